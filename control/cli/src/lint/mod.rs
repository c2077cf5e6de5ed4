//! `penstock lint`: finds what is valid but probably a mistake.

mod blocks;
mod cluster;
mod cluster_policy;
mod policy;
mod selector;
mod service_ports;
mod services;
mod usage;

use std::fmt;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use penstock_admin::printable::Printable;
use penstock_policy::engine::Engine;
use penstock_policy::model::Object;
use penstock_policy::render::tables::PodScope;

use penstock_sources::convert::{FieldPath, FieldPathRef};
use penstock_sources::manifest::{Document, Manifests, Origin, UnknownFields};

use penstock_agent::config::TimeSpan;

use super::cluster::{ManifestArgs, derive_endpoint_slices, say_what_stands_in};
use super::daemon::DaemonArgs;
use super::{Failure, style};

/// Find what is valid in manifests, but probably a mistake
///
/// Rules that never match, policies that select nothing, port names that no pod has, blocks that their excepts cover,
/// fields that this version does not know, and more. With Services among the manifests also blocks that only have
/// Services' addresses, Services' ports where the backends have others, ports that nobody may reach, and egress policies
/// that forget DNS. With --live also rules that a node's daemon has not seen decide. Each is one line with file, line, object
/// and field.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  checked; without --strict also if something is found
  1  with --strict: something is found
  2  bad input: manifests that cannot be read, are not valid, or have nothing that policy is about

Examples:
  penstock lint --manifests policies/
  penstock lint --strict --manifests cluster.yaml policies/
  penstock lint --manifests policies/ --live 30d")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// Also find rules that have decided no connection of a node for this long, by its daemon: a number and s, m, h or d
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "7d", value_parser = super::rules::time)]
    live: Option<TimeSpan>,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// End with exit code 1 if anything is found
    #[arg(long)]
    strict: bool,
}

/// Printed in brackets: `never-matches`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum FindingKind {
    NeverMatches,
    SelectsNothing,
    MatchesNothing,
    UnknownPort,
    NoEffect,
    EmptyList,
    Shadowed,
    EqualPriority,
    HostBits,
    UnknownField,
    NoNamespace,
    NoNode,
    NoAddress,
    NotRead,
    ServiceAddress,
    ServicePort,
    ClosedPort,
    NoDns,
    NeverUsed,
    TooMany,
}

#[derive(Debug)]
struct Finding {
    origin: Origin,
    object: String,
    field: FieldPath,
    kind: FindingKind,
    message: String,
}

impl Finding {
    fn new(document: &Document, field: FieldPath, kind: FindingKind, message: impl fmt::Display) -> Self {
        Self {
            origin: document.origin_of(&field),
            object: document.object.reference().to_string(),
            field,
            kind,
            message: message.to_string(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: ", Printable(&self.origin), Printable(&self.object))?;
        if !self.field.is_empty() {
            write!(f, "{}: ", style::strong(Printable(&self.field)))?;
        }
        let kind = self.kind.to_possible_value();
        let kind = kind.as_ref().map_or("", PossibleValue::get_name);
        write!(f, "{} {}", Printable(&self.message), style::faint(format_args!("[{kind}]")))
    }
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut manifests = args.manifests.read_deployments(UnknownFields::Note)?;
    say_what_stands_in(&manifests);
    derive_endpoint_slices(&mut manifests);
    let engine = args.manifests.engine_of(&manifests, PodScope::AllPods);
    args.manifests.say_staged(&engine);
    let mut findings = find(&manifests, &engine, args.manifests.reads_v1beta1());
    if let Some(time) = args.live {
        let rules = args.daemon.get("/v1/rules", &())?;
        usage::check(&manifests, &engine, &rules, time, &mut findings);
    }
    sort(&manifests, &mut findings);
    let mut text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    text += &match findings.len() {
        0 => format!("nothing found in {} objects\n", manifests.documents.len()),
        1 => format!("1 finding in {} objects\n", manifests.documents.len()),
        more => format!("{more} findings in {} objects\n", manifests.documents.len()),
    };
    Failure::print(text)?;
    match args.strict && !findings.is_empty() {
        true => Err(Failure::Failed(anyhow::anyhow!("findings: fix them, or omit --strict"))),
        false => Ok(()),
    }
}

fn sort(manifests: &Manifests, findings: &mut [Finding]) {
    let place = |origin: &Origin| manifests.documents.iter().position(|document| document.origin.file == origin.file);
    findings.sort_by_cached_key(|finding| (place(&finding.origin), finding.origin.clone()));
}

fn find(manifests: &Manifests, engine: &Engine, v1beta1: bool) -> Vec<Finding> {
    let world = cluster::LintObjects::new(manifests);
    let mut findings = Vec::new();
    cluster::check(manifests, v1beta1, &mut findings);
    cluster_policy::check(manifests, &world, &mut findings);
    services::check(manifests, &world, engine, &mut findings);
    let closed = engine.closed_pods();
    for document in &manifests.documents {
        policy::check(document, &world, &mut findings);
        let Object::Pod(pod) = &document.object else { continue };
        for (_, reason) in closed.iter().filter(|(of, _)| *of == pod.key) {
            findings.push(Finding::new(document, FieldPathRef::OBJECT.path(), FindingKind::TooMany, reason));
        }
    }
    findings
}

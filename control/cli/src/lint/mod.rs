//! `penstock lint`: finds what is valid but probably a mistake.

mod blocks;
mod cluster;
mod cluster_policy;
mod policy;
mod selector;
mod services;

use std::fmt;
use std::io::{self, Write as _};

use penstock_policy::engine::Engine;
use penstock_policy::render::tables::PodScope;
use penstock_sources::convert::FieldPath;
use penstock_sources::manifest::{Document, Manifests, Origin, UnknownFields};

use super::cluster::{ManifestArgs, derive_endpoint_slices};
use super::{Failure, style};

/// Find what is valid in manifests, but probably a mistake
///
/// Rules that never match, policies that select nothing, port names that no pod has, blocks that their excepts cover,
/// fields that this version does not know, and more. With Services among the manifests also blocks that only have
/// Services' addresses, Services' ports where the backends have others, ports that nobody may reach, and egress policies
/// that forget DNS. Each is one line with file, line, object and field.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  checked; without --strict also if something is found
  1  with --strict: something is found
  2  bad input: manifests that cannot be read or are not valid

Examples:
  penstock lint --manifests policies/
  penstock lint --strict --manifests cluster.yaml policies/")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// End with exit code 1 if anything is found
    #[arg(long)]
    strict: bool,
}

/// What is found, as it ends the line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverMatches => "never-matches",
            Self::SelectsNothing => "selects-nothing",
            Self::MatchesNothing => "matches-nothing",
            Self::UnknownPort => "unknown-port",
            Self::NoEffect => "no-effect",
            Self::EmptyList => "empty-list",
            Self::Shadowed => "shadowed",
            Self::EqualPriority => "equal-priority",
            Self::HostBits => "host-bits",
            Self::UnknownField => "unknown-field",
            Self::NoNamespace => "no-namespace",
            Self::NoNode => "no-node",
            Self::NoAddress => "no-address",
            Self::NotRead => "not-read",
            Self::ServiceAddress => "service-address",
            Self::ServicePort => "service-port",
            Self::ClosedPort => "closed-port",
            Self::NoDns => "no-dns",
        })
    }
}

/// One thing found.
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
        write!(f, "{}: {}: ", self.origin, self.object)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", style::strong(&self.field))?;
        }
        write!(f, "{} {}", self.message, style::faint(format_args!("[{}]", self.kind)))
    }
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut manifests = args.manifests.read(UnknownFields::Note)?;
    derive_endpoint_slices(&mut manifests);
    let engine = args.manifests.engine_of(&manifests, PodScope::AllPods);
    args.manifests.say_staged(&engine);
    let findings = find(&manifests, &engine, args.manifests.reads_v1beta1());
    let mut text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    text += &match findings.len() {
        0 => format!("nothing found in {} objects\n", manifests.documents.len()),
        1 => format!("1 finding in {} objects\n", manifests.documents.len()),
        more => format!("{more} findings in {} objects\n", manifests.documents.len()),
    };
    io::stdout().write_all(text.as_bytes()).or_else(Failure::from_output)?;
    match args.strict && !findings.is_empty() {
        true => Err(Failure::Failed(anyhow::anyhow!("findings: fix them, or omit --strict"))),
        false => Ok(()),
    }
}

/// All findings, in the order of files and lines.
fn find(manifests: &Manifests, engine: &Engine, v1beta1: bool) -> Vec<Finding> {
    let world = cluster::LintObjects::new(manifests);
    let mut findings = Vec::new();
    cluster::check(manifests, v1beta1, &mut findings);
    cluster_policy::check(manifests, &world, &mut findings);
    services::check(manifests, &world, engine, &mut findings);
    for document in &manifests.documents {
        policy::check(document, &world, &mut findings);
    }
    let place = |origin: &Origin| manifests.documents.iter().position(|document| document.origin.file == origin.file);
    findings.sort_by_cached_key(|finding| (place(&finding.origin), finding.origin.clone()));
    findings
}

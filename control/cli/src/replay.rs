//! `penstock replay`: what policy does with the packets of a capture.

use std::io::{self, Write};
use std::path::PathBuf;

use penstock_replay::compare::VerdictChange;
use penstock_replay::summary::Summary;
use penstock_replay::{Mapping, OutputPaths, RecordedCounts, ReplayError, ReplayOptions, ReplayReport, run as replay};
use penstock_sources::manifest::UnknownFields;
use serde::Serialize;

use super::Failure;
use super::cluster::ManifestArgs;

/// Run the packets of a capture through the workers' pipeline, and report the verdicts
///
/// With a bundle (`penstock capture --bundle`) it evaluates each packet under the objects that were in effect for it, and compares
/// with what the daemon decided. `--compare` then has objects of the same name in it replaced throughout, or adds them.
///
/// A packet enters by the port of its source address: a local pod's port, otherwise the uplink;
/// or by the port that --ports gives for its interface. The verdict `kernel` is for what the programs leave to the kernel:
/// ARP, neighbour discovery, and on the uplink what is not for a local pod. Time is the capture's.
///
/// The node's kernel translates what pods send to Services: a pod may send there, and its egress policy is for what answers, in the
/// packets behind the translation.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  done; with --compare: no verdict differs
  1  the output cannot be written
  2  bad input: manifests, captures, or files that cannot be written; or not all of a capture could be evaluated
  3  with --compare: verdicts differ; with a bundle: the daemon decided otherwise

Examples:
  penstock replay --manifests cluster/ --pcap incident.pcapng --verdicts verdicts.jsonl
  penstock replay --manifests cluster/ --pcap node.pcap --node worker-1 --denied denied.pcapng
  penstock replay incident/
  penstock replay incident/ --compare fixed-policy.yaml
  penstock replay --manifests main/ --compare pull-request/ --pcap yesterday.pcap.gz")]
#[command(mut_arg("manifests", |arg| arg.required(false).required_unless_present("bundle")))]
pub(super) struct Args {
    /// A bundle of penstock capture: its packets, the cluster's objects, and their changes meanwhile
    #[arg(value_name = "DIR", conflicts_with_all = NOT_WITH_BUNDLE)]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    cluster: ManifestArgs,
    /// Captures, merged by time: pcap or pcapng, may be gzip-compressed
    #[arg(long, value_name = "FILE", required_unless_present = "bundle", num_args = 1..)]
    pcap: Vec<PathBuf>,
    /// Evaluate as this node does; without it, as if all pods were local
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// An interface of a pcapng capture, and the port that it stands for: NAMESPACE/POD, host or uplink
    #[arg(long, value_name = "INTERFACE=PORT", num_args = 1.., value_delimiter = ',')]
    ports: Vec<String>,
    /// Count a packet that was captured in two places once
    #[arg(long)]
    dedup: bool,
    /// Blocks of cluster addresses, as the setting service_cidrs
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',')]
    service_cidrs: Vec<ipnet::IpNet>,
    /// Write one JSON object per packet and line; - for standard output
    #[arg(long, value_name = "FILE")]
    verdicts: Option<PathBuf>,
    /// Write a capture of the packets that pass
    #[arg(long, value_name = "FILE")]
    allowed: Option<PathBuf>,
    /// Write a capture of the packets that are dropped
    #[arg(long, value_name = "FILE")]
    denied: Option<PathBuf>,
    /// Change the manifests at times of the capture, as in this TOML file
    #[arg(long, value_name = "FILE", conflicts_with = "compare")]
    timeline: Option<PathBuf>,
    /// List the connections whose verdicts differ under these manifests
    #[arg(long, value_name = "PATH", num_args = 1..)]
    compare: Vec<PathBuf>,
    /// Form of the summary
    #[arg(long, value_enum, default_value_t = Format::Table)]
    summary: Format,
}

/// Options that a bundle makes needless.
const NOT_WITH_BUNDLE: [&str; 8] =
    ["manifests", "cluster_wide", "pcap", "node", "ports", "dedup", "service_cidrs", "timeline"];

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Format {
    /// For a person
    Table,
    /// For a program
    Json,
}

/// The summary as JSON.
#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Vec<VerdictChange>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<&'a RecordedCounts>,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let ports = args.ports.iter().map(|text| text.parse::<Mapping>());
    let options = ReplayOptions {
        bundle: args.bundle,
        captures: args.pcap,
        reading: args.cluster.options(UnknownFields::Refuse),
        reach: args.cluster.reach(),
        manifests: args.cluster.manifests,
        node: args.node,
        ports: ports.collect::<Result<_, _>>().map_err(Failure::bad_input)?,
        dedup: args.dedup,
        service_cidrs: args.service_cidrs,
        timeline: args.timeline,
        compare: args.compare,
        outputs: OutputPaths { verdicts: args.verdicts, allowed: args.allowed, denied: args.denied },
        ..ReplayOptions::default()
    };
    let report = replay(&options).map_err(failure)?;
    report.notes.iter().for_each(|note| eprintln!("penstock: {note}"));
    let text = render(&report, args.summary);
    // Verdicts on standard output are for a program: print the summary on standard error.
    if options.outputs.verdicts.as_deref() == Some(std::path::Path::new("-")) {
        io::stderr().write_all(text.as_bytes()).or_else(Failure::from_output)?;
    } else {
        Failure::print(text)?;
    }
    if !report.unread.is_empty() {
        return Err(Failure::BadInput(report.unread));
    }
    let is_changed = report.comparison.is_some_and(|comparison| !comparison.is_empty());
    let is_otherwise = report.recorded.is_some_and(|recorded| recorded.different > 0);
    if is_changed || is_otherwise { Err(Failure::Differs) } else { Ok(()) }
}

fn failure(error: ReplayError) -> Failure {
    Failure::BadInput(error.to_string().lines().map(str::to_owned).collect())
}

fn render(report: &ReplayReport, format: Format) -> String {
    let ReplayReport { summary, comparison, recorded, .. } = report;
    match format {
        Format::Table => {
            let recorded = recorded.as_ref().map(|recorded| format!("\n{recorded}"));
            let comparison = comparison.as_ref().map(|comparison| format!("\n{comparison}"));
            [Some(summary.to_string()), recorded, comparison].into_iter().flatten().collect()
        }
        Format::Json => {
            let changes = comparison.as_ref().map(|comparison| comparison.changes());
            let json = Json { summary, changes, recorded: recorded.as_ref() };
            // Strings and numbers only: there is nothing that JSON cannot hold.
            let text = serde_json::to_string_pretty(&json).unwrap_or_default();
            text + "\n"
        }
    }
}

//! `penstock learn`: least-privilege policies from observed flows, and the proof that they allow these.

mod input;
mod manifest;
mod owners;
mod report;
mod yaml;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ipnet::IpNet;
use penstock_admin::client::DEFAULT_SOCKET;
use penstock_policy::engine::Engine;
use penstock_policy::learn::{
    DeniedFlow, LearnSettings, LearnableFlow, UNSTABLE_LABELS, WIDENING, Workloads, closed, denied, narrowed, policies,
    resolve, split, usage,
};
use penstock_policy::model::{Object, ObjectChange};
use penstock_policy::render::tables::PodScope;
use penstock_sources::convert::FieldPath;
use penstock_sources::manifest::{Manifests, UnknownFields, read_text};

use super::Failure;
use super::cluster::ManifestArgs;
use input::Input;
use manifest::Manifest;
use report::Report;

/// Write least-privilege NetworkPolicies from observed flows, and prove them
///
/// One policy for each workload (the pods of a namespace with equal labels) that allows what was seen, in the direction in
/// which it was opened, and nothing else. What is printed is read back and evaluated together with the present policies: if
/// it denies one of the flows, nothing is printed. What cannot be learnt, and what becomes closed, is on standard error.
#[derive(clap::Args, Debug)]
#[command(mut_arg("default_namespace", |arg| arg.long("default-namespace")), after_help = "\
Exit codes:
  0  printed and proven; with --holdout: what was held out is allowed, too
  1  a flow would be denied: nothing is printed
  2  bad input: flows, captures, manifests, or no flow that can be learnt
  3  with --holdout: printed, and some of what was held out would be denied

Examples:
  penstock flows --json > flows.json && penstock learn --from flows.json --manifests cluster/ > learned.yaml
  penstock learn --from monday.pcapng tuesday.pcapng --manifests cluster/ --namespace shop
  penstock learn --from verdicts.jsonl --manifests cluster/ --holdout 0.2
  penstock learn --live --manifests cluster/ --tighten")]
pub(super) struct Args {
    /// Observed flows: the JSON of `penstock flows --json`, a verdict log with opened connections, the verdicts of `penstock
    /// replay`, - for one of these on standard input; or captures, pcap or pcapng
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "live")]
    from: Vec<PathBuf>,
    /// Also the connections that this node's daemon has now, by its admin socket
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = DEFAULT_SOCKET)]
    live: Option<PathBuf>,
    #[command(flatten)]
    manifests: ManifestArgs,
    /// Only policies of this namespace
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Instead, print the existing policies without the rules, peers and ports that no flow used
    #[arg(long)]
    tighten: bool,
    /// Hold out this share of the flows, from 0 to 1, and report which of them would be denied
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    holdout: Option<f64>,
    /// Which flows are held out: the same number chooses the same ones
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "holdout")]
    seed: u64,
    /// The most addresses that were not seen which a block of outside addresses may add
    #[arg(long, value_name = "COUNT", default_value_t = WIDENING)]
    widen: u64,
    /// Labels that do not identify a workload; a * at the end stands for any rest
    #[arg(long, value_name = "KEY", num_args = 1.., value_delimiter = ',', default_values_t = UNSTABLE_LABELS.map(str::to_owned))]
    unstable_labels: Vec<String>,
    /// Where pods' addresses are: one that no pod has is reported there, and not taken as outside
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',')]
    pod_networks: Vec<IpNet>,
    /// Also allow the addresses of Services themselves, for an engine that evaluates egress policy before translation
    #[arg(long)]
    service_addresses: bool,
    /// Also learn TCP connections, and datagrams to Services, that nobody answered
    #[arg(long)]
    unanswered: bool,
    /// The form
    #[arg(long, value_enum, default_value_t = Format::Yaml)]
    output: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Format {
    /// Manifests, with the evidence as comments
    Yaml,
    /// Manifests, evidence and report, for a program
    Json,
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("write a number between 0 and 1, such as 0.2".to_owned()),
    }
}

impl Args {
    fn settings(&self) -> LearnSettings {
        LearnSettings {
            namespace: self.namespace.clone(),
            unstable_labels: self.unstable_labels.clone(),
            widening: self.widen,
            pod_networks: self.pod_networks.clone(),
            service_addresses: self.service_addresses,
            unanswered: self.unanswered,
        }
    }

    /// Standard input can be read once.
    fn check_standard_input(&self) -> Result<(), Failure> {
        let readers = self.from.iter().filter(|path| *path == Path::new("-")).count();
        match readers + usize::from(self.manifests.use_standard_input()) {
            0 | 1 => Ok(()),
            _ => Err(Failure::bad_input("standard input is named more than once: name files instead")),
        }
    }
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    args.check_standard_input()?;
    let manifests = args.manifests.read_with_slices()?;
    let before = args.manifests.engine_of(&manifests, PodScope::AllPods);
    args.manifests.say_staged(&before);
    check_namespace(&before, args.namespace.as_deref())?;
    let input = read(&args, &manifests, &before)?;
    let settings = args.settings();
    let resolution = resolve(before.state(), &input.flows, &settings);
    let workloads = Workloads::new(before.state(), &settings);
    let mut report = Report::new(&before, &input, &resolution);
    report.notes.extend(owners::notes(before.state(), &workloads));
    if resolution.learnable.is_empty() {
        report.print();
        let count = input.flows.len();
        return Err(Failure::bad_input(format_args!(
            "none of the {count} flows can be learnt: the lines above say why"
        )));
    }
    let (learnt, held_out) = match args.holdout {
        Some(share) => split(&resolution.learnable, share, args.seed),
        None => (resolution.learnable.iter().collect(), Vec::new()),
    };
    let written = match args.tighten {
        true => tightened(&manifests, &before, &learnt, &settings, &mut report),
        false => learned(&before, &workloads, &learnt, &settings, &mut report),
    };
    let text: String = written.iter().map(|one| yaml::document(&one.value, &one.comments)).collect();
    let after = with_policies(&args.manifests, &manifests, &text)?;
    prove(&before, &after, &learnt, args.tighten)?;
    report.closed = Some(closed(&before, &after, &resolution.learnable));
    report.learnt = learnt.len();
    let would_be_denied = report.hold_out(&after, &held_out);
    let text = match args.output {
        Format::Yaml => format!("{}{text}", report.head(&learnt, args.tighten)),
        Format::Json => report.json(&written),
    };
    report.print();
    Failure::print(text)?;
    if would_be_denied { Err(Failure::Differs) } else { Ok(()) }
}

fn check_namespace(engine: &Engine, namespace: Option<&str>) -> Result<(), Failure> {
    let Some(name) = namespace else { return Ok(()) };
    match engine.state().namespace_labels(name) {
        Some(_) => Ok(()),
        None => Err(Failure::bad_input(format_args!("--namespace {name}: no manifest has it: correct its name"))),
    }
}

fn read(args: &Args, manifests: &Manifests, engine: &Engine) -> Result<Input, Failure> {
    let objects: Vec<Object> = manifests.objects().collect();
    let mut input = input::read(&args.from, engine.state(), &objects)?;
    if let Some(socket) = &args.live {
        input::read_live(socket, engine.state(), &mut input)?;
    }
    Ok(input)
}

fn learned(
    before: &Engine,
    workloads: &Workloads,
    learnt: &[&LearnableFlow],
    settings: &LearnSettings,
    report: &mut Report,
) -> Vec<Manifest> {
    let policies = policies(before.state(), workloads, learnt.iter().copied(), settings);
    report.note_coverage(before, workloads, &policies, settings);
    policies.iter().map(|policy| manifest::learned(before.state(), workloads, policy)).collect()
}

/// The existing policies that have parts which nobody used, without these.
fn tightened(
    manifests: &Manifests,
    before: &Engine,
    learnt: &[&LearnableFlow],
    settings: &LearnSettings,
    report: &mut Report,
) -> Vec<Manifest> {
    let usage = usage(before.state(), learnt.iter().copied());
    let mut written = Vec::new();
    for document in &manifests.documents {
        let Object::NetworkPolicy(policy) = &document.object else { continue };
        let Some(usage) = usage.get(&policy.key) else { continue };
        if settings.namespace.as_ref().is_some_and(|only| *only != policy.key.namespace) {
            continue;
        }
        report.note_usage(policy, usage);
        let manifest = narrowed(policy, usage).and_then(|_| document.value(&FieldPath::default()));
        written.extend(manifest.map(|value| manifest::narrowed(policy, usage, value)));
    }
    report.changed = Some(written.len());
    written
}

/// The cluster with the printed policies in effect, read as they are printed.
fn with_policies(args: &ManifestArgs, manifests: &Manifests, text: &str) -> Result<Engine, Failure> {
    let mut engine = args.engine_of(manifests, PodScope::AllPods);
    if !text.is_empty() {
        let options = args.options(UnknownFields::Refuse);
        let read = read_text(Path::new("learned"), text, &options);
        // Only a mistake in the writer makes an invalid policy.
        let read =
            read.map_err(|errors| Failure::Failed(anyhow::anyhow!("the policies cannot be read back: {errors}")))?;
        engine.apply(read.documents.into_iter().map(|document| ObjectChange::Set(document.object)));
    }
    Ok(engine)
}

/// Fails if one of the flows would be denied. Of narrowed policies only what they deny anew counts.
fn prove(before: &Engine, after: &Engine, learnt: &[&LearnableFlow], tighten: bool) -> Result<(), Failure> {
    let found = denied(after, learnt.iter().copied());
    let is_new = |found: &&DeniedFlow| !tighten || before.evaluate(&found.flow).is_allowed();
    let found: Vec<String> = found.iter().filter(is_new).map(|denied| report::denied(after, denied)).collect();
    match found.first() {
        None => Ok(()),
        Some(first) => Err(Failure::Failed(anyhow::anyhow!(
            "{} would be denied, so nothing is printed; the first: {first}",
            manifest::plural(found.len() as u64, "flow")
        ))),
    }
}

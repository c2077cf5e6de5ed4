//! `penstock evaluate`: queries in, verdicts out, one JSON object per line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::describe;
use penstock_policy::engine::{DirectionExplanation, Engine, Explanation, TierOutcome, TierStep};
use penstock_policy::flow::{self, FlowEndpoint, FlowError, ProtocolPort};
use penstock_policy::render::tables::PodScope;
use penstock_policy::service_flows::{ServiceFlows, service_flows, service_flows_at};
use serde::{Deserialize, Serialize};

use super::Failure;
use super::cluster::ManifestArgs;

/// Answer queries about manifests: is this flow allowed, and by which rule?
///
/// Each line of the queries is a JSON object: "from" and "to" (NAMESPACE/POD or an address; the address of a pod stands for
/// that pod), "port" (a number, or a name of the destination pod's ports) and "protocol" (default: TCP). Each answer is one
/// line: the query's fields, "verdict", "egress" and "ingress". Both sides are evaluated, on whatever node the pods are,
/// with the tables that the workers use. Every pair of the ends' addresses is evaluated: "allow" means all of them, "partial" some.
/// Where they differ, "families" has an answer for each, and the others are those of one that is denied. Between two ends that are no
/// pods the verdict is "allow", and "reason" says that Penstock does not see it. "to" may be a Service
/// (svc/NAMESPACE/SERVICE, with a port of its own), or an address and port at which one answers: the answer then has the verdict for each backend, and is "partial" where
/// they differ.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all queries are answered, whatever the verdicts
  1  the output cannot be written
  2  bad input: manifests, or a query; the answers before it are printed

Examples:
  penstock evaluate --manifests policies/ --queries queries.jsonl
  penstock evaluate --manifests cluster.yaml policies/ --queries - < queries.jsonl")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// File with one query per line, or - for standard input
    #[arg(long, value_name = "FILE")]
    queries: PathBuf,
}

/// A question. It is given back as it came.
#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields)]
struct Query {
    from: String,
    to: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<Port>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(untagged)]
enum Port {
    Number(u16),
    Text(String),
}

#[derive(Serialize, Debug)]
struct Answer<'a> {
    #[serde(flatten)]
    query: &'a Query,
    #[serde(flatten)]
    answer: FlowAnswer,
    /// An answer for each pair of addresses, where they differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    families: Vec<FamilyAnswer>,
    /// The Service that has the destination's address: policy is for what answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    address_of: Option<String>,
}

#[derive(Serialize, Debug)]
struct FamilyAnswer {
    family: &'static str,
    from: String,
    to: String,
    #[serde(flatten)]
    answer: FlowAnswer,
}

#[derive(Serialize, Debug)]
struct FlowAnswer {
    verdict: Verdict,
    /// Why it is allowed without policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    egress: DirectionAnswer,
    ingress: DirectionAnswer,
}

/// The answer about a Service: one for each backend that a connection may get.
#[derive(Serialize, Debug)]
struct ServiceAnswer<'a> {
    #[serde(flatten)]
    query: &'a Query,
    verdict: Verdict,
    /// The cluster address and port.
    frontend: SocketAddr,
    backends: Vec<BackendAnswer>,
    /// The effect of having no backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

#[derive(Serialize, Debug)]
struct BackendAnswer {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    address: SocketAddr,
    verdict: Verdict,
    egress: DirectionAnswer,
    ingress: DirectionAnswer,
}

#[derive(Serialize, Debug)]
struct DirectionAnswer {
    verdict: Verdict,
    isolated: bool,
    rule: Option<String>,
    policies: Vec<String>,
    /// The decision of each tier, where ClusterNetworkPolicies apply.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tiers: Vec<TierAnswer>,
}

#[derive(Serialize, Debug)]
struct TierAnswer {
    tier: String,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl From<&TierStep> for TierAnswer {
    fn from(TierStep { tier, outcome }: &TierStep) -> Self {
        let (outcome, rule, name) = match outcome {
            TierOutcome::NoPolicy => ("no policy", None, None),
            TierOutcome::NoMatch => ("no match", None, None),
            TierOutcome::Isolated => ("isolated", None, None),
            TierOutcome::Rule { action, rule, name } => {
                (describe::action(*action), Some(rule.to_string()), name.clone())
            }
        };
        Self { tier: tier.to_string(), outcome, rule, name }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Allow,
    Deny,
    /// Some backends of a Service, or some pairs of addresses, are allowed, and others not.
    Partial,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let from_standard_input = args.queries == Path::new("-");
    if from_standard_input && args.manifests.use_standard_input() {
        return Err(Failure::bad_input("standard input cannot be manifests and queries: give one of them as a file"));
    }
    let engine = args.manifests.engine(PodScope::AllPods)?;
    let stdout = io::stdout().lock();
    if from_standard_input {
        // A caller may write one query at a time and wait for each answer: flush after every line.
        return answer_all(&engine, "standard input", io::stdin().lock(), stdout);
    }
    let name = args.queries.display().to_string();
    let file = File::open(&args.queries)
        .map_err(|error| Failure::bad_input(format_args!("{name}: cannot be read: {error}: name a file of queries")))?;
    answer_all(&engine, &name, BufReader::new(file), BufWriter::new(stdout))
}

/// Answers line by line. Answers before a bad query are still printed.
fn answer_all(engine: &Engine, name: &str, queries: impl BufRead, mut output: impl Write) -> Result<(), Failure> {
    for (number, line) in (1..).zip(queries.lines()) {
        let answered = match line {
            Ok(line) if line.trim().is_empty() => continue,
            Ok(line) => answer(engine, line.trim()),
            Err(error) => Err(BadQuery::Unreadable(error)),
        };
        let written = match answered {
            Ok(answer) => writeln!(output, "{answer}"),
            Err(error) => {
                output.flush().or_else(Failure::from_output)?;
                return Err(Failure::bad_input(format_args!("{name}:{number}: {error}")));
            }
        };
        if let Err(error) = written {
            return Failure::from_output(error);
        }
    }
    output.flush().or_else(Failure::from_output)
}

#[derive(thiserror::Error, Debug)]
enum BadQuery {
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    #[error(
        "is not a query ({0}): write {{\"from\": \"NAMESPACE/POD\", \"to\": \"ADDRESS\", \"port\": 80, \"protocol\": \"TCP\"}}"
    )]
    Syntax(serde_json::Error),
    #[error(transparent)]
    FlowError(#[from] FlowError),
}

fn answer(engine: &Engine, line: &str) -> Result<String, BadQuery> {
    let query: Query = serde_json::from_str(line).map_err(BadQuery::Syntax)?;
    let protocol = query.protocol.as_deref().map_or(Ok(Protocol::TCP), flow::protocol)?;
    let port = match &query.port {
        None => None,
        Some(Port::Number(number)) => Some(number.to_string().parse()?),
        Some(Port::Text(text)) => Some(text.parse()?),
    };
    let service = ProtocolPort::new(protocol, port)?;
    let to: FlowEndpoint = query.to.parse()?;
    let from = query.from.parse()?;
    let by_service = match &to {
        FlowEndpoint::Service(key) => Some(service_flows(engine, &from, key, &service)?),
        FlowEndpoint::Address(address) => service_flows_at(engine, &from, *address, &service),
        FlowEndpoint::Pod(_) | FlowEndpoint::Name(_) => None,
    };
    if let Some(flows) = by_service {
        return answer_service(engine, &query, &flows);
    }
    let flows = flow::flows(engine.state(), &from, &to, &service)?;
    let explained: Vec<Explanation> = flows.iter().map(|flow| engine.explain(flow)).collect();
    let differ = explained.iter().any(|explanation| !explanation.is_same(&explained[0]));
    let decides = explained.iter().find(|explanation| !explanation.is_allowed()).unwrap_or(&explained[0]);
    let mut answer_of_all = FlowAnswer::from(decides);
    if !decides.is_allowed() && explained.iter().any(Explanation::is_allowed) {
        answer_of_all.verdict = Verdict::Partial;
    }
    let each = flows.iter().zip(&explained).filter(|_| differ);
    let families = each.map(|(flow, explanation)| FamilyAnswer {
        family: if flow.dst.is_v4() { "IPv4" } else { "IPv6" },
        from: flow.src.to_string(),
        to: flow.dst.to_string(),
        answer: FlowAnswer::from(explanation),
    });
    let address_of = flow::service_at(engine.state(), &to).map(|service| format!("svc/{service}"));
    let answer = Answer { query: &query, answer: answer_of_all, families: families.collect(), address_of };
    serde_json::to_string(&answer).map_err(BadQuery::Syntax)
}

fn answer_service(engine: &Engine, query: &Query, to: &ServiceFlows) -> Result<String, BadQuery> {
    let answer = |flow: &Flow| {
        let FlowAnswer { verdict, egress, ingress, .. } = FlowAnswer::from(&engine.explain_through_service(flow));
        let address = IpAddr::from(flow.dst);
        let name = flow::name(engine.state(), address);
        BackendAnswer { name, address: SocketAddr::new(address, flow.dst_port), verdict, egress, ingress }
    };
    let backends: Vec<BackendAnswer> = to.flows.iter().map(answer).collect();
    let is_allowed = |backend: &BackendAnswer| backend.verdict == Verdict::Allow;
    let verdict = match (backends.iter().all(is_allowed), backends.iter().any(is_allowed)) {
        (true, true) => Verdict::Allow,
        (false, true) => Verdict::Partial,
        (_, false) => Verdict::Deny,
    };
    let reason = backends.is_empty().then(|| to.without.describe());
    let frontend = to.frontend;
    serde_json::to_string(&ServiceAnswer { query, verdict, frontend, backends, reason }).map_err(BadQuery::Syntax)
}

impl From<&Explanation> for FlowAnswer {
    fn from(explanation: &Explanation) -> Self {
        Self {
            verdict: if explanation.is_allowed() { Verdict::Allow } else { Verdict::Deny },
            reason: explanation.unseen(),
            egress: DirectionAnswer::from(&explanation.egress),
            ingress: DirectionAnswer::from(&explanation.ingress),
        }
    }
}

impl From<&DirectionExplanation> for DirectionAnswer {
    fn from(side: &DirectionExplanation) -> Self {
        Self {
            verdict: if side.verdict.is_allowed() { Verdict::Allow } else { Verdict::Deny },
            isolated: side.isolated,
            rule: side.rule.as_ref().map(ToString::to_string),
            policies: side.policies.iter().map(ToString::to_string).collect(),
            tiers: side.tiers.iter().map(TierAnswer::from).collect(),
        }
    }
}

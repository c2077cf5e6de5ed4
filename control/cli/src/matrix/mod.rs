//! `penstock matrix`: who reaches whom.

mod html;
mod services;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::engine::Engine;
use penstock_policy::flow::{self, FlowEndpoint, ProtocolPort};
use penstock_policy::model::{ObjectKey, PolicyPorts, PortMatch, PortProtocol};
use penstock_policy::render::tables::PodScope;

use super::Failure;
use super::cluster::ManifestArgs;

/// Show which pods reach which pods
///
/// Without --port it combines every port that a pod names or a policy mentions: a cell shows whether all, some or none of
/// them are allowed. With --services the columns are the ports of Services, and a cell shows how many of the backends that
/// the pod may get are allowed.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  shown
  1  the output cannot be written
  2  bad input: manifests, a port, or a file that cannot be written

Examples:
  penstock matrix --manifests policies/ --port 8080/TCP
  penstock matrix --manifests policies/ --services
  penstock matrix --manifests policies/ --html matrix.html")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// PORT/PROTOCOL, the port by number or by name, or a protocol without ports; may be repeated. With --services a port of
    /// Services
    #[arg(long, value_name = "PORT/PROTOCOL")]
    port: Vec<ProtocolPort>,
    /// Instead, write a self-contained HTML page with the deciding rules and a filter by port
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show which backends of each Service the pods reach
    #[arg(long, conflicts_with = "html")]
    services: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let engine = args.manifests.engine(PodScope::AllPods)?;
    if args.services {
        let text = services::render(&engine, &Matrix::new(&engine, Vec::new()), &args.port);
        return io::stdout().write_all(text.as_bytes()).or_else(Failure::from_output);
    }
    let matrix = Matrix::new(&engine, args.port);
    let Some(path) = args.html else {
        return io::stdout().write_all(table::render(&engine, &matrix).as_bytes()).or_else(Failure::from_output);
    };
    fs::write(&path, html::render(&engine, &matrix)).map_err(|error| {
        Failure::bad_input(format_args!("{}: cannot be written: {error}: name a file that can", path.display()))
    })
}

/// The queries for every pair of pods.
struct Matrix {
    /// The pods that policy sees, by namespace and name.
    pods: Vec<ObjectKey>,
    /// Those that it does not see, and why.
    unseen: Vec<(ObjectKey, &'static str)>,
    /// The ports.
    services: Vec<ProtocolPort>,
}

impl Matrix {
    fn new(engine: &Engine, services: Vec<ProtocolPort>) -> Self {
        let (mut pods, mut unseen) = (Vec::new(), Vec::new());
        for (_, pod) in engine.state().pods() {
            let why = match pod {
                pod if pod.host_network => "is in the host network: to policy it is its node",
                pod if pod.finished => "has finished",
                pod if pod.addresses.is_empty() => "has no address yet",
                _ => {
                    pods.push(pod.key.clone());
                    continue;
                }
            };
            unseen.push((pod.key.clone(), why));
        }
        pods.sort();
        unseen.sort();
        let services = if services.is_empty() { all_services(engine) } else { services };
        Self { pods, unseen, services }
    }

    /// The flows from one of the pods to another, by each pair of their addresses. None where there can be none: the two
    /// have no address family in common, or the receiver has no port of this name.
    fn flows(&self, engine: &Engine, from: usize, to: usize, service: &ProtocolPort) -> Vec<Flow> {
        let end = |pod: usize| FlowEndpoint::Pod(self.pods[pod].clone());
        flow::flows(engine.state(), &end(from), &end(to), service).unwrap_or_default()
    }
}

/// Every port that a pod has a name for, and every number at which a policy's range begins. If there is none, all that
/// policy distinguishes is the pods, and any port shows that.
fn all_services(engine: &Engine) -> Vec<ProtocolPort> {
    let number = |protocol: PortProtocol, number| {
        ProtocolPort::number(penstock_dataplane::policy::PortProtocol::from(protocol).number(), number)
    };
    let state = engine.state();
    let mut services: BTreeSet<ProtocolPort> =
        state.pods().flat_map(|(_, pod)| &pod.ports).map(|port| number(port.protocol, port.number)).collect();
    let of_network = state.policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress).flatten());
    let of_cluster = state.cluster_policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress));
    for rule in of_network.chain(of_cluster.map(|rule| &rule.matches)) {
        if let PolicyPorts::AnyOf(ports) = &rule.ports {
            services.extend(ports.iter().filter_map(|port| match port.which {
                PortMatch::Range { first, .. } => Some(number(port.protocol, first)),
                PortMatch::Every | PortMatch::Name(_) => None,
            }));
        }
    }
    if services.is_empty() {
        services.insert(ProtocolPort::number(Protocol::TCP, 80));
    }
    services.into_iter().collect()
}

//! `penstock matrix`: who reaches whom.

mod html;
mod json;
mod rows;
mod services;
mod table;

use std::fs;
use std::path::PathBuf;

use penstock_policy::flow::{FlowEndpoint, ProtocolPort};
use penstock_policy::model::ObjectKey;
use penstock_policy::render::tables::PodScope;

use self::rows::Matrix;
use super::Failure;
use super::cluster::ManifestArgs;

/// Show which pods reach which pods
///
/// Without --port it combines every port that a pod names or a policy mentions: a cell shows whether all, some or none of
/// them are allowed. With --services the columns are the ports of Services, and a cell shows how many of the backends that
/// the pod may get are allowed. Pods of one namespace with equal labels that policy does not tell apart, such as the replicas of a
/// Deployment, are one row and one column.
#[derive(clap::Args, Debug)]
#[command(mut_arg("default_namespace", |arg| arg.long("default-namespace")), after_help = "\
Exit codes:
  0  shown
  1  the output cannot be written
  2  bad input: manifests, a namespace, pod or port, or a file that cannot be written

Examples:
  penstock matrix --manifests policies/ --port 8080/TCP
  penstock matrix --manifests policies/ --namespace shop --namespace web
  penstock matrix --manifests policies/ --pod shop/db-0 --port 5432/TCP
  penstock matrix --manifests policies/ --services
  penstock matrix --manifests policies/ --html matrix.html")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// PORT/PROTOCOL, the port by number or by name, or a protocol without ports; may be repeated. With --services a port of
    /// Services
    #[arg(long, value_name = "PORT/PROTOCOL")]
    port: Vec<ProtocolPort>,
    /// Only pods of this namespace; may be repeated
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Vec<String>,
    /// Only what this pod reaches, and what reaches it; may be repeated. With --services only its row
    #[arg(long, value_name = "NAMESPACE/POD")]
    pod: Vec<FlowEndpoint>,
    /// Instead, write a self-contained HTML page with the deciding rules and a filter by port
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show which backends of each Service the pods reach
    #[arg(long, conflicts_with = "html")]
    services: bool,
    /// Print the groups of equal pods, and which reach which, as JSON
    #[arg(long, conflicts_with_all = ["html", "services"])]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let engine = args.manifests.engine(PodScope::AllPods)?;
    let pods: Vec<ObjectKey> = args.pod.iter().map(pod).collect::<Result<_, _>>()?;
    let ports = if args.services { Vec::new() } else { args.port.clone() };
    let mut matrix = Matrix::new(&engine, ports, &args.namespace, &pods).map_err(Failure::bad_input)?;
    let text = match &args.html {
        _ if args.services => services::render(&matrix, &args.port),
        _ if args.json => json::render(&mut matrix),
        Some(path) => {
            return fs::write(path, html::render(&matrix)).map_err(|error| {
                Failure::bad_input(format_args!("{}: cannot be written: {error}: name a file that can", path.display()))
            });
        }
        None => table::render(&mut matrix),
    };
    Failure::print(text)
}

fn pod(end: &FlowEndpoint) -> Result<ObjectKey, Failure> {
    match end {
        FlowEndpoint::Pod(key) => Ok(key.clone()),
        FlowEndpoint::Address(_) | FlowEndpoint::Service(_) | FlowEndpoint::Name(_) => {
            Err(Failure::bad_input(format_args!("--pod {end}: not a pod: write NAMESPACE/POD")))
        }
    }
}

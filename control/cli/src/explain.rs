//! `penstock explain`: why a flow is allowed or denied.

use penstock_admin::types::{ExplainQuery, Explanation};
use penstock_policy::explain;
use penstock_policy::flow::{FlowEndpoint, ProtocolPort};
use penstock_policy::render::tables::PodScope;
use penstock_text::number::json;

use super::Failure;
use super::cluster::ManifestArgs;
use super::daemon::DaemonArgs;
use super::style::ColouredText;

/// Explain why a flow is allowed or denied
///
/// Prints which policies select each end, and the rule that allows the flow. If none does, prints the rules that come
/// nearest and what each lacks; if no rule is about this flow, the policies that isolate the pod.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  explained, whether the flow is allowed or denied
  1  the daemon sent no valid answer
  2  bad input: manifests, an end or a port, or no daemon listens at the socket

Examples:
  penstock explain --manifests policies/ --from shop/web-1 --to shop/db-0 --port 5432/TCP
  penstock explain --manifests policies/ --from shop/web-1 --to 10.1.2.3 --port ICMP
  penstock explain --live --from shop/web-1 --to shop/db-0 --port 5432/TCP
  penstock explain --live --from shop/web-1 --to www.example.org --port 443/TCP")]
#[command(mut_arg("manifests", |arg| arg.required(false)))]
#[command(mut_arg("default_namespace", |arg| arg.requires("manifests")))]
#[command(mut_arg("v1beta1", |arg| arg.requires("manifests")))]
#[command(mut_arg("cluster_wide", |arg| arg.requires("manifests")))]
#[command(mut_arg("staged", |arg| arg.requires("manifests")))]
#[command(group(clap::ArgGroup::new("cluster").required(true).args(["live", "manifests"])))]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// Ask the running daemon of this node, which evaluates the sides of its own pods only
    #[arg(long)]
    live: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print the running daemon's answer as JSON
    #[arg(long, requires = "live", conflicts_with = "manifests")]
    json: bool,
    /// The source: NAMESPACE/POD or an address
    #[arg(long, value_name = "END")]
    from: FlowEndpoint,
    /// The destination: NAMESPACE/POD, an address, or svc/NAMESPACE/SERVICE. Of a Service, also at one of its addresses, each backend
    /// is explained. Or a domain name: which rules accept it, and by the running daemon each address that the pod has learnt for it
    #[arg(long, value_name = "END")]
    to: FlowEndpoint,
    /// PORT/PROTOCOL, the port by number or by name (of a Service its own); or a protocol without ports
    #[arg(long, value_name = "PORT/PROTOCOL")]
    port: ProtocolPort,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let text = match args.live {
        false => {
            let engine = args.manifests.engine(PodScope::AllPods)?;
            explain::text(&engine, &ColouredText, &args.from, &args.to, &args.port).map_err(Failure::bad_input)?.1
        }
        true => {
            let query =
                ExplainQuery { from: args.from.to_string(), to: args.to.to_string(), port: args.port.to_string() };
            let explanation: Explanation = args.daemon.get("/v1/explain", &query)?;
            if args.json {
                return Failure::print(json(&explanation));
            }
            format!(
                "{}\nby snapshot {} of the daemon at {}\n",
                explanation.text,
                explanation.epoch,
                args.daemon.socket.display()
            )
        }
    };
    Failure::print(text)
}

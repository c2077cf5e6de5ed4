//! `kubectl penstock explain`: why a flow is allowed or denied, by the nodes that decide it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_admin::types::Explanation;
use penstock_text::number::json;
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, ask_all, parsed, print, whole, words};
use super::cluster::{Cluster, PodName};

/// Explain why a flow is allowed or denied, by the daemons that decide it
///
/// A daemon judges the sides of its own pods. This asks the node of the source for the egress and the node of the destination for
/// the ingress; the flow passes if both allow it. An address that is no pod's, and a Service, are judged by the other end's node alone.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  explained by every node that decides it, whether allowed or denied
  1  no node has answered, or the API server is away
  2  bad input: an end or a port, the kubeconfig, or rights that the user lacks
  4  one of the two nodes has not answered; it is named

Examples:
  kubectl penstock explain --from shop/web-1 --to shop/db-0 --port 5432/TCP
  kubectl penstock explain --from shop/web-1 --to 10.1.2.3 --port ICMP
  kubectl penstock explain --from shop/web-1 --to svc/shop/db --port 5432/TCP --json | jq .allowed")]
pub(super) struct Args {
    /// The source: NAMESPACE/POD or an address
    #[arg(long, value_name = "END")]
    from: String,
    /// The destination: NAMESPACE/POD, an address, or svc/NAMESPACE/SERVICE, whose backends are explained each
    #[arg(long, value_name = "END")]
    to: String,
    /// PORT/PROTOCOL, the port by number or by name (of a Service its own); or a protocol without ports
    #[arg(long, value_name = "PORT/PROTOCOL")]
    port: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct NodeExplanation<'a> {
    node: &'a str,
    #[serde(flatten)]
    explanation: &'a Explanation,
}

#[derive(Serialize)]
struct Merged<'a> {
    /// Whether all nodes that decide have answered and allow it.
    allowed: bool,
    nodes: Vec<NodeExplanation<'a>>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let mut nodes = BTreeSet::new();
    for end in [&args.from, &args.to] {
        if let Some(pod) = pod_of(end)? {
            nodes.insert(cluster.pod(&pod).await?.node);
        }
    }
    if nodes.is_empty() {
        return Err(Failure::bad_input("neither end is a pod, so no node decides: give NAMESPACE/POD for one of them"));
    }
    let fleet = cluster.daemons().await?.only(&nodes);
    let options = [("from", &args.from), ("to", &args.to), ("port", &args.port)];
    let options = options.map(|(name, value)| format!("--{name}={value}"));
    let command = |_: &_| [words(&["penstock", "explain", "--live", "--json"]), options.to_vec()].concat();
    let answers: Answers<Explanation> = ask_all(cluster, asking, fleet, command, None, parsed).await.some()?;
    print(&if args.json { as_json(&answers) } else { text(&answers) }, &answers)
}

/// The pod that an end is, if it is one.
fn pod_of(end: &str) -> Result<Option<PodName>, Failure> {
    if end.parse::<IpAddr>().is_ok() || end.starts_with("svc/") {
        return Ok(None);
    }
    end.parse().map(Some).map_err(|error| Failure::bad_input(format!("{error}, svc/NAMESPACE/SERVICE or an address")))
}

fn is_allowed(answers: &Answers<Explanation>) -> bool {
    answers.missing.is_empty() && answers.answers.iter().all(|(_, explanation)| explanation.allowed)
}

fn as_json(answers: &Answers<Explanation>) -> String {
    let nodes = answers.answers.iter();
    let nodes = nodes.map(|(daemon, explanation)| NodeExplanation { node: &daemon.node, explanation }).collect();
    json(&whole(&Merged { allowed: is_allowed(answers), nodes }, &answers.missing))
}

fn text(answers: &Answers<Explanation>) -> String {
    let mut text = String::new();
    for (daemon, Explanation { text: explanation, epoch, .. }) in &answers.answers {
        text += &format!("node {} (snapshot {epoch}):\n{}\n\n", daemon.node, explanation.trim_end());
    }
    let verdict = match (is_allowed(answers), answers.answers.iter().all(|(_, it)| it.allowed)) {
        (true, _) => "allowed by all nodes that decide it",
        (false, true) => "allowed by the nodes that have answered, and another decides it, too",
        (false, false) => "denied",
    };
    text + verdict + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::PodPlace;
    use crate::fake::{ASKING, FakeCluster, Reply};

    fn place(node: &str) -> PodPlace {
        PodPlace { node: node.to_owned(), addresses: Vec::new(), host_network: false }
    }

    fn args(from: &str, to: &str) -> Args {
        Args { from: from.to_owned(), to: to.to_owned(), port: "80/TCP".to_owned(), json: false }
    }

    fn reply(allowed: bool) -> Vec<Reply> {
        vec![Reply::ok(json(&Explanation { allowed, text: format!("allowed: {allowed}"), epoch: 3 }))]
    }

    fn cluster() -> FakeCluster {
        let mut cluster = FakeCluster::new([("a", reply(true)), ("b", reply(false)), ("c", reply(true))]);
        for (pod, node) in [("shop/web", "a"), ("shop/api", "a"), ("shop/db", "b"), ("shop/gone", "z")] {
            cluster.pods.insert(pod.to_owned(), place(node));
        }
        cluster
    }

    #[tokio::test]
    async fn the_nodes_of_the_pods_are_asked_and_no_others() {
        for (from, to, nodes) in [
            ("shop/web", "shop/db", &["a", "b"][..]),
            ("shop/web", "shop/api", &["a"]),
            ("10.0.0.1", "shop/db", &["b"]),
            ("shop/web", "svc/shop/db", &["a"]),
        ] {
            let cluster = cluster();
            run(&cluster, ASKING, args(from, to)).await.unwrap();
            let asked = cluster.asked.lock().unwrap();
            let mut asked: Vec<&str> = asked.iter().map(|(node, _)| node.as_str()).collect();
            asked.sort_unstable();
            assert_eq!(asked, nodes, "{from} {to}");
        }
        for (from, to) in [("10.0.0.1", "10.0.0.2"), ("web", "shop/db"), ("shop/web", "shop/none")] {
            assert!(matches!(run(&cluster(), ASKING, args(from, to)).await, Err(Failure::BadInput(_))), "{from} {to}");
        }
    }

    #[tokio::test]
    async fn a_node_that_decides_and_has_no_daemon_is_named() {
        let ended = run(&cluster(), ASKING, args("shop/web", "shop/gone")).await;
        let Err(Failure::Partial(lines)) = ended else { panic!("{ended:?}") };
        assert!(lines[0].starts_with("node z: no pod of Penstock is there"), "{lines:?}");
    }
}

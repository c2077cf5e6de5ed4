//! `kubectl penstock status`: a line for each node.

use std::collections::BTreeSet;

use penstock_admin::table::align_columns;
use penstock_admin::types::Status;
use penstock_text::number::{json, uptime};
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, ask_all, parsed, print, whole, words};
use super::cluster::{Cluster, Daemon, Fleet};

/// Show the daemons of all nodes: version, pods, and whether policy is in effect
///
/// IN FORCE says whether the snapshot that was published last is the one under which every worker of the node evaluates. A pod
/// is enforced once its own rules, and all that is known of its peers, are in effect there. To wait for it, see `wait`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all nodes have answered
  1  no node has answered, or the API server is away
  2  bad input: arguments, the kubeconfig, or rights that the user lacks
  4  some nodes have not answered; they are named

Examples:
  kubectl penstock status
  kubectl penstock status --node worker-1 --node worker-2
  kubectl penstock status --json | jq '.nodes[] | select(.status.in_force | not) | .node'")]
pub(super) struct Args {
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct NodeStatus<'a> {
    node: &'a str,
    pod: &'a str,
    status: &'a Status,
}

#[derive(Serialize)]
struct ClusterStatus<'a> {
    /// Whether every node has answered and has all its pods enforced.
    enforced: bool,
    nodes: Vec<NodeStatus<'a>>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let answers = ask(cluster, asking, cluster.daemons().await?).await;
    let text = if args.json { as_json(&answers) } else { text(&answers) };
    print(&text, &answers)
}

pub(super) async fn ask<C: Cluster>(cluster: &C, asking: Asking, fleet: Fleet) -> Answers<Status> {
    super::tell(fleet.note.as_deref());
    let command = |_: &Daemon| words(&["penstock", "status", "--json"]);
    ask_all(cluster, asking, fleet, command, None, parsed).await
}

fn as_json(answers: &Answers<Status>) -> String {
    let nodes = answers.answers.iter();
    let nodes = nodes.map(|(daemon, status)| NodeStatus { node: &daemon.node, pod: &daemon.pod, status }).collect();
    let enforced = answers.missing.is_empty() && answers.answers.iter().all(|(_, status)| is_enforced(status));
    json(&whole(&ClusterStatus { enforced, nodes }, &answers.missing))
}

/// Whether all of a node is in effect, as far as its daemon knows the cluster.
fn is_enforced(status: &Status) -> bool {
    status.in_force
        && status.stale.is_none()
        && status.not_enforced.is_empty()
        && status.pods.iter().all(|pod| pod.enforced)
}

fn text(answers: &Answers<Status>) -> String {
    let heading = [
        "NODE",
        "VERSION",
        "UP",
        "POLICIES",
        "SNAPSHOT",
        "IN FORCE",
        "PODS",
        "ENFORCED",
        "CONNECTIONS",
        "DROPPED",
        "STATE",
    ];
    let mut rows: Vec<Vec<String>> = answers.answers.iter().map(|(daemon, status)| row(daemon, status)).collect();
    for missing in &answers.missing {
        let mut row = vec![missing.node.clone()];
        row.resize(heading.len() - 1, String::new());
        row.push(missing.problem.replace('_', " "));
        rows.push(row);
    }
    rows.sort();
    rows.insert(0, heading.map(str::to_owned).to_vec());
    let enforced = answers.answers.iter().filter(|(_, status)| is_enforced(status)).count();
    let all = answers.all();
    let pods: usize = answers.answers.iter().map(|(_, status)| status.pods.len()).sum();
    format!("{}\nenforced on {enforced} of {all} nodes, {pods} pods\n", align_columns(&rows))
}

fn row(daemon: &Daemon, status: &Status) -> Vec<String> {
    let dropped: u64 = status.all_drops().values().sum();
    vec![
        daemon.node.clone(),
        status.version.clone(),
        uptime(status.uptime_seconds),
        status.policies.to_string(),
        status.published.to_string(),
        if status.in_force { "yes" } else { "not yet" }.to_owned(),
        status.pods.len().to_string(),
        status.pods.iter().filter(|pod| pod.enforced).count().to_string(),
        status.connections.entries.to_string(),
        dropped.to_string(),
        state(status),
    ]
}

/// The fault of a node, or `ok`.
fn state(status: &Status) -> String {
    let mut wrong = Vec::new();
    if !status.configuration_refused.is_empty() {
        wrong.push("configuration refused".to_owned());
    }
    if status.refused_files > 0 {
        wrong.push("manifests refused".to_owned());
    }
    if let Some(stale) = &status.stale {
        wrong.push(format!("objects of {}", stale.recorded));
    }
    let lost: Vec<&str> =
        status.source.iter().filter(|(_, source)| !source.connected).map(|(resource, _)| resource.as_str()).collect();
    if !lost.is_empty() {
        wrong.push(format!("does not follow {}", lost.join(", ")));
    }
    let waiting = status.pods.iter().filter(|pod| pod.waiting.is_some()).count();
    if waiting > 0 {
        wrong.push(format!("{waiting} pods without network"));
    }
    let open: BTreeSet<_> = status.not_enforced.iter().filter_map(|one| one.pod.as_ref()).collect();
    if !open.is_empty() {
        wrong.push(format!("{} pods not enforced", open.len()));
    }
    wrong.extend(status.not_enforced.iter().filter(|one| one.pod.is_none()).map(|one| one.reason.clone()));
    if wrong.is_empty() { "ok".to_owned() } else { wrong.join("; ") }
}

#[cfg(test)]
pub(super) mod tests;

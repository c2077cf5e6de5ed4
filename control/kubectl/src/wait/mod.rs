//! `kubectl penstock wait`: until what the API server has is in effect on every node.
//!
//! A daemon says up to which resourceVersion of each resource all changes are in the snapshots that it has published, and whether
//! the last of these is in effect on every worker. The second counts only in a later answer than the first, because the two are
//! not read at the same instant.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use clap::ValueEnum;
use penstock_admin::types::{NotEnforced, Status};
use penstock_text::number::json;
use serde::Serialize;
use tokio::time::Instant;

use super::Failure;
use super::ask::Asking;
use super::cluster::{Cluster, Daemon, PodName, Target};
use super::status;

const PAUSE: Duration = Duration::from_millis(300);

/// Wait until policy is in effect on every node
///
/// Looks up the object's resourceVersion at the API server, and waits until each daemon has published it and every worker of the
/// node evaluates by it. From then on no packet anywhere is judged by anything older. Of a pod, its node must have it enforced, and
/// all nodes must know its labels and addresses. Without an object: all policies that are there now. A policy that was deleted
/// cannot be waited for.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  in effect on every node
  1  not in effect everywhere within the time, or the API server is away
  2  bad input: arguments, the kubeconfig, rights that the user lacks, or no such object
  4  within the time in effect on all nodes that have answered, and some have not; they are named

Examples:
  kubectl penstock wait --for enforced
  kubectl penstock wait --for enforced networkpolicy/shop/db --timeout 30s
  kubectl apply -f db.yaml && kubectl penstock wait --for enforced networkpolicy/shop/db
  kubectl penstock wait --for enforced pod/shop/web-1 --json")]
pub(super) struct Args {
    /// The object to wait for: networkpolicy/NAMESPACE/NAME, clusternetworkpolicy/NAME or pod/NAMESPACE/NAME; all policies without it
    #[arg(value_name = "OBJECT")]
    target: Option<Target>,
    /// The condition to wait for
    #[arg(long = "for", value_name = "CONDITION")]
    condition: Condition,
    /// How long to wait at most
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = super::time)]
    timeout: Duration,
    /// Print each node's state as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Condition {
    /// In effect on every worker of every node
    Enforced,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Enforced,
    /// Not yet, and why.
    NotYet(String),
    Missing(String),
}

/// The objects that are waited for, as the daemons have to know them.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Goal {
    versions: BTreeMap<String, u64>,
    pod: Option<(PodName, String)>,
}

#[derive(Debug, Default)]
struct Seen(HashSet<(String, u32)>);

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let Condition::Enforced = args.condition;
    let target = args.target.unwrap_or(Target::AllPolicies);
    let deadline = Instant::now() + args.timeout;
    let goal = goal(cluster, &target).await?;
    let mut seen = Seen::default();
    let states = loop {
        let states = look(cluster, asking, &goal, &mut seen).await?;
        if states.values().all(|state| *state == State::Enforced) || Instant::now() + PAUSE > deadline {
            break states;
        }
        tokio::time::sleep(PAUSE).await;
    };
    finish(&target, args.timeout, &states, args.json)
}

async fn goal<C: Cluster>(cluster: &C, target: &Target) -> Result<Goal, Failure> {
    let versions = cluster.versions(target).await?;
    let Target::Pod(name) = target else { return Ok(Goal { versions, pod: None }) };
    let place = cluster.pod(name).await?;
    if place.host_network {
        return Err(Failure::bad_input(format!("{target}: it has its node's network, which no policy is about")));
    }
    Ok(Goal { versions, pod: Some((name.clone(), place.node)) })
}

async fn look<C: Cluster>(
    cluster: &C,
    asking: Asking,
    goal: &Goal,
    seen: &mut Seen,
) -> Result<BTreeMap<String, State>, Failure> {
    let answers = status::ask(cluster, asking, cluster.daemons().await?).await;
    let missing = answers.missing.into_iter().map(|missing| (missing.node, State::Missing(missing.message)));
    let mut states: BTreeMap<String, State> = missing.collect();
    for (daemon, status) in &answers.answers {
        states.insert(daemon.node.clone(), seen.state(goal, daemon, status));
    }
    if let Some((pod, node)) = &goal.pod
        && !states.contains_key(node)
    {
        states.insert(node.clone(), State::Missing(format!("was not asked, and has pod {pod}; leave out --node")));
    }
    Ok(states)
}

impl Seen {
    /// A node's state by its present answer and those before.
    fn state(&mut self, goal: &Goal, daemon: &Daemon, status: &Status) -> State {
        let not_yet = |why: &str| State::NotYet(why.to_owned());
        if let Some(stale) = &status.stale {
            return State::NotYet(format!(
                "has the objects of {}, and has not read the API server's yet",
                stale.recorded
            ));
        }
        // They hold for one process: another one reads everything anew.
        let identity = (daemon.pod.clone(), status.process);
        let was_seen = self.0.contains(&identity);
        for (resource, &version) in &goal.versions {
            match status.source.get(resource).and_then(|source| source.version) {
                Some(known) if known >= version => {}
                Some(known) => {
                    return State::NotYet(format!("knows {resource} up to version {known}, and not {version} yet"));
                }
                None => {
                    return State::NotYet(format!(
                        "does not say which {resource} it knows: an older version, or one that reads manifests; update it"
                    ));
                }
            }
        }
        self.0.insert(identity);
        if !was_seen || !status.in_force {
            return not_yet("is not in effect on every worker yet");
        }
        let pod = goal.pod.as_ref().filter(|(_, node)| *node == daemon.node).map(|(name, _)| name.to_string());
        let mut not_enforced = status.not_enforced.iter();
        // A pod's own state does not depend on other pods.
        let is_meant = |one: &&NotEnforced| one.pod.is_none() || goal.pod.is_none() || one.pod == pod;
        if let Some(NotEnforced { reason, .. }) = not_enforced.find(is_meant) {
            return State::NotYet(format!("policy is not enforced: {reason}"));
        }
        match &goal.pod {
            Some((name, node)) if *node == daemon.node => of_pod(name, status),
            _ => State::Enforced,
        }
    }
}

/// The state of a pod at the daemon of its node.
fn of_pod(name: &PodName, status: &Status) -> State {
    match status.pods.iter().find(|pod| pod.pod == name.to_string()) {
        None => State::NotYet(format!("does not have pod {name} yet")),
        Some(pod) => match (&pod.waiting, pod.enforced) {
            (Some(waiting), _) => State::NotYet(format!("pod {name} is not attached: {waiting}")),
            (None, false) if pod.building => State::NotYet(format!("builds the tables of pod {name}")),
            (None, false) => State::NotYet(format!("pod {name} is not enforced yet")),
            (None, true) => State::Enforced,
        },
    }
}

fn finish(target: &Target, timeout: Duration, states: &BTreeMap<String, State>, as_json: bool) -> Result<(), Failure> {
    let enforced = states.values().filter(|state| **state == State::Enforced).count();
    if as_json {
        let object = target.to_string();
        let value = serde_json::json!({ "object": object, "enforced": enforced == states.len(), "nodes": states });
        Failure::print(json(&value))?;
    }
    if enforced == states.len() {
        if !as_json {
            let text = format!("{target}: enforced on {enforced} nodes\n");
            return Failure::print(text);
        }
        return Ok(());
    }
    let lines = states.iter().filter_map(|(node, state)| match state {
        State::Enforced => None,
        State::NotYet(why) | State::Missing(why) => Some(format!("node {node}: {why}")),
    });
    let head = format!("{target}: enforced on {enforced} of {} nodes after {} s", states.len(), timeout.as_secs());
    let lines: Vec<String> = std::iter::once(head).chain(lines).collect();
    let is_partial = enforced > 0 && !states.values().any(|state| matches!(state, State::NotYet(_)));
    match is_partial {
        true => Err(Failure::Partial(lines)),
        false => Err(Failure::Failed(anyhow::anyhow!("{}", lines.join("\n")))),
    }
}

#[cfg(test)]
mod tests;

//! A change from event to published tables, in a large cluster as seen by one of its nodes.

use std::time::{Duration, Instant};

use penstock_dataplane::policy::PolicySet;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;

use super::cluster::{address, key, labels, namespace, node, pod, typical_policy};
use super::row;

/// Size of the cluster.
#[derive(Clone, Copy)]
pub(crate) struct ClusterScale {
    pods: usize,
    namespaces: usize,
    policies: usize,
    nodes: usize,
    changes: usize,
}

impl ClusterScale {
    pub(crate) const FULL: Self =
        Self { pods: 100_000, namespaces: 5_000, policies: 10_000, nodes: 400, changes: 2_000 };
    pub(crate) const SMOKE: Self = Self { pods: 1_000, namespaces: 50, policies: 100, nodes: 4, changes: 20 };

    fn namespace_of(&self, pod: usize) -> usize {
        pod % self.namespaces
    }

    /// Spreads the pods of one node over many namespaces.
    fn pod(&self, number: usize) -> Pod {
        let spread = number.wrapping_mul(2_654_435_761) >> 7;
        pod(number, self.namespace_of(number), spread % self.nodes, number / self.namespaces % 5)
    }

    fn policy(&self, number: usize, turn: usize) -> Object {
        typical_policy(number, number % self.namespaces, turn)
    }

    fn objects(self) -> impl Iterator<Item = ObjectChange> {
        let namespaces = (0..self.namespaces).map(namespace);
        let nodes = (0..self.nodes).map(node);
        let pods = (0..self.pods).map(move |number| Object::Pod(self.pod(number)));
        let policies = (0..self.policies).map(move |number| self.policy(number, 0));
        namespaces.chain(nodes).chain(pods).chain(policies).map(ObjectChange::Set)
    }
}

pub(crate) fn run(size: ClusterScale) -> Vec<bool> {
    let mut engine = Engine::new(EngineSettings::for_node("node-0"));
    let start = Instant::now();
    engine.apply(size.objects());
    let mut published = engine.policy_set().clone();
    let fresh = start.elapsed();
    let peak = peak_mebibytes();
    let (state, tables) = engine.statistics();
    println!(
        "cluster: {} pods, {} namespaces, {} policies; this node: {} pods, {} tables, {} rules, {} identities, tables of {} KiB",
        state.pods,
        state.namespaces,
        state.policies,
        tables.endpoints,
        tables.tables,
        tables.rules,
        tables.identities,
        engine.policy_set().statistics().bytes / 1024,
    );
    let mut results = vec![
        row(
            "fresh compile and publish",
            format!("{:.2} s", fresh.as_secs_f64()),
            "<= 3 s",
            fresh <= Duration::from_secs(3),
        ),
        row(
            "peak memory of the process",
            peak.map_or("unknown".to_owned(), |peak| format!("{peak} MiB")),
            "<= 500 MB",
            peak.is_some_and(|peak| peak <= 476),
        ),
    ];
    let own: Vec<usize> = (0..size.pods).filter(|number| size.pod(*number).node.as_deref() == Some("node-0")).collect();
    // One in ten changes is to a pod of this node.
    let pick = |turn: usize| {
        if turn.is_multiple_of(10) { own[turn / 10 % own.len()] } else { turn.wrapping_mul(7919) % size.pods }
    };
    let relabel = |turn: usize| {
        let mut pod = size.pod(pick(turn));
        pod.labels.extend(labels(&[("app", format!("app-{}", turn % 7)), ("version", format!("v{}", turn % 5))]));
        Object::Pod(pod)
    };
    let readdress = |turn: usize| {
        let mut pod = size.pod(pick(turn));
        pod.addresses = vec![address(size.pods + turn)];
        Object::Pod(pod)
    };
    let of_own_namespaces: Vec<usize> =
        own.iter().map(|pod| size.namespace_of(*pod)).filter(|number| *number < size.policies).collect();
    let repolicy = |turn: usize| {
        // Every second one is a policy that may select a pod of this node.
        let number = if turn.is_multiple_of(2) {
            of_own_namespaces[turn / 2 % of_own_namespaces.len()]
        } else {
            turn.wrapping_mul(104_729) % size.policies
        };
        size.policy(number, turn + 1)
    };
    let renamespace = |turn: usize| match namespace(turn.wrapping_mul(31) % size.namespaces) {
        Object::Namespace(mut namespace) => {
            namespace.labels.extend(labels(&[("team", format!("team-{}", turn % 50))]));
            Object::Namespace(namespace)
        }
        other => other,
    };
    let milli = Duration::from_millis;
    for (what, bound, make) in [
        ("one pod's labels", 5, &relabel as &dyn Fn(usize) -> Object),
        ("one pod's address", 5, &readdress),
        ("one policy", 20, &repolicy),
        ("one namespace's labels", 20, &renamespace),
    ] {
        let (median, p99, worst) = changes(&mut engine, &mut published, size.changes, make);
        let figure = format!("{:.3} ms", p99.as_secs_f64() * 1e3);
        let measure = format!("{what} changed, event to published, p99 (median {median:.0?}, worst {worst:.1?})");
        results.push(row(&measure, figure, &format!("<= {bound} ms"), p99 <= milli(bound)));
    }
    let whole = key(0, "policy-0".to_owned());
    assert!(engine.state().policies().any(|(policy, _)| policy.key == whole), "the cluster is still there");
    results
}

/// Median, 99th percentile and maximum of single changes. Each is published while the previous one is still held, as
/// workers do.
fn changes(
    engine: &mut Engine,
    published: &mut PolicySet,
    count: usize,
    make: &dyn Fn(usize) -> Object,
) -> (Duration, Duration, Duration) {
    let mut times: Vec<Duration> = (0..count)
        .map(|turn| {
            let change = ObjectChange::Set(make(turn));
            let start = Instant::now();
            engine.apply([change]);
            *published = engine.policy_set().clone();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    (times[count / 2], times[count * 99 / 100], times[count - 1])
}

/// `VmHWM` of proc(5).
fn peak_mebibytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib / 1024)
}

//! How far changes have come: the epoch of each pod's last change, and how long each step of a change took.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_dataplane::Epoch;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::policy::{AddressOwner, Endpoint, PolicySet};
use penstock_dataplane::worker::Dataplane;
use penstock_policy::model::ObjectKey;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::discovery::PodProblem;

/// How long publishing waits for the workers to take the snapshot. They need some microseconds; a slower worker is
/// checked again later.
const IN_FORCE_WAIT: Duration = Duration::from_micros(200);

/// A pod as it was published.
#[derive(Debug)]
struct PublishedPod {
    port: PortId,
    addresses: BTreeSet<IpAddr>,
    endpoint: Option<Endpoint>,
    since: Epoch,
}

/// A snapshot that is not in force everywhere yet.
#[derive(Clone, Copy, Debug)]
struct AwaitedSnapshot {
    epoch: Epoch,
    seen: Instant,
}

/// Tracks published snapshots until they are in force.
#[derive(Debug)]
pub(super) struct EnforcementProgress {
    pods: BTreeMap<ObjectKey, PublishedPod>,
    /// Why pods are not attached.
    waiting: BTreeMap<ObjectKey, String>,
    awaited: Option<AwaitedSnapshot>,
    /// Whether any snapshot has been in force on every worker.
    programmed: bool,
    pub(super) times: StepTimes,
}

/// How long the steps of a change take, in seconds.
#[derive(Clone, Debug)]
pub(super) struct StepTimes {
    /// From changed objects to tables.
    pub(super) compile: Histogram,
    /// From tables to a published snapshot.
    pub(super) publish: Histogram,
    /// From the event to a snapshot that is in force on every worker.
    pub(super) enforced: Histogram,
    /// Changes of objects applied.
    pub(super) changes: Counter,
}

impl Default for StepTimes {
    fn default() -> Self {
        // 20 microseconds to 10 seconds.
        let times = || Histogram::new(exponential_buckets(20e-6, 2.0, 20));
        Self { compile: times(), publish: times(), enforced: times(), changes: Counter::default() }
    }
}

impl EnforcementProgress {
    pub(super) fn new() -> Self {
        Self {
            pods: BTreeMap::new(),
            waiting: BTreeMap::new(),
            awaited: None,
            programmed: false,
            times: StepTimes::default(),
        }
    }

    /// Records that `epoch` was just published with this policy and these pods, for an event seen at `seen`.
    pub(super) fn published<'a>(
        &mut self,
        epoch: Epoch,
        policy: &PolicySet,
        pods: impl Iterator<Item = (&'a ObjectKey, PortId, &'a BTreeSet<IpAddr>)>,
        seen: Instant,
    ) {
        let mut before = std::mem::take(&mut self.pods);
        for (pod, port, addresses) in pods {
            let endpoint = endpoint_of(policy, addresses);
            let same = before.remove(pod).filter(|last| {
                last.port == port && last.addresses == *addresses && is_same(last.endpoint.as_ref(), endpoint.as_ref())
            });
            let since = same.map_or(epoch, |last| last.since);
            self.pods.insert(pod.clone(), PublishedPod { port, addresses: addresses.clone(), endpoint, since });
        }
        // This snapshot includes the event of an earlier one that is still awaited.
        let seen = self.awaited.map_or(seen, |awaited| awaited.seen.min(seen));
        self.awaited = Some(AwaitedSnapshot { epoch, seen });
    }

    /// Spins for a moment until the workers have taken the published snapshot. What the kernel's programs need for it takes
    /// much longer, and another thread does it.
    pub(super) fn wait_in_force(&mut self, dataplane: &Dataplane) {
        if dataplane.offload_in_force().is_some() {
            return;
        }
        let until = Instant::now() + IN_FORCE_WAIT;
        while !self.check_in_force(dataplane) && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Checks whether the published snapshot is in force on every worker.
    pub(super) fn check_in_force(&mut self, dataplane: &Dataplane) -> bool {
        let Some(awaited) = self.awaited else { return true };
        if !dataplane.is_in_force(awaited.epoch) {
            return false;
        }
        // Not the first snapshot: no event caused it, and it takes as long as the interfaces do.
        if self.programmed {
            self.times.enforced.observe(awaited.seen.elapsed().as_secs_f64());
        }
        self.awaited = None;
        self.programmed = true;
        true
    }

    /// Whether a published snapshot was not in force on every worker when last checked.
    pub(super) fn is_awaiting(&self) -> bool {
        self.awaited.is_some()
    }

    /// Whether policy has been in force on every worker.
    pub(super) fn is_programmed(&self) -> bool {
        self.programmed
    }

    /// The snapshot with which this pod's own rules, addresses or port changed last.
    pub(super) fn changed(&self, pod: &ObjectKey) -> Option<Epoch> {
        self.pods.get(pod).map(|published| published.since)
    }

    /// Whether this pod was published with all of these addresses.
    pub(super) fn has_addresses(&self, pod: &ObjectKey, addresses: &[IpAddr]) -> bool {
        self.pods.get(pod).is_some_and(|pod| addresses.iter().all(|address| pod.addresses.contains(address)))
    }

    /// Records why pods are not attached.
    pub(super) fn note_problems(&mut self, problems: &BTreeSet<PodProblem>) {
        self.waiting.clear();
        for problem in problems {
            for pod in problem.pods() {
                self.waiting.entry(pod.clone()).or_insert_with(|| problem.to_string());
            }
        }
    }

    /// Why this pod, which has no port, is not attached.
    pub(super) fn waiting(&self, pod: &ObjectKey, has_no_address: bool) -> String {
        match self.waiting.get(pod) {
            Some(problem) => problem.clone(),
            None if has_no_address => "it has no address yet".to_owned(),
            None => "its interface is not attached yet: see the log for the reason".to_owned(),
        }
    }
}

fn endpoint_of(policy: &PolicySet, addresses: &BTreeSet<IpAddr>) -> Option<Endpoint> {
    let endpoint = |&address: &IpAddr| match policy.owner(address.into()) {
        Some(AddressOwner::Pod { endpoint, .. }) => endpoint,
        _ => None,
    };
    policy.endpoint(addresses.iter().find_map(endpoint)?).cloned()
}

/// Whether both have the same rule tables. Equal tables are shared, so comparing pointers is enough.
fn is_same(one: Option<&Endpoint>, other: Option<&Endpoint>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.egress.is_same(&other.egress) && one.ingress.is_same(&other.ingress),
        (None, None) => true,
        _ => false,
    }
}

//! What was published when, and how long it took: since which snapshot each pod is as it is, and the times of a change on
//! its way to the packets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_dataplane::Epoch;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::policy::{AddressOwner, Endpoint, EndpointPolicy, PolicySet};
use penstock_dataplane::worker::Dataplane;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::discovery::Problem;
use crate::model::ObjectKey;

/// How long publishing waits for the workers to take the snapshot. They take some microseconds; a worker that is slower is
/// looked at again later.
const TAKEN: Duration = Duration::from_micros(200);

/// A pod as it was published.
#[derive(Debug)]
struct Published {
    port: PortId,
    addresses: BTreeSet<IpAddr>,
    endpoint: Option<Endpoint>,
    since: Epoch,
}

/// A snapshot that is not in force everywhere yet.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    epoch: Epoch,
    seen: Instant,
}

/// How far changes have come.
#[derive(Debug)]
pub(super) struct Progress {
    pods: BTreeMap<ObjectKey, Published>,
    /// Why pods are not attached.
    waiting: BTreeMap<ObjectKey, String>,
    awaited: Option<Awaited>,
    /// Whether some snapshot has been in force everywhere.
    programmed: bool,
    pub(super) times: Times,
}

/// How long the steps of a change take, in seconds.
#[derive(Clone, Debug)]
pub(super) struct Times {
    /// From changed objects to tables.
    pub(super) compile: Histogram,
    /// From tables to a published snapshot.
    pub(super) publish: Histogram,
    /// From the event to a snapshot that is in force on every worker.
    pub(super) enforced: Histogram,
    /// Changes of objects taken in.
    pub(super) changes: Counter,
}

impl Default for Times {
    fn default() -> Self {
        // 20 microseconds to 10 seconds.
        let times = || Histogram::new(exponential_buckets(20e-6, 2.0, 20));
        Self { compile: times(), publish: times(), enforced: times(), changes: Counter::default() }
    }
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            pods: BTreeMap::new(),
            waiting: BTreeMap::new(),
            awaited: None,
            programmed: false,
            times: Times::default(),
        }
    }

    /// Notes that `epoch` was just published with this policy and these pods, for an event seen at `seen`.
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
            self.pods.insert(pod.clone(), Published { port, addresses: addresses.clone(), endpoint, since });
        }
        // An event of an earlier snapshot that is still awaited is in this one too.
        let seen = self.awaited.map_or(seen, |awaited| awaited.seen.min(seen));
        self.awaited = Some(Awaited { epoch, seen });
    }

    /// Waits a moment until the workers go by what was published.
    pub(super) fn follow(&mut self, dataplane: &Dataplane) {
        let until = Instant::now() + TAKEN;
        while !self.look(dataplane) && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Looks whether what was published is in force everywhere.
    pub(super) fn look(&mut self, dataplane: &Dataplane) -> bool {
        let Some(awaited) = self.awaited else { return true };
        if dataplane.in_force().iter().any(|&epoch| epoch != awaited.epoch) {
            return false;
        }
        // The first one is the start: no event, and it takes as long as the interfaces do.
        if self.programmed {
            self.times.enforced.observe(awaited.seen.elapsed().as_secs_f64());
        }
        self.awaited = None;
        self.programmed = true;
        true
    }

    /// Whether a snapshot is published that is not in force everywhere, as far as was looked.
    pub(super) fn awaits(&self) -> bool {
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

    /// Takes note of why pods are not attached.
    pub(super) fn note_problems(&mut self, problems: &BTreeSet<Problem>) {
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
            None => "its interface could not be attached yet: the log says why".to_owned(),
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

/// Whether both have the same tables. Equal tables are shared, so that it is enough to compare where they are.
fn is_same(one: Option<&Endpoint>, other: Option<&Endpoint>) -> bool {
    let same = |one: &EndpointPolicy, other: &EndpointPolicy| match (one, other) {
        (EndpointPolicy::Open, EndpointPolicy::Open) => true,
        (EndpointPolicy::Isolated(one), EndpointPolicy::Isolated(other)) => Arc::ptr_eq(one, other),
        _ => false,
    };
    match (one, other) {
        (Some(one), Some(other)) => same(&one.egress, &other.egress) && same(&one.ingress, &other.ingress),
        (None, None) => true,
        _ => false,
    }
}

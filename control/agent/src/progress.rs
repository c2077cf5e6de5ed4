//! How far changes have come: the epoch of each pod's last change, and how long each step of a change took.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_dataplane::Epoch;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::policy::{AddressOwner, Endpoint, PolicySet};
use penstock_dataplane::worker::Dataplane;
use penstock_policy::model::ObjectKey;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::coverage::NotEnforced;
use crate::discovery::PodProblem;

/// How long publishing waits for the workers to take the snapshot. They need some microseconds; a slower worker is
/// checked again later.
const IN_FORCE_WAIT: Duration = Duration::from_micros(200);

/// Most snapshots that are awaited at a time. While a worker takes none, later ones count as one change.
const MOST_AWAITED: usize = 1024;

#[derive(Debug)]
struct PublishedPod {
    port: PortId,
    addresses: BTreeSet<IpAddr>,
    endpoint: Option<Endpoint>,
    since: Epoch,
}

/// A snapshot that is not in effect everywhere yet.
#[derive(Clone, Copy, Debug)]
struct AwaitedSnapshot {
    epoch: Epoch,
    seen: Instant,
}

/// Tracks published snapshots until they are in effect.
#[derive(Debug, Default)]
pub(super) struct EnforcementProgress {
    pods: BTreeMap<ObjectKey, PublishedPod>,
    not_enforced: BTreeSet<NotEnforced>,
    waiting: BTreeMap<ObjectKey, String>,
    /// The snapshots that are not in effect everywhere yet, oldest first.
    awaited: VecDeque<AwaitedSnapshot>,
    /// Whether any snapshot has been in effect on every worker.
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
    /// From the event to a snapshot that is in effect on every worker.
    pub(super) enforced: Histogram,
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
                last.port == port
                    && last.addresses == *addresses
                    && Endpoint::is_same(last.endpoint.as_ref(), endpoint.as_ref())
            });
            let since = same.map_or(epoch, |last| last.since);
            self.pods.insert(pod.clone(), PublishedPod { port, addresses: addresses.clone(), endpoint, since });
        }
        let is_full = self.awaited.len() == MOST_AWAITED;
        match self.awaited.back_mut() {
            Some(last) if is_full => last.epoch = epoch,
            _ => self.awaited.push_back(AwaitedSnapshot { epoch, seen }),
        }
    }

    /// Spins for a moment until the workers have taken the published snapshot. What the kernel's programs need for it takes
    /// much longer, and another thread does it: then this only checks earlier snapshots, since changes may come without a pause.
    pub(super) fn wait_in_force(&mut self, dataplane: &Dataplane) {
        let by_workers = dataplane.offload_in_force().is_none();
        let until = Instant::now() + IN_FORCE_WAIT;
        while !self.check_in_force(dataplane) && by_workers && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Checks which published snapshots are in effect, on every worker and in the kernel's programs. Returns whether all are.
    pub(super) fn check_in_force(&mut self, dataplane: &Dataplane) -> bool {
        self.take_in_force(|epoch| dataplane.is_in_force(epoch))
    }

    fn take_in_force(&mut self, is_in_force: impl Fn(Epoch) -> bool) -> bool {
        let was_programmed = self.programmed;
        while let Some(oldest) = self.awaited.pop_front_if(|oldest| is_in_force(oldest.epoch)) {
            tracing::debug!(epoch = oldest.epoch.0, "in effect on all workers and in the programs");
            // Not the first snapshots: no event caused them, and they take as long as the interfaces do.
            if was_programmed {
                self.times.enforced.observe(oldest.seen.elapsed().as_secs_f64());
            }
            self.programmed = true;
        }
        self.awaited.is_empty()
    }

    /// Whether a published snapshot was not in effect when last checked.
    pub(super) fn is_awaiting(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Whether all that such a snapshot waited for were workers. Nobody tells when they have taken it.
    pub(super) fn is_awaiting_workers(&self, dataplane: &Dataplane) -> bool {
        let oldest = self.awaited.front();
        oldest
            .is_some_and(|oldest| dataplane.offload_in_force().is_none_or(|programs| !programs.is_before(oldest.epoch)))
    }

    /// Whether policy has been in effect on every worker.
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

    pub(super) fn note_problems(&mut self, problems: &BTreeSet<PodProblem>) {
        self.waiting.clear();
        for problem in problems {
            for pod in problem.pods() {
                self.waiting.entry(pod.clone()).or_insert_with(|| problem.to_string());
            }
        }
    }

    /// Whether pods are not attached, for reasons that were recorded.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn note_not_enforced(&mut self, not_enforced: BTreeSet<NotEnforced>) {
        self.not_enforced = not_enforced;
    }

    pub(super) fn not_enforced(&self) -> &BTreeSet<NotEnforced> {
        &self.not_enforced
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

#[cfg(test)]
mod tests {
    use penstock_dataplane::policy::PolicySet;

    use super::*;

    fn publish(progress: &mut EnforcementProgress, epoch: u32) {
        progress.published(Epoch(epoch), &PolicySet::default(), std::iter::empty(), Instant::now());
    }

    /// The number of changes whose time to be in effect was measured.
    fn measured(progress: &EnforcementProgress) -> u64 {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register("times", "", progress.times.enforced.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let count = text.lines().find_map(|line| line.strip_prefix("times_count ")).unwrap();
        count.parse().unwrap()
    }

    #[test]
    fn a_change_is_measured_though_later_ones_overtake_it() {
        let mut progress = EnforcementProgress::default();
        publish(&mut progress, 1);
        assert!(progress.take_in_force(|_| true) && progress.is_programmed());
        for epoch in 2..=100 {
            publish(&mut progress, epoch);
            assert!(!progress.take_in_force(|asked| asked.0 < epoch), "the last one is awaited");
        }
        assert_eq!(measured(&progress), 98, "all but the start and the last one");
        assert!(progress.take_in_force(|_| true));
        assert_eq!(measured(&progress), 99);
    }

    #[test]
    fn untaken_snapshots_are_awaited_in_bounded_memory() {
        let (mut progress, last) = (EnforcementProgress::default(), 2 * MOST_AWAITED as u32);
        (1..=last).for_each(|epoch| publish(&mut progress, epoch));
        assert_eq!(progress.awaited.len(), MOST_AWAITED);
        assert!(!progress.take_in_force(|epoch| epoch.0 < last) && progress.is_awaiting());
        assert!(progress.take_in_force(|epoch| epoch.0 <= last));
    }
}

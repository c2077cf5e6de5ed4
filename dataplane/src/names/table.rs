//! The tables of all pods of a node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::learnt::{LearntName, LearntNames};
use super::limits::{NameLimits, Shared};

/// A pod, told from others that had its name or its addresses before.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NamedPod {
    /// Its name, with its namespace's.
    pub name: String,
    /// When it was created, in seconds of Unix time, if that is known.
    pub created: Option<i64>,
    /// Its addresses, sorted.
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodNames {
    pub pod: NamedPod,
    /// Its names, in the order in which they expire.
    pub names: Vec<LearntName>,
}

/// Names that all pods have learnt, counted since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NameCounts {
    pub kept: u64,
    /// Names that answers gave, also those that were known.
    pub learnt: u64,
    /// Names that were evicted, because a limit was reached.
    pub evicted: u64,
    /// Datagrams from DNS servers that were no answer, or malformed.
    pub not_understood: u64,
    /// Answers to something else than what the pod had asked.
    pub unasked: u64,
}

/// The names that the pods of a node have learnt from DNS answers.
#[derive(Debug, Default)]
pub struct NameTable {
    pods: Mutex<Pods>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Pods {
    used: BTreeMap<NamedPod, Arc<LearntNames>>,
    /// Names of an earlier run, until their pods are known.
    recorded: BTreeMap<NamedPod, Vec<LearntName>>,
}

impl NameTable {
    pub fn new(limits: NameLimits) -> Self {
        Self { pods: Mutex::default(), shared: Arc::new(Shared { limits, ..Shared::default() }) }
    }

    fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names that this pod has learnt, from now on or before. They are forgotten once all clones that this has returned are dropped.
    pub fn of(&self, pod: NamedPod) -> Arc<LearntNames> {
        let mut pods = self.pods();
        // A pod that comes is rare, and so is one that goes.
        pods.used.retain(|_, names| Arc::strong_count(names) > 1);
        if let Some(names) = pods.used.get(&pod) {
            return Arc::clone(names);
        }
        let names = Arc::new(LearntNames::new(Arc::clone(&self.shared)));
        names.restore(pods.recorded.remove(&pod).into_iter().flatten());
        pods.used.insert(pod, Arc::clone(&names));
        names
    }

    /// Gives pods what an earlier run has learnt, and keeps what is of others until they are known.
    pub fn restore(&self, recorded: Vec<PodNames>) {
        let mut pods = self.pods();
        pods.recorded.clear();
        for PodNames { pod, names } in recorded {
            match pods.used.get(&pod) {
                Some(known) => known.restore(names),
                None => drop(pods.recorded.insert(pod, names)),
            }
        }
    }

    /// Forgets what an earlier run has learnt for pods that have not come.
    pub fn forget_recorded(&self) {
        self.pods().recorded.clear();
    }

    /// Keeps what all pods have learnt for as long as the result lives.
    pub fn hold(&self) -> Vec<Arc<LearntNames>> {
        self.pods().used.values().cloned().collect()
    }

    /// All that is kept, by pod; with what an earlier run has learnt for pods that may still come.
    pub fn all(&self) -> Vec<PodNames> {
        let pods = self.pods();
        let used = pods.used.iter().filter(|(_, names)| Arc::strong_count(names) > 1);
        let used = used.map(|(pod, names)| PodNames { pod: pod.clone(), names: names.all() });
        let recorded = pods.recorded.iter().map(|(pod, names)| PodNames { pod: pod.clone(), names: names.clone() });
        used.chain(recorded).collect()
    }

    /// A number that differs once something was learnt.
    pub fn changes(&self) -> u64 {
        self.shared.changes.load(Relaxed)
    }

    pub fn counts(&self) -> NameCounts {
        let Shared { names, learnt, evicted, not_understood, unasked, .. } = &*self.shared;
        let [kept, learnt, evicted, not_understood, unasked] =
            [names, learnt, evicted, not_understood, unasked].map(|it| it.load(Relaxed));
        NameCounts { kept, learnt, evicted, not_understood, unasked }
    }
}

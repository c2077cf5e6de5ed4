//! The limits of this node's pods' connections, from their annotations to the workers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::conntrack::{ConnTable, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::limits::{Limit, LimitedPods, PodLimits};
use penstock_dataplane::packet::Address;
use penstock_dataplane::policy::Direction;
use penstock_policy::model::{ConnectionLimit, ConnectionLimits, ObjectKey};

/// A pod's limits, with what counts against them, kept for as long as its object and port stay as they are.
#[derive(Debug)]
struct LimitedPod {
    wanted: ConnectionLimits,
    port: PortId,
    limits: Arc<PodLimits>,
}

/// The limits of all pods of the node that have some.
#[derive(Debug, Default)]
pub(super) struct PodConnectionLimits(BTreeMap<ObjectKey, LimitedPod>);

/// Limits of a pod with these addresses, which do not know yet what is open.
pub(super) type NewLimits = (Vec<IpAddr>, Arc<PodLimits>);

impl PodConnectionLimits {
    /// Sets which pods have which limits, behind which ports and with which addresses. Returns what workers get, and which of them are new.
    pub(super) fn set<'a>(
        &mut self,
        pods: impl Iterator<Item = (&'a ObjectKey, ConnectionLimits, PortId, Vec<IpAddr>)>,
    ) -> (LimitedPods, Vec<NewLimits>) {
        let (mut before, mut new) = (std::mem::take(&mut self.0), Vec::new());
        for (key, wanted, port, addresses) in pods {
            let known = before.remove(key).filter(|known| known.wanted == wanted && known.port == port);
            let pod = known.unwrap_or_else(|| {
                let limits = Arc::new(PodLimits::new(limit(wanted.egress), limit(wanted.ingress)));
                new.push((addresses, Arc::clone(&limits)));
                LimitedPod { wanted, port, limits }
            });
            self.0.insert(key.clone(), pod);
        }
        (LimitedPods::new(self.0.values().map(|pod| (pod.port, Arc::clone(&pod.limits)))), new)
    }

    pub(super) fn of(&self, pod: &ObjectKey) -> Option<&PodLimits> {
        self.0.get(pod).map(|pod| &*pod.limits)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &PodLimits)> {
        self.0.iter().map(|(key, pod)| (key, &*pod.limits))
    }
}

/// The directions in which a pod's connections are limited, with their names.
pub(super) fn limited(limits: &PodLimits) -> impl Iterator<Item = (&'static str, Direction)> {
    let directions = [("egress", Direction::Egress), ("ingress", Direction::Ingress)];
    directions.into_iter().filter(|(_, direction)| limits.limit(*direction) != Limit::default())
}

fn limit(ConnectionLimit { each_second, open }: ConnectionLimit) -> Limit {
    Limit { each_second, open }
}

/// Counts the connections that are open already against limits that are new: of before an annotation was written, or of the last
/// process.
pub(super) fn adopt(table: &ConnTable, new: &[NewLimits]) {
    let by_address: BTreeMap<Address, usize> = new
        .iter()
        .enumerate()
        .flat_map(|(n, (addresses, _))| addresses.iter().map(move |&it| (it.into(), n)))
        .collect();
    let mut found = vec![(Vec::new(), Vec::new()); new.len()];
    for (flow, name, via_host) in table.open_connections(Timestamp::now()) {
        // A packet that the node hands to another pod translated was counted when the pod sent it.
        if let Some(&source) = by_address.get(&flow.src).filter(|_| !via_host) {
            found[source].0.push(name);
        }
        if let Some(&destination) = by_address.get(&flow.dst) {
            found[destination].1.push(name);
        }
    }
    for ((_, limits), (egress, ingress)) in new.iter().zip(found) {
        limits.adopt(Direction::Egress, egress);
        limits.adopt(Direction::Ingress, ingress);
    }
}

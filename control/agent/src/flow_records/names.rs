//! Whose an address is, or was.
//!
//! A pod may be gone, and its address another's, when the record of its last connection is made. So what addresses belonged
//! to is remembered for some minutes, with the time from which it was known.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::conntrack::Timestamp;
use penstock_policy::model::Pod;
use penstock_policy::state::{ClusterState, PodOrNode};

use super::record::Identity;

/// How long an owner is remembered after it was last seen.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How often pods are read: one may have had its address for so long before it was known here.
pub(super) const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Owners of addresses, the present one and the one before it.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<IpAddr, Owners>);

#[derive(Debug)]
struct Owners {
    last: Owner,
    before: Option<Owner>,
}

#[derive(Clone, Debug)]
struct Owner {
    identity: Arc<Identity>,
    since: Timestamp,
    seen: Timestamp,
}

impl Names {
    pub(super) fn read<'p>(&mut self, pods: impl Iterator<Item = &'p Pod>, now: Timestamp) {
        for pod in pods.filter(|pod| !pod.finished && !pod.host_network) {
            for &address in &pod.addresses {
                self.remember(address, of_pod(pod), now);
            }
        }
    }

    /// Who owned an address when a connection was opened; `None` for the time of that: not known.
    pub(super) fn owner(
        &mut self,
        state: &ClusterState,
        address: IpAddr,
        opened: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Arc<Identity>> {
        if let Some(identity) = present(state, address) {
            self.remember(address, identity, now);
        }
        let Owners { last, before } = self.0.get(&address)?;
        // The owner's object may be known some time after its address.
        let known_by = opened.unwrap_or(now).plus(2 * READ_INTERVAL);
        let owner = match before {
            Some(before) if last.since > known_by => before,
            _ => last,
        };
        let had_it = owner.seen.plus(2 * READ_INTERVAL) >= opened.unwrap_or(owner.seen);
        had_it.then(|| Arc::clone(&owner.identity))
    }

    pub(super) fn forget(&mut self, now: Timestamp) {
        self.0.retain(|_, owners| owners.last.seen.plus(REMEMBERED) > now);
    }

    fn remember(&mut self, address: IpAddr, identity: Identity, now: Timestamp) {
        let owner = |identity| Owner { identity: Arc::new(identity), since: now, seen: now };
        match self.0.get_mut(&address) {
            Some(owners) if *owners.last.identity == identity => owners.last.seen = now,
            Some(owners) => owners.before = Some(std::mem::replace(&mut owners.last, owner(identity))),
            None => _ = self.0.insert(address, Owners { last: owner(identity), before: None }),
        }
    }
}

fn present(state: &ClusterState, address: IpAddr) -> Option<Identity> {
    match state.owner(&address)? {
        PodOrNode::Pod(pod) => state.pod(pod).map(of_pod),
        PodOrNode::Node(node) => state.node_name(node).map(|node| Identity {
            name: format!("node {node}"),
            namespace: None,
            pod: None,
            workload: None,
            node: Some(node.to_owned()),
        }),
    }
}

fn of_pod(pod: &Pod) -> Identity {
    Identity {
        name: pod.key.to_string(),
        namespace: Some(pod.key.namespace.clone()),
        pod: Some(pod.key.name.clone()),
        workload: pod.controller.clone(),
        node: pod.node.clone(),
    }
}

#[cfg(test)]
mod tests {
    use penstock_policy::model::ObjectKey;

    use super::*;

    fn pod(name: &str) -> Pod {
        Pod {
            key: ObjectKey { namespace: "shop".into(), name: name.into() },
            node: Some("here".into()),
            addresses: vec![[10, 0, 0, 1].into()],
            ..Pod::default()
        }
    }

    #[test]
    fn a_record_names_the_addresss_pod_at_the_opening() {
        let (mut names, state) = (Names::default(), ClusterState::default());
        let at = |seconds| Timestamp::from_millis(seconds * 1000);
        let look = |names: &mut Names, name: &str, from, to| {
            (from..=to).for_each(|second| names.read([pod(name)].iter(), at(second)));
        };
        look(&mut names, "old", 100, 200);
        look(&mut names, "new", 230, 300);
        let mut name = |opened: Option<u64>| {
            let owner = names.owner(&state, [10, 0, 0, 1].into(), opened.map(at), at(301));
            owner.and_then(|identity| identity.pod.clone())
        };
        for (opened, expected) in [
            (Some(150), Some("old")),
            (Some(200), Some("old")),
            // Its object came a second after its first packet.
            (Some(229), Some("new")),
            (Some(290), Some("new")),
            // Nobody's then, as far as is known.
            (Some(215), None),
            (None, Some("new")),
        ] {
            assert_eq!(name(opened).as_deref(), expected, "{opened:?}");
        }
    }

    #[test]
    fn owners_are_forgotten_after_a_while() {
        let (mut names, state) = (Names::default(), ClusterState::default());
        let at = |seconds| Timestamp::from_millis(seconds * 1000);
        names.read([pod("web")].iter(), at(100_u64));
        names.forget(at(699));
        assert!(names.owner(&state, [10, 0, 0, 1].into(), Some(at(100)), at(699)).is_some());
        names.forget(at(700));
        assert!(names.owner(&state, [10, 0, 0, 1].into(), Some(at(100)), at(700)).is_none());
    }
}

//! Pods whose network a CNI plugin has just made. A container runtime starts a pod's containers once the plugins have answered, and
//! the kubelet tells the API server the pod's addresses only after that. `penstock-cni` tells them to the daemon itself, and
//! answers once the pod's policy is in effect.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_policy::model::{Object, ObjectChange, ObjectKey, ObjectRef, Pod};

use super::config::SocketPath;

/// Most pods at a time whose addresses the source has not told.
const MOST: usize = 4096;
/// How long a pod is remembered of which the source tells nothing at all.
const UNKNOWN_FOR: Duration = Duration::from_secs(300);

/// Where the plugin reaches the daemon; `None` without an admin socket.
pub(super) fn path(admin: &SocketPath) -> Option<PathBuf> {
    admin.path().map(|admin| admin.with_extension("cni"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{MOST} new pods wait for the source to tell their addresses; is the API server away?")]
pub(super) struct TooManyNewPods;

/// Addresses of new pods, until the source tells them.
#[derive(Default)]
pub(super) struct NewPods(BTreeMap<ObjectKey, Announced>);

struct Announced {
    addresses: Vec<IpAddr>,
    /// The addresses that the source tells, which are older; `None` while it does not know the pod.
    instead_of: Option<Vec<IpAddr>>,
    since: Instant,
}

impl NewPods {
    /// A plugin has given these addresses to a pod; `known` is what the source tells of it. Returns the pod as it is from now on,
    /// if that differs from what was announced before.
    pub(super) fn announce(
        &mut self,
        key: &ObjectKey,
        addresses: &[IpAddr],
        known: Option<&Pod>,
        now: Instant,
    ) -> Result<Option<Pod>, TooManyNewPods> {
        if self.0.get(key).is_some_and(|announced| announced.addresses == addresses) {
            return Ok(None);
        }
        self.0.retain(|_, pod| pod.instead_of.is_some() || now.duration_since(pod.since) < UNKNOWN_FOR);
        if self.0.len() >= MOST && !self.0.contains_key(key) {
            return Err(TooManyNewPods);
        }
        let known = known.filter(|pod| may_be_new(pod));
        if known.is_some_and(|pod| tells(pod, addresses)) {
            return Ok(None);
        }
        let instead_of = match self.0.remove(key) {
            // The known object has the addresses of the announcement before.
            Some(before) => before.instead_of,
            None => known.map(|pod| pod.addresses.clone()),
        };
        self.0.insert(key.clone(), Announced { addresses: addresses.to_vec(), instead_of, since: now });
        Ok(known.map(|pod| Pod { addresses: addresses.to_vec(), ..pod.clone() }))
    }

    /// A change of the source, with the addresses that it does not know yet.
    pub(super) fn complete(&mut self, mut change: ObjectChange) -> ObjectChange {
        match &mut change {
            ObjectChange::Set(Object::Pod(pod)) if may_be_new(pod) => self.complete_pod(pod),
            // The object of a pod of the same name that was there before may go after the new pod was announced.
            ObjectChange::Delete(ObjectRef::Pod(key))
                if self.0.get(key).is_some_and(|pod| pod.instead_of.is_some()) =>
            {
                self.0.remove(key);
            }
            _ => {}
        }
        change
    }

    fn complete_pod(&mut self, pod: &mut Pod) {
        let Some(announced) = self.0.get_mut(&pod.key) else { return };
        let told = announced.instead_of.get_or_insert_with(|| pod.addresses.clone());
        // A kubelet that makes a pod's network anew may take its addresses away before it tells the new ones.
        let is_older = pod.addresses.is_empty() || *told == pod.addresses;
        if is_older && !tells(pod, &announced.addresses) {
            pod.addresses.clone_from(&announced.addresses);
        } else {
            self.0.remove(&pod.key);
        }
    }
}

/// Whether plugins may just have given this pod addresses.
fn may_be_new(pod: &Pod) -> bool {
    !pod.host_network && !pod.finished && !pod.lifetime.leaving
}

fn tells(pod: &Pod, addresses: &[IpAddr]) -> bool {
    addresses.iter().all(|address| pod.addresses.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: "web-0".into() }
    }

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn pod(told: &[&str]) -> Pod {
        Pod { key: key(), node: Some("here".into()), addresses: addresses(told), ..Pod::default() }
    }

    /// Objects that the source tells, in turn, and the addresses that the pod then has; `None`: it is deleted.
    fn completed(pods: &mut NewPods, told: Option<Pod>) -> Vec<IpAddr> {
        let change = match told {
            Some(pod) => ObjectChange::Set(Object::Pod(pod)),
            None => ObjectChange::Delete(ObjectRef::Pod(key())),
        };
        match pods.complete(change) {
            ObjectChange::Set(Object::Pod(pod)) => pod.addresses,
            _ => Vec::new(),
        }
    }

    const NEW: [&str; 2] = ["10.1.1.5", "fd00::5"];

    #[test]
    fn a_pod_has_its_networks_addresses_until_the_source_tells() {
        let now = Instant::now();
        /// The object that the source tells, and the pod's addresses then.
        type Step = (Option<Pod>, &'static [&'static str]);
        let cases: [(&str, Option<Pod>, Vec<Step>); 5] = [
            (
                "known without addresses",
                Some(pod(&[])),
                vec![(Some(pod(&[])), &NEW), (Some(pod(&NEW)), &NEW), (Some(pod(&[])), &[])],
            ),
            ("not known yet", None, vec![(None, &[]), (Some(pod(&[])), &NEW), (None, &[]), (Some(pod(&[])), &[])]),
            (
                "its network was made anew",
                Some(pod(&["10.1.1.4"])),
                vec![
                    (Some(pod(&["10.1.1.4"])), &NEW),
                    (Some(pod(&[])), &NEW),
                    (Some(pod(&["10.1.1.6"])), &["10.1.1.6"]),
                    (Some(pod(&["10.1.1.4"])), &["10.1.1.4"]),
                ],
            ),
            (
                "a pod of the same name goes",
                Some(Pod {
                    lifetime: penstock_policy::model::PodLifetime { leaving: true, ..Default::default() },
                    ..pod(&["10.1.1.4"])
                }),
                vec![(None, &[]), (Some(pod(&[])), &NEW)],
            ),
            ("it has finished", Some(pod(&[])), vec![(Some(Pod { finished: true, ..pod(&[]) }), &[])]),
        ];
        for (what, known, then) in cases {
            let mut pods = NewPods::default();
            let at_once = pods.announce(&key(), &addresses(&NEW), known.as_ref(), now).unwrap();
            let applies = known.as_ref().is_some_and(may_be_new);
            assert_eq!(at_once.map(|pod| pod.addresses), applies.then(|| addresses(&NEW)), "{what}");
            assert_eq!(pods.announce(&key(), &addresses(&NEW), known.as_ref(), now), Ok(None), "{what}: again");
            for (step, (told, expected)) in then.into_iter().enumerate() {
                assert_eq!(completed(&mut pods, told), addresses(expected), "{what}: step {step}");
            }
        }
    }

    #[test]
    fn what_the_source_tells_already_is_not_remembered() {
        let mut pods = NewPods::default();
        assert_eq!(pods.announce(&key(), &addresses(&NEW), Some(&pod(&NEW)), Instant::now()), Ok(None));
        assert_eq!(completed(&mut pods, Some(pod(&["10.1.1.7"]))), addresses(&["10.1.1.7"]));
        assert_eq!(completed(&mut pods, Some(pod(&[]))), addresses(&[]));
    }

    #[test]
    fn pods_that_nobody_knows_take_bounded_room() {
        let (mut pods, now) = (NewPods::default(), Instant::now());
        let of = |number: usize| ObjectKey { namespace: "shop".into(), name: format!("web-{number}") };
        for number in 0..MOST {
            pods.announce(&of(number), &addresses(&NEW), None, now).unwrap();
        }
        assert_eq!(pods.announce(&of(MOST), &addresses(&NEW), None, now), Err(TooManyNewPods));
        assert_eq!(
            pods.announce(&of(0), &addresses(&["10.1.1.9"]), None, now),
            Ok(None),
            "one that is known may change"
        );
        assert_eq!(pods.announce(&of(MOST), &addresses(&NEW), None, now + UNKNOWN_FOR), Ok(None));
        assert_eq!(pods.0.len(), 1, "the others are forgotten");
    }
}

//! Names the pods on which policy is not enforced, and why. Every pod of this node is served or closed, or it is named here.

use std::collections::BTreeSet;

use penstock_policy::model::{ObjectKey, Pod};

use crate::discovery::{Bindings, NetworkState, PodProblem};

/// Something that policy is about and that is not enforced.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct NotEnforced {
    /// The pod; `None` if it is about the node.
    pub(crate) pod: Option<ObjectKey>,
    /// The reason with its remedy.
    pub(crate) reason: String,
}

/// The evidence by which [`of_pods`] decides.
pub(crate) struct PodCoverage<'a> {
    pub(crate) bindings: &'a Bindings,
    /// Problems that last, or cannot pass by themselves.
    pub(crate) lasting: Vec<&'a PodProblem>,
    /// Whether a pod is served.
    pub(crate) is_served: &'a dyn Fn(&ObjectKey) -> bool,
    /// Whether an interface drops what no worker has seen.
    pub(crate) is_closed: &'a dyn Fn(u32) -> bool,
    /// Whether a bridge may have pods' ports, by its index.
    pub(crate) is_pod_bridge: &'a dyn Fn(u32) -> bool,
    pub(crate) netstate: &'a NetworkState,
}

impl PodCoverage<'_> {
    /// Whether a pod without an interface is behind a bridge whose ports of nobody are all closed.
    fn is_hidden_and_closed(&self, pod: &Pod) -> bool {
        let bridge = self.bindings.bridge_of_hidden(self.netstate, pod);
        bridge.is_some_and(|bridge| {
            (self.is_pod_bridge)(bridge) && self.bindings.unowned_ports(self.netstate, bridge).all(self.is_closed)
        })
    }
}

/// The pods under policy, of those that have a network of their own here, that are neither served nor closed.
pub(crate) fn of_pods<'a>(
    under_policy: impl IntoIterator<Item = &'a Pod>,
    coverage: &PodCoverage<'_>,
) -> BTreeSet<NotEnforced> {
    let mut found = BTreeSet::new();
    for pod in under_policy.into_iter().filter(|pod| !pod.lifetime.leaving) {
        let mut add = |problem: &PodProblem| {
            found.insert(NotEnforced { pod: Some(pod.key.clone()), reason: problem.to_string() });
        };
        let mut links = coverage.bindings.links_of(&pod.key).peekable();
        let is_closed = links.peek().is_some() && links.all(coverage.is_closed);
        let is_covered = (coverage.is_served)(&pod.key) || is_closed || coverage.is_hidden_and_closed(pod);
        for problem in coverage.lasting.iter().filter(|problem| problem.pods().any(|of| *of == pod.key)) {
            match problem {
                PodProblem::Claimed { .. } | PodProblem::MacTaken { .. } => {}
                PodProblem::AnotherVeth { index, .. } if (coverage.is_closed)(*index) => {}
                PodProblem::OtherInterfaces { .. } | PodProblem::AnotherVeth { .. } => add(problem),
                _ if is_covered => {}
                _ => add(problem),
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::{HostRoute, Link, NetworkState};

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    fn pod(name: &str, address: &str) -> Pod {
        Pod {
            key: key(name),
            labels: Default::default(),
            node: Some("here".into()),
            addresses: vec![address.parse().unwrap()],
            host_network: false,
            finished: false,
            ports: Vec::new(),
            lifetime: Default::default(),
            controller: None,
            other_interfaces: Vec::new(),
            limits: Default::default(),
        }
    }

    #[test]
    fn a_pod_under_policy_is_served_or_closed_or_named() {
        let pods =
            [pod("served", "10.1.1.1"), pod("closed", "10.1.1.2"), pod("open", "10.1.1.3"), pod("none", "10.1.1.4")];
        let routes = (1..=3).map(|link| HostRoute { destination: format!("10.1.1.{link}").parse().unwrap(), link });
        let links = (1..=3).map(|index| (index, Link::veth(index, &format!("veth{index}"))));
        let netstate = NetworkState { links: links.collect(), routes: routes.collect(), ..NetworkState::default() };
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &netstate, &pods);
        let long = |pod: &str| PodProblem::TooLong { pod: key(pod), link: "veth".into(), mtu: 9000, largest: 1778 };
        let problems = [
            long("served"),
            long("closed"),
            long("open"),
            PodProblem::NoRoute { pod: key("none"), addresses: "10.1.1.4".into() },
            PodProblem::OtherInterfaces { pod: key("served"), interfaces: "net1".into() },
            PodProblem::AnotherVeth { pod: key("closed"), index: 2, link: "veth2".into() },
            PodProblem::AnotherVeth { pod: key("closed"), index: 8, link: "veth8".into() },
            PodProblem::Claimed { pod: key("served"), address: [10, 1, 1, 1].into(), link: "veth9".into() },
        ];
        let (is_served, is_closed) = (|pod: &ObjectKey| pod.name == "served", |link: u32| link == 2);
        let coverage = PodCoverage {
            bindings: &bindings,
            lasting: problems.iter().collect(),
            is_served: &is_served,
            is_closed: &is_closed,
            is_pod_bridge: &|_| true,
            netstate: &netstate,
        };
        let named = |pods: &[Pod]| -> Vec<String> {
            let found = of_pods(pods, &coverage);
            found.into_iter().map(|one| format!("{} {}", one.pod.unwrap().name, one.reason)).collect()
        };
        let found = named(&pods);
        let expected = [
            "closed pod shop/closed: policy is not enforced on veth8",
            "none pod shop/none: no host route",
            "open pod shop/open: MTU 9000",
            "served pod shop/served: policy is not enforced on its other interfaces (net1)",
        ];
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
        // Nobody waits for a pod that is about to go.
        let mut leaving = pods.clone();
        leaving.iter_mut().for_each(|pod| pod.lifetime.leaving = true);
        assert!(named(&leaving).is_empty() && named(&[]).is_empty());
    }

    #[test]
    fn a_pod_without_an_interface_is_covered_where_its_bridge_has_no_open_port_of_nobody() {
        let on = |index: u32, master| Link { master, ..Link::veth(index, &format!("veth{index}")) };
        let bridge = Link { bridge: true, veth: false, ..Link::veth(1, "cni0") };
        let foreign = Link { peer_namespace: None, ..on(5, Some(1)) };
        let links = [bridge, on(2, Some(1)), on(3, Some(1)), on(4, None), foreign];
        let netstate = NetworkState {
            links: links.into_iter().map(|link| (link.index, link)).collect(),
            bridged: vec![HostRoute { destination: [10, 1, 1, 2].into(), link: 2 }],
            networks: vec![("10.1.1.0/24".parse().unwrap(), 1)],
            ..NetworkState::default()
        };
        let (hidden, elsewhere) = (pod("hidden", "10.1.1.9"), pod("elsewhere", "10.9.9.9"));
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &netstate, &[pod("known", "10.1.1.2"), hidden.clone(), elsewhere.clone()]);
        let no_route = |pod: &Pod| PodProblem::NoRoute { pod: pod.key.clone(), addresses: String::new() };
        let problems = [no_route(&hidden), no_route(&elsewhere)];
        for (what, closed, is_pod_bridge, expected) in [
            ("the port of nobody is closed", 3, true, &["elsewhere"][..]),
            ("it is open", 9, true, &["elsewhere", "hidden"]),
            ("a bridge that has no pods by the configuration", 3, false, &["elsewhere", "hidden"]),
        ] {
            let coverage = PodCoverage {
                bindings: &bindings,
                lasting: problems.iter().collect(),
                is_served: &|_| false,
                is_closed: &|link| link == closed,
                is_pod_bridge: &|_| is_pod_bridge,
                netstate: &netstate,
            };
            let found = of_pods(&[hidden.clone(), elsewhere.clone()], &coverage);
            let found: Vec<&str> = found.iter().map(|one| &*one.pod.as_ref().unwrap().name).collect();
            assert_eq!(found, expected, "{what}");
        }
    }
}

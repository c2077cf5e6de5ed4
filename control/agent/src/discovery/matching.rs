//! Matches pods to interfaces: from network state and pods to the ports that should exist.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_dataplane::forward::Mac;
use penstock_policy::model::{ObjectKey, Pod};

use super::bindings::Bindings;
use super::network_state::{Link, NetworkState, Shaping};
use super::pod_problem::PodProblem;

/// A pod and the interface that leads to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodPort {
    /// Index of the veth's host side.
    pub link: u32,
    /// Name of the veth's host side.
    pub name: String,
    /// Ethernet address of the host side.
    pub own_mac: Mac,
    /// Ethernet address of the pod's side.
    pub peer_mac: Mac,
    /// MTU of the host side, in bytes.
    pub mtu: u32,
    /// Queueing disciplines and filters that others have set on the host side.
    pub shaping: Shaping,
    /// Name of the host side's bridge, if it has one.
    pub bridge: Option<String>,
    /// Index of the interface by which its packets enter the node's stack: the host side, or its bridge.
    pub enters_by: u32,
    pub pod: ObjectKey,
    pub addresses: BTreeSet<IpAddr>,
}

/// The ports of the node's pods, by interface index, and the problems of pods without one.
///
/// `pods` are all pods, each with only the addresses that it owns. Pods of `node` with an address get a port, unless
/// they use the host network or have finished. `bindings` are up to date with them.
pub fn pod_ports<'a>(
    netstate: &NetworkState,
    bindings: &Bindings,
    pods: impl IntoIterator<Item = &'a Pod>,
    limits: PortLimits<'_>,
) -> (BTreeMap<u32, PodPort>, BTreeSet<PodProblem>) {
    let mut problems = bindings.claims().clone();
    let mut ports: BTreeMap<u32, PodPort> = BTreeMap::new();
    let mut contested = BTreeSet::new();
    let mut local: Vec<&Pod> = pods.into_iter().filter(|pod| has_network_on(pod, limits.node)).collect();
    local.sort_by(|a, b| a.key.cmp(&b.key));
    for pod in local {
        let others = bindings.others(pod);
        if !others.is_empty() {
            problems.insert(PodProblem::OtherInterfaces { pod: pod.key.clone(), interfaces: others.join(", ") });
        }
        let beside = bindings.beside().iter().filter(|(_, of)| **of == pod.key);
        problems.extend(beside.filter_map(|(&index, _)| {
            let link = netstate.links.get(&index)?.name.clone();
            Some(PodProblem::AnotherVeth { pod: pod.key.clone(), index, link })
        }));
        let port = match pod_port(netstate, bindings, pod) {
            Ok(port) => port,
            Err(problem) => {
                problems.insert(problem);
                continue;
            }
        };
        if let Some(other) = ports.get(&port.link) {
            let (first, second) = (other.pod.clone(), port.pod);
            contested.insert(port.link);
            problems.insert(PodProblem::TwoPods { first, second, link: port.name });
        } else {
            if port.mtu > limits.largest {
                let (pod, link, mtu) = (port.pod.clone(), port.name.clone(), port.mtu);
                problems.insert(PodProblem::TooLong { pod, link, mtu, largest: limits.largest });
            }
            ports.insert(port.link, port);
        }
    }
    ports.retain(|link, _| !contested.contains(link));
    (ports, problems)
}

#[derive(Clone, Copy, Debug)]
pub struct PortLimits<'a> {
    pub node: &'a str,
    /// The longest IP packet that a frame holds, in bytes.
    pub largest: u32,
}

/// Whether a pod has a network of its own on this node.
pub fn has_network_on(pod: &Pod, node: &str) -> bool {
    pod.node.as_deref() == Some(node) && !pod.host_network && !pod.finished && !pod.addresses.is_empty()
}

fn pod_port(netstate: &NetworkState, bindings: &Bindings, pod: &Pod) -> Result<PodPort, PodProblem> {
    let mut found: Option<&Link> = None;
    // A route outlives its link for a moment.
    for link in bindings.links_of(&pod.key).filter_map(|index| netstate.links.get(&index)) {
        if !link.veth {
            let address = pod.addresses.first().copied().unwrap_or(IpAddr::V4([0; 4].into()));
            return Err(PodProblem::NotVeth { pod: pod.key.clone(), address, link: link.name.clone() });
        }
        if let Some(first) = found {
            let (first, second) = (first.name.clone(), link.name.clone());
            return Err(PodProblem::TwoLinks { pod: pod.key.clone(), first, second });
        }
        found = Some(link);
    }
    let Some(link) = found else {
        let addresses: Vec<String> = pod.addresses.iter().map(IpAddr::to_string).collect();
        return Err(PodProblem::NoRoute { pod: pod.key.clone(), addresses: addresses.join(", ") });
    };
    let (pod_key, name) = (pod.key.clone(), link.name.clone());
    if !link.up {
        return Err(PodProblem::Down { pod: pod_key, link: name });
    }
    let Some(peer_mac) = bindings.mac(link.index) else { return Err(PodProblem::NoMac { pod: pod_key, link: name }) };
    let addresses = pod.addresses.iter().copied().collect();
    let master = netstate.master_of(link);
    let (enters_by, bridge) = (master.unwrap_or(link).index, master.map(|bridge| bridge.name.clone()));
    let Link { mac: own_mac, mtu, shaping, .. } = *link;
    Ok(PodPort { link: link.index, name, own_mac, peer_mac, mtu, shaping, bridge, enters_by, pod: pod_key, addresses })
}

#[cfg(test)]
mod tests {
    use super::super::network_state::HostRoute;
    use super::*;

    fn link(index: u32) -> Link {
        Link::veth(index, &format!("veth{index}"))
    }

    fn netstate(links: impl IntoIterator<Item = Link>, routes: &[(&str, u32)]) -> NetworkState {
        let route = |&(to, link): &(&str, u32)| HostRoute { destination: to.parse().unwrap(), link };
        NetworkState {
            links: links.into_iter().map(|link| (link.index, link)).collect(),
            routes: routes.iter().map(route).collect(),
            ..NetworkState::default()
        }
    }

    fn pod(name: &str, addresses: &[&str]) -> Pod {
        Pod {
            key: ObjectKey { namespace: "shop".into(), name: name.into() },
            node: Some("here".into()),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            ..Pod::default()
        }
    }

    const LIMITS: PortLimits<'static> = PortLimits { node: "here", largest: 1778 };

    fn ports_of(
        netstate: &NetworkState,
        pods: &[Pod],
        limits: PortLimits<'_>,
    ) -> (BTreeMap<u32, PodPort>, BTreeSet<PodProblem>) {
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), netstate, pods.iter().filter(|pod| has_network_on(pod, "here")));
        pod_ports(netstate, &bindings, pods, limits)
    }

    /// Interface and pod of each port, and the problems' messages.
    fn matched(netstate: &NetworkState, pods: &[Pod]) -> (Vec<(u32, String)>, Vec<String>) {
        let (ports, problems) = ports_of(netstate, pods, LIMITS);
        (
            ports.into_iter().map(|(link, port)| (link, port.pod.name)).collect(),
            problems.into_iter().map(|problem| problem.to_string()).collect(),
        )
    }

    #[test]
    fn a_pod_with_packets_longer_than_a_frame_is_served_and_named() {
        let long = Link { mtu: 9000, ..link(7) };
        let (ports, problems) = matched(&netstate([long], &[("10.1.1.5", 7)]), &[pod("a", &["10.1.1.5"])]);
        assert_eq!(ports, [(7, "a".to_owned())]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("pod shop/a: MTU 9000 of veth7 is more than the 1778 that"), "{problems:?}");
    }

    #[test]
    fn a_pod_is_matched_by_the_route_to_any_of_its_addresses() {
        for routes in
            [&[("10.1.1.5", 7)][..], &[("fd00::5", 7)][..], &[("10.1.1.5", 7), ("fd00::5", 7), ("10.1.1.6", 8)][..]]
        {
            let (ports, problems) =
                ports_of(&netstate([link(7), link(8)], routes), &[pod("a", &["10.1.1.5", "fd00::5"])], LIMITS);
            assert!(problems.is_empty(), "{problems:?}");
            assert_eq!(ports.keys().copied().collect::<Vec<_>>(), [7]);
            let port = &ports[&7];
            assert_eq!((port.name.as_str(), port.mtu), ("veth7", 1500));
            assert_eq!((port.own_mac, port.peer_mac), (Mac([2, 0, 0, 0, 0, 7]), Mac([2, 0, 0, 0, 1, 7])));
            assert_eq!(port.addresses.len(), 2, "both addresses are the pod's, whichever route is there");
        }
    }

    #[test]
    fn a_bridged_pod_matches_by_neighbour_without_a_host_route() {
        let bridge = Link { veth: false, bridge: true, name: "cni0".into(), ..link(3) };
        let port = |index| Link { master: Some(3), ..link(index) };
        let bridged = vec![HostRoute { destination: "10.1.1.5".parse().unwrap(), link: 7 }];
        let on_bridge = NetworkState { bridged, ..netstate([bridge, port(7), port(8)], &[]) };
        let (ports, problems) = ports_of(&on_bridge, &[pod("a", &["10.1.1.5"])], LIMITS);
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(ports[&7].bridge.as_deref(), Some("cni0"));
        let routes = vec![HostRoute { destination: "10.1.1.5".parse().unwrap(), link: 8 }];
        let routed = NetworkState { routes, ..on_bridge };
        assert_eq!(matched(&routed, &[pod("a", &["10.1.1.5"])]), (vec![(8, "a".into())], vec![]));
    }

    #[test]
    fn another_tables_route_counts() {
        let routes = vec![HostRoute { destination: "10.1.1.5".parse().unwrap(), link: 7 }];
        let by_rules = NetworkState { other_routes: routes, ..netstate([link(7)], &[]) };
        let pods = [pod("a", &["10.1.1.5"])];
        assert_eq!(matched(&by_rules, &pods), (vec![(7, "a".into())], vec![]));
    }

    #[test]
    fn pods_not_served_here_get_no_port_and_no_problem() {
        let netstate = netstate([link(7)], &[("10.1.1.5", 7)]);
        let elsewhere = Pod { node: Some("there".into()), ..pod("a", &["10.1.1.5"]) };
        let unscheduled = Pod { node: None, ..pod("a", &["10.1.1.5"]) };
        let host_network = Pod { host_network: true, ..pod("a", &["10.1.1.5"]) };
        let finished = Pod { finished: true, ..pod("a", &["10.1.1.5"]) };
        for pod in [elsewhere, unscheduled, host_network, finished.clone(), pod("a", &[])] {
            assert_eq!(matched(&netstate, &[pod]), (vec![], vec![]));
        }
        // Another pod may have a finished pod's address already.
        assert_eq!(matched(&netstate, &[finished, pod("b", &["10.1.1.5"])]), (vec![(7, "b".into())], vec![]));
    }

    #[test]
    fn each_problem_is_reported_and_other_pods_are_served() {
        let not_veth = Link { veth: false, ..link(7) };
        let down = Link { up: false, ..link(7) };
        let unknown_mac = Link { peer_mac: None, ..link(7) };
        let a = pod("a", &["10.1.1.5", "fd00::5"]);
        let cases = [
            (link(7), vec![], vec![a.clone()], "pod shop/a: no host route to 10.1.1.5, fd00::5;"),
            (link(7), vec![("10.1.1.5", 9)], vec![a.clone()], "pod shop/a: no host route to 10.1.1.5, fd00::5;"),
            (
                not_veth,
                vec![("10.1.1.5", 7)],
                vec![a.clone()],
                "pod shop/a: the route to 10.1.1.5 leads to veth7, which is not a veth;",
            ),
            (
                link(7),
                vec![("10.1.1.5", 7), ("fd00::5", 8)],
                vec![a.clone()],
                "pod shop/a: its addresses are behind veth7 and veth8;",
            ),
            (down, vec![("10.1.1.5", 7)], vec![a.clone()], "pod shop/a: veth7 is down; set it up"),
            (
                unknown_mac,
                vec![("10.1.1.5", 7)],
                vec![a.clone()],
                "pod shop/a: the Ethernet address behind veth7 is not known",
            ),
            (
                link(7),
                vec![("10.1.1.5", 7), ("10.1.1.6", 7)],
                vec![a.clone(), pod("b", &["10.1.1.6"])],
                "pods shop/a and shop/b: both are behind veth7;",
            ),
        ];
        for (seven, routes, mut pods, expected) in cases {
            let routes: Vec<_> = routes.into_iter().chain([("10.9.9.9", 20)]).collect();
            pods.push(pod("z", &["10.9.9.9"]));
            let (ports, problems) = matched(&netstate([seven, link(8), link(20)], &routes), &pods);
            assert_eq!(ports, [(20, "z".to_owned())], "{expected}");
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with(expected), "{}", problems[0]);
        }
    }
}

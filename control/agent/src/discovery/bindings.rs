//! Which interface is a pod's, by what no pod can change.
//!
//! In this order: results of the CNI plugins ([`CniResult`]), what `penstock-cni` was given when the pod's network was made, and
//! routes to single addresses, which plugins set. A pod chooses its MAC address and what it says in ARP and neighbour discovery.
//! So the neighbours of a bridge count only where nothing else is known, and only once: the first interface that they name for a pod
//! stays the pod's, and the pod the interface's, as long as the interface exists. What they say later changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_dataplane::forward::Mac;
use penstock_policy::model::{ObjectKey, Pod};
use serde::{Deserialize, Serialize};

use super::cni_results::CniResult;
use super::network_state::{Link, NetworkState};
use super::pod_problem::PodProblem;

/// Most pods whose interfaces `penstock-cni` has told and no other source knows yet.
const MOST_TOLD: usize = 4096;

/// The interface of a bridge that neighbours named first for a pod.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FirstBinding {
    pub index: u32,
    pub interface: String,
    pub pod: ObjectKey,
}

/// Knowledge of pods' interfaces that the network's present state does not show.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    results: Vec<CniResult>,
    /// Names of interfaces, as `penstock-cni` told them.
    told: BTreeMap<ObjectKey, Vec<String>>,
    first: BTreeMap<u32, FirstBinding>,
    /// Present interfaces of pods.
    links: BTreeMap<ObjectKey, BTreeSet<u32>>,
    /// MAC addresses of pods by interface. On a bridge no two have the same: the first to have it keeps it.
    macs: BTreeMap<u32, Mac>,
    claims: BTreeSet<PodProblem>,
    /// Veths that lead to a pod beside its interface, and that no result names.
    beside: BTreeMap<u32, ObjectKey>,
    /// Results name an interface of one of these pods, and no pod is without one.
    are_results_complete: bool,
    /// A pod of this node has no address yet.
    is_pod_awaited: bool,
}

impl Bindings {
    /// With the bindings that neighbours made for an earlier process on this boot.
    pub fn of_earlier(first: Vec<FirstBinding>) -> Self {
        Self { first: first.into_iter().map(|binding| (binding.index, binding)).collect(), ..Self::default() }
    }

    pub fn first(&self) -> impl Iterator<Item = &FirstBinding> {
        self.first.values()
    }

    /// `penstock-cni` was given these interfaces of a pod, whose network has just been made. Returns whether that is news.
    pub fn told(&mut self, pod: &ObjectKey, interfaces: Vec<String>) -> bool {
        let is_known = self.told.get(pod).is_some_and(|known| *known == interfaces);
        if is_known || interfaces.is_empty() || (self.told.len() >= MOST_TOLD && !self.told.contains_key(pod)) {
            return false;
        }
        self.told.insert(pod.clone(), interfaces);
        true
    }

    /// Follows the results, the network and the pods of this node that run.
    pub fn update<'a>(
        &mut self,
        results: Vec<CniResult>,
        netstate: &NetworkState,
        pods: impl IntoIterator<Item = &'a Pod>,
    ) {
        self.results = results;
        self.claims.clear();
        let exists = |index: u32, name: &str| netstate.links.get(&index).is_some_and(|link| link.name == name);
        self.first.retain(|&index, binding| exists(index, &binding.interface));
        // The pod's interface is made before it is told.
        self.told.retain(|_, interfaces| interfaces.iter().any(|name| netstate.link(name).is_some()));
        let pods: Vec<&Pod> = pods.into_iter().collect();
        let routed = netstate.routed();
        let mut links: BTreeMap<ObjectKey, BTreeSet<u32>> = BTreeMap::new();
        let mut others = Vec::new();
        for &pod in &pods {
            let sure = self.sure(netstate, &routed, pod);
            match sure.is_empty() {
                true => others.push(pod),
                false => drop(links.insert(pod.key.clone(), sure)),
            }
        }
        let taken: BTreeMap<u32, ObjectKey> =
            links.iter().flat_map(|(pod, links)| links.iter().map(|&link| (link, pod.clone()))).collect();
        self.links = links;
        self.follow_neighbours(netstate, &taken, &others);
        self.follow_macs(netstate);
        self.beside = self.find_beside(netstate);
        let is_named = |pod: &&Pod| !self.by_results(netstate, pod).is_empty();
        self.are_results_complete =
            pods.iter().any(is_named) && pods.iter().all(|pod| self.links_of(&pod.key).next().is_some());
    }

    /// Whether a pod of this node has no address yet: its plugins may be making an interface.
    pub fn note_awaited(&mut self, is_pod_awaited: bool) {
        self.is_pod_awaited = is_pod_awaited;
    }

    /// Veths that no source names, and that lead to where a pod's interface leads: the kernel knows the network namespace of a veth's
    /// other end.
    fn find_beside(&self, netstate: &NetworkState) -> BTreeMap<u32, ObjectKey> {
        let namespace = |index: &u32| netstate.links.get(index)?.peer_namespace;
        let of_namespaces: BTreeMap<i32, &ObjectKey> = (self.links.iter())
            .flat_map(|(pod, links)| links.iter().filter_map(namespace).map(move |namespace| (namespace, pod)))
            .collect();
        let (bound, named) = (self.links.values().flatten().collect::<BTreeSet<_>>(), self.named());
        let unnamed =
            netstate.links.values().filter(|link| !bound.contains(&link.index) && !named.contains(&link.name));
        let leads_to = |namespace: i32| of_namespaces.get(&namespace).map(|&pod| pod.clone());
        unnamed.filter_map(|link| Some((link.index, link.peer_namespace.and_then(leads_to)?))).collect()
    }

    /// A pod's interfaces by results, by what was told, or by routes.
    fn sure(&self, netstate: &NetworkState, routed: &BTreeMap<IpAddr, u32>, pod: &Pod) -> BTreeSet<u32> {
        let by_results = self.by_results(netstate, pod);
        if !by_results.is_empty() {
            return by_results;
        }
        let told: BTreeSet<u32> =
            self.told.get(&pod.key).into_iter().flat_map(|names| veths(netstate, names)).collect();
        if !told.is_empty() {
            return told;
        }
        pod.addresses.iter().filter_map(|address| routed.get(address)).copied().collect()
    }

    fn by_results(&self, netstate: &NetworkState, pod: &Pod) -> BTreeSet<u32> {
        let of_pod = self.results.iter().filter(|result| result.pod == pod.key);
        let of_addresses =
            of_pod.filter(|result| pod.addresses.iter().any(|address| result.addresses.contains(address)));
        of_addresses.flat_map(|result| veths(netstate, &result.on_node)).collect()
    }

    fn follow_neighbours(&mut self, netstate: &NetworkState, taken: &BTreeMap<u32, ObjectKey>, pods: &[&Pod]) {
        let mut found: BTreeMap<ObjectKey, BTreeSet<u32>> = BTreeMap::new();
        for pod in pods {
            let own: BTreeSet<u32> =
                self.first.values().filter(|binding| binding.pod == pod.key).map(|binding| binding.index).collect();
            for neighbour in netstate.bridged.iter().filter(|entry| pod.addresses.contains(&entry.destination)) {
                let holder = taken.get(&neighbour.link).or(self.first.get(&neighbour.link).map(|first| &first.pod));
                let is_free = holder.is_none_or(|holder| *holder == pod.key);
                if is_free && (own.is_empty() || own.contains(&neighbour.link)) {
                    found.entry(pod.key.clone()).or_default().insert(neighbour.link);
                } else {
                    let interface = |index: &u32| netstate.links.get(index).map(|link| link.name.clone());
                    self.claims.insert(PodProblem::Claimed {
                        pod: pod.key.clone(),
                        address: neighbour.destination,
                        link: interface(&neighbour.link).unwrap_or_default(),
                    });
                }
            }
            if !own.is_empty() {
                found.insert(pod.key.clone(), own);
            }
        }
        let mut claimed: BTreeMap<u32, usize> = BTreeMap::new();
        found.values().flatten().for_each(|&link| *claimed.entry(link).or_default() += 1);
        for (pod, links) in found {
            // Two pods behind one interface, or one behind two: nobody knows which.
            if let (1, Some(&index)) = (links.len(), links.first())
                && claimed.get(&index) == Some(&1)
                && let Some(link) = netstate.links.get(&index)
            {
                let (interface, pod) = (link.name.clone(), pod.clone());
                self.first.entry(index).or_insert(FirstBinding { index, interface, pod });
            }
            self.links.insert(pod, links);
        }
    }

    fn follow_macs(&mut self, netstate: &NetworkState) {
        let bound: BTreeSet<u32> = self.links.values().flatten().copied().collect();
        self.macs.retain(|index, _| bound.contains(index));
        let of = |index: &u32| netstate.links.get(index);
        // Those that stay as they are first.
        let is_new = |index: &u32| of(index).and_then(|link| link.peer_mac) != self.macs.get(index).copied();
        let (changed, same): (Vec<u32>, Vec<u32>) = bound.iter().partition(|index| is_new(index));
        let mut used: BTreeSet<(u32, [u8; 6])> =
            same.iter().filter_map(|index| Some((of(index)?.master?, self.macs.get(index)?.0))).collect();
        for index in changed {
            let Some(link) = of(&index) else { continue };
            let Some(mac) = link.peer_mac else { continue };
            let is_free = link.master.is_none_or(|bridge| used.insert((bridge, mac.0)));
            if is_free {
                self.macs.insert(index, mac);
            } else if let Some((pod, _)) = self.links.iter().find(|(_, links)| links.contains(&index)) {
                let (pod, link, mac) = (pod.clone(), link.name.clone(), mac.to_string());
                self.claims.insert(PodProblem::MacTaken { pod, link, mac });
            }
        }
    }

    pub fn links_of(&self, pod: &ObjectKey) -> impl Iterator<Item = u32> {
        self.links.get(pod).into_iter().flatten().copied()
    }

    /// The MAC address of the pod behind an interface.
    pub(super) fn mac(&self, link: u32) -> Option<Mac> {
        self.macs.get(&link).copied()
    }

    /// Veths that lead to a pod beside its interface, and that no result names.
    pub(super) fn beside(&self) -> &BTreeMap<u32, ObjectKey> {
        &self.beside
    }

    /// Whether this veth is no pod's: all pods of this node have their interfaces, plugins keep results, these have neither its name nor an
    /// address that is routed to it, and it leads to no pod's network namespace.
    pub fn is_no_pods(&self, netstate: &NetworkState, link: &Link) -> bool {
        let routes = netstate.routes.iter().chain(&netstate.other_routes);
        let mut routed = routes.filter(|route| route.link == link.index).map(|route| route.destination);
        self.are_results_complete
            && !self.is_pod_awaited
            && !self.named().contains(&link.name)
            && !self.beside.contains_key(&link.index)
            && !self.links.values().any(|links| links.contains(&link.index))
            && !routed.any(|address| self.results.iter().any(|result| result.addresses.contains(&address)))
    }

    /// The bridge of a pod that has no interface: by its address it is a port of this one.
    pub fn bridge_of_hidden(&self, netstate: &NetworkState, pod: &Pod) -> Option<u32> {
        let bridge = pod.addresses.iter().find_map(|&address| netstate.bridge_of(address))?;
        self.links_of(&pod.key).next().is_none().then_some(bridge)
    }

    /// The ports of a bridge that lead to another network namespace and belong to no pod.
    pub fn unowned_ports<'a>(&'a self, netstate: &'a NetworkState, bridge: u32) -> impl Iterator<Item = u32> + 'a {
        let is_owned = |index| self.links.values().any(|links| links.contains(&index));
        let ports = netstate.links.values().filter(move |link| link.master == Some(bridge));
        let ports = ports.filter(|link| link.veth && link.peer_namespace.is_some()).map(|link| link.index);
        ports.filter(move |&index| !is_owned(index))
    }

    /// False claims of neighbours or MAC addresses.
    pub fn claims(&self) -> &BTreeSet<PodProblem> {
        &self.claims
    }

    /// Names of the interfaces that plugins have made on the node for pods: veths, and what is not a pod's alone.
    pub fn named(&self) -> BTreeSet<String> {
        let by_results = self.results.iter().flat_map(|result| &result.on_node);
        by_results.chain(self.told.values().flatten()).cloned().collect()
    }

    /// Interfaces of a pod beside the one that has its addresses, by the results, otherwise by what its object notes.
    pub(super) fn others(&self, pod: &Pod) -> Vec<String> {
        let of_pod = || self.results.iter().filter(|result| result.pod == pod.key && result.inside != "lo");
        let is_main = |result: &&CniResult| pod.addresses.iter().any(|address| result.addresses.contains(address));
        let Some(main) = of_pod().find(is_main) else { return pod.other_interfaces.clone() };
        let others = of_pod().filter(|result| result.sandbox == main.sandbox && result.inside != main.inside);
        let others: Vec<String> = others.map(|result| result.inside.clone()).collect();
        if others.is_empty() { pod.other_interfaces.clone() } else { others }
    }
}

fn veths(netstate: &NetworkState, names: &[String]) -> Vec<u32> {
    let found = names.iter().filter_map(|name| netstate.link(name));
    found.filter(|link| link.veth).map(|link| link.index).collect()
}

#[cfg(test)]
mod tests {
    use super::super::network_state::HostRoute;
    use super::*;

    const BRIDGE: u32 = 3;

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    fn pod(name: &str, address: &str) -> Pod {
        Pod { key: key(name), node: Some("here".into()), addresses: vec![address.parse().unwrap()], ..Pod::default() }
    }

    /// Ports of a bridge, and the address of the neighbour behind each.
    fn bridged(neighbours: &[(u32, &str)]) -> NetworkState {
        let ports =
            [7, 8, 9].map(|index| (index, Link { master: Some(BRIDGE), ..Link::veth(index, &format!("veth{index}")) }));
        let bridge = Link { veth: false, bridge: true, ..Link::veth(BRIDGE, "cni0") };
        let bridged =
            neighbours.iter().map(|&(link, to)| HostRoute { destination: to.parse().unwrap(), link }).collect();
        NetworkState {
            links: ports.into_iter().chain([(BRIDGE, bridge)]).collect(),
            bridged,
            ..NetworkState::default()
        }
    }

    fn links(bindings: &Bindings, pod: &str) -> Vec<u32> {
        bindings.links_of(&key(pod)).collect()
    }

    fn result(pod: &str, inside: &str, veth: &str, address: &str) -> CniResult {
        CniResult {
            pod: key(pod),
            sandbox: "c1".into(),
            inside: inside.into(),
            on_node: vec!["cni0".into(), veth.into()],
            addresses: BTreeSet::from([address.parse().unwrap()]),
        }
    }

    #[test]
    fn the_first_interface_that_neighbours_name_stays_the_pods() {
        let pods = [pod("victim", "10.1.1.5"), pod("evil", "10.1.1.6")];
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &bridged(&[(7, "10.1.1.5"), (8, "10.1.1.6")]), &pods);
        assert_eq!(
            (links(&bindings, "victim"), links(&bindings, "evil"), bindings.claims().len()),
            (vec![7], vec![8], 0)
        );
        // The other's address behind its own interface; behind a new one; and nobody answers any more.
        let later = [bridged(&[(8, "10.1.1.5"), (8, "10.1.1.6")]), bridged(&[(9, "10.1.1.5")]), bridged(&[])];
        for (netstate, claims) in later.iter().zip([1, 1, 0]) {
            bindings.update(Vec::new(), netstate, &pods);
            assert_eq!((links(&bindings, "victim"), links(&bindings, "evil")), (vec![7], vec![8]));
            assert_eq!(bindings.claims().len(), claims);
        }
        // Also by the next process.
        let mut next = Bindings::of_earlier(bindings.first().cloned().collect());
        next.update(Vec::new(), &bridged(&[(8, "10.1.1.5")]), &pods);
        assert_eq!((links(&next, "victim"), links(&next, "evil")), (vec![7], vec![8]));
    }

    #[test]
    fn an_interface_stays_its_pods_until_it_is_gone() {
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &bridged(&[(7, "10.1.1.5")]), &[pod("gone", "10.1.1.5")]);
        let silent = [pod("silent", "10.1.1.6")];
        bindings.update(Vec::new(), &bridged(&[(7, "10.1.1.6")]), &silent);
        assert!(links(&bindings, "silent").is_empty() && bindings.claims().len() == 1);
        let mut without = bridged(&[]);
        without.links.remove(&7);
        bindings.update(Vec::new(), &without, &silent);
        bindings.update(Vec::new(), &bridged(&[(7, "10.1.1.6")]), &silent);
        assert_eq!(links(&bindings, "silent"), [7]);
    }

    #[test]
    fn results_count_before_what_was_told_routes_and_neighbours() {
        let pods = [pod("a", "10.1.1.5"), pod("b", "10.1.1.6")];
        let mut netstate = bridged(&[(9, "10.1.1.5")]);
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!(links(&bindings, "a"), [9]);
        netstate.routes = vec![HostRoute { destination: "10.1.1.5".parse().unwrap(), link: 8 }];
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!(links(&bindings, "a"), [8]);
        bindings.told(&key("a"), vec!["cni0".into(), "veth9".into()]);
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!(links(&bindings, "a"), [9]);
        let of_a = result("a", "eth0", "veth7", "10.1.1.5");
        // Results of another network, an earlier sandbox's address, an interface that is gone, and another pod.
        let others = [
            result("a", "net1", "veth8", "10.9.9.9"),
            result("a", "eth0", "veth66", "10.1.1.5"),
            result("other", "eth0", "veth8", "10.1.1.5"),
        ];
        let results: Vec<CniResult> = others.into_iter().chain([of_a]).collect();
        bindings.update(results, &netstate, &pods);
        assert_eq!((links(&bindings, "a"), bindings.others(&pods[0])), (vec![7], vec!["net1".to_owned()]));
        // A neighbour's claim of an interface that is surely another's.
        netstate.bridged = vec![HostRoute { destination: "10.1.1.6".parse().unwrap(), link: 7 }];
        bindings.update(vec![result("a", "eth0", "veth7", "10.1.1.5")], &netstate, &pods);
        assert!(links(&bindings, "b").is_empty() && bindings.claims().len() == 1);
    }

    #[test]
    fn a_veth_that_complete_results_do_not_know_is_no_pods() {
        let routed = |to: &str, link| HostRoute { destination: to.parse().unwrap(), link };
        let netstate = NetworkState { routes: vec![routed("10.1.1.5", 7), routed("192.0.2.7", 9)], ..bridged(&[]) };
        let known = || result("a", "eth0", "veth7", "10.1.1.5");
        let starting = CniResult { addresses: ["192.0.2.7".parse().unwrap()].into(), ..result("b", "eth0", "", "::") };
        let pod_a = [pod("a", "10.1.1.5")];
        let with_b = [pod("a", "10.1.1.5"), pod("b", "10.1.1.6")];
        let mut beside = netstate.clone();
        beside.links.get_mut(&9).unwrap().peer_namespace = Some(7);
        for (what, results, netstate, pods, expected) in [
            ("another system's", vec![known()], &netstate, &pod_a[..], true),
            ("without results", vec![], &netstate, &pod_a[..], false),
            (
                "a pod that starts has its name",
                vec![known(), result("b", "eth0", "veth9", "10.1.1.6")],
                &netstate,
                &pod_a[..],
                false,
            ),
            ("a pod that starts has its address", vec![known(), starting], &netstate, &pod_a[..], false),
            ("a pod has no interface", vec![known()], &netstate, &with_b[..], false),
            ("it leads to a pod", vec![known()], &beside, &pod_a[..], false),
        ] {
            let mut bindings = Bindings::default();
            bindings.update(results, netstate, pods);
            assert_eq!(bindings.is_no_pods(netstate, &netstate.links[&9]), expected, "{what}");
            assert!(!bindings.is_no_pods(netstate, &netstate.links[&7]), "{what}");
            bindings.note_awaited(true);
            assert!(!bindings.is_no_pods(netstate, &netstate.links[&9]), "{what}, and a pod has no address yet");
        }
    }

    #[test]
    fn another_veth_into_a_pods_namespace_is_the_pods() {
        let mut netstate = bridged(&[(7, "10.1.1.5"), (8, "10.1.1.6")]);
        netstate.links.get_mut(&9).unwrap().peer_namespace = Some(8);
        let pods = [pod("one", "10.1.1.5"), pod("two", "10.1.1.6")];
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!(*bindings.beside(), BTreeMap::from([(9, key("two"))]));
        // A plugin's result names it, and what it is for.
        bindings.update(vec![result("two", "net1", "veth9", "10.9.9.9")], &netstate, &pods);
        assert!(bindings.beside().is_empty());
        netstate.links.get_mut(&9).unwrap().peer_namespace = None;
        bindings.update(Vec::new(), &netstate, &pods);
        assert!(bindings.beside().is_empty());
    }

    #[test]
    fn of_two_ports_with_one_mac_the_first_keeps_it() {
        let pods = [pod("victim", "10.1.1.5"), pod("evil", "10.1.1.6")];
        let mut netstate = bridged(&[(7, "10.1.1.5"), (8, "10.1.1.6")]);
        let mut bindings = Bindings::default();
        bindings.update(Vec::new(), &netstate, &pods);
        let (of_victim, of_evil) = (bindings.mac(7), bindings.mac(8));
        let set = |netstate: &mut NetworkState, index, mac| {
            netstate.links.get_mut(&index).unwrap().peer_mac = mac;
        };
        set(&mut netstate, 8, of_victim);
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!((bindings.mac(7), bindings.mac(8), bindings.claims().len()), (of_victim, of_evil, 1));
        // One that nobody has is the pod's own choice.
        let free = Some(Mac([2, 0, 0, 0, 9, 9]));
        set(&mut netstate, 8, free);
        bindings.update(Vec::new(), &netstate, &pods);
        assert_eq!((bindings.mac(8), bindings.claims().len()), (free, 0));
    }
}

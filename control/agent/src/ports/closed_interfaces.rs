//! New veths whose pod is not known yet are closed: their programs drop and count their packets, so
//! that a pod that starts before its object arrives sends nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use penstock_xdp_redirect::{Interface, PodVeth, ProgramOutcomeCounts};

use crate::config::{Config, InterfacePattern, StartupMode};
use crate::discovery::{Link, NetworkState};

/// The closed interfaces, and those that must stay open.
pub(super) struct ClosedInterfaces {
    startup: StartupMode,
    patterns: Vec<InterfacePattern>,
    bridges: Vec<InterfacePattern>,
    /// Interfaces that existed before the daemon, or turned out to be no pod's.
    ignored: BTreeSet<u32>,
    /// Interfaces that are no pod's by what is known now.
    nobodys: BTreeSet<u32>,
    /// Since when each is closed, with its programs.
    closed: BTreeMap<u32, (Instant, PodVeth)>,
}

/// How late a pod's object may come that says that an interface is being made.
const LATE_OBJECTS: Duration = Duration::from_secs(30);

impl ClosedInterfaces {
    /// Interfaces that exist now are ignored.
    pub(super) fn new(config: &Config, now: &NetworkState) -> Self {
        Self {
            startup: config.startup,
            patterns: config.pod_interfaces.clone(),
            bridges: config.pod_bridges.clone(),
            ignored: now.links.keys().copied().collect(),
            nobodys: BTreeSet::new(),
            closed: BTreeMap::new(),
        }
    }

    /// Whether an interface that cannot be served is closed.
    pub(super) fn closes(&self) -> bool {
        self.startup == StartupMode::Closed
    }

    /// New interfaces that may be a pod's and are not closed yet.
    pub(super) fn new_interfaces(&self, netstate: &NetworkState, named: &BTreeSet<String>) -> Vec<Interface> {
        if !self.closes() {
            return Vec::new();
        }
        let new = netstate
            .links
            .values()
            .filter(|link| !self.ignored.contains(&link.index) && !self.nobodys.contains(&link.index))
            .filter(|link| self.may_be_pod_interface(netstate, link, named));
        new.filter(|link| !self.closed.contains_key(&link.index)).map(interface).collect()
    }

    /// By the results of CNI plugins, whatever its name; otherwise by its name, or because a route to a single address leads there,
    /// as plugins set it for a pod.
    fn may_be_pod_interface(&self, netstate: &NetworkState, link: &Link, named: &BTreeSet<String>) -> bool {
        link.veth
            && link.peer_namespace.is_some()
            && self.has_pod_master(netstate, link, named)
            && (named.contains(&link.name)
                || self.patterns.iter().any(|pattern| pattern.matches(&link.name))
                || netstate.is_routed(link.index))
    }

    /// Whether the interface has no master, or one that may have pods' ports.
    fn has_pod_master(&self, netstate: &NetworkState, link: &Link, named: &BTreeSet<String>) -> bool {
        let master = netstate.master_of(link).map_or("", |master| &master.name);
        link.master.is_none()
            || named.contains(&link.name)
            || self.bridges.iter().any(|pattern| pattern.matches(master))
    }

    /// Adds an interface that is closed now.
    pub(super) fn put(&mut self, attached: PodVeth) {
        self.closed.insert(attached.interface().index, (Instant::now(), attached));
    }

    /// Removes and returns the programs of an interface that is about to be served.
    pub(super) fn take(&mut self, index: u32) -> Option<PodVeth> {
        self.closed.remove(&index).map(|(_, attached)| attached)
    }

    /// Whether this interface is closed.
    pub(super) fn has(&self, index: u32) -> bool {
        self.closed.contains_key(&index)
    }

    /// Ignores an interface from now on: its pod is known, and no policy is about it.
    pub(super) fn ignore(&mut self, index: u32) {
        self.ignored.insert(index);
    }

    /// Releases interfaces that are gone, those that joined a bridge or the like without pods, and those that are no pod's, except `kept`. One
    /// that turns out to be a pod's after all is new again.
    pub(super) fn release(
        &mut self,
        netstate: &NetworkState,
        named: &BTreeSet<String>,
        is_no_pods: impl Fn(&Link) -> bool,
        kept: &BTreeSet<u32>,
    ) {
        self.ignored.retain(|index| netstate.links.contains_key(index));
        self.nobodys.retain(|index| netstate.links.get(index).is_some_and(&is_no_pods));
        let is_nobodys = |since: &Instant, link| since.elapsed() > LATE_OBJECTS && is_no_pods(link);
        let released: Vec<u32> = (self.closed.iter())
            .filter(|(index, (since, _))| match netstate.links.get(index) {
                Some(link) => {
                    !kept.contains(index) && (!self.has_pod_master(netstate, link, named) || is_nobodys(since, link))
                }
                None => true,
            })
            .map(|(&index, _)| index)
            .collect();
        for index in released {
            let attached = self.take(index);
            let Some(link) = netstate.links.get(&index) else { continue };
            let known = if is_no_pods(link) { &mut self.nobodys } else { &mut self.ignored };
            known.insert(index);
            let name = attached.map(|attached| attached.interface().name.clone());
            tracing::info!(interface = name, "not a pod's interface: opened again");
        }
    }

    /// Each closed interface with the counters of its program.
    pub(super) fn counters(&self) -> Vec<(String, ProgramOutcomeCounts)> {
        let all = self.closed.values().map(|(_, attached)| attached);
        all.filter_map(|attached| Some((attached.interface().name.clone(), attached.outcomes().ok()?))).collect()
    }

    /// The programs of all closed interfaces.
    pub(super) fn attached_mut(&mut self) -> impl Iterator<Item = &mut PodVeth> {
        self.closed.values_mut().map(|(_, attached)| attached)
    }

    /// All programs that are attached.
    pub(super) fn into_attached(self) -> impl Iterator<Item = PodVeth> {
        self.closed.into_values().map(|(_, attached)| attached)
    }
}

/// The interface as the loader of the programs names it.
pub(crate) fn interface(link: &Link) -> Interface {
    Interface { name: link.name.clone(), index: link.index }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::discovery::HostRoute;

    fn netstate(links: &[Link]) -> NetworkState {
        NetworkState { links: links.iter().map(|link| (link.index, link.clone())).collect(), ..NetworkState::default() }
    }

    fn waiting(keys: &str, before: &[Link]) -> ClosedInterfaces {
        let text = format!("node = \"a\"\n{keys}\n[source]\nmanifests = \"/tmp\"\n");
        ClosedInterfaces::new(&Config::parse(&text, Path::new("/tmp/penstock.toml")).unwrap(), &netstate(before))
    }

    #[test]
    fn only_a_new_veth_without_a_foreign_master_is_closed() {
        let cases = [
            ("a pod's", Link::veth(9, "vethabc"), true),
            ("its other end is here", Link { peer_namespace: None, ..Link::veth(9, "vethabc") }, false),
            ("a bridge has it", Link { master: Some(2), ..Link::veth(9, "vethabc") }, false),
            ("the bridge of pods has it", Link { master: Some(3), ..Link::veth(9, "vethabc") }, true),
            ("not a veth", Link { veth: false, ..Link::veth(9, "vethabc") }, false),
            ("another name", Link::veth(9, "tap0"), false),
            ("it was there before", Link::veth(1, "veth1"), false),
        ];
        let found = waiting("", &[Link::veth(1, "veth1")]);
        for (what, link, closed) in cases {
            let bridges =
                [(2, "docker0"), (3, "cni0")].map(|(index, name)| Link { veth: false, ..Link::veth(index, name) });
            let all = [&bridges[..], &[link]].concat();
            assert_eq!(found.new_interfaces(&netstate(&all), &BTreeSet::new()).len(), usize::from(closed), "{what}");
        }
    }

    #[test]
    fn a_plugin_or_a_route_makes_any_name_a_pods() {
        let (found, none) = (waiting("", &[]), BTreeSet::new());
        let mut state = netstate(&[Link::veth(9, "cali9")]);
        assert!(found.new_interfaces(&state, &none).is_empty());
        assert_eq!(found.new_interfaces(&state, &["cali9".to_owned()].into()).len(), 1);
        state.routes = vec![HostRoute { destination: [10, 1, 1, 5].into(), link: 9 }];
        assert_eq!(found.new_interfaces(&state, &none).len(), 1);
    }

    #[test]
    fn startup_open_closes_nothing() {
        assert!(
            waiting("startup = \"open\"", &[])
                .new_interfaces(&netstate(&[Link::veth(9, "vethabc")]), &BTreeSet::new())
                .is_empty()
        );
    }

    #[test]
    fn a_reused_interface_index_may_belong_to_a_new_pod() {
        let mut found = waiting("", &[Link::veth(1, "veth1")]);
        let none = BTreeSet::new();
        found.release(&netstate(&[]), &none, |_| false, &BTreeSet::new());
        assert_eq!(found.new_interfaces(&netstate(&[Link::veth(1, "veth1")]), &none).len(), 1);
    }
}

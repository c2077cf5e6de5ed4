//! New veths whose pod is not known yet. They are closed: an XDP program without sockets drops and counts what comes
//! from them, so that a pod that sends before the API server has told of it sends nowhere.

use std::collections::{BTreeMap, BTreeSet};

use penstock_xdp_redirect::{Attached, Interface, XdpOutcomeCounts};

use super::config::{Config, InterfacePattern, Startup};
use crate::discovery::{Facts, Link};

/// The interfaces that are closed, and those that must not be.
pub(super) struct Waiting {
    startup: Startup,
    patterns: Vec<InterfacePattern>,
    bridges: Vec<InterfacePattern>,
    uplinks: BTreeSet<String>,
    /// Interfaces that were there before the daemon, or turned out to be no pod's.
    left_alone: BTreeSet<u32>,
    closed: BTreeMap<u32, Attached>,
}

impl Waiting {
    /// Interfaces that exist by now are left alone.
    pub(super) fn new(config: &Config, now: &Facts) -> Self {
        Self {
            startup: config.startup,
            patterns: config.pod_interfaces.clone(),
            bridges: config.pod_bridges.clone(),
            uplinks: config.uplinks.iter().map(|name| name.as_str().to_owned()).collect(),
            left_alone: now.links.keys().copied().collect(),
            closed: BTreeMap::new(),
        }
    }

    /// Whether an interface that cannot be served is to be closed.
    pub(super) fn closes(&self) -> bool {
        self.startup == Startup::Closed
    }

    /// New interfaces that may be a pod's, to be closed now.
    pub(super) fn new_interfaces(&self, facts: &Facts) -> Vec<Interface> {
        if !self.closes() {
            return Vec::new();
        }
        let new = facts
            .links
            .values()
            .filter(|link| !self.left_alone.contains(&link.index) && self.may_be_a_pods(facts, link));
        new.filter(|link| !self.closed.contains_key(&link.index)).map(interface).collect()
    }

    fn may_be_a_pods(&self, facts: &Facts, link: &Link) -> bool {
        link.veth
            && link.peer_elsewhere
            && self.may_have(facts, link)
            && !self.uplinks.contains(&link.name)
            && self.patterns.iter().any(|pattern| pattern.matches(&link.name))
    }

    /// Whether what has the interface, if anything has, may have a pod's.
    fn may_have(&self, facts: &Facts, link: &Link) -> bool {
        let master = facts.master_of(link).map_or("", |master| &master.name);
        link.master.is_none() || self.bridges.iter().any(|pattern| pattern.matches(master))
    }

    /// An interface that is closed from now on.
    pub(super) fn put(&mut self, attached: Attached) {
        self.closed.insert(attached.interface().index, attached);
    }

    /// The program of an interface that is to be served now.
    pub(super) fn take(&mut self, index: u32) -> Option<Attached> {
        self.closed.remove(&index)
    }

    /// Whether this interface is closed.
    pub(super) fn has(&self, index: u32) -> bool {
        self.closed.contains_key(&index)
    }

    /// It cannot be closed, or need not be: it is not looked at again.
    pub(super) fn leave_alone(&mut self, index: u32) {
        self.left_alone.insert(index);
    }

    /// Lets go of interfaces that are gone, and of those that a bridge or the like took that has no pods.
    pub(super) fn let_go(&mut self, facts: &Facts) {
        self.left_alone.retain(|index| facts.links.contains_key(index));
        let taken: Vec<u32> = (self.closed.keys().copied())
            .filter(|index| facts.links.get(index).is_none_or(|link| !self.may_have(facts, link)))
            .collect();
        for index in taken {
            let released = self.closed.remove(&index);
            if facts.links.contains_key(&index) {
                self.left_alone.insert(index);
                let name = released.map(|attached| attached.interface().name.clone());
                tracing::info!(interface = name, "not a pod's: open again");
            }
        }
    }

    /// Each closed interface with what came from it.
    pub(super) fn counted(&self) -> Vec<(String, XdpOutcomeCounts)> {
        let all = self.closed.values();
        all.filter_map(|attached| Some((attached.interface().name.clone(), attached.outcomes().ok()?))).collect()
    }

    /// All programs that are attached.
    pub(super) fn into_attached(self) -> impl Iterator<Item = Attached> {
        self.closed.into_values()
    }
}

/// As the loader names it.
pub(super) fn interface(link: &Link) -> Interface {
    Interface { name: link.name.clone(), index: link.index }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn facts(links: &[Link]) -> Facts {
        Facts { links: links.iter().map(|link| (link.index, link.clone())).collect(), ..Facts::default() }
    }

    fn waiting(keys: &str, before: &[Link]) -> Waiting {
        let text = format!("node = \"a\"\nuplinks = [\"veth-up\"]\n{keys}\n[source]\nmanifests = \"/tmp\"\n");
        Waiting::new(&Config::parse(&text, Path::new("/tmp/penstock.toml")).unwrap(), &facts(before))
    }

    #[test]
    fn only_a_new_veth_into_another_namespace_that_nobody_else_has_is_closed() {
        let cases = [
            ("a pod's", Link::veth(9, "vethabc"), true),
            ("its other end is here", Link { peer_elsewhere: false, ..Link::veth(9, "vethabc") }, false),
            ("a bridge has it", Link { master: Some(2), ..Link::veth(9, "vethabc") }, false),
            ("the bridge of pods has it", Link { master: Some(3), ..Link::veth(9, "vethabc") }, true),
            ("not a veth", Link { veth: false, ..Link::veth(9, "vethabc") }, false),
            ("another name", Link::veth(9, "tap0"), false),
            ("an uplink", Link::veth(9, "veth-up"), false),
            ("it was there before", Link::veth(1, "veth1"), false),
        ];
        let found = waiting("", &[Link::veth(1, "veth1")]);
        for (what, link, closed) in cases {
            let bridges =
                [(2, "docker0"), (3, "cni0")].map(|(index, name)| Link { veth: false, ..Link::veth(index, name) });
            let all = [&bridges[..], &[link]].concat();
            assert_eq!(found.new_interfaces(&facts(&all)).len(), usize::from(closed), "{what}");
        }
    }

    #[test]
    fn nothing_is_closed_where_the_setting_says_open() {
        assert!(waiting("startup = \"open\"", &[]).new_interfaces(&facts(&[Link::veth(9, "vethabc")])).is_empty());
    }

    #[test]
    fn an_index_that_was_freed_may_be_a_new_pods() {
        let mut found = waiting("", &[Link::veth(1, "veth1")]);
        found.let_go(&facts(&[]));
        assert_eq!(found.new_interfaces(&facts(&[Link::veth(1, "veth1")])).len(), 1);
    }
}

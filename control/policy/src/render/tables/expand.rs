//! Rules with their peers as addresses, for output forms without identities.

use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::policy::PortSpec;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::compile::{EffectivePeers, RuleSource};
use crate::render::blocks::without_excepts;
use crate::state::NAMESPACE_UNKNOWN;

use super::Tables;

#[derive(Debug)]
pub struct Expansion<'a> {
    tables: &'a Tables,
    addresses: FxHashMap<u32, Vec<IpAddr>>,
}

#[derive(Clone, Debug)]
pub struct ExpandedRule<'a> {
    /// The policy's rule it comes from.
    pub source: &'a RuleSource,
    /// The peers' addresses, sorted and disjoint; `None` for every address.
    pub peers: Option<Vec<IpNet>>,
    pub ports: &'a PortSpec,
}

impl Tables {
    pub fn expand(&self) -> Expansion<'_> {
        let mut addresses: FxHashMap<u32, Vec<IpAddr>> = FxHashMap::default();
        for (address, identity) in self.identities.addresses() {
            addresses.entry(identity).or_default().push(address);
        }
        Expansion { tables: self, addresses }
    }
}

impl<'a> Expansion<'a> {
    /// The rules of a table, in order.
    pub fn rules(&self, table: u32) -> Vec<ExpandedRule<'a>> {
        let linked = &self.tables.tables[table].linked;
        (0u32..)
            .zip(&linked.rules)
            .map(|(number, rule)| ExpandedRule {
                source: &rule.source,
                peers: self.peers(table, number, &rule.peers),
                ports: &rule.ports,
            })
            .collect()
    }

    fn peers(&self, table: u32, rule: u32, peers: &EffectivePeers) -> Option<Vec<IpNet>> {
        let EffectivePeers::AnyOf { every_pod, blocks, .. } = peers else { return None };
        let identities = &self.tables.identities;
        let mut peers: FxHashSet<u32> = self.tables.tables[table].linked.peers(rule, identities.members()).collect();
        if *every_pod {
            let known = |identity: &u32| identities.peer_sets(*identity).first() != Some(&NAMESPACE_UNKNOWN);
            peers.extend(self.addresses.keys().copied().filter(known));
        }
        let pods = peers.iter().filter_map(|identity| self.addresses.get(identity)).flatten();
        let mut nets: Vec<IpNet> = pods.map(|address| IpNet::from(*address)).collect();
        nets.extend(blocks.iter().flat_map(without_excepts));
        Some(outermost(nets))
    }
}

/// Removes prefixes that lie inside another one.
fn outermost(mut nets: Vec<IpNet>) -> Vec<IpNet> {
    // A prefix sorts right before all that lie inside it.
    nets.sort_unstable_by_key(|net| (net.network(), net.prefix_len()));
    let mut result: Vec<IpNet> = Vec::with_capacity(nets.len());
    for net in nets {
        if result.last().is_none_or(|last| !last.contains(&net)) {
            result.push(net);
        }
    }
    result
}

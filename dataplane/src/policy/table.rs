//! The effective rules of one direction of an endpoint, prepared for lookup.

use std::fmt;
use std::sync::Arc;

use crate::packet::{Address, Protocol};

use super::blocks::{AddressBlock, Blocks};
use super::hits::RuleHits;
use super::notes::TableNotes;
use super::peers::{Identity, Peers};
use super::ports::{PortRange, Ports};
use super::rows::{Row, Rows, RowsBuilder, RuleSet};

/// Origin of a rule, for display and for whoever counts by rule; not used by the packet path.
///
/// Displays as its text. The text joins names that may contain what joins them, so rules of two policies may have the same;
/// the policy tells them apart.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RuleName {
    policy: Arc<str>,
    text: Arc<str>,
}

impl RuleName {
    /// The rule of a policy that displays as `text`, which differs between the policy's rules.
    pub fn new(policy: impl Into<Arc<str>>, text: impl Into<Arc<str>>) -> Self {
        Self { policy: policy.into(), text: text.into() }
    }

    /// The policy: `<namespace>/<name>` or `<tier>/<name>`.
    pub fn policy(&self) -> &str {
        &self.policy
    }

    pub(super) fn shared_policy(&self) -> Arc<str> {
        Arc::clone(&self.policy)
    }

    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One effective rule as input of a table. Its number is its position in the list; the identities of its peers are
/// given separately.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSpec {
    pub name: RuleName,
    /// Peers that match, besides the identities.
    pub peers: PeerSpec,
    pub ports: PortSpec,
}

/// The peers of a rule that are not given as identities.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerSpec {
    Every,
    /// Pods, and addresses in blocks.
    AnyOf {
        every_pod: bool,
        /// Addresses that are peers, of pods or not.
        blocks: Vec<AddressBlock>,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortSpec {
    /// Every port of every protocol, and protocols without ports.
    Every,
    /// These ports; none if the list is empty.
    AnyOf(Vec<PortRange>),
}

/// The rules of one direction of an isolated endpoint. An address and a port each select the row of rules that they
/// match; a rule in both rows allows. Immutable; a modified copy shares unchanged parts.
#[derive(Clone)]
pub struct RuleTable {
    rows: Rows,
    peers: Peers,
    /// Each row includes the rules for every address.
    blocks: Blocks,
    /// The rules for every address.
    every: Row,
    /// Each row includes the rules without ports.
    ports: Ports,
    names: Arc<[RuleName]>,
    /// Those of all tables that were made from one by other identities.
    hits: Arc<RuleHits>,
    /// How its policies want their decisions reported, if they say anything.
    notes: Option<Arc<TableNotes>>,
}

impl RuleTable {
    /// Resolves rules to rows. `identities` lists all rules of which an identity is a peer, except those for every peer
    /// and those whose blocks contain its address. An identity that is not listed has the rules for every pod.
    pub fn new(rules: &[RuleSpec], identities: impl IntoIterator<Item = (Identity, RuleSet)>) -> Self {
        let mut rows = RowsBuilder::new(rules.len());
        let numbered = || (0u32..).zip(rules);
        let every_pod: RuleSet = numbered()
            .filter(|(_, rule)| matches!(rule.peers, PeerSpec::AnyOf { every_pod: true, .. }))
            .map(|(number, _)| number)
            .collect();
        let members: Vec<_> = identities.into_iter().map(|(identity, rules)| (identity, rows.row(&rules))).collect();
        let peers = Peers::new(rows.row(&every_pod)).with(members);
        let every: RuleSet =
            numbered().filter(|(_, rule)| rule.peers == PeerSpec::Every).map(|(number, _)| number).collect();
        let blocks: Vec<_> = numbered()
            .filter_map(|(number, rule)| match &rule.peers {
                PeerSpec::Every => None,
                PeerSpec::AnyOf { blocks, .. } => Some((number, blocks)),
            })
            .flat_map(|(number, blocks)| blocks.iter().map(move |block| (block, number)))
            .collect();
        let blocks = Blocks::build(&every, &blocks, &mut rows);
        let every = rows.row(&every);
        let ports = build_ports(rules, &mut rows);
        let names = rules.iter().map(|rule| rule.name.clone()).collect();
        Self { rows: rows.finish(), peers, blocks, every, ports, names, hits: Arc::default(), notes: None }
    }

    /// This table, with counters of its rules for this many workers.
    #[must_use]
    pub fn counting(self, workers: usize) -> Self {
        Self { hits: Arc::new(RuleHits::new(self.rules(), workers)), ..self }
    }

    /// This table, with what its policies want said of their decisions.
    #[must_use]
    pub fn noting(self, notes: TableNotes) -> Self {
        let notes = (notes != TableNotes::default()).then(|| Arc::new(notes));
        Self { notes, ..self }
    }

    pub(super) fn notes(&self) -> Option<&TableNotes> {
        self.notes.as_deref()
    }

    pub fn hits(&self) -> &Arc<RuleHits> {
        &self.hits
    }

    /// This table with other rules for some identities, as in [`RuleTable::new`]; `None` for those of every pod.
    pub fn with_identities(&self, changes: impl IntoIterator<Item = (Identity, Option<RuleSet>)>) -> Self {
        let (mut named, mut sets, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (identity, rules) in changes {
            match rules {
                Some(rules) => {
                    named.push(identity);
                    sets.push(rules);
                }
                None => others.push((identity, self.peers.any_pod())),
            }
        }
        let (rows, found) = self.rows.with(sets);
        let changed = named.into_iter().zip(found).chain(others);
        Self { rows, peers: self.peers.with(changed), ..self.clone() }
    }

    /// The lowest rule that allows, if any. `identity` is the peer's, 0 if it is not a pod.
    #[inline]
    pub(super) fn find(&self, identity: u32, peer: Address, protocol: Protocol, port: u16) -> Option<u32> {
        self.first(self.rows(identity, peer, protocol, port))
    }

    /// The lowest rule that allows every peer, if any.
    pub(super) fn find_for_every_peer(&self, protocol: Protocol, port: u16) -> Option<u32> {
        self.first([self.every, 0, self.ports.row(protocol, port)])
    }

    /// The rules of a flow from this one on by protocol and port alone, in order, and whether each is for every peer.
    pub(super) fn by_port(&self, protocol: Protocol, port: u16) -> impl Fn(u32) -> Option<(u32, bool)> {
        let ports = self.ports.row(protocol, port);
        move |start| {
            let rule = self.first_from([ports, 0, ports], start)?;
            Some((rule, self.rows.has(self.every, rule)))
        }
    }

    /// The rows of a flow: by the peer's identity, by its address, by protocol and port.
    #[inline]
    pub(super) fn rows(&self, identity: u32, peer: Address, protocol: Protocol, port: u16) -> [Row; 3] {
        [self.peers.row(identity), self.blocks.row(peer), self.ports.row(protocol, port)]
    }

    /// The lowest rule that matches a flow with these rows, if any.
    #[inline]
    pub(super) fn first(&self, rows: [Row; 3]) -> Option<u32> {
        self.rows.first_common(rows)
    }

    /// The lowest rule from `start` on that matches a flow with these rows, if any.
    #[inline]
    pub(super) fn first_from(&self, rows: [Row; 3], start: u32) -> Option<u32> {
        self.rows.first_common_from(rows, start)
    }

    /// Whether a rule with these rows matches the flow's protocol and port, whatever its peers.
    pub(super) fn matches_port(&self, [_, _, ports]: [Row; 3], rule: u32) -> bool {
        self.rows.has(ports, rule)
    }

    pub fn name(&self, rule: u32) -> Option<&RuleName> {
        self.names.get(rule as usize)
    }

    pub fn rules(&self) -> usize {
        self.names.len()
    }

    /// Approximate size of the lookup structures in bytes.
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.rows.size() + self.peers.size() + self.blocks.size() + self.ports.size()
    }
}

fn build_ports(rules: &[RuleSpec], rows: &mut RowsBuilder) -> Ports {
    let numbered = || (0u32..).zip(rules);
    let any: RuleSet = numbered().filter(|(_, rule)| rule.ports == PortSpec::Every).map(|(number, _)| number).collect();
    let ranges: Vec<_> = numbered()
        .filter_map(|(number, rule)| match &rule.ports {
            PortSpec::Every => None,
            PortSpec::AnyOf(ranges) => Some((number, ranges)),
        })
        .flat_map(|(number, ranges)| ranges.iter().map(move |range| (*range, number)))
        .collect();
    Ports::build(&any, &ranges, rows)
}

impl fmt::Debug for RuleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleTable").field("rules", &self.names).finish_non_exhaustive()
    }
}

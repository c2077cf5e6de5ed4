//! Effective rules with acquired peer sets, and the rule table built from them.

use std::sync::Arc;

use penstock_dataplane::names::NameRules;
use penstock_dataplane::policy::{
    AddressBlock, EndpointPolicy, PeerSpec, RuleAction, RuleSet, RuleSpec, RuleTable, TableNotes, TieredTable,
};
use rustc_hash::FxHashMap;

use crate::compile::{self, EffectivePeers, EffectiveRule, RuleSource, TableKey, Tier};
use crate::model::{DenyAnswer, IpBlock, PolicyNotes};
use crate::state::{ClusterState, NAMESPACE_UNKNOWN, PeerSetId};

use super::identities::{Members, identity};

/// The rules of one table, with references to the peer sets they use.
#[derive(Default, Debug)]
pub(super) struct LinkedRules {
    pub(super) rules: Vec<EffectiveRule>,
    /// For each rule the peer sets of pods that are peers.
    peer_sets: Vec<Vec<PeerSetId>>,
    every_pod: RuleSet,
    notes: TableNotes,
}

impl LinkedRules {
    /// Those of a key, none of which has been added yet.
    pub(super) fn of(key: &TableKey, state: &ClusterState) -> Self {
        Self { notes: notes_of_isolation(key, state), ..Self::default() }
    }

    /// Adds what follows from one of the key's rules, and acquires its peer sets. Returns for how many pods and namespaces selectors had
    /// to be evaluated. Once those of its namespace reach too far nothing is added: such a pod gets another table.
    pub(super) fn add(&mut self, source: &RuleSource, key: &TableKey, state: &mut ClusterState) -> usize {
        let namespace = source.namespace();
        if namespace.is_some_and(|namespace| state.reaches_too_far(namespace)) {
            return 0;
        }
        let (first, mut reached) = (self.rules.len(), 0);
        compile::append_rules(state, key, source, &mut self.rules);
        for (number, rule) in (first as u32..).zip(&self.rules[first..]) {
            let (every_pod, peer_sets) = match &rule.peers {
                EffectivePeers::Every => (false, &[][..]),
                EffectivePeers::AnyOf { every_pod, peer_sets, .. } => (*every_pod, peer_sets.as_slice()),
            };
            let acquired = peer_sets.iter().map(|peer_set| {
                let (peer_set, evaluated) = state.acquire(peer_set, namespace);
                reached += evaluated;
                peer_set
            });
            self.peer_sets.push(acquired.collect());
            if every_pod {
                self.every_pod.insert(number);
            }
        }
        reached
    }

    /// Call it once all rules have been added.
    pub(super) fn complete(&mut self) {
        note_rules(&self.rules, &mut self.notes);
    }

    /// The acquired peer sets, each as often as it is to be released. They do not count for their namespace any more.
    pub(super) fn take_peer_sets(&mut self, state: &mut ClusterState) -> Vec<Vec<PeerSetId>> {
        for (rule, peer_sets) in self.rules.iter().zip(&self.peer_sets) {
            if let Some(namespace) = rule.source.namespace() {
                peer_sets.iter().for_each(|peer_set| state.discount_reach(namespace, *peer_set));
            }
        }
        std::mem::take(&mut self.peer_sets)
    }

    /// Every peer set that affects rows; may repeat.
    pub(super) fn uses(&self) -> impl Iterator<Item = PeerSetId> {
        self.uses_from(0)
    }

    /// Every peer set that affects rows by rules from this one on; may repeat, and may have one of the rules before.
    pub(super) fn uses_from(&self, first: usize) -> impl Iterator<Item = PeerSetId> {
        let unknown = (!self.every_pod.is_empty()).then_some(NAMESPACE_UNKNOWN);
        self.peer_sets[first..].iter().flatten().copied().chain(unknown)
    }

    /// The rules that match an identity with these peer sets; `None` if they are those that match every pod.
    pub(super) fn row(&self, peer_sets: &[PeerSetId]) -> Option<RuleSet> {
        let has = |peer_set: &PeerSetId| peer_sets.binary_search(peer_set).is_ok();
        let by_peer_set = (0u32..).zip(&self.peer_sets).filter(|(_, peers)| peers.iter().any(has));
        let mut row: RuleSet = by_peer_set.map(|(number, _)| number).collect();
        if !has(&NAMESPACE_UNKNOWN) {
            row.union_with(&self.every_pod);
        }
        (row != self.every_pod).then_some(row)
    }

    /// The identities that match a rule by its peer sets; may repeat.
    pub(super) fn peers(&self, rule: u32, members: &Members) -> impl Iterator<Item = u32> {
        self.peer_sets[rule as usize].iter().flat_map(|peer_set| members.of(*peer_set))
    }

    /// The rules with domain names.
    fn name_rules(&self) -> NameRules {
        let names = (0u32..).zip(&self.rules).flat_map(|(number, rule)| match &rule.peers {
            EffectivePeers::AnyOf { names, .. } => names.iter().map(|name| (number, name)).collect(),
            EffectivePeers::Every => Vec::new(),
        });
        NameRules::new(names)
    }

    /// Builds the table of a key, which counts for this many workers.
    pub(super) fn build(&self, key: &TableKey, members: &Members, workers: usize) -> EndpointPolicy {
        let mut rows: FxHashMap<u32, RuleSet> = FxHashMap::default();
        for rule in 0..self.rules.len() as u32 {
            self.peers(rule, members).for_each(|identity| rows.entry(identity).or_default().insert(rule));
        }
        if !self.every_pod.is_empty() {
            members.of(NAMESPACE_UNKNOWN).for_each(|identity| {
                rows.entry(identity).or_default();
            });
            for (identity, row) in &mut rows {
                if !members.has(NAMESPACE_UNKNOWN, *identity) {
                    row.union_with(&self.every_pod);
                }
            }
        }
        let specs: Vec<RuleSpec> = self.rules.iter().map(spec).collect();
        let rows = rows.into_iter().map(|(number, row)| (identity(number), row));
        let table = RuleTable::new(&specs, rows).counting(workers).noting(self.notes.clone());
        if !key.is_tiered() {
            return EndpointPolicy::Isolated(Arc::new(table));
        }
        let admin = self.rules.iter().filter(|rule| rule.source.policy.name().tier() == Tier::Admin).count();
        let actions = self.rules.iter().map(|rule| rule.source.action());
        let tiers = TieredTable::new(table, actions, admin as u32, key.isolation.is_some());
        EndpointPolicy::Tiered(Arc::new(tiers.with_names(self.name_rules())))
    }
}

/// How those of a key's policies that isolate want denials reported that no rule decides.
fn notes_of_isolation(key: &TableKey, state: &ClusterState) -> TableNotes {
    let isolating = key.isolation.iter().flatten().filter_map(|(number, _)| state.policy(*number));
    let isolating = isolating.filter(|policy| policy.isolates && !policy.notes.is_empty());
    TableNotes {
        record_isolated: isolating
            .clone()
            .filter(|policy| policy.notes.log.has_denied())
            .map(|policy| policy.key.to_string().into())
            .collect(),
        // If two differ, the one that says nothing to the sender.
        isolated_answer: isolating.filter_map(|policy| answer(policy.notes)).min(),
        ..TableNotes::default()
    }
}

/// How the policies of rules want their decisions reported.
fn note_rules(rules: &[EffectiveRule], notes: &mut TableNotes) {
    let numbers = |wanted: fn(RuleAction, PolicyNotes) -> bool| {
        let numbered = (0u32..).zip(rules).filter(|(_, rule)| wanted(rule.source.action(), rule.source.notes()));
        numbered.map(|(number, _)| number).collect()
    };
    notes.record_allowed = numbers(|action, notes| action == RuleAction::Accept && notes.log.has_allowed());
    notes.record_denied = numbers(|action, notes| action == RuleAction::Deny && notes.log.has_denied());
    let denying = (0u32..).zip(rules).filter(|(_, rule)| rule.source.action() == RuleAction::Deny);
    notes.answers = denying.filter_map(|(number, rule)| Some((number, answer(rule.source.notes())?))).collect();
}

/// Whether a policy wants denials answered, if it says so.
fn answer(notes: PolicyNotes) -> Option<bool> {
    notes.deny_answer.map(|answer| answer == DenyAnswer::Reject)
}

fn spec(rule: &EffectiveRule) -> RuleSpec {
    let block = |block: &IpBlock| AddressBlock { cidr: block.cidr, except: block.except.clone() };
    let peers = match &rule.peers {
        EffectivePeers::Every => PeerSpec::Every,
        EffectivePeers::AnyOf { every_pod, blocks, .. } => {
            PeerSpec::AnyOf { every_pod: *every_pod, blocks: blocks.iter().map(block).collect() }
        }
    };
    RuleSpec { name: rule.source.name(), peers, ports: rule.ports.clone() }
}

//! Tables that take long are built beside the others: who has written few rules does not wait for who has written many.
//!
//! [`Tables::update`](super::Tables::update) builds at once what has few entries, and leaves the pods whose tables have more waiting,
//! with what was in effect for them; a new pod is closed. They take turns, namespace by namespace. The rules of a turn are compiled
//! a few at a time, between changes, and another thread builds the tables ([`TableJob`]). A pod whose turn it is keeps to it: what has
//! changed for it meanwhile counts for its next turn, so that it gets the tables of some version however often its policies change.
//!
//! Peer sets that only tables of a turn use, or that no table uses any more, change the identities of the addresses in them a few at a
//! time, too: before the turn's tables are built, and before the number of a released peer set is used again.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::policy::EndpointPolicy;
use rustc_hash::FxHashSet;

use crate::compile::{self, EffectivePeers, RuleSource, TableKey};
use crate::state::{ClusterState, NAMESPACE_UNKNOWN, PeerSetId, PodId};

use super::endpoints::{EndpointRecord, Stage, TableRecord};
use super::identities::Members;
use super::linked::LinkedRules;
use super::{PendingUpdate, Tables, remove};

/// Entries of the tables of a turn, unless those of one pod have more.
const ENTRIES_A_TURN: usize = 1 << 16;
/// As many evaluations of selectors, or peer sets of addresses, take as long as an entry.
const REACHED_AN_ENTRY: usize = 8;

/// The tables that are built beside the others.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// Most entries of tables that are built in one update.
    at_once: usize,
    /// The endpoints that wait for tables, by namespace and since when.
    waiting: BTreeSet<(String, u64, u32)>,
    /// How many have begun to wait.
    begun: u64,
    /// The namespace whose turn was last.
    last: String,
    /// The tables of this turn.
    turn: Vec<u32>,
    /// Those whose rules are still to be compiled, and these rules.
    to_link: Vec<(u32, std::vec::IntoIter<RuleSource>)>,
    is_building: bool,
    /// Pods whose tables are chosen anew after this turn.
    pub(super) held: FxHashSet<PodId>,
    /// Tables that no endpoint uses, with what they have acquired and have not released yet.
    unused: Vec<(UnusedTable, Vec<Vec<PeerSetId>>)>,
    /// Addresses whose identities are still those of before.
    addresses: FxHashSet<IpAddr>,
    /// Those that have released all of it, as long as a snapshot has them.
    released: Vec<UnusedTable>,
}

/// A table that no endpoint uses. To drop one takes long, too.
#[derive(Debug)]
pub(super) struct UnusedTable {
    pub(super) number: u32,
    pub(super) linked: LinkedRules,
    pub(super) table: EndpointPolicy,
}

impl UnusedTable {
    /// Whether no snapshot has it any more.
    fn is_last(&self) -> bool {
        match &self.table {
            EndpointPolicy::Open => true,
            EndpointPolicy::Isolated(table) => Arc::strong_count(table) == 1,
            EndpointPolicy::Tiered(tiers) => Arc::strong_count(tiers) == 1,
        }
    }
}

/// Tables to be built on any thread, by [`TableJob::build`].
#[derive(Debug)]
pub struct TableJob {
    tables: Vec<UnbuiltTable>,
    workers: usize,
    /// Dropped where the tables are built.
    _unused: Vec<UnusedTable>,
}

#[derive(Debug)]
struct UnbuiltTable {
    number: u32,
    key: Arc<TableKey>,
    linked: LinkedRules,
    members: Members,
}

/// Tables that were built.
#[derive(Debug)]
pub struct BuiltTables(Vec<(u32, LinkedRules, EndpointPolicy)>);

impl TableJob {
    /// Builds the tables.
    pub fn build(self) -> BuiltTables {
        let build = |table: UnbuiltTable| {
            let policy = table.linked.build(&table.key, &table.members, self.workers);
            (table.number, table.linked, policy)
        };
        BuiltTables(self.tables.into_iter().map(build).collect())
    }
}

impl Aside {
    /// Whose tables have more than this many entries waits.
    pub(super) fn new(at_once: usize) -> Self {
        Self { at_once, ..Self::default() }
    }

    /// Has an endpoint wait, behind all others of its namespace, or not any more.
    pub(super) fn set_waiting(&mut self, number: u32, record: &mut EndpointRecord) {
        let namespace = || record.owner.0.namespace.clone();
        match (record.waits_since, record.is_waiting()) {
            (None, true) => {
                self.begun += 1;
                self.waiting.insert((namespace(), self.begun, number));
                record.waits_since = Some(self.begun);
            }
            (Some(since), false) => {
                self.waiting.remove(&(namespace(), since, number));
                record.waits_since = None;
            }
            _ => {}
        }
    }

    /// An endpoint is gone.
    pub(super) fn forget(&mut self, number: u32, record: &EndpointRecord) {
        if let Some(since) = record.waits_since {
            self.waiting.remove(&(record.owner.0.namespace.clone(), since, number));
        }
    }

    /// Takes a table that is not used any more. Its number is in use until all is released.
    pub(super) fn take_unused(&mut self, mut unused: UnusedTable, state: &mut ClusterState) {
        let peer_sets = unused.linked.take_peer_sets(state);
        self.unused.push((unused, peer_sets));
    }

    fn has_work(&self) -> bool {
        let has_turn = !(self.waiting.is_empty() && self.turn.is_empty());
        let may_build = has_turn || self.released.iter().any(UnusedTable::is_last);
        !self.unused.is_empty() || !self.addresses.is_empty() || (!self.is_building && may_build)
    }

    /// Whether every address has the identity of what is compiled.
    pub(super) fn has_all_addresses(&self) -> bool {
        self.addresses.is_empty()
    }
}

impl Tables {
    /// From now on builds tables beside the others that have more entries than are built in one update.
    pub fn build_aside(&mut self, at_once: usize) {
        self.aside.get_or_insert_with(|| Aside::new(at_once));
    }

    /// Whether [`Tables::prepare`] has something to do.
    pub fn has_work(&self) -> bool {
        self.aside.as_ref().is_some_and(Aside::has_work)
    }

    /// How many pods wait for tables.
    pub fn waiting(&self) -> usize {
        self.aside.as_ref().map_or(0, |aside| aside.waiting.len())
    }

    /// Leaves tables to be built aside, largest first, until few enough entries are left for this update.
    pub(super) fn leave_aside(&self, state: &ClusterState, pending: &mut PendingUpdate) {
        let Some(aside) = &self.aside else { return };
        let size = |table: u32| {
            let key = &self.tables[table].key;
            match key.entries {
                few if few <= aside.at_once => few + most_reached(state, key) / REACHED_AN_ENTRY,
                many => many,
            }
        };
        let mut by_size: Vec<_> = pending.to_build.iter().map(|table| (size(*table), *table)).collect();
        by_size.sort_unstable();
        let mut sum = 0;
        for (entries, table) in by_size {
            sum += entries;
            if sum > aside.at_once {
                pending.to_build.remove(&table);
            }
        }
    }

    /// The addresses that have the identity of before, and are in peer sets which tables of this turn share with tables that are built
    /// at once.
    pub(super) fn shared_with_turn(&self, state: &ClusterState, pending: &PendingUpdate) -> FxHashSet<IpAddr> {
        let Some(aside) = self.aside.as_ref().filter(|aside| !aside.has_all_addresses()) else {
            return FxHashSet::default();
        };
        let has_turn = |table: &u32| self.tables.get(*table).is_some_and(TableRecord::has_turn);
        let used = pending.to_build.iter().flat_map(|table| self.tables[*table].linked.uses());
        let used: FxHashSet<PeerSetId> = used.filter(|peer_set| *peer_set != NAMESPACE_UNKNOWN).collect();
        let shared = used.into_iter().filter(|peer_set| self.by_peer_set[peer_set].iter().any(has_turn));
        let addresses = shared.flat_map(|peer_set| state.addresses_in(peer_set));
        addresses.filter(|address| aside.addresses.contains(address)).collect()
    }

    /// Works on what is built aside: compiles up to this many rules, and gives the tables of a turn once all of theirs are. The policy
    /// stays the same.
    pub fn prepare(&mut self, state: &mut ClusterState, most: usize) -> Option<TableJob> {
        self.release_some(state, most);
        let aside = self.aside.as_mut()?;
        if !aside.is_building {
            // What nobody uses any more goes first: a tenant that changes its policies without end has one version of them in memory.
            if aside.turn.is_empty() && aside.unused.is_empty() {
                self.begin_turn(state);
            }
            self.link_some(state, most);
        }
        self.identify_some(state, most);
        self.job()
    }

    /// Gives some of the addresses their identities, after all rules are compiled and released that may change them again.
    fn identify_some(&mut self, state: &mut ClusterState, most: usize) {
        let Some(aside) = &mut self.aside else { return };
        aside.addresses.extend(state.take_outdated_addresses());
        if !(aside.to_link.is_empty() && aside.unused.is_empty()) {
            return;
        }
        let mut left = most * REACHED_AN_ENTRY;
        let some: FxHashSet<IpAddr> = aside
            .addresses
            .extract_if(|address| {
                let is_one = left > 0;
                if is_one {
                    left = left.saturating_sub(1 + state.peer_sets_of(address));
                }
                is_one
            })
            .collect();
        let is_last = aside.addresses.is_empty();
        if !some.is_empty() {
            self.publish_all(state, &some, &mut PendingUpdate::default());
        }
        if is_last {
            state.free_released();
        }
    }

    fn release_some(&mut self, state: &mut ClusterState, most: usize) {
        let Some(aside) = &mut self.aside else { return };
        let mut left = most * REACHED_AN_ENTRY;
        while left > 0 {
            left = left.saturating_sub(REACHED_AN_ENTRY);
            let Some((unused, peer_sets)) = aside.unused.last_mut() else { return };
            match peer_sets.pop() {
                Some(of_rule) => {
                    for peer_set in of_rule {
                        remove(&mut self.by_peer_set, &peer_set, unused.number);
                        left = left.saturating_sub(state.release(peer_set));
                    }
                }
                None => {
                    remove(&mut self.by_peer_set, &NAMESPACE_UNKNOWN, unused.number);
                    self.tables.free(unused.number);
                    aside.released.extend(aside.unused.pop().map(|(unused, _)| unused));
                }
            }
        }
    }

    /// The next namespace has its turn, with as many of its pods as fit.
    fn begin_turn(&mut self, state: &ClusterState) {
        let Some(aside) = &mut self.aside else { return };
        let following =
            aside.waiting.iter().map(|(namespace, ..)| namespace).find(|namespace| **namespace > aside.last);
        let Some(namespace) = following.or_else(|| Some(&aside.waiting.first()?.0)).cloned() else { return };
        let of_namespace = aside.waiting.range((namespace.clone(), 0, 0)..).take_while(|(of, ..)| *of == namespace);
        let (mut turn, mut entries) = (FxHashSet::default(), 0);
        for (_, _, endpoint) in of_namespace {
            let wanted = self.endpoints[*endpoint].wanted.tables();
            let more = wanted.filter(|table| !turn.contains(table) && self.tables[*table].stage == Stage::Waiting);
            let more: Vec<u32> = more.collect();
            entries += more.iter().map(|table| self.tables[*table].key.entries).sum::<usize>();
            if entries > ENTRIES_A_TURN && !turn.is_empty() {
                break;
            }
            turn.extend(more);
        }
        aside.last = namespace;
        for table in turn {
            let record = &mut self.tables[table];
            record.stage = Stage::Linking;
            record.linked = LinkedRules::of(&record.key, state);
            aside.to_link.push((table, compile::sources(state, &record.key).into_iter()));
            aside.turn.push(table);
        }
    }

    fn link_some(&mut self, state: &mut ClusterState, most: usize) {
        let Some(aside) = &mut self.aside else { return };
        let mut left = most * REACHED_AN_ENTRY;
        while left > 0 {
            left = left.saturating_sub(REACHED_AN_ENTRY);
            let Some((table, sources)) = aside.to_link.last_mut() else { return };
            let record = &mut self.tables[*table];
            let Some(source) = sources.next() else {
                record.linked.complete();
                aside.to_link.pop();
                continue;
            };
            let before = record.linked.rules.len();
            left = left.saturating_sub(record.linked.add(&source, &record.key, state));
            for peer_set in record.linked.uses_from(before) {
                self.by_peer_set.entry(peer_set).or_default().insert(*table);
            }
        }
    }

    /// The tables of this turn, if all of their rules are compiled.
    fn job(&mut self) -> Option<TableJob> {
        let aside = self.aside.as_mut()?;
        if aside.is_building || !aside.to_link.is_empty() || !aside.has_all_addresses() {
            return None;
        }
        let unused: Vec<UnusedTable> = aside.released.extract_if(.., |unused| unused.is_last()).collect();
        if aside.turn.is_empty() && unused.is_empty() {
            return None;
        }
        aside.is_building = true;
        let tables = std::mem::take(&mut aside.turn).into_iter().map(|number| {
            let record = &mut self.tables[number];
            record.stage = Stage::Building(FxHashSet::default());
            let linked = std::mem::take(&mut record.linked);
            let members = self.identities.members().only(linked.uses());
            UnbuiltTable { number, key: Arc::clone(&record.key), linked, members }
        });
        let tables = tables.collect();
        Some(TableJob { tables, workers: self.usage.workers(), _unused: unused })
    }

    /// Takes tables that were built into effect, for the pods that still want them or have not got newer ones meanwhile. Returns
    /// whether anything changed.
    pub fn finish(&mut self, state: &mut ClusterState, built: BuiltTables) -> bool {
        let Some(aside) = &mut self.aside else { return false };
        aside.is_building = false;
        let held = std::mem::take(&mut aside.held);
        let mut pending = PendingUpdate::default();
        for (number, linked, table) in built.0 {
            let record = &mut self.tables[number];
            record.linked = linked;
            record.table = table;
            if let Stage::Building(changed) = std::mem::replace(&mut record.stage, Stage::Built) {
                record.patch(changed, &self.identities);
            }
            pending.assigned.extend(&record.endpoints);
            pending.released.insert(number);
        }
        self.serve(&mut pending);
        for pod in held {
            self.assign_tables(state, pod, &mut pending);
        }
        let is_changed = self.settle(state, FxHashSet::default(), pending);
        self.close_what_reaches_too_far(state) || is_changed
    }
}

/// For how many pods the selectors of a key's rules are evaluated at most that no other rule has.
fn most_reached(state: &ClusterState, key: &TableKey) -> usize {
    let mut rules = Vec::new();
    for source in compile::sources(state, key) {
        compile::append_rules(state, key, &source, &mut rules);
    }
    let peer_sets = rules.iter().flat_map(|rule| match &rule.peers {
        EffectivePeers::Every => &[],
        EffectivePeers::AnyOf { peer_sets, .. } => peer_sets.as_slice(),
    });
    peer_sets.map(|peer_set| state.most_reached(peer_set)).sum()
}

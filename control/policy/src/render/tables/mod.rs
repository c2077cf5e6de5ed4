//! The workers' bitmap tables, kept consistent with the state.
//!
//! [`Tables::update`] handles only what the state reports as outdated. It finds the table keys of affected pods, compiles
//! new ones, gives addresses with changed peer sets their identities, patches tables that contain an added or removed
//! identity, and publishes all of it in one new [`PolicySet`]. What takes long to build may be left `aside`.

mod aside;
mod endpoints;
mod expand;
mod identities;
mod linked;
mod usage;

use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::forward::Forwarding;
use penstock_dataplane::names::{LearntNames, NameTable, NamedPod};
use penstock_dataplane::policy::{
    AddressOwner, AddressSet, Direction, Endpoint, EndpointId, EndpointPolicy, NodeId, PolicySet, RuleRef, RuleScope,
    RuleTable,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::compile::{self, EffectiveRule, TableKey, TooManyEntries};
use crate::model::PortProtocol;
use crate::state::{ClusterState, Outdated, PeerSetId, PodId, PodOrNode, Registry};

use aside::{Aside, UnusedTable};
pub use aside::{BuiltTables, TableJob};
use endpoints::{EndpointRecord, Sides, Stage, TableRecord, owner_of};
pub use expand::{ExpandedRule, Expansion};
use identities::{Identities, identity};
use linked::LinkedRules;
pub use usage::RuleUse;
use usage::UsageCounts;

/// The pods whose policies a set of tables enforces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PodScope {
    /// Every pod of the cluster: for queries.
    AllPods,
    /// The pods of the named node: for its workers.
    Node(String),
}

/// Tables for the pods in scope.
#[derive(Debug)]
pub struct Tables {
    scope: PodScope,
    endpoints: Registry<PodId, EndpointRecord>,
    tables: Registry<Arc<TableKey>, TableRecord>,
    identities: Identities,
    by_peer_set: FxHashMap<PeerSetId, FxHashSet<u32>>,
    by_name: FxHashMap<(String, PortProtocol), FxHashSet<u32>>,
    /// The tables whose rules name nodes.
    by_nodes: FxHashSet<u32>,
    usage: UsageCounts,
    /// The tables that are built beside the others; `None`: none.
    aside: Option<Aside>,
    /// The table of pods whose own is not built yet: it denies everything.
    unbuilt: EndpointPolicy,
    /// The domain names that pods learn; `None`: names match nothing.
    names: Option<Arc<NameTable>>,
    set: PolicySet,
}

/// The work of one update.
#[derive(Default)]
struct PendingUpdate {
    /// Endpoints to publish; a number may no longer be in use.
    endpoints: FxHashSet<u32>,
    /// Endpoints that may want other tables, or whose tables may be built now.
    assigned: FxHashSet<u32>,
    /// Tables to build.
    to_build: FxHashSet<u32>,
    /// Tables that an endpoint released.
    released: FxHashSet<u32>,
}

impl Tables {
    /// No tables yet. Cluster-wide evaluation needs both directions of every flow: it covers all pods, whatever the scope.
    pub fn new(scope: PodScope, reach: RuleScope) -> Self {
        let scope = match reach {
            RuleScope::BothSides => scope,
            RuleScope::ClusterWide => PodScope::AllPods,
        };
        let mut update = PolicySet::default().update();
        update.set_rule_scope(reach);
        Self {
            scope,
            endpoints: Registry::default(),
            tables: Registry::default(),
            identities: Identities::default(),
            by_peer_set: FxHashMap::default(),
            by_name: FxHashMap::default(),
            by_nodes: FxHashSet::default(),
            usage: UsageCounts::default(),
            aside: None,
            unbuilt: EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], []))),
            names: None,
            set: update.finish(),
        }
    }

    /// The tables after the last update.
    pub fn policy_set(&self) -> &PolicySet {
        &self.set
    }

    /// Enters the ports of this node's pods, as in [`PolicySetUpdate::set_local`]. Later updates keep them.
    ///
    /// [`PolicySetUpdate::set_local`]: penstock_dataplane::policy::PolicySetUpdate::set_local
    pub fn set_local(&mut self, forwarding: &Forwarding) {
        let mut update = self.set.update();
        // As in `publish`.
        self.set = PolicySet::default();
        update.set_local(forwarding);
        self.set = update.finish();
    }

    /// Sets the addresses at which pods may send to Services that the node's kernel translates
    /// ([`PolicySetUpdate::set_services`]). Later updates keep them.
    ///
    /// [`PolicySetUpdate::set_services`]: penstock_dataplane::policy::PolicySetUpdate::set_services
    pub fn set_services(&mut self, services: &Arc<AddressSet>) {
        let mut update = self.set.update();
        // As in `publish`.
        self.set = PolicySet::default();
        update.set_services(services);
        self.set = update.finish();
    }

    /// Updates the tables from the state. Returns whether anything changed.
    pub fn update(&mut self, state: &mut ClusterState) -> bool {
        let Outdated { mut pods, addresses, names, nodes } = state.take_outdated();
        let mut tables: FxHashSet<u32> = FxHashSet::default();
        if nodes {
            tables.extend(&self.by_nodes);
        }
        for name in &names {
            tables.extend(self.by_name.get(name).into_iter().flatten());
        }
        let endpoints = tables.into_iter().flat_map(|table| &self.tables[table].endpoints);
        pods.extend(endpoints.map(|endpoint| self.endpoints[*endpoint].pod));
        let mut pending = PendingUpdate::default();
        for pod in pods {
            self.assign_tables(state, pod, &mut pending);
        }
        let is_changed = self.settle(state, addresses, pending);
        self.close_what_reaches_too_far(state) || is_changed
    }

    /// Selectors are found to reach too far while their rules are compiled.
    fn close_what_reaches_too_far(&mut self, state: &mut ClusterState) -> bool {
        state.has_outdated_pods() && self.update(state)
    }

    /// Builds what is to be built at once, and publishes it.
    fn settle(
        &mut self,
        state: &mut ClusterState,
        mut addresses: FxHashSet<IpAddr>,
        mut pending: PendingUpdate,
    ) -> bool {
        self.leave_aside(state, &mut pending);
        self.serve(&mut pending);
        self.link(state, &mut pending);
        // Linking acquires and releases peer sets; that outdates addresses.
        addresses.extend(state.take_outdated_addresses());
        addresses.extend(self.shared_with_turn(state, &pending));
        let is_changed = !(addresses.is_empty() && pending.endpoints.is_empty() && pending.to_build.is_empty());
        if is_changed {
            self.publish_all(state, &addresses, &mut pending);
        }
        if self.aside.as_ref().is_none_or(Aside::has_all_addresses) {
            state.free_released();
        }
        is_changed
    }

    /// Gives outdated addresses their identities, builds tables, and publishes everything.
    fn publish_all(&mut self, state: &ClusterState, addresses: &FxHashSet<IpAddr>, pending: &mut PendingUpdate) {
        for address in addresses {
            let peer_sets = match state.owner(address) {
                Some(PodOrNode::Pod(pod)) => Some(state.peer_sets_at(pod, address)),
                Some(PodOrNode::Node(_)) | None => None,
            };
            self.identities.set(*address, peer_sets);
        }
        self.rebuild(pending);
        self.publish(state, addresses, pending);
    }

    /// Finds the table keys of a pod and assigns their tables.
    fn assign_tables(&mut self, state: &ClusterState, pod: PodId, pending: &mut PendingUpdate) {
        let owner = state.pod(pod).filter(|_| self.is_in_scope(state, pod)).map(owner_of);
        if let Some(number) = self.endpoints.find(&pod) {
            if owner.as_ref() != Some(&self.endpoints[number].owner) {
                self.remove_endpoint(pod, number, pending);
            } else if self.endpoints[number].wanted.tables().any(|table| self.tables[table].has_turn()) {
                self.aside.as_mut().expect("tables have turns").held.insert(pod);
                return;
            }
        }
        let Some(owner) = owner else { return };
        let number = self.endpoints.find_or_insert(&pod, || EndpointRecord::new(pod, owner));
        pending.assigned.insert(number);
        let [egress, ingress] = [Direction::Egress, Direction::Ingress].map(|direction| {
            let key = compile::table_key(state, pod, direction)?;
            Some(self.assign_table(state, number, key, pending))
        });
        let before = std::mem::replace(&mut self.endpoints[number].wanted, Sides { egress, ingress });
        before.tables().for_each(|table| self.release_table(number, table, pending));
    }

    fn remove_endpoint(&mut self, pod: PodId, number: u32, pending: &mut PendingUpdate) {
        let record = self.endpoints.remove(&pod).expect("the caller has found it");
        if let Some(aside) = &mut self.aside {
            aside.forget(number, &record);
        }
        for table in record.tables() {
            self.tables[table].endpoints.remove(&number);
            pending.released.insert(table);
        }
        pending.endpoints.insert(number);
    }

    fn is_in_scope(&self, state: &ClusterState, pod: PodId) -> bool {
        let in_scope = match &self.scope {
            PodScope::AllPods => true,
            PodScope::Node(name) => state.pod(pod).is_some_and(|pod| pod.node.as_ref() == Some(name)),
        };
        in_scope && state.is_present(pod)
    }

    /// Assigns the table of a key to an endpoint; creates it if needed.
    fn assign_table(&mut self, state: &ClusterState, endpoint: u32, key: TableKey, pending: &mut PendingUpdate) -> u32 {
        let table = match self.tables.find(&key) {
            Some(table) => table,
            None => {
                let key = Arc::new(key);
                let record = TableRecord {
                    key: Arc::clone(&key),
                    endpoints: FxHashSet::default(),
                    names: compile::peers_names(state, &key),
                    stage: Stage::Waiting,
                    linked: LinkedRules::default(),
                    table: self.unbuilt.clone(),
                };
                let names_nodes = key.nodes.is_some();
                let number = self.tables.insert(key, record);
                for name in &self.tables[number].names {
                    self.by_name.entry(name.clone()).or_default().insert(number);
                }
                if names_nodes {
                    self.by_nodes.insert(number);
                }
                pending.to_build.insert(number);
                number
            }
        };
        self.tables[table].endpoints.insert(endpoint);
        table
    }

    /// An endpoint has another table in place of this one, in effect or to come.
    fn release_table(&mut self, endpoint: u32, table: u32, pending: &mut PendingUpdate) {
        if !self.endpoints[endpoint].tables().any(|used| used == table) {
            self.tables[table].endpoints.remove(&endpoint);
            pending.released.insert(table);
        }
    }

    /// Takes the tables of assigned endpoints into effect, both directions at once, if both are built or are to be built now. What waits
    /// with something in effect is not published.
    fn serve(&mut self, pending: &mut PendingUpdate) {
        for number in std::mem::take(&mut pending.assigned) {
            let Some(record) = self.endpoints.get(number) else { continue };
            let is_built = |table: u32| self.tables[table].stage == Stage::Built || pending.to_build.contains(&table);
            let wanted = record.wanted;
            if wanted.tables().all(is_built) {
                let before = self.endpoints[number].served.replace(wanted);
                before.unwrap_or_default().tables().for_each(|table| self.release_table(number, table, pending));
            }
            let record = &mut self.endpoints[number];
            if let Some(aside) = &mut self.aside {
                aside.set_waiting(number, record);
            }
            if !record.is_waiting() || record.served.is_none() {
                pending.endpoints.insert(number);
            }
        }
    }

    /// Compiles the tables to build and removes those without endpoints. Acquires before it releases, so a peer set that
    /// stays in use is not rebuilt.
    fn link(&mut self, state: &mut ClusterState, pending: &mut PendingUpdate) {
        let mut unused = Vec::new();
        for table in &pending.released {
            // One whose turn it is goes afterwards.
            if self.tables.get(*table).is_some_and(|record| record.endpoints.is_empty() && !record.has_turn()) {
                pending.to_build.remove(table);
                unused.push(self.remove_table(*table));
            }
        }
        for table in &pending.to_build {
            let record = &mut self.tables[*table];
            record.linked = LinkedRules::of(&record.key, state);
            for source in compile::sources(state, &record.key) {
                record.linked.add(&source, &record.key, state);
            }
            record.linked.complete();
            for peer_set in record.linked.uses() {
                self.by_peer_set.entry(peer_set).or_default().insert(*table);
            }
            pending.endpoints.extend(&record.endpoints);
        }
        for unused in unused {
            match &mut self.aside {
                Some(aside) => aside.take_unused(unused, state),
                None => self.release(unused, state),
            }
        }
    }

    /// Removes a table, but for what it has acquired.
    fn remove_table(&mut self, table: u32) -> UnusedTable {
        let key = Arc::clone(&self.tables[table].key);
        let (number, record) = self.tables.withdraw(&*key).expect("the table is known by its key");
        for name in &record.names {
            remove(&mut self.by_name, name, table);
        }
        self.by_nodes.remove(&table);
        if record.stage == Stage::Built {
            self.usage.retire(table, &record.linked.rules, &record.table);
        }
        UnusedTable { number, linked: record.linked, table: record.table }
    }

    fn release(&mut self, UnusedTable { number, mut linked, .. }: UnusedTable, state: &mut ClusterState) {
        for peer_set in linked.uses() {
            remove(&mut self.by_peer_set, &peer_set, number);
        }
        for peer_set in linked.take_peer_sets(state).into_iter().flatten() {
            state.release(peer_set);
        }
        self.tables.free(number);
    }

    /// Builds new tables and patches those that contain an added or removed identity.
    fn rebuild(&mut self, pending: &mut PendingUpdate) {
        for table in &pending.to_build {
            let record = &mut self.tables[*table];
            record.table = record.linked.build(&record.key, self.identities.members(), self.usage.workers());
            record.stage = Stage::Built;
        }
        let mut patches: FxHashMap<u32, FxHashSet<u32>> = FxHashMap::default();
        for (identity, peer_set) in self.identities.take_changed() {
            for table in
                self.by_peer_set.get(&peer_set).into_iter().flatten().filter(|table| !pending.to_build.contains(table))
            {
                patches.entry(*table).or_default().insert(identity);
            }
        }
        for (table, changed) in patches {
            // None of one that is not used any more and has not released its peer sets yet.
            let Some(record) = self.tables.get_mut(table) else { continue };
            match &mut record.stage {
                // It is built from the identities of then.
                Stage::Waiting | Stage::Linking => {}
                Stage::Building(all) => all.extend(changed),
                Stage::Built => {
                    record.patch(changed, &self.identities);
                    pending.endpoints.extend(&record.endpoints);
                }
            }
        }
    }

    /// Publishes everything that changed in the next set.
    fn publish(&mut self, state: &ClusterState, addresses: &FxHashSet<IpAddr>, pending: &PendingUpdate) {
        let mut update = self.set.update();
        // Drops the set before, so that what it alone referenced is changed in place.
        self.set = PolicySet::default();
        for number in &pending.endpoints {
            let isolation =
                |table: Option<u32>| table.map_or(EndpointPolicy::Open, |table| self.tables[table].table.clone());
            let endpoint = self.endpoints.get(*number).map(|record| {
                let Sides { egress, ingress } = record.in_effect();
                Endpoint { egress: isolation(egress), ingress: isolation(ingress) }
            });
            update.set_endpoint(EndpointId(*number), endpoint);
            update.set_names(EndpointId(*number), self.names_of(state, *number));
        }
        for address in addresses {
            let owner = match state.owner(address) {
                None => None,
                Some(PodOrNode::Node(node)) => Some(AddressOwner::Node(NodeId(node))),
                Some(PodOrNode::Pod(pod)) => self.identities.at(address).map(|number| AddressOwner::Pod {
                    identity: identity(number),
                    endpoint: self.endpoints.find(&pod).map(EndpointId),
                    node: state.node_of(pod).map(NodeId),
                }),
            };
            update.set_address((*address).into(), owner);
        }
        self.set = update.finish();
    }

    /// The names that an endpoint's pod learns, if its egress rules have domain names. It is kept while they have none, but not for
    /// another pod of its name.
    fn names_of(&mut self, state: &ClusterState, endpoint: u32) -> Option<Arc<LearntNames>> {
        let all = self.names.as_ref()?;
        let record = self.endpoints.get(endpoint)?;
        let has_names = record.in_effect().egress.is_some_and(|table| match &self.tables[table].table {
            EndpointPolicy::Tiered(tiers) => tiers.has_names(),
            EndpointPolicy::Open | EndpointPolicy::Isolated(_) => false,
        });
        let pod = state.pod(record.pod)?;
        let mut addresses = pod.addresses.clone();
        addresses.sort_unstable();
        let named = NamedPod { name: pod.key.to_string(), created: pod.lifetime.created, addresses };
        let record = &mut self.endpoints[endpoint];
        if record.names.as_ref().is_some_and(|(known, _)| *known != named) {
            record.names = None;
        }
        if !has_names {
            return None;
        }
        let (_, names) = record.names.get_or_insert_with(|| (named.clone(), all.of(named)));
        Some(Arc::clone(names))
    }

    /// Whether a pod waits for tables of its policies: what is in effect for it is older, or, for a new pod, denies everything.
    pub fn is_waiting(&self, pod: PodId) -> bool {
        let is_held = self.aside.as_ref().is_some_and(|aside| aside.held.contains(&pod));
        is_held || self.endpoints.find(&pod).is_some_and(|number| self.endpoints[number].is_waiting())
    }

    /// The key of one direction's table of a pod; `None` if no policy applies or the pod is not in scope.
    pub fn key(&self, pod: PodId, direction: Direction) -> Option<&TableKey> {
        Some(&self.tables[self.table_of(pod, direction)?].key)
    }

    /// The effective rules of one direction of a pod; `None` if no policy applies or it is not in scope.
    pub fn rules(&self, pod: PodId, direction: Direction) -> Option<&[EffectiveRule]> {
        Some(&self.tables[self.table_of(pod, direction)?].linked.rules)
    }

    /// The effective rule that a verdict of this set names.
    pub fn rule(&self, rule: RuleRef) -> Option<&EffectiveRule> {
        let pod = self.endpoints.get(rule.endpoint.0)?.pod;
        self.rules(pod, rule.direction)?.get(rule.rule as usize)
    }

    /// The table number of one direction of a pod, from 0; `None` if no policy applies or it is not in scope.
    pub fn table_of(&self, pod: PodId, direction: Direction) -> Option<u32> {
        self.endpoints[self.endpoints.find(&pod)?].in_effect().get(direction)
    }

    /// The pods that are closed in a direction, since there are too many entries.
    pub fn closed(&self) -> impl Iterator<Item = (PodId, Direction, TooManyEntries)> {
        self.endpoints.iter().flat_map(|(_, record)| {
            let tables = record.wanted.tables().map(|table| &self.tables[table].key);
            tables.filter_map(|key| Some((record.pod, key.direction, key.closed?)))
        })
    }

    /// Has pods whose rules have domain names learn what DNS answers say, in this table. Without it such names match nothing.
    pub fn learn_names(&mut self, names: Arc<NameTable>) {
        self.names = Some(names);
    }

    /// Has tables that are built from now on count how often their rules decide, for this many workers.
    pub fn count_use(&mut self, workers: usize) {
        self.usage = UsageCounts::new(workers);
    }

    /// How often rules decided since the last call: those that did, some more than once.
    pub fn take_use(&mut self) -> Vec<RuleUse> {
        let live = self.tables.iter().map(|(number, record)| (number, record.linked.rules.as_slice(), &record.table));
        self.usage.take(live)
    }

    /// The pods in scope.
    pub fn pods(&self) -> impl Iterator<Item = PodId> {
        self.endpoints.iter().map(|(_, record)| record.pod)
    }

    /// How many identities and tables there are.
    pub fn statistics(&self) -> TableStatistics {
        let rules = self.tables.iter().map(|(_, record)| record.linked.rules.len()).sum();
        TableStatistics {
            endpoints: self.endpoints.len(),
            identities: self.identities.len(),
            tables: self.tables.len(),
            rules,
        }
    }
}

/// Sizes of a set of tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableStatistics {
    /// Pods in scope.
    pub endpoints: usize,
    /// Groups of addresses that rules distinguish.
    pub identities: usize,
    /// Distinct tables of pods in scope.
    pub tables: usize,
    /// Effective rules in them.
    pub rules: usize,
}

fn remove<K: Eq + std::hash::Hash>(index: &mut FxHashMap<K, FxHashSet<u32>>, key: &K, table: u32) {
    if let Some(tables) = index.get_mut(key) {
        tables.remove(&table);
        if tables.is_empty() {
            index.remove(key);
        }
    }
}

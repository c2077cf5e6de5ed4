//! The workers' bitmap tables, kept consistent with the state.
//!
//! [`Tables::update`] handles only what the state reports as outdated. It finds the table keys of affected pods, compiles
//! new ones, gives addresses with changed peer sets their identities, patches tables that contain an added or removed
//! identity, and publishes all of it in one new [`PolicySet`].

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
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::compile::{self, Dependencies, EffectiveRule, TableKey};
use crate::model::PortProtocol;
use crate::state::{ClusterState, Outdated, PeerSetId, PodId, PodOrNode, Registry};

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
    /// The domain names that pods learn; `None`: names match nothing.
    names: Option<Arc<NameTable>>,
    set: PolicySet,
}

/// A pod in scope and its tables; `None` where no policy applies.
#[derive(Debug)]
struct EndpointRecord {
    pod: PodId,
    egress: Option<u32>,
    ingress: Option<u32>,
    /// The domain names that this pod has learnt since its egress rules had some.
    names: Option<(NamedPod, Arc<LearntNames>)>,
}

#[derive(Debug)]
struct TableRecord {
    key: Arc<TableKey>,
    /// The endpoints that use it.
    endpoints: FxHashSet<u32>,
    dependencies: Dependencies,
    /// How many entries its policies have, if too many.
    too_many_entries: Option<usize>,
    linked: LinkedRules,
    table: EndpointPolicy,
}

/// The work of one update.
#[derive(Default)]
struct PendingUpdate {
    /// Endpoints whose tables may have changed; a number may no longer be in use.
    endpoints: FxHashSet<u32>,
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
        let Outdated { pods, mut addresses, names, nodes } = state.take_outdated();
        let mut pending = PendingUpdate::default();
        if nodes {
            pending.to_build.extend(&self.by_nodes);
        }
        for name in &names {
            pending.to_build.extend(self.by_name.get(name).into_iter().flatten());
        }
        for pod in pods {
            self.assign_tables(state, pod, &mut pending);
        }
        self.link(state, &mut pending);
        // Linking acquires and releases peer sets; that outdates addresses, but no pod and no port name.
        addresses.extend(state.take_outdated().addresses);
        if addresses.is_empty() && pending.endpoints.is_empty() && pending.to_build.is_empty() {
            return false;
        }
        for address in &addresses {
            let peer_sets = match state.owner(address) {
                Some(PodOrNode::Pod(pod)) => Some(state.peer_sets_at(pod, address)),
                Some(PodOrNode::Node(_)) | None => None,
            };
            self.identities.set(*address, peer_sets);
        }
        self.rebuild(&mut pending);
        self.publish(state, &addresses, &pending);
        true
    }

    /// Finds the table keys of a pod and assigns their tables.
    fn assign_tables(&mut self, state: &ClusterState, pod: PodId, pending: &mut PendingUpdate) {
        if !self.is_in_scope(state, pod) {
            let Some(number) = self.endpoints.find(&pod) else { return };
            let record = self.endpoints.remove(&pod).expect("found above");
            [record.egress, record.ingress]
                .into_iter()
                .flatten()
                .for_each(|table| self.release_table(number, table, pending));
            pending.endpoints.insert(number);
            return;
        }
        let open = || EndpointRecord { pod, egress: None, ingress: None, names: None };
        let number = self.endpoints.find_or_insert(&pod, open);
        pending.endpoints.insert(number);
        for direction in [Direction::Egress, Direction::Ingress] {
            let key = compile::table_key(state, pod, direction);
            let table = key.map(|key| self.assign_table(state, number, key, pending));
            let record = &mut self.endpoints[number];
            let slot = match direction {
                Direction::Egress => &mut record.egress,
                Direction::Ingress => &mut record.ingress,
            };
            let before = std::mem::replace(slot, table);
            if let Some(before) = before.filter(|before| Some(*before) != table) {
                self.release_table(number, before, pending);
            }
        }
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
                let dependencies = compile::dependencies(state, &key);
                let linked = LinkedRules::default();
                let (endpoints, table) =
                    (FxHashSet::default(), linked.build(&key, &self.identities, self.usage.workers()));
                let too_many_entries = compile::too_many_entries(state, &key);
                let record = TableRecord {
                    key: Arc::clone(&key),
                    endpoints,
                    dependencies: dependencies.clone(),
                    too_many_entries,
                    linked,
                    table,
                };
                let number = self.tables.insert(key, record);
                dependencies.names.into_iter().for_each(|name| {
                    self.by_name.entry(name).or_default().insert(number);
                });
                if dependencies.nodes {
                    self.by_nodes.insert(number);
                }
                pending.to_build.insert(number);
                number
            }
        };
        self.tables[table].endpoints.insert(endpoint);
        table
    }

    fn release_table(&mut self, endpoint: u32, table: u32, pending: &mut PendingUpdate) {
        self.tables[table].endpoints.remove(&endpoint);
        pending.released.insert(table);
    }

    /// Compiles the tables to build and removes those without endpoints. Acquires before it releases, so a peer set that
    /// stays in use is not rebuilt.
    fn link(&mut self, state: &mut ClusterState, pending: &mut PendingUpdate) {
        let mut unused = Vec::new();
        for table in &pending.released {
            if self.tables[*table].endpoints.is_empty() {
                let key = self.tables[*table].key.clone();
                let record = self.tables.remove(&*key).expect("the table is known by its key");
                pending.to_build.remove(table);
                self.forget_dependencies(*table, &record.dependencies);
                self.usage.retire(*table, &record.linked.rules, &record.table);
                unused.push((*table, record.linked));
            }
        }
        for table in &pending.to_build {
            let key = &self.tables[*table].key;
            let linked = LinkedRules::new(compile::rules(state, key), key, state);
            let record = &self.tables[*table];
            self.usage.retire(*table, &record.linked.rules, &record.table);
            unused.push((*table, std::mem::replace(&mut self.tables[*table].linked, linked)));
        }
        for (table, linked) in unused {
            for peer_set in linked.uses() {
                remove(&mut self.by_peer_set, &peer_set, table);
            }
            linked.unlink(state);
        }
        for table in &pending.to_build {
            for peer_set in self.tables[*table].linked.uses() {
                self.by_peer_set.entry(peer_set).or_default().insert(*table);
            }
            pending.endpoints.extend(&self.tables[*table].endpoints);
        }
    }

    fn forget_dependencies(&mut self, table: u32, dependencies: &Dependencies) {
        for name in &dependencies.names {
            remove(&mut self.by_name, name, table);
        }
        self.by_nodes.remove(&table);
    }

    /// Builds new tables and patches those that contain an added or removed identity.
    fn rebuild(&mut self, pending: &mut PendingUpdate) {
        for table in &pending.to_build {
            let record = &mut self.tables[*table];
            record.table = record.linked.build(&record.key, &self.identities, self.usage.workers());
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
            let record = &mut self.tables[table];
            let rows = changed.into_iter().map(|number| {
                let peer_sets = self.identities.peer_sets(number);
                (identity(number), if peer_sets.is_empty() { None } else { record.linked.row(peer_sets) })
            });
            record.table = match &record.table {
                EndpointPolicy::Open => unreachable!("a table is never open"),
                EndpointPolicy::Isolated(table) => EndpointPolicy::Isolated(Arc::new(table.with_identities(rows))),
                EndpointPolicy::Tiered(tiers) => EndpointPolicy::Tiered(Arc::new(tiers.with_identities(rows))),
            };
            pending.endpoints.extend(&record.endpoints);
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
            let endpoint = self
                .endpoints
                .get(*number)
                .map(|record| Endpoint { egress: isolation(record.egress), ingress: isolation(record.ingress) });
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
        let has_names = record.egress.is_some_and(|table| match &self.tables[table].table {
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
        let record = &self.endpoints[self.endpoints.find(&pod)?];
        match direction {
            Direction::Egress => record.egress,
            Direction::Ingress => record.ingress,
        }
    }

    /// The pods that are closed in a direction, since their NetworkPolicies have too many entries there, with their number.
    pub fn closed(&self) -> impl Iterator<Item = (PodId, Direction, usize)> {
        self.endpoints.iter().flat_map(|(_, record)| {
            let directions = [(Direction::Egress, record.egress), (Direction::Ingress, record.ingress)];
            directions
                .into_iter()
                .filter_map(|(direction, table)| Some((record.pod, direction, self.tables[table?].too_many_entries?)))
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

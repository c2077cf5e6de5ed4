//! The bitmap tables of the workers, kept in step with the state.
//!
//! A round of [`Tables::update`] looks only at what the state says is outdated: it finds the sides of the pods that may
//! have others, compiles those that are new, gives addresses whose classes changed their identities, patches the tables
//! that name an identity which came or went, and hands all of it to the next [`PolicySet`] at once.

mod expand;
mod identities;
mod linked;

use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::policy::{
    Direction, Endpoint, EndpointId, Isolation, NodeId, Owner, PolicySet, Reach, RuleRef, RuleTable,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::compile::{self, EffectiveRule, TableKey};
use crate::model::PortProtocol;
use crate::state::{AddressOwner, ClassId, Outdated, PodId, Registry, State};

pub use expand::{ExpandedRule, Expansion};
use identities::{Identities, identity};
use linked::LinkedRules;

/// Whose sides a set of tables enforces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PodScope {
    /// Every pod of the cluster: for questions about policy.
    AllPods,
    /// The pods of one node, by its name: for its workers.
    Node(String),
}

/// Tables for the pods in scope.
#[derive(Debug)]
pub struct Tables {
    scope: PodScope,
    endpoints: Registry<PodId, EndpointRecord>,
    tables: Registry<Arc<TableKey>, TableRecord>,
    identities: Identities,
    by_class: FxHashMap<ClassId, FxHashSet<u32>>,
    by_name: FxHashMap<(String, PortProtocol), FxHashSet<u32>>,
    set: PolicySet,
}

/// A pod in scope and its tables; `None` where it is open.
#[derive(Debug)]
struct EndpointRecord {
    pod: PodId,
    egress: Option<u32>,
    ingress: Option<u32>,
}

#[derive(Debug)]
struct TableRecord {
    key: Arc<TableKey>,
    /// How many sides of endpoints have it.
    endpoints: FxHashSet<u32>,
    /// The port names that it resolves on peers.
    names: Vec<(String, PortProtocol)>,
    linked: LinkedRules,
    table: Arc<RuleTable>,
}

/// What one round has to do.
#[derive(Default)]
struct PendingUpdate {
    /// Endpoints whose tables may be others; a number may be no endpoint's any more.
    endpoints: FxHashSet<u32>,
    /// Tables to make.
    to_build: FxHashSet<u32>,
    /// Tables that an endpoint left.
    released: FxHashSet<u32>,
}

impl Tables {
    /// No tables yet. Cluster-wide reach needs both sides of every flow: the scope is then all pods, whichever is asked
    /// for.
    pub fn new(scope: PodScope, reach: Reach) -> Self {
        let scope = match reach {
            Reach::BothSides => scope,
            Reach::ClusterWide => PodScope::AllPods,
        };
        let mut update = PolicySet::default().update();
        update.set_reach(reach);
        Self {
            scope,
            endpoints: Registry::default(),
            tables: Registry::default(),
            identities: Identities::default(),
            by_class: FxHashMap::default(),
            by_name: FxHashMap::default(),
            set: update.finish(),
        }
    }

    /// The tables as of the last update.
    pub fn policy_set(&self) -> &PolicySet {
        &self.set
    }

    /// Brings the tables in step with the state. Whether anything changed.
    pub fn update(&mut self, state: &mut State) -> bool {
        let Outdated { pods, mut addresses, names } = state.take_outdated();
        let mut pending = PendingUpdate::default();
        for name in &names {
            pending.to_build.extend(self.by_name.get(name).into_iter().flatten());
        }
        for pod in pods {
            self.assign_tables(state, pod, &mut pending);
        }
        self.link(state, &mut pending);
        // Linking acquired and released classes; no pod and no port name is outdated by that.
        addresses.extend(state.take_outdated().addresses);
        if addresses.is_empty() && pending.endpoints.is_empty() && pending.to_build.is_empty() {
            return false;
        }
        for address in &addresses {
            let classes = match state.owner(address) {
                Some(AddressOwner::Pod(pod)) => Some(state.classes_at(pod, address)),
                Some(AddressOwner::Node(_)) | None => None,
            };
            self.identities.set(*address, classes);
        }
        self.rebuild(&mut pending);
        self.publish(state, &addresses, &pending);
        true
    }

    /// Finds the sides of a pod and gives it their tables.
    fn assign_tables(&mut self, state: &State, pod: PodId, pending: &mut PendingUpdate) {
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
        let open = || EndpointRecord { pod, egress: None, ingress: None };
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

    fn is_in_scope(&self, state: &State, pod: PodId) -> bool {
        let here = match &self.scope {
            PodScope::AllPods => true,
            PodScope::Node(name) => state.pod(pod).is_some_and(|pod| pod.node.as_ref() == Some(name)),
        };
        here && state.is_present(pod)
    }

    /// The table of a side, which the endpoint has from now on.
    fn assign_table(&mut self, state: &State, endpoint: u32, key: TableKey, pending: &mut PendingUpdate) -> u32 {
        let table = match self.tables.find(&key) {
            Some(table) => table,
            None => {
                let key = Arc::new(key);
                let names = compile::names_on_peers(state, &key);
                let nothing = LinkedRules::default();
                let table = nothing.build(&self.identities);
                let (endpoints, linked) = (FxHashSet::default(), nothing);
                let record = TableRecord { key: key.clone(), endpoints, names: names.clone(), linked, table };
                let number = self.tables.insert(key, record);
                names.into_iter().for_each(|name| {
                    self.by_name.entry(name).or_default().insert(number);
                });
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

    /// Compiles the tables to make and forgets those that no endpoint has. Acquires before it releases, so that a class
    /// which stays in use stays as it is.
    fn link(&mut self, state: &mut State, pending: &mut PendingUpdate) {
        let mut unused = Vec::new();
        for table in &pending.released {
            if self.tables[*table].endpoints.is_empty() {
                let key = self.tables[*table].key.clone();
                let record = self.tables.remove(&*key).expect("the table is known by its key");
                pending.to_build.remove(table);
                self.forget_names(*table, &record.names);
                unused.push((*table, record.linked));
            }
        }
        for table in &pending.to_build {
            let rules = compile::rules(state, &self.tables[*table].key);
            let linked = LinkedRules::new(rules, state);
            unused.push((*table, std::mem::replace(&mut self.tables[*table].linked, linked)));
        }
        for (table, linked) in unused {
            for class in linked.uses() {
                remove(&mut self.by_class, &class, table);
            }
            linked.unlink(state);
        }
        for table in &pending.to_build {
            for class in self.tables[*table].linked.uses() {
                self.by_class.entry(class).or_default().insert(*table);
            }
            pending.endpoints.extend(&self.tables[*table].endpoints);
        }
    }

    fn forget_names(&mut self, table: u32, names: &[(String, PortProtocol)]) {
        for name in names {
            remove(&mut self.by_name, name, table);
        }
    }

    /// Makes the fresh tables and patches those that name an identity which came or went.
    fn rebuild(&mut self, pending: &mut PendingUpdate) {
        for table in &pending.to_build {
            self.tables[*table].table = self.tables[*table].linked.build(&self.identities);
        }
        let mut patches: FxHashMap<u32, FxHashSet<u32>> = FxHashMap::default();
        for (identity, class) in self.identities.take_changed() {
            for table in
                self.by_class.get(&class).into_iter().flatten().filter(|table| !pending.to_build.contains(table))
            {
                patches.entry(*table).or_default().insert(identity);
            }
        }
        for (table, changed) in patches {
            let record = &mut self.tables[table];
            let rows = changed.into_iter().map(|number| {
                let classes = self.identities.classes(number);
                (identity(number), if classes.is_empty() { None } else { record.linked.row(classes) })
            });
            record.table = Arc::new(record.table.with_identities(rows));
            pending.endpoints.extend(&record.endpoints);
        }
    }

    /// Hands everything that changed to the next set.
    fn publish(&mut self, state: &State, addresses: &FxHashSet<IpAddr>, pending: &PendingUpdate) {
        let mut update = self.set.update();
        // The set before is not needed any more: what only it held on to is changed in place.
        self.set = PolicySet::default();
        for number in &pending.endpoints {
            let isolation = |table: Option<u32>| match table {
                None => Isolation::Open,
                Some(table) => Isolation::Isolated(self.tables[table].table.clone()),
            };
            let endpoint = self
                .endpoints
                .get(*number)
                .map(|record| Endpoint { egress: isolation(record.egress), ingress: isolation(record.ingress) });
            update.set_endpoint(EndpointId(*number), endpoint);
        }
        for address in addresses {
            let owner = match state.owner(address) {
                None => None,
                Some(AddressOwner::Node(node)) => Some(Owner::Node(NodeId(node))),
                Some(AddressOwner::Pod(pod)) => self.identities.at(address).map(|number| Owner::Pod {
                    identity: identity(number),
                    endpoint: self.endpoints.find(&pod).map(EndpointId),
                    node: state.node_of(pod).map(NodeId),
                }),
            };
            update.set_address((*address).into(), owner);
        }
        self.set = update.finish();
    }

    /// The effective rules of one direction of a pod in scope; `None` if it is open or not in scope.
    pub fn rules(&self, pod: PodId, direction: Direction) -> Option<&[EffectiveRule]> {
        Some(&self.tables[self.table_of(pod, direction)?].linked.rules)
    }

    /// The effective rule that a verdict of this set names.
    pub fn rule(&self, rule: RuleRef) -> Option<&EffectiveRule> {
        let pod = self.endpoints.get(rule.endpoint.0)?.pod;
        self.rules(pod, rule.direction)?.get(rule.rule as usize)
    }

    /// Which table a direction of a pod in scope has, numbered from 0; `None` if it is open or not in scope.
    pub fn table_of(&self, pod: PodId, direction: Direction) -> Option<u32> {
        let record = &self.endpoints[self.endpoints.find(&pod)?];
        match direction {
            Direction::Egress => record.egress,
            Direction::Ingress => record.ingress,
        }
    }

    /// The pods in scope.
    pub fn pods(&self) -> impl Iterator<Item = PodId> {
        self.endpoints.iter().map(|(_, record)| record.pod)
    }

    /// How many identities and tables there are.
    pub fn statistics(&self) -> Statistics {
        let rules = self.tables.iter().map(|(_, record)| record.linked.rules.len()).sum();
        Statistics {
            endpoints: self.endpoints.len(),
            identities: self.identities.len(),
            tables: self.tables.len(),
            rules,
        }
    }
}

/// How many of each there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Statistics {
    /// Pods in scope.
    pub endpoints: usize,
    /// Classes of addresses that rules tell apart.
    pub identities: usize,
    /// Different sides of pods in scope.
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

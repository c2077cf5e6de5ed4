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
    AddressOwner, Direction, Endpoint, EndpointId, EndpointPolicy, NodeId, PolicySet, RuleRef, RuleScope, RuleTable,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::compile::{self, EffectiveRule, Side};
use crate::model::PortProtocol;
use crate::state::{ClassId, Holder, Outdated, PodId, Registry, State};

pub use expand::{ExpandedRule, Expansion};
use identities::{Identities, identity};
use linked::LinkedRules;

/// Whose sides a set of tables enforces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Every pod of the cluster: for questions about policy.
    AllPods,
    /// The pods of one node, by its name: for its workers.
    Node(String),
}

/// Tables for the pods in scope.
#[derive(Debug)]
pub struct Tables {
    scope: Scope,
    endpoints: Registry<PodId, EndpointRecord>,
    tables: Registry<Arc<Side>, TableRecord>,
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
    side: Arc<Side>,
    /// How many sides of endpoints have it.
    endpoints: FxHashSet<u32>,
    /// The port names that it resolves on peers.
    names: Vec<(String, PortProtocol)>,
    linked: LinkedRules,
    table: Arc<RuleTable>,
}

/// What one round has to do.
#[derive(Default)]
struct Round {
    /// Endpoints whose tables may be others; a number may be no endpoint's any more.
    endpoints: FxHashSet<u32>,
    /// Tables to make.
    fresh: FxHashSet<u32>,
    /// Tables that an endpoint left.
    left: FxHashSet<u32>,
}

impl Tables {
    /// No tables yet. Cluster-wide reach needs both sides of every flow: the scope is then all pods, whichever is asked
    /// for.
    pub fn new(scope: Scope, reach: RuleScope) -> Self {
        let scope = match reach {
            RuleScope::BothSides => scope,
            RuleScope::ClusterWide => Scope::AllPods,
        };
        let mut update = PolicySet::default().update();
        update.set_rule_scope(reach);
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
        let mut round = Round::default();
        for name in &names {
            round.fresh.extend(self.by_name.get(name).into_iter().flatten());
        }
        for pod in pods {
            self.place(state, pod, &mut round);
        }
        self.link(state, &mut round);
        // Linking acquired and released classes; no pod and no port name is outdated by that.
        addresses.extend(state.take_outdated().addresses);
        if addresses.is_empty() && round.endpoints.is_empty() && round.fresh.is_empty() {
            return false;
        }
        for address in &addresses {
            let classes = match state.holder(address) {
                Some(Holder::Pod(pod)) => Some(state.classes_at(pod, address)),
                Some(Holder::Node(_)) | None => None,
            };
            self.identities.set(*address, classes);
        }
        self.rebuild(&mut round);
        self.publish(state, &addresses, &round);
        true
    }

    /// Finds the sides of a pod and gives it their tables.
    fn place(&mut self, state: &State, pod: PodId, round: &mut Round) {
        if !self.is_in_scope(state, pod) {
            let Some(number) = self.endpoints.find(&pod) else { return };
            let record = self.endpoints.remove(&pod).expect("found above");
            [record.egress, record.ingress].into_iter().flatten().for_each(|table| self.leave(number, table, round));
            round.endpoints.insert(number);
            return;
        }
        let open = || EndpointRecord { pod, egress: None, ingress: None };
        let number = self.endpoints.find_or_insert(&pod, open);
        round.endpoints.insert(number);
        for direction in [Direction::Egress, Direction::Ingress] {
            let side = compile::side(state, pod, direction);
            let table = side.map(|side| self.join(state, number, side, round));
            let record = &mut self.endpoints[number];
            let slot = match direction {
                Direction::Egress => &mut record.egress,
                Direction::Ingress => &mut record.ingress,
            };
            let before = std::mem::replace(slot, table);
            if let Some(before) = before.filter(|before| Some(*before) != table) {
                self.leave(number, before, round);
            }
        }
    }

    fn is_in_scope(&self, state: &State, pod: PodId) -> bool {
        let here = match &self.scope {
            Scope::AllPods => true,
            Scope::Node(name) => state.pod(pod).is_some_and(|pod| pod.node.as_ref() == Some(name)),
        };
        here && state.is_present(pod)
    }

    /// The table of a side, which the endpoint has from now on.
    fn join(&mut self, state: &State, endpoint: u32, side: Side, round: &mut Round) -> u32 {
        let table = match self.tables.find(&side) {
            Some(table) => table,
            None => {
                let side = Arc::new(side);
                let names = compile::names_on_peers(state, &side);
                let nothing = LinkedRules::default();
                let table = nothing.build(&self.identities);
                let (endpoints, linked) = (FxHashSet::default(), nothing);
                let record = TableRecord { side: side.clone(), endpoints, names: names.clone(), linked, table };
                let number = self.tables.insert(side, record);
                names.into_iter().for_each(|name| {
                    self.by_name.entry(name).or_default().insert(number);
                });
                round.fresh.insert(number);
                number
            }
        };
        self.tables[table].endpoints.insert(endpoint);
        table
    }

    fn leave(&mut self, endpoint: u32, table: u32, round: &mut Round) {
        self.tables[table].endpoints.remove(&endpoint);
        round.left.insert(table);
    }

    /// Compiles the tables to make and forgets those that no endpoint has. Acquires before it releases, so that a class
    /// which stays in use stays as it is.
    fn link(&mut self, state: &mut State, round: &mut Round) {
        let mut unused = Vec::new();
        for table in &round.left {
            if self.tables[*table].endpoints.is_empty() {
                let side = self.tables[*table].side.clone();
                let record = self.tables.remove(&*side).expect("the table is known by its side");
                round.fresh.remove(table);
                self.forget_names(*table, &record.names);
                unused.push((*table, record.linked));
            }
        }
        for table in &round.fresh {
            let rules = compile::rules(state, &self.tables[*table].side);
            let linked = LinkedRules::new(rules, state);
            unused.push((*table, std::mem::replace(&mut self.tables[*table].linked, linked)));
        }
        for (table, linked) in unused {
            for class in linked.uses() {
                remove(&mut self.by_class, &class, table);
            }
            linked.unlink(state);
        }
        for table in &round.fresh {
            for class in self.tables[*table].linked.uses() {
                self.by_class.entry(class).or_default().insert(*table);
            }
            round.endpoints.extend(&self.tables[*table].endpoints);
        }
    }

    fn forget_names(&mut self, table: u32, names: &[(String, PortProtocol)]) {
        for name in names {
            remove(&mut self.by_name, name, table);
        }
    }

    /// Makes the fresh tables and patches those that name an identity which came or went.
    fn rebuild(&mut self, round: &mut Round) {
        for table in &round.fresh {
            self.tables[*table].table = self.tables[*table].linked.build(&self.identities);
        }
        let mut patches: FxHashMap<u32, FxHashSet<u32>> = FxHashMap::default();
        for (identity, class) in self.identities.take_changed() {
            for table in self.by_class.get(&class).into_iter().flatten().filter(|table| !round.fresh.contains(table)) {
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
            round.endpoints.extend(&record.endpoints);
        }
    }

    /// Hands everything that changed to the next set.
    fn publish(&mut self, state: &State, addresses: &FxHashSet<IpAddr>, round: &Round) {
        let mut update = self.set.update();
        // The set before is not needed any more: what only it held on to is changed in place.
        self.set = PolicySet::default();
        for number in &round.endpoints {
            let isolation = |table: Option<u32>| match table {
                None => EndpointPolicy::Open,
                Some(table) => EndpointPolicy::Isolated(self.tables[table].table.clone()),
            };
            let endpoint = self
                .endpoints
                .get(*number)
                .map(|record| Endpoint { egress: isolation(record.egress), ingress: isolation(record.ingress) });
            update.set_endpoint(EndpointId(*number), endpoint);
        }
        for address in addresses {
            let owner = match state.holder(address) {
                None => None,
                Some(Holder::Node(node)) => Some(AddressOwner::Node(NodeId(node))),
                Some(Holder::Pod(pod)) => self.identities.at(address).map(|number| AddressOwner::Pod {
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

    /// The effective rule that a judgement of this set names.
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

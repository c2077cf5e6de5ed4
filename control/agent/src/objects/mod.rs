//! The daemon's objects: the policy engine, this node's pods and the nodes' addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use penstock_dataplane::forward::Forwarding;
use penstock_dataplane::limits::LimitedPods;
use penstock_dataplane::names::{NameTable, Resolvers};
use penstock_dataplane::packet::Address;
use penstock_dataplane::policy::{AddressSet, Direction, PolicySet};
use penstock_policy::compile::table_key;
use penstock_policy::engine::{Engine, EngineSettings, TranslatedBy};
use penstock_policy::model::{Node, Object, ObjectChange, ObjectKey, ObjectRef, Pod};
use penstock_policy::render::tables::{BuiltTables, RuleUse, TableJob};
use penstock_policy::state::{PodOrNode, ServiceAddresses};
use penstock_sources::directory::unread_manifest;

use super::config::Resolver;
use super::connection_limits::{NewLimits, PodConnectionLimits};
use super::deleted_policies::DeletedPolicies;
use super::new_pods::{NewPods, TooManyNewPods};
use crate::discovery::PodProblem;

/// Up to this many claims of objects that are not met are named.
const MAX_PROBLEMS: usize = 32;

/// All objects, and which of them belong to this node.
pub(super) struct NodeObjects {
    engine: Engine,
    node: String,
    /// This node's object, if the source has one.
    node_object: Option<Node>,
    configured: Vec<IpAddr>,
    /// All addresses of this node: of its object, its interfaces and its configuration.
    addresses: Vec<IpAddr>,
    /// This node as the engine knows it.
    own: Option<Node>,
    pods: BTreeMap<ObjectKey, Pod>,
    /// Addresses of other nodes, by node name.
    others: BTreeMap<String, Vec<IpAddr>>,
    /// NetworkPolicies and ClusterNetworkPolicies that are in effect.
    policies: BTreeSet<ObjectRef>,
    /// Changes that the engine was given since they were last taken, if they are kept.
    kept: Option<Vec<ObjectChange>>,
    service_addresses: ServiceAddresses,
    unmet_claims: BTreeSet<String>,
    new_pods: NewPods,
    deleted_policies: DeletedPolicies,
    /// The domain names that pods learn, if these are followed.
    names: Option<Arc<NameTable>>,
    /// How many connections pods may have, by their annotations.
    limits: PodConnectionLimits,
}

pub(super) struct ChangeEffect {
    /// The compiled policy may differ.
    pub(super) policy: bool,
    pub(super) pods: bool,
    /// Addresses of this node or another changed.
    pub(super) nodes: bool,
    pub(super) services: bool,
}

impl NodeObjects {
    pub(super) fn new(node: &str, configured: &[IpAddr]) -> Self {
        Self {
            engine: Engine::new(EngineSettings::for_node(node)),
            node: node.to_owned(),
            node_object: None,
            configured: configured.to_vec(),
            addresses: Vec::new(),
            own: None,
            pods: BTreeMap::new(),
            others: BTreeMap::new(),
            policies: BTreeSet::new(),
            kept: None,
            service_addresses: ServiceAddresses::default(),
            unmet_claims: BTreeSet::new(),
            new_pods: NewPods::default(),
            deleted_policies: DeletedPolicies::default(),
            names: None,
            limits: PodConnectionLimits::default(),
        }
    }

    /// Changes of the source, with the addresses of new pods that it does not know yet, and the policies that a namespace's end does
    /// not take with it.
    pub(super) fn complete(&mut self, changes: Vec<ObjectChange>) -> Vec<ObjectChange> {
        let changes = changes.into_iter().map(|change| self.new_pods.complete(change)).collect();
        self.deleted_policies.complete(changes, self.engine.state(), Instant::now())
    }

    /// A CNI plugin has given these addresses to a pod. Returns the change that follows from it.
    pub(super) fn announce(
        &mut self,
        pod: &ObjectKey,
        addresses: &[IpAddr],
    ) -> Result<Option<ObjectChange>, TooManyNewPods> {
        let changed = self.new_pods.announce(pod, addresses, self.pods.get(pod), Instant::now())?;
        Ok(changed.map(|pod| ObjectChange::Set(Object::Pod(pod))))
    }

    /// Whether the source has told of this pod of the node.
    pub(super) fn has_pod(&self, pod: &ObjectKey) -> bool {
        self.pods.contains_key(pod)
    }

    /// Applies changes as one batch; `interfaces` are the addresses on the node's interfaces.
    pub(super) fn apply(
        &mut self,
        changes: impl IntoIterator<Item = ObjectChange>,
        interfaces: &[IpAddr],
    ) -> ChangeEffect {
        let (mut pods, mut nodes, mut services, mut limits) = (false, false, false, false);
        let mut others = Vec::new();
        for change in changes {
            match &change {
                ObjectChange::Set(Object::Node(node)) if node.name == self.node => {
                    self.node_object = Some(node.clone());
                    continue;
                }
                ObjectChange::Delete(ObjectRef::Node(name)) if *name == self.node => {
                    self.node_object = None;
                    continue;
                }
                ObjectChange::Set(Object::Node(node)) => {
                    let before = self.others.insert(node.name.clone(), node.addresses.clone());
                    nodes |= before.as_ref() != Some(&node.addresses);
                }
                ObjectChange::Delete(ObjectRef::Node(name)) => nodes |= self.others.remove(name).is_some(),
                ObjectChange::Set(Object::Pod(pod)) if pod.node.as_deref() == Some(&self.node) => {
                    let before = self.pods.insert(pod.key.clone(), pod.clone());
                    limits |= before.map(|pod| pod.limits).unwrap_or_default() != pod.limits;
                    pods = true;
                }
                ObjectChange::Set(Object::Pod(Pod { key, .. })) | ObjectChange::Delete(ObjectRef::Pod(key)) => {
                    pods |= self.pods.remove(key).is_some();
                }
                ObjectChange::Set(Object::Service(_)) | ObjectChange::Delete(ObjectRef::Service(_)) => services = true,
                ObjectChange::Set(object @ (Object::NetworkPolicy(_) | Object::ClusterNetworkPolicy(_))) => {
                    if object.is_staged() {
                        self.policies.remove(&object.reference());
                    } else {
                        self.policies.insert(object.reference());
                    }
                }
                ObjectChange::Delete(key @ (ObjectRef::NetworkPolicy(_) | ObjectRef::ClusterNetworkPolicy(_))) => {
                    self.policies.remove(key);
                }
                _ => {}
            }
            others.push(change);
        }
        let before = self.addresses.clone();
        others.extend(self.own_node(interfaces));
        nodes |= before != self.addresses;
        ChangeEffect { policy: self.apply_changes(others) || limits, pods, nodes, services }
    }

    /// Has the engine count how often each rule decides, for this many workers. Call it before there are objects.
    pub(super) fn count_use(&mut self, workers: usize) {
        self.engine.count_use(workers);
    }

    /// Has pods learn domain names in this table. Call it before there are objects.
    pub(super) fn learn_names(&mut self, names: Arc<NameTable>) {
        self.engine.learn_names(Arc::clone(&names));
        self.names = Some(names);
    }

    /// From now on leaves tables with more entries than these aside.
    pub(super) fn build_aside(&mut self, at_once: usize) {
        self.engine.build_aside(at_once);
    }

    /// Compiles up to this many rules of tables that were left aside; returns tables once all of theirs are.
    pub(super) fn prepare_tables(&mut self, most: usize) -> Option<TableJob> {
        self.engine.prepare_tables(most)
    }

    /// Takes tables that were left aside. Returns whether the policy may differ.
    pub(super) fn finish_tables(&mut self, built: BuiltTables) -> bool {
        self.engine.finish_tables(built)
    }

    /// Sets who translates what pods send to Services, which questions about these depend on.
    pub(super) fn set_translated_by(&mut self, who: TranslatedBy) {
        self.engine.set_translated_by(who);
    }

    /// The domain names that pods learn, if these are followed.
    pub(super) fn names(&self) -> Option<&Arc<NameTable>> {
        self.names.as_ref()
    }

    pub(super) fn take_use(&mut self) -> Vec<RuleUse> {
        self.engine.take_use()
    }

    /// Notes what objects claim that they do not get, and logs what is new of it.
    pub(super) fn note_unmet_claims(&mut self) {
        let conflicts = self.engine.state().address_conflicts(MAX_PROBLEMS);
        let left_out = self.service_addresses.left_out.iter().map(|(namespace, count)| {
            format!(
                "namespace {namespace}: {count} addresses of its Services or more are beyond its share: egress policy is for \
                 these addresses themselves, not for the pods behind them: use fewer externalIPs"
            )
        });
        let conflicts = conflicts.iter().map(ToString::to_string);
        let problems = conflicts.chain(left_out).take(MAX_PROBLEMS).collect::<BTreeSet<_>>();
        for problem in problems.difference(&self.unmet_claims) {
            tracing::warn!("{problem}");
        }
        for problem in self.unmet_claims.difference(&problems) {
            tracing::info!("resolved: {problem}");
        }
        self.unmet_claims = problems;
    }

    /// What objects claim that they do not get.
    pub(super) fn unmet_claims(&self) -> &BTreeSet<String> {
        &self.unmet_claims
    }

    /// Applies the addresses on the node's interfaces. Returns whether the policy may differ.
    pub(super) fn apply_addresses(&mut self, interfaces: &[IpAddr]) -> bool {
        match self.own_node(interfaces) {
            Some(change) => self.apply_changes(vec![change]),
            None => false,
        }
    }

    fn apply_changes(&mut self, changes: Vec<ObjectChange>) -> bool {
        if let Some(kept) = &mut self.kept {
            kept.extend(changes.iter().cloned());
        }
        self.engine.apply(changes)
    }

    /// Keeps what the engine is given from now on for [`NodeObjects::take_changes`], or no more.
    pub(super) fn keep_changes(&mut self, keeps: bool) {
        match keeps {
            true => _ = self.kept.get_or_insert_default(),
            false => self.kept = None,
        }
    }

    /// Takes the changes that the engine was given since the last call; none while they are not kept.
    pub(super) fn take_changes(&mut self) -> Vec<ObjectChange> {
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Sets the configured addresses of this node; they take effect at the next read of the network.
    pub(super) fn set_configured(&mut self, configured: &[IpAddr]) {
        self.configured = configured.to_vec();
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// This node's pods.
    pub(super) fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// This node's pods with the addresses that they own, and a problem for each address that two pods claim.
    pub(super) fn resolved_pods(&self) -> (Vec<Pod>, BTreeSet<PodProblem>) {
        let (mut pods, mut problems) = (Vec::with_capacity(self.pods.len()), BTreeSet::new());
        for pod in self.pods.values() {
            let mut pod = pod.clone();
            if !pod.host_network && !pod.finished {
                let second = pod.key.clone();
                pod.addresses.retain(|&address| match self.owner(address) {
                    Some(first) if *first != second => {
                        problems.insert(PodProblem::AddressTaken {
                            first: first.clone(),
                            second: second.clone(),
                            address,
                        });
                        false
                    }
                    _ => true,
                });
            }
            pods.push(pod);
        }
        (pods, problems)
    }

    /// Why objects are not enforced as they are meant: none is of this node, or manifests could not be read.
    pub(super) fn problems(&self) -> Vec<String> {
        let closed = self.policies.iter().filter_map(unread_manifest).map(|file| {
            format!("manifest {file} is refused, and its last good objects are not known: the pods that it may be about are closed; correct it")
        });
        self.wrong_node().into_iter().chain(closed).collect()
    }

    /// Whether manifests could not be read, so that any interface may be a pod's.
    pub(super) fn are_incomplete(&self) -> bool {
        self.policies.iter().any(|policy| unread_manifest(policy).is_some())
    }

    /// If the source has other nodes, or pods of others, and nothing of this one: then its name is wrong, or it is not registered yet.
    pub(super) fn wrong_node(&self) -> Option<String> {
        const SHOWN: usize = 5;
        if self.node_object.is_some() || !self.pods.is_empty() {
            return None;
        }
        let (what, names): (_, BTreeSet<&str>) = match self.others.is_empty() {
            false => ("there is no such Node, but", self.others.keys().map(String::as_str).collect()),
            true => {
                let pods = self.engine.state().pods().filter_map(|(_, pod)| pod.node.as_deref());
                ("no pod is on this node, but there are pods on", pods.collect())
            }
        };
        let more = if names.len() > SHOWN { ", …" } else { "" };
        let shown: Vec<&str> = names.into_iter().take(SHOWN).collect();
        (!shown.is_empty()).then(|| {
            format!(
                "node = \"{}\": {what} {}{more}: no pod of this machine is known, and all are open; set the name that the API server has for it",
                self.node,
                shown.join(", ")
            )
        })
    }

    /// The pods of this node that policy is about, in any direction.
    pub(super) fn pods_under_policy(&self) -> BTreeSet<ObjectKey> {
        let state = self.engine.state();
        let is_restricted = |pod| {
            [Direction::Egress, Direction::Ingress].iter().any(|&direction| table_key(state, pod, direction).is_some())
        };
        self.pods.keys().filter(|key| state.find_pod(key).is_some_and(is_restricted)).cloned().collect()
    }

    /// The pod that owns this address under the policy.
    fn owner(&self, address: IpAddr) -> Option<&ObjectKey> {
        match self.engine.state().owner(&address)? {
            PodOrNode::Pod(holder) => self.engine.state().pod(holder).map(|pod| &pod.key),
            PodOrNode::Node(_) => None,
        }
    }

    /// Whether this pod owns `address` under the policy.
    pub(super) fn has(&self, pod: &ObjectKey, address: IpAddr) -> bool {
        self.owner(address) == Some(pod)
    }

    /// NetworkPolicies and ClusterNetworkPolicies of the cluster that are in effect.
    pub(super) fn policies(&self) -> usize {
        self.policies.len()
    }

    pub(super) fn node_addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// The addresses of other nodes, but for those that a pod has.
    pub(super) fn other_nodes(&self) -> impl Iterator<Item = IpAddr> {
        let is_nodes = |address: &IpAddr| matches!(self.engine.state().owner(address), Some(PodOrNode::Node(_)));
        self.others.values().flatten().copied().filter(is_nodes)
    }

    /// The addresses of this node's pods, served or not.
    pub(super) fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        let running = self.pods.values().filter(|pod| !pod.host_network && !pod.finished);
        let addresses = running.flat_map(|pod| pod.addresses.iter().copied());
        addresses.filter(|address| !self.addresses.contains(address)).collect()
    }

    /// Reads the addresses of Services at which egress policy is postponed again, if they may have changed. Returns whether they have.
    pub(super) fn refresh_service_addresses(&mut self) -> bool {
        let Some(addresses) = self.engine.take_service_addresses() else { return false };
        let is_changed = addresses.addresses != self.service_addresses.addresses;
        self.service_addresses = addresses;
        is_changed
    }

    pub(super) fn service_addresses(&self) -> &BTreeSet<IpAddr> {
        &self.service_addresses.addresses
    }

    /// The DNS servers that these stand for on a node with these addresses; none, if nobody learns names.
    pub(super) fn resolvers(&self, configured: &[Resolver], local: &BTreeSet<IpNet>) -> Resolvers {
        if self.names.is_none() {
            return Resolvers::default();
        }
        let state = self.engine.state();
        let (mut addresses, mut blocks): (BTreeSet<&IpAddr>, _) = (BTreeSet::new(), Vec::new());
        for resolver in configured {
            match resolver {
                Resolver::Block(block) => blocks.push(*block),
                Resolver::Local(address) => {
                    addresses.extend(Some(address).filter(|_| local.contains(&(*address).into())))
                }
                Resolver::Service(key) => {
                    addresses
                        .extend(state.service(key).into_iter().flat_map(|it| it.addresses.iter().chain(&it.external)));
                }
            }
        }
        Resolvers::new(addresses.into_iter().map(|address| Address::from(*address)), blocks)
    }

    /// Sets the addresses of Services at which egress policy is postponed.
    pub(super) fn postpone_at(&mut self, services: &Arc<AddressSet>) {
        self.engine.set_services(services);
    }

    /// The policy for this node's pods, with the ports of this table.
    pub(super) fn policy_set(&mut self, forwarding: &Forwarding) -> PolicySet {
        self.engine.set_local(forwarding);
        self.engine.policy_set().clone()
    }

    /// The pods of this node whose connections are limited, with the ports of this table, and limits that are new.
    pub(super) fn limited_pods(&mut self, forwarding: &Forwarding) -> (LimitedPods, Vec<NewLimits>) {
        let limited = self.pods.values().filter(|pod| !pod.limits.is_empty() && !pod.host_network && !pod.finished);
        let limited = limited.filter_map(|pod| {
            let own: Vec<IpAddr> = pod.addresses.iter().copied().filter(|&it| self.has(&pod.key, it)).collect();
            let port = own.iter().find_map(|&address| forwarding.pod_port(address.into()))?;
            Some((pod.key.clone(), pod.limits, port, own))
        });
        let limited: Vec<_> = limited.collect();
        self.limits.set(limited.iter().map(|(key, limits, port, own)| (key, *limits, *port, own.clone())))
    }

    /// The limits of pods' connections that are in effect.
    pub(super) fn limits(&self) -> &PodConnectionLimits {
        &self.limits
    }

    /// This node with all of its addresses, if they differ from what the engine knows.
    fn own_node(&mut self, interfaces: &[IpAddr]) -> Option<ObjectChange> {
        let object = self.node_object.iter().flat_map(|node| &node.addresses);
        let all: BTreeSet<IpAddr> = object.chain(&self.configured).chain(interfaces).copied().collect();
        self.addresses = all.into_iter().collect();
        let (labels, status_addresses) = self
            .node_object
            .as_ref()
            .map(|node| (node.labels.clone(), node.status_addresses.clone()))
            .unwrap_or_default();
        let own = Node { name: self.node.clone(), labels, addresses: self.addresses.clone(), status_addresses };
        let is_known = self.own.as_ref() == Some(&own) || (self.own.is_none() && own.addresses.is_empty());
        (!is_known).then(|| ObjectChange::Set(Object::Node(self.own.insert(own).clone())))
    }
}

#[cfg(test)]
mod tests;

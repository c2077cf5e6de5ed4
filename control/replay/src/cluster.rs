//! Makes what a replay needs from a cluster's objects: tables, a port for each pod, names.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use penstock_dataplane::Snapshot;
use penstock_dataplane::forward::{Encapsulation, Forwarding, Mac, Port, PortId, PortKind, WELL_KNOWN_TUNNEL_PORTS};
use penstock_dataplane::names::Resolvers;
use penstock_dataplane::packet::{Address, Flow};
use penstock_dataplane::policy::{AddressSet, RuleScope};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange, ObjectKey};
use penstock_policy::render::tables::PodScope;
use penstock_policy::state::{ClusterState, PodId, PodOrNode};
use rustc_hash::FxHashMap;

use super::rules::RuleNames;

/// The host port: into the node's own stack.
pub const HOST: PortId = PortId(0);
/// The uplink: the port from which everything external comes.
pub const UPLINK: PortId = PortId(1);
const FIRST_POD: usize = 2;

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("--node {name}: the manifests have no Node of this name and no Pod on it; they have {known}")]
    UnknownNode {
        /// The name from `--node`.
        name: String,
        /// The names in the manifests.
        known: String,
    },
    #[error("{0} pods exceed the replay's 65,534 ports: select the pods of one node with --node")]
    TooManyPods(usize),
}

pub struct ReplayCluster {
    engine: Engine,
    scope: PodScope,
    snapshot: Snapshot,
    service_cidrs: Vec<IpNet>,
    names: FxHashMap<Address, Box<str>>,
    postponed: Arc<AddressSet>,
    ports: FxHashMap<ObjectKey, PortId>,
    rules: RuleNames,
}

impl ReplayCluster {
    /// A cluster of these objects. `node` selects the local pods; all pods are local without it.
    ///
    /// # Errors
    /// The node is unknown, or there are too many pods.
    pub fn new(
        objects: impl IntoIterator<Item = Object>,
        node: Option<&str>,
        reach: RuleScope,
    ) -> Result<Self, ClusterError> {
        let scope = node.map_or(PodScope::AllPods, |node| PodScope::Node(node.to_owned()));
        let settings = EngineSettings { scope: scope.clone(), reach };
        let mut engine = Engine::new(settings);
        engine.learn_names(Arc::default());
        engine.apply(objects.into_iter().map(ObjectChange::Set));
        if let Some(name) = node {
            check_node(engine.state(), name)?;
        }
        let mut cluster = Self {
            engine,
            scope,
            snapshot: Snapshot::default(),
            service_cidrs: Vec::new(),
            names: FxHashMap::default(),
            postponed: Arc::default(),
            ports: FxHashMap::default(),
            rules: RuleNames::default(),
        };
        cluster.update_rules()?;
        Ok(cluster)
    }

    /// The same cluster with these blocks of cluster addresses, as the setting `service_cidrs`.
    pub fn with_service_cidrs(mut self, blocks: &[IpNet]) -> Result<Self, ClusterError> {
        self.service_cidrs = blocks.to_vec();
        self.update_rules()?;
        Ok(self)
    }

    /// Applies changes atomically. Returns the addresses whose owner changed: connections of the previous owner must not
    /// pass to the next one.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = ObjectChange>) -> Result<Vec<Address>, ClusterError> {
        self.engine.apply(changes);
        let before = std::mem::take(&mut self.names);
        self.update_rules()?;
        let changed_owner = before.iter().filter(|(address, name)| self.names.get(address) != Some(name));
        let mut changed_owner: Vec<Address> = changed_owner.map(|(address, _)| *address).collect();
        changed_owner.sort_unstable();
        Ok(changed_owner)
    }

    /// Makes a new snapshot from the engine's state.
    fn update_rules(&mut self) -> Result<(), ClusterError> {
        let epoch = self.snapshot.epoch.next();
        let forwarding = self.forwarding()?;
        self.engine.set_local(&forwarding);
        // Egress policy is postponed there, as in a daemon.
        let translated = self.engine.state().service_addresses();
        self.postponed = Arc::new(translated.addresses.into_iter().map(Address::from).collect());
        self.engine.set_services(&self.postponed);
        // A capture does not say which of its servers is the cluster's.
        self.snapshot =
            Snapshot::new(epoch, self.engine.policy_set().clone(), forwarding).with_resolvers(Resolvers::all());
        self.names = names(self.engine.state());
        self.rules.update_rules(&self.engine);
        Ok(())
    }

    /// Whether the node's kernel may have translated a packet that comes from its stack: one of a pod of this node, which the stack
    /// sends on, or one with the node's own address, which it gives to what it masquerades.
    pub(super) fn may_be_translated(&self, flow: &Flow) -> bool {
        let state = self.engine.state();
        let is_here = |node: Option<&str>| match &self.scope {
            PodScope::AllPods => true,
            PodScope::Node(own) => node == Some(own),
        };
        match state.owner(&flow.src.into()) {
            Some(PodOrNode::Pod(pod)) => state.pod(pod).is_some_and(|pod| is_here(pod.node.as_deref())),
            Some(PodOrNode::Node(node)) => is_here(state.node_name(node)),
            None => false,
        }
    }

    fn forwarding(&mut self) -> Result<Forwarding, ClusterError> {
        let state = self.engine.state();
        let is_local = |name: Option<&str>| match &self.scope {
            PodScope::AllPods => true,
            PodScope::Node(node) => name == Some(node),
        };
        let node = state.addresses().filter_map(|(address, holder)| match holder {
            PodOrNode::Node(node) if is_local(state.node_name(node)) => Some(Address::from(address)),
            _ => None,
        });
        let nodes = state.addresses().filter_map(|(address, holder)| match holder {
            PodOrNode::Node(_) => Some(Address::from(address)),
            PodOrNode::Pod(_) => None,
        });
        // The objects do not describe the node's own tunnels.
        let encapsulation = Encapsulation::refused(WELL_KNOWN_TUNNEL_PORTS, nodes, []);
        let mut forwarding =
            Forwarding::new(node).with_encapsulation(Arc::new(encapsulation)).with_services(&self.service_cidrs);
        let mut insert = |id: PortId, kind, addresses: Vec<Address>| {
            let mac = |end| Mac([2, 0, 0, end, (id.0 >> 8) as u8, id.0 as u8]);
            // Captured packets may exceed a link's MTU: the kernel had not segmented them yet.
            let port = Port::new(kind, mac(1), mac(2), u16::MAX, addresses);
            forwarding.insert(id, port).expect("the state has one owner for each address");
        };
        insert(HOST, PortKind::Host, Vec::new());
        insert(UPLINK, PortKind::Uplink, Vec::new());
        let local = self.engine.tables().pods().filter_map(|pod| Some((state.pod(pod)?, pod)));
        // Cluster-wide evaluation has tables for all pods.
        let mut keys: Vec<(_, PodId)> = local.filter(|(pod, _)| is_local(pod.node.as_deref())).collect();
        keys.sort_unstable_by(|(a, _), (b, _)| a.key.cmp(&b.key));
        if keys.len() > usize::from(u16::MAX) - FIRST_POD {
            return Err(ClusterError::TooManyPods(keys.len()));
        }
        self.ports.clear();
        for (place, (pod, number)) in keys.into_iter().enumerate() {
            let id = PortId((place + FIRST_POD) as u16);
            let own = |address: &&IpAddr| state.owner(address) == Some(PodOrNode::Pod(number));
            insert(id, PortKind::Pod, pod.addresses.iter().filter(own).copied().map(Address::from).collect());
            self.ports.insert(pod.key.clone(), id);
        }
        Ok(forwarding)
    }

    #[inline]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The tables for the pipeline, and the rules known so far.
    #[inline]
    pub(super) fn parts(&mut self) -> (&Snapshot, &mut RuleNames) {
        (&self.snapshot, &mut self.rules)
    }

    pub fn rules(&self) -> &RuleNames {
        &self.rules
    }

    /// The owner of an address: `namespace/name` of a pod, `node:name` of a node.
    #[inline]
    pub fn name(&self, address: Address) -> Option<&str> {
        self.names.get(&address).map(|name| &**name)
    }

    /// The owner of an address, or else the address.
    pub(super) fn display_name(&self, address: Address) -> String {
        self.name(address).map_or_else(|| IpAddr::from(address).to_string(), str::to_owned)
    }

    /// Whether the node's kernel translates what pods send to this address.
    #[inline]
    pub(super) fn is_postponed(&self, address: Address) -> bool {
        self.postponed.contains(&address)
    }

    pub(super) fn pod_ports(&self) -> impl Iterator<Item = (&ObjectKey, PortId)> {
        self.ports.iter().map(|(pod, port)| (pod, *port))
    }

    pub fn pod_port(&self, pod: &ObjectKey) -> Option<PortId> {
        self.ports.get(pod).copied()
    }

    pub fn state(&self) -> &ClusterState {
        self.engine.state()
    }
}

fn names(state: &ClusterState) -> FxHashMap<Address, Box<str>> {
    let name = |holder| match holder {
        PodOrNode::Pod(pod) => state.pod(pod).map(|pod| pod.key.to_string()),
        PodOrNode::Node(node) => state.node_name(node).map(|name| format!("node:{name}")),
    };
    state
        .addresses()
        .filter_map(|(address, holder)| Some((Address::from(address), name(holder)?.into_boxed_str())))
        .collect()
}

fn check_node(state: &ClusterState, name: &str) -> Result<(), ClusterError> {
    let of_pods = state.pods().filter_map(|(_, pod)| pod.node.clone());
    let of_nodes = state.addresses().filter_map(|(_, holder)| match holder {
        PodOrNode::Node(node) => state.node_name(node).map(str::to_owned),
        PodOrNode::Pod(_) => None,
    });
    let known: std::collections::BTreeSet<String> = of_pods.chain(of_nodes).collect();
    if known.contains(name) {
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { Vec::from_iter(known).join(", ") };
    Err(ClusterError::UnknownNode { name: name.to_owned(), known })
}

//! From learnable flows to one policy for each workload.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::packet::{Address, Flow, Protocol};
use penstock_dataplane::policy::Direction;

use crate::model::{
    IpBlock, LabelOperator, NetworkPolicy, ObjectKey, Peer, Peers, PolicyPort, PolicyPorts, PortMatch, PortProtocol,
    Requirement, Rule, Selector, Staging,
};
use crate::state::{ClusterState, PodId, PodOrNode};

use super::{Block, BlockLimits, Evidence, LearnSettings, LearnableFlow, Workload, WorkloadId, Workloads, cover};

/// The label that every Namespace has
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/namespaces/#automatic-labelling>).
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
/// Where DNS servers listen, for UDP and, for answers that do not fit, for TCP (RFC 7766 section 5).
const DNS: u16 = 53;
/// Longest name of an object (RFC 1123 subdomain), with room for a number behind it.
const LONGEST_NAME: usize = 240;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LearnedPolicy {
    pub policy: NetworkPolicy,
    pub workload: WorkloadId,
    /// Its ingress rules, in the policy's order.
    pub ingress: Vec<LearnedRule>,
    /// Its egress rules, in the policy's order.
    pub egress: Vec<LearnedRule>,
}

/// Peers with the same ports, and what was seen of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LearnedRule {
    /// In the rule's order, each with its connections on all ports.
    pub peers: Vec<(LearnedPeer, Evidence)>,
    /// In the rule's order, each with all its connections.
    pub ports: Vec<(LearnedPort, Evidence)>,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LearnedPeer {
    Workload(WorkloadId),
    ServiceAddress {
        service: ObjectKey,
        address: IpAddr,
    },
    /// The address of a node other than the pod's own.
    Node {
        node: String,
        address: IpAddr,
    },
    /// A backend of a Service that is neither pod nor node.
    Backend {
        service: ObjectKey,
        address: IpAddr,
    },
    /// Addresses outside of the cluster.
    Outside(Block),
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LearnedPort {
    pub protocol: PortProtocol,
    /// Its number, or the name that all pods give to it.
    pub which: PortName,
    /// Whether it was added for DNS over TCP, and not seen.
    pub is_added: bool,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PortName {
    Number(u16),
    /// Its name on every pod that it is a port of.
    Name(String),
}

impl LearnedPort {
    fn number(protocol: PortProtocol, number: u16) -> Self {
        Self { protocol, which: PortName::Number(number), is_added: false }
    }

    fn to_policy(&self) -> PolicyPort {
        let which = match &self.which {
            PortName::Number(number) => PortMatch::Range { first: *number, last: *number },
            PortName::Name(name) => PortMatch::Name(name.clone()),
        };
        PolicyPort { protocol: self.protocol, which }
    }
}

/// The ports of a peer, each with its connections.
type PortEvidence = BTreeMap<LearnedPort, Evidence>;
/// Ports, each with the addresses outside that have connections on it.
type OutsideEvidence = BTreeMap<LearnedPort, BTreeMap<IpAddr, Evidence>>;

/// Needs of one direction of a workload: ports by peer. Addresses outside are grouped at the end.
#[derive(Default)]
struct Needs {
    peers: BTreeMap<LearnedPeer, PortEvidence>,
    outside: OutsideEvidence,
}

/// The policies for these flows, sorted by namespace and name: one for each workload with a flow, in both directions.
pub fn policies<'a>(
    state: &ClusterState,
    workloads: &Workloads,
    flows: impl IntoIterator<Item = &'a LearnableFlow>,
    settings: &LearnSettings,
) -> Vec<LearnedPolicy> {
    let mut learner = Learner { state, workloads, settings, needs: BTreeMap::new() };
    flows.into_iter().for_each(|flow| learner.learn(flow));
    let limits = limits(state, settings);
    let mut names: BTreeSet<ObjectKey> = state.policies().map(|(policy, _)| policy.key.clone()).collect();
    let mut needs: BTreeMap<WorkloadId, [Vec<LearnedRule>; 2]> = BTreeMap::new();
    for ((workload, direction), of_direction) in learner.needs {
        let place = usize::from(direction == Direction::Egress);
        needs.entry(workload).or_default()[place] = rules(of_direction, &limits);
    }
    let mut policies: Vec<LearnedPolicy> = needs
        .into_iter()
        .map(|(workload, [ingress, egress])| {
            let key = name(workloads, workload, &mut names);
            policy(workloads, workload, key, ingress, egress)
        })
        .collect();
    policies.sort_by(|a, b| a.policy.key.cmp(&b.policy.key));
    policies
}

struct Learner<'a> {
    state: &'a ClusterState,
    workloads: &'a Workloads,
    settings: &'a LearnSettings,
    needs: BTreeMap<(WorkloadId, Direction), Needs>,
}

/// One thing that a flow needs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Need {
    workload: WorkloadId,
    direction: Direction,
    peer: NeedPeer,
    port: LearnedPort,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum NeedPeer {
    Known(LearnedPeer),
    Outside(IpAddr),
}

impl Learner<'_> {
    fn learn(&mut self, flow: &LearnableFlow) {
        // Several backends are often one workload: that is one connection.
        let mut needs: BTreeSet<Need> = BTreeSet::new();
        for end in &flow.ends {
            self.needs_of(end, flow.service.as_ref(), &mut needs);
        }
        if let (true, Some(service)) = (flow.to_service_address, &flow.service) {
            self.service_address(&flow.flow, service, &mut needs);
        }
        let seen = Evidence::one(flow.seen);
        for Need { workload, direction, peer, port } in needs {
            let evidence = if port.is_added { Evidence::default() } else { seen };
            let of_direction = self.needs.entry((workload, direction)).or_default();
            let ports = match peer {
                NeedPeer::Known(peer) => of_direction.peers.entry(peer).or_default().entry(port).or_default(),
                NeedPeer::Outside(address) => of_direction.outside.entry(port).or_default().entry(address).or_default(),
            };
            ports.add(evidence);
        }
    }

    /// Needs of both ends of a flow.
    fn needs_of(&self, end: &Flow, service: Option<&ObjectKey>, into: &mut BTreeSet<Need>) {
        let Some(protocol) = port_protocol(end.protocol) else { return };
        let (src, dst) = (IpAddr::from(end.src), IpAddr::from(end.dst));
        let (from, to) = (self.pod(src), self.pod(dst));
        let ports = self.ports(to, protocol, end.dst_port);
        let sides = [(Direction::Egress, from, dst, to, service), (Direction::Ingress, to, src, from, None)];
        for (direction, own, address, other, service) in sides {
            let Some((_, workload)) = own.filter(|(_, id)| self.is_learnt(*id)) else { continue };
            let peer = self.peer(address, other, service);
            let need = |port: &LearnedPort| Need { workload, direction, peer: peer.clone(), port: port.clone() };
            into.extend(ports.iter().map(need));
        }
    }

    fn service_address(&self, flow: &Flow, service: &ObjectKey, into: &mut BTreeSet<Need>) {
        let (Some((_, workload)), Some(protocol)) = (self.pod(flow.src.into()), port_protocol(flow.protocol)) else {
            return;
        };
        if !self.is_learnt(workload) {
            return;
        }
        let peer = LearnedPeer::ServiceAddress { service: service.clone(), address: flow.dst.into() };
        for port in with_dns(LearnedPort::number(protocol, flow.dst_port), flow.dst_port, || {
            LearnedPort::number(PortProtocol::Tcp, DNS)
        }) {
            let peer = NeedPeer::Known(peer.clone());
            into.insert(Need { workload, direction: Direction::Egress, peer, port });
        }
    }

    fn pod(&self, address: IpAddr) -> Option<(PodId, WorkloadId)> {
        match self.state.owner(&address)? {
            PodOrNode::Pod(pod) => Some((pod, self.workloads.of(pod)?)),
            PodOrNode::Node(_) => None,
        }
    }

    fn is_learnt(&self, workload: WorkloadId) -> bool {
        self.settings.covers(&self.workloads.get(workload).namespace)
    }

    /// The port of a flow, named if all pods of the server's workload name it; with DNS over UDP also that over TCP.
    fn ports(&self, server: Option<(PodId, WorkloadId)>, protocol: PortProtocol, number: u16) -> Vec<LearnedPort> {
        let named = |protocol, number| {
            let name = server.and_then(|(pod, id)| self.workloads.port_name(self.state, id, pod, protocol, number));
            match name {
                Some(name) => LearnedPort { protocol, which: PortName::Name(name), is_added: false },
                None => LearnedPort::number(protocol, number),
            }
        };
        with_dns(named(protocol, number), number, || named(PortProtocol::Tcp, DNS))
    }

    fn peer(&self, address: IpAddr, pod: Option<(PodId, WorkloadId)>, service: Option<&ObjectKey>) -> NeedPeer {
        let node = match self.state.owner(&address) {
            Some(PodOrNode::Node(node)) => self.state.node_name(node),
            _ => None,
        };
        match (pod, node, service) {
            (Some((_, id)), ..) => NeedPeer::Known(LearnedPeer::Workload(id)),
            (_, Some(node), _) => NeedPeer::Known(LearnedPeer::Node { node: node.to_owned(), address }),
            (.., Some(service)) => NeedPeer::Known(LearnedPeer::Backend { service: service.clone(), address }),
            _ => NeedPeer::Outside(address),
        }
    }
}

/// A port, and with DNS over UDP that over TCP: a client asks again over TCP if an answer does not fit a datagram.
fn with_dns(port: LearnedPort, number: u16, tcp: impl FnOnce() -> LearnedPort) -> Vec<LearnedPort> {
    let is_dns = port.protocol == PortProtocol::Udp && number == DNS;
    let added = is_dns.then(|| LearnedPort { is_added: true, ..tcp() });
    std::iter::once(port).chain(added).collect()
}

fn port_protocol(protocol: Protocol) -> Option<PortProtocol> {
    match protocol {
        Protocol::TCP => Some(PortProtocol::Tcp),
        Protocol::UDP => Some(PortProtocol::Udp),
        Protocol::SCTP => Some(PortProtocol::Sctp),
        _ => None,
    }
}

/// Addresses that blocks may hold: no address of a pod, a node or a Service.
fn limits(state: &ClusterState, settings: &LearnSettings) -> BlockLimits {
    let of_services = state.services().flat_map(|service| service.addresses.iter().copied());
    let mut never: Vec<Address> =
        state.addresses().map(|(address, _)| address).chain(of_services).map(Address::from).collect();
    never.sort_unstable();
    BlockLimits { widening: settings.widening, never, never_in: settings.pod_networks.clone() }
}

/// Rules of one direction: peers with equal ports are in one rule, so that each has exactly its ports.
fn rules(needs: Needs, limits: &BlockLimits) -> Vec<LearnedRule> {
    let mut peers = needs.peers;
    for (block, ports) in blocks(needs.outside, limits) {
        peers.insert(LearnedPeer::Outside(block), ports);
    }
    peers.values_mut().for_each(forget_added);
    let mut by_ports = BTreeMap::<Vec<LearnedPort>, Vec<(LearnedPeer, PortEvidence)>>::new();
    for (peer, ports) in peers {
        by_ports.entry(ports.keys().cloned().collect()).or_default().push((peer, ports));
    }
    let mut rules: Vec<LearnedRule> = by_ports.into_iter().map(|(ports, peers)| rule(ports, peers)).collect();
    rules.sort_by(|a, b| a.peers[0].0.cmp(&b.peers[0].0));
    rules
}

/// The blocks of the addresses outside, each with its ports. A block is chosen for each port by itself; where several
/// ports have the same one, what was seen of it counts together.
fn blocks(outside: OutsideEvidence, limits: &BlockLimits) -> BTreeMap<Block, PortEvidence> {
    let mut found: BTreeMap<IpNet, (BTreeSet<IpAddr>, PortEvidence)> = BTreeMap::new();
    for (port, addresses) in outside {
        let list: Vec<IpAddr> = addresses.keys().copied().collect();
        // Blocks and addresses are in the same order.
        let mut rest = addresses.into_iter();
        for block in cover(&list, limits) {
            let (seen, ports) = found.entry(block.cidr).or_default();
            let evidence = ports.entry(port.clone()).or_default();
            for (address, of_address) in rest.by_ref().take(block.seen as usize) {
                seen.insert(address);
                evidence.add(of_address);
            }
        }
    }
    let counted = found.into_iter().map(|(cidr, (seen, ports))| (Block { cidr, seen: seen.len() as u64 }, ports));
    counted.collect()
}

/// DNS over TCP that was seen is not added any more.
fn forget_added(ports: &mut PortEvidence) {
    let seen: Vec<LearnedPort> = ports.keys().filter(|port| !port.is_added).cloned().collect();
    ports
        .retain(|port, _| !port.is_added || !seen.iter().any(|s| s.protocol == port.protocol && s.which == port.which));
}

fn rule(ports: Vec<LearnedPort>, peers: Vec<(LearnedPeer, PortEvidence)>) -> LearnedRule {
    let sum = |list: &mut dyn Iterator<Item = Evidence>| {
        list.fold(Evidence::default(), |mut all, one| {
            all.add(one);
            all
        })
    };
    let of_port = |port: &LearnedPort| sum(&mut peers.iter().filter_map(|(_, ports)| ports.get(port).copied()));
    let ports = ports.iter().map(|port| (port.clone(), of_port(port))).collect();
    let of_peer = |ports: &PortEvidence| sum(&mut ports.values().copied());
    LearnedRule { peers: peers.iter().map(|(peer, ports)| (peer.clone(), of_peer(ports))).collect(), ports }
}

fn policy(
    workloads: &Workloads,
    workload: WorkloadId,
    key: ObjectKey,
    ingress: Vec<LearnedRule>,
    egress: Vec<LearnedRule>,
) -> LearnedPolicy {
    let own = workloads.get(workload);
    let to_rules = |rules: &[LearnedRule]| {
        let peers = |rule: &LearnedRule| {
            Peers::AnyOf(rule.peers.iter().map(|(peer, _)| to_peer(workloads, &own.namespace, peer)).collect())
        };
        let ports =
            |rule: &LearnedRule| PolicyPorts::AnyOf(rule.ports.iter().map(|(port, _)| port.to_policy()).collect());
        rules.iter().map(|rule| Rule { peers: peers(rule), ports: ports(rule) }).collect()
    };
    let policy = NetworkPolicy {
        key,
        pod_selector: own.selector.clone(),
        isolates: true,
        staging: Staging::InForce,
        notes: Default::default(),
        ingress: Some(to_rules(&ingress)),
        egress: Some(to_rules(&egress)),
    };
    LearnedPolicy { policy, workload, ingress, egress }
}

fn to_peer(workloads: &Workloads, namespace: &str, peer: &LearnedPeer) -> Peer {
    let one = |address: &IpAddr| Peer::IpBlock(IpBlock { cidr: IpNet::from(*address), except: Vec::new() });
    match peer {
        LearnedPeer::Workload(id) => {
            let workload = workloads.get(*id);
            let pods = workload.selector.clone();
            if workload.namespace == namespace {
                return Peer::Pods(pods);
            }
            let operator = LabelOperator::In(vec![workload.namespace.clone()]);
            let by_name = Requirement { key: NAMESPACE_NAME.to_owned(), operator };
            Peer::PodsInNamespaces { namespaces: Selector { requirements: vec![by_name] }, pods }
        }
        LearnedPeer::ServiceAddress { address, .. }
        | LearnedPeer::Node { address, .. }
        | LearnedPeer::Backend { address, .. } => one(address),
        LearnedPeer::Outside(block) => Peer::IpBlock(IpBlock { cidr: block.cidr, except: Vec::new() }),
    }
}

/// `learned-` and the values of the workload's labels, as a name that no other policy has.
fn name(workloads: &Workloads, workload: WorkloadId, taken: &mut BTreeSet<ObjectKey>) -> ObjectKey {
    let Workload { namespace, labels, .. } = workloads.get(workload);
    let words = labels.values().map(String::as_str).filter(|value| !value.is_empty());
    let joined = std::iter::once("learned").chain(words).collect::<Vec<_>>().join("-").to_ascii_lowercase();
    let allowed = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let mut name: String = joined.chars().map(allowed).take(LONGEST_NAME).collect();
    name.truncate(name.trim_end_matches('-').len());
    let numbered = (2..).map(|number: u32| format!("{name}-{number}"));
    let keys = std::iter::once(name.clone()).chain(numbered);
    let mut keys = keys.map(|name| ObjectKey { namespace: namespace.clone(), name });
    let key = keys.find(|key| !taken.contains(key)).expect("there are more numbers than policies");
    taken.insert(key.clone());
    key
}

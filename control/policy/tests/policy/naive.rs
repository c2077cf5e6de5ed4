//! A naive evaluator: reads the objects directly, slow and simple.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::model::*;

/// The last state of a cluster.
#[derive(Clone, Default, Debug)]
pub(crate) struct ClusterObjects {
    pub namespaces: BTreeMap<String, Namespace>,
    pub nodes: BTreeMap<String, Node>,
    pub pods: BTreeMap<ObjectKey, Pod>,
    pub policies: BTreeMap<ObjectKey, NetworkPolicy>,
}

/// The verdict of one direction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum NaiveVerdict {
    NoPod,
    Exempt,
    Open,
    Allowed,
    Denied,
}

/// Cases that occurred on the way to a verdict: tests assert that each occurred.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Covered {
    NoPod,
    Open,
    SamePod,
    OwnNode,
    DeniedWithoutRules,
    DeniedByRules,
    Excepted,
    ByEveryPeer,
    ByPods,
    ByNamespaces,
    ByPodsInNamespaces,
    ByBlock,
    ByBlockOfPod,
    ByEveryPort,
    ByPort,
    ByRange,
    ByProtocol,
    ByNameOnIngress,
    ByNameOnEgress,
    NameLacking,
    OtherProtocolAllowed,
    OtherProtocolDenied,
    Ipv6,
}

impl ClusterObjects {
    pub(crate) fn apply(&mut self, change: &ObjectChange) {
        match change.clone() {
            ObjectChange::Set(Object::Namespace(it)) => drop(self.namespaces.insert(it.name.clone(), it)),
            ObjectChange::Set(Object::Node(it)) => drop(self.nodes.insert(it.name.clone(), it)),
            ObjectChange::Set(Object::Pod(it)) => drop(self.pods.insert(it.key.clone(), it)),
            ObjectChange::Set(Object::NetworkPolicy(it)) => drop(self.policies.insert(it.key.clone(), it)),
            ObjectChange::Delete(ObjectRef::Namespace(name)) => drop(self.namespaces.remove(&name)),
            ObjectChange::Delete(ObjectRef::Node(name)) => drop(self.nodes.remove(&name)),
            ObjectChange::Delete(ObjectRef::Pod(key)) => drop(self.pods.remove(&key)),
            ObjectChange::Delete(ObjectRef::NetworkPolicy(key)) => drop(self.policies.remove(&key)),
        }
    }

    pub(crate) fn objects(&self) -> Vec<Object> {
        let namespaces = self.namespaces.values().cloned().map(Object::Namespace);
        let nodes = self.nodes.values().cloned().map(Object::Node);
        let pods = self.pods.values().cloned().map(Object::Pod);
        let policies = self.policies.values().cloned().map(Object::NetworkPolicy);
        namespaces.chain(nodes).chain(pods).chain(policies).collect()
    }

    /// The pod that owns an address: it is not a node's address, and the pod is not finished.
    pub(crate) fn pod_at(&self, address: IpAddr) -> Option<&Pod> {
        self.pods.values().find(|pod| !pod.host_network && !pod.finished && pod.addresses.contains(&address))
    }

    fn node_has(&self, node: &str, address: IpAddr) -> bool {
        let in_host_network = |pod: &&Pod| pod.host_network && !pod.finished && pod.node.as_deref() == Some(node);
        self.nodes.get(node).is_some_and(|node| node.addresses.contains(&address))
            || self.pods.values().filter(in_host_network).any(|pod| pod.addresses.contains(&address))
    }

    pub(crate) fn evaluate(&self, flow: &Flow, covered: &mut BTreeSet<Covered>) -> (NaiveVerdict, NaiveVerdict) {
        let (src, dst): (IpAddr, IpAddr) = (flow.src.into(), flow.dst.into());
        let (from, to) = (self.pod_at(src), self.pod_at(dst));
        if src.is_ipv6() {
            covered.insert(Covered::Ipv6);
        }
        if let (Some(from), Some(to)) = (from, to)
            && from.key == to.key
        {
            covered.insert(Covered::SamePod);
            return (NaiveVerdict::Exempt, NaiveVerdict::Exempt);
        }
        let runs_on = |pod: Option<&Pod>, other: Option<&Pod>, address: IpAddr| {
            let node = pod.and_then(|pod| pod.node.clone());
            other.is_none() && node.is_some_and(|node| self.node_has(&node, address))
        };
        if runs_on(from, to, dst) {
            covered.insert(Covered::OwnNode);
            return (NaiveVerdict::Exempt, NaiveVerdict::NoPod);
        }
        if runs_on(to, from, src) {
            covered.insert(Covered::OwnNode);
            return (NaiveVerdict::NoPod, NaiveVerdict::Exempt);
        }
        (self.side(from, dst, to, flow, false, covered), self.side(to, src, from, flow, true, covered))
    }

    fn side(
        &self,
        own: Option<&Pod>,
        peer: IpAddr,
        peer_pod: Option<&Pod>,
        flow: &Flow,
        ingress: bool,
        covered: &mut BTreeSet<Covered>,
    ) -> NaiveVerdict {
        let Some(own) = own else {
            covered.insert(Covered::NoPod);
            return NaiveVerdict::NoPod;
        };
        let mut isolated =
            ingress && self.namespaces.get(&own.key.namespace).is_some_and(|namespace| namespace.default_deny_ingress);
        let mut rules = Vec::new();
        for policy in self.policies.values() {
            if policy.key.namespace != own.key.namespace || !policy.pod_selector.matches(&own.labels) {
                continue;
            }
            let Some(of_direction) = (if ingress { &policy.ingress } else { &policy.egress }) else { continue };
            isolated |= policy.isolates;
            rules.extend(of_direction.iter().map(|rule| (&policy.key.namespace, rule)));
        }
        if !isolated {
            covered.insert(Covered::Open);
            return NaiveVerdict::Open;
        }
        let server = if ingress { Some(own) } else { peer_pod };
        for (namespace, rule) in &rules {
            let mut here = BTreeSet::new();
            let peer_matches = self.peers_match(namespace, &rule.peers, peer, peer_pod, &mut here);
            let port_matches = ports_match(&rule.ports, server, flow, ingress, &mut here);
            if peer_matches && port_matches {
                covered.extend(here);
                if !matches!(flow.protocol, Protocol::TCP | Protocol::UDP | Protocol::SCTP) {
                    covered.insert(Covered::OtherProtocolAllowed);
                }
                return NaiveVerdict::Allowed;
            }
            covered
                .extend(here.into_iter().filter(|covered| matches!(covered, Covered::Excepted | Covered::NameLacking)));
        }
        if !matches!(flow.protocol, Protocol::TCP | Protocol::UDP | Protocol::SCTP) {
            covered.insert(Covered::OtherProtocolDenied);
        }
        covered.insert(if rules.is_empty() { Covered::DeniedWithoutRules } else { Covered::DeniedByRules });
        NaiveVerdict::Denied
    }

    fn peers_match(
        &self,
        namespace: &str,
        peers: &Peers,
        address: IpAddr,
        pod: Option<&Pod>,
        covered: &mut BTreeSet<Covered>,
    ) -> bool {
        let Peers::AnyOf(peers) = peers else {
            covered.insert(Covered::ByEveryPeer);
            return true;
        };
        let namespace_found = |selector: &Selector| {
            let namespace = pod.and_then(|pod| self.namespaces.get(&pod.key.namespace));
            namespace.is_some_and(|namespace| selector.matches(&namespace.labels))
        };
        peers.iter().any(|peer| {
            let (matches, by) = match peer {
                Peer::Pods(pods) => {
                    let found = |pod: &Pod| pod.key.namespace == namespace && pods.matches(&pod.labels);
                    (pod.is_some_and(found), Covered::ByPods)
                }
                Peer::Namespaces(namespaces) => (namespace_found(namespaces), Covered::ByNamespaces),
                Peer::PodsInNamespaces { namespaces, pods } => {
                    let found = namespace_found(namespaces) && pod.is_some_and(|pod| pods.matches(&pod.labels));
                    (found, Covered::ByPodsInNamespaces)
                }
                Peer::IpBlock(block) => {
                    let excepted = block.except.iter().any(|except| except.contains(&address));
                    if block.cidr.contains(&address) && excepted {
                        covered.insert(Covered::Excepted);
                    }
                    let by = if pod.is_some() { Covered::ByBlockOfPod } else { Covered::ByBlock };
                    (block.cidr.contains(&address) && !excepted, by)
                }
            };
            if matches {
                covered.insert(by);
            }
            matches
        })
    }
}

fn ports_match(
    ports: &PolicyPorts,
    server: Option<&Pod>,
    flow: &Flow,
    ingress: bool,
    covered: &mut BTreeSet<Covered>,
) -> bool {
    let PolicyPorts::AnyOf(ports) = ports else {
        covered.insert(Covered::ByEveryPort);
        return true;
    };
    ports.iter().any(|port| {
        let protocol = match port.protocol {
            PortProtocol::Tcp => Protocol::TCP,
            PortProtocol::Udp => Protocol::UDP,
            PortProtocol::Sctp => Protocol::SCTP,
        };
        if protocol != flow.protocol {
            return false;
        }
        let (matches, by) = match &port.which {
            PortMatch::Every => (true, Covered::ByProtocol),
            PortMatch::Range { first, last } => {
                let by = if first == last { Covered::ByPort } else { Covered::ByRange };
                (*first <= flow.dst_port && flow.dst_port <= *last, by)
            }
            PortMatch::Name(name) => {
                let named = server.map(|pod| pod.ports.as_slice()).unwrap_or_default();
                let has = |own: &&NamedPort| own.name == *name && own.protocol == port.protocol;
                if !named.iter().any(|own| has(&own)) {
                    covered.insert(Covered::NameLacking);
                }
                let by = if ingress { Covered::ByNameOnIngress } else { Covered::ByNameOnEgress };
                (named.iter().filter(has).any(|own| own.number == flow.dst_port), by)
            }
        };
        if matches {
            covered.insert(by);
        }
        matches
    })
}

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
    pub cluster_policies: BTreeMap<String, ClusterNetworkPolicy>,
}

/// The verdict of one direction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum NaiveVerdict {
    NoPod,
    Exempt,
    Open,
    Allowed,
    Denied,
    DeniedByRule,
    Default,
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
    AdminAccept,
    AdminDeny,
    AdminPass,
    AdminPassThenAllowed,
    AdminPassThenDenied,
    AdminPassThenBaselineDeny,
    BaselineAccept,
    BaselineDeny,
    BaselinePass,
    BaselineHidden,
    DefaultAfterTiers,
    TieBrokenByName,
    ByNode,
    ByNetwork,
    OwnNodeDenied,
    OwnNodeIsolated,
    NotUnderstoodAccept,
    NotUnderstoodDeny,
}

impl ClusterObjects {
    pub(crate) fn apply(&mut self, change: &ObjectChange) {
        match change.clone() {
            ObjectChange::Set(Object::Namespace(it)) => drop(self.namespaces.insert(it.name.clone(), it)),
            ObjectChange::Set(Object::Node(it)) => drop(self.nodes.insert(it.name.clone(), it)),
            ObjectChange::Set(Object::Pod(it)) => drop(self.pods.insert(it.key.clone(), it)),
            ObjectChange::Set(Object::NetworkPolicy(it)) => drop(self.policies.insert(it.key.clone(), it)),
            ObjectChange::Set(Object::ClusterNetworkPolicy(it)) => {
                drop(self.cluster_policies.insert(it.name.clone(), it));
            }
            // No verdict of policy depends on them.
            ObjectChange::Set(Object::Service(_) | Object::EndpointSlice(_))
            | ObjectChange::Delete(ObjectRef::Service(_) | ObjectRef::EndpointSlice(_)) => {}
            ObjectChange::Delete(ObjectRef::ClusterNetworkPolicy(name)) => drop(self.cluster_policies.remove(&name)),
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
        let cluster_policies = self.cluster_policies.values().cloned().map(Object::ClusterNetworkPolicy);
        namespaces.chain(nodes).chain(pods).chain(policies).chain(cluster_policies).collect()
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
            return (self.to_own_node(from.expect("it runs there"), dst, flow, covered), NaiveVerdict::NoPod);
        }
        if runs_on(to, from, src) {
            covered.insert(Covered::OwnNode);
            return (NaiveVerdict::NoPod, NaiveVerdict::Exempt);
        }
        (self.tiers(from, dst, to, flow, false, covered), self.tiers(to, src, from, flow, true, covered))
    }

    /// All tiers of one direction.
    fn tiers(
        &self,
        own: Option<&Pod>,
        peer: IpAddr,
        peer_pod: Option<&Pod>,
        flow: &Flow,
        ingress: bool,
        covered: &mut BTreeSet<Covered>,
    ) -> NaiveVerdict {
        let Some(pod) = own else { return self.side(own, peer, peer_pod, flow, ingress, covered) };
        let admin = self.tier(ClusterTier::Admin, pod, peer, peer_pod, flow, ingress, covered);
        match admin {
            Some(RuleAction::Accept) => {
                covered.insert(Covered::AdminAccept);
                return NaiveVerdict::Allowed;
            }
            Some(RuleAction::Deny) => {
                covered.insert(Covered::AdminDeny);
                return NaiveVerdict::DeniedByRule;
            }
            Some(RuleAction::Pass) => drop(covered.insert(Covered::AdminPass)),
            None => {}
        }
        let passed = admin.is_some();
        let by_network_policy = self.side(own, peer, peer_pod, flow, ingress, covered);
        if by_network_policy != NaiveVerdict::Open {
            if passed && by_network_policy == NaiveVerdict::Allowed {
                covered.insert(Covered::AdminPassThenAllowed);
            }
            if passed && by_network_policy == NaiveVerdict::Denied {
                covered.insert(Covered::AdminPassThenDenied);
            }
            if self.tier(ClusterTier::Baseline, pod, peer, peer_pod, flow, ingress, covered).is_some() {
                covered.insert(Covered::BaselineHidden);
            }
            return by_network_policy;
        }
        match self.tier(ClusterTier::Baseline, pod, peer, peer_pod, flow, ingress, covered) {
            Some(RuleAction::Accept) => {
                covered.insert(Covered::BaselineAccept);
                NaiveVerdict::Allowed
            }
            Some(RuleAction::Deny) => {
                covered.insert(if passed { Covered::AdminPassThenBaselineDeny } else { Covered::BaselineDeny });
                NaiveVerdict::DeniedByRule
            }
            decided => {
                if decided == Some(RuleAction::Pass) {
                    covered.insert(Covered::BaselinePass);
                }
                let touched = self.touching(pod, ingress).next().is_some();
                covered.insert(if touched { Covered::DefaultAfterTiers } else { Covered::Open });
                if touched { NaiveVerdict::Default } else { NaiveVerdict::Open }
            }
        }
    }

    /// From a pod to its own node: only NetworkPolicy spares it.
    fn to_own_node(&self, pod: &Pod, node: IpAddr, flow: &Flow, covered: &mut BTreeSet<Covered>) -> NaiveVerdict {
        if self.touching(pod, false).next().is_none() {
            return NaiveVerdict::Exempt;
        }
        let isolated = self.policies.values().any(|policy| {
            policy.key.namespace == pod.key.namespace
                && policy.pod_selector.matches(&pod.labels)
                && policy.egress.is_some()
                && policy.isolates
        });
        let mut tiers = vec![ClusterTier::Admin];
        if !isolated {
            tiers.push(ClusterTier::Baseline);
        }
        // In the Admin tier a Pass goes on; in Baseline, which is last, to the default.
        for tier in tiers {
            match self.tier(tier, pod, node, None, flow, false, covered) {
                Some(RuleAction::Accept) => return NaiveVerdict::Allowed,
                Some(RuleAction::Deny) => {
                    covered.insert(Covered::OwnNodeDenied);
                    return NaiveVerdict::DeniedByRule;
                }
                Some(RuleAction::Pass) | None => {}
            }
        }
        if isolated {
            covered.insert(Covered::OwnNodeIsolated);
            return NaiveVerdict::Exempt;
        }
        NaiveVerdict::Default
    }

    /// The ClusterNetworkPolicies with rules of a direction that select a pod.
    fn touching<'a>(&'a self, pod: &'a Pod, ingress: bool) -> impl Iterator<Item = &'a ClusterNetworkPolicy> {
        let namespace = self.namespaces.get(&pod.key.namespace);
        self.cluster_policies.values().filter(move |policy| {
            let Subject { namespaces, pods } = &policy.subject;
            let in_namespace = namespaces.requirements.is_empty()
                || namespace.is_some_and(|namespace| namespaces.matches(&namespace.labels));
            let rules = if ingress { &policy.ingress } else { &policy.egress };
            in_namespace && pods.matches(&pod.labels) && !rules.is_empty()
        })
    }

    /// The action of the first rule of a tier that matches.
    #[expect(clippy::too_many_arguments, reason = "those of one direction, and its tier")]
    fn tier(
        &self,
        tier: ClusterTier,
        own: &Pod,
        peer: IpAddr,
        peer_pod: Option<&Pod>,
        flow: &Flow,
        ingress: bool,
        covered: &mut BTreeSet<Covered>,
    ) -> Option<RuleAction> {
        let mut policies: Vec<_> = self.touching(own, ingress).filter(|policy| policy.tier == tier).collect();
        // The map sorts by name, and this sort is stable.
        policies.sort_by_key(|policy| policy.priority);
        let server = if ingress { Some(own) } else { peer_pod };
        let rules = policies.iter().flat_map(|policy| {
            let rules = if ingress { &policy.ingress } else { &policy.egress };
            rules.iter().map(|rule| (policy.priority, rule))
        });
        let mut matching = rules.filter(|(_, rule)| {
            let mut here = BTreeSet::new();
            if !rule.is_understood && rule.action == RuleAction::Accept {
                covered.insert(Covered::NotUnderstoodAccept);
            }
            let matches = self.peers_match("", &rule.matches.peers, peer, peer_pod, &mut here)
                && ports_match(&rule.matches.ports, server, flow, ingress, &mut here);
            if matches {
                covered.extend(here);
            }
            matches
        });
        let (priority, rule) = matching.next()?;
        let ties = matching.take_while(|(other, _)| *other == priority).any(|(_, other)| other.action != rule.action);
        if ties && policies.iter().filter(|policy| policy.priority == priority).count() > 1 {
            covered.insert(Covered::TieBrokenByName);
        }
        if !rule.is_understood {
            covered.insert(Covered::NotUnderstoodDeny);
        }
        Some(rule.action)
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
                Peer::Networks(networks) => {
                    (networks.iter().any(|network| network.contains(&address)), Covered::ByNetwork)
                }
                Peer::Nodes(nodes) => {
                    let found = self.nodes.values().filter(|node| nodes.matches(&node.labels));
                    let mut addresses = found.flat_map(|node| &node.status_addresses);
                    (addresses.any(|of_node| *of_node == address), Covered::ByNode)
                }
                // Nothing is learnt here.
                Peer::DomainNames(_) => (false, Covered::ByNetwork),
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

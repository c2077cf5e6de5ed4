//! NetworkPolicy semantics as the Kubernetes API documentation words them, evaluated directly on the objects.

use std::net::IpAddr;

use penstock_policy::model::{
    Labels, Namespace, NetworkPolicy, Object, ObjectChange, ObjectRef, Peer, Peers, Pod, PolicyPort, PolicyPorts,
    PortMatch, PortProtocol, Rule,
};

/// A flow in the direction in which it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Flow {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) sport: u16,
    pub(crate) dport: u16,
}

/// All current objects.
#[derive(Default)]
pub(crate) struct ClusterObjects {
    pub(crate) objects: Vec<Object>,
    pub(crate) node: Option<String>,
    pub(crate) cluster_wide: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Egress,
    Ingress,
}

/// Verdict for one direction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DirectionVerdict {
    NotLocal,
    Open,
    Allowed,
    Denied,
}

impl ClusterObjects {
    pub(crate) fn apply(&mut self, changes: Vec<ObjectChange>) {
        for change in changes {
            let gone = match &change {
                ObjectChange::Set(object) => object.reference(),
                ObjectChange::Delete(reference) => reference.clone(),
            };
            self.objects.retain(|object| object.reference() != gone);
            if let ObjectChange::Set(object) = change {
                self.objects.push(object);
            }
        }
    }

    pub(crate) fn references(&self) -> Vec<ObjectRef> {
        self.objects.iter().map(Object::reference).collect()
    }

    fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.objects.iter().filter_map(|object| match object {
            Object::Pod(pod) if !pod.host_network && !pod.finished => Some(pod),
            _ => None,
        })
    }

    fn policies(&self) -> impl Iterator<Item = &NetworkPolicy> {
        self.objects.iter().filter_map(|object| match object {
            Object::NetworkPolicy(policy) => Some(policy),
            _ => None,
        })
    }

    fn namespace(&self, name: &str) -> Option<&Namespace> {
        self.objects.iter().find_map(|object| match object {
            Object::Namespace(namespace) if namespace.name == name => Some(namespace),
            _ => None,
        })
    }

    pub(crate) fn pod(&self, address: IpAddr) -> Option<&Pod> {
        self.pods().find(|pod| pod.addresses.contains(&address))
    }

    fn is_local_name(&self, node: Option<&str>) -> bool {
        self.node.as_deref().is_none_or(|own| node == Some(own))
    }

    pub(crate) fn local_pod(&self, address: IpAddr) -> Option<&Pod> {
        self.pod(address).filter(|pod| self.is_local_name(pod.node.as_deref()))
    }

    /// The node with this address, or with the pod network that contains it.
    pub(crate) fn node_of(&self, address: IpAddr) -> Option<&str> {
        self.objects.iter().find_map(|object| match object {
            Object::Node(node) if node.addresses.contains(&address) => Some(node.name.as_str()),
            Object::Pod(pod) if pod.host_network && pod.addresses.contains(&address) => pod.node.as_deref(),
            _ => None,
        })
    }

    pub(crate) fn is_own_node(&self, address: IpAddr) -> bool {
        self.node_of(address).is_some_and(|node| self.is_local_name(Some(node)))
    }

    /// Whether the flow may open a connection.
    pub(crate) fn allows(&self, flow: &Flow) -> bool {
        let (src, dst) = (self.pod(flow.src), self.pod(flow.dst));
        if let (Some(src), Some(dst)) = (src, dst)
            && src.key == dst.key
        {
            return true;
        }
        let reach = |pod: Option<&Pod>, other| {
            pod.is_some_and(|pod| pod.node.is_some() && pod.node.as_deref() == self.node_of(other))
        };
        if reach(src, flow.dst) || reach(dst, flow.src) {
            return true;
        }
        let egress = self.direction_verdict(flow.src, Direction::Egress, flow.dst, flow);
        let ingress = self.direction_verdict(flow.dst, Direction::Ingress, flow.src, flow);
        match (egress, ingress) {
            (DirectionVerdict::Denied, DirectionVerdict::Allowed)
            | (DirectionVerdict::Allowed, DirectionVerdict::Denied) => self.cluster_wide,
            (egress, ingress) => egress != DirectionVerdict::Denied && ingress != DirectionVerdict::Denied,
        }
    }

    /// Whether a Service has this address, and no pod or node has it.
    pub(crate) fn is_a_service_alone(&self, address: IpAddr) -> bool {
        let has = |object: &Object| match object {
            Object::Service(service) => service.external.contains(&address) || service.addresses.contains(&address),
            _ => false,
        };
        self.objects.iter().any(has) && self.pod(address).is_none() && self.node_of(address).is_none()
    }

    /// Whether no policy selects a pod at either end: then nothing is asked of the state of a connection.
    pub(crate) fn is_free(&self, flow: &Flow) -> bool {
        [flow.src, flow.dst].into_iter().all(|own| {
            [Direction::Egress, Direction::Ingress].into_iter().all(|direction| {
                matches!(
                    self.direction_verdict(own, direction, own, flow),
                    DirectionVerdict::NotLocal | DirectionVerdict::Open
                )
            })
        })
    }

    fn direction_verdict(&self, own: IpAddr, direction: Direction, peer: IpAddr, flow: &Flow) -> DirectionVerdict {
        let pod = if self.cluster_wide { self.pod(own) } else { self.local_pod(own) };
        let Some(pod) = pod else { return DirectionVerdict::NotLocal };
        // Egress is for what answers, in the packets behind the translation.
        if direction == Direction::Egress && self.is_a_service_alone(peer) {
            return DirectionVerdict::Open;
        }
        let selecting: Vec<(&NetworkPolicy, &[Rule])> = self
            .policies()
            .filter(|policy| policy.key.namespace == pod.key.namespace && policy.pod_selector.matches(&pod.labels))
            .filter_map(|policy| {
                let rules = if direction == Direction::Egress { &policy.egress } else { &policy.ingress };
                Some((policy, rules.as_deref()?))
            })
            .collect();
        let by_annotation = direction == Direction::Ingress
            && self.namespace(&pod.key.namespace).is_some_and(|namespace| namespace.default_deny_ingress);
        if !by_annotation && !selecting.iter().any(|(policy, _)| policy.isolates) {
            return DirectionVerdict::Open;
        }
        let server = if direction == Direction::Ingress { Some(pod) } else { self.pod(peer) };
        let allows = |policy: &NetworkPolicy, rule: &Rule| {
            self.peers_match(policy, &rule.peers, peer) && ports_match(&rule.ports, flow, server)
        };
        match selecting.iter().any(|(policy, rules)| rules.iter().any(|rule| allows(policy, rule))) {
            true => DirectionVerdict::Allowed,
            false => DirectionVerdict::Denied,
        }
    }

    fn peers_match(&self, policy: &NetworkPolicy, peers: &Peers, address: IpAddr) -> bool {
        let Peers::AnyOf(peers) = peers else { return true };
        let pod = self.pod(address);
        let nothing = Labels::new();
        let namespace = |pod: &Pod| self.namespace(&pod.key.namespace).map(|namespace| &namespace.labels);
        peers.iter().any(|peer| match (peer, pod) {
            (Peer::IpBlock(block), _) => {
                block.cidr.contains(&address) && !block.except.iter().any(|except| except.contains(&address))
            }
            (Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_), _) => {
                unreachable!("peers of ClusterNetworkPolicies")
            }
            (_, None) => false,
            (Peer::Pods(pods), Some(pod)) => pod.key.namespace == policy.key.namespace && pods.matches(&pod.labels),
            (Peer::Namespaces(namespaces), Some(pod)) => namespaces.matches(namespace(pod).unwrap_or(&nothing)),
            (Peer::PodsInNamespaces { namespaces, pods }, Some(pod)) => {
                namespaces.matches(namespace(pod).unwrap_or(&nothing)) && pods.matches(&pod.labels)
            }
        })
    }
}

fn ports_match(ports: &PolicyPorts, flow: &Flow, server: Option<&Pod>) -> bool {
    let PolicyPorts::AnyOf(ports) = ports else { return true };
    ports.iter().any(|PolicyPort { protocol, which }| {
        let number = match protocol {
            PortProtocol::Tcp => 6,
            PortProtocol::Udp => 17,
            PortProtocol::Sctp => 132,
        };
        flow.protocol == number
            && match which {
                PortMatch::Every => true,
                PortMatch::Range { first, last } => (*first..=*last).contains(&flow.dport),
                PortMatch::Name(name) => server.is_some_and(|pod| {
                    pod.ports
                        .iter()
                        .any(|port| port.name == *name && port.protocol == *protocol && port.number == flow.dport)
                }),
            }
    })
}

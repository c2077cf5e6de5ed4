//! Parts of a policy as text.

use penstock_dataplane::policy::{Direction, RuleAction};

use crate::model::{IpBlock, LabelOperator, Peer, Peers, PolicyPort, PolicyPorts, PortMatch, PortProtocol, Selector};

/// A selector as kubectl writes it: `app=web,tier in (a,b),!old`.
pub fn selector(selector: &Selector) -> String {
    let requirement = |r: &crate::model::Requirement| match &r.operator {
        LabelOperator::In(values) if values.len() == 1 => format!("{}={}", r.key, values[0]),
        LabelOperator::In(values) => format!("{} in ({})", r.key, values.join(",")),
        LabelOperator::NotIn(values) => format!("{} notin ({})", r.key, values.join(",")),
        LabelOperator::Exists => r.key.clone(),
        LabelOperator::DoesNotExist => format!("!{}", r.key),
    };
    selector.requirements.iter().map(requirement).collect::<Vec<_>>().join(",")
}

fn pods(found: &Selector) -> String {
    match found.requirements.is_empty() {
        true => "every pod".to_owned(),
        false => format!("pods with {}", selector(found)),
    }
}

fn namespaces(found: &Selector) -> String {
    match found.requirements.is_empty() {
        true => "every namespace".to_owned(),
        false => format!("namespaces with {}", selector(found)),
    }
}

/// A peer of a policy in a namespace, or of a ClusterNetworkPolicy, which has none.
pub fn peer(peer: &Peer, namespace: Option<&str>) -> String {
    match peer {
        Peer::Pods(found) => format!("{} of {}", pods(found), namespace.unwrap_or("no namespace")),
        Peer::Namespaces(found) => format!("every pod of {}", namespaces(found)),
        Peer::PodsInNamespaces { namespaces: found, pods: inside } => {
            format!("{} of {}", pods(inside), namespaces(found))
        }
        Peer::IpBlock(found) => block(found),
        Peer::Networks(networks) => networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        Peer::Nodes(found) if found.requirements.is_empty() => "every node".to_owned(),
        Peer::Nodes(found) => format!("nodes with {}", selector(found)),
        Peer::DomainNames(names) => names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// A block: `10.0.0.0/8 except 10.1.0.0/16`.
fn block(block: &IpBlock) -> String {
    let except = block.except.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match except.is_empty() {
        true => block.cidr.to_string(),
        false => format!("{} except {except}", block.cidr),
    }
}

pub(crate) fn peers(peers: &Peers, namespace: Option<&str>) -> String {
    match peers {
        Peers::Every => "every peer".to_owned(),
        Peers::AnyOf(some) if some.is_empty() => "no peer".to_owned(),
        Peers::AnyOf(some) => some.iter().map(|p| peer(p, namespace)).collect::<Vec<_>>().join("; "),
    }
}

pub fn protocol(protocol: PortProtocol) -> &'static str {
    match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    }
}

/// A port: `80/TCP`, `8000-8080/TCP`, `http/TCP`, `TCP`.
fn port(port: &PolicyPort) -> String {
    let protocol = protocol(port.protocol);
    match &port.which {
        PortMatch::Every => format!("every {protocol} port"),
        PortMatch::Range { first, last } if first == last => format!("{first}/{protocol}"),
        PortMatch::Range { first, last } => format!("{first}-{last}/{protocol}"),
        PortMatch::Name(name) => format!("{name}/{protocol}"),
    }
}

pub(crate) fn ports(ports: &PolicyPorts) -> String {
    match ports {
        PolicyPorts::Every => "every port and protocol".to_owned(),
        PolicyPorts::AnyOf(some) if some.is_empty() => "no port".to_owned(),
        PolicyPorts::AnyOf(some) => some.iter().map(port).collect::<Vec<_>>().join(", "),
    }
}

pub fn action(action: RuleAction) -> &'static str {
    match action {
        RuleAction::Accept => "accepts",
        RuleAction::Deny => "denies",
        RuleAction::Pass => "passes",
    }
}

pub fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "egress",
        Direction::Ingress => "ingress",
    }
}

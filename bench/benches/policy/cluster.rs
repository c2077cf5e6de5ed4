//! Synthetic clusters of any size.

use std::net::{IpAddr, Ipv4Addr};

use penstock_policy::model::*;

pub(crate) fn labels(pairs: &[(&str, String)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

pub(crate) fn key(namespace: usize, name: String) -> ObjectKey {
    ObjectKey { namespace: format!("ns-{namespace}"), name }
}

pub(crate) fn namespace(number: usize) -> Object {
    let name = format!("ns-{number}");
    let labels = labels(&[
        ("kubernetes.io/metadata.name", name.clone()),
        ("team", format!("team-{}", number % 50)),
        ("env", ["prod", "test", "dev"][number % 3].to_owned()),
    ]);
    Object::Namespace(Namespace { name, labels, default_deny_ingress: false, terminating: false })
}

pub(crate) fn node(number: usize) -> Object {
    let address = Ipv4Addr::from_bits(0xc0a8_0000 + number as u32).into();
    let (addresses, status_addresses) = (vec![address], vec![address]);
    Object::Node(Node { name: format!("node-{number}"), labels: Default::default(), addresses, status_addresses })
}

/// The address of a pod: one /24 for each hundred pods.
pub(crate) fn address(pod: usize) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 | ((pod / 100) << 8 | (pod % 100)) as u32).into()
}

pub(crate) fn pod(number: usize, namespace: usize, node: usize, app: usize) -> Pod {
    let labels = labels(&[
        ("app", format!("app-{app}")),
        ("version", format!("v{}", number % 2)),
        ("pod-template-hash", format!("{:x}", namespace * 31 + app)),
    ]);
    Pod {
        key: key(namespace, format!("pod-{number}")),
        labels,
        node: Some(format!("node-{node}")),
        addresses: vec![address(number)],
        ports: vec![NamedPort {
            name: "http".to_owned(),
            protocol: PortProtocol::Tcp,
            number: 8080 + (app % 3) as u16,
        }],
        ..Pod::default()
    }
}

pub(crate) fn selector(pairs: &[(&str, String)]) -> Selector {
    let requirement = |(key, value): &(&str, String)| Requirement {
        key: (*key).to_owned(),
        operator: LabelOperator::In(vec![value.clone()]),
    };
    Selector { requirements: pairs.iter().map(requirement).collect() }
}

pub(crate) fn tcp(first: u16, last: u16) -> PolicyPort {
    PolicyPort { protocol: PortProtocol::Tcp, which: PortMatch::Range { first, last } }
}

pub(crate) fn block(cidr: &str, except: &[&str]) -> Peer {
    let parse = |text: &str| text.parse().expect("a prefix");
    Peer::IpBlock(IpBlock { cidr: parse(cidr), except: except.iter().map(|text| parse(text)).collect() })
}

pub(crate) fn policy(
    namespace: usize,
    name: String,
    pod_selector: Selector,
    ingress: Option<Vec<Rule>>,
    egress: Option<Vec<Rule>>,
) -> Object {
    let key = key(namespace, name);
    Object::NetworkPolicy(NetworkPolicy {
        key,
        pod_selector,
        isolates: true,
        ingress,
        egress,
        staging: Staging::InForce,
        notes: Default::default(),
    })
}

/// The `variant`th policy, of the kinds common in clusters; `turn` changes its rules.
pub(crate) fn typical_policy(number: usize, namespace: usize, turn: usize) -> Object {
    let any = |peers: Vec<Peer>, ports: Vec<PolicyPort>| Rule {
        peers: Peers::AnyOf(peers),
        ports: PolicyPorts::AnyOf(ports),
    };
    let app = |app: usize| selector(&[("app", format!("app-{}", app % 5))]);
    let port = 1000 + (turn % 50) as u16;
    let (pods, ingress, egress) = match number % 5 {
        0 => (
            app(number),
            Some(vec![any(vec![Peer::Pods(app(number + 1))], vec![tcp(port, port), tcp(9000, 9100)])]),
            None,
        ),
        1 => {
            let team = selector(&[("team", format!("team-{}", (number + turn) % 50))]);
            let from_team = Peer::PodsInNamespaces { namespaces: team, pods: app(number) };
            (Selector::default(), Some(vec![any(vec![from_team], vec![tcp(80, 80), tcp(port, port)])]), None)
        }
        2 => {
            let outside = block("0.0.0.0/0", &["10.0.0.0/8", "192.168.0.0/16"]);
            let dns = PolicyPort { protocol: PortProtocol::Udp, which: PortMatch::Range { first: 53, last: 53 } };
            let system = Peer::Namespaces(selector(&[("kubernetes.io/metadata.name", "ns-0".to_owned())]));
            (
                Selector::default(),
                None,
                Some(vec![any(vec![system], vec![dns]), any(vec![outside], vec![tcp(443, 443), tcp(port, port)])]),
            )
        }
        3 => {
            let http = PolicyPort { protocol: PortProtocol::Tcp, which: PortMatch::Name("http".to_owned()) };
            (app(number), None, Some(vec![any(vec![Peer::Pods(Selector::default())], vec![http, tcp(port, port)])]))
        }
        _ => {
            let monitoring = Peer::Namespaces(selector(&[("env", "prod".to_owned())]));
            (
                app(number),
                Some(vec![Rule {
                    peers: Peers::AnyOf(vec![monitoring, block("172.16.0.0/12", &["172.16.1.0/24"])]),
                    ports: PolicyPorts::AnyOf(vec![tcp(port, port + 10)]),
                }]),
                None,
            )
        }
    };
    policy(namespace, format!("policy-{number}"), pods, ingress, egress)
}

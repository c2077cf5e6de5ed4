//! Random clusters: few labels, addresses and ports, so that selectors, blocks and ports match often.

use std::net::IpAddr;

use penstock_policy::model::*;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::build::{namespace, node};

const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const KEYS: [&str; 2] = ["k", "l"];
const VALUES: [&str; 3] = ["x", "y", "z"];
const PORTS: [u16; 5] = [0, 80, 81, 255, 65535];
const NAMES: [&str; 2] = ["http", "dns"];
/// Addresses of pods; a pod may have an address that another had before.
pub(crate) const ADDRESSES: [&str; 12] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "10.0.0.128",
    "10.0.1.1",
    "10.0.1.2",
    "10.0.1.129",
    "10.1.0.1",
    "fd00::1",
    "fd00::2",
    "fd00::8001",
    "fd01::1",
];
/// Addresses of nodes, and of no object.
pub(crate) const OTHERS: [&str; 7] =
    ["192.168.0.1", "192.168.0.2", "fd00:ffff::1", "10.0.0.99", "10.1.0.99", "172.16.0.1", "fd00::9999"];
const BLOCKS: [&str; 12] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.0.0.0/16",
    "10.0.0.0/24",
    "10.0.0.128/25",
    "10.0.0.2/31",
    "10.0.1.0/24",
    "10.0.0.1/32",
    "::/0",
    "fd00::/16",
    "fd00::/112",
    "fd00::2/128",
];

pub(crate) fn destinations() -> Vec<(u8, u16)> {
    let ports = [0u16, 1, 79, 80, 81, 82, 254, 255, 256, 65534, 65535];
    let with_ports = [6u8, 17, 132].into_iter().flat_map(|protocol| ports.map(|port| (protocol, port)));
    // Ports that pods name are more frequent.
    let named = [6u8, 17].into_iter().flat_map(|protocol| [80, 81, 255].map(|port| (protocol, port)));
    with_ports.chain(named).chain([(1, 0), (58, 0), (50, 80)]).collect()
}

fn some_labels() -> impl Strategy<Value = Labels> {
    let pair = (select(&KEYS[..]), select(&VALUES[..])).prop_map(|(key, value)| (key.to_owned(), value.to_owned()));
    prop::collection::vec(pair, 0..3).prop_map(|pairs| pairs.into_iter().collect())
}

fn some_selector() -> impl Strategy<Value = Selector> + Clone {
    let values =
        || subsequence(&VALUES[..], 1..3).prop_map(|all| all.into_iter().map(str::to_owned).collect::<Vec<_>>());
    let test = prop_oneof![
        4 => values().prop_map(LabelOperator::In),
        2 => values().prop_map(LabelOperator::NotIn),
        1 => Just(LabelOperator::Exists),
        1 => Just(LabelOperator::DoesNotExist),
    ];
    let requirement =
        (select(&KEYS[..]), test).prop_map(|(key, test)| Requirement { key: key.to_owned(), operator: test });
    prop::collection::vec(requirement, 0..3).prop_map(|requirements| Selector { requirements })
}

fn some_block() -> impl Strategy<Value = IpBlock> {
    (select(&BLOCKS[..]), subsequence(&BLOCKS[..], 0..4)).prop_map(|(cidr, except)| {
        let parse = |text: &str| text.parse::<ipnet::IpNet>().unwrap();
        let cidr = parse(cidr);
        let except = except.into_iter().map(parse).filter(|except| cidr.contains(except) && *except != cidr).collect();
        IpBlock { cidr, except }
    })
}

fn some_peers() -> impl Strategy<Value = Peers> {
    let peer = prop_oneof![
        some_selector().prop_map(Peer::Pods),
        some_selector().prop_map(Peer::Namespaces),
        (some_selector(), some_selector()).prop_map(|(namespaces, pods)| Peer::PodsInNamespaces { namespaces, pods }),
        some_block().prop_map(Peer::IpBlock),
    ];
    prop_oneof![
        1 => Just(Peers::Every),
        6 => prop::collection::vec(peer, 0..3).prop_map(Peers::AnyOf),
    ]
}

fn some_protocol() -> impl Strategy<Value = PortProtocol> {
    prop_oneof![3 => Just(PortProtocol::Tcp), 2 => Just(PortProtocol::Udp), 1 => Just(PortProtocol::Sctp)]
}

fn some_ports() -> impl Strategy<Value = PolicyPorts> {
    let range = (select(&PORTS[..]), select(&PORTS[..]))
        .prop_map(|(a, b)| PortMatch::Range { first: a.min(b), last: a.max(b) });
    let which = prop_oneof![
        1 => Just(PortMatch::Every),
        2 => select(&PORTS[..]).prop_map(|port| PortMatch::Range { first: port, last: port }),
        2 => range,
        6 => select(&NAMES[..]).prop_map(|name| PortMatch::Name(name.to_owned())),
    ];
    let port = (some_protocol(), which).prop_map(|(protocol, which)| PolicyPort { protocol, which });
    prop_oneof![
        2 => Just(PolicyPorts::Every),
        5 => prop::collection::vec(port, 0..3).prop_map(PolicyPorts::AnyOf),
    ]
}

fn some_rules() -> impl Strategy<Value = Option<Vec<Rule>>> {
    let rule = (some_peers(), some_ports()).prop_map(|(peers, ports)| Rule { peers, ports });
    prop::option::weighted(0.7, prop::collection::vec(rule, 0..3))
}

fn some_cluster_peer(egress: bool) -> BoxedStrategy<Peer> {
    let of_pods = prop_oneof![
        some_selector().prop_map(Peer::Namespaces),
        (some_selector(), some_selector()).prop_map(|(namespaces, pods)| Peer::PodsInNamespaces { namespaces, pods }),
    ];
    if !egress {
        return of_pods.boxed();
    }
    let networks = subsequence(&BLOCKS[..], 1..3)
        .prop_map(|blocks| Peer::Networks(blocks.into_iter().map(|block| block.parse().unwrap()).collect()));
    let nodes = select(vec!["n1", "n2", ""]).prop_map(|name| {
        let operator = LabelOperator::In(vec![name.to_owned()]);
        let named = Selector { requirements: vec![Requirement { key: "name".to_owned(), operator }] };
        Peer::Nodes(if name.is_empty() { Selector::default() } else { named })
    });
    prop_oneof![3 => of_pods, 2 => networks, 2 => nodes].boxed()
}

fn some_cluster_rules(egress: bool) -> impl Strategy<Value = Vec<ClusterRule>> {
    let action = prop_oneof![Just(RuleAction::Accept), Just(RuleAction::Deny), Just(RuleAction::Pass)];
    let peers = prop::collection::vec(some_cluster_peer(egress), 1..3).prop_map(Peers::AnyOf);
    let rule = (action, peers, some_ports()).prop_map(|(action, peers, ports)| {
        let ports = if ports == PolicyPorts::AnyOf(Vec::new()) { PolicyPorts::Every } else { ports };
        ClusterRule { name: None, action, matches: Rule { peers, ports }, is_understood: true }
    });
    let narrowed = select(vec![(RuleAction::Accept, Peers::AnyOf(Vec::new())), (RuleAction::Deny, Peers::Every)])
        .prop_map(|(action, peers)| {
            let matches = Rule { peers, ports: PolicyPorts::Every };
            ClusterRule { name: None, action, matches, is_understood: false }
        });
    prop::collection::vec(prop_oneof![15 => rule, 1 => narrowed], 0..4)
}

fn some_cluster_policy() -> impl Strategy<Value = Object> {
    let tier = prop_oneof![Just(ClusterTier::Admin), Just(ClusterTier::Baseline)];
    let wide = prop_oneof![Just(Selector::default()), some_selector()];
    let subject = (wide.clone(), wide).prop_map(|(namespaces, pods)| Subject { namespaces, pods });
    let rules = (some_cluster_rules(false), some_cluster_rules(true));
    (select(&["u", "v", "w", "x"][..]), tier, select(vec![0u16, 10, 1000]), subject, rules).prop_map(
        |(name, tier, priority, subject, (ingress, egress))| {
            let name = name.to_owned();
            Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
                name,
                tier,
                priority,
                subject,
                ingress,
                egress,
                staging: Staging::InForce,
                notes: Default::default(),
            })
        },
    )
}

fn some_key(names: &'static [&'static str]) -> impl Strategy<Value = ObjectKey> {
    (select(&NAMESPACES[..]), select(names))
        .prop_map(|(namespace, name)| ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() })
}

fn some_pod() -> impl Strategy<Value = Object> {
    let port = (select(&NAMES[..]), some_protocol(), select(&[80u16, 81, 255][..]))
        .prop_map(|(name, protocol, number)| NamedPort { name: name.to_owned(), protocol, number });
    let ports = prop::collection::vec(port, 0..5).prop_map(|ports| {
        // One number for each name and protocol, as for a converted API object.
        let mut distinct: Vec<NamedPort> = Vec::new();
        for port in ports {
            if !distinct.iter().any(|other| (&other.name, other.protocol) == (&port.name, port.protocol)) {
                distinct.push(port);
            }
        }
        distinct
    });
    let node = prop::option::weighted(0.9, select(&["n1", "n2"][..]));
    let kind = (prop::bool::weighted(0.08), prop::bool::weighted(0.08));
    (some_key(&["p", "q", "r"]), some_labels(), node, subsequence(&ADDRESSES[..], 0..3), kind, ports).prop_map(
        |(key, labels, node, addresses, (host_network, finished), ports)| {
            let addresses = addresses.into_iter().map(|address| address.parse::<IpAddr>().unwrap()).collect();
            let node = node.map(str::to_owned);
            let lifetime = Default::default();
            Object::Pod(Pod { key, labels, node, addresses, host_network, finished, ports, lifetime, ..Pod::default() })
        },
    )
}

fn some_object() -> impl Strategy<Value = Object> {
    let policy = (some_key(&["s", "t"]), some_selector(), prop::bool::weighted(0.85), some_rules(), some_rules())
        .prop_map(|(key, pod_selector, isolates, ingress, egress)| {
            Object::NetworkPolicy(NetworkPolicy {
                key,
                pod_selector,
                isolates,
                ingress,
                egress,
                staging: Staging::InForce,
                notes: Default::default(),
            })
        });
    let of_namespace =
        (select(&NAMESPACES[..]), some_labels(), prop::bool::weighted(0.15)).prop_map(|(name, labels, deny)| {
            match namespace(name, "") {
                Object::Namespace(mut namespace) => {
                    namespace.labels.extend(labels);
                    namespace.default_deny_ingress = deny;
                    Object::Namespace(namespace)
                }
                other => other,
            }
        });
    let of_node = select(vec![
        node("n1", &["192.168.0.1", "fd00:ffff::1"]),
        node("n1", &["192.168.0.1"]),
        node("n2", &["192.168.0.2"]),
    ]);
    prop_oneof![6 => some_pod(), 4 => policy, 2 => of_namespace, 1 => of_node, 5 => some_cluster_policy()]
}

fn some_change() -> impl Strategy<Value = ObjectChange> {
    prop_oneof![
        5 => some_object().prop_map(ObjectChange::Set),
        1 => some_object().prop_map(|object| ObjectChange::Delete(object.reference())),
    ]
}

/// A history: the initial objects, then batches of one or a few changes.
pub(crate) fn history() -> impl Strategy<Value = (Vec<Object>, Vec<Vec<ObjectChange>>)> {
    let start = prop::collection::vec(some_object(), 10..30).prop_map(|objects| {
        let namespaces = NAMESPACES.map(|name| namespace(name, if name == "a" { "k=x" } else { "l=y" }));
        namespaces.into_iter().chain(objects).collect()
    });
    (start, prop::collection::vec(prop::collection::vec(some_change(), 1..4), 0..8))
}

//! Short notation for clusters, and queries on which all evaluators must agree.

use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::{self, Direction, PolicyVerdict, RuleScope};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;

use super::naive::{self, ClusterObjects, Covered};

pub(crate) fn key(text: &str) -> ObjectKey {
    let (namespace, name) = text.split_once('/').expect("namespace/name");
    ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() }
}

/// `a=b c=d`.
pub(crate) fn labels(text: &str) -> Labels {
    let pairs = text.split_whitespace().map(|pair| pair.split_once('=').expect("key=value"));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// `a=b|c` In, `a!=b|c` NotIn, `a` Exists, `!a` DoesNotExist; all must hold.
pub(crate) fn selector(text: &str) -> Selector {
    let values = |text: &str| {
        let mut values: Vec<String> = text.split('|').map(str::to_owned).collect();
        values.sort();
        values
    };
    let requirement = |text: &str| match (text.split_once("!="), text.split_once('='), text.strip_prefix('!')) {
        (Some((key, list)), _, _) => Requirement { key: key.to_owned(), operator: LabelOperator::NotIn(values(list)) },
        (_, Some((key, list)), _) => Requirement { key: key.to_owned(), operator: LabelOperator::In(values(list)) },
        (_, _, Some(key)) => Requirement { key: key.to_owned(), operator: LabelOperator::DoesNotExist },
        _ => Requirement { key: text.to_owned(), operator: LabelOperator::Exists },
    };
    Selector { requirements: text.split_whitespace().map(requirement).collect() }
}

pub(crate) fn namespace(name: &str, text: &str) -> Object {
    let mut labels = labels(text);
    labels.insert("kubernetes.io/metadata.name".to_owned(), name.to_owned());
    Object::Namespace(Namespace { name: name.to_owned(), labels, default_deny_ingress: false, terminating: false })
}

pub(crate) fn node(name: &str, addresses: &[&str]) -> Object {
    let labels = labels(&format!("name={name}"));
    Object::Node(Node { name: name.to_owned(), labels, addresses: ips(addresses), status_addresses: ips(addresses) })
}

pub(crate) fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

/// A pod on node `n1`. Its ports are `name:tcp/80`.
pub(crate) fn pod(name: &str, text: &str, addresses: &[&str], ports: &[&str]) -> Pod {
    let port = |text: &&str| {
        let (name, rest) = text.split_once(':').expect("name:protocol/number");
        let (protocol, number) = rest.split_once('/').expect("name:protocol/number");
        NamedPort { name: name.to_owned(), protocol: protocol_of(protocol), number: number.parse().expect("a number") }
    };
    Pod {
        key: key(name),
        labels: labels(text),
        node: Some("n1".to_owned()),
        addresses: ips(addresses),
        ports: ports.iter().map(port).collect(),
        ..Pod::default()
    }
}

fn protocol_of(word: &str) -> PortProtocol {
    match word {
        "tcp" => PortProtocol::Tcp,
        "udp" => PortProtocol::Udp,
        "sctp" => PortProtocol::Sctp,
        other => panic!("no port protocol: {other}"),
    }
}

/// `tcp` every port, `tcp/80`, `tcp/80-90`, `tcp/http` by name.
pub(crate) fn port(text: &str) -> PolicyPort {
    let Some((protocol, which)) = text.split_once('/') else {
        return PolicyPort { protocol: protocol_of(text), which: PortMatch::Every };
    };
    let number = |text: &str| text.parse::<u16>().ok();
    let range = which.split_once('-').and_then(|(first, last)| Some((number(first)?, number(last)?)));
    let which = match (number(which), range) {
        (Some(number), _) => PortMatch::Range { first: number, last: number },
        (_, Some((first, last))) => PortMatch::Range { first, last },
        _ => PortMatch::Name(which.to_owned()),
    };
    PolicyPort { protocol: protocol_of(protocol), which }
}

/// `pods SELECTOR`, `namespaces SELECTOR`, `namespaces SELECTOR / pods SELECTOR`, `10.0.0.0/8 except 10.1.0.0/16 …`,
/// `nodes SELECTOR`, `networks 10.0.0.0/8 …`, `names example.org …`.
pub(crate) fn peer(text: &str) -> Peer {
    if let Some(pods) = text.strip_prefix("pods") {
        return Peer::Pods(selector(pods));
    }
    if let Some(nodes) = text.strip_prefix("nodes") {
        return Peer::Nodes(selector(nodes));
    }
    if let Some(names) = text.strip_prefix("names ") {
        return Peer::DomainNames(
            names.split_whitespace().map(|name| DomainPattern::new(name).expect("a name")).collect(),
        );
    }
    if let Some(networks) = text.strip_prefix("networks") {
        return Peer::Networks(networks.split_whitespace().map(|net| net.parse().expect("a prefix")).collect());
    }
    if let Some(rest) = text.strip_prefix("namespaces") {
        return match rest.split_once("/ pods") {
            None => Peer::Namespaces(selector(rest)),
            Some((namespaces, pods)) => {
                Peer::PodsInNamespaces { namespaces: selector(namespaces), pods: selector(pods) }
            }
        };
    }
    let mut nets = text.split_whitespace().filter(|word| *word != "except").map(|net| net.parse().expect("a prefix"));
    Peer::IpBlock(IpBlock { cidr: nets.next().expect("a block"), except: nets.collect() })
}

/// Peers and ports; an empty list of either means every one.
pub(crate) fn rule(peers: &[&str], ports: &[&str]) -> Rule {
    let given = |texts: &[&str]| !texts.is_empty();
    Rule {
        peers: if given(peers) { Peers::AnyOf(peers.iter().map(|text| peer(text)).collect()) } else { Peers::Every },
        ports: if given(ports) {
            PolicyPorts::AnyOf(ports.iter().map(|text| port(text)).collect())
        } else {
            PolicyPorts::Every
        },
    }
}

pub(crate) fn policy(name: &str, pods: &str, ingress: Option<Vec<Rule>>, egress: Option<Vec<Rule>>) -> Object {
    let (key, pod_selector) = (key(name), selector(pods));
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

/// A ClusterNetworkPolicy of all pods that a selector matches in all namespaces: `Admin 10 name`.
pub(crate) fn cluster_policy(which: &str, pods: &str, ingress: Vec<ClusterRule>, egress: Vec<ClusterRule>) -> Object {
    let [tier, priority, name] = which.split_whitespace().collect::<Vec<_>>().try_into().expect("tier, priority, name");
    let tier = match tier {
        "Admin" => ClusterTier::Admin,
        "Baseline" => ClusterTier::Baseline,
        other => panic!("no such tier: {other}"),
    };
    Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
        name: name.to_owned(),
        tier,
        priority: priority.parse().expect("a number"),
        subject: Subject { namespaces: Selector::default(), pods: selector(pods) },
        ingress,
        egress,
        staging: Staging::InForce,
        notes: Default::default(),
    })
}

/// A rule of one: `Accept`, `Deny` or `Pass`, then peers and ports as in [`rule`].
pub(crate) fn ordered(action: RuleAction, peers: &[&str], ports: &[&str]) -> ClusterRule {
    ClusterRule { name: None, action, matches: rule(peers, ports), is_understood: true }
}

/// `tcp/80`, or a protocol without ports: `icmp`, `icmpv6`, `esp`.
pub(crate) fn destination(text: &str) -> (Protocol, u16) {
    let (protocol, port) = text.split_once('/').unwrap_or((text, "0"));
    let protocol = match protocol {
        "tcp" => Protocol::TCP,
        "udp" => Protocol::UDP,
        "sctp" => Protocol::SCTP,
        "icmp" => Protocol::ICMP,
        "icmpv6" => Protocol::ICMPV6,
        "esp" => Protocol(50),
        other => panic!("no such protocol: {other}"),
    };
    (protocol, port.parse().expect("a number"))
}

/// A cluster as objects and as an engine for all pods; every query goes to both evaluators.
pub(crate) struct Cluster {
    pub objects: ClusterObjects,
    pub engine: Engine,
    pub covered: BTreeSet<Covered>,
}

impl Cluster {
    pub(crate) fn new(objects: impl IntoIterator<Item = Object>) -> Self {
        let engine = Engine::new(EngineSettings::for_all_pods());
        let mut cluster = Self { objects: ClusterObjects::default(), engine, covered: BTreeSet::new() };
        cluster.apply(objects.into_iter().map(ObjectChange::Set).collect());
        cluster
    }

    pub(crate) fn apply(&mut self, changes: Vec<ObjectChange>) {
        changes.iter().for_each(|change| self.objects.apply(change));
        self.engine.apply(changes);
    }

    pub(crate) fn set(&mut self, object: Object) {
        self.apply(vec![ObjectChange::Set(object)]);
    }

    /// An end is `namespace/pod` (its first address) or an address.
    pub(crate) fn address(&self, end: &str) -> IpAddr {
        end.parse().unwrap_or_else(|_| self.objects.pods[&key(end)].addresses[0])
    }

    pub(crate) fn flow(&self, from: &str, to: &str, to_port: &str) -> Flow {
        let (protocol, dst_port) = destination(to_port);
        Flow { src: self.address(from).into(), dst: self.address(to).into(), protocol, src_port: 40000, dst_port }
    }

    /// The verdict of the tables. Asserts that the naive evaluator agrees in both directions.
    pub(crate) fn evaluate(&mut self, flow: &Flow) -> PolicyVerdict {
        let verdict = self.engine.evaluate(flow);
        let expected = self.objects.evaluate(flow, &mut self.covered);
        let tables = (side(verdict.egress), side(verdict.ingress));
        assert_eq!(tables, expected, "tables and naive evaluator of {flow:?} in {:#?}", self.objects.objects());
        verdict
    }

    /// Asserts verdicts: `from`, `to`, `port`, whether the flow is allowed.
    pub(crate) fn check(&mut self, queries: &[(&str, &str, &str, bool)]) {
        for (from, to, port, allowed) in queries {
            let verdict = self.evaluate(&self.flow(from, to, port));
            let got = verdict.egress.is_allowed() && verdict.ingress.is_allowed();
            assert_eq!(got, *allowed, "{from} to {to} {port}: {verdict:?}");
        }
    }

    /// The name of the rule that allowed a direction.
    pub(crate) fn rule(&mut self, from: &str, to: &str, port: &str, direction: Direction) -> String {
        let flow = self.flow(from, to, port);
        let explanation = self.engine.explain(&flow);
        let side = match direction {
            Direction::Egress => explanation.egress,
            Direction::Ingress => explanation.ingress,
        };
        side.rule.map_or("none".to_owned(), |rule| rule.to_string())
    }
}

/// A verdict of the tables in the form of the naive evaluator.
pub(crate) fn side(side: policy::DirectionVerdict) -> naive::NaiveVerdict {
    match side {
        policy::DirectionVerdict::Denied => naive::NaiveVerdict::Denied,
        policy::DirectionVerdict::NotReady => unreachable!("without ports every pod is ready"),
        policy::DirectionVerdict::NotLocal => naive::NaiveVerdict::NoPod,
        policy::DirectionVerdict::Open => naive::NaiveVerdict::Open,
        policy::DirectionVerdict::Allowed(_) | policy::DirectionVerdict::AllowedByPeer(_) => {
            naive::NaiveVerdict::Allowed
        }
        policy::DirectionVerdict::Exempt => naive::NaiveVerdict::Exempt,
        policy::DirectionVerdict::DeniedBy(_) => naive::NaiveVerdict::DeniedByRule,
        policy::DirectionVerdict::Default => naive::NaiveVerdict::Default,
        policy::DirectionVerdict::Postponed => unreachable!("no Service's address is set"),
    }
}

/// An engine in which a rule's action applies cluster-wide.
pub(crate) fn cluster_wide(objects: impl IntoIterator<Item = Object>) -> Engine {
    let mut engine = Engine::new(EngineSettings { reach: RuleScope::ClusterWide, ..EngineSettings::for_all_pods() });
    engine.apply(objects.into_iter().map(ObjectChange::Set));
    engine
}

//! ClusterNetworkPolicy of `policy.networking.k8s.io`, by the rules of its CustomResourceDefinition (v1alpha2).
//!
//! The types here are read with their unknown fields noted. A field that is `null` is as good as absent.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use penstock_policy::model::{
    self, ClusterRule, ClusterTier, DomainPattern, Peer, Peers, PolicyPort, PolicyPorts, PortMatch, PortProtocol, Rule,
    RuleAction, Selector, Subject,
};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::policy::selector;
use super::{ConversionSettings, FieldError, FieldPathRef, FieldProblem, names};

/// The most rules of a direction, peers of a rule, and entries of a list.
const MOST: usize = 25;
const RULE_NAME: usize = 100;
/// The most characters of a network.
const NETWORK: usize = 43;
const HIGHEST_PRIORITY: u16 = 1000;
const PROTOCOLS: [PortProtocol; 3] = [PortProtocol::Tcp, PortProtocol::Udp, PortProtocol::Sctp];

/// A ClusterNetworkPolicy as its API defines it.
#[derive(serde::Deserialize, Debug)]
pub struct ClusterNetworkPolicy {
    #[serde(default)]
    metadata: ObjectMeta,
    spec: Option<Mapping<Spec>>,
    #[serde(default, rename = "status")]
    _status: Option<IgnoredAny>,
}

#[derive(serde::Deserialize, Debug)]
struct Spec {
    tier: Option<String>,
    priority: Option<i64>,
    subject: Option<Mapping<SubjectFields>>,
    ingress: Option<Vec<Mapping<IngressRule>>>,
    egress: Option<Vec<Mapping<EgressRule>>>,
}

#[derive(serde::Deserialize, Debug)]
pub(crate) struct SubjectFields {
    namespaces: Option<LabelSelector>,
    pods: Option<Mapping<PodsFields>>,
}

#[derive(serde::Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
struct PodsFields {
    namespace_selector: Option<LabelSelector>,
    pod_selector: Option<LabelSelector>,
}

#[derive(serde::Deserialize, Debug)]
pub(crate) struct IngressRule {
    name: Option<String>,
    action: Option<String>,
    from: Option<Vec<Mapping<IngressPeer>>>,
    protocols: Option<Vec<Mapping<ProtocolFields>>>,
}

#[derive(serde::Deserialize, Debug)]
pub(crate) struct EgressRule {
    name: Option<String>,
    action: Option<String>,
    to: Option<Vec<Mapping<EgressPeer>>>,
    protocols: Option<Vec<Mapping<ProtocolFields>>>,
}

#[derive(serde::Deserialize, Debug)]
struct IngressPeer {
    namespaces: Option<LabelSelector>,
    pods: Option<Mapping<PodsFields>>,
}

#[derive(serde::Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
struct EgressPeer {
    namespaces: Option<LabelSelector>,
    pods: Option<Mapping<PodsFields>>,
    networks: Option<Vec<String>>,
    nodes: Option<LabelSelector>,
    domain_names: Option<Vec<String>>,
}

#[derive(serde::Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
struct ProtocolFields {
    tcp: Option<Mapping<PortFields>>,
    udp: Option<Mapping<PortFields>>,
    sctp: Option<Mapping<PortFields>>,
    destination_named_port: Option<String>,
}

#[derive(serde::Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
struct PortFields {
    destination_port: Option<Mapping<DestinationPort>>,
}

#[derive(serde::Deserialize, Debug)]
struct DestinationPort {
    number: Option<i32>,
    range: Option<Mapping<PortRange>>,
}

#[derive(serde::Deserialize, Debug)]
struct PortRange {
    start: Option<i32>,
    end: Option<i32>,
}

/// A value that is written as a mapping. The derived readers would also take a list of the fields' values.
#[derive(Debug)]
pub(crate) struct Mapping<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Mapping<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MappingVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for MappingVisitor<T> {
            type Value = Mapping<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Mapping)
            }
        }
        deserializer.deserialize_map(MappingVisitor(PhantomData))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Strictness {
    /// All that the CustomResourceDefinition sets.
    Manifest,
    /// Those without which it has no clear meaning. The server has checked the others, perhaps by a newer definition.
    Server,
}

pub fn cluster_network_policy(
    policy: &ClusterNetworkPolicy,
    settings: ConversionSettings,
) -> Result<model::ClusterNetworkPolicy, FieldError> {
    let at = FieldPathRef::OBJECT;
    let name = super::name(&policy.metadata, names::dns_subdomain)?;
    let spec_at = at.field("spec");
    let Some(Mapping(spec)) = &policy.spec else {
        return Err(spec_at.invalid(FieldProblem::Missing("set tier, priority and subject")));
    };
    let strictness = Strictness::Manifest;
    let ingress_at = spec_at.field("ingress");
    let ingress = list(&spec.ingress, &ingress_at, |rule, at| ingress_rule(rule, strictness, at))?;
    let egress_at = spec_at.field("egress");
    let egress = list(&spec.egress, &egress_at, |rule, at| egress_rule(rule, strictness, settings, at))?;
    Ok(model::ClusterNetworkPolicy {
        name,
        tier: tier(spec.tier.as_deref(), &spec_at.field("tier"))?,
        priority: priority(spec.priority, &spec_at.field("priority"))?,
        subject: subject(spec.subject.as_ref().map(|Mapping(subject)| subject), &spec_at.field("subject"))?,
        ingress,
        egress,
        staging: super::staging(&policy.metadata)?,
        notes: super::notes(&policy.metadata)?,
    })
}

pub(crate) fn cluster_policy_name(metadata: &ObjectMeta) -> Result<String, FieldError> {
    super::name(metadata, names::dns_subdomain)
}

pub(crate) fn tier(tier: Option<&str>, at: &FieldPathRef<'_>) -> Result<ClusterTier, FieldError> {
    match tier {
        Some("Admin") => Ok(ClusterTier::Admin),
        Some("Baseline") => Ok(ClusterTier::Baseline),
        None => Err(at.invalid(FieldProblem::Missing("use Admin or Baseline"))),
        Some(other) => Err(at.invalid(FieldProblem::Tier(other.to_owned()))),
    }
}

pub(crate) fn priority(priority: Option<i64>, at: &FieldPathRef<'_>) -> Result<u16, FieldError> {
    let priority = priority.ok_or_else(|| at.invalid(FieldProblem::Missing("use 0 to 1000; lower comes first")))?;
    let valid = u16::try_from(priority).ok().filter(|valid| *valid <= HIGHEST_PRIORITY);
    valid.ok_or_else(|| at.invalid(FieldProblem::Priority(priority)))
}

pub(crate) fn subject(subject: Option<&SubjectFields>, at: &FieldPathRef<'_>) -> Result<Subject, FieldError> {
    let Some(SubjectFields { namespaces, pods }) = subject else {
        return Err(at.invalid(FieldProblem::Missing("set namespaces or pods")));
    };
    one_of(&[("namespaces", namespaces.is_some()), ("pods", pods.is_some())], at)?;
    match (namespaces, pods) {
        (Some(namespaces), _) => {
            let namespaces = selector(namespaces, &at.field("namespaces"))?;
            Ok(Subject { namespaces, pods: Selector::default() })
        }
        (None, pods) => {
            let (namespaces, pods) = pods_fields(pods.as_ref(), &at.field("pods"))?;
            Ok(Subject { namespaces, pods })
        }
    }
}

pub(crate) fn action(action: Option<&str>, at: &FieldPathRef<'_>) -> Result<RuleAction, FieldError> {
    match action {
        Some("Accept") => Ok(RuleAction::Accept),
        Some("Deny") => Ok(RuleAction::Deny),
        Some("Pass") => Ok(RuleAction::Pass),
        None => Err(at.invalid(FieldProblem::Missing("use Accept, Deny or Pass"))),
        Some(other) => Err(at.invalid(FieldProblem::Action(other.to_owned()))),
    }
}

pub(crate) fn ingress_rule(
    rule: &IngressRule,
    strictness: Strictness,
    at: &FieldPathRef<'_>,
) -> Result<ClusterRule, FieldError> {
    let from_at = at.field("from");
    let peers = at_least_one(&rule.from, strictness, &from_at, ingress_peer)?;
    finish(&rule.name, &rule.action, peers, &rule.protocols, strictness, at)
}

pub(crate) fn egress_rule(
    rule: &EgressRule,
    strictness: Strictness,
    settings: ConversionSettings,
    at: &FieldPathRef<'_>,
) -> Result<ClusterRule, FieldError> {
    let (to_at, action_at) = (at.field("to"), at.field("action"));
    let action = action(rule.action.as_deref(), &action_at)?;
    // Domain names are for rules that accept, and for who follows them.
    let may_name = match action {
        RuleAction::Accept if settings.domain_names => Ok(()),
        RuleAction::Accept => Err(FieldProblem::DomainNamesUnsupported),
        RuleAction::Deny | RuleAction::Pass => Err(FieldProblem::DomainNamesAction),
    };
    let peers = at_least_one(&rule.to, strictness, &to_at, |peer, at| egress_peer(peer, &may_name, strictness, at))?;
    let names_port = rule.protocols.iter().flatten().any(|Mapping(entry)| entry.destination_named_port.is_some());
    if names_port && strictness == Strictness::Manifest {
        for (i, Mapping(peer)) in rule.to.iter().flatten().enumerate() {
            let beside = [
                ("networks", peer.networks.is_some()),
                ("nodes", peer.nodes.is_some()),
                ("domainNames", peer.domain_names.is_some()),
            ];
            if let Some((name, _)) = beside.into_iter().find(|(_, is_set)| *is_set) {
                return Err(to_at.index(i).field(name).invalid(FieldProblem::BesideNamedPort));
            }
        }
    }
    finish(&rule.name, &rule.action, peers, &rule.protocols, strictness, at)
}

fn finish(
    name: &Option<String>,
    rule_action: &Option<String>,
    peers: Vec<Peer>,
    protocols: &Option<Vec<Mapping<ProtocolFields>>>,
    strictness: Strictness,
    at: &FieldPathRef<'_>,
) -> Result<ClusterRule, FieldError> {
    if let Some(name) = name
        && strictness == Strictness::Manifest
        && name.chars().count() > RULE_NAME
    {
        return Err(at
            .field("name")
            .invalid(FieldProblem::TooLong { characters: name.chars().count(), most: RULE_NAME }));
    }
    let protocols_at = at.field("protocols");
    let ports = match protocols {
        None => PolicyPorts::Every,
        given => {
            let entries = at_least_one(given, strictness, &protocols_at, protocol_entry)?;
            PolicyPorts::AnyOf(entries.into_iter().flatten().collect())
        }
    };
    Ok(ClusterRule {
        name: name.clone(),
        action: action(rule_action.as_deref(), &at.field("action"))?,
        matches: Rule { peers: Peers::AnyOf(peers), ports },
        is_understood: true,
    })
}

fn ingress_peer(peer: &IngressPeer, at: &FieldPathRef<'_>) -> Result<Peer, FieldError> {
    one_of(&[("namespaces", peer.namespaces.is_some()), ("pods", peer.pods.is_some())], at)?;
    pod_peer(peer.namespaces.as_ref(), peer.pods.as_ref(), at)
}

fn egress_peer(
    peer: &EgressPeer,
    may_name: &Result<(), FieldProblem>,
    strictness: Strictness,
    at: &FieldPathRef<'_>,
) -> Result<Peer, FieldError> {
    one_of(
        &[
            ("namespaces", peer.namespaces.is_some()),
            ("pods", peer.pods.is_some()),
            ("networks", peer.networks.is_some()),
            ("nodes", peer.nodes.is_some()),
            ("domainNames", peer.domain_names.is_some()),
        ],
        at,
    )?;
    if let Some(networks) = &peer.networks {
        return networks_peer(networks, strictness, &at.field("networks"));
    }
    if let Some(nodes) = &peer.nodes {
        return Ok(Peer::Nodes(selector(nodes, &at.field("nodes"))?));
    }
    if let Some(domain_names) = &peer.domain_names {
        return domain_names_peer(domain_names, may_name, strictness, &at.field("domainNames"));
    }
    pod_peer(peer.namespaces.as_ref(), peer.pods.as_ref(), at)
}

fn pod_peer(
    namespaces: Option<&LabelSelector>,
    pods: Option<&Mapping<PodsFields>>,
    at: &FieldPathRef<'_>,
) -> Result<Peer, FieldError> {
    match namespaces {
        Some(namespaces) => Ok(Peer::Namespaces(selector(namespaces, &at.field("namespaces"))?)),
        None => {
            let (namespaces, pods) = pods_fields(pods, &at.field("pods"))?;
            Ok(Peer::PodsInNamespaces { namespaces, pods })
        }
    }
}

/// The selectors of namespaces and pods; without the former, every namespace.
fn pods_fields(pods: Option<&Mapping<PodsFields>>, at: &FieldPathRef<'_>) -> Result<(Selector, Selector), FieldError> {
    let pod_selector_at = at.field("podSelector");
    let missing = || pod_selector_at.invalid(FieldProblem::Missing("{} selects every pod"));
    let Mapping(PodsFields { namespace_selector, pod_selector }) = pods.ok_or_else(missing)?;
    let namespaces = match namespace_selector {
        Some(namespaces) => selector(namespaces, &at.field("namespaceSelector"))?,
        None => Selector::default(),
    };
    Ok((namespaces, selector(pod_selector.as_ref().ok_or_else(missing)?, &pod_selector_at)?))
}

fn networks_peer(networks: &[String], strictness: Strictness, at: &FieldPathRef<'_>) -> Result<Peer, FieldError> {
    set(networks, strictness, at)?;
    let networks = networks.iter().enumerate().map(|(i, text)| network(text, &at.index(i)));
    Ok(Peer::Networks(networks.collect::<Result<_, _>>()?))
}

/// A network with host bits cleared. Stricter than a NetworkPolicy's: no leading zero, no IPv4 in IPv6's notation.
fn network(text: &str, at: &FieldPathRef<'_>) -> Result<IpNet, FieldError> {
    let parts = text.split_once('/').filter(|(_, prefix)| !prefix.starts_with(['+', '-']));
    let parts = parts.filter(|(_, prefix)| *prefix == "0" || !prefix.starts_with('0'));
    let parsed = parts.and_then(|(address, prefix)| {
        let (address, prefix): (IpAddr, u8) = (address.parse().ok()?, prefix.parse().ok()?);
        IpNet::new(address, prefix).ok()
    });
    let net = parsed.filter(|_| text.len() <= NETWORK);
    let net = net.ok_or_else(|| at.invalid(FieldProblem::Cidr(text.to_owned())))?;
    match net.addr() {
        IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => {
            Err(at.invalid(FieldProblem::Mapped(text.to_owned())))
        }
        _ => Ok(net.trunc()),
    }
}

fn domain_names_peer(
    names: &[String],
    may_name: &Result<(), FieldProblem>,
    strictness: Strictness,
    at: &FieldPathRef<'_>,
) -> Result<Peer, FieldError> {
    set(names, strictness, at)?;
    let pattern = |(i, name): (usize, &String)| {
        DomainPattern::new(name).ok_or_else(|| at.index(i).invalid(FieldProblem::DomainName(name.clone())))
    };
    let patterns = names.iter().enumerate().map(pattern).collect::<Result<_, _>>()?;
    may_name.clone().map_err(|problem| at.invalid(problem))?;
    Ok(Peer::DomainNames(patterns))
}

/// An entry of `protocols`. A named port has one entry for each protocol: the pod's port says which.
fn protocol_entry(entry: &ProtocolFields, at: &FieldPathRef<'_>) -> Result<Vec<PolicyPort>, FieldError> {
    let ProtocolFields { tcp, udp, sctp, destination_named_port } = entry;
    let numbered = [("tcp", tcp), ("udp", udp), ("sctp", sctp)];
    let named = ("destinationNamedPort", destination_named_port.is_some());
    let given: Vec<(&str, bool)> = numbered.iter().map(|(name, port)| (*name, port.is_some())).chain([named]).collect();
    one_of(&given, at)?;
    if let Some(name) = destination_named_port {
        let name_at = at.field("destinationNamedPort");
        names::port_name(name).map_err(|problem| name_at.invalid(problem))?;
        let which = PortMatch::Name(name.clone());
        return Ok(PROTOCOLS.map(|protocol| PolicyPort { protocol, which: which.clone() }).into());
    }
    let mut ports = Vec::new();
    for ((name, port), protocol) in numbered.into_iter().zip(PROTOCOLS) {
        if let Some(Mapping(PortFields { destination_port })) = port {
            let protocol_at = at.field(name);
            let port_at = protocol_at.field("destinationPort");
            ports.push(PolicyPort { protocol, which: destination(destination_port.as_ref(), &port_at)? });
        }
    }
    Ok(ports)
}

fn destination(port: Option<&Mapping<DestinationPort>>, at: &FieldPathRef<'_>) -> Result<PortMatch, FieldError> {
    let Some(Mapping(DestinationPort { number, range })) = port else {
        return Err(at.invalid(FieldProblem::Missing("set number or range; 1 to 65535 are all ports")));
    };
    one_of(&[("number", number.is_some()), ("range", range.is_some())], at)?;
    if let Some(number) = number {
        let number = super::port::number(*number, &at.field("number"))?;
        return Ok(PortMatch::Range { first: number, last: number });
    }
    let range_at = at.field("range");
    let bound = |bound: Option<i32>, name: &'static str| {
        let bound_at = range_at.field(name);
        let bound = bound.ok_or_else(|| bound_at.invalid(FieldProblem::Missing("a range needs start and end")))?;
        super::port::number(bound, &bound_at)
    };
    let (start, end) = range.as_ref().map_or((None, None), |Mapping(range)| (range.start, range.end));
    let (first, last) = (bound(start, "start")?, bound(end, "end")?);
    match first < last {
        true => Ok(PortMatch::Range { first, last }),
        false => Err(range_at.invalid(FieldProblem::RangeOrder { start: first, end: last })),
    }
}

/// Checks that exactly one of these fields is set.
fn one_of(fields: &[(&'static str, bool)], at: &FieldPathRef<'_>) -> Result<(), FieldError> {
    let set = fields.iter().filter(|(_, is_set)| *is_set).count();
    match set {
        1 => Ok(()),
        _ => {
            let names = fields.iter().map(|(name, _)| *name).collect();
            Err(at.invalid(FieldProblem::NotExactlyOne { set, names }))
        }
    }
}

fn list<T, R>(
    entries: &Option<Vec<Mapping<T>>>,
    at: &FieldPathRef<'_>,
    convert: impl Fn(&T, &FieldPathRef<'_>) -> Result<R, FieldError>,
) -> Result<Vec<R>, FieldError> {
    let entries = entries.as_deref().unwrap_or_default();
    if entries.len() > MOST {
        return Err(at.invalid(FieldProblem::Entries { count: entries.len(), least: 0, most: MOST }));
    }
    entries.iter().enumerate().map(|(i, Mapping(entry))| convert(entry, &at.index(i))).collect()
}

fn at_least_one<T, R>(
    entries: &Option<Vec<Mapping<T>>>,
    strictness: Strictness,
    at: &FieldPathRef<'_>,
    convert: impl Fn(&T, &FieldPathRef<'_>) -> Result<R, FieldError>,
) -> Result<Vec<R>, FieldError> {
    let entries = entries.as_deref().unwrap_or_default();
    count(entries.len(), strictness, at)?;
    entries.iter().enumerate().map(|(i, Mapping(entry))| convert(entry, &at.index(i))).collect()
}

/// Checks that a set has at least one value, and none twice.
fn set(values: &[String], strictness: Strictness, at: &FieldPathRef<'_>) -> Result<(), FieldError> {
    count(values.len(), strictness, at)?;
    let mut seen = BTreeSet::new();
    match values.iter().position(|value| !seen.insert(value)) {
        Some(place) if strictness == Strictness::Manifest => {
            Err(at.index(place).invalid(FieldProblem::Repeated(values[place].clone())))
        }
        _ => Ok(()),
    }
}

fn count(count: usize, strictness: Strictness, at: &FieldPathRef<'_>) -> Result<(), FieldError> {
    match count == 0 || (count > MOST && strictness == Strictness::Manifest) {
        true => Err(at.invalid(FieldProblem::Entries { count, least: 1, most: MOST })),
        false => Ok(()),
    }
}

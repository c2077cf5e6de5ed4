//! NetworkPolicy of `networking.k8s.io/v1`: its rules, their peers (selectors and address blocks), and label selectors.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use penstock_policy::model::{self, IpBlock, LabelOperator, Peer, Peers, PolicyPorts, Requirement, Rule, Selector};

use super::port::policy_port;
use super::{FieldError, FieldPathRef, FieldProblem, names};

/// Converts a NetworkPolicy. An absent `spec` or `podSelector` selects every pod of the namespace, as in the API.
pub fn network_policy(policy: &NetworkPolicy) -> Result<model::NetworkPolicy, FieldError> {
    let at = FieldPathRef::OBJECT;
    let spec_at = at.field("spec");
    let key = super::key(&policy.metadata)?;
    let spec = policy.spec.clone().unwrap_or_default();
    let pod_selector = match &spec.pod_selector {
        Some(pods) => selector(pods, &spec_at.field("podSelector"))?,
        None => Selector::default(),
    };
    let (isolates_ingress, isolates_egress) = directions(&spec, &spec_at)?;
    // The rules of a direction without isolation have no effect, but must be valid.
    let ingress = rules(spec.ingress.as_deref(), &spec_at.field("ingress"), ingress_rule)?;
    let egress = rules(spec.egress.as_deref(), &spec_at.field("egress"), egress_rule)?;
    Ok(model::NetworkPolicy {
        key,
        pod_selector,
        isolates: true,
        ingress: isolates_ingress.then_some(ingress),
        egress: isolates_egress.then_some(egress),
        staging: super::staging(&policy.metadata)?,
        notes: super::notes(&policy.metadata)?,
    })
}

/// Whether the policy isolates for ingress and for egress. Default without `policyTypes`: ingress, and egress if it has
/// egress rules.
fn directions(spec: &NetworkPolicySpec, at: &FieldPathRef<'_>) -> Result<(bool, bool), FieldError> {
    let types = spec.policy_types.as_deref().unwrap_or_default();
    if types.is_empty() {
        return Ok((true, spec.egress.as_ref().is_some_and(|rules| !rules.is_empty())));
    }
    let types_at = at.field("policyTypes");
    let (mut ingress, mut egress) = (false, false);
    for (i, name) in types.iter().enumerate() {
        match name.as_str() {
            "Ingress" => ingress = true,
            "Egress" => egress = true,
            other => return Err(types_at.index(i).invalid(FieldProblem::PolicyType(other.to_owned()))),
        }
    }
    Ok((ingress, egress))
}

fn rules<R>(
    rules: Option<&[R]>,
    at: &FieldPathRef<'_>,
    convert: fn(&R, &FieldPathRef<'_>) -> Result<Rule, FieldError>,
) -> Result<Vec<Rule>, FieldError> {
    rules.unwrap_or_default().iter().enumerate().map(|(i, rule)| convert(rule, &at.index(i))).collect()
}

fn ingress_rule(rule: &NetworkPolicyIngressRule, at: &FieldPathRef<'_>) -> Result<Rule, FieldError> {
    let peers = peers(rule.from.as_deref(), &at.field("from"))?;
    Ok(Rule { peers, ports: ports(rule.ports.as_deref(), &at.field("ports"))? })
}

fn egress_rule(rule: &NetworkPolicyEgressRule, at: &FieldPathRef<'_>) -> Result<Rule, FieldError> {
    let peers = peers(rule.to.as_deref(), &at.field("to"))?;
    Ok(Rule { peers, ports: ports(rule.ports.as_deref(), &at.field("ports"))? })
}

/// The peers of a rule; an empty list means every peer, as an absent one.
fn peers(peers: Option<&[NetworkPolicyPeer]>, at: &FieldPathRef<'_>) -> Result<Peers, FieldError> {
    match peers.unwrap_or_default() {
        [] => Ok(Peers::Every),
        some => some.iter().enumerate().map(|(i, p)| peer(p, &at.index(i))).collect::<Result<_, _>>().map(Peers::AnyOf),
    }
}

/// The ports of a rule; an empty list means every port and protocol, as an absent one.
fn ports(ports: Option<&[NetworkPolicyPort]>, at: &FieldPathRef<'_>) -> Result<PolicyPorts, FieldError> {
    match ports.unwrap_or_default() {
        [] => Ok(PolicyPorts::Every),
        some => {
            let ports = some.iter().enumerate().map(|(i, port)| policy_port(port, &at.index(i)));
            ports.collect::<Result<_, _>>().map(PolicyPorts::AnyOf)
        }
    }
}

fn peer(peer: &NetworkPolicyPeer, at: &FieldPathRef<'_>) -> Result<Peer, FieldError> {
    let pods_at = at.field("podSelector");
    let namespaces_at = at.field("namespaceSelector");
    match (&peer.ip_block, &peer.namespace_selector, &peer.pod_selector) {
        (None, None, None) => Err(at.invalid(FieldProblem::EmptyPeer)),
        (Some(ip_block), None, None) => Ok(Peer::IpBlock(block(ip_block, &at.field("ipBlock"))?)),
        (Some(_), Some(_), _) => Err(at.invalid(FieldProblem::BlockBesideSelector("namespaceSelector"))),
        (Some(_), None, Some(_)) => Err(at.invalid(FieldProblem::BlockBesideSelector("podSelector"))),
        (None, None, Some(pods)) => Ok(Peer::Pods(selector(pods, &pods_at)?)),
        (None, Some(namespaces), None) => Ok(Peer::Namespaces(selector(namespaces, &namespaces_at)?)),
        (None, Some(namespaces), Some(pods)) => Ok(Peer::PodsInNamespaces {
            namespaces: selector(namespaces, &namespaces_at)?,
            pods: selector(pods, &pods_at)?,
        }),
    }
}

fn block(block: &IPBlock, at: &FieldPathRef<'_>) -> Result<IpBlock, FieldError> {
    let cidr = cidr(&block.cidr, &at.field("cidr"))?;
    let excepts_at = at.field("except");
    let except = block.except.iter().flatten().enumerate().map(|(i, text)| {
        let except_at = excepts_at.index(i);
        let except = self::cidr(text, &except_at)?;
        match cidr.contains(&except) && except.prefix_len() > cidr.prefix_len() {
            true => Ok(except),
            false => Err(except_at.invalid(FieldProblem::ExceptOutside { except, cidr })),
        }
    });
    Ok(IpBlock { cidr, except: except.collect::<Result<_, _>>()? })
}

/// A block with host bits cleared: the API accepts `10.0.0.1/8` as `10.0.0.0/8`.
fn cidr(text: &str, at: &FieldPathRef<'_>) -> Result<IpNet, FieldError> {
    let net: IpNet = text.parse().map_err(|_| at.invalid(FieldProblem::Cidr(text.to_owned())))?;
    match net.addr() {
        // A prefix shorter than the mapped range covers more than IPv4, and is valid.
        IpAddr::V6(address) if address.to_ipv4_mapped().is_some() && net.prefix_len() >= 96 => {
            Err(at.invalid(FieldProblem::Mapped(text.to_owned())))
        }
        _ => Ok(net.trunc()),
    }
}

/// Converts a selector. Sorts its requirements, so that equal selectors compare equal.
pub(super) fn selector(selector: &LabelSelector, at: &FieldPathRef<'_>) -> Result<Selector, FieldError> {
    let mut requirements = Vec::new();
    let labels_at = at.field("matchLabels");
    for (key, value) in selector.match_labels.iter().flatten() {
        let valid = names::label_key(key).and_then(|()| names::label_value(value));
        valid.map_err(|problem| labels_at.field(key).invalid(problem))?;
        requirements.push(Requirement { key: key.clone(), operator: LabelOperator::In(vec![value.clone()]) });
    }
    let expressions_at = at.field("matchExpressions");
    for (i, expression) in selector.match_expressions.iter().flatten().enumerate() {
        requirements.push(requirement(expression, &expressions_at.index(i))?);
    }
    requirements.sort();
    requirements.dedup();
    Ok(Selector { requirements })
}

fn requirement(expression: &LabelSelectorRequirement, at: &FieldPathRef<'_>) -> Result<Requirement, FieldError> {
    names::label_key(&expression.key).map_err(|problem| at.field("key").invalid(problem))?;
    let values_at = at.field("values");
    let values = || values(expression, &values_at);
    let none = |operator| match expression.values.as_deref() {
        None | Some([]) => Ok(()),
        Some(_) => Err(values_at.invalid(FieldProblem::UnwantedValues(operator))),
    };
    let test = match expression.operator.as_str() {
        "In" => LabelOperator::In(values()?.ok_or_else(|| values_at.invalid(FieldProblem::NoValues("In")))?),
        "NotIn" => LabelOperator::NotIn(values()?.ok_or_else(|| values_at.invalid(FieldProblem::NoValues("NotIn")))?),
        "Exists" => none("Exists").map(|()| LabelOperator::Exists)?,
        "DoesNotExist" => none("DoesNotExist").map(|()| LabelOperator::DoesNotExist)?,
        other => return Err(at.field("operator").invalid(FieldProblem::Operator(other.to_owned()))),
    };
    Ok(Requirement { key: expression.key.clone(), operator: test })
}

/// The values of an expression, sorted; `None` if there are none.
fn values(expression: &LabelSelectorRequirement, at: &FieldPathRef<'_>) -> Result<Option<Vec<String>>, FieldError> {
    let mut values = expression.values.clone().unwrap_or_default();
    for (i, value) in values.iter().enumerate() {
        names::label_value(value).map_err(|problem| at.index(i).invalid(problem))?;
    }
    values.sort();
    values.dedup();
    Ok(if values.is_empty() { None } else { Some(values) })
}

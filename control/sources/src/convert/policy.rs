//! NetworkPolicy of `networking.k8s.io/v1`.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use penstock_policy::model::{self, Peers, Ports, Rule, Selector};

use super::peer::peer;
use super::port::policy_port;
use super::selector::selector;
use super::{At, Invalid, Problem};

/// Converts a NetworkPolicy. An absent `spec` or `podSelector` selects every pod of the namespace, as in the API.
pub fn network_policy(policy: &NetworkPolicy) -> Result<model::NetworkPolicy, Invalid> {
    let at = At::OBJECT;
    let spec_at = at.field("spec");
    let key = super::key(&policy.metadata)?;
    let spec = policy.spec.clone().unwrap_or_default();
    let pod_selector = match &spec.pod_selector {
        Some(pods) => selector(pods, &spec_at.field("podSelector"))?,
        None => Selector::default(),
    };
    let (isolates_ingress, isolates_egress) = directions(&spec, &spec_at)?;
    // The rules of a direction that is not isolated have no effect, yet must be valid.
    let ingress = rules(spec.ingress.as_deref(), &spec_at.field("ingress"), ingress_rule)?;
    let egress = rules(spec.egress.as_deref(), &spec_at.field("egress"), egress_rule)?;
    Ok(model::NetworkPolicy {
        key,
        pod_selector,
        isolates: true,
        ingress: isolates_ingress.then_some(ingress),
        egress: isolates_egress.then_some(egress),
    })
}

/// Whether the policy isolates for ingress and for egress. Without `policyTypes`: ingress always, egress if it
/// has egress rules.
fn directions(spec: &NetworkPolicySpec, at: &At<'_>) -> Result<(bool, bool), Invalid> {
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
            other => return Err(types_at.index(i).invalid(Problem::PolicyType(other.to_owned()))),
        }
    }
    Ok((ingress, egress))
}

fn rules<R>(
    rules: Option<&[R]>,
    at: &At<'_>,
    convert: fn(&R, &At<'_>) -> Result<Rule, Invalid>,
) -> Result<Vec<Rule>, Invalid> {
    rules.unwrap_or_default().iter().enumerate().map(|(i, rule)| convert(rule, &at.index(i))).collect()
}

fn ingress_rule(rule: &NetworkPolicyIngressRule, at: &At<'_>) -> Result<Rule, Invalid> {
    let peers = peers(rule.from.as_deref(), &at.field("from"))?;
    Ok(Rule { peers, ports: ports(rule.ports.as_deref(), &at.field("ports"))? })
}

fn egress_rule(rule: &NetworkPolicyEgressRule, at: &At<'_>) -> Result<Rule, Invalid> {
    let peers = peers(rule.to.as_deref(), &at.field("to"))?;
    Ok(Rule { peers, ports: ports(rule.ports.as_deref(), &at.field("ports"))? })
}

/// The peers of a rule; an empty list means the same as none: every peer.
fn peers(peers: Option<&[NetworkPolicyPeer]>, at: &At<'_>) -> Result<Peers, Invalid> {
    match peers.unwrap_or_default() {
        [] => Ok(Peers::Every),
        some => some.iter().enumerate().map(|(i, p)| peer(p, &at.index(i))).collect::<Result<_, _>>().map(Peers::AnyOf),
    }
}

/// The ports of a rule; an empty list means the same as none: every port and protocol.
fn ports(ports: Option<&[NetworkPolicyPort]>, at: &At<'_>) -> Result<Ports, Invalid> {
    match ports.unwrap_or_default() {
        [] => Ok(Ports::Every),
        some => {
            let ports = some.iter().enumerate().map(|(i, port)| policy_port(port, &at.index(i)));
            ports.collect::<Result<_, _>>().map(Ports::AnyOf)
        }
    }
}

//! NetworkPolicy of `extensions/v1beta1`, in the meaning of the original NetworkPolicy proposal.
//!
//! It differs from the stable API: a policy isolates nothing (the namespace's annotation does), an empty `from`
//! or `ports` list matches nothing, and there is neither egress nor ipBlock nor a peer with both selectors.

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use penstock_policy::model::{self, Peers, PolicyPorts};

use super::{FieldError, FieldPathRef, FieldProblem, policy};

/// Converts a policy of `extensions/v1beta1`. Its JSON form is a part of the stable API's, so it is read by
/// the latter's type.
pub fn network_policy(policy: &NetworkPolicy) -> Result<model::NetworkPolicy, FieldError> {
    let mut converted = policy::network_policy(policy)?;
    let at = FieldPathRef::OBJECT;
    let spec_at = at.field("spec");
    let Some(spec) = &policy.spec else { return Ok(converted) };
    if spec.egress.is_some() {
        return Err(spec_at.field("egress").invalid(FieldProblem::NotInV1Beta1));
    }
    if spec.policy_types.is_some() {
        return Err(spec_at.field("policyTypes").invalid(FieldProblem::NotInV1Beta1));
    }
    let ingress_at = spec_at.field("ingress");
    let rules = converted.ingress.iter_mut().flatten();
    for (i, (rule, converted)) in spec.ingress.iter().flatten().zip(rules).enumerate() {
        let rule_at = ingress_at.index(i);
        let from_at = rule_at.field("from");
        for (i, peer) in rule.from.iter().flatten().enumerate() {
            check_peer(peer, &from_at.index(i))?;
        }
        let ports_at = rule_at.field("ports");
        for (i, port) in rule.ports.iter().flatten().enumerate() {
            check_port(port, &ports_at.index(i))?;
        }
        if rule.from.as_ref().is_some_and(Vec::is_empty) {
            converted.peers = Peers::AnyOf(Vec::new());
        }
        if rule.ports.as_ref().is_some_and(Vec::is_empty) {
            converted.ports = PolicyPorts::AnyOf(Vec::new());
        }
    }
    converted.isolates = false;
    Ok(converted)
}

fn check_peer(peer: &NetworkPolicyPeer, at: &FieldPathRef<'_>) -> Result<(), FieldError> {
    if peer.ip_block.is_some() {
        return Err(at.field("ipBlock").invalid(FieldProblem::NotInV1Beta1));
    }
    if peer.pod_selector.is_some() && peer.namespace_selector.is_some() {
        return Err(at.invalid(FieldProblem::OneSelectorInV1Beta1));
    }
    Ok(())
}

fn check_port(port: &NetworkPolicyPort, at: &FieldPathRef<'_>) -> Result<(), FieldError> {
    if port.end_port.is_some() {
        return Err(at.field("endPort").invalid(FieldProblem::NotInV1Beta1));
    }
    match port.protocol.as_deref() {
        Some("SCTP") => Err(at.field("protocol").invalid(FieldProblem::NotInV1Beta1)),
        _ => Ok(()),
    }
}

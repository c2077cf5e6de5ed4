//! Why a flow is allowed or denied.

use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{Direction, DirectionVerdict, PolicyVerdict};

use crate::compile::{Mismatch, Provenance, RuleSource, compare, rules_of};
use crate::model::ObjectKey;
use crate::state::{PodId, PodOrNode};

use super::Engine;

/// A verdict and its reasons.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// The verdict by the tables.
    pub verdict: PolicyVerdict,
    /// Why the source may or may not send it.
    pub egress: DirectionExplanation,
    /// Why the destination may or may not receive it.
    pub ingress: DirectionExplanation,
}

/// The reasons of one direction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectionExplanation {
    /// The direction's verdict by the tables.
    pub verdict: DirectionVerdict,
    /// The pod whose policies apply; `None` if the address is not a pod's.
    pub pod: Option<ObjectKey>,
    /// The policies that select the pod and have rules of this direction, sorted.
    pub policies: Vec<ObjectKey>,
    /// Whether a policy or the namespace's annotation isolates the pod in this direction.
    pub isolated: bool,
    /// Whether the annotation of its namespace isolates it.
    pub default_deny: bool,
    /// The rule that allowed the flow. With [`DirectionVerdict::AllowedByPeer`] it is a rule of the other direction.
    pub rule: Option<Provenance>,
    /// Where denied, the rule that came closest to allowing it.
    pub nearest: Option<NearestRule>,
}

/// The rule that came closest to allowing a denied flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NearestRule {
    /// The rule. Where its peer or port did not match, the first that it lists.
    pub rule: Provenance,
    /// What did not match: one thing, or two if no rule came closer.
    pub mismatches: Vec<Mismatch>,
}

impl Engine {
    /// Evaluates a flow and explains the verdict.
    pub fn explain(&self, flow: &Flow) -> Explanation {
        let verdict = self.evaluate(flow);
        Explanation {
            verdict,
            egress: self.explain_direction(flow, Direction::Egress, verdict.egress),
            ingress: self.explain_direction(flow, Direction::Ingress, verdict.ingress),
        }
    }

    fn explain_direction(&self, flow: &Flow, direction: Direction, verdict: DirectionVerdict) -> DirectionExplanation {
        let own = match direction {
            Direction::Egress => flow.src,
            Direction::Ingress => flow.dst,
        };
        let pod = match self.state.owner(&own.into()) {
            Some(PodOrNode::Pod(pod)) => Some(pod),
            Some(PodOrNode::Node(_)) | None => None,
        };
        let sources = pod.map(|pod| self.sources(pod, direction)).unwrap_or_default();
        let default_deny =
            direction == Direction::Ingress && pod.is_some_and(|pod| self.state.is_denied_by_default(pod));
        let policies = pod.map(|pod| self.policies(pod, direction)).unwrap_or_default();
        DirectionExplanation {
            verdict,
            pod: pod.and_then(|pod| self.state.pod(pod)).map(|pod| pod.key.clone()),
            isolated: default_deny || policies.iter().any(|(_, isolates)| *isolates),
            policies: policies.into_iter().map(|(key, _)| key).collect(),
            default_deny,
            rule: verdict.rule().and_then(|rule| self.provenance(rule, flow)),
            nearest: if verdict == DirectionVerdict::Denied { self.nearest(&sources, flow) } else { None },
        }
    }

    /// The policies of a pod for a direction, each with whether it isolates the pod.
    fn policies(&self, pod: PodId, direction: Direction) -> Vec<(ObjectKey, bool)> {
        let policies = self.state.policies_of(pod).filter_map(|(policy, _)| self.state.policy(policy));
        let applying = policies.filter(|policy| rules_of(policy, direction).is_some());
        applying.map(|policy| (policy.key.clone(), policy.isolates)).collect()
    }

    fn sources(&self, pod: PodId, direction: Direction) -> Vec<RuleSource> {
        let policies = self.state.policies_of(pod).filter_map(|(policy, _)| self.state.policy(policy));
        policies
            .flat_map(|policy| {
                let rules = rules_of(policy, direction).unwrap_or_default().len();
                (0..rules).map(|rule| RuleSource { policy: policy.clone(), direction, rule })
            })
            .collect()
    }

    /// The rule with the smallest mismatch: a port weighs less than an except, an except less than any other peer.
    fn nearest(&self, sources: &[RuleSource], flow: &Flow) -> Option<NearestRule> {
        let weight = |mismatch: &Mismatch| match mismatch {
            Mismatch::Port | Mismatch::PortName(_) => 1,
            Mismatch::Excepted(_) => 2,
            Mismatch::Peer => 3,
        };
        let met = sources.iter().map(|source| compare(&self.state, source, flow));
        let nearest = met.min_by_key(|met| met.mismatches.iter().map(weight).sum::<u32>())?;
        Some(NearestRule { rule: nearest.provenance, mismatches: nearest.mismatches })
    }
}

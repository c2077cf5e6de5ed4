//! Why a flow is allowed or denied.

use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{Direction, Judgement, Side};

use crate::compile::{Mismatch, Provenance, RuleSource, compare, rules_of};
use crate::model::ObjectKey;
use crate::state::{AddressOwner, PodId};

use super::Engine;

/// A verdict and its reasons.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// What the tables say.
    pub verdict: Judgement,
    /// Why the source may send it, or may not.
    pub egress: DirectionExplanation,
    /// Why the destination may receive it, or may not.
    pub ingress: DirectionExplanation,
}

/// The reasons of one side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectionExplanation {
    /// What the tables say.
    pub verdict: Side,
    /// The pod whose side it is; `None` if its address is no pod's.
    pub pod: Option<ObjectKey>,
    /// The policies that select the pod and are about this direction, sorted.
    pub policies: Vec<ObjectKey>,
    /// Whether the pod is isolated in this direction, by one of the policies or by its namespace.
    pub isolated: bool,
    /// Whether the annotation of its namespace isolates it.
    pub default_deny: bool,
    /// The rule that allowed; the other side's, where [`Side::AllowedByPeer`] says so.
    pub rule: Option<Provenance>,
    /// Where it is denied, the rule that came nearest.
    pub nearest: Option<NearestRule>,
}

/// A rule that almost allowed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NearestRule {
    /// The rule; of what did not match, the first that it lists.
    pub rule: Provenance,
    /// What did not match: one thing, or two if no rule came nearer.
    pub mismatches: Vec<Mismatch>,
}

impl Engine {
    /// Judges a flow and says why.
    pub fn explain(&self, flow: &Flow) -> Explanation {
        let verdict = self.evaluate(flow);
        Explanation {
            verdict,
            egress: self.explain_direction(flow, Direction::Egress, verdict.egress),
            ingress: self.explain_direction(flow, Direction::Ingress, verdict.ingress),
        }
    }

    fn explain_direction(&self, flow: &Flow, direction: Direction, verdict: Side) -> DirectionExplanation {
        let own = match direction {
            Direction::Egress => flow.src,
            Direction::Ingress => flow.dst,
        };
        let pod = match self.state.owner(&own.into()) {
            Some(AddressOwner::Pod(pod)) => Some(pod),
            Some(AddressOwner::Node(_)) | None => None,
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
            nearest: if verdict == Side::Denied { self.nearest(&sources, flow) } else { None },
        }
    }

    /// The policies of a pod for a direction, and whether each isolates it.
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

    /// The rule that lacks least: a port before a peer, an except before any other peer.
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

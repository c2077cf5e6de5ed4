//! Why a flow is allowed or denied.

use penstock_dataplane::names::{DomainName, Moment, NameRules, NameTime};
use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{Direction, DirectionVerdict, PolicyVerdict};

use crate::compile::{
    Mismatch, PeerKind, PolicyName, Provenance, RuleSource, Tier, cluster_rules_of, cluster_sources, compare,
    compare_by_name, network_sources, rules_of,
};
use crate::model::{ObjectKey, Peer, Peers, RuleAction};
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

impl Explanation {
    /// Whether both have the same verdicts, by the same rules. Which rule comes nearest to allowing a denied flow, and the
    /// numbers of rules in the tables, may differ.
    pub fn is_same(&self, other: &Self) -> bool {
        self.egress.is_same(&other.egress) && self.ingress.is_same(&other.ingress)
    }

    /// Whether the flow passes.
    pub fn is_allowed(&self) -> bool {
        self.is_unseen() || self.verdict.is_allowed()
    }

    /// Whether neither end is enforced here, so that the flow meets no worker: a worker that got it nevertheless would drop it,
    /// since it could only be of a pod that is not known yet.
    pub fn is_unseen(&self) -> bool {
        [&self.egress, &self.ingress].into_iter().all(|side| side.verdict == DirectionVerdict::NotLocal)
    }

    /// Why it passes unseen, if it does.
    pub fn unseen(&self) -> Option<&'static str> {
        let is_pod = self.egress.pod.is_some() || self.ingress.pod.is_some();
        let reason = if is_pod {
            "no pod of this node at either end, Penstock does not see it here"
        } else {
            "no pod at either end, Penstock does not see it"
        };
        self.is_unseen().then_some(reason)
    }
}

/// The reasons of one direction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectionExplanation {
    /// The direction's verdict by the tables.
    pub verdict: DirectionVerdict,
    /// The pod whose policies apply; `None` if the address is not a pod's.
    pub pod: Option<ObjectKey>,
    /// The decisions of the tiers, up to the one that decided the flow. Empty if no ClusterNetworkPolicy applies.
    pub tiers: Vec<TierStep>,
    /// The rules with domain names that stand before the one that decided: the first decides instead once a DNS answer has
    /// given the pod this destination for one of its names. What pods have learnt is not asked.
    pub by_name: Vec<Provenance>,
    /// The NetworkPolicies that select the pod and have rules of this direction, sorted.
    pub policies: Vec<ObjectKey>,
    /// Whether a NetworkPolicy or the namespace's annotation isolates the pod in this direction.
    pub isolated: bool,
    /// Whether the annotation of its namespace isolates it.
    pub default_deny: bool,
    /// The rule that decided. With [`DirectionVerdict::AllowedByPeer`] it is a rule of the other direction.
    pub rule: Option<Provenance>,
    /// Where NetworkPolicies deny it, their rule that came closest to allowing it.
    pub nearest: Option<NearestRule>,
}

impl DirectionExplanation {
    fn is_same(&self, other: &Self) -> bool {
        let kind = |side: &Self| std::mem::discriminant(&side.verdict);
        let alike = Self { verdict: self.verdict, nearest: self.nearest.clone(), ..other.clone() };
        kind(self) == kind(other) && *self == alike
    }
}

/// The decision of one tier on a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TierStep {
    pub tier: Tier,
    /// The decision.
    pub outcome: TierOutcome,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TierOutcome {
    /// None of its policies applies to the pod in this direction.
    NoPolicy,
    /// None of its rules matches.
    NoMatch,
    /// A ClusterNetworkPolicy's rule matched.
    Rule {
        /// The rule's action.
        action: RuleAction,
        rule: Provenance,
        /// The rule's name, if it has one.
        name: Option<String>,
    },
    /// NetworkPolicies isolate the pod, and so decide: the verdict is theirs.
    Isolated,
}

impl TierOutcome {
    /// Whether no later tier is evaluated.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Isolated | Self::Rule { action: RuleAction::Accept | RuleAction::Deny, .. })
    }
}

/// The rule that came closest to allowing a denied flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NearestRule {
    /// The rule. Where its peer or port did not match, the first that it lists.
    pub rule: Provenance,
    /// The mismatches: one, or two if no rule came closer.
    pub mismatches: Vec<Mismatch>,
}

/// Ends the steps with the rule that has accepted by a domain name.
fn decided_by_name(tiers: &mut Vec<TierStep>, rule: &Provenance) {
    let PolicyName::Cluster { tier, .. } = rule.policy else { return };
    if let Some(at) = tiers.iter().position(|step| step.tier == Tier::from(tier)) {
        tiers.truncate(at + 1);
        tiers[at].outcome = TierOutcome::Rule { action: RuleAction::Accept, rule: rule.clone(), name: None };
    }
}

impl Engine {
    /// Evaluates a flow and explains the verdict.
    pub fn explain(&self, flow: &Flow) -> Explanation {
        self.explain_as(flow, self.evaluate(flow))
    }

    /// The same for a flow that its client opens through a Service, of which the destination is a backend.
    pub fn explain_through_service(&self, flow: &Flow) -> Explanation {
        self.explain_as(flow, self.evaluate_through_service(flow))
    }

    /// The same with what the source has learnt of domain names at this time.
    pub fn explain_named(&self, flow: &Flow, now: Option<Moment>) -> Explanation {
        let time = now.map_or(NameTime::Never, NameTime::At);
        self.explain_as(flow, self.policy_set().evaluate_named(flow, time))
    }

    /// The rules with domain names that accept this one for a flow of the source, whatever its address is, in order.
    pub fn rules_accepting_name(&self, flow: &Flow, name: &DomainName) -> Vec<Provenance> {
        let Some(PodOrNode::Pod(pod)) = self.state.owner(&flow.src.into()) else { return Vec::new() };
        let sources =
            [Tier::Admin, Tier::Baseline].into_iter().flat_map(|tier| self.tier_sources(pod, Direction::Egress, tier));
        let is_named = |peer: &Peer| match peer {
            Peer::DomainNames(patterns) => {
                NameRules::new(patterns.iter().map(|pattern| (0, pattern.pattern()))).match_name(name.as_str())
            }
            _ => false,
        };
        let named = sources.filter(|source| match &source.get().peers {
            Peers::AnyOf(peers) => peers.iter().any(is_named),
            _ => false,
        });
        named.filter_map(|source| compare_by_name(&self.state, &source, flow)).collect()
    }

    fn explain_as(&self, flow: &Flow, verdict: PolicyVerdict) -> Explanation {
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
        let isolated = default_deny || policies.iter().any(|(_, isolates)| *isolates);
        let mut tiers = pod.map(|pod| self.tiers(pod, direction, isolated, verdict, flow)).unwrap_or_default();
        let rule = verdict.rule().and_then(|rule| self.provenance(rule, flow));
        if let Some(rule) = rule.as_ref().filter(|rule| rule.kind == PeerKind::DomainNames) {
            decided_by_name(&mut tiers, rule);
        }
        DirectionExplanation {
            verdict,
            pod: pod.and_then(|pod| self.state.pod(pod)).map(|pod| pod.key.clone()),
            by_name: pod.map(|pod| self.by_name(pod, direction, &tiers, flow)).unwrap_or_default(),
            tiers,
            isolated,
            policies: policies.into_iter().map(|(key, _)| key).collect(),
            default_deny,
            rule,
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
        policies.flat_map(|policy| network_sources(policy, direction)).collect()
    }

    /// The decision of each tier, read from the policies. None where no ClusterNetworkPolicy was evaluated.
    fn tiers(
        &self,
        pod: PodId,
        direction: Direction,
        isolated: bool,
        verdict: DirectionVerdict,
        flow: &Flow,
    ) -> Vec<TierStep> {
        let selecting = self.state.cluster_policies_of(pod).filter_map(|(policy, _)| self.state.cluster_policy(policy));
        let policies: Vec<_> = selecting.filter(|policy| !cluster_rules_of(policy, direction).is_empty()).collect();
        let is_exempt = verdict == DirectionVerdict::Exempt && (direction == Direction::Ingress || !isolated);
        let is_unknown = matches!(verdict, DirectionVerdict::NotLocal | DirectionVerdict::NotReady);
        if policies.is_empty() || is_exempt || is_unknown {
            return Vec::new();
        }
        let mut steps = Vec::new();
        for tier in [Tier::Admin, Tier::NetworkPolicy, Tier::Baseline] {
            let rules = self.tier_sources(pod, direction, tier);
            let outcome = match tier {
                Tier::NetworkPolicy if isolated => TierOutcome::Isolated,
                _ if rules.is_empty() => TierOutcome::NoPolicy,
                _ => self.first_match(&rules, flow),
            };
            let is_final = outcome.is_final();
            steps.push(TierStep { tier, outcome });
            if is_final {
                break;
            }
        }
        steps
    }

    /// The rules of the ClusterNetworkPolicies of a tier that apply to a pod, in order.
    fn tier_sources(&self, pod: PodId, direction: Direction, tier: Tier) -> Vec<RuleSource> {
        let selecting = self.state.cluster_policies_of(pod).filter_map(|(policy, _)| self.state.cluster_policy(policy));
        let of_tier = selecting.filter(|policy| Tier::from(policy.tier) == tier);
        of_tier.flat_map(|policy| cluster_sources(policy, direction)).collect()
    }

    /// The rules that would match a flow by a domain name before those that these tiers found.
    fn by_name(&self, pod: PodId, direction: Direction, tiers: &[TierStep], flow: &Flow) -> Vec<Provenance> {
        let mut found = Vec::new();
        for TierStep { tier, outcome } in tiers {
            for source in self.tier_sources(pod, direction, *tier) {
                let is_matching = match outcome {
                    TierOutcome::Rule { rule, .. } => source.policy.name() == rule.policy && source.rule == rule.rule,
                    _ => false,
                };
                if is_matching {
                    break;
                }
                found.extend(compare_by_name(&self.state, &source, flow));
            }
        }
        found
    }

    fn first_match(&self, rules: &[RuleSource], flow: &Flow) -> TierOutcome {
        let matching = rules.iter().find_map(|source| {
            let met = compare(&self.state, source, flow);
            met.mismatches.is_empty().then_some((source, met.provenance))
        });
        match matching {
            None => TierOutcome::NoMatch,
            Some((source, rule)) => {
                let name = source.cluster_rule().and_then(|rule| rule.name.clone());
                TierOutcome::Rule { action: source.action(), rule, name }
            }
        }
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

//! The rules of a replay by name, and how many connections each decided.

use penstock_dataplane::policy::{Direction, DirectionVerdict, PolicySet, PolicyVerdict, RuleName, RuleRef};
use penstock_policy::compile::{RuleSource, cluster_sources, network_sources};
use penstock_policy::engine::Engine;
use rustc_hash::{FxHashMap, FxHashSet};

/// A rule among all that were in effect during the replay.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RuleId(u32);

/// The rules that decided a connection: those that allowed it, at most one in each direction, or that which denied it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Rules {
    /// Egress of the source.
    pub egress: Option<RuleId>,
    /// Ingress of the destination.
    pub ingress: Option<RuleId>,
}

/// Every rule that was in effect, by name.
#[derive(Debug, Default)]
pub struct RuleNames {
    names: Vec<RuleName>,
    connections: Vec<u64>,
    by_name: FxHashMap<RuleName, RuleId>,
    /// Rule numbers of the current tables; the next tables number them anew.
    by_ref: FxHashMap<RuleRef, RuleId>,
    /// Whether a rule in effect may pass a connection on.
    has_tiers: bool,
}

impl RuleNames {
    /// Adds the rules of the policies that are now in effect. Keeps those from before.
    pub(super) fn update_rules(&mut self, engine: &Engine) {
        self.by_ref.clear();
        self.has_tiers = engine.state().cluster_policies().next().is_some();
        let (mut seen, mut seen_in_cluster) = (FxHashSet::default(), FxHashSet::default());
        for pod in engine.tables().pods() {
            for (policy, _) in engine.state().policies_of(pod) {
                if !seen.insert(policy) {
                    continue;
                }
                let policy = engine.state().policy(policy).expect("the state lists only policies it has");
                for direction in [Direction::Egress, Direction::Ingress] {
                    self.intern_all(network_sources(policy, direction));
                }
            }
            for (policy, _) in engine.state().cluster_policies_of(pod) {
                if !seen_in_cluster.insert(policy) {
                    continue;
                }
                let policy = engine.state().cluster_policy(policy).expect("the state lists only policies it has");
                for direction in [Direction::Egress, Direction::Ingress] {
                    self.intern_all(cluster_sources(policy, direction));
                }
            }
        }
    }

    fn intern_all(&mut self, sources: impl Iterator<Item = RuleSource>) {
        for source in sources {
            self.intern(source.name());
        }
    }

    /// The rules of a verdict by the current tables.
    #[inline]
    pub(super) fn of(&mut self, policy: &PolicySet, policy_verdict: &PolicyVerdict) -> Rules {
        let decides = |side: &DirectionVerdict| policy_verdict.is_allowed() || !side.is_allowed();
        let egress = Some(policy_verdict.egress).filter(decides).and_then(|side| side.rule());
        let ingress = Some(policy_verdict.ingress).filter(decides).and_then(|side| side.rule());
        let egress = egress.map(|rule| self.resolve(policy, rule));
        let ingress = ingress.map(|rule| self.resolve(policy, rule));
        // If one rule allows both directions, it counts once.
        Rules { egress, ingress: ingress.filter(|_| ingress != egress) }
    }

    #[inline]
    fn resolve(&mut self, policy: &PolicySet, rule: RuleRef) -> RuleId {
        if let Some(id) = self.by_ref.get(&rule) {
            return *id;
        }
        let name = policy.rule_name(rule).cloned().unwrap_or_else(|| RuleName::new("", "unnamed"));
        let id = self.intern(name);
        self.by_ref.insert(rule, id);
        id
    }

    fn intern(&mut self, name: RuleName) -> RuleId {
        if let Some(id) = self.by_name.get(&name) {
            return *id;
        }
        let id = RuleId(self.names.len() as u32);
        self.names.push(name.clone());
        self.connections.push(0);
        self.by_name.insert(name, id);
        id
    }

    /// Whether a rule in effect may pass a connection on to the next tier.
    pub(super) fn has_tiers(&self) -> bool {
        self.has_tiers
    }

    /// Counts a connection that these rules passed on to the next tier.
    pub(super) fn passed(&mut self, policy: &PolicySet, rules: impl IntoIterator<Item = RuleRef>) {
        for rule in rules {
            let id = self.resolve(policy, rule);
            self.connections[id.0 as usize] += 1;
        }
    }

    pub(super) fn hit(&mut self, rules: Rules) {
        for rule in [rules.egress, rules.ingress].into_iter().flatten() {
            self.connections[rule.0 as usize] += 1;
        }
    }

    #[inline]
    pub fn name(&self, rule: RuleId) -> &str {
        self.names[rule.0 as usize].text()
    }

    /// Appends the names of the rules to `text`, separated by a space; names contain none.
    #[inline]
    pub fn write_names(&self, rules: Rules, text: &mut Vec<u8>) {
        let before = text.len();
        for rule in [rules.egress, rules.ingress].into_iter().flatten() {
            if text.len() > before {
                text.push(b' ');
            }
            text.extend_from_slice(self.name(rule).as_bytes());
        }
    }

    /// Each rule with the connections it decided, most first, then by name.
    pub fn hits(&self) -> Vec<(&str, u64)> {
        let mut hits: Vec<_> = self.names.iter().map(RuleName::text).zip(self.connections.iter().copied()).collect();
        hits.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        hits
    }
}

//! One cluster's policy from changes to tables, and the reasons for what they say.
//!
//! An [`Engine`] is what the node service, the commands and the tests share: it takes changes, keeps the state and the
//! tables of the pods in scope in step, and explains a verdict. It knows no I/O and no clock.

mod explain;

use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{Judgement, PolicySet, Reach, RuleRef};

use crate::compile::{Provenance, compare};
use crate::model::Change;
use crate::render::tables::{self, PodScope, Tables};
use crate::state::{self, State};

pub use explain::{DirectionExplanation, Explanation, NearestRule};

/// How an [`Engine`] reads policies, and for whom.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineSettings {
    /// Whose sides are enforced.
    pub scope: PodScope,
    /// Whether a rule's action is honoured cluster-wide. If it is, the sides of all pods are, whatever the scope.
    pub reach: Reach,
}

impl EngineSettings {
    /// The Kubernetes API's meaning, for the pods of one node.
    pub fn for_node(name: impl Into<String>) -> Self {
        Self { scope: PodScope::Node(name.into()), reach: Reach::default() }
    }

    /// The Kubernetes API's meaning, for all pods.
    pub fn for_all_pods() -> Self {
        Self { scope: PodScope::AllPods, reach: Reach::default() }
    }
}

/// A cluster's objects and the tables made from them, in step.
#[derive(Debug)]
pub struct Engine {
    state: State,
    tables: Tables,
}

impl Engine {
    /// Of a cluster of which nothing is known.
    pub fn new(settings: EngineSettings) -> Self {
        Self { state: State::default(), tables: Tables::new(settings.scope, settings.reach) }
    }

    /// Takes changes as one: the next [`Engine::policy_set`] has all of them. Whether the set may be another.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> bool {
        changes.into_iter().for_each(|change| self.state.apply(change));
        self.tables.update(&mut self.state)
    }

    /// The tables as of the last change. A clone is cheap and stays as it is.
    pub fn policy_set(&self) -> &PolicySet {
        self.tables.policy_set()
    }

    /// The objects.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The tables, for other renderings.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Judges a flow, opened in this direction, by the tables.
    pub fn evaluate(&self, flow: &Flow) -> Judgement {
        self.policy_set().judge(flow)
    }

    /// The rule that a verdict of the current set names, with the peer and the port through which it matched this
    /// flow. `None` if the rule is gone, or does not match the flow any more: the verdict is older than the objects.
    pub fn provenance(&self, rule: RuleRef, flow: &Flow) -> Option<Provenance> {
        let source = &self.tables.rule(rule)?.source;
        let met = compare(&self.state, source, flow);
        met.mismatches.is_empty().then_some(met.provenance)
    }

    /// How much there is of everything.
    pub fn statistics(&self) -> (state::Statistics, tables::Statistics) {
        (self.state.statistics(), self.tables.statistics())
    }
}

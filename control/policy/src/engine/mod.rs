//! One cluster's policy: applies changes, renders tables, explains verdicts.
//!
//! The node service, the commands and the tests share [`Engine`]. It keeps the state and the tables of the pods in scope
//! consistent. No I/O, no clock.

mod explain;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::forward::Forwarding;
use penstock_dataplane::names::{NameTable, NameTime};
use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{AddressSet, Direction, EvaluationForm, PolicySet, PolicyVerdict, RuleRef, RuleScope};

use crate::compile::{
    MOST_ENTRIES, Provenance, RuleSource, TooManyEntries, cluster_sources, compare, compare_by_name, network_sources,
};
use crate::derived_slices::derived_slices;
use crate::describe;
use crate::model::{EndpointSlice, Object, ObjectChange, ObjectKey, Peer, Peers, RuleAction, Service};
use crate::render::tables::{self, BuiltTables, PodScope, RuleUse, TableJob, Tables};
use crate::staging::{PolicyReading, StagedPolicies, StagedProblem};
use crate::state::{self, ClusterState, MOST_ENTRIES_IN_NAMESPACE, ServiceAddresses};

pub use explain::{DirectionExplanation, Explanation, NearestRule, TierOutcome, TierStep};

/// How an [`Engine`] interprets policies, and for which pods.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineSettings {
    /// The pods whose policies are enforced.
    pub scope: PodScope,
    /// Whether one direction's allow applies cluster-wide. If so, the tables cover all pods, whatever the scope.
    pub reach: RuleScope,
}

impl EngineSettings {
    /// Kubernetes' semantics, for the pods of one node.
    pub fn for_node(name: impl Into<String>) -> Self {
        Self { scope: PodScope::Node(name.into()), reach: RuleScope::default() }
    }

    /// Kubernetes' semantics, for all pods.
    pub fn for_all_pods() -> Self {
        Self { scope: PodScope::AllPods, reach: RuleScope::default() }
    }
}

/// A cluster's objects and the tables made from them, always consistent.
#[derive(Debug)]
pub struct Engine {
    state: ClusterState,
    tables: Tables,
    staging: StagedPolicies,
    translated_by: TranslatedBy,
}

/// Who sends on what pods send to Services' addresses, as far as questions about Services are concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TranslatedBy {
    /// Whoever it is on each node: the objects are all that is known.
    Anyone,
    /// The node's kernel. Egress policy is for what answers only at addresses of [`Engine::set_services`]; where no EndpointSlice is
    /// known, that is what Services' selectors find.
    Kernel,
}

impl Engine {
    /// An engine of an empty cluster, for what is in effect.
    pub fn new(settings: EngineSettings) -> Self {
        Self::reading(settings, PolicyReading::InForce)
    }

    /// An engine of an empty cluster that reads staged policies like this.
    pub fn reading(settings: EngineSettings, reading: PolicyReading) -> Self {
        let state = match &settings.scope {
            PodScope::Node(name) => ClusterState::of_node(name),
            PodScope::AllPods => ClusterState::default(),
        };
        Self {
            state,
            tables: Tables::new(settings.scope, settings.reach),
            staging: StagedPolicies::new(reading),
            translated_by: TranslatedBy::Anyone,
        }
    }

    /// Sets who translates on the node about which questions are asked.
    pub fn set_translated_by(&mut self, who: TranslatedBy) {
        self.translated_by = who;
    }

    /// Whether egress policy of what is sent to this address of a Service is for what answers, and not for the address itself.
    pub(crate) fn is_judged_behind(&self, address: IpAddr) -> bool {
        match self.translated_by {
            TranslatedBy::Anyone => true,
            TranslatedBy::Kernel => self.policy_set().services().contains(&address.into()),
        }
    }

    /// The EndpointSlices of a Service; `None` if they are not known.
    pub(crate) fn endpoint_slices(&self, service: &Service) -> Option<Vec<Arc<EndpointSlice>>> {
        let known: Vec<_> = self.state.endpoint_slices(&service.key).map(Arc::clone).collect();
        if self.translated_by != TranslatedBy::Kernel || self.state.all_endpoint_slices().next().is_some() {
            return Some(known);
        }
        service.selector.as_ref()?;
        let pods = self.state.pods().map(|(_, pod)| (pod, true));
        Some(derived_slices(service, pods).into_iter().map(Arc::new).collect())
    }

    /// Applies changes atomically: the next [`Engine::policy_set`] contains all of them. Returns whether it may differ.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = ObjectChange>) -> bool {
        for change in changes {
            self.staging.admit(change, |seen| self.state.apply(seen));
        }
        self.update()
    }

    /// Replaces the policies of a trial from files, which stand before what the cluster has under their names. Returns
    /// whether the tables may differ. Without effect on an engine for what is in effect.
    pub fn set_trial(&mut self, policies: &[Object]) -> bool {
        self.staging.set_trial(policies, |seen| self.state.apply(seen));
        self.update()
    }

    /// The policies that an annotation stages, those for deletion, too, in order.
    pub fn staged(&self) -> impl Iterator<Item = &Object> {
        self.staging.staged()
    }

    /// Doubts whether the staged policies are as they are meant, in order. Complete only in an engine as promoted.
    pub fn staged_problems(&self) -> Vec<StagedProblem> {
        self.staging.problems()
    }

    fn update(&mut self) -> bool {
        self.tables.update(&mut self.state)
    }

    /// From now on leaves tables aside that have more entries than this: their pods keep what is in effect for them, and new pods are
    /// closed, until [`Engine::finish_tables`] has them.
    pub fn build_aside(&mut self, at_once: usize) {
        self.tables.build_aside(at_once);
    }

    /// Whether tables are left aside that [`Engine::prepare_tables`] has something to do for.
    pub fn has_tables_to_prepare(&self) -> bool {
        self.tables.has_work()
    }

    /// Compiles up to this many rules of tables that were left aside, without effect on the policy. Once the rules of some tables all
    /// are, returns these tables, to be built on another thread.
    pub fn prepare_tables(&mut self, most: usize) -> Option<TableJob> {
        self.tables.prepare(&mut self.state, most)
    }

    /// Has the next [`Engine::policy_set`] contain these tables. Returns whether it may differ.
    pub fn finish_tables(&mut self, built: BuiltTables) -> bool {
        self.tables.finish(&mut self.state, built)
    }

    /// Whether a pod waits for tables that were left aside.
    pub fn is_waiting(&self, pod: &ObjectKey) -> bool {
        self.state.find_pod(pod).is_some_and(|pod| self.tables.is_waiting(pod))
    }

    /// How many pods do.
    pub fn waiting_pods(&self) -> usize {
        self.tables.waiting()
    }

    /// The tables after the last change. A clone is cheap and does not change.
    pub fn policy_set(&self) -> &PolicySet {
        self.tables.policy_set()
    }

    /// The addresses of Services at which egress policy is for the end that answers, if they may have changed since the last call.
    pub fn take_service_addresses(&mut self) -> Option<ServiceAddresses> {
        self.state.take_service_addresses_changed().then(|| self.state.service_addresses())
    }

    /// Enters the ports of this node's pods into the map of addresses, so that a snapshot of the next
    /// [`Engine::policy_set`] and this forwarding table copies only what differs from the one before.
    pub fn set_local(&mut self, forwarding: &Forwarding) {
        self.tables.set_local(forwarding);
    }

    /// Sets the addresses of Services that the node's kernel translates: egress to them is decided for what answers.
    pub fn set_services(&mut self, services: &Arc<AddressSet>) {
        self.tables.set_services(services);
    }

    /// Has the tables count how often each rule decides, for this many workers. Call it before there are objects.
    pub fn count_use(&mut self, workers: usize) {
        self.tables.count_use(workers);
    }

    /// Has pods whose rules have domain names learn what DNS answers say, in this table, which other engines may share. Call it
    /// before there are objects. Without it such names match nothing.
    pub fn learn_names(&mut self, names: Arc<NameTable>) {
        self.tables.learn_names(names);
    }

    /// How often rules decided since the last call: those that did, some more than once.
    pub fn take_use(&mut self) -> Vec<RuleUse> {
        self.tables.take_use()
    }

    /// The rules of all policies in effect that decide: all but those that pass a flow on.
    pub fn deciding_rules(&self) -> impl Iterator<Item = RuleSource> {
        let directions = [Direction::Ingress, Direction::Egress];
        let network = self.state.policy_handles().flat_map(move |policy| {
            directions.into_iter().flat_map(|direction| network_sources(policy, direction).collect::<Vec<_>>())
        });
        let cluster = self.state.cluster_policy_handles().flat_map(move |policy| {
            directions.into_iter().flat_map(|direction| cluster_sources(policy, direction).collect::<Vec<_>>())
        });
        network.chain(cluster).filter(|rule| rule.action() != RuleAction::Pass)
    }

    /// How many rules have domain names: what they match depends on DNS answers.
    pub fn rules_by_name(&self) -> usize {
        let has_names = |rule: &RuleSource| match &rule.get().peers {
            Peers::AnyOf(peers) => peers.iter().any(|peer| matches!(peer, Peer::DomainNames(_))),
            Peers::Every => false,
        };
        self.deciding_rules().filter(has_names).count()
    }

    /// The objects.
    pub fn state(&self) -> &ClusterState {
        &self.state
    }

    /// The tables, for other output forms.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Evaluates a flow in its opening direction.
    pub fn evaluate(&self, flow: &Flow) -> PolicyVerdict {
        self.policy_set().evaluate(flow)
    }

    /// The same for a flow that its client opens through a Service, of which the destination is a backend. Between a pod and itself
    /// ClusterNetworkPolicies apply then, and NetworkPolicies do not.
    pub fn evaluate_through_service(&self, flow: &Flow) -> PolicyVerdict {
        let is_to_itself = flow.src == flow.dst;
        let form = if is_to_itself { EvaluationForm::Hairpin } else { EvaluationForm::Plain };
        self.policy_set().evaluate_as(flow, form, NameTime::Never)
    }

    /// The rule that a verdict of the current set names, with the peer and the port through which it matched this flow.
    /// `None` if the rule no longer exists or no longer matches: the verdict is older than the objects.
    pub fn provenance(&self, rule: RuleRef, flow: &Flow) -> Option<Provenance> {
        let source = &self.tables.rule(rule)?.source;
        let met = compare(&self.state, source, flow);
        match met.mismatches.is_empty() {
            true => Some(met.provenance),
            false => compare_by_name(&self.state, source, flow),
        }
    }

    /// Why pods are closed in a direction whatever their NetworkPolicies say, in order: these are too many to compile.
    pub fn closed_pods(&self) -> BTreeSet<(ObjectKey, String)> {
        let closed = self.tables.closed().filter_map(|(pod, direction, entries)| {
            let direction = describe::direction(direction);
            let found = match entries {
                TooManyEntries::OfPod(entries) => format!(
                    "its NetworkPolicies have {entries} rules, blocks, excepts and ports for {direction}, more than {MOST_ENTRIES}"
                ),
                TooManyEntries::OfNamespace(entries) => format!(
                    "the NetworkPolicies of its namespace have {entries} rules, blocks, excepts, ports and selectors' values; up to {MOST_ENTRIES_IN_NAMESPACE} are kept"
                ),
                TooManyEntries::Reached => format!(
                    "the selectors in the NetworkPolicies of its namespace are to be evaluated more than {} times, once for each pod and namespace that they may match",
                    self.state.most_reached_from_namespace()
                ),
            };
            let remedy = match entries {
                TooManyEntries::Reached => {
                    "write fewer different selectors, with matchLabels that few pods have, and change one of the policies"
                }
                TooManyEntries::OfPod(_) | TooManyEntries::OfNamespace(_) => "write fewer rules, or larger blocks",
            };
            let key = &self.state.pod(pod)?.key;
            let unkept = match entries {
                TooManyEntries::OfNamespace(_) => self.state.unkept_policies(&key.namespace),
                TooManyEntries::OfPod(_) | TooManyEntries::Reached => Vec::new(),
            };
            let then = match unkept.as_slice() {
                [] => String::new(),
                [one] => format!(", then change or delete {one}, whose rules were not kept"),
                [one, others @ ..] => {
                    format!(", then change or delete {one} and {} more, whose rules were not kept", others.len())
                }
            };
            let remedy = format!("none of them allows any {direction}; {remedy}{then}");
            Some((key.clone(), format!("{found}: {remedy}")))
        });
        closed.collect()
    }

    /// The numbers of objects and of table parts.
    pub fn statistics(&self) -> (state::StateStatistics, tables::TableStatistics) {
        (self.state.statistics(), self.tables.statistics())
    }
}

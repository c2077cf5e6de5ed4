//! Staged policies on live traffic: a second engine, on a thread of its own, beside what is in effect.
//!
//! While nothing is staged, the thread sleeps and holds nothing. Once something is, it reads the objects in portions, follows
//! the engine's changes (`feed`), and compiles them as promoted. Workers get the result beside the snapshot, which stays
//! as it is, with its epoch ([`penstock_dataplane::worker::StagedSet`]): so a staged change delays no other change and no
//! connection is evaluated again for it. The connections that are open are evaluated here, by a walk of the table after
//! each change and for each question; those that are opened, or denied, by the workers. `groups` sums up both.

mod feed;
mod groups;

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use jiff::Timestamp as Time;
use penstock_admin::types::TrialStatus;
use penstock_dataplane::Snapshot;
use penstock_dataplane::conntrack::{ConnTable, State, Timestamp};
use penstock_dataplane::packet::Flow;
use penstock_dataplane::pipeline::{OriginalSources, evaluate_connection};
use penstock_dataplane::worker::{Dataplane, StagedSet, VerdictLog};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange, ObjectRef, Staging};
use penstock_policy::staging::PolicyReading;

use super::naming::traffic;
use super::publisher::Publisher;
use crate::privileges;
use feed::TrialMessage;
use groups::{ChangeGroups, Seen};

pub(super) use feed::{ChangeKind, ChangeTotals, StagedCounters, TrialFeed, TrialMessages};

const RECORDS_INTERVAL: Duration = Duration::from_millis(100);
/// A walk of a full table takes a few hundred milliseconds of this thread: after changes there is one in this time.
const WALK_INTERVAL: Duration = Duration::from_secs(2);
/// Questions within this time share a walk.
const WALK_SHARED_FOR: Duration = Duration::from_millis(500);
/// Pods that are read under one lock of the objects: policy waits for that many at most.
const PODS_PER_LOCK: usize = 500;

/// The parts of the daemon that the thread needs.
pub(super) struct TrialContext {
    pub(super) node: String,
    pub(super) publisher: Weak<Publisher>,
    pub(super) log: Arc<VerdictLog>,
    pub(super) table: Arc<ConnTable>,
    pub(super) sources: Option<Arc<dyn OriginalSources>>,
    pub(super) counters: Arc<StagedCounters>,
}

impl TrialContext {
    pub(super) fn new(node: &str, dataplane: &Dataplane, publisher: &Arc<Publisher>, feed: &TrialFeed) -> Self {
        Self {
            node: node.to_owned(),
            publisher: Arc::downgrade(publisher),
            log: Arc::clone(dataplane.verdicts()),
            table: Arc::clone(dataplane.connections()),
            sources: dataplane.original_sources().cloned(),
            counters: Arc::clone(feed.counters()),
        }
    }

    /// Starts the thread. It ends once the feed ends, and has no capabilities.
    pub(super) fn start(self, TrialMessages(messages): TrialMessages) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("trial".to_owned()).spawn(move || {
            privileges::drop_all();
            TrialThread { context: self, trial: None, files: Vec::new() }.run(&messages);
        })
    }
}

struct TrialThread {
    context: TrialContext,
    /// While something is staged.
    trial: Option<Trial>,
    files: Vec<Object>,
}

impl Drop for TrialThread {
    /// Also after a panic: workers would go on to ask a set that nobody keeps up to date.
    fn drop(&mut self) {
        self.context.log.stage(None);
        self.context.counters.clear();
    }
}

/// The policies that are judged, and the result so far.
struct Trial {
    engine: Engine,
    snapshot: Arc<Snapshot>,
    set: StagedSet,
    /// The staged policies that `groups` is about.
    staged: Vec<Object>,
    /// How often they have changed: records of other policies do not count.
    number: u64,
    since: Time,
    groups: ChangeGroups,
    /// Counters of the workers when the groups were empty.
    judged_before: u64,
    unrecorded_before: u64,
    /// Whether connections were not walked since the last change.
    is_unwalked: bool,
    walked: Option<Instant>,
}

#[derive(Default)]
struct Round {
    begins: Option<Arc<Snapshot>>,
    is_changed: bool,
    questions: Vec<tokio::sync::oneshot::Sender<TrialStatus>>,
}

impl TrialThread {
    fn run(mut self, messages: &Receiver<TrialMessage>) {
        loop {
            let first = match &self.trial {
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => messages.recv_timeout(RECORDS_INTERVAL),
            };
            let mut next = match first {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let mut round = Round::default();
            while let Some(message) = next {
                self.take(message, &mut round);
                if let Some(snapshot) = round.begins.take() {
                    self.begin(snapshot);
                    round.is_changed = true;
                }
                next = messages.try_recv().ok();
            }
            self.work(round);
        }
    }

    fn take(&mut self, message: TrialMessage, round: &mut Round) {
        match (message, &mut self.trial) {
            (TrialMessage::Begin(snapshot), _) => round.begins = Some(snapshot),
            (TrialMessage::Update { changes, snapshot }, Some(trial)) => {
                let policies = changes.iter().any(|change| match change {
                    ObjectChange::Set(object) => object.staging().is_some(),
                    ObjectChange::Delete(reference) => reference.is_policy(),
                });
                let tables = trial.engine.apply(changes);
                round.is_changed |= policies || tables || snapshot.epoch != trial.snapshot.epoch;
                trial.snapshot = snapshot;
            }
            (TrialMessage::Files(files), trial) => {
                self.files = files;
                if let Some(trial) = trial {
                    trial.engine.set_trial(&self.files);
                    round.is_changed = true;
                }
            }
            (TrialMessage::End, Some(_)) => {
                self.trial = None;
                self.context.log.stage(None);
                self.context.counters.clear();
                tracing::info!("nothing is staged any more");
            }
            (TrialMessage::Status(answer), _) => round.questions.push(answer),
            (TrialMessage::Update { .. } | TrialMessage::End, None) => {}
        }
    }

    /// Reads all objects in portions. A change meanwhile waits in the queue and is applied afterwards: each object ends as
    /// its last change has it.
    fn begin(&mut self, snapshot: Arc<Snapshot>) {
        let Some(publisher) = self.context.publisher.upgrade() else { return };
        let mut engine = Engine::reading(EngineSettings::for_node(&self.context.node), PolicyReading::Promoted);
        let inputs = publisher.inputs();
        if let Some(names) = inputs.objects.names() {
            engine.learn_names(Arc::clone(names));
        }
        let present = inputs.objects.engine();
        let (others, staged) = (present.state().objects_without_pods(), present.staged().cloned().collect());
        drop(inputs);
        let mut give = |objects: Vec<Object>| engine.apply(objects.into_iter().map(ObjectChange::Set));
        give(others);
        // After those in effect: one that is staged for deletion is among both.
        give(staged);
        let mut next = Some(0);
        while let Some(first) = next {
            let (pods, rest) = publisher.inputs().objects.engine().state().pods_from(first, PODS_PER_LOCK);
            give(pods);
            next = rest;
        }
        engine.set_trial(&self.files);
        self.trial = Some(Trial {
            engine,
            snapshot,
            set: StagedSet::default(),
            staged: Vec::new(),
            number: 0,
            since: Time::now(),
            groups: ChangeGroups::default(),
            judged_before: self.context.log.staged().judged(),
            unrecorded_before: self.context.log.staged().unrecorded(),
            is_unwalked: true,
            walked: None,
        });
    }

    fn work(&mut self, round: Round) {
        let context = &self.context;
        if let Some(trial) = &mut self.trial {
            trial.take_records(context);
            if round.is_changed {
                trial.publish(context, &self.files);
            }
            let age = trial.walked.map(|walked| walked.elapsed());
            let is_due = trial.is_unwalked && age.is_none_or(|age| age >= WALK_INTERVAL);
            if is_due || !round.questions.is_empty() && age.is_none_or(|age| age >= WALK_SHARED_FOR) {
                trial.walk(context);
            }
            trial.count(context);
        }
        for question in round.questions {
            let status = self
                .trial
                .as_ref()
                .map_or_else(TrialStatus::default, |trial| trial.status(context, !self.files.is_empty()));
            // The client may have disconnected meanwhile.
            drop(question.send(status));
        }
    }
}

impl Trial {
    /// Gives workers the set, and starts anew where other policies are staged than before.
    fn publish(&mut self, context: &TrialContext, files: &[Object]) {
        let staged: Vec<Object> = self.engine.staged().chain(files).cloned().collect();
        if staged != self.staged {
            self.restart(context, staged);
        }
        self.engine.set_local(&self.snapshot.forwarding);
        self.engine.set_services(self.snapshot.policy.services());
        let (present, promoted) = (self.snapshot.policy.clone(), self.engine.policy_set().clone());
        let differ = |flow: &Flow| present.evaluate(flow).drop_reason() != promoted.evaluate(flow).drop_reason();
        if self.groups.forget_settled(differ) {
            self.unrecorded_before = context.log.staged().unrecorded();
        }
        self.set = StagedSet { number: self.number, present, promoted };
        context.log.stage(Some(self.set.clone()));
        self.is_unwalked = true;
    }

    fn restart(&mut self, context: &TrialContext, staged: Vec<Object>) {
        let log = context.log.staged();
        (self.staged, self.number) = (staged, self.number + 1);
        (self.judged_before, self.unrecorded_before) = (log.judged(), log.unrecorded());
        (self.since, self.groups, self.walked) = (Time::now(), ChangeGroups::default(), None);
        tracing::info!("judged beside what is in effect: {}", named(&self.staged).join(", "));
        for problem in self.engine.staged_problems() {
            tracing::warn!("{problem}");
        }
    }

    fn take_records(&mut self, context: &TrialContext) {
        let now = (Instant::now(), Time::now());
        while let Some(record) = context.log.staged().take() {
            if record.number != self.number {
                continue;
            }
            let at = now.1 - now.0.saturating_duration_since(record.at);
            let connection = context.table.connection_id(&record.flow);
            let seen = Seen::Packet { connection, bytes: record.bytes };
            self.groups.add(&self.engine, &record.flow, &record.change, seen, at);
        }
    }

    /// Judges the connections that are open.
    fn walk(&mut self, context: &TrialContext) {
        self.groups.forget_live();
        let (sources, now) = (context.sources.as_deref(), Time::now());
        let mut walked = 0;
        let open = context.table.iter(Timestamp::now()).filter(|connection| !connection.state.has_ended());
        for connection in open {
            walked += 1;
            let (flow, present) = evaluate_connection(&self.set.present, sources, &connection);
            let (_, promoted) = evaluate_connection(&self.set.promoted, sources, &connection);
            // One that was revoked, by what is not in effect any more, is not cut a second time.
            let is_cut_already = connection.state == State::Revoked && present.is_allowed();
            if let Some(change) = self.set.differing(present, promoted).filter(|_| !is_cut_already) {
                let seen = Seen::Live(traffic(&connection));
                self.groups.add(&self.engine, &flow, &change, seen, now - connection.idle);
            }
        }
        self.groups.walked(walked);
        (self.is_unwalked, self.walked) = (false, Some(Instant::now()));
    }

    fn count(&self, context: &TrialContext) {
        let unrecorded = context.log.staged().unrecorded();
        context.counters.set(self.staged.len(), unrecorded, self.groups.totals());
    }

    fn status(&self, context: &TrialContext, has_files: bool) -> TrialStatus {
        let log = context.log.staged();
        TrialStatus {
            staged: named(&self.staged),
            from_files: has_files,
            since: Some(format!("{:.0}", self.since)),
            problems: self.engine.staged_problems().iter().map(ToString::to_string).collect(),
            live_judged: self.groups.live_judged(),
            opening_judged: log.judged().saturating_sub(self.judged_before),
            unrecorded: log.unrecorded().saturating_sub(self.unrecorded_before),
            ungrouped: self.groups.ungrouped(),
            changes: self.groups.list(),
        }
    }
}

/// The policies, each with what would happen to it.
pub(super) fn named(policies: &[Object]) -> Vec<String> {
    let name = |policy: &Object| {
        let reference = policy.reference();
        match (policy.staging(), policy.replaced()) {
            (_, Some(ObjectRef::NetworkPolicy(key))) => format!("{reference} for {}", key.name),
            (_, Some(target)) => format!("{reference} for {target}"),
            (Some(Staging::Deleted), _) => format!("{reference} deleted"),
            _ => reference.to_string(),
        }
    };
    policies.iter().map(name).collect()
}

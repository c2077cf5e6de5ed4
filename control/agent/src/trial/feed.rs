//! What the threads that publish send to the thread of the trial. They never wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use penstock_admin::types::TrialStatus;
use penstock_dataplane::Snapshot;
use penstock_policy::model::{Object, ObjectChange};
use tokio::sync::oneshot;

use super::super::objects::{Follower, NodeObjects};

/// To the thread.
pub(super) enum TrialMessage {
    /// Something is staged: read the objects, beside this snapshot.
    Begin(Arc<Snapshot>),
    /// The engine was given these changes, and this snapshot is published.
    Update { changes: Vec<ObjectChange>, snapshot: Arc<Snapshot> },
    /// The policies of the trial from files; none ends it.
    Files(Vec<Object>),
    /// Nothing is staged any more.
    End,
    /// What would change.
    Status(oneshot::Sender<TrialStatus>),
}

/// The messages of a [`TrialFeed`].
pub(in super::super) struct TrialMessages(pub(super) mpsc::Receiver<TrialMessage>);

/// The sending end, beside the objects and under their lock.
pub(in super::super) struct TrialFeed {
    messages: Option<mpsc::Sender<TrialMessage>>,
    /// Whether the thread follows the objects.
    is_active: bool,
    has_files: bool,
    counters: Arc<StagedCounters>,
}

impl TrialFeed {
    pub(in super::super) fn new() -> (Self, TrialMessages) {
        let (sender, receiver) = mpsc::channel();
        let feed = Self { messages: Some(sender), is_active: false, has_files: false, counters: Arc::default() };
        (feed, TrialMessages(receiver))
    }

    /// What the thread counts.
    pub(in super::super) fn counters(&self) -> &Arc<StagedCounters> {
        &self.counters
    }

    /// Call after each change of the objects and each publication, with what was published last.
    pub(in super::super) fn follow(&mut self, objects: &mut NodeObjects, published: impl FnOnce() -> Arc<Snapshot>) {
        let is_wanted = self.has_files || objects.engine().staged().next().is_some();
        match (std::mem::replace(&mut self.is_active, is_wanted), is_wanted) {
            (false, false) => {}
            (false, true) => {
                objects.follow(Follower::Trial, true);
                self.send(TrialMessage::Begin(published()));
            }
            (true, true) => {
                let changes = objects.take_followed(Follower::Trial);
                self.send(TrialMessage::Update { changes, snapshot: published() });
            }
            (true, false) => {
                objects.follow(Follower::Trial, false);
                self.send(TrialMessage::End);
            }
        }
    }

    /// Sets the policies of the trial from files; none ends it. Call [`TrialFeed::follow`] afterwards.
    pub(in super::super) fn set_files(&mut self, policies: Vec<Object>) {
        self.has_files = !policies.is_empty();
        self.send(TrialMessage::Files(policies));
    }

    /// Passes a question on.
    pub(in super::super) fn ask(&self, answer: oneshot::Sender<TrialStatus>) {
        self.send(TrialMessage::Status(answer));
    }

    /// Ends the thread.
    pub(in super::super) fn end(&mut self) {
        self.messages = None;
    }

    fn send(&self, message: TrialMessage) {
        if let Some(messages) = &self.messages {
            // Sending fails only if the thread has ended.
            let _ = messages.send(message);
        }
    }
}

/// What promotion would change, for metrics.
#[derive(Debug, Default)]
pub(in super::super) struct StagedCounters {
    policies: AtomicU64,
    unrecorded: AtomicU64,
    live: [AtomicU64; ChangeKind::ALL.len()],
    opened: [AtomicU64; ChangeKind::ALL.len()],
}

/// What promotion would do to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum ChangeKind {
    /// It passes, and would be denied.
    Denied,
    /// It is denied, and would pass.
    Allowed,
    /// It is denied, and would be denied in the other direction.
    Otherwise,
}

impl ChangeKind {
    pub(in super::super) const ALL: [Self; 3] = [Self::Denied, Self::Allowed, Self::Otherwise];

    /// Its name in metrics.
    pub(in super::super) const fn name(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::Allowed => "allowed",
            Self::Otherwise => "denied_otherwise",
        }
    }
}

/// Connections by [`ChangeKind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in super::super) struct ChangeTotals {
    /// Those that are open.
    pub(in super::super) live: [u64; ChangeKind::ALL.len()],
    /// Those that were opened, or denied, since what is staged has changed.
    pub(in super::super) opened: [u64; ChangeKind::ALL.len()],
}

impl StagedCounters {
    pub(super) fn set(&self, policies: usize, unrecorded: u64, totals: ChangeTotals) {
        self.policies.store(policies as u64, Ordering::Relaxed);
        self.unrecorded.store(unrecorded, Ordering::Relaxed);
        let pairs = self.live.iter().zip(totals.live).chain(self.opened.iter().zip(totals.opened));
        pairs.for_each(|(counter, value)| counter.store(value, Ordering::Relaxed));
    }

    pub(super) fn clear(&self) {
        self.set(0, self.unrecorded.load(Ordering::Relaxed), ChangeTotals::default());
    }

    /// Staged policies, packets without a record, and connections that would change.
    pub(in super::super) fn read(&self) -> (u64, u64, ChangeTotals) {
        let all = |counters: &[AtomicU64; 3]| counters.each_ref().map(|counter| counter.load(Ordering::Relaxed));
        let totals = ChangeTotals { live: all(&self.live), opened: all(&self.opened) };
        (self.policies.load(Ordering::Relaxed), self.unrecorded.load(Ordering::Relaxed), totals)
    }
}

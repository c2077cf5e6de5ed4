//! Messages to the thread of the trial from the threads that publish. They never wait for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use penstock_admin::types::TrialStatus;
use penstock_dataplane::Snapshot;
use penstock_policy::model::{Object, ObjectChange};
use tokio::sync::oneshot;

use crate::subscribers::{Interest, Subscriber, Update};

/// To the thread.
pub(super) enum TrialMessage {
    /// Something is staged: read the objects, beside this snapshot.
    Begin(Arc<Snapshot>),
    /// The engine was given these changes, and this snapshot is published.
    Update {
        changes: Vec<ObjectChange>,
        snapshot: Arc<Snapshot>,
    },
    /// The policies of the trial from files; none ends it.
    Files(Vec<Object>),
    End,
    Status(oneshot::Sender<TrialStatus>),
}

pub(in super::super) struct TrialMessages(pub(super) mpsc::Receiver<TrialMessage>);

/// The sending end: of questions and policies from files, and of what is published, to which it subscribes.
#[derive(Clone)]
pub(in super::super) struct TrialFeed {
    sender: Arc<Mutex<Sender>>,
    counters: Arc<StagedCounters>,
}

struct Sender {
    messages: Option<mpsc::Sender<TrialMessage>>,
    /// Whether the thread follows the objects.
    is_active: bool,
    has_files: bool,
}

impl TrialFeed {
    pub(in super::super) fn new() -> (Self, TrialMessages) {
        let (messages, receiver) = mpsc::channel();
        let sender = Sender { messages: Some(messages), is_active: false, has_files: false };
        (Self { sender: Arc::new(Mutex::new(sender)), counters: Arc::default() }, TrialMessages(receiver))
    }

    pub(in super::super) fn counters(&self) -> &Arc<StagedCounters> {
        &self.counters
    }

    /// Sets the policies of the trial from files; none ends it. They count from the next update on.
    pub(in super::super) fn set_files(&self, policies: Vec<Object>) {
        let mut sender = self.sender();
        sender.has_files = !policies.is_empty();
        sender.send(TrialMessage::Files(policies));
    }

    pub(in super::super) fn ask(&self, answer: oneshot::Sender<TrialStatus>) {
        self.sender().send(TrialMessage::Status(answer));
    }

    pub(in super::super) fn end(&self) {
        self.sender().messages = None;
    }

    fn sender(&self) -> MutexGuard<'_, Sender> {
        // Whoever panicked has ended the daemon.
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for TrialFeed {
    fn update(&mut self, update: &Update<'_>) -> Interest {
        let mut sender = self.sender();
        if sender.messages.is_none() {
            return Interest::Ended;
        }
        let is_wanted = sender.has_files || update.engine.staged().next().is_some();
        match (std::mem::replace(&mut sender.is_active, is_wanted), is_wanted) {
            (false, false) => {}
            (false, true) => sender.send(TrialMessage::Begin((update.snapshot)())),
            (true, true) => {
                let (changes, snapshot) = (update.changes.to_vec(), (update.snapshot)());
                sender.send(TrialMessage::Update { changes, snapshot });
            }
            (true, false) => sender.send(TrialMessage::End),
        }
        if is_wanted { Interest::Changes } else { Interest::Epochs }
    }
}

impl Sender {
    fn send(&self, message: TrialMessage) {
        if let Some(messages) = &self.messages {
            // Sending fails only if the thread has ended.
            let _ = messages.send(message);
        }
    }
}

#[derive(Debug, Default)]
pub(in super::super) struct StagedCounters {
    policies: AtomicU64,
    unrecorded: AtomicU64,
    live: [AtomicU64; ChangeKind::ALL.len()],
    opened: [AtomicU64; ChangeKind::ALL.len()],
}

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

#[cfg(test)]
mod tests {
    use penstock_dataplane::Epoch;
    use penstock_policy::engine::{Engine, EngineSettings};
    use penstock_policy::model::{Namespace, ObjectRef};

    use super::*;

    #[test]
    fn the_trial_follows_objects_while_something_is_staged() {
        let (feed, TrialMessages(messages)) = TrialFeed::new();
        let (mut subscriber, engine) = (feed.clone(), Engine::new(EngineSettings::for_node("here")));
        let changes = [ObjectChange::Delete(ObjectRef::Namespace("shop".into()))];
        let mut update = |changes: &[ObjectChange]| {
            let snapshot = || Arc::new(Snapshot::default());
            subscriber.update(&Update { epoch: Epoch(1), changes, engine: &engine, snapshot: &snapshot })
        };
        let sent = || {
            let name = |message| match message {
                TrialMessage::Begin(_) => "begin".to_owned(),
                TrialMessage::Update { changes, .. } => format!("update {}", changes.len()),
                TrialMessage::Files(files) => format!("files {}", files.len()),
                TrialMessage::End => "end".to_owned(),
                TrialMessage::Status(_) => "status".to_owned(),
            };
            messages.try_iter().map(name).collect::<Vec<_>>()
        };
        let (name, labels) = ("of a file".to_owned(), Default::default());
        let file = Object::Namespace(Namespace { name, labels, default_deny_ingress: false, terminating: false });
        assert_eq!((update(&[]), sent()), (Interest::Epochs, vec![]));
        feed.set_files(vec![file]);
        assert_eq!((update(&[]), sent()), (Interest::Changes, vec!["files 1".to_owned(), "begin".to_owned()]));
        assert_eq!((update(&changes), sent()), (Interest::Changes, vec!["update 1".to_owned()]));
        feed.set_files(Vec::new());
        assert_eq!((update(&changes), sent()), (Interest::Epochs, vec!["files 0".to_owned(), "end".to_owned()]));
        feed.end();
        assert_eq!(update(&[]), Interest::Ended);
    }
}

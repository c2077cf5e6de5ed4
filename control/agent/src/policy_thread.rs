//! The thread that follows the objects: it compiles and publishes their changes at once, whatever the control thread
//! does meanwhile. It has no capabilities and makes no blocking call. What takes long to build another thread builds meanwhile.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use penstock_policy::model::{ObjectChange, ObjectRef};
use penstock_sources::Source;
use tokio::runtime::Builder;
use tokio::sync::{Notify, oneshot};

use super::publisher::Publisher;
use super::recorded_objects::{self, ObjectRecorder};
use super::table_builder::TableBuilder;
use crate::privileges;

/// How often a snapshot that workers have not taken yet is checked for being in effect.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The policy thread. End it with [`PolicyThread::end`].
pub(super) struct PolicyThread {
    stop: Arc<Notify>,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

impl PolicyThread {
    /// Starts publishing the changes of the source, and recording them.
    pub(super) fn start(changes: FollowedChanges, publisher: Arc<Publisher>) -> io::Result<Self> {
        let (stop, (end_sender, ended)) = (Arc::new(Notify::new()), oneshot::channel());
        let stopped = Arc::clone(&stop);
        let builder = TableBuilder::start()?;
        let runtime = Builder::new_current_thread().enable_time().on_thread_start(privileges::drop_all).build()?;
        let thread = thread::Builder::new().name("policy".to_owned()).spawn(move || {
            privileges::drop_all();
            // Dropped at the end, also by a panic.
            let _says_ended = end_sender;
            runtime.block_on(publish_changes(changes, &publisher, builder, &stopped));
        })?;
        Ok(Self { stop, ended, thread })
    }

    /// Waits until the thread ends, which it does by itself only after a failure.
    pub(super) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Ends the thread after it has published a change that it is working on.
    pub(super) fn end(self) {
        self.stop.notify_one();
        // A panic has been reported on standard error.
        let _ = self.thread.join();
    }
}

/// The changes of a source, and what follows from them beside publishing.
pub(super) struct FollowedChanges {
    pub(super) source: Source,
    /// Records objects for a start while the source is away.
    pub(super) recorder: Option<ObjectRecorder>,
    /// The objects of an earlier run that are in effect, until the source is read: its first changes are all of its objects.
    pub(super) stale: Option<BTreeSet<ObjectRef>>,
}

async fn publish_changes(
    mut followed: FollowedChanges,
    publisher: &Publisher,
    mut builder: TableBuilder,
    stop: &Notify,
) {
    loop {
        let is_awaiting_workers = publisher.is_awaiting_workers();
        let has_tables_to_prepare = publisher.has_tables_to_prepare();
        tokio::select! {
            biased;
            () = stop.notified() => return,
            // Before changes, which may come without a pause.
            built = builder.built() => match built {
                Some(built) => publisher.take_tables(built),
                None => return,
            },
            changes = followed.source.next() => match changes {
                Some(changes) => followed.publish(changes, publisher, Instant::now()),
                None => return,
            },
            () = publisher.awaited.notified() => publisher.check_in_force(),
            () = publisher.left_aside.notified() => {}
            // Changes that have come meanwhile are first.
            () = tokio::task::yield_now(), if has_tables_to_prepare => {}
            () = tokio::time::sleep(CHECK_INTERVAL), if is_awaiting_workers => publisher.check_in_force(),
        }
        if let Some(job) = publisher.prepare_tables() {
            builder.build(job);
        }
    }
}

impl FollowedChanges {
    fn publish(&mut self, changes: Vec<ObjectChange>, publisher: &Publisher, seen: Instant) {
        let stale = self.stale.take();
        let changes = match &stale {
            Some(recorded) => recorded_objects::replacing(recorded, changes),
            None => changes,
        };
        let recorded = self.recorder.as_ref().map(|recorder| (recorder, changes.clone()));
        match stale {
            Some(_) => publisher.replace_stale(changes, seen),
            None => publisher.apply_changes(changes, seen),
        }
        if let Some((recorder, changes)) = recorded {
            recorder.record(changes);
        }
    }
}

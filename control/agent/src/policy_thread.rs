//! The thread that follows the objects: it compiles and publishes their changes at once, whatever the control thread
//! does meanwhile. It has no capabilities and makes no blocking call.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use penstock_privileges as privileges;
use penstock_sources::Source;
use tokio::runtime::Builder;
use tokio::sync::{Notify, oneshot};

use super::publisher::Publisher;

/// How often an awaited snapshot is checked for being in force.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The policy thread. End it with [`PolicyThread::end`].
pub(super) struct PolicyThread {
    stop: Arc<Notify>,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

impl PolicyThread {
    /// Starts publishing the changes of the source.
    pub(super) fn start(source: Source, publisher: Arc<Publisher>) -> io::Result<Self> {
        let (stop, (end_sender, ended)) = (Arc::new(Notify::new()), oneshot::channel());
        let stopped = Arc::clone(&stop);
        let runtime = Builder::new_current_thread().enable_time().on_thread_start(privileges::drop_all).build()?;
        let thread = thread::Builder::new().name("policy".to_owned()).spawn(move || {
            privileges::drop_all();
            // Dropped at the end, also by a panic.
            let _says_ended = end_sender;
            runtime.block_on(publish_changes(source, &publisher, &stopped));
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

async fn publish_changes(mut source: Source, publisher: &Publisher, stop: &Notify) {
    loop {
        let is_awaiting = publisher.is_awaiting();
        tokio::select! {
            biased;
            () = stop.notified() => return,
            changes = source.next() => match changes {
                Some(changes) => publisher.apply_changes(changes, Instant::now()),
                None => return,
            },
            () = publisher.awaited.notified() => {}
            () = tokio::time::sleep(CHECK_INTERVAL), if is_awaiting => publisher.check_in_force(),
        }
    }
}

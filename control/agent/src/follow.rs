//! The thread that follows the objects: what they change is compiled and published at once, whatever the control thread
//! does meanwhile. It has no capability, and makes no call that waits.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use penstock_privileges as privileges;
use penstock_sources::Source;
use tokio::runtime::Builder;
use tokio::sync::{Notify, oneshot};

use super::publisher::Publisher;

/// How often it is looked whether a snapshot is in force that is not yet.
const LOOK: Duration = Duration::from_millis(1);

/// The policy thread. To be ended by [`Follower::end`].
pub(super) struct Follower {
    stop: Arc<Notify>,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

impl Follower {
    /// Publishes from now on what the source brings.
    pub(super) fn start(source: Source, publisher: Arc<Publisher>) -> io::Result<Self> {
        let (stop, (says_ended, ended)) = (Arc::new(Notify::new()), oneshot::channel());
        let stopped = Arc::clone(&stop);
        let runtime = Builder::new_current_thread().enable_time().on_thread_start(privileges::forgo).build()?;
        let thread = thread::Builder::new().name("policy".to_owned()).spawn(move || {
            privileges::forgo();
            // Dropped at the end, also of a panic.
            let _says_ended = says_ended;
            runtime.block_on(follow(source, &publisher, &stopped));
        })?;
        Ok(Self { stop, ended, thread })
    }

    /// Waits until the source is followed no more, which it is as long as nothing is wrong.
    pub(super) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Ends the thread, once a change that it has begun with is published.
    pub(super) fn end(self) {
        self.stop.notify_one();
        // A panic has been told on standard error by then, and the source with it.
        let _ = self.thread.join();
    }
}

async fn follow(mut source: Source, publisher: &Publisher, stop: &Notify) {
    loop {
        let awaits = publisher.awaits();
        tokio::select! {
            biased;
            () = stop.notified() => return,
            changes = source.next() => match changes {
                Some(changes) => publisher.change(changes, Instant::now()),
                None => return,
            },
            () = publisher.awaited.notified() => {}
            () = tokio::time::sleep(LOOK), if awaits => publisher.look(),
        }
    }
}

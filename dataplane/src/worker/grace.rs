//! Brings the kernel's programs to a new snapshot, and waits until none forwards under an older epoch any more.
//!
//! First the connections that stay allowed get the new verdict ([`keep_offloaded`]), and so do the answers by which the programs open
//! connections ([`keep_answers`]); then the programs read the new epoch. A
//! program that began before an epoch was published may have read the older one. To wait for these takes some milliseconds, which only the
//! report that an epoch is in effect does: each program that begins later reads the new epoch.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use nix::unistd::{Pid, gettid};

use super::priority::{Priority, raise_priority};
use crate::conntrack::ConnTable;
use crate::epoch::Epoch;
use crate::grace::wait_for_programs;
use crate::pipeline::{keep_answers, keep_offloaded};
use crate::{Snapshot, drop_capabilities};

/// Longest time that connections are evaluated before the programs read the new epoch: some ten thousand. The others meet a
/// worker at their next packet.
const KEEP_LIMIT: Duration = Duration::from_millis(4);

/// The threads that do it: one brings the programs to new snapshots, and the other waits, so that the next change is not
/// brought later for it. Dropping it ends them.
pub(super) struct GraceThreads {
    published: Option<Sender<Arc<Snapshot>>>,
    in_force: Arc<InForce>,
    threads: Vec<(JoinHandle<()>, Pid)>,
}

/// The last epoch of which no program forwards under an older one, and what is called when it changes.
#[derive(Default)]
struct InForce {
    epoch: AtomicU32,
    tell: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl GraceThreads {
    pub(super) fn start(connections: &Arc<ConnTable>) -> io::Result<Self> {
        let in_force: Arc<InForce> = Arc::default();
        let (sender, receiver) = unbounded();
        let (brought, awaited) = unbounded();
        let (to, connections) = (Arc::clone(&in_force), Arc::clone(connections));
        let threads = vec![
            thread("epochs", move || bring_each(&receiver, &connections, &brought))?,
            thread("grace", move || wait_for_each(&awaited, &to))?,
        ];
        Ok(Self { published: Some(sender), in_force, threads })
    }

    /// The threads, for their scheduling.
    pub(super) fn ids(&self) -> impl Iterator<Item = Pid> {
        self.threads.iter().map(|(_, id)| *id)
    }

    /// The workers have this snapshot.
    pub(super) fn published(&self, snapshot: Arc<Snapshot>) {
        if let Some(published) = &self.published {
            // Sending fails only if the thread has ended; then no epoch is reported as in effect.
            let _ = published.send(snapshot);
        }
    }

    /// The last epoch of which no program forwards under an older one.
    pub(super) fn in_force(&self) -> Epoch {
        Epoch(self.in_force.epoch.load(Ordering::Acquire))
    }

    /// Has the waiting thread call this after each time that [`GraceThreads::in_force`] has changed. The first call of this counts.
    pub(super) fn tell(&self, tell: Box<dyn Fn() + Send + Sync>) {
        // Where one is set already, it stays.
        let _ = self.in_force.tell.set(tell);
    }
}

impl Drop for GraceThreads {
    fn drop(&mut self) {
        // The first thread ends without it, and the second one without the first.
        self.published = None;
        for (thread, _) in self.threads.drain(..) {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

/// Starts a thread without capabilities. Returns its id, too.
fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<(JoinHandle<()>, Pid)> {
    let (began, id) = bounded(1);
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        // A change must not wait for the end of another thread's slice.
        let _ = raise_priority(Priority::Nice);
        drop_capabilities();
        // The receiver waits for it.
        let _ = began.send(gettid());
        work();
    })?;
    Ok((thread, id.recv().map_err(io::Error::other)?))
}

fn bring_each(published: &Receiver<Arc<Snapshot>>, connections: &ConnTable, brought: &Sender<Epoch>) {
    while let Ok(mut snapshot) = published.recv() {
        while let Ok(next) = published.try_recv() {
            snapshot = next;
        }
        keep_offloaded(connections, &snapshot, KEEP_LIMIT);
        // At most some thousand, in less than a millisecond.
        keep_answers(connections, &snapshot);
        if connections.publish_epoch(snapshot.epoch) {
            // Fails only if the other thread has ended; then no epoch is reported as in effect.
            let _ = brought.send(snapshot.epoch);
        }
    }
}

fn wait_for_each(brought: &Receiver<Epoch>, in_force: &InForce) {
    while let Ok(mut epoch) = brought.recv() {
        // One grace period serves all that were brought before it.
        while let Ok(next) = brought.try_recv() {
            epoch = next;
        }
        wait_for_programs();
        in_force.epoch.store(epoch.0, Ordering::Release);
        if let Some(tell) = in_force.tell.get() {
            tell();
        }
    }
}

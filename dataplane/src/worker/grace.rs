//! Waits until no program in the kernel forwards under an older epoch any more.
//!
//! A program that began before an epoch was published may have read the older one. Programs run inside RCU read-side
//! sections, so after a grace period all of them have ended. It takes some milliseconds, which only the report that an
//! epoch is in force waits for: each program that begins later reads the new epoch.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use nix::unistd::{Pid, gettid};

use super::privileges::drop_capabilities;
use crate::snapshot::Epoch;

/// Time after which a program has ended where the kernel offers no grace period (`nohz_full`): it takes microseconds, and
/// nothing on its CPU interrupts it for long.
const INSTEAD: Duration = Duration::from_millis(50);

/// The thread that waits. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct GraceThread {
    published: Option<Sender<Epoch>>,
    in_force: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
    id: Pid,
}

impl GraceThread {
    pub(super) fn start() -> io::Result<Self> {
        let in_force = Arc::new(AtomicU32::new(0));
        let (sender, receiver) = unbounded();
        let (to, (began, id)) = (Arc::clone(&in_force), bounded(1));
        let thread = thread::Builder::new().name("epochs".to_owned()).spawn(move || {
            drop_capabilities();
            // The receiver waits for it.
            let _ = began.send(gettid());
            wait_for_each(&receiver, &to);
        })?;
        let id = id.recv().map_err(io::Error::other)?;
        Ok(Self { published: Some(sender), in_force, thread: Some(thread), id })
    }

    /// The thread, for its scheduling.
    pub(super) fn id(&self) -> Pid {
        self.id
    }

    /// The programs read this epoch from now on.
    pub(super) fn published(&self, epoch: Epoch) {
        if let Some(published) = &self.published {
            // Sending fails only if the thread has ended; then no epoch is reported as in force.
            let _ = published.send(epoch);
        }
    }

    /// The last epoch of which no program forwards under an older one.
    pub(super) fn in_force(&self) -> Epoch {
        Epoch(self.in_force.load(Ordering::Acquire))
    }
}

impl Drop for GraceThread {
    fn drop(&mut self) {
        self.published = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

fn wait_for_each(published: &Receiver<Epoch>, in_force: &AtomicU32) {
    while let Ok(mut epoch) = published.recv() {
        // One grace period serves all that were published before it.
        while let Ok(next) = published.try_recv() {
            epoch = next;
        }
        if grace_period().is_err() {
            thread::sleep(INSTEAD);
        }
        in_force.store(epoch.0, Ordering::Release);
    }
}

/// Waits for an RCU grace period (`MEMBARRIER_CMD_GLOBAL`, kernel/sched/membarrier.c).
fn grace_period() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes three numbers and accesses no memory of ours.
    match unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_in_force_after_a_grace_period_and_the_last_one_counts() {
        let grace = GraceThread::start().unwrap();
        assert_eq!(grace.in_force(), Epoch(0));
        (1..=100).for_each(|epoch| grace.published(Epoch(epoch)));
        for _ in 0..1000 {
            if grace.in_force() == Epoch(100) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("{:?} after ten seconds", grace.in_force());
    }
}

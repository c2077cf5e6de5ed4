//! A worker's inbox: commands and wake-ups.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam::channel::Sender;
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::capture::CaptureTap;
use super::statistics::{PortCounters, RingDepth};
use crate::forward::PortId;
use crate::io::XskQueue;

#[derive(Clone, Debug)]
pub(crate) struct HeldFrames {
    pub(crate) cached: u32,
    pub(crate) rings: RingDepth,
}

#[derive(Debug)]
pub(crate) enum WorkerPath {
    /// It is the worker's pair, with this socket.
    Pair(Box<XskQueue>),
    /// It is another worker's pair: nothing is sent on it.
    OtherPair,
    /// A pod's port, through the worker's pair: its packets were at the interface with this index.
    Pod(u32),
    /// The node's stack, through the worker's pair.
    Node,
}

/// A command of the control side. It is executed between two poll iterations, when the worker holds no packet.
pub(crate) enum Command {
    Attach {
        port: PortId,
        path: WorkerPath,
        counters: Arc<PortCounters>,
        done: Sender<()>,
    },
    /// Nothing may be sent on this port any more.
    Unroute {
        port: PortId,
        done: Sender<()>,
    },
    Detach {
        port: PortId,
        done: Sender<Option<XskQueue>>,
    },
    Count {
        done: Sender<HeldFrames>,
    },
    /// Captures packets into this from now on, or no longer; returns what it captured into before.
    Capture {
        tap: Option<Box<CaptureTap>>,
        done: Sender<Option<Box<CaptureTap>>>,
    },
    /// Panic, for tests.
    Panic,
    Stop,
}

/// The inbox of one worker, with many producers and the worker as its only consumer.
#[derive(Debug)]
pub(crate) struct WorkerInbox {
    command_pending: AtomicBool,
    asleep: AtomicBool,
    wake_fd: EventFd,
}

impl WorkerInbox {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            command_pending: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake_fd: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
        })
    }

    /// The eventfd that becomes readable when a sleeping worker is woken.
    pub(crate) fn wake_fd(&self) -> &EventFd {
        &self.wake_fd
    }

    /// Wakes the worker if it sleeps.
    ///
    /// Either this fence comes before the worker's in [`WorkerInbox::prepare_sleep`], and the worker sees the command, or it
    /// comes after, and this thread sees that the worker sleeps. So no wake-up is lost.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // It only fails if the counter would overflow, in which case it is already readable.
            let _ = self.wake_fd.write(1);
        }
    }

    /// Announces a command in the channel.
    pub(crate) fn command(&self) {
        self.command_pending.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether there may be commands; one load in the common case without any.
    #[inline]
    pub(crate) fn take_command_pending(&self) -> bool {
        self.command_pending.load(Ordering::Relaxed) && self.command_pending.swap(false, Ordering::Acquire)
    }

    /// Announces that the worker is about to sleep. `false`: it must not, because there is work.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.command_pending.load(Ordering::Relaxed) {
            return true;
        }
        self.asleep.store(false, Ordering::Relaxed);
        false
    }

    /// Whether the worker sleeps, so that it adopts whatever was published before this call when it wakes up.
    ///
    /// Either this fence comes before the worker's in [`WorkerInbox::resume`], and the worker reads what was published
    /// afterwards, or it comes after, and this thread sees that the worker is awake.
    pub(crate) fn is_asleep(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }

    /// Announces that the worker is awake. `signalled`: the descriptor of [`wake_fd`](Self::wake_fd) was readable.
    pub(crate) fn resume(&self, signalled: bool) {
        self.asleep.store(false, Ordering::Relaxed);
        // For `WorkerInbox::is_asleep`: orders this before everything that the worker reads from now on.
        fence(Ordering::SeqCst);
        // A wake-up that comes just now keeps it readable, and ends the next sleep at once.
        if signalled {
            let _ = self.wake_fd.read();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;

    #[test]
    fn no_wake_up_is_lost() {
        const ROUNDS: u32 = 20_000;
        let (inbox, sent) = (Arc::new(WorkerInbox::new().unwrap()), Arc::new(AtomicU32::new(0)));
        let sleeper = {
            let (inbox, sent) = (inbox.clone(), sent.clone());
            thread::spawn(move || {
                let (mut seen, mut slept) = (0, 0);
                while seen < ROUNDS {
                    if inbox.take_command_pending() {
                        seen = sent.load(Ordering::Relaxed);
                    }
                    if seen < ROUNDS && inbox.prepare_sleep() {
                        let mut fds = [PollFd::new(inbox.wake_fd().as_fd(), PollFlags::POLLIN)];
                        let signalled = poll(&mut fds, PollTimeout::from(5_000u16)).unwrap();
                        assert_eq!(signalled, 1, "a wake-up was lost after {seen} commands");
                        inbox.resume(true);
                        slept += 1;
                    }
                }
                slept
            })
        };
        for number in 1..=ROUNDS {
            sent.store(number, Ordering::Relaxed);
            inbox.command();
            if number % 64 == 0 {
                thread::yield_now();
            }
        }
        assert!(sleeper.join().unwrap() > 0, "it never slept, so nothing was tested");
    }

    #[test]
    fn a_worker_with_pending_work_does_not_sleep() {
        let inbox = WorkerInbox::new().unwrap();
        assert!(inbox.prepare_sleep());
        inbox.resume(false);
        inbox.command();
        assert!(!inbox.prepare_sleep());
        assert!(inbox.take_command_pending());
        assert!(!inbox.take_command_pending());
        assert!(inbox.prepare_sleep());
    }
}

//! How workers and the control side reach a worker: packets for its ports, commands, and the bell that wakes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam::channel::Sender;
use crossbeam::queue::ArrayQueue;
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use xsk_rs::FrameDesc;

use super::statistics::{PortCounters, QueueDepth};
use crate::forward::PortId;
use crate::io::XskQueue;

/// A packet on its way to the worker that owns its port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandOver {
    pub(crate) frame: FrameDesc,
    /// The port to leave by.
    pub(crate) port: PortId,
    /// The port it came in by, which a drop is counted for.
    pub(crate) ingress: PortId,
}

/// Where a worker's frames are, by its own books.
#[derive(Clone, Debug)]
pub(crate) struct Holdings {
    pub(crate) cached: u32,
    /// Of its queues.
    pub(crate) queues: Vec<QueueDepth>,
}

/// What the control side asks of a worker. It is done between two turns, when no packet is in the worker's hands.
pub(crate) enum Command {
    /// A port is open: `queues` are this worker's own; without any it hands packets over to `owner`.
    Attach { port: PortId, queues: Vec<XskQueue>, owner: usize, counters: Arc<PortCounters>, done: Sender<()> },
    /// Nothing is to be sent out of this port any more.
    Unroute { port: PortId, done: Sender<()> },
    /// The port's queues are to be given up.
    Detach { port: PortId, done: Sender<Vec<XskQueue>> },
    /// Where the worker's frames are.
    Count { done: Sender<Holdings> },
    /// The worker is to panic, as by a fault of its own.
    Panic,
    /// The worker is to end.
    Stop,
}

/// One worker's letter box. Anybody puts in; the worker alone takes out.
#[derive(Debug)]
pub(crate) struct Mailbox {
    pub(crate) packets: ArrayQueue<HandOver>,
    commanded: AtomicBool,
    asleep: AtomicBool,
    bell: EventFd,
}

impl Mailbox {
    /// Packets that may wait for a worker.
    pub(crate) const CAPACITY: usize = 4096;

    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            packets: ArrayQueue::new(Self::CAPACITY),
            commanded: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            bell: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
        })
    }

    /// The descriptor that becomes readable when a sleeper is rung.
    pub(crate) fn bell(&self) -> &EventFd {
        &self.bell
    }

    /// Wakes the worker if it sleeps; to be called after something was put in.
    ///
    /// Either this fence comes before the sleeper's in [`Mailbox::lie_down`], and then the sleeper sees what was put
    /// in, or it comes after, and then this sees that it sleeps. So no wake-up is lost.
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // It fails only when the counter would overflow, and then the bell is rung already.
            let _ = self.bell.write(1);
        }
    }

    /// Says that there is a command in the channel.
    pub(crate) fn command(&self) {
        self.commanded.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether there may be commands; one load in the common case that there are none.
    #[inline]
    pub(crate) fn take_commanded(&self) -> bool {
        self.commanded.load(Ordering::Relaxed) && self.commanded.swap(false, Ordering::Acquire)
    }

    /// Announces that the worker is about to sleep. `false`: it must not, there is something to do.
    pub(crate) fn lie_down(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.packets.is_empty() && !self.commanded.load(Ordering::Relaxed) {
            return true;
        }
        self.asleep.store(false, Ordering::Relaxed);
        false
    }

    /// Whether the worker sleeps, and so will see at its next packet whatever was published before this call.
    ///
    /// Either this fence comes before the worker's in [`Mailbox::get_up`], and then the worker reads afterwards what was
    /// published, or it comes after, and then this sees that the worker is awake.
    pub(crate) fn sleeps(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }

    /// Announces that the worker is awake.
    pub(crate) fn get_up(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        // For `Mailbox::sleeps`: between this and whatever the worker reads from now on.
        fence(Ordering::SeqCst);
        // Empty already unless somebody rang.
        let _ = self.bell.read();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::{Duration, Instant};

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;

    #[test]
    fn a_sleeper_is_never_forgotten() {
        const ROUNDS: u32 = 20_000;
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let sleeper = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                let (mut seen, mut slept) = (0, 0);
                while seen < ROUNDS {
                    while mailbox.packets.pop().is_some() {
                        seen += 1;
                    }
                    if seen < ROUNDS && mailbox.lie_down() {
                        let mut fds = [PollFd::new(mailbox.bell().as_fd(), PollFlags::POLLIN)];
                        let rung = poll(&mut fds, PollTimeout::from(5_000u16)).unwrap();
                        assert_eq!(rung, 1, "a wake-up was lost after {seen} packets");
                        mailbox.get_up();
                        slept += 1;
                    }
                }
                slept
            })
        };
        let letter = HandOver { frame: FrameDesc::default(), port: PortId(1), ingress: PortId(2) };
        let deadline = Instant::now() + Duration::from_secs(60);
        for number in 0..ROUNDS {
            while mailbox.packets.push(letter).is_err() {
                assert!(Instant::now() < deadline && !sleeper.is_finished());
                thread::yield_now();
            }
            mailbox.ring();
            if number % 64 == 0 {
                thread::yield_now();
            }
        }
        assert!(sleeper.join().unwrap() > 0, "it never slept, so nothing was tested");
    }

    #[test]
    fn one_who_has_mail_does_not_lie_down() {
        let mailbox = Mailbox::new().unwrap();
        assert!(mailbox.lie_down());
        mailbox.get_up();
        mailbox.command();
        assert!(!mailbox.lie_down());
        assert!(mailbox.take_commanded());
        assert!(!mailbox.take_commanded());
        assert!(mailbox.lie_down());
    }
}

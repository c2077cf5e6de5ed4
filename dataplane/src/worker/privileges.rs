//! What a thread may do, and what it goes before.

use caps::CapSet;
use nix::libc;

/// Takes all capabilities from the calling thread, for good. Threads that it starts have none either.
///
/// The kernel lets every thread give up its own; were it to refuse, nothing would be lost but this precaution.
pub fn forgo_capabilities() {
    for set in [CapSet::Ambient, CapSet::Inheritable, CapSet::Permitted] {
        let _ = caps::clear(None, set);
    }
}

/// What a worker goes before on its core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Priority {
    /// Nothing: it is a thread like any other.
    Ordinary,
    /// The threads of its own control group (nice -20). Other groups get their share of the core, in turns of a few
    /// milliseconds, which queues outlast.
    #[default]
    Nice,
    /// All ordinary threads (SCHED_RR, at the lowest real-time priority), as the kernel's own packet work goes before them.
    ///
    /// For a worker that sleeps now and then. If none of them got to run for most of a second, they have the core for
    /// 50 ms on end (the kernel's fair server, kernel/sched/deadline.c), which no queue outlasts.
    RealTime,
}

/// Puts the calling thread before others, as far as it is allowed to, and says how far that is. While a worker waits for its
/// core its queues overflow.
pub(super) fn go_first(priority: Priority) -> Priority {
    // SAFETY: the parameters live across the call; 0 means the calling thread (sched_setscheduler(2)).
    let real_time = || unsafe {
        let lowest = libc::sched_param { sched_priority: 1 };
        libc::sched_setscheduler(0, libc::SCHED_RR, &lowest) == 0
    };
    // SAFETY: no memory is passed; 0 means the calling thread (setpriority(2), "C library/kernel differences").
    let nice = || unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) == 0 };
    match priority {
        Priority::RealTime if real_time() => Priority::RealTime,
        Priority::RealTime | Priority::Nice if nice() => Priority::Nice,
        _ => Priority::Ordinary,
    }
}

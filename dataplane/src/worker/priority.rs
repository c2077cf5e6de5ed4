//! Scheduling priority of threads.

use nix::libc;

/// Scheduling priority of the workers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[cfg_attr(feature = "settings", derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema))]
#[cfg_attr(feature = "settings", serde(rename_all = "lowercase"))]
pub enum Priority {
    #[cfg_attr(feature = "settings", serde(skip))]
    Ordinary,
    /// Before the other threads of its control group.
    //
    // Nice -20. Other groups get their share of the core in slices of a few milliseconds, which queues can buffer.
    #[default]
    Nice,
    /// Before all ordinary threads, to which a worker leaves a tenth of its core.
    //
    // SCHED_RR at the lowest real-time priority, like the kernel's own packet processing.
    RealTime,
}

/// Raises the calling thread's priority as far as permitted; returns the priority reached. A worker's queues overflow
/// while it waits for its core.
pub fn raise_priority(priority: Priority) -> Priority {
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

/// While this lives, the thread that made it comes before ordinary ones, if it may.
#[derive(Debug)]
pub struct Hurry {
    nice: libc::c_int,
}

impl Hurry {
    /// Raises the calling thread.
    pub fn begin() -> Self {
        // SAFETY: no memory is passed; 0 means the calling thread. An error has the number of nice -1, which does no harm.
        let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        raise_priority(Priority::Nice);
        Self { nice }
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        // SAFETY: no memory is passed; the kernel always permits to lower the priority.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, self.nice) };
    }
}

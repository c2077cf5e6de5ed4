//! Waits for the kernel's programs. They run inside RCU read-side sections, so after a grace period all have ended that had begun before.

use std::io;
use std::thread;
use std::time::Duration;

/// Time after which a program has ended where the kernel offers no grace period (`nohz_full`): it takes microseconds, and
/// nothing on its CPU interrupts it for long.
const INSTEAD: Duration = Duration::from_millis(50);

/// When it returns, all programs have ended that were running when it was called. It takes some milliseconds.
pub(crate) fn wait_for_programs() {
    if grace_period().is_err() {
        thread::sleep(INSTEAD);
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
    fn a_grace_period_can_be_waited_for() {
        // The kernel rejects it where some CPUs have no tick.
        if let Err(error) = grace_period() {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }
}

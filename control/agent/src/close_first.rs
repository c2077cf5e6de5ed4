//! Descriptors that the kernel closes before all others when the process dies.
//!
//! The kernel releases a dead process's files one after the other, highest descriptor first: it puts each before the
//! pending ones (`close_files` in fs/file.c, `task_work_add` in kernel/task_work.c). Many wait for RCU grace periods,
//! AF_XDP sockets and XDP links among them, so on a node with a hundred pods the first pods open seconds after the
//! process died. What all pods depend on must go first. On a kernel with another order only that time is lost.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use nix::sys::resource::{Resource, getrlimit};
use rustix::io::fcntl_dupfd_cloexec;

/// Duplicates with the highest descriptor numbers: a file is released when its last descriptor is closed.
#[derive(Debug, Default)]
pub(super) struct CloseFirstFds {
    held: Vec<OwnedFd>,
}

impl CloseFirstFds {
    /// The lowest number in use: above any that a daemon opens, while the descriptor table stays below half a megabyte.
    const LOWEST: RawFd = 60_000;
    /// How many numbers below the limit are used where the limit is lower.
    const ROOM: RawFd = 16;

    /// Adds a file, to be closed before those that were added earlier.
    pub(super) fn hold(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
        let limit = RawFd::try_from(limit).unwrap_or(RawFd::MAX);
        self.held.push(fcntl_dupfd_cloexec(file, Self::LOWEST.min(limit - Self::ROOM))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn later_files_get_higher_descriptors_above_ordinary_ones() {
        let file = File::open("/dev/null").unwrap();
        let mut first = CloseFirstFds::default();
        for _ in 0..4 {
            first.hold(file.as_fd()).unwrap();
        }
        let numbers: Vec<RawFd> = first.held.iter().map(AsRawFd::as_raw_fd).collect();
        assert!(numbers.is_sorted() && numbers[0] > file.as_raw_fd(), "{numbers:?}");
        assert!(File::open("/dev/null").unwrap().as_raw_fd() < numbers[0]);
    }
}

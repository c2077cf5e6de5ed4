//! Descriptors that the kernel closes before all others when the process dies.
//!
//! A dead process's files are released one after the other, the last numbers first: each is put before what is still to be
//! done (`close_files` in fs/file.c, `task_work_add` in kernel/task_work.c). Many wait for RCU grace periods, an AF_XDP
//! socket and an XDP link among them, so that where a node has a hundred pods the first are open seconds after the process
//! died. What all of them depend on must go before. Where a kernel orders them otherwise nothing is lost but that time.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use nix::sys::resource::{Resource, getrlimit};
use rustix::io::fcntl_dupfd_cloexec;

/// Duplicates with the highest numbers of all: a file is released when the last of its descriptors is closed.
#[derive(Debug, Default)]
pub(super) struct FirstClosed {
    held: Vec<OwnedFd>,
}

impl FirstClosed {
    /// The lowest number that it uses: above what a daemon ever has open, and no more than a table of half a megabyte
    /// takes.
    const LOWEST: RawFd = 60_000;
    /// How many numbers below the limit are left to it where the limit is lower.
    const ROOM: RawFd = 16;

    /// This file is closed before those that were held before it.
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
    fn what_is_held_later_has_a_higher_number_and_all_have_higher_ones_than_other_files() {
        let file = File::open("/dev/null").unwrap();
        let mut first = FirstClosed::default();
        for _ in 0..4 {
            first.hold(file.as_fd()).unwrap();
        }
        let numbers: Vec<RawFd> = first.held.iter().map(AsRawFd::as_raw_fd).collect();
        assert!(numbers.is_sorted() && numbers[0] > file.as_raw_fd(), "{numbers:?}");
        assert!(File::open("/dev/null").unwrap().as_raw_fd() < numbers[0]);
    }
}

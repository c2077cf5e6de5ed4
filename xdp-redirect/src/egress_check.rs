//! Attaching the program that checks sources on the node's end of the host port.

use std::os::fd::BorrowedFd;

use libbpf_rs::{TC_EGRESS, TcHookBuilder};

use crate::{Interface, quietly};

/// Priority of the filter on the interface. Nothing else adds filters there; a fixed priority lets the next process
/// replace the filter.
const PLACE: u32 = 1;

/// Uses the `clsact` queueing discipline and a BPF filter, available since Linux 4.5. The filter holds the program and
/// its maps, and is removed with the interface.
pub(crate) fn attach(program: BorrowedFd<'_>, interface: &Interface) -> Result<(), libbpf_rs::Error> {
    let index = i32::try_from(interface.index).map_err(std::io::Error::other)?;
    let mut hook =
        TcHookBuilder::new(program).ifindex(index).handle(PLACE).priority(PLACE).replace(true).hook(TC_EGRESS);
    // libbpf would print an error if an earlier process has created it.
    quietly(|| hook.create())?;
    hook.attach().map(drop)
}

//! Attaching the program that checks sources to the node's end of the host port.

use std::os::fd::BorrowedFd;

use libbpf_rs::{TC_EGRESS, TcHookBuilder};

use crate::Interface;

/// Where the filter stands among those of the interface. Nobody else has any there; a fixed place makes the next process's
/// take the place of this one's.
const PLACE: u32 = 1;

/// By the `clsact` queueing discipline and a filter of it, which the kernel has had since 4.5. The filter holds the program
/// and its maps, and goes with the interface.
pub(crate) fn attach(program: BorrowedFd<'_>, interface: &Interface) -> Result<(), libbpf_rs::Error> {
    let index = i32::try_from(interface.index).map_err(std::io::Error::other)?;
    let mut hook =
        TcHookBuilder::new(program).ifindex(index).handle(PLACE).priority(PLACE).replace(true).hook(TC_EGRESS);
    // libbpf would print what the kernel says where an earlier process has made it.
    let print = libbpf_rs::set_print(None);
    let created = hook.create();
    libbpf_rs::set_print(print);
    created?;
    hook.attach().map(drop)
}

//! What a thread may do, and what it goes before.

use caps::CapSet;

/// Takes all capabilities from the calling thread, for good. Threads that it starts have none either.
///
/// The kernel lets every thread give up its own; were it to refuse, nothing would be lost but this precaution.
pub fn forgo_capabilities() {
    for set in [CapSet::Ambient, CapSet::Inheritable, CapSet::Permitted] {
        let _ = caps::clear(None, set);
    }
}

/// Puts the calling thread before the ordinary processes of its core. While a worker waits for them its queues overflow,
/// which TCP answers by sending again: with a sender and a receiver on the same two cores, 3 % of all segments, and 0.3 %
/// like this.
pub(super) fn go_first() {
    // SAFETY: no memory is passed; 0 means the calling thread (setpriority(2), "C library/kernel differences"). It fails
    // without CAP_SYS_NICE, and then the thread is one like any other.
    unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, -20) };
}

//! Capabilities of threads.

use std::thread;

use caps::CapSet;

/// Drops all capabilities of the calling thread permanently. Threads that it starts have none either.
///
/// The kernel always permits this; if it failed, only this precaution would be lost.
pub fn drop_capabilities() {
    for set in [CapSet::Ambient, CapSet::Inheritable, CapSet::Permitted] {
        let _ = caps::clear(None, set);
    }
}

/// Runs `start` on a thread without capabilities, so that threads which a library starts in it have none.
pub fn without_capabilities<T: Send>(start: impl FnOnce() -> T + Send) -> T {
    let run = || {
        drop_capabilities();
        start()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

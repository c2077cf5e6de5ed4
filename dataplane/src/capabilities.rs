//! Capabilities of threads.

use caps::CapSet;

/// Drops all capabilities of the calling thread permanently. Threads that it starts have none either.
///
/// The kernel always permits this; if it failed, only this precaution would be lost.
pub fn drop_capabilities() {
    for set in [CapSet::Ambient, CapSet::Inheritable, CapSet::Permitted] {
        let _ = caps::clear(None, set);
    }
}

//! Threads that need no privilege have none.

use caps::CapSet;

/// Takes all capabilities from the calling thread, for good. Threads that it starts have none either.
///
/// The kernel lets every thread give up its own; were it to refuse, nothing would be lost but this precaution.
pub fn forgo_capabilities() {
    for set in [CapSet::Ambient, CapSet::Inheritable, CapSet::Permitted] {
        let _ = caps::clear(None, set);
    }
}

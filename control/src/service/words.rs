//! Names that requests may use.

use std::collections::BTreeSet;

use penstock_dataplane::conntrack::{SctpState, State, TcpState};
use penstock_dataplane::packet::Protocol;

/// A protocol by its name, in either case, or by its number.
pub(super) fn protocol(text: &str) -> Option<Protocol> {
    crate::cli::flow::protocol(text).ok()
}

/// Every state that a connection can be in, of any protocol.
pub(super) fn all_states() -> impl Iterator<Item = State> {
    let tcp = TcpState::ALL.into_iter().map(State::Tcp);
    tcp.chain(SctpState::ALL.into_iter().map(State::Sctp)).chain([
        State::Unreplied,
        State::Replied,
        State::Assured,
        State::Revoked,
    ])
}

/// Their names.
pub(super) fn states() -> BTreeSet<&'static str> {
    all_states().map(State::name).collect()
}

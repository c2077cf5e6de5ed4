//! The states that a connection can be in, and what each is worth.

use crate::packet::Protocol;

/// The state of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// A TCP connection's.
    Tcp(TcpState),
    /// An SCTP association's.
    Sctp(SctpState),
    /// Any other protocol: only the opening side has been heard.
    Unreplied,
    /// Any other protocol: both sides have been heard.
    Replied,
    /// Any protocol: policy has ended it, and no packet of it passes. It is remembered because a packet of its
    /// answering side would otherwise be taken for one that opens a connection the other way.
    Cut,
}

/// Number of [`State::Cut`] in the control word, whatever the protocol.
const CUT: u8 = 15;

/// States of a TCP connection as a firewall between its ends sees them. Names follow nf_conntrack's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum TcpState {
    /// A SYN was seen.
    SynSent = 2,
    /// A SYN was seen from either side (simultaneous open, RFC 9293 section 3.5).
    SynSent2 = 3,
    /// A SYN and a SYN-ACK were seen.
    SynReceived = 4,
    /// The handshake is complete.
    Established = 5,
    /// Established, and a RST in the window was let through that may or may not be valid to its receiver (RFC 5961
    /// section 3.2): the next segment re-establishes it.
    Resetting = 6,
    /// One side has sent a FIN.
    FinWait = 7,
    /// One side has sent a FIN and the other has acknowledged it.
    CloseWait = 8,
    /// Both sides have sent a FIN.
    LastAck = 9,
    /// Both sides have sent a FIN, and both are acknowledged.
    TimeWait = 10,
    /// Ended by a RST.
    Close = 11,
}

/// States of an SCTP association. Names follow nf_conntrack's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum SctpState {
    /// INIT was seen, perhaps INIT ACK.
    CookieWait = 2,
    /// COOKIE ECHO was seen.
    CookieEchoed = 3,
    /// COOKIE ACK was seen.
    Established = 4,
    /// The opening side has sent SHUTDOWN.
    ShutdownSent = 5,
    /// The answering side has sent SHUTDOWN.
    ShutdownReceived = 6,
    /// SHUTDOWN ACK was seen.
    ShutdownAckSent = 7,
    /// SHUTDOWN COMPLETE or ABORT was seen.
    Closed = 8,
}

/// What a connection is worth when the table is full. Ordered: what goes first is least.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Worth {
    /// Half-open or closing: evicted first.
    Transient,
    /// One side has never answered: evicted next, the least recently used first.
    Unreplied,
    /// Never evicted for another connection.
    Established,
}

impl State {
    /// Its name as in nf_conntrack's listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp(state) => state.name(),
            Self::Sctp(state) => state.name(),
            Self::Unreplied => "UNREPLIED",
            Self::Replied => "REPLIED",
            Self::Cut => "CUT",
        }
    }

    /// What it is worth when the table is full.
    pub const fn worth(self) -> Worth {
        match self {
            Self::Tcp(TcpState::Established | TcpState::Resetting)
            | Self::Sctp(SctpState::Established)
            | Self::Replied => Worth::Established,
            Self::Tcp(_) | Self::Sctp(_) | Self::Cut => Worth::Transient,
            Self::Unreplied => Worth::Unreplied,
        }
    }

    /// Whether both sides have agreed to the connection and neither has begun to end it.
    pub const fn is_established(self) -> bool {
        matches!(self.worth(), Worth::Established)
    }

    /// What a cut connection of this protocol is when policy allows it again.
    pub(super) const fn restored(protocol: Protocol) -> Self {
        match protocol {
            Protocol::TCP => Self::Tcp(TcpState::Established),
            Protocol::SCTP => Self::Sctp(SctpState::Established),
            _ => Self::Replied,
        }
    }

    /// Its number in the control word; 0 and 1 are no states of a connection.
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::Tcp(state) => state as u8,
            Self::Sctp(state) => state as u8,
            Self::Unreplied => 2,
            Self::Replied => 3,
            Self::Cut => CUT,
        }
    }

    /// The state of this number in a connection of `protocol`, or `None` if there is none.
    pub(super) const fn from_code(protocol: Protocol, code: u8) -> Option<Self> {
        Some(match (protocol, code) {
            (_, CUT) => Self::Cut,
            (Protocol::TCP, _) => match TcpState::from_code(code) {
                Some(state) => Self::Tcp(state),
                None => return None,
            },
            (Protocol::SCTP, _) => match SctpState::from_code(code) {
                Some(state) => Self::Sctp(state),
                None => return None,
            },
            (_, 2) => Self::Unreplied,
            (_, 3) => Self::Replied,
            _ => return None,
        })
    }
}

impl TcpState {
    /// Every state, in the order of its number.
    pub const ALL: [Self; 10] = [
        Self::SynSent,
        Self::SynSent2,
        Self::SynReceived,
        Self::Established,
        Self::Resetting,
        Self::FinWait,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::Close,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SynSent => "SYN_SENT",
            Self::SynSent2 => "SYN_SENT2",
            Self::SynReceived => "SYN_RECV",
            Self::Established => "ESTABLISHED",
            Self::Resetting => "RESETTING",
            Self::FinWait => "FIN_WAIT",
            Self::CloseWait => "CLOSE_WAIT",
            Self::LastAck => "LAST_ACK",
            Self::TimeWait => "TIME_WAIT",
            Self::Close => "CLOSE",
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        if code >= 2 && code < 12 { Some(Self::ALL[code as usize - 2]) } else { None }
    }
}

impl SctpState {
    /// Every state, in the order of its number.
    pub const ALL: [Self; 7] = [
        Self::CookieWait,
        Self::CookieEchoed,
        Self::Established,
        Self::ShutdownSent,
        Self::ShutdownReceived,
        Self::ShutdownAckSent,
        Self::Closed,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CookieWait => "COOKIE_WAIT",
            Self::CookieEchoed => "COOKIE_ECHOED",
            Self::Established => "ESTABLISHED",
            Self::ShutdownSent => "SHUTDOWN_SENT",
            Self::ShutdownReceived => "SHUTDOWN_RECD",
            Self::ShutdownAckSent => "SHUTDOWN_ACK_SENT",
            Self::Closed => "CLOSED",
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        if code >= 2 && code < 9 { Some(Self::ALL[code as usize - 2]) } else { None }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_names_at_most_one_state_and_comes_back() {
        for protocol in [Protocol::TCP, Protocol::SCTP, Protocol::UDP, Protocol(47)] {
            let states: Vec<_> =
                (0..=u8::MAX).filter_map(|code| Some((code, State::from_code(protocol, code)?))).collect();
            assert!(states.iter().all(|(code, state)| state.code() == *code && (2..16).contains(code)));
            let own = match protocol {
                Protocol::TCP => TcpState::ALL.len(),
                Protocol::SCTP => SctpState::ALL.len(),
                _ => 2,
            };
            assert_eq!(states.len(), own + 1, "its own states, and cut");
        }
    }
}

//! Connection states, and which of them are evicted for others.

use super::entry::ControlWord;
use crate::packet::Protocol;

/// The state of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// The state of a TCP connection.
    Tcp(TcpState),
    /// The state of an SCTP association.
    Sctp(SctpState),
    /// Other protocols: only the opening side has sent.
    Unreplied,
    /// Other protocols: both sides have sent.
    Replied,
    /// Other protocols: both sides have sent, and the opening one again two seconds after the first packet or later, as
    /// in `nf_conntrack_udp_packet` (net/netfilter/nf_conntrack_proto_udp.c).
    Assured,
    /// Any protocol: revoked by policy; no packet of it passes. The entry is kept because a packet of the answering
    /// side would otherwise open a connection in the other direction.
    Revoked,
}

/// TCP states as seen by a firewall between the ends. Names follow nf_conntrack.
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
    /// Established, and an in-window RST has passed that its receiver may or may not accept (RFC 5961 section 3.2): the
    /// next segment re-establishes it.
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
    /// Picked up in mid-stream; only one side has sent so far.
    PickedUp = 12,
}

/// SCTP association states. Names follow nf_conntrack.
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
    /// Picked up in mid-stream; only one side has sent so far.
    PickedUp = 9,
}

/// Eviction order of connections; the lowest class is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EvictionClass {
    /// Ended or closing.
    Closing,
    /// Only one side has sent, or the other's reply is not confirmed: anyone can create such entries.
    Unanswered,
    /// Both sides have sent once.
    Answered,
    /// Never evicted for another connection.
    Kept,
}

impl State {
    /// Whether both sides have ended it, or one has reset it. A reset that its receiver did not accept shows at the next
    /// segment: then it has not ended after all.
    pub const fn has_ended(self) -> bool {
        matches!(
            self,
            Self::Tcp(TcpState::Resetting | TcpState::LastAck | TcpState::TimeWait | TcpState::Close)
                | Self::Sctp(SctpState::Closed)
        )
    }

    /// Its name as in nf_conntrack's listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp(state) => state.name(),
            Self::Sctp(state) => state.name(),
            Self::Unreplied => "UNREPLIED",
            Self::Replied => "REPLIED",
            Self::Assured => "ASSURED",
            Self::Revoked => "REVOKED",
        }
    }

    /// Its eviction class.
    pub(super) const fn eviction_class(self) -> EvictionClass {
        match self {
            Self::Tcp(state) => match state {
                TcpState::Established | TcpState::Resetting | TcpState::FinWait | TcpState::CloseWait => {
                    EvictionClass::Kept
                }
                TcpState::SynSent | TcpState::SynSent2 | TcpState::SynReceived | TcpState::PickedUp => {
                    EvictionClass::Unanswered
                }
                TcpState::LastAck | TcpState::TimeWait | TcpState::Close => EvictionClass::Closing,
            },
            Self::Sctp(state) => match state {
                SctpState::Established | SctpState::ShutdownSent | SctpState::ShutdownReceived => EvictionClass::Kept,
                SctpState::CookieWait | SctpState::CookieEchoed | SctpState::PickedUp => EvictionClass::Unanswered,
                SctpState::ShutdownAckSent | SctpState::Closed => EvictionClass::Closing,
            },
            Self::Unreplied => EvictionClass::Unanswered,
            Self::Replied => EvictionClass::Answered,
            Self::Assured | Self::Revoked => EvictionClass::Kept,
        }
    }

    /// The state of the connection of `control`, or `None` if its number is not a state.
    #[inline]
    pub(super) const fn of(protocol: Protocol, control: ControlWord) -> Option<Self> {
        if control.is_revoked() { Some(Self::Revoked) } else { Self::from_code(protocol, control.state()) }
    }

    /// Its number in the control word; 0 and 1 are not connection states. [`State::Revoked`] has none: it is a flag
    /// besides the previous state.
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::Tcp(state) => state as u8,
            Self::Sctp(state) => state as u8,
            Self::Unreplied => 2,
            Self::Replied => 3,
            Self::Assured => 4,
            Self::Revoked => panic!("no packet leads to it"),
        }
    }

    /// The state of this number for `protocol`, or `None` if there is none.
    pub(super) const fn from_code(protocol: Protocol, code: u8) -> Option<Self> {
        Some(match (protocol, code) {
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
            (_, 4) => Self::Assured,
            _ => return None,
        })
    }
}

impl TcpState {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 11] = [
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
        Self::PickedUp,
    ];

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
            Self::PickedUp => "PICKED_UP",
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        if code >= 2 && code < 13 { Some(Self::ALL[code as usize - 2]) } else { None }
    }
}

impl SctpState {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::CookieWait,
        Self::CookieEchoed,
        Self::Established,
        Self::ShutdownSent,
        Self::ShutdownReceived,
        Self::ShutdownAckSent,
        Self::Closed,
        Self::PickedUp,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::CookieWait => "COOKIE_WAIT",
            Self::CookieEchoed => "COOKIE_ECHOED",
            Self::Established => "ESTABLISHED",
            Self::ShutdownSent => "SHUTDOWN_SENT",
            Self::ShutdownReceived => "SHUTDOWN_RECD",
            Self::ShutdownAckSent => "SHUTDOWN_ACK_SENT",
            Self::Closed => "CLOSED",
            Self::PickedUp => "PICKED_UP",
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        if code >= 2 && code < 10 { Some(Self::ALL[code as usize - 2]) } else { None }
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
    fn state_numbers_are_unique_and_round_trip() {
        for protocol in [Protocol::TCP, Protocol::SCTP, Protocol::UDP, Protocol(47)] {
            let states: Vec<_> =
                (0..=u8::MAX).filter_map(|code| Some((code, State::from_code(protocol, code)?))).collect();
            assert!(states.iter().all(|(code, state)| state.code() == *code && (2..16).contains(code)));
            let own = match protocol {
                Protocol::TCP => TcpState::ALL.len(),
                Protocol::SCTP => SctpState::ALL.len(),
                _ => 3,
            };
            assert_eq!(states.len(), own);
        }
    }
}

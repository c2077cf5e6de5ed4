//! What can be set about the connection table.

use std::path::PathBuf;
use std::time::Duration;

use super::entry::Control;
use super::state::{SctpState, State, TcpState};
use super::time::{LONGEST_TIMEOUT, Timestamp, ticks};
use crate::packet::Protocol;

/// Settings of a [`super::ConnTable`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Connections that it holds; 1,048,576 by default. Each takes 64 octets, and with tags and the room that
    /// keeps groups from filling up about 74.
    pub entries: usize,
    /// Most connections of one owner; a quarter of `entries` if not given.
    pub quota: Option<u32>,
    /// How long an idle connection is kept.
    pub timeouts: Timeouts,
    /// Whether a TCP segment (or an SCTP chunk) from the middle of a connection may open one.
    pub pick_up: PickUp,
    /// File in which the table lives, so that it outlasts the process; in memory of its own if not given.
    pub mapping: Option<PathBuf>,
}

impl Config {
    /// Fewest connections that a table can be made for.
    pub const MIN_ENTRIES: usize = 64;
    /// Most connections that a table can be made for: 2²⁸, 19 GiB.
    pub const MAX_ENTRIES: usize = 1 << 28;

    /// The quota in force.
    pub fn quota(&self) -> u32 {
        self.quota.unwrap_or((self.entries / 4) as u32).max(1)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !(Self::MIN_ENTRIES..=Self::MAX_ENTRIES).contains(&self.entries) {
            return Err(ConfigError::Entries(self.entries));
        }
        self.timeouts.check()
    }
}

impl Default for Config {
    fn default() -> Self {
        Self { entries: 1 << 20, quota: None, timeouts: Timeouts::default(), pick_up: PickUp::Always, mapping: None }
    }
}

/// When a packet from the middle of a connection may open one, and then only while its owner has used less than half of
/// what it may have. Whoever sends a single acknowledgement makes such an entry, and cannot be told from a connection that
/// the table has lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PickUp {
    /// Never.
    Never,
    /// Until this moment, unless the table was [found](super::Opened::Found): connections that a lost table held go on.
    AfterLoss(Timestamp),
    /// Until this moment: connections go on that were opened while no table was kept.
    Until(Timestamp),
    /// Always: for captures, which begin in the middle.
    Always,
}

/// A setting of the connection table that cannot be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// The table's size is out of range.
    #[error(
        "conntrack entries is {0}: choose from {min} to {max}",
        min = Config::MIN_ENTRIES, max = Config::MAX_ENTRIES
    )]
    Entries(usize),
    /// A timeout is zero or too long.
    #[error("conntrack timeout {name} is {value:?}: choose from 1 s to {max} s", max = LONGEST_TIMEOUT.as_secs())]
    Timeout {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: Duration,
    },
    /// No timeout has this name.
    #[error("conntrack has no timeout {name:?}: it has {known}", known = Timeouts::NAMES.join(", "))]
    UnknownTimeout {
        /// The name.
        name: String,
    },
}

macro_rules! timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident = $seconds:literal,)+) => {
        /// How long a connection may be idle, by protocol and state. Names and defaults are those of the
        /// kernel's `net.netfilter.nf_conntrack_*` settings (Documentation/networking/nf_conntrack-sysctl.rst);
        /// what they mean to the second is kept to within a second.
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct Timeouts { $($(#[doc = $doc])+ pub $name: Duration,)+ }

        impl Default for Timeouts {
            fn default() -> Self {
                Self { $($name: Duration::from_secs($seconds),)+ }
            }
        }

        impl Timeouts {
            /// The name of each timeout.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            /// Sets a timeout by its name.
            pub fn set(&mut self, name: &str, value: Duration) -> Result<(), ConfigError> {
                let slot = match name {
                    $(stringify!($name) => &mut self.$name,)+
                    _ => return Err(ConfigError::UnknownTimeout { name: name.to_owned() }),
                };
                *slot = value;
                Ok(())
            }

            /// Each timeout with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, Duration)> + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

timeouts! {
    /// TCP, one SYN or two that crossed.
    tcp_timeout_syn_sent = 120,
    /// TCP, SYN and SYN-ACK.
    tcp_timeout_syn_recv = 60,
    /// TCP, handshake complete: five days.
    tcp_timeout_established = 432_000,
    /// TCP, after a RST of which it is not known whether its receiver took it; or taken up in the middle, and not answered
    /// yet.
    tcp_timeout_unacknowledged = 300,
    /// TCP, one FIN.
    tcp_timeout_fin_wait = 120,
    /// TCP, one FIN, acknowledged.
    tcp_timeout_close_wait = 60,
    /// TCP, both FINs.
    tcp_timeout_last_ack = 30,
    /// TCP, both FINs acknowledged.
    tcp_timeout_time_wait = 120,
    /// TCP, after a RST.
    tcp_timeout_close = 10,
    /// UDP, one side only.
    udp_timeout = 30,
    /// UDP, both sides.
    udp_timeout_stream = 120,
    /// ICMP echo.
    icmp_timeout = 30,
    /// ICMPv6 echo.
    icmpv6_timeout = 30,
    /// SCTP, INIT.
    sctp_timeout_cookie_wait = 3,
    /// SCTP, COOKIE ECHO.
    sctp_timeout_cookie_echoed = 3,
    /// SCTP, COOKIE ACK.
    sctp_timeout_established = 210,
    /// SCTP, SHUTDOWN from the opening side.
    sctp_timeout_shutdown_sent = 3,
    /// SCTP, SHUTDOWN from the answering side.
    sctp_timeout_shutdown_recd = 3,
    /// SCTP, SHUTDOWN ACK.
    sctp_timeout_shutdown_ack_sent = 3,
    /// SCTP, SHUTDOWN COMPLETE or ABORT.
    sctp_timeout_closed = 10,
    /// Every other protocol.
    generic_timeout = 600,
}

impl Timeouts {
    fn check(&self) -> Result<(), ConfigError> {
        match self.iter().find(|(_, value)| !(Duration::from_secs(1)..=LONGEST_TIMEOUT).contains(value)) {
            Some((name, value)) => Err(ConfigError::Timeout { name, value }),
            None => Ok(()),
        }
    }

    /// How long a connection of this protocol may be idle in this state.
    pub fn of(&self, protocol: Protocol, state: State) -> Duration {
        match (state, protocol) {
            (State::Tcp(state), _) => match state {
                TcpState::SynSent | TcpState::SynSent2 => self.tcp_timeout_syn_sent,
                TcpState::SynReceived => self.tcp_timeout_syn_recv,
                TcpState::Established => self.tcp_timeout_established,
                TcpState::Resetting | TcpState::PickedUp => self.tcp_timeout_unacknowledged,
                TcpState::FinWait => self.tcp_timeout_fin_wait,
                TcpState::CloseWait => self.tcp_timeout_close_wait,
                TcpState::LastAck => self.tcp_timeout_last_ack,
                TcpState::TimeWait => self.tcp_timeout_time_wait,
                TcpState::Close => self.tcp_timeout_close,
            },
            (State::Sctp(state), _) => match state {
                SctpState::CookieWait => self.sctp_timeout_cookie_wait,
                SctpState::CookieEchoed => self.sctp_timeout_cookie_echoed,
                SctpState::Established | SctpState::PickedUp => self.sctp_timeout_established,
                SctpState::ShutdownSent => self.sctp_timeout_shutdown_sent,
                SctpState::ShutdownReceived => self.sctp_timeout_shutdown_recd,
                SctpState::ShutdownAckSent => self.sctp_timeout_shutdown_ack_sent,
                SctpState::Closed => self.sctp_timeout_closed,
            },
            // As long as either side may still try: TCP retransmits at least every two minutes (RFC 6298).
            (State::Cut, Protocol::TCP) => self.tcp_timeout_unacknowledged,
            (State::Cut, Protocol::SCTP) => self.sctp_timeout_established,
            (State::Unreplied, Protocol::UDP) => self.udp_timeout,
            (State::Replied | State::Assured | State::Cut, Protocol::UDP) => self.udp_timeout_stream,
            (_, Protocol::ICMP) => self.icmp_timeout,
            (_, Protocol::ICMPV6) => self.icmpv6_timeout,
            _ => self.generic_timeout,
        }
    }
}

/// Where [`State::Cut`] stands among the states' numbers: no state has it.
const CUT: u8 = 15;

/// The timeouts as the packet path reads them: ticks by class of protocol and number of state.
pub(super) struct Lifetimes([[u32; 16]; 6]);

impl Lifetimes {
    pub(super) fn new(timeouts: &Timeouts) -> Self {
        let mut table = [[0; 16]; 6];
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::ICMP, Protocol::ICMPV6, Protocol::SCTP, Protocol(0)] {
            for code in 0..CUT {
                if let Some(state) = State::from_code(protocol, code) {
                    table[class(protocol)][usize::from(code)] = ticks(timeouts.of(protocol, state));
                }
            }
            table[class(protocol)][usize::from(CUT)] = ticks(timeouts.of(protocol, State::Cut));
        }
        Self(table)
    }

    /// Most ticks without a packet for what `control` shows; none if it is no state.
    #[inline]
    pub(super) fn of(&self, protocol: Protocol, control: Control) -> u32 {
        let code = if control.is_revoked() { CUT } else { control.state() };
        self.0[class(protocol)][usize::from(code & 15)]
    }
}

#[inline]
const fn class(protocol: Protocol) -> usize {
    match protocol {
        Protocol::TCP => 0,
        Protocol::UDP => 1,
        Protocol::ICMP => 2,
        Protocol::ICMPV6 => 3,
        Protocol::SCTP => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_set_by_its_kernel_name() {
        let mut timeouts = Timeouts::default();
        assert_eq!(timeouts.tcp_timeout_established, Duration::from_secs(432_000));
        timeouts.set("udp_timeout", Duration::from_secs(7)).unwrap();
        assert_eq!(timeouts.of(Protocol::UDP, State::Unreplied), Duration::from_secs(7));
        let error = timeouts.set("udp_timout", Duration::from_secs(7)).unwrap_err();
        assert!(error.to_string().contains("udp_timeout_stream"), "{error}");
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let mut config = Config { entries: 1, ..Config::default() };
        assert_eq!(config.check(), Err(ConfigError::Entries(1)));
        config.entries = 1000;
        assert_eq!(config.check(), Ok(()));
        for bad in [Duration::ZERO, Duration::from_secs(24 * 86_400)] {
            config.timeouts.icmp_timeout = bad;
            assert_eq!(config.check(), Err(ConfigError::Timeout { name: "icmp_timeout", value: bad }));
        }
    }
}

//! Configuration of the connection table.

use std::path::PathBuf;
use std::time::Duration;

use super::entry::ControlWord;
use super::kernel_maps::KernelMaps;
use super::state::{SctpState, State, TcpState};
use super::time::{LONGEST_TIMEOUT, Timestamp, ticks};
use crate::packet::Protocol;

/// Configuration of a [`super::ConnTable`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Capacity in connections; 1,048,576 by default. Each takes 64 bytes, about 74 with tags and the spare room that
    /// keeps groups from filling up.
    pub entries: usize,
    /// Maximum number of connections of one [owner](super::OwnerId); a quarter of `entries` if `None`.
    pub quota: Option<u32>,
    /// Idle timeouts.
    pub timeouts: Timeouts,
    /// Whether a TCP segment or SCTP chunk from mid-stream may open a connection.
    pub midstream_pickup: MidStreamPickup,
    /// Where the table lies.
    pub memory: TableMemory,
    /// Ended connections that wait for [`ConnTable::take_ended`](super::ConnTable::take_ended). If there are any, packets
    /// and bytes of each connection are counted wherever the table lies, for 8 to 40 bytes of memory an entry. 0: none are
    /// kept.
    pub ended: usize,
    /// Whether programs that read the table may open connections like those that workers have opened, and for how long after the process
    /// has ended. Not where ended connections are kept: their records have when each was opened.
    pub repeats: Option<Duration>,
}

/// Where a table lies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum TableMemory {
    /// In memory of the process; it ends with it.
    #[default]
    Anonymous,
    /// In a file, so that it outlasts the process.
    File(PathBuf),
    /// In BPF arrays, where programs in the kernel read it and forward packets of established connections by themselves.
    Kernel(KernelMaps),
}

impl Config {
    /// Minimum capacity of a table.
    pub const MIN_ENTRIES: usize = 64;
    /// Maximum capacity of a table: 2²⁸, 19 GiB.
    pub const MAX_ENTRIES: usize = 1 << 28;

    /// The effective quota.
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
        Self {
            entries: 1 << 20,
            quota: None,
            timeouts: Timeouts::default(),
            midstream_pickup: MidStreamPickup::Always,
            memory: TableMemory::Anonymous,
            ended: 0,
            repeats: None,
        }
    }
}

/// When a mid-stream packet may open a connection, and then only while its owner uses less than half of its quota. A
/// single ACK from any sender creates such an entry and cannot be distinguished from a connection that the table has
/// lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MidStreamPickup {
    Never,
    /// Until this time, unless the table was [found](super::TableOrigin::Found): connections of a lost table continue.
    AfterLoss(Timestamp),
    /// Until this time: connections that were opened while no table existed continue.
    Until(Timestamp),
    /// Always, as nf_conntrack does (`nf_conntrack_tcp_loose`): idle connections that are older than the table, and captures.
    Always,
}

/// An invalid setting of the connection table.
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
    Timeout { name: &'static str, value: Duration },
    /// No timeout has this name.
    #[error("conntrack has no timeout {name:?}: it has {known}", known = Timeouts::NAMES.join(", "))]
    UnknownTimeout { name: String },
}

macro_rules! timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident = $seconds:literal,)+) => {
        /// Idle timeouts by protocol and state. Names are those of the kernel's `net.netfilter.nf_conntrack_*` settings
        /// (Documentation/networking/nf_conntrack-sysctl.rst), and so are defaults, but for the two that kube-proxy sets on
        /// every node (`conntrack` in KubeProxyConfiguration): TCP established and close-wait. They are kept to within a second.
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
    /// TCP, handshake complete: a day.
    tcp_timeout_established = 86_400,
    /// TCP, after a RST that its receiver may or may not accept; or picked up in mid-stream and not yet answered.
    tcp_timeout_unacknowledged = 300,
    /// TCP, one FIN.
    tcp_timeout_fin_wait = 120,
    /// TCP, one FIN, acknowledged; or one that a program in the kernel forwarded: an hour.
    tcp_timeout_close_wait = 3600,
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

    /// Idle timeout of a connection of this protocol in this state.
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
            // As long as either side may retransmit: TCP does so at least every two minutes (RFC 6298).
            (State::Revoked, Protocol::TCP) => self.tcp_timeout_unacknowledged,
            (State::Revoked, Protocol::SCTP) => self.sctp_timeout_established,
            (State::Unreplied, Protocol::UDP) => self.udp_timeout,
            (State::Replied | State::Assured | State::Revoked, Protocol::UDP) => self.udp_timeout_stream,
            (_, Protocol::ICMP) => self.icmp_timeout,
            (_, Protocol::ICMPV6) => self.icmpv6_timeout,
            _ => self.generic_timeout,
        }
    }
}

/// Number of timeouts that the kernel's programs know.
pub(super) const TIMEOUTS: usize = 5;

/// Index of [`State::Revoked`] among the state numbers; no state uses it.
const REVOKED_AT: u8 = 15;

/// The timeouts in ticks, by protocol class and state number, as the packet path reads them.
pub(super) struct TimeoutTicks([[u32; 16]; 6]);

impl TimeoutTicks {
    pub(super) fn new(timeouts: &Timeouts) -> Self {
        let mut table = [[0; 16]; 6];
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::ICMP, Protocol::ICMPV6, Protocol::SCTP, Protocol(0)] {
            for code in 0..REVOKED_AT {
                if let Some(state) = State::from_code(protocol, code) {
                    table[class(protocol)][usize::from(code)] = ticks(timeouts.of(protocol, state));
                }
            }
            table[class(protocol)][usize::from(REVOKED_AT)] = ticks(timeouts.of(protocol, State::Revoked));
        }
        Self(table)
    }

    /// The timeouts that the kernel's programs must know: TCP established; UDP unreplied, replied, assured; TCP before it is
    /// established, where the shorter one is for both states.
    pub(super) fn of_kernel(&self) -> [u32; TIMEOUTS] {
        let [tcp, udp, ..] = &self.0;
        let udp = [State::Unreplied, State::Replied, State::Assured].map(|of| udp[usize::from(of.code())]);
        let [established, sent, received] =
            [TcpState::Established, TcpState::SynSent, TcpState::SynReceived].map(|of| tcp[of as usize]);
        [established, udp[0], udp[1], udp[2], sent.min(received)]
    }

    /// Idle timeout in ticks for the state in `control`; zero if it is not a state.
    #[inline]
    pub(super) fn of(&self, protocol: Protocol, control: ControlWord) -> u32 {
        let code = if control.is_revoked() { REVOKED_AT } else { control.state() };
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
        assert_eq!(timeouts.tcp_timeout_established, Duration::from_secs(86_400));
        timeouts.set("udp_timeout", Duration::from_secs(7)).unwrap();
        assert_eq!(timeouts.of(Protocol::UDP, State::Unreplied), Duration::from_secs(7));
        let error = timeouts.set("udp_timout", Duration::from_secs(7)).unwrap_err();
        assert!(error.to_string().contains("udp_timeout_stream"), "{error}");
    }

    #[test]
    fn settings_out_of_range_are_rejected_by_name() {
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

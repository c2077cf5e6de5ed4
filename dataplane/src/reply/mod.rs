//! Packets that the node generates in reply to dropped ones: ICMP errors, and TCP resets for revoked connections and
//! Services that nobody serves.
//!
//! The dropped packet is counted as usual. Its reply is built beside the batch in a preallocated store. The caller of
//! the pipeline [takes](Replies::take) the replies and sends them in frames of its own, or ignores them (replay). Their
//! number is limited per batch, and per second and port: RFC 4443 section 2.4(f), RFC 1812 section 4.3.2.8. So what one pod
//! sends suppresses no reply to another.

mod build;
mod token_bucket;

pub use build::IcmpError;
use token_bucket::TokenBucket;

use crate::conntrack::Timestamp;
use crate::forward::{Forwarding, PathPorts, PortId, PortKind};
use crate::packet::{Address, ETHERNET_LEN, Flow, Packet, Protocol, TcpFlags, TcpSegment, Transport};

/// Whether packets of a connection that a policy change revokes are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "settings", derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema))]
#[cfg_attr(feature = "settings", serde(rename_all = "lowercase"))]
pub enum OnRevoke {
    /// Its packets are dropped.
    #[default]
    Drop,
    /// Its packets are dropped, and answered: both ends of a TCP connection get a RST, other senders an ICMP error.
    Reset,
}

/// The answer to a packet that policy does not let open a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "settings", derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema))]
#[cfg_attr(feature = "settings", serde(rename_all = "lowercase"))]
pub enum OnDeny {
    /// None: the client waits until it gives up, for TCP some two minutes.
    #[default]
    #[cfg_attr(feature = "settings", serde(rename = "none"))]
    Drop,
    /// A RST for TCP, otherwise an ICMP error (administratively prohibited): the client fails at once.
    Reject,
}

/// Which drops get a reply that somebody may not want.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplySettings {
    /// Those of revoked connections.
    pub on_revoke: OnRevoke,
    /// Those of connections that policy denies.
    pub on_deny: OnDeny,
}

/// Maximum replies to one batch.
const CAPACITY: usize = 32;
/// Bytes of the longest reply: an ICMPv6 error, which fits the minimum MTU (RFC 4443 section 2.4(c)).
const LONGEST: usize = ETHERNET_LEN + build::LONGEST_V6;
/// ICMP errors per second, and burst. The kernel's own limits (`icmp_msgs_per_sec`, `icmp_msgs_burst`).
type Errors = TokenBucket<1_000, 50>;
/// TCP resets per second, and burst. Higher, since one policy change may revoke many connections. Ends that get no reset are
/// notified at their next packet.
type Resets = TokenBucket<10_000, 1_000>;

/// The replies that one worker may still send to packets that came in by one port.
#[derive(Clone, Default)]
struct PortBudget {
    errors: Errors,
    resets: Resets,
}

/// The replies to one batch, and the limits for more.
pub struct Replies {
    settings: ReplySettings,
    store: Box<[Reply]>,
    count: usize,
    /// By port; as many as the highest port that has sent something needs.
    budgets: Vec<PortBudget>,
    batch: (PortId, Timestamp),
    suppressed: u64,
}

#[derive(Clone)]
struct Reply {
    bytes: [u8; LONGEST],
    length: usize,
    port: PortId,
}

impl Replies {
    pub fn new(settings: ReplySettings) -> Self {
        let none = Reply { bytes: [0; LONGEST], length: 0, port: PortId(0) };
        Self {
            settings,
            store: vec![none; CAPACITY].into(),
            count: 0,
            budgets: Vec::new(),
            batch: (PortId(0), Timestamp::from_millis(0)),
            suppressed: 0,
        }
    }

    /// The replies to the last batch, each with its egress port. They are returned once.
    pub fn take(&mut self) -> impl Iterator<Item = (PortId, &[u8])> {
        let count = std::mem::take(&mut self.count);
        self.store[..count].iter().map(|reply| (reply.port, &reply.bytes[..reply.length]))
    }

    /// Number of replies suppressed by the limits since the last call.
    pub fn take_suppressed(&mut self) -> u64 {
        std::mem::take(&mut self.suppressed)
    }

    /// Starts a batch that came in by a port; replies that were not taken are discarded.
    #[inline]
    pub(crate) fn begin(&mut self, ingress: PortId, now: Timestamp) {
        self.count = 0;
        self.batch = (ingress, now);
    }

    /// Storage for one more reply, if the budget that `spend` takes from has room.
    fn next(&mut self, spend: impl FnOnce(&mut PortBudget, Timestamp) -> bool) -> Option<&mut Reply> {
        let (port, now) = self.batch;
        if port.index() >= self.budgets.len() {
            self.budgets.resize(port.index() + 1, PortBudget::default());
        }
        let budget = &mut self.budgets[port.index()];
        let reply = self.store.get_mut(self.count).filter(|_| spend(budget, now));
        match &reply {
            Some(_) => self.count += 1,
            None => self.suppressed += 1,
        }
        reply
    }

    /// Replies to a packet of a revoked connection, if configured.
    ///
    /// `next` is the sequence number that the packet's destination expects from its source. It is given if this packet caused
    /// the revocation, so that the other end is notified too. Later packets notify only their sender.
    #[cold]
    pub(crate) fn revoked(
        &mut self,
        forwarding: &Forwarding,
        path_ports: PathPorts,
        frame: &[u8],
        packet: &Packet,
        next: Option<u32>,
    ) {
        if self.settings.on_revoke == OnRevoke::Drop {
            return;
        }
        let Transport::Tcp(segment) = packet.transport else {
            return self.error(forwarding, path_ports, frame, packet, IcmpError::Prohibited);
        };
        if segment.flags.contains(TcpFlags::RST) {
            return;
        }
        self.reset(forwarding, path_ports.reply, &packet.flow.reversed(), answer_to(&segment));
        if let Some(next) = next {
            let acknowledged = segment.flags.contains(TcpFlags::ACK).then_some(segment.ack);
            self.reset(forwarding, path_ports.forward, &packet.flow, (next, acknowledged));
        }
    }

    /// Whether senders get an answer where policy denies their connection.
    pub(crate) fn reject_denied(&self) -> bool {
        self.settings.on_deny == OnDeny::Reject
    }

    #[cold]
    pub(crate) fn denied(&mut self, forwarding: &Forwarding, path_ports: PathPorts, frame: &[u8], packet: &Packet) {
        match packet.transport {
            Transport::Tcp(_) => self.refused(forwarding, path_ports, packet),
            _ => self.error(forwarding, path_ports, frame, packet, IcmpError::Prohibited),
        }
    }

    /// Answers a TCP segment by a RST, unless it is one.
    #[cold]
    pub(crate) fn refused(&mut self, forwarding: &Forwarding, path_ports: PathPorts, packet: &Packet) {
        match packet.transport {
            Transport::Tcp(segment) if !segment.flags.contains(TcpFlags::RST) => {
                self.reset(forwarding, path_ports.reply, &packet.flow.reversed(), answer_to(&segment));
            }
            _ => {}
        }
    }

    fn reset(
        &mut self,
        forwarding: &Forwarding,
        way: Option<PortId>,
        flow: &Flow,
        (sequence, acknowledged): (u32, Option<u32>),
    ) {
        let Some(reply) = self.next(|budget, now| budget.resets.spend(now)) else { return };
        reply.length = ETHERNET_LEN + build::reset(&mut reply.bytes[ETHERNET_LEN..], flow, sequence, acknowledged);
        if reply.address(forwarding, way, flow.dst).is_none() {
            self.count -= 1;
        }
    }

    /// Replies to a packet with an ICMP error, if allowed.
    #[cold]
    pub(crate) fn error(
        &mut self,
        forwarding: &Forwarding,
        path_ports: PathPorts,
        frame: &[u8],
        packet: &Packet,
        error: IcmpError,
    ) {
        if !may_get_error(packet) {
            return;
        }
        let Some(source) = source(forwarding, path_ports, packet) else { return };
        let Some(reply) = self.next(|budget, now| budget.errors.spend(now)) else { return };
        let quoted = &frame[usize::from(packet.layout.network)..usize::from(packet.layout.end)];
        let out = &mut reply.bytes[ETHERNET_LEN..];
        reply.length = ETHERNET_LEN + build::error(out, error, source, packet.flow.src, quoted);
        if reply.address(forwarding, path_ports.reply, packet.flow.src).is_none() {
            self.count -= 1;
        }
    }
}

/// Sequence and acknowledgement number of the reset that answers a segment.
///
/// RFC 9293 section 3.5.2: a reset takes its number from the acknowledgement that it replies to, so that it is exactly the
/// next one that the sender expects (RFC 5961 section 3.2); without an acknowledgement it acknowledges.
fn answer_to(segment: &TcpSegment) -> (u32, Option<u32>) {
    if segment.flags.contains(TcpFlags::ACK) { (segment.ack, None) } else { (0, Some(segment.end())) }
}

impl Reply {
    /// Writes the Ethernet header for this port and `destination`; `None` if there is no port.
    fn address(&mut self, forwarding: &Forwarding, way: Option<PortId>, destination: Address) -> Option<()> {
        self.port = way?;
        let port = forwarding.port(self.port)?;
        self.bytes[..6].copy_from_slice(&port.peer_mac.0);
        self.bytes[6..12].copy_from_slice(&port.own_mac.0);
        let ethertype: u16 = if destination.is_v4() { 0x0800 } else { 0x86dd };
        self.bytes[12..14].copy_from_slice(&ethertype.to_be_bytes());
        Some(())
    }
}

/// Whether an ICMP error may be sent about a packet: not about another error, nor about a fragment other than the first
/// (RFC 1812 section 4.3.2.7, RFC 4443 section 2.4(e)). About ICMP only if it is known not to be an error.
fn may_get_error(packet: &Packet) -> bool {
    match packet.transport {
        Transport::Tcp(_) | Transport::Udp | Transport::Sctp { .. } | Transport::EchoRequest => true,
        Transport::Other | Transport::Unreadable => !matches!(packet.flow.protocol, Protocol::ICMP | Protocol::ICMPV6),
        Transport::EchoReply | Transport::IcmpError { .. } | Transport::LaterFragment => false,
    }
}

/// Source address of an ICMP error: the node's, as the router. Errors that leave through the host port have the address
/// of the packet's destination, since the node's stack drops packets from its own addresses.
fn source(forwarding: &Forwarding, path_ports: PathPorts, packet: &Packet) -> Option<Address> {
    let egress = forwarding.port(path_ports.reply?)?;
    let node = forwarding.node_address(packet.flow.src.is_v4()).filter(|_| egress.kind != PortKind::Host);
    Some(node.unwrap_or(packet.flow.dst))
}

#[cfg(test)]
mod tests;

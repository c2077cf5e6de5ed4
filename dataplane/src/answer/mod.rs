//! Packets that the node makes itself, in answer to one that it drops: ICMP errors, and TCP resets for a connection that
//! policy has cut.
//!
//! The packet at hand is dropped and counted as ever. Its answer is built beside the batch, in a store that is allocated
//! once; whoever runs the pipeline [takes](Answers::take) what is in it and sends it in frames of its own, or does not
//! (replay). How many there are in a batch and in a second is bounded: RFC 4443 section 2.4(f), RFC 1812 section 4.3.2.8.

mod allowance;
mod build;

use allowance::Allowance;
pub use build::IcmpError;

use crate::conntrack::Timestamp;
use crate::forward::{Forwarding, PortId, PortKind, Ways};
use crate::packet::{Address, ETHERNET_LEN, Flow, Packet, Protocol, TcpFlags, Transport};

/// What becomes of a connection that policy ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnCut {
    /// Its packets are dropped, and its ends find out in their own time.
    #[default]
    Drop,
    /// Its ends are told: both by a TCP RST; of other protocols whoever sends, by an ICMP error "administratively
    /// prohibited".
    Reset,
}

/// Most answers to one batch.
const CAPACITY: usize = 32;
/// Octets of the longest: an ICMPv6 error, which fits the least MTU (RFC 4443 section 2.4(c)).
const LONGEST: usize = ETHERNET_LEN + build::LONGEST_V6;
/// ICMP errors of one worker: in a second, and at once. The kernel's own bounds (`icmp_msgs_per_sec`, `icmp_msgs_burst`).
const ERRORS: (u32, u32) = (1_000, 50);
/// TCP resets of one worker: in a second, and at once. More, since one change of policy may cut many connections; those
/// that are not told are dropped, and told at their next packet.
const RESETS: (u32, u32) = (10_000, 1_000);

/// The answers to one batch, and how many more there may be.
pub struct Answers {
    on_cut: OnCut,
    store: Box<[Answer]>,
    count: usize,
    errors: Allowance,
    resets: Allowance,
    withheld: u64,
}

/// One answer: a frame, and the port that it is to leave by.
#[derive(Clone)]
struct Answer {
    octets: [u8; LONGEST],
    length: usize,
    port: PortId,
}

impl Answers {
    /// No answers yet.
    pub fn new(on_cut: OnCut) -> Self {
        let none = Answer { octets: [0; LONGEST], length: 0, port: PortId(0) };
        Self {
            on_cut,
            store: vec![none; CAPACITY].into(),
            count: 0,
            errors: Allowance::new(ERRORS.0, ERRORS.1),
            resets: Allowance::new(RESETS.0, RESETS.1),
            withheld: 0,
        }
    }

    /// The answers to the last batch, each with the port that it is to leave by. They are taken once.
    pub fn take(&mut self) -> impl Iterator<Item = (PortId, &[u8])> {
        let count = std::mem::take(&mut self.count);
        self.store[..count].iter().map(|answer| (answer.port, &answer.octets[..answer.length]))
    }

    /// How many answers were due since the last call and not given, because there had been too many.
    pub fn take_withheld(&mut self) -> u64 {
        std::mem::take(&mut self.withheld)
    }

    /// A new batch begins; answers that nobody took are forgotten.
    #[inline]
    pub(crate) fn begin(&mut self, now: Timestamp) {
        self.count = 0;
        self.errors.refill(now);
        self.resets.refill(now);
    }

    /// Answers a packet of a connection that policy has cut, if that is to be done.
    ///
    /// `next` is the sequence number that the packet's destination expects of its source: given when the connection was
    /// cut just now, so that the other end is told too. Later packets answer their sender alone.
    #[cold]
    pub(crate) fn cut(
        &mut self,
        forwarding: &Forwarding,
        ways: Ways,
        frame: &[u8],
        packet: &Packet,
        next: Option<u32>,
    ) {
        if self.on_cut == OnCut::Drop {
            return;
        }
        let Transport::Tcp(segment) = packet.transport else {
            return self.error(forwarding, ways, frame, packet, IcmpError::Prohibited);
        };
        if segment.flags.contains(TcpFlags::RST) {
            return;
        }
        let acknowledges = segment.flags.contains(TcpFlags::ACK);
        // RFC 9293 section 3.5.2: a reset takes its number from the acknowledgement that it answers, so that it is the
        // very next one that the sender expects (RFC 5961 section 3.2); where there is none, it acknowledges.
        let numbers = if acknowledges { (segment.ack, None) } else { (0, Some(segment.end())) };
        self.reset(forwarding, ways.back, &packet.flow.reversed(), numbers);
        if let Some(next) = next {
            self.reset(forwarding, ways.ahead, &packet.flow, (next, acknowledges.then_some(segment.ack)));
        }
    }

    fn reset(
        &mut self,
        forwarding: &Forwarding,
        way: Option<PortId>,
        flow: &Flow,
        (sequence, acknowledged): (u32, Option<u32>),
    ) {
        let Some(answer) = next(&mut self.store, &mut self.count, &mut self.resets) else {
            self.withheld += 1;
            return;
        };
        answer.length = ETHERNET_LEN + build::reset(&mut answer.octets[ETHERNET_LEN..], flow, sequence, acknowledged);
        if answer.address(forwarding, way, flow.dst).is_none() {
            self.count -= 1;
        }
    }

    /// Answers a packet with an ICMP error, if one may be sent about it.
    #[cold]
    pub(crate) fn error(
        &mut self,
        forwarding: &Forwarding,
        ways: Ways,
        frame: &[u8],
        packet: &Packet,
        error: IcmpError,
    ) {
        if !may_be_answered(packet) {
            return;
        }
        let Some(source) = source(forwarding, ways, packet) else { return };
        let Some(answer) = next(&mut self.store, &mut self.count, &mut self.errors) else {
            self.withheld += 1;
            return;
        };
        let quoted = &frame[usize::from(packet.layout.network)..usize::from(packet.layout.end)];
        let out = &mut answer.octets[ETHERNET_LEN..];
        answer.length = ETHERNET_LEN + build::error(out, error, source, packet.flow.src, quoted);
        if answer.address(forwarding, ways.back, packet.flow.src).is_none() {
            self.count -= 1;
        }
    }
}

/// Room for one more answer, if there may be one.
fn next<'a>(store: &'a mut [Answer], count: &mut usize, allowance: &mut Allowance) -> Option<&'a mut Answer> {
    let answer = store.get_mut(*count).filter(|_| allowance.spend())?;
    *count += 1;
    Some(answer)
}

impl Answer {
    /// Writes the Ethernet header of this way to `destination`; `None` if there is none.
    fn address(&mut self, forwarding: &Forwarding, way: Option<PortId>, destination: Address) -> Option<()> {
        self.port = way?;
        let port = forwarding.port(self.port)?;
        self.octets[..6].copy_from_slice(&port.peer_mac.0);
        self.octets[6..12].copy_from_slice(&port.own_mac.0);
        let ethertype: u16 = if destination.is_v4() { 0x0800 } else { 0x86dd };
        self.octets[12..14].copy_from_slice(&ethertype.to_be_bytes());
        Some(())
    }
}

/// Whether an ICMP error may be sent about a packet: not about another error, nor about a fragment that is not its
/// datagram's first (RFC 1812 section 4.3.2.7, RFC 4443 section 2.4(e)). About ICMP only where it is known to be none.
fn may_be_answered(packet: &Packet) -> bool {
    match packet.transport {
        Transport::Tcp(_) | Transport::Udp | Transport::Sctp { .. } | Transport::EchoRequest => true,
        Transport::Other => !matches!(packet.flow.protocol, Protocol::ICMP | Protocol::ICMPV6),
        Transport::EchoReply | Transport::IcmpError { .. } | Transport::LaterFragment => false,
    }
}

/// Whose address an ICMP error carries: the node's, which is the router. What leaves by the host port carries that of
/// the packet's destination: the node's stack drops what comes in with an address of its own.
fn source(forwarding: &Forwarding, ways: Ways, packet: &Packet) -> Option<Address> {
    let egress = forwarding.port(ways.back?)?;
    let node = forwarding.node_address(packet.flow.src.is_v4()).filter(|_| egress.kind != PortKind::Host);
    Some(node.unwrap_or(packet.flow.dst))
}

#[cfg(test)]
mod tests;

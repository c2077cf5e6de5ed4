//! Reads what has arrived somewhere, and finds what must not have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::evaluator::{
    End, Flow, ICMP, ICMPV6, SCTP, TCP, UDP, are_free, has_own_source, is_answer, is_of_node, passes,
};

/// A datagram as it was sent.
pub(super) struct Sent {
    pub(super) from: End,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    /// Ports in each first fragment of it.
    pub(super) ports: Vec<[u16; 2]>,
    /// How it was made, for people.
    pub(super) how: Vec<&'static str>,
}

/// Bytes of a mark.
pub(super) const MARK: usize = 8;
const MAGIC: [u8; 2] = [0xf5, 0x5a];

/// The mark of a datagram: payloads repeat it, so that each piece of them says whose it is.
pub(super) fn mark(number: u32) -> [u8; MARK] {
    let [a, b, c, d] = number.to_be_bytes();
    [MAGIC[0], MAGIC[1], a, b, c, d, a ^ b ^ c ^ d ^ 0x3c, a.wrapping_add(d) ^ 0x77]
}

/// The number of the first datagram whose mark is here.
pub(super) fn marked(bytes: &[u8]) -> Option<u32> {
    let numbers = bytes.windows(MARK).filter(|window| window[..2] == MAGIC).filter_map(|window| {
        let number = u32::from_be_bytes(window[2..6].try_into().ok()?);
        (mark(number) == window).then_some(number)
    });
    numbers.into_iter().next()
}

/// An IP packet, as far as it can be read.
struct Packet<'a> {
    from: IpAddr,
    to: IpAddr,
    hops: u8,
    protocol: u8,
    is_later: bool,
    transport: &'a [u8],
}

fn read_v4(bytes: &[u8]) -> Option<Packet<'_>> {
    let (length, total) = (usize::from(*bytes.first()? & 15) * 4, u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]));
    if bytes[0] >> 4 != 4 || length < 20 {
        return None;
    }
    let at = |place: usize| Some(IpAddr::from(<[u8; 4]>::try_from(bytes.get(place..place + 4)?).ok()?));
    Some(Packet {
        from: at(12)?,
        to: at(16)?,
        hops: bytes[8],
        protocol: bytes[9],
        is_later: u16::from_be_bytes([bytes[6], bytes[7]]) & 0x1fff != 0,
        transport: bytes.get(length..usize::from(total).min(bytes.len()))?,
    })
}

fn read_v6(bytes: &[u8]) -> Option<Packet<'_>> {
    if bytes.len() < 40 || bytes[0] >> 4 != 6 {
        return None;
    }
    let at = |place: usize| Some(IpAddr::from(<[u8; 16]>::try_from(bytes.get(place..place + 16)?).ok()?));
    let (mut next, mut rest, mut is_later) = (bytes[6], &bytes[40..], false);
    // Hop-by-hop, routing and destination options, fragment, authentication: RFC 8200 section 4, RFC 4302 section 2.
    while !is_later && matches!(next, 0 | 43 | 44 | 51 | 60) {
        let length = match next {
            44 => 8,
            51 => (usize::from(*rest.get(1)?) + 2) * 4,
            _ => (usize::from(*rest.get(1)?) + 1) * 8,
        };
        is_later = next == 44 && u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]) & 0xfff8 != 0;
        next = *rest.first()?;
        rest = rest.get(length..)?;
    }
    Some(Packet { from: at(8)?, to: at(24)?, hops: bytes[7], protocol: next, is_later, transport: rest })
}

fn read_ip(kind: u16, bytes: &[u8]) -> Option<Packet<'_>> {
    match kind {
        0x0800 => read_v4(bytes),
        0x86dd => read_v6(bytes),
        _ => None,
    }
}

impl Packet<'_> {
    fn flow(&self) -> Option<Flow> {
        let ports = match self.protocol {
            UDP | TCP | SCTP => {
                let four: [u8; 4] = self.transport.get(..4)?.try_into().ok()?;
                [u16::from_be_bytes([four[0], four[1]]), u16::from_be_bytes([four[2], four[3]])]
            }
            _ => [0, 0],
        };
        Some(Flow { from: self.from, to: self.to, protocol: self.protocol, ports })
    }

    /// The type of an ICMP message.
    fn message(&self) -> Option<u8> {
        (matches!(self.protocol, ICMP | ICMPV6) && !self.is_later).then(|| self.transport.first().copied()).flatten()
    }

    /// The flow of the packet that an ICMP error quotes.
    fn quoted(&self) -> Option<Flow> {
        let is_error = match self.protocol {
            ICMP => matches!(self.message()?, 3 | 11 | 12),
            _ => self.message()? < 128,
        };
        let bytes = self.transport.get(8..).filter(|_| is_error)?;
        // A router quotes as much as it likes: lengths in a quoted header say nothing.
        let quoted = if bytes.first()? >> 4 == 4 { read_v4(bytes)? } else { read_v6(bytes)? };
        quoted.flow()
    }
}

/// Why a frame that has arrived at `receiver` must not have, if so, and of which datagram it is.
pub(super) fn judge<'a>(
    receiver: End,
    frame: &[u8],
    sent: &'a [Sent],
    is_bridged: bool,
) -> (Option<&'a Sent>, Result<(), String>) {
    let Some(of) = frame.get(14..).and_then(marked).and_then(|number| sent.get(number as usize)) else {
        return (None, Ok(()));
    };
    if of.from == receiver {
        return (None, Ok(()));
    }
    let kind = u16::from_be_bytes([frame[12], frame[13]]);
    let verdict = match kind {
        0x0800 | 0x86dd => judge_ip(receiver, of, read_ip(kind, &frame[14..]), is_bridged),
        // Pods of one bridge reach each other by what is not IP.
        _ if is_bridged && receiver != End::Outside && of.from != End::Outside => Ok(()),
        _ => Err(format!("of type {kind:04x}")),
    };
    (Some(of), verdict)
}

fn judge_ip(receiver: End, of: &Sent, packet: Option<Packet<'_>>, is_bridged: bool) -> Result<(), String> {
    let is_free = are_free(of.from, receiver);
    let Some(packet) = packet else { return if is_free { Ok(()) } else { Err("unreadable".to_owned()) } };
    let link_local = Ipv6Addr::from(0xfe80_u128 << 112);
    let is_link_local = matches!(packet.from, IpAddr::V6(from) if from.segments()[0] == link_local.segments()[0]);
    let is_discovery =
        packet.protocol == ICMPV6 && packet.hops == 255 && matches!(packet.message(), Some(133 | 135 | 136));
    if is_bridged && is_discovery && receiver != End::Outside && of.from != End::Outside {
        return Ok(());
    }
    // The node redirects pods that it has forwarded a packet between, and quotes the packet (RFC 4861 section 8). No sender here has such a
    // source.
    if is_bridged && is_link_local && packet.hops == 255 && packet.message() == Some(137) {
        return Ok(());
    }
    // The node itself answers whom it believes to have asked.
    let is_nodes_answer = (is_of_node(packet.from) || is_link_local) && matches!(packet.protocol, ICMP | ICMPV6);
    if of.from == End::Outside && is_nodes_answer {
        return Ok(());
    }
    if !has_own_source(of.from, packet.from) && !is_link_local {
        return Err(format!("with the source {}", packet.from));
    }
    if is_free {
        return Ok(());
    }
    if packet.is_later {
        let flow = |ports: &[u16; 2]| Flow { from: packet.from, to: packet.to, protocol: of.protocol, ports: *ports };
        let is_allowed = of.ports.iter().any(|ports| passes(of.from, receiver, &flow(ports)));
        return if is_allowed { Ok(()) } else { Err(format!("as a later fragment to {}", packet.to)) };
    }
    if let Some(quoted) = packet.quoted() {
        // Where a connection to the Service and one to the backend have the same ports, the kernel gives one of them another source port.
        let reverse = passes(receiver, of.from, &quoted) || is_answer(receiver, of.from, &quoted);
        return if reverse { Ok(()) } else { Err(format!("as an error about {quoted:?}")) };
    }
    match packet.flow() {
        Some(flow) if passes(of.from, receiver, &flow) => Ok(()),
        Some(flow) => {
            Err(format!("as {} {:?} to {}, message {:?}", flow.protocol, flow.ports, flow.to, packet.message()))
        }
        None => Err("without ports".to_owned()),
    }
}

#[test]
fn arrivals_are_judged_for_who_really_sent_them() {
    let v4 = |from: End, to: End, port: u16, number: u32| {
        let addresses = [from, to].map(|end| match end.address(false) {
            IpAddr::V4(address) => address.octets(),
            IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED.octets(),
        });
        let mut frame = Vec::new();
        let packet = etherparse::PacketBuilder::ethernet2([2; 6], [2; 6]).ipv4(addresses[0], addresses[1], 64);
        packet.udp(5000, port).write(&mut frame, &mark(number)).unwrap();
        frame
    };
    let of = |from| Sent { from, to: from.address(false), protocol: UDP, ports: Vec::new(), how: Vec::new() };
    let sent = [of(End::Narrow), of(End::Free)];
    let verdict = |receiver, frame: &[u8]| judge(receiver, frame, &sent, false).1.is_ok();
    let to_served = |number| v4(End::Narrow, End::Served, super::evaluator::SERVED_UDP, number);
    assert!(verdict(End::Served, &to_served(0)));
    assert!(!verdict(End::Served, &to_served(1)), "another pod with the address of the allowed one");
    assert!(!verdict(End::Outside, &v4(End::Narrow, End::Outside, 53, 0)), "another port");
    assert!(!verdict(End::Shut, &to_served(0)), "another receiver");
    assert!(verdict(End::Outside, &v4(End::Free, End::Outside, 53, 1)));
    assert!(verdict(End::Served, &v4(End::Narrow, End::Served, 53, 7)), "nobody's");
}

//! Random frames: of flows that are allowed, and of others, with what the rest of a frame can have.

use std::net::IpAddr;

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use super::arrivals::{MARK, Sent, mark};
use super::evaluator::{
    CLIENT, DENIED, ELSEWHERE, End, FAR, ICMP, ICMPV6, NEAR, NODE, NODE_PORT, NODE_PORT_OUTSIDE, OUTSIDE_UDP, SCTP,
    SERVED_TCP, SERVED_UDP, SERVICE, SERVICE_PORT, TCP, UDP,
};
use super::headers::{Datagram, Piece, checksum_offset, fill_checksum, octets, padding};
use crate::forger::{BROADCAST, VirtioHeader};

/// Bytes of the longest frame that an interface takes, and of its Ethernet header.
const LONGEST: usize = 1514;
const ETHERNET: usize = 14;

/// MAC addresses of the fuzzed node, as a sender knows them.
pub(super) struct Macs {
    /// MAC of each sender.
    pub(super) own: [[u8; 6]; 5],
    /// MAC that each sends to.
    pub(super) gateway: [[u8; 6]; 5],
    /// MACs of the node's ends of their links.
    pub(super) node: [[u8; 6]; 5],
}

/// Makes datagrams.
pub(super) struct Maker {
    pub(super) random: SmallRng,
    pub(super) macs: Macs,
    /// The last datagram's. None is used again soon: fragments of two, as the kernel also makes them of long ones, would be of one.
    identification: u32,
}

/// A frame, with what the kernel is to do with it.
pub(super) struct Frame {
    pub(super) bytes: Vec<u8>,
    pub(super) virtio: VirtioHeader,
}

/// Payload that repeats a datagram's mark.
pub(super) fn payload(number: u32, length: usize) -> Vec<u8> {
    mark(number).into_iter().cycle().take(length.max(MARK)).collect()
}

impl Maker {
    pub(super) fn new(random: SmallRng, macs: Macs) -> Self {
        Self { random, macs, identification: 0 }
    }

    fn one_in(&mut self, of: u32) -> bool {
        self.random.random_ratio(1, of)
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        *values.choose(&mut self.random).expect("there is one")
    }

    /// Frames of one datagram of this sender, and the record of it.
    pub(super) fn datagram(&mut self, from: End, number: u32) -> (Vec<Frame>, Sent) {
        let v6 = self.random.random();
        let (to, protocol, ports) = self.flow(from, v6);
        let mut sent = Sent { from, to, protocol, ports: vec![ports], how: Vec::new() };
        let source = self.source(from, v6, &mut sent);
        let hops = if self.one_in(6) { self.of(&[0, 1, 2, 255]) } else { 64 };
        self.identification += 1;
        let head = Datagram { from: source, to, hops, protocol, identification: self.identification };
        let length = if self.one_in(4) { self.random.random_range(0..1400) } else { self.random.random_range(8..200) };
        let mut body = self.transport(&head, ports, payload(number, length), &mut sent);
        let is_open = protocol != ICMP && self.one_in(5);
        if !self.one_in(20) {
            fill_checksum(&mut body, (source, to), protocol, is_open);
        }
        let head = Datagram { hops: if protocol == ICMPV6 && self.one_in(2) { 255 } else { hops }, ..head };
        let virtio = is_open.then(|| checksum_offset(protocol)).flatten();
        let frames = match virtio {
            Some(offset) => vec![self.steered(&head, body, offset, number, &mut sent)],
            None if self.one_in(4) => self.pieces(&head, body, number, &mut sent),
            None => {
                let piece = self.piece(body, v6, &mut sent);
                vec![self.frame(from, head.packet(&piece), &mut sent)]
            }
        };
        (frames, sent)
    }

    /// A datagram that the narrow pod sends with the address of another, as that one would.
    pub(super) fn as_another(&mut self, other: End, number: u32) -> (Vec<Frame>, Sent) {
        let v6 = self.random.random();
        let to = self.of(&[End::Served, End::Outside, End::Shut]).address(v6);
        let mut sent = Sent { from: End::Narrow, to, protocol: UDP, ports: Vec::new(), how: vec!["as another"] };
        let head = Datagram { from: other.address(v6), to, hops: 64, protocol: UDP, identification: 0 };
        let mut body = [CLIENT.start.to_be_bytes(), DENIED.to_be_bytes(), [0, 72], [0, 0]].concat();
        body.extend(payload(number, 64));
        fill_checksum(&mut body, (head.from, to), UDP, false);
        let packet = head.packet(&Piece { body, ..Piece::default() });
        (vec![self.frame(End::Narrow, packet, &mut sent)], sent)
    }

    /// Where to, by which protocol and ports: half of them are such that the sender may send, or that look like answers.
    fn flow(&mut self, from: End, v6: bool) -> (IpAddr, u8, [u16; 2]) {
        let family = usize::from(v6);
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        let client = self.random.random_range(CLIENT);
        let narrow = End::Narrow.address(v6);
        let good = match from {
            End::Narrow => vec![
                (End::Served.address(v6), UDP, [client, SERVED_UDP]),
                (at(NEAR[family]), UDP, [client, OUTSIDE_UDP]),
                (at(NEAR[family]), UDP, [CLIENT.start, OUTSIDE_UDP]),
                (at(SERVICE[family]), UDP, [client, SERVICE_PORT]),
                (End::Served.address(v6), TCP, [client, SERVED_TCP]),
                (at(SERVICE[family]), TCP, [client, SERVICE_PORT]),
                (at(NODE[family][0]), UDP, [client, NODE_PORT]),
                (at(NODE[family][0]), TCP, [client, NODE_PORT]),
            ],
            End::Served => vec![(narrow, UDP, [SERVED_UDP, client]), (narrow, TCP, [SERVED_TCP, client])],
            End::Outside => vec![
                (End::Free.address(v6), UDP, [client, DENIED]),
                (narrow, UDP, [OUTSIDE_UDP, client]),
                (narrow, UDP, [SERVED_UDP, client]),
                (at(NODE[family][2]), UDP, [client, NODE_PORT]),
            ],
            End::Free => vec![(at(FAR[family]), UDP, [client, DENIED])],
            // It may send nothing; by its node, or as neighbour discovery, it would get somewhere.
            End::Shut => vec![
                (at(NEAR[family]), if v6 { ICMPV6 } else { ICMP }, [0, 0]),
                (at(NODE[family][0]), UDP, [client, NODE_PORT_OUTSIDE]),
                (at(NODE[family][3]), TCP, [client, NODE_PORT_OUTSIDE]),
                (at(SERVICE[family]), UDP, [client, SERVICE_PORT]),
            ],
        };
        if self.random.random() {
            return self.of(&good);
        }
        let mut places: Vec<IpAddr> = End::ALL.iter().map(|end| end.address(v6)).collect();
        places.extend([FAR[family], SERVICE[family], NODE[family][3]].map(at));
        places.extend(NODE[family].map(at));
        places.push(at(["10.244.1.200", "fd00:10:244:1::200"][family]));
        places.push(at(["224.0.0.1", "ff02::1"][family]));
        let protocols = [UDP, UDP, UDP, TCP, TCP, SCTP, if v6 { ICMPV6 } else { ICMP }, 4, 41, 47, 50, 136];
        let known = [SERVED_UDP, SERVED_TCP, OUTSIDE_UDP, DENIED, SERVICE_PORT, NODE_PORT, NODE_PORT_OUTSIDE, 53, 8472];
        // Connections of the narrow pod from other ports than a client's are answered at ports that nobody else sends to.
        let is_known = from != End::Narrow && self.random.random();
        let source = if is_known { self.of(&known) } else { self.random.random_range(40_000..60_000) };
        (self.of(&places), self.of(&protocols), [source, self.of(&known)])
    }

    fn source(&mut self, from: End, v6: bool, sent: &mut Sent) -> IpAddr {
        let family = usize::from(v6);
        if !self.one_in(6) {
            return if from == End::Outside && self.one_in(3) {
                FAR[family].parse().unwrap()
            } else {
                from.address(v6)
            };
        }
        sent.how.push("another's source");
        let mut all: Vec<IpAddr> = End::ALL.iter().map(|end| end.address(v6)).collect();
        all.extend(NODE[family].iter().chain([&SERVICE[family]]).map(|address| address.parse::<IpAddr>().unwrap()));
        self.of(&all)
    }

    /// The transport header and the payload; no checksum yet.
    fn transport(&mut self, head: &Datagram, ports: [u16; 2], payload: Vec<u8>, sent: &mut Sent) -> Vec<u8> {
        let [source, destination] = ports.map(u16::to_be_bytes);
        let both = [source, destination].concat();
        match head.protocol {
            UDP if self.one_in(20) => {
                sent.how.push("vxlan");
                let inner = self.inner(head, payload);
                // A device takes no frame with its own MAC as source for another's.
                let macs = [2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 9];
                let vxlan = [&[8, 0, 0, 0, 0, 0, 1, 0][..], &macs, &self.kind(head), &inner].concat();
                let length = (vxlan.len() + 8) as u16;
                [&source[..], &8472_u16.to_be_bytes(), &length.to_be_bytes(), &[0, 0], &vxlan].concat()
            }
            UDP => {
                let length = if self.one_in(20) { self.random.random() } else { (payload.len() + 8) as u16 };
                [&both[..], &length.to_be_bytes(), &[0, 0], &payload].concat()
            }
            TCP => {
                let flags = self.of(&[2, 16, 16, 18, 24, 17, 4, 20, 0, 41]);
                let numbers: [u8; 8] = self.random.random();
                [&both[..], &numbers, &[0x50, flags, 0xff, 0xff, 0, 0, 0, 0], &payload].concat()
            }
            SCTP => [&both[..], &[0; 8], &[1, 0, 0, 20], &payload].concat(),
            ICMP => {
                let message = self.of(&[8, 0, 3, 3, 11, 12, 5, 13]);
                let quoted = self.quoted(head, &payload);
                [&[message, 3, 0, 0, 0, 0, 0, 0][..], if message == 8 { &payload } else { &quoted }].concat()
            }
            ICMPV6 => {
                let message = self.of(&[128, 129, 1, 3, 4, 133, 134, 135, 136, 137, 130]);
                let quoted = self.quoted(head, &payload);
                let target = octets(head.to);
                let rest = if message < 128 { quoted } else { [target, payload].concat() };
                [&[message, 0, 0, 0, 0, 0, 0, 0][..], &rest].concat()
            }
            4 | 41 => {
                sent.how.push("a packet in a packet");
                self.inner(head, payload)
            }
            47 => [&[0, 0][..], &self.kind(head), &self.inner(head, payload)].concat(),
            _ => [&both[..], &[0; 8], &payload].concat(),
        }
    }

    /// The Ethernet type of a packet.
    fn kind(&self, head: &Datagram) -> [u8; 2] {
        if head.from.is_ipv4() { [0x08, 0] } else { [0x86, 0xdd] }
    }

    /// A datagram with the source of another, inside another packet.
    fn inner(&mut self, head: &Datagram, payload: Vec<u8>) -> Vec<u8> {
        let v6 = head.from.is_ipv6();
        let to = self.of(&[End::Served, End::Free, End::Outside]).address(v6);
        let from = self.of(&[End::Narrow.address(v6), ELSEWHERE[usize::from(v6)].parse().unwrap()]);
        let inner = Datagram { from, to, protocol: UDP, ..*head };
        let port = self.of(&[SERVED_UDP, OUTSIDE_UDP]);
        let mut body = [CLIENT.start.to_be_bytes(), port.to_be_bytes()].concat();
        body.extend((payload.len() as u16 + 8).to_be_bytes());
        body.extend([0, 0]);
        body.extend(payload);
        fill_checksum(&mut body, (inner.from, to), UDP, false);
        inner.packet(&Piece { body, ..Piece::default() })
    }

    /// The start of a packet that was sent to this one's sender, for an ICMP error.
    fn quoted(&mut self, head: &Datagram, payload: &[u8]) -> Vec<u8> {
        let port = self.of(&[SERVED_UDP, OUTSIDE_UDP, DENIED]);
        let client = self.random.random_range(CLIENT);
        let ports = if self.random.random() { [client, port] } else { [port, client] };
        let mut body = ports.map(u16::to_be_bytes).concat();
        body.extend([0, 100, 0, 0]);
        body.extend(payload);
        Datagram { from: head.to, to: head.from, protocol: UDP, ..*head }.packet(&Piece { body, ..Piece::default() })
    }

    /// A packet that is not in fragments, or in one.
    fn piece(&mut self, body: Vec<u8>, v6: bool, sent: &mut Sent) -> Piece {
        let mut piece = Piece { body, ..Piece::default() };
        if v6 && self.one_in(3) {
            piece.chain = self.chain(sent);
        } else if !v6 && self.one_in(6) {
            sent.how.push("options");
            piece.options = match self.random.random_range(0..4) {
                0 => vec![1; 4],
                // Record route, loose source route, timestamp (RFC 791).
                1 => vec![7, 7, 4, 0, 0, 0, 0, 0],
                2 => [&[131, 7, 4][..], &octets(FAR[0].parse().unwrap()), &[0]].concat(),
                _ => vec![68, 8, 5, 0, 0, 0, 0, 0],
            };
        }
        if self.one_in(40) {
            sent.how.push("an only fragment");
            piece.fragment = Some((0, false));
        }
        piece
    }

    fn chain(&mut self, sent: &mut Sent) -> Vec<(u8, Vec<u8>)> {
        sent.how.push("extension headers");
        let count = self.of(&[1, 1, 1, 2, 3]);
        let header = |it: &mut Self| {
            let more = it.of(&[0, 0, 1, 12]);
            match it.random.random_range(0..10) {
                0..3 => (0, padding(more)),
                3..7 => (60, padding(more)),
                // A routing header: of type 0, 2 or 4, with segments left or without.
                7 => {
                    let mut routing = vec![0; 24];
                    (routing[1], routing[2], routing[3]) = (2, it.of(&[0, 2, 4, 253]), it.of(&[0, 1]));
                    routing[8..].copy_from_slice(&octets(FAR[1].parse().unwrap()));
                    (43, routing)
                }
                8 => (44, vec![0; 8]),
                _ => (51, [&[0, 4, 0, 0][..], &[0; 20]].concat()),
            }
        };
        let mut chain: Vec<_> = (0..count).map(|_| header(self)).collect();
        // Hop-by-hop options elsewhere than first are malformed: not too many of these.
        if !self.one_in(8) {
            chain.sort_by_key(|(number, _)| *number);
            chain.dedup_by_key(|(number, _)| *number);
        }
        chain
    }

    /// Fragments of a datagram, in any order, now and then with two at one place, or one missing.
    fn pieces(&mut self, head: &Datagram, mut body: Vec<u8>, number: u32, sent: &mut Sent) -> Vec<Frame> {
        sent.how.push("fragments");
        let v6 = head.from.is_ipv6();
        if self.one_in(3) {
            body.extend(payload(number, self.random.random_range(100..4000)));
        }
        let common = if v6 && self.one_in(2) { self.chain(sent) } else { Vec::new() };
        let is_first_alone = self.one_in(2);
        let (mut at, mut pieces) = (0, Vec::new());
        while at < body.len() {
            let length = if self.one_in(2) { 1200 } else { self.of(&[8, 16, 48, 104, 600]) };
            let end = (at + length).min(body.len());
            let chain = if at == 0 || !is_first_alone { common.clone() } else { Vec::new() };
            let fragment = Some((at, end < body.len()));
            pieces.push(Piece { chain, fragment, body: body[at..end].to_vec(), ..Piece::default() });
            at = end;
        }
        if self.one_in(6) && pieces[0].body.len() >= 4 && matches!(head.protocol, UDP | TCP | SCTP) {
            // A second first fragment, to another port.
            sent.how.push("two first fragments");
            let mut other = pieces[0].clone();
            other.body[2..4].copy_from_slice(&DENIED.to_be_bytes());
            sent.ports.push([sent.ports[0][0], DENIED]);
            pieces.push(other);
        }
        if self.one_in(8) {
            let lost = self.random.random_range(0..pieces.len());
            pieces.remove(lost);
        }
        if self.one_in(2) {
            rand::seq::SliceRandom::shuffle(&mut pieces[..], &mut self.random);
        }
        let from = sent.from;
        pieces.iter().map(|piece| self.frame(from, head.packet(piece), sent)).collect()
    }

    /// A frame with a virtio header, by which the kernel writes a checksum somewhere, and cuts the frame up.
    fn steered(&mut self, head: &Datagram, mut body: Vec<u8>, offset: usize, number: u32, sent: &mut Sent) -> Frame {
        sent.how.push("an open checksum");
        let is_long = matches!(head.protocol, UDP | TCP) && self.one_in(3);
        if is_long {
            sent.how.push("segments");
            body.extend(payload(number, self.random.random_range(500..9000)));
            if head.protocol == UDP {
                let length = (body.len() as u16).to_be_bytes();
                body[4..6].copy_from_slice(&length);
            }
            fill_checksum(&mut body, (head.from, head.to), head.protocol, true);
        }
        let piece = if self.one_in(4) { self.piece(Vec::new(), head.from.is_ipv6(), sent) } else { Piece::default() };
        let start = ETHERNET + head.packet(&piece).len();
        let header = if head.protocol == TCP { 20 } else { 8 };
        let packet = head.packet(&Piece { body, ..piece });
        let mut virtio = VirtioHeader { start: start as u16, offset: offset as u16, ..VirtioHeader::open() };
        if self.one_in(2) {
            sent.how.push("to another place");
            virtio.start = self.of(&[start, start, start - 8, start - 20, 22, 14, 30, start + 8]) as u16;
            let any = self.random.random_range(0..40);
            virtio.offset = self.of(&[2, 2, 0, 4, 6, 12, 16, any]);
        }
        if is_long {
            // TCP over IPv4 and IPv6, UDP (VIRTIO_NET_HDR_GSO_*).
            let own = if head.protocol == UDP {
                5
            } else if head.from.is_ipv4() {
                1
            } else {
                4
            };
            virtio.kind = if self.one_in(8) { self.of(&[1, 3, 4, 5, 0x81]) } else { own };
            virtio.segment = self.of(&[1, 8, 100, 500, 1200, 1400]);
            virtio.headers = if self.one_in(4) { self.random.random() } else { (start + header) as u16 };
        }
        Frame { virtio, ..self.frame(sent.from, packet, sent) }
    }

    /// An Ethernet frame around a packet, now and then with a tag, with others' MACs, cut off or with bytes changed.
    fn frame(&mut self, from: End, mut packet: Vec<u8>, sent: &mut Sent) -> Frame {
        let index = from as usize;
        let (mut to, mut source) = (self.macs.gateway[index], self.macs.own[index]);
        if sent.protocol == ICMPV6 && self.one_in(2) {
            // On a bridge, that of its port.
            to = self.macs.node[index];
        }
        if self.one_in(6) {
            sent.how.push("to another MAC");
            let other = self.random.random_range(0..self.macs.own.len());
            let multicast = [0x33, 0x33, 0, 0, 0, 1];
            to = self.of(&[self.macs.node[index], self.macs.own[other], self.macs.node[other], BROADCAST, multicast]);
        }
        if self.one_in(12) {
            sent.how.push("from another MAC");
            source = self.macs.own[self.random.random_range(0..self.macs.own.len())];
        }
        if self.one_in(20) && packet.len() > MARK + 20 {
            sent.how.push("changed");
            // A fragment whose identification changes would be one of another datagram.
            if self.random.random() || sent.how.iter().any(|how| ["fragments", "segments"].contains(how)) {
                packet.truncate(self.random.random_range(20..packet.len()));
            } else {
                let at = self.random.random_range(0..packet.len());
                packet[at] = self.random.random();
            }
        }
        let kind = if packet.first().is_some_and(|byte| byte >> 4 == 4) { [0x08, 0] } else { [0x86, 0xdd] };
        let mut frame = [&to[..], &source].concat();
        if self.one_in(25) {
            sent.how.push("a VLAN tag");
            frame.extend(self.of(&[[0x81, 0], [0x88, 0xa8]]));
            frame.extend([0, self.of(&[0, 1, 100])]);
        }
        frame.extend(if self.one_in(60) { self.of(&[[0x08, 0], [0x86, 0xdd], [0x88, 0x47], [0, 0]]) } else { kind });
        frame.extend(packet);
        if !sent.how.contains(&"segments") {
            frame.truncate(LONGEST);
        }
        Frame { bytes: frame, virtio: VirtioHeader::default() }
    }
}

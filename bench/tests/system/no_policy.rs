//! Without a policy Penstock is not there: two nodes that differ in nothing but the daemon get the same packets, and what arrives at
//! one arrives at the other, unchanged. The exceptions are a list, which the test prints.

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use etherparse::{
    IcmpEchoHeader, Icmpv4Type, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, PacketBuilder, TcpHeader,
    icmpv4::DestUnreachableHeader,
};
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::{Daemon, DaemonConfig, Outside, ScratchDir};

use crate::fixture::pods;

const PODS: [&str; 2] = ["10.244.1.10", "10.244.1.11"];
const PODS_V6: [&str; 2] = ["fd00:10:244:1::10", "fd00:10:244:1::11"];
const OUTSIDE: &str = "198.51.100.2";
const OUTSIDE_V6: &str = "fd00:51:100::2";
/// Address of a DNS cache on the node.
const CACHE: &str = "169.254.20.10";
/// Idle timeouts, so that a pause of two seconds is as days are.
const SHORT: &str = "timeouts = { tcp_timeout_established = \"1s\", tcp_timeout_close_wait = \"1s\", \
                     tcp_timeout_syn_sent = \"1s\", tcp_timeout_unacknowledged = \"1s\", udp_timeout = \"1s\", \
                     udp_timeout_stream = \"1s\", sctp_timeout_established = \"1s\" }\n";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Pod0,
    Pod1,
    Outside,
}
use End::{Outside as Out, Pod0, Pod1};

impl End {
    fn address(self, v6: bool) -> IpAddr {
        let text = match (self, v6) {
            (Pod0, false) => PODS[0],
            (Pod1, false) => PODS[1],
            (Out, false) => OUTSIDE,
            (Pod0, true) => PODS_V6[0],
            (Pod1, true) => PODS_V6[1],
            (Out, true) => OUTSIDE_V6,
        };
        text.parse().unwrap()
    }
}

/// An IP packet between two ends, and whether a node with Penstock may keep it back.
struct Case {
    name: String,
    from: End,
    to: End,
    packet: Vec<u8>,
    exception: Option<&'static str>,
    /// Whether everything pauses for longer than all timeouts before it.
    after_pause: bool,
}

fn v4(from: End, to: End, protocol: u8, payload: &[u8], edit: impl FnOnce(&mut Ipv4Header)) -> Vec<u8> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (from.address(false), to.address(false)) else { unreachable!() };
    let mut header = Ipv4Header::new(payload.len() as u16, 64, IpNumber(protocol), src.octets(), dst.octets()).unwrap();
    header.dont_fragment = false;
    edit(&mut header);
    header.set_payload_len(payload.len()).unwrap();
    header.header_checksum = header.calc_header_checksum();
    [&header.to_bytes()[..], payload].concat()
}

/// A packet of a builder, without its Ethernet header.
fn built(
    from: End,
    to: End,
    v6: bool,
    finish: impl FnOnce(etherparse::PacketBuilderStep<etherparse::IpHeaders>, &mut Vec<u8>),
) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip = match (from.address(v6), to.address(v6)) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ethernet.ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => ethernet.ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!(),
    };
    let mut frame = Vec::new();
    finish(ip, &mut frame);
    frame.split_off(14)
}

fn udp(from: End, to: End, v6: bool, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    built(from, to, v6, |ip, frame| ip.udp(ports.0, ports.1).write(frame, payload).unwrap())
}

/// A segment with these flags: a letter each.
fn tcp(from: End, to: End, v6: bool, ports: (u16, u16), flags: &str, seq: u32) -> Vec<u8> {
    let has = |flag| flags.contains(flag);
    let mut header = TcpHeader::new(ports.0, ports.1, seq, 4096);
    (header.syn, header.ack, header.fin, header.rst) = (has('S'), has('A'), has('F'), has('R'));
    (header.psh, header.urg) = (has('P'), has('U'));
    header.acknowledgment_number = seq ^ 0x5555;
    built(from, to, v6, |ip, frame| ip.tcp_header(header).write(frame, b"x").unwrap())
}

/// An SCTP packet with one chunk of this type (RFC 9260); nobody checks its checksum on the way.
fn sctp(from: End, to: End, ports: (u16, u16), tag: u32, chunk: u8) -> Vec<u8> {
    let mut packet = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    packet.extend(tag.to_be_bytes());
    // Not 0, which a sender leaves for others to complete.
    packet.extend([1, 2, 3, 4]);
    packet.extend([chunk, 0, 0, 20]);
    packet.extend([1; 16]);
    v4(from, to, 132, &packet, |_| {})
}

fn icmp(from: End, to: End, kind: Icmpv4Type, payload: &[u8]) -> Vec<u8> {
    built(from, to, false, |ip, frame| ip.icmpv4(kind).write(frame, payload).unwrap())
}

/// A fragment of a datagram, at this offset in units of eight bytes.
fn fragment(from: End, to: End, id: u16, units: u16, more: bool, length: usize) -> Vec<u8> {
    let mut payload = udp(from, to, false, (5000 + id, 7000), &[id as u8; 64]).split_off(20);
    payload.resize(72, 0);
    let at = usize::from(units) * 8;
    v4(from, to, 17, &payload[at..at + length], |header| {
        header.identification = id;
        header.more_fragments = more;
        header.fragment_offset = IpFragOffset::try_new(units).unwrap();
    })
}

/// A fragment of an IPv6 datagram (RFC 8200 section 4.5).
fn fragment_v6(from: End, to: End, id: u32, units: u16, more: bool) -> Vec<u8> {
    let whole = udp(from, to, true, (5000, 7001), &[6; 40]);
    let at = 40 + usize::from(units) * 8;
    let mut packet = whole[..40].to_vec();
    packet[4..6].copy_from_slice(&(8 + 24_u16).to_be_bytes());
    packet[6] = 44;
    packet.extend([17, 0]);
    packet.extend((units << 3 | u16::from(more)).to_be_bytes());
    packet.extend(id.to_be_bytes());
    packet.extend(&whole[at..at + 24]);
    packet
}

/// The table of kinds of traffic, in the order of sending.
fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut port = 20_000;
    for (from, to) in [(Pod0, Pod1), (Pod1, Pod0), (Pod0, Out), (Out, Pod1)] {
        let mut add = |name: &str, packet: Vec<u8>, exception: Option<&'static str>| {
            cases.push(Case {
                name: format!("{from:?} to {to:?}: {name}"),
                from,
                to,
                packet,
                exception,
                after_pause: false,
            });
        };
        for v6 in [false, true] {
            for flags in ["A", "FA", "RA", "R", "SA", "F", "SF", "SR", "", "FPU", "S"] {
                port += 1;
                add(&format!("TCP {flags:?} of no connection, v6 {v6}"), tcp(from, to, v6, (port, 80), flags, 9), None);
            }
            for (number, flags) in ["S", "S", "A", "A", "FA", "A", "R", "S", "A"].into_iter().enumerate() {
                let seq = 1_000_000_000_u32.wrapping_mul(number as u32 + 1);
                add(
                    &format!("TCP {flags} far out of window, v6 {v6}"),
                    tcp(from, to, v6, (443, 50_000), flags, seq),
                    None,
                );
            }
            add("UDP", udp(from, to, v6, (port, 53), b"question"), None);
            add("UDP without payload", udp(from, to, v6, (port, 53), b""), None);
        }
        let mut unchecked = udp(from, to, false, (port, 54), b"without checksum");
        unchecked[26..28].fill(0);
        add("UDP without checksum", unchecked, None);
        for (tag, chunk) in [(0, 1), (7, 4), (8, 5), (9, 10), (10, 0), (11, 7), (12, 14), (13, 6)] {
            port += 1;
            add(&format!("SCTP chunk {chunk} of no association"), sctp(from, to, (port, 9000), tag, chunk), None);
        }
        for (tag, chunk) in [(0, 1), (21, 0), (22, 0), (23, 4), (24, 5)] {
            add(&format!("SCTP chunk {chunk} with tag {tag}"), sctp(from, to, (6000, 9001), tag, chunk), None);
        }
        let echo = |id| IcmpEchoHeader { id, seq: 1 };
        add("echo request", icmp(from, to, Icmpv4Type::EchoRequest(echo(7)), b"ping"), None);
        add("echo reply to nothing", icmp(from, to, Icmpv4Type::EchoReply(echo(8)), b"pong"), None);
        let quoted = udp(to, from, false, (1, 2), b"");
        let unreachable = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
        add("ICMP error about nothing", icmp(from, to, unreachable.clone(), &quoted), None);
        for protocol in [47, 50, 89, 99, 132, 253] {
            add(&format!("protocol {protocol}"), v4(from, to, protocol, &[9; 24], |_| {}), None);
        }
        for (what, order) in [("in order", [0, 3, 6]), ("last first", [6, 3, 0]), ("mixed", [3, 0, 6])] {
            port += 1;
            for units in order {
                let packet = fragment(from, to, port, units, units != 6, 24);
                add(&format!("fragments {what}: {units}"), packet, None);
            }
        }
        add("a later fragment alone", fragment(from, to, 9, 3, true, 24), None);
        for units in [3, 0] {
            add(
                &format!("IPv6 fragments last first: {units}"),
                fragment_v6(from, to, port.into(), units, units == 0),
                None,
            );
        }
        let options = |bytes: &[u8]| Ipv4Options::try_from(bytes).unwrap();
        for (what, bytes, exception) in [
            ("router alert", &[148, 4, 0, 0][..], None),
            ("no operation", &[1, 1, 1, 0], None),
            (
                "source route",
                &[131, 7, 4, 10, 244, 1, 1, 0],
                Some("source routes: a pod would choose its way past policy"),
            ),
        ] {
            add(
                &format!("option {what}"),
                v4(from, to, 17, &[0, 9, 0, 9, 0, 8, 0, 0], |header| header.options = options(bytes)),
                exception,
            );
        }
        let redirect = Icmpv4Type::Unknown { type_u8: 5, code_u8: 1, bytes5to8: [10, 244, 1, 1] };
        add("ICMP redirect", icmp(from, to, redirect, &quoted), Some("redirects: they change a pod's routes"));
        if from != Out {
            let other = if from == Pod0 { Pod1 } else { Pod0 };
            let forged = udp(other, Out, false, (port, 55), b"forged");
            let to = Out;
            let name = format!("{from:?} to {to:?}: another pod's source");
            cases.push(Case { name, from, to, packet: forged, exception: Some("forged sources"), after_pause: false });
        }
    }
    // The same flows after days of silence.
    let again: Vec<Case> = [(Pod0, Pod1), (Pod1, Pod0), (Out, Pod1), (Pod0, Out)]
        .into_iter()
        .flat_map(|(from, to)| ["A", "FA", "R"].map(|flags| (from, to, flags)))
        .enumerate()
        .map(|(number, (from, to, flags))| Case {
            name: format!("{from:?} to {to:?}: TCP {flags} after a pause"),
            from,
            to,
            packet: tcp(from, to, false, (443, 50_000), flags, 4_000_000),
            exception: None,
            after_pause: number == 0,
        })
        .collect();
    cases.extend(again);
    cases
}

/// A packet as it is at its receiver, whatever routers have counted: without TTL or hop limit, and without the checksum over it.
fn as_received(packet: &[u8]) -> Option<Vec<u8>> {
    let (length, fields): (usize, &[usize]) = match packet.first()? >> 4 {
        4 => (u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]).into(), &[8, 10, 11]),
        6 => (40 + usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?])), &[7]),
        _ => return None,
    };
    let mut packet = packet.get(..length)?.to_vec();
    fields.iter().for_each(|at| packet[*at] = 0);
    Some(packet)
}

/// A node with two pods, a machine behind it, and sockets on the wires of all three.
struct Node {
    cluster: Cluster,
    outside: Outside,
    daemon: Option<Daemon>,
    _scratch: ScratchDir,
}

impl Node {
    fn new(with_daemon: bool, conntrack: &str) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::write(manifests.join("all.yaml"), pods(2)).unwrap();
        let mut cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
        let outside = cluster.node.add_outside("outside").unwrap();
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.conntrack += conntrack;
        let daemon = with_daemon.then(|| Daemon::start(cluster.node.namespace(), &config).unwrap());
        Self { cluster, outside, daemon, _scratch: scratch }
    }

    fn ends(&self) -> [End; 3] {
        [Pod0, Pod1, Out]
    }

    fn wire(&self, end: End) -> (PacketSocket, [u8; 12]) {
        let (namespace, interface) = match end {
            Out => (self.outside.namespace(), self.outside.interface()),
            pod => {
                let pod = self.cluster.node.pod(if pod == Pod0 { "test/pod-0" } else { "test/pod-1" }).unwrap();
                (pod.namespace(), pod.interface())
            }
        };
        let own = namespace.netlink().unwrap().mac("eth0").unwrap();
        let gateway = self.cluster.node.netlink().mac(interface).unwrap();
        let mut macs = [0; 12];
        macs[..6].copy_from_slice(&gateway);
        macs[6..].copy_from_slice(&own);
        (PacketSocket::open(namespace).unwrap(), macs)
    }

    /// Sends all packets in order. Returns how often each of them arrived at its end, by its number.
    fn run(&self, cases: &[Case], expected: Option<&[usize]>) -> Vec<usize> {
        let wires = self.ends().map(|end| self.wire(end));
        let wanted: BTreeMap<(usize, Vec<u8>), usize> = cases
            .iter()
            .enumerate()
            .map(|(number, case)| ((case.to as usize, as_received(&case.packet).unwrap()), number))
            .collect();
        assert_eq!(wanted.len(), cases.len(), "each packet differs from all others");
        let mut arrived = vec![0; cases.len()];
        let listen = |arrived: &mut Vec<usize>, time| {
            for (end, (wire, _)) in wires.iter().enumerate() {
                for frame in wire.received(time).unwrap() {
                    let packet = frame.get(14..).and_then(as_received);
                    if let Some(number) = packet.and_then(|packet| wanted.get(&(end, packet))) {
                        arrived[*number] += 1;
                    }
                }
            }
        };
        for case in cases {
            if case.after_pause {
                std::thread::sleep(Duration::from_secs(2));
            }
            let (wire, macs) = &wires[case.from as usize];
            let ethertype: [u8; 2] = if case.packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
            let frame = [&macs[..], &ethertype, &case.packet].concat();
            let deadline = Instant::now() + Duration::from_secs(30);
            while let Err(error) = wire.send(&frame) {
                assert!(Instant::now() < deadline, "{}: {error}", case.name);
                std::thread::yield_now();
            }
            listen(&mut arrived, Duration::from_millis(1));
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_complete =
            |arrived: &[usize]| expected.is_some_and(|expected| arrived.iter().zip(expected).all(|(a, b)| a >= b));
        let mut quiet = 0;
        while quiet < 5 && !is_complete(&arrived) && Instant::now() < deadline {
            let before: usize = arrived.iter().sum();
            listen(&mut arrived, Duration::from_millis(100));
            // Without knowing what is to come: until nothing has come for some time.
            quiet = if expected.is_none() && arrived.iter().sum::<usize>() == before { quiet + 1 } else { 0 };
        }
        arrived
    }
}

#[test]
fn a_node_without_policies_forwards_what_a_plain_kernel_does() {
    let cases = cases();
    let plain = Node::new(false, "").run(&cases, None);
    let with_penstock = Node::new(true, SHORT);
    let counted: Vec<usize> =
        plain.iter().zip(&cases).map(|(count, case)| if case.exception.is_some() { 0 } else { *count }).collect();
    let arrived = with_penstock.run(&cases, Some(&counted));
    let differs = |number: &usize| (plain[*number] > 0) != (arrived[*number] > 0);
    let (mut wrong, mut exceptions) = (Vec::new(), BTreeMap::new());
    for number in (0..cases.len()).filter(differs) {
        match cases[number].exception {
            Some(reason) if plain[number] > 0 => *exceptions.entry(reason).or_insert(0) += 1,
            _ => wrong.push(format!("{}: plain {}, Penstock {}", cases[number].name, plain[number], arrived[number])),
        }
    }
    let forwarded = plain.iter().filter(|count| **count > 0).count();
    println!(
        "{} packets, {forwarded} forwarded by a plain kernel; not by Penstock, as written: {exceptions:?}",
        cases.len()
    );
    let log = with_penstock.daemon.as_ref().map(|daemon| daemon.log().lines().join("\n")).unwrap_or_default();
    assert!(wrong.is_empty(), "{}\n\nthe daemon wrote:\n{log}", wrong.join("\n"));
    assert!(forwarded > 300, "only {forwarded} packets of {} passed a plain kernel", cases.len());
}

/// Asks a server on the node, at an address of its link, from each pod.
fn answers_at_link_local(node: &Node) -> usize {
    let namespace = node.cluster.node.namespace();
    let cache: IpAddr = CACHE.parse().unwrap();
    let loopback = node.cluster.node.netlink().index("lo").unwrap();
    node.cluster.node.netlink().add_address(loopback, cache.into()).unwrap();
    let server = namespace.run(|| UdpSocket::bind((cache, 53))).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let client = |name: &str| {
        let pod = node.cluster.node.pod(name).unwrap();
        pod.namespace().run(|| UdpSocket::bind((pod.address(false).unwrap(), 0))).unwrap()
    };
    let clients = ["test/pod-0", "test/pod-1"].map(client);
    let is_answered = |client: &UdpSocket| {
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (mut buffer, deadline) = ([0; 64], Instant::now() + Duration::from_secs(5));
        while Instant::now() < deadline {
            client.send_to(b"question", (cache, 53)).unwrap();
            if let Ok((length, from)) = server.recv_from(&mut buffer) {
                server.send_to(&buffer[..length], from).unwrap();
            }
            if client.recv(&mut buffer).is_ok() {
                return true;
            }
        }
        false
    };
    clients.iter().filter(|client| is_answered(client)).count()
}

#[test]
fn pods_reach_the_node_at_link_local_addresses() {
    for with_daemon in [false, true] {
        assert_eq!(answers_at_link_local(&Node::new(with_daemon, "")), 2, "with a daemon: {with_daemon}");
    }
}

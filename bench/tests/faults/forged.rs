//! A pod sends forged replies to open a path for itself or another pod: each is rejected and counted.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::{Icmpv4Type, Icmpv6Type, icmpv6};
use penstock_bench::load::PacketSocket;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::{Forger, count_to};

/// Port of all forged packets, to recognise them on arrival.
const MARK: u16 = 47_111;

/// A forged packet and its expected drop reason.
type ForgedPacket = (&'static str, Vec<u8>, &'static str);

/// An ICMP error from this pod about a packet.
fn unreachable(forger: &Forger, from: IpAddr, to: IpAddr, quoted: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let ip = forger.ip(from, to);
    let built = match from {
        IpAddr::V4(_) => {
            let kind = DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 68 };
            ip.icmpv4(Icmpv4Type::DestinationUnreachable(kind)).write(&mut frame, &quoted[14..])
        }
        IpAddr::V6(_) => {
            let kind = icmpv6::DestUnreachableCode::Port;
            ip.icmpv6(Icmpv6Type::DestinationUnreachable(kind)).write(&mut frame, &quoted[14..])
        }
    };
    built.unwrap();
    frame
}

fn echo_reply(forger: &Forger, from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut frame = Vec::new();
    let ip = forger.ip(from, to);
    let payload = MARK.to_be_bytes();
    match from {
        IpAddr::V4(_) => ip.icmpv4_echo_reply(7, 1).write(&mut frame, &payload),
        IpAddr::V6(_) => ip.icmpv6_echo_reply(7, 1).write(&mut frame, &payload),
    }
    .unwrap();
    frame
}

/// Packets that `pod-2` forges towards a victim; `quoted` belongs to the victim's connection with another pod.
fn forgeries(forger: &Forger, own: IpAddr, victim: IpAddr, quoted: &[u8]) -> Vec<ForgedPacket> {
    let (from, to) = ((own, MARK), (victim, 8080));
    vec![
        ("SYN-ACK", forger.tcp(from, to, |tcp| (tcp.syn, tcp.ack) = (true, true)), "ingress_denied"),
        ("ACK", forger.tcp(from, to, |tcp| tcp.ack = true), "ingress_denied"),
        ("RST-ACK", forger.tcp(from, to, |tcp| (tcp.rst, tcp.ack) = (true, true)), "ingress_denied"),
        ("FIN-ACK", forger.tcp(from, to, |tcp| (tcp.fin, tcp.ack) = (true, true)), "ingress_denied"),
        ("no flag at all", forger.tcp(from, to, |_| ()), "ingress_denied"),
        ("a UDP answer", forger.udp((own, 53), (victim, MARK), b"answer"), "ingress_denied"),
        ("an echo reply", echo_reply(forger, own, victim), "ingress_denied"),
        ("an error about a connection of others", unreachable(forger, own, victim, quoted), "no_connection"),
        (
            "an error about no connection",
            unreachable(forger, own, victim, &forger.udp((victim, MARK), (own, 53), b"")),
            "no_connection",
        ),
    ]
}

fn is_marked(frame: &[u8]) -> bool {
    frame.windows(2).any(|bytes| bytes == MARK.to_be_bytes())
}

#[test]
fn forged_replies_open_no_connection_and_are_counted() {
    // The victim sends queries and admits nobody.
    let fixture = Fixture::of(&(pods(3) + &policy("closed", "pod-1", "  ingress: []\n")), |_, _| {});
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let seen = PacketSocket::open(&fixture.site("test/pod-1").namespace).unwrap();
    let mut expected = BTreeMap::<&str, u64>::new();
    for v6 in [false, true] {
        let address = |name: &str| fixture.site(name).address(v6).unwrap();
        let (victim, other, own) = (address("test/pod-1"), address("test/pod-0"), address("test/pod-2"));
        // Queries use the marked port, so that a quoted query is recognised too.
        let asking = fixture.site("test/pod-1").namespace.udp((victim, MARK)).unwrap();
        asking.send_to(b"question", SocketAddr::new(other, 53)).unwrap();
        asking.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let answered = asking.recv_from(&mut [0; 64]).unwrap().1;
        assert_eq!(answered.ip(), other, "there is a connection to forge errors about");
        seen.received(Duration::from_millis(50)).unwrap();
        let quoted = forger.udp((victim, MARK), (other, 53), b"question");
        for (_, frame, cause) in forgeries(&forger, own, victim, &quoted) {
            forger.send(&frame);
            *expected.entry(cause).or_default() += 1;
        }
        for protocol in [Protocol::Tcp(8080), Protocol::Udp(53), Protocol::Icmp] {
            let target = fixture.target("test/pod-1", v6);
            let outcome = probe::run_one(fixture.site("test/pod-2"), target, protocol, RetryPolicy::default()).unwrap();
            assert_eq!(outcome, ProbeOutcome::Silent, "{protocol} after forged replies (IPv6: {v6})");
            *expected.get_mut("ingress_denied").unwrap() += u64::from(RetryPolicy::default().attempts);
        }
        let arrived: Vec<_> = seen.received(Duration::from_millis(100)).unwrap();
        assert!(!arrived.iter().any(|frame| is_marked(frame)), "{arrived:02x?}");
    }
    for (cause, times) in expected {
        assert_eq!(count_to(&fixture, "test/pod-2", cause, times), times, "{cause}");
    }
}

#[test]
fn forged_replies_of_a_pod_with_denied_egress_are_dropped() {
    let fixture =
        Fixture::of(&(pods(3) + &policy("mute", "pod-2", "  policyTypes: [Egress]\n  egress: []\n")), |_, _| {});
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let seen = PacketSocket::open(&fixture.site("test/pod-1").namespace).unwrap();
    for v6 in [false, true] {
        let address = |name: &str| fixture.site(name).address(v6).unwrap();
        let (victim, own) = (address("test/pod-1"), address("test/pod-2"));
        let quoted = forger.udp((victim, MARK), (address("test/pod-0"), 53), b"");
        for (_, frame, _) in forgeries(&forger, own, victim, &quoted) {
            forger.send(&frame);
        }
    }
    let arrived = seen.received(Duration::from_millis(300)).unwrap();
    assert!(!arrived.iter().any(|frame| is_marked(frame)), "{arrived:02x?}");
    assert_eq!(count_to(&fixture, "test/pod-2", "egress_denied", 14), 14);
    assert_eq!(count_to(&fixture, "test/pod-2", "no_connection", 4), 4);
}

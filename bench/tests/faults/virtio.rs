//! Frames with a virtio header, by which a pod has the kernel change them, or cut them up, behind the programs.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etherparse::PacketBuilder;
use penstock_bench::testbed::{Offload, Outside};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::{VirtioHeader, VirtioSocket};

/// The port that the pod may send to, and one that it may not.
const ALLOWED: u16 = 1053;
const DENIED: u16 = 2222;
const OWN: u16 = 5000;
const WAIT: Duration = Duration::from_millis(500);

/// The sum of RFC 1071, not complemented.
fn sum(bytes: &[u8]) -> u16 {
    let word = |two: &[u8]| u64::from(u16::from_be_bytes([two[0], two.get(1).copied().unwrap_or(0)]));
    let mut sum: u64 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A datagram to the allowed port, in which the checksum of all from the transport header on is `DENIED`.
fn steered(macs: [[u8; 6]; 2], from: IpAddr, to: IpAddr) -> (Vec<u8>, usize) {
    let ethernet = PacketBuilder::ethernet2(macs[0], macs[1]);
    let packet = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        _ => panic!("two families"),
    };
    let mut frame = Vec::new();
    packet.udp(OWN, ALLOWED).write(&mut frame, b"STEERED!\0\0").unwrap();
    let transport = frame.len() - 18;
    // No checksum, which IPv4 permits; in IPv6 the receiver would drop it, and must not get it.
    frame[transport + 6..transport + 8].fill(0);
    let missing = sum(&[&(!DENIED).to_be_bytes()[..], &(!sum(&frame[transport..])).to_be_bytes()].concat());
    let end = frame.len();
    frame[end - 2..].copy_from_slice(&missing.to_be_bytes());
    assert_eq!(!sum(&frame[transport..]), DENIED);
    (frame, transport)
}

#[test]
fn a_checksum_elsewhere_is_not_written_behind_policy() {
    let allowed = format!("  policyTypes: [Egress]\n  egress: [{{ports: [{{port: {ALLOWED}, protocol: UDP}}]}}]\n");
    let mut outside: Option<Outside> = None;
    let fixture = Fixture::of(&(pods(1) + &policy("narrow", "pod-0", &allowed)), |cluster, _| {
        let machine = cluster.node.add_outside("outside").unwrap();
        // A device that computes no checksums: the kernel writes them before it.
        cluster.node.namespace().set_offload(machine.interface(), Offload::TxChecksum, false).unwrap();
        outside = Some(machine);
    });
    let outside = outside.unwrap();
    let pod = fixture.site("test/pod-0");
    let node = fixture.cluster.node.netlink();
    let macs = [
        pod.namespace.netlink().unwrap().mac("eth0").unwrap(),
        node.mac(fixture.cluster.node.pod("test/pod-0").unwrap().interface()).unwrap(),
    ];
    let to = *outside.addresses().iter().find(|address| address.is_ipv4()).unwrap();
    let from = pod.address(false).unwrap();
    let bind = |port| {
        let socket = outside.namespace().udp(SocketAddr::new(to, port)).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket
    };
    let (server, denied) = (bind(ALLOWED), bind(DENIED));
    let client = pod.namespace.udp(SocketAddr::new(from, OWN)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // A connection that the programs forward by themselves.
    server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    for _ in 0..3 {
        client.send_to(b"hello", SocketAddr::new(to, ALLOWED)).unwrap();
        let (_, peer) = server.recv_from(&mut [0; 99]).unwrap();
        server.send_to(b"back", peer).unwrap();
        client.recv(&mut [0; 99]).unwrap();
    }
    let raw = VirtioSocket::open(&pod.namespace);
    let (frame, transport) = steered(macs, from, to);
    let send = |offset| {
        let header = VirtioHeader { start: transport as u16, offset, ..VirtioHeader::open() };
        raw.send(&header, &frame).unwrap();
    };
    for _ in 0..3 {
        send(2);
    }
    assert!(denied.recv(&mut [0; 99]).is_err(), "it reached the denied port");
    // One in its place is written as ever.
    send(6);
    client.send_to(b"end", SocketAddr::new(to, ALLOWED)).unwrap();
    let mut got = [0; 99];
    while server.recv(&mut got).unwrap() != 3 {}
}

//! A pod claims other identities: by its source addresses, in ARP and neighbour discovery, as a router or as a DHCP
//! server.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_bench::load::PacketSocket;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::network_state;

use crate::fixture::{Fixture, pods};
use crate::forger::{BROADCAST, Forger, count, count_to, sum_to};

const MARK: u16 = 47_112;
/// A MAC that nobody uses.
const NOBODY: [u8; 6] = [2, 0, 0, 0xbe, 0xef, 0];

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// An ARP packet (RFC 826): operation, claimed sender and target.
fn arp(forger: &Forger, operation: u8, mac: [u8; 6], sender: IpAddr, target: IpAddr) -> Vec<u8> {
    let mut frame = [BROADCAST, forger.mac].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(mac);
    frame.extend(bytes(sender));
    frame.extend(BROADCAST);
    frame.extend(bytes(target));
    frame
}

/// A message of neighbour discovery (RFC 4861) with its checksum; `rest` follows type, code and checksum.
fn discovery(forger: &Forger, kind: u8, from: IpAddr, to: IpAddr, rest: &[u8]) -> Vec<u8> {
    let IpAddr::V6(destination) = to else { panic!("{to} is no IPv6 address") };
    let IpAddr::V6(source) = from else { panic!("{from} is no IPv6 address") };
    let kind = etherparse::Icmpv6Type::Unknown { type_u8: kind, code_u8: 0, bytes5to8: rest[..4].try_into().unwrap() };
    let mut frame = Vec::new();
    etherparse::PacketBuilder::ethernet2(forger.mac, forger.gateway)
        .ipv6(source.octets(), destination.octets(), 255)
        .icmpv6(kind)
        .write(&mut frame, &rest[4..])
        .unwrap();
    frame
}

/// A link-layer address option of neighbour discovery.
fn link_address(kind: u8, mac: [u8; 6]) -> Vec<u8> {
    [&[kind, 1][..], &mac].concat()
}

/// All messages with which a pod can impersonate others; `own` and the others are of both families.
fn spoofed_messages(forger: &Forger, own: [IpAddr; 2], others: &[[IpAddr; 2]], gateway: [IpAddr; 2]) -> Vec<Vec<u8>> {
    let [all, nobody]: [IpAddr; 2] = ["ff02::1", "::"].map(|address| address.parse().unwrap());
    let mut spoofed_messages = Vec::new();
    for [v4, v6] in others {
        for mac in [forger.mac, NOBODY] {
            spoofed_messages.push(arp(forger, 1, mac, *v4, gateway[0]));
            spoofed_messages.push(arp(forger, 2, mac, *v4, *v4));
            // A request for the gateway's address from the other's address, and an announcement of the other's address.
            let asks = [&[0; 4][..], &bytes(gateway[1]), &link_address(1, mac)].concat();
            spoofed_messages.push(discovery(forger, 135, *v6, gateway[1], &asks));
            let tells = [&[0x60, 0, 0, 0][..], &bytes(*v6), &link_address(2, mac)].concat();
            spoofed_messages.push(discovery(forger, 136, *v6, all, &tells));
            spoofed_messages.push(discovery(forger, 136, own[1], gateway[1], &tells));
            // Probes for the other's address, which keep it from taking it (RFC 5227, RFC 4862).
            spoofed_messages.push(arp(forger, 1, mac, [0, 0, 0, 0].into(), *v4));
            spoofed_messages.push(discovery(forger, 135, nobody, all, &[&[0; 4][..], &bytes(*v6)].concat()));
        }
    }
    // Its own addresses with a MAC that is not its own, alone and behind its own; and options that nobody sends.
    let (right, wrong, nonce) =
        (|kind| link_address(kind, forger.mac), |kind| link_address(kind, NOBODY), [14, 1, 1, 2, 3, 4, 5, 6]);
    for options in [
        wrong(1),
        wrong(2),
        [right(1), wrong(1)].concat(),
        [&nonce[..], &wrong(2)].concat(),
        [&[1, 2][..], &forger.mac, &[0; 8]].concat(),
        vec![1, 0, 0, 0, 0, 0, 0, 0],
        [right(1), right(1), right(1), right(1), right(1)].concat(),
        right(1)[..4].to_vec(),
    ] {
        for (kind, target) in [(133, None), (135, Some(gateway[1])), (136, Some(own[1]))] {
            let rest = [&[0; 4][..], &target.map_or(Vec::new(), bytes), &options].concat();
            spoofed_messages.push(discovery(forger, kind, own[1], all, &rest));
        }
    }
    spoofed_messages.push(arp(forger, 2, NOBODY, own[0], gateway[0]));
    let link_local: IpAddr = "fe80::bad".parse().unwrap();
    // Router advertisements for an hour with a prefix, and a redirect to a better route.
    let prefix = [&[3, 4, 64, 0xc0][..], &[0, 0, 0xe, 0x10].repeat(2), &[0; 4], &bytes("2001:db8::".parse().unwrap())];
    let router = [&[64, 0, 0xe, 0x10][..], &[0; 8], &link_address(1, forger.mac), &prefix.concat()].concat();
    spoofed_messages.push(discovery(forger, 134, link_local, all, &router));
    let redirect = [&[0; 4][..], &bytes(link_local), &bytes("2001:db8::1".parse().unwrap())].concat();
    spoofed_messages.push(discovery(forger, 137, link_local, gateway[1], &redirect));
    spoofed_messages
}

/// Messages of a pod about itself, as kernels send them.
fn honest_messages(forger: &Forger, own: [IpAddr; 2], gateway: [IpAddr; 2]) -> Vec<Vec<u8>> {
    let [all, nobody, link_local]: [IpAddr; 3] = ["ff02::1", "::", "fe80::5"].map(|address| address.parse().unwrap());
    let about = |address, options: &[u8]| [&[0; 4][..], &bytes(address), options].concat();
    let (source, target, nonce) = (link_address(1, forger.mac), link_address(2, forger.mac), [14, 1, 1, 2, 3, 4, 5, 6]);
    vec![
        arp(forger, 1, forger.mac, [0, 0, 0, 0].into(), own[0]),
        arp(forger, 1, forger.mac, own[0], gateway[0]),
        arp(forger, 2, forger.mac, own[0], gateway[0]),
        discovery(forger, 133, own[1], all, &[&[0; 4][..], &source].concat()),
        discovery(forger, 133, nobody, all, &[0; 4]),
        discovery(forger, 135, nobody, all, &about(own[1], &[])),
        discovery(forger, 135, nobody, all, &about(own[1], &nonce)),
        discovery(forger, 135, nobody, all, &about(link_local, &nonce)),
        discovery(forger, 135, own[1], all, &about(gateway[1], &source)),
        discovery(forger, 135, link_local, all, &about(gateway[1], &[&source[..], &nonce].concat())),
        discovery(forger, 136, own[1], all, &about(own[1], &target)),
        discovery(forger, 136, own[1], all, &about(own[1], &[])),
    ]
}

/// Addresses of a name in both families.
fn addresses(fixture: &Fixture, name: &str) -> [IpAddr; 2] {
    [false, true].map(|v6| fixture.site(name).address(v6).unwrap())
}

fn reach_all(fixture: &Fixture) {
    fixture.assert_as_expected(&fixture.matrix());
}

#[test]
fn spoofed_arp_and_neighbour_discovery_are_dropped_and_counted() {
    const STRANGERS: u16 = 2_000;
    let fixture = Fixture::of(&pods(3), |cluster, _| {
        // A node with the most permissive settings.
        let interface = cluster.node.pod("test/pod-2").unwrap().interface().to_owned();
        for key in ["ipv4/conf/IF/arp_accept", "ipv4/conf/IF/accept_redirects", "ipv6/conf/IF/accept_redirects"] {
            let key = format!("net/{}", key.replace("IF", &interface));
            cluster.node.namespace().set_sysctl(&key, "1").unwrap();
        }
        cluster.node.namespace().set_sysctl(&format!("net/ipv6/conf/{interface}/accept_ra"), "2").unwrap();
    });
    let node = fixture.cluster.node.netlink();
    reach_all(&fixture);
    let (before, state) = (node.neighbours().unwrap(), network_state(node).unwrap());
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let gateways = fixture.cluster.node.gateways();
    let gateway = [gateways.v4.into(), gateways.v6.into()];
    let others = ["test/pod-0", "test/pod-1", "node"].map(|name| addresses(&fixture, name));
    let spoofed_messages =
        spoofed_messages(&forger, addresses(&fixture, "test/pod-2"), &[&others[..], &[gateway]].concat(), gateway);
    spoofed_messages.iter().for_each(|lie| forger.send(lie));
    // Each would be a separate entry of the neighbour table, whose capacity all pods of the machine share.
    for number in 0..STRANGERS {
        let [high, low] = number.to_be_bytes();
        forger.send(&arp(&forger, 1, forger.mac, IpAddr::from([10, 9, high, low]), gateway[0]));
        let stranger: IpAddr = format!("fd00:bad::{number:x}").parse().unwrap();
        let asks = [&[0; 4][..], &bytes(gateway[1]), &link_address(1, forger.mac)].concat();
        forger.send(&discovery(&forger, 135, stranger, gateway[1], &asks));
    }
    let forged = count_to(&fixture, "test/pod-2", "forged_neighbour", forger.sent);
    assert_eq!(forged, forger.sent, "each is dropped and counted");
    reach_all(&fixture);
    let own = addresses(&fixture, "test/pod-2");
    let now = node.neighbours().unwrap();
    let poisoned: Vec<_> = (now.difference(&before))
        .filter(|(_, address, mac)| mac == &NOBODY || mac == &forger.mac && !own.contains(address))
        .collect();
    assert!(poisoned.is_empty(), "{} neighbours, such as {:?}", poisoned.len(), poisoned.first());
    assert_eq!(network_state(node).unwrap(), state, "no address, no route, no router");
    let honest = honest_messages(&forger, addresses(&fixture, "test/pod-2"), gateway);
    honest.iter().for_each(|message| forger.send(message));
    forger.send(&spoofed_messages[0]);
    let later = count_to(&fixture, "test/pod-2", "forged_neighbour", forged + 1);
    assert_eq!(later, forged + 1, "only the last of these is forged");
}

#[test]
fn packets_with_a_foreign_source_are_dropped_and_counted() {
    let fixture = Fixture::of(&pods(3), |_, _| {});
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let seen = ["test/pod-0", "test/pod-1"].map(|name| PacketSocket::open(&fixture.site(name).namespace).unwrap());
    let from_others = [
        "10.244.1.10",
        "10.244.1.1",
        "172.18.0.2",
        "192.0.2.1",
        "127.0.0.1",
        "169.254.0.1",
        "0.0.0.0",
        "fd00:10:244:1::10",
        "fd00:172:18::2",
        "2001:db8::1",
        "::1",
        "fe80::1",
        "::",
    ];
    for source in from_others {
        let source: IpAddr = source.parse().unwrap();
        let to = (fixture.site("test/pod-1").address(source.is_ipv6()).unwrap(), MARK);
        forger.send(&forger.udp((source, 1000), to, b"spoofed"));
        forger.send(&forger.tcp((source, 1000), to, |tcp| tcp.syn = true));
    }
    for wire in seen {
        let arrived = wire.received(Duration::from_millis(200)).unwrap();
        let marked = arrived.iter().filter(|frame| frame.windows(2).any(|bytes| bytes == MARK.to_be_bytes()));
        assert_eq!(marked.count(), 0, "{arrived:02x?}");
    }
    // The pod's own stack may report its multicast groups at any time (RFC 3810), from a link-local address: so the
    // count is a lower bound.
    let causes = ["spoofed_source", "malformed"];
    let counted = sum_to(&fixture, "test/pod-2", &causes, forger.sent);
    assert!(counted >= forger.sent, "{counted} of {}", forger.sent);
}

#[test]
fn a_foreign_source_mac_does_not_affect_forwarding() {
    let fixture = Fixture::of(&pods(3), |_, _| {});
    reach_all(&fixture);
    let before = fixture.cluster.node.netlink().neighbours().unwrap();
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let honest = forger.mac;
    let seen = PacketSocket::open(&fixture.site("test/pod-1").namespace).unwrap();
    let victim = fixture.site("test/pod-1").namespace.netlink().unwrap().mac("eth0").unwrap();
    let own = addresses(&fixture, "test/pod-2");
    for mac in [NOBODY, victim, forger.gateway] {
        forger.mac = mac;
        forger.send(&forger.udp((own[0], 1000), (addresses(&fixture, "test/pod-1")[0], MARK), b"hello"));
    }
    let (mut arrived, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(30));
    let is_marked = |frame: &&Vec<u8>| frame.windows(2).any(|two| two == MARK.to_be_bytes());
    while arrived.iter().filter(is_marked).count() < 3 && Instant::now() < deadline {
        arrived.extend(seen.received(Duration::from_millis(50)).unwrap());
    }
    let marked: Vec<_> = arrived.iter().filter(is_marked).collect();
    assert_eq!(marked.len(), 3, "what the pod may send, it may: its MAC ends at the node");
    let host_side = fixture.cluster.node.pod("test/pod-1").unwrap().interface();
    let gateway = fixture.cluster.node.netlink().mac(host_side).unwrap();
    assert!(marked.iter().all(|frame| frame[..6] == victim && frame[6..12] == gateway), "{marked:02x?}");
    assert_eq!(fixture.cluster.node.netlink().neighbours().unwrap().difference(&before).count(), 0);
    forger.mac = honest;
    reach_all(&fixture);
}

#[test]
fn dhcp_from_a_pod_reaches_no_other_pod() {
    /// More than the pod's own stack sends to its link.
    const EACH: u64 = 50;
    let fixture = Fixture::of(&pods(3), |_, _| {});
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let seen = ["test/pod-0", "test/pod-1"].map(|name| PacketSocket::open(&fixture.site(name).namespace).unwrap());
    let node = fixture.cluster.node.namespace().udp("0.0.0.0:67").unwrap();
    node.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let [v4, v6] = addresses(&fixture, "test/pod-2");
    let (any, every): (IpAddr, IpAddr) = ("0.0.0.0".parse().unwrap(), "255.255.255.255".parse().unwrap());
    let (link_local, servers): (IpAddr, IpAddr) = ("fe80::2".parse().unwrap(), "ff02::1:2".parse().unwrap());
    // Discover and offer to broadcast; solicit and advertise to multicast.
    for (from, to, cause) in [
        ((any, 68), (every, 67), Some("spoofed_source")),
        // To a group a pod may send: it is for the node.
        ((v4, 67), (every, 68), None),
        ((link_local, 546), (servers, 547), Some("spoofed_source")),
        ((v6, 547), (servers, 546), None),
    ] {
        let mut frame = forger.udp(from, to, b"dhcp");
        frame[..6].copy_from_slice(&BROADCAST);
        let Some(cause) = cause else {
            (0..EACH).for_each(|_| forger.send(&frame));
            continue;
        };
        let before = count(&fixture, "test/pod-2", cause);
        (0..EACH).for_each(|_| forger.send(&frame));
        let counted = count_to(&fixture, "test/pod-2", cause, before + EACH);
        assert!(counted >= before + EACH, "{from:?} to {to:?}: {counted} after {before}");
    }
    assert!(node.recv_from(&mut [0; 64]).is_err(), "no request that is forged, not even at the node");
    for wire in seen {
        let arrived = wire.received(Duration::from_millis(100)).unwrap();
        assert!(!arrived.iter().any(|frame| frame.ends_with(b"dhcp")), "{arrived:02x?}");
    }
    let to_node = fixture.target("node", false);
    let outcome = probe::run_one(fixture.site("test/pod-2"), to_node, Protocol::Icmp, RetryPolicy::default()).unwrap();
    assert_eq!(outcome, ProbeOutcome::Reached, "the pod itself has its network");
}

//! No other sender can use a local pod's address: neither from outside, nor through a tunnel, nor a process on the
//! node.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use penstock_bench::load::PacketSocket;
use penstock_bench::probe::{ProbeOutcome, Protocol};
use penstock_bench::testbed::Namespace;

use socket2::{Domain, Socket, Type};

use crate::fixture;
use crate::services::service::{BackendPath, OWN, ServiceFixture, WEB, address, run, service};

/// A pod of this node according to the API, with the label that `pod-1` admits, but without an interface.
const GHOST: [&str; 2] = ["10.244.1.99", "fd00:10:244:1::99"];
const TUNNEL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

/// An IP packet with a UDP datagram to `pod-1`.
fn packet(from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut packet = Vec::new();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => panic!("{from} and {to} are of two families"),
    }
    .udp(1234, OWN)
    .write(&mut packet, b"in another's name")
    .unwrap();
    packet
}

fn framed(to: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&to[..], &[2, 0, 0, 0, 0, 9], &kind, packet].concat()
}

/// VXLAN (RFC 7348), network 9, from the machine outside to the node.
fn wrapped(setup: &ServiceFixture, to: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let inner = [&[8, 0, 0, 0, 0, 0, 9, 0][..], &framed(TUNNEL_MAC, packet)].concat();
    let [from, node] = [setup.outside.addresses()[0], address("198.51.100.1")];
    let (IpAddr::V4(from), IpAddr::V4(node)) = (from, node) else { panic!("IPv4 comes first") };
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], to).ipv4(from.octets(), node.octets(), 64);
    builder.udp(5000, 4789).write(&mut frame, &inner).unwrap();
    frame
}

/// Sends a raw IP packet as a process of the node.
fn send_from_a_process(node: &Namespace, to: IpAddr, packet: &[u8]) {
    let domain = if to.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    node.run(|| {
        let socket = Socket::new(domain, Type::RAW, Some(socket2::Protocol::from(libc::IPPROTO_RAW))).unwrap();
        socket.send_to(packet, &SocketAddr::new(to, 0).into()).unwrap();
    });
}

/// Packets dropped for their source address, by any program or worker.
fn spoofed(setup: &ServiceFixture) -> u64 {
    // A worker's drops at a pod's port are of what the pod sent.
    let count = |port: &penstock_admin::types::PortStatus| {
        let by_worker = (port.kind != "pod").then_some(&port.drops);
        by_worker.into_iter().chain([&port.outcomes]).filter_map(|by| by.get("spoofed_source")).sum::<u64>()
    };
    setup.fixture.status().ports.iter().map(count).sum()
}

fn setup() -> ServiceFixture {
    ServiceFixture::with(BackendPath::Here, |cluster, config| {
        let ghost = fixture::pod("ghost", GHOST[0], GHOST[1]).replace("app: ghost", "app: pod-0");
        std::fs::write(config.manifests.join("ghost.yaml"), ghost.trim_start_matches("---\n")).unwrap();
        let node = cluster.node.namespace();
        let add = "link add vxlan9 address 02:00:00:00:00:77 type vxlan id 9 dstport 4789 local 198.51.100.1 dev eth1 nolearning";
        run(node, "ip", &add.split(' ').collect::<Vec<_>>(), "");
        run(node, "ip", &["link", "set", "vxlan9", "up"], "");
    })
}

#[test]
fn packets_past_the_workers_with_a_pods_source_are_dropped() {
    let mut setup = setup();
    let node = setup.fixture.cluster.node.namespace().clone();
    let to_node = node.netlink().unwrap().mac("eth1").unwrap();
    let wire = PacketSocket::open(setup.outside.namespace()).unwrap();
    for restarted in [false, true] {
        if restarted {
            setup.restart();
        }
        let before = spoofed(&setup);
        let mut sent = 0;
        let mut sockets = Vec::new();
        for v6 in [false, true] {
            let victim = setup.fixture.site("test/pod-1").address(v6).unwrap();
            let here = SocketAddr::new(victim, OWN);
            let socket = setup.backend.namespace.udp(here).unwrap();
            for name in [setup.fixture.site("test/pod-0").address(v6).unwrap(), address(GHOST[usize::from(v6)])] {
                let packet = packet(name, victim);
                wire.send(&framed(to_node, &packet)).unwrap();
                wire.send(&wrapped(&setup, to_node, &packet)).unwrap();
                send_from_a_process(&node, victim, &packet);
                sent += 3;
            }
            sockets.push(socket);
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while spoofed(&setup) < before + sent && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let what = format!("restarted: {restarted}");
        for socket in sockets {
            socket.set_nonblocking(true).unwrap();
            let mut bytes = [0; 64];
            let got = socket.recv_from(&mut bytes).map(|(_, from)| from);
            assert!(got.is_err(), "{what}: from {got:?}\n{}", setup.logs());
        }
        assert_eq!(spoofed(&setup) - before, sent, "{what}\n{}", setup.logs());
        for (v6, protocol) in [(false, Protocol::Tcp(WEB)), (true, Protocol::Udp(WEB))] {
            let outcome = setup.probe("test/pod-0", v6, protocol);
            assert_eq!(outcome, ProbeOutcome::Reached, "what the node translated passes, {what}\n{}", setup.logs());
        }
    }
}

#[test]
fn outside_hosts_cannot_answer_for_a_service_backend() {
    let setup = setup();
    let to_node = setup.fixture.cluster.node.netlink().mac("eth1").unwrap();
    let wire = PacketSocket::open(setup.outside.namespace()).unwrap();
    for v6 in [false, true] {
        let (client, backend) = (setup.fixture.site("test/pod-0"), setup.backend.address(v6).unwrap());
        let server = setup.backend.namespace.udp(SocketAddr::new(backend, OWN)).unwrap();
        let own = SocketAddr::new(client.address(v6).unwrap(), 1234);
        let asking = client.namespace.udp(own).unwrap();
        for socket in [&server, &asking] {
            socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        }
        let mut bytes = [0; 64];
        let asked = (0..10).find_map(|_| {
            asking.send_to(b"question", SocketAddr::new(service(v6), OWN)).unwrap();
            server.recv_from(&mut bytes).ok()
        });
        let (_, from) = asked.unwrap_or_else(|| panic!("{}", setup.logs()));
        let before = spoofed(&setup);
        let mut forged = packet(backend, own.ip());
        // Swapping the ports leaves the checksum valid; IPv4 works without it.
        let udp = if v6 { 40 } else { 20 };
        forged[udp..udp + 4].copy_from_slice(&[OWN.to_be_bytes(), 1234_u16.to_be_bytes()].concat());
        wire.send(&framed(to_node, &forged)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while spoofed(&setup) == before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(spoofed(&setup) > before, "v6: {v6}\n{}", setup.logs());
        let answered = (0..10).find_map(|_| {
            server.send_to(b"answer", from).unwrap();
            asking.recv_from(&mut bytes).ok()
        });
        let (length, answers) = answered.unwrap_or_else(|| panic!("{}", setup.logs()));
        assert_eq!((&bytes[..length], answers.ip()), (&b"answer"[..], service(v6)), "the backend itself");
    }
}

//! A pod cannot evade policy with encapsulation that the node removes.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use etherparse::{IpNumber, PacketBuilder};
use penstock_bench::cluster::Cluster;
use penstock_bench::testbed::{DaemonConfig, Namespace, Outside};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::{Forger, count_to};
use crate::services::service::{OWN, address, run};

/// `pod-1` admits a network elsewhere; `pod-2` may send nothing.
const ELSEWHERE: [&str; 2] = ["10.244.9.9", "fd00:10:244:9::9"];
const INGRESS: &str =
    "  ingress: [{from: [{ipBlock: {cidr: 10.244.9.0/24}}, {ipBlock: {cidr: \"fd00:10:244:9::/64\"}}]}]\n";
const OTHER_NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: other}, status: {addresses: [\
                          {type: InternalIP, address: 172.18.0.3}, {type: InternalIP, address: \"fd00:172:18::3\"}]}}\n";
const TUNNEL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

fn tunnel(node: &Namespace, name: &str, port: u16) {
    let add = format!(
        "link add {name} address 02:00:00:00:00:77 type vxlan id 1 dstport {port} local 198.51.100.1 dev eth1 nolearning"
    );
    run(node, "ip", &add.split(' ').collect::<Vec<_>>(), "");
    run(node, "ip", &["link", "set", name, "up"], "");
}

fn fixture(settings: &str) -> (Fixture, Outside) {
    fixture_with(|_, config| config.sections += settings)
}

/// `more` runs before the daemon starts.
fn fixture_with(more: impl FnOnce(&Cluster, &mut DaemonConfig)) -> (Fixture, Outside) {
    let yaml = pods(3) + &policy("served", "pod-1", INGRESS) + &policy("shut", "pod-2", "  policyTypes: [Egress]\n");
    let mut outside = None;
    let fixture = Fixture::of(&yaml, |cluster, config: &mut DaemonConfig| {
        std::fs::write(config.manifests.join("other.yaml"), OTHER_NODE).unwrap();
        outside = Some(cluster.node.add_outside("outside").unwrap());
        tunnel(cluster.node.namespace(), "flannel.1", 8472);
        more(cluster, config);
    });
    (fixture, outside.unwrap())
}

/// A datagram to `pod-1` from elsewhere, in VXLAN network 1.
fn vxlan(fixture: &Fixture, v6: bool) -> Vec<u8> {
    let to = fixture.site("test/pod-1").address(v6).unwrap();
    let mut inner = Vec::new();
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], TUNNEL_MAC);
    match (address(ELSEWHERE[usize::from(v6)]), to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        _ => unreachable!("both are of the family asked for"),
    }
    .udp(1234, OWN)
    .write(&mut inner, b"through the node's tunnel")
    .unwrap();
    [&[8, 0, 0, 0, 0, 0, 1, 0][..], &inner].concat()
}

/// Sockets that receive on `pod-1`'s port.
struct ReceiverSockets(Vec<UdpSocket>);

impl ReceiverSockets {
    fn open(fixture: &Fixture) -> Self {
        let site = fixture.site("test/pod-1");
        let open = |v6| {
            let socket = site.namespace.udp(SocketAddr::new(site.address(v6).unwrap(), OWN)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        Self([false, true].map(open).into())
    }

    fn heard(&self) -> usize {
        let mut bytes = [0; 64];
        self.0.iter().map(|socket| std::iter::from_fn(|| socket.recv(&mut bytes).ok()).count()).sum()
    }
}

/// A frame with this IP protocol.
fn of_protocol(forger: &Forger, from: IpAddr, to: IpAddr, protocol: u8) -> Vec<u8> {
    let mut frame = Vec::new();
    forger.ip(from, to).write(&mut frame, IpNumber(protocol), &[0; 40]).unwrap();
    frame
}

/// An IPv4 frame truncated to whole units of eight bytes and marked as a first fragment.
fn first_fragment(mut frame: Vec<u8>) -> Vec<u8> {
    let mut header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
    let payload = (frame.len() - 34) / 8 * 8;
    frame.truncate(34 + payload);
    (header.more_fragments, header.dont_fragment) = (true, false);
    header.set_payload_len(payload).unwrap();
    header.header_checksum = header.calc_header_checksum();
    header.write(&mut &mut frame[14..34]).unwrap();
    frame
}

/// An IPv6 frame with an empty destination-options header (RFC 8200 section 4.6) inserted before its payload.
fn behind_an_option(mut frame: Vec<u8>) -> Vec<u8> {
    let protocol = std::mem::replace(&mut frame[20], 60);
    frame.splice(54..54, [protocol, 0, 1, 4, 0, 0, 0, 0]);
    let length = u16::from_be_bytes([frame[18], frame[19]]) + 8;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame
}

#[test]
fn tunnel_packets_that_the_node_would_unpack_are_dropped() {
    let (fixture, _outside) = fixture("");
    let sockets = ReceiverSockets::open(&fixture);
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let nodes = [
        ["172.18.0.2", "fd00:172:18::2"],
        // The pods' gateway, the node's address on another interface, that network's broadcast address and anycast
        // address.
        ["10.244.1.1", "fd00:10:244:1::1"],
        ["198.51.100.1", "fd00:51:100::1"],
        ["198.51.100.255", "fd00:51:100::"],
        ["172.18.0.3", "fd00:172:18::3"],
    ];
    for (v6, node) in nodes.iter().flat_map(|node| [(false, node[0]), (true, node[1])]) {
        let (own, node) = (fixture.site("test/pod-2").address(v6).unwrap(), address(node));
        for port in [8472, 4789, 6081] {
            forger.send(&forger.udp((own, 5000), (node, port), &vxlan(&fixture, v6)));
        }
        for protocol in [4, 41, 47, 108, 115, 137] {
            forger.send(&of_protocol(&forger, own, node, protocol));
        }
        let datagram = forger.udp((own, 5000), (node, 8472), &vxlan(&fixture, v6));
        let hidden = if v6 { behind_an_option(datagram) } else { first_fragment(datagram) };
        forger.send(&hidden);
    }
    let counted = count_to(&fixture, "test/pod-2", "encapsulation", forger.sent);
    assert_eq!(counted, forger.sent, "{}", fixture.statistics().join("\n"));
    assert_eq!(sockets.heard(), 0, "nothing comes out of the tunnel");
}

/// The machine outside is a node, too, and these are networks of its pods and a pod there.
const OUTSIDE_NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: outside}, status: {addresses: [\
                            {type: InternalIP, address: 198.51.100.2}, {type: InternalIP, address: \"fd00:51:100::2\"}]}}\n";
const ITS_PODS: [[&str; 2]; 2] = [["10.244.2.0/24", "198.51.100.2"], ["fd00:10:244:2::/64", "fd00:51:100::2"]];
const ITS_POD: [&str; 2] = ["10.244.2.66", "fd00:10:244:2::66"];

#[test]
fn a_node_unwraps_no_tunnel_packet_of_another_nodes_pod() {
    let metrics = SocketAddr::from(([127, 0, 0, 1], 9469));
    let (fixture, outside) = fixture_with(|cluster, config| {
        config.metrics = Some(metrics);
        std::fs::write(config.manifests.join("outside.yaml"), OUTSIDE_NODE).unwrap();
        for [network, gateway] in ITS_PODS {
            run(cluster.node.namespace(), "ip", &["route", "add", network, "via", gateway], "");
        }
    });
    let sockets = ReceiverSockets::open(&fixture);
    let mut forger = Forger::outside(&fixture, &outside);
    // The other node's own packets come out of the tunnel.
    let deadline = Instant::now() + Duration::from_secs(30);
    let node = address("198.51.100.2");
    while sockets.heard() == 0 {
        assert!(Instant::now() < deadline, "nothing\n{}", fixture.statistics().join("\n"));
        forger.send(&forger.udp((node, 5000), (address("198.51.100.1"), 8472), &vxlan(&fixture, false)));
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut sent = 0;
    let mut send = |frame: &[u8]| {
        forger.send(frame);
        sent += 1;
    };
    let here =
        [["172.18.0.2", "fd00:172:18::2"], ["10.244.1.1", "fd00:10:244:1::1"], ["198.51.100.1", "fd00:51:100::1"]];
    let of_outside = Forger::outside(&fixture, &outside);
    for (v6, to) in here.iter().flat_map(|node| [(false, node[0]), (true, node[1])]) {
        let (from, to) = (address(ITS_POD[usize::from(v6)]), address(to));
        let datagram = of_outside.udp((from, 5000), (to, 8472), &vxlan(&fixture, v6));
        send(&datagram);
        send(&if v6 { behind_an_option(datagram) } else { first_fragment(datagram) });
        [4, 41, 47].into_iter().for_each(|protocol| send(&of_protocol(&of_outside, from, to, protocol)));
    }
    let refused = || {
        let page = fixture.http(metrics, "/metrics");
        let line = page.lines().find_map(|line| line.strip_prefix("penstock_tunnel_packets_refused_total "));
        line.expect("a counter").parse::<u64>().unwrap()
    };
    while refused() < sent {
        assert!(Instant::now() < deadline, "{} of {sent} refused", refused());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((refused(), sockets.heard()), (sent, 0), "something came out of the tunnel");
    // A tunnel between pods is their own matter, and so is what else the other node's pods send to this node.
    let site = fixture.site("test/pod-0");
    let to = site.address(false).unwrap();
    let pod = site.namespace.udp(SocketAddr::new(to, 8472)).unwrap();
    pod.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let from = address(ITS_POD[0]);
    let is_heard = (0..50).any(|_| {
        forger.send(&forger.udp((from, 5000), (to, 8472), b"to a pod"));
        pod.recv(&mut [0; 16]).is_ok()
    });
    assert!(is_heard, "{}", fixture.statistics().join("\n"));
    assert_eq!(refused(), sent);
}

#[test]
fn a_configured_tunnel_port_is_dropped_too() {
    let (fixture, _outside) = fixture("[encapsulation]\nports = [7777]\n");
    let mut forger = Forger::of(&fixture, "test/pod-2");
    for v6 in [false, true] {
        let own = fixture.site("test/pod-2").address(v6).unwrap();
        let node = fixture.site("node").address(v6).unwrap();
        forger.send(&forger.udp((own, 5000), (node, 7777), b"wrapped"));
    }
    let counted = count_to(&fixture, "test/pod-2", "encapsulation", forger.sent);
    assert_eq!(counted, forger.sent, "{}", fixture.statistics().join("\n"));
}

#[test]
fn a_tunnel_port_is_dropped_as_soon_as_its_interface_exists() {
    let (fixture, _outside) = fixture("");
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let own = fixture.site("test/pod-2").address(false).unwrap();
    tunnel(fixture.cluster.node.namespace(), "later", 5555);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        forger.send(&forger.udp((own, 5000), (address("172.18.0.2"), 5555), &vxlan(&fixture, false)));
        if crate::forger::count(&fixture, "test/pod-2", "encapsulation") > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "{}", fixture.daemon.log().lines().join("\n"));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_tunnel_to_the_node_passes_if_configured() {
    let (fixture, _outside) = fixture("[encapsulation]\nfrom_pods = \"allow\"\n");
    let sockets = ReceiverSockets::open(&fixture);
    let mut forger = Forger::of(&fixture, "test/pod-2");
    let own = fixture.site("test/pod-2").address(false).unwrap();
    // The ends of the tunnel have IPv4 addresses only.
    for inside_v6 in [false, true] {
        let deadline = Instant::now() + Duration::from_secs(30);
        while sockets.heard() == 0 {
            forger.send(&forger.udp((own, 5000), (address("172.18.0.2"), 8472), &vxlan(&fixture, inside_v6)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(Instant::now() < deadline, "{}", fixture.statistics().join("\n"));
        }
    }
    assert_eq!(crate::forger::count(&fixture, "test/pod-2", "encapsulation"), 0);
}

#[test]
fn a_tunnel_that_ends_in_a_pod_is_not_restricted() {
    let (fixture, _outside) = fixture("");
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-2"));
    for v6 in [false, true] {
        let there = SocketAddr::new(to.address(v6).unwrap(), 8472);
        let server = to.namespace.udp(there).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let here = SocketAddr::new(from.address(v6).unwrap(), 0);
        let client = from.namespace.udp(here).unwrap();
        let heard = (0..10).any(|_| {
            client.send_to(b"to a pod", there).unwrap();
            server.recv(&mut [0; 16]).is_ok()
        });
        assert!(heard, "v6: {v6}\n{}", fixture.statistics().join("\n"));
    }
}

//! Bridges that pods share with something else, as with a machine behind a physical port.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use penstock_bench::cluster::Cluster;
use penstock_bench::load::{PacketSocket, transfer};
use penstock_bench::testbed::Namespace;

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(30);
const PORT: u16 = 5353;
const BYTES: u64 = 5_000_000;

/// A machine that is a port of the pods' bridge.
struct Neighbour {
    namespace: Namespace,
    address: SocketAddr,
}

impl Neighbour {
    /// Three pods, of which `pod-1` takes in nothing and `pod-2` what `pod-0` sends, and the machine.
    fn beside_pods() -> (Fixture, Self) {
        let namespace = Namespace::new("neighbour").unwrap();
        let address = "10.244.1.200:4000".parse().unwrap();
        let of_a_pod = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
        let yaml =
            pods(3) + &policy("closed", "pod-1", "  policyTypes: [Ingress]\n") + &policy("one", "pod-2", of_a_pod);
        let fixture = Fixture::bridged(&yaml, |cluster, _| {
            let netlink = cluster.node.netlink();
            let index = netlink.add_veth("physical0", "eth0", &namespace, 1500).unwrap();
            netlink.set_controller(index, netlink.index("cni0").unwrap()).unwrap();
            let inside = namespace.netlink().unwrap();
            let eth0 = inside.index("eth0").unwrap();
            inside.set_up(eth0).unwrap();
            inside.add_address(eth0, "10.244.1.200/24".parse().unwrap()).unwrap();
        });
        fixture.daemon.log().wait_for_after(0, "pods=3 ", LIMIT).unwrap();
        (fixture, Self { namespace, address })
    }

    /// How often a pod receives what is sent to it. The next datagram says that no other comes behind the first.
    fn copies(&self, fixture: &Fixture, pod: &str, before: impl Fn()) -> usize {
        let site = fixture.site(pod);
        let to = SocketAddr::new(site.address(false).unwrap(), PORT);
        let receiver = site.namespace.udp(to).unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let sender = self.namespace.udp(self.address).unwrap();
        let deadline = Instant::now() + LIMIT;
        // The first one resolves the address.
        while receiver.recv(&mut [0; 9]).is_err() && Instant::now() < deadline {
            sender.send_to(b"first", to).unwrap();
        }
        while receiver.recv(&mut [0; 9]).is_ok() {}
        before();
        sender.send_to(b"once", to).unwrap();
        std::iter::from_fn(|| receiver.recv(&mut [0; 9]).ok()).count()
    }

    /// A pod gets nothing of what comes with this source, in one frame, with tags, or in fragments.
    fn assert_denied(&self, fixture: &Fixture, pod: &str, source: IpAddr, case: &str) {
        let site = fixture.site(pod);
        let to = SocketAddr::new(site.address(false).unwrap(), PORT);
        let receiver = site.namespace.udp(to).unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mac = |namespace: &Namespace| namespace.netlink().unwrap().mac("eth0").unwrap();
        let (IpAddr::V4(from), IpAddr::V4(at)) = (source, to.ip()) else { unreachable!("addresses of IPv4") };
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(mac(&self.namespace), mac(&site.namespace))
            .ipv4(from.octets(), at.octets(), 64)
            .udp(4001, PORT)
            .write(&mut frame, b"denied")
            .unwrap();
        // The pod's kernel takes any number of tags of VLAN 0 for none.
        let tagged = |tags: usize| [&frame[..12], &[0x81, 0, 0, 0].repeat(tags), &frame[12..]].concat();
        let frames = [frame.clone(), tagged(1), tagged(2), tagged(3)];
        let wire = PacketSocket::open(&self.namespace).unwrap();
        let sender = self.namespace.udp(self.address).unwrap();
        for _ in 0..3 {
            frames.iter().for_each(|frame| wire.send(frame).unwrap());
            if source == self.address.ip() {
                assert_eq!(sender.send_to(&[0; 3000], to).unwrap(), 3000);
            }
        }
        assert!(receiver.recv(&mut [0; 3000]).is_err(), "{case}: policy does not hold for {pod}");
    }
}

#[test]
fn what_a_bridge_floods_arrives_once() {
    let (fixture, neighbour) = Neighbour::beside_pods();
    let forget = || {
        let node = fixture.cluster.node.namespace();
        let arguments = ["link", "set", "cni0", "type", "bridge", "fdb_flush"];
        assert!(node.command("ip").args(arguments).status().unwrap().success());
    };
    for (state, copies) in [
        ("learnt", neighbour.copies(&fixture, "test/pod-0", || {})),
        ("flooded", neighbour.copies(&fixture, "test/pod-0", forget)),
    ] {
        assert_eq!(copies, 1, "{state}");
    }
}

#[test]
fn what_shares_a_pods_bridge_meets_policy_without_a_daemon_too() {
    let (mut fixture, neighbour) = Neighbour::beside_pods();
    let assert_holds = |fixture: &Fixture, when: &str| {
        neighbour.assert_denied(fixture, "test/pod-1", neighbour.address.ip(), when);
        let forged = fixture.site("test/pod-0").address(false).unwrap();
        neighbour.assert_denied(fixture, "test/pod-2", forged, &format!("{when}, as another pod"));
    };
    for when in ["at first", "after a restart"] {
        assert_eq!(neighbour.copies(&fixture, "test/pod-0", || {}), 1, "{when}: no policy is about it");
        assert!(fixture.status().not_enforced.is_empty(), "{:?}", fixture.status().not_enforced);
        assert_holds(&fixture, when);
        fixture.kill();
        assert_holds(&fixture, "without a daemon");
        fixture.restart();
    }
}

#[test]
fn a_connection_with_what_shares_a_pods_bridge_works() {
    let (fixture, neighbour) = Neighbour::beside_pods();
    let site = fixture.site("test/pod-0");
    let address = site.address(false).unwrap();
    let into = transfer(&neighbour.namespace, &site.namespace, address, BYTES).unwrap();
    let out = transfer(&site.namespace, &neighbour.namespace, neighbour.address.ip(), BYTES).unwrap();
    assert!(into.bytes >= BYTES && out.bytes >= BYTES, "{into:?} {out:?}");
}

/// A pod that the node cannot find: it was there before the first daemon, no plugin has left a result, and it answers nobody who looks for its
/// addresses. Its kernel has what others would tell it.
fn hide(cluster: &mut Cluster, pod: &str) {
    let silent = "nft 'table arp hidden { chain o { type filter hook output priority 0; drop; }; }'; \
                  nft 'table ip6 hidden { chain o { type filter hook output priority 0; icmpv6 type nd-neighbor-advert drop; }; }'";
    let namespace = cluster.node.pod(pod).unwrap().namespace();
    assert!(namespace.command("sh").args(["-ec", silent]).status().unwrap().success());
}

/// Whether datagrams arrive from one place on the bridge at another, whose MAC the sender knows.
fn arrives(from: &Place<'_>, to: &Place<'_>) -> bool {
    let mac = to.namespace.netlink().unwrap().mac(to.interface).unwrap();
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let neighbour = format!("ip neigh replace {} dev {} lladdr {mac} nud permanent", to.address, from.interface);
    assert!(from.namespace.command("sh").args(["-ec", &neighbour]).status().unwrap().success());
    let receiver = to.namespace.udp((to.address, PORT)).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let sender = from.namespace.udp((from.address, 0)).unwrap();
    (0..3).for_each(|_| drop(sender.send_to(b"hidden", (to.address, PORT))));
    receiver.recv(&mut [0; 9]).is_ok()
}

struct Place<'a> {
    namespace: &'a Namespace,
    interface: &'a str,
    address: IpAddr,
}

#[test]
fn a_pod_that_hides_on_a_bridge_is_closed_and_harms_no_other() {
    const HIDDEN: &str = "test/pod-1";
    let yaml = pods(3) + &policy("denied", "pod-1", "  policyTypes: [Ingress, Egress]\n");
    let fixture = Fixture::bridged(&yaml, |cluster, _| hide(cluster, HIDDEN));
    let place = |name, v6| {
        let site = fixture.site(name);
        Place { namespace: &site.namespace, interface: "eth0", address: site.address(v6).unwrap() }
    };
    let gateways = fixture.cluster.node.gateways();
    let node = |v6| Place {
        namespace: fixture.cluster.node.namespace(),
        interface: "cni0",
        address: if v6 { gateways.v6.into() } else { gateways.v4.into() },
    };
    let log = || fixture.daemon.log().lines().join("\n");
    assert!(log().contains("ready: 2 pods"), "the others are found before the daemon is ready:\n{}", log());
    for v6 in [false, true] {
        let (hidden, other) = (place(HIDDEN, v6), place("test/pod-0", v6));
        for (what, from, to) in
            [("to a pod", &hidden, &other), ("from a pod", &other, &hidden), ("to the node", &hidden, &node(v6))]
        {
            assert!(!arrives(from, to), "{what}, IPv6 {v6}:\n{}", log());
        }
        assert!(arrives(&place("test/pod-2", v6), &other), "no policy is about these, IPv6 {v6}");
    }
    assert!(fixture.status().not_enforced.is_empty(), "{:?}", fixture.status().not_enforced);
    // Without a policy on the bridge nobody need be found.
    for (yaml, is_open) in [(pods(3), true), (yaml, false)] {
        fixture.enforce(&yaml);
        let deadline = Instant::now() + LIMIT;
        while arrives(&place(HIDDEN, false), &node(false)) != is_open {
            assert!(Instant::now() < deadline, "open: {is_open}:\n{}", log());
        }
    }
}

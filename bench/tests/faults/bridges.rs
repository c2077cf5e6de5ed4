//! Bridges that pods share with something else, as with a machine behind a physical port.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::testbed::{Attach, Namespace};

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(30);
const PORT: u16 = 5353;

/// A machine that is a port of the pods' bridge.
struct Neighbour {
    namespace: Namespace,
    address: SocketAddr,
}

impl Neighbour {
    /// Two pods, of which `pod-1` takes in nothing, and the machine.
    fn beside_pods(attach: Attach) -> (Fixture, Self) {
        let namespace = Namespace::new("neighbour").unwrap();
        let address = "10.244.1.200:4000".parse().unwrap();
        let yaml = pods(3) + &policy("closed", "pod-1", "  policyTypes: [Ingress]\n");
        let fixture = Fixture::bridged(&yaml, |cluster, config| {
            config.attach = attach;
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
}

#[test]
fn what_a_bridge_floods_arrives_once() {
    for attach in [Attach::Tcx, Attach::Xdp] {
        let (fixture, neighbour) = Neighbour::beside_pods(attach);
        let forget = || {
            let node = fixture.cluster.node.namespace();
            let arguments = ["link", "set", "cni0", "type", "bridge", "fdb_flush"];
            assert!(node.command("ip").args(arguments).status().unwrap().success());
        };
        for (state, copies) in [
            ("learnt", neighbour.copies(&fixture, "test/pod-0", || {})),
            ("flooded", neighbour.copies(&fixture, "test/pod-0", forget)),
        ] {
            assert_eq!(copies, 1, "{attach:?}, {state}");
        }
    }
}

#[test]
fn what_shares_a_pods_bridge_meets_policy_or_is_named() {
    for attach in [Attach::Tcx, Attach::Xdp] {
        let (fixture, neighbour) = Neighbour::beside_pods(attach);
        assert_eq!(neighbour.copies(&fixture, "test/pod-0", || {}), 1, "{attach:?}: no policy is about it");
        let not_enforced = fixture.status().not_enforced;
        if attach == Attach::Xdp {
            assert_eq!(not_enforced.len(), 1, "{not_enforced:?}");
            assert_eq!(not_enforced[0].pod.as_deref(), Some("test/pod-1"));
            assert!(not_enforced[0].reason.contains("from physical0, which its bridge cni0"), "{not_enforced:?}");
            continue;
        }
        assert!(not_enforced.is_empty(), "{not_enforced:?}");
        let site = fixture.site("test/pod-1");
        let to = SocketAddr::new(site.address(false).unwrap(), PORT);
        let receiver = site.namespace.udp(to).unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let sender = neighbour.namespace.udp(neighbour.address).unwrap();
        (0..3).for_each(|_| assert_eq!(sender.send_to(b"denied", to).unwrap(), 6));
        assert!(receiver.recv(&mut [0; 9]).is_err(), "policy does not hold");
    }
}

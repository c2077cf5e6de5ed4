//! Discovery and the workers' pairs on a real kernel, in network namespaces.

mod netns;

use std::net::IpAddr;
use std::time::Duration;

use penstock_agent::discovery::{Netlink, WorkerPairError, WorkerPairs};

use netns::{Pod, ip, node_state, on_a_node_async};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn network_state_has_each_pods_veth_and_its_peers_mac() {
    on_a_node_async(async || {
        let pods = [Pod::new(5), Pod::new(6)];
        // Belongs to no pod: another link, a route with a gateway, a network route, a host route in another table.
        ip("link add uplink type bridge");
        ip("addr add 192.0.2.7/24 dev uplink");
        ip("link set uplink up");
        ip("route add 10.1.2.9/32 via 192.0.2.1");
        ip("route add 10.1.3.9/32 dev uplink table 77");
        let (netlink, _) = Netlink::open().unwrap();
        let netstate = netlink.network_state().await.unwrap();
        for pod in &pods {
            let link = netstate.link(&pod.veth).unwrap();
            assert!(link.veth && link.up);
            assert_eq!(link.mtu, 1500);
            let inside = ip(&format!("-n {} -o link show eth0", pod.namespace));
            assert!(inside.contains(&link.peer_mac.unwrap().to_string()), "{inside} {link:?}");
            let outside = ip(&format!("-o link show {}", pod.veth));
            assert!(outside.contains(&link.mac.to_string()), "{outside} {link:?}");
        }
        let mut found: Vec<_> = netstate.routes.iter().map(|route| route.destination).collect();
        found.sort();
        let mut expected: Vec<_> = pods.iter().flat_map(|pod| [address(&pod.v4), address(&pod.v6)]).collect();
        expected.sort();
        assert_eq!(found, expected);
        let uplink = netstate.link("uplink").unwrap();
        assert!(!uplink.veth && uplink.peer_mac.is_none());
        assert_eq!(netstate.addresses, ["10.1.1.1", "192.0.2.7", "fd00:1::1"].map(address));
    });
}

#[test]
fn a_new_pod_and_a_deleted_one_raise_events() {
    on_a_node_async(async || {
        let (_netlink, events) = Netlink::open().unwrap();
        let wait = async |what: &str| {
            tokio::time::timeout(Duration::from_secs(5), events.changed()).await.expect(what);
            // One change may raise several messages.
            while tokio::time::timeout(Duration::from_millis(200), events.changed()).await.is_ok() {}
        };
        let pod = Pod::new(5);
        wait("a pod came").await;
        drop(pod);
        wait("a pod went").await;
    });
}

#[test]
fn workers_pairs_leave_the_node_as_it_was() {
    on_a_node_async(async || {
        let before = node_state();
        let (netlink, _) = Netlink::open().unwrap();
        let pairs = WorkerPairs::create(&netlink, 2, 1500).await.unwrap();
        assert_eq!(
            pairs.pairs().iter().map(|pair| pair.node.name.as_str()).collect::<Vec<_>>(),
            ["penstock-w0", "penstock-w1"]
        );
        assert!(pairs.pairs().iter().all(|pair| pair.node.up && pair.worker.up && pair.worker.mtu == 1500));
        // As if killed: the next one removes what is left.
        drop(pairs);
        assert_ne!(node_state(), before);
        let pairs = WorkerPairs::create(&netlink, 1, 1500).await.unwrap();
        assert!(netlink.network_state().await.unwrap().link("penstock-w1").is_none());
        pairs.remove().await.unwrap();
        assert_eq!(node_state(), before);
    });
}

#[test]
fn a_second_daemon_or_a_taken_name_changes_nothing() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open().unwrap();
        let pairs = WorkerPairs::create(&netlink, 1, 1500).await.unwrap();
        let during = node_state();
        let error = WorkerPairs::create(&netlink, 1, 1500).await.unwrap_err();
        assert!(matches!(error, WorkerPairError::Running), "{error}");
        assert_eq!(node_state(), during);
        pairs.remove().await.unwrap();

        ip("link add penstock-x1 type bridge");
        let before = node_state();
        // Of two pairs the second cannot be made; and the kernel rejects this MTU.
        for (workers, mtu) in [(2, 1500), (1, 70_000)] {
            let error = WorkerPairs::create(&netlink, workers, mtu).await.unwrap_err();
            assert!(matches!(error, WorkerPairError::Netlink(_)), "{error}");
            assert_eq!(node_state(), before);
        }
    });
}

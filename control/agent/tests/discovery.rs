//! Discovery and the host veth on a real kernel, in network namespaces.

mod netns;

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

use penstock_agent::config;
use penstock_agent::discovery::{
    HostVeth, HostVethError, Lifetime, Netlink, PodRoute, Sysctl, Sysctls, keep_answering_arp,
};

use netns::{GATEWAYS, Pod, ip, node_state, on_a_node, on_a_node_async};

fn names() -> config::HostVeth {
    config::HostVeth::default()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Routes to all addresses of these pods.
async fn routes(netlink: &Netlink, pods: &[&Pod]) -> BTreeMap<IpAddr, PodRoute> {
    let netstate = netlink.network_state().await.unwrap();
    let route = |pod: &&Pod| {
        let link = netstate.link(&pod.veth).unwrap();
        [&pod.v4, &pod.v6]
            .map(|text| (address(text), PodRoute { link: link.index, mtu: link.mtu, enters_by: link.index }))
    };
    pods.iter().flat_map(route).collect()
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
        let (netlink, _) = Netlink::open(names().table).unwrap();
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
        let (_netlink, events) = Netlink::open(names().table).unwrap();
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
fn routes_to_pods_keep_the_source_address_and_are_removed() {
    on_a_node_async(async || {
        let pods = [Pod::new(5), Pod::new(6)];
        let before = node_state();
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        assert_eq!(port.node().name, "penstock-host");
        assert_eq!(port.workers().mtu, 1500);
        let main = ip("route show");
        let sources = ["10.1.1.5", "fd00:1::5"].map(|to| ip(&format!("route get {to}")));
        assert!(sources.iter().zip(["src 10.1.1.1 ", "src fd00:1::1 "]).all(|(s, src)| s.contains(src)), "{sources:?}");

        let both = routes(&netlink, &[&pods[0], &pods[1]]).await;
        assert!(port.set_routes(&both).await.unwrap().is_empty());
        for to in both.keys() {
            let way = ip(&format!("route get {to}"));
            assert!(
                way.contains("dev penstock-host") && way.contains(&format!("src {}", GATEWAYS[to.is_ipv6() as usize])),
                "{way}"
            );
        }
        assert_eq!(ip("route show"), main, "the main table is the CNI plugin's");
        // Setting the same routes again changes nothing.
        let table = ip("-d route show table 11200");
        assert!(port.set_routes(&both).await.unwrap().is_empty());
        assert_eq!(ip("-d route show table 11200"), table);

        assert!(port.set_routes(&routes(&netlink, &[&pods[1]]).await).await.unwrap().is_empty());
        assert!(ip("route get 10.1.1.5").contains("dev veth5"));
        assert!(ip("route get fd00:1::5").contains("dev veth5"));
        assert!(ip("route get 10.1.1.6").contains("dev penstock-host"));

        port.remove().await.unwrap();
        assert_eq!(node_state(), before);
    });
}

#[test]
fn a_link_local_gateway_is_supported() {
    on_a_node_async(async || {
        let pod = Pod::new(5);
        ip("addr del fd00:1::1/128 dev veth5");
        ip("addr add fe80::1/64 dev veth5 nodad");
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        let rejected = port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
        assert!(rejected.is_empty(), "{rejected:?}");
        assert!(ip("-6 route show table 11200").contains("fd00:1::5 dev penstock-host"));
        port.remove().await.unwrap();
    });
}

#[test]
fn a_pods_smaller_mtu_is_in_its_route() {
    on_a_node_async(async || {
        let pod = Pod::new(5);
        ip("link set veth5 mtu 1400");
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        assert!(port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap().is_empty());
        for to in [&pod.v4, &pod.v6] {
            assert!(ip(&format!("route get {to}")).contains("mtu 1400"));
        }
        port.remove().await.unwrap();
    });
}

#[test]
fn the_kernel_sends_nothing_on_the_host_veth_by_itself() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        assert_eq!(ip("-o addr show dev penstock-host"), "");
        assert_eq!(ip("-o addr show dev penstock0"), "");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let sent = ip("-s -o link show penstock-host");
        let sent = sent.split("TX:").nth(1).unwrap().split_whitespace();
        let packets: u64 = sent.skip_while(|word| word.parse::<u64>().is_err()).nth(1).unwrap().parse().unwrap();
        // The kernel may send an MLD report or two at "up"; there is no duplicate address detection and no
        // solicitation.
        assert!(packets <= 4, "{packets}");
        port.remove().await.unwrap();
    });
}

#[test]
fn a_killed_daemons_host_veth_is_taken_over_if_complete() {
    // An event between two daemons; the lifetime of the next daemon's pair; the route to the pod after its start.
    let cases = [
        ("", Lifetime::Node, "dev penstock-host"),
        ("link set penstock0 down", Lifetime::Node, "dev veth5"),
        ("rule del preference 90", Lifetime::Node, "dev veth5"),
        ("", Lifetime::Daemon, "dev veth5"),
    ];
    for (meanwhile, lifetime, way) in cases {
        on_a_node_async(async || {
            let pod = Pod::new(5);
            let before = node_state();
            let (netlink, _) = Netlink::open(names().table).unwrap();
            let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
            assert!(!port.found_leftovers());
            port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
            drop(port);
            assert_ne!(node_state(), before, "dropped without being removed, as if killed");
            if !meanwhile.is_empty() {
                ip(meanwhile);
            }
            let port = HostVeth::create(&netlink, &names(), 1500, lifetime).await.unwrap();
            assert!(port.found_leftovers());
            assert!(ip("route get 10.1.1.5").contains(way), "{meanwhile}, {lifetime:?}");
            assert_eq!(ip("rule").matches("lookup 11200").count(), 1);
            port.remove().await.unwrap();
            assert_eq!(node_state(), before);
        });
    }
}

#[test]
fn a_host_veth_with_an_earlier_versions_alias_is_taken_over() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open(names().table).unwrap();
        drop(HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap());
        let index = ip("-o link show penstock-host").split(':').next().unwrap().to_owned();
        for end in ["penstock-host", "penstock0"] {
            let alias = ["link", "set", "dev", end, "alias", "penstock host port"];
            assert!(Command::new("ip").args(alias).status().unwrap().success());
        }
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        let shown = ip("-d -o link show penstock-host");
        assert!(shown.starts_with(&format!("{index}:")) && shown.contains("alias penstock host veth"), "{shown}");
        port.remove().await.unwrap();
    });
}

#[test]
fn a_second_daemon_or_a_taken_name_changes_nothing() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        let during = node_state();
        let error = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap_err();
        assert!(matches!(error, HostVethError::Running), "{error}");
        assert_eq!(node_state(), during);
        port.remove().await.unwrap();

        ip("link add penstock0 type bridge");
        let before = node_state();
        let error = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap_err();
        assert!(matches!(&error, HostVethError::NameTaken(name) if name == "penstock0"), "{error}");
        assert_eq!(node_state(), before);
    });
}

#[test]
fn a_failed_start_leaves_nothing() {
    on_a_node_async(async || {
        let before = node_state();
        let (netlink, _) = Netlink::open(names().table).unwrap();
        // The kernel rejects this MTU after the name check has passed.
        let error = HostVeth::create(&netlink, &names(), 70_000, Lifetime::Node).await.unwrap_err();
        assert!(matches!(error, HostVethError::Netlink(_)), "{error}");
        assert_eq!(node_state(), before);
    });
}

/// The pod's neighbour entry for its gateway after it has sent a packet.
fn gateway_seen_by(pod: &Pod) -> String {
    ip(&format!("-n {} neigh flush dev eth0", pod.namespace));
    pod.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", "10.1.1.1:9")).unwrap();
    let mut seen = String::new();
    for _ in 0..50 {
        seen = ip(&format!("-n {} neigh show 10.1.1.1 dev eth0", pod.namespace));
        if seen.contains("lladdr") {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    seen
}

#[test]
fn arp_is_still_answered_on_a_pods_veth_with_strict_rp_filter() {
    for place in ["all", "veth5"] {
        on_a_node_async(async || {
            let pod = Pod::new(5);
            Sysctl::v4(place, "rp_filter").write(1).unwrap();
            let (netlink, _) = Netlink::open(names().table).unwrap();
            let port = HostVeth::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
            port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
            let seen = gateway_seen_by(&pod);
            assert!(!seen.contains("lladdr"), "without the setting it is not answered: {seen}");

            let mut settings = Sysctls::default();
            keep_answering_arp(&mut settings, "veth5", false).unwrap();
            assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some(2));
            let seen = gateway_seen_by(&pod);
            assert!(seen.contains("lladdr"), "{place}: {seen}");
            drop(settings);
            assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some((place == "veth5") as i64), "restored");
            port.remove().await.unwrap();
        });
    }
}

#[test]
fn settings_that_need_no_change_are_not_written() {
    on_a_node(|| {
        let _pod = Pod::new(5);
        let mut settings = Sysctls::default();
        keep_answering_arp(&mut settings, "veth5", false).unwrap();
        assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some(0));
        drop(settings);
        // An interface that is gone is no error.
        let mut settings = Sysctls::default();
        Sysctl::v4("veth5", "rp_filter").write(1).unwrap();
        keep_answering_arp(&mut settings, "veth5", false).unwrap();
        ip("link del veth5");
        drop(settings);
    });
}

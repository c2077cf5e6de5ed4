//! Discovery and the host port on a real kernel, in network namespaces.

mod netns;

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use penstock_agent::config;
use penstock_agent::discovery::{
    HostPort, HostPortError, Lifetime, Netlink, PodRoute, Sysctl, Sysctls, keep_answering_arp,
};

use netns::{GATEWAYS, Pod, ip, node_state, on_a_node, on_a_node_async};

fn names() -> config::HostPort {
    config::HostPort::default()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Routes to all addresses of these pods.
async fn routes(netlink: &Netlink, pods: &[&Pod]) -> BTreeMap<IpAddr, PodRoute> {
    let facts = netlink.facts().await.unwrap();
    let route = |pod: &&Pod| {
        let link = facts.link(&pod.veth).unwrap();
        [&pod.v4, &pod.v6].map(|text| (address(text), PodRoute { link: link.index, mtu: link.mtu }))
    };
    pods.iter().flat_map(route).collect()
}

#[test]
fn facts_tell_each_pods_veth_and_the_mac_of_its_other_end() {
    on_a_node_async(async || {
        let pods = [Pod::new(5), Pod::new(6)];
        // What is no pod's: another link, a route by a gateway, a network route, a host route in another table.
        ip("link add uplink type bridge");
        ip("addr add 192.0.2.7/24 dev uplink");
        ip("link set uplink up");
        ip("route add 10.1.2.9/32 via 192.0.2.1");
        ip("route add 10.1.3.9/32 dev uplink table 77");
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let facts = netlink.facts().await.unwrap();
        for pod in &pods {
            let link = facts.link(&pod.veth).unwrap();
            assert!(link.veth && link.up);
            assert_eq!(link.mtu, 1500);
            let inside = ip(&format!("-n {} -o link show eth0", pod.namespace));
            assert!(inside.contains(&link.peer_mac.unwrap().to_string()), "{inside} {link:?}");
            let outside = ip(&format!("-o link show {}", pod.veth));
            assert!(outside.contains(&link.mac.to_string()), "{outside} {link:?}");
        }
        let mut found: Vec<_> = facts.routes.iter().map(|route| route.destination).collect();
        found.sort();
        let mut expected: Vec<_> = pods.iter().flat_map(|pod| [address(&pod.v4), address(&pod.v6)]).collect();
        expected.sort();
        assert_eq!(found, expected);
        let uplink = facts.link("uplink").unwrap();
        assert!(!uplink.veth && uplink.peer_mac.is_none());
        assert_eq!(facts.addresses, ["10.1.1.1", "192.0.2.7", "fd00:1::1"].map(address));
    });
}

#[test]
fn a_new_pod_and_one_that_goes_are_events() {
    on_a_node_async(async || {
        let (_netlink, events) = Netlink::open(names().table).unwrap();
        let wait = async |what: &str| {
            tokio::time::timeout(Duration::from_secs(5), events.changed()).await.expect(what);
            // All that belongs to one change may come in several messages.
            while tokio::time::timeout(Duration::from_millis(200), events.changed()).await.is_ok() {}
        };
        let pod = Pod::new(5);
        wait("a pod came").await;
        drop(pod);
        wait("a pod went").await;
    });
}

#[test]
fn the_nodes_routes_to_pods_lead_into_the_pair_with_the_same_source_address_and_all_is_put_back() {
    on_a_node_async(async || {
        let pods = [Pod::new(5), Pod::new(6)];
        let before = node_state();
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
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
        // The same again changes nothing, and a source address that comes later is taken up.
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
fn a_gateway_that_is_link_local_is_no_hindrance() {
    on_a_node_async(async || {
        let pod = Pod::new(5);
        ip("addr del fd00:1::1/128 dev veth5");
        ip("addr add fe80::1/64 dev veth5 nodad");
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        let refused = port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
        assert!(refused.is_empty(), "{refused:?}");
        assert!(ip("-6 route show table 11200").contains("fd00:1::5 dev penstock-host"));
        port.remove().await.unwrap();
    });
}

#[test]
fn a_pods_smaller_mtu_is_told_by_its_route() {
    on_a_node_async(async || {
        let pod = Pod::new(5);
        ip("link set veth5 mtu 1400");
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        assert!(port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap().is_empty());
        for to in [&pod.v4, &pod.v6] {
            assert!(ip(&format!("route get {to}")).contains("mtu 1400"));
        }
        port.remove().await.unwrap();
    });
}

#[test]
fn nothing_is_ever_said_on_the_pair() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        assert_eq!(ip("-o addr show dev penstock-host"), "");
        assert_eq!(ip("-o addr show dev penstock0"), "");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let sent = ip("-s -o link show penstock-host");
        let sent = sent.split("TX:").nth(1).unwrap().split_whitespace();
        let packets: u64 = sent.skip_while(|word| word.parse::<u64>().is_err()).nth(1).unwrap().parse().unwrap();
        // An MLD report or two are the kernel's at "up"; there is no duplicate address detection and no solicitation.
        assert!(packets <= 4, "{packets}");
        port.remove().await.unwrap();
    });
}

#[test]
fn what_a_killed_daemon_left_is_taken_over_where_it_is_whole_and_cleared_where_not() {
    // What happens meanwhile; how long the next daemon's pair is to live; the way to the pod once it is there.
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
            let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
            assert!(!port.follows());
            port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
            drop(port);
            assert_ne!(node_state(), before, "dropped without being removed, as if killed");
            if !meanwhile.is_empty() {
                ip(meanwhile);
            }
            let port = HostPort::create(&netlink, &names(), 1500, lifetime).await.unwrap();
            assert!(port.follows());
            assert!(ip("route get 10.1.1.5").contains(way), "{meanwhile}, {lifetime:?}");
            assert_eq!(ip("rule").matches("lookup 11200").count(), 1);
            port.remove().await.unwrap();
            assert_eq!(node_state(), before);
        });
    }
}

#[test]
fn a_second_daemon_and_a_name_that_is_taken_are_refused_and_change_nothing() {
    on_a_node_async(async || {
        let (netlink, _) = Netlink::open(names().table).unwrap();
        let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
        let during = node_state();
        let told = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap_err();
        assert!(matches!(told, HostPortError::Running), "{told}");
        assert_eq!(node_state(), during);
        port.remove().await.unwrap();

        ip("link add penstock0 type bridge");
        let before = node_state();
        let told = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap_err();
        assert!(matches!(&told, HostPortError::NameTaken(name) if name == "penstock0"), "{told}");
        assert_eq!(node_state(), before);
    });
}

#[test]
fn half_a_start_leaves_nothing() {
    on_a_node_async(async || {
        let before = node_state();
        let (netlink, _) = Netlink::open(names().table).unwrap();
        // The kernel refuses this MTU after the names were found free.
        let told = HostPort::create(&netlink, &names(), 70_000, Lifetime::Node).await.unwrap_err();
        assert!(matches!(told, HostPortError::Netlink(_)), "{told}");
        assert_eq!(node_state(), before);
    });
}

/// What the pod knows of its gateway's Ethernet address after it has asked.
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
fn arp_is_still_answered_on_a_pods_veth_under_strict_reverse_path_filtering() {
    for place in ["all", "veth5"] {
        on_a_node_async(async || {
            let pod = Pod::new(5);
            Sysctl::v4(place, "rp_filter").write(1).unwrap();
            let (netlink, _) = Netlink::open(names().table).unwrap();
            let port = HostPort::create(&netlink, &names(), 1500, Lifetime::Node).await.unwrap();
            port.set_routes(&routes(&netlink, &[&pod]).await).await.unwrap();
            let seen = gateway_seen_by(&pod);
            assert!(!seen.contains("lladdr"), "without the setting it is not answered: {seen}");

            let mut settings = Sysctls::default();
            keep_answering_arp(&mut settings, "veth5", false).unwrap();
            assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some(2));
            let seen = gateway_seen_by(&pod);
            assert!(seen.contains("lladdr"), "{place}: {seen}");
            drop(settings);
            assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some((place == "veth5") as i64), "put back");
            port.remove().await.unwrap();
        });
    }
}

#[test]
fn settings_that_need_no_change_are_left_alone() {
    on_a_node(|| {
        let _pod = Pod::new(5);
        let mut settings = Sysctls::default();
        keep_answering_arp(&mut settings, "veth5", false).unwrap();
        assert_eq!(Sysctl::v4("veth5", "rp_filter").read(), Some(0));
        drop(settings);
        // An interface that is gone is no trouble.
        let mut settings = Sysctls::default();
        Sysctl::v4("veth5", "rp_filter").write(1).unwrap();
        keep_answering_arp(&mut settings, "veth5", false).unwrap();
        ip("link del veth5");
        drop(settings);
    });
}

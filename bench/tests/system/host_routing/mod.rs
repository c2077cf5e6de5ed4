//! Packets between pods and other machines pass the node's stack by, as long as nothing on the node has a say in them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use penstock_admin::types::HostRoutingStatus;
use penstock_bench::probe::{EchoConnection, EchoServers, Site};
use penstock_bench::testbed::{Namespace, Outside};

use crate::fixture::{Fixture, SERVICES, pods, policy};

mod hooks;
mod routes;

const LIMIT: Duration = Duration::from_secs(20);
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);
/// Exchanges of a connection, each a packet in each direction and at times an acknowledgement.
const EXCHANGES: u64 = 50;

/// A node with two pods, and a machine behind it with servers.
struct Network {
    fixture: Fixture,
    outside: Outside,
    _servers: EchoServers,
}

/// Packets that programs forwarded: past the stack, and by it.
#[derive(Clone, Copy, Debug)]
struct Ways {
    past: u64,
    by: u64,
}

impl Network {
    fn new(yaml: &str, keys: &str, offload: bool) -> Self {
        let mut outside = None;
        let fixture = Fixture::of(yaml, |cluster, config| {
            outside = Some(cluster.node.add_outside("outside").unwrap());
            config.offload = offload;
            config.metrics = Some(METRICS);
            config.keys += keys;
        });
        let outside = outside.unwrap();
        let _servers = EchoServers::start(&Site::from(&outside), 77, &SERVICES).unwrap();
        Self { fixture, outside, _servers }
    }

    fn node(&self) -> &Namespace {
        self.fixture.cluster.node.namespace()
    }

    fn address(&self, v6: bool) -> IpAddr {
        self.outside.addresses()[usize::from(v6)]
    }

    /// A connection of the first pod to the machine, or of the machine to the pod.
    fn open(&self, is_of_pod: bool, v6: bool) -> EchoConnection {
        let (from, to) = if is_of_pod {
            (&self.fixture.site("test/pod-0").namespace, (77, self.address(v6)))
        } else {
            (self.outside.namespace(), self.fixture.target("test/pod-0", v6))
        };
        EchoConnection::open(from, to, 8080, LIMIT).unwrap()
    }

    /// The packets that programs have forwarded: from pods, and to pods.
    fn ways(&self) -> [Ways; 2] {
        let deadline = Instant::now() + LIMIT;
        let page = loop {
            let page = self.fixture.http(METRICS, "/metrics");
            if page.trim_end().ends_with("# EOF") {
                break page;
            }
            assert!(Instant::now() < deadline, "no metrics: {page}");
        };
        let count = |path: &str| -> u64 {
            let name = format!("penstock_offloaded_packets_total{{path=\"{path}\"}} ");
            page.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
        };
        [
            Ways { past: count("pod_to_uplink"), by: count("pod_to_stack") },
            Ways { past: count("uplink_to_pod"), by: count("stack_to_pod") },
        ]
    }

    /// Sends until packets from pods (0), or to pods (1), pass the stack by.
    fn send_until_past(&self, direction: usize, mut send: impl FnMut()) {
        let deadline = Instant::now() + LIMIT;
        let before = self.ways()[direction].past;
        while self.ways()[direction].past == before {
            assert!(Instant::now() < deadline, "no packet passes the stack by");
            send();
        }
    }

    /// Whether what connections send and receive passes the stack by: all of it, or nothing.
    fn assert_ways(&self, connections: &[&EchoConnection], expected: [bool; 2], what: &str) {
        // Some packets are under way when something changes.
        connections.iter().for_each(|connection| connection.wait_for(2, LIMIT).unwrap());
        let before = self.ways();
        connections.iter().for_each(|connection| connection.wait_for(EXCHANGES, LIMIT).unwrap());
        let after = self.ways();
        for (direction, (is_past, [before, after])) in
            ["sent", "received"].iter().zip(expected.iter().zip([0, 1].map(|at| [before[at], after[at]])))
        {
            let (past, by) = (after.past - before.past, after.by - before.by);
            let (most, none) = if *is_past { (past, by) } else { (by, past) };
            assert!(most >= EXCHANGES && none == 0, "{what}, {direction}: {past} past the stack, {by} by it");
        }
    }

    /// By the status: why packets of the interface to the machine go by the node's stack.
    fn kept_by(&self) -> [Option<String>; 2] {
        let interfaces = self.fixture.status().host_routing;
        let of = |one: &&HostRoutingStatus| one.interface == self.outside.interface();
        let HostRoutingStatus { ipv4_kept_by, ipv6_kept_by, .. } = interfaces.iter().find(of).unwrap().clone();
        [ipv4_kept_by, ipv6_kept_by]
    }
}

fn shell(namespace: &Namespace, command: &str) {
    let output = namespace.command("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Something on the node that has a say.
struct Say {
    what: &'static str,
    begin: &'static str,
    end: &'static str,
    /// By the status: why packets of the interface to the machine go by the node's stack.
    kept_by: Option<&'static str>,
    /// For which families.
    families: [bool; 2],
    /// In what pods send, and what they receive.
    directions: [bool; 2],
}

const NETFILTER: Option<&str> = Some("netfilter hooks");

const SAYS: &[Say] = &[
    Say {
        what: "a chain of what is forwarded",
        begin: "nft 'table inet says { chain f { type filter hook forward priority 0; }; }'",
        end: "nft delete table inet says",
        kept_by: NETFILTER,
        families: [true, true],
        directions: [true, true],
    },
    Say {
        what: "tracking of connections that drops what is invalid, as kube-proxy's rules do",
        begin: "nft 'table inet says { chain f { type filter hook forward priority 0; ct state invalid drop; }; }'",
        end: "nft delete table inet says",
        kept_by: NETFILTER,
        families: [true, true],
        directions: [true, true],
    },
    Say {
        what: "masquerade",
        begin: "nft 'table ip says { chain p { type nat hook postrouting priority 100; ip saddr 192.0.2.1 masquerade; }; }'",
        end: "nft delete table ip says",
        kept_by: NETFILTER,
        families: [true, false],
        directions: [true, true],
    },
    Say {
        what: "a chain of what leaves",
        begin: "nft 'table ip says { chain p { type filter hook postrouting priority 0; }; }'",
        end: "nft delete table ip says",
        kept_by: NETFILTER,
        families: [true, false],
        directions: [true, true],
    },
    Say {
        what: "a chain of what leaves by IPv6",
        begin: "nft 'table ip6 says { chain p { type filter hook postrouting priority 0; }; }'",
        end: "nft delete table ip6 says",
        kept_by: NETFILTER,
        families: [false, true],
        directions: [true, true],
    },
    Say {
        what: "a chain of what enters by IPv4",
        begin: "nft 'table ip says { chain p { type filter hook prerouting priority 0; }; }'",
        end: "nft delete table ip says",
        kept_by: NETFILTER,
        families: [true, false],
        directions: [true, true],
    },
    Say {
        what: "a chain of what enters by IPv6",
        begin: "nft 'table ip6 says { chain p { type filter hook prerouting priority 0; }; }'",
        end: "nft delete table ip6 says",
        kept_by: NETFILTER,
        families: [false, true],
        directions: [true, true],
    },
    Say {
        what: "a chain at the interface",
        begin: "nft 'table netdev says { chain i { type filter hook ingress device eth1 priority 0; }; }'",
        end: "nft delete table netdev says",
        kept_by: NETFILTER,
        families: [true, true],
        directions: [false, true],
    },
    Say {
        what: "a chain of what leaves by the interface",
        begin: "nft 'table netdev says { chain e { type filter hook egress device eth1 priority 0; }; }'",
        end: "nft delete table netdev says",
        kept_by: NETFILTER,
        families: [true, true],
        directions: [true, false],
    },
    Say {
        what: "an IPsec policy",
        begin: "ip xfrm policy add src 192.0.2.0/24 dst 192.0.2.0/24 dir fwd",
        end: "ip xfrm policy flush",
        kept_by: Some("IPsec policies"),
        families: [true, true],
        directions: [true, true],
    },
    Say {
        what: "an IPsec policy of what leaves",
        begin: "ip xfrm policy add src 192.0.2.0/24 dst 192.0.2.0/24 dir out",
        end: "ip xfrm policy flush",
        kept_by: Some("IPsec policies"),
        families: [true, true],
        directions: [true, true],
    },
    Say {
        what: "a filter at the interface",
        begin: "tc qdisc add dev eth1 clsact; tc filter add dev eth1 ingress protocol all u32 match u32 0 0 flowid :1",
        end: "tc qdisc del dev eth1 clsact",
        kept_by: Some("others' programs or filters on the interface"),
        families: [true, true],
        directions: [false, true],
    },
    Say {
        what: "a macvlan on the interface",
        begin: "ip link add says link eth1 type macvlan mode bridge",
        end: "ip link del says",
        kept_by: Some("the bridge, bond, macvlan or VRF of the interface"),
        families: [true, true],
        directions: [false, true],
    },
    Say {
        what: "a packet's priority that the kernel keeps",
        begin: "echo 0 > /proc/sys/net/ipv4/ip_forward_update_priority",
        end: "echo 1 > /proc/sys/net/ipv4/ip_forward_update_priority",
        kept_by: Some("settings of the kernel"),
        families: [true, false],
        directions: [true, true],
    },
    Say {
        what: "nothing: the check of sources, which the packets pass",
        begin: "echo 1 > /proc/sys/net/ipv4/conf/eth1/rp_filter",
        end: "echo 0 > /proc/sys/net/ipv4/conf/eth1/rp_filter",
        kept_by: None,
        families: [false, false],
        directions: [false, false],
    },
    Say {
        what: "nothing: a rule that leads to the same route",
        begin: "ip rule add pref 100 ipproto 6 lookup main; ip -6 rule add pref 100 ipproto 6 lookup main",
        end: "ip rule del pref 100; ip -6 rule del pref 100",
        kept_by: None,
        families: [false, false],
        directions: [false, false],
    },
    Say {
        what: "nothing: a chain of what is for the node itself",
        begin: "nft 'table inet says { chain i { type filter hook input priority 0; }; }'",
        end: "nft delete table inet says",
        kept_by: None,
        families: [false, false],
        directions: [false, false],
    },
];

#[test]
fn packets_pass_the_stack_by_until_somebody_has_a_say() {
    let network = Network::new(&pods(1), "", true);
    assert_eq!(network.kept_by(), [None, None]);
    for v6 in [false, true] {
        let connections = [true, false].map(|is_of_pod| network.open(is_of_pod, v6));
        for Say { what, begin, end, kept_by, families, directions } in SAYS {
            for is_begun in [true, false] {
                shell(network.node(), if is_begun { begin } else { end });
                let kept = families.map(|is_kept| kept_by.filter(|_| is_kept && is_begun).map(str::to_owned));
                assert_eq!(network.kept_by(), kept, "{what}, begun {is_begun}");
                let is_past = directions.map(|has_say| !(has_say && families[usize::from(v6)] && is_begun));
                let what = format!("{what}, begun {is_begun}, IPv6 {v6}");
                network.assert_ways(&connections.each_ref(), is_past, &what);
            }
        }
    }
}

/// The node's tracking of connections finds none invalid, beside rules that drop what it does.
#[test]
fn connections_that_change_the_way_are_never_invalid() {
    let network = Network::new(&pods(1), "", true);
    let connections = [(true, false), (false, false), (true, true), (false, true)].map(|(is_of_pod, v6)| {
        let connection = network.open(is_of_pod, v6);
        connection.wait_for(EXCHANGES, LIMIT).unwrap();
        connection
    });
    for _ in 0..5 {
        let rules = "nft 'table inet says { counter invalid { }; chain f { type filter hook forward priority 0; \
                     ct state invalid counter name invalid drop; }; }'";
        shell(network.node(), rules);
        network.assert_ways(&connections.each_ref(), [false, false], "tracked");
        let listed = network.node().command("nft").args(["list", "counters"]).output().unwrap();
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        assert!(listed.contains("packets 0 bytes 0"), "{listed}");
        shell(network.node(), "nft delete table inet says");
        network.assert_ways(&connections.each_ref(), [true, true], "not tracked");
    }
}

#[test]
fn a_filter_or_chain_on_a_pods_interface_has_its_say() {
    let network = Network::new(&pods(1), "", true);
    let connection = network.open(true, false);
    let interface = network.fixture.cluster.node.pod("test/pod-0").unwrap().interface().to_owned();
    for (what, begin, end, is_past) in [
        (
            "a filter of what the pod sends",
            "tc qdisc add dev POD clsact; tc filter add dev POD ingress protocol all u32 match u32 0 0 flowid :1",
            "tc qdisc del dev POD clsact",
            [false, true],
        ),
        (
            "a chain of what the pod sends",
            "nft 'table netdev says { chain i { type filter hook ingress device POD priority 0; }; }'",
            "nft delete table netdev says",
            [false, true],
        ),
        (
            "a chain of what the pod gets",
            "nft 'table netdev says { chain e { type filter hook egress device POD priority 0; }; }'",
            "nft delete table netdev says",
            [true, false],
        ),
    ] {
        network.assert_ways(&[&connection], [true, true], &format!("without {what}"));
        shell(network.node(), &begin.replace("POD", &interface));
        network.assert_ways(&[&connection], is_past, what);
        shell(network.node(), &end.replace("POD", &interface));
    }
    network.assert_ways(&[&connection], [true, true], "without any");
}

#[test]
fn with_the_setting_or_without_offload_all_goes_by_the_stack() {
    for (keys, offload) in [("host_routing = \"never\"\n", true), ("", false)] {
        let network = Network::new(&pods(1), keys, offload);
        let before = network.ways();
        for v6 in [false, true] {
            network.open(true, v6).wait_for(EXCHANGES, LIMIT).unwrap();
            network.open(false, v6).wait_for(EXCHANGES, LIMIT).unwrap();
        }
        let after = network.ways();
        assert!(before.iter().chain(&after).all(|ways| ways.past == 0), "{keys} {offload}: {after:?}");
        assert_eq!(network.kept_by(), [Some("host_routing".to_owned()), Some("host_routing".to_owned())]);
    }
}

#[test]
fn policy_holds_for_connections_past_the_stack() {
    let allowed = "  policyTypes: [Ingress, Egress]\n  ingress: [{}]\n  egress: [{}]\n";
    let network = Network::new(&(pods(1) + &policy("all", "pod-0", allowed)), "", true);
    for (is_of_pod, v6) in [(true, false), (true, true), (false, false), (false, true)] {
        let connection = network.open(is_of_pod, v6);
        network.assert_ways(&[&connection], [true, true], "allowed");
        network.fixture.enforce(&(pods(1) + &policy("all", "pod-0", "  policyTypes: [Ingress, Egress]\n")));
        let until = connection.exchanges();
        std::thread::sleep(Duration::from_millis(200));
        let more = connection.exchanges() - until;
        assert!(more <= 1, "of the pod {is_of_pod}, IPv6 {v6}: {more} exchanges under a policy that denies them");
        network.fixture.enforce(&(pods(1) + &policy("all", "pod-0", allowed)));
        connection.wait_for(EXCHANGES, LIMIT).unwrap();
        network.assert_ways(&[&connection], [true, true], "allowed again");
    }
}

//! Packets between pods and other machines pass the node's stack by, as long as nothing on the node has a say in them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use penstock_admin::types::HostRoutingStatus;
use penstock_bench::load::pin;
use penstock_bench::probe::{EchoConnection, EchoServers, Site};
use penstock_bench::testbed::{Attach, Namespace, Outside};

use crate::fixture::{Fixture, SERVICES, pods, policy};

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
            (config.attach, config.offload) = (Attach::Tcx, offload);
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
        begin: "ip rule add pref 100 ipproto tcp lookup main; ip -6 rule add pref 100 ipproto tcp lookup main",
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
fn a_filter_on_a_pods_interface_has_its_say() {
    let network = Network::new(&pods(1), "", true);
    let connection = network.open(true, false);
    let interface = network.fixture.cluster.node.pod("test/pod-0").unwrap().interface().to_owned();
    network.assert_ways(&[&connection], [true, true], "without a filter");
    shell(
        network.node(),
        &format!(
            "tc qdisc add dev {interface} clsact; tc filter add dev {interface} ingress protocol all u32 match u32 0 0 flowid :1"
        ),
    );
    network.assert_ways(&[&connection], [false, true], "with a filter of what the pod sends");
    shell(network.node(), &format!("tc qdisc del dev {interface} clsact"));
    network.assert_ways(&[&connection], [true, true], "without it again");
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

#[test]
fn a_route_with_a_smaller_mtu_is_kept_to() {
    let network = Network::new(&pods(1), "", true);
    let pod = &network.fixture.site("test/pod-0").namespace;
    let socket = pod.udp("0.0.0.0:0").unwrap();
    socket.connect((network.address(false), 53)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let deadline = Instant::now() + LIMIT;
    let is_answered = || socket.send(&[7; 1350]).and_then(|_| socket.recv(&mut [0; 1500])).is_ok();
    while !is_answered() {
        assert!(Instant::now() < deadline, "no answer");
    }
    shell(network.node(), "ip route add 198.51.100.2/32 dev eth1 mtu 1300");
    // The node's error tells the pod, which remembers it for its route.
    let is_told = || {
        let route = pod.command("ip").args(["route", "get", "198.51.100.2"]).output().unwrap();
        String::from_utf8_lossy(&route.stdout).contains("mtu 1300")
    };
    while !is_told() {
        is_answered();
        assert!(Instant::now() < deadline, "datagrams pass that are too long for their route");
    }
}

/// A change of what the node's routes say about an address that two machines have.
struct Change {
    what: &'static str,
    /// Commands, in which `IP` is `ip` or `ip -6`, `TO` the address, and `A` and `B` are the two next hops with their interfaces.
    before: &'static str,
    begin: &'static str,
    end: &'static str,
    /// Who gets the next packet: the second machine, or nobody.
    leads_to_second: bool,
}

const CHANGES: &[Change] = &[
    Change {
        what: "another next hop",
        before: "",
        begin: "IP route replace TO via B metric 10",
        end: "",
        leads_to_second: true,
    },
    Change {
        what: "a route with a lower metric",
        before: "",
        begin: "IP route add TO via B metric 5",
        end: "IP route del TO metric 5",
        leads_to_second: true,
    },
    Change {
        what: "the route is gone",
        before: "",
        begin: "IP route del TO metric 10",
        end: "",
        leads_to_second: true,
    },
    Change {
        what: "another next hop of a group",
        before: "IP nexthop add id 7 via A; IP route add TO nhid 7 metric 4",
        begin: "IP nexthop replace id 7 via B",
        end: "IP route del TO metric 4; IP nexthop del id 7",
        leads_to_second: true,
    },
    Change {
        what: "a blackhole",
        before: "",
        begin: "IP route add blackhole TO metric 1",
        end: "IP route del TO metric 1",
        leads_to_second: false,
    },
    Change {
        what: "the node forwards nothing",
        before: "",
        begin: "echo 0 > /proc/sys/net/FORWARDING",
        end: "echo 1 > /proc/sys/net/FORWARDING",
        leads_to_second: false,
    },
    Change {
        what: "the interface is down",
        before: "",
        begin: "ip link set eth1 down",
        end: "ip link set eth1 up",
        leads_to_second: true,
    },
    // The kernel remembers for ever that there were rules.
    Change {
        what: "a rule",
        before: "IP route add TO via B table 77",
        begin: "IP rule add pref 100 to TO lookup 77",
        end: "IP rule del pref 100; IP route flush table 77",
        leads_to_second: true,
    },
    Change {
        what: "the route is gone where a rule leads",
        before: "IP route del TO metric 10; IP route add TO via A table 77; IP rule add pref 100 to TO lookup 77",
        begin: "IP route del TO table 77",
        end: "IP rule del pref 100; IP route flush table 77",
        leads_to_second: true,
    },
];

/// Two machines behind a node that have the same addresses, and a pod that sends to these.
struct Crossroads {
    network: Network,
    sender: UdpSocket,
    v6: bool,
    /// Of the machine behind `eth1`, and the one behind `eth2`.
    receivers: [UdpSocket; 2],
    second: Namespace,
    sent: u32,
}

impl Crossroads {
    const PORT: u16 = 5300;

    fn address(v6: bool) -> IpAddr {
        if v6 { "fd00:113::9".parse().unwrap() } else { "203.0.113.9".parse().unwrap() }
    }

    fn new(v6: bool) -> Self {
        let network = Network::new(&pods(1), "", true);
        let second = Namespace::new("second").unwrap();
        network.fixture.cluster.node.netlink().add_veth("eth2", "eth0", &second, 1500).unwrap();
        shell(
            network.node(),
            "ip addr add 198.51.101.1/24 dev eth2; ip addr add fd00:51:101::1/64 dev eth2 nodad; ip link set eth2 up; \
             sysctl -qw net.ipv6.conf.eth1.keep_addr_on_down=1",
        );
        shell(
            &second,
            "ip link set lo up; ip link set eth0 up; ip addr add 198.51.101.2/24 dev eth0; \
             ip addr add fd00:51:101::2/64 dev eth0 nodad",
        );
        let receivers = [network.outside.namespace(), &second].map(|machine| {
            shell(machine, "ip addr add 203.0.113.9/32 dev eth0; ip addr add fd00:113::9/128 dev eth0 nodad");
            let socket = machine.udp((Self::address(v6), Self::PORT)).unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket
        });
        // Programs keep routes by processor, and run where the sender does.
        pin(0).unwrap();
        let any = if v6 { "[::]:0" } else { "0.0.0.0:0" };
        let sender = network.fixture.site("test/pod-0").namespace.udp(any).unwrap();
        Self { network, sender, v6, receivers, second, sent: 0 }
    }

    fn run(&self, commands: &str) {
        let (ip, to) = (if self.v6 { "ip -6" } else { "ip" }, Self::address(self.v6).to_string());
        let hops = if self.v6 { ["fd00:51:100::2", "fd00:51:101::2"] } else { ["198.51.100.2", "198.51.101.2"] };
        let forwarding = if self.v6 { "ipv6/conf/all/forwarding" } else { "ipv4/ip_forward" };
        let commands = commands
            .replace("IP ", &format!("{ip} "))
            .replace("TO", &to)
            .replace("via A", &format!("via {} dev eth1", hops[0]))
            .replace("via B", &format!("via {} dev eth2", hops[1]))
            .replace("FORWARDING", forwarding);
        shell(self.network.node(), &commands);
    }

    /// Sends the next datagram. Returns its number.
    fn send(&mut self) -> u32 {
        self.sent += 1;
        self.sender.send_to(&self.sent.to_be_bytes(), (Self::address(self.v6), Self::PORT)).unwrap();
        self.sent
    }

    /// The number of the next datagram that one of the machines gets.
    fn next(&self, machine: usize) -> u32 {
        let mut number = [0; 4];
        self.receivers[machine].recv(&mut number).unwrap_or_else(|error| panic!("machine {machine}: {error}"));
        u32::from_be_bytes(number)
    }

    /// Sends until datagrams pass the stack by to the first machine.
    fn warm_up(&mut self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let before = self.network.ways()[0].past;
            let number = self.send();
            assert_eq!(self.next(0), number);
            if self.network.ways()[0].past > before {
                break;
            }
            assert!(Instant::now() < deadline, "no datagram passes the stack by");
        }
        let number = self.send();
        assert_eq!(self.next(0), number);
    }
}

#[test]
fn a_change_of_routes_is_in_effect_for_the_next_packet() {
    for v6 in [false, true] {
        let mut crossroads = Crossroads::new(v6);
        for Change { what, before, begin, end, leads_to_second } in CHANGES {
            crossroads.run("IP route replace TO via A metric 10; IP route replace TO via B metric 20");
            crossroads.run(before);
            crossroads.warm_up();
            crossroads.run(begin);
            let number = crossroads.send();
            if *leads_to_second {
                assert_eq!(crossroads.next(1), number, "{what}, IPv6 {v6}");
            }
            crossroads.run(end);
            crossroads.run("IP route replace TO via A metric 10");
            // What came before it has not arrived here.
            let number = crossroads.send();
            assert_eq!(crossroads.next(0), number, "{what}, undone, IPv6 {v6}");
        }
    }
}

/// The way back to the source of what comes in, as the check of sources wants it, and the way to the pod.
#[test]
fn what_comes_in_takes_the_routes_of_that_moment() {
    let mut crossroads = Crossroads::new(false);
    let pod = crossroads.network.fixture.target("test/pod-0", false).1;
    let to = (pod, crossroads.sender.local_addr().unwrap().port());
    crossroads.sender.set_read_timeout(Some(LIMIT)).unwrap();
    for (what, begin, end) in [
        (
            "the way back to the source leads elsewhere",
            "IP route replace TO via B metric 10; echo 1 > /proc/sys/net/ipv4/conf/eth1/rp_filter",
            "IP route replace TO via A metric 10; echo 0 > /proc/sys/net/ipv4/conf/eth1/rp_filter",
        ),
        (
            "a blackhole is in the pod's place",
            "ip route add blackhole POD table 7; ip rule add pref 50 lookup 7",
            "ip rule del pref 50; ip route flush table 7",
        ),
    ] {
        crossroads.run("IP route replace TO via A metric 10; IP route replace TO via B metric 20");
        crossroads.warm_up();
        let answer = |number: u8| crossroads.receivers[0].send_to(&[number], to).unwrap();
        let next = || {
            let mut number = [0];
            crossroads.sender.recv(&mut number).unwrap_or_else(|error| panic!("{what}: {error}"));
            number[0]
        };
        let deadline = Instant::now() + LIMIT;
        loop {
            let before = crossroads.network.ways()[1].past;
            answer(1);
            assert_eq!(next(), 1);
            if crossroads.network.ways()[1].past > before {
                break;
            }
            assert!(Instant::now() < deadline, "{what}: no datagram passes the stack by");
        }
        answer(2);
        assert_eq!(next(), 2);
        crossroads.run(&begin.replace("POD", &pod.to_string()));
        answer(3);
        crossroads.run(end);
        answer(4);
        assert_eq!(next(), 4, "{what}");
    }
}

/// The kernel takes such a route away only after half a minute, and until then no longer by it.
#[test]
fn a_route_that_has_expired_is_not_taken() {
    let mut crossroads = Crossroads::new(true);
    crossroads.run("IP route replace TO via B metric 20; IP route replace TO via A metric 10 expires 2");
    crossroads.warm_up();
    crossroads.receivers[1].set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let deadline = Instant::now() + LIMIT;
    while crossroads.receivers[1].recv(&mut [0; 4]).is_err() {
        assert!(Instant::now() < deadline, "packets still take a route that has expired");
        crossroads.send();
    }
}

/// More pairs of addresses than there are places for routes.
#[test]
fn each_of_many_addresses_has_its_own_route() {
    const ROUNDS: usize = 3;
    let crossroads = Crossroads::new(false);
    crossroads.run("IP route add 203.0.114.0/24 via A; IP route add 203.0.115.0/24 via B");
    let machines = [crossroads.network.outside.namespace(), &crossroads.second];
    let sockets = ["203.0.114", "203.0.115"].iter().zip(machines).map(|(network, machine)| {
        shell(machine, &format!("ip route add local {network}.0/24 dev lo"));
        let socket = machine.udp(("0.0.0.0", Crossroads::PORT + 1)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    });
    let receivers: Vec<UdpSocket> = sockets.collect();
    for round in 0..ROUNDS {
        for host in 1..255 {
            for (network, receiver) in [114, 115].into_iter().zip(&receivers) {
                let to = Ipv4Addr::new(203, 0, network, host);
                crossroads.sender.send_to(&to.octets(), (to, Crossroads::PORT + 1)).unwrap();
                let mut got = [0; 4];
                receiver.recv(&mut got).unwrap_or_else(|error| panic!("{to} in round {round}: {error}"));
                assert_eq!(Ipv4Addr::from(got), to, "round {round}");
            }
        }
    }
    assert!(crossroads.network.ways()[0].past > 254);
}

#[test]
fn a_pod_is_told_of_a_neighbour_that_is_gone() {
    let network = Network::new(&pods(1), "", true);
    for (key, value) in [("mcast_solicit", "1"), ("ucast_solicit", "1"), ("retrans_time_ms", "100")] {
        network.node().set_sysctl(&format!("net/ipv4/neigh/eth1/{key}"), value).unwrap();
    }
    let pod = &network.fixture.site("test/pod-0").namespace;
    let socket = pod.udp("0.0.0.0:0").unwrap();
    // Programs keep routes by processor, and run where the sender does.
    pin(0).unwrap();
    let send = || socket.send_to(&[7; 32], (network.address(false), 53)).unwrap();
    let deadline = Instant::now() + LIMIT;
    while network.ways()[0].past == 0 {
        assert!(Instant::now() < deadline, "no datagram passes the stack by");
        send();
    }
    // Errors that the pod has got from the node (RFC 1213, icmpInDestUnreachs).
    let told = || -> u64 {
        let counters = pod.command("nstat").args(["-asz", "IcmpInDestUnreachs"]).output().unwrap();
        let counters = String::from_utf8_lossy(&counters.stdout).into_owned();
        let counter = counters.lines().find_map(|line| line.strip_prefix("IcmpInDestUnreachs"));
        counter.and_then(|values| values.split_whitespace().next()).unwrap().parse().unwrap()
    };
    let before = told();
    shell(network.outside.namespace(), "ip link set eth0 arp off");
    shell(network.node(), "ip neigh del 198.51.100.2 dev eth1");
    while told() == before {
        assert!(Instant::now() < deadline, "nobody tells the pod that the machine is gone");
        send();
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn neighbours_are_asked_for_again_as_by_the_stack() {
    let network = Network::new(&pods(1), "", true);
    for (key, value) in
        [("base_reachable_time_ms", "1000"), ("delay_first_probe_time", "1"), ("retrans_time_ms", "200")]
    {
        network.node().set_sysctl(&format!("net/ipv4/neigh/eth1/{key}"), value).unwrap();
    }
    let connection = network.open(true, false);
    network.assert_ways(&[&connection], [true, true], "before");
    shell(network.node(), "ip neigh del 198.51.100.2 dev eth1");
    connection.wait_for(EXCHANGES, LIMIT).unwrap();
    network.assert_ways(&[&connection], [true, true], "once the neighbour is known again");
    // The machine gets another MAC, and tells nobody.
    shell(network.outside.namespace(), "ip link set eth0 address 02:00:00:00:77:77");
    connection.wait_for(EXCHANGES, 2 * LIMIT).unwrap();
    network.assert_ways(&[&connection], [true, true], "once its new MAC is known");
}

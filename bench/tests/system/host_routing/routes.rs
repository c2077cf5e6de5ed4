//! On the way past the node's stack the node's routes, neighbours and MTUs are kept to, as they are at that moment.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use penstock_bench::load::pin;
use penstock_bench::testbed::Namespace;

use super::{EXCHANGES, LIMIT, Network, shell};
use crate::fixture::pods;

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
            "ip addr add 198.51.101.1/24 dev eth2; ip addr add fd00:51:101::1/64 dev eth2 nodad; ip link set eth2 up",
        );
        network.node().set_sysctl("net/ipv6/conf/eth1/keep_addr_on_down", "1").unwrap();
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

    fn send(&self, number: u32) {
        self.sender.send_to(&number.to_be_bytes(), (Self::address(self.v6), Self::PORT)).unwrap();
    }

    /// Sends the next datagram. Returns its number.
    fn send_next(&mut self) -> u32 {
        self.sent += 1;
        self.send(self.sent);
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
        let mut sent = self.sent;
        self.network.send_until_past(0, || {
            sent += 1;
            self.send(sent);
            assert_eq!(self.next(0), sent);
        });
        self.sent = sent;
        let number = self.send_next();
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
            let number = crossroads.send_next();
            if *leads_to_second {
                assert_eq!(crossroads.next(1), number, "{what}, IPv6 {v6}");
            }
            crossroads.run(end);
            crossroads.run("IP route replace TO via A metric 10");
            // What came before it has not arrived here.
            let number = crossroads.send_next();
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
        crossroads.network.send_until_past(1, || {
            answer(1);
            assert_eq!(next(), 1);
        });
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
        crossroads.send_next();
    }
}

/// So many that some of one network have the place of some of the other in the programs' table of routes.
#[test]
fn each_of_many_addresses_has_its_own_route() {
    const ROUNDS: u64 = 3;
    const HOSTS: u8 = 254;
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
        for host in 1..=HOSTS {
            for (network, receiver) in [114, 115].into_iter().zip(&receivers) {
                let to = Ipv4Addr::new(203, 0, network, host);
                crossroads.sender.send_to(&to.octets(), (to, Crossroads::PORT + 1)).unwrap();
                let mut got = [0; 4];
                receiver.recv(&mut got).unwrap_or_else(|error| panic!("{to} in round {round}: {error}"));
                assert_eq!(Ipv4Addr::from(got), to, "round {round}");
            }
        }
    }
    // A worker decides about the first of each.
    assert!(crossroads.network.ways()[0].past > u64::from(HOSTS) * 2 * (ROUNDS - 2));
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
    let send = || {
        socket.send_to(&[7; 32], (network.address(false), 53)).unwrap();
    };
    network.send_until_past(0, send);
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
    let deadline = Instant::now() + LIMIT;
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

//! Packets that pods send to their own node, and it sends on: by an interface whose frames have no Ethernet header, such as a tunnel that a CNI
//! plugin makes between nodes, and by one that has another below it.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{
    KubeProxy, Namespace, ProxiedPort, ProxiedService, ProxyMode, RouteVia, ServiceProtocol,
};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{address, run, service};

/// Machines beyond the tunnel, by family: `pod-1` may send to the second only.
const BEYOND: [[&str; 2]; 2] = [["198.18.0.5", "2001:db8:18::5"], ["198.18.0.6", "2001:db8:18::6"]];
/// The node ports that lead to them.
const NODE_PORTS: [u16; 2] = [30_080, 30_081];
/// Identity of the server outside.
const OUTSIDE: u32 = 77;
const POLICY: &str = "  policyTypes: [Egress]\n  egress: [{to: [{ipBlock: {cidr: 198.18.0.6/32}}, {ipBlock: {cidr: \"2001:db8:18::6/128\"}}]}]\n";

nix::ioctl_write_ptr_bad!(tunsetiff, libc::TUNSETIFF, libc::ifreq);

/// The near end of a tunnel; what is sent into it is read from the file.
fn open_tunnel(node: &Namespace, name: &str) -> File {
    node.run(|| {
        let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        // SAFETY: numbers and an array of them, for which zero is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte as libc::c_char);
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
        // SAFETY: the request lives across the call, and its name ends with a zero.
        unsafe { tunsetiff(file.as_raw_fd(), &raw const request) }.unwrap();
        file
    })
}

/// Destination and payload of the UDP datagrams that come until `limit`, other packets left out.
fn read(tunnel: &mut File, limit: Duration) -> Option<(IpAddr, String)> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap();
        if poll(&mut [PollFd::new(std::os::fd::AsFd::as_fd(tunnel), PollFlags::POLLIN)], timeout).unwrap() == 0 {
            return None;
        }
        let mut packet = [0; 2048];
        let length = tunnel.read(&mut packet).unwrap();
        let sliced = etherparse::SlicedPacket::from_ip(&packet[..length]).unwrap();
        let Some(etherparse::TransportSlice::Udp(udp)) = sliced.transport else { continue };
        let to = match sliced.net.unwrap() {
            etherparse::NetSlice::Ipv4(v4) => v4.header().destination_addr().into(),
            etherparse::NetSlice::Ipv6(v6) => v6.header().destination_addr().into(),
            other => panic!("{other:?}"),
        };
        return Some((to, String::from_utf8_lossy(udp.payload()).into_owned()));
    }
}

#[test]
fn a_node_port_into_a_tunnel_is_judged_for_its_far_end() {
    let mut tunnel = None;
    let fixture = Fixture::of(&(pods(2) + &policy("some", "pod-1", POLICY)), |cluster, _| {
        let node = &cluster.node;
        tunnel = Some(open_tunnel(node.namespace(), "tun0"));
        let netlink = node.netlink();
        let index = netlink.index("tun0").unwrap();
        netlink.set_up(index).unwrap();
        for network in ["198.18.0.0/24", "2001:db8:18::/64"] {
            netlink.add_route(network.parse().unwrap(), index, RouteVia::Link).unwrap();
        }
        let port = |(to, number): ([&str; 2], u16)| ProxiedPort {
            protocol: ServiceProtocol::Udp,
            number,
            node_port: Some(number),
            backends: to.map(|to| SocketAddr::new(address(to), 53)).into(),
        };
        let ports = BEYOND.into_iter().zip(NODE_PORTS).map(port).collect();
        let addresses = [false, true].map(service).into();
        let services = vec![ProxiedService { name: "test/beyond".to_owned(), addresses, ports }];
        let proxy = KubeProxy { mode: ProxyMode::Nftables, node: node.addresses().to_vec(), services };
        proxy.install(node.namespace()).unwrap();
    });
    let mut tunnel = tunnel.unwrap();
    let send = |pod: &str, v6: bool, port: u16, text: &str| {
        let node = fixture.cluster.node.addresses().iter().find(|address| address.is_ipv6() == v6).unwrap();
        let from: IpAddr = address(if v6 { "::" } else { "0.0.0.0" });
        let socket = fixture.site(pod).namespace.udp((from, 0)).unwrap();
        socket.send_to(text.as_bytes(), (*node, port)).unwrap();
    };
    for v6 in [false, true] {
        let to = BEYOND.map(|to| address(to[usize::from(v6)]));
        // The denied packet is sent first: it would come first.
        for number in 0..5 {
            send("test/pod-1", v6, NODE_PORTS[0], &format!("denied {number}"));
        }
        for (pod, at) in [("test/pod-1", 1), ("test/pod-0", 0), ("test/pod-0", 1)] {
            let text = format!("{pod} {v6}");
            send(pod, v6, NODE_PORTS[at], &text);
            let came = read(&mut tunnel, Duration::from_secs(5));
            assert_eq!(came, Some((to[at], text)), "{}", fixture.statistics().join("\n"));
        }
        assert_eq!(read(&mut tunnel, Duration::from_millis(100)), None);
    }
    let denied: u64 =
        fixture.statistics().iter().filter(|line| line.contains("(node)")).map(|line| dropped(line)).sum();
    assert!(denied >= 10, "{}", fixture.statistics().join("\n"));
}

/// Makes a bridge with the addresses of an interface, and the interface its port.
fn put_into_bridge(node: &Namespace, interface: &str) {
    let script = format!(
        "set -e\nip link add br-uplink type bridge\nip link set br-uplink up\n\
         for address in $(ip -o address show dev {interface} scope global | awk '{{print $4}}'); do\n\
         ip address del $address dev {interface}\nip address add $address dev br-uplink nodad\ndone\n\
         ip link set {interface} master br-uplink\n"
    );
    run(node, "sh", &["-s"], &script);
}

#[test]
fn a_node_port_by_a_bridge_and_its_port_is_judged_once() {
    let mut outside = None;
    let fixture = Fixture::of(&(pods(2) + &policy("none", "pod-1", "  policyTypes: [Egress]\n")), |cluster, _| {
        let node = &mut cluster.node;
        let machine = node.add_outside("outside").unwrap();
        put_into_bridge(node.namespace(), machine.interface());
        let backends = machine.addresses().iter().map(|&to| SocketAddr::new(to, 8080)).collect();
        let number = NODE_PORTS[0];
        let port = ProxiedPort { protocol: ServiceProtocol::Tcp, number, node_port: Some(number), backends };
        let addresses = [false, true].map(service).into();
        let services = vec![ProxiedService { name: "test/beyond".to_owned(), addresses, ports: vec![port] }];
        let proxy = KubeProxy { mode: ProxyMode::Iptables, node: node.addresses().to_vec(), services };
        proxy.install(node.namespace()).unwrap();
        outside = Some(machine);
    });
    let outside = Site::from(&outside.unwrap());
    let _server = EchoServers::start(&outside, OUTSIDE, &[EchoService::Tcp(8080)]).unwrap();
    for &node in fixture.cluster.node.addresses() {
        for (pod, expected) in [("test/pod-0", ProbeOutcome::Reached), ("test/pod-1", ProbeOutcome::Silent)] {
            let to = (OUTSIDE, node);
            let protocol = Protocol::Tcp(NODE_PORTS[0]);
            let outcome = probe::run_one(fixture.site(pod), to, protocol, RetryPolicy::default()).unwrap();
            assert_eq!(outcome, expected, "{pod} to {node}: {}", fixture.statistics().join("\n"));
        }
    }
}

/// More than workers know interfaces by number, and more than are on one interface of an ordinary node.
const INTERFACES: usize = 300;
const ADDRESSES: usize = 1_300;

#[test]
#[ignore = "sets up hundreds of interfaces, a minute; make test-long runs it"]
fn beyond_what_workers_know_of_interfaces_node_ports_are_closed() {
    let many = |number: usize| format!("10.200.{}.{}", number / 250, number % 250 + 1);
    let mut outside = None;
    let yaml = pods(2) + &policy("none", "pod-1", "  policyTypes: [Egress]\n");
    let fixture = Fixture::of(&yaml, |cluster, _| {
        let node = &mut cluster.node;
        let interfaces =
            (0..INTERFACES).map(|number| format!("link add b{number} type bridge\nlink set b{number} up\n"));
        let addresses = (0..ADDRESSES).map(|number| format!("address add {}/32 dev lo\n", many(number)));
        run(node.namespace(), "ip", &["-batch", "-"], &interfaces.chain(addresses).collect::<String>());
        let machine = node.add_outside("outside").unwrap();
        let backends = machine.addresses().iter().map(|&to| SocketAddr::new(to, 8080)).collect();
        let number = NODE_PORTS[0];
        let port = ProxiedPort { protocol: ServiceProtocol::Tcp, number, node_port: Some(number), backends };
        let services =
            vec![ProxiedService { name: "test/beyond".to_owned(), addresses: vec![service(false)], ports: vec![port] }];
        let own = node.addresses().iter().copied().chain([many(0), many(ADDRESSES - 1)].map(|text| address(&text)));
        let proxy = KubeProxy { mode: ProxyMode::Nftables, node: own.collect(), services };
        proxy.install(node.namespace()).unwrap();
        outside = Some(machine);
    });
    let outside = Site::from(&outside.unwrap());
    let machine = outside.address(false).unwrap();
    let _server = EchoServers::start(&outside, OUTSIDE, &[EchoService::Tcp(8080)]).unwrap();
    let reaches = |pod, to, port| {
        probe::run_one(fixture.site(pod), (OUTSIDE, to), Protocol::Tcp(port), RetryPolicy::default()).unwrap()
    };
    let own = *fixture.cluster.node.addresses().iter().find(|address| address.is_ipv4()).unwrap();
    for to in [own, address(&many(0)), address(&many(ADDRESSES - 1))] {
        assert_eq!(reaches("test/pod-1", to, NODE_PORTS[0]), ProbeOutcome::Silent, "by {to}");
    }
    assert_eq!(reaches("test/pod-1", machine, 8080), ProbeOutcome::Silent);
    assert_eq!(reaches("test/pod-0", machine, 8080), ProbeOutcome::Reached);
    let is_said = |line: &String| line.contains("more interfaces to other machines than workers know");
    assert!(fixture.daemon.log().lines().iter().any(is_said));
}

/// How many packets a line of the statistics says were denied for their sender.
fn dropped(line: &str) -> u64 {
    let number = line.split("egress_denied ").nth(1).and_then(|rest| rest.split([',', ' ']).next());
    number.map_or(0, |number| number.parse().unwrap())
}

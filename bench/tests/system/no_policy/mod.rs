//! Without a policy Penstock is not there: two nodes that differ in nothing but the daemon get the same packets, and what arrives at
//! one arrives at the other, unchanged. The exceptions are a list, which the test prints.

mod cases;
pub(super) mod packets;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, UdpSocket};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::{
    Daemon, DaemonConfig, KubeProxy, Namespace, Outside, ProxiedPort, ProxiedService, ProxyMode, ScratchDir,
    ServiceProtocol,
};

use crate::fixture::pods;
use crate::services::service::{WEB, service};
use cases::{cases, jumbo_cases, service_cases};
use packets::End::{self, Outside as Out, Pod0, Pod1};
use packets::{Arrival, Before, Case, as_received};

/// Addresses of the node, by family.
const NODE: [&str; 2] = ["172.18.0.2", "fd00:172:18::2"];
/// A port of the node that leads to the Service's backend.
pub(super) const NODE_PORT: u16 = 30_080;
/// Address of a DNS cache on the node.
const CACHE: &str = "169.254.20.10";
/// Idle timeouts, so that a pause of two seconds is as days are.
pub(super) const SHORT: &str = "timeouts = { tcp_timeout_established = \"1s\", tcp_timeout_close_wait = \"1s\", \
                     tcp_timeout_syn_sent = \"1s\", tcp_timeout_unacknowledged = \"1s\", udp_timeout = \"1s\", \
                     udp_timeout_stream = \"1s\", sctp_timeout_established = \"1s\" }\n";

/// How two nodes are set up that differ in the daemon alone.
#[derive(Clone, Copy, Default)]
struct Layout {
    /// Keys of the daemon's connection table.
    conntrack: &'static str,
    /// The MTU of the pods' links, if it is not that of Ethernet.
    mtu: Option<u32>,
    /// kube-proxy's rules for a Service and its node port, with the second pod as backend.
    proxy: Option<ProxyMode>,
}

/// A node with two pods, a machine behind it, and sockets on the wires of all three.
struct Node {
    cluster: Cluster,
    outside: Outside,
    daemon: Option<Daemon>,
    config: DaemonConfig,
    _scratch: ScratchDir,
}

/// Where a packet arrived, and as what.
#[derive(Default)]
struct Expected {
    exactly: BTreeMap<(usize, Vec<u8>), usize>,
    ending: Vec<(usize, Vec<u8>, usize)>,
}

impl Expected {
    fn of(cases: &[Case]) -> Self {
        let mut all = Self::default();
        for (number, case) in cases.iter().enumerate() {
            match &case.arrival {
                Arrival::Exactly(packet) => {
                    let before = all.exactly.insert((case.to as usize, as_received(packet).unwrap()), number);
                    assert_eq!(before, None, "each packet differs from all others: {}", case.name);
                }
                Arrival::Ending(end) => all.ending.push((case.to as usize, end.clone(), number)),
            }
        }
        all
    }

    fn find(&self, end: usize, packet: Vec<u8>) -> Option<usize> {
        let by_end = || {
            let found = self.ending.iter().find(|(at, mark, _)| *at == end && packet.ends_with(mark))?;
            Some(found.2)
        };
        by_end().or_else(|| self.exactly.get(&(end, packet)).copied())
    }
}

impl Node {
    fn new(with_daemon: bool, layout: Layout) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::write(manifests.join("all.yaml"), pods(2)).unwrap();
        let objects = read_objects(&manifests).unwrap();
        let mut cluster = match layout.mtu {
            Some(mtu) => Cluster::build_with_mtu(&objects, mtu).unwrap(),
            None => Cluster::build(&objects).unwrap(),
        };
        let outside = cluster.node.add_outside("outside").unwrap();
        if let Some(mode) = layout.proxy {
            proxy(mode, &cluster).install(cluster.node.namespace()).unwrap();
            cluster.node.pods().iter().map(|pod| pod.namespace()).chain([outside.namespace()]).for_each(silence);
        }
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.conntrack += layout.conntrack;
        let daemon = with_daemon.then(|| Daemon::start(cluster.node.namespace(), &config).unwrap());
        Self { cluster, outside, daemon, config, _scratch: scratch }
    }

    fn restart(&mut self) {
        let Some(daemon) = self.daemon.take() else { return };
        daemon.signal(Signal::SIGTERM).unwrap();
        daemon.wait(Duration::from_secs(60)).unwrap();
        self.daemon = Some(Daemon::start(self.cluster.node.namespace(), &self.config).unwrap());
    }

    fn ends(&self) -> [End; 3] {
        [Pod0, Pod1, Out]
    }

    fn wire(&self, end: End) -> (PacketSocket, [u8; 12]) {
        let (namespace, interface) = match end {
            Out => (self.outside.namespace(), self.outside.interface()),
            pod => {
                let pod = self.cluster.node.pod(if pod == Pod0 { "test/pod-0" } else { "test/pod-1" }).unwrap();
                (pod.namespace(), pod.interface())
            }
        };
        let own = namespace.netlink().unwrap().mac("eth0").unwrap();
        let gateway = self.cluster.node.netlink().mac(interface).unwrap();
        let mut macs = [0; 12];
        macs[..6].copy_from_slice(&gateway);
        macs[6..].copy_from_slice(&own);
        (PacketSocket::open(namespace).unwrap(), macs)
    }

    /// Sends all packets in order. Returns how often each of them arrived at its end, by its number.
    fn run(&mut self, cases: &[Case], expected: Option<&[usize]>) -> Vec<usize> {
        let wires = self.ends().map(|end| self.wire(end));
        let wanted = Expected::of(cases);
        let mut arrived = vec![0; cases.len()];
        let listen = |arrived: &mut Vec<usize>, time| {
            for (end, (wire, _)) in wires.iter().enumerate() {
                for frame in wire.received(time).unwrap() {
                    let packet = frame.get(14..).and_then(as_received);
                    if let Some(number) = packet.and_then(|packet| wanted.find(end, packet)) {
                        arrived[number] += 1;
                    }
                }
            }
        };
        for case in cases {
            match case.before {
                Before::Nothing => {}
                Before::Pause => std::thread::sleep(Duration::from_secs(2)),
                Before::Restart => self.restart(),
            }
            let (wire, macs) = &wires[case.from as usize];
            let ethertype: [u8; 2] = if case.packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
            let frame = [&macs[..], &ethertype, &case.packet].concat();
            let deadline = Instant::now() + Duration::from_secs(30);
            while let Err(error) = wire.send(&frame) {
                assert!(Instant::now() < deadline, "{}: {error}", case.name);
                std::thread::yield_now();
            }
            listen(&mut arrived, Duration::from_millis(1));
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_complete =
            |arrived: &[usize]| expected.is_some_and(|expected| arrived.iter().zip(expected).all(|(a, b)| a >= b));
        let mut quiet = 0;
        while quiet < 5 && !is_complete(&arrived) && Instant::now() < deadline {
            let before: usize = arrived.iter().sum();
            listen(&mut arrived, Duration::from_millis(100));
            // Without knowing what is to come: until nothing has come for some time.
            quiet = if expected.is_none() && arrived.iter().sum::<usize>() == before { quiet + 1 } else { 0 };
        }
        arrived
    }
}

/// kube-proxy's rules for a Service with a node port, of which the second pod is the backend.
pub(super) fn proxy(mode: ProxyMode, cluster: &Cluster) -> KubeProxy {
    let port = |protocol, target| {
        let backends = [false, true].map(|v6| Pod1.at(v6, target)).into();
        ProxiedPort { protocol, number: WEB, node_port: Some(NODE_PORT), backends }
    };
    let ports = vec![port(ServiceProtocol::Tcp, 8080), port(ServiceProtocol::Udp, 53)];
    let api = ProxiedService { name: "test/api".to_owned(), addresses: [false, true].map(service).into(), ports };
    KubeProxy { mode, node: cluster.node.addresses().to_vec(), services: vec![api] }
}

/// Has a stack answer nothing: connections that the node tracks are those of the packets alone.
pub(super) fn silence(namespace: &Namespace) {
    const RULES: &str = "table inet silent { chain output { type filter hook output priority 0; policy drop;\n\
                         icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept\n}\n}\n";
    let mut nft = namespace.command("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    nft.stdin.take().unwrap().write_all(RULES.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
}

/// Sends the same packets on two nodes. At least so many of them pass a plain one.
fn both_forward_the_same(cases: &[Case], layout: Layout, least: usize) {
    let plain = Node::new(false, layout).run(cases, None);
    let mut with_penstock = Node::new(true, layout);
    let counted: Vec<usize> =
        plain.iter().zip(cases).map(|(count, case)| if case.exception.is_some() { 0 } else { *count }).collect();
    let arrived = with_penstock.run(cases, Some(&counted));
    let differs = |number: &usize| (plain[*number] > 0) != (arrived[*number] > 0);
    let (mut wrong, mut exceptions) = (Vec::new(), BTreeMap::new());
    for number in (0..cases.len()).filter(differs) {
        match cases[number].exception {
            Some(reason) if plain[number] > 0 => *exceptions.entry(reason).or_insert(0) += 1,
            _ => wrong.push(format!("{}: plain {}, Penstock {}", cases[number].name, plain[number], arrived[number])),
        }
    }
    let forwarded = plain.iter().filter(|count| **count > 0).count();
    println!(
        "{} packets, {forwarded} forwarded by a plain kernel; not by Penstock, as written: {exceptions:?}",
        cases.len()
    );
    let log = with_penstock.daemon.as_ref().map(|daemon| daemon.log().lines().join("\n")).unwrap_or_default();
    assert!(wrong.is_empty(), "{}\n\nthe daemon wrote:\n{log}", wrong.join("\n"));
    assert!(forwarded >= least, "only {forwarded} packets of {} passed a plain kernel", cases.len());
}

#[test]
fn a_node_without_policies_forwards_what_a_plain_kernel_does() {
    both_forward_the_same(&cases(), Layout { conntrack: SHORT, ..Layout::default() }, 300);
}

#[test]
fn jumbo_frames_pass_a_node_without_policies() {
    let cases = jumbo_cases();
    both_forward_the_same(&cases, Layout { mtu: Some(9001), ..Layout::default() }, cases.len());
}

#[test]
fn what_the_node_translates_passes_as_on_a_plain_node() {
    for mode in [ProxyMode::Iptables, ProxyMode::Nftables] {
        both_forward_the_same(&service_cases(), Layout { proxy: Some(mode), ..Layout::default() }, 60);
    }
}

/// Asks a server on the node, at an address of its link, from each pod.
fn answers_at_link_local(node: &Node) -> usize {
    let namespace = node.cluster.node.namespace();
    let cache: IpAddr = CACHE.parse().unwrap();
    let loopback = node.cluster.node.netlink().index("lo").unwrap();
    node.cluster.node.netlink().add_address(loopback, cache.into()).unwrap();
    let server = namespace.udp((cache, 53)).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let client = |name: &str| {
        let pod = node.cluster.node.pod(name).unwrap();
        pod.namespace().udp((pod.address(false).unwrap(), 0)).unwrap()
    };
    let clients = ["test/pod-0", "test/pod-1"].map(client);
    let is_answered = |client: &UdpSocket| {
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (mut buffer, deadline) = ([0; 64], Instant::now() + Duration::from_secs(5));
        while Instant::now() < deadline {
            client.send_to(b"question", (cache, 53)).unwrap();
            if let Ok((length, from)) = server.recv_from(&mut buffer) {
                server.send_to(&buffer[..length], from).unwrap();
            }
            if client.recv(&mut buffer).is_ok() {
                return true;
            }
        }
        false
    };
    clients.iter().filter(|client| is_answered(client)).count()
}

#[test]
fn pods_reach_the_node_at_link_local_addresses() {
    for with_daemon in [false, true] {
        assert_eq!(
            answers_at_link_local(&Node::new(with_daemon, Layout::default())),
            2,
            "with a daemon: {with_daemon}"
        );
    }
}

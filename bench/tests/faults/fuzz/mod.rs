//! Random frames on real veths, from pods and from outside: whatever arrives anywhere was allowed for who really sent it.
//!
//! Each payload has the number of its datagram in it, again and again, so that what arrives says who sent it, however it was changed, cut
//! up or translated on the way. [`evaluator`] says what may arrive, without the code of policy.
//!
//! Who finds each mend when it is taken out? *Mutant*: `faults::mends`, which takes it out of the programs and asks the fuzzer, or the test that
//! it names there; the rest was taken out of the daemon by hand.
//!
//! | mend | found by |
//! |---|---|
//! | a checksum only where the transport header has it; VLAN tags | mutant: fuzzer |
//! | the kernel's translation behind IPv6 options, and in later fragments | mutant: fuzzer |
//! | local output is known by its socket; pieces of what the node cuts up have entered it | mutant: fuzzer, `services::answering` |
//! | nobody outside sends as a pod, answers as a backend, or as the node | mutant: fuzzer, `services::answering` |
//! | what the node masquerades has no exemption of the node | fuzzer |
//! | egress is asked behind the translation, at whatever address of the node | mutant: fuzzer |
//! | programs at uplinks are pinned | `services::answering::without_a_daemon_no_node_port_leads_where_policy_denies` |
//! | a masqueraded client is noted, and kept beside its connection | mutant: `services::masquerade`; `…::denying_a_masqueraded_client_ends_its_connections`, `penstock-dataplane via_host` |
//! | tunnels from pods, at the sender's node and at the receiver's | fuzzer, `services::tunnels`; mutant: `services::tunnels` |
//! | neighbour discovery is not routed off a bridge | mutant: fuzzer |
//! | a neighbour's MAC, its address by ARP, also after the link was down | `faults::identity`, mutant: `faults::identity`, `faults::spoofing` |
//! | a pod that is not served is closed or named | `system::operation::a_pod_under_policy_is_served_or_closed_or_named` |
//! | segments count before they are let in | `xdp-redirect tcx a_long_packet_counts_as_its_segments_before_it_is_let_in` |
//! | descriptors for closing, connections to the metrics port | `penstock-agent reserved_descriptors`, `exporter::connections` |

mod arrivals;
mod evaluator;
mod frames;
mod headers;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::{
    KubeProxy, Namespace, Offload, Outside, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol, masquerade_outside,
};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use self::arrivals::{Sent, judge};
use self::evaluator::{
    CLIENT, End, FAR, NODE, NODE_PORT, NODE_PORT_OUTSIDE, OUTSIDE_UDP, SERVED_TCP, SERVED_UDP, SERVICE, SERVICE_PORT,
    policies,
};
use self::frames::{Macs, Maker, payload};
use crate::fixture::{Fixture, pods};
use crate::forger::VirtioSocket;

const LIMIT: Duration = Duration::from_secs(30);
/// The MAC of the node's tunnel, to which inner frames are sent.
const TUNNEL_MAC: &str = "02:02:02:02:02:02";
/// Datagrams of each sender in a round; what has arrived is read after each.
const ROUND: usize = 24;

/// Who translates Services.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Translation {
    None,
    Kernel(ProxyMode),
}

/// How a node is set up.
#[derive(Clone, Copy, Debug)]
struct Setting {
    offload: bool,
    is_bridged: bool,
    translation: Translation,
}

/// All of them.
fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for offload in [true, false] {
        for is_bridged in [false, true] {
            for translation in
                [Translation::None, Translation::Kernel(ProxyMode::Iptables), Translation::Kernel(ProxyMode::Nftables)]
            {
                all.push(Setting { offload, is_bridged, translation });
            }
        }
    }
    all
}

/// A Service in front of the served pod, and a policy for each pod but the free one.
fn manifests() -> String {
    let mut yaml = pods(4) + &policies();
    yaml += &format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: test, name: api}}\n\
         spec: {{clusterIPs: [{}, \"{}\"], ports: [{{name: web, port: {SERVICE_PORT}, targetPort: {SERVED_TCP}}}, \
         {{name: dns, protocol: UDP, port: {SERVICE_PORT}, targetPort: {SERVED_UDP}}}]}}\n",
        SERVICE[0], SERVICE[1]
    );
    for v6 in [false, true] {
        let family = if v6 { "IPv6" } else { "IPv4" };
        yaml += &format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: test, name: api-{}, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: {family}\nendpoints: [{{addresses: ['{}']}}]\nports: [{{name: web, port: {SERVED_TCP}}}, \
             {{name: dns, protocol: UDP, port: {SERVED_UDP}}}]\n",
            family.to_lowercase(),
            End::Served.address(v6)
        );
    }
    yaml
}

/// Rules as kube-proxy has them: the Service, node ports to the served pod, and one to a machine that no pod under policy may reach.
fn translate(node: &Namespace, mode: ProxyMode) {
    let served = |port| [false, true].map(|v6| SocketAddr::new(End::Served.address(v6), port)).to_vec();
    let far = FAR.map(|address| SocketAddr::new(address.parse().unwrap(), 53)).to_vec();
    let port = |protocol, number, node_port, backends| ProxiedPort { protocol, number, node_port, backends };
    let (tcp, udp) = (ServiceProtocol::Tcp, ServiceProtocol::Udp);
    let ports = vec![
        port(tcp, SERVICE_PORT, Some(NODE_PORT), served(SERVED_TCP)),
        port(udp, SERVICE_PORT, Some(NODE_PORT), served(SERVED_UDP)),
        port(tcp, NODE_PORT_OUTSIDE, Some(NODE_PORT_OUTSIDE), far.clone()),
        port(udp, NODE_PORT_OUTSIDE, Some(NODE_PORT_OUTSIDE), far),
    ];
    let addresses = SERVICE.map(|address| address.parse().unwrap()).to_vec();
    let services = vec![ProxiedService { name: "test/api".to_owned(), addresses, ports }];
    let addresses = NODE.iter().flatten().map(|address| address.parse().unwrap()).collect();
    KubeProxy { mode, node: addresses, services }.install(node).unwrap();
    masquerade_outside(node).unwrap();
}

/// Runs the `ip` command in a namespace.
fn ip(namespace: &Namespace, arguments: &str) {
    let output = namespace.command("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A node under fuzzing.
struct World {
    fixture: Fixture,
    _outside: Outside,
    setting: Setting,
    maker: Maker,
    senders: Vec<VirtioSocket>,
    listeners: Vec<PacketSocket>,
    namespaces: Vec<Namespace>,
    sent: Vec<Sent>,
    /// Allowed arrivals, by sender and receiver.
    arrived: BTreeMap<(End, End), u64>,
    /// Frames that must not have arrived, with how they were sent.
    wrong: Vec<String>,
}

impl World {
    fn new(setting: Setting, random: SmallRng) -> Self {
        let mut outside = None;
        let start = if setting.is_bridged { Fixture::bridged } else { Fixture::of };
        let fixture = start(
            &manifests(),
            Box::new(|cluster: &mut penstock_bench::cluster::Cluster, config: &mut _| {
                let config: &mut penstock_bench::testbed::DaemonConfig = config;
                config.offload = setting.offload;
                config.keys += "node_addresses = [\"203.0.113.9\"]\n";
                let machine = cluster.node.add_outside("outside").unwrap();
                // A device that computes no checksums: the kernel writes them before it.
                cluster.node.namespace().set_offload(machine.interface(), Offload::TxChecksum, false).unwrap();
                // A tunnel that a node has for its pods: it unwraps what comes to its port.
                let tunnel = "type vxlan external dstport 8472 nolearning";
                ip(cluster.node.namespace(), &format!("link add tunnel address {TUNNEL_MAC} {tunnel}"));
                ip(cluster.node.namespace(), "link set tunnel up");
                for far in FAR {
                    // IPv6 answers for an address at its own interface alone.
                    let nodad = if far.contains(':') { " nodad" } else { "" };
                    ip(machine.namespace(), &format!("address add {far} dev eth0{nodad}"));
                }
                match setting.translation {
                    Translation::None => {}
                    Translation::Kernel(mode) => translate(cluster.node.namespace(), mode),
                }
                outside = Some(machine);
            }),
        );
        fixture
            .daemon
            .log()
            .wait_for_after(0, if setting.is_bridged { "pods=4 " } else { "ready: 4 pods" }, LIMIT)
            .unwrap();
        let outside = outside.unwrap();
        let mut namespaces: Vec<Namespace> =
            End::PODS.iter().map(|pod| fixture.site(&pod.pod()).namespace.clone()).collect();
        namespaces.push(outside.namespace().clone());
        let maker = Maker::new(random, macs(&fixture, &outside, &namespaces, setting.is_bridged));
        let listeners = namespaces.iter().map(|namespace| PacketSocket::open(namespace).unwrap()).collect();
        let senders = namespaces.iter().map(VirtioSocket::open).collect();
        let (sent, arrived, wrong) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { fixture, _outside: outside, setting, maker, senders, listeners, namespaces, sent, arrived, wrong }
    }

    /// One round: every sender sends, then everything that has arrived is judged.
    fn round(&mut self) {
        for from in End::ALL {
            for _ in 0..ROUND {
                let (frames, sent) = self.maker.datagram(from, self.sent.len() as u32);
                self.sent.push(sent);
                for frame in frames {
                    // The kernel refuses some headers, and what a full queue does not take.
                    let _ = self.senders[from as usize].send(&frame.virtio, &frame.bytes);
                }
            }
        }
        self.judge_arrivals(Duration::from_millis(2));
    }

    fn judge_arrivals(&mut self, time: Duration) {
        for receiver in End::ALL {
            for frame in self.listeners[receiver as usize].received(time).unwrap() {
                let (sent, verdict) = judge(receiver, &frame, &self.sent, self.setting.is_bridged);
                let Some(sent) = sent else { continue };
                match verdict {
                    Ok(()) => *self.arrived.entry((sent.from, receiver)).or_default() += 1,
                    Err(why) if self.wrong.len() < 20 => self.wrong.push(format!(
                        "{:?} to {receiver:?} {why}; sent to {} by {} {:?}: {}\n    {}",
                        sent.from,
                        sent.to,
                        sent.protocol,
                        sent.ports,
                        sent.how.join(", "),
                        frame.iter().take(96).map(|byte| format!("{byte:02x}")).collect::<String>(),
                    )),
                    Err(_) => {}
                }
            }
        }
    }

    /// Connections that policy allows, which the forged frames of the same flows can then use.
    fn converse(&mut self) {
        let number = self.sent.len() as u32;
        let sent = |from: End| Sent {
            from,
            to: from.address(false),
            protocol: evaluator::UDP,
            ports: vec![[CLIENT.start, SERVED_UDP], [CLIENT.start, OUTSIDE_UDP]],
            how: vec!["a conversation"],
        };
        self.sent.extend([sent(End::Narrow), sent(End::Served), sent(End::Outside)]);
        for v6 in [false, true] {
            let to_served = (End::Served, SocketAddr::new(End::Served.address(v6), SERVED_UDP));
            let service = SocketAddr::new(SERVICE[usize::from(v6)].parse().unwrap(), SERVICE_PORT);
            self.exchange(number, CLIENT.start, to_served, to_served.1);
            if self.setting.translation != Translation::None {
                self.exchange(number, CLIENT.start + 1, to_served, service);
            }
            let near = (End::Outside, SocketAddr::new(End::Outside.address(v6), OUTSIDE_UDP));
            self.exchange(number, CLIENT.start, near, near.1);
        }
    }

    /// Sends until an answer has come back; a worker may be busy with forged frames.
    fn exchange(&mut self, number: u32, port: u16, (end, listens): (End, SocketAddr), to: SocketAddr) {
        let bind = |end: End, at: SocketAddr| {
            let socket = self.namespaces[end as usize].udp(at).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            socket
        };
        let client = bind(End::Narrow, SocketAddr::new(End::Narrow.address(to.is_ipv6()), port));
        let server = bind(end, listens);
        let question = payload(number, 64);
        let answer = payload(number + if end == End::Served { 1 } else { 2 }, 64);
        let is_answered = |_| {
            let mut bytes = [0; 2048];
            client.send_to(&question, to).unwrap();
            while let Ok((length, peer)) = server.recv_from(&mut bytes) {
                if bytes[..length] == question[..] {
                    let _ = server.send_to(&answer, peer);
                    break;
                }
            }
            std::iter::from_fn(|| client.recv(&mut bytes).ok().map(|length| bytes[..length] == answer[..])).any(|it| it)
        };
        let is_answered = (0..200).any(is_answered);
        assert!(is_answered, "{:?}: {to} from {port} does not answer\n{}", self.setting, self.logs());
    }

    /// The narrow pod takes its free neighbour's MAC, says that it has its address, and sends as it would.
    fn copy_mac(&mut self) {
        let (own, other) = (self.maker.macs.own[End::Narrow as usize], self.maker.macs.own[End::Free as usize]);
        self.set_mac(other);
        let sender = &self.senders[End::Narrow as usize];
        let IpAddr::V4(free) = End::Free.address(false) else { return };
        let claim = [&other[..], &free.octets(), &[0; 6], &free.octets()].concat();
        let arp = [&[0xff; 6][..], &other, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &claim].concat();
        for _ in 0..3 {
            let _ = sender.send(&crate::forger::VirtioHeader::default(), &arp);
            std::thread::sleep(Duration::from_millis(20));
        }
        for _ in 0..20 * ROUND {
            let number = self.sent.len() as u32;
            let (frames, sent) = self.maker.as_another(End::Free, number);
            self.sent.push(sent);
            for frame in frames {
                let _ = self.senders[End::Narrow as usize].send(&frame.virtio, &frame.bytes);
            }
        }
        self.judge_arrivals(Duration::from_millis(20));
        self.set_mac(own);
    }

    /// Gives the narrow pod's interface this MAC, as it is, or while it is down for a moment.
    fn set_mac(&mut self, mac: [u8; 6]) {
        let namespace = self.namespaces[End::Narrow as usize].clone();
        let is_down = self.maker.random.random();
        if is_down {
            // Without these the pod loses its IPv6 addresses, or cannot use them for a while.
            for setting in ["keep_addr_on_down=1", "accept_dad=0"] {
                let set = ["-q", "-w", &format!("net.ipv6.conf.eth0.{setting}")];
                assert!(namespace.command("sysctl").args(set).status().unwrap().success());
            }
            ip(&namespace, "link set eth0 down");
        }
        ip(&namespace, &format!("link set eth0 address {}", mac.map(|byte| format!("{byte:02x}")).join(":")));
        if is_down {
            ip(&namespace, "link set eth0 up");
            ip(&namespace, "route replace default via 10.244.1.1");
            ip(&namespace, "-6 route replace default via fd00:10:244:1::1");
            // It has an error to report.
            self.listeners[End::Narrow as usize] = PacketSocket::open(&namespace).unwrap();
        }
        self.maker.macs.own[End::Narrow as usize] = mac;
    }

    fn logs(&self) -> String {
        [self.fixture.daemon.log().lines(), self.fixture.statistics()].concat().join("\n")
    }
}

fn macs(fixture: &Fixture, outside: &Outside, namespaces: &[Namespace], is_bridged: bool) -> Macs {
    let netlink = fixture.cluster.node.netlink();
    let own: Vec<[u8; 6]> = namespaces.iter().map(|of| of.netlink().unwrap().mac("eth0").unwrap()).collect();
    let pods = End::PODS.iter().map(|pod| fixture.cluster.node.pod(&pod.pod()).unwrap().interface().to_owned());
    let links: Vec<String> = pods.chain([outside.interface().to_owned()]).collect();
    let node: [[u8; 6]; 5] = std::array::from_fn(|index| netlink.mac(&links[index]).unwrap());
    let mut gateway = node;
    if is_bridged {
        gateway[..4].fill(netlink.mac("cni0").unwrap());
    }
    Macs { own: own.try_into().unwrap(), gateway, node }
}

/// Rounds, or until when.
enum Length {
    Rounds(usize),
    Until(Instant),
}

fn fuzz(setting: Setting, seed: u64, length: &Length) {
    println!("{setting:?}, seed {seed}");
    let mut world = World::new(setting, SmallRng::seed_from_u64(seed));
    for round in 0.. {
        let is_over = match length {
            Length::Rounds(rounds) => round >= *rounds,
            Length::Until(end) => Instant::now() >= *end && round >= 16,
        };
        if is_over || !world.wrong.is_empty() && round % 16 == 0 {
            break;
        }
        if round % 16 == 0 {
            world.converse();
        }
        if setting.is_bridged && round % 64 == 8 {
            world.copy_mac();
        }
        world.round();
    }
    world.judge_arrivals(Duration::from_millis(100));
    println!("{} sent, arrived {:?}", world.sent.len(), world.arrived);
    assert!(world.wrong.is_empty(), "{setting:?}, seed {seed}:\n{}\n{}", world.wrong.join("\n"), world.logs());
    for pair in [
        (End::Narrow, End::Served),
        (End::Served, End::Narrow),
        (End::Narrow, End::Outside),
        (End::Outside, End::Free),
        (End::Free, End::Outside),
    ] {
        assert!(world.arrived.get(&pair).is_some_and(|count| *count > 5), "{pair:?}: {:?}", world.arrived);
    }
    let lines = world.fixture.daemon.log().lines();
    assert!(!lines.iter().any(|line| line.contains("panicked")), "{}", lines.join("\n"));
}

#[test]
fn random_frames_arrive_only_where_policy_allows_their_sender() {
    for (offload, is_bridged, translation) in [
        (true, false, Translation::Kernel(ProxyMode::Nftables)),
        (true, true, Translation::Kernel(ProxyMode::Iptables)),
        (false, false, Translation::Kernel(ProxyMode::Nftables)),
    ] {
        fuzz(Setting { offload, is_bridged, translation }, 44, &Length::Rounds(48));
    }
}

/// `FUZZ_SECONDS` makes it longer, `FUZZ_ONLY` takes only settings whose description has this text, and `FUZZ_SEED` repeats what a failure
/// has printed.
#[test]
#[ignore = "takes a minute; make test-long runs it"]
fn random_frames_for_a_minute_arrive_only_where_policy_allows() {
    let seconds = std::env::var("FUZZ_SECONDS").map_or(60, |text| text.parse().expect("FUZZ_SECONDS is a number"));
    let only = std::env::var("FUZZ_ONLY").unwrap_or_default();
    let all: Vec<Setting> = settings().into_iter().filter(|setting| format!("{setting:?}").contains(&only)).collect();
    let each = Duration::from_secs(seconds) / all.len() as u32;
    let seed = std::env::var("FUZZ_SEED").ok().map(|text| text.parse().expect("FUZZ_SEED is a number"));
    let mut random: SmallRng = SmallRng::from_os_rng();
    for setting in all.choose_multiple(&mut random, all.len()).copied().collect::<Vec<_>>() {
        fuzz(setting, seed.unwrap_or_else(|| random.random()), &Length::Until(Instant::now() + each));
    }
}

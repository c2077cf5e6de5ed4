//! A node with two pods and a machine behind it, with a daemon or without, and what arrives where.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::{Daemon, DaemonConfig, Namespace, Outside, ScratchDir};

use super::bytes::{of_frame, without_choices};
use super::scripts::{group_mac, is_of_node};
use super::steps::{Act, Hop, Shot, Step};
use super::{Event, HOST_PORT, NODE, Obstacle, Reference, Setting, Translator};
use crate::fixture::{pods, policy};
use crate::forger::{VirtioHeader, VirtioSocket};
use crate::system::no_policy::packets::End::{self, Outside as Out, Pod0, Pod1};
use crate::system::no_policy::{SHORT, proxy, silence};

/// For what is about to come.
const LIMIT: Duration = Duration::from_secs(20);
/// For one packet, before the next is sent; nothing is judged by it.
const PACE: Duration = Duration::from_millis(100);
const ENDS: [End; 3] = [Pod0, Pod1, Out];
const MACS: [&str; 4] = ["pod 0's", "pod 1's", "the machine's", "the node's"];

/// A packet where it arrived: at which end, with which MACs, and its bytes.
pub(super) type Arrival = (End, [&'static str; 2], Vec<u8>);
/// Arrivals of a history, with how often, by the number of the packet that they are about.
pub(super) type Arrivals = BTreeMap<u16, BTreeMap<Arrival, usize>>;

pub(super) struct World {
    cluster: Cluster,
    outside: Outside,
    /// The obstacles on the way to it now.
    obstacles: BTreeSet<Obstacle>,
    daemon: Option<Daemon>,
    config: DaemonConfig,
    setting: Setting,
    wires: Vec<PacketSocket>,
    senders: Vec<VirtioSocket>,
    /// Addresses of the ends, and of the node towards them.
    own: Vec<[u8; 6]>,
    gateways: Vec<[u8; 6]>,
    _scratch: ScratchDir,
}

impl World {
    pub(super) fn new(setting: Setting, with_daemon: bool) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        let mut yaml = pods(2);
        if setting.reference == Reference::Tracked {
            for pod in ["pod-0", "pod-1"] {
                yaml += &policy(pod, pod, "  policyTypes: [Ingress, Egress]\n  ingress: [{}]\n  egress: [{}]\n");
            }
        }
        std::fs::write(manifests.join("all.yaml"), yaml).unwrap();
        let objects = read_objects(&manifests).unwrap();
        let mut cluster = match (setting.is_bridged, setting.mtu) {
            (true, _) => Cluster::build_bridged(&objects).unwrap(),
            (false, Some(mtu)) => Cluster::build_with_mtu(&objects, mtu).unwrap(),
            (false, None) => Cluster::build(&objects).unwrap(),
        };
        let outside = cluster.node.add_outside("outside").unwrap();
        let node = cluster.node.namespace();
        prepare(node, setting, with_daemon);
        if let Some(mode) = setting.proxy() {
            proxy(mode, &cluster).install(node).unwrap();
        }
        if setting.translator == Translator::HostPort {
            super::nft(node, &host_port());
        }
        let namespaces: Vec<&Namespace> =
            cluster.node.pods().iter().map(|pod| pod.namespace()).chain([outside.namespace()]).collect();
        namespaces.iter().for_each(|namespace| silence(namespace));
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        if setting.reference == Reference::Plain {
            config.conntrack += SHORT;
        }
        // By it daemons take over.
        config.admin = Some(scratch.path().join("admin.sock"));
        config.offload = setting.offload;
        config.keys += if setting.past_stack { "host_routing = \"auto\"\n" } else { "host_routing = \"never\"\n" };
        let wires = namespaces.iter().map(|namespace| PacketSocket::open(namespace).unwrap()).collect();
        let senders = namespaces.iter().map(|namespace| VirtioSocket::open(namespace)).collect();
        let own = namespaces.iter().map(|namespace| namespace.netlink().unwrap().mac("eth0").unwrap()).collect();
        let links = cluster.node.pods().iter().map(|pod| if setting.is_bridged { "cni0" } else { pod.interface() });
        let links: Vec<&str> = links.chain([outside.interface()]).collect();
        let gateways = links.iter().map(|link| cluster.node.netlink().mac(link).unwrap()).collect();
        let mut world = Self {
            cluster,
            outside,
            obstacles: BTreeSet::new(),
            daemon: None,
            config,
            setting,
            wires,
            senders,
            own,
            gateways,
            _scratch: scratch,
        };
        if with_daemon {
            world.start(false);
        }
        world
    }

    fn start(&mut self, takes_over: bool) {
        let node = self.cluster.node.namespace();
        let start = if takes_over { Daemon::take_over } else { Daemon::start };
        let daemon = start(node, &self.config).unwrap();
        let ready = if self.setting.is_bridged { "pods=2 " } else { "ready: 2 pods" };
        daemon.log().wait_for_after(0, ready, LIMIT).unwrap();
        self.daemon = Some(daemon);
    }

    /// An event of a history; a node without a daemon has none but pauses and obstacles.
    fn change(&mut self, event: Event) {
        match event {
            Event::Pause => std::thread::sleep(Duration::from_millis(2100)),
            Event::OfWay(obstacle) => self.change_way(obstacle),
            Event::Restart | Event::Kill | Event::TakeOver => {}
        }
        if self.daemon.is_none() {
            return;
        }
        let signal = match event {
            Event::Pause | Event::OfWay(_) => return,
            Event::TakeOver => return self.start(true),
            Event::Restart => Signal::SIGTERM,
            Event::Kill => Signal::SIGKILL,
        };
        let daemon = self.daemon.take().unwrap();
        daemon.signal(signal).unwrap();
        daemon.wait_until_ended(Duration::from_secs(60)).unwrap();
        drop(daemon);
        self.start(false);
    }

    /// Puts something into the way between pods and the machine, or takes it away.
    fn change_way(&mut self, obstacle: Obstacle) {
        let is_new = self.obstacles.insert(obstacle) || !self.obstacles.remove(&obstacle);
        let (node, link) = (self.cluster.node.namespace(), self.outside.interface());
        let command = match (obstacle, is_new) {
            (Obstacle::Rules, true) => format!(
                "nft 'table inet way {{ chain f {{ type filter hook forward priority 0; oifname {link} udp dport 53 drop; \
                 iifname {link} udp sport 53 drop; oifname {link} tcp flags psh drop; }}; }}'"
            ),
            (Obstacle::Rules, false) => "nft delete table inet way".to_owned(),
            (Obstacle::Blackhole, _) => {
                let what = if is_new { "add" } else { "del" };
                let routes = self.outside.addresses().iter().map(|to| format!("ip route {what} blackhole {to}; "));
                routes.collect()
            }
            (Obstacle::Narrow, _) => format!("ip link set {link} mtu {}", if is_new { 1300 } else { 1500 }),
        };
        let changed = node.command("sh").args(["-ec", &command]).status().unwrap();
        assert!(changed.success(), "{command}");
    }

    fn send(&self, shot: &Shot) {
        let from = shot.from as usize;
        let to = match shot.hop {
            Hop::Gateway => self.gateways[from],
            Hop::Peer(peer) => self.own[peer as usize],
            Hop::Group => group_mac(&shot.packet),
        };
        let ethertype: [u8; 2] = if shot.packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
        let frame = [&to[..], &self.own[from], &ethertype, &shot.packet].concat();
        let header = shot.open_sum.map(|(start, offset)| VirtioHeader { start, offset, ..VirtioHeader::open() });
        let deadline = Instant::now() + LIMIT;
        while let Err(error) = self.senders[from].send(&header.unwrap_or_default(), &frame) {
            // A malformed packet is refused at once, in both worlds.
            let is_busy = matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN));
            if !is_busy {
                return;
            }
            assert!(Instant::now() < deadline, "{error}");
            std::thread::yield_now();
        }
    }

    /// Sends a history. With what is expected, waits for it: before the next packet for a moment, at the end until it is there.
    pub(super) fn run(&mut self, history: &[Step], expected: Option<&Arrivals>) -> Arrivals {
        let is_open: BTreeSet<u16> = history
            .iter()
            .filter(|step| matches!(&step.act, Act::Send(shot) if shot.open_sum.is_some()))
            .map(|step| step.number)
            .collect();
        let mut arrivals = Arrivals::new();
        for step in history {
            match &step.act {
                Act::Change(event) => self.change(*event),
                Act::Send(shot) => {
                    self.send(shot);
                    self.listen(&mut arrivals, &is_open);
                    let Some(expected) = expected.filter(|_| shot.exception.is_none()) else { continue };
                    let deadline = Instant::now() + PACE;
                    while lacks(&arrivals, expected, step.number) && Instant::now() < deadline {
                        std::thread::yield_now();
                        self.listen(&mut arrivals, &is_open);
                    }
                }
            }
        }
        let (start, mut last, mut seen) = (Instant::now(), Instant::now(), 0);
        let numbers: Vec<u16> = history
            .iter()
            .filter(|step| matches!(&step.act, Act::Send(shot) if shot.exception.is_none()))
            .map(|step| step.number)
            .collect();
        let quiet = |is_complete: bool| if is_complete { Duration::from_millis(20) } else { Duration::from_secs(2) };
        loop {
            self.listen(&mut arrivals, &is_open);
            let count: usize = arrivals.values().flat_map(BTreeMap::values).sum();
            if count != seen {
                (seen, last) = (count, Instant::now());
            }
            let is_complete =
                expected.is_none_or(|expected| !numbers.iter().any(|number| lacks(&arrivals, expected, *number)));
            if last.elapsed() > quiet(is_complete) || start.elapsed() > LIMIT {
                return arrivals;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn listen(&self, arrivals: &mut Arrivals, is_open: &BTreeSet<u16>) {
        for (end, wire) in ENDS.iter().zip(&self.wires) {
            for frame in wire.waiting().unwrap() {
                let Some(packet) = of_frame(&frame) else { continue };
                let from_node = is_of_node(&packet);
                if from_node && is_redirect(&packet) {
                    // It comes from two ways over one bridge, which Penstock does not use.
                    continue;
                }
                let (bytes, about) = without_choices(packet, from_node, |number| is_open.contains(&number));
                let mut macs = [self.mac(*end, &frame[..6]), self.mac(*end, &frame[6..12])];
                if self.setting.is_bridged && *end != Out {
                    // Between two pods on a bridge Penstock sends with the bridge's address, which is written.
                    macs[1] = MACS[3];
                }
                *arrivals.entry(about).or_default().entry((*end, macs, bytes)).or_default() += 1;
            }
        }
    }

    fn mac(&self, at: End, mac: &[u8]) -> &'static str {
        if mac == self.gateways[at as usize] {
            return MACS[3];
        }
        let own = self.own.iter().position(|own| own == mac);
        own.map_or(if mac[0] & 1 == 1 { "a group's" } else { "unknown" }, |own| MACS[own])
    }

    /// The daemon's log.
    pub(super) fn log(&self) -> String {
        self.daemon.as_ref().map(|daemon| daemon.log().lines().join("\n")).unwrap_or_default()
    }
}

fn is_redirect(packet: &[u8]) -> bool {
    packet[0] == 0x45 && packet[9] == 1 && packet.get(20) == Some(&5)
}

/// Whether something expected of this packet has not arrived yet.
fn lacks(arrivals: &Arrivals, expected: &Arrivals, number: u16) -> bool {
    let Some(expected) = expected.get(&number) else { return false };
    let count = |of: &BTreeMap<Arrival, usize>| of.values().sum::<usize>();
    arrivals.get(&number).map_or(0, count) < count(expected)
}

/// The same rates and tracking of connections on both nodes.
fn prepare(node: &Namespace, setting: Setting, with_daemon: bool) {
    for (key, value) in [
        ("net/ipv4/icmp_ratemask", "0"),
        ("net/ipv6/icmp/ratelimit", "0"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/default/send_redirects", "0"),
    ] {
        node.set_sysctl(key, value).unwrap();
    }
    if setting.reference == Reference::Tracked && !with_daemon {
        let rules =
            "table inet tracked { chain forward { type filter hook forward priority 0; ct state invalid drop\n}\n}\n";
        super::nft(node, rules);
    }
}

/// Rules by which a port of the node is that of the second pod.
fn host_port() -> String {
    let rule = |v6: bool| {
        let (ip, node, pod) = (if v6 { "ip6" } else { "ip" }, NODE[usize::from(v6)], Pod1.address(v6));
        let at = |port| if v6 { format!("[{pod}]:{port}") } else { format!("{pod}:{port}") };
        let to = |protocol: &str, port| {
            format!("{ip} daddr {node} {protocol} dport {HOST_PORT} dnat {ip} to {}\n", at(port))
        };
        (to("tcp", 8080) + &to("udp", 53), format!("{ip} saddr {pod} {ip} daddr {pod} masquerade\n"))
    };
    let [v4, v6] = [false, true].map(rule);
    format!(
        "table inet hostport {{\nchain entering {{ type nat hook prerouting priority dstnat;\n{}{}}}\n\
         chain leaving {{ type nat hook postrouting priority srcnat;\n{}{}}}\n}}\n",
        v4.0, v6.0, v4.1, v6.1
    )
}

//! Services that the node's kernel translates: egress policy is for the pod, the machine or the address that answers, wherever it is.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use penstock_bench::load::PacketSocket;
use penstock_bench::probe::{self, EchoServers, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{KubeProxy, Outside, ProxiedPort, ProxiedService, ProxyMode, RouteVia, ServiceProtocol};

use crate::fixture::{Fixture, SERVICES, pods, policy};
use crate::forger::Forger;
use crate::services::service::{WEB, address, run, service, translate};

/// A Service's address that no rule translates, and which the machine outside has.
const BARE: [&str; 2] = ["10.96.0.99", "fd00:10:96::99"];
/// Identity of the server outside.
const OUTSIDE: u32 = 77;

/// A Service of the API.
fn object(name: &str, addresses: [IpAddr; 2]) -> String {
    let [v4, v6] = addresses;
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: test, name: {name}}}\n\
         spec: {{clusterIPs: [{v4}, \"{v6}\"], ports: [{{name: web, port: 80, targetPort: 8080}}, \
         {{name: dns, protocol: UDP, port: 80, targetPort: 53}}]}}\n"
    )
}

/// Egress of a pod to these peers, at a port or at any.
fn egress(of_pod: &str, peers: &str, ports: &str) -> String {
    let ports = if ports.is_empty() { String::new() } else { format!(", ports: [{ports}]") };
    policy(&format!("of-{of_pod}"), of_pod, &format!("  policyTypes: [Egress]\n  egress: [{{to: [{peers}]{ports}}}]\n"))
}

fn blocks(addresses: [IpAddr; 2]) -> String {
    addresses.map(|of| format!("{{ipBlock: {{cidr: {of}/{}}}}}", if of.is_ipv6() { 128 } else { 32 })).join(", ")
}

/// Everything but these addresses.
fn all_but([v4, v6]: [IpAddr; 2]) -> String {
    format!(
        "{{ipBlock: {{cidr: 0.0.0.0/0, except: [{v4}/32]}}}}, {{ipBlock: {{cidr: \"::/0\", except: [\"{v6}/128\"]}}}}"
    )
}

/// A node with pods, a Service whose backend is here or outside, and another Service that nothing translates.
struct Answering {
    fixture: Fixture,
    backend: u32,
    /// The addresses of the machine outside.
    machine: [IpAddr; 2],
    _servers: [EchoServers; 2],
    outside: Outside,
}

impl Answering {
    fn new(is_here: bool) -> Self {
        let (mut outside, mut backend) = (None, OUTSIDE);
        let objects = object("api", [false, true].map(service)) + &object("bare", BARE.map(address));
        let fixture = Fixture::of(&(pods(4) + &objects), |cluster, _| {
            let machine = cluster.node.add_outside("outside").unwrap();
            let site = if is_here {
                backend = cluster.site("test/pod-1").unwrap() as u32;
                cluster.sites[backend as usize].clone()
            } else {
                Site::from(&machine)
            };
            translate(cluster.node.namespace(), &site);
            let netlink = cluster.node.netlink();
            let index = netlink.index(machine.interface()).unwrap();
            for (bare, gateway) in BARE.iter().zip(machine.addresses()) {
                let length = if gateway.is_ipv6() { 128 } else { 32 };
                netlink
                    .add_route(format!("{bare}/{length}").parse().unwrap(), index, RouteVia::Gateway(*gateway))
                    .unwrap();
                let add = ["address", "add", &format!("{bare}/{length}"), "dev", "lo", "nodad"];
                run(machine.namespace(), "ip", if gateway.is_ipv6() { &add } else { &add[..5] }, "");
            }
            outside = Some(machine);
        });
        let outside = outside.unwrap();
        let site = Site::from(&outside);
        let bare = Site { addresses: BARE.map(address).into(), ..site.clone() };
        let servers = [&site, &bare].map(|site| EchoServers::start(site, OUTSIDE, &SERVICES).unwrap());
        let machine = [false, true].map(|v6| site.address(v6).unwrap());
        Self { fixture, backend, machine, _servers: servers, outside }
    }

    fn enforce(&self, policies: &str) {
        let objects = object("api", [false, true].map(service)) + &object("bare", BARE.map(address));
        self.fixture.enforce(&(pods(4) + &objects + policies));
    }

    fn probe(&self, pod: &str, to: (u32, IpAddr), protocol: Protocol) -> ProbeOutcome {
        let patience = RetryPolicy { attempts: 3, ..RetryPolicy::default() };
        probe::run_one(self.fixture.site(pod), to, protocol, patience).unwrap()
    }

    /// The answers that a pod gets at the Service, over TCP and UDP, in both families.
    fn expect(&self, what: &str, pod: &str, tcp: ProbeOutcome, udp: ProbeOutcome) {
        for v6 in [false, true] {
            for (protocol, expected) in [(Protocol::Tcp(WEB), tcp), (Protocol::Udp(WEB), udp)] {
                let outcome = self.probe(pod, (self.backend, service(v6)), protocol);
                let log = self.fixture.statistics().join("\n");
                assert_eq!(outcome, expected, "{what}: {pod} by {protocol}, IPv6: {v6}\n{log}");
            }
        }
    }
}

#[test]
fn egress_by_a_service_is_judged_for_the_pod_that_answers() {
    use ProbeOutcome::{Reached, Silent};
    let it = Answering::new(true);
    it.expect("without policy", "test/pod-0", Reached, Reached);
    let by_label = "{podSelector: {matchLabels: {app: pod-1}}}";
    let other_label = "{podSelector: {matchLabels: {app: pod-3}}}";
    it.enforce(
        &(egress("pod-0", by_label, "{port: 8080}")
            + &egress("pod-2", &blocks([false, true].map(service)), "")
            + &egress("pod-3", other_label, "")),
    );
    it.expect("allowed by its label, at the pod's port", "test/pod-0", Reached, Silent);
    it.expect("the Service's address alone", "test/pod-2", Silent, Silent);
    it.expect("another label", "test/pod-3", Silent, Silent);
    it.enforce(&(egress("pod-0", by_label, "") + &egress("pod-2", by_label, "{port: 53, protocol: UDP}")));
    it.expect("after a change", "test/pod-0", Reached, Reached);
    it.expect("names by label", "test/pod-2", Silent, Reached);
}

#[test]
fn egress_by_a_service_is_judged_for_a_machine_elsewhere() {
    use ProbeOutcome::{Reached, Silent};
    let it = Answering::new(false);
    it.expect("without policy", "test/pod-0", Reached, Reached);
    it.enforce(
        &(egress("pod-0", &blocks(it.machine), "{port: 8080}")
            + &egress("pod-1", &blocks([false, true].map(service)), "")
            + &egress("pod-2", &all_but(it.machine), "")),
    );
    it.expect("its address and port", "test/pod-0", Reached, Silent);
    it.expect("the Service's address alone", "test/pod-1", Silent, Silent);
    it.expect("everything but that machine", "test/pod-2", Silent, Silent);
    it.expect("no policy", "test/pod-3", Reached, Reached);
    it.enforce(&(egress("pod-2", &blocks(it.machine), "") + &egress("pod-0", &all_but(it.machine), "")));
    it.expect("after a change", "test/pod-2", Reached, Reached);
    it.expect("denied by a change", "test/pod-0", Silent, Silent);
}

#[test]
fn an_untranslated_service_is_judged_by_its_own_address() {
    let it = Answering::new(true);
    it.enforce(
        &(egress("pod-0", "{podSelector: {}}", "")
            + &egress("pod-1", &blocks(BARE.map(address)), "")
            + &egress("pod-2", &all_but(BARE.map(address)), "")),
    );
    for (pod, expected) in [
        ("test/pod-0", ProbeOutcome::Silent),
        ("test/pod-1", ProbeOutcome::Reached),
        ("test/pod-2", ProbeOutcome::Silent),
        ("test/pod-3", ProbeOutcome::Reached),
    ] {
        for bare in BARE.map(address) {
            for protocol in [Protocol::Tcp(8080), Protocol::Udp(53)] {
                let outcome = it.probe(pod, (OUTSIDE, bare), protocol);
                assert_eq!(outcome, expected, "{pod} to {bare}\n{}", it.fixture.statistics().join("\n"));
            }
        }
    }
}

/// Whether the machine outside gets a frame with this mark that a pod sends. What is not expected is not waited for long.
fn leaves(it: &Answering, inside: &mut Forger, frame: &[u8], mark: &[u8], is_expected: bool) -> bool {
    let seen = PacketSocket::open(it.outside.namespace()).unwrap();
    (0..if is_expected { 20 } else { 4 }).any(|_| {
        inside.send(frame);
        let frames = seen.received(Duration::from_millis(200)).unwrap();
        frames.iter().any(|frame| frame.windows(mark.len()).any(|bytes| bytes == mark))
    })
}

/// The kernel tracks what comes with the address of a Service, whatever a worker says to it. What the pod sends back answers it then, as far
/// as the kernel knows: it does for a worker only if the pod's ingress policy allows what came.
#[test]
fn who_sends_as_a_service_first_opens_no_way_back() {
    const MARK: &[u8] = b"secret";
    let it = Answering::new(true);
    let closed = |pod: &str| policy(&format!("closed-{pod}"), pod, "  policyTypes: [Ingress]\n");
    let inside = "{podSelector: {}}";
    it.enforce(&(egress("pod-0", inside, "") + &closed("pod-0") + &egress("pod-2", inside, "")));
    for v6 in [false, true] {
        for (pod, passes) in [("test/pod-0", false), ("test/pod-2", true), ("test/pod-3", true)] {
            let here = (it.fixture.site(pod).address(v6).unwrap(), 5000);
            let there = (address(BARE[usize::from(v6)]), 7777);
            let (mut inside, mut outside) = (Forger::of(&it.fixture, pod), Forger::outside(&it.fixture, &it.outside));
            let first = outside.udp(there, here, b"first");
            (0..3).for_each(|_| outside.send(&first));
            // It is tracked once it has been sent on, or dropped.
            std::thread::sleep(Duration::from_millis(200));
            let back = inside.udp(here, there, MARK);
            let found = leaves(&it, &mut inside, &back, MARK, passes);
            assert_eq!(found, passes, "{pod}, IPv6: {v6}\n{}", it.fixture.statistics().join("\n"));
            // Another connection to there is the pod's own.
            let other = inside.udp((here.0, 5001), there, b"another");
            let is_free = pod == "test/pod-3";
            let found = leaves(&it, &mut inside, &other, b"another", is_free);
            assert_eq!(found, is_free, "{pod}, opened by itself, IPv6: {v6}\n{}", it.fixture.statistics().join("\n"));
        }
    }
}

/// Whoever may write a Service chooses its external addresses: a machine's, another node's, or those of a pod there.
#[test]
fn a_services_external_address_takes_nothing_from_who_has_it() {
    let it = Answering::new(true);
    let site = Site { addresses: it.machine.into(), ..Site::from(&it.outside) };
    let [v4, v6] = it.machine;
    let tenants = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: evil, name: mine}}\n\
         spec: {{externalIPs: [{v4}, \"{v6}\"], ports: [{{port: 9999}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: evil, name: balanced}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: 9999}}]}}\nstatus: {{loadBalancer: {{ingress: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}}}\n"
    );
    let of_pod = format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{namespace: test, name: far, labels: {{app: far}}}}\n\
         spec: {{nodeName: node-b, containers: []}}\nstatus: {{phase: Running, podIPs: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}\n"
    );
    let of_node = format!(
        "---\napiVersion: v1\nkind: Node\nmetadata: {{name: node-b}}\n\
         status: {{addresses: [{{type: InternalIP, address: {v4}}}, {{type: InternalIP, address: \"{v6}\"}}]}}\n"
    );
    // Whom it may ask, and who may ask it.
    let own = egress("pod-0", "{podSelector: {matchLabels: {app: pod-1}}}", "");
    let mut turn = 0;
    for (what, owner) in [("a machine", ""), ("a pod of another node", &of_pod), ("another node", &of_node)] {
        for claims in ["", &tenants, ""] {
            // Something changes each time, so that there is a snapshot to wait for.
            turn += 1;
            let other = egress("pod-3", "{podSelector: {}}", &format!("{{port: {turn}}}"));
            it.enforce(&[&own, &other, owner, claims].concat());
            for to in it.fixture.site("test/pod-0").addresses.clone() {
                for protocol in [Protocol::Tcp(8080), Protocol::Udp(53)] {
                    let patience = RetryPolicy { attempts: 3, ..RetryPolicy::default() };
                    let pod = it.fixture.cluster.site("test/pod-0").unwrap() as u32;
                    let outcome = probe::run_one(&site, (pod, to), protocol, patience).unwrap();
                    let log = it.fixture.statistics().join("\n");
                    assert_eq!(
                        outcome,
                        ProbeOutcome::Reached,
                        "{what}, claimed: {}, {protocol}\n{log}",
                        !claims.is_empty()
                    );
                }
            }
            // No way out for the pod, either.
            for to in it.machine {
                assert_eq!(
                    it.probe("test/pod-0", (OUTSIDE, to), Protocol::Udp(53)),
                    ProbeOutcome::Silent,
                    "{what}: {to}"
                );
            }
        }
    }
}

/// A datagram of a pod to `to`, and the answers that it gets: any, and one that a machine outside forges.
fn answers(it: &Answering, pod: &str, to: SocketAddr) -> [bool; 2] {
    const FORGED: &[u8] = b"forged";
    let site = it.fixture.site(pod);
    let socket = site.namespace.udp((site.address(to.is_ipv6()).unwrap(), 0)).unwrap();
    socket.connect(to).unwrap();
    let here = socket.local_addr().unwrap();
    let hears = |awaited: Duration, is_forged: bool| {
        let (until, mut bytes) = (Instant::now() + awaited, [0; 64]);
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left)).unwrap();
            if socket.recv(&mut bytes).is_ok_and(|length| (&bytes[..length] == FORGED) == is_forged) {
                return true;
            }
        }
        false
    };
    // The next answers need no worker.
    let is_answered = (0..3).all(|_| {
        (0..5).any(|_| {
            socket.send(b"question").unwrap();
            hears(Duration::from_secs(2), false)
        })
    });
    let mut forger = Forger::outside(&it.fixture, &it.outside);
    let frame = forger.udp((to.ip(), to.port()), (here.ip(), here.port()), FORGED);
    (0..3).for_each(|_| forger.send(&frame));
    [is_answered, hears(Duration::from_millis(500), true)]
}

#[test]
fn outside_answers_neither_as_the_node_nor_as_a_service() {
    let it = Answering::new(false);
    let node = it.fixture.cluster.node.namespace();
    // IPv4 would take no packet with an address of its own.
    for name in ["all", it.outside.interface()] {
        run(node, "sh", &["-c", &format!("echo 1 > /proc/sys/net/ipv4/conf/{name}/accept_local")], "");
    }
    it.enforce(&(policy("closed", "pod-1", "  ingress: []\n") + &egress("pod-1", &blocks(it.machine), "")));
    for v6 in [false, true] {
        let own = *it.fixture.cluster.node.addresses().iter().find(|own| own.is_ipv6() == v6).unwrap();
        // The kernel itself takes no answer with the address that a connection had before it was translated.
        for (to, by_kernel) in [(SocketAddr::new(own, 53), true), (SocketAddr::new(service(v6), WEB), false)] {
            let log = || it.fixture.statistics().join("\n");
            assert_eq!(answers(&it, "test/pod-1", to), [true, false], "{to}, under policy\n{}", log());
            assert_eq!(answers(&it, "test/pod-0", to), [true, by_kernel], "{to}, without policy\n{}", log());
        }
    }
}

/// An IPv6 frame as two fragments (RFC 8200 section 4.5), the first of them with 24 bytes of payload, and with options that the second has not: the
/// kernel copies such a datagram where it cuts it up again.
fn in_two(frame: &[u8], identification: u32) -> [Vec<u8>; 2] {
    let (head, payload) = frame.split_at(54);
    let piece = |options: &[u8], payload: &[u8], place: u16| {
        let header = [&[head[20], 0][..], &place.to_be_bytes(), &identification.to_be_bytes()].concat();
        let mut piece = [head, options, &header, payload].concat();
        let length = piece.len() as u16 - 54;
        piece[18..20].copy_from_slice(&length.to_be_bytes());
        piece[20] = if options.is_empty() { 44 } else { 60 };
        piece
    };
    let mut options = [0; 104];
    options[..4].copy_from_slice(&[44, 12, 1, 100]);
    [piece(&options, &payload[..24], 1), piece(&[], &payload[24..], 24)]
}

#[test]
fn fragments_from_outside_are_not_the_nodes_own() {
    const MARK: [u8; 4] = *b"mark";
    let it = Answering::new(false);
    it.enforce(&policy("closed", "pod-1", "  policyTypes: [Ingress, Egress]\n"));
    // A node whose rules drop what is invalid forwards no such packet.
    run(it.fixture.cluster.node.namespace(), "nft", &["flush", "chain", "ip6", "filter", "KUBE-FORWARD"], "");
    let own = *it.fixture.cluster.node.addresses().iter().find(|own| own.is_ipv6()).unwrap();
    let mut outside = Forger::outside(&it.fixture, &it.outside);
    let payload = [&[0; 24][..], &MARK].concat();
    // Without a checksum, which the kernel's connection tracking takes for invalid.
    let light = |forger: &Forger, from: (IpAddr, u16), to: (IpAddr, u16), payload: &[u8]| {
        let head = [from.1.to_be_bytes(), to.1.to_be_bytes(), [0; 2], [0; 2]].concat();
        let mut frame = Vec::new();
        let ip = forger.ip(from.0, to.0);
        ip.write(&mut frame, etherparse::IpNumber(136), &[&head[..], payload].concat()).unwrap();
        frame
    };
    for (pod, passes) in [("test/pod-0", true), ("test/pod-1", false)] {
        let site = it.fixture.site(pod);
        let (node, to) = ((own, 7), (site.address(true).unwrap(), 8080));
        // The pod has asked its node, which may answer by an error that quotes the question.
        let mut inside = Forger::of(&it.fixture, pod);
        let questions = [inside.udp(to, node, &[0; 28]), light(&inside, to, node, &[0; 28])];
        questions.iter().for_each(|frame| inside.send(frame));
        let (mut segment, tcp) = (Vec::new(), outside.ip(node.0, to.0).tcp(node.1, to.1, 1_000, 65_000).syn());
        tcp.write(&mut segment, &payload).unwrap();
        let frames = [segment, outside.udp(node, to, &payload), light(&outside, node, to, &payload)];
        for (number, (what, frame)) in ["TCP", "UDP", "UDP-Lite"].iter().zip(&frames).enumerate() {
            let seen = PacketSocket::open(&site.namespace).unwrap();
            let arrives = (0..if passes { 20 } else { 3 }).any(|turn| {
                in_two(frame, (number << 8 | turn) as u32).iter().for_each(|piece| outside.send(piece));
                let frames = seen.received(Duration::from_millis(200)).unwrap();
                frames.iter().any(|frame| frame.windows(4).any(|bytes| bytes == MARK))
            });
            assert_eq!(arrives, passes, "{what} to {pod}\n{}", it.fixture.statistics().join("\n"));
        }
    }
}

/// An address that the node has by its configuration, on none of its interfaces.
const EXTERNAL: &str = "203.0.113.9";
/// A node port that leads to the machine outside.
const NODE_PORT: u16 = 30_053;

/// A node whose node port leads to a machine outside, which `pod-1` may not reach, and the server there.
fn node_port_to_outside(v6: bool) -> (Fixture, UdpSocket, Outside) {
    let mut outside = None;
    let fixture = Fixture::of(&(pods(2) + &policy("none", "pod-1", "  policyTypes: [Egress]\n")), |cluster, config| {
        config.keys += &format!("node_addresses = [\"{EXTERNAL}\"]\n");
        let machine = cluster.node.add_outside("outside").unwrap();
        let backends = machine.addresses().iter().map(|&to| SocketAddr::new(to, 53)).collect();
        let port =
            ProxiedPort { protocol: ServiceProtocol::Udp, number: NODE_PORT, node_port: Some(NODE_PORT), backends };
        let addresses = [false, true].map(service).into();
        let services = vec![ProxiedService { name: "test/beyond".to_owned(), addresses, ports: vec![port] }];
        let node = cluster.node.addresses().iter().copied().chain([address(EXTERNAL)]).collect();
        KubeProxy { mode: ProxyMode::Nftables, node, services }.install(cluster.node.namespace()).unwrap();
        outside = Some(machine);
    });
    let outside = outside.unwrap();
    let here = SocketAddr::new(Site::from(&outside).address(v6).unwrap(), 53);
    let server = outside.namespace().udp(here).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    (fixture, server, outside)
}

/// A pod's socket to the node port, whose packets have this IPv6 option header (`IPV6_HOPOPTS`, `IPV6_DSTOPTS`).
fn client(fixture: &Fixture, pod: &str, node: IpAddr, option: Option<libc::c_int>) -> UdpSocket {
    // Next header, length, and a padding option.
    const HEADER: [u8; 8] = [0, 0, 1, 4, 0, 0, 0, 0];
    let site = fixture.site(pod);
    let here = SocketAddr::new(site.address(node.is_ipv6()).unwrap(), 0);
    let socket = site.namespace.udp(here).unwrap();
    if let Some(option) = option {
        let (header, length) = (HEADER.as_ptr().cast(), HEADER.len() as libc::socklen_t);
        // SAFETY: the header lives across the call and has this length, and the kernel copies it.
        let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IPV6, option, header, length) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }
    socket.connect((node, NODE_PORT)).unwrap();
    socket
}

/// Datagrams that the server receives until nothing comes.
fn heard(server: &UdpSocket) -> Vec<String> {
    let mut bytes = [0; 64];
    std::iter::from_fn(|| server.recv(&mut bytes).ok().map(|length| String::from_utf8_lossy(&bytes[..length]).into()))
        .collect()
}

#[test]
fn no_header_or_node_address_leads_past_egress_policy() {
    for v6 in [false, true] {
        let (fixture, server, _outside) = node_port_to_outside(v6);
        let own = *fixture.cluster.node.addresses().iter().find(|address| address.is_ipv6() == v6).unwrap();
        let ways: &[(IpAddr, Option<libc::c_int>)] = match v6 {
            false => &[(own, None), (address(EXTERNAL), None)],
            true => &[(own, None), (own, Some(libc::IPV6_HOPOPTS)), (own, Some(libc::IPV6_DSTOPTS))],
        };
        for &(node, option) in ways {
            for (pod, word) in [("test/pod-1", "denied"), ("test/pod-0", "allowed")] {
                let socket = client(&fixture, pod, node, option);
                (0..3).for_each(|_| _ = socket.send(word.as_bytes()));
            }
            let heard = heard(&server);
            let log = fixture.statistics().join("\n");
            assert!(heard.contains(&"allowed".to_owned()), "{node}, option {option:?}: {heard:?}\n{log}");
            assert!(!heard.contains(&"denied".to_owned()), "{node}, option {option:?}: {heard:?}\n{log}");
        }
    }
}

#[test]
fn without_a_daemon_no_node_port_leads_where_policy_denies() {
    for v6 in [false, true] {
        let (mut fixture, server, _outside) = node_port_to_outside(v6);
        let own = *fixture.cluster.node.addresses().iter().find(|address| address.is_ipv6() == v6).unwrap();
        let sockets = ["test/pod-1", "test/pod-0"].map(|pod| client(&fixture, pod, own, None));
        let send = || {
            for (socket, word) in sockets.iter().zip(["denied", "allowed"]) {
                (0..3).for_each(|_| _ = socket.send(word.as_bytes()));
            }
        };
        send();
        let before = heard(&server);
        assert!(before.contains(&"allowed".to_owned()) && !before.contains(&"denied".to_owned()), "{before:?}");
        fixture.kill();
        send();
        let after = heard(&server);
        assert!(!after.contains(&"denied".to_owned()), "{after:?}");
    }
}

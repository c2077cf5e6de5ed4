//! Workers that translate, beside what the node has and changes: backends that come and go, an address that the node binds, and
//! rules of the form of kube-proxy's for what stays its own.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::Outside;

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{WEB, address, run, service};

const TIMEOUT: Duration = Duration::from_secs(20);
/// An address of a load balancer, which no interface has.
const EXTERNAL: &str = "198.51.100.7";
/// A port of the node that leads to `pod-1`.
const NODE_PORT: u16 = 30_080;
const NODE: &str = "172.18.0.2";

/// The Service with these backends, IPv4 alone.
fn manifest(backends: &[IpAddr], affinity: &str) -> String {
    let endpoints: Vec<String> = backends.iter().map(|backend| format!("{{addresses: ['{backend}']}}")).collect();
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: test, name: api}}\n\
         spec:\n  clusterIPs: [{}]\n{affinity}  ports:\n\
         \x20 - {{name: web, protocol: TCP, port: {WEB}}}\n  - {{name: dns, protocol: UDP, port: {WEB}}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{namespace: test, name: api-1, labels: {{kubernetes.io/service-name: api}}}}\n\
         addressType: IPv4\nendpoints: [{}]\n\
         ports: [{{name: web, protocol: TCP, port: 8080}}, {{name: dns, protocol: UDP, port: 53}}]\n",
        service(false),
        endpoints.join(", "),
    )
}

struct BesideFixture {
    fixture: Fixture,
    outside: Outside,
}

impl BesideFixture {
    /// A node with three pods; the Service's backends are `pod-1` and `pod-2`.
    fn new(policies: &str, affinity: &str) -> Self {
        let mut outside = None;
        let fixture = Fixture::of(&(pods(3) + policies), |cluster, config| {
            outside = Some(cluster.node.add_outside("outside").unwrap());
            config.keys += "service_cidrs = [\"10.96.0.0/16\"]\n";
            config.sections += "[services]\nenabled = true\n";
            let backends = ["test/pod-1", "test/pod-2"].map(|pod| {
                let site = &cluster.sites[cluster.site(pod).unwrap()];
                site.address(false).unwrap()
            });
            std::fs::write(config.manifests.join("service.yaml"), manifest(&backends, affinity)).unwrap();
        });
        Self { fixture, outside: outside.unwrap() }
    }

    /// Identity and address of a pod's server.
    fn server(&self, pod: &str) -> (u32, IpAddr) {
        self.fixture.target(pod, false)
    }

    /// Makes these pods the Service's backends.
    fn publish(&self, backends: &[&str], affinity: &str) {
        let addresses: Vec<IpAddr> = backends.iter().map(|pod| self.server(pod).1).collect();
        self.fixture.save("service.yaml", &manifest(&addresses, affinity));
    }

    /// The server that a new TCP connection of `pod-0` to the Service gets.
    fn connect(&self) -> u32 {
        let there = SocketAddr::new(service(false), WEB);
        let connected = self.fixture.site("test/pod-0").namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT));
        let mut stream = connected.unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut greeting = [0; 4];
        stream.read_exact(&mut greeting).unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        u32::from_be_bytes(greeting)
    }

    /// A socket of `pod-0` that sends to the Service.
    fn socket(&self) -> UdpSocket {
        let site = self.fixture.site("test/pod-0");
        let here = SocketAddr::new(site.address(false).unwrap(), 0);
        let socket = site.namespace.udp(here).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket.connect(SocketAddr::new(service(false), WEB)).unwrap();
        socket
    }

    /// Asks on one socket until the answer is as expected: of this server, or none.
    fn ask_until(&self, socket: &UdpSocket, expected: Option<u32>) {
        self.until(expected, || ask(socket));
    }

    /// The same, each time on another socket.
    fn ask_anew_until(&self, expected: u32) {
        self.until(Some(expected), || ask(&self.socket()));
    }

    fn until(&self, expected: Option<u32>, ask: impl Fn() -> Option<u32>) {
        let (until, mut last) = (Instant::now() + TIMEOUT, ask());
        while last != expected && Instant::now() < until {
            last = ask();
        }
        assert_eq!(last, expected, "who answers\n{}", self.logs());
    }

    fn probe(&self, from: &Site, to: IpAddr, port: u16) -> ProbeOutcome {
        let patience = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
        probe::run_one(from, (self.server("test/pod-1").0, to), Protocol::Tcp(port), patience).unwrap()
    }

    fn node(&self) -> &Site {
        self.fixture.site("node")
    }

    fn logs(&self) -> String {
        [self.fixture.daemon.log().lines(), self.fixture.statistics()].concat().join("\n")
    }
}

/// Which server answers a datagram; the answer to an earlier one does not count.
fn ask(socket: &UdpSocket) -> Option<u32> {
    let question: [u8; 8] = rand::random();
    // An error of the datagram before, as where a port was refused, counts as none.
    socket.send(&question).ok()?;
    loop {
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer).ok()?;
        let (identity, rest) = answer[..length].split_first_chunk::<4>()?;
        if rest == question.map(|byte| !byte) {
            return Some(u32::from_be_bytes(*identity));
        }
    }
}

/// S6, and S2 where a backend goes.
#[test]
fn a_client_keeps_its_backend_until_it_is_gone() {
    const AFFINITY: &str = "  sessionAffinity: ClientIP\n";
    let setup = BesideFixture::new("", AFFINITY);
    let servers: BTreeSet<u32> = (0..10).map(|_| setup.connect()).collect();
    assert_eq!(servers.len(), 1, "one backend for all connections of a client: {servers:?}");
    let kept = *servers.first().unwrap();
    let other = ["test/pod-1", "test/pod-2"].into_iter().find(|pod| setup.server(pod).0 != kept).unwrap();
    setup.publish(&[other], AFFINITY);
    let until = Instant::now() + TIMEOUT;
    while setup.connect() == kept {
        assert!(Instant::now() < until, "the former backend gets connections\n{}", setup.logs());
    }
    setup.publish(&["test/pod-1", "test/pod-2"], AFFINITY);
    let servers: BTreeSet<u32> = (0..10).map(|_| setup.connect()).collect();
    assert_eq!(servers, [setup.server(other).0].into(), "the client keeps the one that it has now");
}

/// S12.
#[test]
fn a_datagram_flow_follows_its_service() {
    let setup = BesideFixture::new("", "");
    let socket = setup.socket();
    let mut backends = ["test/pod-1", "test/pod-2"];
    let first = (0..20).find_map(|_| ask(&socket)).unwrap_or_else(|| panic!("no answer\n{}", setup.logs()));
    assert!((0..5).all(|_| ask(&socket) == Some(first)), "a flow keeps its backend\n{}", setup.logs());
    backends.sort_by_key(|pod| setup.server(pod).0 == first);
    let [other, former] = backends;
    setup.publish(&[other], "");
    setup.ask_until(&socket, Some(setup.server(other).0));
    setup.publish(&[former], "");
    setup.ask_until(&socket, Some(first));
    // Its Service goes.
    std::fs::remove_file(setup.fixture.manifests.join("service.yaml")).unwrap();
    setup.ask_until(&socket, None);
}

/// S13: as a node-local DNS cache binds the Service's address.
#[test]
fn an_address_that_the_node_binds_is_the_nodes_while_bound() {
    const CACHE: u32 = 500;
    let setup = BesideFixture::new("", "");
    setup.publish(&["test/pod-1"], "");
    let (socket, backend) = (setup.socket(), setup.server("test/pod-1").0);
    setup.ask_until(&socket, Some(backend));
    let namespace = setup.node().namespace.clone();
    let change = |what: &str| {
        run(&namespace, "ip", &["address", what, &format!("{}/32", service(false)), "dev", "lo"], "");
    };
    change("add");
    let cache = Site { name: "cache".into(), namespace: namespace.clone(), addresses: vec![service(false)] };
    let servers = EchoServers::start(&cache, CACHE, &[EchoService::Udp(WEB)]).unwrap();
    setup.ask_anew_until(CACHE);
    // The flow that has a backend, too.
    setup.ask_until(&socket, Some(CACHE));
    drop(servers);
    change("del");
    setup.ask_anew_until(backend);
}

/// S14 and S15: NodePorts, addresses of load balancers and the node's own traffic to the Service.
#[test]
fn what_the_nodes_kernel_translates_stays_its_own() {
    let admits = |peer: &str| policy("served", "pod-1", &format!("  ingress: [{{from: [{peer}]}}]\n"));
    let pod = "{podSelector: {matchLabels: {app: pod-0}}}";
    let setup = BesideFixture::new(&admits(pod), "");
    let backend = SocketAddr::new(setup.server("test/pod-1").1, 8080);
    let cluster_ip = service(false);
    run(
        &setup.node().namespace,
        "nft",
        &["-f", "-"],
        &format!(
            "table ip proxy {{\n\
             chain prerouting {{ type nat hook prerouting priority -100\n\
             ip daddr {EXTERNAL} tcp dport {WEB} dnat to {backend}\n\
             ip daddr {NODE} tcp dport {NODE_PORT} dnat to {backend}\n}}\n\
             chain output {{ type nat hook output priority -100\n\
             ip daddr {cluster_ip} tcp dport {WEB} dnat to {backend}\n}}\n\
             chain forward {{ type filter hook forward priority 0\n ct state invalid drop\n}}\n}}\n"
        ),
    );
    let outside = Site::from(&setup.outside);
    let (external, node) = (address(EXTERNAL), address(NODE));
    let expect = |from: &Site, to: IpAddr, port: u16, expected: ProbeOutcome| {
        let what = format!("{} to {to}:{port}", from.name);
        let (until, mut found) = (Instant::now() + TIMEOUT, setup.probe(from, to, port));
        while found != expected && Instant::now() < until {
            found = setup.probe(from, to, port);
        }
        assert_eq!(found, expected, "{what}\n{}", setup.logs());
    };
    let site = |pod| setup.fixture.site(pod);
    // The rules leave the source: the server's policy sees the client.
    for (from, expected) in [
        (site("test/pod-0"), ProbeOutcome::Reached),
        (site("test/pod-2"), ProbeOutcome::Silent),
        (&outside, ProbeOutcome::Silent),
    ] {
        expect(from, node, NODE_PORT, expected);
    }
    expect(site("test/pod-0"), external, WEB, ProbeOutcome::Reached);
    expect(site("test/pod-2"), external, WEB, ProbeOutcome::Silent);
    // The node's own process, by the cluster address. Its first lookup of a route is for that one, before the rules.
    let route = format!("{cluster_ip}/32");
    run(&setup.node().namespace, "ip", &["route", "add", &route, "dev", setup.outside.interface()], "");
    expect(setup.node(), cluster_ip, WEB, ProbeOutcome::Reached);
    // The client's policy sees the load balancer's address, and not the pod behind it.
    let to =
        |peer: &str| policy("client", "pod-0", &format!("  policyTypes: [Egress]\n  egress: [{{to: [{peer}]}}]\n"));
    setup.fixture.save("client.yaml", &to(&format!("{{ipBlock: {{cidr: {EXTERNAL}/32}}}}")));
    expect(site("test/pod-0"), external, WEB, ProbeOutcome::Reached);
    setup.fixture.save("client.yaml", &to("{podSelector: {matchLabels: {app: pod-1}}}"));
    expect(site("test/pod-0"), external, WEB, ProbeOutcome::Silent);
    expect(site("test/pod-0"), backend.ip(), 8080, ProbeOutcome::Reached);
}

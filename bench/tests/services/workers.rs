//! Services that the workers translate, without any rule in the node's kernel: TCP and UDP, both families, with the backend
//! on the same node, elsewhere, or in the client itself.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use penstock_admin::client::Client;
use penstock_admin::types::{Dump, Flows, FlowsQuery, ServicesStatus};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{Attach, Outside, PacketCapture, penstock_binary};

use crate::fixture::{Fixture, SERVICES, pods, policy};
use crate::services::service::{BackendPath, CLOSED, OWN, WEB, service};

const TIMEOUT: Duration = Duration::from_secs(20);
/// In the daemon's network namespace, of which each test has its own.
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9469);
/// Identity of the server elsewhere.
const ELSEWHERE: u32 = 77;
/// `pod-1` admits only `pod-0`.
const POLICY: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
/// `pod-2` may send only to `pod-1`, on the port behind the Service's.
const EGRESS: &str =
    "  policyTypes: [Egress]\n  egress: [{to: [{podSelector: {matchLabels: {app: pod-1}}}], ports: [{port: 9090}]}]\n";

/// The Service, with its ports at each backend: as [`crate::services::service::translate`] makes the kernel translate them.
fn manifest(backends: [&str; 2]) -> String {
    let mut yaml = String::from(
        "---\napiVersion: v1\nkind: Service\nmetadata: {namespace: test, name: api}\n\
         spec:\n  clusterIPs: [10.96.0.10, 'fd00:10:96::10']\n  ports:\n",
    );
    let ports =
        [("web", "TCP", WEB, 8080), ("dns", "UDP", WEB, 53), ("own", "TCP", OWN, OWN), ("owns", "UDP", OWN, OWN)];
    for (name, protocol, number, _) in ports {
        yaml += &format!("  - {{name: {name}, protocol: {protocol}, port: {number}}}\n");
    }
    yaml += &format!("  - {{name: none, port: {CLOSED}}}\n");
    for (family, backend) in [("IPv4", backends[0]), ("IPv6", backends[1])] {
        yaml += &format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: test, name: api-{}, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: {family}\nendpoints: [{{addresses: ['{backend}']}}]\nports:\n",
            family.to_lowercase(),
        );
        for (name, protocol, _, target) in ports {
            yaml += &format!("- {{name: {name}, protocol: {protocol}, port: {target}}}\n");
        }
    }
    yaml
}

struct WorkersFixture {
    fixture: Fixture,
    backend: Site,
    identity: u32,
    _outside: Outside,
    _servers: Option<probe::EchoServers>,
}

impl WorkersFixture {
    /// With tcx, asserts that its programs have forwarded so many packets without a worker, if they may.
    fn assert_offloaded(&self, packets: f64) {
        if Attach::of_run() != Attach::Tcx || std::env::var("PENSTOCK_TEST_OFFLOAD").as_deref() == Ok("false") {
            return;
        }
        let page = self.fixture.http(METRICS, "/metrics");
        let counts = page.lines().filter(|line| line.starts_with("penstock_offloaded_packets_total{"));
        let all: f64 = counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
        assert!(all >= packets, "{all} packets were forwarded without a worker\n{}", self.logs());
    }

    fn new(path: BackendPath) -> Self {
        let (mut outside, mut found) = (None, None);
        let yaml = pods(3) + &policy("served", "pod-1", POLICY);
        let fixture = Fixture::of(&yaml, |cluster, config| {
            let machine = cluster.node.add_outside("outside").unwrap();
            if let BackendPath::ByUplink = path {
                config.keys += &format!("uplinks = [\"{}\"]\n", machine.interface());
            }
            config.keys += "service_cidrs = [\"10.96.0.0/16\", \"fd00:10:96::/112\"]\n";
            let socket = config.manifests.with_file_name("capture.sock");
            config.sections += &format!("[services]\nenabled = true\n[capture]\nsocket = \"{}\"\n", socket.display());
            config.metrics = Some(METRICS);
            let site = match path {
                BackendPath::Here => cluster.sites[cluster.site("test/pod-1").unwrap()].clone(),
                BackendPath::Elsewhere | BackendPath::ByUplink => Site::from(&machine),
            };
            let address = |v6| site.address(v6).unwrap().to_string();
            let backends = [address(false), address(true)];
            std::fs::write(config.manifests.join("service.yaml"), manifest([&backends[0], &backends[1]])).unwrap();
            (outside, found) = (Some(machine), Some(site));
        });
        let backend: Site = found.unwrap();
        let servers = match path {
            BackendPath::Here => None,
            _ => Some(probe::EchoServers::start(&backend, ELSEWHERE, &SERVICES).unwrap()),
        };
        let identity = fixture.cluster.site(&backend.name).map_or(ELSEWHERE, |index| index as u32);
        Self { fixture, backend, identity, _outside: outside.unwrap(), _servers: servers }
    }

    fn probe(&self, pod: &str, v6: bool, protocol: Protocol) -> ProbeOutcome {
        let patience = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
        probe::run_one(self.fixture.site(pod), (self.identity, service(v6)), protocol, patience).unwrap()
    }

    fn logs(&self) -> String {
        [self.fixture.daemon.log().lines(), self.fixture.statistics()].concat().join("\n")
    }
}

/// S9 and S10: over TCP and UDP, both families.
#[test]
fn by_a_workers_service_ingress_policy_sees_the_client() {
    for path in [BackendPath::Here, BackendPath::Elsewhere, BackendPath::ByUplink] {
        let setup = WorkersFixture::new(path);
        for (v6, protocol) in
            [false, true].into_iter().flat_map(|v6| [(v6, Protocol::Tcp(WEB)), (v6, Protocol::Udp(WEB))])
        {
            let what = format!("{protocol}, v6: {v6}, backend {path:?}");
            assert_eq!(setup.probe("test/pod-0", v6, protocol), ProbeOutcome::Reached, "{what}\n{}", setup.logs());
            let other = if let BackendPath::Here = path { ProbeOutcome::Silent } else { ProbeOutcome::Reached };
            assert_eq!(setup.probe("test/pod-2", v6, protocol), other, "{what}\n{}", setup.logs());
        }
        setup.fixture.assert_as_expected(&setup.fixture.matrix());
    }
}

/// S10 in bulk: long segments, whose checksums their sender left open, in both directions.
#[test]
fn bulk_transfers_through_a_service_arrive_as_they_were_sent() {
    for (path, v6) in [(BackendPath::Here, false), (BackendPath::Here, true), (BackendPath::Elsewhere, false)] {
        let setup = WorkersFixture::new(path);
        let here = SocketAddr::new(setup.backend.address(v6).unwrap(), OWN);
        let listener = setup.backend.namespace.listen(here).unwrap();
        let there = SocketAddr::new(service(v6), OWN);
        let pod = setup.fixture.site("test/pod-0");
        let client = pod.namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT));
        let client = client.unwrap_or_else(|error| panic!("{error}\n{}", setup.logs()));
        let (server, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), pod.address(v6).unwrap(), "the server sees the pod");
        for (mut from, mut to) in
            [(&client, &server), (&server, &client)].map(|(a, b)| (a.try_clone().unwrap(), b.try_clone().unwrap()))
        {
            to.set_read_timeout(Some(TIMEOUT)).unwrap();
            let sent: Vec<u8> = (0..8_000_000).map(|at: usize| (at * 7 + at / 251) as u8).collect();
            let mut received = vec![0; sent.len()];
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| from.write_all(&sent));
                to.read_exact(&mut received).unwrap_or_else(|error| panic!("{error}\n{}", setup.logs()));
                writer.join().unwrap().unwrap();
            });
            assert!(sent == received, "{} bytes arrive as they were sent", sent.len());
        }
        setup.assert_offloaded(5_000.0);
    }
}

/// S7 and S8: refused at once.
#[test]
fn a_port_without_backend_or_service_refuses_at_once() {
    let setup = WorkersFixture::new(BackendPath::Here);
    let pod = setup.fixture.site("test/pod-0");
    for (v6, port) in [(false, CLOSED), (true, CLOSED), (false, 4444), (true, 4444)] {
        let there = SocketAddr::new(service(v6), port);
        let error = pod.namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{there}\n{}", setup.logs());
        let here = SocketAddr::new(pod.address(v6).unwrap(), 0);
        let socket = pod.namespace.udp(here).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        socket.connect(there).unwrap();
        socket.send(b"anyone?").unwrap();
        let error = socket.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{there} over UDP\n{}", setup.logs());
    }
}

/// Each packet as it came and as it leaves, in both directions, by the pods' ports.
#[test]
fn a_translated_connections_bundle_replays_to_its_verdicts() {
    let setup = WorkersFixture::new(BackendPath::Here);
    let (scratch, port) = (setup.fixture.scratch.path(), WEB.to_string());
    let (socket, bundle) = (setup.fixture.manifests.with_file_name("capture.sock"), scratch.join("bundle"));
    let arguments = ["--protocol", "UDP", "--port", &port];
    let capture = PacketCapture::start_bundle(&socket, &bundle, &arguments).unwrap();
    assert_eq!(setup.probe("test/pod-0", false, Protocol::Udp(WEB)), ProbeOutcome::Reached, "{}", setup.logs());
    capture.wait_for(4, TIMEOUT).unwrap();
    let (packets, _) = capture.end().unwrap();
    let (pod, backend) =
        (setup.fixture.site("test/pod-0").address(false).unwrap(), setup.backend.address(false).unwrap());
    let (pod, backend, service) = (pod.to_string(), format!("{backend}:53"), format!("{}:{WEB}", service(false)));
    let seen: Vec<(&str, String, String, bool)> = packets
        .iter()
        .map(|packet| {
            let ip = &packet.bytes[14..];
            let port = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
            let end = |at: usize, port: u16| {
                let address = Ipv4Addr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
                if address.to_string() == pod { pod.clone() } else { format!("{address}:{port}") }
            };
            let is_translated = packet.comment.ends_with(" translated");
            (packet.interface.as_str(), end(12, port(20)), end(16, port(22)), is_translated)
        })
        .collect();
    let expected = [
        ("test/pod-0", pod.clone(), service.clone(), false),
        ("test/pod-1", pod.clone(), backend.clone(), true),
        ("test/pod-1", backend, pod.clone(), false),
        ("test/pod-0", service, pod.clone(), true),
    ];
    assert_eq!(seen[..4], expected, "{packets:?}");
    assert!(packets.iter().all(|packet| packet.comment.contains(" service=test/api:dns ")), "{packets:?}");
    let connection = |at: usize| packets[at].comment.split(' ').find(|part| part.starts_with("connection=")).unwrap();
    assert!((1..4).all(|at| connection(at) == connection(0)), "one connection: {packets:?}");

    let mut command = Command::new(penstock_binary().unwrap());
    let output = command.arg("replay").arg(&bundle).args(["--summary", "json"]).output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let came = packets.iter().filter(|packet| !packet.comment.ends_with(" translated")).count() as u64;
    let counted = ["same", "different"].map(|key| answer["recorded"][key].as_u64().unwrap());
    assert_eq!((output.status.code(), counted), (Some(0), [came, 0]), "{answer:#}");
    assert_eq!(answer["services"][0]["service"], "test/api:dns", "{answer:#}");
}

/// S11.
#[test]
fn a_pod_that_is_its_own_backend_reaches_itself() {
    let setup = WorkersFixture::new(BackendPath::Here);
    for v6 in [false, true] {
        for protocol in [Protocol::Tcp(WEB), Protocol::Udp(WEB)] {
            let outcome = setup.probe("test/pod-1", v6, protocol);
            assert_eq!(outcome, ProbeOutcome::Reached, "{protocol}, v6: {v6}\n{}", setup.logs());
        }
    }
}

/// S9 on the client's side: the rule names the backend and its port.
#[test]
fn egress_policy_names_the_backend_and_not_the_services_address() {
    let setup = WorkersFixture::new(BackendPath::Here);
    let open = "  ingress: [{}]\n";
    let block = "  policyTypes: [Egress]\n  egress: [{to: [{ipBlock: {cidr: 10.96.0.0/16}}]}]\n";
    for (rule, expected) in [
        (EGRESS.replace("9090", "8080"), ProbeOutcome::Reached),
        (EGRESS.to_owned(), ProbeOutcome::Silent),
        (block.to_owned(), ProbeOutcome::Silent),
    ] {
        setup.fixture.save("more.yaml", &(policy("open", "pod-1", open) + &policy("client", "pod-2", &rule)));
        let until = Instant::now() + TIMEOUT;
        let mut outcome = setup.probe("test/pod-2", false, Protocol::Tcp(WEB));
        while outcome != expected && Instant::now() < until {
            outcome = setup.probe("test/pod-2", false, Protocol::Tcp(WEB));
        }
        assert_eq!(outcome, expected, "{rule}\n{}", setup.logs());
    }
}

/// Status, flows and metrics agree on a connection to a Service, to other backends and without one.
#[test]
fn a_connection_is_shown_and_counted_with_its_service() {
    let setup = WorkersFixture::new(BackendPath::Here);
    for (pod, port) in [("test/pod-0", WEB), ("test/pod-1", WEB)] {
        let outcome = setup.probe(pod, false, Protocol::Tcp(port));
        assert_eq!(outcome, ProbeOutcome::Reached, "{pod}\n{}", setup.logs());
    }
    let pod = setup.fixture.site("test/pod-0");
    let nowhere = SocketAddr::new(service(false), CLOSED);
    pod.namespace.run(|| TcpStream::connect_timeout(&nowhere, TIMEOUT)).unwrap_err();
    let expected = ServicesStatus { frontends: 10, without_backend: 2, backends: 8, ..ServicesStatus::default() };
    let found = setup.fixture.status().services.expect("workers translate");
    assert_eq!(ServicesStatus { affinity_capacity: 0, ..found }, expected);
    let flows = |service: &str| -> Result<Flows, _> {
        let query = FlowsQuery { service: Some(service.to_owned()), ..FlowsQuery::default() };
        Client::new(setup.fixture.admin()).unwrap().get("/v1/flows", &query)
    };
    for service in ["test/api", "svc/test/api", "10.96.0.10"] {
        let mut found = flows(service).unwrap().flows;
        found.sort_by_key(|flow| flow.from.address);
        let shown: Vec<_> = found
            .iter()
            .map(|flow| {
                let end = flow.service.as_ref().unwrap();
                let names = [&flow.from.name, &flow.to.name, &end.name].map(|name| name.clone().unwrap_or_default());
                (names, flow.to.port, end.address.to_string(), end.port)
            })
            .collect();
        let row = |from: &str| {
            let names = [from, "test/pod-1", "test/api:web"].map(str::to_owned);
            (names, 8080, "10.96.0.10".to_owned(), WEB)
        };
        assert_eq!(shown, [row("test/pod-0"), row("test/pod-1")], "{service}: also of a pod that is its own backend");
    }
    assert!(flows("fd00:10:96::10").unwrap().flows.is_empty());
    assert!(flows("test/other").unwrap_err().to_string().contains("Service test/other is unknown"));
    let bundle: Dump = Client::new(setup.fixture.admin()).unwrap().get("/v1/dump", &()).unwrap();
    let listed = bundle.files.iter().find(|file| file.name == "services.json").expect("the bundle has the Services");
    assert_eq!(listed.content.matches("\"service\": \"test/api:").count(), 10, "{}", listed.content);
    let metrics = setup.fixture.http(METRICS, "/metrics");
    for line in [
        "penstock_service_frontends 10.0",
        "penstock_service_connections_opened_total{affinity=\"false\"} 2",
        "penstock_service_connections{service=\"other\"} 2.0",
        "penstock_service_packets_refused_total{reason=\"no_backend\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");
    }
}

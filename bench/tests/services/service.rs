//! A Service as kube-proxy sets it up: a destination that the node translates.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;

use nix::sys::signal::Signal;
use penstock_bench::cluster::Cluster;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{
    DaemonConfig, KubeProxy, Namespace, Outside, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol,
};

use crate::fixture::{Fixture, SERVICES, pods, policy};

/// The Service's addresses; no interface has them.
pub(crate) const SERVICE: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Ports: these two lead to echo servers,
pub(crate) const WEB: u16 = 80;
/// this one to whatever a test listens with,
pub(crate) const OWN: u16 = 5201;
/// and this one to a closed port.
pub(crate) const CLOSED: u16 = 81;

/// `pod-1` admits only `pod-0`.
const POLICY: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The Service's address of a family.
pub(crate) fn service(v6: bool) -> IpAddr {
    address(SERVICE[usize::from(v6)])
}

/// Makes a node translate the Service to this backend.
pub(crate) fn translate(node: &Namespace, backend: &Site) {
    const PORTS: [(ServiceProtocol, u16, u16); 6] = [
        (ServiceProtocol::Tcp, WEB, 8080),
        (ServiceProtocol::Udp, WEB, 53),
        (ServiceProtocol::Tcp, OWN, OWN),
        (ServiceProtocol::Udp, OWN, OWN),
        (ServiceProtocol::Tcp, CLOSED, 9),
        (ServiceProtocol::Udp, CLOSED, 9),
    ];
    let port = |(protocol, number, target)| {
        let backends = [false, true].map(|v6| SocketAddr::new(backend.address(v6).unwrap(), target));
        ProxiedPort { protocol, number, node_port: None, backends: backends.into() }
    };
    let service = ProxiedService {
        name: "test/api".to_owned(),
        addresses: [false, true].map(service).into(),
        ports: PORTS.map(port).into(),
    };
    let proxy = KubeProxy { mode: ProxyMode::Iptables, node: Vec::new(), services: vec![service] };
    proxy.install(node).unwrap();
}

/// Runs a tool in a namespace.
pub(crate) fn run(namespace: &Namespace, tool: &str, arguments: &[&str], input: &str) {
    let mut child = namespace.command(tool).args(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let status = child.wait().unwrap();
    assert!(status.success(), "{tool} {}: {status}\n{input}", arguments.join(" "));
}

/// Location of a Service's backend, and the path of its replies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BackendPath {
    /// A pod of the same node.
    Here,
    /// A machine elsewhere; the kernel routes its packets.
    Elsewhere,
}

pub(crate) const BACKENDS: [BackendPath; 2] = [BackendPath::Here, BackendPath::Elsewhere];

/// A node with three pods and a Service whose backend is the last site.
pub(crate) struct ServiceFixture {
    pub(crate) fixture: Fixture,
    pub(crate) backend: Site,
    pub(crate) outside: Outside,
    _servers: Option<probe::EchoServers>,
}

impl ServiceFixture {
    pub(crate) fn new(backend: BackendPath) -> Self {
        Self::with(backend, |_, _| {})
    }

    pub(crate) fn with(backend: BackendPath, more: impl FnOnce(&mut Cluster, &mut DaemonConfig)) -> Self {
        let (mut outside, mut found) = (None, None);
        let fixture = Fixture::of(&(pods(3) + &policy("served", "pod-1", POLICY)), |cluster, config| {
            let machine = cluster.node.add_outside("outside").unwrap();
            let site = match backend {
                BackendPath::Here => cluster.sites[cluster.site("test/pod-1").unwrap()].clone(),
                BackendPath::Elsewhere => Site::from(&machine),
            };
            translate(cluster.node.namespace(), &site);
            (outside, found) = (Some(machine), Some(site));
            more(cluster, config);
        });
        let backend_site = found.unwrap();
        let servers = match backend {
            BackendPath::Here => None,
            _ => Some(probe::EchoServers::start(&backend_site, IDENTITY_ELSEWHERE, &SERVICES).unwrap()),
        };
        Self { fixture, backend: backend_site, outside: outside.unwrap(), _servers: servers }
    }

    /// Result of a probe of the Service from a pod.
    pub(crate) fn probe(&self, pod: &str, v6: bool, protocol: Protocol) -> ProbeOutcome {
        let identity = self.fixture.cluster.site(&self.backend.name).map_or(IDENTITY_ELSEWHERE, |index| index as u32);
        let patience = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
        probe::run_one(self.fixture.site(pod), (identity, service(v6)), protocol, patience).unwrap()
    }

    /// The daemon's log and statistics.
    pub(crate) fn logs(&self) -> String {
        [self.fixture.daemon.log().lines(), self.fixture.statistics()].concat().join("\n")
    }

    /// Kills the daemon and starts the next one.
    pub(crate) fn restart(&mut self) {
        self.fixture.daemon.signal(Signal::SIGKILL).unwrap();
        self.fixture.daemon.wait_until_ended(std::time::Duration::from_secs(30)).unwrap();
        self.fixture.restart();
    }
}

/// Identity of the server elsewhere.
const IDENTITY_ELSEWHERE: u32 = 77;

//! Test fixture: a node with pods from manifests, servers on all of them, and the daemon.
#![allow(dead_code, reason = "several test programs share it, and each uses a part")]

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_admin::client::Client;
use penstock_admin::types::{PortStatus, Status};
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::{EchoServers, EchoService, Protocol, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, ProxyMode, ScratchDir};

/// Services on every site.
pub(crate) const SERVICES: [EchoService; 3] = [EchoService::Tcp(8080), EchoService::Tcp(9090), EchoService::Udp(53)];
/// Protocols of the probes.
pub(crate) const PROTOCOLS: [Protocol; 4] =
    [Protocol::Tcp(8080), Protocol::Tcp(9090), Protocol::Udp(53), Protocol::Icmp];

/// A directory of manifests with one file, `all.yaml`.
fn saved(yaml: &str) -> (ScratchDir, PathBuf) {
    let scratch = ScratchDir::new().unwrap();
    let manifests = scratch.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    std::fs::write(manifests.join("all.yaml"), yaml).unwrap();
    (scratch, manifests)
}

/// A node with pods and a running daemon.
pub(crate) struct Fixture {
    pub(crate) daemon: Daemon,
    pub(crate) cluster: Cluster,
    pub(crate) manifests: PathBuf,
    pub(crate) scratch: ScratchDir,
    config: DaemonConfig,
    _servers: Vec<EchoServers>,
}

impl Fixture {
    /// The cluster of `configs/demo`, as the demo has it.
    pub(crate) fn demo() -> Self {
        Self::demo_beside(ProxyMode::Iptables)
    }

    /// The same with a changed configuration.
    pub(crate) fn demo_with(more: impl FnOnce(&mut DaemonConfig)) -> Self {
        Self::demo_of(ProxyMode::Iptables, more)
    }

    /// The same beside kube-proxy in this mode.
    pub(crate) fn demo_beside(mode: ProxyMode) -> Self {
        Self::demo_of(mode, |_| {})
    }

    fn demo_of(mode: ProxyMode, more: impl FnOnce(&mut DaemonConfig)) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/demo");
        let manifests = scratch.copy_in(&demo, "manifests").unwrap();
        Self::start(scratch, manifests.clone(), |cluster, config| {
            cluster.proxy_services(&manifests, mode).unwrap();
            more(config);
        })
    }

    /// A cluster of these manifests in one file, `all.yaml`; `more` runs before the daemon starts.
    pub(crate) fn of(yaml: &str, more: impl FnOnce(&mut Cluster, &mut DaemonConfig)) -> Self {
        let (scratch, manifests) = saved(yaml);
        Self::start(scratch, manifests, more)
    }

    /// The same, with the pods on a bridge.
    pub(crate) fn bridged(yaml: &str, more: impl FnOnce(&mut Cluster, &mut DaemonConfig)) -> Self {
        let (scratch, manifests) = saved(yaml);
        let cluster = Cluster::build_bridged(&read_objects(&manifests).unwrap()).unwrap();
        Self::serve(scratch, manifests, cluster, more)
    }

    /// The same, with this MTU on the pods' links.
    pub(crate) fn with_mtu(yaml: &str, mtu: u32) -> Self {
        let (scratch, manifests) = saved(yaml);
        let cluster = Cluster::build_with_mtu(&read_objects(&manifests).unwrap(), mtu).unwrap();
        Self::serve(scratch, manifests, cluster, |_, _| {})
    }

    fn start(scratch: ScratchDir, manifests: PathBuf, more: impl FnOnce(&mut Cluster, &mut DaemonConfig)) -> Self {
        let cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
        Self::serve(scratch, manifests, cluster, more)
    }

    fn serve(
        scratch: ScratchDir,
        manifests: PathBuf,
        mut cluster: Cluster,
        more: impl FnOnce(&mut Cluster, &mut DaemonConfig),
    ) -> Self {
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.admin = Some(scratch.path().join("admin.sock"));
        more(&mut cluster, &mut config);
        let servers = EchoServers::start_all(&cluster.sites, &SERVICES).unwrap();
        let daemon = Daemon::start(cluster.node.namespace(), &config).unwrap();
        Self { daemon, cluster, manifests, scratch, config, _servers: servers }
    }

    /// Kills the daemon and waits until it has ended.
    pub(crate) fn kill(&mut self) {
        self.daemon.signal(Signal::SIGKILL).unwrap();
        self.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
    }

    /// Stops the daemon and waits until it has ended.
    pub(crate) fn stop(&mut self) {
        self.daemon.signal(Signal::SIGTERM).unwrap();
        self.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
    }

    /// What the daemon has in its environment.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        self.config.environment.clone()
    }

    /// Changes the configuration of the next daemon.
    pub(crate) fn change_config(&mut self, change: impl FnOnce(&mut DaemonConfig)) {
        change(&mut self.config);
    }

    /// Starts the next daemon after a kill.
    pub(crate) fn restart(&mut self) {
        self.daemon = Daemon::start(self.cluster.node.namespace(), &self.config).unwrap();
    }

    /// Starts a daemon that takes over from the one that runs. Returns that one.
    pub(crate) fn take_over(&mut self) -> Daemon {
        let next = Daemon::take_over(self.cluster.node.namespace(), &self.config).unwrap();
        std::mem::replace(&mut self.daemon, next)
    }

    /// Starts a daemon that is to take over, and that waits for an API server which is not there.
    pub(crate) fn start_successor_without_server(&self) -> Daemon {
        let kubeconfig = self.scratch.path().join("kubeconfig");
        let server = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
                      clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                      users: [{name: a, user: {}}]\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n";
        std::fs::write(&kubeconfig, server).unwrap();
        let manifests = format!("manifests = \"{}\"", self.config.manifests.display());
        let toml = self.config.to_toml();
        assert!(toml.contains(&manifests), "{toml}");
        let toml = toml.replace(&manifests, &format!("kubeconfig = \"{}\"", kubeconfig.display()));
        Daemon::launch_to_take_over(self.cluster.node.namespace(), &toml).unwrap()
    }

    /// Saves a manifest atomically.
    pub(crate) fn save(&self, file: &str, content: &str) {
        self.scratch.save(&self.manifests.join(file), content).unwrap();
    }

    /// Saves all manifests and waits until the change is in effect, with tcx some milliseconds after it is published.
    pub(crate) fn enforce(&self, yaml: &str) {
        const LIMIT: Duration = Duration::from_secs(20);
        let seen = self.daemon.log().len();
        self.save("all.yaml", yaml);
        self.daemon.log().wait_for_after(seen, "published", LIMIT).unwrap();
        let deadline = Instant::now() + LIMIT;
        let is_in_effect = |status: Status| status.in_force && !status.pods.iter().any(|pod| pod.building);
        while !is_in_effect(self.status()) {
            assert!(Instant::now() < deadline, "the change is not in effect");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Evaluates the current manifests and sends all probes.
    pub(crate) fn matrix(&self) -> Matrix {
        let oracle = PolicyOracle::new(&read_objects(&self.manifests).unwrap());
        Matrix::measure(&self.cluster, &oracle, &PROTOCOLS).unwrap()
    }

    pub(crate) fn site(&self, name: &str) -> &Site {
        &self.cluster.sites[self.cluster.site(name).unwrap()]
    }

    /// A site as the target of a probe: its server's identity and its address of a family.
    pub(crate) fn target(&self, name: &str, v6: bool) -> (u32, std::net::IpAddr) {
        let index = self.cluster.site(name).unwrap();
        (index as u32, self.cluster.sites[index].address(v6).unwrap())
    }

    /// The daemon's current statistics: its tables, and the line with the frame account last.
    pub(crate) fn statistics(&self) -> Vec<String> {
        let seen = self.daemon.log().len();
        self.daemon.signal(Signal::SIGUSR1).unwrap();
        self.daemon.log().wait_for_after(seen, "frames: ", Duration::from_secs(5)).unwrap();
        self.daemon.log().lines().split_off(seen)
    }

    /// The daemon's status.
    pub(crate) fn status(&self) -> Status {
        Client::new(self.admin()).unwrap().get("/v1/status", &()).unwrap()
    }

    /// Socket of the admin API.
    pub(crate) fn admin(&self) -> &Path {
        self.config.admin.as_deref().expect("a test that asks has left it on")
    }

    /// Figures of a pod's port.
    pub(crate) fn port(&self, pod: &str) -> PortStatus {
        let ports = self.status().ports;
        ports.into_iter().find(|port| port.pod.as_deref() == Some(pod)).expect("a port of this pod")
    }

    /// A page of the metrics endpoint: status line, header and body; empty without an answer.
    pub(crate) fn http(&self, address: SocketAddr, path: &str) -> String {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
            stream.set_read_timeout(Some(Duration::from_secs(30)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        self.cluster.node.namespace().run(ask).unwrap_or_default()
    }

    /// Fails with the daemon's log if there is a difference.
    pub(crate) fn assert_as_expected(&self, matrix: &Matrix) {
        let differences = matrix.differences();
        let log = self.daemon.log().lines();
        assert!(differences.is_empty(), "{}\n\nthe daemon wrote:\n{}", differences.join("\n"), log.join("\n"));
    }
}

/// Manifests of a node `node` and of pods `test/pod-0`, `test/pod-1`… at 10.244.1.10 and fd00:10:244:1::10 and up, each
/// labelled `app: pod-N`.
pub(crate) fn pods(count: u8) -> String {
    let mut yaml = String::from(
        "{apiVersion: v1, kind: Namespace, metadata: {name: test}}\n\
         ---\n\
         apiVersion: v1\nkind: Node\nmetadata: {name: node}\n\
         status: {addresses: [{type: InternalIP, address: 172.18.0.2}, {type: InternalIP, address: \"fd00:172:18::2\"}]}\n",
    );
    for number in 0..count {
        let (v4, v6) = (format!("10.244.1.{}", 10 + number), format!("fd00:10:244:1::{}", 10 + number));
        yaml += &pod(&format!("pod-{number}"), &v4, &v6);
    }
    yaml
}

/// A document with one pod in the namespace `test`, labelled `app: NAME`.
pub(crate) fn pod(name: &str, v4: &str, v6: &str) -> String {
    let mut yaml = String::new();
    write!(
        yaml,
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{namespace: test, name: {name}, labels: {{app: {name}}}}}\n\
         spec: {{nodeName: node, containers: [{{name: main, image: example.invalid/test}}]}}\n\
         status: {{phase: Running, podIPs: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}\n"
    )
    .unwrap();
    yaml
}

/// A document with a policy in the namespace `test` for one pod; `spec` follows its selector.
pub(crate) fn policy(name: &str, of_pod: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: test, name: {name}}}\n\
         spec:\n  podSelector: {{matchLabels: {{app: {of_pod}}}}}\n{spec}"
    )
}

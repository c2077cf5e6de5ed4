//! Test fixture: nodes with pods from manifests, servers on all of them, and a daemon on each node.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::cluster::{MultiNodeCluster, NodeLayout, read_objects};
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::{EchoServers, EchoService, Protocol, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, InterNodeLink, Node, Outside, ScratchDir};

/// Services on every site.
pub(crate) const SERVICES: [EchoService; 4] =
    [EchoService::Tcp(8080), EchoService::Tcp(9090), EchoService::Udp(53), EchoService::Sctp(9090)];
/// Protocols of the probes.
pub(crate) const PROTOCOLS: [Protocol; 5] =
    [Protocol::Tcp(8080), Protocol::Tcp(9090), Protocol::Udp(53), Protocol::Sctp(9090), Protocol::Icmp];

/// How nodes are wired.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wiring {
    pub(crate) layout: NodeLayout,
}

impl Wiring {
    /// Routes to a pod network on each node.
    pub(crate) fn routed() -> Self {
        Self { layout: NodeLayout { between: InterNodeLink::Routes, prefixes: (24, 64), bridged: false } }
    }

    /// The same with the pods of each node on a bridge.
    pub(crate) fn bridged() -> Self {
        let Self { layout } = Self::routed();
        Self { layout: NodeLayout { bridged: true, ..layout } }
    }

    /// A tunnel between the nodes.
    pub(crate) fn tunnelled() -> Self {
        let Self { layout } = Self::routed();
        Self { layout: NodeLayout { between: InterNodeLink::Vxlan, ..layout } }
    }

    /// Configuration of a node's daemon; each worker has its own core as long as there are enough.
    pub(crate) fn config(self, number: usize, node: &str, manifests: &std::path::Path) -> DaemonConfig {
        let mut config = DaemonConfig::new(node, manifests);
        let cores = penstock_dataplane::worker::available_cores();
        // Senders, receivers and other tests' workers share the cores: a worker that wakes up must not wait for all of
        // them.
        let core = cores[number % cores.len()].0;
        config.sections += &format!("[workers]\ncores = [{core}]\npriority = \"realtime\"\n");
        // That a change is in effect is said there.
        config.sections += "[log]\nlevel = \"debug\"\n";
        config
    }
}

/// Nodes with pods, each under a running daemon.
pub(crate) struct Fixture {
    pub(crate) daemons: Vec<Daemon>,
    pub(crate) nodes: MultiNodeCluster,
    /// Nodes and pods, then the machine beyond the router.
    pub(crate) sites: Vec<Site>,
    pub(crate) configs: Vec<DaemonConfig>,
    pub(crate) manifests: PathBuf,
    scratch: ScratchDir,
    pub(crate) beyond: Outside,
    _servers: Vec<EchoServers>,
}

impl Fixture {
    /// With these manifests in one file, `all.yaml`.
    pub(crate) fn start(yaml: &str, wiring: Wiring, services: &[EchoService]) -> Self {
        Self::start_with(yaml, wiring, services, |_| {})
    }

    /// The same with further configuration.
    pub(crate) fn start_with(
        yaml: &str,
        wiring: Wiring,
        services: &[EchoService],
        more: fn(&mut DaemonConfig),
    ) -> Self {
        Self::start_prepared(yaml, wiring, services, more, |_, _| Vec::new())
    }

    /// The same; `prepare` wires more between nodes and the machine beyond the router before anything runs, and returns it
    /// as further sites.
    pub(crate) fn start_prepared(
        yaml: &str,
        wiring: Wiring,
        services: &[EchoService],
        more: fn(&mut DaemonConfig),
        prepare: impl FnOnce(&MultiNodeCluster, &Outside) -> Vec<Site>,
    ) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::write(manifests.join("all.yaml"), yaml).unwrap();
        let nodes = MultiNodeCluster::build(&read_objects(&manifests).unwrap(), wiring.layout).unwrap();
        let beyond = nodes.router.add_outside("beyond").unwrap();
        let mut sites = nodes.sites.clone();
        if wiring.layout.between == InterNodeLink::Routes {
            // With a tunnel, only the nodes have routes to pods.
            sites.push(Site::from(&beyond));
        }
        sites.extend(prepare(&nodes, &beyond));
        let servers = EchoServers::start_all(&sites, services).unwrap();
        let configs: Vec<DaemonConfig> = (nodes.nodes.iter().enumerate())
            .map(|(number, (name, _))| {
                let mut config = wiring.config(number, name, &manifests);
                more(&mut config);
                config
            })
            .collect();
        let started = configs.iter().zip(&nodes.nodes).map(|(config, (_, node))| start_on(node, config));
        let daemons = started.collect();
        Self { daemons, nodes, sites, configs, manifests, scratch, beyond, _servers: servers }
    }

    /// Ends a node's daemon as an upgrade does and starts the next one.
    pub(crate) fn replace_daemon(&mut self, node: usize) {
        let (status, log) = self.daemons.remove(node).stop().unwrap();
        assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
        self.daemons.insert(node, start_on(&self.nodes.nodes[node].1, &self.configs[node]));
    }

    /// Saves a manifest atomically.
    pub(crate) fn save(&self, file: &str, content: &str) {
        self.scratch.save(&self.manifests.join(file), content).unwrap();
    }

    /// Saves a manifest that changes a policy and waits until it is in effect on every node.
    pub(crate) fn publish(&self, file: &str, content: &str) {
        let seen: Vec<usize> = self.daemons.iter().map(|daemon| daemon.log().len()).collect();
        self.save(file, content);
        for (daemon, seen) in self.daemons.iter().zip(seen) {
            daemon.log().wait_for_after(seen, "published: NetworkPolicy", Duration::from_secs(10)).unwrap();
        }
        self.wait_until_in_effect();
    }

    /// Until then programs go by what was published before.
    pub(crate) fn wait_until_in_effect(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        for daemon in &self.daemons {
            let published = last_epoch(&daemon.log().lines(), "published: ");
            while last_epoch(&daemon.log().lines(), "in effect on all workers") < published {
                assert!(Instant::now() < deadline, "{published:?} is not in effect:\n{}", self.logs());
                sleep(Duration::from_millis(1));
            }
        }
    }

    /// Evaluates the current manifests and sends all probes.
    pub(crate) fn matrix(&self) -> Matrix {
        let oracle = PolicyOracle::new(&read_objects(&self.manifests).unwrap());
        Matrix::between(&self.sites, &[], &oracle, &PROTOCOLS).unwrap()
    }

    pub(crate) fn site(&self, name: &str) -> &Site {
        &self.sites[self.index(name)]
    }

    fn index(&self, name: &str) -> usize {
        self.sites.iter().position(|site| site.name == name).unwrap_or_else(|| panic!("no site {name}"))
    }

    /// A site as the target of a probe: its server's identity and its address of a family.
    pub(crate) fn target(&self, name: &str, v6: bool) -> (u32, std::net::IpAddr) {
        (self.index(name) as u32, self.site(name).address(v6).unwrap())
    }

    /// Index of the node of a site; `None` for the machine beyond the router.
    pub(crate) fn node_of(&self, site: usize) -> Option<usize> {
        let name = &self.sites[site].name;
        let is_here = |(own, node): &(String, Node)| own == name || node.pods().iter().any(|pod| pod.name() == name);
        self.nodes.nodes.iter().position(is_here)
    }

    /// A daemon's current statistics.
    pub(crate) fn statistics(&self, node: usize) -> Vec<String> {
        let daemon = &self.daemons[node];
        let seen = daemon.log().len();
        daemon.signal(Signal::SIGUSR1).unwrap();
        daemon.log().wait_for_after(seen, "frames: ", Duration::from_secs(5)).unwrap();
        daemon.log().lines().split_off(seen)
    }

    /// Fails with the daemons' logs if there is a difference.
    pub(crate) fn assert_as_expected(&self, matrix: &Matrix) {
        let differences = matrix.differences();
        assert!(differences.is_empty(), "{}\n\n{}", differences.join("\n"), self.logs());
    }

    /// Logs of all daemons.
    pub(crate) fn logs(&self) -> String {
        let logs = self.daemons.iter().zip(&self.nodes.nodes);
        logs.map(|(daemon, (name, _))| format!("{name} wrote:\n{}\n", daemon.log().lines().join("\n"))).collect()
    }
}

/// Waits until a daemon serves all pods of its node; pods on a bridge are found shortly after it is ready.
fn start_on(node: &Node, config: &DaemonConfig) -> Daemon {
    let daemon = Daemon::start(node.namespace(), config).unwrap();
    let all = format!("pods={} ", node.pods().len());
    let served = daemon.log().wait_for_after(0, &all, Duration::from_secs(10));
    assert!(served.is_ok(), "not all pods are served:\n{}", daemon.log().lines().join("\n"));
    daemon
}

/// The epoch of the last line of a log that says this.
fn last_epoch(lines: &[String], what: &str) -> Option<u32> {
    let line = lines.iter().rev().find(|line| line.contains(what))?;
    line.split_once(" epoch=")?.1.split(' ').next()?.parse().ok()
}

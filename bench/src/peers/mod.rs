//! Packet forwarders between two pods: Penstock and its alternatives, on the same topology and under the same policies.
//! Enforcement is verified before anything is measured.

mod churn;
mod filters;
mod full_table;
mod huge_pages;
mod nfqueue;
mod openvswitch;
mod peer;
mod policy;
mod redirect;
mod testpmd;
mod tools;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use penstock_admin::client::Client;
use penstock_admin::types::Status;

use crate::load::{
    Flood, FloodPackets, FloodSources, Harness, ProbeMode, Traffic, Trial, TrialResult, UdpSink, pin, raise_priority,
    route_default_to,
};
use crate::testbed::{Daemon, Namespace, Node, Outside, PacketCapture, Pod, RouteVia, ScratchDir, ServiceProcess};

pub use churn::{ChangeTimes, PodChurn, churn, times_until_in_force};
use huge_pages::HugePages;
pub use peer::{CONNECTIONS, Peer};
use peer::{KEPT, MEMORY, daemon_config};
pub use policy::{ClusterSize, NODE, further_policy, manifests, pod_name};
pub use tools::{MissingTool, find, find_in, search_path};

/// The core of generator and receiver, and the forwarder's core where it has one of its own.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    pub generator: usize,
    pub worker: usize,
}

impl Cores {
    /// The first two cores that this process may use.
    pub fn first_two() -> Result<Self> {
        let cores = core_affinity::get_core_ids().context("the system does not tell which cores there are")?;
        let [generator, worker, ..] = cores.as_slice() else {
            bail!("generator and worker need a core each, and there is one core; run it where there are two");
        };
        Ok(Self { generator: generator.id, worker: worker.id })
    }
}

enum RunningPeer {
    Rules,
    Penstock(Box<Daemon>),
    Queue { _thread: nfqueue::VerdictThread },
    Services(Vec<ServiceProcess>),
}

/// A node with pods and a peer that forwards between them.
pub struct PeerTestbed {
    peer: Peer,
    /// Dropped before the node.
    running: RunningPeer,
    node: Node,
    /// A machine behind the node, or the second node.
    outside: Option<Outside>,
    harness: Harness,
    manifests: PathBuf,
    /// The peer's description of itself, such as its version.
    description: String,
    size: ClusterSize,
    cores: Cores,
    scratch: ScratchDir,
}

impl PeerTestbed {
    /// Builds it and verifies the peer: allowed traffic arrives and is answered, denied traffic does not arrive.
    pub fn build(label: &str, peer: Peer, size: ClusterSize, mtu: u32, cores: Cores) -> Result<Self> {
        let scratch = ScratchDir::in_memory()?;
        let mut node = node(label, size, mtu)?;
        let outside = size.other_node.then(|| other_node(&mut node)).transpose()?;
        let manifests = policy::write(&scratch, size)?;
        let (from, to) = (node.pod(&pod_name(0))?, node.pod(&pod_name(1))?);
        let gateway = node.netlink().mac(from.interface())?;
        let harness = Harness::open(from, to, gateway)?;
        let (running, description) = start(&peer, &node, outside.as_ref(), &manifests, &scratch, cores)
            .with_context(|| format!("cannot set {label} up"))?;
        if size.services > 0 {
            filters::service(node.namespace(), scratch.path())?;
        }
        let mut testbed = Self { peer, node, outside, harness, running, manifests, description, size, cores, scratch };
        testbed.harness.send_to(testbed.destination()?);
        testbed.verify().with_context(|| format!("{label} does not do what it should"))?;
        if let Some(other) = &testbed.outside {
            testbed.harness.receive_at(other.namespace(), policy::REMOTE.into())?;
        }
        if size.open > 0 {
            testbed.with_peer_mut(|testbed| full_table::fill(testbed, size.open))?;
        }
        testbed.pause()?;
        Ok(testbed)
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns a flood from a machine behind the node, and the namespace in which to run it. The first call adds the
    /// machine and makes it the node's default route.
    pub fn flood_from_outside(
        &mut self,
        packets: FloodPackets,
        sources: FloodSources,
        to: (Ipv4Addr, u16),
    ) -> Result<(Flood, Namespace)> {
        if self.outside.is_none() {
            let outside = self.node.add_outside("outside")?;
            route_default_to(&self.node, &outside)?;
            self.outside = Some(outside);
        }
        let outside = self.outside.as_ref().context("a machine outside was just added")?;
        let end = (outside.namespace(), outside.interface());
        Ok((Flood::new(&self.node, end, packets, sources, to)?, outside.namespace().clone()))
    }

    /// Returns a flood that a pod sends from its own address, and the namespace in which to run it.
    pub fn flood_from_pod(
        &self,
        number: usize,
        packets: FloodPackets,
        to: (Ipv4Addr, u16),
    ) -> Result<(Flood, Namespace)> {
        let (pod, from) = (self.pod(number)?, policy::pod_address(number));
        let end = (pod.namespace(), pod.interface());
        Ok((Flood::new(&self.node, end, packets, FloodSources::One(from), to)?, pod.namespace().clone()))
    }

    pub fn description(&self) -> &str {
        &self.description
    }

    /// The daemon, if the peer is Penstock.
    pub fn daemon(&self) -> Option<&Daemon> {
        match &self.running {
            RunningPeer::Penstock(daemon) => Some(daemon),
            _ => None,
        }
    }

    pub fn pod(&self, number: usize) -> Result<&Pod> {
        self.node.pod(&pod_name(number))
    }

    /// Where the first pod's traffic goes to: the second one, or the Service whose backend that is.
    pub fn destination(&self) -> Result<IpAddr> {
        if self.size.to_service { Ok(policy::cluster_address(0).into()) } else { v4(self.pod(1)?) }
    }

    /// The namespaces of the first pod and of the one that it sends to, on the second node if there is one, and the
    /// address to send to.
    pub fn ends(&self) -> Result<(&Namespace, &Namespace, IpAddr)> {
        let from = self.pod(0)?.namespace();
        match &self.outside {
            Some(other) if self.size.other_node => Ok((from, other.namespace(), policy::REMOTE.into())),
            _ => Ok((from, self.pod(1)?.namespace(), self.destination()?)),
        }
    }

    /// Runs a trial between the first two pods.
    pub fn run(&mut self, trial: &Trial) -> Result<TrialResult> {
        self.resume()?;
        let (harness, core) = (&mut self.harness, self.cores.generator);
        let run = || {
            pin(core)?;
            if trial.high_priority {
                raise_priority()?;
            }
            harness.run(trial)
        };
        let outcome = std::thread::scope(|scope| scope.spawn(run).join());
        self.pause()?;
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs `work` while the peer is resumed.
    pub fn with_peer<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.resume()?;
        let result = work(self);
        self.pause()?;
        result
    }

    /// The same for work that runs trials of its own.
    fn with_peer_mut<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.resume()?;
        let result = work(self);
        self.pause()?;
        result
    }

    /// Runs a trial and, on another thread, `beside`, which is signalled when the trial ends.
    pub fn run_beside<T: Send>(
        &mut self,
        trial: &Trial,
        beside: impl FnOnce(&AtomicBool) -> Result<T> + Send,
    ) -> Result<(TrialResult, T)> {
        let core = self.cores.worker;
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ends = &ends;
            let other = scope.spawn(move || {
                pin(core)?;
                beside(ends)
            });
            let outcome = self.run(trial);
            ends.store(true, Ordering::Relaxed);
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok((outcome?, other?))
        })
    }

    /// A handle that replaces manifests and makes the peer apply them.
    pub fn reload(&self) -> ManifestReloader {
        ManifestReloader {
            peer: self.peer.clone(),
            node: self.node.namespace().clone(),
            manifests: self.manifests.clone(),
            scratch: self.scratch.path().to_owned(),
        }
    }

    pub fn size(&self) -> ClusterSize {
        self.size
    }

    /// A handle that reads the daemon's status, also during a measurement.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader { socket: self.daemon().map(|_| self.scratch.path().join("admin.sock")) }
    }

    /// Ends the daemon and starts it again: the time until it is ready.
    pub fn restart(&mut self) -> Result<Duration> {
        let Peer::Penstock { sections, .. } = &self.peer else { bail!("this peer is no daemon") };
        let config = daemon_config(&self.manifests, &self.scratch, sections, self.cores);
        match std::mem::replace(&mut self.running, RunningPeer::Rules) {
            RunningPeer::Penstock(daemon) => drop(daemon.stop()?),
            _ => bail!("the daemon has not started"),
        }
        let began = Instant::now();
        let daemon = Daemon::start(self.node.namespace(), &config)?;
        let took = began.elapsed();
        self.running = RunningPeer::Penstock(Box::new(daemon));
        Ok(took)
    }

    /// The daemon's status, if the peer is Penstock.
    pub fn status(&self) -> Result<Option<Status>> {
        self.status_reader().status()
    }

    /// Connections that the peer's table holds: that of Penstock, or the kernel's in the node's namespace.
    pub fn open_connections(&self) -> Result<usize> {
        if let Some(status) = self.status()? {
            return Ok(status.connections.entries);
        }
        let count = || std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
        let text = self.node.namespace().run(count).context("cannot read how many connections the kernel tracks")?;
        text.trim().parse().with_context(|| format!("the kernel tracks {text:?} connections, which is no number"))
    }

    /// Begins a capture of Penstock with these options of `penstock capture`, whose packets nobody keeps. The peer needs a line
    /// `capture on`.
    pub fn capture(&self, options: &[&str]) -> Result<PacketCapture> {
        PacketCapture::start_discarding(&capture_socket(&self.scratch), options)
    }

    /// Moves the kernel's receive work to the worker's core (receive packet steering), or leaves it where packets
    /// arrive.
    pub fn steer(&self, steered: bool) -> Result<()> {
        let mask = if steered { 1 << self.cores.worker } else { 0 };
        self.node.namespace().set_receive_steering(self.pod(0)?.interface(), mask)
    }

    fn processes(&self) -> Vec<Pid> {
        match &self.running {
            RunningPeer::Penstock(daemon) => vec![daemon.id()],
            RunningPeer::Services(services) => services.iter().map(ServiceProcess::id).collect(),
            RunningPeer::Rules | RunningPeer::Queue { .. } => Vec::new(),
        }
    }

    fn pause(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    fn resume(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)?;
        if let RunningPeer::Services(services) = &self.running {
            ensure!(services.iter().all(|service| !service.has_ended()), "it has ended by itself");
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        if self.peer.always_polls() {
            for process in self.processes() {
                kill(process, signal).with_context(|| format!("cannot send {signal} to process {process}"))?;
            }
        }
        Ok(())
    }

    /// Verifies that an allowed packet arrives and is answered, and that a denied one does not arrive if the peer
    /// enforces policy.
    fn verify(&mut self) -> Result<()> {
        let mut trial = Trial::paced(Traffic::SMALLEST, 1000.0, Duration::from_millis(200));
        trial.probing = ProbeMode::RoundTrip(200.0);
        let mut answered = 0;
        // Some peers need a moment until their ports are up.
        for _ in 0..10 {
            let outcome = self.run(&trial)?;
            ensure!(outcome.corrupted + outcome.probes.corrupted == 0, "packets arrive otherwise than they were sent");
            answered = outcome.probes.round_trip.len();
            if answered > 0 {
                break;
            }
        }
        ensure!(answered > 0, "an allowed packet or its answer does not arrive");
        match (self.peer.enforces(), self.with_peer(Self::denied_arrives)?) {
            (true, true) => bail!("a packet that no policy allows arrived"),
            (false, false) => bail!("a packet did not arrive, though nobody enforces a policy"),
            (true, false) | (false, true) => Ok(()),
        }
    }

    fn denied_arrives(&self) -> Result<bool> {
        let (from, to) = (self.pod(0)?, self.pod(1)?);
        let destination = SocketAddr::new(v4(to)?, policy::DENIED);
        let sink = UdpSink::open(to.namespace(), destination)?;
        let sender = from.namespace().run(|| UdpSocket::bind(SocketAddr::new(v4(from)?, 0)).context("cannot bind"))?;
        for _ in 0..3 {
            sender.send_to(b"denied", destination)?;
        }
        Ok(!sink.drain(Duration::from_millis(300))?.is_empty())
    }
}

/// Reads the status of a testbed's daemon.
pub struct StatusReader {
    /// The admin socket, if the peer is Penstock.
    socket: Option<PathBuf>,
}

impl StatusReader {
    /// The daemon's status, if the peer is Penstock.
    pub fn status(&self) -> Result<Option<Status>> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let status = Client::new(socket)?.get("/v1/status", &());
        Ok(Some(status.map_err(|error| anyhow::anyhow!("{error}"))?))
    }

    /// The snapshot epoch that all workers have adopted, if the peer is Penstock.
    pub fn epoch(&self) -> Result<Option<u32>> {
        let status = self.status()?;
        Ok(status.and_then(|status| status.workers.iter().map(|worker| worker.epoch).min()))
    }
}

pub struct ManifestReloader {
    peer: Peer,
    node: Namespace,
    manifests: PathBuf,
    scratch: PathBuf,
}

impl ManifestReloader {
    /// Replaces the manifests atomically. Penstock watches them; nftables loads a new rendering.
    pub fn save(&self, text: &str) -> Result<()> {
        let new = self.scratch.join("being-saved");
        std::fs::write(&new, text)?;
        std::fs::rename(&new, self.manifests.join("all.yaml"))?;
        match &self.peer {
            Peer::Nftables => filters::nftables(&self.node, &policy::engine(&self.manifests)?, &self.scratch).map(drop),
            _ => Ok(()),
        }
    }

    /// Saves a further manifest of this name atomically; Penstock watches it too.
    pub fn save_as(&self, file: &str, text: &str) -> Result<()> {
        let new = self.scratch.join(format!("being-saved-{file}"));
        std::fs::write(&new, text)?;
        Ok(std::fs::rename(&new, self.manifests.join(file))?)
    }

    pub fn remove(&self, file: &str) -> Result<()> {
        std::fs::remove_file(self.manifests.join(file)).with_context(|| format!("cannot remove {file}"))
    }
}

impl Drop for PeerTestbed {
    fn drop(&mut self) {
        // A stopped process cannot end.
        let _ = self.signal(Signal::SIGCONT);
    }
}

fn node(label: &str, size: ClusterSize, mtu: u32) -> Result<Node> {
    let mut node = Node::new(label, &[policy::NODE_ADDRESS.into()])?;
    for number in 0..size.pods {
        node.add_pod_with_mtu(&pod_name(number), &[policy::pod_address(number).into()], mtu)?;
    }
    node.settle()?;
    Ok(node)
}

/// The second node, which has nothing but its pod: a machine behind the node that has the pod's address as well.
fn other_node(node: &mut Node) -> Result<Outside> {
    let outside = node.add_outside("other")?;
    let inside = outside.namespace().netlink()?;
    inside.add_address(inside.index("eth0")?, IpNet::from(IpAddr::from(policy::REMOTE)))?;
    let gateway = outside.addresses().iter().copied().find(IpAddr::is_ipv4).context("the node has no IPv4 address")?;
    let netlink = node.netlink();
    let index = netlink.index(outside.interface())?;
    netlink.add_route(IpNet::from(IpAddr::from(policy::REMOTE)), index, RouteVia::Gateway(gateway))?;
    Ok(outside)
}

fn start(
    peer: &Peer,
    node: &Node,
    other: Option<&Outside>,
    manifests: &Path,
    scratch: &ScratchDir,
    cores: Cores,
) -> Result<(RunningPeer, String)> {
    let namespace = node.namespace();
    let rules = |description: String| (RunningPeer::Rules, description);
    match peer {
        Peer::Penstock { enforces, sections } => {
            let mut config = daemon_config(manifests, scratch, sections, cores);
            if !enforces {
                config.environment.push(("FORWARD_ONLY".to_owned(), "1".to_owned()));
            }
            // The huge pages are taken when the daemon starts. Afterwards the pool may shrink again.
            let pages = sections.contains("huge pages").then(HugePages::reserve).transpose()?;
            let daemon = Daemon::start(namespace, &config)?;
            pages.map(HugePages::were_taken).transpose()?;
            Ok((RunningPeer::Penstock(Box::new(daemon)), format!("version {}", env!("CARGO_PKG_VERSION"))))
        }
        Peer::Kernel => Ok(rules(tools::kernel()?)),
        Peer::Nftables => filters::nftables(namespace, &policy::engine(manifests)?, scratch.path()).map(rules),
        Peer::Linear => filters::linear(namespace, &policy::engine(manifests)?, scratch.path()).map(rules),
        Peer::Iptables => filters::iptables(namespace, &policy::engine(manifests)?).map(rules),
        Peer::Nfqueue => {
            let thread = nfqueue::VerdictThread::start(namespace, policy::engine(manifests)?, cores.worker)?;
            Ok((RunningPeer::Queue { _thread: thread }, tools::version("iptables", "--version")?))
        }
        Peer::OpenVSwitch => {
            let (services, description) = openvswitch::start(node, &policy::engine(manifests)?, scratch, cores)?;
            Ok((RunningPeer::Services(services), description))
        }
        Peer::Testpmd => {
            let (service, description) = testpmd::start(node, scratch, cores)?;
            Ok((RunningPeer::Services(vec![service]), description))
        }
        Peer::Redirect => redirect::start(node, other, scratch).map(rules),
    }
}

fn capture_socket(scratch: &ScratchDir) -> PathBuf {
    scratch.path().join("capture.sock")
}

fn v4(pod: &Pod) -> Result<IpAddr> {
    pod.address(false).with_context(|| format!("pod {} has no IPv4 address", pod.name()))
}

//! One configuration under test: a node with two pods, and what forwards between them.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use penstock_bench::cluster::read_objects;
use penstock_bench::load::{Generator, Sink, UdpFlow, pin};
use penstock_bench::testbed::{Daemon, DaemonConfig, Node, Pod, Scratch};
use penstock_control::engine::{Engine, Settings};
use penstock_control::model::Change;
use penstock_control::render;

/// The port that the policy allows.
const ALLOWED: u16 = 9000;
/// One that it does not.
const DENIED: u16 = 9001;
/// The sender's port.
const SOURCE: u16 = 40000;
/// Octets of a frame, without the frame check sequence.
const FRAME: usize = 64;
/// The node's name in the manifests.
const NODE: &str = "smoke";
/// The policy's objects.
const MANIFESTS: &str = include_str!("manifests.yaml");

/// The generator's core, and the one that forwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    pub(crate) generator: usize,
    pub(crate) worker: usize,
}

/// Who forwards.
pub(crate) enum Forwarder {
    Kernel,
    Nftables,
    Penstock(Daemon),
}

/// A node with two pods, ready to be measured.
pub(crate) struct Lane {
    node: Node,
    sender: UdpSocket,
    sink: Sink,
    generator: Generator,
    frame: Vec<u8>,
    forwarder: Forwarder,
    _scratch: Scratch,
}

/// What one measurement came to, in packets per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) offered: f64,
    pub(crate) received: f64,
}

impl Lane {
    pub(crate) fn kernel() -> Result<Self> {
        Self::build("kernel", |_, _| Ok(Forwarder::Kernel))
    }

    /// The policy as `penstock render --format nft` has it.
    pub(crate) fn nftables(nft: &Path) -> Result<Self> {
        Self::build("nftables", |node, scratch| {
            let mut engine = Engine::new(Settings::for_node(NODE));
            engine.apply(read_objects(&manifests(scratch)?)?.into_iter().map(Change::Set));
            let file = scratch.path().join("ruleset.nft");
            fs::write(&file, render::nft::render(engine.state(), engine.tables()))?;
            let output = node.namespace().command(nft).arg("-f").arg(&file).output().context("cannot run nft")?;
            ensure!(output.status.success(), "nft refuses the ruleset: {}", complaint(&output));
            Ok(Forwarder::Nftables)
        })
    }

    pub(crate) fn penstock(mode: &str, cores: Cores) -> Result<Self> {
        Self::build(mode, |node, scratch| {
            let mut config = DaemonConfig::new(NODE, &manifests(scratch)?);
            config.sections += &format!("[workers]\ncores = [{}]\n[dataplane]\nmode = \"{mode}\"\n", cores.worker);
            Ok(Forwarder::Penstock(Daemon::start(node.namespace(), &config)?))
        })
    }

    fn build(label: &str, forwarder: impl FnOnce(&Node, &Scratch) -> Result<Forwarder>) -> Result<Self> {
        let scratch = Scratch::new()?;
        let mut node = Node::new(label, &["172.18.0.2".parse()?, "fd00:172:18::2".parse()?])?;
        node.add_pod("smoke/sender", &["10.244.1.11".parse()?, "fd00:10:244:1::11".parse()?])?;
        node.add_pod("smoke/receiver", &["10.244.1.12".parse()?, "fd00:10:244:1::12".parse()?])?;
        node.settle()?;
        let forwarder = forwarder(&node, &scratch)?;
        let (from, to) = (node.pod("smoke/sender")?, node.pod("smoke/receiver")?);
        let source = SocketAddr::new(v4(from)?, SOURCE);
        let destination = SocketAddr::new(v4(to)?, ALLOWED);
        let flow = UdpFlow {
            source_mac: from.namespace().netlink()?.mac("eth0")?,
            gateway_mac: node.netlink().mac(from.interface())?,
            source,
            destination,
        };
        let lane = Self {
            sender: from.namespace().run(|| UdpSocket::bind(source))?,
            sink: Sink::open(to.namespace(), destination)?,
            generator: from.namespace().run(|| Generator::open("eth0"))?,
            frame: flow.frame(FRAME)?,
            forwarder,
            node,
            _scratch: scratch,
        };
        lane.verify().with_context(|| format!("the configuration {label} does not do what it should"))?;
        Ok(lane)
    }

    /// An allowed packet arrives and is answered (which establishes the connection that is then measured); a
    /// denied one does not arrive where there is a policy, and does where there is none.
    fn verify(&self) -> Result<()> {
        let receiver = self.node.pod("smoke/receiver")?;
        self.establish()?;
        let denied = Sink::open(receiver.namespace(), SocketAddr::new(v4(receiver)?, DENIED))?;
        self.sender.send_to(b"denied", SocketAddr::new(v4(receiver)?, DENIED))?;
        let arrived = !denied.drain(Duration::from_millis(300))?.is_empty();
        let polices = match &self.forwarder {
            Forwarder::Kernel => false,
            Forwarder::Nftables => true,
            Forwarder::Penstock(daemon) => !fs::read_to_string(daemon.config())?.contains("\"forward\""),
        };
        match (polices, arrived) {
            (true, true) => bail!("a packet that the policy denies arrived"),
            (false, false) => bail!("a packet to port {DENIED} did not arrive, though there is no policy"),
            (true, false) | (false, true) => Ok(()),
        }
    }

    /// Exchanges packets of the measured flow in both directions.
    fn establish(&self) -> Result<()> {
        let receiver = self.node.pod("smoke/receiver")?;
        for _ in 0..10 {
            self.sender.send_to(b"allowed", SocketAddr::new(v4(receiver)?, ALLOWED))?;
            let datagrams = self.sink.drain(Duration::from_millis(300))?;
            let Some((from, _)) = datagrams.iter().find(|(_, content)| content == b"allowed") else { continue };
            self.sink.socket().send_to(b"reply", from)?;
            self.sender.set_read_timeout(Some(Duration::from_millis(300)))?;
            let mut reply = [0; 16];
            if self.sender.recv(&mut reply).is_ok_and(|length| &reply[..length] == b"reply") {
                return Ok(());
            }
        }
        bail!("an allowed packet or its answer does not arrive")
    }

    /// Overloads it for this long. `steer` moves the kernel's work to the worker's core.
    pub(crate) fn measure(&self, length: Duration, cores: Cores, steer: bool) -> Result<Rates> {
        let mask = if steer { 1 << cores.worker } else { 0 };
        let from = self.node.pod("smoke/sender")?;
        self.node.namespace().set_receive_steering(from.interface(), mask)?;
        self.establish()?;
        std::thread::scope(|scope| {
            let run = scope.spawn(|| {
                pin(cores.generator)?;
                // The first moments fill caches and buffers and are not counted.
                self.generator.run_for(&self.frame, length / 5)?;
                let (start, before) = (Instant::now(), self.sink.arrived()?);
                let sent = self.generator.run_for(&self.frame, length)?;
                let (time, after) = (start.elapsed().as_secs_f64(), self.sink.arrived()?);
                Ok(Rates { offered: sent as f64 / time, received: (after - before) as f64 / time })
            });
            run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// How many packets arrived with a wrong checksum.
    pub(crate) fn wrong_checksums(&self) -> Result<u64> {
        self.sink.wrong_checksums()
    }
}

/// The policy's objects as a directory.
fn manifests(scratch: &Scratch) -> Result<PathBuf> {
    let directory = scratch.path().join("manifests");
    fs::create_dir(&directory)?;
    fs::write(directory.join("smoke.yaml"), MANIFESTS)?;
    Ok(directory)
}

fn v4(pod: &Pod) -> Result<IpAddr> {
    pod.address(false).with_context(|| format!("pod {} has no IPv4 address", pod.name()))
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")
}

/// The `nft` command, where there is one.
pub(crate) fn nft_command() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(usual).map(|directory| directory.join("nft"));
    places.find(|file| file.is_file())
}

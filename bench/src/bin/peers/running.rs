//! An engine that runs on both nodes of a cell.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use penstock_bench::testbed::{ControlGroup, ServiceProcess};

use crate::cell::{Cell, CellNode};
use crate::cluster::NODES;
use crate::engine::{Engine, PeersFolder, Place};

/// How long an engine may take to end by itself.
const END: Duration = Duration::from_secs(10);
/// How often it may end by itself while it starts.
const RESTARTS: usize = 4;
/// An engine that takes less of a core for this long has done what it does at its start.
const REST: Duration = Duration::from_millis(300);
/// See [`REST`].
const SHARE_AT_REST: f64 = 0.05;

/// Its processes; they end when this is dropped.
pub(crate) struct Running<'a> {
    engine: &'a Engine,
    cell: &'a Cell,
    peers: &'a PeersFolder,
    kubeconfig: &'a Path,
    processes: Vec<ServiceProcess>,
    /// One of each node, which outlast the processes.
    groups: Vec<ControlGroup>,
}

impl<'a> Running<'a> {
    pub(crate) fn start(
        engine: &'a Engine,
        cell: &'a Cell,
        peers: &'a PeersFolder,
        kubeconfig: &'a Path,
    ) -> Result<Self> {
        let groups = match engine.enforces() {
            true => NODES[..2].iter().map(|node| ControlGroup::new(node.name)).collect::<Result<Vec<_>>>()?,
            false => Vec::new(),
        };
        let mut running = Self { engine, cell, peers, kubeconfig, processes: Vec::new(), groups };
        running.launch()?;
        Ok(running)
    }

    /// Starts it again after it has ended.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let Some(program) = self.engine.program(self.peers)? else { return Ok(()) };
        self.processes =
            (0..self.cell.nodes.len()).map(|number| self.launch_on(number, &program)).collect::<Result<_>>()?;
        Ok(())
    }

    fn launch_on(&self, number: usize, program: &Path) -> Result<ServiceProcess> {
        let node = &self.cell.nodes[number];
        let pins = pins(self.engine, node)?;
        let place = Place { node: NODES[number].name, kubeconfig: self.kubeconfig, state: &node.state, pins: &pins };
        std::fs::write(place.configuration(), (self.engine.configuration)(&place))?;
        let mut command = self.command(program, node);
        command.args(self.engine.arguments(&place)).envs(self.engine.environment(&place));
        let log = File::options().create(true).append(true).open(log_of(node))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.groups[number].take_in(&mut command)?;
        ServiceProcess::start(command)
    }

    /// In the node's network namespace. Another project's program gets the folders of a machine of its own, in which two nodes
    /// would otherwise meet.
    fn command(&self, program: &Path, node: &CellNode) -> Command {
        if !self.engine.is_peer() {
            return node.namespace.command(program);
        }
        let state = node.state.display();
        let libraries = self.peers.libraries().map_or_else(String::new, |folder| {
            format!("mount -t overlay overlay -o 'lowerdir={}:/usr/lib' /usr/lib\n", folder.display())
        });
        // A sysfs shows the network namespace of the process that mounts it.
        let script = format!(
            "set -e\nmount -t sysfs sysfs /sys\nmount --bind {state}/bpf /sys/fs/bpf\n{libraries}\
             mount --bind {state}/lib /var/lib\nmount --bind {state}/log /var/log\nmount --bind {state}/run /run\nexec \"$@\"\n"
        );
        let mut command = node.namespace.command("unshare");
        command.args(["--mount", "--", "sh", "-c", &script, "sh"]).arg(program);
        command
    }

    /// Waits until all probes give what policy says; returns when the first round of them began that did.
    pub(crate) fn wait_until_verified(&mut self, limit: Duration) -> Result<Instant> {
        let (deadline, mut restarts) = (Instant::now() + limit, 0);
        loop {
            let begun = Instant::now();
            let differences = match self.engine.enforces() {
                true => self.cell.differences()?,
                false => Vec::new(),
            };
            if differences.is_empty() {
                return Ok(begun);
            }
            if let Some(number) = self.processes.iter().position(ServiceProcess::has_ended) {
                // As a kubelet: Felix ends where its settings change, and is started again.
                restarts += 1;
                if restarts > RESTARTS {
                    bail!(
                        "it ends again and again on {}; the end of its output: {}",
                        NODES[number].name,
                        self.output(number)
                    );
                }
                let program = self.engine.program(self.peers)?.context("an engine without a program has not ended")?;
                self.processes[number] = self.launch_on(number, &program)?;
            }
            if Instant::now() > deadline {
                eprintln!("{} on {}, the end of its output: {}", self.engine.name, NODES[0].name, self.output(0));
                let (all, first) = (differences.len(), differences.into_iter().take(2).collect::<Vec<_>>().join("; "));
                bail!("not as policy says {limit:?} after its start, in {all} probes of 14: {first}");
            }
        }
    }

    /// Waits until it rests; not longer than `limit`.
    pub(crate) fn settle(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && !self.groups.is_empty() {
            let (start, before) = (Instant::now(), self.processor_time(2)?);
            std::thread::sleep(REST);
            let used = self.processor_time(2)?.saturating_sub(before);
            if used.as_secs_f64() < SHARE_AT_REST * start.elapsed().as_secs_f64() {
                break;
            }
        }
        Ok(())
    }

    /// Kills it on both nodes, with all that it has started, as the kernel ends a container whose memory is used up.
    pub(crate) fn crash(&mut self) -> Result<()> {
        self.groups.iter().try_for_each(ControlGroup::kill)?;
        self.wait_until_ended(END);
        Ok(())
    }

    /// Has it end by itself, and what it leaves.
    pub(crate) fn stop(&mut self) -> Result<()> {
        for process in &self.processes {
            // It may have ended already.
            let _ = kill(process.id(), Signal::SIGTERM);
        }
        self.wait_until_ended(END);
        self.crash()
    }

    fn wait_until_ended(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while !self.processes.iter().all(ServiceProcess::has_ended) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        if self.processes.iter().all(ServiceProcess::has_ended) {
            self.processes.clear();
        }
    }

    /// Processor time of its first so many nodes.
    pub(crate) fn processor_time(&self, nodes: usize) -> Result<Duration> {
        self.groups.iter().take(nodes).map(ControlGroup::processor_time).sum()
    }

    /// Memory on the first node, in bytes: of its processes, and of its BPF maps.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        self.groups.first().map(|group| (group.resident(), group.bpf_maps()))
    }

    /// The end of its output on a node.
    fn output(&self, node: usize) -> String {
        const LINES: usize = 5;
        let text = std::fs::read(log_of(&self.cell.nodes[node])).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let mut lines: Vec<String> = text.lines().rev().take(LINES).map(|line| format!("{line:.300}")).collect();
        lines.reverse();
        if lines.is_empty() { "(nothing)".to_owned() } else { lines.join(" | ") }
    }
}

fn log_of(node: &CellNode) -> PathBuf {
    node.state.join("output.log")
}

/// Where it pins BPF objects: Penstock on the machine's own file system, which the namespace's end cleans.
fn pins(engine: &Engine, node: &CellNode) -> Result<PathBuf> {
    Ok(match engine.is_peer() {
        true => node.state.join("bpf"),
        false => Path::new("/sys/fs/bpf/penstock").join(node.namespace.inode()?.to_string()),
    })
}

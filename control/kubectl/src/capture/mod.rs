//! `kubectl penstock capture`: packets of several nodes, with their verdicts, in one file ordered by time.

mod merge;
mod node;
mod output;
mod plan;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_admin::capture::{CaptureCounts, CaptureMessage};
use penstock_replay::capture::filter;
use penstock_text::arguments::{CaptureArgs, new_file};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::ask::{Answers, Asking, words};
use super::cluster::{Cluster, Daemon, Fleet, Missing, PodName, Problem, Writer};
use super::{Failure, folder};
use node::{Event, follow};
use output::{Output, Packet};
use plan::Plan;

/// Capture packets of several nodes with their verdicts, in one file ordered by time
///
/// With --from and --to: the packets between two pods, at both ends. With --pod: those of one pod, on its node. Otherwise those of
/// all nodes. Writes pcapng: an interface for each pod's port of each node, and the comments that `penstock capture` writes, with the
/// node. The order is that of the nodes' clocks: where they differ, so does the order. Each daemon must offer captures
/// (`capture.socket` in its configuration), and does one at a time.
///
/// With --bundle a directory gets a folder for each node, as `penstock capture --bundle` writes it: packets, the cluster's objects, and
/// their changes meanwhile. `penstock replay DIR/NODE` evaluates the packets again.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  ended at a limit, by Ctrl-C, or because the reader of standard output has left
  1  the file cannot be written in full, or no node has answered
  2  bad input: a filter, a file that exists, a directory with files, a terminal, rights that the user lacks, or no daemon
     offers captures
  4  some nodes have not captured, or not to the end; they are named, and the file has the others' packets

Examples:
  kubectl penstock capture --from shop/web-1 --to shop/db-0 -o both.pcapng
  kubectl penstock capture --pod shop/web-1 --port 443 -o - | wireshark -k -i -
  kubectl penstock capture --pod shop/web-1 --filter 'tcp port 80 or icmp' -o web.pcapng
  kubectl penstock capture --pod shop/web-1 --seconds 60 --bundle incident/
  kubectl penstock capture --verdict deny --seconds 30 -o denied.pcapng
  kubectl penstock capture --reason spoofed_source --snaplen 128 --packets 1000 -o spoofed.pcapng")]
pub(super) struct Args {
    /// The file to write, or - for standard output; an existing file is not overwritten
    #[arg(short, long, value_name = "FILE", required_unless_present = "bundle")]
    output: Option<PathBuf>,
    /// Write a bundle of each node for penstock replay, a folder each; the directory is created, or is empty
    #[arg(long, value_name = "DIR", conflicts_with = "output")]
    bundle: Option<PathBuf>,
    /// Only packets between this pod (NAMESPACE/POD) and that of --to, on both nodes
    #[arg(long, value_name = "POD", requires = "to", conflicts_with_all = ["pod", "host"])]
    from: Option<PodName>,
    /// The other pod
    #[arg(long, value_name = "POD", requires = "from")]
    to: Option<PodName>,
    /// Only packets from or to this pod (NAMESPACE/POD), on its node
    #[arg(long, value_name = "POD")]
    pod: Option<PodName>,
    #[command(flatten)]
    packets: CaptureArgs,
}

/// How long the nodes may take to end once they are asked to.
const LAST_PACKETS: Duration = Duration::from_secs(10);
/// Between two looks for packets that have waited long enough.
const TICK: Duration = Duration::from_millis(100);

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let plan = args.plan(cluster).await?;
    let CaptureArgs { filter, program, .. } = &args.packets;
    let program = filter::program(filter.as_deref(), program.as_deref()).map_err(Failure::bad_input)?;
    let fleet = cluster.daemons().await?;
    let fleet = match &plan.nodes {
        Some(nodes) => fleet.only(&nodes.keys().cloned().collect()),
        None => {
            super::tell(fleet.note.as_deref());
            fleet
        }
    };
    // Before the capture: a file that cannot be written is no reason to look at packets.
    let target = Target::open(&args)?;
    let command = |daemon: &Daemon| args.command(&plan, program.clone(), daemon);
    let mut capture = Capture::start(cluster, asking, fleet, command).await;
    let limits = Limits { packets: args.packets.packets, between: plan.between };
    let ended = if capture.nodes.is_empty() { Ok(()) } else { capture.run(target, &limits).await };
    let is_empty = capture.written == 0;
    let answers = capture.answers();
    if answers.answers.is_empty() && is_empty {
        args.remove();
    }
    match (ended, args.file()) {
        (Err(error), None) => Failure::from_output(error)?,
        (Err(error), Some(path)) => {
            let context = format!("cannot write {}", path.display());
            return Err(Failure::Failed(anyhow::Error::new(error).context(context)));
        }
        (Ok(()), _) => {}
    }
    answers.completeness()
}

/// The output, opened before the nodes are known.
enum Target {
    /// One file; and what to watch for the end of its reader.
    Merged(Box<dyn Write>, Option<OwnedFd>),
    /// A folder for each node below a directory.
    Bundles(PathBuf),
}

impl Target {
    fn open(args: &Args) -> Result<Self, Failure> {
        if let Some(directory) = &args.bundle {
            folder::create(directory)?;
            return Ok(Self::Bundles(directory.clone()));
        }
        if let Some(path) = args.file() {
            return Ok(Self::Merged(Box::new(new_file(path)?), None));
        }
        if io::stdout().is_terminal() {
            return Err(Failure::bad_input(
                "standard output is a terminal: write packets to a file (-o FILE), or pipe them to a program",
            ));
        }
        Ok(Self::Merged(Box::new(io::stdout()), io::stdout().as_fd().try_clone_to_owned().ok()))
    }
}

struct Limits {
    packets: Option<u64>,
    between: Option<(Vec<IpAddr>, Vec<IpAddr>)>,
}

impl Args {
    async fn plan<C: Cluster>(&self, cluster: &C) -> Result<Plan, Failure> {
        if let (Some(from), Some(to)) = (&self.from, &self.to) {
            let (one, other) = (cluster.pod(from).await?, cluster.pod(to).await?);
            return Ok(plan::between((from, &one), (to, &other)));
        }
        let Some(pod) = &self.pod else { return Ok(Plan::default()) };
        Ok(plan::of_pod(pod, cluster.pod(pod).await?))
    }

    /// The file or directory that is written; `None`: standard output.
    fn file(&self) -> Option<&Path> {
        let given = self.bundle.as_deref().or(self.output.as_deref());
        given.filter(|path| *path != Path::new("-"))
    }

    /// Removes what nothing was written to.
    fn remove(&self) {
        // A directory that was there before, and is empty, is no loss.
        let _ = match (&self.bundle, self.file()) {
            (Some(directory), _) => std::fs::remove_dir(directory),
            (None, Some(file)) => std::fs::remove_file(file),
            (None, None) => Ok(()),
        };
    }

    fn command(&self, plan: &Plan, program: Option<String>, daemon: &Daemon) -> Vec<String> {
        let mut command = words(&["penstock", "capture", "--messages", "--end-with-input"]);
        command.extend(self.bundle.as_ref().map(|_| "--objects".to_owned()));
        command.extend(plan.nodes.iter().filter_map(|nodes| nodes.get(&daemon.node)).flatten().cloned());
        command.extend(self.packets.options(program));
        command
    }
}

struct Capture {
    nodes: Vec<CapturingNode>,
    missing: Vec<Missing>,
    events: mpsc::Receiver<Event>,
    written: u64,
    /// Ends with this value.
    _tasks: JoinSet<()>,
}

struct CapturingNode {
    daemon: Daemon,
    stdin: Option<Writer>,
    began: bool,
    counts: CaptureCounts,
    reason: Option<String>,
    ended: Option<Result<(), Problem>>,
}

impl Capture {
    async fn start<C: Cluster>(
        cluster: &C,
        asking: Asking,
        fleet: Fleet,
        command: impl Fn(&Daemon) -> Vec<String>,
    ) -> Self {
        let (sender, events) = mpsc::channel(1024);
        let (mut nodes, mut missing, mut tasks) = (Vec::new(), fleet.missing, JoinSet::new());
        let started = fleet.daemons.into_iter().map(|daemon| {
            let command = command(&daemon);
            async move {
                let started = tokio::time::timeout(asking.timeout, cluster.exec(&daemon, command, true)).await;
                (daemon, started.unwrap_or(Err(Problem::TimedOut(asking.timeout.as_secs()))))
            }
        });
        for (daemon, started) in futures_util::future::join_all(started).await {
            match started {
                Ok(mut running) => {
                    let stdin = running.stdin.take();
                    tasks.spawn(follow(nodes.len(), running, sender.clone()));
                    let counts = CaptureCounts::default();
                    nodes.push(CapturingNode { daemon, stdin, began: false, counts, reason: None, ended: None });
                }
                Err(problem) => missing.push(Missing::new(&daemon.node, Some(&daemon.pod), &problem)),
            }
        }
        Self { nodes, missing, events, written: 0, _tasks: tasks }
    }

    async fn run(&mut self, target: Target, limits: &Limits) -> io::Result<()> {
        let names: Vec<String> = self.nodes.iter().map(|node| node.daemon.node.clone()).collect();
        let (mut output, watched) = match target {
            Target::Merged(file, watched) => (Output::merged(file, &names)?, watched),
            Target::Bundles(directory) => (Output::bundles(&directory, &names)?, None),
        };
        let start = Instant::now();
        if let Err(error) = self.write(&mut output, watched, limits, start).await {
            self.ask_to_end().await;
            return Err(error);
        }
        output.drain(Duration::MAX, limits.packets)?;
        self.written = output.packets();
        eprintln!("kubectl penstock: {}", self.summary(&output));
        let damages = output.end(&ends(&self.nodes), start.elapsed())?;
        for (node, damage) in self.nodes.iter_mut().zip(damages) {
            let damage = damage.map(|error| Err(Problem::Failed(format!("its bundle is not whole: {error}"))));
            // Why the node has not captured to the end comes first.
            if let (Some(Ok(())), Some(damage)) = (&node.ended, damage) {
                node.ended = Some(damage);
            }
        }
        Ok(())
    }

    async fn write(
        &mut self,
        output: &mut Output,
        watched: Option<OwnedFd>,
        limits: &Limits,
        start: Instant,
    ) -> io::Result<()> {
        let mut interrupt = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        let mut end: Option<Instant> = None;
        let closed = closed(watched);
        tokio::pin!(closed);
        while self.nodes.iter().any(|node| node.ended.is_none()) {
            let [int, term] = &mut interrupt;
            let asked_to_end = tokio::select! {
                event = self.events.recv() => {
                    if let Some(event) = event {
                        self.take(event, output, start.elapsed(), limits)?;
                    }
                    false
                }
                _ = int.recv() => true,
                _ = term.recv() => true,
                () = &mut closed, if end.is_none() => true,
                () = tokio::time::sleep(TICK) => false,
                () = sleep_until(end.unwrap_or(start)), if end.is_some() => {
                    self.give_up();
                    false
                }
            };
            output.drain(start.elapsed(), limits.packets)?;
            self.written = output.packets();
            let is_full = limits.packets.is_some_and(|most| self.written >= most);
            match (asked_to_end || is_full, end) {
                (true, None) => {
                    self.ask_to_end().await;
                    end = Some(Instant::now() + LAST_PACKETS);
                }
                // A second time: now.
                (true, Some(_)) if asked_to_end => self.give_up(),
                _ => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, event: Event, output: &mut Output, now: Duration, limits: &Limits) -> io::Result<()> {
        match event {
            Event::Message(number, message, content) => {
                output.message(number, &message, &content, now)?;
                let node = &mut self.nodes[number];
                match message {
                    CaptureMessage::Begin { .. } => {
                        node.began = true;
                        self.tell_when_all_have_begun();
                    }
                    CaptureMessage::Packet(record) => {
                        if limits.between.as_ref().is_none_or(|ends| plan::is_between(&content, ends)) {
                            let packet = Packet { record, frame: content, lost: node.counts.lost };
                            output.packet(number, packet, now, limits.packets)?;
                        }
                    }
                    CaptureMessage::Progress(counts) => node.counts = counts,
                    CaptureMessage::End { reason, counts } => {
                        (node.counts, node.reason) = (counts, Some(reason));
                    }
                    CaptureMessage::Objects { .. } | CaptureMessage::Changes { .. } => {}
                }
            }
            Event::Ended(node, ended) => {
                output.ended(node);
                self.nodes[node].ended = Some(ended);
            }
        }
        Ok(())
    }

    fn tell_when_all_have_begun(&self) {
        if self.nodes.iter().all(|node| node.began) {
            let names: Vec<&str> = self.nodes.iter().map(|node| node.daemon.node.as_str()).collect();
            eprintln!("kubectl penstock: capturing on {}", names.join(", "));
        }
    }

    /// Says in a line what is written, and what is not.
    fn summary(&self, output: &Output) -> String {
        let nodes = self.nodes.iter().enumerate().map(|(number, CapturingNode { daemon, counts, .. })| {
            format!("{} {} (and {} lost to the capture)", daemon.node, output.packets_of(number), counts.lost)
        });
        let late = match output.late() {
            0 => String::new(),
            late => format!("; {late} came too late for their place in the order"),
        };
        format!("{} packets: {}{late}", output.packets(), nodes.collect::<Vec<_>>().join(", "))
    }

    /// Something on its standard input ends a capture, and it still says how.
    async fn ask_to_end(&mut self) {
        for node in &mut self.nodes {
            if let Some(stdin) = &mut node.stdin {
                // A node that has ended has closed it.
                let _ = stdin.write_all(b"\n").await;
                let _ = stdin.flush().await;
            }
        }
    }

    /// Nodes that have not ended by now are missing.
    fn give_up(&mut self) {
        for node in self.nodes.iter_mut().filter(|node| node.ended.is_none()) {
            node.ended = Some(Err(Problem::TimedOut(LAST_PACKETS.as_secs())));
        }
    }

    fn answers(self) -> Answers<CaptureCounts> {
        let (mut answers, mut missing) = (Vec::new(), self.missing);
        for CapturingNode { daemon, counts, ended, .. } in self.nodes {
            match ended.unwrap_or(Err(Problem::Unreachable("the capture was ended here".to_owned()))) {
                Ok(()) => answers.push((daemon, counts)),
                Err(problem) => missing.push(Missing::new(&daemon.node, Some(&daemon.pod), &problem)),
            }
        }
        missing.sort_by(|one, other| one.node.cmp(&other.node));
        Answers { answers, missing }
    }
}

/// By node: what it has counted, and why its capture ended.
fn ends(nodes: &[CapturingNode]) -> Vec<(CaptureCounts, String)> {
    let end = |node: &CapturingNode| {
        let reason = match (&node.ended, &node.reason) {
            (Some(Err(problem)), _) => problem.to_string(),
            (_, Some(reason)) => reason.clone(),
            (_, None) => "interrupted".to_owned(),
        };
        (node.counts, reason)
    };
    nodes.iter().map(end).collect()
}

/// Waits until nobody reads this pipe or socket any more. A file has no other end.
async fn closed(output: Option<OwnedFd>) {
    // SAFETY: the descriptor is open, and the value owns it and never gives it away.
    let watched = output.and_then(|output| unsafe { AsyncFd::register_with_interest(output, Interest::ERROR) }.ok());
    match watched {
        Some(watched) => drop(watched.ready(Interest::ERROR).await),
        None => std::future::pending().await,
    }
}

//! `kubectl penstock capture`: packets of several nodes, with their verdicts, in one file ordered by time.

mod merge;
mod node;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::Failure;
use super::ask::{Answers, Asking, words};
use super::cluster::{Cluster, Daemon, Fleet, Missing, PodName, PodPlace, Problem, Writer};
use merge::{Merger, PacketFile};
use node::{Counts, Event, Packet, follow};

/// Capture packets of several nodes with their verdicts, in one file ordered by time
///
/// With --from and --to: the packets between two pods, at both ends. With --pod: those of one pod, on its node. Otherwise those of
/// all nodes. Writes pcapng: an interface for each pod's port of each node, and the comments that `penstock capture` writes, with the
/// node. The order is that of the nodes' clocks: where they differ, so does the order. Each daemon must offer captures
/// (`capture.socket` in its configuration), and does one at a time.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  ended at a limit, by Ctrl-C, or because the reader of standard output has left
  1  the file cannot be written in full, or no node has answered
  2  bad input: a filter, a file that exists, a terminal, rights that the user lacks, or no daemon offers captures
  4  some nodes have not captured, or not to the end; they are named, and the file has the others' packets

Examples:
  kubectl penstock capture --from shop/web-1 --to shop/db-0 -o both.pcapng
  kubectl penstock capture --pod shop/web-1 --port 443 -o - | wireshark -k -i -
  kubectl penstock capture --verdict deny --seconds 30 -o denied.pcapng
  kubectl penstock capture --reason spoofed_source --snaplen 128 --packets 1000 -o spoofed.pcapng")]
pub(super) struct Args {
    /// The file to write, or - for standard output; an existing file is not overwritten
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Only packets between this pod (NAMESPACE/POD) and that of --to, on both nodes
    #[arg(long, value_name = "POD", requires = "to", conflicts_with_all = ["pod", "host"])]
    from: Option<PodName>,
    /// The other pod
    #[arg(long, value_name = "POD", requires = "from")]
    to: Option<PodName>,
    /// Only packets from or to this pod (NAMESPACE/POD), on its node
    #[arg(long, value_name = "POD")]
    pod: Option<PodName>,
    /// Only packets with this verdict: allow or deny
    #[arg(long, value_name = "VERDICT")]
    verdict: Option<String>,
    /// Only packets that were dropped for this reason, such as ingress_denied
    #[arg(long, value_name = "CAUSE")]
    reason: Option<String>,
    /// Only packets from or to this address
    #[arg(long, value_name = "ADDRESS")]
    host: Option<IpAddr>,
    /// Only packets from or to this port
    #[arg(long, value_name = "NUMBER")]
    port: Option<u16>,
    /// Only packets of this protocol: TCP, UDP, SCTP, ICMP, ICMPv6 or a number
    #[arg(long, value_name = "PROTOCOL")]
    protocol: Option<String>,
    /// Only packets that this program accepts: what `tcpdump -ddd -y EN10MB EXPRESSION` prints
    #[arg(long, value_name = "PROGRAM")]
    program: Option<String>,
    /// Bytes to keep of each packet, from 64 to 4096
    #[arg(long, value_name = "BYTES")]
    snaplen: Option<u32>,
    /// End after so many packets of all nodes together
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    packets: Option<u64>,
    /// End after so many seconds, at most an hour
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// End on a node after so many bytes of its packets
    #[arg(long, value_name = "COUNT")]
    bytes: Option<u64>,
}

/// How long the nodes may take to end once they are asked to.
const LAST_PACKETS: Duration = Duration::from_secs(10);
/// How long a packet waits for older ones of other nodes.
const HOLD: Duration = Duration::from_secs(1);
/// Between two looks for packets that have waited long enough.
const TICK: Duration = Duration::from_millis(100);

/// What to capture where.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Plan {
    /// By node, the options that only it gets; `None`: all nodes.
    nodes: Option<BTreeMap<String, Vec<String>>>,
    /// Addresses of both ends, where a node cannot choose by them.
    between: Option<(Vec<IpAddr>, Vec<IpAddr>)>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let plan = args.plan(cluster).await?;
    let fleet = cluster.daemons().await?;
    let fleet = match &plan.nodes {
        Some(nodes) => fleet.only(&nodes.keys().cloned().collect()),
        None => {
            super::tell(fleet.note.as_deref());
            fleet
        }
    };
    let is_stdout = args.output == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        return Err(Failure::bad_input(
            "standard output is a terminal: write packets to a file (-o FILE), or pipe them to a program",
        ));
    }
    // Before the capture: a file that cannot be written is no reason to look at packets.
    let (output, watched): (Box<dyn Write>, _) = match is_stdout {
        true => (Box::new(io::stdout()), io::stdout().as_fd().try_clone_to_owned().ok()),
        false => (Box::new(create(&args.output)?), None),
    };
    let mut capture = Capture::start(cluster, asking, fleet, |daemon| args.command(&plan, daemon)).await;
    let ended = match capture.nodes.is_empty() {
        true => Ok(()),
        false => capture.run(output, watched, &args, plan.between.as_ref()).await,
    };
    let is_empty = capture.written == 0;
    let answers = capture.answers();
    if answers.answers.is_empty() && is_empty && !is_stdout {
        let _ = std::fs::remove_file(&args.output);
    }
    match ended {
        Err(error) if is_stdout => Failure::from_output(error)?,
        Err(error) => {
            let context = format!("cannot write {}", args.output.display());
            return Err(Failure::Failed(anyhow::Error::new(error).context(context)));
        }
        Ok(()) => {}
    }
    answers.completeness()
}

fn create(path: &Path) -> Result<File, Failure> {
    File::create_new(path).map_err(|error| {
        let name = path.display();
        Failure::bad_input(match error.kind() {
            io::ErrorKind::AlreadyExists => format!("{name}: exists already; give another name"),
            _ => format!(
                "{name}: cannot be created ({error}); give a path that can be written, or - for standard output"
            ),
        })
    })
}

impl Args {
    /// Which nodes to ask, and for what.
    async fn plan<C: Cluster>(&self, cluster: &C) -> Result<Plan, Failure> {
        if let (Some(from), Some(to)) = (&self.from, &self.to) {
            let (one, other) = (cluster.pod(from).await?, cluster.pod(to).await?);
            return Ok(between((from, &one), (to, &other)));
        }
        let Some(pod) = &self.pod else { return Ok(Plan::default()) };
        let place = cluster.pod(pod).await?;
        let nodes = BTreeMap::from([(place.node, vec![format!("--pod={pod}")])]);
        Ok(Plan { nodes: Some(nodes), between: None })
    }

    fn command(&self, plan: &Plan, daemon: &Daemon) -> Vec<String> {
        let mut command = words(&["penstock", "capture", "--output=-", "--end-with-input"]);
        command.extend(plan.nodes.iter().filter_map(|nodes| nodes.get(&daemon.node)).flatten().cloned());
        let text = |value: &Option<u64>| value.map(|value| value.to_string());
        for (option, value) in [
            ("verdict", self.verdict.clone()),
            ("reason", self.reason.clone()),
            ("host", self.host.map(|host| host.to_string())),
            ("port", self.port.map(|port| port.to_string())),
            ("protocol", self.protocol.clone()),
            ("program", self.program.clone()),
            ("snaplen", self.snaplen.map(|bytes| bytes.to_string())),
            ("packets", text(&self.packets)),
            ("seconds", text(&self.seconds)),
            ("bytes", text(&self.bytes)),
        ] {
            command.extend(value.map(|value| format!("--{option}={value}")));
        }
        command
    }
}

/// The packets between two pods: each node chooses by its own pod and the other's address, if there is but one.
fn between((from, one): (&PodName, &PodPlace), (to, other): (&PodName, &PodPlace)) -> Plan {
    let options = |pod: &PodName, peer: &PodPlace| match peer.addresses[..] {
        [address] => vec![format!("--pod={pod}"), format!("--host={address}")],
        _ => vec![format!("--pod={pod}")],
    };
    let nodes = BTreeMap::from([(other.node.clone(), options(to, one)), (one.node.clone(), options(from, other))]);
    let is_plain = one.addresses.len() == 1 && other.addresses.len() == 1;
    let between = (!is_plain).then(|| (one.addresses.clone(), other.addresses.clone()));
    Plan { nodes: Some(nodes), between }
}

/// Whether a frame is from one of these addresses to one of those, or back.
fn is_between(frame: &[u8], (one, other): &(Vec<IpAddr>, Vec<IpAddr>)) -> bool {
    let address = |at: std::ops::Range<usize>| -> Option<IpAddr> {
        let bytes = frame.get(at)?;
        match bytes.len() {
            4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
            _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        }
    };
    let ends = match frame.get(12..14) {
        Some([0x08, 0x00]) => address(26..30).zip(address(30..34)),
        Some([0x86, 0xdd]) => address(22..38).zip(address(38..54)),
        _ => None,
    };
    ends.is_some_and(|(from, to)| {
        one.contains(&from) && other.contains(&to) || one.contains(&to) && other.contains(&from)
    })
}

/// A capture that runs on several nodes.
struct Capture {
    nodes: Vec<CapturingNode>,
    missing: Vec<Missing>,
    events: mpsc::Receiver<Event>,
    /// Packets in the file.
    written: u64,
    /// Ends with this value.
    _tasks: JoinSet<()>,
}

struct CapturingNode {
    daemon: Daemon,
    stdin: Option<Writer>,
    began: bool,
    /// How it ended.
    ended: Option<Result<Counts, Problem>>,
}

impl Capture {
    /// Starts captures on all nodes.
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
                    nodes.push(CapturingNode { daemon, stdin, began: false, ended: None });
                }
                Err(problem) => missing.push(Missing::new(&daemon.node, Some(&daemon.pod), &problem)),
            }
        }
        Self { nodes, missing, events, written: 0, _tasks: tasks }
    }

    /// Writes packets in their order until all nodes have ended.
    async fn run(
        &mut self,
        output: Box<dyn Write>,
        watched: Option<OwnedFd>,
        args: &Args,
        between: Option<&(Vec<IpAddr>, Vec<IpAddr>)>,
    ) -> io::Result<()> {
        let names = self.nodes.iter().map(|node| node.daemon.node.clone()).collect();
        let mut file = PacketFile::new(BufWriter::with_capacity(1 << 16, output), names)?;
        let mut merger = Merger::new(self.nodes.len(), HOLD);
        let mut interrupt = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        let start = Instant::now();
        let mut end: Option<Instant> = None;
        let closed = closed(watched);
        tokio::pin!(closed);
        while self.nodes.iter().any(|node| node.ended.is_none()) {
            let [int, term] = &mut interrupt;
            let asked_to_end = tokio::select! {
                event = self.events.recv() => {
                    if let Some(event) = event {
                        self.take(event, &mut merger, start.elapsed(), between);
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
            if let Err(error) = file.drain(&mut merger, start.elapsed(), args.packets) {
                self.ask_to_end().await;
                return Err(error);
            }
            self.written = file.packets();
            let is_full = args.packets.is_some_and(|most| file.packets() >= most);
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
        file.drain(&mut merger, Duration::MAX, args.packets)?;
        self.written = file.packets();
        file.end(&self.counts())?;
        eprintln!("kubectl penstock: {}", file.summary(&self.counts(), merger.late()));
        Ok(())
    }

    fn take(
        &mut self,
        event: Event,
        merger: &mut Merger<Packet>,
        now: Duration,
        between: Option<&(Vec<IpAddr>, Vec<IpAddr>)>,
    ) {
        match event {
            Event::Began(node) => {
                self.nodes[node].began = true;
                let began = self.nodes.iter().filter(|node| node.began).count();
                if began == self.nodes.len() {
                    let names: Vec<&str> = self.nodes.iter().map(|node| node.daemon.node.as_str()).collect();
                    eprintln!("kubectl penstock: capturing on {}", names.join(", "));
                }
            }
            Event::Packet(node, packet) => {
                if between.is_none_or(|ends| is_between(&packet.frame, ends)) {
                    merger.push(node, packet.time, packet, now);
                }
            }
            Event::Ended(node, ended) => {
                merger.end(node);
                self.nodes[node].ended = Some(ended);
            }
        }
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

    /// By node.
    fn counts(&self) -> Vec<Counts> {
        let counts = |node: &CapturingNode| match &node.ended {
            Some(Ok(counts)) => *counts,
            _ => Counts::default(),
        };
        self.nodes.iter().map(counts).collect()
    }

    fn answers(self) -> Answers<Counts> {
        let (mut answers, mut missing) = (Vec::new(), self.missing);
        for CapturingNode { daemon, ended, .. } in self.nodes {
            match ended.unwrap_or(Err(Problem::Unreachable("the capture was ended here".to_owned()))) {
                Ok(counts) => answers.push((daemon, counts)),
                Err(problem) => missing.push(Missing::new(&daemon.node, Some(&daemon.pod), &problem)),
            }
        }
        missing.sort_by(|one, other| one.node.cmp(&other.node));
        Answers { answers, missing }
    }
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

//! A trace of the kernel's events, and what of a connection it says.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::unistd::{Pid, gettid};
use penstock_bench::testbed::CleanupGuard;

const TRACING: &str = "/sys/kernel/tracing";
const EVENTS: [&str; 9] = [
    "syscalls/sys_enter_connect",
    "syscalls/sys_exit_connect",
    "syscalls/sys_exit_epoll_wait",
    "syscalls/sys_enter_sendto",
    "syscalls/sys_exit_sendto",
    "sched/sched_waking",
    "sched/sched_switch",
    "net/netif_receive_skb",
    "net/net_dev_queue",
];
/// Room for a round's events.
const BUFFER: &str = "65536";

/// A part of a connection's opening.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) nanoseconds: f64,
}

/// Means of a round's connections.
pub(crate) struct TraceRead {
    pub(crate) parts: Vec<Part>,
    /// Of workers' threads, without what the kernel does for packets meanwhile.
    pub(crate) worker: f64,
}

pub(crate) struct Trace {
    folder: PathBuf,
    workers: Vec<Pid>,
    _guard: CleanupGuard,
}

struct Event<'a> {
    seconds: f64,
    /// The thread that ran.
    thread: Pid,
    name: &'a str,
    fields: &'a str,
}

impl Trace {
    /// Begins to trace this core; the daemon's workers are known by their names.
    pub(crate) fn start(daemon: Option<Pid>) -> Result<Self> {
        if !Path::new(TRACING).join("instances").is_dir() {
            let none: Option<&str> = None;
            mount(Some("tracefs"), TRACING, Some("tracefs"), MsFlags::empty(), none).context("cannot mount tracefs")?;
        }
        let folder = Path::new(TRACING).join(format!("instances/penstock-{}", gettid()));
        fs::create_dir(&folder).context("cannot make an instance of the kernel's tracing")?;
        let remove = folder.clone();
        let guard = CleanupGuard::new(move || drop(fs::remove_dir(remove)));
        let write = |file: &str, text: &str| {
            fs::write(folder.join(file), text).with_context(|| format!("cannot write {text} to {file} of the tracing"))
        };
        write("buffer_size_kb", BUFFER)?;
        for event in EVENTS {
            write(&format!("events/{event}/enable"), "1")?;
        }
        let workers = daemon.map(workers_of).transpose()?.unwrap_or_default();
        Ok(Self { folder, workers, _guard: guard })
    }

    /// Reads what so many connections left; each took `longer` nanoseconds for being traced.
    pub(crate) fn read(self, number: u32, longer: f64) -> Result<TraceRead> {
        fs::write(self.folder.join("tracing_on"), "0")?;
        let text = fs::read_to_string(self.folder.join("trace"))?;
        let events: Vec<Event<'_>> = text.lines().filter_map(Event::read).collect();
        let begins: Vec<usize> =
            events.iter().enumerate().filter(|(_, event)| event.name == "sys_connect").map(|(at, _)| at).collect();
        let begins: Vec<usize> = begins.into_iter().filter(|&at| events[at].fields.starts_with("(fd:")).collect();
        ensure!(begins.len() == number as usize, "of {number} connections {} were traced", begins.len());
        let each = longer / (events.len() as f64 / f64::from(number));
        let opened = begins.windows(2).map(|ends| self.parts_of(&events[ends[0]..ends[1]], each));
        Ok(TraceRead { parts: means(opened.collect()), worker: self.worker(&events, each) / f64::from(number) })
    }

    fn parts_of(&self, events: &[Event<'_>], each: f64) -> Vec<Part> {
        let (mut parts, mut last) = (Vec::new(), 0);
        for (name, ends) in BOUNDARIES {
            let Some(next) = (last + 1..events.len()).find(|&at| ends(self, &events[at])) else { continue };
            let took = (events[next].seconds - events[last].seconds) * 1e9 - (next - last) as f64 * each;
            parts.push(Part { name, nanoseconds: took });
            last = next;
        }
        parts
    }

    /// Nanoseconds of workers' threads, from one switch to the next, without packets that the kernel receives meanwhile.
    fn worker(&self, events: &[Event<'_>], each: f64) -> f64 {
        let (mut since, mut sum) = (None, 0.0);
        for (at, event) in events.iter().enumerate() {
            match event.name {
                "sched_switch" => {
                    if let Some(began) = since.take() {
                        sum += self.between(events, began, at, each);
                    }
                    let is_next = |worker: &Pid| event.fields.contains(&format!("next_pid={worker} "));
                    since = self.workers.iter().any(is_next).then_some(at);
                }
                "sys_sendto" if since.is_some() && event.fields.starts_with("(fd:") => {
                    sum += self.between(events, since.take().unwrap_or(at), at, each);
                }
                "sys_sendto" if self.workers.contains(&event.thread) => since = Some(at),
                _ => {}
            }
        }
        sum
    }

    fn between(&self, events: &[Event<'_>], from: usize, to: usize, each: f64) -> f64 {
        (events[to].seconds - events[from].seconds) * 1e9 - (to - from) as f64 * each
    }

    fn is_of_worker(&self, event: &Event<'_>) -> bool {
        self.workers.contains(&event.thread)
    }
}

type Boundary = fn(&Trace, &Event<'_>) -> bool;

/// The parts of a connection's opening, in order, each with the event that ends it. A connection that meets no worker lacks some.
const BOUNDARIES: [(&str, Boundary); 10] = [
    ("the client's stack, its veth", |_, event| event.is_received("veth") || event.is_received("p")),
    ("`from_pod`, and into the pair", |_, event| {
        event.name == "net_dev_queue" && event.fields.contains("dev=penstock-w")
    }),
    ("the pair, XDP, and AF_XDP's receive", |trace, event| {
        event.name == "sched_waking"
            && trace.workers.iter().any(|worker| event.fields.contains(&format!(" pid={worker} ")))
    }),
    ("wake-up, until the worker runs", |trace, event| {
        event.name == "sched_switch"
            && trace.workers.iter().any(|worker| event.fields.contains(&format!("next_pid={worker} ")))
    }),
    ("wake-up, out of `epoll_wait`", |trace, event| event.name == "sys_epoll_wait" && trace.is_of_worker(event)),
    ("the worker: descriptors, and its decision", |trace, event| {
        event.name == "sys_sendto" && trace.is_of_worker(event)
    }),
    ("AF_XDP's send, the pair", |_, event| event.is_received("penstock-w")),
    ("the SYN's way to the server, its stack, up to the SYN-ACK", |_, event| {
        event.name == "net_dev_queue" && event.fields.contains("dev=eth0")
    }),
    ("the SYN-ACK's way to the client, and the ACK's back", |trace, event| {
        event.name == "sys_sendto" && trace.is_of_worker(event) || event.name == "sys_connect"
    }),
    ("the worker, until it sleeps, and the client", |_, event| {
        event.name == "sys_connect" && event.fields.starts_with("->")
    }),
];

impl<'a> Event<'a> {
    /// A line such as `visits-12 [000] d..2. 853.734013: sched_waking: comm=… pid=…`.
    fn read(line: &'a str) -> Option<Self> {
        let (who, rest) = line.split_once(" [")?;
        let (_, thread) = who.trim().rsplit_once('-')?;
        let (before, rest) = rest.split_once(": ")?;
        // A system call's entry is `sys_name(…)`, its end `sys_name -> …`.
        let (name, fields) = rest.split_once(": ").or_else(|| Some((rest.split(['(', ' ']).next()?, "")))?;
        let name = if rest.starts_with("sys_") { rest.split(['(', ' ']).next()? } else { name };
        let fields = if rest.starts_with("sys_") { rest[name.len()..].trim_start() } else { fields };
        let thread = Pid::from_raw(thread.trim().parse().ok()?);
        Some(Self { seconds: before.split_whitespace().last()?.parse().ok()?, thread, name, fields })
    }

    fn is_received(&self, interface: &str) -> bool {
        self.name == "netif_receive_skb" && self.fields.contains(&format!("dev={interface}"))
    }
}

fn workers_of(daemon: Pid) -> Result<Vec<Pid>> {
    let mut workers = Vec::new();
    for task in fs::read_dir(format!("/proc/{daemon}/task"))?.flatten() {
        let name = fs::read_to_string(task.path().join("comm"))?;
        if name.starts_with("worker-") {
            workers.extend(task.file_name().to_str().and_then(|id| id.parse().ok()).map(Pid::from_raw));
        }
    }
    Ok(workers)
}

/// The mean of each part, over the connections that have all parts of most of them, without the slowest tenth.
fn means(mut connections: Vec<Vec<Part>>) -> Vec<Part> {
    let mut lengths: Vec<usize> = connections.iter().map(Vec::len).collect();
    lengths.sort_unstable();
    let usual = lengths.get(lengths.len() / 2).copied().unwrap_or(0);
    connections.retain(|parts| parts.len() == usual);
    let whole = |parts: &Vec<Part>| parts.iter().map(|part| part.nanoseconds).sum::<f64>();
    connections.sort_by(|one, other| whole(one).total_cmp(&whole(other)));
    connections.truncate((connections.len() * 9).div_ceil(10));
    let number = connections.len() as f64;
    let of = |at: usize| connections.iter().map(|parts| parts[at].nanoseconds).sum::<f64>() / number;
    let Some(first) = connections.first() else { return Vec::new() };
    first.iter().enumerate().map(|(at, part)| Part { name: part.name, nanoseconds: of(at) }).collect()
}

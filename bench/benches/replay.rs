//! Replay speed of a capture, against thresholds and against tcpdump on the same file.
//!
//! `cargo bench -p penstock-bench --bench replay`. The capture has a million packets of ten thousand TCP connections
//! between two hundred pods under a thousand policies; it runs on one core, best of three, replay and tcpdump in
//! alternation. The capture is generated each time with a fixed seed. All times are CPU time, system calls included, so
//! that other load has little effect.
//!
//! The pipeline alone is timed as in a worker: 64 Ki established connections in rotation, in batches from each pod's
//! port, with frames just copied into a ring of 4,096 buffers of 2 KiB; with a table of the default size and with one
//! of a quarter of it, which stays in the caches to a larger part. The cost of copying is measured in alternation and
//! subtracted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, BufWriter, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::Address;
use penstock_dataplane::pipeline::{BATCH, DropReason, Frames, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::RuleScope;
use penstock_replay::cluster::ReplayCluster;
use penstock_replay::{OutputPaths, ReplayOptions, run};
use penstock_sources::manifest::{self, read_manifests};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const PACKETS: usize = 1_000_000;
const CONNECTIONS: usize = 10_000;
const POLICIES: usize = 1000;
const PODS: usize = 200;
/// Flows when the pipeline is timed alone.
const FLOWS: usize = 64 << 10;
/// Packets of each flow while it is timed.
const ROUNDS: usize = 40;
/// Bytes of a frame when the pipeline is timed alone: the Ethernet minimum.
const FRAME: usize = 60;
/// Payload of a data segment in bytes.
const PAYLOAD: usize = 64;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Fallible<()> {
    if let Some(core) = core_affinity::get_core_ids().and_then(|cores| cores.last().copied()) {
        core_affinity::set_for_current(core);
    }
    let directory = tempfile::tempdir()?;
    let manifests = directory.path().join("cluster.yaml");
    fs::write(&manifests, cluster())?;
    let (capture, empty) = (directory.path().join("million.pcap"), directory.path().join("empty.pcap"));
    write_capture(&capture, PACKETS)?;
    write_capture(&empty, 0)?;
    let options = |capture: &Path, verdicts: Option<PathBuf>| ReplayOptions {
        captures: vec![capture.to_owned()],
        manifests: vec![manifests.clone()],
        outputs: OutputPaths { verdicts, ..OutputPaths::default() },
        ..ReplayOptions::default()
    };
    let report = run(&options(&capture, None))?;
    assert_eq!(report.summary.packets as usize, PACKETS);
    assert!(
        report.summary.verdicts.allow as usize == PACKETS,
        "the capture is all allowed: {:?}",
        report.summary.reasons
    );
    let verdicts = directory.path().join("verdicts.jsonl");
    let [loading, plain, with_verdicts, tcpdump] = best([
        &mut || Ok(run(&options(&empty, None)).map(drop)?),
        &mut || Ok(run(&options(&capture, None)).map(drop)?),
        &mut || Ok(run(&options(&capture, Some(verdicts.clone()))).map(drop)?),
        &mut || tcpdump(&capture),
    ])?;
    let (plain, with_verdicts) = (plain.saturating_sub(loading), with_verdicts.saturating_sub(loading));
    let (roomy, tight) = (pipeline(&manifests, 1 << 20)?, pipeline(&manifests, 1 << 18)?);
    let (clock, size) = (clock()?, fs::metadata(&capture)?.len());
    println!(
        "{PACKETS} packets, {} MB, {CONNECTIONS} connections, {POLICIES} policies; one core, now at {clock:.1} GHz",
        size >> 20
    );
    println!("manifests read and compiled in {loading:.0?}, not counted below\n");
    let rate = |time: Duration| PACKETS as f64 / time.as_secs_f64() / 1e6;
    println!("{:<44} {:>12} {:>12}", "", "measured", "bar");
    row("replay, M packets/s", rate(plain), 3.0, Bound::AtLeast);
    row("replay with verdict file, M packets/s", rate(with_verdicts), 0.7, Bound::AtLeast);
    row("replay / tcpdump -r -w /dev/null", rate(plain) / rate(tcpdump), 0.5, Bound::AtLeast);
    row("pipeline alone, established, ns/packet", roomy.nanoseconds, 60.0, Bound::AtMost);
    row("the same in a table of a quarter the size", tight.nanoseconds, 60.0, Bound::AtMost);
    let note = |name, figure: f64| println!("{name:<44} {figure:>12.2}");
    note("pipeline alone, cycles/packet", roomy.nanoseconds * clock);
    note("the same in a table of a quarter the size", tight.nanoseconds * clock);
    note("copying a frame in, ns, not in it", roomy.copying);
    note("packets in a batch, on average", roomy.batch);
    note("tcpdump -r -w /dev/null, M packets/s", rate(tcpdump));
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Bound {
    AtLeast,
    AtMost,
}

fn row(name: &str, measured: f64, threshold: f64, bound: Bound) {
    let (sign, meets) = match bound {
        Bound::AtLeast => ("≥", measured >= threshold),
        Bound::AtMost => ("≤", measured <= threshold),
    };
    let word = if meets { "meets" } else { "falls short" };
    println!("{name:<44} {measured:>12.2} {:>12}  {word}", format!("{sign} {threshold}"));
}

/// Best CPU time of each of some works, out of three in alternation.
fn best<const N: usize>(mut works: [&mut dyn FnMut() -> Fallible<()>; N]) -> Fallible<[Duration; N]> {
    let mut best = [Duration::MAX; N];
    for _ in 0..3 {
        for (work, best) in works.iter_mut().zip(&mut best) {
            let started = cpu_time()? + cpu_time_of_children()?;
            work()?;
            *best = (cpu_time()? + cpu_time_of_children()? - started).min(*best);
        }
    }
    Ok(best)
}

/// On the same core: a child inherits the affinity.
fn tcpdump(capture: &Path) -> Fallible<()> {
    let mut command = Command::new("tcpdump");
    command.arg("-r").arg(capture).args(["-w", "/dev/null"]).stderr(Stdio::null());
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err("tcpdump failed".into()) }
}

fn pod_address(pod: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, (pod / 200) as u8, (pod % 200 + 1) as u8)
}

/// Pods in one namespace, each with a unique label and one of ten shared ones; policies that each admit one of the ten
/// on one port of one pod.
fn cluster() -> String {
    let mut text = String::from("apiVersion: v1\nkind: Namespace\nmetadata: { name: bench }\n");
    for pod in 0..PODS {
        let address = pod_address(pod);
        write!(
            text,
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{ namespace: bench, name: p{pod}, labels: {{ pod: p{pod}, team: t{} }} }}\n\
             spec: {{ nodeName: n, containers: [{{ name: c, image: example.invalid/c }}] }}\n\
             status: {{ phase: Running, podIP: {address}, podIPs: [{{ ip: {address} }}] }}\n",
            pod % 10
        )
        .expect("writing to a string does not fail");
    }
    for policy in 0..POLICIES {
        let (pod, team) = (policy % PODS, policy / PODS);
        write!(
            text,
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{ namespace: bench, name: n{policy} }}\n\
             spec:\n  podSelector: {{ matchLabels: {{ pod: p{pod} }} }}\n  ingress:\n  - from: [{{ podSelector: {{ matchLabels: {{ team: t{team} }} }} }}]\n    ports: [{{ port: {} }}]\n",
            8000 + policy
        )
        .expect("writing to a string does not fail");
    }
    text
}

/// A connection of the capture and its state.
#[derive(Clone, Copy)]
struct Connection {
    ends: [(Ipv4Addr, u16); 2],
    /// Next sequence number of each end.
    next: [u32; 2],
    /// Completed steps of the handshake.
    step: u8,
}

/// A client with the label that the policy admits, and the policy's pod and port.
fn connection(number: usize) -> Connection {
    let policy = number % POLICIES;
    let (server, team) = (policy % PODS, policy / PODS);
    let client = (number / POLICIES * 10 + team + 10 * (server % 7)) % PODS;
    let client = if client == server { (client + 10) % PODS } else { client };
    let port = 20_000 + (number / POLICIES * 64 + number % 64) as u16;
    Connection {
        ends: [(pod_address(client), port), (pod_address(server), 8000 + policy as u16)],
        next: [1000, 5000],
        step: 0,
    }
}

impl Connection {
    /// The next segment from one of the ends.
    fn segment(&mut self, from: usize) -> Vec<u8> {
        let ((src, src_port), (dst, dst_port)) = (self.ends[from], self.ends[1 - from]);
        let mut header = TcpHeader::new(src_port, dst_port, self.next[from], 60_000);
        header.syn = self.step < 2;
        header.ack = self.step > 0;
        header.acknowledgment_number = if header.ack { self.next[1 - from] } else { 0 };
        let payload = if self.step > 2 { PAYLOAD } else { 0 };
        self.next[from] += payload as u32 + u32::from(header.syn);
        self.step = (self.step + 1).min(3);
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4(src.octets(), dst.octets(), 64)
            .tcp_header(header)
            .write(&mut frame, &[b'd'; PAYLOAD][..payload])
            .expect("a segment of this size can be built");
        frame
    }
}

/// Ten microseconds between packets. Each connection begins with a handshake; then a random connection sends one to
/// eight segments in one direction, and so on.
fn write_capture(path: &Path, packets: usize) -> io::Result<()> {
    let mut random = SmallRng::seed_from_u64(7);
    let mut connections: Vec<Connection> = (0..CONNECTIONS).map(connection).collect();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    for word in [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65535, 1] {
        file.write_all(&word.to_le_bytes())?;
    }
    let mut written = 0;
    let mut opened = 0;
    while written < packets {
        let (which, burst) = if opened < CONNECTIONS && random.random_ratio(1, 20) || opened == 0 {
            opened += 1;
            (opened - 1, 3)
        } else {
            (random.random_range(0..opened), random.random_range(1..=8))
        };
        let from = random.random_range(0..2);
        for _ in 0..burst.min(packets - written) {
            let connection = &mut connections[which];
            let from = if connection.step < 3 { usize::from(connection.step == 1) } else { from };
            let frame = connection.segment(from);
            let micros = written as u64 * 10;
            let words = [1_700_000_000 + (micros / 1_000_000) as u32, (micros % 1_000_000) as u32];
            for word in words.into_iter().chain([frame.len() as u32; 2]) {
                file.write_all(&word.to_le_bytes())?;
            }
            file.write_all(&frame)?;
            written += 1;
        }
    }
    assert!(packets == 0 || opened == CONNECTIONS, "{opened} connections opened");
    file.flush()
}

/// Buffers into which the kernel would copy received frames.
struct RxBuffers {
    bytes: Vec<u8>,
    first: usize,
    len: usize,
}

impl RxBuffers {
    /// Number of buffers: as many as a port's rings hold.
    const BUFFERS: usize = 4096;
    /// Bytes from buffer to buffer.
    const STRIDE: usize = 2048;

    fn new() -> Self {
        Self { bytes: vec![0; Self::BUFFERS * Self::STRIDE], first: 0, len: 0 }
    }

    /// Copies a batch of frames into the next buffers.
    fn receive(&mut self, frames: &[[u8; FRAME]]) {
        self.first = if self.first + self.len + BATCH <= Self::BUFFERS { self.first + self.len } else { 0 };
        self.len = frames.len();
        for (index, frame) in frames.iter().enumerate() {
            self.bytes(index).copy_from_slice(frame);
        }
    }
}

impl Frames for RxBuffers {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn bytes(&mut self, index: usize) -> &mut [u8] {
        let at = (self.first + index) * Self::STRIDE;
        &mut self.bytes[at..at + FRAME]
    }
}

/// Result for the pipeline alone.
struct PipelineTimes {
    /// Nanoseconds a packet: the median of the rounds.
    nanoseconds: f64,
    /// Nanoseconds for copying a frame in, which are not included.
    copying: f64,
    /// Average packets in a batch.
    batch: f64,
}

/// CPU time of this thread.
fn cpu_time() -> Fallible<Duration> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(Duration::new(time.tv_sec() as u64, time.tv_nsec() as u32))
}

/// CPU time of this process' ended children.
fn cpu_time_of_children() -> Fallible<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = |time: TimeVal| (time.tv_sec() * 1_000_000 + time.tv_usec()) as u64;
    Ok(Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time())))
}

/// Current core clock in GHz: dependent multiplications take three cycles each on every x86-64 and most aarch64 cores
/// of the last ten years.
fn clock() -> Fallible<f64> {
    const TIMES: u32 = 30_000_000;
    let (started, mut number) = (cpu_time()?, black_box(3u64));
    for _ in 0..TIMES {
        number = number.wrapping_mul(number);
    }
    black_box(number);
    Ok(3.0 * f64::from(TIMES) / (cpu_time()? - started).as_nanos() as f64)
}

/// Parse, connection, verdict and rewrite of established connections in a table with room for `entries`.
fn pipeline(manifests: &Path, entries: usize) -> Fallible<PipelineTimes> {
    let read = read_manifests(&[manifests], &manifest::Options::default())?;
    let objects = read.documents.into_iter().map(|document| document.object);
    let cluster = ReplayCluster::new(objects, None, RuleScope::BothSides)?;
    let snapshot = cluster.snapshot();
    let config = Config { entries, quota: Some(1 << 20), ..Config::default() };
    let mut pipeline = Pipeline::new(Arc::new(ConnTable::new(&config)?), PipelineMode::Full);
    let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
    let now = Timestamp::from_millis(5_000_000);
    let mut ring = RxBuffers::new();
    let mut process = |ingress, ring: &mut RxBuffers| {
        pipeline.process_batch(snapshot, now, ingress, ring, &mut verdicts, &mut ());
        assert!(verdicts[..ring.len].iter().all(|verdict| matches!(verdict, Verdict::Forward(_))));
    };
    let mut ports: BTreeMap<PortId, Vec<[u8; FRAME]>> = BTreeMap::new();
    for number in 0..FLOWS {
        let mut connection = connection(number);
        connection.ends[0].1 = 20_000 + (number / POLICIES) as u16;
        for (place, from) in [0, 1, 0, 0].into_iter().enumerate() {
            let mut frame = connection.segment(from);
            // A repeated acknowledgement carries no data.
            connection.step = connection.step.min(2);
            frame.resize(FRAME, 0);
            let frame = *frame.first_chunk::<FRAME>().ok_or("a segment without data is short")?;
            let address = Address::from_v4_bytes(connection.ends[from].0.octets());
            let ingress = snapshot.forwarding.pod_port(address).ok_or("a pod has no port")?;
            if place < 3 {
                ring.receive(&[frame]);
                process(ingress, &mut ring);
            } else {
                ports.entry(ingress).or_default().push(frame);
            }
        }
    }
    let batches: Vec<_> =
        ports.iter().flat_map(|(port, frames)| frames.chunks(BATCH).map(|batch| (*port, batch))).collect();
    let (mut both, mut copying) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let started = cpu_time()?;
        for (_, frames) in &batches {
            ring.receive(frames);
            black_box(&mut ring);
        }
        let copied = cpu_time()?;
        for (port, frames) in &batches {
            ring.receive(frames);
            process(*port, &mut ring);
        }
        copying.push((copied - started).as_nanos() as f64 / FLOWS as f64);
        both.push((cpu_time()? - copied).as_nanos() as f64 / FLOWS as f64);
    }
    let copying = median(copying);
    Ok(PipelineTimes { nanoseconds: median(both) - copying, copying, batch: FLOWS as f64 / batches.len() as f64 })
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

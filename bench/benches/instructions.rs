//! Instructions per packet of the packet path's parts, counted by callgrind; independent of the machine's load.
//!
//! `make bench-check` compares with `bench/baselines/instructions.txt` and fails if a part takes more than 3 % more.
//! `PENSTOCK_BLESS=1 make bench-check` writes a new baseline. A count is the difference of two runs with different
//! numbers of repetitions, so that setup is not counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use penstock_bench::in_memory::{Batch, frame, snapshot};
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::{Sum, parse};
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// Accepted increase over the baseline.
const MARGIN: f64 = 0.03;
/// Repetitions in the two runs.
const RUNS: (u64, u64) = (200, 1200);
/// The parts, and the number of packets in one repetition of each.
const PARTS: [(&str, u64); 6] = [
    ("parse", 1),
    ("checksum of 1,480 bytes", 1),
    ("policy lookup", 1),
    ("connection, find and update", 1),
    ("pipeline, established", BATCH as u64),
    ("pipeline, forward only", BATCH as u64),
];
/// Number of flows in the connection table.
const FLOWS: usize = 1024;
/// The same where they are many: a hundred thousand, in whole batches.
const MANY: usize = 100_032;
const NOW: Timestamp = Timestamp::from_millis(5_000_000);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().position(|argument| argument == "--part") {
        Some(at) => work(&arguments[at + 1], arguments[at + 2].parse().unwrap_or(0)).map(|()| true),
        None => check(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Counts all parts and compares them with the baseline.
fn check() -> Fallible<bool> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("baselines/instructions.txt");
    let mut counted = BTreeMap::new();
    for (part, packets) in PARTS {
        let (few, many) = (count(part, RUNS.0)?, count(part, RUNS.1)?);
        counted.insert(part, many.saturating_sub(few) as f64 / ((RUNS.1 - RUNS.0) * packets) as f64);
    }
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        path.parent().map(std::fs::create_dir_all).transpose()?;
        std::fs::write(&path, baseline(&counted))?;
        println!("written: {}", path.display());
        return Ok(true);
    }
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("{}: {error}; PENSTOCK_BLESS=1 writes it", path.display()))?;
    let known: BTreeMap<&str, f64> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(part, count)| Some((part.trim(), count.parse().ok()?)))
        .collect();
    let mut holds = true;
    println!("{:32} {:>10} {:>10} {:>8}", "instructions a packet", "baseline", "now", "change");
    for (part, _) in PARTS {
        let now = counted[part];
        let Some(&before) = known.get(part) else {
            println!("{part:32} {:>10} {now:>10.1}   not in the baseline", "-");
            holds = false;
            continue;
        };
        let change = now / before - 1.0;
        let verdict = if change > MARGIN { "more than 3 % above" } else { "" };
        holds &= change <= MARGIN;
        println!("{part:32} {before:>10.1} {now:>10.1} {:>+7.1}% {verdict}", change * 100.0);
    }
    if !holds {
        println!("With another compiler than the baseline's counts differ: its first line names it.");
    }
    Ok(holds)
}

fn baseline(counted: &BTreeMap<&str, f64>) -> String {
    let compiler = Command::new("rustc").arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    let mut text = format!("# Instructions a packet, {}", String::from_utf8_lossy(&compiler));
    for (part, _) in PARTS {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{part} {:.1}", counted[part]);
    }
    text
}

/// Instructions of a process that repeats a part so many times.
fn count(part: &str, times: u64) -> Fallible<u64> {
    let program: PathBuf = std::env::current_exe()?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["--part", part, &times.to_string()])
        .output()
        .map_err(|error| format!("cannot run valgrind ({error}); install it with: apt-get install valgrind"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{part} failed under valgrind: {text}").into());
    }
    let collected = text.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, count)| count.trim());
    Ok(collected.ok_or("callgrind says no count")?.parse()?)
}

/// Repeats a part so many times: the code that callgrind runs.
fn work(part: &str, times: u64) -> Fallible<()> {
    let bytes = frame(0);
    match part {
        "parse" => repeat(times, || parse(black_box(&bytes))),
        "checksum of 1,480 bytes" => {
            let payload = [0x5a; 1480];
            repeat(times, || Sum::default().add_bytes(black_box(&payload)).folded());
        }
        "policy lookup" => {
            let set = snapshot().policy;
            let flow = parse(&bytes).map_err(|cause| format!("{cause:?}"))?.flow;
            repeat(times, || set.evaluate(black_box(&flow)));
        }
        "connection, find and update" => connections(times)?,
        "pipeline, established" => pipeline(PipelineMode::Full, FLOWS, times)?,
        "pipeline, forward only" => pipeline(PipelineMode::ForwardOnly, FLOWS, times)?,
        // For scripts/packet-cost, which counts what each stage takes.
        "pipeline, 1 connection" => pipeline(PipelineMode::Full, 1, times)?,
        "pipeline, 100,000 connections" => pipeline(PipelineMode::Full, MANY, times)?,
        _ => return Err(format!("there is no part {part}").into()),
    }
    Ok(())
}

fn repeat<T>(times: u64, work: impl Fn() -> T) {
    for _ in 0..times {
        black_box(work());
    }
}

/// A table of 16 times as many entries as there are connections, and of 16,384 at least.
fn table(connections: usize) -> Fallible<Arc<ConnTable>> {
    let entries = (connections * 16).max(1 << 14);
    Ok(Arc::new(ConnTable::new(&Config { entries, quota: Some(entries as u32), ..Config::default() })?))
}

fn connections(times: u64) -> Fallible<()> {
    let table = table(FLOWS)?;
    fill(&mut Pipeline::new(table.clone(), PipelineMode::Full), &mut Batch::of(FLOWS))?;
    let packets: Vec<_> = (0..FLOWS)
        .map(|number| parse(&frame(number)).map_err(|cause| format!("{cause:?}")))
        .collect::<Result<_, _>>()?;
    for packet in packets.iter().cycle().take(times as usize) {
        let hashed = table.prepare(&packet.flow);
        let mut connection = table.find(&hashed, NOW).ok_or("a connection that was opened is not found")?;
        black_box(connection.update(hashed.orientation(), &packet.transport, NOW));
    }
    Ok(())
}

/// Opens all connections of a batch's frames.
fn fill(pipeline: &mut Pipeline, batch: &mut Batch) -> Fallible<()> {
    let (snapshot, mut verdicts) = (snapshot(), [Verdict::Drop(DropReason::NotReady); BATCH]);
    for _ in 0..batch.count() / BATCH {
        pipeline.process_batch(&snapshot, NOW, PortId(0), batch, &mut verdicts, &mut ());
        if verdicts != [Verdict::Forward(PortId(1)); BATCH] {
            return Err(format!("not every packet passes: {:?}", verdicts[0]).into());
        }
        batch.turn();
    }
    Ok(())
}

fn pipeline(mode: PipelineMode, flows: usize, times: u64) -> Fallible<()> {
    let (mut pipeline, mut batch) = (Pipeline::new(table(flows)?, mode), Batch::of(flows));
    fill(&mut pipeline, &mut batch)?;
    let (snapshot, mut verdicts) = (snapshot(), [Verdict::Drop(DropReason::NotReady); BATCH]);
    for _ in 0..times {
        pipeline.process_batch(&snapshot, NOW, PortId(0), &mut batch, &mut verdicts, &mut ());
        batch.turn();
    }
    Ok(())
}

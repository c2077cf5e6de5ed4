//! Where the time of a new connection goes: of one that meets workers and of one that programs open, beside the kernel's, part by part.
//!
//! Both ends run on one core, in one thread, so that nobody is woken but workers. In a machine whose clock counts instructions
//! (`scripts/visit-instructions`) the nanoseconds are instructions.

mod connections;
mod programs;
mod trace;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use penstock_bench::peers::{ClusterSize, Cores, MissingTool, Peer, PeerTestbed};

use connections::Connections;
use programs::{ProgramRuns, Statistics};
use trace::{Part, Trace};

/// Where the time of a new connection goes.
#[derive(Parser, Debug)]
struct Arguments {
    /// Connections of a round, one after the other
    #[arg(long, default_value_t = 500)]
    connections: u32,
    /// Rounds; the figures are their medians
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Two pods, and a policy in either direction.
const SIZE: ClusterSize =
    ClusterSize { pods: 2, policies: 2, services: 0, to_service: false, other_node: false, open: 0 };

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("visits: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What connections of one case take, by round.
#[derive(Default)]
struct Case {
    name: &'static str,
    whole: Vec<f64>,
    programs: Vec<f64>,
    runs: Vec<f64>,
    worker: Vec<f64>,
    parts: Vec<Vec<Part>>,
}

fn run(arguments: &Arguments) -> Result<()> {
    let cores = Cores::first_two()?;
    let peers: [(&'static str, Peer); 6] = [
        ("a program that looks nothing up", Peer::Redirect),
        ("kernel routing", Peer::Kernel),
        ("nftables", Peer::Nftables),
        ("repeated, by programs", Peer::penstock_by_tcx(true)),
        ("one visit", Peer::penstock_by_tcx_without_repeats()),
        ("all by workers", Peer::penstock_by_tcx(false)),
    ];
    let mut cases = Vec::new();
    for (name, peer) in peers {
        match PeerTestbed::build(&format!("visits{}", cases.len()), peer, SIZE, 1500, cores) {
            Ok(testbed) => cases.push((testbed, Case { name, ..Case::default() })),
            Err(error) if error.is::<MissingTool>() => println!("{name} is left out: {error:#}"),
            Err(error) => return Err(error.context(name)),
        }
    }
    for _ in 0..arguments.rounds {
        for (testbed, case) in &mut cases {
            testbed
                .with_peer(|testbed| measure(testbed, case, (cores.generator, arguments.connections)))
                .context(case.name)?;
        }
    }
    print_whole(&cases);
    cases.iter().for_each(|(_, case)| print_parts(case));
    Ok(())
}

/// One round: without looking, with the kernel's statistics of programs, and traced.
fn measure(testbed: &PeerTestbed, case: &mut Case, (core, number): (usize, u32)) -> Result<()> {
    let connections = Connections::between(testbed, core)?;
    connections.open(number / 5)?;
    let whole = connections.open(number)?;
    case.whole.push(whole);
    if let Some(daemon) = testbed.daemon() {
        let _statistics = Statistics::on()?;
        let before = ProgramRuns::of(daemon.id())?;
        connections.open(number)?;
        let (nanoseconds, runs) = ProgramRuns::of(daemon.id())?.since(&before);
        case.programs.push(nanoseconds / f64::from(number));
        case.runs.push(runs / f64::from(number));
    }
    let trace = Trace::start(testbed.daemon().map(|daemon| daemon.id()))?;
    let traced = connections.open(number)?;
    let read = trace.read(number, traced - whole)?;
    case.worker.push(read.worker);
    case.parts.push(read.parts);
    Ok(())
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print_whole(cases: &[(PeerTestbed, Case)]) {
    println!("| a connection, ns | whole | worker | programs | their runs |\n|---|---:|---:|---:|---:|");
    for (testbed, case) in cases {
        let own = |values: &[f64], digits: usize| match testbed.daemon() {
            Some(_) => format!("{:.digits$}", median(values.iter().copied())),
            None => "–".to_owned(),
        };
        let [worker, programs, runs] = [own(&case.worker, 0), own(&case.programs, 0), own(&case.runs, 1)];
        println!("| {} | {:.0} | {worker} | {programs} | {runs} |", case.name, median(case.whole.iter().copied()));
    }
}

fn print_parts(case: &Case) {
    println!("\n| {}: up to the answer of a SYN | ns |\n|---|---:|", case.name);
    let Some(first) = case.parts.first() else { return };
    for part in first {
        let of = |round: &Vec<Part>| round.iter().find(|other| other.name == part.name).map(|other| other.nanoseconds);
        println!("| {} | {:.0} |", part.name, median(case.parts.iter().filter_map(of)));
    }
}

//! `make bench-peers`: Penstock beside other engines of Kubernetes network policy, each as its project installs it.
//!
//! One API server has the objects. Each engine takes turns on a `cell` of its own: two nodes and their pods in network namespaces.
//! `engine` says how each is started, `traffic` and `changes` what is measured, `output` writes the report.

mod cell;
mod changes;
mod cluster;
mod engine;
mod output;
mod results;
mod running;
mod traffic;
mod turn;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use penstock_bench::machine::Machine;

use cluster::Cluster;
use engine::{ENGINES, Engine, PeersFolder};
use output::Report;
use results::Results;
use turn::{Turn, take};

const EXAMPLES: &str = "Examples:
  peers --list                                  which engines can run here, and why others cannot
  peers --quick                                 one short round with 10 policies: does all of it work?
  peers --engine penstock --engine kube-router  these two, beside no enforcement
  peers --policies 10,1000 --rounds 5           medians of five rounds at either number of policies

PENSTOCK_PEERS names a folder with the other projects' programs in bin, and what they need beside them in crds and lib;
KUBEBUILDER_ASSETS one with etcd and kube-apiserver (scripts/kubernetes etcd kube-apiserver prints it).";

/// Measure Penstock beside other engines of network policy, and write a report.
#[derive(Parser, Debug)]
#[command(after_help = EXAMPLES)]
struct Arguments {
    /// Only this engine, beside no enforcement; may be given several times
    #[arg(long, value_name = "NAME")]
    engine: Vec<String>,
    /// Numbers of policies that select the pods
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [10, 1000, 10_000])]
    policies: Vec<usize>,
    /// How often each engine is measured, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of the counted part of a measurement
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Seconds that an engine may take until it enforces what the policies say
    #[arg(long, default_value_t = 60.0)]
    patience: f64,
    /// No round begins after this many minutes, but the first one of each number of policies
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// A first look: 10 policies, one round, 0.1 s
    #[arg(long)]
    quick: bool,
    /// List the engines, and why some cannot run here, and exit
    #[arg(long)]
    list: bool,
    /// Folder of the report
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    output: PathBuf,
    /// A page whose figures are replaced by those of this run, such as docs/compare.md
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
}

struct Plan {
    policies: Vec<usize>,
    rounds: u32,
    length: Duration,
    patience: Duration,
    limit: Duration,
}

impl Plan {
    fn of(arguments: &Arguments) -> Result<Self> {
        let (policies, rounds, seconds) = match arguments.quick {
            true => (vec![10], 1, 0.1),
            false => (arguments.policies.clone(), arguments.rounds, arguments.seconds),
        };
        ensure!(rounds > 0, "--rounds 0 measures nothing; give 1 or more");
        ensure!((0.05..=60.0).contains(&seconds), "--seconds must be between 0.05 and 60");
        ensure!((1.0..=3600.0).contains(&arguments.patience), "--patience must be between 1 and 3600");
        ensure!((0.0..=10_000.0).contains(&arguments.minutes), "--minutes must be between 0 and 10000");
        ensure!(
            policies.iter().all(|it| (1..=50_000).contains(it)),
            "--policies: each number must be between 1 and 50000"
        );
        Ok(Self {
            policies,
            rounds,
            length: Duration::from_secs_f64(seconds),
            patience: Duration::from_secs_f64(arguments.patience),
            limit: Duration::from_secs_f64(arguments.minutes * 60.0),
        })
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let peers = PeersFolder::of_environment();
    if arguments.list {
        for engine in &ENGINES {
            let state = engine.missing(&peers).map_or_else(|| "can run".to_owned(), |why| format!("cannot run: {why}"));
            println!("{:22} {}\n{:22} {state}", engine.name, engine.about, "");
        }
        return Ok(());
    }
    let (plan, chosen) = (Plan::of(arguments)?, choose(&arguments.engine)?);
    let (machine, begun) = (Machine::look()?, Instant::now());
    let mut results = Results::default();
    let mut able = Vec::new();
    for engine in chosen {
        match engine.missing(&peers) {
            None => able.push(engine),
            Some(why) => {
                println!("{} is left out: {why}", engine.name);
                results.failures.push((engine.name, None, why));
            }
        }
    }
    let mut cluster = Cluster::start().context("cannot start the API server")?;
    able.retain(|engine| match prepare(engine, &cluster, &peers) {
        Ok(()) => true,
        Err(error) => {
            println!("{} is left out: {error:#}", engine.name);
            results.failures.push((engine.name, None, format!("{error:#}")));
            false
        }
    });
    measure(&plan, &able, &peers, &mut cluster, &mut results)?;
    let report = Report {
        machine,
        server: cluster.version(),
        rounds: plan.rounds,
        length: plan.length,
        took: begun.elapsed(),
        engines: able.iter().map(|engine| (engine.name, engine.version(&peers))).collect(),
        results,
    };
    let files = output::write(&arguments.output, &report)?;
    print!("\n{}\n", output::markdown(&report));
    files.iter().for_each(|file| println!("written: {}", file.display()));
    arguments.page.as_ref().map_or(Ok(()), |page| output::update(page, &report))
}

/// The engines of these names, the zero line first; all of them without names.
fn choose(names: &[String]) -> Result<Vec<&'static Engine>> {
    for name in names {
        let known = ENGINES.each_ref().map(|engine| engine.name).join(", ");
        ensure!(ENGINES.iter().any(|engine| engine.name == name), "--engine {name}: no such engine; there are {known}");
    }
    let is_chosen =
        |engine: &&Engine| names.is_empty() || !engine.enforces() || names.iter().any(|it| it == engine.name);
    Ok(ENGINES.iter().filter(is_chosen).collect())
}

/// Creates the definitions that an engine reads.
fn prepare(engine: &Engine, cluster: &Cluster, peers: &PeersFolder) -> Result<()> {
    ensure!(
        !engine.is_peer() || cluster.is_real(),
        "it needs a real API server: set KUBEBUILDER_ASSETS to what scripts/kubernetes etcd kube-apiserver prints"
    );
    engine.definitions(peers)?.map_or(Ok(()), |folder| cluster.define(&folder))?;
    engine.object.map_or(Ok(()), |(path, object)| cluster.create_once(path, object))
}

/// Rounds in which each engine has its turn; another one begins each.
fn measure(
    plan: &Plan,
    engines: &[&'static Engine],
    peers: &PeersFolder,
    cluster: &mut Cluster,
    results: &mut Results,
) -> Result<()> {
    let begun = Instant::now();
    for &policies in &plan.policies {
        cluster.set_policies(policies)?;
        ensure!(cluster.count_policies()? == policies, "the API server has not the {policies} policies that it took");
        let mut failed = Vec::new();
        for round in 0..plan.rounds {
            if round > 0 && begun.elapsed() > plan.limit {
                println!("{policies} policies: no time for round {}", round + 1);
                break;
            }
            let mut order = engines.to_vec();
            order.rotate_left(round as usize % engines.len().max(1));
            for engine in order {
                if failed.contains(&engine.name) {
                    continue;
                }
                let started = Instant::now();
                let turn = Turn { engine, policies, round, length: plan.length, patience: plan.patience };
                let outcome = take(&turn, cluster, peers, results);
                let state = outcome.as_ref().err().map_or_else(|| "done".to_owned(), |error| format!("{error:#}"));
                println!(
                    "{policies} policies, round {}, {}: {state} ({:.0} s)",
                    round + 1,
                    engine.name,
                    started.elapsed().as_secs_f64()
                );
                if outcome.is_err() {
                    failed.push(engine.name);
                    results.failures.push((engine.name, Some(policies), state));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_measures_nothing_is_refused() {
        for (arguments, expected) in [
            (["--rounds", "0"], "--rounds 0"),
            (["--seconds", "0"], "--seconds must be between"),
            (["--policies", "0"], "--policies: each number"),
            (["--patience", "0"], "--patience must be between"),
        ] {
            let parsed = Arguments::try_parse_from(std::iter::once("peers").chain(arguments)).unwrap();
            let error = Plan::of(&parsed).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{arguments:?}: {error}");
        }
        let error = choose(&["cilium".to_owned()]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("cilium") && error.contains("kube-router"), "{error}");
    }

    #[test]
    fn chosen_engines_stand_beside_the_zero_line() {
        let names = |chosen: &[&str]| {
            let chosen: Vec<String> = chosen.iter().map(|&name| name.to_owned()).collect();
            choose(&chosen).unwrap().iter().map(|engine| engine.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["kube-router"]), ["none", "kube-router"]);
        assert_eq!(names(&[]).len(), ENGINES.len());
    }
}

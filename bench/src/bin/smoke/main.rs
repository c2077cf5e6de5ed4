//! 64-byte UDP packets per second of Penstock, of Penstock without policy, of the kernel, and of the kernel with
//! nftables: one run, one topology, one generator.

mod report;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use penstock_bench::load::{Traffic, Trial};
use penstock_bench::peers::{ClusterSize, Cores, MissingTool, Peer, PeerTestbed};

use report::{Rates, Report, SmokeCase};

/// Packets per second of 64-byte UDP frames between two pods, in four configurations.
#[derive(Parser, Debug)]
struct Arguments {
    /// Seconds that one measurement takes.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How often each configuration is measured, interleaved with the others.
    #[arg(long, default_value_t = 5)]
    repetitions: u32,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("smoke: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.repetitions > 0, "--repetitions 0 measures nothing; give 1 or more");
    ensure!(arguments.seconds > 0.0 && arguments.seconds <= 60.0, "--seconds must be above 0 and at most 60");
    let cores = Cores::first_two()?;
    report::introduce(cores);
    let build = |label: &str, peer: Peer| PeerTestbed::build(label, peer, SIZE, 1500, cores);
    let mut testbeds = vec![
        (build("full", Peer::penstock())?, vec![SmokeCase::Penstock]),
        (build("forward", Peer::forward())?, vec![SmokeCase::Forward]),
        (
            build("kernel", Peer::Kernel)?,
            vec![SmokeCase::Kernel { steered: false }, SmokeCase::Kernel { steered: true }],
        ),
    ];
    match build("nftables", Peer::Nftables) {
        Ok(testbed) => {
            testbeds
                .push((testbed, vec![SmokeCase::Nftables { steered: false }, SmokeCase::Nftables { steered: true }]));
        }
        Err(error) if error.is::<MissingTool>() => println!("(d) is left out: {error:#}\n"),
        Err(error) => return Err(error),
    }
    let trial = Trial::flat_out(Traffic::SMALLEST, Duration::from_secs_f64(arguments.seconds));
    let mut report = Report::default();
    for repetition in 1..=arguments.repetitions {
        for (testbed, cases) in &mut testbeds {
            for &case in &*cases {
                let rates = measure(testbed, &trial, case)
                    .with_context(|| format!("{} in repetition {repetition}", case.name()))?;
                report.add(case, rates);
            }
        }
        report.progress(repetition, arguments.repetitions);
    }
    report.print();
    Ok(())
}

/// Two pods, and a policy in either direction of the measured connection.
const SIZE: ClusterSize =
    ClusterSize { pods: 2, policies: 2, services: 0, to_service: false, other_node: false, open: 0 };

fn measure(testbed: &mut PeerTestbed, trial: &Trial, case: SmokeCase) -> Result<Rates> {
    testbed.steer(case.steered())?;
    let outcome = testbed.run(trial)?;
    ensure!(outcome.corrupted == 0, "{} packets arrived with a wrong checksum", outcome.corrupted);
    Ok(Rates { offered: outcome.offered_rate(), received: outcome.rate() })
}

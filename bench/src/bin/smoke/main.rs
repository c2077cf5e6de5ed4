//! 64-byte UDP packets per second of Penstock, of Penstock without policy, of the kernel, and of the kernel with
//! nftables: one run, one topology, one generator.

mod lane;
mod report;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;

use lane::{Cores, Lane};
use report::{Case, Report};

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
    let cores = cores()?;
    report::introduce(cores);
    let mut lanes = vec![
        (Lane::penstock("full", cores)?, vec![Case::Penstock]),
        (Lane::penstock("forward", cores)?, vec![Case::Forward]),
        (Lane::kernel()?, vec![Case::Kernel { steered: false }, Case::Kernel { steered: true }]),
    ];
    if let Some(nft) = lane::nft_command() {
        lanes.push((Lane::nftables(&nft)?, vec![Case::Nftables { steered: false }, Case::Nftables { steered: true }]));
    } else {
        println!("no nft command: (d) is left out; install it with: apt-get install nftables\n");
    }
    let mut report = Report::default();
    for repetition in 1..=arguments.repetitions {
        for (lane, cases) in &lanes {
            for &case in cases {
                let length = Duration::from_secs_f64(arguments.seconds);
                let rates = lane
                    .measure(length, cores, case.steered())
                    .with_context(|| format!("{} in repetition {repetition}", case.name()))?;
                report.add(case, rates);
            }
        }
        report.progress(repetition, arguments.repetitions);
    }
    for (lane, cases) in &lanes {
        let wrong = lane.wrong_checksums()?;
        ensure!(wrong == 0, "{wrong} packets arrived with a wrong checksum ({})", cases[0].name());
    }
    report.print();
    Ok(())
}

/// The first two cores that this process may use.
fn cores() -> Result<Cores> {
    let cores = core_affinity::get_core_ids().context("the system does not tell which cores there are")?;
    let [generator, worker, ..] = cores.as_slice() else {
        anyhow::bail!("generator and worker need a core each, and there is one core; run it where there are two");
    };
    Ok(Cores { generator: generator.id, worker: worker.id })
}

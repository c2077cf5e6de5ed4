//! Mixed traffic, pod and policy churn, and daemon restarts. Watches what must not grow, accounts for every packet, and
//! prints a result at the end.

mod churn;
mod fixture;
mod log;
mod plot;
mod result;
mod sample;
mod streams;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use churn::Churn;
use fixture::Fixture;
use result::SoakResult;
use sample::Sampler;

/// Mixed traffic, churn and restarts for a given time; writes a plot and prints a result.
#[derive(Parser, Debug)]
struct Arguments {
    /// Duration in minutes.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Number of daemon restarts, alternately by a kill and by an update, spread evenly.
    #[arg(long, default_value_t = 5)]
    restarts: u32,
    /// File of the plot.
    #[arg(long, default_value = "target/soak.svg")]
    plot: PathBuf,
}

/// Interval at which due steps are run.
const TICK: Duration = Duration::from_millis(25);
/// Interval of progress lines without a terminal.
const LINE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    ensure!(arguments.minutes >= 0.5, "--minutes {}: less than half a minute shows no trend", arguments.minutes);
    let length = Duration::from_secs_f64(arguments.minutes * 60.0);
    let restart_every = length / (arguments.restarts + 1);
    let mut fixture = Fixture::start(arguments.restarts == 0)?;
    println!(
        "Soak: {} minutes, {} restarts of {}; the plot goes to {}",
        arguments.minutes,
        arguments.restarts,
        penstock_bench::testbed::penstock_binary()?.display(),
        arguments.plot.display()
    );
    let streams = streams::start(&fixture)?;
    let mut churn = Churn::new();
    let mut sampler = Sampler::new(&fixture)?;
    let mut progress = Progress::new(length);
    let mut restarts = 0;
    while fixture.epoch.elapsed() < length {
        if restarts < arguments.restarts && fixture.epoch.elapsed() > restart_every * (restarts + 1) {
            restarts += 1;
            sampler.take(&fixture, &streams)?;
            fixture.restart(restarts % 2 == 1, restarts == arguments.restarts)?;
            sampler.begin_life(&fixture)?;
        }
        churn.step(&mut fixture)?;
        if sampler.is_due() {
            sampler.take(&fixture, &streams)?;
            progress.show(&sampler);
        }
        std::thread::sleep(TICK);
    }
    progress.end();
    let outcome = streams.stop()?;
    churn.end(&mut fixture)?;
    sampler.take_at_rest(&fixture)?;
    let (outages, ended, warnings) = fixture.stop()?;
    let result = SoakResult::reach(&sampler, &outcome, &churn, &outages, ended, warnings);
    plot::draw(&arguments.plot, &sampler, &outages).context("the plot cannot be drawn")?;
    result.print(&arguments.plot);
    Ok(result.is_good())
}

/// A progress bar on a terminal, otherwise a line now and then.
struct Progress {
    bar: Option<ProgressBar>,
    start: Instant,
    length: Duration,
    printed: Duration,
}

impl Progress {
    fn new(length: Duration) -> Self {
        let style = ProgressStyle::with_template("  {bar:30} {elapsed_precise}  {msg}");
        let bar = std::io::stdout().is_terminal().then(|| ProgressBar::new(length.as_secs()));
        if let (Some(bar), Ok(style)) = (&bar, style) {
            bar.set_style(style);
        }
        Self { bar, start: Instant::now(), length, printed: Duration::ZERO }
    }

    fn show(&mut self, sampler: &Sampler) {
        let (now, text) = (self.start.elapsed(), sampler.describe());
        match &self.bar {
            Some(bar) => {
                bar.set_position(now.as_secs().min(self.length.as_secs()));
                bar.set_message(text);
            }
            None if now - self.printed >= LINE => {
                println!("  {:5.0} s of {:.0} s  {text}", now.as_secs_f64(), self.length.as_secs_f64());
                self.printed = now;
            }
            None => {}
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

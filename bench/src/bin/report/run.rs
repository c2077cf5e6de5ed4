//! Runs scenarios: every case of every scenario in turn, and then all of it again.

use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

use crate::Plan;
use crate::bars;
use crate::host::{Host, Kept};
use crate::lanes::Lanes;
use crate::machine::{BUSY, Machine, Prepared};
use crate::results::{CaseResult, Results, Samples, ScenarioResult};
use crate::scenarios::{Known, Scenario};

/// How long waiting for the host and measuring again may take together, in all repetitions.
const AGAIN: Duration = Duration::from_secs(100);
/// How often a case is measured in one repetition at most.
const ATTEMPTS: u32 = 4;
/// How long a case waits for whole cores at most, each time.
const WAIT: Duration = Duration::from_millis(500);

/// Measures everything, as often as the plan says.
pub(crate) fn run(plan: &Plan, mut scenarios: Vec<Scenario>) -> Result<Results> {
    let (mut machine, started) = (Machine::look()?, Instant::now());
    if machine.load > BUSY {
        println!("This machine is busy (load average {:.1}): figures are not to be relied on.", machine.load);
    }
    let _prepared = Prepared::new()?;
    machine.look_for_gaps(plan.cores)?;
    let (mut lanes, mut host) = (Lanes::new(plan.cores), Host::new(plan.cores)?);
    let mut results: Vec<ScenarioResult> = scenarios.iter().map(Scenario::empty_result).collect();
    let (mut known, mut again) = (Known::default(), Duration::ZERO);
    let steps: usize = scenarios.iter().map(|scenario| scenario.cases.len()).sum();
    let bar = progress(steps as u64 * u64::from(plan.repetitions));
    for repetition in 1..=plan.repetitions {
        again += AGAIN / plan.repetitions;
        for (scenario, result) in scenarios.iter_mut().zip(&mut results) {
            for (case, into) in scenario.cases.iter_mut().zip(&mut result.cases) {
                bar.set_message(format!("{repetition}/{}  {}: {}", plan.repetitions, scenario.name, case.name));
                // What fails twice is not tried again.
                if into.failed < 2 {
                    let lane = lanes.get(&case.spec).map_err(|reason| anyhow::anyhow!(reason));
                    let waits = bars::go_by(scenario.name, &case.name);
                    let measured = lane.and_then(|lane| {
                        least_disturbed(plan, &mut host, &mut again, waits, || (case.measure)(lane, plan, &mut known))
                    });
                    take(into, measured);
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    let peers = std::mem::take(&mut lanes.descriptions);
    drop(lanes);
    Ok(Results { machine, plan: *plan, took: started.elapsed(), scenarios: results, peers })
}

/// What was measured, and what the host kept from this machine meanwhile.
type Measured = (Vec<Option<f64>>, Kept);

/// Measures, and again if the host took the cores away meanwhile: what it kept least from counts. What decides whether a bar
/// is reached `waits` for whole cores first, and is measured again if they were not.
///
/// A wait of some milliseconds that is the host's shows in every percentile, and it hits those who use both cores first.
fn least_disturbed(
    plan: &Plan,
    host: &mut Host,
    again: &mut Duration,
    waits: bool,
    mut measure: impl FnMut() -> Result<Vec<Option<f64>>>,
) -> Result<Measured> {
    let mut best: Option<Measured> = None;
    for attempt in 1.. {
        if waits {
            *again = again.saturating_sub(host.wait_until_whole(WAIT.min(*again))?);
        }
        let began = Instant::now();
        let (values, kept) = host.watch(&mut measure)?;
        let took = began.elapsed();
        // A search sees to it at each of its trials.
        let is_long = took > 6 * plan.length.max(Duration::from_millis(200));
        let was_alone = if waits { kept.degree() == 0.0 } else { kept.stolen == 0.0 };
        if best.as_ref().is_none_or(|(_, least)| kept.degree() < least.degree()) {
            best = Some((values, kept));
        }
        if was_alone || attempt == ATTEMPTS || *again < took || is_long {
            break;
        }
        *again -= took;
    }
    Ok(best.expect("it was measured once"))
}

/// Takes what a case measured into its result.
fn take(into: &mut CaseResult, measured: Result<Measured>) {
    match measured {
        Ok((values, kept)) => {
            into.stolen.add(kept.stolen);
            into.speed.add(kept.speed);
            into.samples.resize(values.len(), Samples::default());
            for (samples, value) in into.samples.iter_mut().zip(values) {
                value.into_iter().for_each(|value| samples.add(value));
            }
        }
        Err(error) => {
            into.failure = Some(format!("{error:#}").replace('\n', "; "));
            into.failed += 1;
        }
    }
}

fn progress(steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {percent}% {eta} left  {msg}");
    // The template is a constant; were it wrong, the bar would look otherwise.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

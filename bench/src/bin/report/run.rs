//! Runs scenarios: every case of every scenario once, then those again that decide something, as often as there is time for.

use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use penstock_bench::machine::{BUSY, Machine};

use crate::Plan;
use crate::host::{Host, HostInterference};
use crate::machine::{MachineSettings, look_for_gaps};
use crate::output::overview;
use crate::results::{CaseResult, Results, Samples, ScenarioResult};
use crate::scenarios::{KnownRates, Scenario};
use crate::testbeds::PeerTestbeds;
use crate::thresholds;

/// Total time for waiting for the host and measuring again, over all repetitions.
const AGAIN: Duration = Duration::from_secs(100);
/// Cases that decide nothing are measured in the first repetition, and in each of so many after it.
const OTHERS_EACH: u32 = 4;
/// Maximum attempts for a case in one repetition.
const ATTEMPTS: u32 = 4;
/// How long a case waits for undisturbed cores, each time.
const WAIT: Duration = Duration::from_millis(500);

pub(crate) fn run(plan: &Plan, mut scenarios: Vec<Scenario>) -> Result<Results> {
    let (mut machine, started) = (Machine::look()?, Instant::now());
    if machine.load > BUSY {
        println!("This machine is busy (load average {:.1}): the figures are unreliable.", machine.load);
    }
    let _prepared = MachineSettings::new()?;
    look_for_gaps(&mut machine, plan.cores)?;
    let (mut testbeds, mut host) = (PeerTestbeds::new(plan.cores), Host::new(plan.cores)?);
    let mut results: Vec<ScenarioResult> = scenarios.iter().map(Scenario::empty_result).collect();
    let (mut known, mut again) = (KnownRates::default(), Duration::ZERO);
    let bar = progress(steps(&scenarios, plan.repetitions));
    // The time of the deciding cases in the last run, and of the others, without the building of their testbeds.
    let (mut repetitions, mut deciding, mut others) = (0, Duration::ZERO, Duration::ZERO);
    for repetition in 1..=plan.repetitions {
        let left = plan.limit.saturating_sub(started.elapsed());
        if repetition > 1 && left < deciding {
            break;
        }
        let all = repetition == 1 || is_turn_of_all(repetition) && left >= deciding + others;
        again += AGAIN / plan.repetitions;
        let mut took = [Duration::ZERO; 2];
        for (scenario, result) in scenarios.iter_mut().zip(&mut results) {
            let scenario_began = Instant::now();
            for (case, into) in scenario.cases.iter_mut().zip(&mut result.cases) {
                let decides = decides(scenario.name, &case.name);
                if !decides && !all {
                    continue;
                }
                let began = Instant::now();
                bar.set_message(format!("{repetition}/{}  {}: {}", plan.repetitions, scenario.name, case.name));
                // A case that failed twice is not tried again.
                if into.failed < 2 {
                    let testbed = testbeds.get(&case.spec).map_err(|reason| anyhow::anyhow!(reason));
                    let waits = thresholds::uses_case(scenario.name, &case.name);
                    let measured = testbed.and_then(|testbed| {
                        least_disturbed(plan, &mut host, &mut again, waits, || {
                            (case.measure)(testbed, plan, &mut known)
                        })
                    });
                    take(into, measured);
                }
                bar.inc(1);
                // Each testbed is built once.
                let building = std::mem::take(&mut testbeds.building);
                took[usize::from(!decides)] += began.elapsed().saturating_sub(building);
            }
            result.took += scenario_began.elapsed();
        }
        (repetitions, deciding) = (repetition, took[0]);
        if all {
            others = took[1];
        }
    }
    bar.finish_and_clear();
    let peers = std::mem::take(&mut testbeds.descriptions);
    drop(testbeds);
    Ok(Results { machine, plan: *plan, repetitions, took: started.elapsed(), scenarios: results, peers })
}

/// Whether a case is measured in every repetition: it is in the first table, or a threshold needs it.
fn decides(scenario: &str, case: &str) -> bool {
    thresholds::uses_case(scenario, case) || overview::uses_case(scenario, case)
}

/// Whether the other cases are measured in this repetition, too, if there is time.
fn is_turn_of_all(repetition: u32) -> bool {
    repetition % OTHERS_EACH == 1
}

fn steps(scenarios: &[Scenario], repetitions: u32) -> u64 {
    let cases = || scenarios.iter().flat_map(|scenario| scenario.cases.iter().map(|case| (scenario.name, &case.name)));
    let deciding = cases().filter(|(scenario, case)| decides(scenario, case)).count();
    let of = |repetition| if is_turn_of_all(repetition) { cases().count() } else { deciding };
    (1..=repetitions).map(|repetition| of(repetition) as u64).sum()
}

/// Figures, and the host's interference meanwhile.
type Measured = (Vec<Option<f64>>, HostInterference);

/// Measures, and measures again if the host took the cores away; the least disturbed attempt counts. Cases that decide
/// a threshold wait (`waits`) for undisturbed cores first, and are measured again if the cores were slow.
///
/// A host delay of some milliseconds shows in every percentile, and hits peers that use both cores first.
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
        // A search checks this in each of its trials.
        let is_long = took > 6 * plan.length.max(Duration::from_millis(200));
        let was_alone = if waits { kept.degree() == 0.0 } else { kept.stolen == 0.0 };
        if best.as_ref().is_none_or(|(_, at_least)| kept.degree() < at_least.degree()) {
            best = Some((values, kept));
        }
        if was_alone || attempt == ATTEMPTS || *again < took || is_long {
            break;
        }
        *again -= took;
    }
    Ok(best.expect("it was measured once"))
}

/// Adds a measurement to its case's result.
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
    // The template is a constant; if it were invalid, the default style is used.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

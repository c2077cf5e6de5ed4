//! Content of the report, independent of its format.

use super::number::{number, short};
use super::overview;
use crate::results::{Better, CaseResult, Metric, Results, Samples, ScenarioResult};
use crate::thresholds::{Bound, THRESHOLDS, ThresholdResult};

#[derive(Clone, Debug)]
pub(crate) enum ReportPart {
    Heading(String),
    Text(String),
    /// The first row is the header.
    Table(Vec<Vec<String>>),
    Plot(&'static str),
}

/// Name of the plot on the first page.
pub(super) const OVERVIEW: &str = "overview";

/// The whole report: first what most readers want, then the rest; `trex` are the parts with the results of TRex.
pub(crate) fn document(results: &Results, trex: Vec<ReportPart>) -> Vec<ReportPart> {
    let mut parts = vec![ReportPart::Text(introduction(results))];
    if let Some(table) = overview::table(results) {
        parts.extend([ReportPart::Plot(OVERVIEW), ReportPart::Table(table)]);
    }
    parts.push(ReportPart::Heading("Thresholds".to_owned()));
    parts.push(ReportPart::Table(thresholds(results)));
    for scenario in &results.scenarios {
        parts.push(ReportPart::Heading(scenario.title.to_owned()));
        parts.push(ReportPart::Text(format!("{} (`--only {}`)", scenario.about, scenario.name)));
        parts.push(ReportPart::Table(cases(scenario)));
        let failures = scenario.cases.iter().filter_map(|case| Some((case, case.failure.as_ref()?)));
        parts.extend(failures.map(|(case, why)| {
            let what = if case.samples.is_empty() { "Not measured" } else { "Failed in some repetitions" };
            ReportPart::Text(format!("{what}: {}: {why}.", case.name))
        }));
        parts.push(ReportPart::Plot(scenario.name));
    }
    parts.push(ReportPart::Heading("TRex".to_owned()));
    parts.extend(trex);
    parts.push(ReportPart::Heading("How it was measured".to_owned()));
    parts.push(ReportPart::Text(method(results)));
    parts.push(ReportPart::Table(times(results)));
    parts.push(ReportPart::Table(machine(results)));
    parts
}

fn introduction(results: &Results) -> String {
    let busy = match results.machine.load {
        load if load > penstock_bench::machine::BUSY => {
            format!(" **The machine was busy when it began (load average {load:.1}): the figures are unreliable.**")
        }
        _ => String::new(),
    };
    format!(
        "Penstock by tcx, its default, beside the kernel, in one run of {:.0} minutes on one machine. A ratio above 1 means that \
         Penstock is better. Below are the thresholds, then every scenario with all peers, and at the end how it was \
         measured.{busy}",
        (results.took.as_secs_f64() / 60.0).max(1.0),
    )
}

fn method(results: &Results) -> String {
    let plan = &results.plan;
    format!(
        "{} of {} repetitions of {:.2} s each, as many as the time was enough for, alternating between the cases of the first table and of the thresholds; the others were measured in the first one, and in each fourth after it. Figures are medians, followed by the lowest and the highest value; ratios are relative to the \
         first row of a table. Packets go from one pod to another of the same node, over veths between network namespaces. \
         Generator and receiver run on core {}, the forwarding process of a peer that has one on core {}. Every peer has \
         the same policies as a ruleset or access lists. Before the measurement it forwarded an allowed packet and its reply and, \
         if it enforces policy, dropped a denied packet. No NIC is involved: the figures compare peers and do not predict \
         the throughput of a NIC. The share of the cores' time that a hypervisor took away is shown for every case, and so \
         is the speed of the slower core relative to the highest speed seen: a core that shares its execution units with \
         another machine runs at about half speed. Disturbed measurements were repeated while there was time; cases with a \
         threshold also waited for undisturbed cores, half a second at most.",
        results.repetitions,
        plan.repetitions,
        plan.length.as_secs_f64(),
        plan.cores.generator,
        plan.cores.worker,
    )
}

/// Rows of the first table, with their header; `None` if nothing of it was measured.
pub(crate) fn overview(results: &Results) -> Option<Vec<Vec<String>>> {
    overview::table(results)
}

/// Rows of the thresholds, with their header.
pub(crate) fn thresholds(results: &Results) -> Vec<Vec<String>> {
    let mut rows =
        vec![["ratio", "threshold", "measured", "lowest – highest", "limit", ""].map(str::to_owned).to_vec()];
    for threshold in THRESHOLDS {
        let sign = if threshold.bound == Bound::AtLeast { "≥" } else { "≤" };
        let (measured, verdict) = match threshold.evaluate(results) {
            ThresholdResult::Measured(value, true) => (number(value, 2), "meets".to_owned()),
            ThresholdResult::Measured(value, false) => (number(value, 2), "falls short".to_owned()),
            ThresholdResult::NotMeasured(why) => ("–".to_owned(), format!("not measured: {why}")),
        };
        let spread =
            threshold.spread(results).map_or_else(String::new, |spread| spread.map(|it| number(it, 2)).join(" – "));
        let limit = threshold.limit(results).map_or_else(String::new, |limit| number(limit, 2));
        let bound = format!("{sign} {}", short(threshold.threshold));
        rows.push(vec![threshold.what.to_owned(), bound, measured, spread, limit, verdict]);
    }
    rows
}

fn times(results: &Results) -> Vec<Vec<String>> {
    let header = ["scenario", "cases", "took, s"].map(str::to_owned).to_vec();
    let row = |scenario: &ScenarioResult| {
        let took = number(scenario.took.as_secs_f64(), 0);
        vec![scenario.name.to_owned(), scenario.cases.len().to_string(), took]
    };
    std::iter::once(header).chain(results.scenarios.iter().map(row)).collect()
}

fn machine(results: &Results) -> Vec<Vec<String>> {
    let mut rows = vec![vec!["what".to_owned(), "is".to_owned()]];
    rows.extend(results.machine.facts.iter().map(|(name, value)| vec![name.clone(), value.clone()]));
    rows.extend(results.peers.iter().map(|(name, value)| vec![name.clone(), value.clone()]));
    rows
}

/// Shown beside every case's own metrics.
const STOLEN: Metric = Metric::lower("taken by the host", "%", 1);
/// Speed that the host left to the cores.
const SPEED: Metric = Metric::higher("speed of the slower core", "%", 0);

fn cases(scenario: &ScenarioResult) -> Vec<Vec<String>> {
    let mut heading = vec!["case".to_owned()];
    for (index, metric) in scenario.metrics.iter().enumerate() {
        heading.push(format!("{}, {}", metric.name, metric.unit));
        if index == 0 {
            heading.push("ratio".to_owned());
        }
    }
    heading.extend([STOLEN, SPEED].map(|metric| format!("{}, {}", metric.name, metric.unit)));
    let base = scenario.cases.first().and_then(|case| case.samples.first()).and_then(Samples::median);
    let rows = scenario.cases.iter().map(|case| row(case, scenario.metrics, base));
    std::iter::once(heading).chain(rows).collect()
}

fn row(case: &CaseResult, metrics: &[Metric], base: Option<f64>) -> Vec<String> {
    let mut cells = vec![case.name.clone()];
    for (index, metric) in metrics.iter().enumerate() {
        let samples = case.samples.get(index).filter(|samples| samples.count() > 0);
        cells.push(samples.map_or_else(|| "–".to_owned(), |samples| figure(samples, metric)));
        if index == 0 {
            let ratio = samples.and_then(Samples::median).zip(base).filter(|(_, base)| *base != 0.0);
            cells.push(ratio.map_or_else(|| "–".to_owned(), |(own, base)| number(own / base, 2)));
        }
    }
    cells.push(figure(&case.stolen, &STOLEN));
    cells.push(figure(&case.speed, &SPEED));
    cells
}

fn figure(samples: &Samples, metric: &Metric) -> String {
    let part = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| number(value, metric.digits));
    format!("{} ({} – {})", part(samples.median()), part(samples.lowest()), part(samples.highest()))
}

/// The plotted metric, and whether higher is better.
pub(crate) fn plotted(scenario: &ScenarioResult) -> Option<(&Metric, bool)> {
    scenario.metrics.first().map(|metric| (metric, metric.better == Better::Higher))
}

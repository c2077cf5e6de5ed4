//! The result of a soak run.

use std::path::Path;
use std::time::Duration;

use owo_colors::{OwoColorize, Stream};

use crate::churn::Churn;
use crate::fixture::Outage;
use crate::sample::{Sample, Sampler};
use crate::streams::TrafficResult;

/// A daemon's first seconds, in which everything grows to its size.
const WARM_UP: Duration = Duration::from_secs(10);
/// Fewer samples show no trend.
const LEAST: usize = 12;

struct Finding {
    good: bool,
    what: String,
}

pub(crate) struct SoakResult(Vec<Finding>);

/// A value that must not grow: its name, how to read it from a sample, and the accepted factor and amount.
type GrowthLimit = (&'static str, fn(&Sample) -> Option<f64>, f64, f64);

const WATCHED: [GrowthLimit; 4] = [
    ("memory, MiB", |sample| Some(sample.memory_mebibytes), 1.05, 4.0),
    ("descriptors", |sample| Some(sample.descriptors), 1.0, 8.0),
    ("frames under way", |sample| Some(sample.frames_under_way), 1.0, 64.0),
    // The plot also has the 99th percentile, which depends more on other load of the machine.
    ("median latency, ms", |sample| sample.latency_milliseconds.map(|(p50, _)| p50), 2.0, 1.0),
];

impl SoakResult {
    pub(crate) fn reach(
        sampler: &Sampler,
        outcome: &TrafficResult,
        churn: &Churn,
        outages: &[Outage],
        ended: Vec<String>,
        warnings: Vec<String>,
    ) -> Self {
        let mut findings = Vec::new();
        let mut find = |good, what| findings.push(Finding { good, what });
        losses(sampler, outcome, outages, &mut find);
        find(
            outcome.denied_arrived == 0,
            format!(
                "{} datagrams that policy denies, of which {} arrived",
                outcome.denied_sent, outcome.denied_arrived
            ),
        );
        find(
            outcome.flows_broken == 0,
            format!("{} exchanges over connections, {} of which broke", outcome.exchanges, outcome.flows_broken),
        );
        let met = |start, end| outages.iter().any(|outage| outage.meets(start, end));
        let wrong: Vec<_> = churn.wrong.iter().filter(|(start, end, _)| !met(*start, *end)).collect();
        find(
            wrong.is_empty(),
            format!(
                "{} policies and {} pods came, {} questions, {} answered wrongly",
                churn.policies,
                churn.pods,
                churn.probes,
                wrong.len()
            ),
        );
        for (start, _, what) in wrong {
            find(false, format!("at {:.1} s: {what}", start.as_secs_f64()));
        }
        find(sampler.frames_missing == 0, format!("{} frames missing at rest", sampler.frames_missing));
        trends(&sampler.samples, &mut find);
        find(
            ended.is_empty(),
            format!("the daemon's end and what it left: {}", if ended.is_empty() { "clean" } else { "" }),
        );
        ended.into_iter().for_each(|what| find(false, what));
        find(warnings.is_empty(), format!("{} warnings and errors in the daemons' logs", warnings.len()));
        warnings.into_iter().for_each(|line| find(false, line));
        Self(findings)
    }

    pub(crate) fn is_good(&self) -> bool {
        self.0.iter().all(|finding| finding.good)
    }

    pub(crate) fn print(&self, plot: &Path) {
        for Finding { good, what } in &self.0 {
            println!("  {}  {what}", if *good { "holds" } else { "FAILS" });
        }
        println!("Plot: {}", plot.display());
        match self.is_good() {
            true => println!("{}", "The soak passed.".if_supports_color(Stream::Stdout, |text| text.green())),
            false => println!("{}", "The soak failed.".if_supports_color(Stream::Stdout, |text| text.red())),
        }
    }
}

/// Every datagram arrived once, was sent while no daemon ran, or was counted as lost by a daemon.
fn losses(sampler: &Sampler, outcome: &TrafficResult, outages: &[Outage], find: &mut impl FnMut(bool, String)) {
    let met = |sent: &&Duration| outages.iter().any(|outage| outage.meets(**sent, **sent));
    let mut unexplained = 0;
    for stream_result in &outcome.streams {
        let in_outages = stream_result.lost.iter().filter(met).count() as u64;
        let others = stream_result.lost.len() as u64 - in_outages;
        unexplained += others;
        find(
            stream_result.twice == 0,
            format!(
                "{}: {} datagrams, {} twice, {in_outages} lost while no daemon ran, {others} otherwise",
                stream_result.name, stream_result.sent, stream_result.twice
            ),
        );
    }
    let mut counted = std::collections::BTreeMap::<&str, u64>::new();
    for (cause, count) in sampler.losses.iter().flatten() {
        *counted.entry(cause).or_default() += count;
    }
    let all: u64 = counted.values().sum();
    find(
        unexplained <= all,
        format!("{unexplained} lost while a daemon ran; it counted {all} lost packets: {counted:?}"),
    );
    let longest = outages.iter().map(|outage| outage.to - outage.from).max().unwrap_or_default();
    find(true, format!("{} restarts, the longest {:.2} s", outages.len(), longest.as_secs_f64()));
}

/// Compares the first third with the last: over the whole run, and within the longest life of a daemon.
fn trends(samples: &[Sample], find: &mut impl FnMut(bool, String)) {
    let warm: Vec<&Sample> = samples.iter().filter(|sample| sample.age > WARM_UP).collect();
    let lives = samples.last().map_or(0, |sample| sample.life + 1);
    let of = |life: usize| warm.iter().copied().filter(|sample| sample.life == life).collect::<Vec<_>>();
    let longest = (0..lives).map(of).max_by_key(Vec::len).unwrap_or_default();
    for (scope, samples) in [("the run", &warm), ("the longest life of a daemon", &longest)] {
        if samples.len() < LEAST {
            find(true, format!("{scope}: too short for a trend ({} samples)", samples.len()));
            continue;
        }
        let third = samples.len() / 3;
        for (name, value, factor, amount) in WATCHED {
            let (first, last) = (median(&samples[..third], value), median(&samples[samples.len() - third..], value));
            let limit = first * factor + amount;
            find(
                last <= limit,
                format!("{name}, over {scope}: {first:.2} at first, {last:.2} at last, at most {limit:.2}"),
            );
        }
    }
}

fn median(samples: &[&Sample], value: fn(&Sample) -> Option<f64>) -> f64 {
    let mut values: Vec<f64> = samples.iter().filter_map(|sample| value(sample)).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

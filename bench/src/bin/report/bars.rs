//! Thresholds that the results must meet, as ratios or differences within one run.

use crate::results::Results;

/// Direction of a threshold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    AtLeast,
    AtMost,
}

/// A threshold for the figure of one case, alone or relative to another case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bar {
    pub(crate) what: &'static str,
    scenario: &'static str,
    metric: &'static str,
    of: &'static str,
    against: Option<&'static str>,
    /// Whether the difference of the two figures counts, rather than their ratio.
    beyond: bool,
    pub(crate) side: Side,
    pub(crate) bar: f64,
}

/// Result of a threshold.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reached {
    /// The ratio or difference, and whether it meets the threshold.
    Measured(f64, bool),
    /// Why it was not measured.
    Not(String),
}

const fn least(what: &'static str, scenario: &'static str, metric: &'static str, bar: f64) -> Bar {
    Bar { what, scenario, metric, of: "Penstock", against: None, beyond: false, side: Side::AtLeast, bar }
}

const fn most(what: &'static str, scenario: &'static str, metric: &'static str, bar: f64) -> Bar {
    Bar { side: Side::AtMost, ..least(what, scenario, metric, bar) }
}

impl Bar {
    const fn of(self, of: &'static str) -> Self {
        Self { of, ..self }
    }

    const fn against(self, against: &'static str) -> Self {
        Self { against: Some(against), ..self }
    }

    /// The difference to that case is bounded.
    const fn beyond(self, rest: &'static str) -> Self {
        Self { against: Some(rest), beyond: true, ..self }
    }
}

/// All thresholds.
pub(crate) const BARS: &[Bar] = &[
    least("full pipeline with 10,000 policies against own raw AF_XDP forward, 64 octets", "pps", "received", 0.92)
        .of("Penstock, 10,000 policies")
        .against("Penstock, raw forward"),
    least("one UDP connection, 64 octets, against kernel + nftables sets + conntrack", "pps", "received", 1.5)
        .against("nftables, sets + conntrack"),
    least("the same against kernel + 1,000 linear rules", "pps", "received", 5.0)
        .against("nftables, 1000 linear rules"),
    least("the same against Open vSwitch, userspace, with conntrack", "pps", "received", 2.0)
        .against("Open vSwitch, userspace"),
    most(
        "from save to in force, p99, while 50 pods come and go each second: ms beyond that at rest",
        "policy-churn",
        "p99",
        10.0,
    )
    .of("Penstock, 50 pods a second")
    .beyond("Penstock, at rest"),
    most("first packet of a connection, p99 of the added latency, against NFQUEUE", "first-packet", "added p99", 0.1)
        .against("NFQUEUE"),
    least("new TCP connections a second against kernel + nftables + conntrack", "tcp-connections", "opened", 1.0)
        .against("nftables, sets + conntrack"),
    most("round trip p99 at half load against plain kernel routing", "round-trip", "p99", 1.3)
        .of("50 %: Penstock")
        .against("50 %: kernel routing"),
    least("bulk TCP, one stream, against kernel without GSO", "bulk", "one stream", 0.8)
        .against("kernel routing, without GSO"),
    least("bulk TCP, one stream, against kernel with GSO, MTU 1,500", "bulk", "one stream", 0.2)
        .against("kernel routing"),
    least("bulk TCP, one stream, largest single frame, against kernel with GSO", "bulk", "one stream", 0.4)
        .of("Penstock, largest single frame")
        .against("kernel routing"),
    most("clocks of an established packet outside of system calls", "stages", "outside system calls", 200.0),
    most("packets lost in a swap of 10,000 rules", "swap", "lost", 0.0),
    least("new connections opened during an ACK flood from outside, of those without", "ack-flood", "share", 0.99),
];

/// Whether a threshold uses this case.
pub(crate) fn go_by(scenario: &str, case: &str) -> bool {
    BARS.iter().any(|bar| bar.scenario == scenario && (bar.of == case || bar.against == Some(case)))
}

impl Bar {
    /// Evaluates the threshold.
    pub(crate) fn reached(&self, results: &Results) -> Reached {
        let Some(scenario) = results.scenario(self.scenario) else {
            return Reached::Not(format!("scenario {} was not run", self.scenario));
        };
        let median = |case: &str| {
            // A loss of zero is required in every repetition, not only in the median.
            let samples = scenario.samples(case, self.metric);
            let value = samples.and_then(|samples| if self.bar == 0.0 { samples.highest() } else { samples.median() });
            value.ok_or_else(|| {
                let failure = scenario.cases.iter().find(|other| other.name == case);
                let failure = failure.and_then(|case| case.failure.clone());
                format!("{case}: {}", failure.unwrap_or_else(|| "not measured".to_owned()))
            })
        };
        let against = self.against.map_or(Ok(1.0), median);
        match (median(self.of), against) {
            (Ok(of), Ok(against)) => {
                let value = if self.beyond { of - against } else { of / against };
                let meets = match self.side {
                    Side::AtLeast => value >= self.bar,
                    Side::AtMost => value <= self.bar,
                };
                Reached::Measured(value, meets)
            }
            (Err(reason), _) | (_, Err(reason)) => Reached::Not(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use penstock_bench::peers::Cores;

    use super::*;
    use crate::Plan;
    use crate::machine::Machine;
    use crate::results::{CaseResult, Metric, Samples, ScenarioResult};

    const METRICS: &[Metric] = &[Metric::higher("received", "", 0)];

    fn results(cases: &[(&str, &[f64], Option<&str>)]) -> Results {
        let case = |&(name, values, failure): &(&str, &[f64], Option<&str>)| {
            let mut samples = Samples::default();
            values.iter().for_each(|&value| samples.add(value));
            CaseResult {
                name: name.into(),
                samples: vec![samples],
                failure: failure.map(Into::into),
                ..CaseResult::default()
            }
        };
        let cases = cases.iter().map(case).collect();
        let scenario = ScenarioResult { name: "pps", title: "", about: "", metrics: METRICS, cases };
        Results {
            machine: Machine { facts: Vec::new(), load: 0.0 },
            plan: Plan { length: Duration::ZERO, repetitions: 1, cores: Cores { generator: 0, worker: 1 } },
            took: Duration::ZERO,
            scenarios: vec![scenario],
            peers: BTreeMap::new(),
        }
    }

    #[test]
    fn a_bar_is_met_fallen_short_of_or_not_measured_for_a_reason() {
        let twice = least("", "pps", "received", 2.0).against("other");
        let most_twice = most("", "pps", "received", 2.0).against("other");
        let none = most("", "pps", "received", 0.0);
        let beyond = |bar| most("", "pps", "received", bar).beyond("other");
        let measured: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[1.0, 6.0, 5.0], None), ("other", &[2.0, 2.5, 3.0], None)];
        let slower: &[(&str, &[f64], Option<&str>)] = &[("Penstock", &[3.0], None), ("other", &[2.0], None)];
        let missing: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[3.0], None), ("other", &[], Some("it is not installed"))];
        for (bar, cases, expected) in [
            (twice, measured, Reached::Measured(2.0, true)),
            (most_twice, measured, Reached::Measured(2.0, true)),
            (twice, slower, Reached::Measured(1.5, false)),
            (most_twice, slower, Reached::Measured(1.5, true)),
            (beyond(2.5), measured, Reached::Measured(2.5, true)),
            (beyond(2.0), measured, Reached::Measured(2.5, false)),
            (twice, missing, Reached::Not("other: it is not installed".into())),
            // Where nothing may be lost, one repetition that loses something is enough.
            (none, &[("Penstock", &[0.0, 0.0, 7.0][..], None)], Reached::Measured(7.0, false)),
            (none, &[("Penstock", &[0.0, 0.0][..], None)], Reached::Measured(0.0, true)),
        ] {
            assert_eq!(bar.reached(&results(cases)), expected);
        }
        let elsewhere = least("", "bulk", "received", 1.0);
        assert_eq!(elsewhere.reached(&results(measured)), Reached::Not("scenario bulk was not run".into()));
    }

    #[test]
    fn every_bar_names_a_scenario_a_case_and_a_metric_that_there_are() {
        let scenarios = crate::scenarios::all();
        for bar in BARS {
            let scenario = scenarios.iter().find(|scenario| scenario.name == bar.scenario).expect(bar.what);
            assert!(scenario.metrics.iter().any(|metric| metric.name == bar.metric), "{}", bar.what);
            for case in std::iter::once(bar.of).chain(bar.against) {
                assert!(scenario.cases.iter().any(|other| other.name == case), "{}: {case}", bar.what);
            }
        }
    }
}

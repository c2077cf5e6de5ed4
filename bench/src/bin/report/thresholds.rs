//! Thresholds that the results must meet, as ratios or differences within one run.

use crate::results::Results;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bound {
    AtLeast,
    AtMost,
}

/// A threshold for the figure of one case, alone or relative to another case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Threshold {
    pub(crate) what: &'static str,
    scenario: &'static str,
    metric: &'static str,
    of: &'static str,
    against: Option<&'static str>,
    /// Whether the difference of the two figures counts, rather than their ratio.
    difference: bool,
    /// A case that does less, or as much work beside it: such a forwarder can hardly better its figure on this machine.
    limit: Option<&'static str>,
    pub(crate) bound: Bound,
    pub(crate) threshold: f64,
}

/// Lowest and highest of what the repetitions gave.
pub(crate) type Spread = [f64; 2];

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum ThresholdResult {
    /// The ratio or difference, and whether it meets the threshold.
    Measured(f64, bool),
    NotMeasured(String),
}

const fn at_least(what: &'static str, scenario: &'static str, metric: &'static str, threshold: f64) -> Threshold {
    Threshold {
        what,
        scenario,
        metric,
        of: "Penstock",
        against: None,
        difference: false,
        limit: None,
        bound: Bound::AtLeast,
        threshold,
    }
}

const fn at_most(what: &'static str, scenario: &'static str, metric: &'static str, threshold: f64) -> Threshold {
    Threshold { bound: Bound::AtMost, ..at_least(what, scenario, metric, threshold) }
}

impl Threshold {
    const fn of(self, of: &'static str) -> Self {
        Self { of, ..self }
    }

    const fn against(self, against: &'static str) -> Self {
        Self { against: Some(against), ..self }
    }

    /// The figure of this case is shown beside the result.
    const fn limited_by(self, limit: &'static str) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The difference to that case is bounded.
    const fn difference(self, rest: &'static str) -> Self {
        Self { against: Some(rest), difference: true, ..self }
    }
}

/// Two pods joined by a program that looks nothing up.
const REDIRECT: &str = "tcx, redirect alone";
/// A pod and another machine joined by one.
const REDIRECT_OUT: &str = "tcx, redirect alone, to another node";

pub(crate) const THRESHOLDS: &[Threshold] = &[
    at_least("full pipeline with 10,000 policies against own raw AF_XDP forward, 64 bytes", "pps", "received", 0.92)
        .of("Penstock, 10,000 policies")
        .against("Penstock, raw forward"),
    at_least("one UDP connection, 64 bytes, against kernel + nftables sets + conntrack", "pps", "received", 1.5)
        .against("nftables, sets + conntrack"),
    at_least("the same against kernel + 1,000 linear rules", "pps", "received", 5.0)
        .against("nftables, 1000 linear rules"),
    at_least("the same against Open vSwitch, userspace, with conntrack", "pps", "received", 2.0)
        .against("Open vSwitch, userspace"),
    at_most(
        "from save to in effect, p99, while 50 pods come and go each second: ms beyond that at rest",
        "policy-churn",
        "p99",
        10.0,
    )
    .of("Penstock, 50 pods a second")
    .difference("Penstock, at rest"),
    at_most(
        "first packet of a connection, p99 of the added latency, against NFQUEUE",
        "first-packet",
        "added p99",
        0.1,
    )
    .against("NFQUEUE"),
    at_least("new TCP connections a second against kernel + nftables + conntrack", "tcp-connections", "opened", 1.0)
        .against("nftables, sets + conntrack"),
    at_most("round trip p99 at half load against plain kernel routing", "round-trip", "p99", 1.3)
        .of("50 %: Penstock")
        .against("50 %: kernel routing"),
    at_least("bulk TCP, one stream, against kernel without GSO", "bulk", "one stream", 0.8)
        .against("kernel routing, without GSO")
        .limited_by("Penstock, raw forward"),
    at_least("bulk TCP, one stream, against kernel with GSO, MTU 1,500", "bulk", "one stream", 0.2)
        .against("kernel routing")
        .limited_by("Penstock, raw forward"),
    at_least("bulk TCP, one stream, largest single frame, against kernel with GSO", "bulk", "one stream", 0.4)
        .of("Penstock, largest single frame")
        .against("kernel routing")
        .limited_by("Penstock, raw forward, largest single frame"),
    at_most("packets lost in swaps of 10,000 rules, the most of all repetitions", "swap", "lost", 0.0),
    at_most("the same by tcx", "swap", "lost", 0.0).of("Penstock, tcx"),
    at_most(
        "from taking a policy back to the last packet of a connection that the kernel forwards, by tcx, ms, median",
        "policy-churn",
        "cut, median",
        12.0,
    )
    .of("Penstock, tcx, at rest"),
    at_most("its p99", "policy-churn", "cut, p99", 12.0).of("Penstock, tcx, at rest"),
    at_most(
        "first packet of a connection by tcx, p99 of the added latency, against NFQUEUE",
        "first-packet",
        "added p99",
        0.1,
    )
    .of("Penstock, tcx")
    .against("NFQUEUE"),
    at_most("round trip p99 by tcx at half load against plain kernel routing", "round-trip", "p99", 1.3)
        .of("50 %: Penstock, tcx")
        .against("50 %: kernel routing"),
    at_least("new connections opened during an ACK flood from outside, of those without", "ack-flood", "share", 0.99),
    at_most(
        "first packets by tcx, p99, while another pod floods the same worker, against those without",
        "neighbours-flood",
        "p99",
        2.0,
    )
    .of("Penstock, tcx, one worker, 100 k SYNs a second")
    .against("Penstock, tcx, one worker, 0 k SYNs a second"),
    at_most("from SYN to SYN-ACK by a worker, by tcx, p99, against kernel routing", "handshakes", "p99", 2.0)
        .of("Penstock, tcx, by workers, 0 k SYNs a second")
        .against("kernel routing, 0 k SYNs a second"),
    at_most("the same beside another pod's SYN flood, against kernel routing beside it", "handshakes", "p99", 3.0)
        .of("Penstock, tcx, by workers, 100 k SYNs a second")
        .against("kernel routing, 100 k SYNs a second"),
    at_most("seconds until a daemon is ready by tcx, 110 pods, beside eight busy threads", "start", "ready", 2.0)
        .of("Penstock, tcx, as shipped, 8 busy threads"),
    at_least("one UDP connection by tcx, 64 bytes, against kernel routing", "pps", "received", 1.15)
        .of("Penstock, tcx")
        .against("kernel routing")
        .limited_by(REDIRECT),
    at_most("what a packet of it costs the core, against kernel routing", "pps", "generator core", 0.9)
        .of("Penstock, tcx")
        .against("kernel routing")
        .limited_by(REDIRECT),
    at_least("one UDP connection by tcx against kernel + nftables sets + conntrack", "pps", "received", 1.5)
        .of("Penstock, tcx")
        .against("nftables, sets + conntrack")
        .limited_by(REDIRECT),
    at_least("bulk TCP by tcx, one stream, against kernel with GSO, MTU 1,500", "bulk", "one stream", 0.97)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_most("what a gigabit of it costs the processor, against the same", "bulk", "one stream, processor", 1.05)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_least("bulk TCP by tcx, eight streams, against the same", "bulk", "eight streams", 0.97)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_least(
        "one stream by tcx while policies change 100 times a second, against the same",
        "bulk",
        "one stream",
        0.95,
    )
    .of("Penstock, tcx, 100 policy changes a second")
    .against("kernel routing")
    .limited_by("kernel routing, 100 saves a second and as much work"),
    at_least("eight streams by tcx meanwhile, against the same", "bulk", "eight streams", 0.95)
        .of("Penstock, tcx, 100 policy changes a second")
        .against("kernel routing")
        .limited_by("kernel routing, 100 saves a second and as much work"),
    at_least(
        "new TCP connections a second by tcx against kernel + nftables + conntrack",
        "tcp-connections",
        "opened",
        0.9,
    )
    .of("Penstock, tcx")
    .against("nftables, sets + conntrack"),
    at_most("TCP_RR by tcx, both ends on one core, against kernel routing", "transactions", "TCP_RR, one core", 1.0)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_most("its p99", "transactions", "TCP_RR, one core, p99", 1.05).of("Penstock, tcx").against("kernel routing"),
    at_most("TCP_RR by tcx, an end on each core, against kernel routing", "transactions", "TCP_RR, two cores", 1.0)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_most("its p99", "transactions", "TCP_RR, two cores, p99", 1.05).of("Penstock, tcx").against("kernel routing"),
    at_most("TCP_RR by tcx at 1,000 a second against kernel routing", "transactions", "TCP_RR, 1,000 a second", 1.0)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_most("its p99", "transactions", "TCP_RR, 1,000 a second, p99", 1.05)
        .of("Penstock, tcx")
        .against("kernel routing"),
    at_least(
        "TCP_CRR by tcx, one at a time, against kernel + nftables + conntrack",
        "transactions",
        "TCP_CRR, one at a time",
        0.9,
    )
    .of("Penstock, tcx")
    .against("nftables, sets + conntrack"),
    at_least("TCP_CRR by tcx, 32 at once, against the same", "transactions", "TCP_CRR, 32 at once", 0.95)
        .of("Penstock, tcx")
        .against("nftables, sets + conntrack"),
    at_least("one UDP connection by tcx to another node, 64 bytes, against kernel routing", "pps", "received", 1.15)
        .of("Penstock, tcx, to another node")
        .against("kernel routing, to another node")
        .limited_by(REDIRECT_OUT),
    at_least(
        "TCP_CRR by tcx to another node, one at a time, against kernel routing",
        "transactions",
        "TCP_CRR, one at a time",
        1.0,
    )
    .of("Penstock, tcx, to another node")
    .against("kernel routing, to another node")
    .limited_by(REDIRECT_OUT),
    at_least(
        "TCP_CRR by tcx to another node, 32 at once, against the same",
        "transactions",
        "TCP_CRR, 32 at once",
        1.0,
    )
    .of("Penstock, tcx, to another node")
    .against("kernel routing, to another node")
    .limited_by(REDIRECT_OUT),
    at_least("one UDP connection by tcx to a Service against the same to its pod", "services", "received", 0.95)
        .of("Penstock, tcx, to its Service")
        .against("Penstock, tcx, to the pod"),
    at_least("bulk TCP by tcx to a Service against kernel + DNAT", "services", "one stream", 1.0)
        .of("Penstock, tcx, to its Service")
        .against("nftables, sets + conntrack, to its Service"),
    at_least("new TCP connections to a Service by tcx against kernel + DNAT", "services", "opened", 1.0)
        .of("Penstock, tcx, to its Service")
        .against("nftables, sets + conntrack, to its Service"),
    at_least("10,000 Services against one: packets to a Service", "services", "received", 0.9)
        .of("Penstock, tcx, to its Service of 10000")
        .against("Penstock, tcx, to its Service"),
    at_least("1 UDP connection of a full table of 1 M by tcx against kernel routing", "connections", "received", 1.1)
        .of("1: Penstock, tcx, full table")
        .against("1: kernel routing")
        .limited_by("1: tcx, redirect alone"),
    at_least(
        "1 UDP connection of a full table of 1 M by tcx against kernel + nftables sets + conntrack with as many",
        "connections",
        "received",
        1.4,
    )
    .of("1: Penstock, tcx, full table")
    .against("1: nftables, sets + conntrack, full table")
    .limited_by("1: tcx, redirect alone"),
    at_least("10,000 of them against kernel routing", "connections", "received", 1.0)
        .of("10000: Penstock, tcx, full table")
        .against("10000: kernel routing")
        .limited_by("10000: tcx, redirect alone"),
    at_least("10,000 of them against kernel + nftables sets + conntrack with as many", "connections", "received", 1.4)
        .of("10000: Penstock, tcx, full table")
        .against("10000: nftables, sets + conntrack, full table")
        .limited_by("10000: tcx, redirect alone"),
    at_least("100,000 of them against kernel routing", "connections", "received", 0.85)
        .of("100000: Penstock, tcx, full table")
        .against("100000: kernel routing")
        .limited_by("100000: tcx, redirect alone"),
    at_least("100,000 of them against kernel + nftables sets + conntrack with as many", "connections", "received", 1.4)
        .of("100000: Penstock, tcx, full table")
        .against("100000: nftables, sets + conntrack, full table")
        .limited_by("100000: tcx, redirect alone"),
];

pub(crate) fn uses_case(scenario: &str, case: &str) -> bool {
    THRESHOLDS.iter().any(|threshold| threshold.scenario == scenario && threshold.cases().any(|other| other == case))
}

impl Threshold {
    fn cases(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.of).chain(self.against).chain(self.limit)
    }

    pub(crate) fn evaluate(&self, results: &Results) -> ThresholdResult {
        match self.value(self.of, results) {
            Ok(value) => {
                let meets = match self.bound {
                    Bound::AtLeast => value >= self.threshold,
                    Bound::AtMost => value <= self.threshold,
                };
                ThresholdResult::Measured(value, meets)
            }
            Err(reason) => ThresholdResult::NotMeasured(reason),
        }
    }

    /// The same ratio or difference for the case that limits it, if there is one and it was measured.
    pub(crate) fn limit(&self, results: &Results) -> Option<f64> {
        self.value(self.limit?, results).ok()
    }

    /// Lowest and highest ratio or difference of single repetitions; `None` where nothing was measured. Where one of the two
    /// cases failed in some repetition, its median stands for all of them.
    pub(crate) fn spread(&self, results: &Results) -> Option<Spread> {
        let scenario = results.scenario(self.scenario)?;
        let of = scenario.samples(self.of, self.metric)?;
        let against = self.against.map(|case| scenario.samples(case, self.metric).ok_or(())).transpose().ok()?;
        let each: Vec<f64> = match against {
            None => of.values().to_vec(),
            Some(other) if other.count() == of.count() => {
                of.values().iter().zip(other.values()).map(|(&of, &other)| self.compare(of, other)).collect()
            }
            Some(other) => {
                let median = other.median()?;
                of.values().iter().map(|&of| self.compare(of, median)).collect()
            }
        };
        Some([each.iter().copied().reduce(f64::min)?, each.iter().copied().reduce(f64::max)?])
    }

    fn compare(&self, of: f64, against: f64) -> f64 {
        if self.difference { of - against } else { of / against }
    }

    /// The ratio or difference of this case.
    fn value(&self, of: &str, results: &Results) -> Result<f64, String> {
        let Some(scenario) = results.scenario(self.scenario) else {
            return Err(format!("scenario {} was not run", self.scenario));
        };
        let median = |case: &str| {
            // A loss of zero is required in every repetition, not only in the median.
            let samples = scenario.samples(case, self.metric);
            let value =
                samples.and_then(|samples| if self.threshold == 0.0 { samples.highest() } else { samples.median() });
            value.ok_or_else(|| {
                let failure = scenario.cases.iter().find(|other| other.name == case);
                let failure = failure.and_then(|case| case.failure.clone());
                format!("{case}: {}", failure.unwrap_or_else(|| "not measured".to_owned()))
            })
        };
        match self.against {
            None => median(of),
            Some(other) => Ok(self.compare(median(of)?, median(other)?)),
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
    use crate::results::{CaseResult, Metric, Samples, ScenarioResult};
    use penstock_bench::machine::Machine;

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
        let scenario =
            ScenarioResult { name: "pps", title: "", about: "", metrics: METRICS, cases, took: Duration::ZERO };
        Results {
            machine: Machine { facts: Vec::new(), load: 0.0 },
            plan: Plan {
                length: Duration::ZERO,
                repetitions: 1,
                limit: Duration::ZERO,
                cores: Cores { generator: 0, worker: 1 },
            },
            repetitions: 1,
            took: Duration::ZERO,
            scenarios: vec![scenario],
            peers: BTreeMap::new(),
        }
    }

    #[test]
    fn a_threshold_is_met_missed_or_not_measured_with_a_reason() {
        let twice = at_least("", "pps", "received", 2.0).against("other");
        let most_twice = at_most("", "pps", "received", 2.0).against("other");
        let none = at_most("", "pps", "received", 0.0);
        let difference = |threshold| at_most("", "pps", "received", threshold).difference("other");
        let measured: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[1.0, 6.0, 5.0], None), ("other", &[2.0, 2.5, 3.0], None)];
        let slower: &[(&str, &[f64], Option<&str>)] = &[("Penstock", &[3.0], None), ("other", &[2.0], None)];
        let missing: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[3.0], None), ("other", &[], Some("it is not installed"))];
        for (threshold, cases, expected) in [
            (twice, measured, ThresholdResult::Measured(2.0, true)),
            (most_twice, measured, ThresholdResult::Measured(2.0, true)),
            (twice, slower, ThresholdResult::Measured(1.5, false)),
            (most_twice, slower, ThresholdResult::Measured(1.5, true)),
            (difference(2.5), measured, ThresholdResult::Measured(2.5, true)),
            (difference(2.0), measured, ThresholdResult::Measured(2.5, false)),
            (twice, missing, ThresholdResult::NotMeasured("other: it is not installed".into())),
            // Where nothing may be lost, one repetition that loses something is enough.
            (none, &[("Penstock", &[0.0, 0.0, 7.0][..], None)], ThresholdResult::Measured(7.0, false)),
            (none, &[("Penstock", &[0.0, 0.0][..], None)], ThresholdResult::Measured(0.0, true)),
        ] {
            assert_eq!(threshold.evaluate(&results(cases)), expected);
        }
        assert_eq!(twice.limited_by("Penstock").limit(&results(measured)), Some(2.0));
        assert_eq!(twice.limited_by("Penstock").limit(&results(missing)), None);
        assert_eq!(twice.limit(&results(measured)), None);
        let elsewhere = at_least("", "bulk", "received", 1.0);
        assert_eq!(
            elsewhere.evaluate(&results(measured)),
            ThresholdResult::NotMeasured("scenario bulk was not run".into())
        );
    }

    #[test]
    fn the_spread_is_that_of_single_repetitions() {
        let ratio = at_least("", "pps", "received", 2.0).against("other");
        let difference = at_least("", "pps", "received", 2.0).difference("other");
        let alone = at_least("", "pps", "received", 2.0);
        let all: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[8.0, 3.0, 6.0], None), ("other", &[2.0, 1.0, 4.0], None)];
        let one_failed: &[(&str, &[f64], Option<&str>)] =
            &[("Penstock", &[8.0, 3.0, 6.0], None), ("other", &[2.0, 4.0], None)];
        let missing: &[(&str, &[f64], Option<&str>)] = &[("Penstock", &[8.0], None), ("other", &[], None)];
        for (threshold, cases, expected) in [
            (ratio, all, Some([1.5, 4.0])),
            (difference, all, Some([2.0, 6.0])),
            (alone, all, Some([3.0, 8.0])),
            (ratio, one_failed, Some([1.0, 8.0 / 3.0])),
            (ratio, missing, None),
            (at_least("", "bulk", "received", 1.0), all, None),
        ] {
            assert_eq!(threshold.spread(&results(cases)), expected);
        }
    }

    #[test]
    fn every_threshold_names_an_existing_scenario_case_and_metric() {
        let scenarios = crate::scenarios::all();
        for threshold in THRESHOLDS {
            let scenario = scenarios.iter().find(|scenario| scenario.name == threshold.scenario).expect(threshold.what);
            assert!(scenario.metrics.iter().any(|metric| metric.name == threshold.metric), "{}", threshold.what);
            for case in threshold.cases() {
                assert!(scenario.cases.iter().any(|other| other.name == case), "{}: {case}", threshold.what);
            }
        }
    }
}

//! The first table of the report: Penstock beside the kernel, in the measures that users of CNI plugins know.

use super::number::number;
use crate::results::{Better, Metric, Results, ScenarioResult};

/// One line: a metric of a scenario, for the case of each peer.
struct Line {
    what: &'static str,
    scenario: &'static str,
    metric: &'static str,
    /// Kernel routing, the kernel with nftables and conntrack, and Penstock.
    cases: [Option<&'static str>; 3],
}

const ROUTING: &str = "kernel routing";
const NFTABLES: &str = "nftables, sets + conntrack";
const PENSTOCK: &str = "Penstock, tcx";

const fn to_pod(what: &'static str, scenario: &'static str, metric: &'static str) -> Line {
    Line { what, scenario, metric, cases: [Some(ROUTING), Some(NFTABLES), Some(PENSTOCK)] }
}

/// Kernel routing knows no Services.
const fn to_service(what: &'static str, scenario: &'static str, metric: &'static str) -> Line {
    let cases = [None, Some("nftables, sets + conntrack, to its Service"), Some("Penstock, tcx, to its Service")];
    Line { what, scenario, metric, cases }
}

const fn to_other_node(what: &'static str, scenario: &'static str, metric: &'static str) -> Line {
    let cases = [
        Some("kernel routing, to another node"),
        Some("nftables, sets + conntrack, to another node"),
        Some("Penstock, tcx, to another node"),
    ];
    Line { what, scenario, metric, cases }
}

const LINES: &[Line] = &[
    to_pod("UDP_STREAM, 64 bytes", "pps", "received"),
    to_pod("UDP_STREAM, sender's core", "pps", "generator core"),
    to_pod("TCP_STREAM", "bulk", "one stream"),
    to_pod("TCP_STREAM, processor", "bulk", "one stream, processor"),
    to_pod("TCP_STREAM, eight at once", "bulk", "eight streams"),
    to_pod("TCP_STREAM, 32 at once", "bulk", "32 streams"),
    to_pod("TCP_RR, one core", "transactions", "TCP_RR, one core"),
    to_pod("TCP_RR, two cores", "transactions", "TCP_RR, two cores"),
    to_pod("TCP_RR, 32 at once", "transactions", "TCP_RR, 32 at once"),
    to_pod("TCP_RR, processor", "transactions", "TCP_RR, processor"),
    to_pod("TCP_CRR", "transactions", "TCP_CRR, one at a time"),
    to_pod("TCP_CRR, 32 at once", "transactions", "TCP_CRR, 32 at once"),
    to_pod("TCP_CRR, processor", "transactions", "TCP_CRR, processor"),
    to_service("UDP_STREAM, 64 bytes, to a Service", "services", "received"),
    to_service("TCP_STREAM to a Service", "services", "one stream"),
    to_service("TCP_STREAM to a Service, processor", "services", "one stream, processor"),
    to_service("TCP_RR to a Service, one core", "transactions", "TCP_RR, one core"),
    to_service("TCP_CRR to a Service", "transactions", "TCP_CRR, one at a time"),
    to_service("TCP_CRR to a Service, 32 at once", "transactions", "TCP_CRR, 32 at once"),
    to_other_node("UDP_STREAM, 64 bytes, to another node", "pps", "received"),
    to_other_node("TCP_STREAM to another node", "bulk", "one stream"),
    to_other_node("TCP_STREAM to another node, processor", "bulk", "one stream, processor"),
    to_other_node("TCP_RR to another node, one core", "transactions", "TCP_RR, one core"),
    to_other_node("TCP_CRR to another node", "transactions", "TCP_CRR, one at a time"),
    to_other_node("TCP_CRR to another node, 32 at once", "transactions", "TCP_CRR, 32 at once"),
];

pub(crate) fn uses_case(scenario: &str, case: &str) -> bool {
    LINES.iter().any(|line| line.scenario == scenario && line.cases.contains(&Some(case)))
}

/// The medians of a line, and how many times as good Penstock's is as each peer's: above 1 Penstock is better.
struct Figures<'a> {
    metric: &'a Metric,
    medians: [Option<f64>; 3],
}

impl Line {
    fn figures<'a>(&self, results: &'a Results) -> Option<Figures<'a>> {
        let scenario: &ScenarioResult = results.scenario(self.scenario)?;
        let metric = scenario.metrics.iter().find(|metric| metric.name == self.metric)?;
        let median = |case: Option<&str>| scenario.samples(case?, self.metric)?.median();
        Some(Figures { metric, medians: self.cases.map(median) })
    }
}

impl Figures<'_> {
    /// Penstock against the peer with this index.
    fn against(&self, peer: usize) -> Option<f64> {
        let (own, other) = (self.medians[2]?, self.medians[peer]?);
        let (more, less) = if self.metric.better == Better::Higher { (own, other) } else { (other, own) };
        (less > 0.0).then_some(more / less)
    }
}

/// The table with its header; `None` if nothing of it was measured.
pub(super) fn table(results: &Results) -> Option<Vec<Vec<String>>> {
    let header =
        ["from pod to pod", "kernel routing", "kernel, nftables", "Penstock", "against routing", "against nftables"];
    let shown = |value: Option<f64>, digits| value.map_or_else(|| "–".to_owned(), |value| number(value, digits));
    let row = |line: &Line| {
        let figures = line.figures(results).filter(|figures| figures.medians[2].is_some())?;
        let mut cells = vec![format!("{}, {}", line.what, figures.metric.unit)];
        cells.extend(figures.medians.map(|median| shown(median, figures.metric.digits)));
        cells.extend([0, 1].map(|peer| shown(figures.against(peer), 2)));
        Some(cells)
    };
    let rows: Vec<_> = LINES.iter().filter_map(row).collect();
    let header = header.map(str::to_owned).to_vec();
    (!rows.is_empty()).then(|| std::iter::once(header).chain(rows).collect())
}

/// The lines with their ratio against the kernel with nftables and conntrack, for the plot.
pub(super) fn ratios(results: &Results) -> Vec<(&'static str, f64)> {
    LINES.iter().filter_map(|line| Some((line.what, line.figures(results)?.against(1)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use penstock_bench::peers::Cores;

    use super::*;
    use crate::Plan;
    use crate::results::{CaseResult, Samples};
    use penstock_bench::machine::Machine;

    fn results(cases: &[(&str, [f64; 2])]) -> Results {
        const METRICS: &[Metric] =
            &[Metric::higher("received", "k packets/s", 0), Metric::lower("generator core", "ns/packet", 0)];
        let case = |(name, values): &(&str, [f64; 2])| {
            let samples = values.map(|value| {
                let mut samples = Samples::default();
                samples.add(value);
                samples
            });
            CaseResult { name: (*name).to_owned(), samples: samples.to_vec(), ..CaseResult::default() }
        };
        let cases = cases.iter().map(case).collect();
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
            scenarios: vec![ScenarioResult {
                name: "pps",
                title: "",
                about: "",
                metrics: METRICS,
                cases,
                took: Duration::ZERO,
            }],
            peers: BTreeMap::new(),
        }
    }

    #[test]
    fn a_ratio_above_one_means_that_penstock_is_better() {
        let both = results(&[(ROUTING, [1000.0, 400.0]), (NFTABLES, [500.0, 800.0]), (PENSTOCK, [1500.0, 200.0])]);
        let rows = table(&both).unwrap();
        assert_eq!(rows[1], ["UDP_STREAM, 64 bytes, k packets/s", "1,000", "500", "1,500", "1.50", "3.00"]);
        assert_eq!(rows[2], ["UDP_STREAM, sender's core, ns/packet", "400", "800", "200", "2.00", "4.00"]);
        assert_eq!(rows.len(), 3, "what was not measured has no line");
        assert_eq!(ratios(&both), [("UDP_STREAM, 64 bytes", 3.0), ("UDP_STREAM, sender's core", 4.0)]);
        let without = results(&[(PENSTOCK, [1500.0, 200.0])]);
        assert_eq!(table(&without).unwrap()[1][1..], ["–", "–", "1,500", "–", "–"]);
        assert!(table(&results(&[(NFTABLES, [500.0, 800.0])])).is_none() && ratios(&without).is_empty());
    }

    #[test]
    fn every_line_names_an_existing_scenario_case_and_metric() {
        let scenarios = crate::scenarios::all();
        for line in LINES {
            let scenario = scenarios.iter().find(|scenario| scenario.name == line.scenario).expect(line.what);
            assert!(scenario.metrics.iter().any(|metric| metric.name == line.metric), "{}", line.what);
            for case in line.cases.into_iter().flatten() {
                assert!(scenario.cases.iter().any(|other| other.name == case), "{}: {case}", line.what);
            }
        }
    }
}

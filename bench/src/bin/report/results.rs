//! Results by scenario, case and metric.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::machine::Machine;

/// Direction in which a metric improves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Better {
    Higher,
    Lower,
}

/// A figure of a scenario.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    /// Digits after the decimal point.
    pub(crate) digits: usize,
}

impl Metric {
    pub(crate) const fn higher(name: &'static str, unit: &'static str, digits: usize) -> Self {
        Self { name, unit, better: Better::Higher, digits }
    }

    pub(crate) const fn lower(name: &'static str, unit: &'static str, digits: usize) -> Self {
        Self { name, unit, better: Better::Lower, digits }
    }
}

/// Values of one metric of one case, in the order of measurement.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    fn sorted(&self) -> Vec<f64> {
        let mut values = self.0.clone();
        values.sort_by(f64::total_cmp);
        values
    }

    /// The middle value; of an even number, the mean of the middle two.
    pub(crate) fn median(&self) -> Option<f64> {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => None,
            odd if odd % 2 == 1 => Some(sorted[middle]),
            _ => Some(sorted[middle - 1].midpoint(sorted[middle])),
        }
    }

    pub(crate) fn lowest(&self) -> Option<f64> {
        self.sorted().first().copied()
    }

    pub(crate) fn highest(&self) -> Option<f64> {
        self.sorted().last().copied()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// In the order of measurement.
    pub(crate) fn values(&self) -> &[f64] {
        &self.0
    }
}

/// Results of one case of a scenario.
#[derive(Clone, Debug, Default)]
pub(crate) struct CaseResult {
    pub(crate) name: String,
    /// One per metric.
    pub(crate) samples: Vec<Samples>,
    /// Stolen CPU time of the cores, in percent.
    pub(crate) stolen: Samples,
    /// Speed of the slower core in percent of its full speed.
    pub(crate) speed: Samples,
    /// Why there are no samples, or fewer than expected.
    pub(crate) failure: Option<String>,
    /// Number of failed attempts.
    pub(crate) failed: u32,
}

/// A scenario with its results.
#[derive(Clone, Debug)]
pub(crate) struct ScenarioResult {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) metrics: &'static [Metric],
    pub(crate) cases: Vec<CaseResult>,
    /// Time that all of it took, testbeds included.
    pub(crate) took: Duration,
}

impl ScenarioResult {
    /// Samples of a case's metric; `None` if there are none.
    pub(crate) fn samples(&self, case: &str, metric: &str) -> Option<&Samples> {
        let index = self.metrics.iter().position(|other| other.name == metric)?;
        let case = self.cases.iter().find(|other| other.name == case)?;
        case.samples.get(index).filter(|samples| samples.count() > 0)
    }
}

/// A whole run.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) plan: crate::Plan,
    /// Repetitions that the time was enough for.
    pub(crate) repetitions: u32,
    pub(crate) took: Duration,
    pub(crate) scenarios: Vec<ScenarioResult>,
    /// Each peer's description of itself.
    pub(crate) peers: BTreeMap<String, String>,
}

impl Results {
    pub(crate) fn scenario(&self, name: &str) -> Option<&ScenarioResult> {
        self.scenarios.iter().find(|scenario| scenario.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_lists() {
        for (values, expected) in [
            (vec![5.0], Some(5.0)),
            (vec![3.0, 1.0, 2.0], Some(2.0)),
            (vec![4.0, 1.0, 2.0, 3.0], Some(2.5)),
            (vec![], None),
        ] {
            assert_eq!(Samples(values).median(), expected);
        }
    }
}

//! Results by scenario, case and metric.

use std::collections::BTreeMap;
use std::time::Duration;

pub(crate) use penstock_bench::figures::Samples;
use penstock_bench::machine::Machine;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Better {
    Higher,
    Lower,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
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
    pub(crate) failed: u32,
}

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

#[derive(Clone, Debug)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) plan: crate::Plan,
    /// Repetitions that the time was enough for.
    pub(crate) repetitions: u32,
    pub(crate) took: Duration,
    pub(crate) scenarios: Vec<ScenarioResult>,
    pub(crate) peers: BTreeMap<String, String>,
}

impl Results {
    pub(crate) fn scenario(&self, name: &str) -> Option<&ScenarioResult> {
        self.scenarios.iter().find(|scenario| scenario.name == name)
    }
}

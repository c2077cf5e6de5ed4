//! The measured scenarios.

mod captures;
mod disturbances;
mod handshakes;
mod io;
mod latency;
mod services;
mod start;
mod tcp;
mod throughput;
mod transactions;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use penstock_bench::peers::{Peer, PeerTestbed};

use crate::Plan;
use crate::results::{CaseResult, Metric, ScenarioResult};
use crate::testbeds::TestbedSpec;

/// Results of earlier scenarios that later ones use, such as rates.
pub(crate) type KnownRates = BTreeMap<String, f64>;

type Measure = Box<dyn FnMut(&mut PeerTestbed, &Plan, &mut KnownRates) -> Result<Vec<Option<f64>>>>;

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// The quantity that is measured, in full sentences.
    pub(crate) about: &'static str,
    /// The metrics of every case, the most important one first.
    pub(crate) metrics: &'static [Metric],
    /// The first is the reference for the others.
    pub(crate) cases: Vec<ScenarioCase>,
}

pub(crate) struct ScenarioCase {
    pub(crate) name: String,
    pub(crate) spec: TestbedSpec,
    pub(crate) measure: Measure,
}

impl ScenarioCase {
    /// Named after its peer.
    pub(crate) fn of(
        peer: Peer,
        measure: impl FnMut(&mut PeerTestbed, &Plan, &mut KnownRates) -> Result<Vec<Option<f64>>> + 'static,
    ) -> Self {
        let spec = TestbedSpec::of(peer);
        Self { name: spec.peer_name().to_owned(), spec, measure: Box::new(measure) }
    }

    pub(crate) fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    pub(crate) fn with_other_node(self) -> Self {
        let name = format!("{}, to another node", self.name);
        self.with(TestbedSpec::other_node).named(name)
    }

    pub(crate) fn with(self, change: impl FnOnce(TestbedSpec) -> TestbedSpec) -> Self {
        Self { spec: change(self.spec), ..self }
    }
}

impl Scenario {
    pub(crate) fn empty_result(&self) -> ScenarioResult {
        let cases = self.cases.iter().map(|case| CaseResult { name: case.name.clone(), ..CaseResult::default() });
        let Self { name, title, about, metrics, .. } = *self;
        ScenarioResult { name, title, about, metrics, cases: cases.collect(), took: Duration::ZERO }
    }
}

/// All scenarios, in the order in which they run.
pub(crate) fn all() -> Vec<Scenario> {
    vec![
        throughput::one_connection(),
        throughput::policies(),
        throughput::lengths(),
        throughput::connections(),
        throughput::pods(),
        tcp::new_udp(),
        tcp::connections(),
        tcp::bulk(),
        transactions::transactions(),
        services::services(),
        latency::no_drop_rates(),
        latency::round_trip(),
        latency::first_packet(),
        handshakes::first_handshakes(),
        disturbances::updates(),
        disturbances::swap(),
        disturbances::flood(),
        disturbances::neighbours_flood(),
        disturbances::ack_flood(),
        disturbances::policy_churn(),
        start::start(),
        captures::captures(),
        io::matrix(),
    ]
}

//! How long a daemon takes until it serves a full node.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

/// The kubelet's default.
const PODS: usize = 110;
/// Threads that only compute.
const BUSY: usize = 8;

const METRICS: &[Metric] = &[Metric::lower("ready", "s", 2)];

pub(crate) fn start() -> Scenario {
    let case = |busy: usize| {
        let measure = move |testbed: &mut PeerTestbed, _: &Plan, _: &mut KnownRates| {
            let ready = beside_busy_threads(busy, || testbed.restart())?;
            Ok(vec![Some(ready.as_secs_f64())])
        };
        let case = ScenarioCase::of(Peer::penstock_as_shipped(), measure).with(|spec| spec.pods(PODS));
        let name = format!("{}, {busy} busy threads", case.spec.peer_name());
        case.named(name)
    };
    Scenario {
        name: "start",
        title: "From the start of a daemon until it is ready, with 110 pods",
        about: "A daemon of a node with 110 pods and 100 policies is ended and started again: the time until it says that it is ready. In half \
                of the cases eight threads compute meanwhile, wherever the scheduler puts them, on two cores.",
        metrics: METRICS,
        cases: [0, BUSY].map(case).into(),
    }
}

fn beside_busy_threads<T>(number: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..number {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        result
    })
}

//! How long a change of policy takes while pods come and go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use penstock_bench::peers::{ChurnOf, Lane, Peer, churn, times_until_in_force};

use super::{Case, Known, Scenario};
use crate::Plan;
use crate::results::Metric;

/// Pods created, and as many deleted, each second.
const PODS: f64 = 50.0;
/// Changes per repetition: enough that the 99th percentile is not the maximum.
const CHANGES: usize = 150;

const METRICS: &[Metric] =
    &[Metric::lower("p99", "ms", 2), Metric::lower("median", "ms", 2), Metric::higher("pods", "a second", 1)];

pub(crate) fn policy() -> Scenario {
    let case = |name: &str, a_second: f64| Case::of(Peer::penstock(), measured(a_second)).named(name);
    Scenario {
        name: "policy-churn",
        title: "From saving a policy to the first packet that it allows, while pods come and go",
        about: "A policy that opens a port to a pod is saved and taken back by turns, 150 times a repetition; a packet each \
                0.2 ms tells when it is in force. Beside it 50 pods come and go each second: an interface, a route and a \
                manifest each.",
        metrics: METRICS,
        cases: vec![case("Penstock, at rest", 0.0), case("Penstock, 50 pods a second", PODS)],
    }
}

fn measured(a_second: f64) -> impl FnMut(&mut Lane, &Plan, &mut Known) -> Result<Vec<Option<f64>>> {
    move |lane, _, _| {
        lane.with_peer(|lane| {
            let (ends, pods) = (AtomicBool::new(false), ChurnOf::new(lane));
            let began = Instant::now();
            let (times, made) = std::thread::scope(|scope| {
                let ends = &ends;
                let churning = (a_second > 0.0).then(|| scope.spawn(move || churn(&pods, a_second, ends)));
                let times = times_until_in_force(lane, CHANGES);
                ends.store(true, Ordering::Relaxed);
                let made = churning.map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                (times, made.transpose())
            });
            let (mut times, rate) = (times?, f64::from(made?.unwrap_or(0)) / began.elapsed().as_secs_f64());
            ensure!(
                rate >= 0.8 * a_second,
                "{rate:.0} pods a second came instead of {a_second}: the machine is too busy"
            );
            times.sort();
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
            Ok(vec![Some(at(0.99)), Some(at(0.5)), Some(rate)])
        })
    }
}

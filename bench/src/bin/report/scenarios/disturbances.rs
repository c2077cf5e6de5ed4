//! Effects of policy changes and floods on other traffic, and of pod churn on policy changes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use penstock_bench::load::{
    FloodPackets, FloodSources, Generator, PORTS, ProbeMode, Traffic, Trial, TrialResult, connections_at, pin,
};
use penstock_bench::peers::{
    ClusterSize, ManifestReloader, Peer, PeerTestbed, PodChurn, StatusReader, churn, manifests, times_until_in_force,
};
use penstock_bench::testbed::Pod;

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

/// Packets a second of the measured traffic.
const RATE: f64 = 100e3;
/// Probes a second, which also measure the longest gap.
const PROBES: f64 = 10e3;

const METRICS: &[Metric] = &[
    Metric::lower("lost", "packets", 0),
    Metric::lower("longest gap", "ms", 2),
    Metric::lower("p99", "µs", 1),
    Metric::higher("changes", "", 0),
    Metric::higher("load", "k packets/s", 0),
];

fn figures(outcome: &TrialResult, changes: f64) -> Vec<Option<f64>> {
    vec![
        Some((outcome.lost() + outcome.probes.lost()) as f64),
        Some(outcome.probes.longest_gap.as_secs_f64() * 1e3),
        Some(outcome.probes.round_trip.value_at_quantile(0.99) as f64 / 1e3),
        Some(changes),
        Some(outcome.offered_rate() / 1e3),
    ]
}

fn steady(length: Duration) -> Trial {
    Trial { probing: ProbeMode::RoundTrip(PROBES), ..Trial::paced(Traffic::SMALLEST, RATE, length) }
}

/// Changes the policies `a_second` times a second until the trial ends; returns how often.
fn change(reload: &ManifestReloader, size: ClusterSize, a_second: f64, ends: &AtomicBool) -> Result<f64> {
    often(a_second, ends, |turn| reload.save(&manifests(size, turn)))
}

/// Does this `a_second` times a second until the end, with a number that counts from 1; returns how often.
pub(super) fn often(a_second: f64, ends: &AtomicBool, mut work: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let (start, mut times) = (Instant::now(), 0);
    while !ends.load(Ordering::Relaxed) {
        let due = start + Duration::from_secs_f64(times as f64 / a_second);
        // In parts, so that it ends soon.
        let wait = due.saturating_duration_since(Instant::now()).min(Duration::from_millis(10));
        if !wait.is_zero() {
            std::thread::sleep(wait);
            continue;
        }
        times += 1;
        work(times)?;
    }
    Ok(times as f64)
}

pub(crate) fn updates() -> Scenario {
    let case = |peer: fn() -> Peer, a_second: f64| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let trial = steady((plan.length * 2).max(Duration::from_millis(300)));
            let (reload, size) = (testbed.reload(), testbed.size());
            let (outcome, changes) = match a_second {
                0.0 => (testbed.run(&trial)?, 0.0),
                _ => testbed.run_beside(&trial, move |ends| change(&reload, size, a_second, ends))?,
            };
            Ok(figures(&outcome, changes))
        };
        let case = ScenarioCase::of(peer(), measure);
        let name = format!("{}, {a_second} a second", case.spec.peer_name());
        case.named(name)
    };
    let peers: [fn() -> Peer; 2] = [Peer::penstock, || Peer::Nftables];
    Scenario {
        name: "updates",
        title: "Policy changes during traffic",
        about: "100 k packets a second on one connection and 10 k probes a second; meanwhile 98 of 100 policies change at \
                once, 10 and 100 times a second: for Penstock by saving the manifests, for nftables by loading what is \
                rendered of them. The work of changing competes for the forwarding core. A peer may not get through as many.",
        metrics: METRICS,
        cases: peers.into_iter().flat_map(|peer| [0.0, 10.0, 100.0].map(|a_second| case(peer, a_second))).collect(),
    }
}

pub(crate) fn swap() -> Scenario {
    let case = |peer: Peer| {
        let mut turn = 0;
        let measure = move |testbed: &mut PeerTestbed, _: &Plan, _: &mut KnownRates| {
            let (reload, status) = (testbed.reload(), testbed.status_reader());
            let rules = [0, 1].map(|turn| manifests(testbed.size(), turn));
            let swapping = |ends: &AtomicBool| swap_again_and_again(&reload, &status, (&rules, &mut turn), ends);
            let (outcome, swaps) = testbed.run_beside(&steady(SWAPS), swapping)?;
            // A swap after the traffic would lose nothing, either.
            ensure!(swaps >= 1.0, "the new rules were not in effect when the traffic ended");
            Ok(figures(&outcome, swaps))
        };
        ScenarioCase::of(peer, measure).with(|spec| spec.policies(10_000))
    };
    Scenario {
        name: "swap",
        title: "10,000 rules are replaced at once during traffic",
        about: "100 k packets a second on one connection and 10 k probes a second for six seconds; meanwhile 9,998 of 10,000 \
                policies that select the receiver get another port, again and again, each time once the last change is in effect. \
                \"changes\" are the swaps of a repetition. nftables loads the ruleset rendered of them.",
        metrics: METRICS,
        cases: [Peer::penstock(), Peer::Nftables, Peer::penstock_by_tcx(true)].map(case).into(),
    }
}

/// Saves one of two rulesets by turns, each once the other is in effect; returns how many were in effect by the end. `turn` counts
/// what was saved so far.
fn swap_again_and_again(
    reload: &ManifestReloader,
    status: &StatusReader,
    (rules, turn): (&[String; 2], &mut usize),
    ends: &AtomicBool,
) -> Result<f64> {
    // Let the traffic start first.
    std::thread::sleep(Duration::from_millis(200));
    let mut swaps = 0.0;
    while !ends.load(Ordering::Relaxed) {
        let before = status.epoch()?;
        *turn += 1;
        reload.save(&rules[*turn % 2])?;
        // nftables has loaded it by now.
        while before.is_some() && status.epoch()? == before && !ends.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !ends.load(Ordering::Relaxed) {
            swaps += 1.0;
        }
    }
    Ok(swaps)
}

/// Long enough to contain several swaps.
const SWAPS: Duration = Duration::from_secs(6);

pub(crate) fn flood() -> Scenario {
    let case = |peer: fn() -> Peer, syns: f64| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let trial = Trial { syns, ..steady(plan.length * 2) };
            let outcome = testbed.run(&trial)?;
            Ok(figures(&outcome, syns * outcome.time.as_secs_f64()))
        };
        let case = ScenarioCase::of(peer(), measure);
        let name = format!("{}, {:.0} k SYNs a second", case.spec.peer_name(), syns / 1e3);
        case.named(name)
    };
    let peers: [fn() -> Peer; 2] = [Peer::penstock, || Peer::Nftables];
    Scenario {
        name: "syn-flood",
        title: "A SYN flood beside good traffic",
        about: "100 k packets a second on one connection and 10 k probes a second; beside them the same pod sends SYNs from ports \
                at random to an allowed port at which nobody listens. \"changes\" are the SYNs sent.",
        metrics: METRICS,
        cases: peers.into_iter().flat_map(|peer| [0.0, 50e3].map(|syns| case(peer, syns))).collect(),
    }
}

/// Packets a second of a pod's flood.
const NEIGHBOURS_FLOOD: f64 = 100e3;

const FIRST_PACKETS: &[Metric] = &[
    Metric::lower("p99", "µs", 1),
    Metric::lower("p50", "µs", 1),
    Metric::lower("lost", "packets", 0),
    Metric::higher("flood", "k packets/s", 0),
];

pub(crate) fn neighbours_flood() -> Scenario {
    let case = |peer: fn() -> Peer, rate: f64| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let length = (plan.length * 2).max(Duration::from_millis(500));
            let mut trial = Trial::paced(Traffic::SMALLEST, 1000.0, length);
            trial.probing = ProbeMode::FirstPacket(OTHERS_OPEN);
            let to = (v4(testbed.pod(1)?)?, PORTS.start + 9);
            let (mut flood, pod) = testbed.flood_from_pod(2, FloodPackets::Syn, to)?;
            let generator = pod.run(|| Generator::open("eth0"))?;
            let began = Instant::now();
            let flooding = move |ends: &AtomicBool| if rate > 0.0 { flood.run(&generator, rate, ends) } else { Ok(0) };
            let (outcome, sent) = testbed.run_beside(&trial, flooding)?;
            let sent = sent as f64 / began.elapsed().as_secs_f64();
            let probes = &outcome.probes;
            ensure!(probes.arrived > 10, "of {} first packets {} arrived", probes.sent, probes.arrived);
            let at = |share| Some(probes.one_way.value_at_quantile(share) as f64 / 1e3);
            Ok(vec![at(0.99), at(0.5), Some(probes.lost() as f64), Some(sent / 1e3)])
        };
        let case = ScenarioCase::of(peer(), measure).with(|spec| spec.pods(3));
        let name = format!("{}, {:.0} k SYNs a second", case.spec.peer_name(), rate / 1e3);
        case.named(name)
    };
    let peers: [fn() -> Peer; 3] = [Peer::penstock, Peer::penstock_by_tcx_with_one_worker, || Peer::Nftables];
    Scenario {
        name: "neighbours-flood",
        title: "First packets of a pod's connections while another pod floods",
        about: "A pod opens 1,000 connections a second; what their first packets take one way. Beside it, on the other core, \
                another pod of the node sends 100 k SYNs a second, each of a connection of its own, to an allowed port \
                at which nobody listens. All of Penstock's cases have one worker, on the flood's core, by tcx with the settings of \
                one that shares its core, as by default: both pods' first packets \
                wait in the same queue.",
        metrics: FIRST_PACKETS,
        cases: peers.into_iter().flat_map(|peer| [0.0, NEIGHBOURS_FLOOD].map(|rate| case(peer, rate))).collect(),
    }
}

/// Connections that the other pod opens a second.
const OTHERS_OPEN: f64 = 1000.0;

/// Packets a second of a flood from outside.
const FLOOD: f64 = 100e3;
const OPENED: f64 = 200.0;

const SHARES: &[Metric] = &[
    Metric::higher("share", "", 4),
    Metric::higher("without a flood", "", 4),
    Metric::higher("flood", "k packets/s", 0),
];

pub(crate) fn ack_flood() -> Scenario {
    let measure = |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
        let length = (plan.length * 2).max(Duration::from_millis(500));
        let address = v4(testbed.pod(0)?)?;
        let to = (address, PORTS.start);
        let (mut flood, machine) = testbed.flood_from_outside(FloodPackets::Ack, FloodSources::Spoofed, to)?;
        let generator = machine.run(|| Generator::open("eth0"))?;
        let pod_0 = testbed.pod(0)?.namespace();
        let open = || -> Result<f64> {
            let (tried, opened) =
                connections_at(&machine, pod_0, SocketAddr::new(address.into(), PORTS.start + 9), OPENED, length)?;
            Ok(opened as f64 / tried.max(1) as f64)
        };
        let without = open()?;
        ensure!(without > 0.0, "no connection opens without a flood");
        let (ends, core) = (AtomicBool::new(false), plan.cores.generator);
        let start = Instant::now();
        let (during, sent) = std::thread::scope(|scope| {
            let flooding = scope.spawn(|| {
                pin(core)?;
                flood.run(&generator, FLOOD, &ends)
            });
            // Connections are opened once the flood has filled the pod's quota.
            std::thread::sleep(FILLED);
            let during = open();
            ends.store(true, Ordering::Relaxed);
            let sent = flooding.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            anyhow::Ok((during?, sent?))
        })?;
        let rate = sent as f64 / start.elapsed().as_secs_f64();
        Ok(vec![Some(during / without), Some(without), Some(rate / 1e3)])
    };
    let small = Peer::Penstock { enforces: true, sections: "conntrack entries = 65536\n".to_owned() };
    Scenario {
        name: "ack-flood",
        title: "An ACK flood from outside beside new connections",
        about: "A machine outside opens 200 connections a second to a pod; then again while it floods the same pod with 100 k \
                bare ACKs a second from made-up addresses. Only what opens at its first SYN counts. The connection table is a \
                16th of the default, so that the flood has filled the pod's quota before the first of them.",
        metrics: SHARES,
        cases: vec![ScenarioCase::of(small, measure)],
    }
}

fn v4(pod: &Pod) -> Result<Ipv4Addr> {
    match pod.address(false) {
        Some(IpAddr::V4(address)) => Ok(address),
        _ => bail!("pod {} has no IPv4 address", pod.name()),
    }
}

/// Twice the time that the flood takes to fill a quota of 16,384.
const FILLED: Duration = Duration::from_millis(350);

/// Pods created, and as many deleted, each second.
const PODS_A_SECOND: f64 = 50.0;
/// Changes per repetition: enough that the 99th percentile is not the maximum.
const CHANGES: usize = 150;
/// The same where the medians decide.
const CUTS: usize = 60;

const CHURN_METRICS: &[Metric] = &[
    Metric::lower("p99", "ms", 2),
    Metric::lower("median", "ms", 2),
    Metric::lower("cut, p99", "ms", 2),
    Metric::lower("cut, median", "ms", 2),
    Metric::higher("pods", "a second", 1),
];

pub(crate) fn policy_churn() -> Scenario {
    let case = |name: &str, peer: Peer, changes: usize, a_second: f64| {
        ScenarioCase::of(peer, change_times(changes, a_second)).named(name)
    };
    Scenario {
        name: "policy-churn",
        title: "From saving a policy to the first packet that it allows, and to the last one that it does not",
        about: "A policy that opens a port to a pod is saved and taken back by turns, 150 times a repetition, by tcx 60 times; a packet \
                each 0.2 ms of one UDP connection tells when it is in effect. \"Cut\" is the time from taking it back to the last packet \
                that still arrives; by tcx the kernel forwards these packets, without a worker. Beside it 50 pods come and go \
                each second: an interface, a route and a manifest each.",
        metrics: CHURN_METRICS,
        cases: vec![
            case("Penstock, at rest", Peer::penstock(), CHANGES, 0.0),
            case("Penstock, 50 pods a second", Peer::penstock(), CHANGES, PODS_A_SECOND),
            case("Penstock, tcx, at rest", Peer::penstock_by_tcx(true), CUTS, 0.0),
        ],
    }
}

fn change_times(
    changes: usize,
    a_second: f64,
) -> impl FnMut(&mut PeerTestbed, &Plan, &mut KnownRates) -> Result<Vec<Option<f64>>> {
    move |testbed, _, _| {
        testbed.with_peer(|testbed| {
            let (ends, pods) = (AtomicBool::new(false), PodChurn::new(testbed));
            let began = Instant::now();
            let (times, made) = std::thread::scope(|scope| {
                let ends = &ends;
                let churning = (a_second > 0.0).then(|| scope.spawn(move || churn(&pods, a_second, ends)));
                let times = times_until_in_force(testbed, changes);
                ends.store(true, Ordering::Relaxed);
                let made = churning.map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                (times, made.transpose())
            });
            let (times, rate) = (times?, f64::from(made?.unwrap_or(0)) / began.elapsed().as_secs_f64());
            ensure!(
                rate >= 0.8 * a_second,
                "{rate:.0} pods a second came instead of {a_second}: the machine is too busy"
            );
            let [opened, closed] = [times.opened, times.closed].map(|mut times| {
                times.sort();
                [0.99, 0.5].map(|share| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3)
            });
            Ok([opened[0], opened[1], closed[0], closed[1], rate].map(Some).into())
        })
    }
}

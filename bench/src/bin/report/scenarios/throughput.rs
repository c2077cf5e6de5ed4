//! Throughput in packets a second, flat out.

use anyhow::{Result, ensure};
use penstock_bench::load::{FrameLengths, Traffic, Trial, TrialResult, of_length};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;
use crate::testbeds::{FULL_TABLE, TestbedSpec};

const METRICS: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::higher("offered", "k packets/s", 0),
    Metric::lower("generator core", "ns/packet", 0),
    Metric::lower("forwarding core", "ns/packet", 0),
];

fn figures(outcome: &TrialResult, plan: &Plan) -> Result<Vec<Option<f64>>> {
    ensure!(outcome.corrupted == 0, "{} packets arrived with a wrong checksum", outcome.corrupted);
    ensure!(outcome.received > 0, "nothing arrived");
    Ok(vec![
        Some(outcome.rate() / 1e3),
        Some(outcome.offered_rate() / 1e3),
        outcome.busy_nanoseconds(plan.cores.generator),
        outcome.busy_nanoseconds(plan.cores.worker),
    ])
}

fn flat_out(
    traffic: Traffic,
) -> impl FnMut(&mut PeerTestbed, &Plan, &mut KnownRates) -> Result<Vec<Option<f64>>> + 'static {
    move |testbed, plan, _| figures(&testbed.run(&Trial::flat_out(traffic, plan.length))?, plan)
}

/// With the kernel's work on the worker's core, as far as it can be moved.
fn steered(
    traffic: Traffic,
) -> impl FnMut(&mut PeerTestbed, &Plan, &mut KnownRates) -> Result<Vec<Option<f64>>> + 'static {
    move |testbed, plan, _| {
        testbed.steer(true)?;
        let outcome = testbed.run(&Trial::flat_out(traffic, plan.length));
        testbed.steer(false)?;
        figures(&outcome?, plan)
    }
}

pub(crate) fn one_connection() -> Scenario {
    let traffic = Traffic::SMALLEST;
    let plain = |peer| ScenarioCase::of(peer, flat_out(traffic));
    let linear = |rules: usize| {
        plain(Peer::Linear).with(|spec| spec.policies(rules)).named(format!("nftables, {rules} linear rules"))
    };
    Scenario {
        name: "pps",
        title: "One UDP connection, 64 bytes, flat out",
        about: "The generator has one core. Kernel peers do their work on it too, as on a node, since the sender's \
                system call carries a packet to the receiver's socket; with RPS the kernel moves its part to the second core, \
                which Penstock's worker has in its own cases. Open vSwitch and testpmd poll on that core. The core times \
                tell what a packet costs either way. \"Redirect alone\" joins the two pods, or a pod and the other node, by a program that looks nothing up: \
                what a forwarder by tcx can reach at most.",
        metrics: METRICS,
        cases: vec![
            plain(Peer::penstock()),
            plain(Peer::penstock()).with(|spec| spec.policies(10_000)).named("Penstock, 10,000 policies"),
            plain(Peer::forward()),
            plain(Peer::penstock_by_tcx(true)),
            plain(Peer::penstock_by_tcx(false)),
            plain(Peer::forward_by_tcx()),
            plain(Peer::Redirect),
            plain(Peer::Kernel),
            ScenarioCase::of(Peer::Kernel, steered(traffic)).named("kernel routing, RPS"),
            plain(Peer::Nftables),
            ScenarioCase::of(Peer::Nftables, steered(traffic)).named("nftables, sets + conntrack, RPS"),
            linear(10),
            linear(100),
            linear(1000),
            plain(Peer::Iptables),
            plain(Peer::Nfqueue),
            plain(Peer::OpenVSwitch),
            plain(Peer::Testpmd),
            plain(Peer::penstock_by_tcx(true)).with_other_node(),
            plain(Peer::Kernel).with_other_node(),
            plain(Peer::Nftables).with_other_node(),
            plain(Peer::Redirect).with_other_node(),
        ],
    }
}

pub(crate) fn policies() -> Scenario {
    let case = |peer: fn() -> Peer, policies: usize| {
        let case = ScenarioCase::of(peer(), flat_out(Traffic { new: 0.1, ..Traffic::SMALLEST }));
        let name = format!("{}, {policies} policies", case.spec.peer_name());
        case.with(|spec| spec.policies(policies)).named(name)
    };
    let penstock = [1, 100, 10_000].map(|policies| case(Peer::penstock, policies));
    let nftables = [1, 100, 10_000].map(|policies| case(|| Peer::Nftables, policies));
    Scenario {
        name: "policies",
        title: "Policies that select the receiver: 1, 100 and 10,000; a tenth of the packets opens a connection",
        about: "Frames of 64 bytes. Policy is asked once a connection; the tenth that opens one makes its cost visible.",
        metrics: METRICS,
        cases: penstock.into_iter().chain(nftables).collect(),
    }
}

/// Peers to compare where all of them would be too many.
fn few() -> [Peer; 5] {
    [Peer::penstock(), Peer::forward(), Peer::Kernel, Peer::Nftables, Peer::OpenVSwitch]
}

pub(crate) fn lengths() -> Scenario {
    let lengths = [FrameLengths::Of(128), FrameLengths::Of(512), FrameLengths::Of(1500), FrameLengths::Imix];
    let cases = lengths.into_iter().flat_map(|lengths| {
        few().into_iter().map(move |peer| {
            let traffic = Traffic { lengths, ..of_length(64) };
            let case = ScenarioCase::of(peer, flat_out(traffic));
            let name = format!("{}: {}", lengths.name(), case.spec.peer_name());
            case.named(name)
        })
    });
    Scenario {
        name: "lengths",
        title: "Longer frames, one UDP connection, flat out",
        about: "Frames of 128, 512 and 1,500 bytes, and the simple Internet mix (7:4:1 of 64, 576 and 1,500).",
        metrics: METRICS,
        cases: cases.collect(),
    }
}

pub(crate) fn connections() -> Scenario {
    let case = |connections: u32, spec: TestbedSpec| {
        let traffic = Traffic { connections, ..Traffic::SMALLEST };
        let open = spec.size.open;
        // Connections that any peer opens in a second.
        let rate = if spec.peer == Peer::OpenVSwitch { 40e3 } else { 300e3 };
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let now = testbed.open_connections()?;
            ensure!(now >= open as usize / 100 * 98, "of {open} connections {now} are still open");
            // Every connection has had its turn before the counted part; of a million, as many as a peer opens in a little more
            // than three seconds.
            let opened = f64::from(connections) / rate;
            let opening = std::time::Duration::from_secs_f64(opened.min(3.3));
            let mut trial = Trial::flat_out(traffic, plan.length);
            trial.warm_up = trial.warm_up.max(opening);
            figures(&testbed.run(&trial)?, plan)
        };
        let name = format!("{connections}: {}", spec.peer_name());
        ScenarioCase::of(spec.peer.clone(), measure).with(|_| spec).named(name)
    };
    let full = |peer| TestbedSpec::with_full_table(peer);
    let in_full_table = || {
        let tracking = [Peer::penstock_by_tcx_with_table(FULL_TABLE), Peer::Nftables].map(full);
        tracking.into_iter().chain([Peer::Redirect, Peer::Kernel].map(TestbedSpec::of))
    };
    let most = [Peer::penstock(), Peer::penstock_by_tcx(true), Peer::Kernel, Peer::Nftables, Peer::OpenVSwitch];
    let few = [Peer::penstock(), Peer::Nftables, Peer::OpenVSwitch];
    let cases = few
        .map(|peer| case(10_000, TestbedSpec::of(peer)))
        .into_iter()
        .chain([1, 10_000, 100_000].into_iter().flat_map(|number| in_full_table().map(move |spec| case(number, spec))))
        .chain(most.map(|peer| case(1_000_000, TestbedSpec::of(peer))));
    Scenario {
        name: "connections",
        title: "Many UDP connections, 64 bytes, flat out",
        about: "1 to 1,000,000 connections take turns, packet by packet. Up to 100,000 are open when the measurement begins; of a \
                million, those that the peer has opened in the seconds before. A full table is one of 1,048,576 entries of which \
                92 % are taken, by the measured connections and by others of 13 pods that stay idle; the kernel's conntrack \
                has as many connections then, in room for 4 million, as every other peer has.",
        metrics: METRICS,
        cases: cases.collect(),
    }
}

/// Peers to compare where connections are opened.
pub(super) const FEW_MORE: [fn() -> Peer; 6] =
    [Peer::penstock, || Peer::Kernel, || Peer::Nftables, || Peer::Iptables, || Peer::Nfqueue, || Peer::OpenVSwitch];

pub(super) fn opening() -> Scenario {
    let case = |peer: fn() -> Peer| ScenarioCase::of(peer(), flat_out(Traffic { new: 1.0, ..Traffic::SMALLEST }));
    Scenario {
        name: "udp-connections",
        title: "New UDP connections: every packet opens one, 64 bytes, flat out",
        about: "One packet each, from ports that were not used before.",
        metrics: METRICS,
        cases: FEW_MORE.map(case).into(),
    }
}

pub(crate) fn pods() -> Scenario {
    let cases = [2, 10, 100].into_iter().flat_map(|pods| {
        [Peer::penstock, || Peer::Kernel, || Peer::Nftables].into_iter().map(move |peer: fn() -> Peer| {
            let case = ScenarioCase::of(peer(), flat_out(Traffic::SMALLEST)).with(|spec| spec.pods(pods));
            let name = format!("{pods} pods: {}", case.spec.peer_name());
            case.named(name)
        })
    });
    Scenario {
        name: "pods",
        title: "2, 10 and 100 pods on the node, one UDP connection between two of them",
        about: "All others are idle, as most pods are: what do they cost who sends? Frames of 64 bytes, flat out.",
        metrics: METRICS,
        cases: cases.collect(),
    }
}

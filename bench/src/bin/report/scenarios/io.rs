//! Settings of receiving and sending, and the effect of each.

use anyhow::{Result, bail, ensure};
use penstock_bench::load::{Traffic, Trial};
use penstock_bench::peers::{Peer, PeerTestbed};
use penstock_bench::testbed::{Namespace, Offload, Pod};

use super::tcp::{LARGEST, streams};
use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;
use crate::testbeds::MTU;

const IO: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::lower("forwarding core", "ns/packet", 0),
    Metric::lower("forwarding core at 50 k packets/s", "%", 0),
    Metric::higher("bulk TCP, one stream", "Gb/s", 2),
];

#[derive(Clone, Copy)]
struct IoVariant {
    name: &'static str,
    /// Daemon settings, one per line, each prefixed with its section.
    sections: &'static str,
    mtu: u32,
    offloads: VethOffloads,
}

/// Offload settings of the pods' veths.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VethOffloads {
    /// As created.
    Default,
    /// The pods' stacks coalesce received segments (GRO). On a veth this requires that the other end has no TSO
    /// (`veth_skb_is_eligible_for_gro` in drivers/net/veth.c).
    Gro,
    /// The same in a separate NAPI thread.
    ThreadedGro,
}

impl VethOffloads {
    /// Applies or reverts these settings on the first two pods.
    fn set(self, testbed: &PeerTestbed, so: bool) -> Result<()> {
        let node = testbed.node().namespace();
        [testbed.pod(0)?, testbed.pod(1)?].into_iter().try_for_each(|pod| self.set_pod(node, pod, so))
    }

    fn set_pod(self, node: &Namespace, pod: &Pod, so: bool) -> Result<()> {
        let namespace = pod.namespace();
        match self {
            Self::Default => Ok(()),
            Self::Gro => {
                node.set_offload(pod.interface(), Offload::Tso, !so)?;
                namespace.set_offload("eth0", Offload::Gro, so)
            }
            // The pods' ends have NAPI only while GRO is on.
            Self::ThreadedGro if so => {
                Self::Gro.set_pod(node, pod, true)?;
                namespace.set_threaded_napi("eth0", true)
            }
            Self::ThreadedGro => {
                namespace.set_threaded_napi("eth0", false)?;
                Self::Gro.set_pod(node, pod, false)
            }
        }
    }
}

const fn by_settings(name: &'static str, sections: &'static str) -> IoVariant {
    IoVariant { name, sections, mtu: MTU, offloads: VethOffloads::Default }
}

const VARIANTS: [IoVariant; 6] = [
    by_settings("defaults", ""),
    by_settings("frame_size = 4096", "umem frame_size = 4096\n"),
    by_settings("with free huge pages", "huge pages\n"),
    IoVariant {
        mtu: LARGEST,
        ..by_settings("largest single frame: MTU 3,506, frame_size = 4096", "umem frame_size = 4096\n")
    },
    IoVariant { offloads: VethOffloads::Gro, ..by_settings("gro of the pods on, tso of the node's ends off", "") },
    IoVariant { offloads: VethOffloads::ThreadedGro, ..by_settings("the same, threaded NAPI on the pods' side", "") },
];

/// Variants that cannot be measured, and why.
const MISSING: [(&str, &str); 2] = [
    (
        "busy-polling sockets (SO_PREFER_BUSY_POLL)",
        "on a veth there is nothing that a socket could poll. Linux 6.18 takes the options, but a socket learns when it is bound \
         which NAPI its queue has (xsk_bind in net/xdp/xsk.c), from a driver that says so (netif_queue_set_napi); veth's does \
         not, SO_INCOMING_NAPI_ID stays 0 also after packets came, and sk_busy_loop returns at once. So there is no such setting",
    ),
    (
        "checksums by transmit metadata (XDP_TXMD_FLAGS_CHECKSUM)",
        "the kernel is told tx_metadata_len when the UMEM is registered; libxdp 1.6 does that, knows no such field, and xsk-rs 0.11 \
         has no other way. Tried with the field put into that system call from outside: of some 6,600 clocks that a segment of 1,500 \
         bytes costs the worker, 350 are saved, and bulk TCP is no faster (2.30 Gb/s, the median of eleven runs, with and without)",
    ),
];

fn measure(testbed: &mut PeerTestbed, plan: &Plan) -> Result<Vec<Option<f64>>> {
    let trial = Trial::flat_out(Traffic::SMALLEST, plan.length);
    let outcome = testbed.run(&trial)?;
    ensure!(outcome.received > 0, "nothing arrived");
    let light = testbed.run(&Trial::paced(Traffic::SMALLEST, 50e3, plan.length / 2))?;
    let busy = light.busy.get(plan.cores.worker).map(|busy| busy.as_secs_f64() / light.time.as_secs_f64() * 100.0);
    let bulk = testbed.with_peer(|testbed| streams(testbed, 2, 1, plan.length))?;
    let core = outcome.busy_nanoseconds(plan.cores.worker);
    Ok(vec![Some(outcome.rate() / 1e3), core, busy, Some(bulk)])
}

pub(crate) fn matrix() -> Scenario {
    let case = |variant: IoVariant| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let measured = variant.offloads.set(testbed, true).and_then(|()| measure(testbed, plan));
            variant.offloads.set(testbed, false).and(measured)
        };
        let peer = Peer::Penstock { enforces: true, sections: variant.sections.to_owned() };
        ScenarioCase::of(peer, measure).with(|spec| spec.mtu(variant.mtu)).named(variant.name)
    };
    let missing = |(name, why): (&str, &'static str)| {
        ScenarioCase::of(Peer::penstock(), move |_: &mut PeerTestbed, _: &Plan, _: &mut KnownRates| bail!(why))
            .named(name)
    };
    Scenario {
        name: "io",
        title: "Ways of receiving and sending",
        about: "One thing at a time, all else as it is by default: MTU 1,500, frames of 2,048 bytes, rings of 1,024 \
                which one system call sends whole, no huge pages free. One UDP connection, 64 bytes, flat out; what of the core is \
                taken at 50 k packets a second; and bulk TCP.",
        metrics: IO,
        cases: VARIANTS.map(case).into_iter().chain(MISSING.map(missing)).collect(),
    }
}

//! Settings of receiving and sending, and the effect of each.

use anyhow::{Result, bail, ensure};
use penstock_bench::load::{Traffic, Trial};
use penstock_bench::peers::{Lane, Peer};
use penstock_bench::testbed::{Namespace, Offload, Pod};

use super::tcp::{LARGEST, streams};
use super::{Case, Known, Scenario, inside};
use crate::Plan;
use crate::lanes::MTU;
use crate::results::Metric;

const IO: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::lower("outside system calls", "clocks/packet", 0),
    Metric::lower("send", "clocks/packet", 0),
    Metric::lower("forwarding core", "ns/packet", 0),
    Metric::lower("forwarding core at 50 k packets/s", "%", 0),
    Metric::higher("bulk TCP, one stream", "Gb/s", 2),
];

/// A variant of the default settings.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Daemon settings, one per line, each prefixed with its section.
    sections: &'static str,
    mtu: u32,
    ends: Ends,
}

/// Offload settings of the pods' veths.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// As created.
    AsMade,
    /// The pods' stacks segment what they send.
    Cut,
    /// The pods' stacks coalesce received segments (GRO). On a veth this requires that the other end has no TSO
    /// (`veth_skb_is_eligible_for_gro` in drivers/net/veth.c).
    Join,
    /// The same in a separate NAPI thread.
    JoinInThread,
}

impl Ends {
    /// Applies or reverts these settings on the first two pods.
    fn set(self, lane: &Lane, so: bool) -> Result<()> {
        let node = lane.node().namespace();
        [lane.pod(0)?, lane.pod(1)?].into_iter().try_for_each(|pod| self.set_pod(node, pod, so))
    }

    fn set_pod(self, node: &Namespace, pod: &Pod, so: bool) -> Result<()> {
        let inside = pod.namespace();
        match self {
            Self::AsMade => Ok(()),
            Self::Cut => {
                inside.set_offload("eth0", Offload::Tso, !so)?;
                inside.set_offload("eth0", Offload::Gso, !so)
            }
            Self::Join => {
                node.set_offload(pod.interface(), Offload::Tso, !so)?;
                inside.set_offload("eth0", Offload::Gro, so)
            }
            // The pods' ends have NAPI only while GRO is on.
            Self::JoinInThread if so => {
                Self::Join.set_pod(node, pod, true)?;
                inside.set_threaded_napi("eth0", true)
            }
            Self::JoinInThread => {
                inside.set_threaded_napi("eth0", false)?;
                Self::Join.set_pod(node, pod, false)
            }
        }
    }
}

const fn by_settings(name: &'static str, sections: &'static str) -> Way {
    Way { name, sections, mtu: MTU, ends: Ends::AsMade }
}

const WAYS: [Way; 14] = [
    by_settings("defaults", ""),
    by_settings("polling = busy", "workers polling = \"busy\"\n"),
    by_settings("spin = 0", "workers spin = \"0us\"\n"),
    by_settings("send_budget = 32", "workers send_budget = 32\n"),
    by_settings("gso = false", "workers gso = false\n"),
    by_settings("ring_size = 256", "umem ring_size = 256\n"),
    by_settings("ring_size = 4096", "umem ring_size = 4096\n"),
    by_settings("frame_size = 4096", "umem frame_size = 4096\n"),
    by_settings("huge_pages = auto, with free ones", "umem huge_pages = \"auto\"\n"),
    by_settings("time_stages = false", "workers time_stages = false\n"),
    Way { ends: Ends::Cut, ..by_settings("generic XDP, tso and gso of the pods off", "xdp mode = \"generic\"\n") },
    Way {
        mtu: LARGEST,
        ..by_settings("largest single frame: MTU 3,506, frame_size = 4096", "umem frame_size = 4096\n")
    },
    Way { ends: Ends::Join, ..by_settings("gro of the pods on, tso of the node's ends off", "") },
    Way { ends: Ends::JoinInThread, ..by_settings("the same, threaded NAPI on the pods' side", "") },
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
         octets costs the worker, 350 are saved, and bulk TCP is no faster (2.30 Gb/s, the median of eleven runs, with and without)",
    ),
];

fn measure(way: Way, lane: &mut Lane, plan: &Plan) -> Result<Vec<Option<f64>>> {
    let trial = Trial::flat_out(Traffic::SMALLEST, plan.length);
    let (clocks, outcome) = match way.sections.contains("time_stages") {
        true => (None, lane.run(&trial)?),
        false => inside::clocks(lane, &trial).map(|(clocks, outcome)| (Some(clocks), outcome))?,
    };
    ensure!(outcome.received > 0, "nothing arrived");
    let light = lane.run(&Trial::paced(Traffic::SMALLEST, 50e3, plan.length / 2))?;
    let busy = light.busy.get(plan.cores.worker).map(|busy| busy.as_secs_f64() / light.time.as_secs_f64() * 100.0);
    let bulk = lane.with_peer(|lane| streams(lane, 2, 1, plan.length))?;
    let core = outcome.busy_nanoseconds(plan.cores.worker);
    let (outside, send) = (clocks.as_ref().map(inside::Clocks::outside), clocks.as_ref().map(inside::Clocks::send));
    Ok(vec![Some(outcome.rate() / 1e3), outside, send, core, busy, Some(bulk)])
}

pub(crate) fn matrix() -> Scenario {
    let case = |way: Way| {
        let measure = move |lane: &mut Lane, plan: &Plan, _: &mut Known| {
            let measured = way.ends.set(lane, true).and_then(|()| measure(way, lane, plan));
            way.ends.set(lane, false).and(measured)
        };
        let peer = Peer::Penstock { enforces: true, sections: way.sections.to_owned() };
        Case::of(peer, measure).with(|spec| spec.mtu(way.mtu)).named(way.name)
    };
    let missing = |(name, why): (&str, &'static str)| {
        Case::of(Peer::penstock(), move |_: &mut Lane, _: &Plan, _: &mut Known| bail!(why)).named(name)
    };
    Scenario {
        name: "io",
        title: "Ways of receiving and sending",
        about: "One thing at a time, all else as it is by default: native XDP, MTU 1,500, frames of 2,048 octets, rings of 1,024 \
                which one system call sends whole, no huge pages free. One UDP connection, 64 octets, flat out; what of the core is \
                taken at 50 k packets a second; and bulk TCP.",
        metrics: IO,
        cases: WAYS.map(case).into_iter().chain(MISSING.map(missing)).collect(),
    }
}

//! Proves what learnt policies do: to the flows they were learnt from, to others, and to everything else.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher;
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::Direction;
use siphasher::sip::SipHasher13;

use crate::engine::Engine;
use crate::flow::ANY_SOURCE_PORT;
use crate::model::Pod;
use crate::render::services::protocol;
use crate::state::{ClusterState, PodOrNode};

use super::LearnableFlow;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeniedFlow {
    /// Its index among the flows that were asked about.
    pub index: usize,
    /// The flow that is denied: the observed one, or that to one backend.
    pub flow: Flow,
    /// The side that denies it; egress if both do.
    pub direction: Direction,
}

/// The flows that an engine denies, in order, each once.
pub fn denied<'a>(engine: &Engine, flows: impl IntoIterator<Item = &'a LearnableFlow>) -> Vec<DeniedFlow> {
    let first = |(index, learnable): (usize, &LearnableFlow)| {
        learnable.judged().find_map(|flow| {
            let verdict = engine.evaluate(flow);
            let direction = match (verdict.egress.is_allowed(), verdict.ingress.is_allowed()) {
                (true, true) => return None,
                (false, _) => Direction::Egress,
                (true, false) => Direction::Ingress,
            };
            Some(DeniedFlow { index, flow: *flow, direction })
        })
    };
    flows.into_iter().enumerate().filter_map(first).collect()
}

/// Splits flows in those to learn from and those to hold out: about this share of them, from 0 to 1. The same seed holds
/// out the same flows, whatever their order.
pub fn split(flows: &[LearnableFlow], held_out: f64, seed: u64) -> (Vec<&LearnableFlow>, Vec<&LearnableFlow>) {
    let is_held_out = |flow: &&LearnableFlow| {
        let mut hasher = SipHasher13::new_with_keys(seed, 0);
        let Flow { src, dst, protocol, src_port, dst_port } = flow.flow;
        hasher.write_u128(src.bits());
        hasher.write_u128(dst.bits());
        hasher.write_u8(protocol.0);
        hasher.write_u16(src_port);
        hasher.write_u16(dst_port);
        hasher.write_u64(flow.seen.map_or(0, |seen| seen.first));
        // The upper 53 bits, which a float holds, as a number from 0 to 1.
        ((hasher.finish() >> 11) as f64) < held_out * (1u64 << 53) as f64
    };
    let (rest, learnt) = flows.iter().partition(is_held_out);
    (learnt, rest)
}

/// How much is open: between pods, on the ports that the receiving pod names or was seen to serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClosedWays {
    /// Pairs of pods with a port, in one direction each.
    pub pairs: u64,
    /// How many of these had an open port before.
    pub pairs_before: u64,
    /// And now.
    pub pairs_after: u64,
    /// Ports of all pairs.
    pub ways: u64,
    /// How many of these were open before.
    pub ways_before: u64,
    /// And now.
    pub ways_after: u64,
}

/// Compares what two engines with the same pods leave open.
pub fn closed(before: &Engine, after: &Engine, flows: &[LearnableFlow]) -> ClosedWays {
    let state = after.state();
    let ports = ports(state, flows);
    let mut pods: Vec<&Pod> = state.pods().filter(|(id, _)| state.is_present(*id)).map(|(_, pod)| pod).collect();
    pods.sort_by(|a, b| a.key.cmp(&b.key));
    let mut found = ClosedWays::default();
    for to in &pods {
        let Some(ports) = ports.get(&to.key).filter(|ports| !ports.is_empty()) else { continue };
        for from in pods.iter().filter(|from| from.key != to.key) {
            let Some((src, dst)) = addresses(from, to) else { continue };
            let open = |engine: &Engine| {
                let flow = |(protocol, dst_port): &(Protocol, u16)| {
                    let (protocol, dst_port) = (*protocol, *dst_port);
                    Flow { src: src.into(), dst: dst.into(), protocol, src_port: ANY_SOURCE_PORT, dst_port }
                };
                ports.iter().filter(|port| engine.evaluate(&flow(port)).is_allowed()).count() as u64
            };
            let (was, is) = (open(before), open(after));
            found.pairs += 1;
            found.pairs_before += u64::from(was > 0);
            found.pairs_after += u64::from(is > 0);
            found.ways += ports.len() as u64;
            found.ways_before += was;
            found.ways_after += is;
        }
    }
    found
}

/// The ports that pods name, and those to which flows went.
fn ports<'a>(
    state: &'a ClusterState,
    flows: &[LearnableFlow],
) -> BTreeMap<&'a crate::model::ObjectKey, BTreeSet<(Protocol, u16)>> {
    let mut found: BTreeMap<_, BTreeSet<(Protocol, u16)>> = BTreeMap::new();
    for (_, pod) in state.pods() {
        let named = pod.ports.iter().map(|port| (protocol(port.protocol), port.number));
        found.entry(&pod.key).or_default().extend(named);
    }
    for end in flows.iter().flat_map(|flow| &flow.ends) {
        if let Some(PodOrNode::Pod(pod)) = state.owner(&end.dst.into())
            && let Some(pod) = state.pod(pod)
        {
            found.entry(&pod.key).or_default().insert((end.protocol, end.dst_port));
        }
    }
    found
}

/// The first pair of addresses of one family.
fn addresses(from: &Pod, to: &Pod) -> Option<(IpAddr, IpAddr)> {
    let mut pairs = from.addresses.iter().flat_map(|src| to.addresses.iter().map(move |dst| (*src, *dst)));
    pairs.find(|(src, dst)| src.is_ipv4() == dst.is_ipv4())
}

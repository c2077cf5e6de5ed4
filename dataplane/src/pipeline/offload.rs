//! After the last stage: which connections the kernel's programs may forward from now on by themselves. And before a new
//! snapshot counts for the programs: which connections they may go on to forward.

use std::time::{Duration, Instant};

use super::{AdmittedPacket, BATCH, Verdict, is_longer, names, track};
use crate::Snapshot;
use crate::conntrack::{BY_NODE, ConnTable, ForwardedConnection};
use crate::forward::{Port, PortId, PortKind};
use crate::names::NameTime;
use crate::packet::{Address, AddressScope, Flow, Packet, Protocol, TcpFlags, Transport};
use crate::policy::{AddressEntry, FlowEnds};

/// Counts each packet that is forwarded at its connection, and notes its path, so that the kernel's programs forward the next
/// ones of its direction alike, and of one that opens a connection also the answers. They do so for TCP and UDP in states in which every such packet passes, and decide that for
/// themselves.
pub(super) fn offload(
    connections: &ConnTable,
    snapshot: &Snapshot,
    from: &Port,
    slots: &[AdmittedPacket],
    verdicts: &[Verdict; BATCH],
    longest: u16,
) {
    let (sender, is_from_stack, is_shared) = (from, from.kind == PortKind::Host, connections.is_shared());
    let reads_answers = snapshot.policy.has_names();
    for slot in slots {
        let Verdict::Forward(egress) = verdicts[slot.index] else { continue };
        // From the node's stack and back there: it leaves the node, and has no connection here.
        if is_from_stack && snapshot.forwarding.host() == Some(egress) {
            continue;
        }
        let packet = &slot.packet;
        let may_follow = is_shared
            && packet.fragment.is_none()
            && matches!(packet.transport, Transport::Tcp(_) | Transport::Udp)
            // Workers read the next ones, too.
            && !(reads_answers && is_dns(snapshot, slot));
        let flow = slot.hashed.flow();
        let to = || snapshot.forwarding.port(egress).and_then(|port| end(snapshot, port, &flow.reversed()));
        let path = if may_follow { end(snapshot, sender, &flow).zip(to()) } else { None };
        let flags = match &packet.transport {
            Transport::Tcp(segment) => segment.flags,
            _ => TcpFlags::default(),
        };
        let path = path.map(|ends| (ends, snapshot.epoch));
        let knows_answers = |via_host| {
            let is_shortened = flags.contains(TcpFlags::SYN) && is_longer(snapshot, sender, egress, longest);
            !is_shortened && path.is_some_and(|(ends, _)| knows_answers(snapshot, slot, ends, via_host))
        };
        let may_repeat = |via_host| {
            if is_from_stack {
                slot.is_as_it_came && may_repeat_forwarded(snapshot, &packet.flow, via_host)
            } else {
                !via_host && may_repeat_of_pod(snapshot, &packet.flow)
            }
        };
        connections.forwarded(&slot.hashed, packet.ip_len(), flags, path, knows_answers, may_repeat);
    }
}

/// Whether workers read what packets like this one ask or answer.
fn is_dns(snapshot: &Snapshot, slot: &AdmittedPacket) -> bool {
    names::answers_for(snapshot, slot).or_else(|| names::questions_of(snapshot, &slot.packet)).is_some()
}

/// Whether a worker would admit the answers to a packet that opens a connection, and send them back from the second of these interfaces to
/// the first as they are, under this snapshot.
fn knows_answers(snapshot: &Snapshot, slot: &AdmittedPacket, (from, to): (u32, u32), via_host: bool) -> bool {
    let original = slot.hashed.flow();
    let answer = Packet { flow: original.reversed(), ..slot.packet };
    let found = ForwardedConnection { original, ends: [from, to], via_host };
    [original.src, original.dst].iter().all(|address| address.scope() == AddressScope::Routable)
        && !snapshot.would_be_decapsulated(&answer)
        && names::questions_of(snapshot, &slot.packet).is_none()
        && has_same_path(snapshot, &found)
}

/// Whether programs may open the next connections of a pod that differ from this one in the opener's port alone, under this snapshot. To a Service's
/// address that the node translates, the way into its stack is all that is decided here: policy for what answers is asked where the stack sends it,
/// each time. An address of the node may get another end each time, or be of the node itself.
fn may_repeat_of_pod(snapshot: &Snapshot, flow: &Flow) -> bool {
    let FlowEnds { src, dst } = snapshot.policy.ends(flow);
    let is_nodes = dst.is_node() || snapshot.forwarding.is_node(flow.dst);
    // Answers come back to the pod, so no node takes one for a tunnel's packet, whatever the opener's port is.
    may_go_unseen(snapshot, flow) && !is_nodes && src.is_pod() && src.port().is_some()
}

/// The same of connections to a pod that the node's stack forwards with the source that they came with: those of other machines, and those of pods
/// that the node has translated, which traverse the stack in both directions. What has an address of a Service or of the node as its source may be
/// of the node itself.
fn may_repeat_forwarded(snapshot: &Snapshot, flow: &Flow, via_host: bool) -> bool {
    let FlowEnds { src, dst } = snapshot.policy.ends(flow);
    let forwarding = &snapshot.forwarding;
    let is_services = |end: &AddressEntry, address| end.is_service() || forwarding.is_service(address);
    let is_nodes = |end: &AddressEntry, address| end.is_node() || forwarding.is_node(address);
    let is_own = [(src, flow.src), (dst, flow.dst)]
        .into_iter()
        .any(|(end, address)| is_services(end, address) || is_nodes(end, address));
    let ends_tunnels = flow.protocol == Protocol::UDP && snapshot.may_end_tunnels(flow.src);
    may_go_unseen(snapshot, flow)
        && !(is_own || ends_tunnels)
        && src.is_local_pod() == via_host
        && dst.is_pod()
        && dst.port().is_some()
}

/// Whether no worker needs to see each connection like this one: what a policy wants recorded, or a pod's limit counts, it must; and what a domain
/// name allows, the clock ends.
fn may_go_unseen(snapshot: &Snapshot, flow: &Flow) -> bool {
    let (policy, ends) = (&snapshot.policy, snapshot.policy.ends(flow));
    policy.names_of(flow.src).is_none() && !policy.may_record_allowed(ends) && !snapshot.limits.count(ends)
}

/// The end of a path at this port, whose end is the source of this flow. `None`: the port has no interface that the programs know.
fn end(snapshot: &Snapshot, port: &Port, flow: &Flow) -> Option<u32> {
    match port.kind {
        PortKind::Pod => (1..BY_NODE).contains(&port.interface).then_some(port.interface),
        PortKind::Host => Some(end_at_stack(snapshot, flow)),
        PortKind::Uplink => None,
    }
}

/// The end of a path at the node's stack: whether workers drop a packet of this flow that the stack forwards as it came.
fn end_at_stack(snapshot: &Snapshot, flow: &Flow) -> u32 {
    if snapshot.has_nodes_source(flow) { BY_NODE } else { 0 }
}

/// Evaluates the connections that the kernel's programs forward, before the epoch of `snapshot` counts for them. Those that stay
/// allowed, between the same interfaces, need no worker for it: a long segment that a worker cuts up would be overtaken by the
/// next ones, and what all send at once would be more than a pod's share of a worker's queue. It takes no longer than `limit`.
/// Returns how many stay.
pub fn keep_offloaded(connections: &ConnTable, snapshot: &Snapshot, limit: Duration) -> usize {
    let until = Instant::now() + limit;
    connections.keep_forwarded(
        snapshot.epoch,
        || Instant::now() >= until,
        |found| {
            let ends = snapshot.policy.ends(&found.original);
            // The node may have translated its source, for which a worker asks.
            if [ends.src, ends.dst].iter().any(|end| end.is_node()) || found.via_host && !ends.src.is_local_pod() {
                return false;
            }
            if found.original.protocol == Protocol::UDP && !has_same_meaning(snapshot, found, &ends) {
                return false;
            }
            let verdict = snapshot.policy.evaluate_between(&found.original, ends, NameTime::Ever);
            verdict.drop_reason().is_none() && has_same_path(snapshot, found)
        },
    )
}

/// Keeps the answers by which the kernel's programs open connections, before the epoch of `snapshot` counts for them: those that a worker would
/// give again under it. The others end, and the next connection like them meets a worker. Returns how many stay.
pub fn keep_answers(connections: &ConnTable, snapshot: &Snapshot) -> usize {
    connections.keep_answers(snapshot.epoch, |found, owner| {
        let flow = &found.original;
        let ends = snapshot.policy.ends(flow);
        let is_of_pod = !matches!(found.ends[0], 0 | BY_NODE);
        let may_repeat = if is_of_pod {
            !found.via_host && may_repeat_of_pod(snapshot, flow)
        } else {
            may_repeat_forwarded(snapshot, flow, found.via_host)
        };
        may_repeat
            && track::owner(ends) == owner
            && !is_named(snapshot, flow)
            && !may_be_tunnel(snapshot, flow)
            && has_same_path(snapshot, found)
            && is_path_of_ports(snapshot, found, ends)
            && snapshot.policy.evaluate_between(flow, ends, NameTime::Never).drop_reason().is_none()
    })
}

/// Whether the pod of this port may send to a destination on another machine, behind the node's translation, and no worker needs to see
/// its packets.
pub fn may_leave(snapshot: &Snapshot, pod: PortId, dst: Address, protocol: Protocol, dst_port: u16) -> bool {
    snapshot.own_address(pod, dst.is_v4()).is_some_and(|src| {
        let (policy, flow) = (&snapshot.policy, Flow { src, dst, protocol, src_port: 0, dst_port });
        track::may_leave_unseen(policy, &flow) && policy.evaluate_as_it_is(&flow, NameTime::Never).is_allowed()
    })
}

/// Whether a worker would send a connection between two pods of the node by the path that it has: past the node's stack only if
/// nobody has filters there.
fn is_path_of_ports(snapshot: &Snapshot, found: &ForwardedConnection, ends: FlowEnds<'_>) -> bool {
    let is_direct = found.ends.iter().all(|&end| !matches!(end, 0 | BY_NODE));
    let port = |end: &AddressEntry| end.port().and_then(|id| snapshot.forwarding.port(id));
    !is_direct || [ends.src, ends.dst].into_iter().all(|end| port(end).is_some_and(|port| !port.by_stack))
}

/// Whether the rules of either end have domain names, so that workers may have to read what is asked or answered.
fn is_named(snapshot: &Snapshot, flow: &Flow) -> bool {
    [flow.src, flow.dst].into_iter().any(|end| snapshot.policy.names_of(end).is_some())
}

/// Whether a node may unwrap a datagram of a pod, which the pod may not send then. A worker decides it by the port.
fn may_be_tunnel(snapshot: &Snapshot, flow: &Flow) -> bool {
    flow.protocol == Protocol::UDP && snapshot.may_end_tunnels(flow.dst)
}

/// Whether a worker would find nothing but policy to ask about the next datagram of a UDP connection. Unlike TCP's, such a
/// connection follows changes of the node's addresses, so that only one between two pods' own addresses is
/// sure to go where it went; and workers read what a pod asks of DNS, and the answers, whose rules have domain names.
fn has_same_meaning(snapshot: &Snapshot, found: &ForwardedConnection, ends: &FlowEnds<'_>) -> bool {
    let reads_names = snapshot.policy.names_of(found.original.src).is_some();
    !(found.via_host || reads_names) && ends.src.is_pod() && ends.dst.is_pod()
}

/// Whether workers would admit and forward packets of both directions as before.
fn has_same_path(snapshot: &Snapshot, found: &ForwardedConnection) -> bool {
    let (original, is_of_stack) = (found.original, |known: u32| matches!(known, 0 | BY_NODE));
    let is_same = |(flow, known): (Flow, u32)| {
        let port = snapshot.pod_port(flow.src).and_then(|id| snapshot.forwarding.port(id));
        match port {
            Some(_) if is_of_stack(known) => found.via_host && known == end_at_stack(snapshot, &flow),
            Some(port) => end(snapshot, port, &flow) == Some(known),
            None => known == end_at_stack(snapshot, &flow) && !snapshot.policy.find(flow.src).is_portless_pod(),
        }
    };
    let is_direct = !found.ends.iter().any(|&known| is_of_stack(known));
    snapshot.forwarding.host().is_some()
        && !(found.via_host && is_direct)
        && [(original, found.ends[0]), (original.reversed(), found.ends[1])].into_iter().all(is_same)
}

//! Last stage: selects the egress port of an allowed packet.

use crate::forward::{PathPorts, Port, PortId, PortKind};
use crate::packet::{Flow, NextHop, OpenChecksum, Packet, TtlChange, rewrite};
use crate::tag;
use crate::{DropReason, Snapshot};

/// Path of a packet that may pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum PacketPath {
    /// Directly to its destination.
    #[default]
    Direct,
    /// The same, at this port: the destination was looked up already.
    At(PortId),
    /// Through the host port, whatever its destination: the node's own stack translates its connection.
    ViaHost,
    /// Out by an uplink: the node's own stack has chosen it.
    ByUplink(Leaving),
}

/// A packet of a pod that leaves the node by an uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Leaving {
    /// The uplink's number.
    pub(super) uplink: u8,
    /// The pod's port.
    pub(super) pod: PortId,
    /// The program there may send the pod's next packets to the same address and port on by itself, under the same epoch.
    pub(super) allows_next: bool,
}

/// The ports towards the two ends of a packet received on `ingress`: its destination and its sender.
pub(super) fn path_ports(
    snapshot: &Snapshot,
    ingress: PortId,
    from: &Port,
    packet: &Packet,
    route: PacketPath,
) -> PathPorts {
    let forward = egress(snapshot, packet, route);
    // If the node translates a sender's packets, the sender only knows the node's translation of the reply.
    let reply = if from.kind == PortKind::Host { Some(ingress) } else { snapshot.next_hop(packet.flow.src) };
    PathPorts { forward, reply }
}

#[inline(always)]
fn egress(snapshot: &Snapshot, packet: &Packet, route: PacketPath) -> Option<PortId> {
    match route {
        PacketPath::Direct => snapshot.next_hop(packet.flow.dst),
        PacketPath::At(port) => Some(port),
        PacketPath::ViaHost | PacketPath::ByUplink(_) => via_host(snapshot),
    }
}

#[cold]
fn via_host(snapshot: &Snapshot) -> Option<PortId> {
    snapshot.forwarding.host()
}

/// Finds the egress port of a packet received on `from` and rewrites its frame. `is_plain`: whether that port [is](Port::is_plain).
#[inline(always)]
pub(super) fn dispatch(
    snapshot: &Snapshot,
    (from, is_plain): (&Port, bool),
    frame: &mut [u8],
    packet: &Packet,
    route: PacketPath,
    open: OpenChecksum,
) -> Result<PortId, DropReason> {
    // By comparisons, and not by a match, which the compiler makes a jump by a table.
    let egress = if let PacketPath::At(port) = route {
        Some(port)
    } else if let PacketPath::Direct = route {
        snapshot.next_hop(packet.flow.dst)
    } else {
        None
    };
    // Nearly every packet. What bridges and others' filters need is asked only where a port has them.
    if is_plain
        && let Some(egress) = egress
        && let Some(to) = snapshot.forwarding.port(egress)
    {
        rewrite(frame, packet, next_hop((from, to), packet, false, open)?);
        return Ok(egress);
    }
    dispatch_otherwise(snapshot, from, frame, packet, route, open)
}

/// [`dispatch`] for every packet.
#[inline(never)]
fn dispatch_otherwise(
    snapshot: &Snapshot,
    from: &Port,
    frame: &mut [u8],
    packet: &Packet,
    route: PacketPath,
    open: OpenChecksum,
) -> Result<PortId, DropReason> {
    let (egress, hop) = way(snapshot, from, packet, frame, route, open)?;
    rewrite(frame, packet, hop);
    Ok(egress)
}

/// The port by which a pod's packet gets to the filters that others have on the pod's interface: the node's stack, which brings
/// it back to a worker if it is for another pod.
#[cold]
#[inline(never)]
fn by_stack(snapshot: &Snapshot, from: &Port, packet: &Packet, egress: PortId) -> PortId {
    match snapshot.forwarding.host() {
        Some(host) if from.addresses.contains(&packet.flow.src) => host,
        _ => egress,
    }
}

/// A packet of the node's stack goes back into its pair, to leave as it is.
#[cold]
fn by_uplink(
    snapshot: &Snapshot,
    flow: &Flow,
    leaving: Leaving,
    open: OpenChecksum,
) -> Result<(PortId, NextHop), DropReason> {
    let host = snapshot.forwarding.host().ok_or(DropReason::NoPort)?;
    let next = leaving.allows_next.then_some(flow.protocol);
    let peer = tag::to_uplink(leaving.uplink, leaving.pod, next);
    Ok((host, NextHop { peer, own: tag::allowed(flow.dst_port, snapshot.epoch), ttl: TtlChange::Keep, open }))
}

/// Whether a bridge would forward a frame to the pod that it is for, and no router. `to`: the port by which it leaves.
#[cold]
#[inline(never)]
fn is_bridged(snapshot: &Snapshot, (from, to): (&Port, &Port), packet: &Packet, frame: &mut [u8]) -> bool {
    let receiver = match to.kind {
        PortKind::Host => snapshot.next_hop(packet.flow.dst).and_then(|port| snapshot.forwarding.port(port)),
        PortKind::Pod | PortKind::Uplink => Some(to),
    };
    receiver.is_some_and(|to| from.bridge == to.bridge && tag::is_to_neighbour(frame, to.peer_mac))
}

/// The change of a packet's TTL. `by_stack`: it comes from the node's stack, or goes there.
#[inline(always)]
fn change_of_ttl(ttl: u8, by_stack: bool, is_bridged: bool) -> TtlChange {
    match (by_stack, is_bridged) {
        // Never 255, which says to receivers of some protocols that no router was on the way.
        (true, true) if (1..254).contains(&ttl) => TtlChange::Increment,
        (false, false) => TtlChange::Decrement,
        _ => TtlChange::Keep,
    }
}

/// The egress port of a packet, and what is rewritten for it.
#[inline(always)]
fn way(
    snapshot: &Snapshot,
    from: &Port,
    packet: &Packet,
    frame: &mut [u8],
    route: PacketPath,
    open: OpenChecksum,
) -> Result<(PortId, NextHop), DropReason> {
    if let PacketPath::ByUplink(leaving) = route {
        return by_uplink(snapshot, &packet.flow, leaving, open);
    }
    let mut egress = egress(snapshot, packet, route).ok_or(DropReason::NoPort)?;
    if from.by_stack {
        egress = by_stack(snapshot, from, packet, egress);
    }
    let port = snapshot.forwarding.port(egress).ok_or(DropReason::PortGone)?;
    let is_bridged = from.bridge != 0 && is_bridged(snapshot, (from, port), packet, frame);
    Ok((egress, next_hop((from, port), packet, is_bridged, open)?))
}

/// The changes to a packet that goes from one port straight to the other.
#[inline(always)]
fn next_hop(
    (from, to): (&Port, &Port),
    packet: &Packet,
    is_bridged: bool,
    open: OpenChecksum,
) -> Result<NextHop, DropReason> {
    let (from_host, to_host) = (from.kind == PortKind::Host, to.kind == PortKind::Host);
    if from_host && to_host {
        // The node's stack sent it here because it belongs to a pod; returning it would create a loop.
        return Err(DropReason::NoPort);
    }
    let ttl = change_of_ttl(packet.ttl, from_host || to_host, is_bridged);
    if ttl == TtlChange::Decrement && packet.ttl <= 1 {
        return Err(DropReason::TtlExpired);
    }
    if packet.ip_len() > to.mtu {
        return Err(DropReason::TooBig);
    }
    Ok(NextHop { peer: to.peer_mac, own: to.own_mac, ttl, open })
}

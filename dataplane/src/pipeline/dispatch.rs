//! Last stage: selects the egress port of an allowed packet.

use crate::DropReason;
use crate::forward::{Forwarding, PathPorts, Port, PortId, PortKind};
use crate::packet::{NextHop, OpenChecksum, Packet, rewrite};

/// Path of a packet that may pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum PacketPath {
    /// Directly to its destination.
    #[default]
    Direct,
    /// Through the host port, whatever its destination: the node's own stack translates its connection.
    ViaHost,
}

/// The ports towards the two ends of a packet received on `ingress`: its destination and its sender.
pub(super) fn path_ports(
    forwarding: &Forwarding,
    ingress: PortId,
    from: &Port,
    packet: &Packet,
    route: PacketPath,
) -> PathPorts {
    let ahead = egress(forwarding, packet, route);
    // If the node translates a sender's packets, the sender only knows the node's translation of the reply.
    let back = if from.kind == PortKind::Host { Some(ingress) } else { forwarding.next_hop(packet.flow.src) };
    PathPorts { ahead, back }
}

#[inline(always)]
fn egress(forwarding: &Forwarding, packet: &Packet, route: PacketPath) -> Option<PortId> {
    if route == PacketPath::ViaHost {
        return via_host(forwarding);
    }
    forwarding.next_hop(packet.flow.dst)
}

#[cold]
fn via_host(forwarding: &Forwarding) -> Option<PortId> {
    forwarding.host()
}

/// Finds the egress port of a packet received on `from` and rewrites its frame.
#[inline(always)]
pub(super) fn dispatch(
    forwarding: &Forwarding,
    from: &Port,
    frame: &mut [u8],
    packet: &Packet,
    route: PacketPath,
    open: OpenChecksum,
) -> Result<PortId, DropReason> {
    let egress = egress(forwarding, packet, route).ok_or(DropReason::NoPort)?;
    let port = forwarding.port(egress).ok_or(DropReason::PortGone)?;
    let (from_host, to_host) = (from.kind == PortKind::Host, port.kind == PortKind::Host);
    if from_host && to_host {
        // The node's stack sent it here because it belongs to a pod; returning it would create a loop.
        return Err(DropReason::NoPort);
    }
    let spend_ttl = !from_host && !to_host;
    if spend_ttl && packet.ttl <= 1 {
        return Err(DropReason::TtlExpired);
    }
    if packet.ip_len() > port.mtu {
        return Err(DropReason::TooBig);
    }
    rewrite(frame, packet, NextHop { peer: port.peer_mac, own: port.own_mac, spend_ttl, open });
    Ok(egress)
}

//! Last stage: selects the egress port of an allowed packet.

use crate::Cause;
use crate::forward::{Forwarding, Port, PortId, PortKind, Ways};
use crate::packet::{NextHop, OpenChecksum, Packet, rewrite};

/// Path of a packet that may pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Route {
    /// Directly to its destination.
    #[default]
    Direct,
    /// Through the host port, whatever its destination: the node's own stack translates its connection.
    ViaHost,
}

/// The ports towards the two ends of a packet received on `ingress`: its destination and its sender.
pub(super) fn ways(forwarding: &Forwarding, ingress: PortId, from: &Port, packet: &Packet, route: Route) -> Ways {
    let ahead = egress(forwarding, packet, route);
    // If the node translates a sender's packets, the sender only knows the node's translation of the reply.
    let back = if from.kind == PortKind::Host { Some(ingress) } else { forwarding.next_hop(packet.flow.src) };
    Ways { ahead, back }
}

#[inline(always)]
fn egress(forwarding: &Forwarding, packet: &Packet, route: Route) -> Option<PortId> {
    if route == Route::ViaHost {
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
    route: Route,
    open: OpenChecksum,
) -> Result<PortId, Cause> {
    let egress = egress(forwarding, packet, route).ok_or(Cause::NoPort)?;
    let port = forwarding.port(egress).ok_or(Cause::PortGone)?;
    let (from_host, to_host) = (from.kind == PortKind::Host, port.kind == PortKind::Host);
    if from_host && to_host {
        // The node's stack sent it here because it belongs to a pod; returning it would create a loop.
        return Err(Cause::NoPort);
    }
    let spend_ttl = !from_host && !to_host;
    if spend_ttl && packet.ttl <= 1 {
        return Err(Cause::TtlExpired);
    }
    if packet.ip_len() > port.mtu {
        return Err(Cause::TooBig);
    }
    rewrite(frame, packet, NextHop { peer: port.peer_mac, own: port.own_mac, spend_ttl, open });
    Ok(egress)
}

//! Last stage: an allowed packet gets its way out.

use crate::Cause;
use crate::forward::{Forwarding, Port, PortId, PortKind, Ways};
use crate::packet::{NextHop, OpenChecksum, Packet, rewrite};

/// Which way a packet that may pass leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Route {
    /// To whom it is for.
    #[default]
    Direct,
    /// By the host port, whomever it is for: the node's own stack translates its connection.
    ViaHost,
}

/// The ports by which the two ends of a packet from port `ingress` are reached: the end ahead, and its sender.
pub(super) fn ways(forwarding: &Forwarding, ingress: PortId, from: &Port, packet: &Packet, route: Route) -> Ways {
    let ahead = egress(forwarding, packet, route);
    // A sender whose packets the node translates knows only what the node makes of the answer.
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

/// Finds the port that a packet from port `from` leaves by and rewrites its frame for it.
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
        // The node's stack sent it here because it belongs to a pod; back to the stack it would come round again.
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

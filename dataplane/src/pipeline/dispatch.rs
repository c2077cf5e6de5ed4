//! Last stage: an allowed packet gets its way out.

use crate::Cause;
use crate::forward::{Forwarding, Port, PortId, PortKind};
use crate::packet::{NextHop, OpenChecksum, Packet, rewrite};

/// Finds the port that a packet from port `from` leaves by and rewrites its frame for it.
#[inline(always)]
pub(super) fn dispatch(
    forwarding: &Forwarding,
    from: &Port,
    frame: &mut [u8],
    packet: &Packet,
    open: OpenChecksum,
) -> Result<PortId, Cause> {
    let egress = forwarding.next_hop(packet.flow.dst).ok_or(Cause::NoPort)?;
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

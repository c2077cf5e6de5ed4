//! Which drops get a reply, and which one.

use super::dispatch::path_ports;
use super::{AdmittedPacket, DroppedPacket};
use crate::forward::{Forwarding, PathPorts, Port, PortId};
use crate::packet::Packet;
use crate::reply::{IcmpError, Replies};
use crate::{DropReason, Snapshot};

/// The minimum MTU of an IPv6 link (RFC 8200 section 5); Packet Too Big must not report less.
const LEAST_MTU_V6: u16 = 1280;

/// Replies to a dropped packet if its sender is notified of the reason.
///
/// Packet Too Big is sent even if the sender allows fragmentation on the path: workers do not fragment, and a stack
/// that learns the MTU does so itself.
#[cold]
pub(super) fn reply(
    replies: &mut Replies,
    snapshot: &Snapshot,
    (ingress, port): (PortId, &Port),
    frame: &[u8],
    entry: &AdmittedPacket,
    dropped: DroppedPacket,
) {
    let forwarding = &snapshot.forwarding;
    let has_reply = matches!(
        dropped.reason,
        DropReason::ConnectionRevoked
            | DropReason::TtlExpired
            | DropReason::TooBig
            | DropReason::NoBackend
            | DropReason::NoServicePort
    );
    if !has_reply {
        return;
    }
    let packet = &entry.packet;
    let leaving = entry.translation().map_or(*packet, |translation| translation.leaving(packet));
    let path_ports = path_ports(snapshot, ingress, port, (packet, &leaving), dropped.route);
    match dropped.reason {
        DropReason::ConnectionRevoked => {
            let next = dropped.revoked_at.map(|next| (leaving.flow, next));
            replies.revoked(forwarding, path_ports, frame, packet, next);
        }
        DropReason::NoBackend | DropReason::NoServicePort => replies.refused(forwarding, path_ports, frame, packet),
        DropReason::TtlExpired => replies.error(forwarding, path_ports, frame, packet, IcmpError::TtlExpired),
        DropReason::TooBig => {
            if let Some(mtu) = mtu(forwarding, path_ports, packet) {
                replies.error(forwarding, path_ports, frame, packet, IcmpError::TooBig { mtu });
            }
        }
        _ => {}
    }
}

fn mtu(forwarding: &Forwarding, path_ports: PathPorts, packet: &Packet) -> Option<u16> {
    let mtu = forwarding.port(path_ports.ahead?)?.mtu;
    Some(if packet.flow.src.is_v4() { mtu } else { mtu.max(LEAST_MTU_V6) })
}

//! Which drops get a reply, and which one.

use super::DroppedPacket;
use super::dispatch::{PacketPath, path_ports};
use crate::forward::{Forwarding, PathPorts, Port, PortId};
use crate::names::NameTime;
use crate::packet::{Packet, TcpFlags, Transport};
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
    packet: &Packet,
    dropped: DroppedPacket,
) {
    let forwarding = &snapshot.forwarding;
    let is_refused = is_refused(packet, &dropped);
    let is_rejected = is_rejected(snapshot, packet, &dropped)
        && snapshot.policy.answer_to_denied(&packet.flow).unwrap_or(replies.reject_denied());
    let has_reply =
        matches!(dropped.reason, DropReason::ConnectionRevoked | DropReason::TtlExpired | DropReason::TooBig);
    if !has_reply && !is_refused && !is_rejected || may_continue(snapshot, packet, &dropped) {
        return;
    }
    let path_ports = path_ports(snapshot, ingress, port, packet, dropped.route);
    match dropped.reason {
        DropReason::ConnectionRevoked => {
            replies.revoked(forwarding, path_ports, frame, packet, dropped.revoked_at);
        }
        _ if is_refused => replies.refused(forwarding, path_ports, packet),
        _ if is_rejected => replies.denied(forwarding, path_ports, frame, packet),
        DropReason::TtlExpired => replies.error(forwarding, path_ports, frame, packet, IcmpError::TtlExpired),
        DropReason::TooBig => {
            if let Some(mtu) = mtu(forwarding, path_ports, packet) {
                replies.error(forwarding, path_ports, frame, packet, IcmpError::TooBig { mtu });
            }
        }
        _ => {}
    }
}

/// Whether it is a segment from the middle of a TCP connection that is not known and not picked up. Its sender would retransmit it
/// for a quarter of an hour; a machine that knows no such connection answers with a RST (RFC 9293 section 3.10.7.1), and a client
/// then connects anew. What leaves the node has no connection here.
fn is_refused(packet: &Packet, dropped: &DroppedPacket) -> bool {
    let Transport::Tcp(segment) = packet.transport else { return false };
    let is_unknown = matches!(
        dropped.reason,
        DropReason::NoConnection
            | DropReason::TableFull
            | DropReason::QuotaExceeded
            | DropReason::ConnectionRate
            | DropReason::TooManyConnections
    );
    (is_unknown || is_denied(dropped.reason))
        && segment.flags.contains(TcpFlags::ACK)
        && !segment.flags.contains(TcpFlags::SYN)
        && !matches!(dropped.route, PacketPath::ByUplink(_))
}

/// Whether policy denies a segment from the middle of an unknown connection that its receiver may have opened. The receiver's next
/// segment brings such a connection back, and a RST would end it before.
fn may_continue(snapshot: &Snapshot, packet: &Packet, dropped: &DroppedPacket) -> bool {
    matches!(packet.transport, Transport::Tcp(_) | Transport::Sctp { .. })
        && !packet.transport.may_open()
        && is_denied(dropped.reason)
        && snapshot.policy.evaluate_as_it_is(&packet.flow.reversed(), NameTime::Ever).is_allowed()
}

const fn is_denied(reason: DropReason) -> bool {
    matches!(reason, DropReason::EgressDenied | DropReason::ServiceDenied | DropReason::IngressDenied)
}

/// Whether policy denies a connection of a sender that may be told: one in the cluster, since to all others a closed port looks as if
/// nobody were there. What leaves the node has no connection here.
fn is_rejected(snapshot: &Snapshot, packet: &Packet, dropped: &DroppedPacket) -> bool {
    is_denied(dropped.reason)
        && !matches!(dropped.route, PacketPath::ByUplink(_))
        && snapshot.policy.owner(packet.flow.src).is_some()
}

fn mtu(forwarding: &Forwarding, path_ports: PathPorts, packet: &Packet) -> Option<u16> {
    let mtu = forwarding.port(path_ports.forward?)?.mtu;
    Some(if packet.flow.src.is_v4() { mtu } else { mtu.max(LEAST_MTU_V6) })
}

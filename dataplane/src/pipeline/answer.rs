//! Which drops get a reply, and which one.

use super::Refusal;
use super::dispatch::ways;
use crate::answer::{Answers, IcmpError};
use crate::forward::{Forwarding, Port, PortId, Ways};
use crate::packet::Packet;
use crate::{Cause, Snapshot};

/// The minimum MTU of an IPv6 link (RFC 8200 section 5); Packet Too Big must not report less.
const LEAST_MTU_V6: u16 = 1280;

/// Replies to a dropped packet if its sender is notified of the reason.
///
/// Packet Too Big is sent even if the sender allows fragmentation on the path: workers do not fragment, and a stack
/// that learns the MTU does so itself.
#[cold]
pub(super) fn answer(
    answers: &mut Answers,
    snapshot: &Snapshot,
    (ingress, port): (PortId, &Port),
    frame: &[u8],
    packet: &Packet,
    refusal: Refusal,
) {
    let forwarding = &snapshot.forwarding;
    if !matches!(refusal.cause, Cause::ConnectionCut | Cause::TtlExpired | Cause::TooBig) {
        return;
    }
    let ways = ways(forwarding, ingress, port, packet, refusal.route);
    match refusal.cause {
        Cause::ConnectionCut => answers.cut(forwarding, ways, frame, packet, refusal.cut_at),
        Cause::TtlExpired => answers.error(forwarding, ways, frame, packet, IcmpError::TtlExpired),
        Cause::TooBig => {
            if let Some(mtu) = mtu(forwarding, ways, packet) {
                answers.error(forwarding, ways, frame, packet, IcmpError::TooBig { mtu });
            }
        }
        _ => {}
    }
}

fn mtu(forwarding: &Forwarding, ways: Ways, packet: &Packet) -> Option<u16> {
    let mtu = forwarding.port(ways.ahead?)?.mtu;
    Some(if packet.flow.src.is_v4() { mtu } else { mtu.max(LEAST_MTU_V6) })
}

//! First stage: parses a frame and rejects invalid packets.

use crate::forward::{Port, PortKind};
use crate::packet::{Address, AddressScope, Flow, Packet, Protocol, Transport, parse_into};
use crate::{DropReason, Snapshot};

/// Parses a frame received on `port` and checks its source address and whether it may be routed.
#[inline(always)]
pub(super) fn admit(snapshot: &Snapshot, port: &Port, frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    if let Err(reason) = parse_into(frame, packet)
        && !is_forwarded_unread(snapshot, packet)
    {
        return Err(reason);
    }
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    if port.kind != PortKind::Pod {
        from_elsewhere(snapshot, port.kind, &packet.flow)?;
    } else if !port.addresses.contains(&src) {
        return Err(DropReason::SpoofedSource);
    } else if snapshot.would_be_decapsulated(packet) && snapshot.pod_port(dst).is_none() {
        return Err(DropReason::Encapsulation);
    }
    if Address::are_plainly_routable(src, dst) { Ok(()) } else { routable(port.kind, src, dst) }
}

/// Whether a packet passes although its transport header cannot be read: no policy asks for it, and a router does not look at it. Not a part of
/// an ICMP message: its receiver would put together what no pod may send, as redirects.
#[cold]
#[inline(never)]
fn is_forwarded_unread(snapshot: &Snapshot, packet: &Packet) -> bool {
    let is_part_of_message =
        packet.fragment.is_some() && matches!(packet.flow.protocol, Protocol::ICMP | Protocol::ICMPV6);
    packet.transport == Transport::Unreadable
        && !is_part_of_message
        && snapshot.policy.is_free(snapshot.policy.ends(&packet.flow))
}

/// Checks the source address of a packet that did not come from a pod's port.
#[inline(never)]
fn from_elsewhere(snapshot: &Snapshot, kind: PortKind, flow: &Flow) -> Result<(), DropReason> {
    let known = snapshot.policy.find(flow.src);
    let is_spoofed = match kind {
        // Packets from outside never have a source address of this node or of its pods.
        PortKind::Uplink => {
            known.is_local_pod()
                || snapshot.forwarding.is_node(flow.src)
                || (known.is_service() && snapshot.policy.is_unasked(flow))
        }
        // A pod without a port has sent nothing that the node's stack could send back.
        PortKind::Host | PortKind::Pod => known.is_portless_pod(),
    };
    if is_spoofed { Err(DropReason::SpoofedSource) } else { Ok(()) }
}

/// Whether the node's kernel would take a packet between these addresses. What is for the link, or for a group, may be for the node
/// itself: it answers pods at link-local addresses (a DNS cache, a cloud's metadata), and IPv4's are even routed. IPv6's are not
/// (RFC 4291 section 2.5.6).
#[inline(never)]
fn routable(kind: PortKind, src: Address, dst: Address) -> Result<(), DropReason> {
    let is_from_outside = kind == PortKind::Uplink;
    match (src.scope(), dst.scope()) {
        (AddressScope::Host | AddressScope::Multicast, _) | (_, AddressScope::Host) => Err(DropReason::NotRoutable),
        (_, AddressScope::Multicast) if kind != PortKind::Pod => Err(DropReason::Multicast),
        (AddressScope::Link, _) | (_, AddressScope::Link) if is_from_outside && !dst.is_v4() => {
            Err(DropReason::NotRoutable)
        }
        _ => Ok(()),
    }
}

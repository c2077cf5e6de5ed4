//! First stage: parses a frame and rejects invalid packets.

use crate::DropReason;
use crate::forward::{Forwarding, Port, PortKind};
use crate::packet::{Address, AddressScope, Packet, parse_into};

/// Parses a frame received on `port` and checks its source address and whether it may be routed.
#[inline(always)]
pub(super) fn admit(forwarding: &Forwarding, port: &Port, frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    parse_into(frame, packet)?;
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    let own_source = match port.kind {
        PortKind::Pod => port.addresses.contains(&src),
        // A pod without a port has sent nothing that the node's stack could send back.
        PortKind::Host => !forwarding.is_portless_pod(src),
        // Packets from outside never have a source address of this node or of its pods.
        PortKind::Uplink => !forwarding.is_local_pod(src) && !forwarding.is_node(src),
    };
    if !own_source {
        return Err(DropReason::SpoofedSource);
    }
    if port.kind == PortKind::Pod && forwarding.would_be_decapsulated(packet) {
        return Err(DropReason::Encapsulation);
    }
    if src.is_plainly_routable() && dst.is_plainly_routable() { Ok(()) } else { routable(src, dst) }
}

/// Whether a router may forward a packet between these addresses.
#[inline(never)]
fn routable(src: Address, dst: Address) -> Result<(), DropReason> {
    match (src.scope(), dst.scope()) {
        (_, AddressScope::Multicast) => Err(DropReason::Multicast),
        (AddressScope::Routable, AddressScope::Routable) => Ok(()),
        _ => Err(DropReason::NotRoutable),
    }
}

//! First stage: a frame becomes a packet, or is refused for what it is.

use crate::Cause;
use crate::forward::{Forwarding, Port, PortKind};
use crate::packet::{Address, Packet, Scope, parse_into};

/// Parses a frame received on `port` and checks that it may come from there and be routed at all.
#[inline(always)]
pub(super) fn admit(forwarding: &Forwarding, port: &Port, frame: &[u8], packet: &mut Packet) -> Result<(), Cause> {
    parse_into(frame, packet)?;
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    let own_source = match port.kind {
        PortKind::Pod => port.addresses.contains(&src),
        // A pod without a port has sent nothing that the node's stack could send back.
        PortKind::Host => !forwarding.is_portless_pod(src),
        // From outside, nothing honest carries an address of this node or of its pods.
        PortKind::Uplink => !forwarding.is_local_pod(src) && !forwarding.is_node(src),
    };
    if !own_source {
        return Err(Cause::SpoofedSource);
    }
    if port.kind == PortKind::Pod && forwarding.would_be_decapsulated(packet) {
        return Err(Cause::Encapsulation);
    }
    if src.is_plainly_routable() && dst.is_plainly_routable() { Ok(()) } else { routable(src, dst) }
}

/// Whether a router may carry a packet between these two.
#[inline(never)]
fn routable(src: Address, dst: Address) -> Result<(), Cause> {
    match (src.scope(), dst.scope()) {
        (_, Scope::Many) => Err(Cause::Multicast),
        (Scope::Routable, Scope::Routable) => Ok(()),
        _ => Err(Cause::NotRoutable),
    }
}

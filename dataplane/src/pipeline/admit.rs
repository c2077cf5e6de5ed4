//! First stage: parses a frame and rejects invalid packets.

use crate::Cause;
use crate::forward::{Forwarding, Port, PortKind};
use crate::packet::{Address, Packet, Scope, parse_into};

/// Parses a frame received on `port` and checks its source address and whether it may be routed.
#[inline(always)]
pub(super) fn admit(forwarding: &Forwarding, port: &Port, frame: &[u8], packet: &mut Packet) -> Result<(), Cause> {
    parse_into(frame, packet)?;
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    if port.kind != PortKind::Pod {
        from_elsewhere(forwarding, port.kind, src)?;
    } else if !port.addresses.contains(&src) {
        return Err(Cause::SpoofedSource);
    } else if forwarding.would_be_decapsulated(packet) {
        return Err(Cause::Encapsulation);
    }
    if src.is_plainly_routable() && dst.is_plainly_routable() { Ok(()) } else { routable(src, dst) }
}

/// Whether a packet that no pod of this node sent may have this source.
#[inline(never)]
fn from_elsewhere(forwarding: &Forwarding, kind: PortKind, src: Address) -> Result<(), Cause> {
    let is_spoofed = match kind {
        // From outside, nothing honest carries an address of this node or of its pods.
        PortKind::Uplink => forwarding.is_local_pod(src) || forwarding.is_node(src),
        // A pod without a port has sent nothing that the node's stack could send back.
        PortKind::Host | PortKind::Pod => forwarding.is_portless_pod(src),
    };
    if is_spoofed { Err(Cause::SpoofedSource) } else { Ok(()) }
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

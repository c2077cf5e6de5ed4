//! First stage: parses a frame and rejects invalid packets.

use crate::forward::{Port, PortKind};
use crate::packet::{Address, AddressScope, Packet, parse_into};
use crate::{DropReason, Snapshot};

/// Parses a frame received on `port` and checks its source address and whether it may be routed.
#[inline(always)]
pub(super) fn admit(snapshot: &Snapshot, port: &Port, frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    parse_into(frame, packet)?;
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    if port.kind != PortKind::Pod {
        from_elsewhere(snapshot, port.kind, src)?;
    } else if !port.addresses.contains(&src) {
        return Err(DropReason::SpoofedSource);
    } else if snapshot.forwarding.would_be_decapsulated(packet, &snapshot.policy) && snapshot.pod_port(dst).is_none() {
        return Err(DropReason::Encapsulation);
    }
    if src.is_plainly_routable() && dst.is_plainly_routable() { Ok(()) } else { routable(src, dst) }
}

/// Checks the source address of a packet that did not come from a pod's port.
#[inline(never)]
fn from_elsewhere(snapshot: &Snapshot, kind: PortKind, src: Address) -> Result<(), DropReason> {
    let is_spoofed = match kind {
        // Packets from outside never have a source address of this node or of its pods.
        PortKind::Uplink => snapshot.policy.find(src).is_local_pod() || snapshot.forwarding.is_node(src),
        // A pod without a port has sent nothing that the node's stack could send back.
        PortKind::Host | PortKind::Pod => snapshot.policy.find(src).is_portless_pod(),
    };
    if is_spoofed { Err(DropReason::SpoofedSource) } else { Ok(()) }
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

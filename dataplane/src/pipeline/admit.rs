//! First stage: a frame becomes a packet, or is refused for what it is.

use crate::Cause;
use crate::forward::{Forwarding, PortId, PortKind};
use crate::packet::{Address, Packet, parse};

/// Parses a frame received on `ingress` and checks that it may come from there and be routed at all.
#[inline]
pub(super) fn admit(forwarding: &Forwarding, ingress: PortId, frame: &[u8]) -> Result<Packet, Cause> {
    let port = forwarding.port(ingress).ok_or(Cause::NotReady)?;
    let packet = parse(frame)?;
    let (src, dst) = (packet.flow.src, packet.flow.dst);
    let own_source = match port.kind {
        PortKind::Pod => port.addresses.contains(&src),
        PortKind::Host => true,
        // From outside, nothing honest carries an address of this node or of its pods.
        PortKind::Uplink => forwarding.pod_port(src).is_none() && !forwarding.is_node(src),
    };
    if !own_source {
        return Err(Cause::SpoofedSource);
    }
    if dst.is_multicast_or_broadcast() {
        return Err(Cause::Multicast);
    }
    if !(is_routable(src) && is_routable(dst)) {
        return Err(Cause::NotRoutable);
    }
    Ok(packet)
}

/// Whether a router may carry a packet with this address as its source or its destination.
#[inline]
fn is_routable(address: Address) -> bool {
    !address.is_loopback_or_unspecified() && !address.is_link_local() && !address.is_multicast_or_broadcast()
}

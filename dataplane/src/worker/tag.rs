//! Tags of frames on a worker's veth pair, which carries the packets of many ports: both Ethernet addresses say which.
//!
//! The tcx programs write the tags of frames to a worker and read those of frames from one; both sides replace both
//! addresses, so that no pod's bytes are ever taken for a tag (`struct tag` in `xdp-redirect/src/bpf/tcx.bpf.c`).
//!
//! | bytes | to a worker | from a worker |
//! |---|---|---|
//! | 0 | `02`: locally administered, unicast | `02` |
//! | 1 | `fa` | `fb` |
//! | 2 | flags: 1 the transport checksum is open, 2 [`FROM_NODE`], 4 sent by a process of the node | flags: 1 [`TO_NODE`] |
//! | 3 | 0 | 0 |
//! | 4–5 | number of the pod's port, in network byte order | the same; `ffff`: none |
//! | 6–7 | `02fa` | – |
//! | 8–11 | index of the interface at which the frame was, in network byte order | – |

use crate::forward::{Mac, PortId};

const LOCAL: u8 = 0x02;
const TO_WORKER: u8 = 0xfa;
const FROM_WORKER: u8 = 0xfb;

/// The transport checksum is that of the pseudo header: the sender's stack left it to the device. The pipeline
/// recognises such a checksum by itself.
#[cfg(test)]
pub(super) const CHECKSUM_OPEN: u8 = 1;
/// Sent to the pod by the node's stack; otherwise by the pod.
pub(super) const FROM_NODE: u8 = 2;
/// Sent by a process of the node, not forwarded.
#[cfg(test)]
pub(super) const LOCAL_PROCESS: u8 = 4;

/// To the node's stack, as a packet of the port; without a port as one of the pair.
const TO_NODE: u8 = 1;
/// No port.
const NO_PORT: PortId = PortId(0xffff);

/// Where a frame came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameTag {
    /// The port of the pod at whose veth it was.
    pub(super) port: PortId,
    /// Index of that veth's interface.
    pub(super) interface: u32,
    /// Whether the node's stack sent it to the pod.
    pub(super) from_node: bool,
}

impl FrameTag {
    /// The tag of a frame that a program sent to a worker; `None` for any other frame.
    #[inline]
    pub(super) fn read(frame: &[u8]) -> Option<Self> {
        let head: &[u8; 12] = frame.first_chunk()?;
        let [LOCAL, TO_WORKER, flags, _, p, q, LOCAL, TO_WORKER, a, b, c, d] = *head else { return None };
        Some(Self {
            port: PortId(u16::from_be_bytes([p, q])),
            interface: u32::from_be_bytes([a, b, c, d]),
            from_node: flags & FROM_NODE != 0,
        })
    }
}

/// Destination address by which a frame from a worker goes to the pod behind this port.
pub(super) const fn to_pod(port: PortId) -> Mac {
    let [p, q] = port.0.to_be_bytes();
    Mac([LOCAL, FROM_WORKER, 0, 0, p, q])
}

/// Destination address by which a frame from a worker goes to the node's stack, as received on the pair.
pub(super) const fn to_node() -> Mac {
    let [p, q] = NO_PORT.0.to_be_bytes();
    Mac([LOCAL, FROM_WORKER, TO_NODE, 0, p, q])
}

/// Makes a frame with the address of [`to_node`] one that the node's stack receives as a packet of this port.
#[inline]
pub(super) fn set_port(frame: &mut [u8], port: PortId) {
    if let Some(bytes) = frame.get_mut(4..6) {
        bytes.copy_from_slice(&port.0.to_be_bytes());
    }
}

/// Source address of every frame from a worker; the programs ignore it.
pub(super) const FROM: Mac = Mac([LOCAL, FROM_WORKER, 0, 0, 0, 0]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_programs_frame_has_a_tag() {
        let tagged = [2, 0xfa, CHECKSUM_OPEN | FROM_NODE | LOCAL_PROCESS, 0, 0x12, 0x34, 2, 0xfa, 0, 1, 2, 3, 8, 0];
        let tag = FrameTag { port: PortId(0x1234), interface: 0x0001_0203, from_node: true };
        assert_eq!(FrameTag::read(&tagged), Some(tag));
        let mut of_pod = tagged;
        of_pod[2] = CHECKSUM_OPEN;
        assert_eq!(FrameTag::read(&of_pod), Some(FrameTag { from_node: false, ..tag }));
        for (at, byte) in [(0, 0), (1, 0xfb), (6, 0), (7, 0xfb)] {
            let mut other = tagged;
            other[at] = byte;
            assert_eq!(FrameTag::read(&other), None, "{other:02x?}");
        }
        assert_eq!(FrameTag::read(&tagged[..11]), None);
    }

    #[test]
    fn a_frame_to_the_node_names_its_pods_port() {
        let mut frame = [to_node().0, FROM.0].concat();
        assert_eq!(frame[..6], [2, 0xfb, 1, 0, 0xff, 0xff]);
        set_port(&mut frame, PortId(0x0102));
        assert_eq!(frame[..6], [2, 0xfb, 1, 0, 1, 2]);
        assert_eq!(to_pod(PortId(0x0304)).0, [2, 0xfb, 0, 0, 3, 4]);
        set_port(&mut [], PortId(1));
    }
}

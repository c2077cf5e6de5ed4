//! Tags of frames on a worker's veth pair, which carries the packets of many ports: both Ethernet addresses say which.
//!
//! The tc programs write the tags of frames to a worker and read those of frames from one; both sides replace both
//! addresses, so that no pod's bytes are ever taken for a tag (`struct tag` in `xdp-redirect/src/bpf/worker.h`).
//!
//! | bytes | to a worker | from a worker |
//! |---|---|---|
//! | 0 | `02`: locally administered, unicast | `02` |
//! | 1 | `fa` | `fb` |
//! | 2 | flags: 1 the transport checksum is open, 2 [`FROM_NODE`], 4 [`LOCAL_PROCESS`], 8 [`TRANSLATED`], 16 [`LEAVING`], 32 [`UNCHANGED`], 64 [`UNTRANSLATED`], 128 [`TO_NEIGHBOUR`] | flags: 1 [`TO_NODE`], 2 [`TO_UPLINK`], and which protocol is [`allowed`] |
//! | 3 | with [`LEAVING`] the uplink's number | with [`TO_UPLINK`] the same |
//! | 4–5 | number of the pod's port, in network byte order | the same; `ffff`: none |
//! | 6–7 | `02fa` | of what is [`allowed`] the port, in network byte order |
//! | 8–11 | index of the interface at which the frame was, in network byte order | and the epoch, the same |

use crate::batch::StackSender;
use crate::epoch::Epoch;
use crate::forward::{Mac, PortId};
use crate::packet::Protocol;

const LOCAL: u8 = 0x02;
const TO_WORKER: u8 = 0xfa;
const FROM_WORKER: u8 = 0xfb;

/// The transport checksum is that of the pseudo header: the sender's stack left it to the device. The pipeline
/// recognises such a checksum by itself.
#[cfg(test)]
pub(crate) const CHECKSUM_OPEN: u8 = 1;
/// Sent to the pod by the node's stack; otherwise by the pod.
pub(crate) const FROM_NODE: u8 = 2;
/// Sent by a process of the node, not forwarded.
pub(crate) const LOCAL_PROCESS: u8 = 4;
/// Forwarded, and its source translated: who sent it is known by its flow ([`crate::pipeline::OriginalSources`]).
pub(crate) const TRANSLATED: u8 = 8;
/// Forwarded with the addresses and ports that it came with.
pub(crate) const UNCHANGED: u8 = 32;
/// Forwarded with the source that it came with, as far as is known.
pub(crate) const UNTRANSLATED: u8 = 64;
/// Sent by the pod to its node, and by the node's stack on to another machine.
pub(crate) const LEAVING: u8 = 16;
/// Sent by a pod on a bridge to another address there than the bridge's own.
pub(crate) const TO_NEIGHBOUR: u8 = 128;

/// To the node's stack, as a packet of the port; without a port as one of the pair.
const TO_NODE: u8 = 1;
const TO_UPLINK: u8 = 2;
const NO_PORT: PortId = PortId(0xffff);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrameTag {
    /// The port of the pod at whose veth it was.
    pub(crate) port: PortId,
    /// Index of that veth's interface.
    pub(crate) interface: u32,
    /// Whether the node's stack sent it, to the pod or on for it.
    pub(crate) from_node: bool,
}

impl FrameTag {
    /// The tag of a frame that a program sent to a worker; `None` for any other frame.
    #[inline]
    pub(crate) fn read(frame: &[u8]) -> Option<Self> {
        let head: &[u8; 12] = frame.first_chunk()?;
        let [LOCAL, TO_WORKER, flags, _, p, q, LOCAL, TO_WORKER, a, b, c, d] = *head else { return None };
        Some(Self {
            port: PortId(u16::from_be_bytes([p, q])),
            interface: u32::from_be_bytes([a, b, c, d]),
            from_node: flags & FROM_NODE != 0,
        })
    }
}

/// Who sent a frame that came from the node's stack.
#[inline]
pub(crate) fn stack_sender(frame: &[u8]) -> StackSender {
    match frame {
        [LOCAL, TO_WORKER, flags, uplink, p, q, ..] if flags & (FROM_NODE | LEAVING) == FROM_NODE | LEAVING => {
            StackSender::Leaving { port: u16::from_be_bytes([*p, *q]), uplink: *uplink }
        }
        [LOCAL, TO_WORKER, flags, ..] if flags & FROM_NODE != 0 => {
            match flags & (LOCAL_PROCESS | TRANSLATED | UNCHANGED | UNTRANSLATED) {
                LOCAL_PROCESS => StackSender::Process,
                TRANSLATED => StackSender::Translated,
                UNCHANGED => StackSender::Unchanged,
                UNTRANSLATED => StackSender::Untranslated,
                _ => StackSender::Forwarded,
            }
        }
        _ => StackSender::Unknown,
    }
}

/// Whether a pod on a bridge has sent this frame to a neighbour there: to this one, where the frame has the pod's own Ethernet
/// addresses, or to any, by a program's tag.
#[inline]
pub(crate) fn is_to_neighbour(frame: &[u8], neighbour: Mac) -> bool {
    match frame {
        [LOCAL, TO_WORKER, flags, ..] => flags & TO_NEIGHBOUR != 0,
        _ => frame.starts_with(&neighbour.0),
    }
}

/// Destination address by which a frame from a worker goes to the pod behind this port.
pub(crate) const fn to_pod(port: PortId) -> Mac {
    let [p, q] = port.0.to_be_bytes();
    Mac([LOCAL, FROM_WORKER, 0, 0, p, q])
}

/// Destination address by which a frame from a worker goes to the node's stack, as received on the pair.
pub(crate) const fn to_node() -> Mac {
    let [p, q] = NO_PORT.0.to_be_bytes();
    Mac([LOCAL, FROM_WORKER, TO_NODE, 0, p, q])
}

/// Destination address by which a frame of the pod behind this port leaves the node by an uplink. `next`: the protocol, if the program
/// there may send the pod's next packets to this address and port on by itself: those of [`allowed`].
pub(crate) fn to_uplink(uplink: u8, port: PortId, next: Option<Protocol>) -> Mac {
    let [p, q] = port.0.to_be_bytes();
    Mac([LOCAL, FROM_WORKER, TO_UPLINK | next.and_then(remembered).unwrap_or(0), uplink, p, q])
}

/// The flag of a protocol of which the program remembers what is allowed.
const fn remembered(protocol: Protocol) -> Option<u8> {
    match protocol {
        Protocol::TCP => Some(4),
        Protocol::UDP => Some(8),
        Protocol::SCTP => Some(16),
        _ => None,
    }
}

/// Source address of a frame that leaves by an uplink: the port that the pod may send to, and the epoch under which it was evaluated.
pub(crate) fn allowed(to_port: u16, epoch: Epoch) -> Mac {
    let ([p, q], [a, b, c, d]) = (to_port.to_be_bytes(), epoch.0.to_be_bytes());
    Mac([p, q, a, b, c, d])
}

/// Makes a frame with the address of [`to_node`] one that the node's stack receives as a packet of this port. One that leaves [by an
/// uplink](to_uplink) came from the stack, and names its pod's port already.
#[inline]
pub(crate) fn set_port(frame: &mut [u8], port: PortId) {
    if let [LOCAL, FROM_WORKER, TO_NODE, _, p, q, ..] = frame {
        [*p, *q] = port.0.to_be_bytes();
    }
}

/// Source address of every frame from a worker; the programs ignore it.
pub(crate) const FROM: Mac = Mac([LOCAL, FROM_WORKER, 0, 0, 0, 0]);

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
    fn who_sent_a_frame_of_the_stack_is_in_its_flags() {
        let leaving = StackSender::Leaving { port: 0x1234, uplink: 9 };
        for (flags, sender) in [
            (FROM_NODE | LOCAL_PROCESS, StackSender::Process),
            (FROM_NODE | CHECKSUM_OPEN, StackSender::Forwarded),
            (FROM_NODE | TRANSLATED, StackSender::Translated),
            (FROM_NODE | UNCHANGED, StackSender::Unchanged),
            (FROM_NODE | UNTRANSLATED, StackSender::Untranslated),
            // Contradictory: without the exemption of the node's processes.
            (FROM_NODE | TRANSLATED | LOCAL_PROCESS, StackSender::Forwarded),
            (FROM_NODE | UNCHANGED | LOCAL_PROCESS, StackSender::Forwarded),
            (FROM_NODE | UNCHANGED | TRANSLATED, StackSender::Forwarded),
            (FROM_NODE | UNTRANSLATED | LOCAL_PROCESS, StackSender::Forwarded),
            (LOCAL_PROCESS, StackSender::Unknown),
            (LEAVING, StackSender::Unknown),
            (FROM_NODE | LEAVING, leaving),
            (FROM_NODE | LEAVING | LOCAL_PROCESS | TRANSLATED, leaving),
        ] {
            assert_eq!(stack_sender(&[2, 0xfa, flags, 9, 0x12, 0x34]), sender, "{flags:#x}");
        }
        for (next, flags) in [(None, 2), (Some(Protocol::TCP), 6), (Some(Protocol::UDP), 10), (Some(Protocol::ICMP), 2)]
        {
            assert_eq!(to_uplink(9, PortId(0x1234), next).0, [2, 0xfb, flags, 9, 0x12, 0x34]);
        }
        assert_eq!(allowed(0x0102, Epoch(0x0304_0506)).0, [1, 2, 3, 4, 5, 6]);
        for frame in [&[][..], &[2, 0xfa], &[2, 0xfb, FROM_NODE | LOCAL_PROCESS]] {
            assert_eq!(stack_sender(frame), StackSender::Unknown);
        }
    }

    #[test]
    fn a_frame_to_the_node_names_its_pods_port() {
        let mut frame = [to_node().0, FROM.0].concat();
        assert_eq!(frame[..6], [2, 0xfb, 1, 0, 0xff, 0xff]);
        set_port(&mut frame, PortId(0x0102));
        assert_eq!(frame[..6], [2, 0xfb, 1, 0, 1, 2]);
        assert_eq!(to_pod(PortId(0x0304)).0, [2, 0xfb, 0, 0, 3, 4]);
        set_port(&mut [], PortId(1));
        let mut leaving = [to_uplink(9, PortId(0x0506), Some(Protocol::TCP)).0, allowed(80, Epoch(1)).0].concat();
        set_port(&mut leaving, PortId(1));
        assert_eq!(leaving[..6], [2, 0xfb, 2 | 4, 9, 5, 6], "that of who may send there");
    }

    #[test]
    fn a_frame_to_a_neighbour_has_its_address_or_a_tag() {
        let neighbour = Mac([6, 1, 2, 3, 4, 5]);
        for (frame, is_to_neighbour) in [
            (&[2, 0xfa, TO_NEIGHBOUR | CHECKSUM_OPEN, 0, 0, 1, 2, 0xfa][..], true),
            (&[2, 0xfa, CHECKSUM_OPEN, 0, 0, 1, 2, 0xfa], false),
            (&[6, 1, 2, 3, 4, 5, 6, 0], true),
            (&[6, 1, 2, 3, 4, 6, 6, 0], false),
            (&[6, 1], false),
        ] {
            assert_eq!(super::is_to_neighbour(frame, neighbour), is_to_neighbour, "{frame:02x?}");
        }
    }
}

//! After the last stage: what DNS answers in the batch say of names, for pods whose rules have some.

use super::{AdmittedPacket, BATCH, Verdict};
use crate::Snapshot;
use crate::batch::Frames;
use crate::conntrack::{ConnTable, Timestamp};
use crate::names::{LearntNames, Moment};
use crate::packet::{Packet, Protocol, Transport};

/// The port of DNS servers.
const DNS: u16 = 53;
/// Bytes of a UDP header.
const UDP_HEADER: usize = 8;

/// Learns from the answers in a batch. Nothing of the batch has been sent yet, so no packet that follows from an answer comes
/// before this. An answer counts only as the reply of a connection that its pod has opened, and policy allows: what nobody
/// has asked for teaches nothing.
#[cold]
#[inline(never)]
pub(super) fn learn<F: Frames>(
    connections: &ConnTable,
    snapshot: &Snapshot,
    now: Timestamp,
    frames: &mut F,
    slots: &[AdmittedPacket],
    verdicts: &[Verdict; BATCH],
) {
    for slot in slots {
        let Verdict::Forward(_) = verdicts[slot.index] else { continue };
        let Some(names) = hears(snapshot, slot) else { continue };
        let connection = connections.find(&slot.hashed, now);
        let is_answer =
            connection.is_some_and(|found| found.is_reply(slot.hashed.orientation()) && !found.is_revoked());
        if is_answer && let Some(message) = payload(frames.bytes(slot.index), slot) {
            names.hear(message, Moment(now.as_millis()));
        }
    }
}

/// What the pod has learnt for which this packet may be a DNS answer, if its rules have names: as the pod receives it, from
/// a server's port. A fragment is none: its rest would be missing.
pub(super) fn hears<'a>(snapshot: &'a Snapshot, slot: &AdmittedPacket) -> Option<&'a LearntNames> {
    let packet = &slot.packet;
    let flow = slot.translation().map_or(packet.flow, |translation| translation.out);
    let may_answer = packet.transport == Transport::Udp
        && flow.protocol == Protocol::UDP
        && flow.src_port == DNS
        && packet.fragment.is_none();
    if may_answer { snapshot.policy.names_of(flow.dst) } else { None }
}

/// Whether a pod asks a DNS server by this packet, and hears what that answers.
pub(super) fn asks(snapshot: &Snapshot, packet: &Packet) -> bool {
    packet.flow.protocol == Protocol::UDP
        && packet.flow.dst_port == DNS
        && snapshot.policy.names_of(packet.flow.src).is_some()
}

/// The datagram's payload.
fn payload<'a>(frame: &'a [u8], slot: &AdmittedPacket) -> Option<&'a [u8]> {
    let layout = &slot.packet.layout;
    let datagram = frame.get(usize::from(layout.transport)..usize::from(layout.end))?;
    let length = u16::from_be_bytes(datagram.get(4..6)?.try_into().ok()?);
    datagram.get(UDP_HEADER..usize::from(length))
}

//! After the last stage: what the batch has of DNS, for pods whose rules have names.

use super::{AdmittedPacket, BATCH, Verdict};
use crate::Snapshot;
use crate::batch::Frames;
use crate::conntrack::{ConnTable, PreparedFlow, Timestamp};
use crate::names::{DnsSegment, DnsTalk, LearntNames, Moment, Side};
use crate::packet::{Packet, Protocol, TcpFlags, Transport};

/// The port of DNS servers.
const DNS: u16 = 53;
/// Bytes of a UDP header.
const UDP_HEADER: usize = 8;

/// Learns from the answers in a batch, as far as they are to questions in this one or before. Nothing of the batch has been sent yet, so no
/// packet that follows from an answer comes before this. An answer counts only as the reply of a connection that its pod has opened, and
/// policy allows: what nobody has asked for teaches nothing.
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
    let moment = Moment(now.as_millis());
    for slot in slots {
        let Verdict::Forward(_) = verdicts[slot.index] else { continue };
        let (names, side, flow) = match (answers_for(snapshot, slot), questions_of(snapshot, &slot.packet)) {
            (Some(names), _) => (names, Side::Resolver, slot.packet.flow.reversed()),
            (None, Some(names)) => (names, Side::Pod, slot.packet.flow),
            (None, None) => continue,
        };
        let is_reply = side == Side::Resolver;
        let is_of_pods_connection = |hashed: &PreparedFlow| {
            let found = connections.find(hashed, now);
            found.is_some_and(|found| found.is_reply(hashed.orientation()) == is_reply && !found.is_revoked())
        };
        if !is_of_pods_connection(&slot.hashed) {
            continue;
        }
        let is_stream = flow.protocol == Protocol::TCP;
        let talk = DnsTalk { resolver: flow.dst, pod: flow.src, port: flow.src_port, is_stream };
        let frame = frames.bytes(slot.index);
        match (side, segment(frame, slot), datagram(frame, slot)) {
            (side, Some(segment), _) => names.hear_segment(talk, side, segment, moment),
            (Side::Pod, None, Some(message)) => names.ask(talk, message),
            (Side::Resolver, None, Some(message)) => names.hear(talk, message, moment),
            (_, None, None) => {}
        }
    }
}

/// The names of the pod for which this packet may be a DNS answer, if its rules have names: as the pod receives it, from the port of one
/// of the cluster's resolvers. A fragment is none: its rest would be missing.
pub(super) fn answers_for<'a>(snapshot: &'a Snapshot, slot: &AdmittedPacket) -> Option<&'a LearntNames> {
    let flow = &slot.packet.flow;
    let may_answer = flow.src_port == DNS && is_read(&slot.packet);
    if may_answer { snapshot.policy.names_of(flow.dst).filter(|_| snapshot.resolvers.contains(flow.src)) } else { None }
}

/// The names of a pod that may ask one of the cluster's resolvers by this packet.
pub(super) fn questions_of<'a>(snapshot: &'a Snapshot, packet: &Packet) -> Option<&'a LearntNames> {
    let flow = &packet.flow;
    let may_ask = flow.dst_port == DNS && is_read(packet);
    if may_ask { snapshot.policy.names_of(flow.src).filter(|_| snapshot.resolvers.contains(flow.dst)) } else { None }
}

fn is_read(packet: &Packet) -> bool {
    matches!(packet.transport, Transport::Udp | Transport::Tcp(_)) && packet.fragment.is_none()
}

/// The datagram's payload.
fn datagram<'a>(frame: &'a [u8], slot: &AdmittedPacket) -> Option<&'a [u8]> {
    let layout = &slot.packet.layout;
    let datagram = frame.get(usize::from(layout.transport)..usize::from(layout.end))?;
    let length = u16::from_be_bytes(datagram.get(4..6)?.try_into().ok()?);
    datagram.get(UDP_HEADER..usize::from(length))
}

/// The place of a segment in its stream.
fn segment<'a>(frame: &'a [u8], slot: &AdmittedPacket) -> Option<DnsSegment<'a>> {
    let Transport::Tcp(segment) = &slot.packet.transport else { return None };
    let end = usize::from(slot.packet.layout.end);
    let data = frame.get(end.checked_sub(usize::from(segment.payload_len))?..end)?;
    Some(DnsSegment { seq: segment.seq, opens: segment.flags.contains(TcpFlags::SYN), data })
}

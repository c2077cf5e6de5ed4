//! An existing connection allows the packet, otherwise policy is evaluated.

mod open;

pub(super) use open::owner;

use super::dispatch::{Leaving, PacketPath};
use super::sources::{Opener, OriginalSources};
use super::{AdmittedPacket, DroppedPacket, EvaluationReason, Observer};
use crate::batch::{Frames, StackSender};
use crate::conntrack::{Conn, ConnTable, DatagramKey, Reevaluation, Timestamp, Update};
use crate::forward::PortId;
use crate::names::{Moment, NameTime};
use crate::packet::{Address, Flow, Packet, Transport, quoted_ends, quoted_flow};
use crate::policy::{EvaluationForm, FlowEnds, PolicySet};
use crate::{DropReason, Snapshot};

/// The stage for one batch, with the current packet.
pub(super) struct Tracker<'a, F, O> {
    pub(super) frames: &'a mut F,
    pub(super) sources: Option<&'a dyn OriginalSources>,
    pub(super) connections: &'a ConnTable,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Timestamp,
    pub(super) ingress: PortId,
    pub(super) index: usize,
    pub(super) observer: &'a mut O,
    /// Whether the batch came from the node's own stack.
    pub(super) from_host: bool,
    /// Whether fragments that are early are held.
    pub(super) holds_early: bool,
}

impl<'a, F: Frames, O: Observer> Tracker<'a, F, O> {
    /// Returns the path of the packet if it may pass.
    #[inline(always)]
    pub(super) fn track(&mut self, entry: &mut AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        self.index = entry.index;
        let sender = self.sender();
        entry.is_as_it_came = matches!(sender, StackSender::Unchanged | StackSender::Untranslated);
        if let StackSender::Leaving { port, uplink } = sender {
            let pod = PortId(port);
            let route = PacketPath::ByUplink(Leaving { uplink, pod, allows_next: false });
            return match self.leave_by_uplink(&entry.packet, pod, uplink) {
                Ok(leaving) => Ok(PacketPath::ByUplink(leaving)),
                Err(dropped) => Err(DroppedPacket { route, ..dropped }),
            };
        }
        if self.has_nodes_source(&entry.packet) {
            return Err(DropReason::SpoofedSource.into());
        }
        match entry.packet.transport {
            Transport::IcmpError { quoted_at } => return self.related(entry, quoted_at),
            Transport::LaterFragment => return self.later_fragment(entry),
            // Between ends without policy, or it were not here.
            Transport::Unreadable => return Ok(PacketPath::Direct),
            _ => {}
        }
        let route = match self.connections.find(&entry.hashed, self.now) {
            Some(connection) => self.follow(connection, entry)?,
            None => self.open(entry)?,
        };
        if entry.packet.fragment.is_some() {
            self.connections.fragments().remember(&entry.packet, self.ingress, self.now);
        }
        Ok(route)
    }

    /// A pod's packet to its own node or to a Service, which the node sends on to another machine. Egress policy is for that one. The
    /// answers come back by the node, so that there is no connection to track: the program at the uplink keeps what is allowed.
    #[cold]
    #[inline(never)]
    fn leave_by_uplink(&mut self, packet: &Packet, pod: PortId, uplink: u8) -> Result<Leaving, DroppedPacket> {
        let sent = self.leaving_flow(packet)?;
        // The node may have given it an address of its own.
        let src = self.snapshot.own_address(pod, sent.src.is_v4()).ok_or(DropReason::NotReady)?;
        if self.answers_connection(&sent)? {
            return Ok(Leaving { uplink, pod, allows_next: false });
        }
        let flow = Flow { src, ..sent };
        let policy = &self.snapshot.policy;
        let verdict = policy.evaluate_as_it_is(&flow, self.name_time(EvaluationReason::Opened));
        // There is no connection here that would tell which of its packets is the first.
        if !verdict.is_allowed() || packet.transport.may_open() {
            self.observer.evaluated(self.index, &flow, &verdict, EvaluationForm::Plain, EvaluationReason::Opened);
        }
        if let Some(reason) = verdict.drop_reason() {
            return Err(reason.into());
        }
        if packet.fragment.is_some() {
            self.connections.fragments().remember(packet, self.ingress, self.now);
        }
        let allows_next = sent == packet.flow && may_leave_unseen(policy, &flow);
        Ok(Leaving { uplink, pod, allows_next })
    }

    /// Whether a flow answers a connection of the table, which the flow's receiver has opened.
    ///
    /// # Errors
    /// Policy does not allow that connection any more.
    fn answers_connection(&mut self, flow: &Flow) -> Result<bool, DropReason> {
        let hashed = self.connections.prepare(flow);
        let Some(mut connection) = self.connections.find(&hashed, self.now) else { return Ok(false) };
        if !connection.is_reply(hashed.orientation()) {
            return Ok(false);
        }
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            self.reevaluate(&mut connection);
        }
        if connection.is_revoked() { Err(DropReason::ConnectionRevoked) } else { Ok(true) }
    }

    /// The flow that a packet which leaves the node belongs to, in the direction of its sender.
    fn leaving_flow(&mut self, packet: &Packet) -> Result<Flow, DroppedPacket> {
        match packet.transport {
            Transport::IcmpError { quoted_at } => {
                let quoted = quoted_flow(self.frames.bytes(self.index), packet, quoted_at);
                // The sender is an end of the connection, or the pod could report errors about others'.
                let is_between = |quoted: &Flow| (quoted.src, quoted.dst) == (packet.flow.dst, packet.flow.src);
                let quoted = quoted.filter(is_between).map(|quoted| quoted.reversed());
                quoted.ok_or_else(|| DropReason::NoConnection.into())
            }
            Transport::LaterFragment => {
                let flow = self.connections.fragments().flow_of(packet, self.ingress, self.now);
                flow.ok_or_else(|| self.without_flow(packet))
            }
            _ => Ok(packet.flow),
        }
    }

    /// Whether a packet came to the node with an address of the node itself for a pod that policy selects, or answers such a pod with the
    /// address of a Service: it answers nothing that the pod has asked the node.
    #[inline(always)]
    fn has_nodes_source(&mut self, packet: &Packet) -> bool {
        self.from_host
            && matches!(self.sender(), StackSender::Unchanged | StackSender::Untranslated)
            && self.snapshot.has_nodes_source(&packet.flow)
            && !self.is_free(&packet.flow)
            && !self.is_of_sender(packet)
    }

    /// Whether a packet with another source than the node's belongs to a connection that its sender opens, or has opened. Who writes a
    /// Service chooses its addresses: one may be a machine's, which other pods serve.
    #[cold]
    #[inline(never)]
    fn is_of_sender(&mut self, packet: &Packet) -> bool {
        let flow = match packet.transport {
            _ if self.snapshot.forwarding.is_node(packet.flow.src) => return false,
            Transport::IcmpError { .. } | Transport::Unreadable => return false,
            Transport::LaterFragment => match self.connections.fragments().flow_of(packet, self.ingress, self.now) {
                Some(flow) => flow,
                // It waits for its first one.
                None => return true,
            },
            _ => packet.flow,
        };
        let hashed = self.connections.prepare(&flow);
        self.connections.find(&hashed, self.now).is_none_or(|known| !known.is_reply(hashed.orientation()))
    }

    /// A later fragment belongs to the connection of its first fragment, which has the ports.
    #[cold]
    #[inline(never)]
    fn later_fragment(&mut self, entry: &mut AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        let fragments = self.connections.fragments();
        let Some(flow) = fragments.flow_of(&entry.packet, self.ingress, self.now) else {
            // Its first fragment may come later, or another way.
            let is_free = self.is_free(&entry.packet.flow);
            return if is_free { Ok(PacketPath::Direct) } else { Err(self.without_flow(&entry.packet)) };
        };
        entry.hashed = self.connections.prepare(&flow);
        let connection = self.connections.find(&entry.hashed, self.now).ok_or(DropReason::Fragment)?;
        self.follow(connection, entry)
    }

    /// A later fragment that gets no flow: its first is not known yet, or it overlaps that.
    fn without_flow(&self, packet: &Packet) -> DroppedPacket {
        let datagram = DatagramKey::of(packet, self.ingress);
        let has_first = datagram.is_some_and(|it| self.connections.fragments().has_first(&it, self.now));
        DroppedPacket { is_early: self.holds_early && !has_first, ..DropReason::Fragment.into() }
    }

    /// A packet of a known connection.
    #[inline(always)]
    fn follow(&mut self, mut connection: Conn<'_>, entry: &AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            return self.follow_again(connection, entry);
        }
        let route = self.route_of(&mut connection, &entry.packet);
        match connection.update(entry.hashed.orientation(), &entry.packet.transport, self.now) {
            Update::Accepted(_) => Ok(route),
            other => self.follow_exception(other, connection, entry, route),
        }
    }

    /// A packet that its connection does not simply accept.
    #[cold]
    #[inline(never)]
    fn follow_exception(
        &mut self,
        update: Update,
        connection: Conn<'_>,
        entry: &AdmittedPacket,
        route: PacketPath,
    ) -> Result<PacketPath, DroppedPacket> {
        let rejected = |reason: DropReason| Err(DroppedPacket { route, ..reason.into() });
        match update {
            Update::Accepted(_) => Ok(route),
            Update::Invalid if self.is_free(&entry.packet.flow) => Ok(route),
            Update::Invalid => rejected(DropReason::InvalidState),
            Update::Revoked => rejected(DropReason::ConnectionRevoked),
            Update::Removed => self.open(entry),
            Update::Opens => self.open_in_place(connection, entry),
            Update::ReverseSyn => self.evaluate_reverse_syn(connection, entry).map(|()| route),
            Update::Restarts => self.restart(connection, entry).map(|()| route),
        }
    }

    /// A packet that opens a connection in place of one that has ended or was revoked. Policy is evaluated first: if
    /// the old one were removed for a packet that is then denied, the next packet of its other side could bring it
    /// back.
    fn open_in_place(&mut self, old: Conn<'_>, entry: &AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        let opening = self.evaluate_first(entry)?;
        if !old.replace(entry.hashed.orientation(), &entry.packet.transport, self.now) {
            return Err(DropReason::InvalidState.into());
        }
        self.insert(entry, &opening)
    }

    /// A SYN on a live connection from the answering side.
    fn evaluate_reverse_syn(&mut self, mut connection: Conn<'_>, entry: &AdmittedPacket) -> Result<(), DroppedPacket> {
        let opener = Opener::Sender(self.sender());
        let flow = &entry.packet.flow;
        self.evaluate(flow, self.snapshot.policy.ends(flow), opener, EvaluationReason::Opened)?;
        match connection.hold_syn(entry.hashed.orientation(), &entry.packet.transport, self.now) {
            Update::Accepted(_) => Ok(()),
            _ => Err(DropReason::InvalidState.into()),
        }
    }

    /// A SYN-ACK by which both ends restart a connection that is still live in the table.
    fn restart(&mut self, mut connection: Conn<'_>, entry: &AdmittedPacket) -> Result<(), DroppedPacket> {
        self.evaluate_opener(&connection, &entry.packet.flow.reversed(), EvaluationReason::Opened)?;
        let (orientation, transport) = (entry.hashed.orientation(), &entry.packet.transport);
        let restarted = connection.restart(self.snapshot.epoch, orientation, transport, self.now);
        if restarted { Ok(()) } else { Err(DropReason::InvalidState.into()) }
    }

    /// A connection that came through the node's own stack uses it in both directions, since it was translated there:
    /// packets from a pod go to the stack, packets from the stack to the pod.
    #[inline(always)]
    fn route_of(&mut self, connection: &mut Conn<'_>, packet: &Packet) -> PacketPath {
        match (self.from_host, connection.via_host()) {
            (false, true) => return PacketPath::ViaHost,
            (false, false) => {}
            (true, false) => {
                // The pod now reaches this end through another address, from the same port. One that the node has not
                // translated was on its way when the other pod got its port.
                let may_be_translated = packet.transport.may_open() && self.sender() != StackSender::Unchanged;
                if may_be_translated && self.is_pod(packet.flow.src) {
                    connection.set_via_host(true);
                }
            }
            (true, true) => {
                // One that workers met in its middle, and the node does not translate: it needs the node no longer.
                if self.sender() == StackSender::Unchanged && self.is_pod(packet.flow.src) {
                    connection.set_via_host(false);
                }
            }
        }
        PacketPath::Direct
    }

    fn is_pod(&self, address: Address) -> bool {
        self.snapshot.pod_port(address).is_some()
    }

    /// A packet of a connection that must be evaluated again. If that revokes it, the reply to the packet's sender carries
    /// the sequence number that the packet's destination expects.
    #[cold]
    #[inline(never)]
    fn follow_again(&mut self, mut connection: Conn<'_>, entry: &AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        let mut revoked_at = None;
        if self.reevaluate(&mut connection) == Reevaluation::Revoked
            && let Transport::Tcp(segment) = entry.packet.transport
        {
            // After a restart the segment's own number is the best known.
            revoked_at = connection.next_sequence(entry.hashed.orientation(), self.now).or(Some(segment.seq));
        }
        let route = self.route_of(&mut connection, &entry.packet);
        let update = connection.update(entry.hashed.orientation(), &entry.packet.transport, self.now);
        let followed = self.follow_exception(update, connection, entry, route);
        followed.map_err(|dropped| DroppedPacket { revoked_at, ..dropped })
    }

    /// Whether no policy selects an end of this flow, so that its packets pass whatever their connection.
    #[cold]
    #[inline(never)]
    fn is_free(&self, flow: &Flow) -> bool {
        self.snapshot.policy.is_free(self.snapshot.policy.ends(flow))
    }

    /// An ICMP error: it passes for a live connection, to the sender of the quoted packet. Routers send them, and the
    /// packet's destination; a pod is no router, so it may not send errors about other pods' connections.
    #[inline(never)]
    fn related(&mut self, entry: &AdmittedPacket, quoted_at: u16) -> Result<PacketPath, DroppedPacket> {
        let (packet, frame) = (&entry.packet, self.frames.bytes(self.index));
        let (src, dst) = quoted_ends(frame, packet, quoted_at).ok_or(DropReason::NoConnection)?;
        let quoted = quoted_flow(frame, packet, quoted_at);
        let is_router = !self.is_pod(packet.flow.src);
        if src != packet.flow.dst || !(is_router || dst == packet.flow.src) {
            return Err(DropReason::NoConnection.into());
        }
        let Some(mut connection) = quoted.and_then(|quoted| self.connections.related(&quoted, self.now)) else {
            let is_free = self.is_free(&packet.flow);
            return if is_free { Ok(PacketPath::Direct) } else { Err(DropReason::NoConnection.into()) };
        };
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            self.reevaluate(&mut connection);
        }
        // The node translates what is quoted back to what its receiver knows.
        let route = if connection.via_host() && !self.from_host { PacketPath::ViaHost } else { PacketPath::Direct };
        if connection.is_revoked() {
            Err(DroppedPacket { route, ..DropReason::ConnectionRevoked.into() })
        } else {
            Ok(route)
        }
    }

    /// A connection last evaluated under an older epoch: it is evaluated again in its original direction, and kept or
    /// revoked.
    ///
    /// A revoked connection keeps its entry. If it were removed, a packet of its answering side would be evaluated as
    /// if that side had opened it, and might bring back what policy has revoked.
    #[cold]
    fn reevaluate(&mut self, connection: &mut Conn<'_>) -> Reevaluation {
        let flow = connection.original_flow();
        let allowed = self.evaluate_opener(connection, &flow, EvaluationReason::Reevaluated).is_ok();
        connection.set_verdict(self.snapshot.epoch, allowed)
    }

    /// Who sent the packet, if it came from the node's stack.
    #[inline(always)]
    pub(super) fn sender(&mut self) -> StackSender {
        if self.from_host { self.frames.stack_sender(self.index) } else { StackSender::Unknown }
    }

    /// Evaluates policy for a known connection, in the direction in which it is opened.
    fn evaluate_opener(
        &mut self,
        connection: &Conn<'_>,
        flow: &Flow,
        evaluation_reason: EvaluationReason,
    ) -> Result<(), DropReason> {
        let ends = self.snapshot.policy.ends(flow);
        let kept = || self.connections.opener_of(connection);
        let opener = Opener::of_connection(connection.via_host(), ends, kept);
        self.evaluate(flow, ends, opener, evaluation_reason).map(drop)
    }

    /// Which domain names count: for a connection that is opened, those that hold now; one that was allowed before stays so
    /// when they expire.
    #[inline(always)]
    fn name_time(&self, evaluation_reason: EvaluationReason) -> NameTime {
        match evaluation_reason {
            EvaluationReason::Opened => NameTime::At(Moment(self.now.as_millis())),
            EvaluationReason::Reevaluated => NameTime::Ever,
        }
    }

    /// Evaluates policy in the direction in which the connection is opened. Returns the flow that it was asked about.
    fn evaluate(
        &mut self,
        flow: &Flow,
        ends: FlowEnds<'_>,
        opener: Opener,
        evaluation_reason: EvaluationReason,
    ) -> Result<Flow, DropReason> {
        let policy = &self.snapshot.policy;
        let time = self.name_time(evaluation_reason);
        let (flow, policy_verdict, form) = opener.evaluate(policy, self.sources, flow, ends, time);
        self.observer.evaluated(self.index, &flow, &policy_verdict, form, evaluation_reason);
        match policy_verdict.drop_reason() {
            None => Ok(flow),
            Some(DropReason::EgressDenied) if self.snapshot.forwarding.is_service(flow.dst) => {
                Err(DropReason::ServiceDenied)
            }
            Some(reason) => Err(reason),
        }
    }
}

/// Whether no worker needs to see the next packets that a pod sends to a destination behind the node's translation, if policy allows this
/// one: an allowed name expires, and workers record connections.
pub(super) fn may_leave_unseen(policy: &PolicySet, flow: &Flow) -> bool {
    policy.names_of(flow.src).is_none() && !policy.may_record_allowed(policy.ends(flow))
}

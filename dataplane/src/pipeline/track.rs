//! Second stage: an existing connection allows the packet, otherwise policy is evaluated.

use super::dispatch::PacketPath;
use super::timed::StageTimer;
use super::{AdmittedPacket, DroppedPacket, EvaluationReason, Observer, PipelineMode};
use crate::conntrack::{
    Conn, ConnTable, InsertError, Insertion, NewConnection, OwnerId, PreparedFlow, Reevaluation, Timestamp, Update,
};
use crate::forward::PortId;
use crate::packet::{Address, Flow, Packet, Transport, quoted_flow};
use crate::policy::{AddressEntry, FlowEnds};
use crate::{DropReason, Snapshot};

/// The stage for one batch, with the current packet.
pub(super) struct Tracker<'a, O, T> {
    pub(super) connections: &'a ConnTable,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Timestamp,
    pub(super) ingress: PortId,
    pub(super) index: usize,
    pub(super) observer: &'a mut O,
    pub(super) timer: &'a mut T,
    /// Whether the batch came from the node's own stack.
    pub(super) from_host: bool,
}

impl<O: Observer, T: StageTimer> Tracker<'_, O, T> {
    /// Tracks a packet of the batch, if the mode wants it.
    #[inline(always)]
    pub(super) fn track_in(
        &mut self,
        mode: PipelineMode,
        frame: &[u8],
        entry: &AdmittedPacket,
    ) -> Result<PacketPath, DroppedPacket> {
        self.index = entry.index;
        match mode {
            PipelineMode::Full => self.track(frame, &entry.packet, &entry.hashed),
            PipelineMode::ForwardOnly => Ok(PacketPath::Direct),
        }
    }

    /// Returns the path of the packet if it may pass.
    #[inline(always)]
    fn track(&mut self, frame: &[u8], packet: &Packet, hashed: &PreparedFlow) -> Result<PacketPath, DroppedPacket> {
        match packet.transport {
            Transport::IcmpError { quoted_at } => return self.related(frame, packet, quoted_at),
            Transport::LaterFragment => return self.later_fragment(packet),
            _ => {}
        }
        let route = match self.connections.find(hashed, self.now) {
            Some(connection) => self.follow(connection, packet, hashed)?,
            None => self.open(packet, hashed)?,
        };
        if packet.fragment.is_some() {
            self.connections.fragments().remember(packet, self.ingress, self.now);
        }
        Ok(route)
    }

    /// A later fragment belongs to the connection of its first fragment, which has the ports.
    #[cold]
    #[inline(never)]
    fn later_fragment(&mut self, packet: &Packet) -> Result<PacketPath, DroppedPacket> {
        let flow = self.connections.fragments().flow_of(packet, self.ingress, self.now).ok_or(DropReason::Fragment)?;
        let hashed = self.connections.prepare(&flow);
        let connection = self.connections.find(&hashed, self.now).ok_or(DropReason::Fragment)?;
        self.follow(connection, packet, &hashed)
    }

    /// A packet of a known connection.
    #[inline(always)]
    fn follow(
        &mut self,
        mut connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<PacketPath, DroppedPacket> {
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            return self.follow_again(connection, packet, hashed);
        }
        let route = self.route_of(&mut connection, packet);
        match connection.update(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(route),
            other => self.follow_exception(other, connection, packet, hashed, route),
        }
    }

    /// A packet that its connection does not simply accept.
    #[cold]
    #[inline(never)]
    fn follow_exception(
        &mut self,
        update: Update,
        connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
        route: PacketPath,
    ) -> Result<PacketPath, DroppedPacket> {
        let rejected = |reason| Err(DroppedPacket { reason, revoked_at: None, route });
        match update {
            Update::Accepted(_) => Ok(route),
            Update::Invalid => rejected(DropReason::InvalidState),
            Update::Revoked => rejected(DropReason::ConnectionRevoked),
            Update::Removed => self.open(packet, hashed),
            Update::Opens => self.open_in_place(connection, packet, hashed),
            Update::ReverseSyn => self.ask_in_reverse(connection, packet, hashed).map(|()| route),
            Update::Restarts => self.restart(connection, packet, hashed).map(|()| route),
        }
    }

    /// A packet that opens a connection in place of one that has ended or was revoked. Policy is evaluated first: if
    /// the old one were removed for a packet that is then denied, the next packet of its other side could bring it
    /// back.
    fn open_in_place(
        &mut self,
        old: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<PacketPath, DroppedPacket> {
        let ends = self.snapshot.policy.ends(&packet.flow);
        self.evaluate(&packet.flow, ends, EvaluationReason::Opened)?;
        if !old.replace(hashed.orientation(), &packet.transport, self.now) {
            return Err(DropReason::InvalidState.into());
        }
        self.enter(packet, hashed, ends)
    }

    /// A SYN on a live connection from the answering side.
    fn ask_in_reverse(
        &mut self,
        mut connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<(), DroppedPacket> {
        self.evaluate_flow(&packet.flow, EvaluationReason::Opened)?;
        match connection.hold_syn(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(()),
            _ => Err(DropReason::InvalidState.into()),
        }
    }

    /// A SYN-ACK by which both ends restart a connection that is still live in the table.
    fn restart(
        &mut self,
        mut connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<(), DroppedPacket> {
        self.evaluate_flow(&packet.flow.reversed(), EvaluationReason::Opened)?;
        let restarted = connection.restart(self.snapshot.epoch, hashed.orientation(), &packet.transport, self.now);
        if restarted { Ok(()) } else { Err(DropReason::InvalidState.into()) }
    }

    /// A connection that came through the node's own stack uses it in both directions, since it was translated there:
    /// packets from a pod go to the stack, packets from the stack to the pod.
    #[inline(always)]
    fn route_of(&self, connection: &mut Conn<'_>, packet: &Packet) -> PacketPath {
        match (self.from_host, connection.via_host()) {
            (false, true) => PacketPath::ViaHost,
            (true, false) => {
                // The pod now reaches this end through another address, from the same port.
                if packet.transport.may_open() && self.is_pod(packet.flow.src) {
                    connection.set_via_host();
                }
                PacketPath::Direct
            }
            _ => PacketPath::Direct,
        }
    }

    /// Whether the connection that this packet opens goes through the node's own stack in both directions. A pod's packet
    /// that comes from the stack was translated there. For a mid-stream pick-up between two local pods this is unknown;
    /// the stack forwards it either way, if there is a port into it.
    fn enters_via_host(&self, packet: &Packet, ends: FlowEnds<'_>) -> bool {
        let is_pod = |end: &AddressEntry| end.port().is_some();
        let known = packet.transport.may_open();
        let has_host = self.snapshot.forwarding.host().is_some();
        has_host && is_pod(ends.src) && (self.from_host || !known && is_pod(ends.dst))
    }

    fn is_pod(&self, address: Address) -> bool {
        self.snapshot.pod_port(address).is_some()
    }

    /// A packet of a connection that must be evaluated again. If that revokes it, the reply to the packet's sender carries
    /// the sequence number that the packet's destination expects.
    #[cold]
    #[inline(never)]
    fn follow_again(
        &mut self,
        mut connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<PacketPath, DroppedPacket> {
        let mut revoked_at = None;
        if self.reevaluate(&mut connection) == Reevaluation::Revoked
            && let Transport::Tcp(segment) = packet.transport
        {
            // After a restart the segment's own number is the best known.
            revoked_at = connection.next_sequence(hashed.orientation(), self.now).or(Some(segment.seq));
        }
        let route = self.route_of(&mut connection, packet);
        let update = connection.update(hashed.orientation(), &packet.transport, self.now);
        let followed = self.follow_exception(update, connection, packet, hashed, route);
        followed.map_err(|dropped| DroppedPacket { revoked_at, ..dropped })
    }

    /// A packet without a connection: policy is evaluated, and a connection opened if allowed.
    #[inline(never)]
    fn open(&mut self, packet: &Packet, hashed: &PreparedFlow) -> Result<PacketPath, DroppedPacket> {
        let ends = self.snapshot.policy.ends(&packet.flow);
        self.evaluate(&packet.flow, ends, EvaluationReason::Opened)?;
        self.enter(packet, hashed, ends)
    }

    /// Enters the connection that an allowed packet opens.
    fn enter(
        &mut self,
        packet: &Packet,
        hashed: &PreparedFlow,
        ends: FlowEnds<'_>,
    ) -> Result<PacketPath, DroppedPacket> {
        let via_host = self.enters_via_host(packet, ends);
        let route = match ends.dst.port() {
            _ if via_host && !self.from_host => PacketPath::ViaHost,
            Some(port) => PacketPath::At(port),
            None => PacketPath::Direct,
        };
        let new = NewConnection {
            hashed,
            transport: &packet.transport,
            owner: owner(ends),
            via_host,
            epoch: self.snapshot.epoch,
            now: self.now,
        };
        match self.connections.insert(&new) {
            Ok(Insertion::Created(_)) => Ok(route),
            // Another worker was first, perhaps with a packet of the other direction.
            Ok(Insertion::Found(mut connection)) => {
                let route = self.route_of(&mut connection, packet);
                match connection.update(hashed.orientation(), &packet.transport, self.now) {
                    Update::Accepted(_) => Ok(route),
                    Update::Revoked => {
                        Err(DroppedPacket { reason: DropReason::ConnectionRevoked, revoked_at: None, route })
                    }
                    // Ended again within the same instant: the sender will try again.
                    _ => Err(DropReason::InvalidState.into()),
                }
            }
            Err(InsertError::Full) => Err(DropReason::TableFull.into()),
            Err(InsertError::Quota) => Err(DropReason::QuotaExceeded.into()),
            Err(InsertError::CannotOpen) => Err(DropReason::NoConnection.into()),
        }
    }

    /// An ICMP error: it passes for a live connection, to the sender of the quoted packet. Routers send them, and the
    /// packet's destination; a pod is no router, so it may not send errors about other pods' connections.
    #[inline(never)]
    fn related(&mut self, frame: &[u8], packet: &Packet, quoted_at: u16) -> Result<PacketPath, DroppedPacket> {
        let quoted = quoted_flow(frame, packet, quoted_at).ok_or(DropReason::NoConnection)?;
        let is_router = !self.is_pod(packet.flow.src);
        if quoted.src != packet.flow.dst || !(is_router || quoted.dst == packet.flow.src) {
            return Err(DropReason::NoConnection.into());
        }
        let mut connection = self.connections.related(&quoted, self.now).ok_or(DropReason::NoConnection)?;
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            self.reevaluate(&mut connection);
        }
        // The node translates what is quoted back to what its receiver knows.
        let route = if connection.via_host() && !self.from_host { PacketPath::ViaHost } else { PacketPath::Direct };
        if connection.is_revoked() {
            Err(DroppedPacket { reason: DropReason::ConnectionRevoked, revoked_at: None, route })
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
        let allowed = self.evaluate_flow(&connection.original_flow(), EvaluationReason::Reevaluated).is_ok();
        connection.set_verdict(self.snapshot.epoch, allowed)
    }

    /// Evaluates policy in the direction in which the connection is opened.
    fn evaluate_flow(&mut self, flow: &Flow, evaluation_reason: EvaluationReason) -> Result<(), DropReason> {
        self.evaluate(flow, self.snapshot.policy.ends(flow), evaluation_reason)
    }

    /// The same, with what is known of the flow's ends.
    fn evaluate(
        &mut self,
        flow: &Flow,
        ends: FlowEnds<'_>,
        evaluation_reason: EvaluationReason,
    ) -> Result<(), DropReason> {
        self.timer.before_evaluation();
        let policy_verdict = self.snapshot.policy.evaluate_between(flow, ends);
        self.timer.evaluated();
        self.observer.evaluated(self.index, flow, &policy_verdict, evaluation_reason);
        match policy_verdict.drop_reason() {
            None => Ok(()),
            Some(DropReason::EgressDenied) if self.snapshot.forwarding.is_service(flow.dst) => {
                Err(DropReason::ServiceDenied)
            }
            Some(reason) => Err(reason),
        }
    }
}

/// Owner for quotas: the local pod that opens the connection, otherwise the local pod that it is for.
fn owner(ends: FlowEnds<'_>) -> OwnerId {
    OwnerId(ends.src.port().or(ends.dst.port()).map_or(u16::MAX, |port| port.0))
}

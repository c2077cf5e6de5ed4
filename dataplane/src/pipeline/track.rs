//! Second stage: an existing connection allows the packet, otherwise policy is evaluated.

use super::dispatch::PacketPath;
use super::{EvaluationReason, Observer};
use crate::conntrack::{
    Conn, ConnTable, InsertError, Insertion, NewConnection, OwnerId, PreparedFlow, Reevaluation, Timestamp, Update,
};
use crate::forward::PortId;
use crate::packet::{Address, Flow, Packet, Transport, quoted_flow};
use crate::policy::{DirectionVerdict, PolicyVerdict};
use crate::{DropReason, Snapshot};

/// The stage for one batch, with the current packet.
pub(super) struct Tracker<'a, O> {
    pub(super) connections: &'a ConnTable,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Timestamp,
    pub(super) ingress: PortId,
    pub(super) index: usize,
    pub(super) observer: &'a mut O,
    /// Set if this packet's evaluation revoked its connection: the sequence number that the packet's destination
    /// expects, for TCP.
    pub(super) revoked_at: Option<u32>,
    /// Whether the batch came from the node's own stack.
    pub(super) from_host: bool,
    /// The path of this packet if it may pass; set for each packet.
    pub(super) route: PacketPath,
}

impl<O: Observer> Tracker<'_, O> {
    /// Whether the packet may pass.
    #[inline(always)]
    pub(super) fn track(&mut self, frame: &[u8], packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        match packet.transport {
            Transport::IcmpError { quoted_at } => return self.related(frame, packet, quoted_at),
            Transport::LaterFragment => return self.later_fragment(packet),
            _ => {}
        }
        match self.connections.find(hashed, self.now) {
            Some(connection) => self.follow(connection, packet, hashed)?,
            None => self.open(packet, hashed)?,
        }
        if packet.fragment.is_some() {
            self.connections.fragments().remember(packet, self.ingress, self.now);
        }
        Ok(())
    }

    /// A later fragment belongs to the connection of its first fragment, which has the ports.
    #[cold]
    #[inline(never)]
    fn later_fragment(&mut self, packet: &Packet) -> Result<(), DropReason> {
        let flow = self.connections.fragments().flow_of(packet, self.ingress, self.now).ok_or(DropReason::Fragment)?;
        let hashed = self.connections.prepare(&flow);
        let connection = self.connections.find(&hashed, self.now).ok_or(DropReason::Fragment)?;
        self.follow(connection, packet, &hashed)
    }

    /// A packet of a known connection.
    #[inline(always)]
    fn follow(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            connection = self.follow_again(connection, packet, hashed);
        }
        self.route = self.route_of(&mut connection, packet);
        match connection.update(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(()),
            Update::Invalid => Err(DropReason::InvalidState),
            Update::Revoked => Err(DropReason::ConnectionCut),
            Update::Removed => self.open(packet, hashed),
            Update::Opens => self.open_in_place(connection, packet, hashed),
            Update::ReverseSyn => self.ask_in_reverse(connection, packet, hashed),
            Update::Restarts => self.restart(connection, packet, hashed),
        }
    }

    /// A packet that opens a connection in place of one that has ended or was revoked. Policy is evaluated first: if
    /// the old one were removed for a packet that is then denied, the next packet of its other side could bring it
    /// back.
    #[cold]
    #[inline(never)]
    fn open_in_place(&mut self, old: Conn<'_>, packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        self.evaluate(&packet.flow, EvaluationReason::Opened)?;
        if !old.replace(hashed.orientation(), &packet.transport, self.now) {
            return Err(DropReason::InvalidState);
        }
        self.enter(packet, hashed)
    }

    /// A SYN on a live connection from the answering side.
    #[cold]
    #[inline(never)]
    fn ask_in_reverse(
        &mut self,
        mut connection: Conn<'_>,
        packet: &Packet,
        hashed: &PreparedFlow,
    ) -> Result<(), DropReason> {
        self.evaluate(&packet.flow, EvaluationReason::Opened)?;
        match connection.hold_syn(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(()),
            _ => Err(DropReason::InvalidState),
        }
    }

    /// A SYN-ACK by which both ends restart a connection that is still live in the table.
    #[cold]
    #[inline(never)]
    fn restart(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        self.evaluate(&packet.flow.reversed(), EvaluationReason::Opened)?;
        let restarted = connection.restart(self.snapshot.epoch, hashed.orientation(), &packet.transport, self.now);
        if restarted { Ok(()) } else { Err(DropReason::InvalidState) }
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

    /// Whether a connection opened by this packet must traverse the node's own stack: the node has translated it, since
    /// packets of a pod only come from the stack in that case. For a connection between two pods that is picked up in
    /// mid-stream this is unknown. The stack forwards it in either case.
    fn enters_via_host(&self, packet: &Packet) -> bool {
        let Flow { src, dst, .. } = packet.flow;
        let known = packet.transport.may_open();
        self.is_pod(src) && (self.from_host || !known && self.is_pod(dst))
    }

    fn is_pod(&self, address: Address) -> bool {
        self.snapshot.forwarding.pod_port(address).is_some()
    }

    /// A packet of a connection that must be evaluated again.
    #[cold]
    #[inline(never)]
    fn follow_again<'c>(&mut self, mut connection: Conn<'c>, packet: &Packet, hashed: &PreparedFlow) -> Conn<'c> {
        if self.reevaluate(&mut connection) == Reevaluation::Revoked
            && let Transport::Tcp(segment) = packet.transport
        {
            // After a restart the segment's own number is the best known.
            self.revoked_at = connection.next_sequence(hashed.orientation()).or(Some(segment.seq));
        }
        connection
    }

    /// A packet without a connection: policy is evaluated, and a connection opened if allowed.
    #[inline(never)]
    fn open(&mut self, packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        self.evaluate(&packet.flow, EvaluationReason::Opened)?;
        self.enter(packet, hashed)
    }

    /// Inserts the connection that an allowed packet opens.
    fn enter(&mut self, packet: &Packet, hashed: &PreparedFlow) -> Result<(), DropReason> {
        let via_host = self.enters_via_host(packet);
        self.route = if via_host && !self.from_host { PacketPath::ViaHost } else { PacketPath::Direct };
        let new = NewConnection {
            hashed,
            transport: &packet.transport,
            owner: self.owner(&packet.flow),
            via_host,
            epoch: self.snapshot.epoch,
            now: self.now,
        };
        match self.connections.insert(&new) {
            Ok(Insertion::Created(_)) => Ok(()),
            // Another worker was first, perhaps with a packet of the other direction.
            Ok(Insertion::Found(mut connection)) => {
                self.route = self.route_of(&mut connection, packet);
                match connection.update(hashed.orientation(), &packet.transport, self.now) {
                    Update::Accepted(_) => Ok(()),
                    Update::Revoked => Err(DropReason::ConnectionCut),
                    // It ended again immediately: the sender will retry.
                    _ => Err(DropReason::InvalidState),
                }
            }
            Err(InsertError::Full) => Err(DropReason::TableFull),
            Err(InsertError::Quota) => Err(DropReason::QuotaExceeded),
            Err(InsertError::CannotOpen) => Err(DropReason::NoConnection),
        }
    }

    /// An ICMP error: it passes for a live connection, to the sender of the quoted packet. Routers send them, and the
    /// packet's destination; a pod is no router, so it may not send errors about other pods' connections.
    #[inline(never)]
    fn related(&mut self, frame: &[u8], packet: &Packet, quoted_at: u16) -> Result<(), DropReason> {
        let quoted = quoted_flow(frame, packet, quoted_at).ok_or(DropReason::NoConnection)?;
        let is_router = self.snapshot.forwarding.pod_port(packet.flow.src).is_none();
        if quoted.src != packet.flow.dst || !(is_router || quoted.dst == packet.flow.src) {
            return Err(DropReason::NoConnection);
        }
        let mut connection = self.connections.related(&quoted, self.now).ok_or(DropReason::NoConnection)?;
        if !connection.is_evaluated_under(self.snapshot.epoch) {
            self.reevaluate(&mut connection);
        }
        // The node translates the quoted packet back for its receiver.
        self.route = if connection.via_host() && !self.from_host { PacketPath::ViaHost } else { PacketPath::Direct };
        if connection.is_revoked() { Err(DropReason::ConnectionCut) } else { Ok(()) }
    }

    /// A connection last evaluated under an older epoch: it is evaluated again in its original direction, and kept or
    /// revoked.
    ///
    /// A revoked connection keeps its entry. If it were removed, a packet of its answering side would be evaluated as
    /// if that side had opened it, and might bring back what policy has revoked.
    #[cold]
    fn reevaluate(&mut self, connection: &mut Conn<'_>) -> Reevaluation {
        let allowed = self.evaluate(&connection.original_flow(), EvaluationReason::Reevaluated).is_ok();
        connection.set_verdict(self.snapshot.epoch, allowed)
    }

    /// Evaluates policy in the direction in which the connection is opened.
    fn evaluate(&mut self, flow: &Flow, evaluation_reason: EvaluationReason) -> Result<(), DropReason> {
        self.observer.before_evaluation();
        let policy_verdict = self.snapshot.policy.evaluate(flow);
        self.observer.evaluated(self.index, flow, &policy_verdict, evaluation_reason);
        if self.is_unready(flow, &policy_verdict) {
            return Err(DropReason::NotReady);
        }
        match policy_verdict.drop_reason() {
            None => Ok(()),
            Some(DropReason::EgressDenied) if self.snapshot.forwarding.is_service(flow.dst) => {
                Err(DropReason::ServiceDenied)
            }
            Some(reason) => Err(reason),
        }
    }

    /// Whether one end is a pod of this node that policy does not know yet. It must not be treated as another node's.
    fn is_unready(&self, flow: &Flow, policy_verdict: &PolicyVerdict) -> bool {
        (policy_verdict.egress == DirectionVerdict::NotLocal && self.is_pod(flow.src))
            || (policy_verdict.ingress == DirectionVerdict::NotLocal && self.is_pod(flow.dst))
    }

    /// Owner for quotas: the local pod that opens the connection, otherwise the local pod that it is for.
    fn owner(&self, flow: &Flow) -> OwnerId {
        let forwarding = &self.snapshot.forwarding;
        let port = forwarding.pod_port(flow.src).or_else(|| forwarding.pod_port(flow.dst));
        OwnerId(port.map_or(u16::MAX, |port| port.0))
    }
}

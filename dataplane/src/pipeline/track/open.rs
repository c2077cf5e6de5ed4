//! Opens a connection for a packet without one: policy is evaluated, and the connection inserted if it allows that.

use super::Tracker;
use crate::DropReason;
use crate::batch::{Frames, StackSender};
use crate::conntrack::{InsertError, Insertion, NewConnection, OwnerId, Update};
use crate::limits::Admission;
use crate::packet::{Address, Flow, Packet};
use crate::pipeline::dispatch::PacketPath;
use crate::pipeline::sources::Opener;
use crate::pipeline::{AdmittedPacket, DroppedPacket, EvaluationReason, Observer};
use crate::policy::{AddressEntry, FlowEnds};

impl<'a, F: Frames, O: Observer> Tracker<'a, F, O> {
    /// A packet without a connection: policy is evaluated, and a connection opened if allowed.
    #[inline(never)]
    pub(super) fn open(&mut self, entry: &AdmittedPacket) -> Result<PacketPath, DroppedPacket> {
        let opening = self.evaluate_first(entry)?;
        self.insert(entry, &opening)
    }

    /// Evaluates policy for a packet that opens a connection, always in the packet's own direction. Nothing in a packet proves that its
    /// receiver opened the connection: ports and flags are the sender's choice. If a segment of the answering end is denied, the
    /// connection continues with its opener's next segment.
    pub(super) fn evaluate_first(&mut self, entry: &AdmittedPacket) -> Result<Opening<'a>, DropReason> {
        let flow = entry.packet.flow;
        let ends = self.snapshot.policy.ends(&flow);
        let opener = Opener::Sender(self.sender());
        let asked = self.evaluate(&flow, ends, opener, EvaluationReason::Opened)?;
        Ok(Opening { flow, ends, opener: (asked.src != flow.src).then_some(asked.src) })
    }

    /// Enters the connection that an allowed packet opens.
    pub(super) fn insert(
        &mut self,
        entry: &AdmittedPacket,
        opening: &Opening<'_>,
    ) -> Result<PacketPath, DroppedPacket> {
        let AdmittedPacket { packet, hashed, .. } = entry;
        let sender = self.sender();
        let Opening { flow, ends, opener } = opening;
        let via_host = self.opens_via_host(packet, *ends, sender);
        let route = match ends.dst.port() {
            _ if via_host && !self.from_host => PacketPath::ViaHost,
            Some(port) => PacketPath::At(port),
            None => PacketPath::Direct,
        };
        let new = NewConnection {
            hashed,
            transport: &packet.transport,
            owner: owner(*ends),
            via_host,
            opener: (sender == StackSender::Translated).then_some(*opener),
            epoch: self.snapshot.epoch,
            now: self.now,
        };
        let counts = [!self.from_host, !self.is_nodes_own(flow, *opener)];
        let admission = self.snapshot.limits.admit(*ends, counts, self.connections, self.now)?;
        let must_be_tracked = admission.as_ref().is_some_and(Admission::is_listed);
        match self.connections.insert(&new) {
            Ok(Insertion::Created(connection)) => {
                if let Some(admission) = admission {
                    admission.opened(connection.name());
                }
                Ok(route)
            }
            // Another worker was first, perhaps with a packet of the other direction.
            Ok(Insertion::Found(mut connection)) => {
                let route = self.route_of(&mut connection, packet);
                match connection.update(hashed.orientation(), &packet.transport, self.now) {
                    Update::Accepted(_) => Ok(route),
                    Update::Revoked => Err(DroppedPacket { route, ..DropReason::ConnectionRevoked.into() }),
                    // Ended again within the same instant: the sender will try again.
                    _ => Err(DropReason::InvalidState.into()),
                }
            }
            Err(error)
                if self.snapshot.policy.is_free(*ends) && (error == InsertError::CannotOpen || !must_be_tracked) =>
            {
                Ok(route)
            }
            Err(error) => Err(insert_drop_reason(error).into()),
        }
    }

    /// Whether the connection that this packet opens goes through the node's own stack in both directions. A pod's packet
    /// that comes from the stack was translated there, and so was what the stack forwards with an address of the node. For
    /// a mid-stream pick-up between two local pods this is unknown; the stack forwards it either way, if there is a port
    /// into it.
    fn opens_via_host(&self, packet: &Packet, ends: FlowEnds<'_>, sender: StackSender) -> bool {
        let is_pod = |end: &AddressEntry| end.port().is_some();
        let known = packet.transport.may_open();
        let has_host = self.snapshot.forwarding.host().is_some();
        let is_translated = match sender {
            StackSender::Translated => true,
            StackSender::Forwarded | StackSender::Untranslated => ends.src.is_node(),
            StackSender::Unchanged => return false,
            StackSender::Process | StackSender::Unknown | StackSender::Leaving { .. } => false,
        };
        has_host && (is_translated || is_pod(ends.src) && (self.from_host || !known && is_pod(ends.dst)))
    }

    /// Whether the node itself opens a connection: its probes are nobody's limit.
    fn is_nodes_own(&self, flow: &Flow, opener: Option<Address>) -> bool {
        opener.is_none() && self.snapshot.forwarding.is_node(flow.src)
    }
}

/// A connection that a packet opens, in the direction in which it is opened.
pub(super) struct Opening<'a> {
    /// The flow that policy was asked about.
    flow: Flow,
    ends: FlowEnds<'a>,
    /// Who has opened it, where the node's stack has translated that one's address.
    opener: Option<Address>,
}

/// Owner for quotas: the local pod that opens the connection, otherwise the local pod that it is opened to.
pub(in crate::pipeline) fn owner(ends: FlowEnds<'_>) -> OwnerId {
    match (ends.src.port(), ends.dst.port()) {
        (Some(port), _) => OwnerId::opens(port.0),
        (None, Some(port)) => OwnerId::opened_to(port.0),
        (None, None) => OwnerId::NONE,
    }
}

const fn insert_drop_reason(error: InsertError) -> DropReason {
    match error {
        InsertError::Full => DropReason::TableFull,
        InsertError::Quota => DropReason::QuotaExceeded,
        InsertError::CannotOpen => DropReason::NoConnection,
    }
}

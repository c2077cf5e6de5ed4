//! Second stage: an existing connection allows the packet, otherwise policy is evaluated.

use super::dispatch::Route;
use super::{Observer, Occasion, Refusal};
use crate::conntrack::{Conn, ConnTable, Hashed, Insertion, Judged, NewConn, OwnerId, Refused, Timestamp, Update};
use crate::forward::PortId;
use crate::packet::{Address, Flow, Packet, Transport, quoted_flow};
use crate::policy::{Judgement, Side};
use crate::{Cause, Snapshot};

/// The stage for one batch, with the current packet.
pub(super) struct Tracker<'a, O> {
    pub(super) connections: &'a ConnTable,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Timestamp,
    pub(super) ingress: PortId,
    pub(super) index: usize,
    pub(super) observer: &'a mut O,
    /// Whether what is tracked came from the node's own stack.
    pub(super) from_host: bool,
}

impl<O: Observer> Tracker<'_, O> {
    /// Which way the packet leaves, if it may pass.
    #[inline(always)]
    pub(super) fn track(&mut self, frame: &[u8], packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
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
    fn later_fragment(&mut self, packet: &Packet) -> Result<Route, Refusal> {
        let flow = self.connections.fragments().flow_of(packet, self.ingress, self.now).ok_or(Cause::Fragment)?;
        let hashed = self.connections.prepare(&flow);
        let connection = self.connections.find(&hashed, self.now).ok_or(Cause::Fragment)?;
        self.follow(connection, packet, &hashed)
    }

    /// A packet of a known connection.
    #[inline(always)]
    fn follow(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
        if !connection.is_of_epoch(self.snapshot.epoch) {
            return self.follow_again(connection, packet, hashed);
        }
        let route = self.route_of(&mut connection, packet);
        match connection.update(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(route),
            other => self.follow_exception(other, connection, packet, hashed, route),
        }
    }

    /// A packet that its connection does not simply let pass.
    #[cold]
    #[inline(never)]
    fn follow_exception(
        &mut self,
        update: Update,
        connection: Conn<'_>,
        packet: &Packet,
        hashed: &Hashed,
        route: Route,
    ) -> Result<Route, Refusal> {
        let refused = |cause| Err(Refusal { cause, cut_at: None, route });
        match update {
            Update::Accepted(_) => Ok(route),
            Update::Invalid => refused(Cause::InvalidState),
            Update::Cut => refused(Cause::ConnectionCut),
            Update::Ended => self.open(packet, hashed),
            Update::Opens => self.open_in_place(connection, packet, hashed),
            Update::AsksInReverse => self.ask_in_reverse(connection, packet, hashed).map(|()| route),
            Update::Restarts => self.restart(connection, packet, hashed).map(|()| route),
        }
    }

    /// A packet that opens a connection where another one has ended, or was cut. Policy is asked first: were the old one
    /// forgotten for a packet that is then denied, the next packet of its other side could bring it back.
    fn open_in_place(&mut self, old: Conn<'_>, packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
        self.judge(&packet.flow, Occasion::Opened)?;
        if !old.replace(hashed.orientation(), &packet.transport, self.now) {
            return Err(Cause::InvalidState.into());
        }
        self.enter(packet, hashed)
    }

    /// A SYN on a live connection from the side that did not open it.
    fn ask_in_reverse(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &Hashed) -> Result<(), Refusal> {
        self.judge(&packet.flow, Occasion::Opened)?;
        match connection.hold_syn(hashed.orientation(), &packet.transport, self.now) {
            Update::Accepted(_) => Ok(()),
            _ => Err(Cause::InvalidState.into()),
        }
    }

    /// A SYN-ACK with which both ends begin anew what the table still holds as a live connection.
    fn restart(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &Hashed) -> Result<(), Refusal> {
        self.judge(&packet.flow.reversed(), Occasion::Opened)?;
        let restarted = connection.restart(self.snapshot.epoch, hashed.orientation(), &packet.transport, self.now);
        if restarted { Ok(()) } else { Err(Cause::InvalidState.into()) }
    }

    /// A connection that came through the node's own stack uses it in both directions, since it was translated there:
    /// packets from a pod go to the stack, packets from the stack to the pod.
    #[inline(always)]
    fn route_of(&self, connection: &mut Conn<'_>, packet: &Packet) -> Route {
        match (self.from_host, connection.via_host()) {
            (false, true) => Route::ViaHost,
            (true, false) => {
                // The pod now reaches this end through another address, from the same port.
                if packet.transport.may_open() && self.is_pod(packet.flow.src) {
                    connection.set_via_host();
                }
                Route::Direct
            }
            _ => Route::Direct,
        }
    }

    /// Whether a connection that this packet enters is to cross the node's own stack: the node has translated it, since a
    /// pod's packets come from there only then. Of one between two pods that is picked up from its middle that is not known.
    /// The stack carries it in either case, if there is a port into it.
    fn enters_via_host(&self, packet: &Packet) -> bool {
        let Flow { src, dst, .. } = packet.flow;
        let known = packet.transport.may_open();
        let has_host = self.snapshot.forwarding.host().is_some();
        has_host && self.is_pod(src) && (self.from_host || !known && self.is_pod(dst))
    }

    fn is_pod(&self, address: Address) -> bool {
        self.snapshot.forwarding.pod_port(address).is_some()
    }

    /// A packet of a connection that is to be judged again. Should that cut it, the answer to its sender names the sequence
    /// number that the packet's destination expects.
    #[cold]
    #[inline(never)]
    fn follow_again(&mut self, mut connection: Conn<'_>, packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
        let mut cut_at = None;
        if self.judge_again(&mut connection) == Judged::Cut
            && let Transport::Tcp(segment) = packet.transport
        {
            // After a restart the segment's own number is the best that is known.
            cut_at = connection.next_sequence(hashed.orientation()).or(Some(segment.seq));
        }
        let route = self.route_of(&mut connection, packet);
        let update = connection.update(hashed.orientation(), &packet.transport, self.now);
        let followed = self.follow_exception(update, connection, packet, hashed, route);
        followed.map_err(|refusal| Refusal { cut_at, ..refusal })
    }

    /// A packet without a connection: policy is evaluated, and a connection opened if allowed.
    #[inline(never)]
    fn open(&mut self, packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
        self.judge(&packet.flow, Occasion::Opened)?;
        self.enter(packet, hashed)
    }

    /// Enters the connection that an allowed packet opens.
    fn enter(&mut self, packet: &Packet, hashed: &Hashed) -> Result<Route, Refusal> {
        let via_host = self.enters_via_host(packet);
        let route = if via_host && !self.from_host { Route::ViaHost } else { Route::Direct };
        let new = NewConn {
            hashed,
            transport: &packet.transport,
            owner: self.owner(&packet.flow),
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
                    Update::Cut => Err(Refusal { cause: Cause::ConnectionCut, cut_at: None, route }),
                    // Ended again within the same instant: the sender will try again.
                    _ => Err(Cause::InvalidState.into()),
                }
            }
            Err(Refused::Full) => Err(Cause::TableFull.into()),
            Err(Refused::Quota) => Err(Cause::QuotaExceeded.into()),
            Err(Refused::CannotOpen) => Err(Cause::NoConnection.into()),
        }
    }

    /// An ICMP error: it passes for a live connection, to the sender of the quoted packet. Routers send them, and the
    /// packet's destination; a pod is no router, so it may not send errors about other pods' connections.
    #[inline(never)]
    fn related(&mut self, frame: &[u8], packet: &Packet, quoted_at: u16) -> Result<Route, Refusal> {
        let quoted = quoted_flow(frame, packet, quoted_at).ok_or(Cause::NoConnection)?;
        let is_router = self.snapshot.forwarding.pod_port(packet.flow.src).is_none();
        if quoted.src != packet.flow.dst || !(is_router || quoted.dst == packet.flow.src) {
            return Err(Cause::NoConnection.into());
        }
        let mut connection = self.connections.related(&quoted, self.now).ok_or(Cause::NoConnection)?;
        if !connection.is_of_epoch(self.snapshot.epoch) {
            self.judge_again(&mut connection);
        }
        // The node translates what is quoted back to what its receiver knows.
        let route = if connection.via_host() && !self.from_host { Route::ViaHost } else { Route::Direct };
        if connection.is_cut() { Err(Refusal { cause: Cause::ConnectionCut, cut_at: None, route }) } else { Ok(route) }
    }

    /// A connection last evaluated under an older epoch: it is evaluated again in its original direction, and kept or
    /// revoked.
    ///
    /// A revoked connection keeps its entry. If it were removed, a packet of its answering side would be evaluated as
    /// if that side had opened it, and might bring back what policy has revoked.
    #[cold]
    fn judge_again(&mut self, connection: &mut Conn<'_>) -> Judged {
        let allowed = self.judge(&connection.original_flow(), Occasion::JudgedAgain).is_ok();
        connection.set_judged(self.snapshot.epoch, allowed)
    }

    /// Evaluates policy in the direction in which the connection is opened.
    fn judge(&mut self, flow: &Flow, occasion: Occasion) -> Result<(), Cause> {
        self.observer.asked();
        let judgement = self.snapshot.policy.judge(flow);
        self.observer.judged(self.index, flow, &judgement, occasion);
        if self.is_unready(flow, &judgement) {
            return Err(Cause::NotReady);
        }
        match judgement.cause() {
            None => Ok(()),
            Some(Cause::EgressDenied) if self.snapshot.forwarding.is_service(flow.dst) => Err(Cause::ServiceDenied),
            Some(cause) => Err(cause),
        }
    }

    /// Whether one end is a pod of this node that policy does not know yet. It must not be treated as another node's.
    fn is_unready(&self, flow: &Flow, judgement: &Judgement) -> bool {
        (judgement.egress == Side::NotLocal && self.is_pod(flow.src))
            || (judgement.ingress == Side::NotLocal && self.is_pod(flow.dst))
    }

    /// Owner for quotas: the local pod that opens the connection, otherwise the local pod that it is for.
    fn owner(&self, flow: &Flow) -> OwnerId {
        let forwarding = &self.snapshot.forwarding;
        let port = forwarding.pod_port(flow.src).or_else(|| forwarding.pod_port(flow.dst));
        OwnerId(port.map_or(u16::MAX, |port| port.0))
    }
}

//! Between admit and track: a packet to a Service gets a backend, and packets of such connections the flow that the
//! connection table and policy know.
//!
//! A packet has up to three flows: the one it came with, the *inner* one between client and backend, and the one it leaves
//! with. A client's packet to a Service leaves with the inner flow, a backend's comes with it. What leaves is written only
//! after the last stage has found a way, so that an ICMP error about a drop quotes what the sender sent.

use rand::Rng;

use super::flows::{Translation, inner_flow};
use super::track::Tracker;
use super::{AdmittedPacket, DroppedPacket, Observer};
use crate::DropReason;
use crate::batch::{Frames, StackSender};
use crate::conntrack::{Conn, PreparedFlow, Translated};
use crate::packet::{Flow, Packet, Protocol, can_translate};
use crate::services::{Backend, Destination, Frontend, FrontendKey, WithoutBackend};

/// Backends that are tried if the client's address and port have a connection to the chosen one already.
const ATTEMPTS: usize = 8;

impl<'a, F: Frames, O: Observer> Tracker<'a, F, O> {
    /// The stage, for a packet of a translated connection, or a pod's without a connection: the connection that it belongs to,
    /// if there is one. A packet that is translated has its flows afterwards.
    pub(super) fn translate(
        &mut self,
        found: Option<Conn<'a>>,
        entry: &mut AdmittedPacket,
    ) -> Result<Option<Conn<'a>>, DroppedPacket> {
        match found.and_then(|found| self.connections.translated(&found, self.now)) {
            Some(translated) if self.has_lost_its_backend(&translated) => self.turn_lost(translated, entry),
            Some(translated) => self.set_flows(translated, entry).map(Some),
            None => self.ask_services(entry, None).map(|()| None),
        }
    }

    /// A packet of a connection that has lost its backend. The client's gives it another one. An answer that was on its way
    /// then is still the Service's, unless that is gone; it must open no connection of its own to the client's port.
    fn turn_lost(
        &mut self,
        translated: Translated<'a>,
        entry: &mut AdmittedPacket,
    ) -> Result<Option<Conn<'a>>, DroppedPacket> {
        let is_answer = translated.connection.is_reply(translated.inner.orientation());
        if is_answer && self.frontend_of(&translated.frontend).is_some() {
            let connection = self.set_flows(translated, entry)?;
            entry.flows.is_late = true;
            return Ok(Some(connection));
        }
        self.connections.remove_translated(&translated.connection);
        if is_answer {
            return Err(DropReason::NoConnection.into());
        }
        self.ask_services(entry, None).map(|()| None)
    }

    /// The Service's port that a client sends to with this flow.
    fn frontend_of(&self, flow: &Flow) -> Option<&'a Frontend> {
        let key = FrontendKey { address: flow.dst, protocol: flow.protocol, port: flow.dst_port };
        let services = self.snapshot.services.as_ref().filter(|_| !self.snapshot.forwarding.is_node(flow.dst))?;
        services.frontend(&key).map(|frontend| &**frontend)
    }

    /// Gives a packet the flows of its connection.
    pub(super) fn set_flows(
        &mut self,
        translated: Translated<'a>,
        entry: &mut AdmittedPacket,
    ) -> Result<Conn<'a>, DroppedPacket> {
        let Translated { connection, inner, frontend, by_frontend } = translated;
        let is_of_client = !connection.is_reply(inner.orientation());
        let out = match (by_frontend, is_of_client) {
            (true, true) => inner.flow(),
            (false, false) => frontend.reversed(),
            // A worker has translated it, and sent it by the node's stack ([`Port::by_stack`](crate::forward::Port::by_stack)).
            (false, true) if self.from_host && self.sender() == StackSender::Unchanged => inner.flow(),
            // Between the same ends without the Service, or from its address by someone else.
            _ => return Err(DropReason::FlowInUse.into()),
        };
        let flows = Translation { frontend, inner: inner.flow(), out, ..Translation::default() };
        entry.set_translation(Some(flows));
        entry.hashed = inner;
        Ok(connection)
    }

    /// Whether a connection without a handshake must get another backend, or ends with its Service: it is checked once under
    /// each snapshot.
    pub(super) fn has_lost_its_backend(&self, translated: &Translated<'_>) -> bool {
        let Translated { connection, frontend, .. } = translated;
        if self.snapshot.services.is_none()
            || connection.is_evaluated_under(self.snapshot.epoch)
            || matches!(frontend.protocol, Protocol::TCP | Protocol::SCTP)
        {
            return false;
        }
        let Flow { dst, dst_port, .. } = connection.original_flow();
        let backend = Backend { address: dst, port: dst_port };
        self.frontend_of(frontend).is_none_or(|frontend| !frontend.is_serving(&backend))
    }

    /// A pod's packet without a connection: if it is to a Service, chooses its backend.
    /// It may have the flow of `old`, which ends.
    fn ask_services(&mut self, entry: &mut AdmittedPacket, old: Option<&Conn<'_>>) -> Result<(), DroppedPacket> {
        let Flow { dst, dst_port, protocol, .. } = entry.packet.flow;
        let Some(services) = self.snapshot.services.as_ref().filter(|_| self.translates) else { return Ok(()) };
        // An address that the node has itself is answered there.
        if self.snapshot.forwarding.is_node(dst) {
            return Ok(());
        }
        match services.find(dst, protocol, dst_port) {
            Destination::Frontend(frontend) => self.choose(frontend, entry, old),
            Destination::NoSuchPort => Err(DropReason::NoServicePort.into()),
            Destination::NotService if self.snapshot.forwarding.is_service(dst) => Err(DropReason::NoService.into()),
            Destination::NotService => Ok(()),
        }
    }

    /// Chooses the backend of a new connection. It may have the flow of `old`, which ends.
    fn choose(
        &mut self,
        frontend: &Frontend,
        entry: &mut AdmittedPacket,
        old: Option<&Conn<'_>>,
    ) -> Result<(), DroppedPacket> {
        let packet = &entry.packet;
        if !packet.transport.may_open() {
            return Err(DropReason::NoConnection.into());
        }
        if frontend.backends.is_empty() {
            return Err(match frontend.without {
                WithoutBackend::Refused => DropReason::NoBackend.into(),
                WithoutBackend::Dropped => DropReason::NoLocalBackend.into(),
            });
        }
        let affinities = self.connections.affinities();
        let client = packet.flow.src;
        let last = frontend
            .affinity
            .as_ref()
            .and_then(|it| affinities.find(it, client, &frontend.backends, self.now))
            .copied();
        let named = self.observer.backend(self.index, &packet.flow, frontend, last);
        let count = frontend.backends.len();
        let first = if named.is_some() { 0 } else { self.rng.random_range(0..count) };
        let others = (0..count.min(ATTEMPTS)).map(|number| frontend.backends[(first + number) % count]);
        for backend in named.or(last).into_iter().chain(others) {
            let inner = inner_flow(&packet.flow, &backend);
            let hashed = self.connections.prepare(&inner);
            if self.is_in_use(&hashed, old) {
                continue;
            }
            self.check(packet, &inner)?;
            let affinity = frontend.affinity.map(|affinity| (affinity, backend, last == Some(backend)));
            let frontend = packet.flow;
            let translation = Translation { frontend, inner, out: inner, affinity, ..Translation::default() };
            entry.set_translation(Some(translation));
            entry.hashed = hashed;
            return Ok(());
        }
        Err(DropReason::FlowInUse.into())
    }

    /// A packet that opens a connection in place of a translated one that has ended. A client's packet to the Service chooses
    /// again; one from a former backend is no Service's.
    pub(super) fn open_anew(&mut self, entry: &mut AdmittedPacket, old: &Conn<'_>) -> Result<(), DroppedPacket> {
        let is_of_client = entry.translation().is_some_and(|translation| entry.packet.flow == translation.frontend);
        entry.set_translation(None);
        entry.hashed = self.connections.prepare(&entry.packet.flow);
        if is_of_client { self.ask_services(entry, Some(old)) } else { Ok(()) }
    }

    fn is_in_use(&self, hashed: &PreparedFlow, old: Option<&Conn<'_>>) -> bool {
        let Some(found) = self.connections.find(hashed, self.now) else { return false };
        // The rest of a translated connection that has ended gives way.
        let is_left = found.is_translated() && self.connections.translated(&found, self.now).is_none();
        !is_left && !old.is_some_and(|old| old.is_same(&found))
    }

    /// Checks of a packet to a backend that also hold for one that a pod sends there directly.
    fn check(&self, packet: &Packet, inner: &Flow) -> Result<(), DropReason> {
        let direct = Packet { flow: *inner, ..*packet };
        if self.snapshot.would_be_decapsulated(&direct) && self.snapshot.pod_port(inner.dst).is_none() {
            return Err(DropReason::Encapsulation);
        }
        if can_translate(packet, inner) { Ok(()) } else { Err(DropReason::Fragment) }
    }

    /// The flows of an ICMP error about a connection to a Service, whose packet it quotes with the flow `quoted`. `None`: its
    /// receiver knows what is quoted.
    pub(super) fn error_flows(
        &self,
        packet: &Packet,
        quoted: &Flow,
        translated: &Translated<'_>,
    ) -> Option<Translation> {
        let Translated { connection, inner, frontend, by_frontend } = translated;
        let is_of_client = !connection.is_reply(inner.orientation());
        let quote = match (by_frontend, is_of_client) {
            // About what the client sent, by a router or the backend: the client knows the Service.
            (false, true) => *frontend,
            // About what it got, by the client: the backend knows the inner flow.
            (true, false) => inner.flow(),
            _ => return None,
        };
        let src = if packet.flow.src == quoted.dst { quote.dst } else { packet.flow.src };
        let out = Flow { src, dst: quote.src, ..packet.flow };
        let (frontend, inner) = (*frontend, inner.flow());
        Some(Translation { frontend, inner, out, quote: Some(quote), ..Translation::default() })
    }
}

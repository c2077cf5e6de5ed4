//! The flows of a translated packet: the one it came with, the one that the table and policy know, and the one it leaves with.

use super::AdmittedPacket;
use crate::packet::{Flow, Packet};
use crate::services::{Affinity, Backend};

/// The flows of a packet that is translated.
#[derive(Clone, Default, Debug)]
pub(super) struct Translation {
    /// The flow of the connection's first packet, as the client sent it.
    pub(super) frontend: Flow,
    /// This packet's flow between client and backend.
    pub(super) inner: Flow,
    /// The flow with which it leaves; of an ICMP error only the addresses.
    pub(super) out: Flow,
    /// In an ICMP error: the flow of the packet that it quotes, as its receiver knows it.
    pub(super) quote: Option<Flow>,
    /// Whether it is an answer of a backend that the connection has lost, or may not have any more.
    pub(super) is_late: bool,
    /// For the first packet to a Service with affinity: whether the client had this backend before.
    pub(super) affinity: Option<(Affinity, Backend, bool)>,
}

impl Translation {
    /// The packet as it leaves.
    pub(super) fn leaving(&self, packet: &Packet) -> Packet {
        Packet { flow: self.out, ..*packet }
    }
}

impl AdmittedPacket {
    /// Its flows, if it is translated.
    #[inline(always)]
    pub(super) fn translation(&self) -> Option<&Translation> {
        self.is_translated.then_some(&self.flows)
    }

    pub(super) fn set_translation(&mut self, translation: Option<Translation>) {
        self.is_translated = translation.is_some();
        translation.into_iter().for_each(|translation| self.flows = translation);
    }

    /// The packet's flow for policy and the connection table.
    pub(super) fn inner(&self) -> Flow {
        self.translation().map_or(self.packet.flow, |translation| translation.inner)
    }
}

/// The flow that policy is asked about, in the direction of a connection's opener: the client's own address stands for the
/// Service's where the client is its own backend.
pub(super) fn policy_flow(inner: Flow, frontend: Option<&Flow>) -> Flow {
    match frontend {
        Some(frontend) => Flow { src: frontend.src, src_port: frontend.src_port, ..inner },
        None => inner,
    }
}

/// The flow to a backend of a packet to a Service. If the client is its own backend, its stack would not accept a packet
/// from its own address: it gets one from the Service's, and its reply comes back to a worker.
pub(super) fn inner_flow(flow: &Flow, backend: &Backend) -> Flow {
    let src = if backend.address == flow.src { flow.dst } else { flow.src };
    Flow { src, dst: backend.address, dst_port: backend.port, ..*flow }
}

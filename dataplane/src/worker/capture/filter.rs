//! Which packets a capture has.

use crate::DropReason;
use crate::filter_program::FilterProgram;
use crate::forward::PortId;
use crate::packet::{Address, Flow, Protocol};
use crate::pipeline::Verdict;

/// Which packets a capture has: those that fit every part that is set.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CaptureFilter {
    pub pod: Option<CapturedPod>,
    /// Only packets that pass (`true`), or that are dropped.
    pub allowed: Option<bool>,
    pub reason: Option<DropReason>,
    pub host: Option<Address>,
    /// Only packets from or to this port; of ICMP queries their identifier.
    pub port: Option<u16>,
    pub protocol: Option<Protocol>,
    /// Only packets of the connection with this id; see [`ConnTable::connection_id`](crate::conntrack::ConnTable::connection_id).
    pub connection: Option<u64>,
    pub program: Option<FilterProgram>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CapturedPod {
    /// Its port: whatever it sends, with whatever addresses.
    pub port: Option<PortId>,
    pub addresses: Vec<Address>,
}

/// The parts of a packet that a filter sees.
pub(super) struct SeenPacket {
    pub(super) ingress: PortId,
    pub(super) verdict: Verdict,
    /// Its flow, and that of its connection.
    pub(super) flows: [Option<Flow>; 2],
    pub(super) connection: Option<u64>,
    pub(super) fits_program: bool,
}

impl CaptureFilter {
    /// Whether the program accepts a frame, if there is one.
    pub(super) fn fits_program(&self, frame: &[u8]) -> bool {
        self.program.as_ref().is_none_or(|program| program.accepts(frame))
    }

    pub(super) fn fits(&self, seen: &SeenPacket) -> bool {
        let any = |fits: &dyn Fn(&Flow) -> bool| seen.flows.iter().flatten().any(fits);
        let is_allowed = matches!(seen.verdict, Verdict::Forward(_));
        seen.fits_program
            && self.allowed.is_none_or(|allowed| allowed == is_allowed)
            && self.reason.is_none_or(|reason| seen.verdict == Verdict::Drop(reason))
            && self.connection.is_none_or(|connection| seen.connection == Some(connection))
            && self.protocol.is_none_or(|protocol| any(&|flow| flow.protocol == protocol))
            && self.host.is_none_or(|host| any(&|flow| [flow.src, flow.dst].contains(&host)))
            && self.port.is_none_or(|port| any(&|flow| has_port(flow, port)))
            && self.pod.as_ref().is_none_or(|pod| pod.has(seen))
    }
}

fn has_port(flow: &Flow, port: u16) -> bool {
    let (src, dst) = flow.shown_ports();
    port != 0 && [src, dst].contains(&port)
}

impl CapturedPod {
    fn has(&self, seen: &SeenPacket) -> bool {
        let is_end = |flow: &Flow| self.addresses.contains(&flow.src) || self.addresses.contains(&flow.dst);
        let egress = match seen.verdict {
            Verdict::Forward(port) => Some(port),
            Verdict::Drop(_) | Verdict::Early => None,
        };
        let by_port = self.port.is_some_and(|port| seen.ingress == port || egress == Some(port));
        by_port || seen.flows.iter().flatten().any(is_end)
    }
}

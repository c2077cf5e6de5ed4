//! Denied connections, summed up: a flood gives one record for each pair of ends, port, rule and reason.

use std::collections::HashMap;
use std::net::IpAddr;

use jiff::Timestamp as Time;
use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::pipeline::DropReason;
use penstock_dataplane::worker::{LoggedOutcome, VerdictRecord};

use super::record::DecidingRules;
use crate::naming::evaluated_sides;

/// Most that are summed up apart at a time; a sender can forge nothing but ports, and scans of ports are one line each.
const MOST: usize = 10_000;

/// Packets that are alike in all of this are summed up together.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct DeniedFlow {
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
    pub(super) protocol: Protocol,
    /// The port that was tried; 0 if the protocol has none.
    pub(super) port: u16,
    pub(super) reason: DropReason,
    pub(super) rules: DecidingRules,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DeniedPackets {
    pub(super) packets: u64,
    /// The port they came from; 0 if there were several.
    pub(super) src_port: u16,
    pub(super) connection: Option<u64>,
    pub(super) first: Time,
    pub(super) last: Time,
}

/// The denied connections since the last records of them.
#[derive(Debug, Default)]
pub(super) struct DeniedFlows(HashMap<DeniedFlow, DeniedPackets>);

impl DeniedFlows {
    /// Adds a packet. False if there are too many kinds: it is not counted.
    pub(super) fn add(&mut self, record: &VerdictRecord, at: Time) -> bool {
        let (Some(flow), LoggedOutcome::Dropped(reason)) = (record.flow, record.outcome) else { return true };
        let rules = record.evaluation.as_ref().map(|evaluation| DecidingRules::new(evaluated_sides(evaluation)));
        self.add_flow(&flow, reason, rules.unwrap_or_default(), record.connection, at)
    }

    fn add_flow(
        &mut self,
        flow: &Flow,
        reason: DropReason,
        rules: DecidingRules,
        connection: Option<u64>,
        at: Time,
    ) -> bool {
        let (src_port, port) = flow.shown_ports();
        let (src, dst, protocol) = (flow.src.into(), flow.dst.into(), flow.protocol);
        let key = DeniedFlow { src, dst, protocol, port, reason, rules };
        let is_full = self.0.len() >= MOST;
        match self.0.get_mut(&key) {
            Some(packets) => {
                packets.packets += 1;
                if packets.src_port != src_port {
                    (packets.src_port, packets.connection) = (0, None);
                }
                (packets.first, packets.last) = (packets.first.min(at), packets.last.max(at));
            }
            None if is_full => return false,
            None => _ = self.0.insert(key, DeniedPackets { packets: 1, src_port, connection, first: at, last: at }),
        }
        true
    }

    pub(super) fn take(&mut self) -> Vec<(DeniedFlow, DeniedPackets)> {
        self.0.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(from: u8, src_port: u16, dst_port: u16) -> Flow {
        let end = |last| IpAddr::from([10, 0, 0, last]).into();
        Flow { src: end(from), dst: end(100), protocol: Protocol::TCP, src_port, dst_port }
    }

    #[test]
    fn a_flood_is_one_record_with_its_count() {
        let mut denied = DeniedFlows::default();
        let at = |second| Time::from_second(second).unwrap();
        let (reason, rules) = (DropReason::IngressDenied, DecidingRules::default());
        for second in 0..1000 {
            let source = 1000 + second as u16;
            assert!(denied.add_flow(&flow(1, source, 80), reason, rules.clone(), Some(1), at(second)));
        }
        assert!(denied.add_flow(&flow(1, 7, 443), reason, rules.clone(), Some(2), at(5)));
        assert!(denied.add_flow(&flow(1, 7, 443), reason, rules.clone(), Some(2), at(9)));
        assert!(denied.add_flow(&flow(1, 7, 443), DropReason::EgressDenied, rules, Some(2), at(9)));
        let mut found = denied.take();
        found.sort_by_key(|(flow, packets)| (flow.port, packets.packets));
        let expected = [
            (80, DropReason::IngressDenied, 1000, 0, None, (0, 999)),
            (443, DropReason::EgressDenied, 1, 7, Some(2), (9, 9)),
            (443, DropReason::IngressDenied, 2, 7, Some(2), (5, 9)),
        ];
        let found = found.into_iter().map(|(flow, of)| {
            (
                flow.port,
                flow.reason,
                of.packets,
                of.src_port,
                of.connection,
                (of.first.as_second(), of.last.as_second()),
            )
        });
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert!(denied.take().is_empty());
    }

    #[test]
    fn kinds_are_bounded() {
        let mut denied = DeniedFlows::default();
        let at = Time::from_second(1).unwrap();
        let mut add =
            |port| denied.add_flow(&flow(1, 9, port), DropReason::TableFull, DecidingRules::default(), None, at);
        assert_eq!((1..=20_000).filter(|&port| add(port)).count(), MOST);
        assert!(add(1), "one that is known is counted");
    }
}

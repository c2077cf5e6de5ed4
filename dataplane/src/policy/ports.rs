//! From protocol and destination port to the row of rules whose ports match.

use std::sync::Arc;

use crate::packet::Protocol;

use super::rows::{Row, RowsBuilder, RuleSet, RuleSweep};

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PortProtocol {
    Tcp,
    Udp,
    Sctp,
}

impl PortProtocol {
    pub const fn number(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::TCP,
            Self::Udp => Protocol::UDP,
            Self::Sctp => Protocol::SCTP,
        }
    }
}

/// Ports of one protocol: from the first to the last, inclusive, host byte order. A range whose last port is below its
/// first is empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PortRange {
    pub protocol: PortProtocol,
    pub first: u16,
    pub last: u16,
}

const FAN: usize = 256;
/// Marks an entry of the upper level as a page index rather than a row for all of its ports.
const PAGE: u32 = 1 << 31;

/// A page table for each protocol that a rule names: upper byte, then lower byte. An upper byte whose ports all have
/// one row needs no page.
#[derive(Clone, Debug)]
pub(super) struct Ports {
    /// The upper level, then the pages, in one array.
    tables: [Option<Arc<[u32]>>; 3],
    /// The row of rules without ports.
    any: Row,
}

impl Ports {
    /// The row of rules that match this destination. For a protocol without ports only rules without ports match.
    #[inline]
    pub(super) fn row(&self, protocol: Protocol, port: u16) -> Row {
        let table = match protocol {
            Protocol::TCP => &self.tables[0],
            Protocol::UDP => &self.tables[1],
            Protocol::SCTP => &self.tables[2],
            _ => return self.any,
        };
        let Some(table) = table else { return self.any };
        let entry = table[port as usize / FAN];
        if entry & PAGE == 0 { entry } else { table[(entry & !PAGE) as usize + port as usize % FAN] }
    }

    /// Resolves the ports of rules to rows: `any` are the rules without ports, `ranges` the ports of the others.
    pub(super) fn build(any: &RuleSet, ranges: &[(PortRange, u32)], rows: &mut RowsBuilder) -> Self {
        let table = |protocol: PortProtocol, rows: &mut RowsBuilder| {
            let of_protocol: Vec<(u16, u16, u32)> = ranges
                .iter()
                .filter(|(range, _)| range.protocol == protocol && range.first <= range.last)
                .map(|(range, rule)| (range.first, range.last, *rule))
                .collect();
            (!of_protocol.is_empty()).then(|| page_table(any, &of_protocol, rows))
        };
        let tables = [table(PortProtocol::Tcp, rows), table(PortProtocol::Udp, rows), table(PortProtocol::Sctp, rows)];
        Self { tables, any: rows.row(any) }
    }

    /// Size of the tables in bytes.
    pub(super) fn size(&self) -> usize {
        self.tables.iter().flatten().map(|table| size_of_val(&**table)).sum()
    }
}

fn page_table(any: &RuleSet, ranges: &[(u16, u16, u32)], rows: &mut RowsBuilder) -> Arc<[u32]> {
    let intervals = intervals(any, ranges, rows);
    let mut rest = intervals.as_slice();
    let mut table: Vec<u32> = vec![0; FAN];
    for upper in 0..FAN {
        let (first, end) = (upper * FAN, (upper + 1) * FAN);
        let inside = rest.partition_point(|interval| interval.0 < end);
        table[upper] = match &rest[..inside] {
            [(_, _, row)] => *row,
            several => {
                let place = table.len();
                for (_, stop, row) in several {
                    table.resize(place + (*stop).min(end) - first, *row);
                }
                PAGE | place as u32
            }
        };
        let whole = rest.partition_point(|interval| interval.1 <= end);
        rest = &rest[whole..];
    }
    table.into()
}

/// Splits all ports into intervals `start..end` in which the same rules match.
fn intervals(any: &RuleSet, ranges: &[(u16, u16, u32)], rows: &mut RowsBuilder) -> Vec<(usize, usize, Row)> {
    let mut events: Vec<(usize, bool, u32)> = Vec::with_capacity(ranges.len() * 2);
    for (first, last, rule) in ranges {
        events.push((*first as usize, true, *rule));
        events.push((*last as usize + 1, false, *rule));
    }
    events.sort_unstable();
    let mut sweep = RuleSweep::default();
    let mut row = |sweep: &RuleSweep| {
        let mut rules = sweep.current().clone();
        rules.union_with(any);
        rows.row(&rules)
    };
    let (mut result, mut start) = (Vec::new(), 0);
    for same_place in events.chunk_by(|a, b| a.0 == b.0) {
        let place = same_place[0].0;
        if start < place {
            result.push((start, place, row(&sweep)));
        }
        start = place;
        for (_, _, rule) in same_place.iter().filter(|event| event.1) {
            sweep.begin_range(*rule);
        }
        for (_, _, rule) in same_place.iter().filter(|event| !event.1) {
            sweep.end_range(*rule);
        }
    }
    if start < FAN * FAN {
        result.push((start, FAN * FAN, row(&sweep)));
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_range() -> impl Strategy<Value = (PortRange, u32)> {
        let protocol = prop_oneof![Just(PortProtocol::Tcp), Just(PortProtocol::Udp), Just(PortProtocol::Sctp)];
        // Around the edges of pages and of the port range, where errors are likely.
        let port = prop_oneof![Just(0u16), Just(255), Just(256), Just(257), Just(511), Just(65535), any::<u16>()];
        (protocol, port.clone(), port, 0u32..70)
            .prop_map(|(protocol, a, b, rule)| (PortRange { protocol, first: a.min(b), last: a.max(b) }, rule))
    }

    proptest! {
        #[test]
        fn every_port_has_the_rules_whose_ranges_cover_it(
            ranges in prop::collection::vec(any_range(), 0..12),
            any in prop::collection::vec(0u32..70, 0..3),
            probes in prop::collection::vec(any::<u16>(), 0..20),
        ) {
            let mut builder = RowsBuilder::new(70);
            let any: RuleSet = any.into_iter().collect();
            let ports = Ports::build(&any, &ranges, &mut builder);
            let rows = builder.finish();
            let edges = ranges.iter().flat_map(|(range, _)| {
                [range.first, range.last, range.first.wrapping_sub(1), range.last.wrapping_add(1)]
            });
            for port in probes.iter().copied().chain(edges) {
                for protocol in [PortProtocol::Tcp, PortProtocol::Udp, PortProtocol::Sctp] {
                    let mut expected: RuleSet = ranges
                        .iter()
                        .filter(|(range, _)| range.protocol == protocol && (range.first..=range.last).contains(&port))
                        .map(|(_, rule)| *rule)
                        .collect();
                    expected.union_with(&any);
                    prop_assert_eq!(rows.rules(ports.row(protocol.number(), port)), expected);
                }
                prop_assert_eq!(rows.rules(ports.row(Protocol::ICMP, port)), any.clone());
            }
        }
    }
}

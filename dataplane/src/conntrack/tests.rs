//! The table as its callers see it.

use std::time::Duration;

use super::*;
use crate::packet::{Address, Flow, Protocol, TcpFlags, TcpSegment, Transport};
use crate::snapshot::Epoch;

pub(super) const NOW: Timestamp = Timestamp::from_millis(1_000_000);
pub(super) const POD: OwnerId = OwnerId(7);

pub(super) fn table(entries: usize) -> ConnTable {
    ConnTable::new(&Config { entries, ..Config::default() }).unwrap()
}

/// The flow of number `n` from a client to 10.0.0.1:53.
pub(super) fn flow(n: u32) -> Flow {
    Flow {
        src: Address::from_v4_octets((0x0a01_0000 + (n >> 14)).to_be_bytes()),
        dst: Address::from_v4_octets([10, 0, 0, 1]),
        protocol: Protocol::UDP,
        src_port: 1024 + (n & 0x3fff) as u16,
        dst_port: 53,
    }
}

pub(super) fn tcp(n: u32) -> Flow {
    Flow { protocol: Protocol::TCP, ..flow(n) }
}

pub(super) fn syn() -> Transport {
    Transport::Tcp(TcpSegment { seq: 1000, window: 1000, flags: TcpFlags::SYN, ..TcpSegment::default() })
}

pub(super) fn insert<'t>(
    table: &'t ConnTable,
    flow: &Flow,
    transport: &Transport,
    now: Timestamp,
) -> Result<Insertion<'t>, Refused> {
    table.insert(&NewConn { hashed: &table.prepare(flow), transport, owner: POD, epoch: Epoch(1), now })
}

fn find<'t>(table: &'t ConnTable, flow: &Flow, now: Timestamp) -> Option<Conn<'t>> {
    let mut hashed = table.prepare(flow);
    let found = table.find(&hashed, now);
    table.locate(&mut hashed);
    assert_eq!(found.is_some(), table.find(&hashed, now).is_some(), "a hint changes nothing");
    found
}

#[test]
fn both_directions_find_the_one_entry() {
    let table = table(100);
    assert!(find(&table, &flow(1), NOW).is_none());
    assert!(matches!(insert(&table, &flow(1), &Transport::Udp, NOW), Ok(Insertion::Created(_))));
    assert!(matches!(insert(&table, &flow(1).reversed(), &Transport::Udp, NOW), Ok(Insertion::Found(_))));
    assert_eq!((table.len(), table.len_of(POD), table.len_of(OwnerId(8))), (1, 1, 0));
    for asked in [flow(1), flow(1).reversed()] {
        let conn = find(&table, &asked, NOW).unwrap();
        assert_eq!((conn.original_flow(), conn.owner(), conn.state()), (flow(1), POD, State::Unreplied));
        assert_eq!(conn.is_reply(asked.key().1), asked != flow(1));
        assert!(table.related(&asked, NOW).is_some());
    }
    assert!(find(&table, &flow(2), NOW).is_none());
    assert!(find(&table, &tcp(1), NOW).is_none());
    assert!(find(&table, &flow(1), NOW).unwrap().remove());
    assert!(find(&table, &flow(1), NOW).is_none() && table.is_empty());
    let statistics = table.statistics();
    assert_eq!((statistics.created, statistics.raced, statistics.removed), (1, 1, 1));
}

#[test]
fn a_stale_handle_reaches_nobody_elses_connection() {
    let table = table(64);
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    let mut stale = find(&table, &flow(1), NOW).unwrap();
    assert!(find(&table, &flow(1), NOW).unwrap().remove());
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    assert!(!stale.set_epoch(Epoch(9)) && !stale.is_of_epoch(Epoch(1)));
    assert_eq!(stale.update(flow(1).key().1, &Transport::Udp, NOW), Update::Ended);
    assert!(!stale.remove());
    assert!(find(&table, &flow(1), NOW).unwrap().is_of_epoch(Epoch(1)));
}

#[test]
fn an_epoch_is_kept_with_its_connection() {
    let table = table(64);
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    let conn = find(&table, &flow(1), NOW).unwrap();
    assert!(conn.is_of_epoch(Epoch(1)) && !conn.is_of_epoch(Epoch(2)));
    assert!(conn.set_epoch(Epoch(2)));
    let conn = find(&table, &flow(1).reversed(), NOW).unwrap();
    assert!(conn.is_of_epoch(Epoch(2)) && !conn.is_of_epoch(Epoch(1)));
    assert_eq!(conn.original_flow(), flow(1), "the epoch leaves ports and protocol alone");
}

#[test]
fn what_was_asked_for_fits_in() {
    for entries in [64, 1000, 100_000] {
        let table = ConnTable::new(&Config { entries, quota: Some(u32::MAX), ..Config::default() }).unwrap();
        for n in 0..entries as u32 {
            let inserted = insert(&table, &flow(n), &Transport::Udp, NOW);
            assert!(matches!(inserted, Ok(Insertion::Created(_))), "connection {n} of {entries}");
        }
        let statistics = table.statistics();
        assert_eq!((table.len(), statistics.evicted_unreplied), (entries, 0), "{entries} entries");
        assert!((0..entries as u32).all(|n| find(&table, &flow(n), NOW).is_some()));
        assert_eq!(table.iter(NOW).count(), entries);
    }
}

#[test]
fn an_idle_connection_expires_and_a_touched_one_does_not() {
    let table = table(64);
    for n in 0..2 {
        insert(&table, &flow(n), &Transport::Udp, NOW).unwrap();
    }
    let later = NOW.plus(Duration::from_secs(29));
    let orientation = flow(1).key().1;
    assert_eq!(
        find(&table, &flow(1), later).unwrap().update(orientation, &Transport::Udp, later),
        Update::Accepted(State::Unreplied)
    );
    let mut cursor = SweepCursor::default();
    assert_eq!(table.sweep(&mut cursor, usize::MAX, later).expired, 0);
    let end = NOW.plus(Duration::from_secs(32));
    assert!(find(&table, &flow(0), end).is_none(), "not found although not swept yet");
    assert_eq!(table.len(), 2);
    let swept = table.sweep(&mut cursor, usize::MAX, end);
    assert_eq!((swept.expired, swept.examined, swept.wrapped), (1, table.capacity(), true));
    assert!(find(&table, &flow(1), end).is_some());
    assert_eq!((table.len(), table.statistics().expired), (1, 1));
}

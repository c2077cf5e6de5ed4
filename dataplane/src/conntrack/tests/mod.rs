//! Tests of the table's public interface.

use std::time::Duration;

use super::entry::EntrySnapshot;
use super::*;
use crate::epoch::Epoch;
use crate::packet::{Address, Flow, Protocol, TcpFlags, TcpSegment, Transport};

mod answered;
mod revoked;

pub(super) const NOW: Timestamp = Timestamp::from_millis(1_000_000);
pub(super) const POD: OwnerId = OwnerId(7);

pub(super) fn table(entries: usize) -> ConnTable {
    ConnTable::new(&Config { entries, ..Config::default() }).unwrap()
}

/// Flow number `n` from a client to 10.0.0.1:53.
pub(super) fn flow(n: u32) -> Flow {
    Flow {
        src: Address::from_v4_bytes((0x0a01_0000 + (n >> 14)).to_be_bytes()),
        dst: Address::from_v4_bytes([10, 0, 0, 1]),
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
) -> Result<Insertion<'t>, InsertError> {
    insert_for(table, flow, transport, POD, now)
}

pub(super) fn insert_for<'t>(
    table: &'t ConnTable,
    flow: &Flow,
    transport: &Transport,
    owner: OwnerId,
    now: Timestamp,
) -> Result<Insertion<'t>, InsertError> {
    let hashed = &table.prepare(flow);
    table.insert(&NewConnection { hashed, transport, owner, via_host: false, opener: None, epoch: Epoch(1), now })
}

/// Connection `n` with an owner of its own, so that only the table's size limits their number.
pub(super) fn insert_alone(table: &ConnTable, flow: &Flow, n: u32, transport: &Transport, now: Timestamp) -> bool {
    insert_for(table, flow, transport, OwnerId(n as u16), now).is_ok()
}

fn find<'t>(table: &'t ConnTable, flow: &Flow, now: Timestamp) -> Option<Conn<'t>> {
    let mut hashed = table.prepare(flow);
    let found = table.find(&hashed, now);
    table.locate(&mut hashed);
    assert_eq!(found.is_some(), table.find(&hashed, now).is_some(), "a hint changes nothing");
    found
}

#[test]
fn both_directions_find_the_same_entry() {
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
fn a_stale_handle_never_reaches_another_connection() {
    let table = table(64);
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    let mut stale = find(&table, &flow(1), NOW).unwrap();
    assert!(find(&table, &flow(1), NOW).unwrap().remove());
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    assert_eq!(stale.set_verdict(Epoch(9), false), Reevaluation::Removed);
    assert_eq!(stale.update(flow(1).key().1, &Transport::Udp, NOW), Update::Removed);
    assert!(!stale.remove());
    assert!(find(&table, &flow(1), NOW).unwrap().is_evaluated_under(Epoch(1)));
}

#[test]
fn an_epoch_is_stored_with_its_connection() {
    let table = table(64);
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    let mut conn = find(&table, &flow(1), NOW).unwrap();
    assert!(conn.is_evaluated_under(Epoch(1)) && !conn.is_evaluated_under(Epoch(2)));
    assert_eq!(conn.set_verdict(Epoch(2), true), Reevaluation::Unchanged);
    let conn = find(&table, &flow(1).reversed(), NOW).unwrap();
    assert!(
        conn.is_evaluated_under(Epoch(2)) && conn.is_evaluated_under(Epoch(1)) && !conn.is_evaluated_under(Epoch(3))
    );
    assert_eq!(conn.original_flow(), flow(1), "the epoch leaves ports and protocol alone");
}

#[test]
fn the_configured_capacity_fits() {
    for entries in [64, 1000, 50_000] {
        let table = table(entries);
        for n in 0..entries as u32 {
            assert!(insert_alone(&table, &flow(n), n, &Transport::Udp, NOW), "connection {n} of {entries}");
        }
        let statistics = table.statistics();
        assert_eq!((table.len(), statistics.evicted_unanswered), (entries, 0), "{entries} entries");
        assert!((0..entries as u32).all(|n| find(&table, &flow(n), NOW).is_some()));
        assert_eq!(table.iter(NOW).count(), entries);
    }
}

#[test]
fn an_idle_connection_expires_and_a_used_one_does_not() {
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
    assert_eq!(table.sweep(&mut cursor, usize::MAX, later, Epoch(1)).expired, 0);
    let end = NOW.plus(Duration::from_secs(32));
    assert!(find(&table, &flow(0), end).is_none(), "not found although not swept yet");
    assert_eq!(table.len(), 2);
    let swept = table.sweep(&mut cursor, usize::MAX, end, Epoch(1));
    assert_eq!((swept.expired, swept.examined, swept.wrapped), (1, table.capacity(), true));
    assert!(find(&table, &flow(1), end).is_some());
    assert_eq!((table.len(), table.statistics().expired), (1, 1));
}

/// Makes the connection of `flow` one that is never evicted: both sides have sent, and the opening one again.
fn establish(table: &ConnTable, flow: &Flow, owner: OwnerId, now: Timestamp) -> Result<(), InsertError> {
    let began = Timestamp::from_millis(now.as_millis() - 3000);
    let way = flow.key().1;
    let (Insertion::Created(mut conn) | Insertion::Found(mut conn)) =
        insert_for(table, flow, &Transport::Udp, owner, began)?;
    assert_eq!(conn.update(way.opposite(), &Transport::Udp, began), Update::Accepted(State::Replied));
    assert_eq!(conn.update(way, &Transport::Udp, now), Update::Accepted(State::Assured));
    Ok(())
}

/// Inserts connections with `enter` until every entry is used.
fn fill(table: &ConnTable, mut enter: impl FnMut(u32)) {
    for n in 0..60_000 {
        if table.len() == table.capacity() {
            return;
        }
        enter(n);
    }
    panic!("{} of {} entries are taken", table.len(), table.capacity());
}

#[test]
fn an_established_connection_is_never_evicted_for_a_new_one() {
    let table = table(64);
    let mut established = Vec::new();
    fill(&table, |n| established.extend(establish(&table, &flow(n), OwnerId(n as u16), NOW).is_ok().then_some(n)));
    let refused = table.statistics().refused_full;
    for n in 61_000..61_100 {
        assert!(matches!(insert_for(&table, &tcp(n), &syn(), OwnerId(n as u16), NOW), Err(InsertError::Full)));
    }
    assert!(established.iter().all(|n| find(&table, &flow(*n), NOW).is_some()));
    let s = table.statistics();
    assert_eq!(s.refused_full, refused + 100);
    assert_eq!((s.evicted_closing, s.evicted_unanswered, s.evicted_answered, s.expired), (0, 0, 0, 0));
    // Once they have expired there is room again, even without a sweep.
    let later = NOW.plus(Duration::from_secs(200));
    assert!(insert_alone(&table, &tcp(0), 62_000, &syn(), later));
    assert_eq!(table.statistics().expired, 1);
}

/// A connection last used at `since`, brought into the state `kind` by packets.
fn entry_of(table: &ConnTable, kind: &str, n: u32, since: Timestamp) {
    let segment = |flags: TcpFlags, seq, ack| {
        Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, ..TcpSegment::default() })
    };
    let (ack, reset) = (TcpFlags::ACK, TcpFlags::RST);
    let packets: &[(bool, Transport)] = match kind {
        "closed" => &[(true, syn()), (false, segment(reset.with(ack), 0, 1001))],
        "half-open" => &[(true, syn()), (false, segment(TcpFlags::SYN.with(ack), 5, 1001))],
        "picked up" => &[(true, segment(ack, 1000, 7))],
        "unreplied" => &[(true, Transport::Udp)],
        "replied" => &[(true, Transport::Udp), (false, Transport::Udp)],
        "established" => {
            &[(true, syn()), (false, segment(TcpFlags::SYN.with(ack), 5, 1001)), (true, segment(ack, 1001, 6))]
        }
        other => panic!("{other}"),
    };
    let flow = if matches!(packets[0].1, Transport::Tcp(_)) { tcp(n) } else { flow(n) };
    assert!(insert_alone(table, &flow, n, &packets[0].1, since), "{kind} {n}");
    for (from_opener, packet) in &packets[1..] {
        let way = if *from_opener { flow.key().1 } else { flow.key().1.opposite() };
        let update = find(table, &flow, since).unwrap().update(way, packet, since);
        assert!(matches!(update, Update::Accepted(_)), "{kind}: {update:?}");
    }
}

/// The kind of connection that is evicted for a new one if every entry is one of these two kinds, half each, and those
/// of the second kind were used later.
fn goes_first(older: &str, younger: &str) -> [u64; 3] {
    let table = table(64);
    let later = NOW.plus(Duration::from_secs(5));
    for n in 0..40 {
        entry_of(&table, older, n, NOW);
    }
    fill(&table, |n| entry_of(&table, younger, 100 + n, later));
    let before = table.statistics();
    insert_alone(&table, &flow(40_000), 40_000, &Transport::Udp, later);
    let after = table.statistics();
    [
        after.evicted_closing - before.evicted_closing,
        after.evicted_unanswered - before.evicted_unanswered,
        after.evicted_answered - before.evicted_answered,
    ]
}

#[test]
fn the_lowest_eviction_class_goes_first() {
    for (older, younger, closing, unanswered, answered) in [
        ("unreplied", "closed", 1, 0, 0),
        ("replied", "closed", 1, 0, 0),
        ("established", "closed", 1, 0, 0),
        ("established", "half-open", 0, 1, 0),
        ("established", "picked up", 0, 1, 0),
        ("established", "replied", 0, 0, 1),
        ("replied", "unreplied", 0, 1, 0),
        ("replied", "half-open", 0, 1, 0),
        ("replied", "picked up", 0, 1, 0),
    ] {
        assert_eq!(goes_first(older, younger), [closing, unanswered, answered], "{older}, {younger}");
    }
}

#[test]
fn among_unanswered_connections_the_least_recently_used_goes() {
    for (older, younger) in [("unreplied", "half-open"), ("half-open", "unreplied"), ("picked up", "unreplied")] {
        let table = table(64);
        let later = NOW.plus(Duration::from_secs(5));
        fill(&table, |n| entry_of(&table, if n < 60 { older } else { younger }, n, if n < 60 { NOW } else { later }));
        let is_old = |c: &ConnectionInfo| c.idle > Duration::from_secs(2);
        let (old, young) = (table.iter(later).filter(is_old).count(), table.iter(later).filter(|c| !is_old(c)).count());
        insert_alone(&table, &flow(40_000), 40_000, &Transport::Udp, later);
        assert_eq!(table.iter(later).filter(is_old).count(), old - 1, "{older}, {younger}");
        assert_eq!(table.iter(later).filter(|c| !is_old(c)).count(), young + 1, "{older}, {younger}");
    }
}

#[test]
fn a_flood_from_one_address_evicts_its_own_connections_first() {
    let table = table(1000);
    let from = |host: u8, n: u32| Flow { src: Address::from_v4_bytes([192, 0, 2, host]), ..flow(n) };
    // Older than the whole flood, and the pod is at its share.
    for n in 0..50 {
        insert(&table, &from(1, n), &Transport::Udp, NOW).unwrap();
    }
    let flood = |n: u32| insert(&table, &from(66, n), &Transport::Udp, NOW.plus(Duration::from_secs(1))).is_ok();
    let entered = (0..20_000).filter(|n| flood(*n)).count();
    assert_eq!(table.len_of(POD), 250);
    assert!(entered > 19_000, "{entered}");
    let left = (0..50).filter(|n| find(&table, &from(1, *n), NOW).is_some()).count();
    assert!(left >= 48, "{left} of 50 are left: one goes only where no entry of the flood is near");
}

/// Streams of one address, so many that they fill a share of 2,048; whether it is of what others open to a pod.
fn hoarded(share: OwnerId) -> (ConnTable, impl Fn(u8, u32) -> Flow) {
    let table = table(8192);
    let from = |host: u8, n: u32| Flow { src: Address::from_v4_bytes([192, 0, 2, host]), ..flow(n) };
    for n in 0..2048 {
        establish(&table, &from(66, n), share, NOW).unwrap();
    }
    assert_eq!(table.len_of(share), 2048);
    (table, from)
}

#[test]
fn streams_of_one_source_shut_nobody_out_of_a_pods_share() {
    let (table, from) = hoarded(OwnerId::opened_to(7));
    let mut opened = 0;
    for n in 0..200 {
        let host = (n % 50) as u8;
        opened += u32::from(establish(&table, &from(host, n), OwnerId::opened_to(7), NOW).is_ok());
        // The flood goes on.
        (0..5).for_each(|m| _ = establish(&table, &from(66, 3000 + 5 * n + m), OwnerId::opened_to(7), NOW));
    }
    assert!(opened >= 199, "{opened} of 200 connections of other sources");
    let left = (0..200).filter(|n| find(&table, &from((n % 50) as u8, *n), NOW).is_some()).count();
    assert!(left >= 198, "{left} of 200 streams of other sources are left");
    assert_eq!(table.len_of(OwnerId::opened_to(7)), 2048);
}

#[test]
fn what_is_opened_to_a_pod_takes_nothing_of_what_it_opens() {
    let (table, from) = hoarded(OwnerId::opened_to(7));
    for n in 0..2048 {
        establish(&table, &from(1, n).reversed(), OwnerId::opens(7), NOW).unwrap();
    }
    let shares = [OwnerId::opens(7), OwnerId::opened_to(7)].map(|owner| table.len_of(owner));
    assert_eq!(shares, [2048; 2]);
}

#[test]
fn a_pods_own_streams_never_give_way_to_its_new_ones() {
    let (table, from) = hoarded(OwnerId::opens(7));
    assert!((3000..3100).all(|n| insert_for(&table, &from(1, n), &Transport::Udp, OwnerId::opens(7), NOW).is_err()));
    assert!((0..2048).all(|n| find(&table, &from(66, n), NOW).is_some()));
}

/// As where many pods are flooded: each then has a small part of the table.
#[test]
fn who_hoards_a_small_share_gives_from_groups_further_away() {
    let table = ConnTable::new(&Config { entries: 65_536, quota: Some(2048), ..Config::default() }).unwrap();
    let (share, from) =
        (OwnerId::opened_to(7), |host: u8, n| Flow { src: Address::from_v4_bytes([192, 0, 2, host]), ..flow(n) });
    (0..2048).for_each(|n| establish(&table, &from(66, n), share, NOW).unwrap());
    let opened = (0..500).filter(|n| establish(&table, &from((n % 50) as u8, *n), share, NOW).is_ok()).count();
    assert!(opened >= 495, "{opened} of 500 connections of other sources");
    assert!(table.len_of(share) <= 2048);
}

#[test]
fn owners_at_their_limit_leave_room_for_another() {
    let table = table(10_000);
    for owner in 0..20 {
        for n in 0..5000 {
            let _ = insert_for(&table, &flow(owner * 5000 + n), &Transport::Udp, OwnerId(owner as u16), NOW);
        }
    }
    assert!((0..20).all(|owner| table.len_of(OwnerId(owner)) > 0));
    assert!(table.len() < table.capacity() * 95 / 100, "{} of {}", table.len(), table.capacity());
    // Unanswered entries are evicted, also for owners that come late; established ones stay.
    for n in 0..9 {
        establish(&table, &flow(200_000 + n), OwnerId(99), NOW).unwrap();
    }
    assert!((0..9).all(|n| find(&table, &flow(200_000 + n), NOW).is_some()));
}

#[test]
fn an_owner_beyond_its_share_gives_back_as_the_table_fills() {
    let table = ConnTable::new(&Config { entries: 10_000, quota: Some(10_000), ..Config::default() }).unwrap();
    let greedy = |n: u32| insert_for(&table, &flow(n), &Transport::Udp, OwnerId(1), NOW).is_ok();
    (0..20_000).for_each(|n| _ = greedy(n));
    let alone = table.len_of(OwnerId(1));
    assert!((4_900..=5_000).contains(&alone), "half of the table, so that as much is free: {alone}");
    for n in 0..20_000 {
        _ = insert_for(&table, &flow(100_000 + n), &Transport::Udp, OwnerId(2), NOW);
        _ = greedy(200_000 + n);
    }
    let shares = [1, 2].map(|owner| table.len_of(OwnerId(owner)));
    assert!(shares.iter().all(|share| (3_000..3_500).contains(share)), "a third each: {shares:?}");
}

#[test]
fn a_mid_stream_segment_opens_in_time_and_half_a_share() {
    let ack =
        Transport::Tcp(TcpSegment { seq: 1, ack: 1, window: 1000, flags: TcpFlags::ACK, ..TcpSegment::default() });
    let end = NOW.plus(Duration::from_secs(60));
    let open = |midstream_pickup, now| {
        let table = ConnTable::new(&Config { entries: 1000, midstream_pickup, ..Config::default() }).unwrap();
        (0..1000).filter(|n| insert(&table, &tcp(*n), &ack, now).is_ok()).count()
    };
    assert_eq!(open(MidStreamPickup::Never, NOW), 0);
    assert_eq!(open(MidStreamPickup::Always, end), 125, "half of a quarter, at any time");
    for midstream_pickup in [MidStreamPickup::AfterLoss(end), MidStreamPickup::Until(end)] {
        assert_eq!(open(midstream_pickup, NOW), 125, "half of a quarter");
        assert_eq!(open(midstream_pickup, end), 0);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("conntrack");
    for (midstream_pickup, first, again) in
        [(MidStreamPickup::AfterLoss(end), true, false), (MidStreamPickup::Until(end), true, true)]
    {
        let memory = TableMemory::File(path.clone());
        let config = Config { entries: 64, midstream_pickup, memory, ..Config::default() };
        for (n, expected) in [(1, first), (2, again)] {
            let table = ConnTable::new(&config).unwrap();
            assert_eq!(
                insert(&table, &tcp(n), &ack, NOW).is_ok(),
                expected,
                "{midstream_pickup:?}: {:?}",
                table.origin()
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_connection_idle_through_an_epoch_wrap_is_evaluated_again() {
    let table = table(64);
    insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
    let sweep = |epoch: u32| table.sweep(&mut SweepCursor::default(), usize::MAX, NOW, Epoch(epoch));
    sweep(1000);
    assert!(find(&table, &flow(1), NOW).unwrap().is_evaluated_under(Epoch(1)), "not old enough to matter");
    for epoch in (1..=20).map(|n| n << 20) {
        sweep(epoch);
    }
    for epoch in [1, 2, 1 << 23, (1 << 24) + 1, (1 << 24) + 2] {
        assert!(!find(&table, &flow(1), NOW).unwrap().is_evaluated_under(Epoch(epoch)), "{epoch}");
    }
    assert_eq!(find(&table, &flow(1), NOW).unwrap().set_verdict(Epoch((1 << 24) + 1), true), Reevaluation::Unchanged);
    assert!(find(&table, &flow(1), NOW).unwrap().is_evaluated_under(Epoch((1 << 24) + 1)));
}

#[test]
fn an_older_epochs_verdict_never_replaces_a_newer_one() {
    for (first, second) in [(true, false), (false, true)] {
        let table = table(64);
        insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
        let mut newer = find(&table, &flow(1), NOW).unwrap();
        let mut lagging = find(&table, &flow(1), NOW).unwrap();
        newer.set_verdict(Epoch(3), first);
        assert_eq!(lagging.set_verdict(Epoch(2), second), Reevaluation::Unchanged);
        let found = find(&table, &flow(1), NOW).unwrap();
        assert!(found.is_evaluated_under(Epoch(3)) && found.is_revoked() != first);
        assert_eq!(lagging.is_revoked(), found.is_revoked(), "and the lagging one goes by it");
    }
}

#[test]
fn a_flood_from_one_pod_does_not_affect_others() {
    let table = table(1000);
    let (victim, flooder) = (OwnerId(1), OwnerId(2));
    for n in 0..200 {
        establish(&table, &flow(n), victim, NOW).unwrap();
    }
    let flood = |n: u32| {
        let hashed = table.prepare(&tcp(1_000_000 + n));
        let syn = syn();
        let new = NewConnection {
            hashed: &hashed,
            transport: &syn,
            owner: flooder,
            via_host: false,
            opener: None,
            epoch: Epoch(1),
            now: NOW,
        };
        table.insert(&new).map(|_| ())
    };
    let refused = (0..20_000).filter(|n| flood(*n) == Err(InsertError::Quota)).count() as u64;
    assert_eq!(table.len_of(flooder), 250, "a quarter of the table");
    assert_eq!(table.len_of(victim), 200);
    assert!((0..200).all(|n| find(&table, &flow(n), NOW).is_some()));
    let statistics = table.statistics();
    assert_eq!((statistics.refused_quota, statistics.refused_full), (refused, 0));
    assert!(statistics.evicted_quota > 0, "its own half-open connections make room for its next ones");
    assert_eq!(statistics.created - statistics.evicted_quota, 450);
    for n in 200..250 {
        establish(&table, &flow(n), victim, NOW).unwrap();
    }
    assert_eq!(establish(&table, &flow(250), victim, NOW), Err(InsertError::Quota), "established ones make no room");
}

#[test]
fn connections_of_a_removed_pod_are_removed() {
    let table = table(1000);
    for n in 0..100 {
        establish(&table, &flow(n), OwnerId(n as u16 % 2), NOW).unwrap();
    }
    assert_eq!((table.remove_owner(OwnerId(0)), table.remove_owner(OwnerId(0))), (50, 0));
    assert_eq!((table.len(), table.len_of(OwnerId(0)), table.len_of(OwnerId(1))), (50, 0, 50));
    assert!((0..100).all(|n| find(&table, &flow(n), NOW).is_some() == (n % 2 == 1)));
    assert_eq!(table.remove_addresses(&[flow(0).src]), 50, "all come from one client");
    assert_eq!((table.len(), table.iter(NOW).count(), table.statistics().removed), (0, 0, 100));
}

#[test]
fn a_listing_shows_the_time_until_expiry() {
    let table = table(64);
    establish(&table, &flow(1), POD, NOW).unwrap();
    let later = NOW.plus(Duration::from_secs(20));
    let listed: Vec<_> = table.iter(later).collect();
    let [connection] = listed[..] else { panic!("{listed:?}") };
    assert_eq!((connection.original, connection.state.name(), connection.owner), (flow(1), "ASSURED", POD));
    let close = |a: Duration, b: u64| a.abs_diff(Duration::from_secs(b)) <= Duration::from_secs(1);
    assert!(close(connection.idle, 20) && close(connection.expires_in, 100), "{connection:?}");
    assert_eq!(table.iter(later.plus(Duration::from_secs(102))).count(), 0, "expired ones are not listed");
}

/// Four threads run all operations on so few connections that they collide all the time.
#[test]
fn concurrent_threads_leave_a_consistent_table() {
    use std::collections::HashSet;
    const THREADS: u64 = 4;
    const FLOWS: u32 = 300;
    let config = Config { entries: 128, quota: Some(60), ..Config::default() };
    let table = ConnTable::new(&config).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(1);
    let owner = |n: u32| OwnerId(n as u16 % 4);
    let work = |thread: u64| {
        let mut random = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut cursor = SweepCursor::default();
        let mut operations = 0u64;
        while !operations.is_multiple_of(512) || std::time::Instant::now() < deadline {
            operations += 1;
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let n = (random >> 8) as u32 % FLOWS;
            // The threads' clocks advance together, some of them ahead of others.
            let now = NOW.plus(Duration::from_millis(operations / 4 + (random >> 40) % 1000));
            let asked = if random & 1 == 0 { flow(n) } else { flow(n).reversed() };
            let mut hashed = table.prepare(&asked);
            if random & 2 == 0 {
                table.locate(&mut hashed);
            }
            match (table.find(&hashed, now), (random >> 32) % 32) {
                (Some(conn), 0) => _ = conn.remove(),
                (Some(mut conn), 1) => _ = conn.set_verdict(Epoch(operations as u32), true),
                (Some(mut conn), 2) => _ = conn.set_verdict(Epoch(operations as u32), random & 4 == 0),
                (Some(mut conn), _) => {
                    let opened = if conn.is_reply(hashed.orientation()) { asked.reversed() } else { asked };
                    assert_eq!(conn.original_flow().key(), opened.key());
                    let found = conn.owner();
                    match conn.update(hashed.orientation(), &Transport::Udp, now) {
                        Update::Accepted(_) => assert_eq!(found, owner(n)),
                        other => assert!(matches!(other, Update::Revoked | Update::Removed), "{other:?}"),
                    }
                }
                (None, 0) => _ = table.sweep(&mut cursor, 64, now, Epoch(1)),
                (None, 1) if n == 0 => _ = table.remove_owner(OwnerId((random >> 50) as u16 % 4)),
                (None, _) => {
                    let new = NewConnection {
                        hashed: &hashed,
                        transport: &Transport::Udp,
                        owner: owner(n),
                        via_host: false,
                        opener: None,
                        epoch: Epoch(1),
                        now,
                    };
                    if let Err(refused) = table.insert(&new) {
                        assert_ne!(refused, InsertError::CannotOpen);
                    }
                }
            }
        }
        operations
    };
    let operations: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let mut keys = HashSet::new();
    let mut by_owner = [0; 4];
    for slot in (0..table.groups).flat_map(|group| table.occupied(group)) {
        let EntrySnapshot { control, key, owner: found, .. } =
            table.entry(slot).load().expect("no claim is left behind");
        assert!(control.is_live(), "nothing tentative is left behind");
        assert!(keys.insert(key), "one entry a connection");
        let n = (0..FLOWS).find(|n| table.prepare(&flow(*n)).words == key).expect("a key that was entered");
        assert_eq!(found, owner(n));
        assert_eq!(table.lookup(&table.prepare(&flow(n))).map(|(found, _)| found), Some(slot));
        by_owner[usize::from(found.0)] += 1;
    }
    assert_eq!(by_owner, std::array::from_fn(|n| table.len_of(OwnerId(n as u16))));
    assert!(by_owner.iter().all(|count| *count <= 60));
    let free = (0..table.capacity() as u32).filter(|slot| table.entry(*slot).control().is_free()).count();
    assert_eq!(free + keys.len(), table.capacity());
    let s = table.statistics();
    let left = s.expired
        + s.removed
        + s.evicted_closing
        + s.evicted_unanswered
        + s.evicted_answered
        + s.evicted_quota
        + s.reopened;
    assert_eq!(s.created - left, keys.len() as u64, "{operations} operations: {s:?}");
    assert!(s.created > 1000 && s.removed > 100, "{operations} operations: {s:?}");
}

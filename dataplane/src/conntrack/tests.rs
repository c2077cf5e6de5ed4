//! The table as its callers see it.

use std::time::Duration;

use super::*;
use crate::packet::{Address, Flow, Protocol, TcpFlags, TcpSegment, Transport};
use crate::snapshot::Epoch;

mod cut;

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
    table.insert(&NewConn {
        hashed: &table.prepare(flow),
        transport,
        owner: POD,
        via_host: false,
        epoch: Epoch(1),
        now,
    })
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

/// Makes an established connection of `flow`.
fn establish(table: &ConnTable, flow: &Flow, owner: OwnerId, now: Timestamp) -> Result<(), Refused> {
    let hashed = table.prepare(flow);
    let new = NewConn { hashed: &hashed, transport: &Transport::Udp, owner, via_host: false, epoch: Epoch(1), now };
    let (Insertion::Created(mut conn) | Insertion::Found(mut conn)) = table.insert(&new)?;
    let updated = conn.update(hashed.orientation().opposite(), &Transport::Udp, now);
    assert_eq!(updated, Update::Accepted(State::Replied));
    Ok(())
}

fn unlimited(entries: usize) -> ConnTable {
    ConnTable::new(&Config { entries, quota: Some(u32::MAX), ..Config::default() }).unwrap()
}

/// Enters connections with `enter` until every entry is taken; their flows.
fn fill(table: &ConnTable, mut enter: impl FnMut(u32)) {
    for n in 0..100_000 {
        if table.len() == table.capacity() {
            return;
        }
        enter(n);
    }
    panic!("{} of {} entries are taken", table.len(), table.capacity());
}

#[test]
fn an_established_connection_is_never_evicted_for_a_new_one() {
    let table = unlimited(64);
    let mut established = Vec::new();
    fill(&table, |n| established.extend(establish(&table, &flow(n), POD, NOW).is_ok().then_some(n)));
    let refused = table.statistics().refused_full;
    for n in 200_000..200_100 {
        assert!(matches!(insert(&table, &tcp(n), &syn(), NOW), Err(Refused::Full)));
    }
    assert!(established.iter().all(|n| find(&table, &flow(*n), NOW).is_some()));
    let statistics = table.statistics();
    assert_eq!(statistics.refused_full, refused + 100);
    assert_eq!((statistics.evicted_transient, statistics.evicted_unreplied, statistics.expired), (0, 0, 0));
    // Once they have expired there is room again, swept or not.
    let later = NOW.plus(Duration::from_secs(200));
    assert!(matches!(insert(&table, &tcp(0), &syn(), later), Ok(Insertion::Created(_))));
    assert_eq!(table.statistics().expired, 1);
}

#[test]
fn half_open_connections_go_before_older_unreplied_ones() {
    let table = unlimited(64);
    let later = NOW.plus(Duration::from_secs(10));
    for n in 0..40 {
        insert(&table, &flow(n), &Transport::Udp, NOW).unwrap();
    }
    fill(&table, |n| _ = insert(&table, &tcp(n), &syn(), later).unwrap());
    let before = table.statistics();
    for n in 300_000..300_010 {
        insert(&table, &flow(n), &Transport::Udp, later).unwrap();
    }
    let after = table.statistics();
    assert_eq!(after.evicted_transient, before.evicted_transient + 10);
    assert_eq!((after.evicted_unreplied, table.len()), (0, table.capacity()));
    assert!((0..40).all(|n| find(&table, &flow(n), later).is_some()));
}

#[test]
fn among_unreplied_connections_the_least_recently_used_goes() {
    let table = unlimited(64);
    let at = |n: u32| NOW.plus(Duration::from_millis(u64::from(n) * 200));
    let mut present = Vec::new();
    fill(&table, |n| {
        insert(&table, &flow(n), &Transport::Udp, at(n)).unwrap();
        present.push(n);
    });
    present.retain(|n| find(&table, &flow(*n), at(*n)).is_some());
    let now = at(*present.last().unwrap());
    let evicted = table.statistics().evicted_unreplied;
    insert(&table, &flow(500_000), &Transport::Udp, now).unwrap();
    assert_eq!(table.statistics().evicted_unreplied, evicted + 1);
    let gone: Vec<u32> = present.iter().copied().filter(|n| find(&table, &flow(*n), now).is_none()).collect();
    let groups = {
        let hashed = table.prepare(&flow(500_000));
        [hash::home(hashed.hash, table.groups), hash::alternate(hashed.hash, table.groups)]
    };
    // The oldest of the two groups in which it may be; a tick is half a second, and equally old ones may go.
    let oldest = present
        .iter()
        .filter(|n| !gone.contains(n))
        .filter(|n| groups.contains(&(table.lookup(&table.prepare(&flow(**n))).unwrap().0 / tags::LANES)))
        .map(|n| at(*n).tick().0)
        .min();
    let [gone] = gone[..] else { panic!("one makes room for one: {gone:?}") };
    assert!(Some(at(gone).tick().0) <= oldest, "{gone} went, {oldest:?} is left");
}

#[test]
fn a_flood_from_one_pod_leaves_the_others_alone() {
    let table = table(1000);
    let (victim, flooder) = (OwnerId(1), OwnerId(2));
    for n in 0..200 {
        establish(&table, &flow(n), victim, NOW).unwrap();
    }
    let flood = |n: u32| {
        let hashed = table.prepare(&tcp(1_000_000 + n));
        let syn = syn();
        let new =
            NewConn { hashed: &hashed, transport: &syn, owner: flooder, via_host: false, epoch: Epoch(1), now: NOW };
        table.insert(&new).map(|_| ())
    };
    let refused = (0..20_000).filter(|n| flood(*n) == Err(Refused::Quota)).count() as u64;
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
    assert_eq!(establish(&table, &flow(250), victim, NOW), Err(Refused::Quota), "established ones make no room");
}

#[test]
fn what_a_pod_leaves_behind_is_removed() {
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
fn a_listing_says_how_long_a_connection_is_kept() {
    let table = table(64);
    establish(&table, &flow(1), POD, NOW).unwrap();
    let later = NOW.plus(Duration::from_secs(20));
    let listed: Vec<_> = table.iter(later).collect();
    let [connection] = listed[..] else { panic!("{listed:?}") };
    assert_eq!((connection.original, connection.state.name(), connection.owner), (flow(1), "REPLIED", POD));
    let close = |a: Duration, b: u64| a.abs_diff(Duration::from_secs(b)) <= Duration::from_secs(1);
    assert!(close(connection.idle, 20) && close(connection.expires_in, 100), "{connection:?}");
    assert_eq!(table.iter(later.plus(Duration::from_secs(102))).count(), 0, "expired ones are not listed");
}

/// Four threads do all that can be done, on so few connections that they meet all the time.
#[test]
fn threads_that_meet_leave_a_sound_table() {
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
            // All threads' clocks run on together, with some of them ahead.
            let now = NOW.plus(Duration::from_millis(operations / 4 + (random >> 40) % 1000));
            let asked = if random & 1 == 0 { flow(n) } else { flow(n).reversed() };
            let mut hashed = table.prepare(&asked);
            if random & 2 == 0 {
                table.locate(&mut hashed);
            }
            match (table.find(&hashed, now), (random >> 32) % 32) {
                (Some(conn), 0) => _ = conn.remove(),
                (Some(conn), 1) => _ = conn.set_epoch(Epoch(random as u32)),
                (Some(mut conn), 2) => _ = conn.set_judged(Epoch(random as u32), random & 4 == 0),
                (Some(mut conn), _) => {
                    assert_eq!(
                        (conn.original_flow().key(), conn.owner()),
                        (if conn.is_reply(hashed.orientation()) { asked.reversed() } else { asked }.key(), owner(n))
                    );
                    assert_ne!(conn.update(hashed.orientation(), &Transport::Udp, now), Update::Invalid);
                }
                (None, 0) => _ = table.sweep(&mut cursor, 64, now),
                (None, 1) if n == 0 => _ = table.remove_owner(OwnerId((random >> 50) as u16 % 4)),
                (None, _) => {
                    let new = NewConn {
                        hashed: &hashed,
                        transport: &Transport::Udp,
                        owner: owner(n),
                        via_host: false,
                        epoch: Epoch(1),
                        now,
                    };
                    if let Err(refused) = table.insert(&new) {
                        assert_ne!(refused, Refused::CannotOpen);
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
        let (control, key, _) = table.entry(slot).load().expect("no claim is left behind");
        assert!(control.is_live(), "nothing tentative is left behind");
        assert!(keys.insert(key), "one entry a connection");
        let n = (0..FLOWS).find(|n| table.prepare(&flow(*n)).words == key).expect("a key that was entered");
        assert_eq!(control.owner(), owner(n));
        assert_eq!(table.lookup(&table.prepare(&flow(n))).map(|(found, _)| found), Some(slot));
        by_owner[usize::from(control.owner().0)] += 1;
    }
    assert_eq!(by_owner, std::array::from_fn(|n| table.len_of(OwnerId(n as u16))));
    assert!(by_owner.iter().all(|count| *count <= 60));
    let free = (0..table.capacity() as u32).filter(|slot| table.entry(*slot).control().is_free()).count();
    assert_eq!(free + keys.len(), table.capacity());
    let s = table.statistics();
    let left = s.expired + s.removed + s.evicted_transient + s.evicted_unreplied + s.evicted_quota + s.reopened;
    assert_eq!(s.created - left, keys.len() as u64, "{operations} operations: {s:?}");
    assert!(s.created > 1000 && s.removed > 100, "{operations} operations: {s:?}");
}

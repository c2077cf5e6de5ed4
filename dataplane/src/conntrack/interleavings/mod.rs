//! All interleavings (up to a bound on preemptions) of the relevant races, on a table of two groups with two entries.
//!
//! Run with `cargo test -p penstock-dataplane --features loom --lib conntrack::interleavings`, which takes seconds;
//! `LOOM_MAX_PREEMPTIONS=3` takes minutes. Not covered: three threads that insert one connection (even with a single
//! preemption there are too many interleavings for ten minutes; `tests::concurrent_threads_leave_a_consistent_table`
//! uses real threads for it), more than three threads in general, the wrap of the generation, quotas and counters
//! (plain read-modify-write of one word each), the file mapping, and that the hardware's SIMD loads see what word loads
//! would. Loom treats sequentially consistent accesses as weaker ones; the table uses none, only fences, which loom
//! models.

mod kernel;
mod seqlock;
pub(super) mod storage;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::epoch::Epoch;
use crate::packet::{Address, Flow, Orientation, Protocol, TcpFlags, TcpSegment, Transport};

const NOW: Timestamp = Timestamp::from_millis(1_000_000);
const LATER: Timestamp = NOW.plus(Duration::from_secs(100));

/// Runs `test` in every interleaving with at most two preemptions, or `LOOM_MAX_PREEMPTIONS`. It returns which outcome
/// occurred, and all of `0..outcomes` must occur.
fn explore(outcomes: usize, test: impl Fn() -> usize + Sync + Send + 'static) {
    explore_within(2, outcomes, test);
}

/// The same with at most this many preemptions.
fn explore_within(preemptions: usize, outcomes: usize, test: impl Fn() -> usize + Sync + Send + 'static) {
    let reached: std::sync::Arc<Vec<AtomicU32>> =
        std::sync::Arc::new((0..outcomes).map(|_| AtomicU32::new(0)).collect());
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(preemptions));
    model.max_branches = 10_000;
    let counts = reached.clone();
    model.check(move || _ = counts[test()].fetch_add(1, Ordering::Relaxed));
    let counts: Vec<u32> = reached.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert!(counts.iter().all(|count| *count > 0), "runs by outcome: {counts:?}");
    println!("runs by outcome: {counts:?}");
}

fn table() -> Arc<ConnTable> {
    Arc::new(ConnTable::new(&Config { quota: Some(100), ..Config::default() }).unwrap())
}

/// The `n`th flow whose home group is `group`. Flows differ in all words that an entry stores here.
fn flow(table: &ConnTable, group: u32, n: usize) -> Flow {
    (1..)
        .map(|number: u16| Flow {
            src: Address::from_bits(0xfd00 << 112 | u128::from(number) << 64),
            dst: Address::from_bits(0xfdff << 112),
            protocol: Protocol::UDP,
            src_port: number,
            dst_port: 53,
        })
        .filter(|flow| hash::home(table.prepare(flow).hash, table.groups) == group)
        .nth(n)
        .unwrap()
}

fn insert<'t>(table: &'t ConnTable, flow: &Flow, epoch: u32, now: Timestamp) -> Result<Insertion<'t>, InsertError> {
    let hashed = table.prepare(flow);
    table.insert(&NewConnection {
        hashed: &hashed,
        transport: &Transport::Udp,
        owner: OwnerId(1),
        via_host: false,
        opener: None,
        epoch: Epoch(epoch),
        now,
    })
}

fn find<'t>(table: &'t ConnTable, flow: &Flow, now: Timestamp) -> Option<Conn<'t>> {
    table.find(&table.prepare(flow), now)
}

/// Whether a listed flow belongs to this connection; of a key's words an entry only stores the client's here.
fn is_of(listed: &Flow, flow: &Flow) -> bool {
    [*listed, listed.reversed()].iter().any(|listed| listed.src == flow.src && listed.src_port == flow.src_port)
}

fn entries(table: &ConnTable, flow: &Flow) -> usize {
    table.iter(NOW).filter(|connection| is_of(&connection.original, flow)).count()
}

/// First packets of both directions at once: one entry, inserted by one of them.
fn insert_against_insert(crowd: usize) {
    explore(2, move || {
        let table = table();
        let wanted = flow(&table, 0, 2);
        for n in 0..crowd {
            insert(&table, &flow(&table, 0, n), 1, NOW).unwrap();
        }
        let run = |flow: Flow| {
            let table = table.clone();
            thread::spawn(move || match insert(&table, &flow, 1, NOW).unwrap() {
                Insertion::Created(conn) => (1, conn.original_flow() == flow),
                Insertion::Found(conn) => (0, conn.original_flow().key().0 == flow.key().0),
            })
        };
        let other = run(wanted.reversed());
        let created = match insert(&table, &wanted, 1, NOW).unwrap() {
            Insertion::Created(_) => 1,
            Insertion::Found(_) => 0,
        };
        let (also, is_right) = other.join().unwrap();
        assert!(is_right);
        let (created, winner) = (created + also, also);
        assert_eq!((created, entries(&table, &wanted)), (1, 1));
        assert_eq!(table.len(), crowd + 1, "what lost was given back");
        winner
    });
}

#[test]
fn concurrent_inserts_leave_one_entry_in_one_group() {
    insert_against_insert(0);
}

#[test]
fn concurrent_inserts_leave_one_entry_across_groups() {
    insert_against_insert(1);
}

#[test]
fn one_of_two_concurrent_revocations_reports_it() {
    explore(2, || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || find(&table, &wanted, NOW).unwrap().set_verdict(Epoch(2), false))
        };
        let results = [find(&table, &wanted, NOW).unwrap().set_verdict(Epoch(2), false), other.join().unwrap()];
        assert!(
            results == [Reevaluation::Revoked, Reevaluation::Unchanged]
                || results == [Reevaluation::Unchanged, Reevaluation::Revoked],
            "{results:?}"
        );
        let conn = find(&table, &wanted, NOW).unwrap();
        assert!(conn.is_revoked() && conn.is_evaluated_under(Epoch(2)));
        usize::from(results[0] == Reevaluation::Revoked)
    });
}

/// Writes of two workers that evaluate policy concurrently, one under an epoch, the other under the next; the third
/// word of each case says whether the connection was revoked before.
fn verdicts_of_two_epochs(was_cut: bool, older: bool, newer: bool) {
    explore(2, move || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        if was_cut {
            find(&table, &wanted, NOW).unwrap().set_verdict(Epoch(2), false);
        }
        let lagging = {
            let table = table.clone();
            thread::spawn(move || {
                let mut conn = find(&table, &wanted, NOW).unwrap();
                if !conn.is_evaluated_under(Epoch(3)) {
                    conn.set_verdict(Epoch(3), older);
                }
                // The state that its packet sees.
                (conn.is_revoked(), conn.is_evaluated_under(Epoch(4)))
            })
        };
        let mut conn = find(&table, &wanted, NOW).unwrap();
        conn.set_verdict(Epoch(4), newer);
        assert!(conn.is_revoked() != newer && conn.is_evaluated_under(Epoch(4)));
        let (is_revoked, went_by_newer) = lagging.join().unwrap();
        assert_eq!(is_revoked, if went_by_newer { !newer } else { !older });
        let conn = find(&table, &wanted, NOW).unwrap();
        assert!(conn.is_revoked() != newer && conn.is_evaluated_under(Epoch(4)), "what is newest stays");
        usize::from(went_by_newer)
    });
}

#[test]
fn of_concurrent_verdicts_the_newer_epoch_stays() {
    for was_cut in [false, true] {
        for (older, newer) in [(false, false), (false, true), (true, false), (true, true)] {
            verdicts_of_two_epochs(was_cut, older, newer);
        }
    }
}

#[test]
fn a_concurrent_verdict_and_packet_are_both_applied() {
    explore(2, || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || find(&table, &wanted, NOW).unwrap().set_verdict(Epoch(2), false))
        };
        let mut conn = find(&table, &wanted, NOW).unwrap();
        let update = conn.update(wanted.key().1.opposite(), &Transport::Udp, NOW);
        assert_eq!(other.join().unwrap(), Reevaluation::Revoked);
        let mut conn = find(&table, &wanted, NOW).unwrap();
        assert!(conn.is_revoked() && conn.is_evaluated_under(Epoch(2)));
        assert_eq!(conn.set_verdict(Epoch(3), true), Reevaluation::Restored);
        match update {
            Update::Accepted(state) => assert_eq!((state, conn.state()), (State::Replied, State::Replied)),
            other => assert_eq!((other, conn.state()), (Update::Revoked, State::Unreplied)),
        }
        usize::from(update == Update::Revoked)
    });
}

#[test]
fn an_owner_change_during_removal_is_counted_once() {
    explore(1, || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let doomed = find(&table, &wanted, NOW).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || table.assign_owners(|_| Some(OwnerId(2))))
        };
        assert!(doomed.remove());
        assert_eq!(other.join().unwrap(), 0);
        assert_eq!((table.len(), table.len_of(OwnerId(1)), table.len_of(OwnerId(2))), (0, 0, 0));
        0
    });
}

#[test]
fn expiry_removes_no_connection_that_was_just_used() {
    explore(2, || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let mut conn = find(&table, &wanted, NOW).unwrap();
        let sweeper = {
            let table = table.clone();
            thread::spawn(move || table.sweep(&mut SweepCursor::default(), usize::MAX, LATER, Epoch(1)).expired)
        };
        let update = conn.update(wanted.key().1, &Transport::Udp, LATER);
        let expired = sweeper.join().unwrap();
        let there = find(&table, &wanted, LATER).is_some();
        match update {
            Update::Accepted(_) => assert_eq!((expired, there), (0, true)),
            other => assert_eq!((other, expired, there), (Update::Removed, 1, false)),
        }
        expired
    });
}

#[test]
fn expiry_removes_no_connection_that_was_reinserted() {
    explore(2, || {
        let table = table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let sweeper = {
            let table = table.clone();
            thread::spawn(move || table.sweep(&mut SweepCursor::default(), usize::MAX, LATER, Epoch(1)).expired)
        };
        // Either the sweep or the insert removes the old one; the new one stays.
        assert!(matches!(insert(&table, &wanted, 2, LATER), Ok(Insertion::Created(_))));
        let swept = sweeper.join().unwrap();
        assert!(find(&table, &wanted, LATER).unwrap().is_evaluated_under(Epoch(2)));
        assert_eq!((table.len(), table.statistics().expired), (1, 1));
        swept
    });
}

#[test]
fn a_lookup_never_returns_the_entrys_next_connection() {
    explore(3, || {
        let table = table();
        let (old, new) = (flow(&table, 0, 0), flow(&table, 0, 1));
        insert(&table, &old, 1, NOW).unwrap();
        let doomed = find(&table, &old, NOW).unwrap();
        // The reader is the second thread: loom discards a load once another thread loads the same word.
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                let Some(mut conn) = find(&table, &old, NOW) else { return 0 };
                assert_eq!(conn.original_flow(), old);
                _ = conn.set_verdict(Epoch(3), true);
                match conn.update(old.key().1.opposite(), &Transport::Udp, NOW) {
                    Update::Removed => 1,
                    Update::Accepted(State::Replied) => 2,
                    other => panic!("{other:?}"),
                }
            })
        };
        assert!(doomed.remove());
        insert(&table, &new, 2, NOW).unwrap();
        let outcome = reader.join().unwrap();
        let conn = find(&table, &new, NOW).unwrap();
        assert!(conn.is_evaluated_under(Epoch(2)) && conn.state() == State::Unreplied, "late writes do not reach it");
        assert_eq!((entries(&table, &old), table.len()), (0, 1));
        outcome
    });
}

#[test]
fn a_listing_never_mixes_two_connections() {
    explore(3, || {
        let table = table();
        let (old, new) = (flow(&table, 0, 0), flow(&table, 0, 1));
        insert(&table, &old, 1, NOW).unwrap();
        let doomed = find(&table, &old, NOW).unwrap();
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                let listed: Vec<Flow> = table.iter(NOW).map(|connection| connection.original).collect();
                match listed[..] {
                    [] => 0,
                    [flow] if is_of(&flow, &old) => 1,
                    [flow] if is_of(&flow, &new) => 2,
                    _ => panic!("{listed:?}"),
                }
            })
        };
        assert!(doomed.remove());
        insert(&table, &new, 2, NOW).unwrap();
        reader.join().unwrap()
    });
}

#[test]
fn eviction_removes_no_connection_that_was_just_answered() {
    explore(2, || {
        let table = table();
        let answered = flow(&table, 0, 0);
        insert(&table, &answered, 1, NOW).unwrap();
        // Fills the rest of both groups with younger connections than the one that will be answered.
        let younger = NOW.plus(Duration::from_secs(5));
        for n in 1..4 {
            insert(&table, &flow(&table, 0, n), 1, younger).unwrap();
        }
        let mut conn = find(&table, &answered, younger).unwrap();
        let evictor = {
            let (table, new) = (table.clone(), flow(&table, 0, 4));
            thread::spawn(move || assert!(matches!(insert(&table, &new, 1, younger), Ok(Insertion::Created(_)))))
        };
        let update = conn.update(answered.key().1.opposite(), &Transport::Udp, younger);
        evictor.join().unwrap();
        let found = find(&table, &answered, younger).map(|conn| conn.state());
        match update {
            Update::Accepted(state) => assert_eq!((state, found), (State::Replied, Some(State::Replied))),
            other => assert_eq!((other, found), (Update::Removed, None)),
        }
        assert_eq!((table.len(), table.statistics().evicted_unanswered), (4, 1));
        usize::from(update == Update::Removed)
    });
}

#[test]
fn concurrent_updates_of_both_directions_are_both_applied() {
    explore(2, || {
        let table = table();
        let flow = Flow { protocol: Protocol::TCP, ..flow(&table, 0, 0) };
        let (out, back) = (flow.key().1, flow.key().1.opposite());
        let segment = |flags: TcpFlags, seq, ack, payload_len| {
            Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, payload_len, window_scale: None })
        };
        let hashed = table.prepare(&flow);
        let transport = segment(TcpFlags::SYN, 100, 0, 0);
        table
            .insert(&NewConnection {
                hashed: &hashed,
                transport: &transport,
                owner: OwnerId(1),
                via_host: false,
                opener: None,
                epoch: Epoch(1),
                now: NOW,
            })
            .unwrap();
        let update = move |table: &ConnTable, way: Orientation, transport: Transport| {
            let updated = table.find(&table.prepare(&flow), NOW).unwrap().update(way, &transport, NOW);
            assert!(matches!(updated, Update::Accepted(_)), "{updated:?} for {transport:?}");
            updated
        };
        update(&table, back, segment(TcpFlags::SYN.with(TcpFlags::ACK), 500, 101, 0));
        update(&table, out, segment(TcpFlags::ACK, 101, 501, 0));
        let other = {
            let table = table.clone();
            thread::spawn(move || update(&table, back, segment(TcpFlags::ACK.with(TcpFlags::FIN), 501, 101, 50)))
        };
        let updated = update(&table, out, segment(TcpFlags::ACK.with(TcpFlags::FIN), 101, 501, 70));
        other.join().unwrap();
        // If one side's `end` had been lost, the other's acknowledgement of it would be out of window.
        update(&table, out, segment(TcpFlags::ACK, 172, 552, 0));
        update(&table, back, segment(TcpFlags::ACK, 552, 172, 0));
        assert_eq!(find(&table, &flow, NOW).unwrap().state(), State::Tcp(TcpState::TimeWait));
        usize::from(updated == Update::Accepted(State::Tcp(TcpState::FinWait)))
    });
}

//! A program in the kernel that reads the table while workers write it: as `xdp-redirect/src/bpf/established.h` does, word for
//! word and in the same order.

use loom::sync::atomic::AtomicU32;

use super::*;
use crate::conntrack::entry::{ControlWord, EntryContents, EpochTag};
use crate::conntrack::path::{Note, Noted};
use crate::conntrack::sync::{Ordering as TableOrdering, fence};
use crate::conntrack::tags::{LANES, bits};
use crate::conntrack::tcp::Window;

/// A table with the words that the kernel's programs read beside the entries.
fn shared_table() -> Arc<ConnTable> {
    let memory = TableMemory::File(Default::default());
    Arc::new(ConnTable::new(&Config { quota: Some(100), memory, ..Config::default() }).unwrap())
}

/// Where a program forwards a packet that comes from interface `from` under `epoch`; `None`: to a worker.
fn forwarded_to(table: &ConnTable, flow: &Flow, from: u32, epoch: &AtomicU32) -> Option<u32> {
    let epoch = EpochTag::of(Epoch(epoch.load(Ordering::Acquire)));
    let hashed = table.prepare(flow);
    let (slot, control) = table.lookup(&hashed)?;
    if control.is_revoked() || !control.epoch().covers(epoch) {
        return None;
    }
    let (at, to, taken) = table.storage.uses().unwrap()[slot as usize].read_path(hashed.orientation)?;
    let is_valid = at == from && taken == control.epoch().low_bits() && table.entry(slot).control() == control;
    is_valid.then_some(to)
}

fn take(table: &ConnTable, flow: &Flow, path: (u32, u32), epoch: u32) {
    take_and(table, flow, path, epoch, false);
}

/// The same; of the packet that opens a connection also the way of its answers, if the worker knows it.
fn take_and(table: &ConnTable, flow: &Flow, path: (u32, u32), epoch: u32, knows_answers: bool) {
    let path = Some((path, Epoch(epoch)));
    table.forwarded(&table.prepare(flow), 100, TcpFlags::default(), path, |_| knows_answers, |_| false);
}

/// The connection is removed and another one is written into its entry, while a worker still notes the path of the first.
#[test]
fn a_program_never_forwards_by_the_entrys_last_path() {
    explore(1, || {
        let table = shared_table();
        let epoch = Arc::new(AtomicU32::new(1));
        let (old, new) = (flow(&table, 0, 0), flow(&table, 0, 1));
        insert(&table, &old, 1, NOW).unwrap();
        let doomed = find(&table, &old, NOW).unwrap();
        let late = {
            let table = table.clone();
            thread::spawn(move || take(&table, &old, (7, 9), 1))
        };
        assert!(doomed.remove());
        insert(&table, &new, 1, NOW).unwrap();
        assert_eq!(forwarded_to(&table, &new, 7, &epoch), None);
        late.join().unwrap();
        assert_eq!(forwarded_to(&table, &new, 7, &epoch), None, "late writes do not reach it");
        0
    });
}

/// The same while a program forwards a FIN of the first.
#[test]
fn a_late_fin_does_not_close_the_entrys_next_connection() {
    explore(2, || {
        let table = shared_table();
        let (old, new) = (flow(&table, 0, 0), flow(&table, 0, 1));
        insert(&table, &old, 1, NOW).unwrap();
        take(&table, &old, (7, 9), 1);
        let doomed = find(&table, &old, NOW).unwrap();
        let program = {
            let table = table.clone();
            thread::spawn(move || {
                let hashed = table.prepare(&old);
                let Some((slot, control)) = table.lookup(&hashed) else { return 0 };
                let is_still = || table.entry(slot).control() == control;
                usize::from(table.uses().unwrap()[slot as usize].note(Note::Fin(hashed.orientation), is_still))
            })
        };
        assert!(doomed.remove());
        insert(&table, &new, 1, NOW).unwrap();
        let finished = program.join().unwrap();
        let (slot, _) = table.lookup(&table.prepare(&new)).unwrap();
        assert_eq!(table.uses().unwrap()[slot as usize].noted(), Noted::default());
        finished
    });
}

/// Policy changes from *allowed* under epoch 1 to *denied* under epoch 2 while a worker that has not seen the change sends a
/// packet on. The workers evaluate the connection again at its next packet under epoch 2.
#[test]
fn a_program_under_the_new_epoch_forwards_nothing_denied() {
    explore(2, || {
        let table = shared_table();
        let epoch = Arc::new(AtomicU32::new(1));
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        take(&table, &wanted, (7, 9), 1);
        let program = {
            let (table, epoch) = (table.clone(), epoch.clone());
            thread::spawn(move || {
                let sees_change = epoch.load(Ordering::Acquire) == 2;
                let to = forwarded_to(&table, &wanted, 7, &epoch);
                assert!(!sees_change || to.is_none(), "under epoch 2");
                to.map_or(0, |to| {
                    assert_eq!(to, 9);
                    1
                })
            })
        };
        epoch.store(2, Ordering::Release);
        // A worker under epoch 1, then one under epoch 2.
        take(&table, &wanted, (7, 9), 1);
        let mut conn = find(&table, &wanted, NOW).unwrap();
        assert_eq!(conn.set_verdict(Epoch(2), false), Reevaluation::Revoked);
        take(&table, &wanted, (7, 9), 2);
        assert_eq!(forwarded_to(&table, &wanted, 7, &epoch), None);
        program.join().unwrap()
    });
}

/// An established TCP connection under epoch 1, which programs forward from interface 7 to 9.
fn forwarded_connection(table: &ConnTable) -> Flow {
    let flow = tcp_flow(table, 0);
    let mut conn = send_syn(table, &flow, 100);
    let there = conn.original();
    _ = conn.update(there.opposite(), &segment(TcpFlags::SYN.with(TcpFlags::ACK), 500, 101), NOW);
    _ = conn.update(there, &segment(TcpFlags::ACK, 101, 501), NOW);
    assert_eq!(conn.state(), State::Tcp(TcpState::Established));
    take(table, &flow, (7, 9), 1);
    flow
}

fn tcp_flow(table: &ConnTable, n: usize) -> Flow {
    Flow { protocol: Protocol::TCP, ..flow(table, 0, n) }
}

fn segment(flags: TcpFlags, seq: u32, ack: u32) -> Transport {
    Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, payload_len: 0, window_scale: None })
}

const SYN_ACK: TcpFlags = TcpFlags::SYN.with(TcpFlags::ACK);

/// A worker admits a SYN with this number, which goes from interface 7 to 9, and knows where the answer goes.
fn send_syn<'t>(table: &'t ConnTable, flow: &Flow, seq: u32) -> Conn<'t> {
    let (hashed, transport) = (table.prepare(flow), segment(TcpFlags::SYN, seq, 0));
    let new = NewConnection {
        hashed: &hashed,
        transport: &transport,
        owner: OwnerId(1),
        via_host: false,
        opener: None,
        epoch: Epoch(1),
        now: NOW,
    };
    let Ok(Insertion::Created(conn)) = table.insert(&new) else { panic!("there is room") };
    take_and(table, flow, (7, 9), 1, true);
    conn
}

/// A program that meets a SYN-ACK with this number, which acknowledges a SYN with the number 100. Whether it forwards it.
fn answer_by_program(table: &ConnTable, flow: &Flow, seq: u32) -> bool {
    let hashed = table.prepare(&flow.reversed());
    let Some((slot, control)) = table.lookup(&hashed) else { return false };
    let (entry, kernel_use) = (table.entry(slot), &table.uses().unwrap()[slot as usize]);
    let is_syn_sent = control.is_in(TcpState::SynSent as u8) && !kernel_use.noted().answered;
    if !is_syn_sent || kernel_use.read_path(hashed.orientation).is_none() {
        return false;
    }
    kernel_use.note(Note::Answer, || {
        let Some(tracked) = entry.tracking_under(control) else { return false };
        let (sender, receiver) = (hashed.orientation, hashed.orientation.opposite());
        let unanswered = Window::unanswered(101).pack();
        tracked[receiver as usize] as u32 == 101
            && tracked[sender as usize] == unanswered
            && entry.exchange_tracking(sender, unanswered, Window::of_answer(seq + 1))
    })
}

/// The opener ends the handshake at a worker.
fn end_handshake(table: &ConnTable, flow: &Flow, seq: u32, ack: u32) -> Update {
    let mut conn = find(table, flow, NOW).unwrap();
    conn.update(conn.original(), &segment(TcpFlags::ACK, seq, ack), NOW)
}

const ESTABLISHED: Update = Update::Accepted(State::Tcp(TcpState::Established));

/// A program forwards a SYN-ACK, and a worker its retransmission: whoever is first, the handshake ends with the number of it.
#[test]
fn a_program_and_a_worker_take_the_same_answer_once() {
    explore(2, || {
        let table = shared_table();
        let wanted = tcp_flow(&table, 0);
        send_syn(&table, &wanted, 100);
        let program = {
            let table = table.clone();
            thread::spawn(move || answer_by_program(&table, &wanted, 500))
        };
        let mut conn = find(&table, &wanted.reversed(), NOW).unwrap();
        let back = conn.original().opposite();
        let update = conn.update(back, &segment(SYN_ACK, 500, 101), NOW);
        assert_eq!(update, Update::Accepted(State::Tcp(TcpState::SynReceived)));
        let by_program = program.join().unwrap();
        let unended = Update::Accepted(State::Tcp(TcpState::SynReceived));
        assert_eq!(end_handshake(&table, &wanted, 101, 9000), unended, "it acknowledges what nobody has sent");
        assert_eq!(end_handshake(&table, &wanted, 101, 501), ESTABLISHED);
        usize::from(by_program)
    });
}

/// While a program forwards a SYN-ACK, its connection is removed and the next one gets the entry.
#[test]
fn a_late_answer_changes_nothing_of_the_entrys_next_connection() {
    explore(2, || {
        let table = shared_table();
        let (old, new) = (tcp_flow(&table, 0), tcp_flow(&table, 1));
        let doomed = send_syn(&table, &old, 100);
        let program = {
            let table = table.clone();
            thread::spawn(move || answer_by_program(&table, &old, 500))
        };
        assert!(doomed.remove());
        send_syn(&table, &new, 300);
        let by_program = program.join().unwrap();
        let mut conn = find(&table, &new, NOW).unwrap();
        assert_eq!(conn.state(), State::Tcp(TcpState::SynSent), "nobody has answered it");
        let back = conn.original().opposite();
        let update = conn.update(back, &segment(SYN_ACK, 800, 301), NOW);
        assert_eq!(update, Update::Accepted(State::Tcp(TcpState::SynReceived)));
        assert_eq!(end_handshake(&table, &new, 301, 801), ESTABLISHED);
        usize::from(by_program)
    });
}

/// A snapshot is published: connections that stay allowed get its verdict, and then the programs its epoch.
fn publish(table: &ConnTable, epoch: &AtomicU32, next: u32, is_kept: bool) {
    table.keep_forwarded(Epoch(next), || false, |_| is_kept);
    epoch.store(next, Ordering::Release);
}

/// A program that starts at any time: which epoch it read, and where it forwards to.
fn program(table: &Arc<ConnTable>, flow: Flow, epoch: &Arc<AtomicU32>) -> thread::JoinHandle<(u32, Option<u32>)> {
    let (table, epoch) = (table.clone(), epoch.clone());
    thread::spawn(move || {
        let read = epoch.load(Ordering::Acquire);
        (read, forwarded_to(&table, &flow, 7, &AtomicU32::new(read)))
    })
}

/// Policy is published under epoch 2 while a worker that still has the snapshot of epoch 1 sends a packet on, by another
/// interface.
fn published_beside_a_late_worker(is_kept: bool) {
    explore(if is_kept { 2 } else { 1 }, move || {
        let (table, epoch) = (shared_table(), Arc::new(AtomicU32::new(1)));
        let wanted = forwarded_connection(&table);
        let program = program(&table, wanted, &epoch);
        let late = {
            let table = table.clone();
            thread::spawn(move || take(&table, &wanted, (7, 10), 1))
        };
        publish(&table, &epoch, 2, is_kept);
        let (read, to) = program.join().unwrap();
        assert!(read == 1 || to.is_none() || is_kept && to == Some(9), "under epoch {read}: {to:?}");
        late.join().unwrap();
        let to = forwarded_to(&table, &wanted, 7, &epoch);
        assert!(to.is_none() || is_kept && to == Some(9), "{to:?}");
        usize::from(to.is_some())
    });
}

#[test]
fn a_late_worker_changes_no_path_of_a_kept_connection() {
    published_beside_a_late_worker(true);
}

#[test]
fn a_late_worker_brings_no_connection_back_that_is_not_kept() {
    published_beside_a_late_worker(false);
}

/// Epoch 2 allows a connection and epoch 3 denies it: a worker that has the second snapshot revokes it while the first one is
/// being published. With three threads and all that they do here, two preemptions take long.
#[test]
fn a_kept_connection_is_never_forwarded_where_it_is_denied() {
    explore_within(1, 2, || {
        let (table, epoch) = (shared_table(), Arc::new(AtomicU32::new(1)));
        let wanted = forwarded_connection(&table);
        let program = program(&table, wanted, &epoch);
        let worker = {
            let table = table.clone();
            thread::spawn(move || {
                let verdict = find(&table, &wanted, NOW).unwrap().set_verdict(Epoch(3), false);
                assert_eq!(verdict, Reevaluation::Revoked);
            })
        };
        publish(&table, &epoch, 2, true);
        let was_kept = forwarded_to(&table, &wanted, 7, &epoch).is_some();
        publish(&table, &epoch, 3, false);
        let (read, to) = program.join().unwrap();
        assert!(read < 3 || to.is_none(), "under epoch {read}: {to:?}");
        worker.join().unwrap();
        assert_eq!(forwarded_to(&table, &wanted, 7, &epoch), None);
        assert!(find(&table, &wanted, NOW).unwrap().is_revoked(), "no older verdict replaces a newer one");
        usize::from(was_kept)
    });
}

/// A program that opens a connection under epoch 1 by a worker's answer, which goes from interface 7 to 9. It is counted for its owner
/// already, as credit. Whether the program forwards the packet.
fn open_by_program(table: &ConnTable, flow: &Flow) -> bool {
    let hashed = table.prepare(flow);
    let group = hash::home(hashed.hash, table.groups);
    let lane = bits(table.tags(group).free_lanes()).next();
    let claimed = lane.and_then(|lane| Some((group * LANES + lane, table.entry(group * LANES + lane).claim()?)));
    match claimed {
        Some(claimed) => publish_by_program(table, &hashed, claimed, NOW),
        None => {
            give_back(table);
            false
        }
    }
}

/// The same in the entry of a connection that has ended, if there is one: it stays counted, and is taken without credit.
fn reopen_by_program(table: &ConnTable, flow: &Flow, now: Timestamp) -> bool {
    let hashed = table.prepare(flow);
    let ended = |&(slot, control): &(u32, ControlWord)| {
        let is_closed = control.is_in(TcpState::Close as u8) && hashed.protocol() == Protocol::TCP;
        control.is_live() && (is_closed || table.is_expired(hashed.protocol(), (slot, control), now.tick()))
    };
    let Some((slot, control)) = table.written(&hashed).find(ended) else { return false };
    let claimed = control.claimed_anew();
    table.entry(slot).exchange(control, claimed).is_ok() && publish_by_program(table, &hashed, (slot, claimed), now)
}

/// Credit that a program gives back counts as its owner's, which is no connection.
fn give_back(table: &ConnTable) {
    table.count_less(OwnerId(1), 1);
}

fn publish_by_program(
    table: &ConnTable,
    hashed: &PreparedFlow,
    (slot, claimed): (u32, ControlWord),
    now: Timestamp,
) -> bool {
    let epoch = EpochTag::of(Epoch(1));
    let candidate = ControlWord::tentative(claimed, State::Unreplied.code(), hashed.orientation, epoch, now.tick());
    table.publish((slot, candidate), hashed, EntryContents { owner: OwnerId(1), tracking: [0, 0] });
    fence(TableOrdering::SeqCst);
    let entry = table.entry(slot);
    if table.written(hashed).any(|(other, _)| other != slot) {
        if entry.exchange(candidate, candidate.claimed()).is_ok() {
            table.tags(slot / LANES).clear(slot % LANES);
            entry.free(candidate.claimed());
            give_back(table);
        }
        return false;
    }
    if entry.exchange(candidate, candidate.confirmed()).is_err() {
        return false;
    }
    take_and(table, &hashed.flow(), (7, 9), 1, true);
    true
}

/// A connection that a program opens, of a table with so many others.
fn openable(crowd: usize) -> (Arc<ConnTable>, Flow) {
    let table = shared_table();
    for n in 0..crowd {
        insert(&table, &flow(&table, 0, n), 1, NOW).unwrap();
    }
    let wanted = flow(&table, 0, 2);
    (table, wanted)
}

/// A program and a worker open one connection, from either side.
fn opened_beside_a_worker(crowd: usize, from_same_side: bool) {
    explore(2, move || {
        let (table, wanted) = openable(crowd);
        table.count_more(OwnerId(1), 1);
        let program = {
            let table = table.clone();
            thread::spawn(move || open_by_program(&table, &wanted))
        };
        let of_worker = if from_same_side { wanted } else { wanted.reversed() };
        insert(&table, &of_worker, 1, NOW).unwrap();
        let by_program = program.join().unwrap();
        assert_eq!((entries(&table, &wanted), table.len()), (1, crowd + 1), "one entry, and what lost was given back");
        usize::from(by_program)
    });
}

#[test]
fn a_program_beside_a_worker_leaves_one_entry() {
    opened_beside_a_worker(0, true);
    opened_beside_a_worker(0, false);
}

#[test]
fn a_program_beside_a_worker_leaves_one_entry_across_groups() {
    opened_beside_a_worker(1, true);
}

#[test]
fn two_programs_leave_at_most_one_entry() {
    explore(2, || {
        let (table, wanted) = openable(0);
        table.count_more(OwnerId(1), 2);
        let other = {
            let table = table.clone();
            thread::spawn(move || open_by_program(&table, &wanted.reversed()))
        };
        let opened = [open_by_program(&table, &wanted), other.join().unwrap()];
        let left = opened.iter().filter(|opened| **opened).count();
        assert_eq!((entries(&table, &wanted), table.len()), (left, left), "at most one, and what lost was given back");
        left
    });
}

/// A connection that a RST has ended, and the SYN of the next one with its addresses and ports.
fn reset_connection(table: &ConnTable) -> (Flow, Transport) {
    let flow = tcp_flow(table, 0);
    let mut conn = send_syn(table, &flow, 100);
    let there = conn.original();
    let update = conn.update(there.opposite(), &segment(TcpFlags::RST.with(TcpFlags::ACK), 0, 101), NOW);
    assert_eq!(update, Update::Accepted(State::Tcp(TcpState::Close)));
    (flow, segment(TcpFlags::SYN, 7000, 0))
}

/// A worker admits a SYN, of which it may find the last connection.
fn admit(table: &ConnTable, flow: &Flow, syn: &Transport) {
    let hashed = table.prepare(flow);
    if let Some(mut found) = find(table, flow, NOW) {
        match found.update(hashed.orientation(), syn, NOW) {
            Update::Opens => assert!(found.replace(hashed.orientation(), syn, NOW) || find(table, flow, NOW).is_some()),
            Update::Removed => {}
            Update::Accepted(State::Tcp(TcpState::SynSent)) => return,
            other => panic!("{other:?}"),
        }
    }
    let (owner, epoch) = (OwnerId(1), Epoch(1));
    table
        .insert(&NewConnection {
            hashed: &hashed,
            transport: syn,
            owner,
            via_host: false,
            opener: None,
            epoch,
            now: NOW,
        })
        .unwrap();
}

#[test]
fn a_program_and_a_worker_replace_an_ended_connection_once() {
    // With two preemptions it takes many minutes.
    explore_within(1, 2, || {
        let table = shared_table();
        let (wanted, syn) = reset_connection(&table);
        let program = {
            let table = table.clone();
            thread::spawn(move || reopen_by_program(&table, &wanted, NOW))
        };
        admit(&table, &wanted, &syn);
        let by_program = program.join().unwrap();
        assert_eq!((entries(&table, &wanted), table.len()), (1, 1));
        usize::from(by_program)
    });
}

#[test]
fn a_program_and_a_worker_replace_an_expired_connection_once() {
    explore(2, || {
        let table = shared_table();
        let wanted = flow(&table, 0, 0);
        insert(&table, &wanted, 1, NOW).unwrap();
        let program = {
            let table = table.clone();
            thread::spawn(move || reopen_by_program(&table, &wanted, LATER))
        };
        insert(&table, &wanted.reversed(), 1, LATER).unwrap();
        let by_program = program.join().unwrap();
        let left = table.iter(LATER).filter(|connection| is_of(&connection.original, &wanted)).count();
        assert_eq!((left, table.len()), (1, 1));
        usize::from(by_program)
    });
}

/// One of them has not seen the connection that has ended, since the other one was about to take its entry.
#[test]
fn two_programs_replace_an_ended_connection_at_most_once() {
    explore(2, || {
        let table = shared_table();
        let (wanted, _) = reset_connection(&table);
        table.count_more(OwnerId(1), 1);
        let other = {
            let table = table.clone();
            thread::spawn(move || open_by_program(&table, &wanted.reversed()))
        };
        let opened = [reopen_by_program(&table, &wanted, NOW), other.join().unwrap()];
        let left = opened.iter().filter(|opened| **opened).count();
        assert_eq!((entries(&table, &wanted), table.len()), (left, left), "what neither takes is given back");
        left
    });
}

/// A worker still has the connection that has ended, and its last segment, while a program gives the entry to the next one.
#[test]
fn a_late_segment_does_not_change_the_connection_in_its_place() {
    explore(2, || {
        let table = shared_table();
        let (wanted, _) = reset_connection(&table);
        let late = {
            let table = table.clone();
            thread::spawn(move || {
                let Some(mut conn) = find(&table, &wanted, NOW) else { return };
                if conn.state() == State::Tcp(TcpState::Close) {
                    let next_tick = NOW.plus(Duration::from_secs(1));
                    let update = conn.update(conn.original(), &segment(TcpFlags::ACK, 101, 1), next_tick);
                    assert!(matches!(update, Update::Removed | Update::Invalid | Update::Accepted(_)), "{update:?}");
                }
            })
        };
        let by_program = reopen_by_program(&table, &wanted, NOW);
        late.join().unwrap();
        let state = find(&table, &wanted, NOW).unwrap().state();
        assert_eq!(state == State::Tcp(TcpState::SynSent), by_program, "{state:?}");
        usize::from(by_program)
    });
}

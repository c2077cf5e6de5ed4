//! Connections of which a program in the kernel has forwarded the answer: to a SYN, or to a datagram.

use proptest::prelude::*;

use super::*;
use crate::conntrack::entry::Tracking;
use crate::conntrack::path::Note;
use crate::conntrack::tcp::Window;
use crate::packet::Orientation;

const ACK: TcpFlags = TcpFlags::ACK;
const SYN_ACK: TcpFlags = TcpFlags::SYN.with(ACK);

fn segment(flags: TcpFlags, seq: u32, ack: u32) -> TcpSegment {
    TcpSegment { seq, ack, window: 1000, flags, payload_len: 0, window_scale: None }
}

fn counting_table() -> ConnTable {
    ConnTable::new(&Config { entries: 64, ended: 100, ..Config::default() }).unwrap()
}

/// A program forwards the answer to a packet that a worker has admitted.
fn answer_by_program(table: &ConnTable, flow: &Flow, now: Timestamp) {
    let back = table.prepare(&flow.reversed());
    let (slot, _) = table.lookup(&back).unwrap();
    if flow.protocol == Protocol::TCP {
        let noted = table.entry(slot).exchange_tracking(
            back.orientation,
            Window::unanswered(1001).pack(),
            Window::of_answer(5001),
        );
        assert!(noted, "nobody has answered");
    }
    note(table, flow, Note::Answer, back.orientation, now);
}

/// A program notes something of a packet.
fn note(table: &ConnTable, flow: &Flow, what: Note, from: Orientation, now: Timestamp) {
    let (slot, _) = table.lookup(&table.prepare(flow)).unwrap();
    let kernel_use = &table.uses().unwrap()[slot as usize];
    assert!(kernel_use.note(what, || true));
    kernel_use.count_by_program(from, 60, now.tick());
}

/// A worker admits the packet that opens a connection, and sends it on.
fn open(table: &ConnTable, flow: &Flow, transport: &Transport, now: Timestamp) {
    insert(table, flow, transport, now).unwrap();
    let flags = if let Transport::Tcp(segment) = transport { segment.flags } else { TcpFlags::default() };
    table.forwarded(&table.prepare(flow), 60, flags, None, |_| false, |_| false);
}

/// A handshake whose end a program has forwarded, too.
fn open_by_programs(table: &ConnTable, flow: &Flow, now: Timestamp) {
    open(table, flow, &syn(), now);
    answer_by_program(table, flow, now);
    note(table, flow, Note::Confirmation, table.prepare(flow).orientation, now);
}

fn listed(table: &ConnTable, now: Timestamp) -> (State, Duration) {
    let listed: Vec<_> = table.iter(now).collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    (listed[0].state, listed[0].expires_in)
}

#[test]
fn an_answer_by_a_program_leads_to_the_state_that_workers_know() {
    let seconds = Duration::from_secs;
    let cases =
        [(tcp(1), syn(), State::Tcp(TcpState::SynReceived), 60), (flow(1), Transport::Udp, State::Replied, 120)];
    for (flow, transport, state, lifetime) in cases {
        let table = counting_table();
        open(&table, &flow, &transport, NOW);
        answer_by_program(&table, &flow, NOW);
        let (found, left) = listed(&table, NOW);
        assert!(found == state && left <= seconds(lifetime + 1) && left > seconds(lifetime - 2), "{found}: {left:?}");
        assert_eq!(find(&table, &flow, NOW).unwrap().state(), state);
        let expires = |after| find(&table, &flow, NOW.plus(seconds(after))).is_none();
        assert_eq!([lifetime - 2, lifetime + 3].map(expires), [false, true], "{state}");
    }
}

#[test]
fn an_opener_makes_a_stream_of_what_a_program_has_answered() {
    let table = counting_table();
    open(&table, &flow(1), &Transport::Udp, NOW);
    answer_by_program(&table, &flow(1), NOW);
    let there = table.prepare(&flow(1)).orientation;
    let send = |after| {
        let now = NOW.plus(Duration::from_secs(after));
        find(&table, &flow(1), now).unwrap().update(there, &Transport::Udp, now)
    };
    assert_eq!(send(1), Update::Accepted(State::Replied));
    assert_eq!(send(3), Update::Accepted(State::Assured));
}

#[test]
fn connections_that_programs_confirmed_are_never_evicted() {
    for is_revoked in [false, true] {
        let table = counting_table();
        let first = tcp(0);
        open_by_programs(&table, &first, NOW);
        assert_eq!(listed(&table, NOW).0, State::Tcp(TcpState::Established));
        if is_revoked {
            let verdict = find(&table, &first, NOW).unwrap().set_verdict(Epoch(2), false);
            assert_eq!(verdict, Reevaluation::Revoked);
        }
        (1..1000).for_each(|n| _ = insert_alone(&table, &tcp(n), n, &syn(), NOW));
        let found = find(&table, &first, NOW).expect("it is kept");
        assert_eq!(found.is_revoked(), is_revoked);
    }
}

#[test]
fn a_connection_that_programs_alone_confirm_and_close_has_ended() {
    let table = counting_table();
    open_by_programs(&table, &tcp(1), NOW);
    let there = table.prepare(&tcp(1)).orientation;
    for (from, state) in [(there, TcpState::CloseWait), (there.opposite(), TcpState::TimeWait)] {
        note(&table, &tcp(1), Note::Fin(from), from, NOW);
        assert_eq!(listed(&table, NOW).0, State::Tcp(state));
    }
}

#[test]
fn a_record_has_the_flags_of_an_answer_that_no_worker_saw() {
    for (flow, transport, flags) in [(tcp(1), syn(), SYN_ACK), (flow(1), Transport::Udp, TcpFlags::default())] {
        let table = counting_table();
        open(&table, &flow, &transport, NOW);
        answer_by_program(&table, &flow, NOW);
        assert!(find(&table, &flow, NOW).unwrap().remove());
        let ended = table.take_ended().expect("it has ended");
        assert_eq!((ended.flags, ended.traffic.map(|traffic| traffic.packets)), (flags, [1, 1]));
    }
}

/// A segment of either end, near the numbers that it should have.
fn any_segment() -> impl Strategy<Value = (bool, TcpSegment)> {
    let flags =
        [ACK, ACK, ACK, SYN_ACK, TcpFlags::SYN, ACK.with(TcpFlags::FIN), TcpFlags::RST, ACK.with(TcpFlags::RST)];
    let near = || prop_oneof![6 => Just(0_i32), 2 => 0..3000, 1 => -3..3, 1 => 60_000..140_000, 1 => any::<i32>()];
    let payload = prop_oneof![2 => Just(0_u16), 1 => 1..1400_u16];
    (any::<bool>(), prop::sample::select(flags.to_vec()), near(), near(), payload, any::<u16>()).prop_map(
        |(from_opener, flags, seq, ack, payload_len, window)| {
            let (own, other) = if from_opener { (1001_u32, 5001_u32) } else { (5001, 1001) };
            let (seq, ack) = (own.wrapping_add_signed(seq), other.wrapping_add_signed(ack));
            (from_opener, TcpSegment { seq, ack, window, flags, payload_len, window_scale: None })
        },
    )
}

proptest! {
    /// One connection whose SYN-ACK a worker has seen, and one whose SYN-ACK a program has forwarded: the windows of the second are
    /// wider, since the scale that the answer has announced is not known.
    #[test]
    fn workers_go_on_alike_after_an_answer_by_a_program(
        scales in prop::array::uniform2(prop::option::of(0..14_u8)),
        window in any::<u16>(),
        segments in prop::collection::vec(any_segment(), 1..12),
    ) {
        let tables = [counting_table(), counting_table()];
        let flow = tcp(1);
        for table in &tables {
            let syn = Transport::Tcp(TcpSegment { window_scale: scales[0], ..segment(TcpFlags::SYN, 1000, 0) });
            open(table, &flow, &syn, NOW);
        }
        let there = tables[0].prepare(&flow).orientation;
        let answer = Transport::Tcp(TcpSegment { window_scale: scales[1], window, ..segment(SYN_ACK, 5000, 1001) });
        find(&tables[0], &flow, NOW).unwrap().update(there.opposite(), &answer, NOW);
        answer_by_program(&tables[1], &flow, NOW);
        for (from_opener, segment) in segments {
            let from = if from_opener { there } else { there.opposite() };
            let known = || {
                tables.each_ref().map(|table| {
                    let (slot, control) = table.lookup(&table.prepare(&flow)).unwrap();
                    let state = find(table, &flow, NOW).unwrap().state();
                    (state, table.entry(slot).tracking_under(control))
                })
            };
            let before = known();
            let [by_worker, by_program] = tables.each_ref().map(|table| {
                let mut conn = find(table, &flow, NOW).unwrap();
                match conn.update(from, &Transport::Tcp(segment), NOW) {
                    Update::ReverseSyn => conn.hold_syn(from, &Transport::Tcp(segment), NOW),
                    update => update,
                }
            });
            let after = known();
            let differs = by_worker != by_program
                && (by_worker == Update::Accepted(before[0].0) || by_worker == Update::Restarts);
            let sent_until = |known: &[(State, Option<Tracking>); 2]| {
                known.map(|(_, tracking)| tracking.unwrap().map(|word| word as u32))
            };
            let [one, other] = sent_until(&before);
            prop_assert_eq!(one, other, "until here both know the same numbers");
            let [one, other] = sent_until(&after);
            if differs || (before[0] == after[0]) != (before[1] == after[1]) || one != other {
                // It fits the wider windows alone.
                break;
            }
            prop_assert_eq!(by_worker, by_program, "{:?}", segment);
            if !matches!(by_worker, Update::Accepted(_) | Update::Invalid) {
                break;
            }
        }
    }
}

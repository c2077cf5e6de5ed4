//! Revoked connections.

use super::*;
use crate::packet::{Orientation, SctpChunk};

fn segment(flags: TcpFlags, seq: u32, ack: u32, payload_len: u16) -> Transport {
    Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, payload_len, window_scale: None })
}

fn chunk(chunk: SctpChunk, tag: u32) -> Transport {
    Transport::Sctp { chunk, tag }
}

/// A connection confirmed by both sides, by protocol: its flow, one more packet from either side, the packet that
/// reopens it if there is one, how long it is kept when revoked, and its state when restored.
struct Case {
    flow: Flow,
    packets: Vec<(bool, Transport)>,
    later: [Transport; 2],
    anew: Option<Transport>,
    remembered: u64,
    restored: State,
}

fn cases() -> Vec<Case> {
    let of = |protocol| Flow { protocol, ..flow(3) };
    let ack = TcpFlags::ACK;
    vec![
        Case {
            flow: of(Protocol::TCP),
            packets: vec![
                (true, syn()),
                (false, segment(TcpFlags::SYN.with(ack), 5000, 1001, 0)),
                (true, segment(ack, 1001, 5001, 0)),
                (true, segment(ack, 1001, 5001, 10)),
            ],
            later: [segment(ack, 1011, 5001, 10), segment(ack, 5001, 1011, 7)],
            anew: Some(syn()),
            remembered: 300,
            restored: State::Tcp(TcpState::Established),
        },
        Case {
            flow: of(Protocol::SCTP),
            packets: vec![
                (true, chunk(SctpChunk::Init, 0)),
                (false, chunk(SctpChunk::InitAck, 11)),
                (true, chunk(SctpChunk::CookieEcho, 22)),
                (false, chunk(SctpChunk::CookieAck, 11)),
            ],
            later: [chunk(SctpChunk::Other, 22), chunk(SctpChunk::Other, 11)],
            anew: Some(chunk(SctpChunk::Init, 0)),
            remembered: 210,
            restored: State::Sctp(SctpState::Established),
        },
        Case {
            flow: of(Protocol::UDP),
            packets: vec![(true, Transport::Udp), (false, Transport::Udp)],
            later: [Transport::Udp; 2],
            anew: None,
            remembered: 120,
            restored: State::Replied,
        },
        Case {
            flow: Flow { dst_port: 0, ..of(Protocol::ICMP) },
            packets: vec![(true, Transport::EchoRequest), (false, Transport::EchoReply)],
            later: [Transport::EchoRequest, Transport::EchoReply],
            anew: None,
            remembered: 30,
            restored: State::Replied,
        },
        Case {
            flow: Flow { src_port: 0, dst_port: 0, ..of(Protocol(47)) },
            packets: vec![(true, Transport::Other), (false, Transport::Other)],
            later: [Transport::Other; 2],
            anew: None,
            remembered: 600,
            restored: State::Replied,
        },
    ]
}

impl Case {
    fn ways(&self) -> [Orientation; 2] {
        let out = self.flow.key().1;
        [out, out.opposite()]
    }

    /// Inserts the connection.
    fn open(&self, table: &ConnTable) {
        insert(table, &self.flow, &self.packets[0].1, NOW).unwrap();
        for (from_opener, transport) in &self.packets[1..] {
            let way = self.ways()[usize::from(!from_opener)];
            let updated = find(table, &self.flow, NOW).unwrap().update(way, transport, NOW);
            assert!(matches!(updated, Update::Accepted(_)), "{:?}: {updated:?} for {transport:?}", self.flow);
        }
    }
}

#[test]
fn a_revoked_connection_passes_nothing_until_restored() {
    for case in cases() {
        let table = table(64);
        case.open(&table);
        let mut conn = find(&table, &case.flow, NOW).unwrap();
        assert_eq!(conn.set_verdict(Epoch(2), true), Reevaluation::Unchanged);
        assert_eq!(conn.set_verdict(Epoch(3), false), Reevaluation::Revoked);
        assert_eq!(conn.set_verdict(Epoch(4), false), Reevaluation::Unchanged, "cut once");
        assert!(conn.is_revoked() && conn.is_evaluated_under(Epoch(4)));
        for (way, later) in case.ways().into_iter().zip(&case.later) {
            for asked in [case.flow, case.flow.reversed()] {
                let mut found = find(&table, &asked, NOW).unwrap();
                assert_eq!((found.state(), found.original_flow()), (State::Revoked, case.flow));
                assert_eq!(found.update(way, later, NOW), Update::Revoked, "{:?} {later:?}", case.flow);
            }
        }
        let mut conn = find(&table, &case.flow, NOW).unwrap();
        assert_eq!(conn.set_verdict(Epoch(5), true), Reevaluation::Restored);
        for (way, later) in case.ways().into_iter().zip(&case.later) {
            let updated = find(&table, &case.flow, NOW).unwrap().update(way, later, NOW);
            assert_eq!(updated, Update::Accepted(case.restored), "{:?}", case.flow);
        }
        assert_eq!(table.len(), 1);
    }
}

#[test]
fn a_new_connection_replaces_a_revoked_one_only_if_allowed() {
    for case in cases() {
        let table = table(64);
        case.open(&table);
        find(&table, &case.flow, NOW).unwrap().set_verdict(Epoch(2), false);
        let Some(anew) = case.anew else { continue };
        // From the answering side too: policy is then evaluated for its own direction.
        for way in case.ways() {
            assert_eq!(find(&table, &case.flow, NOW).unwrap().update(way, &anew, NOW), Update::Opens);
            let later = &case.later[usize::from(way == case.ways()[1])];
            assert_eq!(
                find(&table, &case.flow, NOW).unwrap().update(way, later, NOW),
                Update::Revoked,
                "{:?}",
                case.flow
            );
        }
        let (way, conn) = (case.ways()[1], find(&table, &case.flow, NOW).unwrap());
        assert!(!conn.replace(way, &case.later[1], NOW), "not for what opens nothing");
        assert!(conn.replace(way, &anew, NOW));
        assert!(find(&table, &case.flow, NOW).is_none() && table.is_empty());
        assert_eq!(table.statistics().reopened, 1);
    }
}

#[test]
fn a_revoked_connection_is_kept_while_its_answering_end_sends() {
    for case in cases() {
        let is_agreed = matches!(case.restored, State::Tcp(_) | State::Sctp(_));
        let table = table(64);
        case.open(&table);
        find(&table, &case.flow, NOW).unwrap().set_verdict(Epoch(2), false);
        let mut now = NOW;
        // Both sides agreed only to the first two: otherwise the opener's packets keep nothing.
        for side in if is_agreed { [0, 1, 0, 1] } else { [1; 4] } {
            now = now.plus(Duration::from_secs(case.remembered - 1));
            let mut conn = find(&table, &case.flow, now).unwrap_or_else(|| panic!("{:?}", case.flow));
            assert_eq!(conn.update(case.ways()[side], &case.later[side], now), Update::Revoked);
        }
        let soon = now.plus(Duration::from_secs(case.remembered / 2));
        let mut conn = find(&table, &case.flow, soon).unwrap();
        assert_eq!(conn.update(case.ways()[0], &case.later[0], soon), Update::Revoked);
        let silent = now.plus(Duration::from_secs(case.remembered + 2));
        assert_eq!(find(&table, &case.flow, silent).is_some(), is_agreed, "{:?}", case.flow);
        let silent = soon.plus(Duration::from_secs(case.remembered + 2));
        assert!(find(&table, &case.flow, silent).is_none(), "{:?}", case.flow);
        assert_eq!(table.sweep(&mut SweepCursor::default(), usize::MAX, silent, Epoch(1)).expired, 1);
    }
}

#[test]
fn a_revoked_connection_is_not_evicted() {
    let reset = segment(TcpFlags::RST, 1011, 0, 0);
    let confirmed = cases().into_iter().map(|case| (case, None));
    // Its pod alone can make a connection look reset, or open one that nobody has answered.
    let reset = cases().into_iter().take(1).map(|case| (case, Some(reset)));
    let unanswered = cases().into_iter().map(|case| (Case { packets: case.packets[..1].to_vec(), ..case }, None));
    for (case, last) in confirmed.chain(reset).chain(unanswered) {
        let table = table(64);
        case.open(&table);
        let mut conn = find(&table, &case.flow, NOW).unwrap();
        if let Some(last) = last {
            assert_eq!(conn.update(case.ways()[0], &last, NOW), Update::Accepted(State::Tcp(TcpState::Close)));
        }
        let state = conn.state();
        assert_eq!(conn.set_verdict(Epoch(2), false), Reevaluation::Revoked);
        // A flood of its own pod, and then one that fills the table.
        for n in 100..5000 {
            let _ = insert(&table, &tcp(n), &syn(), NOW);
        }
        let is_revoked = || find(&table, &case.flow, NOW).is_some_and(|found| found.is_revoked());
        assert!(table.statistics().evicted_quota > 0 && is_revoked(), "{:?} {state}", case.flow);
        for n in 100..5000 {
            insert_alone(&table, &tcp(n), n, &syn(), NOW);
        }
        assert!(table.statistics().evicted_unanswered > 0 && is_revoked(), "{:?} {state}", case.flow);
    }
}

#[test]
fn a_restored_connection_keeps_its_state() {
    let table = table(64);
    let reset = segment(TcpFlags::RST.with(TcpFlags::ACK), 0, 1001, 0);
    for (n, packets, expected) in [(1, vec![], TcpState::SynSent), (2, vec![reset], TcpState::Close)] {
        insert(&table, &tcp(n), &syn(), NOW).unwrap();
        for packet in packets {
            find(&table, &tcp(n), NOW).unwrap().update(tcp(n).key().1.opposite(), &packet, NOW);
        }
        let mut conn = find(&table, &tcp(n), NOW).unwrap();
        assert_eq!((conn.set_verdict(Epoch(2), false), conn.state()), (Reevaluation::Revoked, State::Revoked));
        assert_eq!((conn.set_verdict(Epoch(3), true), conn.state()), (Reevaluation::Restored, State::Tcp(expected)));
    }
}

#[test]
fn the_expected_sequence_number_follows_what_passed() {
    let table = table(64);
    let case = &cases()[0];
    case.open(&table);
    let conn = find(&table, &case.flow, NOW).unwrap();
    assert_eq!(case.ways().map(|way| conn.next_sequence(way, NOW)), [Some(1011), Some(5001)]);
    // Whether the final FIN and a revoked packet count depends on whether they passed.
    let mut conn = conn;
    conn.update(case.ways()[1], &segment(TcpFlags::ACK.with(TcpFlags::FIN), 5001, 1011, 2), NOW);
    assert_eq!(conn.next_sequence(case.ways()[1], NOW), Some(5004));
    conn.set_verdict(Epoch(2), false);
    assert_eq!(conn.update(case.ways()[0], &case.later[0], NOW), Update::Revoked);
    assert_eq!(conn.next_sequence(case.ways()[0], NOW), Some(1011));
    let udp = &cases()[2];
    udp.open(&table);
    assert_eq!(find(&table, &udp.flow, NOW).unwrap().next_sequence(udp.ways()[0], NOW), None);
}

#[test]
fn a_revoked_connection_stays_revoked_across_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let config =
        Config { entries: 64, memory: TableMemory::File(directory.path().join("conntrack")), ..Config::default() };
    let case = &cases()[0];
    {
        let table = ConnTable::new(&config).unwrap();
        case.open(&table);
        find(&table, &case.flow, NOW).unwrap().set_verdict(Epoch(2), false);
    }
    let table = ConnTable::new(&config).unwrap();
    let mut conn = find(&table, &case.flow, NOW).unwrap();
    assert!(conn.is_revoked() && !conn.is_evaluated_under(Epoch(2)), "and is evaluated again");
    assert_eq!(conn.next_sequence(case.ways()[0], NOW), None, "segments may have passed meanwhile");
    assert_eq!(conn.set_verdict(Epoch(1), false), Reevaluation::Unchanged);
    assert_eq!(conn.update(case.ways()[0], &case.later[0], NOW), Update::Revoked);
}

//! TCP connections packet by packet: real frames, parsed and passed to the table like in the pipeline.

mod foreign;
mod windows;

use etherparse::{PacketBuilder, TcpOptionElement};

use super::super::state::{State, TcpState};
use super::super::tests::{NOW, POD};
use super::super::{Config, ConnTable, InsertError, Insertion, MidStreamPickup, NewConnection, Update};
use crate::epoch::Epoch;
use crate::packet::parse;
use TcpState::*;

/// Result of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SegmentOutcome {
    /// It opened a connection.
    Opened,
    /// It passed.
    Passed,
    /// It was invalid.
    Invalid,
    /// The connection had ended, and the segment opened a new one.
    Reopened,
    /// It answered a SYN on a live connection, which restarted.
    Restarted,
    /// It belongs to no connection and cannot open one.
    Refused,
}

/// A segment, its expected result, and the expected state.
#[derive(Clone, Copy, Debug)]
struct Row {
    from_client: bool,
    flags: &'static str,
    seq: u32,
    ack: u32,
    len: usize,
    window: u16,
    scale: Option<u8>,
    outcome: SegmentOutcome,
    state: Option<TcpState>,
}

fn row(from_client: bool, flags: &'static str, seq: u32, ack: u32, len: usize) -> Row {
    Row { from_client, flags, seq, ack, len, window: 1000, scale: None, outcome: SegmentOutcome::Refused, state: None }
}

/// From the client: flags (S, A, F, R, P, U, E, C), sequence number, acknowledgement, payload bytes.
fn c(flags: &'static str, seq: u32, ack: u32, len: usize) -> Row {
    row(true, flags, seq, ack, len)
}

/// From the server.
fn s(flags: &'static str, seq: u32, ack: u32, len: usize) -> Row {
    row(false, flags, seq, ack, len)
}

impl Row {
    fn win(self, window: u16) -> Self {
        Self { window, ..self }
    }
    fn expect(self, outcome: SegmentOutcome, state: TcpState) -> Self {
        Self { outcome, state: Some(state), ..self }
    }
    fn opens(self, state: TcpState) -> Self {
        self.expect(SegmentOutcome::Opened, state)
    }
    fn ok(self, state: TcpState) -> Self {
        self.expect(SegmentOutcome::Passed, state)
    }
    fn bad(self, state: TcpState) -> Self {
        self.expect(SegmentOutcome::Invalid, state)
    }
    fn reopens(self, state: TcpState) -> Self {
        self.expect(SegmentOutcome::Reopened, state)
    }

    fn restarts(self, state: TcpState) -> Self {
        self.expect(SegmentOutcome::Restarted, state)
    }

    fn frame(&self, v6: bool) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let (mut src, mut dst, mut ports) = (1, 2, (40_000, 80));
        if !self.from_client {
            (src, dst, ports) = (2, 1, (80, 40_000));
        }
        let address = |n: u8| std::array::from_fn(|index| if index == 0 { 0xfd } else { n });
        let builder = if v6 {
            builder.ipv6(address(src), address(dst), 64)
        } else {
            builder.ipv4([10, 0, 0, src], [10, 0, 0, dst], 64)
        };
        let mut tcp = builder.tcp(ports.0, ports.1, self.seq, self.window);
        for flag in self.flags.chars() {
            tcp = match flag {
                'S' => tcp.syn(),
                'A' => tcp.ack(self.ack),
                'F' => tcp.fin(),
                'R' => tcp.rst(),
                'P' => tcp.psh(),
                'U' => tcp.urg(1),
                'E' => tcp.ece(),
                'C' => tcp.cwr(),
                other => panic!("no flag {other}"),
            };
        }
        if let Some(shift) = self.scale {
            tcp = tcp.options(&[TcpOptionElement::Noop, TcpOptionElement::WindowScale(shift)]).unwrap();
        }
        let mut frame = Vec::new();
        tcp.write(&mut frame, &vec![0; self.len]).unwrap();
        frame
    }
}

/// Passes a frame to the table like the pipeline.
fn pass(table: &ConnTable, frame: &[u8]) -> (SegmentOutcome, Option<State>) {
    let packet = parse(frame).unwrap();
    let hashed = table.prepare(&packet.flow);
    let enter = |opened| {
        let new = NewConnection {
            hashed: &hashed,
            transport: &packet.transport,
            owner: POD,
            via_host: false,
            opener: None,
            epoch: Epoch(1),
            now: NOW,
        };
        match table.insert(&new) {
            Ok(Insertion::Created(conn)) => {
                assert_eq!(conn.original_flow(), packet.flow);
                opened
            }
            Ok(Insertion::Found(_)) => unreachable!("one thread races with nobody"),
            Err(refused) => {
                assert_eq!(refused, InsertError::CannotOpen);
                SegmentOutcome::Refused
            }
        }
    };
    let outcome = match table.find(&hashed, NOW) {
        None => enter(SegmentOutcome::Opened),
        Some(mut conn) => match conn.update(hashed.orientation(), &packet.transport, NOW) {
            Update::Accepted(state) => {
                assert_eq!(state, conn.state());
                SegmentOutcome::Passed
            }
            Update::Invalid => SegmentOutcome::Invalid,
            Update::Revoked | Update::Removed => unreachable!("nobody cuts or removes it"),
            // Policy allows everything.
            Update::Opens => {
                assert!(conn.replace(hashed.orientation(), &packet.transport, NOW));
                enter(SegmentOutcome::Reopened)
            }
            Update::ReverseSyn => {
                assert!(conn.is_reply(hashed.orientation()));
                let held = conn.hold_syn(hashed.orientation(), &packet.transport, NOW);
                assert_eq!(held, Update::Accepted(conn.state()));
                SegmentOutcome::Passed
            }
            Update::Restarts => {
                assert!(conn.restart(Epoch(1), hashed.orientation(), &packet.transport, NOW));
                let conn = table.find(&hashed, NOW).unwrap();
                assert_eq!(conn.original_flow(), packet.flow.reversed(), "opened by whose SYN it is");
                SegmentOutcome::Restarted
            }
        },
    };
    (outcome, table.find(&hashed, NOW).map(|conn| conn.state()))
}

fn run(midstream_pickup: bool, description: &str, rows: &[Row]) {
    for v6 in [false, true] {
        let table = ConnTable::new(&Config {
            entries: 64,
            midstream_pickup: if midstream_pickup { MidStreamPickup::Always } else { MidStreamPickup::Never },
            ..Config::default()
        })
        .unwrap();
        for (number, row) in rows.iter().enumerate() {
            let (outcome, state) = pass(&table, &row.frame(v6));
            let expected = (row.outcome, row.state.map(State::Tcp));
            assert_eq!((outcome, state), expected, "{description} (IPv6: {v6}): segment {number}, {row:?}");
        }
    }
}

/// A handshake with client number 100 and server number 500, then `rest`.
fn established(rest: &[Row]) -> Vec<Row> {
    let handshake =
        [c("S", 100, 0, 0).opens(SynSent), s("SA", 500, 101, 0).ok(SynReceived), c("A", 101, 501, 0).ok(Established)];
    [&handshake[..], rest].concat()
}

/// The same, closed from both sides: the next numbers are 102 and 502.
fn closed(rest: &[Row]) -> Vec<Row> {
    let end = [c("FA", 101, 501, 0).ok(FinWait), s("FA", 501, 102, 0).ok(LastAck), c("A", 102, 502, 0).ok(TimeWait)];
    established(&[&end[..], rest].concat())
}

#[test]
fn opening() {
    let syn = c("S", 100, 0, 0).opens(SynSent);
    let syn_ack = s("SA", 500, 101, 0).ok(SynReceived);
    let cases: &[(&str, &[Row])] = &[
        ("handshake", &established(&[])),
        ("the handshake's last segment carries data", &[syn, syn_ack, c("PA", 101, 501, 50).ok(Established)]),
        ("the server's data come first", &established(&[s("PA", 501, 101, 20).ok(Established)])),
        ("ECN set-up", &[c("SEC", 100, 0, 0).opens(SynSent), s("SAE", 500, 101, 0).ok(SynReceived)]),
        ("SYN again", &[syn, c("S", 100, 0, 0).ok(SynSent), syn_ack]),
        ("SYN with another number", &[syn, c("S", 77_000, 0, 0).ok(SynSent), s("SA", 500, 77_001, 0).ok(SynReceived)]),
        ("SYN-ACK again", &[syn, syn_ack, s("SA", 500, 101, 0).ok(SynReceived), c("A", 101, 501, 0).ok(Established)]),
        ("SYN-ACK again after the answer was lost", &established(&[s("SA", 500, 101, 0).ok(Established)])),
        ("the server repeats itself before it is answered", &[syn, syn_ack, s("A", 501, 101, 0).ok(SynReceived)]),
        ("SYN-ACK from the opener", &[syn, c("SA", 100, 1, 0).ok(SynSent), syn_ack]),
        ("SYN-ACK of a SYN that was never sent", &[syn, s("SA", 500, 102, 0).ok(SynSent), syn_ack]),
        ("SYN-ACK of a SYN long ago", &[syn, s("SA", 500, 0xffff_0000, 0).ok(SynSent), syn_ack]),
        ("SYN with data, taken", &[c("S", 100, 0, 30).opens(SynSent), s("SA", 500, 131, 0).ok(SynReceived)]),
        ("SYN with data, left", &[c("S", 100, 0, 30).opens(SynSent), s("SA", 500, 101, 0).ok(SynReceived)]),
        ("data before the answer", &[syn, c("A", 101, 501, 5).ok(SynSent), syn_ack]),
        (
            "answer in the handshake acknowledges what was not sent",
            &[syn, syn_ack, c("A", 101, 9000, 0).ok(SynReceived)],
        ),
        ("refused", &[syn, s("RA", 0, 101, 0).ok(Close), c("S", 100, 0, 0).reopens(SynSent)]),
        ("refusal of another SYN", &[syn, s("RA", 0, 102, 0).ok(SynSent), syn_ack]),
        ("refusal that acknowledges nothing", &[syn, s("R", 0, 0, 0).ok(SynSent), syn_ack]),
        ("refusal of an earlier SYN", &[syn, s("RA", 0, 0xffff_0000, 0).ok(SynSent), syn_ack]),
        ("the opener gives up", &[syn, c("R", 101, 0, 0).ok(Close)]),
        (
            "the server believes in an older connection",
            &[
                syn,
                s("A", 8000, 7000, 0).ok(SynSent),
                c("R", 7000, 0, 0).ok(SynSent),
                c("S", 100, 0, 0).ok(SynSent),
                syn_ack,
            ],
        ),
        (
            "the server sends data on an older connection, or ends it",
            &[syn, s("A", 8000, 7000, 9).ok(SynSent), s("FA", 8009, 7000, 0).ok(SynSent), syn_ack],
        ),
        (
            "data in SYN and SYN-ACK, and from the server before the answer",
            &[
                c("S", 100, 0, 40).opens(SynSent),
                s("SA", 500, 141, 30).ok(SynReceived),
                s("PA", 531, 141, 50).ok(SynReceived),
                c("A", 141, 581, 0).ok(Established),
            ],
        ),
        (
            "simultaneous open",
            &[
                syn,
                s("S", 500, 0, 0).ok(SynSent2),
                c("S", 100, 0, 0).ok(SynSent2),
                c("SA", 100, 501, 0).ok(SynReceived),
                s("SA", 500, 101, 0).ok(SynReceived),
                c("A", 101, 501, 0).ok(Established),
            ],
        ),
        (
            "simultaneous open, SYN-ACK of another number",
            &[
                syn,
                s("S", 500, 0, 0).ok(SynSent2),
                s("SA", 600, 101, 0).ok(SynSent2),
                s("SA", 500, 102, 0).ok(SynSent2),
                c("A", 101, 501, 0).ok(SynSent2),
                s("A", 501, 101, 9).ok(SynSent2),
                c("SA", 100, 501, 0).ok(SynReceived),
            ],
        ),
        (
            "simultaneous open with data in a SYN",
            &[
                c("S", 100, 0, 40).opens(SynSent),
                s("S", 500, 0, 0).ok(SynSent2),
                c("SA", 100, 501, 0).ok(SynReceived),
                s("SA", 500, 141, 0).ok(SynReceived),
                c("A", 141, 501, 0).ok(Established),
            ],
        ),
        ("no connection opens with SYN-ACK", &[s("SA", 500, 101, 0)]),
        ("no connection opens with RST", &[c("R", 500, 0, 0), c("RA", 500, 1, 0)]),
        ("no connection opens with FIN", &[c("FA", 500, 1, 0), c("F", 500, 0, 0)]),
        (
            "no connection opens with flags that no TCP sends",
            &[c("", 1, 0, 0), c("SF", 1, 0, 0), c("SR", 1, 0, 0), c("FPU", 1, 0, 0), c("SFRPAUEC", 1, 1, 0)],
        ),
    ];
    for (description, rows) in cases {
        run(true, description, rows);
    }
}

#[test]
fn windows() {
    let long = |rest: &[Row]| {
        let segment = |n: u32| c("A", 101 + n * 30_000, 501, 30_000).win(65_535).ok(Established);
        let answer = |n: u32| s("A", 501, 101 + n * 30_000, 0).win(65_535).ok(Established);
        let open = [s("A", 501, 101, 0).win(65_535).ok(Established)];
        let sent = [segment(0), answer(1), segment(1), answer(2), segment(2), answer(3)];
        established(&[&open[..], &sent[..], rest].concat())
    };
    let scaled = |client: Option<u8>, server: Option<u8>, rest: &[Row]| {
        let handshake = [
            Row { scale: client, ..c("S", 100, 0, 0).opens(SynSent) },
            Row { scale: server, ..s("SA", 500, 101, 0).ok(SynReceived) },
            c("A", 101, 501, 0).ok(Established),
        ];
        [&handshake[..], rest].concat()
    };
    let cases: &[(&str, Vec<Row>)] = &[
        (
            "data both ways",
            established(&[
                c("PA", 101, 501, 100).ok(Established),
                s("A", 501, 201, 0).ok(Established),
                s("PA", 501, 201, 300).ok(Established),
                c("A", 201, 801, 0).ok(Established),
            ]),
        ),
        ("data again", established(&[c("A", 101, 501, 100).ok(Established), c("A", 101, 501, 100).ok(Established)])),
        ("out of order", established(&[c("A", 601, 501, 100).ok(Established), c("A", 101, 501, 500).ok(Established)])),
        (
            "data a little beyond the window, which the server takes",
            established(&[c("A", 20_000, 501, 10).ok(Established), s("A", 501, 20_010, 0).ok(Established)]),
        ),
        ("data beyond the window", established(&[c("A", 200_000, 501, 10).ok(Established)])),
        ("data of long ago", long(&[c("A", 101, 501, 10).win(65_535).ok(Established)])),
        (
            "the end of long ago, and a RST",
            long(&[c("FA", 101, 501, 10).win(65_535).ok(Established), c("R", 101, 0, 0).ok(Established)]),
        ),
        (
            "an acknowledgement without data, of any number",
            established(&[c("A", 3_000_000, 501, 0).ok(Established), c("A", 101, 501, 9).ok(Established)]),
        ),
        ("data of a window ago", long(&[c("A", 30_101, 501, 10).win(65_535).ok(Established)])),
        ("acknowledgement of what was not sent", established(&[s("A", 501, 5000, 0).ok(Established)])),
        ("acknowledgement of long ago", long(&[s("A", 501, 101, 0).win(65_535).ok(Established)])),
        ("acknowledgement of a window ago", long(&[s("A", 501, 30_101, 0).win(65_535).ok(Established)])),
        ("keep-alive", established(&[c("A", 100, 501, 0).ok(Established), s("A", 501, 101, 0).ok(Established)])),
        ("keep-alive with an byte", established(&[c("A", 100, 501, 1).ok(Established)])),
        (
            "zero window and probe",
            established(&[
                s("A", 501, 101, 0).win(0).ok(Established),
                c("A", 101, 501, 1).ok(Established),
                s("A", 501, 101, 0).win(0).ok(Established),
            ]),
        ),
        ("scaled window", scaled(Some(7), Some(7), &[s("A", 100_000, 101, 10).ok(Established)])),
        ("beyond a scaled window", scaled(Some(7), Some(7), &[s("A", 400_000, 101, 10).ok(Established)])),
        ("only the client would scale", scaled(Some(7), None, &[s("A", 100_000, 101, 10).ok(Established)])),
        (
            "scales of each side",
            scaled(
                Some(0),
                Some(7),
                &[
                    s("A", 100_000, 101, 10).ok(Established),
                    s("A", 501, 101, 0).ok(Established),
                    c("A", 100_000, 501, 10).ok(Established),
                ],
            ),
        ),
        (
            "a shift above 14 counts as 14",
            scaled(
                Some(200),
                Some(0),
                &[s("A", 16_000_000, 101, 10).ok(Established), s("A", 34_000_000, 101, 10).ok(Established)],
            ),
        ),
        (
            "numbers wrap",
            vec![
                c("S", 0xffff_ff00, 0, 0).opens(SynSent),
                s("SA", 0xffff_fff0, 0xffff_ff01, 0).ok(SynReceived),
                c("A", 0xffff_ff01, 0xffff_fff1, 600).ok(Established),
                s("A", 0xffff_fff1, 0x159, 600).ok(Established),
                c("A", 0x159, 0x249, 0).ok(Established),
                c("A", 0x9000, 0x249, 10).ok(Established),
                s("A", 0x249, 0x1000, 0).ok(Established),
            ],
        ),
        ("urgent data", established(&[c("PUA", 101, 501, 10).ok(Established)])),
        (
            "flags that no TCP sends",
            established(&[
                c("", 101, 0, 0).bad(Established),
                c("SF", 101, 0, 0).bad(Established),
                c("F", 101, 0, 0).bad(Established),
                c("FR", 101, 0, 0).bad(Established),
            ]),
        ),
    ];
    for (description, rows) in cases {
        run(true, description, rows);
    }
}

#[test]
fn closing() {
    let cases: &[(&str, Vec<Row>)] = &[
        (
            "the client closes first",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                s("A", 501, 102, 0).ok(CloseWait),
                s("FA", 501, 102, 0).ok(LastAck),
                c("A", 102, 502, 0).ok(TimeWait),
            ]),
        ),
        (
            "the server closes first",
            established(&[
                s("FA", 501, 101, 0).ok(FinWait),
                c("A", 101, 502, 0).ok(CloseWait),
                c("FA", 101, 502, 0).ok(LastAck),
                s("A", 502, 102, 0).ok(TimeWait),
            ]),
        ),
        ("three segments", closed(&[])),
        (
            "both close at once",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                s("FA", 501, 101, 0).ok(LastAck),
                c("A", 102, 502, 0).ok(LastAck),
                s("A", 502, 102, 0).ok(TimeWait),
            ]),
        ),
        (
            "FIN with data, acknowledged in part",
            established(&[
                c("FPA", 101, 501, 50).ok(FinWait),
                s("A", 501, 131, 0).ok(FinWait),
                s("A", 501, 152, 0).ok(CloseWait),
            ]),
        ),
        ("FIN again", established(&[c("FA", 101, 501, 0).ok(FinWait), c("FA", 101, 501, 0).ok(FinWait)])),
        (
            "half closed: the other side goes on",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                s("A", 501, 102, 100).ok(CloseWait),
                c("A", 102, 601, 0).ok(CloseWait),
                s("FA", 601, 102, 0).ok(LastAck),
            ]),
        ),
        (
            "FIN out of window",
            established(&[c("FA", 500_000, 501, 0).ok(Established), c("FA", 9_000, 501, 0).ok(Established)]),
        ),
        (
            "FIN in the handshake's last segment",
            vec![
                c("S", 100, 0, 0).opens(SynSent),
                s("SA", 500, 101, 0).ok(SynReceived),
                c("FA", 101, 501, 0).ok(FinWait),
            ],
        ),
        ("last FIN again in TIME_WAIT", closed(&[s("FA", 501, 102, 0).ok(TimeWait), c("A", 102, 502, 0).ok(TimeWait)])),
        (
            "SYN opens anew in TIME_WAIT",
            closed(&[c("S", 9000, 0, 0).reopens(SynSent), s("SA", 70, 9001, 0).ok(SynReceived)]),
        ),
        (
            "SYN from the other side in TIME_WAIT",
            closed(&[s("S", 9000, 0, 0).reopens(SynSent), c("SA", 70, 9001, 0).ok(SynReceived)]),
        ),
        (
            "SYN before the last acknowledgement",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                s("FA", 501, 102, 0).ok(LastAck),
                c("S", 9000, 0, 0).ok(LastAck),
            ]),
        ),
    ];
    for (description, rows) in cases {
        run(true, description, rows);
    }
}

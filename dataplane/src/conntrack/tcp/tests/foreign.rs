//! Segments of another connection, or from the middle of one.

use super::*;

#[test]
fn resets_and_syns_that_do_not_belong() {
    let sent = [
        c("A", 101, 501, 1000).ok(Established),
        s("A", 501, 1101, 0).ok(Established),
        c("A", 1101, 501, 1000).ok(Established),
        s("A", 501, 2101, 0).ok(Established),
    ];
    let cases: &[(&str, Vec<Row>)] = &[
        ("RST of the next number", established(&[c("R", 101, 0, 0).ok(Close)])),
        ("RST that answers data", established(&[c("A", 101, 501, 10).ok(Established), s("R", 501, 0, 0).ok(Close)])),
        ("RST with an acknowledgement of zero", established(&[c("RA", 101, 0, 0).ok(Close)])),
        ("RST within the window", established(&[c("R", 150, 0, 0).ok(Resetting), s("A", 501, 101, 0).ok(Established)])),
        (
            "RST within the window, then the right one",
            established(&[c("R", 150, 0, 0).ok(Resetting), c("R", 101, 0, 0).ok(Close)]),
        ),
        (
            "RST beyond the window",
            established(&[
                c("R", 500_000, 0, 0).ok(Established),
                c("R", 50_000, 0, 0).ok(Established),
                c("A", 101, 501, 5).ok(Established),
            ]),
        ),
        ("RST of long ago", established(&[&sent[..], &[c("R", 102, 0, 0).ok(Established)]].concat())),
        ("RST that acknowledges what was not sent", established(&[c("RA", 101, 700, 0).ok(Established)])),
        ("RST while closing", established(&[c("FA", 101, 501, 0).ok(FinWait), s("R", 510, 0, 0).ok(Close)])),
        (
            "RST while closing, of another connection",
            established(&[c("FA", 101, 501, 0).ok(FinWait), s("R", 900_000, 0, 0).ok(FinWait)]),
        ),
        (
            "RST in the handshake",
            vec![c("S", 100, 0, 0).opens(SynSent), s("SA", 500, 101, 0).ok(SynReceived), c("R", 101, 0, 0).ok(Close)],
        ),
        (
            "what comes late after RST",
            established(&[
                c("R", 101, 0, 0).ok(Close),
                s("A", 501, 101, 20).ok(Close),
                s("A", 900_000, 101, 20).ok(Close),
            ]),
        ),
        ("SYN after RST", established(&[c("R", 101, 0, 0).ok(Close), c("S", 7, 0, 0).reopens(SynSent)])),
        (
            "SYN within the window",
            established(&[c("S", 120, 0, 0).ok(Established), c("A", 101, 501, 9).ok(Established)]),
        ),
        (
            "SYN from the server",
            established(&[s("S", 9000, 0, 0).ok(Established), s("A", 501, 101, 9).ok(Established)]),
        ),
        (
            "a client that forgot: SYN, challenge, RST, SYN",
            established(&[
                c("S", 70_000, 0, 0).ok(Established),
                s("A", 501, 101, 0).ok(Established),
                c("R", 101, 0, 0).ok(Close),
                c("S", 70_000, 0, 0).reopens(SynSent),
            ]),
        ),
        ("SYN-ACK beyond the window", established(&[s("SA", 90_000, 101, 0).ok(Established)])),
        ("SYN-ACK of the opener", established(&[c("SA", 90_000, 501, 0).ok(Established)])),
        (
            "both forgot, and the same side opens again",
            established(&[
                c("S", 70_000, 0, 0).ok(Established),
                c("S", 70_000, 0, 0).ok(Established),
                s("SA", 8000, 70_001, 0).restarts(SynReceived),
                c("A", 70_001, 8001, 0).ok(Established),
                c("PA", 70_001, 8001, 30).ok(Established),
                s("A", 8001, 70_031, 30).ok(Established),
                c("A", 0, 8001, 10).ok(Established),
                c("A", 500_000, 8001, 10).ok(Established),
            ]),
        ),
        (
            "both forgot, and the same side opens with data",
            established(&[
                c("S", 70_000, 0, 30).ok(Established),
                s("SA", 8000, 70_031, 0).restarts(SynReceived),
                c("A", 70_031, 8001, 0).ok(Established),
            ]),
        ),
        (
            "both forgot, and the other side opens",
            established(&[
                s("S", 70_000, 0, 0).ok(Established),
                c("SA", 8000, 70_001, 0).restarts(SynReceived),
                s("A", 70_001, 8001, 9).ok(Established),
                c("A", 8001, 70_010, 0).ok(Established),
            ]),
        ),
        (
            "both forgot, and the second attempt is answered",
            established(&[
                c("S", 70_000, 0, 0).ok(Established),
                c("S", 80_000, 0, 0).ok(Established),
                s("SA", 8000, 70_001, 0).ok(Established),
                s("SA", 8000, 80_001, 0).restarts(SynReceived),
            ]),
        ),
        (
            "the new connection scales, and how much is not known of the side whose SYN it was",
            established(&[
                Row { scale: Some(7), ..c("S", 70_000, 0, 0).ok(Established) },
                Row { scale: Some(7), ..s("SA", 8000, 70_001, 0).restarts(SynReceived) },
                c("A", 70_001, 8001, 0).ok(Established),
                s("A", 100_000, 70_001, 10).ok(Established),
                s("A", 40_000_000, 70_001, 10).ok(Established),
                c("A", 500_000, 8001, 10).ok(Established),
            ]),
        ),
        (
            "SYN-ACK of a SYN that was not seen",
            established(&[c("S", 70_000, 0, 0).ok(Established), s("SA", 8000, 60_001, 0).ok(Established)]),
        ),
        (
            "the other side knows no connection and has no listener",
            established(&[
                c("S", 70_000, 0, 0).ok(Established),
                s("RA", 0, 70_001, 0).ok(Close),
                c("S", 75_000, 0, 0).reopens(SynSent),
            ]),
        ),
        (
            "a refusal of another SYN than the one that was seen",
            established(&[c("S", 70_000, 0, 0).ok(Established), s("RA", 900_000, 60_001, 0).ok(Established)]),
        ),
        (
            "a forged SYN of the client: the connection goes on",
            established(&[
                Row { scale: Some(0), ..c("S", 70_000, 0, 0).win(1).ok(Established) },
                s("A", 501, 101, 0).ok(Established),
                c("PA", 101, 501, 100).ok(Established),
                s("PA", 501, 201, 900).ok(Established),
                c("A", 201, 1401, 0).ok(Established),
                c("A", 500_000, 1401, 10).ok(Established),
                s("SA", 8000, 70_001, 0).ok(Established),
            ]),
        ),
        (
            "a forged SYN between data: both go on without a challenge",
            established(&[
                c("PA", 101, 501, 100).ok(Established),
                c("S", 70_000, 0, 0).ok(Established),
                c("PA", 201, 501, 100).ok(Established),
                s("A", 501, 301, 0).ok(Established),
                s("PA", 501, 301, 50).ok(Established),
            ]),
        ),
        (
            "a forged SYN of the server's side",
            established(&[
                s("S", 70_000, 0, 0).ok(Established),
                c("A", 101, 501, 0).ok(Established),
                s("PA", 501, 101, 20).ok(Established),
                c("A", 101, 521, 0).ok(Established),
            ]),
        ),
        (
            "a forged SYN and a forged segment: both go on",
            established(&[
                c("PA", 101, 501, 100).ok(Established),
                c("S", 70_000, 0, 0).ok(Established),
                c("A", 900_000, 501, 10).ok(Established),
                s("A", 501, 201, 0).ok(Established),
                c("PA", 201, 501, 100).ok(Established),
            ]),
        ),
        (
            "SYN on a connection that its side has ended",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                c("S", 9000, 0, 0).ok(FinWait),
                s("SA", 8000, 9001, 0).restarts(SynReceived),
            ]),
        ),
        (
            "a forged SYN on a connection that its side has ended",
            established(&[
                c("FA", 101, 501, 0).ok(FinWait),
                c("S", 9000, 0, 0).ok(FinWait),
                s("A", 501, 102, 5).ok(CloseWait),
                c("S", 9000, 0, 0).ok(CloseWait),
                s("FA", 506, 102, 0).ok(LastAck),
                c("A", 102, 507, 0).ok(TimeWait),
            ]),
        ),
        (
            "SYN on one that the other side has ended",
            established(&[
                s("FA", 501, 101, 0).ok(FinWait),
                c("S", 9000, 0, 0).ok(FinWait),
                s("SA", 8000, 9001, 0).restarts(SynReceived),
            ]),
        ),
    ];
    for (description, rows) in cases {
        run(true, description, rows);
    }
}

#[test]
fn mid_stream_pickup() {
    let first = c("PA", 5000, 9000, 10).opens(PickedUp);
    let answer = s("A", 9000, 5010, 100).ok(Established);
    run(false, "not set", &[c("A", 5000, 9000, 10), c("A", 5000, 9000, 0), c("S", 100, 0, 0).opens(SynSent)]);
    let cases: &[(&str, &[Row])] = &[
        ("data, then the other side's", &[first, answer, c("A", 5010, 9100, 0).ok(Established)]),
        (
            "several from one side before the other's",
            &[first, c("A", 5010, 9300, 10).ok(PickedUp), s("A", 9000, 5020, 10).ok(Established)],
        ),
        ("windows whose scale is not known", &[first, answer, s("A", 900_000, 5010, 10).ok(Established)]),
        (
            "far beyond any window: the numbers begin anew",
            &[
                first,
                answer,
                c("A", 200_000_000, 9100, 10).ok(Established),
                s("A", 9100, 200_000_010, 10).ok(Established),
                c("A", 200_000_010, 9110, 10).ok(Established),
            ],
        ),
        (
            "acknowledgement of what was not sent",
            &[
                first,
                answer,
                c("A", 5010, 2_000_099_000, 10).ok(Established),
                s("A", 2_000_099_000, 5020, 9).ok(Established),
            ],
        ),
        (
            "RST of a side not yet heard",
            &[first, s("R", 9000, 0, 0).ok(Close), c("A", 5010, 9000, 1).ok(Close), c("S", 7, 0, 0).reopens(SynSent)],
        ),
        ("FIN before the other side is heard", &[first, c("FA", 5010, 9000, 0).ok(PickedUp)]),
        (
            "SYN before the other side is heard",
            &[first, c("S", 100, 0, 0).reopens(SynSent), s("SA", 500, 101, 0).ok(SynReceived)],
        ),
        ("RST of the next number", &[first, answer, s("R", 9100, 0, 0).ok(Close)]),
        (
            "closing",
            &[
                first,
                answer,
                c("FA", 5010, 9100, 0).ok(FinWait),
                s("FA", 9100, 5011, 0).ok(LastAck),
                c("A", 5011, 9101, 0).ok(TimeWait),
            ],
        ),
        (
            "a segment sent again, of which more had arrived",
            &[first, s("A", 9000, 5100, 0).ok(Established), c("A", 5100, 9000, 10).ok(Established)],
        ),
        (
            "the server is heard first",
            &[s("A", 9000, 5000, 10).opens(PickedUp), c("A", 5000, 9010, 10).ok(Established)],
        ),
    ];
    for (description, rows) in cases {
        run(true, description, rows);
    }
}

//! Connections open, are used and end while programs forward their packets.

use super::*;

#[test]
fn a_connection_that_the_kernel_forwards_does_not_expire() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        // Its last packet at a worker was longer ago than the timeout of an answered datagram, 120 s.
        let old = Timestamp::from_millis(now.as_millis() - 300_000);
        let (there, back) = (sent(End::A, End::B, false, 0), sent(End::B, End::A, false, 0));
        open(&mut node, there, old);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_none(), "expired");
        let near = Timestamp::from_millis(now.as_millis() - 100_000);
        open(&mut node, there, near);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_some());
        let later = now.plus(Duration::from_secs(60));
        let idle: Vec<Duration> = node.pipeline.connections().iter(later).map(|found| found.idle).collect();
        assert!(idle.len() == 1 && idle[0] <= Duration::from_secs(61), "{idle:?}");
        let (verdict, _) = node.worker(End::B, &back.frame(), later);
        assert_eq!(verdict, Verdict::Forward(A), "160 s after the last packet at a worker");
    });
}

/// The packets of the only connection that were forwarded, by the table.
fn counted(node: &Node) -> [Traffic; 2] {
    let listed: Vec<_> = node.pipeline.connections().iter(Timestamp::now()).collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    listed[0].traffic.expect("programs read the table")
}

#[test]
fn a_connection_counts_traffic_of_workers_and_programs() {
    for there in [
        sent(End::A, End::B, true, ACK),
        sent(End::A, End::B, false, 0),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
    ] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            open(&mut node, there, now);
            let before = counted(&node);
            assert_eq!(before.map(|traffic| traffic.packets), [3, 2], "{there:?}: of the handshake");
            let mut expected = before;
            for (turn, payload) in [0, 1, 900, 1200].into_iter().enumerate() {
                for (direction, packet) in [there, there.back()].into_iter().enumerate() {
                    let packet = Sent { payload, ..packet };
                    let frame = packet.frame();
                    // The opener's packets go by program and worker in turn, the other end's by program alone.
                    if direction == 0 && turn % 2 == 1 {
                        assert!(matches!(node.worker(packet.from, &frame, now).0, Verdict::Forward(_)), "{packet:?}");
                    } else {
                        assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}");
                    }
                    expected[direction].packets += 1;
                    expected[direction].bytes += frame.len() as u64 - 14;
                }
            }
            assert_eq!(counted(&node), expected, "{there:?}");
            // A dropped packet is not counted. From the node's stack such a packet passes: the stack has counted its hop.
            if there.from != End::Outside {
                let dropped = Sent { ttl: 1, ..there }.frame();
                assert!(node.program(there.from, there.to, &dropped, 0).is_none());
                assert!(matches!(node.worker(there.from, &dropped, now).0, Verdict::Drop(_)));
                assert_eq!(counted(&node), expected, "{there:?}");
            }
        });
    }
}

#[test]
fn a_datagram_that_may_open_a_stream_meets_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let (there, back) = (sent(End::A, End::B, false, 0), sent(End::B, End::A, false, 0));
        let began = Timestamp::from_millis(now.as_millis() - 3000);
        open_since(&mut node, there, began, began);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_some(), "only the opener's make a stream");
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_none(), "two seconds after the first");
        assert_eq!(node.worker(End::A, &there.frame(), now).0, Verdict::Forward(B));
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_some(), "the worker has noted it");
    });
}

#[test]
fn a_datagram_too_early_to_open_a_stream_needs_no_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        // On a busy machine the two seconds may be over before the program runs. And its clock is behind by up to a jiffy: at the
        // end of a tick it takes such a connection for one of the future.
        let passes = (0..20).any(|flow| {
            let there = Sent { flow, ..sent(End::A, End::B, false, 0) };
            let began = Timestamp::now();
            open_since(&mut node, there, began, began);
            let done = node.program(End::A, End::B, &there.frame(), 0);
            Timestamp::now().as_millis() - began.as_millis() < 1500 && done.is_some()
        });
        assert!(passes, "twenty tries of 1.5 s");
    });
}

#[test]
fn segments_after_forwarded_ones_are_in_window() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        open(&mut node, there, now);
        let mut far = Sent { flags: ACK | 1, ..there }.frame();
        far[38..42].copy_from_slice(&2_000_000_000_u32.to_be_bytes());
        assert_eq!(node.worker(End::A, &far, now).0, Verdict::Forward(B));
        assert_eq!(listed(&node, now).0, "ESTABLISHED", "nothing came in between, so that it ends nothing");
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_some());
        assert_eq!(node.worker(End::A, &far, now).0, Verdict::Forward(B));
        assert_eq!(listed(&node, now).0, "FIN_WAIT", "the worker has not seen what came before it");
    });
}

/// State and time left of the only connection, as listed.
fn listed(node: &Node, now: Timestamp) -> (String, Duration) {
    let listed: Vec<_> = node.pipeline.connections().iter(now).collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    (listed[0].state.to_string(), listed[0].expires_in)
}

/// A SYN and its answer, by a worker.
fn half_open(node: &mut Node, there: Sent, now: Timestamp) {
    for (packet, flags, from_opener) in [(there, SYN, true), (there.back(), SYN | ACK, false)] {
        let frame = Sent { flags, payload: 0, ..packet }.frame();
        let (verdict, _) = node.worker(packet.from, &in_step(frame, true, flags, from_opener), now);
        assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
    }
}

/// A change to a TCP header.
type Change<'a> = &'a dyn Fn(&mut [u8]);

#[test]
fn a_handshake_ends_without_a_worker_by_both_syns_numbers() {
    for there in [
        sent(End::A, End::B, true, ACK),
        sent(End::B, End::A, true, ACK),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
    ] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            half_open(&mut node, there, now);
            let program = |node: &Node, packet: Sent, change: Change<'_>| {
                let mut frame = packet.frame();
                change(&mut frame[if packet.v4 { 34 } else { 54 }..]);
                node.program(packet.from, packet.to, &frame, 0)
            };
            let data = Sent { payload: 1, ..there };
            let there = Sent { payload: 0, ..there };
            let others: [(&str, Sent, Change<'_>); 7] = [
                ("with data", data, &|_| {}),
                ("of the answering end", there.back(), &|_| {}),
                ("another sequence number", there, &|tcp| tcp[7] ^= 1),
                ("another acknowledgement", there, &|tcp| tcp[11] ^= 1),
                ("neither", there, &|tcp| tcp[4..12].fill(0)),
                ("SYN", Sent { flags: SYN, ..there }, &|_| {}),
                ("RST", Sent { flags: ACK | 4, ..there }, &|_| {}),
            ];
            for (what, packet, change) in others {
                assert!(program(&node, packet, change).is_none(), "{what}: {there:?}");
                assert_eq!(listed(&node, now).0, "SYN_RECV", "{what}: {there:?}");
            }
            assert!(program(&node, there, &|_| {}).is_some(), "{there:?}");
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
            assert!(program(&node, there.back(), &|_| {}).is_some(), "{there:?}");
            assert!(program(&node, there, &|tcp| tcp[7] ^= 1).is_some(), "{there:?}: no longer of the handshake");
            let table = node.pipeline.connections();
            let swept =
                table.sweep(&mut Default::default(), usize::MAX, now.plus(Duration::from_secs(3600)), Epoch(1)).expired;
            assert_eq!(swept, 0, "{there:?}: as long as an established one");
            let kept = node.next_epoch_keeping(true);
            assert_eq!(program(&node, there, &|_| {}).is_some(), kept == 1, "{there:?}");
            let (verdict, _) = node.worker(there.back().from, &there.back().frame(), now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
        });
    }
}

#[test]
fn a_reset_closes_a_handshake_that_a_program_completed() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (flow, with_data, expected) in [(1, false, "CLOSE"), (2, true, "RESETTING")] {
            let there = Sent { payload: 0, flow, ..sent(End::A, End::B, true, ACK) };
            half_open(&mut node, there, now);
            assert!(node.program(End::A, End::B, &there.frame(), 0).is_some());
            if with_data {
                // Workers do not see how much it was.
                assert!(node.program(End::A, End::B, &Sent { payload: 9, ..there }.frame(), 0).is_some());
            }
            let reset = Sent { flags: ACK | 4, ..there }.frame();
            assert_eq!(node.worker(End::A, &reset, now).0, Verdict::Forward(B));
            assert_eq!(listed(&node, now).0, expected);
            node.pipeline.connections().remove_addresses(&[address(End::A, true).into()]);
        }
    });
}

#[test]
fn a_close_without_a_worker_counts_for_workers() {
    for there in [sent(End::A, End::B, true, ACK), Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) }] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            open(&mut node, there, now);
            let by_program = |node: &Node, packet: Sent, flags| {
                let frame = Sent { flags, ..packet }.frame();
                assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}: {flags:x}");
            };
            by_program(&node, there, FIN | ACK);
            assert_eq!(listed(&node, now).0, "CLOSE_WAIT", "{there:?}");
            // Half closed: the other end goes on sending, and the first one acknowledges.
            by_program(&node, there.back(), ACK);
            by_program(&node, there, ACK);
            assert_eq!(listed(&node, now).0, "CLOSE_WAIT", "{there:?}");
            by_program(&node, there.back(), FIN | ACK);
            by_program(&node, there, ACK);
            let (state, left) = listed(&node, now);
            assert!(state == "TIME_WAIT" && left <= Duration::from_secs(121), "{there:?}: {state}, {left:?}");
            let sweep = |node: &Node, after: u64| {
                let table = node.pipeline.connections();
                table.sweep(&mut Default::default(), usize::MAX, now.plus(Duration::from_secs(after)), Epoch(1)).expired
            };
            assert_eq!(sweep(&node, 110), 0, "{there:?}");
            // A new connection with the same ports is one that nobody has closed.
            open(&mut node, there, now);
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
            assert_eq!(sweep(&node, 130), 0, "{there:?}");
            by_program(&node, there, FIN | ACK);
            by_program(&node, there.back(), FIN | ACK);
            assert!(sweep(&node, 130) > 0, "{there:?}");
        });
    }
}

#[test]
fn a_worker_goes_on_where_a_program_has_forwarded_a_fin() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        let back = there.back();
        open(&mut node, there, now);
        let fin = Sent { flags: FIN | ACK, ..there }.frame();
        assert!(node.program(End::A, End::B, &fin, 0).is_some());
        // Policy changes, so that the next packets meet a worker.
        node.next_epoch(true);
        let steps = [(back, FIN | ACK, "LAST_ACK"), (there, ACK, "TIME_WAIT")];
        for (number, (packet, flags, state)) in steps.into_iter().enumerate() {
            let mut frame = Sent { flags, payload: 0, ..packet }.frame();
            // After ten bytes and a FIN of one side, and after a FIN of the other.
            let (seq, ack): (u32, u32) = if number == 0 { (1000, 1011) } else { (1011, 1001) };
            frame[38..42].copy_from_slice(&seq.to_be_bytes());
            frame[42..46].copy_from_slice(&ack.to_be_bytes());
            let verdict = node.worker(packet.from, &frame, now).0;
            assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
            assert_eq!(listed(&node, now).0, state);
        }
    });
}

/// A segment of a handshake by a program, with the numbers that it must have but for this change of its TCP header.
fn by_program(node: &Node, packet: Sent, from_opener: bool, change: Change<'_>) -> Option<(u32, Vec<u8>)> {
    let mut frame = in_step(packet.frame(), packet.tcp, packet.flags, from_opener);
    change(&mut frame[if packet.v4 { 34 } else { 54 }..]);
    node.program(packet.from, packet.to, &frame, 0)
}

/// Ends of connections, of which a worker knows where the answers go.
fn openers() -> [Sent; 4] {
    [
        sent(End::A, End::B, true, ACK),
        sent(End::B, End::A, true, ACK),
        sent(End::A, End::Outside, true, ACK),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
    ]
}

#[test]
fn of_a_handshake_only_the_syn_meets_a_worker() {
    for there in openers() {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            let verdict = node.handshake(there, SYN, true, now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
            let answer = Sent { flags: SYN | ACK, payload: 0, ..there.back() };
            let end = Sent { payload: 0, ..there };
            let others: [(&str, Sent, bool, Change<'_>); 10] = [
                ("with data", Sent { payload: 1, ..answer }, false, &|_| {}),
                ("of the opener", Sent { flags: SYN | ACK, ..end }, true, &|_| {}),
                ("more is acknowledged", answer, false, &|tcp| tcp[11] ^= 1),
                ("less is acknowledged", answer, false, &|tcp| tcp[10] ^= 1),
                ("FIN, too", Sent { flags: SYN | ACK | FIN, ..answer }, false, &|_| {}),
                ("RST, too", Sent { flags: SYN | ACK | 4, ..answer }, false, &|_| {}),
                ("SYN alone", Sent { flags: SYN, ..answer }, false, &|_| {}),
                ("ACK alone", Sent { flags: ACK, ..answer }, false, &|_| {}),
                ("RST", Sent { flags: ACK | 4, ..answer }, false, &|_| {}),
                ("the end of the handshake", end, true, &|_| {}),
            ];
            for (what, packet, from_opener, change) in others {
                assert!(by_program(&node, packet, from_opener, change).is_none(), "{what}: {there:?}");
                assert_eq!(listed(&node, now).0, "SYN_SENT", "{what}: {there:?}");
            }
            let frame = in_step(answer.frame(), true, SYN | ACK, false);
            let done = node.program(answer.from, answer.to, &frame, 0).unwrap_or_else(|| panic!("{there:?}"));
            assert_eq!(listed(&node, now).0, "SYN_RECV", "{there:?}");
            // Again it is a worker's, which sends it on with the same bytes.
            assert!(node.program(answer.from, answer.to, &frame, 0).is_none(), "{there:?}");
            let (verdict, by_worker) = node.worker(answer.from, &frame, now);
            assert!(
                matches!(verdict, Verdict::Forward(_)) && by_worker[12..] == done.1[12..],
                "{there:?}: {verdict:?}"
            );
            assert!(by_program(&node, end, true, &|tcp| tcp[11] ^= 1).is_none(), "{there:?}: another acknowledgement");
            assert!(by_program(&node, end, true, &|_| {}).is_some(), "{there:?}");
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
            for packet in [there, there.back()] {
                assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_some(), "{packet:?}");
            }
            let table = node.pipeline.connections();
            let hour = now.plus(Duration::from_secs(3600));
            assert_eq!(table.sweep(&mut Default::default(), usize::MAX, hour, Epoch(1)).expired, 0, "{there:?}");
            // A worker goes on.
            node.next_epoch(true);
            for packet in [there, there.back()] {
                assert!(matches!(node.worker(packet.from, &packet.frame(), now).0, Verdict::Forward(_)), "{packet:?}");
                assert_eq!(listed(&node, now).0, "ESTABLISHED", "{packet:?}");
            }
        });
    }
}

#[test]
fn only_the_question_of_a_pair_meets_a_worker() {
    for there in openers().map(|there| Sent { tcp: false, flags: 0, ..there }) {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            let verdict = node.handshake(there, 0, true, now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
            assert_eq!(listed(&node, now).0, "UNREPLIED", "{there:?}");
            let (answer, frame) = (there.back(), there.back().frame());
            let done = node.program(answer.from, answer.to, &frame, 0).unwrap_or_else(|| panic!("{there:?}"));
            let (state, left) = listed(&node, now);
            assert!(state == "REPLIED" && left > Duration::from_secs(100), "{there:?}: {state}, {left:?}");
            assert_alike(&mut node, answer, &frame, &done, now);
            assert_eq!(listed(&node, now).0, "REPLIED", "{there:?}");
        });
    }
}

#[test]
fn what_a_worker_would_not_send_back_alike_is_left_to_it() {
    let tunnel = |node: &mut Node| {
        let (nodes, ports) = ([address(End::Outside, true).into()], [1001]);
        let refused = penstock_dataplane::forward::Encapsulation::refused(ports, nodes, []);
        node.snapshot.forwarding = node.snapshot.forwarding.clone().with_encapsulation(Arc::new(refused));
    };
    let jumbo = |node: &mut Node| {
        let connections = open_table(&node.maps);
        node.pipeline = Pipeline::new(connections, PipelineMode::Full).with_longest(MTU - 1);
    };
    type Prepare<'a> = &'a (dyn Fn(&mut Node) + Sync);
    let cases: [(&str, Prepare<'_>, Sent, bool); 5] = [
        ("a tunnel to a node", &tunnel, sent(End::Outside, End::B, false, 0), false),
        ("no tunnel", &tunnel, Sent { flow: 2, ..sent(End::Outside, End::B, false, 0) }, true),
        ("TCP is told of a frame's length", &jumbo, sent(End::A, End::B, true, SYN), false),
        ("UDP is not", &jumbo, sent(End::A, End::B, false, 0), true),
        ("another epoch", &|node| node.next_epoch(true), sent(End::A, End::B, true, SYN), true),
    ];
    for (what, prepare, there, passes) in cases {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            prepare(&mut node);
            let verdict = node.handshake(there, SYN, true, now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{what}: {verdict:?}");
            let flags = if there.tcp { SYN | ACK } else { 0 };
            let answer = Sent { flags, payload: 0, ..there.back() };
            assert_eq!(by_program(&node, answer, false, &|_| {}).is_some(), passes, "{what}");
        });
    }
}

#[test]
fn an_answer_after_a_change_of_policy_meets_a_worker() {
    for (allowed, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            let there = sent(End::A, End::B, tcp, if tcp { SYN } else { 0 });
            node.handshake(there, SYN, true, now);
            let answer = Sent { flags: if tcp { SYN | ACK } else { 0 }, payload: 0, ..there.back() };
            node.next_epoch(allowed);
            assert!(by_program(&node, answer, false, &|_| {}).is_none(), "{answer:?}");
            let frame = in_step(answer.frame(), tcp, SYN | ACK, false);
            let verdict = node.worker(answer.from, &frame, now).0;
            assert_eq!(matches!(verdict, Verdict::Forward(_)), allowed, "{answer:?}: {verdict:?}");
            if !allowed {
                assert!(by_program(&node, answer, false, &|_| {}).is_none(), "revoked: {answer:?}");
            }
        });
    }
}

//! After a change of policy, and with the next process.

use super::*;

#[test]
fn after_a_change_each_connection_meets_a_worker_once() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let (there, back) = (sent(End::A, End::B, true, ACK), sent(End::B, End::A, true, ACK));
        open(&mut node, there, now);
        node.next_epoch(true);
        for packet in [there, back] {
            assert!(
                node.program(packet.from, packet.to, &packet.frame(), 0).is_none(),
                "evaluated under an older epoch"
            );
            assert!(matches!(node.worker(packet.from, &packet.frame(), now).0, Verdict::Forward(_)));
            assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_some());
        }
        node.next_epoch(false);
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_none());
        assert!(matches!(node.worker(End::A, &there.frame(), now).0, Verdict::Drop(_)));
        for packet in [there, back] {
            assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "revoked");
        }
    });
}

/// The programs read 23 bits of the epoch in an entry, and 16 in its path.
#[test]
fn a_stale_epoch_is_no_hit_across_the_wrap_of_its_numbers() {
    for start in [0x7f_fffd, 0xff_fffd, 0xfffd] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            node.publish(Epoch(start), true);
            let opened = [true, false].map(|v4| Sent { v4, ..sent(End::A, End::B, true, ACK) });
            opened.iter().for_each(|there| open(&mut node, *there, now));
            for _ in 0..5 {
                let epoch = node.snapshot.epoch.next();
                node.publish(epoch, true);
                for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                    let frame = packet.frame();
                    assert!(node.program(packet.from, packet.to, &frame, 0).is_none(), "{epoch:?}: {packet:?}");
                    assert!(matches!(node.worker(packet.from, &frame, now).0, Verdict::Forward(_)));
                    let done = node.program(packet.from, packet.to, &frame, 0);
                    assert_alike(
                        &mut node,
                        packet,
                        &frame,
                        &done.unwrap_or_else(|| panic!("{epoch:?}: {packet:?}")),
                        now,
                    );
                }
            }
            // A connection that stays allowed needs no worker, and one that does not is revoked, across the wrap too.
            forget(&node);
            node.publish(Epoch(start), true);
            opened.iter().for_each(|there| open(&mut node, *there, now));
            for _ in 0..5 {
                assert_eq!(node.next_epoch_keeping(true), opened.len());
                for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                    assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_some(), "{packet:?}");
                }
            }
            node.next_epoch(false);
            for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "{packet:?}");
                assert!(matches!(node.worker(packet.from, &packet.frame(), now).0, Verdict::Drop(_)));
                assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "{packet:?}");
            }
        });
    }
}

#[test]
fn a_connection_in_a_part_once_found_empty_is_kept() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        for _ in 0..2 {
            open(&mut node, there, now);
            assert_eq!(node.next_epoch_keeping(true), 1);
            forget(&node);
            assert_eq!(node.next_epoch_keeping(true), 0);
        }
    });
}

#[test]
fn connections_that_stay_allowed_need_no_worker_after_a_change() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let between = [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)];
        let tcp = between.map(|(a, b)| sent(a, b, true, ACK));
        let opened = [tcp.as_slice(), &[sent(End::A, End::B, false, 0)]].concat();
        opened.iter().for_each(|there| open(&mut node, *there, now));
        assert_eq!(node.next_epoch_keeping(true), opened.len());
        for there in opened.iter().copied() {
            let back = Sent { from: there.to, to: there.from, ..there };
            for packet in [there, back] {
                let frame = packet.frame();
                let done = node.program(packet.from, packet.to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                assert_alike(&mut node, packet, &frame, &done, now);
            }
        }
        assert_eq!(node.next_epoch_keeping(false), 1, "B takes no more connections; A's to the outside stays");
        for there in opened {
            let stays = there.to == End::Outside;
            assert_eq!(node.program(there.from, there.to, &there.frame(), 0).is_some(), stays, "{there:?}");
        }
    });
}

/// Unlike TCP's, which stay where they are.
#[test]
fn datagrams_with_a_changed_path_meet_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let to_pod = Sent { flow: 2, ..sent(End::A, End::B, false, 0) };
        let elsewhere = [sent(End::A, End::Outside, false, 0), sent(End::Outside, End::B, false, 0)];
        for there in elsewhere.into_iter().chain([to_pod]) {
            open(&mut node, there, now);
            assert!(node.program(there.from, there.to, &there.frame(), 0).is_some(), "{there:?}");
        }
        assert_eq!(node.next_epoch_keeping(true), 1);
        for there in elsewhere {
            assert!(node.program(there.from, there.to, &there.frame(), 0).is_none(), "{there:?}");
        }
        assert!(node.program(to_pod.from, to_pod.to, &to_pod.frame(), 0).is_some());
    });
}

#[test]
fn forwarding_goes_on_until_the_next_process() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        open(&mut node, there, now);
        node.next_epoch(true);
        open(&mut node, Sent { flow: 2, ..there }, now);
        let second = Sent { flow: 2, ..there };
        node.pipeline = Pipeline::new(open_table(&node.maps), PipelineMode::Full);
        let table = node.pipeline.connections();
        assert_eq!((table.origin(), table.len(), table.last_epoch()), (&TableOrigin::Found, 2, Epoch(2)));
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_some(), "under the last epoch");
        // Until it has ports and policy, what it publishes does not count.
        node.next_epoch(true);
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_some());
        node.pipeline.connections().take_over();
        assert!(node.pipeline.connections().publish_epoch(node.snapshot.epoch));
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_none());
        for packet in [there, second] {
            assert!(matches!(node.worker(End::A, &packet.frame(), now).0, Verdict::Forward(B)));
            assert!(node.program(End::A, End::B, &packet.frame(), 0).is_some());
        }
    });
}

/// Denied packets are seen by a worker, which has not seen what programs forwarded before them.
#[test]
fn a_connection_that_is_allowed_again_goes_on_from_either_side() {
    let far = |packet: Sent, seq: u32, ack: u32| {
        let mut frame = packet.frame();
        let at = if packet.v4 { 34 } else { 54 };
        frame[at + 4..at + 8].copy_from_slice(&seq.to_be_bytes());
        frame[at + 8..at + 12].copy_from_slice(&ack.to_be_bytes());
        frame
    };
    let opened = [sent(End::A, End::B, true, ACK), Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) }];
    for (there, from_opener) in opened.into_iter().flat_map(|there| [(there, true), (there, false)]) {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            let at = |seconds| now.plus(Duration::from_secs(seconds));
            open(&mut node, there, now);
            // Programs forward what no window of a worker has room for.
            let frames = [
                (there, far(there, 2_000_000_000, 1_000_000_000)),
                (there.back(), far(there.back(), 1_000_000_000, 2_000_000_010)),
            ];
            for (packet, frame) in &frames {
                assert!(node.program(packet.from, packet.to, frame, 0).is_some(), "{packet:?}");
            }
            let (packet, frame) = &frames[usize::from(!from_opener)];
            node.next_epoch(false);
            for seconds in [2, 4, 9] {
                let (verdict, _) = node.worker(packet.from, frame, at(seconds));
                assert_eq!(verdict, Verdict::Drop(DropReason::ConnectionRevoked), "{packet:?}");
            }
            node.next_epoch(true);
            for (packet, frame) in [(packet, frame), (&frames[0].0, &frames[0].1), (&frames[1].0, &frames[1].1)] {
                let (verdict, _) = node.worker(packet.from, frame, at(15));
                assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
                assert!(node.program(packet.from, packet.to, frame, 0).is_some(), "{packet:?}");
            }
        });
    }
}

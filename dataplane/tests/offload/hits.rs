//! Which packets of a connection pass without a worker, and with which bytes.

use super::*;

#[test]
fn established_packets_pass_without_a_worker_both_ways() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (a, b) in [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)] {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..sent(a, b, tcp, ACK) };
                assert!(node.program(a, b, &there.frame(), 0).is_none(), "{there:?}: not open yet");
                open(&mut node, there, now);
                for (from, to) in [(a, b), (b, a)] {
                    let packet = Sent { from, to, ..there };
                    let frame = packet.frame();
                    let done = node.program(from, to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                    assert_alike(&mut node, packet, &frame, &done, now);
                }
            }
        }
    });
}

#[test]
fn between_neighbours_on_a_bridge_no_hop_is_spent() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let mut check = |bridges: [u32; 2], v4: bool, to: [u8; 6], is_bridged: bool| {
            node.bridge(bridges);
            for ttl in [64, 2, 1] {
                forget(&node);
                let opened = Sent { v4, ..sent(End::A, End::B, true, ACK) };
                open(&mut node, opened, now);
                let packet = Sent { ttl, ..opened };
                let mut frame = packet.frame();
                frame[..6].copy_from_slice(&to);
                let what = format!("{bridges:?}, to {to:x?}: {packet:?}");
                let Some(done) = node.program(End::A, End::B, &frame, 0) else {
                    assert!(ttl == 1 && !is_bridged, "{what}");
                    let expired = Verdict::Drop(DropReason::TtlExpired);
                    assert_eq!(node.worker(End::A, &frame, now).0, expired, "{what}");
                    continue;
                };
                assert_eq!(done.1[if v4 { 22 } else { 21 }], if is_bridged { ttl } else { ttl - 1 }, "{what}");
                assert_alike(&mut node, packet, &frame, &done, now);
            }
        };
        for v4 in [true, false] {
            for (bridges, is_one) in [([5, 5], true), ([5, 6], false), ([5, 0], false), ([0, 0], false)] {
                check(bridges, v4, pod_mac(B), is_one);
                check(bridges, v4, NODE_MAC, false);
            }
        }
    });
}

#[test]
fn only_a_captured_pods_packets_all_go_to_workers() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let ways = [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)];
        let ways: Vec<(End, End)> = ways.into_iter().flat_map(|(a, b)| [(a, b), (b, a)]).collect();
        ways.iter().step_by(2).for_each(|&(a, b)| open(&mut node, sent(a, b, true, ACK), now));
        let forwarded = |node: &mut Node| -> Vec<bool> {
            ways.iter()
                .map(|&(from, to)| node.program(from, to, &sent(from, to, true, ACK).frame(), 0).is_some())
                .collect()
        };
        assert_eq!(forwarded(&mut node), [true; 6]);
        node.veths[0].set_captured(true).unwrap();
        // A's packets and those to it; not those between B and the node.
        let of_others = [false, false, false, false, true, true];
        assert_eq!(forwarded(&mut node), of_others);
        node.veths[0].serve(&served(A, 0)).unwrap();
        assert_eq!(forwarded(&mut node), of_others, "also once the pod is served anew");
        node.veths[1].set_captured(true).unwrap();
        assert_eq!(forwarded(&mut node), [false; 6]);
        node.veths.iter_mut().for_each(|veth| veth.set_captured(false).unwrap());
        assert_eq!(forwarded(&mut node), [true; 6], "and no longer");
    });
}

#[test]
fn what_needs_a_worker_is_left_to_it() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let base = sent(End::A, End::B, true, ACK);
        open(&mut node, base, now);
        let long = Sent { payload: usize::from(MTU) - 40, ..base };
        let cases: [(&str, Sent, bool); 9] = [
            ("a segment", base, true),
            ("as long as the MTU", long, true),
            ("longer than the MTU", Sent { payload: long.payload + 1, ..base }, false),
            ("its last hop", Sent { ttl: 1, ..base }, false),
            ("SYN", Sent { flags: SYN, ..base }, false),
            ("RST", Sent { flags: ACK | 4, ..base }, false),
            ("FIN without ACK", Sent { flags: FIN, ..base }, false),
            ("another flow", Sent { flow: 2, ..base }, false),
            ("FIN", Sent { flags: FIN | ACK, ..base }, true),
        ];
        for (what, packet, passes) in cases {
            assert_eq!(node.program(End::A, End::B, &packet.frame(), 0).is_some(), passes, "{what}");
        }
        // A long TCP segment is measured by what it becomes.
        let large = Sent { payload: 3000, ..base }.frame();
        assert!(node.program(End::A, End::B, &large, u32::from(MTU) - 40).is_some());
        assert!(node.program(End::A, End::B, &large, u32::from(MTU) - 39).is_none());
        // The same packet from another pod, and one with another pod's MACs towards the node's stack.
        let tried = node.programs.try_frame(TriedSender::Pod, node.interface(End::B), &base.frame(), 0).unwrap();
        assert_eq!(tried.frame[..2], TO_WORKER, "a forged source is a worker's to drop");
        let out = sent(End::A, End::Outside, true, ACK);
        open(&mut node, out, now);
        assert!(node.program(End::A, End::Outside, &out.frame(), 0).is_some());
        for at in [0, 6] {
            let mut frame = out.frame();
            frame[at + 5] ^= 1;
            assert!(node.program(End::A, End::Outside, &frame, 0).is_none(), "byte {at}");
        }
    });
}

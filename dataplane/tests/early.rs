//! Fragments that come before their first, as a worker treats them: held, and tried again.

use std::sync::Arc;

use penstock_dataplane::conntrack::{DatagramKey, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::parse;
use penstock_dataplane::pipeline::{BATCH, DropReason, EarlyFragments, Frames, MemoryFrames, StackSender, Verdict};
use penstock_dataplane::policy::{EndpointPolicy, PeerSpec, PortSpec, RuleName, RuleSpec, RuleTable};

use crate::via_host::{A, A_IPS, B, B_IPS, HOST, NODE_IPS, Node, OfStack, masquerading, udp};

/// The policy of a pod that policy selects, with a rule for everything or without one.
fn isolated(is_allowed: bool) -> EndpointPolicy {
    let every =
        RuleSpec { name: RuleName::new("test/policy", "every"), peers: PeerSpec::Every, ports: PortSpec::Every };
    EndpointPolicy::Isolated(Arc::new(RuleTable::new(if is_allowed { std::slice::from_ref(&every) } else { &[] }, [])))
}

/// `a` may send everything or nothing, and `b` admits everything or nothing.
fn published(mut node: Node, a_may_send: bool, b_admits: bool) -> Node {
    node.publish_policies(isolated(a_may_send), isolated(b_admits));
    node
}

/// A node whose worker holds fragments; what it decides of each frame, by the frame's first byte, in the order of decisions.
struct Worker {
    node: Node,
    held: EarlyFragments<(PortId, Vec<u8>)>,
    sender: StackSender,
    now: u64,
    decided: Vec<(u8, Verdict)>,
}

impl Worker {
    fn new(node: Node) -> Self {
        let held = EarlyFragments::new(EarlyFragments::<(PortId, Vec<u8>)>::MOST);
        Self { node, held, sender: StackSender::Unknown, now: 1_000_000, decided: Vec::new() }
    }

    fn evaluate(&mut self, port: PortId, frame: &[u8], holds: bool) -> Verdict {
        let mut frames = OfStack(MemoryFrames::new(), self.sender);
        frames.0.push(frame.to_vec()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let Node { pipeline, snapshot } = &mut self.node;
        pipeline.hold_early(holds);
        let now = Timestamp::from_millis(self.now);
        pipeline.process_batch(snapshot, now, port, &mut frames, &mut verdicts, &mut ());
        if verdicts[0] == Verdict::Early {
            assert_eq!(frames.bytes(0), frame, "it is held as it came");
            assert_eq!(pipeline.replies().take().count(), 0, "no reply is sent");
        }
        verdicts[0]
    }

    fn receive(&mut self, port: PortId, frame: &[u8]) {
        let verdict = self.evaluate(port, frame, true);
        if verdict != Verdict::Early {
            self.decided.push((frame[0], verdict));
        } else {
            let packet = parse(frame).unwrap();
            let key = DatagramKey::of(&packet, port).unwrap();
            let holder = EarlyFragments::<()>::holder(&self.node.snapshot, port, self.sender, &packet);
            assert_eq!(holder, A, "on the share of the pod that sent it");
            let item = (port, frame.to_vec());
            let evicted = self.held.hold(key, holder, Timestamp::from_millis(self.now), item);
            evicted.into_iter().for_each(|(port, frame)| self.try_again(port, &frame));
        }
        self.try_due();
    }

    fn try_due(&mut self) {
        let (mut from, now) = (0, Timestamp::from_millis(self.now));
        while let Some((port, frame)) = {
            let fragments = self.node.pipeline.connections().fragments();
            self.held.take_due(&mut from, fragments, now)
        } {
            self.try_again(port, &frame);
        }
    }

    fn try_again(&mut self, port: PortId, frame: &[u8]) {
        let verdict = self.evaluate(port, frame, false);
        self.decided.push((frame[0], verdict));
    }

    /// The decisions on these, received in this order.
    fn of(mut self, port: PortId, frames: &[&[u8]]) -> Vec<(u8, Verdict)> {
        frames.iter().for_each(|frame| self.receive(port, frame));
        self.decided
    }
}

/// The bytes of a datagram from one on up to another as a fragment, with this first byte of the frame.
fn fragment(mark: u8, datagram: &[u8], (from, to): (usize, usize)) -> Vec<u8> {
    let is_v4 = datagram[12] == 8;
    let (headers, payload) = datagram.split_at(if is_v4 { 34 } else { 54 });
    let (to, more) = (to.min(payload.len()), to < payload.len());
    let mut frame = headers.to_vec();
    frame[0] = mark;
    let word = from as u16 | u16::from(more);
    if is_v4 {
        frame[16..18].copy_from_slice(&((20 + to - from) as u16).to_be_bytes());
        frame[18..20].copy_from_slice(&[0, 77]);
        frame[20..22].copy_from_slice(&((from as u16 / 8) | (u16::from(more) << 13)).to_be_bytes());
        let header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
    } else {
        frame[18..20].copy_from_slice(&((8 + to - from) as u16).to_be_bytes());
        frame[20] = 44;
        let [a, b] = word.to_be_bytes();
        frame.extend([17, 0, a, b, 0, 0, 0, 77]);
    }
    frame.extend(&payload[from..to]);
    frame
}

/// A datagram's first, second and last fragment, with first bytes 2, 4 and 6.
fn fragments(from: &str, to: &str) -> [Vec<u8>; 3] {
    let whole = udp((from, 40_000), (to, 53), 1500);
    [(2, (0, 512)), (4, (512, 1024)), (6, (1024, 4096))].map(|(mark, range)| fragment(mark, &whole, range))
}

#[test]
fn early_fragments_pass_once_their_first_has_passed() {
    for v6 in [0, 1] {
        for is_allowed in [true, false] {
            let mut worker = Worker::new(published(Node::new(), true, is_allowed));
            let [first, second, last] = fragments(A_IPS[v6], B_IPS[v6]);
            if is_allowed {
                let passes = |mark| (mark, Verdict::Forward(B));
                let decided = worker.of(A, &[&last, &second, &first, &last]);
                assert_eq!(decided, [passes(2), passes(6), passes(4), passes(6)], "behind the first, in their order");
            } else {
                [&last, &first, &second].iter().for_each(|frame| worker.receive(A, frame));
                assert_eq!(worker.decided, [(2, Verdict::Drop(DropReason::IngressDenied))]);
                worker.now += 1000;
                worker.try_due();
                let never = |mark| (mark, Verdict::Drop(DropReason::Fragment));
                assert_eq!(worker.decided[1..], [never(6), never(4)]);
            }
        }
    }
}

#[test]
fn an_early_fragment_without_a_first_is_dropped_once() {
    for v6 in [0, 1] {
        let mut worker = Worker::new(published(Node::new(), true, true));
        let [.., last] = fragments(A_IPS[v6], B_IPS[v6]);
        worker.receive(A, &last);
        worker.now += 999;
        worker.try_due();
        assert_eq!(worker.decided, []);
        worker.now += 1;
        worker.try_due();
        worker.now += 1000;
        worker.try_due();
        assert_eq!(worker.decided, [(6, Verdict::Drop(DropReason::Fragment))]);
    }
}

#[test]
fn an_early_fragment_that_overlaps_its_first_is_dropped() {
    for v6 in [0, 1] {
        let whole = udp((A_IPS[v6], 40_000), (B_IPS[v6], 53), 1500);
        let [over, first] = [(4, (8, 4096)), (2, (0, 512))].map(|(mark, range)| fragment(mark, &whole, range));
        let worker = Worker::new(published(Node::new(), true, true));
        let decided = worker.of(A, &[&over, &first, &over]);
        let dropped = (4, Verdict::Drop(DropReason::Fragment));
        assert_eq!(decided, [(2, Verdict::Forward(B)), dropped, dropped], "then, and what comes later");
    }
}

#[test]
fn early_fragments_that_leave_by_an_uplink_wait_for_their_first() {
    let elsewhere = ["203.0.113.99", "2001:db8::99"];
    for v6 in [0, 1] {
        for is_allowed in [true, false] {
            let mut worker = Worker::new(published(masquerading(), is_allowed, true));
            worker.sender = StackSender::Leaving { port: A.0, uplink: 7 };
            let [first, second, last] = fragments(NODE_IPS[v6], elsewhere[v6]);
            let decided = worker.of(HOST, &[&last, &second, &first]);
            let passes = |mark| (mark, Verdict::Forward(HOST));
            let expected = match is_allowed {
                true => vec![passes(2), passes(6), passes(4)],
                false => vec![(2, Verdict::Drop(DropReason::EgressDenied))],
            };
            assert_eq!(decided, expected);
        }
    }
}

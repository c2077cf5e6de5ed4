//! Random histories of connections, changes of policy and mutated packets.

use penstock_dataplane::packet::parse;
use proptest::prelude::*;
use proptest::test_runner::{Config as RunnerConfig, TestRunner};

use super::entry::{Fields, Words};
use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// The packets that open the connection of this one: at workers alone, or where they meet a program, which may forward them.
    Open(Sent, bool),
    /// The same twice by programs, and between the two a FIN of both ends.
    Reopen(Sent),
    /// This packet with so many mutated bytes (position, and what is changed in it).
    Packet(Sent, Vec<(u16, u8)>),
    /// This packet with the numbers of a handshake.
    Handshake(Sent),
    /// A long TCP segment, that becomes segments with so many bytes each.
    Long(Sent, u16),
    /// Policy that allows connections to B or not, and whether connections that stay allowed get its verdict at once.
    Publish(bool, bool),
}

fn any_ends() -> impl Strategy<Value = (End, End)> {
    prop::sample::select(vec![
        (End::A, End::B),
        (End::B, End::A),
        (End::A, End::Outside),
        (End::Outside, End::A),
        (End::Outside, End::B),
        (End::B, End::Outside),
    ])
}

fn any_packet() -> impl Strategy<Value = Sent> {
    let flags = prop_oneof![8 => Just(ACK), 2 => Just(SYN), 2 => Just(SYN | ACK), 1 => Just(ACK | 1), 1 => 0..64_u8];
    let ttl = prop_oneof![8 => Just(64_u8), 1 => Just(1), 1 => Just(2), 1 => Just(0)];
    let payload = prop_oneof![8 => 0..64_usize, 1 => Just(1355), 1 => 1340..1380_usize];
    (any_ends(), any::<bool>(), any::<bool>(), 0..3_u8, flags, ttl, payload).prop_map(
        |((from, to), v4, tcp, flow, flags, ttl, payload)| Sent { from, to, v4, tcp, flow, flags, ttl, payload },
    )
}

fn any_step() -> impl Strategy<Value = Step> {
    let mutation = (0..80_u16, 1..=255_u8);
    let long = (any_packet(), 1..3000_usize, prop_oneof![1..1500_u16, 1335..1365_u16]);
    prop_oneof![
        4 => (any_packet(), any::<bool>()).prop_map(|(packet, by_programs)| Step::Open(packet, by_programs)),
        2 => any_packet().prop_map(Step::Reopen),
        8 => any_packet().prop_map(Step::Handshake),
        20 => any_packet().prop_map(|packet| Step::Packet(packet, Vec::new())),
        8 => (any_packet(), prop::collection::vec(mutation, 1..3)).prop_map(|(packet, at)| Step::Packet(packet, at)),
        6 => long.prop_map(|(packet, payload, size)| Step::Long(Sent { tcp: true, flags: ACK, payload, ..packet }, size)),
        1 => (prop::bool::weighted(0.7), any::<bool>()).prop_map(|(allowed, keeps)| Step::Publish(allowed, keeps)),
    ]
}

/// Each connection as workers know it. Two seconds make a stream of datagrams: the machine may be that slow.
fn known(node: &Node) -> Vec<String> {
    let listed = node.pipeline.connections().iter(Timestamp::now());
    let name = |state: String| if state == "ASSURED" { "REPLIED".to_owned() } else { state };
    let mut known: Vec<String> =
        listed.map(|it| format!("{:?} {} {}", it.original, it.via_host, name(it.state.to_string()))).collect();
    known.sort();
    known
}

/// How many packets of a history were forwarded.
#[derive(Default)]
struct Forwarded {
    all: u32,
    /// Answers to a SYN.
    answers: u32,
    /// Those that opened a connection.
    opened: u32,
    /// In the entry of one that had ended.
    in_place: u32,
    long: u32,
}

/// Gives a packet to the program that it meets, and where that leaves it to a worker, to one. An answer to a SYN, and a datagram, must be
/// forwarded only where a worker would do so that knows nothing of the program, with the same bytes, and lead to the same state.
fn meet(node: &mut Node, words: &Words, packet: Sent, frame: &[u8], forwarded: &mut Forwarded) {
    let now = Timestamp::now();
    let slots = words.slots();
    let save = |slots: &[usize]| slots.iter().map(|&slot| (slot, words.read(slot))).collect::<Vec<_>>();
    let restore = |saved: &[(usize, Fields)]| saved.iter().for_each(|(slot, fields)| words.write(*slot, fields));
    let before = save(&slots);
    let Some(done) = node.program(packet.from, packet.to, frame, 0) else {
        node.worker(packet.from, frame, now);
        return;
    };
    forwarded.all += 1;
    let generation = |slot: &usize| words.read(*slot).generation();
    let is_in_place = before.iter().any(|(slot, fields)| fields.generation() != generation(slot));
    if words.slots().len() > slots.len() || is_in_place {
        forwarded.opened += 1;
        forwarded.in_place += u32::from(is_in_place);
        return open_both_ways(node, words, packet, frame, &done);
    }
    // The frame may have other flags than the packet that it was made of.
    let has_syn = || frame[if packet.v4 { 34 } else { 54 } + 13] & SYN != 0;
    let answers = packet.tcp && has_syn() && known(node).iter().any(|it| it.ends_with("SYN_RECV"));
    if packet.tcp && !answers {
        assert_alike(node, packet, frame, &done, now);
        return;
    }
    forwarded.answers += u32::from(packet.tcp);
    let (by_program, after) = (known(node), save(&slots));
    restore(&before);
    assert_alike(node, packet, frame, &done, now);
    assert_eq!(known(node), by_program, "{packet:?}");
    restore(&after);
}

/// A program has opened a connection: so would a worker, with the same bytes and the same entry, but for the opener's window. The one or the
/// other stays.
fn open_both_ways(node: &mut Node, words: &Words, packet: Sent, frame: &[u8], done: &(u32, Vec<u8>)) {
    let now = Timestamp::now();
    let flow = parse(frame).unwrap().flow;
    let remove = |node: &Node| {
        let table = node.pipeline.connections();
        assert!(table.find(&table.prepare(&flow), now).unwrap().remove(), "{packet:?}");
    };
    let entries = |node: &Node| {
        let find = |slot: &usize| words.read(*slot).lasting();
        (known(node), words.slots().iter().map(find).filter(|entry| entry.is_of(&flow)).collect::<Vec<_>>())
    };
    let by_program = entries(node);
    remove(node);
    assert_alike(node, packet, frame, done, now);
    let (known, mut by_worker) = entries(node);
    if packet.tcp {
        by_worker.iter_mut().for_each(|entry| entry.widen(usize::from(flow.src > flow.dst)));
    }
    assert_eq!(by_program, (known, by_worker), "{packet:?}");
    // There may be no credit for another one.
    if packet.flow == 1 {
        remove(node);
        if node.program(packet.from, packet.to, frame, 0).is_none() {
            node.worker(packet.from, frame, now);
        }
    }
}

#[test]
fn the_kernel_forwards_only_what_a_worker_would_and_alike() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, mut forwarded) = (Words::of(&node), Forwarded::default());
        let mut runner =
            TestRunner::new(RunnerConfig { cases: 200, failure_persistence: None, ..RunnerConfig::default() });
        let steps = prop::collection::vec(any_step(), 1..200);
        let cell = std::cell::RefCell::new((&mut node, &mut forwarded));
        runner
            .run(&steps, |steps| {
                let (node, forwarded) = &mut *cell.borrow_mut();
                forget(node);
                node.next_epoch(true);
                node.repeat();
                for step in steps {
                    take(node, &words, step, forwarded);
                    node.hear();
                }
                Ok(())
            })
            .unwrap();
        let Forwarded { all, answers, opened, in_place, long } = forwarded;
        assert!(all > 200, "only {all} packets of all passed without a worker");
        assert!(answers > 50, "only {answers} answers to a SYN passed without a worker");
        assert!(opened > 20, "only {opened} connections were opened without a worker");
        assert!(in_place > 5, "only {in_place} of them in place of one that had ended");
        assert!(long > 20, "only {long} long segments passed without a worker");
    });
}

fn take(node: &mut Node, words: &Words, step: Step, forwarded: &mut Forwarded) {
    let now = Timestamp::now();
    match step {
        Step::Publish(allowed, true) => _ = node.next_epoch_keeping(allowed),
        Step::Publish(allowed, false) => node.next_epoch(allowed),
        Step::Long(packet, size) => forwarded.long += u32::from(assert_segmented_alike(node, packet, size, now)),
        Step::Open(packet, by_programs) => {
            let (there, back) = (Sent { ttl: 64, ..packet }, Sent { ttl: 64, ..packet }.back());
            // Policy, or the connection's state before, may forbid it.
            for (packet, flags, from_opener) in
                [(there, SYN, true), (back, SYN | ACK, false), (there, ACK, true), (back, ACK, false)]
            {
                if by_programs {
                    let packet = Sent { flags: if packet.tcp { flags } else { 0 }, payload: 0, ..packet };
                    let frame = in_step(packet.frame(), packet.tcp, flags, from_opener);
                    meet(node, words, packet, &frame, forwarded);
                } else {
                    node.handshake(packet, flags, from_opener, now);
                }
            }
        }
        Step::Reopen(packet) => {
            take(node, words, Step::Open(packet, true), forwarded);
            for (packet, from_opener) in [(packet, true), (packet.back(), false)] {
                let packet = Sent { ttl: 64, flags: FIN | ACK, payload: 0, ..packet };
                let frame = in_step(packet.frame(), packet.tcp, packet.flags, from_opener);
                // By workers, an acknowledgement of each FIN would have to follow.
                node.program(packet.from, packet.to, &frame, 0);
            }
            take(node, words, Step::Open(packet, true), forwarded);
        }
        Step::Handshake(packet) => {
            let frame = in_step(packet.frame(), packet.tcp, packet.flags, false);
            meet(node, words, packet, &frame, forwarded);
        }
        Step::Packet(packet, mutations) => {
            let mut frame = packet.frame();
            for (at, change) in mutations {
                if let Some(byte) = frame.get_mut(usize::from(at)) {
                    *byte ^= change;
                }
            }
            meet(node, words, packet, &frame, forwarded);
        }
    }
}

//! Random histories of connections, changes of policy and mutated packets.

use proptest::prelude::*;
use proptest::test_runner::{Config as RunnerConfig, TestRunner};

use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// The packets that open the connection of this one.
    Open(Sent),
    /// This packet with so many mutated bytes (position, and what is changed in it).
    Packet(Sent, Vec<(u16, u8)>),
    /// A long TCP segment, that becomes segments with so many bytes each.
    Long(Sent, u16),
    /// Policy that allows connections to B or not, and whether connections that stay allowed get its verdict at once.
    Publish(bool, bool),
}

fn any_ends() -> impl Strategy<Value = (End, End, Way)> {
    let direct = [
        (End::A, End::B),
        (End::B, End::A),
        (End::A, End::Outside),
        (End::Outside, End::A),
        (End::Outside, End::B),
        (End::B, End::Outside),
    ];
    let direct = direct.map(|(from, to)| (from, to, Way::Direct));
    let translated = CLIENTS.into_iter().flat_map(|(client, backend)| {
        let there = to_service(client, backend, true, ACK);
        [there, there.back()].map(|packet| (packet.from, packet.to, packet.way))
    });
    prop::sample::select(direct.into_iter().chain(translated).collect::<Vec<_>>())
}

fn any_packet() -> impl Strategy<Value = Sent> {
    let flags = prop_oneof![8 => Just(ACK), 2 => Just(SYN), 2 => Just(SYN | ACK), 1 => Just(ACK | 1), 1 => 0..64_u8];
    let ttl = prop_oneof![8 => Just(64_u8), 1 => Just(1), 1 => Just(2), 1 => Just(0)];
    let payload = prop_oneof![8 => 0..64_usize, 1 => Just(1355), 1 => 1340..1380_usize];
    (any_ends(), any::<bool>(), any::<bool>(), 0..3_u8, flags, ttl, payload).prop_map(
        |((from, to, way), v4, tcp, flow, flags, ttl, payload)| Sent {
            from,
            to,
            way,
            v4,
            tcp,
            flow,
            flags,
            ttl,
            payload,
        },
    )
}

fn any_step() -> impl Strategy<Value = Step> {
    let mutation = (0..80_u16, 1..=255_u8);
    let long = (any_packet(), 1..3000_usize, prop_oneof![1..1500_u16, 1335..1365_u16]);
    prop_oneof![
        4 => any_packet().prop_map(Step::Open),
        20 => any_packet().prop_map(|packet| Step::Packet(packet, Vec::new())),
        8 => (any_packet(), prop::collection::vec(mutation, 1..3)).prop_map(|(packet, at)| Step::Packet(packet, at)),
        6 => long.prop_map(|(packet, payload, size)| Step::Long(Sent { tcp: true, flags: ACK, payload, ..packet }, size)),
        1 => (prop::bool::weighted(0.7), any::<bool>()).prop_map(|(allowed, keeps)| Step::Publish(allowed, keeps)),
    ]
}

#[test]
fn the_kernel_forwards_only_what_a_worker_would_forward_and_with_the_same_bytes() {
    in_namespace(|| {
        let mut node = Node::new();
        let (mut forwarded, mut translated, mut long) = (0_u32, 0_u32, 0_u32);
        let mut runner =
            TestRunner::new(RunnerConfig { cases: 200, failure_persistence: None, ..RunnerConfig::default() });
        let steps = prop::collection::vec(any_step(), 1..200);
        let cell = std::cell::RefCell::new((&mut node, &mut forwarded, &mut translated, &mut long));
        runner
            .run(&steps, |steps| {
                let (node, forwarded, translated, long) = &mut *cell.borrow_mut();
                forget(node);
                node.next_epoch(true);
                for step in steps {
                    let now = Timestamp::now();
                    let (packet, mutations) = match step {
                        Step::Publish(allowed, true) => {
                            node.next_epoch_keeping(allowed);
                            continue;
                        }
                        Step::Publish(allowed, false) => {
                            node.next_epoch(allowed);
                            continue;
                        }
                        Step::Long(packet, size) => {
                            **long += u32::from(assert_segmented_alike(node, packet, size, now));
                            continue;
                        }
                        Step::Open(packet) => {
                            let (there, back) = (Sent { ttl: 64, ..packet }, Sent { ttl: 64, ..packet }.back());
                            // Policy, or the connection's state before, may forbid it.
                            for (packet, flags, from_opener) in
                                [(there, SYN, true), (back, SYN | ACK, false), (there, ACK, true), (back, ACK, false)]
                            {
                                node.handshake(packet, flags, from_opener, now);
                            }
                            continue;
                        }
                        Step::Packet(packet, mutations) => (packet, mutations),
                    };
                    let mut frame = packet.frame();
                    for (at, change) in mutations {
                        if let Some(byte) = frame.get_mut(usize::from(at)) {
                            *byte ^= change;
                        }
                    }
                    match node.program(packet.from, packet.to, &frame, 0) {
                        Some(done) => {
                            assert_alike(node, packet, &frame, &done, now);
                            **forwarded += 1;
                            **translated += u32::from(done.1[26..] != frame[26..]);
                        }
                        None => _ = node.worker(packet.from, &frame, now),
                    }
                }
                Ok(())
            })
            .unwrap();
        assert!(forwarded > 200, "only {forwarded} packets of all passed without a worker");
        assert!(translated > 100, "only {translated} packets of {forwarded} were translated");
        assert!(long > 20, "only {long} long segments passed without a worker");
    });
}

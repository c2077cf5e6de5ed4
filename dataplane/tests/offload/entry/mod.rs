//! The parts that programs read of an entry of the table and of its path: a packet passes only if each part allows it.

mod races;
mod words;

use super::*;
pub(crate) use words::*;

/// A change of what the programs read. `direction`: that of the packet, 1 from the higher end.
type Change = fn(&mut Fields, usize);

/// For each connection, whether packets pass after this change.
const OF_ANY: &[(&str, Change, bool)] = &[
    ("as it is", |_, _| (), true),
    ("tentative", |of, _| of.entry[0] |= TENTATIVE, false),
    ("revoked", |of, _| of.entry[0] |= REVOKED, false),
    ("of another generation", |of, _| of.entry[0] ^= 1 << GENERATION_AT, true),
    ("free", |of, _| of.set_state(0), false),
    ("claimed", |of, _| of.set_state(CLAIMED), false),
    ("in a state that there is not", |of, _| of.set_state(15), false),
    ("who opened it is kept beside it", |of, _| of.entry[0] |= HAS_OPENER, true),
    ("evaluated under the epoch before", |of, _| of.set_evaluated(u64::from(of.epoch) - 1), false),
    ("evaluated under the next epoch", |of, _| of.set_evaluated(u64::from(of.epoch) + 1), true),
    ("evaluated long ago", |of, _| of.epoch += 0x20_0000, false),
    (
        "never evaluated, and 0 is less behind than ahead",
        |of, _| {
            of.set_evaluated(0);
            of.epoch = 0x60_0000;
        },
        false,
    ),
    ("the epoch has more bits than an entry", |of, _| of.epoch |= 0x80_0000, true),
    ("its path is of the epoch before", |of, _| of.set_path_epoch(u64::from(of.epoch) - 1), false),
    ("its path is of the next epoch", |of, _| of.set_path_epoch(u64::from(of.epoch) + 1), false),
    ("no worker has taken the path", |of, direction| of.path &= !(1 << (TAKEN_AT + direction)), false),
    ("no worker has taken it the other way", |of, direction| of.path &= !(2 << TAKEN_AT >> direction), true),
    ("from another interface", |of, direction| of.path ^= 1 << (END_BITS * direction), false),
    ("another lower address", |of, _| of.entry[1] ^= 1, false),
    ("the other half of it", |of, _| of.entry[2] ^= 1 << 63, false),
    ("another higher address", |of, _| of.entry[3] ^= 1 << 63, false),
    ("the other half of that", |of, _| of.entry[4] ^= 1, false),
    ("another port", |of, _| of.entry[5] ^= 1, false),
    ("another port of the other end", |of, _| of.entry[5] ^= 1 << 31, false),
    ("another protocol", |of, _| of.entry[5] ^= 1 << 39, false),
    ("another owner", |of, _| of.entry[5] ^= 1 << 40, true),
    ("a tick ahead of this CPU's clock", |of, _| of.set_age(-3), true),
    (
        "nearly expired",
        |of, _| {
            of.timeouts = [1000; 5];
            of.set_age(900);
        },
        true,
    ),
    (
        "expired",
        |of, _| {
            (of.timeouts, of.used) = ([1000; 5], [0; 2]);
            of.set_age(1100);
        },
        false,
    ),
    (
        "expired, and used long ago",
        |of, _| {
            (of.timeouts, of.used) = ([1000; 5], [of.tick().wrapping_sub(1100) & TICKS; 2]);
            of.set_age(1100);
        },
        false,
    ),
    (
        "expired at workers, but used in this direction",
        |of, direction| {
            (of.timeouts, of.used) = ([1000; 5], [0; 2]);
            of.used[direction] = of.tick();
            of.set_age(1100);
        },
        true,
    ),
    (
        "expired at workers, but used in the other direction",
        |of, direction| {
            (of.timeouts, of.used) = ([1000; 5], [0; 2]);
            of.used[1 - direction] = of.tick();
            of.set_age(1100);
        },
        true,
    ),
];

/// The same for TCP alone: states, and the timeout of an established connection.
const OF_TCP: &[(&str, Change, bool)] = &[
    ("SYN_SENT", |of, _| of.set_confirmed(2), false),
    ("state 3", |of, _| of.set_confirmed(3), false),
    (
        "SYN_SENT, answered, and the handshake is over",
        |of, _| {
            of.set_confirmed(2);
            of.path |= ANSWERED;
        },
        true,
    ),
    (
        "SYN_SENT, answered, and it is not",
        |of, _| {
            of.set_unconfirmed();
            of.set_state(2);
            of.path |= ANSWERED;
        },
        false,
    ),
    ("SYN_RECEIVED, and the handshake is over", |of, _| of.set_confirmed(4), true),
    ("SYN_RECEIVED, and it is not", |of, _| of.set_unconfirmed(), false),
    ("both ends have closed", |of, _| of.path |= FINISHED, true),
    ("state 6", |of, _| of.set_confirmed(6), false),
    ("state 7", |of, _| of.set_confirmed(7), false),
    ("state 8", |of, _| of.set_confirmed(8), false),
    ("state 9", |of, _| of.set_confirmed(9), false),
    ("state 10", |of, _| of.set_confirmed(10), false),
    (
        "state 10, answered before",
        |of, _| {
            of.set_confirmed(10);
            of.path |= ANSWERED;
        },
        false,
    ),
    ("state 11", |of, _| of.set_confirmed(11), false),
    ("state 12", |of, _| of.set_confirmed(12), false),
    ("state 13", |of, _| of.set_confirmed(13), false),
    ("state 14", |of, _| of.set_confirmed(14), false),
    (
        "within the timeout of an established connection",
        |of, _| {
            of.timeouts = [1000, 10, 10, 10, 10];
            of.set_age(500);
        },
        true,
    ),
    (
        "behind the timeout of an established connection",
        |of, _| {
            (of.timeouts, of.used) = ([10, 1000, 1000, 1000, 1000], [0; 2]);
            of.set_age(500);
        },
        false,
    ),
];

/// The same for UDP: by the opener, and by the other end.
const OF_UDP: &[(&str, Change, [bool; 2])] = &[
    ("not answered", |of, _| of.set_state(2), [true, true]),
    ("answered by a program, and it may become a stream", |of, _| of.set_answered(100), [false, true]),
    ("answered by a program just now", |of, _| of.set_answered(1), [true, true]),
    (
        "answered by a program, expired",
        |of, _| {
            of.set_aged(2, 2);
            of.path |= ANSWERED;
        },
        [false, false],
    ),
    ("answered, and it may become a stream", |of, _| of.set_begun(100), [false, true]),
    ("answered just now", |of, _| of.set_begun(1), [true, true]),
    ("a stream", |of, _| of.set_state(4), [true, true]),
    ("a state of TCP", |of, _| of.set_state(5), [false, false]),
    ("state 6", |of, _| of.set_state(6), [false, false]),
    ("state 14", |of, _| of.set_state(14), [false, false]),
    ("not answered, expired", |of, _| of.set_aged(2, 1), [false, false]),
    ("answered, expired", |of, _| of.set_aged(3, 2), [false, false]),
    ("a stream, expired", |of, _| of.set_aged(4, 3), [false, false]),
    ("not answered, and others' timeouts are over", |of, _| of.set_others_aged(2, 1), [true, true]),
    ("a stream, and others' timeouts are over", |of, _| of.set_others_aged(4, 3), [true, true]),
];

impl Fields {
    /// In this state, after a program has forwarded the end of the handshake.
    fn set_confirmed(&mut self, state: u64) {
        self.set_state(state);
        self.path |= CONFIRMED;
    }

    /// Between the answer to a SYN and the end of the handshake.
    fn set_unconfirmed(&mut self) {
        self.set_state(4);
        self.path &= !CONFIRMED;
    }

    /// An answered datagram whose first one was so many ticks ago.
    fn set_begun(&mut self, ticks: u64) {
        self.set_state(3);
        self.entry[6] = self.tick().wrapping_sub(ticks) & TICKS;
    }

    /// A datagram, so many ticks ago, whose answer a program has forwarded.
    fn set_answered(&mut self, ticks: u64) {
        self.set_begun(ticks);
        self.set_state(2);
        self.path |= ANSWERED;
    }

    /// In this state, older than its timeout alone.
    fn set_aged(&mut self, state: u64, kind: usize) {
        self.set_begun(1);
        self.set_state(state);
        (self.timeouts, self.used) = ([1000; 5], [0; 2]);
        self.timeouts[kind] = 10;
        self.set_age(500);
    }

    /// In this state, older than all timeouts but its own.
    fn set_others_aged(&mut self, state: u64, kind: usize) {
        self.set_aged(state, kind);
        self.timeouts = [10; 5];
        self.timeouts[kind] = 1000;
    }
}

/// Asserts for a packet of a connection whether it passes while the words in this slot are changed.
fn assert_passes(node: &Node, words: &Words, slot: usize, packet: Sent, row: (&str, Change, bool)) {
    assert_frame_passes(node, words, slot, (packet, &packet.frame()), row);
}

fn assert_frame_passes(
    node: &Node,
    words: &Words,
    slot: usize,
    (packet, frame): (Sent, &[u8]),
    (what, change, passes): (&str, Change, bool),
) {
    let ((from, _), (to, _)) = packet.ends();
    let direction = usize::from(from > to);
    let before = words.read(slot);
    let mut changed = before;
    // A busy machine may take longer than a datagram may open a stream for.
    let is_as_expected = (0..if passes { 20 } else { 1 }).any(|_| {
        changed = before;
        changed.set_tick(Timestamp::now());
        change(&mut changed, direction);
        words.write(slot, &changed);
        let done = node.program(packet.from, packet.to, frame, 0);
        words.write(slot, &before);
        done.is_some() == passes
    });
    assert!(is_as_expected, "{what}: {packet:?}: {changed:x?}");
}

#[test]
fn a_packet_passes_only_if_each_field_of_its_entry_allows() {
    in_namespace(|| {
        let mut node = Node::new();
        node.publish(Epoch(9), true);
        let (words, now) = (Words::of(&node), Timestamp::now());
        let (other, itself) = (StackSender::Untranslated, StackSender::Process);
        let ends = [(End::A, End::B, other), (End::A, End::Outside, other), (End::Outside, End::B, other)];
        for ((a, b, outside), v4, tcp) in ends
            .into_iter()
            .chain([(End::A, End::Outside, itself), (End::Outside, End::B, itself)])
            .flat_map(|ends| [(ends, true, true), (ends, false, true), (ends, true, false), (ends, false, false)])
        {
            forget(&node);
            node.outside = outside;
            let there = Sent { v4, ..sent(a, b, tcp, ACK) };
            open(&mut node, there, now);
            let slot = words.slots()[0];
            for (packet, from_opener) in [(there, true), (there.back(), false)] {
                let check = |row| assert_passes(&node, &words, slot, packet, row);
                OF_ANY.iter().copied().for_each(check);
                if tcp {
                    OF_TCP.iter().copied().for_each(check);
                } else {
                    let by_sender =
                        |&(what, change, passes): &(_, _, [bool; 2])| (what, change, passes[usize::from(!from_opener)]);
                    OF_UDP.iter().map(by_sender).for_each(check);
                }
                let to_pod = packet.to != End::Outside;
                let is_direct = packet.from != End::Outside && to_pod;
                check(("its way is through the node's stack", |of, _| of.entry[0] |= VIA_HOST, !is_direct));
                let other_end: Change = |of, direction| of.path ^= 1 << (END_BITS * (1 - direction) + 10);
                check(("to an interface that no pod has", other_end, false));
                let by_node: Change = |of, direction| of.path |= BY_NODE << (END_BITS * direction);
                check(("from an address of the node", by_node, packet.from == End::Outside && outside == itself));
            }
        }
    });
}

/// For the answer to a SYN: whether it passes. `direction`: of the answer.
const OF_SYN_ACK: &[(&str, Change, bool)] = &[
    ("the SYN had another number", |of, direction| of.entry[7 - direction] ^= 1, false),
    ("the SYN had data that is not acknowledged", |of, direction| of.entry[7 - direction] += 4, false),
    ("the other end has sent a SYN, too", |of, _| of.set_state(3), false),
    ("a worker is taking the answer", |of, direction| of.entry[6 + direction] |= 1 << 61 | 5000, false),
    ("the answer's window is another's", |of, direction| of.entry[6 + direction] = 0, false),
    ("a program has taken the answer", |of, _| of.path |= ANSWERED, false),
    ("the handshake is over", |of, _| of.path |= ANSWERED | CONFIRMED, false),
    ("SYN_RECEIVED", |of, _| of.set_state(4), false),
    ("ESTABLISHED", |of, _| of.set_state(5), false),
    ("TIME_WAIT", |of, _| of.set_state(10), false),
    ("CLOSE", |of, _| of.set_state(11), false),
    ("opened by the other end", |of, _| of.entry[0] ^= ORIGINAL, false),
    ("answered, but the number is that of no answer", |of, direction| of.entry[6 + direction] ^= 1, false),
    (
        "within the timeout of a handshake",
        |of, _| {
            of.timeouts = [10, 10, 10, 10, 1000];
            of.set_age(500);
        },
        true,
    ),
    (
        "behind the timeout of a handshake",
        |of, _| {
            (of.timeouts, of.used) = ([1000, 1000, 1000, 1000, 10], [0; 2]);
            of.set_age(500);
        },
        false,
    ),
];

#[test]
fn an_answer_to_a_syn_passes_only_if_each_field_allows_it() {
    in_namespace(|| {
        let mut node = Node::new();
        node.publish(Epoch(9), true);
        let (words, now) = (Words::of(&node), Timestamp::now());
        for ((a, b), v4) in [(End::A, End::B), (End::B, End::A), (End::A, End::Outside), (End::Outside, End::B)]
            .into_iter()
            .flat_map(|ends| [(ends, true), (ends, false)])
        {
            forget(&node);
            let there = Sent { v4, ..sent(a, b, true, SYN) };
            let verdict = node.handshake(there, SYN, true, now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
            let (slot, back) = (words.slots()[0], Sent { flags: SYN | ACK, payload: 0, ..there.back() });
            let frame = in_step(back.frame(), true, SYN | ACK, false);
            for row in OF_ANY.iter().chain(OF_SYN_ACK) {
                assert_frame_passes(&node, &words, slot, (back, &frame), *row);
            }
        }
    });
}

#[test]
fn a_connection_is_found_in_either_of_its_groups() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        for flow in 0..30 {
            forget(&node);
            let there = Sent { flow, v4: flow % 2 == 0, ..sent(End::A, End::B, true, ACK) };
            open(&mut node, there, now);
            let slot = words.slots()[0];
            let (fields, tag) = (words.read(slot), words.tag(slot));
            words.set_tag(slot, 0);
            for lane in [0, 13, LANES - 1] {
                let is_found = |group: &usize| {
                    let slot = group * LANES + lane;
                    let before = words.read(slot);
                    words.write(slot, &fields);
                    words.set_tag(slot, tag);
                    let done = node.program(there.from, there.to, &there.frame(), 0);
                    words.write(slot, &before);
                    words.set_tag(slot, 0);
                    done.is_some()
                };
                assert_eq!((0..capacity() / LANES).filter(is_found).count(), 2, "lane {lane}: {there:?}");
            }
            words.set_tag(slot, tag);
            words.write(slot, &fields);
        }
    });
}

//! Connections that programs open in the entry of one with the same addresses and ports that has ended.

use penstock_dataplane::conntrack::SweepCursor;

use super::entry::{CLAIMED, Fields, Words};
use super::mutations::{LOOKUP, Mutation, REPEAT, mutation};
use super::repeat::{answer, flow_of, opening, owner, repeatable};
use super::*;

/// How a connection comes to its end, by workers or programs.
type Ending<'a> = &'a (dyn Fn(&mut Node, Sent) + Sync);

/// A packet of a connection whose handshake has the usual numbers, by a program.
fn by_program(node: &Node, packet: Sent, flags: u8, from_opener: bool) {
    let packet = Sent { flags: if packet.tcp { flags } else { 0 }, payload: 0, ..packet };
    let frame = in_step(packet.frame(), packet.tcp, flags, from_opener);
    assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}: {flags:x}");
}

/// Opens a connection by programs.
fn establish(node: &Node, there: Sent) {
    by_program(node, there, SYN, true);
    finish_handshake(node, there);
}

fn finish_handshake(node: &Node, there: Sent) {
    by_program(node, there.back(), SYN | ACK, false);
    by_program(node, there, ACK, true);
}

fn close(node: &Node, there: Sent) {
    establish(node, there);
    close_established(node, there);
}

fn close_established(node: &Node, there: Sent) {
    by_program(node, there, FIN | ACK, true);
    by_program(node, there.back(), FIN | ACK, false);
}

/// A pod that opens many short connections fills its share with what has ended, long before the time of that is over.
#[test]
fn what_has_ended_makes_room_in_a_full_share() {
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let there = sent(End::A, End::B, true, ACK);
        answer(&mut node, there);
        let opened = (0..100).take_while(|flow| {
            let there = Sent { flow: *flow, ..there };
            node.hear();
            let is_opened = node.opened_by_program(there).is_some();
            // One stays open.
            if is_opened && *flow > 0 {
                finish_handshake(&node, there);
                close_established(&node, there);
            }
            is_opened
        });
        let share = (ENTRIES / 4) as u32;
        assert_eq!(opened.count() as u32, share - 1, "but for the worker's own");
        let next = Sent { flow: 101, ..there };
        let table = || node.pipeline.connections();
        let sweep = |seconds: u64| {
            let later = Timestamp::from_millis(Timestamp::now().as_millis() + seconds * 1000);
            table().sweep(&mut SweepCursor::default(), usize::MAX, later, Epoch(1)).expired as u32
        };
        assert_eq!(sweep(0), 0, "what has just ended stays for a moment");
        // Those that are swept last find room.
        let gone = sweep(4);
        assert!((share / 8..share / 4).contains(&gone), "{gone}");
        let still = flow_of(Sent { flow: 0, ..there });
        assert!(table().iter(Timestamp::now()).any(|found| found.original == still), "what is open stays");
        assert_eq!(sweep(4), 0, "there is room");
        assert!(node.opened_by_program(next).is_none(), "no credit");
        node.handshake(Sent { flow: 100, ..there }, SYN, true, Timestamp::now());
        assert!(node.opened_by_program(next).is_some());
    });
}

/// A worker admits a segment with these numbers.
fn by_worker(node: &mut Node, packet: Sent, flags: u8, (seq, ack): (u32, u32)) {
    let mut frame = Sent { flags, payload: 0, ..packet }.frame();
    let at = if packet.v4 { 34 } else { 54 };
    frame[at + 4..at + 8].copy_from_slice(&seq.to_be_bytes());
    frame[at + 8..at + 12].copy_from_slice(&ack.to_be_bytes());
    let verdict = node.worker(packet.from, &frame, Timestamp::now()).0;
    assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
}

fn close_by_workers(node: &mut Node, there: Sent) {
    open(node, there, Timestamp::now());
    by_worker(node, there, FIN | ACK, (1000, 1000));
    by_worker(node, there.back(), FIN | ACK, (1000, 1001));
}

/// Datagrams so long ago that they count no more.
fn expire(node: &mut Node, there: Sent) {
    let long_ago = Timestamp::from_millis(Timestamp::now().as_millis() - 500_000);
    node.handshake(there, SYN, true, long_ago);
    node.handshake(there.back(), SYN | ACK, false, long_ago);
}

/// The only connection of these addresses and ports: its slot and its words.
fn only(words: &Words, there: Sent) -> (usize, Fields) {
    let found = words.slots().into_iter().map(|slot| (slot, words.read(slot)));
    let found: Vec<_> = found.filter(|(_, fields)| fields.is_of(&flow_of(there))).collect();
    let [one] = found[..] else { panic!("{there:?}: {found:?}") };
    one
}

#[test]
fn an_ended_connection_leaves_its_entry_to_the_next() {
    let endings: [(&str, bool, Ending<'_>, bool); 8] = [
        ("closed by programs", true, &|node, there| close(node, there), true),
        (
            "closed by workers",
            true,
            &|node, there| {
                close_by_workers(node, there);
                by_worker(node, there, ACK, (1001, 1001));
            },
            true,
        ),
        (
            "reset",
            true,
            &|node, there| {
                open(node, there, Timestamp::now());
                by_worker(node, there, 4 | ACK, (1000, 1000));
            },
            true,
        ),
        ("expired", false, &expire, true),
        ("without the last acknowledgement", true, &close_by_workers, false),
        (
            "half closed",
            true,
            &|node, there| {
                establish(node, there);
                by_program(node, there, FIN | ACK, true);
            },
            false,
        ),
        ("established", true, &|node, there| establish(node, there), false),
        ("unanswered", true, &|node, there| by_program(node, there, SYN, true), false),
    ];
    for (ending, tcp, end, passes) in endings {
        for there in repeatable().into_iter().filter(|there| there.tcp == tcp) {
            in_namespace(|| {
                let mut node = Node::new();
                node.repeat();
                let (words, owner) = (Words::of(&node), owner(there));
                answer(&mut node, there);
                end(&mut node, there);
                node.hear();
                let (slot, before) = only(&words, there);
                let credit = words.credit(owner);
                let counted = node.pipeline.connections().len_of(owner);
                let done = node.opened_by_program(there);
                assert_eq!(done.is_some(), passes, "{ending}: {there:?}");
                let (place, after) = only(&words, there);
                let table = node.pipeline.connections();
                assert_eq!((place, words.credit(owner), table.len_of(owner)), (slot, credit, counted), "{ending}");
                assert_eq!(after.generation(), (before.generation() + u64::from(passes)) & 0x3ff, "{ending}");
                let heard = if passes { vec![(flow_of(there), owner)] } else { Vec::new() };
                assert_eq!((node.hear(), node.pipeline.connections().statistics().reopened), (heard, passes.into()));
                if !passes {
                    return;
                }
                by_program(&node, there.back(), SYN | ACK, false);
                by_program(&node, there, ACK, true);
                // As a worker writes it and sends it on.
                forget(&node);
                let frame = in_step(opening(there).frame(), there.tcp, SYN, true);
                assert_alike(&mut node, opening(there), &frame, &done.unwrap(), Timestamp::now());
                let mut by_worker = only(&words, there).1.lasting();
                if tcp {
                    by_worker.widen(usize::from(there.ends().0.0 > there.ends().1.0));
                }
                assert_eq!(after.lasting(), by_worker, "{ending}: {there:?}");
            });
        }
    }
}

/// A change of what programs read of an entry, and whether they take it. `direction`: of the packet.
type Change = fn(&mut Fields, usize);

const FIN_OF_LOWER: u64 = 1 << 44;
const FIN_OF_HIGHER: u64 = 1 << 45;
const NOTED: u64 = 0b1111 << 42;

const OF_ANY: &[(&str, Change, bool)] = &[
    ("as it is", |_, _| (), true),
    ("tentative", |of, _| of.entry[0] |= 1 << 4, false),
    ("revoked", |of, _| of.entry[0] |= 1 << 6, false),
    ("by the node's stack", |of, _| of.entry[0] |= 1 << 7, false),
    ("who opened it is kept beside it", |of, _| of.entry[0] |= 1 << 63, true),
    ("free", |of, _| of.set_state(0), false),
    ("claimed", |of, _| of.set_state(CLAIMED), false),
    ("of an older epoch", |of, _| of.set_evaluated(u64::from(of.epoch) - 1), true),
    ("its generation wraps", |of, _| of.entry[0] |= 0x3ff << 53, true),
    ("opened by the other end", |of, _| of.entry[0] ^= 1 << 5, true),
    ("of another owner", |of, _| of.entry[5] ^= 1 << 40, false),
    ("about to be cleared", |of, _| of.entry[5] |= 1 << 56, false),
    ("after a SYN that was held", |of, _| of.entry[5] |= 0x7f << 57, true),
];

const OF_TCP: &[(&str, Change, bool)] = &[
    ("no FIN of the lower end", |of, _| of.path &= !FIN_OF_LOWER, false),
    ("no FIN of the higher end", |of, _| of.path &= !FIN_OF_HIGHER, false),
    ("the handshake is not over", |of, _| of.path &= !(1 << 43), false),
    ("not answered", |of, _| of.path &= !(1 << 42), false),
    ("answered, without the number", |of, direction| of.entry[6 + 1 - direction] &= !(31 << 52), false),
    ("SYN_RECV", |of, _| of.set_state(4), true),
    ("SYN_RECV that nobody has confirmed", |of, _| (of.path &= !(1 << 43), of.set_state(4)).1, false),
    ("ESTABLISHED", |of, _| (of.path &= !(0b11 << 42), of.set_state(5)).1, true),
    ("ESTABLISHED, one FIN", |of, _| (of.path &= !FIN_OF_LOWER, of.set_state(5)).1, false),
    ("state 3", |of, _| of.set_state(3), false),
    ("RESETTING", |of, _| of.set_state(6), false),
    ("FIN_WAIT", |of, _| of.set_state(7), false),
    ("CLOSE_WAIT", |of, _| of.set_state(8), false),
    ("LAST_ACK", |of, _| of.set_state(9), false),
    ("TIME_WAIT", |of, _| (of.path &= !NOTED, of.set_state(10)).1, true),
    ("CLOSE", |of, _| (of.path &= !NOTED, of.set_state(11)).1, true),
    ("state 12", |of, _| of.set_state(12), false),
    ("of no end that a program knows", |of, _| of.path = 7, false),
];

/// Of TCP, without a daemon: whether a SYN with the number of the last one passes, and whether it takes the entry, where it would otherwise be a
/// worker's.
const UNSERVED: &[(&str, bool, bool)] = &[
    ("revoked", true, true),
    ("no FIN of the lower end", true, false),
    ("no FIN of the higher end", true, false),
    ("the handshake is not over", true, false),
    ("not answered", true, false),
    ("answered, without the number", true, false),
    ("SYN_RECV that nobody has confirmed", true, false),
    ("ESTABLISHED, one FIN", true, false),
    ("RESETTING", true, true),
    ("LAST_ACK", true, true),
];

/// Ticks that a datagram is old here.
const AGE: i64 = 500;
const LONGER: u32 = 600;

/// Of datagrams while a daemon runs; without one they take the entry in each of these cases.
const OF_UDP: &[(&str, Change, bool)] = &[
    ("no way, and not expired", |of, _| (of.path, of.timeouts) = (7, [LONGER; 5]), false),
    ("of the other states not expired", |of, _| of.timeouts = [LONGER, LONGER, 1, LONGER, LONGER], true),
    ("ASSURED by a note", |of, _| (of.path, of.timeouts[3]) = (7, LONGER), true),
    (
        "UNREPLIED and not expired",
        |of, _| {
            of.set_state(2);
            (of.path, of.timeouts) = (7, [0, LONGER, 0, 0, 0]);
        },
        false,
    ),
    (
        "ASSURED and not expired",
        |of, _| {
            of.set_state(4);
            (of.path, of.timeouts) = (7, [0, 0, 0, LONGER, 0]);
        },
        false,
    ),
    (
        "used in this direction",
        |of, direction| {
            of.path = 7;
            of.used[direction] = Fields::now();
        },
        false,
    ),
    (
        "used in the other one",
        |of, direction| {
            of.path = 7;
            of.used[1 - direction] = Fields::now();
        },
        false,
    ),
];

#[test]
fn an_entry_is_taken_only_if_each_of_its_fields_allows() {
    for (there, is_served) in repeatable().into_iter().flat_map(|there| [(there, true), (there, false)]) {
        in_namespace(|| {
            let mut node = Node::new();
            node.publish(Epoch(9), true);
            node.repeat();
            if !is_served {
                node.programs.forget_process().unwrap();
            }
            let words = Words::of(&node);
            let timeouts = {
                node.handshake(there, SYN, true, Timestamp::now());
                only(&words, there).1.timeouts
            };
            for (what, change, passes) in OF_ANY.iter().chain(if there.tcp { OF_TCP } else { OF_UDP }) {
                forget(&node);
                node.next_epoch(true);
                answer(&mut node, there);
                if there.tcp {
                    close(&node, there);
                } else {
                    node.handshake(there, SYN, true, Timestamp::now());
                    node.handshake(there.back(), SYN | ACK, false, Timestamp::now());
                }
                let (slot, before) = only(&words, there);
                let mut changed = before;
                if !there.tcp {
                    (changed.timeouts, changed.used) = ([1; 5], [0; 2]);
                    changed.set_age(AGE);
                }
                change(&mut changed, usize::from(there.ends().0.0 > there.ends().1.0));
                words.write(slot, &changed);
                let is_taken = |after: &Fields| after.generation() != changed.generation();
                let done = node.opened_by_program(there);
                let after = words.read(slot);
                let unserved = UNSERVED.iter().find(|(name, ..)| name == what && there.tcp && !is_served);
                let of_udp = OF_UDP.iter().any(|(name, ..)| name == what && !there.tcp && !is_served);
                let expected =
                    unserved.map_or((*passes || of_udp, *passes || of_udp), |(_, passes, takes)| (*passes, *takes));
                assert_eq!((done.is_some(), is_taken(&after)), expected, "{what}, served: {is_served}, {there:?}");
                // Back to what a worker may clear.
                words.write(slot, &Fields { timeouts, epoch: after.epoch, ..if expected.1 { after } else { before } });
            }
        });
    }
}

/// Both ends open the connection at once, and the second one's number is that of an answer.
#[test]
fn a_syn_of_the_answering_end_is_a_workers() {
    in_namespace(|| {
        let mut node = Node::new();
        let there = sent(End::A, End::B, true, SYN);
        node.handshake(there, SYN, true, Timestamp::now());
        let back = Sent { flags: SYN, payload: 0, ..there.back() };
        let frame = in_step(Sent { flags: SYN | ACK, ..back }.frame(), true, SYN | ACK, false);
        let without_ack = [&frame[..47], &[SYN], &frame[48..]].concat();
        assert!(node.program(back.from, back.to, &without_ack, 0).is_none());
        assert!(node.program(back.from, back.to, &frame, 0).is_some());
    });
}

const OF_FIELDS: &str = "ended::an_entry_is_taken_only_if_each_of_its_fields_allows";
const OF_ANSWERING_SYN: &str = "ended::a_syn_of_the_answering_end_is_a_workers";
const OF_ENDINGS: &str = "ended::an_ended_connection_leaves_its_entry_to_the_next";
const HAS_ENDED: &str = "!IS_WRITTEN(control) || control & TENTATIVE";

/// Changes to the programs that a test here must notice.
pub(crate) const MUTATIONS: &[Mutation] = &[
    mutation(OF_FIELDS, "a tentative entry is taken", REPEAT, HAS_ENDED, "!IS_WRITTEN(control)"),
    mutation(
        OF_FIELDS,
        "a revoked entry is taken while workers are served",
        REPEAT,
        "if (control & REVOKED)\n\t\treturn !is_served();",
        "",
    ),
    mutation(
        OF_FIELDS,
        "a revoked datagram's entry is taken",
        REPEAT,
        "return !(control & REVOKED) &&\n\t\t       (!is_served() || !is_active",
        "return (!is_served() || !is_active",
    ),
    mutation(
        OF_FIELDS,
        "what goes by the node's stack is taken",
        REPEAT,
        " || (control & VIA_HOST) != found->via_host)",
        ")",
    ),
    mutation(OF_FIELDS, "an entry that another one claims is taken", REPEAT, HAS_ENDED, "control & TENTATIVE"),
    mutation(
        OF_ENDINGS,
        "any entry is taken",
        REPEAT,
        "opens = found->slot == NO_SLOT || has_ended(table, packet, ingress, found);",
        "opens = 1;",
    ),
    mutation(
        OF_FIELDS,
        "a datagram's entry is taken before it has expired",
        REPEAT,
        " &&\n\t\t       (!is_served() || !is_active(use, control, found->now, table->timeouts[(state - 1) & 3]));",
        ";",
    ),
    mutation(
        OF_FIELDS,
        "without a daemon a datagram waits for an entry to expire",
        REPEAT,
        "(!is_served() || !is_active",
        "(!is_active",
    ),
    mutation(OF_FIELDS, "datagrams have one timeout", REPEAT, "table->timeouts[(state - 1) & 3]", "table->timeouts[1]"),
    mutation(OF_FIELDS, "TIME_WAIT is not ended", REPEAT, "state == TCP_TIME_WAIT || ", ""),
    mutation(
        OF_FIELDS,
        "CLOSE is not ended",
        REPEAT,
        "state == TCP_TIME_WAIT || state == TCP_CLOSE",
        "state == TCP_TIME_WAIT",
    ),
    mutation(OF_FIELDS, "a FIN of the higher end is enough", LOOKUP, "return path & FINISHED(0) && ", "return "),
    mutation(OF_FIELDS, "a FIN of the lower end is enough", LOOKUP, " && path & FINISHED(1);", ";"),
    mutation(
        OF_FIELDS,
        "FINs end a connection in any state",
        REPEAT,
        "if (state == TCP_ESTABLISHED)\n\t\treturn have",
        "if (path & CONFIRMED || state >= TCP_ESTABLISHED)\n\t\treturn have",
    ),
    mutation(
        OF_FIELDS,
        "the number of the answer is not asked for",
        REPEAT,
        " &&\n\t\t       (STATE(control) != TCP_SYN_SENT || IS_ANSWERED(entry->tracking[!ORIGINAL(control)]));",
        ";",
    ),
    mutation(
        OF_FIELDS,
        "the entry of another owner is taken",
        REPEAT,
        "if (!entry || (entry->ports & ~HELD_SYN) != ports ||",
        "if (!entry ||",
    ),
    mutation(
        OF_ENDINGS,
        "the generation stays",
        REPEAT,
        "ended->control, CLAIMED_ANEW(ended->control))",
        "ended->control, FREED(ended->control) | CLAIMED)",
    ),
    mutation(
        OF_ENDINGS,
        "a free entry is looked for",
        REPEAT,
        "is_new ? claim_free(table, decision, hash) : claim_ended(packet, decision, candidate)",
        "claim_free(table, decision, hash)",
    ),
    mutation(
        OF_ENDINGS,
        "no worker hears that one had ended",
        REPEAT,
        "(entry == ENDED_ENTRY ?",
        "(entry > ENDED_ENTRY ?",
    ),
    mutation(
        OF_ANSWERING_SYN,
        "a SYN is looked up like an answer",
        LOOKUP,
        "if (packet->flags & ~(TCP_SYN | TCP_FIN))\n\t\t\treturn 0;",
        "",
    ),
];

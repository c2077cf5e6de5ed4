//! Segments that only a worker could place, while nobody serves the workers: they go on with connections that are allowed.

use super::entry::Words;
use super::mutations::{LOOKUP, Mutation, REPEAT, mutation};
use super::repeat::{ANSWERS, flow_of, opening, repeatable};
use super::*;

const RST: u8 = 4;

/// A segment of a connection between `there` and its answering end, with the numbers that its flags ask for.
#[derive(Clone, Copy)]
struct Segment {
    from_opener: bool,
    flags: u8,
    payload: usize,
    /// Another sequence number than the one before.
    is_renumbered: bool,
}

const fn opener(flags: u8) -> Segment {
    Segment { from_opener: true, flags, payload: 0, is_renumbered: false }
}

const fn other(flags: u8) -> Segment {
    Segment { from_opener: false, ..opener(flags) }
}

impl Segment {
    /// Whether a program forwards it.
    fn passes(self, node: &Node, there: Sent) -> bool {
        let packet = if self.from_opener { there } else { there.back() };
        let packet = Sent { flags: self.flags, payload: self.payload, ..packet };
        let mut frame = in_step(packet.frame(), true, self.flags, self.from_opener);
        if self.is_renumbered {
            frame[if packet.v4 { 34 } else { 54 } + 6] ^= 1;
        }
        node.program(packet.from, packet.to, &frame, 0).is_some()
    }

    /// Whether it comes by a pod's interface, so that the pod has sent it.
    fn is_of_a_pod(self, there: Sent) -> bool {
        let from = if self.from_opener { there.from } else { there.to };
        matches!(from, End::A | End::B)
    }
}

const HANDSHAKE: [Segment; 3] = [opener(SYN), other(SYN | ACK), opener(ACK)];

/// TCP connections that programs open.
fn connections() -> impl Iterator<Item = Sent> {
    repeatable().into_iter().filter(|there| there.tcp)
}

/// Opens a connection as far as this many segments of its handshake.
fn open_as_far_as(node: &mut Node, there: Sent, segments: usize) {
    let verdict = node.handshake(opening(there), SYN, true, Timestamp::now());
    assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
    for segment in &HANDSHAKE[1..segments] {
        assert!(segment.passes(node, there), "{there:?}");
    }
}

/// Segments after so many of the handshake, and whether each passes without a daemon.
const SEGMENTS: &[(&str, usize, Segment, bool)] = &[
    ("a RST of the opener", 3, opener(RST | ACK), true),
    ("a RST of the other end", 3, other(RST | ACK), true),
    ("a RST that acknowledges nothing", 3, other(RST), true),
    ("a RST that has a FIN", 3, other(RST | FIN | ACK), false),
    ("a RST that has a SYN", 3, opener(RST | SYN), false),
    ("a SYN with data", 3, Segment { payload: 1, ..opener(SYN) }, false),
    ("a SYN of the other end", 3, other(SYN), false),
    ("its SYN-ACK again", 3, other(SYN | ACK), true),
    ("a SYN-ACK of the opener", 3, opener(SYN | ACK), false),
    ("the SYN again, which was answered", 2, opener(SYN), true),
    ("the SYN-ACK again, before it is confirmed", 2, other(SYN | ACK), true),
    ("a RST in place of the confirmation", 2, opener(RST | ACK), true),
    ("data in place of the confirmation", 2, Segment { payload: 1, ..opener(ACK) }, false),
    ("the SYN again", 1, opener(SYN), true),
    ("the refusal of a SYN", 1, other(RST | ACK), true),
    ("a SYN that crosses it", 1, other(SYN), false),
    ("an acknowledgement of who has the last connection", 1, other(ACK), true),
    ("data of who has it", 1, Segment { payload: 1, ..other(ACK) }, false),
    ("a FIN of who has it", 1, other(FIN | ACK), false),
    ("an acknowledgement of the opener", 1, opener(ACK), false),
];

#[test]
fn without_a_daemon_what_only_a_worker_could_place_passes() {
    // Of so many a pod's share has room.
    for (there, cases) in connections().flat_map(|there| SEGMENTS.chunks(9).map(move |cases| (there, cases))) {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            let of = |number: usize| Sent { flow: number as u8, ..there };
            for (number, (what, segments, segment, _)) in cases.iter().enumerate() {
                open_as_far_as(&mut node, of(number), *segments);
                assert!(!segment.passes(&node, of(number)), "{what}, with a daemon: {there:?}");
            }
            node.programs.forget_process().unwrap();
            for (number, (what, segments, segment, passes)) in cases.iter().enumerate() {
                assert_eq!(segment.passes(&node, of(number)), *passes, "{what}: {there:?}");
                let ends = *passes && *segments == 3 && segment.flags & RST != 0 && segment.is_of_a_pod(there);
                let expected = if ends { "TIME_WAIT" } else { ["SYN_SENT", "SYN_RECV", "ESTABLISHED"][segments - 1] };
                let mut connections = node.pipeline.connections().iter(Timestamp::now());
                let found =
                    connections.find(|found| found.original.src_port == of(number).ends().0.1).expect("it is there");
                assert_eq!(found.state.to_string(), expected, "{what}: {there:?}");
            }
        });
    }
}

type Prepare<'a> = &'a (dyn Fn(&mut Node) + Sync);

#[test]
fn without_a_daemon_nothing_passes_that_policy_has_not_allowed() {
    let changes: [(&str, Prepare<'_>); 3] = [
        ("revoked", &|node| {
            let words = Words::of(node);
            let [slot] = words.slots()[..] else { panic!("{:?}", words.slots()) };
            let mut fields = words.read(slot);
            fields.entry[0] |= 1 << 6;
            words.write(slot, &fields);
        }),
        ("of an older policy", &|node| node.next_epoch(true)),
        ("no longer there", &|node| forget(node)),
    ];
    for (what, change) in changes {
        for segment in [opener(RST | ACK), other(RST | ACK), opener(SYN), other(SYN | ACK)] {
            in_namespace(|| {
                let mut node = Node::new();
                let there = sent(End::A, End::B, true, ACK);
                open_as_far_as(&mut node, there, 3);
                change(&mut node);
                node.programs.forget_process().unwrap();
                assert!(!segment.passes(&node, there), "{what}: {:x}", segment.flags);
            });
        }
    }
    // Where no program may open it: without an answer, as of a pod with domain names or limits.
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let there = sent(End::A, End::B, true, ACK);
        open_as_far_as(&mut node, there, 3);
        let words = Words::of(&node);
        (0..ANSWERS).for_each(|answer| words.behind(answer)[0].store(0, Ordering::Release));
        node.programs.forget_process().unwrap();
        assert!(!opener(SYN).passes(&node, there));
    });
    // Where programs may open nothing, and from another pod than the one that has the address.
    in_namespace(|| {
        let mut node = Node::new();
        let there = sent(End::A, End::B, true, ACK);
        open_as_far_as(&mut node, there, 3);
        node.programs.forget_process().unwrap();
        assert!(!opener(SYN).passes(&node, there));
        let reset = Sent { flags: RST | ACK, payload: 0, ..there }.frame();
        let tried = node.programs.try_frame(TriedSender::Pod, node.interface(End::B), &reset, 0).unwrap();
        assert_eq!(tried.frame[..2], TO_WORKER);
    });
}

/// What the programs do with a SYN of a port that comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Opens {
    /// In the entry as it is.
    WithinIt,
    /// In place of what was there.
    InItsPlace,
}

/// What became of the last connection of a port: how many segments of its handshake there were, and which RST came.
const ENDINGS: &[(&str, usize, Option<Segment>, Opens)] = &[
    ("reset", 3, Some(opener(RST | ACK)), Opens::InItsPlace),
    ("lost", 3, None, Opens::WithinIt),
    ("answered and given up", 2, None, Opens::InItsPlace),
    ("unanswered and given up", 1, None, Opens::InItsPlace),
    ("refused", 1, Some(other(RST | ACK)), Opens::InItsPlace),
];

#[test]
fn without_a_daemon_a_port_that_comes_back_opens_again() {
    let again = Segment { is_renumbered: true, ..opener(SYN) };
    for there in connections() {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            let of = |number: usize| Sent { flow: number as u8, ..there };
            for (number, (_, segments, ..)) in ENDINGS.iter().enumerate() {
                open_as_far_as(&mut node, of(number), *segments);
            }
            node.programs.forget_process().unwrap();
            let words = Words::of(&node);
            for (number, (what, segments, resets, expected)) in ENDINGS.iter().enumerate() {
                let of = of(number);
                assert!(resets.is_none_or(|reset| reset.passes(&node, of)), "{what}: {of:?}");
                let generation = || {
                    let entries = words.slots().into_iter().map(|slot| words.read(slot));
                    let mut of_flow = entries.filter(|fields| fields.is_of(&flow_of(of)));
                    of_flow.next().expect("it is there").generation()
                };
                let before = generation();
                let passes = again.passes(&node, of);
                let opens = if generation() == before { Opens::WithinIt } else { Opens::InItsPlace };
                // Another machine may send a RST that its connection does not accept, and a SYN in another's name.
                let expected = match (there.from == End::Outside, segments) {
                    (true, 3) => Some(Opens::WithinIt),
                    (true, _) => None,
                    (false, _) => Some(*expected),
                };
                assert_eq!(passes.then_some(opens), expected, "{what}: {of:?}");
            }
        });
    }
}

const OF_SEGMENTS: &str = "unserved::without_a_daemon_what_only_a_worker_could_place_passes";
const OF_PORTS: &str = "unserved::without_a_daemon_a_port_that_comes_back_opens_again";
const ENDED_FIELDS: &str = "ended::an_entry_is_taken_only_if_each_of_its_fields_allows";
const UNALLOWED: &str = "unserved::without_a_daemon_nothing_passes_that_policy_has_not_allowed";

/// What of this a test must notice.
pub(crate) const MUTATIONS: &[Mutation] = &[
    mutation(
        OF_SEGMENTS,
        "it passes with a daemon, too",
        LOOKUP,
        "control & (TENTATIVE | REVOKED) || is_served())",
        "control & (TENTATIVE | REVOKED))",
    ),
    mutation(
        UNALLOWED,
        "it passes on a revoked connection",
        LOOKUP,
        "control & (TENTATIVE | REVOKED) || is_served())",
        "control & TENTATIVE || is_served())",
    ),
    mutation(OF_SEGMENTS, "no RST passes", LOOKUP, "if (packet->flags & TCP_RST)\n\t\treturn 1;", ""),
    mutation(
        OF_SEGMENTS,
        "data passes before a handshake is over",
        LOOKUP,
        "if (!(packet->flags & TCP_SYN) && state > TCP_ESTABLISHED)",
        "if (!(packet->flags & TCP_SYN))",
    ),
    mutation(
        OF_SEGMENTS,
        "data of a server's last connection passes, or a SYN with data",
        LOOKUP,
        "if (packet->length != packet->headers)\n\t\treturn 0;\n\tif (!packet->flags)",
        "if (!packet->flags)",
    ),
    mutation(
        OF_SEGMENTS,
        "an acknowledgement of the opener passes unanswered",
        LOOKUP,
        "return !from_opener && state == TCP_SYN_SENT;",
        "return state == TCP_SYN_SENT;",
    ),
    mutation(
        OF_SEGMENTS,
        "no acknowledgement of a server's last connection passes",
        LOOKUP,
        "return !from_opener && state == TCP_SYN_SENT;",
        "return 0;",
    ),
    mutation(
        OF_SEGMENTS,
        "a SYN-ACK of the opener passes",
        LOOKUP,
        "return !from_opener && state <= TCP_ESTABLISHED;",
        "return state <= TCP_ESTABLISHED;",
    ),
    mutation(
        OF_SEGMENTS,
        "a SYN of the other end passes",
        LOOKUP,
        "packet->flags == OPENING_SYN && from_opener && ",
        "packet->flags == OPENING_SYN && ",
    ),
    mutation(
        OF_PORTS,
        "a SYN with another number passes on a handshake",
        LOOKUP,
        " &&\n\t       is_same_syn(packet, slot, control);",
        ";",
    ),
    mutation(OF_SEGMENTS, "another machine's RST ends a connection", LOOKUP, " && ingress && ingress != BY_NODE;", ";"),
    mutation(
        OF_PORTS,
        "a RST ends nothing",
        LOOKUP,
        "return ends ? path | FINISHED(0) | FINISHED(1) : path;",
        "return path;",
    ),
    mutation(
        OF_PORTS,
        "what its opener has given up stays",
        REPEAT,
        "return ingress && !is_same_syn(packet, slot, control);",
        "return 0;",
    ),
    mutation(
        OF_PORTS,
        "another machine's SYN ends a handshake",
        REPEAT,
        "return ingress && !is_same_syn(packet, slot, control);",
        "return !is_same_syn(packet, slot, control);",
    ),
    mutation(
        OF_PORTS,
        "a port does not come back after a RST that was lost",
        REPEAT,
        "goes_on_unserved(packet, found) ? ESTABLISHED : 0;",
        "0;",
    ),
    mutation(
        ENDED_FIELDS,
        "a SYN goes on where the stack forwards otherwise",
        REPEAT,
        "(control & VIA_HOST) != found->via_host || packet->direction != ORIGINAL(control) || is_served())",
        "packet->direction != ORIGINAL(control) || is_served())",
    ),
];

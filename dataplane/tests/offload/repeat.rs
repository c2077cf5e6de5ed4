//! Connections that programs open like those that workers have opened.

use std::sync::atomic::AtomicBool;

use penstock_dataplane::conntrack::OwnerId;
use penstock_dataplane::forward::{Encapsulation, WELL_KNOWN_TUNNEL_PORTS};
use penstock_dataplane::limits::{Limit, LimitedPods, PodLimits};
use penstock_dataplane::pipeline::MemoryFrames;

use super::entry::Words;
use super::*;

/// A change of a frame.
type Change<'a> = &'a (dyn Fn(&mut [u8]) + Sync);

/// Flow number of the connections that only workers open.
const FIRST: u8 = 200;

impl Node {
    /// Lets programs open connections from now on.
    pub(crate) fn repeat(&self) {
        self.pipeline.connections().let_repeat(Timestamp::now(), true);
    }

    /// The worker that keeps the table has heard of what programs have opened.
    pub(crate) fn hear(&self) -> Vec<(Flow, OwnerId)> {
        let (mut heard, mut next) = (Vec::new(), self.heard.load(Ordering::Relaxed));
        self.pipeline.connections().hear(&mut next, usize::MAX, |flow, owner| heard.push((*flow, owner)));
        self.heard.store(next, Ordering::Relaxed);
        heard
    }

    /// Gives the packet that opens a connection to the program that it meets.
    pub(crate) fn opened_by_program(&self, there: Sent) -> Option<(u32, Vec<u8>)> {
        let frame = opening(there).frame();
        self.program(there.from, there.to, &in_step(frame, there.tcp, SYN, true), 0)
    }
}

/// The packet that opens a connection.
pub(crate) fn opening(there: Sent) -> Sent {
    Sent { flags: if there.tcp { SYN } else { 0 }, payload: 0, ..there }
}

/// A worker opens a connection like this one, which leaves its answer and credit.
pub(crate) fn answer(node: &mut Node, there: Sent) {
    let verdict = node.handshake(Sent { flow: FIRST, ..there }, SYN, true, Timestamp::now());
    assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
}

/// What programs repeat: of a pod, to another one of the node, to the outside and to a Service that the node translates, and from outside. By IPv6 the
/// others have lower addresses.
pub(crate) fn repeatable() -> Vec<Sent> {
    [(End::A, End::B), (End::A, End::Outside), (End::A, End::Service), (End::Outside, End::B)]
        .into_iter()
        .flat_map(|ends| [(true, true), (false, true), (true, false), (false, false)].map(|form| (ends, form)))
        .map(|((from, to), (v4, tcp))| Sent { v4, ..sent(from, to, tcp, ACK) })
        .collect()
}

/// Whose share a connection is of.
pub(crate) fn owner(there: Sent) -> OwnerId {
    if there.from == End::Outside { OwnerId::opened_to(there.to.port().0) } else { OwnerId::opens(there.from.port().0) }
}

/// Which element of credit is an owner's, as `credit_of` in `repeat.h`.
pub(crate) fn place_of_credit(owner: OwnerId) -> usize {
    const PODS: u16 = 4096;
    usize::from(owner.0 % PODS + if owner.is_opened_to() { PODS } else { 0 })
}

#[test]
fn a_connection_like_one_that_a_worker_opened_meets_no_worker() {
    for there in repeatable() {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            assert!(node.opened_by_program(there).is_none(), "{there:?}: nobody has answered it");
            answer(&mut node, there);
            let done = node.opened_by_program(there).unwrap_or_else(|| panic!("{there:?}"));
            let flow = flow_of(there);
            assert_eq!(node.hear(), [(flow, owner(there))], "{there:?}");
            // The same bytes as a worker's.
            let frame = in_step(opening(there).frame(), there.tcp, SYN, true);
            forget(&node);
            assert_alike(&mut node, opening(there), &frame, &done, Timestamp::now());
            forget(&node);
            // The whole connection, by programs.
            answer(&mut node, there);
            assert!(node.opened_by_program(there).is_some(), "{there:?}");
            let steps = [(there.back(), SYN | ACK, false), (there, ACK, true), (there.back(), ACK, false)];
            for (packet, flags, from_opener) in steps.into_iter().take(if there.tcp { 3 } else { 2 }) {
                let packet = Sent { flags: if packet.tcp { flags } else { 0 }, payload: 0, ..packet };
                let frame = in_step(packet.frame(), packet.tcp, flags, from_opener);
                assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}");
            }
            let listed = node.pipeline.connections().iter(Timestamp::now());
            let states: Vec<String> =
                listed.filter(|found| found.original == flow).map(|found| found.state.to_string()).collect();
            assert_eq!(states, [if there.tcp { "ESTABLISHED" } else { "REPLIED" }], "{there:?}");
        });
    }
}

/// The flow of a packet.
pub(crate) fn flow_of(packet: Sent) -> Flow {
    let ((from, src_port), (to, dst_port)) = packet.ends();
    let protocol = if packet.tcp { Protocol::TCP } else { Protocol::UDP };
    Flow { src: from.into(), dst: to.into(), protocol, src_port, dst_port }
}

#[test]
fn what_a_program_opens_is_written_as_a_worker_writes_it() {
    for there in repeatable() {
        in_namespace(|| {
            let mut node = Node::new();
            node.publish(Epoch(0x80_0009), true);
            node.repeat();
            let words = Words::of(&node);
            answer(&mut node, there);
            forget(&node);
            assert!(node.opened_by_program(there).is_some(), "{there:?}");
            let [slot] = words.slots()[..] else { panic!("{:?}", words.slots()) };
            let by_program = words.read(slot).lasting();
            let owner = owner(there);
            assert_eq!(node.pipeline.connections().len_of(owner), 1, "{there:?}");
            forget(&node);
            assert_eq!((node.pipeline.connections().len(), words.slots()), (0, vec![]), "{there:?}");
            node.handshake(opening(there), SYN, true, Timestamp::now());
            let [slot] = words.slots()[..] else { panic!("{:?}", words.slots()) };
            let mut by_worker = words.read(slot).lasting();
            if there.tcp {
                // Options are not read: the opener may have offered most.
                let direction = usize::from(there.ends().0.0 > there.ends().1.0);
                by_worker.widen(direction);
            }
            assert_eq!(by_program, by_worker, "{there:?}");
        });
    }
}

type Prepare<'a> = &'a (dyn Fn(&mut Node, Sent) + Sync);

#[test]
fn a_packet_opens_only_what_a_worker_has_opened_before() {
    let there = sent(End::A, End::B, true, ACK);
    let datagram = Sent { tcp: false, ..there };
    let out = sent(End::A, End::Outside, true, ACK);
    let nothing: Prepare<'_> = &|_, _| ();
    let cases: [(&str, Sent, Prepare<'_>, Change<'_>, bool); 23] = [
        ("as it is", there, nothing, &|_| (), true),
        ("a datagram", datagram, nothing, &|_| (), true),
        ("to the outside", out, nothing, &|_| (), true),
        ("with another port of its own", there, nothing, &|frame| frame[35] ^= 1, true),
        ("to another port", there, nothing, &|frame| frame[37] ^= 1, false),
        ("a datagram to another port", datagram, nothing, &|frame| frame[36] ^= 1, false),
        ("to another address", out, nothing, &set_destination, false),
        ("SYN and ACK", there, nothing, &|frame| frame[47] = SYN | ACK, false),
        ("SYN and FIN", there, nothing, &|frame| frame[47] = SYN | FIN, false),
        ("SYN and RST", there, nothing, &|frame| frame[47] = SYN | 4, false),
        ("ACK alone", there, nothing, &|frame| frame[47] = ACK, false),
        ("no flag", there, nothing, &|frame| frame[47] = 0, false),
        ("with ECN, and PSH and URG", there, nothing, &|frame| frame[47] = SYN | 0xe8, true),
        ("its last hop", there, nothing, &set_last_hop, false),
        ("another MAC towards the node", out, nothing, &|frame| frame[5] ^= 1, false),
        ("another policy", there, &|node, _| node.next_epoch(true), &|_| (), false),
        ("a policy that denies it", there, &|node, _| node.next_epoch(false), &|_| (), false),
        ("a change that keeps connections", there, &|node, _| _ = node.next_epoch_keeping(true), &|_| (), true),
        ("one that denies it", there, &|node, _| _ = node.next_epoch_keeping(false), &|_| (), false),
        ("a captured sender", there, &|node, _| node.veths[0].set_captured(true).unwrap(), &|_| (), false),
        ("a captured receiver", there, &|node, _| node.veths[1].set_captured(true).unwrap(), &|_| (), false),
        ("nobody says that programs may", there, &|node, _| may_repeat(node, false), &|_| (), false),
        ("a connection that is there", there, &|node, there| open(node, there, Timestamp::now()), &|_| (), false),
    ];
    for (what, there, prepare, change, passes) in cases {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            answer(&mut node, there);
            prepare(&mut node, there);
            let mut frame = in_step(opening(there).frame(), there.tcp, SYN, true);
            change(&mut frame);
            let before = node.pipeline.connections().len();
            assert_eq!(node.program(there.from, there.to, &frame, 0).is_some(), passes, "{what}");
            assert_eq!(node.pipeline.connections().len(), before + usize::from(passes), "{what}");
        });
    }
}

fn may_repeat(node: &Node, is_wanted: bool) {
    node.pipeline.connections().let_repeat(Timestamp::now(), is_wanted);
}

fn set_destination(frame: &mut [u8]) {
    frame[33] ^= 1;
    headers::seal(frame);
}

fn set_last_hop(frame: &mut [u8]) {
    frame[22] = 1;
    headers::seal(frame);
}

#[test]
fn what_a_program_does_not_repeat_has_no_answer_or_no_way() {
    let to_pod = sent(End::A, End::B, true, ACK);
    // The same packet at another pod's interface, a longer one, and one with data.
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        answer(&mut node, to_pod);
        let frame = in_step(opening(to_pod).frame(), true, SYN, true);
        let tried = node.programs.try_frame(TriedSender::Pod, node.interface(End::B), &frame, 0).unwrap();
        assert_eq!(tried.frame[..2], TO_WORKER, "a forged source is a worker's to drop");
        for (tcp, payload) in [(true, 1), (false, usize::from(MTU) - 27)] {
            let there = Sent { tcp, ..to_pod };
            answer(&mut node, there);
            let frame = Sent { payload, ..opening(there) }.frame();
            let frame = in_step(frame, tcp, SYN, true);
            assert!(node.program(End::A, End::B, &frame, 0).is_none(), "{there:?}, {payload} bytes");
        }
    });
}

/// What the stack forwards as it came is repeated, and nothing else that it sends: neither by a worker's answer to it, nor to another sender.
#[test]
fn of_the_nodes_stack_only_what_it_forwards_is_repeated() {
    use StackSender::{Forwarded, Process, Translated, Unchanged, Unknown, Untranslated};
    let cases = [
        (Untranslated, Untranslated, true),
        (Unchanged, Untranslated, true),
        (Unknown, Untranslated, false),
        (Process, Untranslated, false),
        (Forwarded, Untranslated, false),
        (Translated, Untranslated, false),
        (Untranslated, Process, false),
    ];
    for (answered, then, passes) in cases {
        for tcp in [true, false] {
            in_namespace(|| {
                let there = sent(End::Outside, End::B, tcp, ACK);
                let mut node = Node::new();
                node.repeat();
                node.outside = answered;
                answer(&mut node, there);
                node.outside = then;
                assert_eq!(node.opened_by_program(there).is_some(), passes, "{answered:?}, {then:?}, {tcp}");
            });
        }
    }
}

/// The ports of its answers are the opener's, and may be those of a tunnel.
#[test]
fn a_datagram_from_where_tunnels_may_end_is_a_workers() {
    for (tcp, v4) in [(true, true), (true, false), (false, true), (false, false)] {
        in_namespace(|| {
            let there = Sent { v4, ..sent(End::Outside, End::B, tcp, ACK) };
            let mut node = Node::new();
            node.repeat();
            let nodes = [address(End::Outside, true).into(), address(End::Outside, false).into()];
            let refused = Arc::new(Encapsulation::refused(WELL_KNOWN_TUNNEL_PORTS, nodes, []));
            node.snapshot.forwarding = node.snapshot.forwarding.clone().with_encapsulation(refused);
            answer(&mut node, there);
            assert_eq!(node.opened_by_program(there).is_some(), tcp, "{there:?}");
        });
    }
}

/// Opens connections by programs until one is left to a worker; returns how many.
fn flood(node: &Node, there: Sent, first: u8) -> u8 {
    (first..).find(|flow| node.opened_by_program(Sent { flow: *flow, ..there }).is_none()).unwrap() - first
}

#[test]
fn a_flood_ends_at_the_credit_of_its_pod_which_is_of_its_share() {
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let there = sent(End::A, End::B, true, ACK);
        let credit = 2;
        answer(&mut node, there);
        assert_eq!(flood(&node, there, 0), credit);
        let table = node.pipeline.connections();
        assert_eq!((table.len_of(OwnerId(A.0)), table.len()), (u32::from(credit) + 1, usize::from(credit) + 1));
        // A worker that opens one gives more, as does one that hears of them.
        node.handshake(Sent { flow: 100, ..there }, SYN, true, Timestamp::now());
        assert_eq!(flood(&node, there, 10), credit);
        node.hear();
        assert_eq!(flood(&node, there, 20), credit);
        // As far as the share goes, a quarter of the table.
        let mut opened = 0;
        while opened < 200 {
            node.hear();
            match flood(&node, there, 30 + opened) {
                0 => break,
                more => opened += more,
            }
        }
        let table = node.pipeline.connections();
        assert_eq!(table.len_of(OwnerId(A.0)), ENTRIES as u32 / 4);
        // What ends makes room.
        forget(&node);
        assert_eq!(node.pipeline.connections().len(), 0);
        answer(&mut node, there);
        assert_eq!(flood(&node, there, 0), credit);
    });
}

#[test]
fn a_repeated_connection_meets_a_worker_after_a_change() {
    for keeps in [true, false] {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            let there = sent(End::A, End::B, true, ACK);
            answer(&mut node, there);
            forget(&node);
            // A change that finds the table empty leaves nothing to look at.
            node.next_epoch_keeping(true);
            answer(&mut node, there);
            let steps = [(there, SYN, true), (there.back(), SYN | ACK, false), (there, ACK, true)];
            for (packet, flags, from_opener) in steps {
                let packet = Sent { flags, payload: 0, ..packet };
                let frame = in_step(packet.frame(), true, flags, from_opener);
                assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}");
            }
            node.hear();
            let kept = if keeps { node.next_epoch_keeping(true) } else { 0 };
            if !keeps {
                node.next_epoch(false);
            }
            assert_eq!(kept, usize::from(keeps));
            assert_eq!(node.program(End::A, End::B, &there.frame(), 0).is_some(), keeps);
            if !keeps {
                let (verdict, _) = node.worker(End::A, &there.frame(), Timestamp::now());
                assert_eq!(verdict, Verdict::Drop(DropReason::ConnectionRevoked));
            }
            let next = Sent { flow: 7, ..there };
            assert_eq!(node.opened_by_program(next).is_some(), keeps, "what was answered before counts if it was kept");
        });
    }
}

/// A snapshot with other ports.
fn with_ports(next: &Snapshot, node: &[&str], change: impl Fn(PortId, &mut Port) -> PortId) -> Snapshot {
    let mut forwarding = Forwarding::new(node.iter().map(|address| ip(address).into()));
    for (id, port) in next.forwarding.ports() {
        let mut port = port.clone();
        let id = change(id, &mut port);
        forwarding.insert(id, port).unwrap();
    }
    Snapshot::new(next.epoch, next.policy.clone(), forwarding)
}

/// What the next snapshot is made of.
type Next<'a> = &'a (dyn Fn(&Node, Snapshot) -> Snapshot + Sync);

/// Whether a connection between these ends stays as it is.
type Stays = fn(End, End) -> bool;

#[test]
fn an_answer_outlasts_each_change_under_which_a_worker_would_give_it_again() {
    const NODE: &str = "192.168.0.1";
    let swapped = |id: PortId| match id {
        A => B,
        B => A,
        other => other,
    };
    let limits = |port: PortId| {
        let limit = Limit { each_second: Some(1), open: None };
        LimitedPods::new([(port, Arc::new(PodLimits::new(limit, limit)))])
    };
    let cases: [(&str, Next<'_>, Stays); 8] = [
        ("nothing", &|_, next| next, |_, _| true),
        ("B takes no more", &|node, next| node.snapshot_of(next.epoch, false), |_, to| to != End::B),
        (
            "the pods' interfaces are others",
            &|_, next| {
                let of = |id| next.forwarding.port(swapped(id)).unwrap().interface;
                with_ports(&next, &[NODE], |id, port| {
                    port.interface = of(id);
                    id
                })
            },
            |_, _| false,
        ),
        ("the pods' ports are others", &|_, next| with_ports(&next, &[NODE], |id, _| swapped(id)), |_, _| false),
        (
            "others filter at A's interface",
            &|_, next| {
                with_ports(&next, &[NODE], |id, port| {
                    port.by_stack = id == A;
                    id
                })
            },
            |from, to| (from, to) != (End::A, End::B),
        ),
        (
            "the machine outside is the node itself",
            &|_, next| {
                let outside = [true, false].map(|v4| address(End::Outside, v4).to_string());
                with_ports(&next, &[NODE, &outside[0], &outside[1]], |id, _| id)
            },
            |from, to| ![from, to].contains(&End::Outside),
        ),
        ("A's connections are limited", &|_, next| next.with_limits(limits(A)), |from, _| from != End::A),
        ("B's connections are limited", &|_, next| next.with_limits(limits(B)), |_, to| to != End::B),
    ];
    for (what, change, stays) in cases {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            repeatable().into_iter().for_each(|there| answer(&mut node, there));
            let next = node.snapshot_of(node.snapshot.epoch.next(), true);
            node.keep_and_publish(change(&node, next));
            for there in repeatable() {
                let is_repeated = node.opened_by_program(Sent { flow: 7, ..there }).is_some();
                // Its owner gets new credit.
                node.hear();
                forget(&node);
                assert_eq!(is_repeated, stays(there.from, there.to), "{what}: {there:?}");
            }
        });
    }
}

#[test]
fn the_next_process_counts_and_stops_what_programs_open() {
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let there = sent(End::A, End::B, true, ACK);
        answer(&mut node, there);
        assert!(node.opened_by_program(there).is_some(), "without a daemon as with one");
        node.pipeline = Pipeline::new(open_table_for(&node.maps, WITHOUT_DAEMON), PipelineMode::Full);
        let meanwhile = Sent { flow: 4, ..there };
        assert!(node.opened_by_program(meanwhile).is_some(), "until the next process takes the table");
        let table = node.pipeline.connections();
        table.adopt();
        assert_eq!((table.origin(), table.len()), (&TableOrigin::Found, 3));
        assert_eq!(table.len_of(OwnerId(A.0)), 3, "the credit has ended with its process");
        let next = Sent { flow: 3, ..there };
        node.repeat();
        assert!(node.opened_by_program(next).is_none(), "before it has ports and policy");
        node.pipeline.connections().take_over();
        node.next_epoch(true);
        node.repeat();
        assert!(node.opened_by_program(next).is_none(), "answers have ended with their process");
        assert!(node.hear().is_empty(), "and so have its events");
        node.handshake(Sent { flow: 5, ..there }, SYN, true, Timestamp::now());
        assert!(node.opened_by_program(next).is_some());
    });
}

/// A program and a worker open the same connections at once, from both sides: each has one entry, and what lost is given back.
#[test]
fn a_program_beside_a_worker_leaves_one_entry() {
    in_namespace(|| {
        let mut node = Node::new();
        let connections = open_table(&node.maps);
        node.pipeline = Pipeline::new(connections.clone(), PipelineMode::Full);
        connections.take_over();
        node.next_epoch(true);
        node.repeat();
        let there = sent(End::A, End::B, false, 0);
        answer(&mut node, there);
        let snapshot = node.snapshot.clone();
        let (stop, now) = (AtomicBool::new(false), Timestamp::now());
        let frame = there.frame();
        let at = node.interface(End::A);
        let (mut opened, mut most) = (0, 0);
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut pipeline = Pipeline::new(connections.clone(), PipelineMode::Full);
                let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
                while !stop.load(Ordering::Relaxed) {
                    let mut batch = MemoryFrames::new();
                    batch.push(frame.clone()).unwrap();
                    pipeline.process_batch(&snapshot, now, A, &mut batch, &mut verdicts, &mut ());
                }
            });
            for _ in 0..3000 {
                let tried = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap();
                opened += u32::from(tried.frame[..2] != TO_WORKER);
                let flows = connections.iter(now).map(|found| found.original);
                most = most.max(flows.filter(|flow| flow.src_port == there.ends().0.1).count());
                node.hear();
                forget(&node);
            }
            stop.store(true, Ordering::Relaxed);
            worker.join().unwrap();
        });
        forget(&node);
        assert_eq!((most, connections.len()), (1, 0), "{opened} were opened by programs");
        assert!(opened > 0);
    });
}

/// Elements before those of credit, as `ANSWERS` in `repeat.h`.
pub(crate) const ANSWERS: usize = 4096;

/// What programs read to open a connection.
struct Shared {
    /// Version, four words of addresses, ports with protocol, path, and epoch with owner and direction.
    answer: [u64; 8],
    credit: u64,
    /// Until when they may.
    repeats: u32,
    epoch: u32,
}

/// A change of what the programs read to open a connection, and whether they do. `direction`: of the packet.
type SharedChange = fn(&mut Shared, usize);
const OF_SHARED: &[(&str, SharedChange, bool)] = &[
    ("as it is", |_, _| (), true),
    ("a later version", |of, _| of.answer[0] += 2, true),
    ("being written", |of, _| of.answer[0] += 1, false),
    ("never written", |of, _| of.answer[0] = 0, false),
    ("another lower address", |of, _| of.answer[1] ^= 1, false),
    ("the other half of it", |of, _| of.answer[2] ^= 1 << 63, false),
    ("another higher address", |of, _| of.answer[3] ^= 1 << 63, false),
    ("the other half of that", |of, _| of.answer[4] ^= 1, false),
    ("another port", |of, direction| of.answer[5] ^= 1 << (16 * (1 - direction)), false),
    ("a port of the opener", |of, direction| of.answer[5] ^= 1 << (16 * direction), false),
    ("another protocol", |of, _| of.answer[5] ^= 1 << 39, false),
    ("from another interface", |of, direction| of.answer[6] ^= 1 << (21 * direction), false),
    ("from an interface with more bits", |of, direction| of.answer[6] ^= 1 << (21 * direction + 20), false),
    ("to an interface that no pod has", |of, direction| of.answer[6] ^= 1 << (21 * (1 - direction) + 10), false),
    ("of the epoch before", |of, _| of.answer[7] -= 1, false),
    ("of the next epoch", |of, _| of.answer[7] += 1, true),
    ("of an epoch long ago", |of, _| of.epoch += 1 << 30, false),
    ("opened by the other end", |of, _| of.answer[7] ^= 1 << 48, false),
    ("of an owner without credit", |of, _| of.answer[7] ^= 1 << 40, false),
    ("of what another opens to it, or it opens itself", |of, _| of.answer[7] ^= 1 << 47, false),
    ("the last credit", |of, _| of.credit = 1, true),
    ("no credit", |of, _| of.credit = 0, false),
    ("less than none", |of, _| of.credit = u64::MAX, false),
    ("nobody says that programs may", |of, _| of.repeats = 0, false),
    ("nobody does any more", |of, _| of.repeats &= !(1 << 31), false),
    ("until an hour ago", |of, _| of.set_until(-7000), false),
    ("until now", |of, _| of.set_until(2), true),
    ("for five days", |of, _| of.set_until(5 * 86_400 * 2), true),
    ("only with a daemon, which runs", |of, _| of.repeats |= 1 << 30, true),
];

impl Shared {
    /// Programs may for so many ticks.
    fn set_until(&mut self, ticks: i64) {
        let tick = (Timestamp::now().as_millis() / 512).wrapping_add(ticks as u64) & 0x3f_ffff;
        self.repeats = 1 << 31 | tick as u32;
    }

    fn read(words: &Words, answer: usize, owner: usize) -> Self {
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        Self {
            answer: std::array::from_fn(|word| load(&words.behind(answer)[word])),
            credit: load(&words.behind(ANSWERS + owner)[0]),
            repeats: words.repeats().load(Ordering::Acquire),
            epoch: words.epoch().load(Ordering::Acquire),
        }
    }

    fn write(&self, words: &Words, answer: usize, owner: usize) {
        let store = |word: &AtomicU64, value| word.store(value, Ordering::Release);
        words.behind(answer).iter().zip(self.answer).for_each(|(word, value)| store(word, value));
        store(&words.behind(ANSWERS + owner)[0], self.credit);
        words.repeats().store(self.repeats, Ordering::Release);
        words.epoch().store(self.epoch, Ordering::Release);
    }
}

#[test]
fn a_connection_opens_only_if_each_field_of_an_answer_allows() {
    for there in repeatable() {
        in_namespace(|| {
            let mut node = Node::new();
            node.publish(Epoch(9), true);
            node.repeat();
            let (words, owner) = (Words::of(&node), place_of_credit(owner(there)));
            for (what, change, passes) in OF_SHARED {
                node.next_epoch(true);
                answer(&mut node, there);
                forget(&node);
                let is_written = |element: &usize| words.behind(*element)[0].load(Ordering::Acquire) != 0;
                let answers: Vec<usize> = (0..ANSWERS).filter(is_written).collect();
                let [at] = answers[..] else { panic!("{answers:?}") };
                let mut shared = Shared::read(&words, at, owner);
                let before = Shared::read(&words, at, owner);
                change(&mut shared, usize::from(there.ends().0.0 > there.ends().1.0));
                shared.write(&words, at, owner);
                let done = node.opened_by_program(there);
                let left = words.behind(ANSWERS + owner)[0].load(Ordering::Acquire);
                assert_eq!(done.is_some(), *passes, "{what}: {there:?}");
                assert_eq!(left, shared.credit.wrapping_sub(u64::from(*passes)), "{what}: {there:?}");
                assert_eq!(node.pipeline.connections().iter(Timestamp::now()).count(), usize::from(*passes), "{what}");
                let used = before.credit.wrapping_sub(u64::from(*passes));
                Shared { credit: used, ..before }.write(&words, at, owner);
                forget(&node);
            }
        });
    }
}

/// Another question may have the first place of the pair.
#[test]
fn an_answer_is_found_in_either_place_of_its_pair() {
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let (words, there) = (Words::of(&node), sent(End::A, End::B, true, ACK));
        answer(&mut node, there);
        let is_written = |element: &usize| words.behind(*element)[0].load(Ordering::Acquire) != 0;
        let first = (0..ANSWERS).find(is_written).unwrap();
        words.behind(first)[1].fetch_xor(1, Ordering::AcqRel);
        assert!(node.opened_by_program(there).is_none());
        node.handshake(Sent { flow: 7, ..there }, SYN, true, Timestamp::now());
        assert_eq!((0..ANSWERS).filter(is_written).collect::<Vec<_>>(), [first & !1, first | 1]);
        assert!(node.opened_by_program(there).is_some());
    });
}

#[test]
fn a_connection_without_a_free_entry_in_its_group_is_a_workers() {
    in_namespace(|| {
        let mut node = Node::new();
        node.repeat();
        let (words, there) = (Words::of(&node), sent(End::A, End::B, true, ACK));
        answer(&mut node, there);
        let left = words.behind(ANSWERS + A.index())[0].load(Ordering::Acquire);
        words.fill(true);
        assert!(node.opened_by_program(there).is_none());
        words.fill(false);
        assert!(node.opened_by_program(there).is_some());
        assert_eq!(
            words.behind(ANSWERS + A.index())[0].load(Ordering::Acquire),
            left - 1,
            "what was not used is there"
        );
    });
}

/// Without the process, programs that are not to open connections alone open none.
#[test]
fn answers_end_with_the_daemon_where_they_must_not_outlast_it() {
    for (longest, passes) in [(WITHOUT_DAEMON, true), (Duration::ZERO, false)] {
        in_namespace(|| {
            let mut node = Node::new();
            node.pipeline = Pipeline::new(open_table_for(&node.maps, longest), PipelineMode::Full);
            node.pipeline.connections().take_over();
            node.next_epoch(true);
            node.repeat();
            let there = sent(End::A, End::B, true, ACK);
            answer(&mut node, there);
            assert!(node.opened_by_program(there).is_some(), "{longest:?}");
            node.programs.forget_process().unwrap();
            let next = Sent { flow: 2, ..there };
            assert_eq!(node.opened_by_program(next).is_some(), passes, "{longest:?}");
        });
    }
}

/// With a daemon a flood ends at the credit that workers give; without one it may have more of its pod's share, and has an end, too.
#[test]
fn without_a_daemon_a_pod_has_a_part_of_its_share_as_credit() {
    for tcp in [true, false] {
        in_namespace(|| {
            let mut node = Node::new();
            node.repeat();
            let there = sent(End::A, End::B, tcp, if tcp { ACK } else { 0 });
            let credit = 2;
            answer(&mut node, there);
            let alone = (ENTRIES / 4) as u8 / 4;
            assert_eq!(flood(&node, there, 0), credit);
            node.programs.forget_process().unwrap();
            // The worker's own connection was counted by then.
            assert_eq!(flood(&node, there, 10), alone - 1);
            assert_eq!(flood(&node, there, 50), 0);
            let table = open_table(&node.maps);
            assert_eq!(table.len_of(OwnerId(A.0)), u32::from(credit + alone), "the next process counts them all");
        });
    }
}

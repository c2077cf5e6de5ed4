//! What the programs read of an entry of the table, of its path and of its links: a packet passes only if each part allows it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions};
use penstock_dataplane::conntrack::OwnerId;

use super::repeat::{ANSWERS, place_of_credit};
use super::*;

// The control word, as `dataplane/src/conntrack/entry.rs` has it.
const STATES: u64 = 15;
const TENTATIVE: u64 = 1 << 4;
const ORIGINAL: u64 = 1 << 5;
const REVOKED: u64 = 1 << 6;
const VIA_HOST: u64 = 1 << 7;
const TICK_AT: u32 = 8;
const TICKS: u64 = 0x3f_ffff;
const TICK_MILLISECONDS: u64 = 512;
const EPOCH_AT: u32 = 30;
const EPOCHS: u64 = 0x7f_ffff;
const GENERATION_AT: u32 = 53;
const GENERATIONS: u64 = 0x3ff;
const TRANSLATED: u64 = 1 << 63;
pub(crate) const CLAIMED: u64 = 1;
const FRONTEND: u64 = 15;

// The path, as `dataplane/src/conntrack/path.rs` has it.
const ANSWERED: u64 = 1 << 42;
const CONFIRMED: u64 = 1 << 43;
const FINISHED: u64 = 0b11 << 44;
const TAKEN_AT: usize = 46;
const PATH_EPOCH_AT: u32 = 48;
const END_BITS: usize = 21;
const BY_NODE: u64 = 0x1f_ffff;

/// What the programs read of a connection, and the words for all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fields {
    /// Control word, four words of addresses, ports with protocol, and tracking of each direction.
    pub(crate) entry: [u64; 8],
    pub(crate) path: u64,
    /// By direction: bytes, and the tick of the last packet.
    pub(crate) used: [u64; 2],
    pub(crate) link: u64,
    pub(crate) epoch: u32,
    pub(crate) timeouts: [u32; 5],
}

impl Fields {
    pub(crate) fn set_state(&mut self, state: u64) {
        self.entry[0] = self.entry[0] & !STATES | state;
    }

    /// The tick of the last packet at a worker.
    fn tick(&self) -> u64 {
        self.entry[0] >> TICK_AT & TICKS
    }

    fn set_tick(&mut self, now: Timestamp) {
        let tick = (now.as_millis() / TICK_MILLISECONDS) & TICKS;
        self.entry[0] = self.entry[0] & !(TICKS << TICK_AT) | tick << TICK_AT;
    }

    /// How often the entry was claimed.
    pub(crate) fn generation(&self) -> u64 {
        self.entry[0] >> GENERATION_AT & GENERATIONS
    }

    /// The present tick, as programs note it.
    pub(crate) fn now() -> u64 {
        (Timestamp::now().as_millis() / TICK_MILLISECONDS) & TICKS
    }

    pub(crate) fn set_age(&mut self, ticks: i64) {
        let tick = self.tick().wrapping_sub(ticks as u64) & TICKS;
        self.entry[0] = self.entry[0] & !(TICKS << TICK_AT) | tick << TICK_AT;
    }

    /// What is alike in two entries of the same connection: neither its generation nor when it was used.
    pub(crate) fn lasting(mut self) -> Self {
        let began = self.tick();
        self.entry[0] &= !(TICKS << TICK_AT | GENERATIONS << GENERATION_AT);
        self.used = self.used.map(|used| used & !TICKS);
        if self.entry[5] >> 32 & 0xff == 17 && self.entry[6] == began {
            self.entry[6] = u64::MAX;
        }
        Self { link: 0, ..self }
    }

    /// Whether it is of the connection of this flow.
    pub(crate) fn is_of(&self, flow: &Flow) -> bool {
        let ends = [flow.src.min(flow.dst), flow.src.max(flow.dst)].map(|end| end.bits());
        let halves = ends.iter().flat_map(|bits| [(bits >> 64) as u64, *bits as u64]);
        let ports = [flow.src_port, flow.dst_port].map(u64::from);
        let [low, high] = if flow.src < flow.dst { ports } else { [ports[1], ports[0]] };
        self.entry[1..5].iter().copied().eq(halves)
            && self.entry[5] & 0xff_ffff_ffff == low | high << 16 | u64::from(flow.protocol.0) << 32
    }

    /// The window of a SYN's sender whose options were not read.
    pub(crate) fn widen(&mut self, direction: usize) {
        self.entry[6 + direction] &= !(31 << 52 | 15 << 57);
        self.entry[6 + direction] |= 16 << 52 | 15 << 57;
    }

    /// Evaluated under this epoch, and the path taken under it.
    pub(crate) fn set_evaluated(&mut self, epoch: u64) {
        self.entry[0] = self.entry[0] & !(EPOCHS << EPOCH_AT) | (epoch & EPOCHS) << EPOCH_AT;
        self.set_path_epoch(epoch);
    }

    fn set_path_epoch(&mut self, epoch: u64) {
        self.path = self.path & ((1 << PATH_EPOCH_AT) - 1) | (epoch & 0xffff) << PATH_EPOCH_AT;
    }
}

/// The table's words, mapped as workers map them.
pub(crate) struct Words {
    table: MmapMut,
    tags: MmapMut,
    entries: MmapMut,
    uses: MmapMut,
}

/// Entries of a group.
const LANES: usize = 32;

/// Number of entries: more than there may be connections.
fn capacity() -> usize {
    KernelMapSizes::of(ENTRIES).entries as usize
}

/// Words of `struct table` before its epoch.
const HEADER: usize = 14;

impl Words {
    pub(crate) fn of(node: &Node) -> Self {
        let [table, tags, entries, uses] = node.maps.descriptors().unwrap();
        let sizes = KernelMapSizes::of(ENTRIES);
        let map = |fd, elements: u32, size: u32| {
            // SAFETY: what others change in these maps is read and written by atomics only.
            unsafe { MmapOptions::new().len((elements * size) as usize).map_mut(&fd) }.unwrap()
        };
        Self {
            table: map(table, 1, KernelMapSizes::TABLE),
            tags: map(tags, sizes.groups, KernelMapSizes::TAGS),
            entries: map(entries, sizes.with_links, KernelMapSizes::ENTRY),
            uses: map(uses, sizes.entries, KernelMapSizes::USE),
        }
    }

    fn words(map: &MmapMut) -> &[AtomicU64] {
        // SAFETY: the mapping lives as long as the borrow, is page-aligned, and any bits are a valid atomic.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / 8) }
    }

    fn entry(&self, slot: usize) -> &[AtomicU64] {
        &Self::words(&self.entries)[slot * 8..][..8]
    }

    /// Path, packets, and of each direction the bytes and the tick.
    fn usage(&self, slot: usize) -> &[AtomicU64] {
        &Self::words(&self.uses)[slot * 4..][..4]
    }

    fn link(&self, slot: usize) -> &AtomicU64 {
        &Self::words(&self.entries)[capacity() * 8 + slot]
    }

    fn tag(&self, slot: usize) -> u64 {
        Self::words(&self.tags)[slot / 4].load(Ordering::Acquire) >> (slot % 4 * 16) & 0xffff
    }

    fn set_tag(&self, slot: usize, tag: u64) {
        let (word, at) = (&Self::words(&self.tags)[slot / 4], slot % 4 * 16);
        let others = word.load(Ordering::Acquire) & !(0xffff << at);
        word.store(others | tag << at, Ordering::Release);
    }

    /// Element of what programs need to open connections: answers, then credit by owner.
    pub(crate) fn behind(&self, element: usize) -> &[AtomicU64] {
        // Eight links are an element, and four openers.
        let openers = capacity() + capacity() / 8 + capacity() / 4;
        &Self::words(&self.entries)[(openers + element) * 8..][..8]
    }

    /// What programs may still open for an owner.
    pub(crate) fn credit(&self, owner: OwnerId) -> u64 {
        self.behind(ANSWERS + place_of_credit(owner))[0].load(Ordering::Acquire)
    }

    /// Until when programs may open connections.
    pub(crate) fn repeats(&self) -> &AtomicU32 {
        let at = &self.table[HEADER * 8 + 6 * 4..][..4];
        // SAFETY: as in [`Words::words`].
        unsafe { &*at.as_ptr().cast() }
    }

    /// The epoch that programs compare with.
    pub(crate) fn epoch(&self) -> &AtomicU32 {
        &self.shared()[0]
    }

    /// Gives each entry of the table a tag, so that none is free, or takes these away again.
    pub(crate) fn fill(&self, is_full: bool) {
        for slot in (0..capacity()).filter(|&slot| self.entry(slot)[0].load(Ordering::Acquire) & STATES == 0) {
            self.set_tag(slot, u64::from(is_full));
        }
    }

    /// The epoch, and the timeouts.
    fn shared(&self) -> &[AtomicU32] {
        let at = &self.table[HEADER * 8..][..6 * 4];
        // SAFETY: as in [`Words::words`].
        unsafe { std::slice::from_raw_parts(at.as_ptr().cast(), 6) }
    }

    /// The entries in use.
    pub(crate) fn slots(&self) -> Vec<usize> {
        (0..capacity()).filter(|&slot| self.entry(slot)[0].load(Ordering::Acquire) & STATES > CLAIMED).collect()
    }

    pub(crate) fn read(&self, slot: usize) -> Fields {
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        let shared = self.shared();
        Fields {
            entry: std::array::from_fn(|word| load(&self.entry(slot)[word])),
            path: load(&self.usage(slot)[0]),
            used: std::array::from_fn(|direction| load(&self.usage(slot)[2 + direction])),
            link: load(self.link(slot)),
            epoch: shared[0].load(Ordering::Acquire),
            timeouts: std::array::from_fn(|kind| shared[1 + kind].load(Ordering::Acquire)),
        }
    }

    pub(crate) fn write(&self, slot: usize, fields: &Fields) {
        let store = |word: &AtomicU64, value| word.store(value, Ordering::Release);
        self.entry(slot).iter().zip(fields.entry).for_each(|(word, value)| store(word, value));
        store(&self.usage(slot)[0], fields.path);
        self.usage(slot)[2..].iter().zip(fields.used).for_each(|(word, value)| store(word, value));
        store(self.link(slot), fields.link);
        self.shared()[0].store(fields.epoch, Ordering::Release);
        self.shared()[1..].iter().zip(fields.timeouts).for_each(|(word, value)| word.store(value, Ordering::Release));
    }
}

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
    ("a frontend without a Service", |of, _| of.set_state(FRONTEND), false),
    ("translated without a link", |of, _| of.entry[0] |= TRANSLATED, false),
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
fn a_packet_passes_only_if_each_field_of_its_connection_allows_it() {
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

/// While a program notes the number of a SYN-ACK, the next SYN that was sent between the same ends gets the entry.
#[test]
fn a_late_answer_leaves_the_window_of_the_entrys_next_connection() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        let there = sent(End::A, End::B, true, SYN);
        node.handshake(there, SYN, true, now);
        let (slot, back) = (words.slots()[0], Sent { flags: SYN | ACK, payload: 0, ..there.back() });
        let other = 6 + usize::from(back.ends().0.0 > back.ends().1.0);
        let (fields, entry, path) = (words.read(slot).entry, words.entry(slot), &words.usage(slot)[0]);
        let (taken, claims, wrong) = (path.load(Ordering::SeqCst), AtomicU64::new(0), AtomicBool::new(false));
        // A worker writes other protocols' words, and those of a connection that it has answered itself.
        let worker = || {
            for window in [0, 77, 1 << 61 | 5000] {
                let control = of_next_generation(fields[0], &claims);
                entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                path.store(control >> GENERATION_AT & GENERATIONS, Ordering::SeqCst);
                entry[other].store(window, Ordering::SeqCst);
                entry[0].store(control, Ordering::SeqCst);
                (0..50).for_each(|_| std::hint::spin_loop());
                wrong.fetch_or(entry[other].load(Ordering::SeqCst) != window, Ordering::SeqCst);
                entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                entry[other].store(fields[other], Ordering::SeqCst);
                path.store(taken, Ordering::SeqCst);
                entry[0].store(of_next_generation(fields[0], &claims), Ordering::SeqCst);
                (0..200).for_each(|_| std::hint::spin_loop());
            }
        };
        let (frame, at) = (in_step(back.frame(), true, SYN | ACK, false), node.interface(End::B));
        let before = node.programs.offloaded().unwrap();
        beside(worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
        assert_ne!(node.programs.offloaded().unwrap(), before, "some pass");
        assert!(!wrong.into_inner());
    });
}

/// In which directions packets of a connection to a Service pass after a change of the client's entry, of the other one, or of their
/// links: from the client, and from the backend. A change that makes the other direction's packets those of another connection says
/// nothing of them: `None`.
type LinkedChange = fn(&mut Fields, &mut Fields);
const OF_TRANSLATED: &[(&str, LinkedChange, [Option<bool>; 2])] = &[
    ("as it is", |_, _| (), [Some(true); 2]),
    ("the client's is tentative", |client, _| client.entry[0] |= TENTATIVE, [Some(false); 2]),
    ("the other is tentative", |_, other| other.entry[0] |= TENTATIVE, [Some(false); 2]),
    ("the other is revoked", |_, other| other.entry[0] |= REVOKED, [Some(false); 2]),
    ("the client's is of the next connection", |client, _| client.entry[0] ^= 1 << GENERATION_AT, [Some(false); 2]),
    ("the other is of the next connection", |_, other| other.entry[0] ^= 1 << GENERATION_AT, [Some(false); 2]),
    ("the client's link names another entry", |client, _| client.link ^= 1, [Some(false); 2]),
    ("the other's link names another entry", |_, other| other.link ^= 1, [Some(false); 2]),
    ("the client's has no link", |client, _| client.link = 0, [Some(false); 2]),
    ("the other has no link", |_, other| other.link = 0, [Some(false); 2]),
    ("the client's link leads out of the table", |client, _| client.link |= 0xffff, [Some(false); 2]),
    ("the client's is not translated", |client, _| client.entry[0] &= !TRANSLATED, [Some(false); 2]),
    ("the other is not translated", |_, other| other.entry[0] &= !TRANSLATED, [Some(false), None]),
    ("the client's is no frontend", |client, _| client.set_state(5), [Some(false); 2]),
    ("both are frontends", |_, other| other.set_state(FRONTEND), [Some(false); 2]),
    ("the client's is free", |client, _| client.set_state(0), [Some(false); 2]),
    ("the other is claimed", |_, other| other.set_state(CLAIMED), [Some(false); 2]),
    ("the client's was opened by the Service", |client, _| client.entry[0] ^= ORIGINAL, [Some(false), None]),
    ("the other was opened by the backend", |_, other| other.entry[0] ^= ORIGINAL, [Some(false); 2]),
    ("the other is of the epoch before", |_, other| other.set_evaluated(u64::from(other.epoch) - 1), [Some(false); 2]),
    (
        "the client's is of the epoch before",
        |client, _| client.set_evaluated(u64::from(client.epoch) - 1),
        [Some(true); 2],
    ),
];

#[test]
fn a_translated_packet_passes_only_if_both_entries_and_their_links_allow_it() {
    in_namespace(|| {
        let mut node = Node::new();
        node.publish(Epoch(9), true);
        let (words, now) = (Words::of(&node), Timestamp::now());
        for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
            forget(&node);
            let there = Sent { v4, ..to_service(End::A, End::B, tcp, ACK) };
            open(&mut node, there, now);
            let is_frontend = |slot: &usize| words.read(*slot).entry[0] & STATES == FRONTEND;
            let (of_client, of_other): (Vec<usize>, Vec<usize>) = words.slots().into_iter().partition(is_frontend);
            let slots = [of_client[0], of_other[0]];
            for (what, change, passes) in OF_TRANSLATED {
                let before = slots.map(|slot| words.read(slot));
                let [mut client, mut other] = before;
                change(&mut client, &mut other);
                for (packet, passes) in [there, there.back()].into_iter().zip(passes) {
                    words.write(slots[0], &client);
                    words.write(slots[1], &other);
                    let done = node.program(packet.from, packet.to, &packet.frame(), 0);
                    slots.iter().zip(&before).for_each(|(&slot, fields)| words.write(slot, fields));
                    assert!(passes.is_none_or(|passes| done.is_some() == passes), "{what}: {packet:?}: {done:?}");
                }
            }
            assert_no_forged_answer(&node, there);
        }
    });
}

/// The client sends as if it were its Service; the backend, as if it were asked by itself.
fn assert_no_forged_answer(node: &Node, there: Sent) {
    let swapped = |packet: Sent| {
        let mut frame = packet.frame();
        let (from, size, ports) = if packet.v4 { (26, 4, 34) } else { (22, 16, 54) };
        (0..size).for_each(|byte| frame.swap(from + byte, from + size + byte));
        (0..2).for_each(|byte| frame.swap(ports + byte, ports + 2 + byte));
        frame
    };
    for packet in [there, there.back()] {
        assert!(node.program(packet.from, packet.to, &swapped(packet), 0).is_none(), "{packet:?}");
    }
}

#[test]
fn a_connection_is_found_in_either_of_its_two_groups_wherever_it_is_there() {
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

/// Runs `program` while `worker` writes again and again, until so many runs have had a worker beside them; on a machine where both
/// hardly ever run at the same time, for ten times as many.
fn beside(worker: impl Fn() + Sync, runs: u32, program: impl FnMut()) {
    // An entry's generation, of which there are 1024, must not come back while a program runs.
    beside_turns(200, worker, runs, program);
}

/// The same with at most so many turns of the worker in a run.
fn beside_turns(most_turns: u32, worker: impl Fn() + Sync, runs: u32, mut program: impl FnMut()) {
    const MOST: u32 = 10;
    let (is_over, begun, turns) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut run, mut in_run) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                let now = begun.load(Ordering::SeqCst);
                if now != run {
                    (run, in_run) = (now, 0);
                }
                if in_run < most_turns {
                    worker();
                    in_run += 1;
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut all = || {
            // Before, the entry is as the connection was opened, and its packets pass.
            while turns.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            let mut accompanied = 0;
            for _ in 0..MOST * runs {
                let before = turns.load(Ordering::Relaxed);
                begun.fetch_add(1, Ordering::SeqCst);
                program();
                accompanied += u32::from(turns.load(Ordering::Relaxed) != before);
                if accompanied == runs {
                    break;
                }
            }
        };
        // Also if an assertion fails, the worker ends.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut all));
        is_over.store(true, Ordering::Relaxed);
        done.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

const RUNS: u32 = 4_000;

/// The control word once the entry has been claimed again.
fn of_next_generation(control: u64, claims: &AtomicU64) -> u64 {
    let generation = claims.fetch_add(1, Ordering::Relaxed) & GENERATIONS;
    control & !(GENERATIONS << GENERATION_AT) | generation << GENERATION_AT
}

/// An entry has in turn an allowed connection of another flow, and the packet's flow, which is revoked.
#[test]
fn a_packet_never_passes_by_the_verdict_of_the_entrys_last_connection() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        for (v4, tcp) in [(true, true), (false, false)] {
            forget(&node);
            let there = Sent { v4, ..sent(End::A, End::B, tcp, ACK) };
            open(&mut node, there, now);
            let slot = words.slots()[0];
            let (allowed, entry) = (words.read(slot).entry, words.entry(slot));
            let claims = AtomicU64::new(0);
            let worker = || {
                for (port, verdict) in [(allowed[5] ^ 1, 0), (allowed[5], REVOKED)] {
                    let control = of_next_generation(allowed[0], &claims);
                    entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                    entry[5].store(port, Ordering::SeqCst);
                    entry[0].store(control | verdict, Ordering::SeqCst);
                }
            };
            let (frame, at) = (there.frame(), node.interface(End::A));
            let before = node.programs.offloaded().unwrap();
            beside(worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
            assert_eq!(node.programs.offloaded().unwrap(), before, "{there:?}");
        }
    });
}

/// While a program translates a packet, its connection ends, and another one gets the entry that the packet leaves with.
#[test]
fn a_packet_never_leaves_with_the_flow_of_the_entrys_next_connection() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        for v4 in [true, false] {
            forget(&node);
            let there = Sent { v4, ..to_service(End::A, End::B, true, ACK) };
            open(&mut node, there, now);
            let is_frontend = |slot: &usize| words.read(*slot).entry[0] & STATES == FRONTEND;
            let (of_client, of_other): (Vec<usize>, Vec<usize>) = words.slots().into_iter().partition(is_frontend);
            let (link, slot) = (words.link(of_client[0]), of_other[0]);
            let (fields, entry) = (words.read(slot).entry, words.entry(slot));
            // The backend has another port in the next connection.
            let is_low = fields[5] & 0xffff == u64::from(ANSWERING_PORT);
            let names = [fields[5], fields[5] ^ if is_low { 2 } else { 2 << 16 }];
            let claims = AtomicU64::new(0);
            let worker = || {
                for (name, is_linked) in names.into_iter().zip([true, false]) {
                    let control = of_next_generation(fields[0], &claims);
                    entry[0].store(control & !STATES & !TRANSLATED | CLAIMED, Ordering::SeqCst);
                    entry[5].store(name, Ordering::SeqCst);
                    entry[0].store(control, Ordering::SeqCst);
                    if is_linked {
                        let generation = control >> GENERATION_AT & GENERATIONS;
                        link.store(slot as u64 | generation << 32 | 1 << 63, Ordering::SeqCst);
                    }
                    // Long enough for a program to begin.
                    (0..200).for_each(|_| std::hint::spin_loop());
                }
            };
            let (frame, at) = (there.frame(), node.interface(End::A));
            let port = if v4 { 36 } else { 56 };
            beside(worker, RUNS, || {
                let tried = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap();
                let left = u16::from_be_bytes([tried.frame[port], tried.frame[port + 1]]);
                assert!(left == SERVICE_PORT || left == ANSWERING_PORT, "{left}: {there:?}");
            });
        }
    });
}

/// A worker changes the path while a program forwards a FIN, and notes it there.
#[test]
fn a_fin_never_brings_back_a_path_that_a_worker_has_just_changed() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        let there = sent(End::A, End::B, true, FIN | ACK);
        open(&mut node, there, now);
        let slot = words.slots()[0];
        let taken = words.read(slot).path & !FINISHED;
        let none = taken & !(0b11 << TAKEN_AT);
        let path = &words.usage(slot)[0];
        let (brought_back, turns) = (AtomicBool::new(false), AtomicU32::new(0));
        path.store(none, Ordering::SeqCst);
        let worker = || {
            brought_back.fetch_or(path.swap(taken, Ordering::SeqCst) != none, Ordering::SeqCst);
            // It changes the path at another moment of the program's each time, and sometimes long after, so that some pass.
            let spins = (1u32 << (turns.fetch_add(1, Ordering::Relaxed) % 9)) - 1;
            (0..spins).for_each(|_| std::hint::spin_loop());
            path.store(none, Ordering::SeqCst);
            (0..4).for_each(|_| std::hint::spin_loop());
        };
        let (frame, at) = (there.frame(), node.interface(End::A));
        let before = node.programs.offloaded().unwrap();
        beside_turns(u32::MAX, worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
        assert_ne!(node.programs.offloaded().unwrap(), before, "some pass");
        assert!(!brought_back.into_inner());
    });
}

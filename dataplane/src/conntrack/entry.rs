//! One connection: a cache line of eight atomic words.

use super::hash::{KeyWords, PORTS_BITS, PORTS_MASK};
use super::held_syn::HeldSyn;
use super::seqlock::{Control, SeqLock};
use super::sync::{AtomicU64, EXCHANGE, Ordering, overwrite};
use super::time::Tick;
use crate::epoch::Epoch;
use crate::packet::{Orientation, Protocol};

/// Owner of connections for quotas: a small number that the caller assigns to each pod, such as that of its port, and whether the pod
/// opens them or others open them to it. So what others do never takes from what the pod may open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct OwnerId(pub u16);

impl OwnerId {
    /// Others open them: the highest bit, which no pod's number has.
    const OPENED_TO: u16 = 1 << 15;
    /// Owns connections that no pod is an end of.
    pub const NONE: Self = Self(u16::MAX);

    /// Owns the connections that the pod of this number opens.
    #[inline]
    pub const fn opens(pod: u16) -> Self {
        Self(pod & !Self::OPENED_TO)
    }

    /// Owns the connections that others open to the pod of this number.
    #[inline]
    pub const fn opened_to(pod: u16) -> Self {
        Self(pod | Self::OPENED_TO)
    }

    /// Whether others open them, each of whom is a source.
    #[inline]
    pub const fn is_opened_to(self) -> bool {
        self.0 & Self::OPENED_TO != 0
    }
}

/// Epoch tag: the low 23 bits of an [`Epoch`], as stored in an entry. Compared by serial number arithmetic (RFC 1982):
/// of two within 2²² of each other the later one is known. [`ConnTable::sweep`](super::ConnTable::sweep) clears older
/// ones long before they are that far apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EpochTag(u32);

impl EpochTag {
    const BITS: u32 = Epoch::TAG_BITS;
    const MASK: u32 = (1 << Self::BITS) - 1;
    /// Tag of a connection that was not evaluated under any snapshot of this process. No published epoch has it
    /// ([`Epoch::next`]).
    pub(super) const NONE: Self = Self(0);
    /// A sweep clears the tag of an entry this far behind.
    const STALE: u32 = 1 << (Self::BITS - 2);

    #[inline]
    pub(super) const fn of(epoch: Epoch) -> Self {
        Self(epoch.0 & Self::MASK)
    }

    /// Its low 16 bits, as stored in a [path](super::path).
    pub(super) const fn low_bits(self) -> u64 {
        self.0 as u64 & 0xffff
    }

    /// Whether a verdict under this tag is still valid under `wanted`: it is equal or newer.
    #[inline]
    pub(super) const fn covers(self, wanted: Self) -> bool {
        self.0 != Self::NONE.0 && self.0.wrapping_sub(wanted.0) & Self::MASK < 1 << (Self::BITS - 1)
    }

    /// Whether it is so far behind `now` that it must be cleared before the numbers wrap.
    pub(super) const fn is_stale(self, now: Self) -> bool {
        self.0 != Self::NONE.0 && !self.covers(now) && now.0.wrapping_sub(self.0) & Self::MASK >= Self::STALE
    }
}

/// The control word: whether the entry is in use, per-packet state, and the verdict with the epoch of its evaluation.
/// Every change of use, state and verdict is one compare-and-swap of this word.
///
/// | bits | |
/// |---|---|
/// | 0–3 | state: 0 free, 1 claimed, otherwise the number of the connection's state |
/// | 4 | tentative: written, but not yet confirmed as the only entry of its key |
/// | 5 | orientation of the original direction |
/// | 6 | revoked by policy; the state is kept |
/// | 7 | via host: its packets traverse the node's own stack |
/// | 8–29 | tick of the last packet |
/// | 30–52 | tag of the epoch under which policy was last evaluated |
/// | 53–62 | generation: number of times the entry was claimed |
/// | 63 | who opened it is kept beside the entry ([`super::opener`]) |
///
/// The generation wraps after 2¹⁰ claims. A compare-and-swap delayed that long would also have to find the same state,
/// epoch and tick to go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ControlWord(pub(super) u64);

const STATE: u64 = 15;
const TENTATIVE: u64 = 1 << 4;
const ORIENTATION_AT: u32 = 5;
const ORIENTATION: u64 = 1 << ORIENTATION_AT;
const REVOKED: u64 = 1 << 6;
const VIA_HOST: u64 = 1 << 7;
const TICK_AT: u32 = 8;
const TICK: u64 = (Tick::MASK as u64) << TICK_AT;
const EPOCH_AT: u32 = TICK_AT + Tick::BITS;
const EPOCH: u64 = (EpochTag::MASK as u64) << EPOCH_AT;
const GENERATION_AT: u32 = EPOCH_AT + EpochTag::BITS;
const GENERATION: u64 = (1 << 10) - 1;
const HAS_OPENER: u64 = 1 << 63;
const _: () = assert!(GENERATION_AT == 53 && GENERATION << GENERATION_AT & HAS_OPENER == 0);

/// A slot and the control word under which this thread saw or claimed it.
pub(super) type SlotRef = (u32, ControlWord);

/// State number of a free entry.
pub(super) const FREE: u8 = 0;
/// State number of an entry that one thread is writing or clearing.
pub(super) const CLAIMED: u8 = 1;

impl ControlWord {
    /// A tentative connection in an entry claimed at this generation.
    pub(super) fn tentative(claimed: Self, state: u8, orientation: Orientation, epoch: EpochTag, tick: Tick) -> Self {
        Self(
            u64::from(state)
                | TENTATIVE
                | (orientation as u64) << ORIENTATION_AT
                | u64::from(tick.0) << TICK_AT
                | u64::from(epoch.0) << EPOCH_AT
                | claimed.generation() << GENERATION_AT,
        )
    }

    #[inline]
    pub(super) const fn state(self) -> u8 {
        (self.0 & STATE) as u8
    }

    #[inline]
    pub(super) const fn is_free(self) -> bool {
        self.state() == FREE
    }

    /// Whether it contains a connection, tentative or not.
    #[inline]
    pub(super) const fn is_written(self) -> bool {
        self.state() > CLAIMED
    }

    #[inline]
    pub(super) const fn is_tentative(self) -> bool {
        self.0 & TENTATIVE != 0
    }

    /// Whether it contains a connection visible to all.
    #[inline]
    pub(super) const fn is_live(self) -> bool {
        self.is_written() && !self.is_tentative()
    }

    /// Whether policy has revoked the connection.
    #[inline]
    pub(super) const fn is_revoked(self) -> bool {
        self.0 & REVOKED != 0
    }

    #[inline]
    pub(super) const fn is_via_host(self) -> bool {
        self.0 & VIA_HOST != 0
    }

    pub(super) const fn with_via_host(self, via_host: bool) -> Self {
        Self(if via_host { self.0 | VIA_HOST } else { self.0 & !VIA_HOST })
    }

    /// Whether who opened the connection is kept beside the entry.
    #[inline]
    pub(super) const fn has_opener(self) -> bool {
        self.0 & HAS_OPENER != 0
    }

    pub(super) const fn with_opener(self, has_opener: bool) -> Self {
        Self(if has_opener { self.0 | HAS_OPENER } else { self.0 & !HAS_OPENER })
    }

    /// Whether the connection is in the state of this number and not revoked.
    #[inline]
    pub(super) const fn is_in(self, state: u8) -> bool {
        self.0 & (STATE | REVOKED) == state as u64
    }

    #[inline]
    pub(super) const fn original(self) -> Orientation {
        if self.0 & ORIENTATION == 0 { Orientation::LowToHigh } else { Orientation::HighToLow }
    }

    #[inline]
    pub(super) const fn tick(self) -> Tick {
        Tick((self.0 >> TICK_AT) as u32 & Tick::MASK)
    }

    #[inline]
    pub(super) const fn epoch(self) -> EpochTag {
        EpochTag((self.0 >> EPOCH_AT) as u32 & EpochTag::MASK)
    }

    #[inline]
    pub(super) const fn generation(self) -> u64 {
        self.0 >> GENERATION_AT & GENERATION
    }

    /// Whether both belong to one connection, between one claim of the entry and the next.
    #[inline]
    pub(super) const fn is_same_generation(self, other: Self) -> bool {
        self.generation() == other.generation() && self.is_written() && other.is_written()
    }

    pub(super) const fn confirmed(self) -> Self {
        Self(self.0 & !TENTATIVE)
    }

    /// The same connection with another state or time.
    #[inline]
    pub(super) const fn with(self, state: u8, tick: Tick) -> Self {
        Self(self.0 & !STATE & !TICK | state as u64 | (tick.0 as u64) << TICK_AT)
    }

    /// The same connection with the verdict of this epoch.
    #[inline]
    pub(super) const fn with_verdict(self, epoch: EpochTag, allowed: bool) -> Self {
        let revoked = if allowed { 0 } else { REVOKED };
        Self(self.0 & !EPOCH & !REVOKED | (epoch.0 as u64) << EPOCH_AT | revoked)
    }

    /// The same connection, opened in this direction.
    pub(super) const fn with_original(self, orientation: Orientation) -> Self {
        Self(self.0 & !ORIENTATION | (orientation as u64) << ORIENTATION_AT)
    }

    /// Claimed by one thread, in the same generation.
    pub(super) const fn claimed(self) -> Self {
        Self(self.generation() << GENERATION_AT | CLAIMED as u64)
    }

    /// Claimed by one thread for a new connection, in the next generation.
    pub(super) const fn claimed_anew(self) -> Self {
        Self(((self.generation() + 1) & GENERATION) << GENERATION_AT | CLAIMED as u64)
    }

    /// Free, in the same generation.
    pub(super) const fn freed(self) -> Self {
        Self(self.generation() << GENERATION_AT)
    }
}

impl Control for ControlWord {
    #[inline(always)]
    fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline(always)]
    fn word(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn is_same_write(self, other: Self) -> bool {
        self.is_same_generation(other)
    }
}

/// Tracking state of each direction, indexed by [`Orientation`]: the window for TCP, the tag for SCTP. For other
/// protocols the first word is the tick of the first packet.
pub(super) type Tracking = [u64; 2];

/// Initial content of an entry besides its key.
#[derive(Clone, Copy)]
pub(super) struct EntryContents {
    pub(super) owner: OwnerId,
    pub(super) tracking: Tracking,
}

/// A consistent copy of an entry.
pub(super) struct EntrySnapshot {
    pub(super) control: ControlWord,
    pub(super) key: KeyWords,
    pub(super) owner: OwnerId,
    pub(super) tracking: Tracking,
}

/// The last key word above the key's 40 bits: owner in bits 40–55, then a flag, then a held SYN.
const OWNER_AT: u32 = PORTS_BITS;
const OWNER: u64 = 0xffff << OWNER_AT;
/// The owner is no longer counted: the entry is being cleared.
const UNCOUNTED: u64 = 1 << 56;
/// State of a SYN that a live connection has let through ([`super::held_syn::HeldSyn`]): bits 57–63.
const HELD_SYN_AT: u32 = 57;

/// Address words of a key. Loom uses only one, since it would not terminate otherwise.
const ADDRESS_WORDS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 4 };

/// One entry of the table. All zero is a free entry. Its key is of one connection as long as the generation in its
/// control word is the same ([`SeqLock`]).
#[repr(C, align(64))]
pub(super) struct TableEntry(SeqLock<ControlWord, EntryWords>);

/// The words of an entry besides the control word.
#[repr(C)]
struct EntryWords {
    /// Both addresses.
    addresses: [AtomicU64; ADDRESS_WORDS],
    /// Ports and protocol in the low 40 bits, then owner, flag and held SYN.
    ports: AtomicU64,
    tracking: [AtomicU64; 2],
}

const _: () = assert!(cfg!(all(test, feature = "loom")) || size_of::<TableEntry>() == 64);

impl TableEntry {
    #[cfg(all(test, feature = "loom"))]
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        let addresses = std::array::from_fn(|_| zero());
        Self(SeqLock::new(EntryWords { addresses, ports: zero(), tracking: [zero(), zero()] }))
    }

    /// The control word, with acquire ordering.
    #[inline]
    pub(super) fn control(&self) -> ControlWord {
        self.0.control()
    }

    /// Compare-and-swap of the control word; returns the current word on failure.
    #[inline]
    pub(super) fn exchange(&self, from: ControlWord, to: ControlWord) -> Result<(), ControlWord> {
        self.0.exchange(from, to)
    }

    /// Claims the entry for a new connection; returns the control word to write it under.
    pub(super) fn claim(&self) -> Option<ControlWord> {
        let free = self.control();
        let claimed = free.claimed_anew();
        (free.is_free() && self.exchange(free, claimed).is_ok()).then_some(claimed)
    }

    /// Writes a connection into an entry that this thread has claimed, and publishes it.
    pub(super) fn publish(&self, control: ControlWord, key: &KeyWords, contents: EntryContents) {
        self.0.publish(control, |words| {
            for (word, value) in words.addresses.iter().zip(key) {
                word.store(*value, Ordering::Relaxed);
            }
            overwrite(&words.ports, key[4] | u64::from(contents.owner.0) << OWNER_AT, Ordering::Relaxed);
            for (word, value) in words.tracking.iter().zip(contents.tracking) {
                overwrite(word, value, Ordering::Relaxed);
            }
        });
    }

    /// Frees an entry that this thread has claimed.
    pub(super) fn free(&self, claimed: ControlWord) {
        self.0.release(claimed.freed());
    }

    /// The control word, if the entry contains a connection with this key.
    #[inline(always)]
    pub(super) fn matches(&self, key: &KeyWords) -> Option<ControlWord> {
        let before = self.control();
        let words = self.words();
        // No early exit between the words: the comparison is one branch, which is nearly always taken.
        let ports = (words.ports.load(Ordering::Relaxed) ^ key[4]) & PORTS_MASK;
        let addresses = words.addresses.iter().zip(key);
        let differs =
            addresses.fold(ports, |differs, (word, wanted)| differs | (word.load(Ordering::Relaxed) ^ wanted));
        (differs == 0 && self.0.is_still(before)).then_some(before)
    }

    /// A consistent copy of the entry, or `None` if it is free or was claimed meanwhile.
    pub(super) fn load(&self) -> Option<EntrySnapshot> {
        let control = self.control();
        self.0.read(control, |words| words.snapshot(control))
    }

    /// The contents of the entry under `control`, though it is claimed for clearing or free by now; `None` if it was claimed
    /// for another connection.
    pub(super) fn load_claimed(&self, control: ControlWord) -> Option<EntrySnapshot> {
        let snapshot = self.words().snapshot(control);
        (self.0.control_after_loads().generation() == control.generation()).then_some(snapshot)
    }

    #[inline(always)]
    fn words(&self) -> &EntryWords {
        self.0.words()
    }

    /// The tracking words of the connection of `control`, if it still exists, with its current control word.
    #[inline]
    pub(super) fn tracking(&self, control: ControlWord) -> Option<(ControlWord, Tracking)> {
        let now = self.control();
        if !now.is_same_generation(control) {
            return None;
        }
        self.0.read(now, EntryWords::tracking).map(|tracking| (now, tracking))
    }

    /// The tracking words while the control word is exactly this one; `None` if it is not.
    #[inline]
    pub(super) fn tracking_under(&self, control: ControlWord) -> Option<Tracking> {
        let tracking = self.words().tracking();
        (self.0.control_after_loads() == control).then_some(tracking)
    }

    /// Compare-and-swap of a tracking word. It contains no generation: 32 bits are a sequence number or verification
    /// tag, which distinguish connections, and `from` was read while the connection existed.
    #[inline]
    pub(super) fn exchange_tracking(&self, orientation: Orientation, from: u64, to: u64) -> bool {
        from == to
            || self.words().tracking[orientation as usize]
                .compare_exchange(from, to, EXCHANGE, Ordering::Relaxed)
                .is_ok()
    }

    /// Resets the tracking words; only while no other thread uses the table.
    pub(super) fn set_tracking(&self, tracking: Tracking) {
        for (word, value) in self.words().tracking.iter().zip(tracking) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Owner whose quota the connection counts against. Only valid for a caller that afterwards changes the previously
    /// read control word by compare-and-swap, or has claimed the entry.
    #[inline]
    pub(super) fn owner(&self) -> OwnerId {
        OwnerId((self.words().ports.load(Ordering::Relaxed) >> OWNER_AT) as u16)
    }

    /// The owner of a connection that this thread has claimed for clearing. Afterwards [`TableEntry::exchange_owner`]
    /// fails, so the returned owner is the one it is counted for.
    pub(super) fn take_owner(&self) -> OwnerId {
        OwnerId((self.words().ports.fetch_or(UNCOUNTED, EXCHANGE) >> OWNER_AT) as u16)
    }

    /// Assigns the connection of `control` to another owner; returns the previous one, or `None` if the connection was
    /// removed.
    pub(super) fn exchange_owner(&self, control: ControlWord, to: OwnerId) -> Option<OwnerId> {
        let mut ports = self.words().ports.load(Ordering::Relaxed);
        loop {
            if !self.0.is_still(control) || ports & UNCOUNTED != 0 {
                return None;
            }
            // A thread that clears the entry later sets UNCOUNTED first and finds the new owner.
            let wanted = ports & !OWNER | u64::from(to.0) << OWNER_AT;
            match self.words().ports.compare_exchange(ports, wanted, EXCHANGE, Ordering::Relaxed) {
                Ok(_) => return Some(OwnerId((ports >> OWNER_AT) as u16)),
                Err(found) => ports = found,
            }
        }
    }

    /// The held SYN, if the tracking words indicate one; valid under the conditions of [`TableEntry::owner`].
    #[inline]
    pub(super) fn held_syn(&self) -> HeldSyn {
        HeldSyn((self.words().ports.load(Ordering::Relaxed) >> HELD_SYN_AT) as u8)
    }

    /// Stores a held SYN in the connection of `control`, if it still exists.
    pub(super) fn hold_syn(&self, control: ControlWord, syn: HeldSyn) {
        let mut ports = self.words().ports.load(Ordering::Relaxed);
        while self.0.is_still(control) {
            let wanted = ports & ((1 << HELD_SYN_AT) - 1) | u64::from(syn.0) << HELD_SYN_AT;
            match self.words().ports.compare_exchange(ports, wanted, EXCHANGE, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => ports = found,
            }
        }
    }

    /// Address words of the side that opened the connection of `control`. Valid under the conditions of
    /// [`TableEntry::owner`].
    #[inline]
    pub(super) fn opener_words(&self, control: ControlWord) -> [u64; 2] {
        let first = match control.original() {
            Orientation::LowToHigh => 0,
            Orientation::HighToLow => 2,
        };
        let word = |index: usize| self.words().addresses.get(index).map_or(0, |word| word.load(Ordering::Relaxed));
        [word(first), word(first + 1)]
    }

    /// The protocol; only valid for a caller with a control word of the same generation.
    #[inline]
    pub(super) fn protocol(&self) -> Protocol {
        Protocol((self.words().ports.load(Ordering::Relaxed) >> 32) as u8)
    }
}

impl EntryWords {
    #[inline]
    fn snapshot(&self, control: ControlWord) -> EntrySnapshot {
        let mut key = [0; 5];
        for (value, word) in key.iter_mut().zip(&self.addresses) {
            *value = word.load(Ordering::Relaxed);
        }
        let ports = self.ports.load(Ordering::Relaxed);
        key[4] = ports & PORTS_MASK;
        EntrySnapshot { control, key, owner: OwnerId((ports >> OWNER_AT) as u16), tracking: self.tracking() }
    }

    #[inline]
    fn tracking(&self) -> Tracking {
        [self.tracking[0].load(Ordering::Relaxed), self.tracking[1].load(Ordering::Relaxed)]
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_control_word_do_not_overlap() {
        let claimed = ControlWord(0x1ef << 53 | 0xfffff << 20).claimed_anew();
        assert_eq!((claimed.generation(), claimed.state()), (0x1f0, CLAIMED));
        let (tick, epoch) = (Tick(0x2a_5a5a), EpochTag::of(Epoch(0x12ab_cdef)));
        let control = ControlWord::tentative(claimed, 11, Orientation::HighToLow, epoch, tick);
        assert!(control.is_tentative() && control.is_written() && !control.is_live());
        let control = control.confirmed();
        assert!(control.is_live() && !control.is_revoked() && control.is_in(11));
        assert_eq!((control.state(), control.tick(), control.epoch()), (11, tick, epoch));
        assert_eq!((control.original(), control.generation()), (Orientation::HighToLow, 0x1f0));
        let other = control.with(3, Tick(Tick::MASK)).with_verdict(EpochTag::of(Epoch(1)), false);
        assert_eq!((other.state(), other.tick(), other.epoch()), (3, Tick(Tick::MASK), EpochTag(1)));
        assert!(other.is_revoked() && !other.is_in(3));
        assert_eq!((other.original(), other.generation()), (Orientation::HighToLow, 0x1f0));
        assert_eq!(other.with_original(Orientation::LowToHigh).original(), Orientation::LowToHigh);
        assert!(!other.with_verdict(EpochTag::of(Epoch(2)), true).is_revoked());
        let by_host = other.with_via_host(true);
        assert!(!other.is_via_host() && by_host.is_via_host() && by_host.with_via_host(false) == other);
        assert!(by_host.with(5, tick).is_via_host() && !by_host.claimed().is_via_host());
        assert!(control.is_same_generation(other) && !control.is_same_generation(control.claimed()));
        let opened = by_host.with_opener(true);
        assert!(!by_host.has_opener() && opened.has_opener() && opened.with_opener(false) == by_host);
        assert!(opened.with(5, tick).with_verdict(epoch, true).has_opener() && !opened.claimed().has_opener());
        assert_eq!(opened.generation(), 0x1f0);
        assert_eq!(ControlWord(u64::MAX).claimed_anew().generation(), 0, "the generation wraps");
    }

    #[test]
    fn epochs_are_compared_in_order_across_the_wrap() {
        let tag = |epoch: u32| EpochTag::of(Epoch(epoch));
        for start in [1, 5_000_000, (1 << 24) - 3, (3 << 24) - 1, u32::MAX - 2] {
            let (old, new) = (Epoch(start), Epoch(start).next().next());
            assert!(EpochTag::of(new).covers(EpochTag::of(old)) && EpochTag::of(old).covers(EpochTag::of(old)));
            assert!(!EpochTag::of(old).covers(EpochTag::of(new)), "{start}");
        }
        assert!(!EpochTag::NONE.covers(tag(1)) && !EpochTag::NONE.covers(EpochTag::NONE));
        assert!(!tag(1).is_stale(tag(1000)) && !tag(1000).is_stale(tag(1)), "a lagging reader");
        assert!(tag(1).is_stale(tag(1 + (1 << 21))) && tag(1).is_stale(tag((1 << 22) - 1)));
        assert!(!EpochTag::NONE.is_stale(tag(1 << 22)));
    }
}

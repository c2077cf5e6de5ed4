//! One connection: a cache line of eight words, each of them atomic.

use super::hash::{KeyWords, NAME_BITS, NAME_MASK};
use super::sync::{AtomicU64, EXCHANGE, Ordering, fence, overwrite};
use super::time::Tick;
use crate::packet::{Orientation, Protocol};
use crate::snapshot::Epoch;

/// Whose quota a connection counts against: a small number that the caller gives to each pod (its port's, say).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct OwnerId(pub u16);

/// The control word: who holds the entry, and what changes with packets. Every change of hands and every change
/// of state is one compare-and-swap of it.
///
/// | bits | |
/// |---|---|
/// | 0–3 | state: 0 free, 1 claimed, else the number of the connection's state |
/// | 4 | tentative: written, but not yet known to be the only entry of its key |
/// | 5 | orientation of the original direction |
/// | 6–27 | tick of the last packet |
/// | 28–43 | owner |
/// | 44 | via host: its packets cross the node's own stack |
/// | 45–63 | generation: counts how often the entry has been claimed |
///
/// The generation wraps after 2¹⁹ claims. A compare-and-swap that waited so long would in addition have to meet the
/// same state, owner and tick to go wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Control(pub(super) u64);

const TENTATIVE: u64 = 1 << 4;
const ORIENTATION: u64 = 1 << 5;
const TICK_AT: u32 = 6;
const OWNER_AT: u32 = TICK_AT + Tick::BITS;
const VIA_HOST: u64 = 1 << (OWNER_AT + 16);
const GENERATION_AT: u32 = OWNER_AT + 17;
const _: () = assert!(GENERATION_AT == 45);

/// State number of an entry that is free.
pub(super) const FREE: u8 = 0;
/// State number of an entry that one thread is writing or clearing.
pub(super) const CLAIMED: u8 = 1;

impl Control {
    /// A tentative connection in an entry that was claimed at this generation.
    pub(super) fn tentative(claimed: Self, state: u8, orientation: Orientation, owner: OwnerId, tick: Tick) -> Self {
        Self(
            u64::from(state)
                | TENTATIVE
                | (orientation as u64) << 5
                | u64::from(tick.0) << TICK_AT
                | u64::from(owner.0) << OWNER_AT
                | claimed.generation() << GENERATION_AT,
        )
    }

    #[inline]
    pub(super) const fn state(self) -> u8 {
        (self.0 & 15) as u8
    }

    #[inline]
    pub(super) const fn is_free(self) -> bool {
        self.state() == FREE
    }

    /// Whether a connection is in it, tentative or not.
    #[inline]
    pub(super) const fn is_written(self) -> bool {
        self.state() > CLAIMED
    }

    #[inline]
    pub(super) const fn is_tentative(self) -> bool {
        self.0 & TENTATIVE != 0
    }

    /// Whether a connection is in it that everyone may see.
    #[inline]
    pub(super) const fn is_live(self) -> bool {
        self.is_written() && !self.is_tentative()
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
    pub(super) const fn owner(self) -> OwnerId {
        OwnerId((self.0 >> OWNER_AT) as u16)
    }

    #[inline]
    pub(super) const fn is_via_host(self) -> bool {
        self.0 & VIA_HOST != 0
    }

    pub(super) const fn with_via_host(self, via_host: bool) -> Self {
        Self(if via_host { self.0 | VIA_HOST } else { self.0 & !VIA_HOST })
    }

    #[inline]
    pub(super) const fn generation(self) -> u64 {
        self.0 >> GENERATION_AT
    }

    /// Whether both are of one stay of one connection.
    #[inline]
    pub(super) const fn is_same_stay(self, other: Self) -> bool {
        self.generation() == other.generation() && self.is_written() && other.is_written()
    }

    pub(super) const fn confirmed(self) -> Self {
        Self(self.0 & !TENTATIVE)
    }

    /// The same connection in another state, or at another time.
    #[inline]
    pub(super) const fn with(self, state: u8, tick: Tick) -> Self {
        Self(self.0 & !15 & !((Tick::MASK as u64) << TICK_AT) | state as u64 | (tick.0 as u64) << TICK_AT)
    }

    pub(super) const fn with_owner(self, owner: OwnerId) -> Self {
        Self(self.0 & !(0xffff << OWNER_AT) | (owner.0 as u64) << OWNER_AT)
    }

    /// Held by one thread, in the same generation.
    pub(super) const fn claimed(self) -> Self {
        Self(self.generation() << GENERATION_AT | CLAIMED as u64)
    }

    /// Held by one thread for a new connection: the next generation.
    pub(super) const fn claimed_anew(self) -> Self {
        Self((self.generation() + 1) << GENERATION_AT | CLAIMED as u64)
    }

    /// Free, in the same generation.
    pub(super) const fn freed(self) -> Self {
        Self(self.generation() << GENERATION_AT)
    }
}

/// What tracking keeps of each direction: the window of TCP, the tag of SCTP. Indexed by [`Orientation`].
pub(super) type Tracking = [u64; 2];

/// Words of a key before the last. Loom makes do with the first, or it would never come to an end.
const ADDRESS_WORDS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 4 };

/// One entry of the table. All zero is a free entry.
///
/// Reading without a lock: an entry's key is written only while its control word says *claimed*, so a reader that
/// finds the same generation *written* before and after it read the key has read one connection's key.
/// [`Entry::load`] does so.
#[repr(C, align(64))]
pub(super) struct Entry {
    control: AtomicU64,
    /// Both addresses.
    addresses: [AtomicU64; ADDRESS_WORDS],
    /// Ports and protocol in the low 40 bits, the epoch in the high 24.
    name: AtomicU64,
    tracking: [AtomicU64; 2],
}

const _: () = assert!(cfg!(all(test, feature = "loom")) || size_of::<Entry>() == 64);

impl Entry {
    #[cfg(all(test, feature = "loom"))]
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { control: zero(), addresses: std::array::from_fn(|_| zero()), name: zero(), tracking: [zero(), zero()] }
    }

    /// The control word; what another thread wrote before it set the word is seen.
    #[inline]
    pub(super) fn control(&self) -> Control {
        Control(self.control.load(Ordering::Acquire))
    }

    /// Compare-and-swap of the control word; the word found on failure.
    #[inline]
    pub(super) fn exchange(&self, from: Control, to: Control) -> Result<(), Control> {
        match self.control.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(found) => Err(Control(found)),
        }
    }

    /// Takes the entry for a new connection; the control word to write it under.
    pub(super) fn claim(&self) -> Option<Control> {
        let free = self.control();
        let claimed = free.claimed_anew();
        (free.is_free() && self.exchange(free, claimed).is_ok()).then_some(claimed)
    }

    /// Writes a connection into an entry that this thread has claimed, and shows it.
    pub(super) fn publish(&self, control: Control, key: &KeyWords, epoch: Epoch, tracking: Tracking) {
        // A reader that sees any of the words below also sees, by its own fence, that the entry was claimed.
        fence(Ordering::Release);
        for (word, value) in self.addresses.iter().zip(key) {
            word.store(*value, Ordering::Relaxed);
        }
        overwrite(&self.name, key[4] | stored_epoch(epoch, control) << NAME_BITS);
        for (word, value) in self.tracking.iter().zip(tracking) {
            overwrite(word, value);
        }
        self.control.store(control.0, Ordering::Release);
    }

    /// Gives back an entry that this thread has claimed.
    pub(super) fn free(&self, claimed: Control) {
        self.control.store(claimed.freed().0, Ordering::Release);
    }

    /// The control word, if the entry holds a connection of this key.
    #[inline(always)]
    pub(super) fn matches(&self, key: &KeyWords) -> Option<Control> {
        let before = self.control();
        // No early exit between the words: the comparison is one branch, and it is nearly always taken.
        let name = (self.name.load(Ordering::Relaxed) ^ key[4]) & NAME_MASK;
        let words = self.addresses.iter().zip(key);
        let differs = words.fold(name, |differs, (word, wanted)| differs | (word.load(Ordering::Relaxed) ^ wanted));
        (differs == 0 && self.still(before)).then_some(before)
    }

    /// A connection's words as of one moment of its stay, or `None` if there is none or it changed hands meanwhile.
    pub(super) fn load(&self) -> Option<(Control, KeyWords, Tracking)> {
        let before = self.control();
        let mut key = [0; 5];
        for (value, word) in key.iter_mut().zip(&self.addresses) {
            *value = word.load(Ordering::Relaxed);
        }
        key[4] = self.name.load(Ordering::Relaxed) & NAME_MASK;
        let tracking = [self.tracking[0].load(Ordering::Relaxed), self.tracking[1].load(Ordering::Relaxed)];
        self.still(before).then_some((before, key, tracking))
    }

    /// Whether what was read since `before` was read belongs to the connection that `before` shows.
    #[inline]
    fn still(&self, before: Control) -> bool {
        fence(Ordering::Acquire);
        before.is_same_stay(Control(self.control.load(Ordering::Relaxed)))
    }

    /// The tracking words of the connection that `control` shows, if it is still there, with its control word of now.
    #[inline]
    pub(super) fn tracking(&self, control: Control) -> Option<(Control, Tracking)> {
        let now = self.control();
        if !now.is_same_stay(control) {
            return None;
        }
        let tracking = [self.tracking[0].load(Ordering::Relaxed), self.tracking[1].load(Ordering::Relaxed)];
        self.still(now).then_some((now, tracking))
    }

    /// The tracking words as they are while the control word is exactly this one; `None` if it is not.
    #[inline]
    pub(super) fn tracking_under(&self, control: Control) -> Option<Tracking> {
        let tracking = [self.tracking[0].load(Ordering::Relaxed), self.tracking[1].load(Ordering::Relaxed)];
        fence(Ordering::Acquire);
        (self.control.load(Ordering::Relaxed) == control.0).then_some(tracking)
    }

    /// Compare-and-swap of a tracking word. It names no generation: the word itself tells connections apart (32 bits of
    /// it are a sequence number or a verification tag), and `from` was read during the connection's stay.
    #[inline]
    pub(super) fn exchange_tracking(&self, orientation: Orientation, from: u64, to: u64) -> bool {
        from == to
            || self.tracking[orientation as usize].compare_exchange(from, to, EXCHANGE, Ordering::Relaxed).is_ok()
    }

    /// Forgets what tracking knows; only while no other thread uses the table.
    pub(super) fn set_tracking(&self, tracking: Tracking) {
        for (word, value) in self.tracking.iter().zip(tracking) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Whether the connection that `control` shows was judged under `epoch`.
    #[inline]
    pub(super) fn is_of_epoch(&self, control: Control, epoch: Epoch) -> bool {
        self.name.load(Ordering::Relaxed) >> NAME_BITS == stored_epoch(epoch, control)
    }

    /// Notes that the connection that `control` shows was judged under `epoch`; false if it is gone.
    pub(super) fn set_epoch(&self, control: Control, epoch: Epoch) -> bool {
        let mut name = self.name.load(Ordering::Relaxed);
        loop {
            if !self.still(control) {
                return false;
            }
            let wanted = name & NAME_MASK | stored_epoch(epoch, control) << NAME_BITS;
            // `name` was read during the connection's stay. Were the entry re-used between here and the swap, ports,
            // protocol and the epoch sealed with the generation would all have to repeat for it to succeed.
            match self.name.compare_exchange(name, wanted, EXCHANGE, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => name = found,
            }
        }
    }

    /// The protocol, which only a caller that holds a control word of the same stay may trust.
    #[inline]
    pub(super) fn protocol(&self) -> Protocol {
        Protocol((self.name.load(Ordering::Relaxed) >> 32) as u8)
    }
}

/// 24 bits that stand for `epoch` in one stay: sealed with the generation, so that a late writer's word does not fit
/// the entry's next connection.
#[inline]
fn stored_epoch(epoch: Epoch, control: Control) -> u64 {
    let seal = (control.generation() as u32).wrapping_mul(0x9e37_79b1) >> 8;
    u64::from((epoch.0 ^ seal) & 0x00ff_ffff)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn the_control_word_keeps_its_parts_apart() {
        let claimed = Control(0x5bcde << 45 | 0xfffff << 20).claimed_anew();
        assert_eq!((claimed.generation(), claimed.state()), (0x5bcdf, CLAIMED));
        let tick = Tick(0x2a_5a5a);
        let control = Control::tentative(claimed, 11, Orientation::HighToLow, OwnerId(0xbeef), tick);
        assert!(control.is_tentative() && control.is_written() && !control.is_live());
        let control = control.confirmed();
        assert!(control.is_live());
        assert_eq!((control.state(), control.tick(), control.owner()), (11, tick, OwnerId(0xbeef)));
        assert_eq!((control.original(), control.generation()), (Orientation::HighToLow, 0x5bcdf));
        let other = control.with(3, Tick(Tick::MASK)).with_owner(OwnerId(1));
        assert_eq!((other.state(), other.tick(), other.owner()), (3, Tick(Tick::MASK), OwnerId(1)));
        assert_eq!((other.original(), other.generation()), (Orientation::HighToLow, 0x5bcdf));
        let by_host = other.with_via_host(true);
        assert!(!other.is_via_host() && by_host.is_via_host() && by_host.with_via_host(false) == other);
        assert!(by_host.is_same_stay(other) && !by_host.claimed().is_via_host());
        assert!(control.is_same_stay(other) && !control.is_same_stay(control.claimed()));
        assert_eq!(Control(u64::MAX).claimed_anew().generation(), 0, "the generation wraps");
    }

    #[test]
    fn an_epoch_is_sealed_with_the_generation() {
        let at = |generation: u64| Control(generation << 45 | 5);
        for generation in 1..1000 {
            assert_eq!(stored_epoch(Epoch(7), at(generation)), stored_epoch(Epoch(7), at(generation)));
            assert_ne!(stored_epoch(Epoch(7), at(generation)), stored_epoch(Epoch(7), at(generation + 1)));
            assert_ne!(stored_epoch(Epoch(7), at(generation)), stored_epoch(Epoch(8), at(generation)));
        }
    }
}

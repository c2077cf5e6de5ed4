//! Words beside each entry that its 64 bytes have no room for: which other entry belongs to it, and who opened its connection.

use super::entry::{ControlWord, SlotRef};
use super::sync::{AtomicU64, EXCHANGE, Ordering, overwrite};

/// Names the other entry of a translated connection: slot in the low 32 bits, generation above, bit 63 set. It is valid
/// only if that entry names this one; what an earlier connection of the slot left is not.
#[repr(transparent)]
pub(super) struct Link(AtomicU64);

const GENERATION_AT: u32 = 32;
pub(super) const IS_LINK: u64 = 1 << 63;
/// Instead of a link: beside the entry is who opened its connection ([`Opener`]).
const HAS_OPENER: u64 = 1 << 62;

impl Default for Link {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Link {
    pub(super) fn to((slot, control): SlotRef) -> u64 {
        u64::from(slot) | control.generation() << GENERATION_AT | IS_LINK
    }

    pub(super) fn set(&self, other: SlotRef) {
        overwrite(&self.0, Self::to(other), Ordering::Release);
    }

    /// Says that beside the entry is who opened the connection of this control word.
    pub(super) fn set_own(&self, control: ControlWord) {
        overwrite(&self.0, control.generation() << GENERATION_AT | HAS_OPENER, Ordering::Release);
    }

    pub(super) fn is_own(&self, control: ControlWord) -> bool {
        self.word() == control.generation() << GENERATION_AT | HAS_OPENER
    }

    pub(super) fn word(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Removes it if it names this entry.
    pub(super) fn clear(&self, other: SlotRef) {
        let _ = self.0.compare_exchange(Self::to(other), 0, EXCHANGE, Ordering::Relaxed);
    }
}

/// An address; only as the entry's link says is it that of the entry's connection. Unspecified: it is not known.
#[repr(transparent)]
pub(super) struct Opener([AtomicU64; 2]);

impl Default for Opener {
    fn default() -> Self {
        Self([AtomicU64::new(0), AtomicU64::new(0)])
    }
}

impl Opener {
    pub(super) fn set(&self, bits: u128) {
        overwrite(&self.0[0], (bits >> 64) as u64, Ordering::Relaxed);
        overwrite(&self.0[1], bits as u64, Ordering::Release);
    }

    pub(super) fn bits(&self) -> u128 {
        let [high, low] = [&self.0[0], &self.0[1]].map(|word| u128::from(word.load(Ordering::Acquire)));
        high << 64 | low
    }
}

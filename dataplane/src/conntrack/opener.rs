//! Who opened a connection whose source the node's stack has translated: kept beside the entry as long as that is in use, so that policy
//! is evaluated for the same opener whenever it changes.

use super::sync::{AtomicU64, Ordering, overwrite};
use crate::packet::Address;

/// An address; it is that of the entry's connection only if the control word says so. Unspecified: it is not known.
#[repr(transparent)]
pub(super) struct Opener([AtomicU64; 2]);

impl Opener {
    /// Only for the thread that has claimed the entry. A reader that finds a word of it then finds the claim, too.
    pub(super) fn set(&self, opener: Option<Address>) {
        let bits = opener.map_or(0, |address| address.bits());
        overwrite(&self.0[0], (bits >> 64) as u64, Ordering::Release);
        overwrite(&self.0[1], bits as u64, Ordering::Release);
    }

    pub(super) fn get(&self) -> Option<Address> {
        let [high, low] = [&self.0[0], &self.0[1]].map(|word| u128::from(word.load(Ordering::Acquire)));
        let bits = high << 64 | low;
        (bits != 0).then(|| Address::from_bits(bits))
    }
}

//! How many groups a table has, and a set of them: a bit for each, so that a walk which wants few of them reads few cache lines.

use std::sync::atomic::{AtomicU64, Ordering};

use super::tags::LANES;

/// Groups in a word.
const WORD: u32 = u64::BITS;

/// Number of groups for this many connections: a tenth more room than needed, so that two groups suffice for each until
/// all are inserted.
pub(super) fn group_count(entries: usize) -> u32 {
    if cfg!(all(test, feature = "loom")) { 2 } else { (entries * 10).div_ceil(9 * LANES as usize).max(2) as u32 }
}

/// A set of groups that several threads change. What another thread has just changed may not be seen yet: it is a hint.
pub(super) struct GroupSet(Box<[AtomicU64]>);

impl GroupSet {
    /// All of so many groups.
    pub(super) fn all(groups: u32) -> Self {
        let of_word = |first: u32| AtomicU64::new(u64::MAX >> (WORD - (groups - first).min(WORD)));
        Self((0..groups).step_by(WORD as usize).map(of_word).collect())
    }

    /// Includes a group. Writes nothing if it is included.
    #[inline]
    pub(super) fn insert(&self, group: u32) {
        let (word, bit) = self.place(group);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Excludes a group.
    pub(super) fn remove(&self, group: u32) {
        let (word, bit) = self.place(group);
        word.fetch_and(!bit, Ordering::Relaxed);
    }

    /// The groups, lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().zip((0..).step_by(WORD as usize)).flat_map(|(word, first)| {
            let mut left = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(first + bit)
            })
        })
    }

    #[inline]
    fn place(&self, group: u32) -> (&AtomicU64, u64) {
        (&self.0[(group / WORD) as usize], 1 << (group % WORD))
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_holds_what_a_set_holds(
            groups in 1u32..300,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..200),
        ) {
            let (set, mut expected) = (GroupSet::all(groups), (0..groups).collect::<BTreeSet<_>>());
            for (group, is_inserted) in changes {
                let group = group.index(groups as usize) as u32;
                if is_inserted {
                    set.insert(group);
                    expected.insert(group);
                } else {
                    set.remove(group);
                    expected.remove(&group);
                }
            }
            prop_assert_eq!(set.iter().collect::<BTreeSet<_>>(), expected);
        }
    }
}

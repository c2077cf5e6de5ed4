//! Tags of a group: a cache line that indicates which of its entries may match.

use super::sync::{AtomicU64, EXCHANGE, Ordering};

/// Entries in a group, each with a 16-bit tag.
#[cfg(not(all(test, feature = "loom")))]
pub(super) const LANES: u32 = 32;
/// Few, so that all interleavings can be explored.
#[cfg(all(test, feature = "loom"))]
pub(super) const LANES: u32 = 2;

const WORDS: usize = LANES.div_ceil(4) as usize;
/// All lanes.
pub(super) const ALL: u32 = u32::MAX >> (32 - LANES);

/// The tags of a group. 0 means that the entry is free or not ready. Any other tag means that it may contain a
/// connection whose hash ends in it. Tags are only hints: the words of the entry decide.
#[repr(C, align(64))]
pub(super) struct Tags([AtomicU64; WORDS]);

impl Tags {
    #[cfg(all(test, feature = "loom"))]
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// The lanes with this tag, as bits.
    #[inline]
    pub(super) fn lanes_with(&self, tag: u16) -> u32 {
        let words: [u64; WORDS] = std::array::from_fn(|word| self.0[word].load(Ordering::Relaxed));
        #[cfg(all(target_arch = "x86_64", not(all(test, feature = "loom"))))]
        {
            equal_sse2(&words, tag)
        }
        #[cfg(not(all(target_arch = "x86_64", not(all(test, feature = "loom")))))]
        {
            equal_portable(&words, tag) & ALL
        }
    }

    /// The lanes without a tag.
    #[inline]
    pub(super) fn free_lanes(&self) -> u32 {
        self.lanes_with(0)
    }

    /// The lanes with a tag.
    #[inline]
    pub(super) fn used_lanes(&self) -> u32 {
        !self.free_lanes() & ALL
    }

    /// Whether no lane has a tag. Cheaper than to ask which: most groups that a walk through a table finds are empty.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().fold(0, |any, word| any | word.load(Ordering::Relaxed)) == 0
    }

    /// How many lanes have a tag.
    #[inline]
    pub(super) fn occupancy(&self) -> u32 {
        self.used_lanes().count_ones()
    }

    /// Sets the tag of a lane whose tag is 0. Only the thread that has claimed the entry may do so.
    pub(super) fn set(&self, lane: u32, tag: u16) {
        self.0[lane as usize / 4].fetch_or(u64::from(tag) << (lane % 4 * 16), EXCHANGE);
    }

    /// Clears the tag of a lane. Only the thread that has claimed the entry may do so.
    pub(super) fn clear(&self, lane: u32) {
        self.0[lane as usize / 4].fetch_and(!(0xffff << (lane % 4 * 16)), EXCHANGE);
    }
}

/// The lanes of `words` that equal `tag`, four to a word.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn equal_portable(words: &[u64; WORDS], tag: u16) -> u32 {
    /// 1 in each lane of a word.
    const ONES: u64 = 0x0001_0001_0001_0001;
    const LOW: u64 = 0x7fff * ONES;
    /// Moves bit 0 of each lane next to the others: lane n to bit 48 + n.
    const GATHER: u64 = 1 << 48 | 1 << 33 | 1 << 18 | 1 << 3;
    let wanted = ONES * u64::from(tag);
    words.iter().enumerate().fold(0, |lanes, (index, word)| {
        let differs = word ^ wanted;
        // The top bit of a lane ends up set if and only if the whole lane is zero; no carry leaves a lane.
        let equal = !(((differs & LOW) + LOW) | differs | LOW);
        lanes | (((equal >> 15).wrapping_mul(GATHER) >> 48) as u32 & 0xf) << (index * 4)
    })
}

/// The lanes of `words` that equal `tag`, eight to a comparison.
#[cfg(all(target_arch = "x86_64", not(all(test, feature = "loom"))))]
#[inline]
fn equal_sse2(words: &[u64; WORDS], tag: u16) -> u32 {
    use std::arch::x86_64::{_mm_cmpeq_epi16, _mm_movemask_epi8, _mm_packs_epi16, _mm_set_epi64x, _mm_set1_epi16};
    // SAFETY: SSE2 is part of x86-64, and these work on registers.
    unsafe {
        let wanted = _mm_set1_epi16(tag as i16);
        let equal = |at: usize| _mm_cmpeq_epi16(_mm_set_epi64x(words[at + 1] as i64, words[at] as i64), wanted);
        let half = |at: usize| _mm_movemask_epi8(_mm_packs_epi16(equal(at), equal(at + 2))) as u32;
        half(0) | half(4) << 16
    }
}

/// The numbers of the bits that are set, lowest first.
#[inline]
pub(super) fn bits(mut lanes: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let lane = (lanes != 0).then(|| lanes.trailing_zeros())?;
        lanes &= lanes - 1;
        Some(lane)
    })
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn portable_and_simd_comparison_agree(
            tags in prop::collection::vec(prop_oneof![Just(0u16), Just(1), Just(0x8000), Just(0x7fff), Just(0xffff), any::<u16>()], 32),
            tag in prop_oneof![Just(0u16), Just(1), Just(0x8000), Just(0xffff), any::<u16>()],
        ) {
            let mut words = [0u64; WORDS];
            for (lane, tag) in tags.iter().enumerate() {
                words[lane / 4] |= u64::from(*tag) << (lane % 4 * 16);
            }
            let expected = tags.iter().enumerate().fold(0u32, |bits, (lane, other)| bits | u32::from(*other == tag) << lane);
            prop_assert_eq!(equal_portable(&words, tag), expected);
            #[cfg(target_arch = "x86_64")]
            prop_assert_eq!(equal_sse2(&words, tag), expected);
        }
    }

    #[test]
    fn setting_and_clearing_a_lane_leaves_others_unchanged() {
        let tags = Tags(Default::default());
        tags.set(5, 0xabcd);
        tags.set(31, 1);
        assert_eq!((tags.lanes_with(0xabcd), tags.lanes_with(1), tags.occupancy()), (1 << 5, 1 << 31, 2));
        tags.clear(5);
        assert_eq!((tags.lanes_with(0xabcd), tags.free_lanes().count_ones()), (0, 31));
        assert_eq!(bits(0b1010_0001).collect::<Vec<_>>(), [0, 5, 7]);
    }
}

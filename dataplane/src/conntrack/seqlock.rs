//! A sequence lock whose control word also says what the words beside it are: the lock of connection table and fragment
//! cache.
//!
//! No library has it: they keep the sequence number in a word of its own, and here one compare-and-swap must change
//! state, verdict and sequence together.
//!
//! **Rules.** Every word is atomic. A thread writes the words only between its compare-and-swap of the control word to a
//! *claimed* one and [`SeqLock::publish`]. No two writes have control words of which [`Control::is_same_write`] holds
//! (until the number in them wraps, during one read). Single words may also be exchanged by compare-and-swap, where their
//! own content says whether that is valid.
//!
//! **Why a read is consistent.** A reader loads the control word with acquire ordering, loads the words, and then loads
//! the control word again behind an acquire fence. The first load synchronises with the release store that published the
//! write, so the words are of this write or of a later one. If a word is of a later write, the acquire fence
//! synchronises with the release fence of [`SeqLock::publish`], which follows that write's claim: the second load sees
//! the claim or something later, and `is_same_write` is false. The reader then discards what it has read. Such a race is
//! not undefined behaviour, since every word is atomic.
//!
//! `interleavings` explores it with loom.

use std::marker::PhantomData;

use super::sync::{AtomicU64, Ordering, fence};

/// A control word.
pub(super) trait Control: Copy + PartialEq {
    fn from_word(word: u64) -> Self;

    fn word(self) -> u64;

    /// Whether both say that the words are written, and by one and the same write.
    fn is_same_write(self, other: Self) -> bool;
}

/// Words `W` behind a control word `C`.
#[derive(Default)]
#[repr(C)]
pub(super) struct SeqLock<C, W> {
    control: AtomicU64,
    words: W,
    of: PhantomData<C>,
}

impl<C: Control, W> SeqLock<C, W> {
    #[cfg(all(test, feature = "loom"))]
    pub(super) fn new(words: W) -> Self {
        Self { control: AtomicU64::new(0), words, of: PhantomData }
    }

    /// The control word, with acquire ordering.
    #[inline(always)]
    pub(super) fn control(&self) -> C {
        C::from_word(self.control.load(Ordering::Acquire))
    }

    /// Compare-and-swap of the control word; returns the current word on failure.
    #[inline(always)]
    pub(super) fn exchange(&self, from: C, to: C) -> Result<(), C> {
        match self.control.compare_exchange(from.word(), to.word(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(found) => Err(C::from_word(found)),
        }
    }

    /// Writes words that this thread has claimed, with relaxed stores, and publishes them under this control word.
    #[inline(always)]
    pub(super) fn publish(&self, control: C, write: impl FnOnce(&W)) {
        // A reader that sees any of the words also sees, through its own fence, that they were claimed.
        fence(Ordering::Release);
        write(&self.words);
        self.control.store(control.word(), Ordering::Release);
    }

    /// Publishes a control word for words that this thread has claimed and leaves as they are.
    pub(super) fn release(&self, control: C) {
        self.control.store(control.word(), Ordering::Release);
    }

    /// The result of `read` on the words by relaxed loads, or `None` if they are not of the write of `before`.
    #[inline(always)]
    pub(super) fn read<T>(&self, before: C, read: impl FnOnce(&W) -> T) -> Option<T> {
        let result = read(&self.words);
        self.is_still(before).then_some(result)
    }

    /// Whether words loaded since `before` was loaded are of the write of `before`.
    #[inline(always)]
    pub(super) fn is_still(&self, before: C) -> bool {
        before.is_same_write(self.control_after_loads())
    }

    /// The control word as it was after all loads so far.
    #[inline(always)]
    pub(super) fn control_after_loads(&self) -> C {
        fence(Ordering::Acquire);
        C::from_word(self.control.load(Ordering::Relaxed))
    }

    /// The words, for loads and exchanges of single ones.
    #[inline(always)]
    pub(super) fn words(&self) -> &W {
        &self.words
    }
}

//! Answers, credit and events: the memory by which workers let the kernel's programs open connections ([`super::repeat`]), behind the
//! table's openers. `xdp-redirect/src/bpf/repeat.h` has the same structures.

use std::sync::atomic::{AtomicI64, AtomicU64 as Word};

use super::entry::{EpochTag, OwnerId};
use super::hash::{KeyWords, PreparedFlow, home, key_of};
use super::path::{ForwardedConnection, Path};
use super::seqlock::{Control, SeqLock};
use super::sync::{AtomicU64, Ordering, overwrite};
use crate::epoch::Epoch;
use crate::packet::Orientation;

/// Answers, in pairs: each question has one of a pair.
const ANSWERS: u32 = 4096;
/// Owners that may have credit: of what each pod opens, and of what others open to each.
const CREDITS: u32 = 2 * PODS;
/// Numbers of pods.
const PODS: u32 = 4096;
/// Events that wait for [`ConnTable::hear`](super::ConnTable::hear).
pub(super) const EVENTS: u32 = 1 << 14;
/// The memory that programs and workers share for this, behind the table's openers.
#[repr(C, align(64))]
pub(super) struct Repeats {
    answers: [Answer; ANSWERS as usize],
    credits: [Credit; CREDITS as usize],
    sent: Sent,
    events: [Word; EVENTS as usize],
}

/// `struct answer`: the key of the connection, in which the opener's port says whether it traverses the node's stack in both directions, the path,
/// and the [`Verdict`].
#[repr(C, align(64))]
struct Answer(SeqLock<Version, [AtomicU64; 7]>);

/// Number of the writes of an answer: odd while one is written, 0 before the first.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version(u64);

/// Under which epoch, whose share, and which direction opens: as one word.
pub(super) struct Verdict;

/// `struct credit`.
#[repr(C, align(64))]
pub(super) struct Credit {
    pub(super) left: AtomicI64,
    /// For programs without a daemon; it is not counted.
    pub(super) alone: AtomicI64,
}

/// A program has opened a connection in the entry of this slot and generation.
pub(super) struct Event {
    pub(super) slot: u32,
    pub(super) generation: u64,
    /// In place of one that had ended.
    pub(super) is_in_place: bool,
}

/// `struct events`: how many were sent.
#[repr(C, align(64))]
struct Sent(Word);

const _: () = assert!(cfg!(all(test, feature = "loom")) || size_of::<Answer>() == 64);
const _: () = assert!(size_of::<Credit>() == 64 && size_of::<Sent>() == 64);

impl Control for Version {
    fn from_word(word: u64) -> Self {
        Self(word)
    }

    fn word(self) -> u64 {
        self.0
    }

    fn is_same_write(self, other: Self) -> bool {
        self == other && self.is_written()
    }
}

impl Version {
    const fn is_written(self) -> bool {
        self.0 != 0 && self.0 & 1 == 0
    }
}

impl Verdict {
    pub(super) fn of(epoch: Epoch, owner: OwnerId, question: &PreparedFlow) -> u64 {
        u64::from(epoch.0) | u64::from(owner.0) << 32 | (question.orientation as u64) << 48
    }

    const fn epoch(word: u64) -> Epoch {
        Epoch(word as u32)
    }

    const fn owner(word: u64) -> OwnerId {
        OwnerId((word >> 32) as u16)
    }

    const fn original(word: u64) -> Orientation {
        if word >> 48 & 1 == 0 { Orientation::LowToHigh } else { Orientation::HighToLow }
    }

    /// The same under another epoch.
    const fn renewed(word: u64, epoch: Epoch) -> u64 {
        word >> 32 << 32 | epoch.0 as u64
    }
}

impl Answer {
    /// Its words, if it is of this key.
    fn of(&self, key: &KeyWords) -> Option<[u64; 7]> {
        let words = self.read()?;
        (words[..5] == key[..]).then_some(words)
    }

    fn read(&self) -> Option<[u64; 7]> {
        self.read_version(self.0.control())
    }

    fn read_version(&self, version: Version) -> Option<[u64; 7]> {
        self.0.read(version, |words| std::array::from_fn(|word| words[word].load(Ordering::Relaxed)))
    }

    /// Whether another one may have its place: it is of an older epoch.
    fn is_outdated(&self, epoch: Epoch) -> bool {
        self.read().is_none_or(|words| Verdict::epoch(words[6]).is_before(epoch))
    }

    /// Gives it this epoch if it has an older one and `is_kept`. An answer that a worker writes meanwhile stays as that worker has written it.
    fn renew(&self, epoch: Epoch, is_kept: impl FnOnce(&ForwardedConnection, OwnerId) -> bool) -> bool {
        let before = self.0.control();
        let Some([k0, k1, k2, k3, k4, path, verdict]) = self.read_version(before) else { return false };
        let (key, path, original) = ([k0, k1, k2, k3, k4], Path::from_word(path), Verdict::original(verdict));
        let (flow, ends) = (key_of(&key).flow(original), path.ends());
        let found = ForwardedConnection {
            original: flow,
            ends: [ends[original as usize], ends[original.opposite() as usize]],
            // Stands for the opener's port (`leave_answer`).
            via_host: flow.src_port != 0,
        };
        let is_renewed = Verdict::epoch(verdict).is_before(epoch) && is_kept(&found, Verdict::owner(verdict));
        if is_renewed {
            let (path, verdict) = (path.renewed(EpochTag::of(epoch)).word(), Verdict::renewed(verdict, epoch));
            self.write_over(before, &[k0, k1, k2, k3, k4, path, verdict]);
        }
        is_renewed
    }

    /// Writes it, unless another worker is about to.
    fn write(&self, words: &[u64; 7]) {
        self.write_over(self.0.control(), words);
    }

    /// The same in place of what was written under this version, and of nothing else.
    fn write_over(&self, before: Version, words: &[u64; 7]) {
        let (claimed, written) = (Version(before.0.wrapping_add(1)), Version(before.0.wrapping_add(2)));
        if before.0 & 1 == 0 && self.0.exchange(before, claimed).is_ok() {
            let store = |to: &[AtomicU64; 7]| {
                to.iter().zip(words).for_each(|(word, value)| overwrite(word, *value, Ordering::Relaxed));
            };
            self.0.publish(written, store);
        }
    }
}

impl Repeats {
    /// Elements of the array of entries that it takes.
    pub(super) const ELEMENTS: u32 = (size_of::<Self>() / size_of::<Credit>()) as u32;

    pub(super) fn credit(&self, owner: OwnerId) -> Option<&Credit> {
        let pod = u32::from(OwnerId::opens(owner.0).0);
        let place = if owner.is_opened_to() { PODS + pod } else { pod };
        self.credits.get(place as usize).filter(|_| pod < PODS)
    }

    /// Stores the answer to this question.
    pub(super) fn store(&self, question: &PreparedFlow, path: u64, verdict: u64) {
        let first = home(question.hash, ANSWERS);
        let pair = [first, first ^ 1].map(|index| &self.answers[index as usize]);
        let [k0, k1, k2, k3, k4] = question.words;
        let words = [k0, k1, k2, k3, k4, path, verdict];
        match pair.iter().find_map(|answer| Some((answer, answer.of(&question.words)?))) {
            Some((_, known)) if known == words => {}
            Some((answer, _)) => answer.write(&words),
            None => {
                let outdated = pair.iter().find(|answer| answer.is_outdated(Verdict::epoch(verdict)));
                outdated.unwrap_or(&pair[(question.hash & 1) as usize]).write(&words);
            }
        }
    }

    /// Gives this epoch to each answer with an older one that `is_kept`, asked with its connection, without the opener's port, and its
    /// owner. Returns how many got it.
    pub(super) fn renew(&self, epoch: Epoch, mut is_kept: impl FnMut(&ForwardedConnection, OwnerId) -> bool) -> usize {
        self.answers.iter().filter(|answer| answer.renew(epoch, &mut is_kept)).count()
    }

    /// Forgets what an earlier process has left. Only while the programs open nothing.
    pub(super) fn clear(&self) {
        for answer in &self.answers {
            answer.0.release(Version(0));
        }
        for credit in &self.credits {
            credit.left.store(0, Ordering::Relaxed);
            credit.alone.store(0, Ordering::Relaxed);
        }
    }

    /// Credit that is given and not used.
    pub(super) fn left(&self) -> u32 {
        self.credits.iter().map(Credit::left).sum()
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.0.load(Ordering::Acquire)
    }

    /// The connection in an event. `None`: it is not written yet, or another one in its place.
    pub(super) fn event(&self, number: u64) -> Option<Event> {
        const LAP_AT: u32 = 42;
        const IN_PLACE: u32 = 1 << 31;
        let (lap, place) = (number / u64::from(EVENTS) + 1, number % u64::from(EVENTS));
        let word = self.events[place as usize].load(Ordering::Acquire);
        let (slot, generation) = (word as u32 & !IN_PLACE, word >> 32 & 0x3ff);
        let event = Event { slot, generation, is_in_place: word as u32 & IN_PLACE != 0 };
        (word >> LAP_AT == lap & (u64::MAX >> LAP_AT)).then_some(event)
    }
}

impl Credit {
    pub(super) fn left(&self) -> u32 {
        // A program takes it, and gives it back if there was none.
        self.left.load(Ordering::Relaxed).max(0) as u32
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_fills_whole_elements() {
        assert_eq!(Repeats::ELEMENTS, ANSWERS + CREDITS + 1 + EVENTS / 8);
        assert_eq!(size_of::<Repeats>() % size_of::<Credit>(), 0);
    }
}

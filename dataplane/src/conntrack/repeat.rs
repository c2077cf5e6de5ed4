//! Connections that the kernel's programs open by themselves: like one that a worker has opened before, under a policy that has not
//! changed (`xdp-redirect/src/bpf/repeat.h`).
//!
//! A worker that has admitted a connection, and knows the way of its answers, leaves its *answer* in shared memory: both ends, protocol, port
//! of the answering end, interfaces and epoch. A program that finds it for a packet without a connection writes the connection into a
//! free entry, in the steps of [`ConnTable::insert`], and tells the workers by an event. For each it takes one of the *credit* that
//! workers give the connection's owner. What is given is counted as connections of the owner at once: so the programs open no more than
//! the owner's share has room for, and an entry that they have made counts like any other. The entry of a connection of the same key and owner
//! that has ended is counted already: a program takes that one without credit, as a worker would replace it ([`Conn::replace`](super::Conn::replace)).

use std::sync::atomic::{AtomicI64, AtomicU64 as Word};

use super::counters::TableEvent;
use super::entry::{EntrySnapshot, OwnerId};
use super::hash::{KeyWords, PreparedFlow, home, key_of};
use super::path::Path;
use super::seqlock::{Control, SeqLock};
use super::sync::{AtomicU64, Ordering, overwrite};
use super::table::ConnTable;
use super::tags::LANES;
use super::time::{Tick, Timestamp, ticks};
use crate::epoch::Epoch;
use crate::packet::Flow;

/// Answers, in pairs: each question has one of a pair.
const ANSWERS: u32 = 4096;
/// Owners that may have credit: of what each pod opens, and of what others open to each.
const CREDITS: u32 = 2 * PODS;
/// Numbers of pods.
const PODS: u32 = 4096;
/// Events that wait for [`ConnTable::hear`].
const EVENTS: u32 = 1 << 14;
/// Most connections of an owner that the programs may open before they need more credit.
const MOST: u32 = 512;
/// The same as a part of what the owner may have.
const PART: u32 = 16;
/// Ticks until the daemon says again that answers may be repeated: more than the longest time that its thread needs for it.
const ALIVE: u32 = 40;
/// The most that they may be ahead: less than half of a clock's range (`repeats_now` in `repeat.h`).
const FAR: u32 = Tick::MASK / 4;

/// What programs and workers share for this, behind the table's openers.
#[repr(C, align(64))]
pub(super) struct Repeats {
    answers: [Answer; ANSWERS as usize],
    credits: [Credit; CREDITS as usize],
    sent: Sent,
    events: [Word; EVENTS as usize],
}

/// `struct answer`: the key of the connection without the opener's port, the path, and the [`Verdict`].
#[repr(C, align(64))]
struct Answer(SeqLock<Version, [AtomicU64; 7]>);

/// Number of the writes of an answer: odd while one is written, 0 before the first.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version(u64);

/// Under which epoch, whose share, and which direction opens: as one word.
struct Verdict;

/// `struct credit`.
#[repr(C, align(64))]
struct Credit {
    left: AtomicI64,
}

/// A program has opened a connection in the entry of this slot and generation.
struct Event {
    slot: u32,
    generation: u64,
    /// In place of one that had ended.
    is_in_place: bool,
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
    fn of(epoch: Epoch, owner: OwnerId, question: &PreparedFlow) -> u64 {
        u64::from(epoch.0) | u64::from(owner.0) << 32 | (question.orientation as u64) << 48
    }

    const fn epoch(word: u64) -> Epoch {
        Epoch(word as u32)
    }
}

impl Answer {
    /// Its words, if it is of this key.
    fn of(&self, key: &KeyWords) -> Option<[u64; 7]> {
        let words = self.read()?;
        (words[..5] == key[..]).then_some(words)
    }

    fn read(&self) -> Option<[u64; 7]> {
        self.0.read(self.0.control(), |words| std::array::from_fn(|word| words[word].load(Ordering::Relaxed)))
    }

    /// Whether another one may have its place: it is of an older epoch.
    fn is_outdated(&self, epoch: Epoch) -> bool {
        self.read().is_none_or(|words| Verdict::epoch(words[6]).is_before(epoch))
    }

    /// Writes it, unless another worker is about to.
    fn write(&self, words: &[u64; 7]) {
        let before = self.0.control();
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

    fn credit(&self, owner: OwnerId) -> Option<&Credit> {
        let pod = u32::from(OwnerId::opens(owner.0).0);
        let place = if owner.is_opened_to() { PODS + pod } else { pod };
        self.credits.get(place as usize).filter(|_| pod < PODS)
    }

    /// Leaves an answer to this question.
    fn leave(&self, question: &PreparedFlow, path: u64, verdict: u64) {
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

    /// Forgets what an earlier process has left. Only while the programs open nothing.
    pub(super) fn clear(&self) {
        for answer in &self.answers {
            answer.0.release(Version(0));
        }
        for credit in &self.credits {
            credit.left.store(0, Ordering::Relaxed);
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
    fn event(&self, number: u64) -> Option<Event> {
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
    fn left(&self) -> u32 {
        // A program takes it, and gives it back if there was none.
        self.left.load(Ordering::Relaxed).max(0) as u32
    }
}

impl ConnTable {
    /// What is shared with programs that may open connections.
    fn repeats(&self) -> Option<&Repeats> {
        self.repeats_for.and(self.storage.shared()).map(super::shared::SharedMaps::repeats)
    }

    /// Whether the kernel's programs may open connections like those that workers have opened, from now on for some time: say so at least
    /// every few seconds. They may not before [`ConnTable::take_over`]. [`Config::repeats`](super::Config::repeats) says for how
    /// long after the process has ended.
    pub fn let_repeat(&self, now: Timestamp, is_wanted: bool) {
        const ON: u32 = 1 << 31;
        const WITH_DAEMON: u32 = 1 << 30;
        let Some((shared, longest)) = self.storage.shared().zip(self.repeats_for) else { return };
        let after = ticks(longest);
        let alone = if after == 0 { WITH_DAEMON } else { 0 };
        let until = now.tick().0.wrapping_add(after.clamp(ALIVE, FAR)) & Tick::MASK;
        shared.set_repeats(if is_wanted && self.is_taken_over() { ON | alone | until } else { 0 });
    }

    /// A connection was opened by a packet of `question` between these interfaces under this epoch, for this owner: programs may open the next
    /// ones that differ in the opener's port alone.
    pub(super) fn leave_answer(&self, opened: &PreparedFlow, ends: (u32, u32), epoch: Epoch, owner: OwnerId) {
        let Some(repeats) = self.repeats() else { return };
        let flow = opened.flow();
        let question = PreparedFlow::new(&self.seed, &Flow { src_port: 0, ..flow });
        let path = Path::of_both_ways(opened.orientation, ends, epoch);
        // With one address at both ends the ports tell which is the lower.
        let may_have = flow.src != flow.dst && repeats.credit(owner).is_some();
        if let Some(path) = path.filter(|_| may_have) {
            repeats.leave(&question, path, Verdict::of(epoch, owner, &question));
            self.give_credit(repeats, owner);
        }
    }

    /// Gives an owner credit if little is left, out of what it may have.
    fn give_credit(&self, repeats: &Repeats, owner: OwnerId) {
        let Some(credit) = repeats.credit(owner) else { return };
        let limit = self.limit();
        let (most, before) = (MOST.min(limit / PART), credit.left.load(Ordering::Relaxed));
        let left = before.max(0) as u32;
        if left > most / 2 {
            return;
        }
        let more = (most - left).min(limit.saturating_sub(self.counted(owner)));
        // Counted first: a connection may be opened by it, and end, at once.
        self.count_more(owner, more);
        let after = before + i64::from(more);
        if more > 0 && credit.left.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            self.count_less(owner, more);
        }
    }

    /// Credit of an owner, which counts as connections.
    pub(super) fn credit_of(&self, owner: OwnerId) -> u32 {
        self.repeats().and_then(|repeats| repeats.credit(owner)).map_or(0, Credit::left)
    }

    /// Credit of all owners.
    pub(super) fn credit(&self) -> u32 {
        self.repeats().map_or(0, Repeats::left)
    }

    /// Hears of at most so many connections that the programs have opened since the last call, and tells the flow of each that is still
    /// there. One thread alone may call it, and keeps `next` between calls, at first 0. Returns of how many it has heard.
    pub fn hear(&self, next: &mut u64, most: usize, mut tell: impl FnMut(&Flow, OwnerId)) -> usize {
        let Some(repeats) = self.repeats() else { return 0 };
        let (sent, began) = (repeats.sent(), *next);
        // Who was too slow has missed the first ones, and those before this process are not its own.
        *next = (*next).max(self.first_event).max(sent.saturating_sub(u64::from(EVENTS)));
        self.counters.add(TableEvent::Unheard, *next - began.max(self.first_event));
        let until = sent.min(next.saturating_add(most as u64));
        let first = *next;
        while *next < until {
            match repeats.event(*next) {
                Some(event) => self.hear_of(repeats, &event, &mut tell),
                // It is about to be written.
                None if sent - *next < u64::from(EVENTS / 2) => break,
                None => self.counters.count(TableEvent::Unheard),
            }
            *next += 1;
        }
        (*next - first) as usize
    }

    fn hear_of(&self, repeats: &Repeats, event: &Event, tell: &mut impl FnMut(&Flow, OwnerId)) {
        let Event { slot, generation, is_in_place } = *event;
        self.counters.count(TableEvent::Created);
        self.counters.count(TableEvent::Repeated);
        self.counters.add(TableEvent::Reopened, u64::from(is_in_place));
        let Some(entry) = self.storage.entries().get(slot as usize) else { return };
        self.offloaded.insert(slot / LANES);
        if let Some(EntrySnapshot { control, key, owner, .. }) = entry.load()
            && control.generation() == generation
        {
            self.give_credit(repeats, owner);
            tell(&key_of(&key).flow(control.original()), owner);
        }
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

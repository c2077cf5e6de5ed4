//! Connections that the kernel's programs open by themselves: like one that a worker has opened before, under a policy that still
//! allows it (`xdp-redirect/src/bpf/repeat.h`).
//!
//! A worker that has admitted a connection, and knows the way of its answers, leaves its *answer* in shared memory: both ends, protocol, port
//! of the answering end, interfaces and epoch. A program that finds it for a packet without a connection writes the connection into a
//! free entry, in the steps of [`ConnTable::insert`], and tells the workers by an event. For each it takes one of the *credit* that
//! workers give the connection's owner. What is given is counted as connections of the owner at once: so the programs open no more than
//! the owner's share has room for, and an entry that they have made counts like any other. The entry of a connection of the same key and owner
//! that has ended is counted already: a program takes that one without credit, as a worker would replace it ([`Conn::replace`](super::Conn::replace)).

use std::sync::atomic::Ordering as CountOrdering;

use super::answers::{Credit, EVENTS, Event, Repeats, Verdict};
use super::counters::TableEvent;
use super::entry::{EntrySnapshot, OwnerId};
use super::hash::{PreparedFlow, key_of};
use super::path::{ForwardedConnection, Path};
use super::shared::SharedMaps;
use super::sync::Ordering;
use super::table::ConnTable;
use super::tags::LANES;
use super::time::{Tick, Timestamp, ticks};
use crate::epoch::Epoch;
use crate::packet::Flow;

/// Most connections of an owner that the programs may open before they need more credit.
const MOST: u32 = 512;
/// The same as a part of what the owner may have.
const PART: u32 = 16;
/// The part of what else an owner may have that the programs may open without a daemon: nobody gives credit then, nor takes away what has
/// ended, and others' connections need entries, too.
const PART_ALONE: u32 = 4;
/// Ticks until the daemon says again that answers may be repeated: more than the longest time that its thread needs for it.
const ALIVE: u32 = 40;
/// The most that they may be ahead: less than half of a clock's range (`may_repeat` in `repeat.h`).
const FAR: u32 = Tick::MASK / 4;

impl ConnTable {
    /// The memory shared with programs that may open connections.
    fn repeats(&self) -> Option<&Repeats> {
        self.repeats_for.and(self.storage.shared()).map(SharedMaps::repeats)
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

    /// A connection was opened by a packet of `opened` between these interfaces under this epoch, for this owner, and traverses the node's stack
    /// in both directions or not: programs may open the next ones that differ in the opener's port alone.
    pub(super) fn leave_answer(
        &self,
        opened: &PreparedFlow,
        (ends, via_host): ((u32, u32), bool),
        epoch: Epoch,
        owner: OwnerId,
    ) {
        let Some(repeats) = self.repeats() else { return };
        let flow = opened.flow();
        // In place of the opener's port, so that both kinds have an answer of their own.
        let question = PreparedFlow::new(&self.seed, &Flow { src_port: via_host.into(), ..flow });
        let path = Path::of_both_ways(opened.orientation, ends, epoch);
        // With one address at both ends the ports tell which is the lower.
        let may_have = flow.src != flow.dst && repeats.credit(owner).is_some();
        if let Some(path) = path.filter(|_| may_have) {
            repeats.store(&question, path, Verdict::of(epoch, owner, &question));
            self.give_credit(repeats, owner);
        }
    }

    /// Gives answers that were left under an older epoch this one, where `is_kept` finds that a worker would give them again: pairs
    /// that open a connection now and then need no worker for a change that is not about them, nor while no daemon runs. Call it
    /// before [`ConnTable::publish_epoch`]. Returns how many are kept.
    pub(crate) fn keep_answers(
        &self,
        epoch: Epoch,
        is_kept: impl FnMut(&ForwardedConnection, OwnerId) -> bool,
    ) -> usize {
        // Those of the last process are not this one's.
        self.repeats().filter(|_| self.is_taken_over()).map_or(0, |repeats| repeats.renew(epoch, is_kept))
    }

    /// Gives an owner credit if little is left, out of what it may have.
    fn give_credit(&self, repeats: &Repeats, owner: OwnerId) {
        let Some(credit) = repeats.credit(owner) else { return };
        let limit = self.limit();
        let (most, before) = (MOST.min(limit / PART), credit.left.load(Ordering::Relaxed));
        let (left, room) = (before.max(0) as u32, limit.saturating_sub(self.counted(owner)));
        credit.alone.store(i64::from(room / PART_ALONE), Ordering::Relaxed);
        if left > most / 2 {
            return;
        }
        let more = (most - left).min(room);
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
        let own = self.first_event.load(CountOrdering::Relaxed);
        // Who was too slow has missed the first ones, and those before this process are not its own.
        *next = (*next).max(own).max(sent.saturating_sub(u64::from(EVENTS)));
        self.counters.add(TableEvent::Unheard, *next - began.max(own));
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

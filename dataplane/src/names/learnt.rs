//! The names that one pod has learnt.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::answer::{Answer, DomainName, read_answer};
use super::limits::Shared;
use super::questions::{DnsTalk, Questions};
use super::rules::NameRules;
use super::streams::{DnsSegment, Side, Streams};
use crate::packet::Address;

/// An answer counts at most this long, as in most resolvers.
const MOST: Duration = Duration::from_secs(7 * 86_400);

/// Milliseconds on the clock by which connections are timed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Moment(pub u64);

/// Which of the names count that a pod has learnt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NameTime {
    /// None: as if nothing had been learnt.
    #[default]
    Never,
    /// Those that hold at this moment, for a connection that is opened then.
    At(Moment),
    /// All that are kept, also those that have expired: for a connection that was allowed before.
    Ever,
}

/// A name that an answer gave for an address.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LearntName {
    /// Until when it holds for new connections.
    pub expires: Moment,
    pub address: Address,
    pub name: DomainName,
}

/// The names that one pod has learnt from DNS answers.
#[derive(Debug)]
pub struct LearntNames {
    learnt: RwLock<Learnt>,
    heard: Mutex<Heard>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Heard {
    questions: Questions,
    streams: Streams,
}

#[derive(Debug, Default)]
struct Learnt {
    by_address: FxHashMap<Address, Vec<(DomainName, Moment)>>,
    /// The same, what expires first first.
    by_time: BTreeSet<LearntName>,
}

impl LearntNames {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { learnt: RwLock::default(), heard: Mutex::default(), shared }
    }

    fn read(&self) -> RwLockReadGuard<'_, Learnt> {
        self.learnt.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Learnt> {
        self.learnt.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a message of the pod to a resolver.
    pub fn ask(&self, talk: DnsTalk, message: &[u8]) {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).questions.ask_by(talk, message);
    }

    /// Reads a message of a resolver to the pod, received `now`, and learns what it says, if it answers what the pod has asked. One that is
    /// not understood, or does not, is counted.
    pub fn hear(&self, talk: DnsTalk, message: &[u8], now: Moment) {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(&mut heard.questions, talk, message, now);
    }

    /// Reads a segment of DNS over TCP, likewise.
    pub fn hear_segment(&self, talk: DnsTalk, side: Side, segment: DnsSegment<'_>, now: Moment) {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let Heard { questions, streams } = &mut *heard;
        streams.read(talk, side, segment, |message| match side {
            Side::Pod => questions.ask_by(talk, message),
            Side::Resolver => self.take(questions, talk, message, now),
        });
    }

    fn take(&self, questions: &mut Questions, talk: DnsTalk, message: &[u8], now: Moment) {
        let counter = match read_answer(message) {
            Ok((question, answer)) if questions.take(talk, &question) => return self.learn(&answer, now),
            Ok(_) => &self.shared.unasked,
            Err(_) => &self.shared.not_understood,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Learns what an answer says, received `now`. What held longer before keeps doing so.
    pub fn learn(&self, answer: &Answer, now: Moment) {
        if answer.names.is_empty() || answer.addresses.is_empty() {
            return;
        }
        let mut learnt = self.write();
        for (address, of_address) in &answer.addresses {
            for (name, of_name) in &answer.names {
                let lifetime = (*of_address).min(*of_name).clamp(self.shared.limits.least, MOST);
                let expires = Moment(now.0.saturating_add(lifetime.as_millis() as u64));
                self.record(&mut learnt, LearntName { expires, address: *address, name: name.clone() });
            }
        }
        drop(learnt);
        self.shared.learnt.fetch_add((answer.addresses.len() * answer.names.len()) as u64, Relaxed);
        self.shared.changes.fetch_add(1, Relaxed);
    }

    pub(super) fn restore(&self, names: impl IntoIterator<Item = LearntName>) {
        let mut learnt = self.write();
        names.into_iter().for_each(|name| self.record(&mut learnt, name));
    }

    fn record(&self, learnt: &mut Learnt, new: LearntName) {
        match learnt.until(&new) {
            Some(before) if before >= new.expires => return,
            Some(before) => {
                learnt.by_time.remove(&LearntName { expires: before, ..new.clone() });
                learnt.remove_from_address(&new);
            }
            None => {
                self.make_room(learnt, new.address);
                self.shared.names.fetch_add(1, Relaxed);
            }
        }
        learnt.by_address.entry(new.address).or_default().push((new.name.clone(), new.expires));
        learnt.by_time.insert(new);
    }

    /// Evicts what expires first, or has expired the longest ago, until one more name for this address keeps the limits.
    fn make_room(&self, learnt: &mut Learnt, address: Address) {
        let limits = &self.shared.limits;
        while learnt.by_time.len() >= limits.per_pod
            || learnt.by_time.len() >= limits.reserved && self.shared.names.load(Relaxed) >= limits.total as u64
        {
            let Some(first) = learnt.by_time.pop_first() else { break };
            learnt.remove_from_address(&first);
            self.shared.evicted();
        }
        let of_address = learnt.by_address.get(&address).map_or(&[][..], Vec::as_slice);
        if of_address.len() >= limits.per_address
            && let Some((name, expires)) = of_address.iter().min_by_key(|(_, expires)| *expires).cloned()
        {
            let first = LearntName { expires, address, name };
            learnt.by_time.remove(&first);
            learnt.remove_from_address(&first);
            self.shared.evicted();
        }
    }

    /// The lowest rule that matches this address by a name, among those that `counts` accepts.
    pub(crate) fn first_rule(
        &self,
        rules: &NameRules,
        address: Address,
        time: NameTime,
        counts: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let learnt = self.read();
        let names = learnt.by_address.get(&address)?.iter().filter(|(_, expires)| match time {
            NameTime::Never => false,
            NameTime::At(now) => now < *expires,
            NameTime::Ever => true,
        });
        names.flat_map(|(name, _)| rules.of(name.as_str())).filter(|rule| counts(*rule)).min()
    }

    /// All that is kept, what expires first first.
    pub fn all(&self) -> Vec<LearntName> {
        self.read().by_time.iter().cloned().collect()
    }
}

impl Learnt {
    /// Until when this name is known to hold for its address.
    fn until(&self, new: &LearntName) -> Option<Moment> {
        let names = self.by_address.get(&new.address)?;
        names.iter().find(|(name, _)| *name == new.name).map(|(_, expires)| *expires)
    }

    fn remove_from_address(&mut self, gone: &LearntName) {
        if let Some(names) = self.by_address.get_mut(&gone.address) {
            names.retain(|(name, _)| *name != gone.name);
            if names.is_empty() {
                self.by_address.remove(&gone.address);
            }
        }
    }
}

impl Drop for LearntNames {
    fn drop(&mut self) {
        let kept = self.read().by_time.len() as u64;
        self.shared.names.fetch_sub(kept, Relaxed);
    }
}

//! What is known of a cluster's objects, and what of it has not been told yet: free of I/O.
//!
//! Of an object it keeps the name, the version and a fingerprint of its meaning, not the object: whoever is told of the
//! changes keeps that. Whatever the order in which events come, and however often, what is told ends in the objects'
//! latest versions: an event that is not newer than what is known of its object is passed over, also
//! when the object has been deleted since. A list is taken whole or not at all.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};

use penstock_policy::model::{Change, Object, ObjectRef};
use rustc_hash::FxHashMap;

use super::narrow::Content;
use super::read::Read;
use crate::Kind;

/// How many deleted objects of a kind are remembered, lest a late event bring one back.
const REMEMBERED: usize = 10_000;

/// What is known of a cluster.
#[derive(Debug, Default)]
pub(super) struct Store {
    kinds: [Objects; Kind::ALL.len()],
    /// What has not been told yet, with the number of its coming.
    untold: FxHashMap<ObjectRef, (u64, Change)>,
    coming: u64,
    hasher: RandomState,
    started: bool,
}

/// The objects of one kind.
#[derive(Debug, Default)]
struct Objects {
    known: FxHashMap<ObjectRef, Known>,
    deleted: Deleted,
    list: Option<FxHashMap<ObjectRef, Listed>>,
    is_listed: bool,
    /// How many of the known are not wholly understood.
    invalid: usize,
}

/// What is known of an object.
#[derive(Clone, Copy, Debug)]
struct Known {
    version: Option<u64>,
    /// Fingerprint of what holds of it; `None` where nothing does.
    meaning: Option<u64>,
    /// Fingerprint of what is not understood of it.
    problem: Option<u64>,
}

/// An object in a list that is not complete yet.
#[derive(Debug)]
struct Listed {
    known: Known,
    /// What holds of it, if that is not what was told of it before.
    news: Option<Object>,
    /// What is not understood, if that has not been told before.
    problem: Option<String>,
}

/// Objects deleted lately, and at which version.
#[derive(Debug, Default)]
struct Deleted {
    versions: FxHashMap<ObjectRef, u64>,
    order: VecDeque<ObjectRef>,
}

impl Store {
    /// A list of all objects of a kind begins. One that was not complete is forgotten.
    pub(super) fn begin_list(&mut self, kind: Kind) {
        self.kinds[kind as usize].list = Some(FxHashMap::default());
    }

    /// An object of the list that has begun.
    pub(super) fn list(&mut self, kind: Kind, read: Read) {
        let Read { reference, version, content } = read;
        let (meaning, problem, object, text) = fingerprints(&self.hasher, content);
        let objects = &mut self.kinds[kind as usize];
        let before = objects.known.get(&reference);
        let news = object.filter(|_| before.is_none_or(|known| known.meaning != meaning));
        let told = before.is_some_and(|known| known.problem == problem);
        let listed = Listed { known: Known { version, meaning, problem }, news, problem: text.filter(|_| !told) };
        let Some(list) = &mut objects.list else { return };
        match list.entry(reference) {
            Entry::Vacant(place) => {
                place.insert(listed);
            }
            Entry::Occupied(mut place) => {
                if !is_late(version, place.get().known.version) {
                    place.insert(listed);
                }
            }
        }
    }

    /// The list is complete: what is not in it is gone. Whether this was the kind's first.
    pub(super) fn end_list(&mut self, kind: Kind) -> bool {
        let objects = &mut self.kinds[kind as usize];
        let Some(mut list) = objects.list.take() else { return false };
        let gone: Vec<ObjectRef> = objects.known.keys().filter(|name| !list.contains_key(name)).cloned().collect();
        let mut changes: Vec<Change> = gone.into_iter().map(Change::Delete).collect();
        objects.deleted = Deleted::default();
        objects.invalid = 0;
        let before = std::mem::take(&mut objects.known);
        for (reference, listed) in &mut list {
            let before = before.get(reference);
            tell(reference, before.and_then(|known| known.problem), listed.known.problem, listed.problem.take());
            objects.invalid += usize::from(listed.known.problem.is_some());
            match listed.news.take() {
                Some(object) => changes.push(Change::Set(object)),
                // Something held of it before, and now nothing does.
                None if listed.known.meaning.is_none() && before.is_some_and(|known| known.meaning.is_some()) => {
                    changes.push(Change::Delete(reference.clone()));
                }
                None => {}
            }
        }
        // In the order of their last changes: of two pods with one address the later one has it.
        changes.sort_by_cached_key(|change| list.get(&name_of(change)).and_then(|listed| listed.known.version));
        objects.known = list.into_iter().map(|(reference, listed)| (reference, listed.known)).collect();
        let is_first = !std::mem::replace(&mut objects.is_listed, true);
        changes.into_iter().for_each(|change| self.note(change));
        is_first
    }

    /// An object was added or modified. Whether that was news.
    pub(super) fn set(&mut self, kind: Kind, read: Read) -> bool {
        let Read { reference, version, content } = read;
        let objects = &mut self.kinds[kind as usize];
        let before = objects.known.get(&reference).copied();
        if before.is_some_and(|known| is_late(version, known.version)) || objects.deleted.is_late(&reference, version) {
            return false;
        }
        let (meaning, problem, object, text) = fingerprints(&self.hasher, content);
        tell(&reference, before.and_then(|known| known.problem), problem, text);
        objects.invalid -= usize::from(before.is_some_and(|known| known.problem.is_some()));
        objects.invalid += usize::from(problem.is_some());
        objects.known.insert(reference.clone(), Known { version, meaning, problem });
        let meant = before.and_then(|known| known.meaning);
        if meaning == meant {
            return false;
        }
        self.note(object.map_or(Change::Delete(reference), Change::Set));
        true
    }

    /// An object was deleted, at this version. Whether that was news.
    pub(super) fn delete(&mut self, kind: Kind, reference: ObjectRef, version: Option<u64>) -> bool {
        let objects = &mut self.kinds[kind as usize];
        let Some(known) = objects.known.get(&reference) else {
            objects.deleted.remember(reference, version);
            return false;
        };
        // Made again since. An old server tells the last version of the object itself.
        if version != known.version && is_late(version, known.version) {
            return false;
        }
        objects.invalid -= usize::from(known.problem.is_some());
        objects.known.remove(&reference);
        objects.deleted.remember(reference.clone(), version);
        self.note(Change::Delete(reference));
        true
    }

    /// The kinds that have not been listed yet.
    pub(super) fn awaited(&self) -> Vec<Kind> {
        Kind::ALL.into_iter().filter(|&kind| !self.kinds[kind as usize].is_listed).collect()
    }

    /// How many objects of a kind there are, and how many of them are not wholly understood.
    pub(super) fn count(&self, kind: Kind) -> (usize, usize) {
        let objects = &self.kinds[kind as usize];
        (objects.known.len(), objects.invalid)
    }

    /// What has not been told yet: deletions first, then namespaces, nodes, pods and policies, each in the order
    /// of their coming. `None` while there is nothing, or not all kinds have been listed; the first time it is
    /// all that there is, and may be empty.
    pub(super) fn take(&mut self) -> Option<Vec<Change>> {
        if !self.awaited().is_empty() || (self.started && self.untold.is_empty()) {
            return None;
        }
        self.started = true;
        let mut changes: Vec<(u64, Change)> = std::mem::take(&mut self.untold).into_values().collect();
        changes.sort_unstable_by_key(|(coming, change)| (rank(change), *coming));
        Some(changes.into_iter().map(|(_, change)| change).collect())
    }

    fn note(&mut self, change: Change) {
        self.coming += 1;
        self.untold.insert(name_of(&change), (self.coming, change));
    }
}

impl Deleted {
    fn remember(&mut self, reference: ObjectRef, version: Option<u64>) {
        let Some(version) = version else { return };
        if self.versions.insert(reference.clone(), version).is_none() {
            self.order.push_back(reference);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.versions.remove(&oldest);
        }
    }

    fn is_late(&self, reference: &ObjectRef, version: Option<u64>) -> bool {
        self.versions.get(reference).is_some_and(|&deleted| is_late(version, Some(deleted)))
    }
}

/// Whether a version is not newer than one that is known.
fn is_late(version: Option<u64>, known: Option<u64>) -> bool {
    matches!((version, known), (Some(version), Some(known)) if version <= known)
}

type Fingerprints = (Option<u64>, Option<u64>, Option<Object>, Option<String>);

/// Fingerprints of what holds and of what is not understood, and both as they are.
fn fingerprints(hasher: &RandomState, content: Content) -> Fingerprints {
    let (object, problem) = match content {
        Content::Whole(object) => (Some(object), None),
        Content::Part { object, problem } => (Some(object), Some(problem)),
        Content::Nothing { problem } => (None, Some(problem)),
    };
    let meaning = object.as_ref().map(|object| hasher.hash_one(object));
    (meaning, problem.as_ref().map(|problem| hasher.hash_one(problem)), object, problem)
}

/// Tells, once, that an object is not understood, or that it is again.
fn tell(reference: &ObjectRef, before: Option<u64>, now: Option<u64>, text: Option<String>) {
    if before == now {
        return;
    }
    match text {
        Some(text) => tracing::warn!(object = %reference, "not understood: {text}"),
        None => tracing::info!(object = %reference, "understood again"),
    }
}

fn name_of(change: &Change) -> ObjectRef {
    match change {
        Change::Set(object) => object.reference(),
        Change::Delete(reference) => reference.clone(),
    }
}

fn rank(change: &Change) -> u8 {
    match change {
        Change::Delete(_) => 0,
        Change::Set(Object::Namespace(_)) => 1,
        Change::Set(Object::Node(_)) => 2,
        Change::Set(Object::Pod(_)) => 3,
        Change::Set(Object::NetworkPolicy(_)) => 4,
    }
}

#[cfg(test)]
mod tests;

//! The cluster's known objects and the changes not yet sent. No I/O.
//!
//! Keeps the name, version and content fingerprint of an object, not the object: the receiver of the changes keeps that.
//! In whatever order and however often events arrive, the changes sent end in the latest versions: an event that is not
//! newer than the known version is ignored, also for an object deleted since. A list applies as a whole or not at all.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};

use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use rustc_hash::FxHashMap;

use super::converted::ConvertedObject;
use super::events::{Problem, Problems};
use super::fail_closed::Interpretation;
use crate::ObjectKind;
use crate::health::Versions;

/// Deleted objects remembered for each kind, so that a late event does not bring one back.
const DELETED_KEPT: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Store {
    kinds: [KindObjects; ObjectKind::ALL.len()],
    /// Changes not yet sent, with their sequence number.
    unsent: FxHashMap<ObjectRef, (u64, ObjectChange)>,
    sequence: u64,
    hasher: RandomState,
    started: bool,
    /// The versions up to which all changes are in the store, and those that went with the last changes sent.
    versions: Versions,
    sent: Versions,
    /// Problems that were logged, of policies.
    problems: Problems,
}

#[derive(Debug, Default)]
struct KindObjects {
    known: FxHashMap<ObjectRef, Known>,
    deleted: Deleted,
    list: Option<FxHashMap<ObjectRef, Listed>>,
    is_listed: bool,
    /// The number of known objects that are not fully understood.
    invalid: usize,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    version: Option<u64>,
    /// Fingerprint of its valid content; `None` if it has none.
    content_hash: Option<u64>,
    /// Fingerprint of its problem; `None` if it is fully understood.
    problem_hash: Option<u64>,
}

#[derive(Debug)]
struct Listed {
    known: Known,
    /// Its content, if it differs from the known one.
    changed: Option<Object>,
    /// Its problem, if not yet logged.
    problem: Option<Problem>,
}

#[derive(Debug, Default)]
struct Deleted {
    versions: FxHashMap<ObjectRef, u64>,
    order: VecDeque<ObjectRef>,
}

impl Store {
    /// Starts a list of all objects of a kind. Discards an incomplete one.
    pub(super) fn begin_list(&mut self, kind: ObjectKind) {
        self.kinds[kind as usize].list = Some(FxHashMap::default());
    }

    pub(super) fn list(&mut self, kind: ObjectKind, object: ConvertedObject) {
        let ConvertedObject { reference, version, uid, content } = object;
        let objects = &mut self.kinds[kind as usize];
        let before = objects.known.get(&reference);
        let hash_before = before.and_then(|known| known.content_hash);
        let (content_hash, problem_hash, object, problem) = fingerprints(&self.hasher, content, hash_before);
        let changed = object.filter(|_| before.is_none_or(|known| known.content_hash != content_hash));
        let is_logged = before.is_some_and(|known| known.problem_hash == problem_hash);
        let known = Known { version, content_hash, problem_hash };
        let problem = problem.filter(|_| !is_logged);
        let problem = problem.map(|text| Problem { reference: reference.clone(), uid, version, text });
        let listed = Listed { known, changed, problem };
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

    /// Completes the list: objects not in it are deleted. Returns whether this was the kind's first list.
    pub(super) fn end_list(&mut self, kind: ObjectKind) -> bool {
        let objects = &mut self.kinds[kind as usize];
        let Some(mut list) = objects.list.take() else { return false };
        let gone: Vec<ObjectRef> = objects.known.keys().filter(|name| !list.contains_key(name)).cloned().collect();
        let mut changes: Vec<ObjectChange> = gone.into_iter().map(ObjectChange::Delete).collect();
        objects.deleted = Deleted::default();
        objects.invalid = 0;
        let before = std::mem::take(&mut objects.known);
        for (reference, listed) in &mut list {
            let before = before.get(reference);
            let hash_before = before.and_then(|known| known.problem_hash);
            let problem = listed.problem.take();
            log_problem(&mut self.problems, reference, hash_before, listed.known.problem_hash, problem);
            objects.invalid += usize::from(listed.known.problem_hash.is_some());
            match listed.changed.take() {
                Some(object) => changes.push(ObjectChange::Set(object)),
                // Its content was valid before and is not now.
                None if listed.known.content_hash.is_none()
                    && before.is_some_and(|known| known.content_hash.is_some()) =>
                {
                    changes.push(ObjectChange::Delete(reference.clone()));
                }
                None => {}
            }
        }
        // In order of their last changes: of two pods with one address the later one gets it.
        changes.sort_by_cached_key(|change| list.get(&name_of(change)).and_then(|listed| listed.known.version));
        objects.known = list.into_iter().map(|(reference, listed)| (reference, listed.known)).collect();
        let is_first = !std::mem::replace(&mut objects.is_listed, true);
        changes.into_iter().for_each(|change| self.queue(change));
        is_first
    }

    /// Adds or updates an object. Returns whether anything changed.
    pub(super) fn set(&mut self, kind: ObjectKind, object: ConvertedObject) -> bool {
        let ConvertedObject { reference, version, uid, content } = object;
        let objects = &mut self.kinds[kind as usize];
        let before = objects.known.get(&reference).copied();
        if before.is_some_and(|known| is_late(version, known.version)) || objects.deleted.is_late(&reference, version) {
            return false;
        }
        let hash_before = before.and_then(|known| known.content_hash);
        let (content_hash, problem_hash, object, problem) = fingerprints(&self.hasher, content, hash_before);
        let problem = problem.map(|text| Problem { reference: reference.clone(), uid, version, text });
        let hash_of_problem = before.and_then(|known| known.problem_hash);
        log_problem(&mut self.problems, &reference, hash_of_problem, problem_hash, problem);
        objects.invalid -= usize::from(before.is_some_and(|known| known.problem_hash.is_some()));
        objects.invalid += usize::from(problem_hash.is_some());
        objects.known.insert(reference.clone(), Known { version, content_hash, problem_hash });
        if content_hash == before.and_then(|known| known.content_hash) {
            return false;
        }
        self.queue(object.map_or(ObjectChange::Delete(reference), ObjectChange::Set));
        true
    }

    /// Deletes an object at this version. Returns whether anything changed.
    pub(super) fn delete(&mut self, kind: ObjectKind, reference: ObjectRef, version: Option<u64>) -> bool {
        let objects = &mut self.kinds[kind as usize];
        let Some(known) = objects.known.get(&reference) else {
            objects.deleted.remember(reference, version);
            return false;
        };
        // Created again since. An old server sends the object's own last version.
        if version != known.version && is_late(version, known.version) {
            return false;
        }
        objects.invalid -= usize::from(known.problem_hash.is_some());
        objects.known.remove(&reference);
        objects.deleted.remember(reference.clone(), version);
        self.queue(ObjectChange::Delete(reference));
        true
    }

    /// The kinds not listed yet.
    pub(super) fn awaited(&self) -> Vec<ObjectKind> {
        ObjectKind::ALL.into_iter().filter(|&kind| !self.kinds[kind as usize].is_listed).collect()
    }

    /// The number of objects of a kind, and how many of them are not fully understood.
    pub(super) fn count(&self, kind: ObjectKind) -> (usize, usize) {
        let objects = &self.kinds[kind as usize];
        (objects.known.len(), objects.invalid)
    }

    /// The changes not yet sent: deletions, then namespaces, nodes, pods, policies, Services and EndpointSlices, each in order
    /// of arrival. `None` without changes, or until all kinds are listed; the first result has all objects and may be empty.
    pub(super) fn take(&mut self) -> Option<Vec<ObjectChange>> {
        if !self.awaited().is_empty() || (self.started && self.unsent.is_empty()) {
            return None;
        }
        self.started = true;
        let mut changes: Vec<(u64, ObjectChange)> = std::mem::take(&mut self.unsent).into_values().collect();
        changes.sort_unstable_by_key(|(sequence, change)| (rank(change), *sequence));
        Some(changes.into_iter().map(|(_, change)| change).collect())
    }

    /// All changes of a kind up to this version are in the store. Returns the version before.
    pub(super) fn advance(&mut self, kind: ObjectKind, version: u64) -> u64 {
        std::mem::replace(&mut self.versions[kind as usize], version)
    }

    /// The versions up to which all changes have been taken; `None` if they are those of the last call, or not all kinds are
    /// listed.
    pub(super) fn take_versions(&mut self) -> Option<Versions> {
        let is_news = self.started && self.unsent.is_empty() && self.sent != self.versions;
        is_news.then(|| {
            self.sent = self.versions;
            self.sent
        })
    }

    /// Takes a policy's problem that was logged, the oldest first. At most 256 are kept.
    pub(super) fn take_problem(&mut self) -> Option<Problem> {
        self.problems.take()
    }

    fn queue(&mut self, change: ObjectChange) {
        self.sequence += 1;
        self.unsent.insert(name_of(&change), (self.sequence, change));
    }
}

impl Deleted {
    fn remember(&mut self, reference: ObjectRef, version: Option<u64>) {
        let Some(version) = version else { return };
        if self.versions.insert(reference.clone(), version).is_none() {
            self.order.push_back(reference);
        }
        if self.order.len() > DELETED_KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.versions.remove(&oldest);
        }
    }

    fn is_late(&self, reference: &ObjectRef, version: Option<u64>) -> bool {
        self.versions.get(reference).is_some_and(|&deleted| is_late(version, Some(deleted)))
    }
}

/// Whether a version is not newer than a known one.
fn is_late(version: Option<u64>, known: Option<u64>) -> bool {
    matches!((version, known), (Some(version), Some(known)) if version <= known)
}

type Fingerprints = (Option<u64>, Option<u64>, Option<Object>, Option<String>);

/// The fingerprints of content and problem, and both themselves. `before` is the fingerprint of the known content, which
/// may stay.
fn fingerprints(hasher: &RandomState, content: Interpretation, before: Option<u64>) -> Fingerprints {
    let (object, problem) = match content {
        Interpretation::Kept { problem } => return (before, Some(hasher.hash_one(&problem)), None, Some(problem)),
        Interpretation::Full(object) => (Some(object), None),
        Interpretation::Restricted { object, problem } => (Some(object), Some(problem)),
        Interpretation::Unusable { problem } => (None, Some(problem)),
    };
    let content_hash = object.as_ref().map(|object| hasher.hash_one(object));
    (content_hash, problem.as_ref().map(|problem| hasher.hash_one(problem)), object, problem)
}

/// Logs once that an object is not understood, or is understood again.
fn log_problem(
    problems: &mut Problems,
    reference: &ObjectRef,
    before: Option<u64>,
    now: Option<u64>,
    problem: Option<Problem>,
) {
    if before == now {
        return;
    }
    match problem {
        Some(problem) => {
            tracing::warn!(object = %reference, "not understood: {}", problem.text);
            problems.add(problem);
        }
        None => tracing::info!(object = %reference, "understood again"),
    }
}

fn name_of(change: &ObjectChange) -> ObjectRef {
    match change {
        ObjectChange::Set(object) => object.reference(),
        ObjectChange::Delete(reference) => reference.clone(),
    }
}

fn rank(change: &ObjectChange) -> u8 {
    match change {
        ObjectChange::Delete(_) => 0,
        ObjectChange::Set(Object::Namespace(_)) => 1,
        ObjectChange::Set(Object::Node(_)) => 2,
        ObjectChange::Set(Object::Pod(_)) => 3,
        ObjectChange::Set(Object::NetworkPolicy(_) | Object::ClusterNetworkPolicy(_)) => 4,
        ObjectChange::Set(Object::Service(_)) => 5,
        ObjectChange::Set(Object::EndpointSlice(_)) => 6,
    }
}

#[cfg(test)]
mod tests;

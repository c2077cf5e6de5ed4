//! Staged policies: which policies the state sees, by one of two readings of the same objects.
//!
//! As they are **in effect**, a staged policy does not exist. As **promoted**, every staged policy is what it would become:
//! a new one exists, an edit stands in place of what it is for, and what is staged for deletion is gone. An engine has one
//! reading from its start on; two engines that are given the same changes give the verdicts before and after promotion.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Object, ObjectChange, ObjectRef, Staging};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PolicyReading {
    #[default]
    InForce,
    /// The policies that workers would enforce if everything that is staged were promoted.
    Promoted,
}

/// A staged policy that does not mean what its author may think.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, thiserror::Error)]
pub enum StagedProblem {
    /// It is for a policy that does not exist.
    #[error(
        "{staged} is staged for {target}, which does not exist: it is judged as a new policy; correct the name, or use policy.penstock.dev/staged: \"true\""
    )]
    NoTarget { staged: ObjectRef, target: ObjectRef },
    #[error("{staged} is staged for {target}, and so is {counts}, which counts: remove one of them")]
    SameTarget {
        staged: ObjectRef,
        /// The one that does: the first by name.
        counts: ObjectRef,
        target: ObjectRef,
    },
}

/// The staged policies of a cluster, and those of a trial from files.
#[derive(Debug, Default)]
pub(crate) struct StagedPolicies {
    reading: PolicyReading,
    /// Policies as they are written: those with an annotation, and as promoted all others, too.
    written: BTreeMap<ObjectRef, Object>,
    /// The policies that are staged for another one, by that one's name.
    edits: BTreeMap<ObjectRef, BTreeSet<ObjectRef>>,
    /// As promoted: what files say of a policy, before all else. `None`: it would be deleted.
    trial: BTreeMap<ObjectRef, Option<Object>>,
}

impl StagedPolicies {
    pub(crate) fn new(reading: PolicyReading) -> Self {
        Self { reading, ..Self::default() }
    }

    /// Passes on what the state shall see of a change.
    pub(crate) fn admit(&mut self, change: ObjectChange, mut pass: impl FnMut(ObjectChange)) {
        let reference = match &change {
            ObjectChange::Set(object) => object.reference(),
            ObjectChange::Delete(reference) => reference.clone(),
        };
        if !reference.is_policy() {
            return pass(change);
        }
        let written = match change {
            ObjectChange::Set(object) => Some(object),
            ObjectChange::Delete(_) => None,
        };
        match self.reading {
            PolicyReading::InForce => {
                let (plain, annotated) = match written {
                    Some(object) if is_plain(&object) => (Some(object), None),
                    other => (None, other),
                };
                let kept = annotated.as_ref().filter(|object| !object.is_staged());
                let enforced = plain.or_else(|| Some(kept?.clone().in_force_as(&reference)));
                pass(state_of(&reference, enforced));
                self.write(&reference, annotated);
            }
            PolicyReading::Promoted => {
                let mut affected = BTreeSet::from([reference.clone()]);
                affected.extend(self.write(&reference, written));
                for target in affected {
                    pass(state_of(&target, self.promoted(&target)));
                }
            }
        }
    }

    /// Replaces the policies of a trial from files; passes on what the state shall see. Only as promoted.
    pub(crate) fn set_trial(&mut self, policies: &[Object], mut pass: impl FnMut(ObjectChange)) {
        if self.reading == PolicyReading::InForce {
            return;
        }
        let says = |policy: &Object| {
            let own = policy.reference();
            match policy.staging()? {
                Staging::InForce | Staging::New => Some((own.clone(), Some(policy.clone().in_force_as(&own)))),
                Staging::Replaces(_) => {
                    let target = policy.replaced()?;
                    Some((target.clone(), Some(policy.clone().in_force_as(&target))))
                }
                Staging::Deleted => Some((own, None)),
            }
        };
        let before = std::mem::replace(&mut self.trial, policies.iter().filter_map(says).collect());
        let affected: BTreeSet<ObjectRef> = before.into_keys().chain(self.trial.keys().cloned()).collect();
        for target in affected {
            pass(state_of(&target, self.promoted(&target)));
        }
    }

    /// The policies that an annotation stages, for deletion, too, in order.
    pub(crate) fn staged(&self) -> impl Iterator<Item = &Object> {
        self.written.values().filter(|object| !is_plain(object))
    }

    /// Doubts whether the staged policies are as they are meant, in order. Complete only as promoted.
    pub(crate) fn problems(&self) -> Vec<StagedProblem> {
        let mut problems = Vec::new();
        for (target, staged) in &self.edits {
            let counts = staged.first();
            let is_known = self.written.get(target).is_some_and(|object| !object.is_staged());
            if let (Some(staged), false) = (counts, is_known) {
                problems.push(StagedProblem::NoTarget { staged: staged.clone(), target: target.clone() });
            }
            let others = staged.iter().skip(1).zip(counts.into_iter().cycle());
            problems.extend(others.map(|(staged, counts)| StagedProblem::SameTarget {
                staged: staged.clone(),
                counts: counts.clone(),
                target: target.clone(),
            }));
        }
        problems
    }

    /// Keeps a policy as written. Returns the policies that it was staged for, and is.
    fn write(&mut self, reference: &ObjectRef, object: Option<Object>) -> Vec<ObjectRef> {
        let now = object.as_ref().and_then(Object::replaced);
        let before = match object {
            Some(object) => self.written.insert(reference.clone(), object),
            None => self.written.remove(reference),
        };
        let before = before.as_ref().and_then(Object::replaced);
        if let Some(target) = &before
            && let Some(edits) = self.edits.get_mut(target)
        {
            edits.remove(reference);
            if edits.is_empty() {
                self.edits.remove(target);
            }
        }
        if let Some(target) = &now {
            self.edits.entry(target.clone()).or_default().insert(reference.clone());
        }
        before.into_iter().chain(now).collect()
    }

    /// The policy of this name once everything is promoted.
    fn promoted(&self, target: &ObjectRef) -> Option<Object> {
        if let Some(policy) = self.trial.get(target) {
            return policy.clone();
        }
        let edit = self.edits.get(target).and_then(BTreeSet::first).and_then(|staged| self.written.get(staged));
        let own = || {
            let own = self.written.get(target)?;
            matches!(own.staging(), Some(Staging::InForce | Staging::New)).then_some(own)
        };
        edit.or_else(own).map(|policy| policy.clone().in_force_as(target))
    }
}

/// Whether a policy has no annotation.
fn is_plain(object: &Object) -> bool {
    object.staging().is_none_or(Staging::is_in_force)
}

fn state_of(reference: &ObjectRef, object: Option<Object>) -> ObjectChange {
    object.map_or_else(|| ObjectChange::Delete(reference.clone()), ObjectChange::Set)
}

//! The objects of a replay at one time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use penstock_sources::manifest::{ManifestErrors, Options, read_manifests};

/// Objects, by reference.
#[derive(Clone, Default, Debug)]
pub(super) struct ReplayObjects(BTreeMap<ObjectRef, Object>);

impl ReplayObjects {
    /// Reads manifests.
    pub(super) fn read(paths: &[PathBuf], options: &Options) -> Result<Self, ManifestErrors> {
        let documents = read_manifests(paths, options)?.documents;
        Ok(documents.into_iter().map(|document| document.object).collect())
    }

    pub(super) fn references(&self) -> impl Iterator<Item = &ObjectRef> {
        self.0.keys()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Object> {
        self.0.values().cloned()
    }

    /// Removes an object; whether it was there.
    pub(super) fn remove(&mut self, reference: &ObjectRef) -> bool {
        self.0.remove(reference).is_some()
    }

    /// Adds objects, or replaces those of the same name.
    pub(super) fn add(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// The changes that lead from these objects to others.
    pub(super) fn changes_to(&self, others: &Self) -> Vec<ObjectChange> {
        let gone = self.0.keys().filter(|gone| !others.0.contains_key(*gone)).cloned().map(ObjectChange::Delete);
        let set = others.0.iter().filter(|(reference, object)| self.0.get(*reference) != Some(object));
        gone.chain(set.map(|(_, object)| ObjectChange::Set(object.clone()))).collect()
    }
}

impl FromIterator<Object> for ReplayObjects {
    fn from_iter<T: IntoIterator<Item = Object>>(objects: T) -> Self {
        Self(objects.into_iter().map(|object| (object.reference(), object)).collect())
    }
}

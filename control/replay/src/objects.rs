//! The objects of a replay at one time, with the EndpointSlices that follow from them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_dataplane::packet::Address;
use penstock_policy::model::{EndpointSlice, Object, ObjectChange, ObjectRef};
use penstock_sources::manifest::{ManifestErrors, Options, derive_endpoint_slices, read_manifests};

/// Objects as manifests have them. Without an EndpointSlice among them, those of Services are derived from selectors and pods,
/// as a cluster's controller would.
#[derive(Clone, Default, Debug)]
pub(super) struct ReplayObjects {
    /// Each with whether it is a pod that is ready.
    written: BTreeMap<ObjectRef, (Object, bool)>,
    /// Whether they are all that a daemon had: then nothing is derived.
    is_complete: bool,
}

impl ReplayObjects {
    /// Reads manifests.
    pub(super) fn read(paths: &[PathBuf], options: &Options) -> Result<Self, ManifestErrors> {
        let documents = read_manifests(paths, options)?.documents;
        let written = documents.into_iter().map(|document| {
            let is_ready = document.is_ready();
            (document.object.reference(), (document.object, is_ready))
        });
        Ok(Self { written: written.collect(), is_complete: false })
    }

    /// The objects of a daemon, as they are.
    pub(super) fn of_daemon(objects: impl IntoIterator<Item = Object>) -> Self {
        let written = objects.into_iter().map(|object| (object.reference(), (object, false)));
        Self { written: written.collect(), is_complete: true }
    }

    pub(super) fn references(&self) -> impl Iterator<Item = &ObjectRef> {
        self.written.keys()
    }

    /// The derived EndpointSlices, and of how many Services they are.
    pub(super) fn derived(&self) -> (Vec<EndpointSlice>, usize) {
        if self.is_complete {
            return (Vec::new(), 0);
        }
        let objects: Vec<_> = self.written.values().map(|(object, is_ready)| (object, *is_ready)).collect();
        derive_endpoint_slices(&objects)
    }

    /// All of them, derived ones too.
    pub(super) fn all(&self) -> Vec<Object> {
        let derived = self.derived().0.into_iter().map(Object::EndpointSlice);
        self.written.values().map(|(object, _)| object.clone()).chain(derived).collect()
    }

    pub(super) fn service_addresses(&self) -> impl Iterator<Item = Address> {
        let services = self.written.values().filter_map(|(object, _)| match object {
            Object::Service(service) => Some(service),
            _ => None,
        });
        services.flat_map(|service| service.addresses.iter().copied().map(Address::from))
    }

    /// Removes an object; whether it was there.
    pub(super) fn remove(&mut self, reference: &ObjectRef) -> bool {
        self.written.remove(reference).is_some()
    }

    /// Adds objects, or replaces those of the same name.
    pub(super) fn add(&mut self, others: Self) {
        self.written.extend(others.written);
    }

    /// The changes that lead from these objects to others.
    pub(super) fn changes_to(&self, others: &Self) -> Vec<ObjectChange> {
        let of = |objects: &Self| -> BTreeMap<ObjectRef, Object> {
            objects.all().into_iter().map(|object| (object.reference(), object)).collect()
        };
        let (before, after) = (of(self), of(others));
        let gone = before.keys().filter(|gone| !after.contains_key(*gone)).cloned().map(ObjectChange::Delete);
        let set = after.iter().filter(|(reference, object)| before.get(*reference) != Some(object));
        gone.chain(set.map(|(_, object)| ObjectChange::Set(object.clone()))).collect()
    }
}

//! Services and their EndpointSlices.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::{EndpointSlice, ObjectKey, Service};

use super::{ClusterState, MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE};

/// A Service and its EndpointSlices; either may be known before the other.
#[derive(Default, Debug)]
pub(super) struct ServiceRecord {
    service: Option<Arc<Service>>,
    /// By their name.
    slices: BTreeMap<String, Arc<EndpointSlice>>,
}

impl ClusterState {
    pub(super) fn set_service(&mut self, mut service: Service) {
        // One more than count shows that some do not.
        service.external.truncate(MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE + 1);
        service.external.shrink_to_fit();
        let record = self.services.entry(service.key.clone()).or_default();
        let service = Arc::new(service);
        let before = record.service.replace(Arc::clone(&service));
        self.count_named(before.as_deref(), Some(&service));
    }

    pub(super) fn delete_service(&mut self, key: &ObjectKey) {
        let Some(record) = self.services.get_mut(key) else { return };
        let before = record.service.take();
        self.count_named(before.as_deref(), None);
        self.forget_service_if_unknown(key);
    }

    pub(super) fn set_endpoint_slice(&mut self, slice: EndpointSlice) {
        let service = slice.service.clone().map(|name| ObjectKey { namespace: slice.key.namespace.clone(), name });
        if self.slice_services.get(&slice.key) != service.as_ref() {
            self.delete_endpoint_slice(&slice.key);
        }
        let Some(service) = service else { return };
        self.slice_services.insert(slice.key.clone(), service.clone());
        let record = self.services.entry(service).or_default();
        record.slices.insert(slice.key.name.clone(), Arc::new(slice));
    }

    pub(super) fn delete_endpoint_slice(&mut self, key: &ObjectKey) {
        let Some(service) = self.slice_services.remove(key) else { return };
        if let Some(record) = self.services.get_mut(&service) {
            record.slices.remove(&key.name);
        }
        self.forget_service_if_unknown(&service);
    }

    fn forget_service_if_unknown(&mut self, key: &ObjectKey) {
        if self.services.get(key).is_some_and(|record| record.service.is_none() && record.slices.is_empty()) {
            self.services.remove(key);
        }
    }

    pub fn service(&self, key: &ObjectKey) -> Option<&Arc<Service>> {
        self.services.get(key)?.service.as_ref()
    }

    /// All Services, in no order.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.values().filter_map(|record| record.service.as_ref())
    }

    /// The EndpointSlices of a Service, by their name.
    pub fn endpoint_slices(&self, service: &ObjectKey) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.services.get(service).into_iter().flat_map(|record| record.slices.values())
    }

    /// All EndpointSlices of Services, known or not, in no order.
    pub(crate) fn all_endpoint_slices(&self) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.services.values().flat_map(|record| record.slices.values())
    }

    /// All EndpointSlices whose Service is not known, in no order.
    pub fn slices_without_service(&self) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.services.values().filter(|record| record.service.is_none()).flat_map(|record| record.slices.values())
    }

    pub fn zone_of(&self, node: &str) -> Option<&str> {
        let labels = &self.nodes.get(self.nodes.find(node)?)?.labels;
        labels.get(ZONE_LABEL).map(String::as_str).filter(|zone| !zone.is_empty())
    }
}

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

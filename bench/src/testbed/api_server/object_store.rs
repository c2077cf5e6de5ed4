//! An object store with the semantics of the API server: resource versions, a history for watches, and paginated lists.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};

use super::Resource;

/// Path of an object: resource, namespace (empty for cluster-scoped objects) and name.
pub(super) type ObjectPath = (Resource, String, String);

/// One change, as reported by a watch.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) version: u64,
    pub(super) resource: Resource,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) kind: &'static str,
    pub(super) object: Value,
}

#[derive(Debug)]
pub(super) struct ObjectStore {
    version: u64,
    objects: BTreeMap<ObjectPath, Value>,
    history: Vec<Event>,
    /// Changes up to this version are compacted.
    compacted: u64,
    /// Remainders of paginated lists, by continue token.
    rest: HashMap<String, (u64, Vec<Value>)>,
}

pub(super) struct Page {
    pub(super) version: u64,
    pub(super) items: Vec<Value>,
    pub(super) next: Option<String>,
    pub(super) remaining: usize,
}

/// An API error: status code, reason and message.
pub(super) type ApiError = (u16, &'static str, String);

impl ObjectStore {
    pub(super) fn new() -> Self {
        // Version 0 has a special meaning in the API.
        Self { version: 100, objects: BTreeMap::new(), history: Vec::new(), compacted: 0, rest: HashMap::new() }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, place: &ObjectPath) -> Result<Value, ApiError> {
        self.objects.get(place).cloned().ok_or_else(|| not_found(place))
    }

    /// Creates an object without its status, as for every resource that has a status subresource.
    pub(super) fn create(&mut self, place: ObjectPath, mut object: Value) -> Result<Value, ApiError> {
        if self.objects.contains_key(&place) {
            return Err((409, "AlreadyExists", format!("{} {} already exists", place.0.path(), place.2)));
        }
        object["status"] = json!({});
        if place.0 == Resource::Pods {
            object["status"] = json!({ "phase": "Pending" });
        }
        object["metadata"]["name"] = json!(place.2);
        if !place.1.is_empty() {
            object["metadata"]["namespace"] = json!(place.1);
        }
        object["metadata"]["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", self.version + 1));
        Ok(self.put(place, "ADDED", object))
    }

    /// Replaces an object without its status, or only its status.
    pub(super) fn replace(
        &mut self,
        place: ObjectPath,
        mut object: Value,
        status_alone: bool,
    ) -> Result<Value, ApiError> {
        let mut old = self.get(&place)?;
        if let Some(version) = object["metadata"]["resourceVersion"].as_str()
            && Some(version) != old["metadata"]["resourceVersion"].as_str()
        {
            return Err((409, "Conflict", format!("{} {} was modified since", place.0.path(), place.2)));
        }
        let new = match status_alone {
            true => {
                old["status"] = object["status"].take();
                old
            }
            false => {
                object["status"] = old["status"].take();
                for key in ["uid", "name", "namespace"] {
                    if !old["metadata"][key].is_null() {
                        object["metadata"][key] = old["metadata"][key].take();
                    }
                }
                object
            }
        };
        Ok(self.put(place, "MODIFIED", new))
    }

    pub(super) fn delete(&mut self, place: &ObjectPath) -> Result<Value, ApiError> {
        let mut object = self.objects.remove(place).ok_or_else(|| not_found(place))?;
        self.note(place.0, "DELETED", &mut object);
        Ok(object)
    }

    /// Deletes an object with a grace period: it stays until it is deleted without one, as a pod does until its kubelet has ended it.
    pub(super) fn terminate(&mut self, place: ObjectPath, grace: &Value) -> Result<Value, ApiError> {
        let mut object = self.get(&place)?;
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        object["metadata"]["deletionGracePeriodSeconds"] = grace.clone();
        Ok(self.put(place, "MODIFIED", object))
    }

    /// Creates or replaces an object, status included.
    pub(super) fn set(&mut self, place: ObjectPath, object: Value) {
        let kind = if self.objects.contains_key(&place) { "MODIFIED" } else { "ADDED" };
        self.put(place, kind, object);
    }

    fn put(&mut self, place: ObjectPath, kind: &'static str, mut object: Value) -> Value {
        self.note(place.0, kind, &mut object);
        self.objects.insert(place, object.clone());
        object
    }

    fn note(&mut self, resource: Resource, kind: &'static str, object: &mut Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        // Watch events carry kind and version in each object; in lists only the list does.
        let mut event_object = object.clone();
        (event_object["apiVersion"], event_object["kind"]) = (json!(resource.api_version()), json!(resource.kind()));
        self.history.push(Event { version: self.version, resource, kind, object: event_object });
    }

    /// The first page of a list, or the page of a continue token.
    pub(super) fn list(
        &mut self,
        resource: Resource,
        namespace: Option<&str>,
        limit: usize,
        token: Option<&str>,
    ) -> Result<Page, ApiError> {
        let (version, mut items) = match token {
            Some(token) => self.rest.remove(token).ok_or_else(|| {
                (410, "Expired", "The provided continue parameter is too old to display a consistent list".to_owned())
            })?,
            None => {
                let wanted = |place: &ObjectPath| place.0 == resource && namespace.is_none_or(|name| place.1 == name);
                let items = self.objects.iter().filter(|(place, _)| wanted(place));
                (self.version, items.map(|(_, object)| object.clone()).collect())
            }
        };
        let rest = items.split_off(limit.min(items.len()));
        let remaining = rest.len();
        let next = (remaining > 0).then(|| format!("{version}-{}-{remaining}", resource.path()));
        if let Some(token) = &next {
            self.rest.insert(token.clone(), (version, rest));
        }
        Ok(Page { version, items, next, remaining })
    }

    /// Changes of a resource after a version, and the version up to which they reach.
    pub(super) fn since(&self, resource: Resource, version: u64) -> Result<(Vec<Event>, u64), ApiError> {
        if version < self.compacted {
            return Err((410, "Expired", format!("too old resource version: {version} ({})", self.compacted)));
        }
        let later = self.history.partition_point(|event| event.version <= version);
        let events = self.history[later..].iter().filter(|event| event.resource == resource).cloned().collect();
        Ok((events, self.version))
    }

    /// Discards the history, as etcd's compaction does, and unfinished lists with it.
    pub(super) fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
        self.rest.clear();
    }
}

fn not_found(place: &ObjectPath) -> ApiError {
    (404, "NotFound", format!("{} \"{}\" not found", place.0.path(), place.2))
}

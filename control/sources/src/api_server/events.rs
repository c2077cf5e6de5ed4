//! Kubernetes Events about policies that are not understood, or only in part, and about pods on which policy is not enforced:
//! `kubectl describe` shows them on the object.
//!
//! Every node reads every policy. The name of an Event depends on what it is about alone, so that all nodes write the same one,
//! and a server keeps the first. `kube::runtime::events::Recorder` is not used for that reason: its names differ by process.

use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use penstock_admin::printable::with_causes;
use penstock_policy::model::{ObjectKey, ObjectRef};
use rand::Rng;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::Shared;

/// Most Events that wait to be written; the oldest are left out then.
const MOST: usize = 256;
/// Longest time until an Event is written, so that nodes do not all write at once.
const SPREAD: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_secs(30);
/// For one request.
const LIMIT: Duration = Duration::from_secs(30);
/// Longest note that a server accepts, in bytes.
const LONGEST: usize = 1024;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Problem {
    pub(super) reference: ObjectRef,
    pub(super) uid: String,
    pub(super) version: Option<u64>,
    pub(super) text: String,
}

#[derive(Debug, Default)]
pub(super) struct Problems(VecDeque<Problem>);

impl Problems {
    /// Adds a problem, if it is of a policy.
    pub(super) fn add(&mut self, problem: Problem) {
        if subject(&problem).is_none_or(|(_, kind, ..)| kind == "Pod") {
            return;
        }
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(problem);
    }

    pub(super) fn take(&mut self) -> Option<Problem> {
        self.0.pop_front()
    }
}

/// A pod of the node on which policy is not enforced, with the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodNotEnforced {
    pub pod: ObjectKey,
    /// The reason with its remedy.
    pub reason: String,
}

/// Most of them that wait.
pub(super) const MOST_PODS: usize = 256;

impl From<PodNotEnforced> for Problem {
    fn from(PodNotEnforced { pod, reason }: PodNotEnforced) -> Self {
        Self { reference: ObjectRef::Pod(pod), uid: String::new(), version: None, text: reason }
    }
}

/// Writes Events for problems, as this node's, for ever.
pub(super) async fn write(shared: Arc<Shared>, node: String, mut pods: mpsc::Receiver<PodNotEnforced>) {
    let mut is_failing = false;
    loop {
        let wait = rand::rng().random_range(Duration::ZERO..SPREAD);
        sleep(wait).await;
        while let Some(problem) = shared.next_problem().or_else(|| pods.try_recv().ok().map(Problem::from)) {
            match write_one(&shared, &problem, &node).await {
                Ok(()) => is_failing = false,
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(object = %problem.reference, "cannot write an Event: {error}; the log has what it says");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("{0}: the account needs the verb create on events; apply ClusterRole penstock (configs/kubernetes)")]
    Forbidden(String),
    #[error("{0}")]
    Other(String),
    #[error("no answer within {} s", LIMIT.as_secs())]
    Slow,
}

async fn write_one(shared: &Shared, problem: &Problem, node: &str) -> Result<(), WriteError> {
    let mut problem = problem.clone();
    if let ObjectRef::Pod(key) = &problem.reference {
        let pods: Api<Pod> = Api::namespaced(shared.client.get().client, &key.namespace);
        let found = timeout(LIMIT, pods.get_metadata(&key.name)).await.map_err(|_| WriteError::Slow)?;
        // A pod that is gone has no Events.
        let Ok(found) = found else { return Ok(()) };
        problem.uid = found.metadata.uid.unwrap_or_default();
    }
    let Some(event) = event(&problem, node) else { return Ok(()) };
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    let api: Api<Event> = Api::namespaced(shared.client.get().client, &namespace);
    let created = timeout(LIMIT, api.create(&PostParams::default(), &event)).await.map_err(|_| WriteError::Slow)?;
    match created {
        Ok(_) => Ok(()),
        // Another node was first; or the namespace is gone, or going.
        Err(kube::Error::Api(status))
            if matches!(status.code, 404 | 409) || status.reason == "NamespaceTerminating" =>
        {
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 403 => Err(WriteError::Forbidden(status.message)),
        Err(error) => Err(WriteError::Other(with_causes(&error))),
    }
}

/// `apiVersion`, `kind`, namespace and name of a policy or pod; `None` for other objects.
fn subject(problem: &Problem) -> Option<(&'static str, &'static str, Option<&str>, &str)> {
    match &problem.reference {
        ObjectRef::NetworkPolicy(key) => {
            Some(("networking.k8s.io/v1", "NetworkPolicy", Some(key.namespace.as_str()), key.name.as_str()))
        }
        ObjectRef::ClusterNetworkPolicy(name) => {
            Some(("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", None, name.as_str()))
        }
        ObjectRef::Pod(key) => Some(("v1", "Pod", Some(key.namespace.as_str()), key.name.as_str())),
        _ => None,
    }
}

fn event(problem: &Problem, node: &str) -> Option<Event> {
    let (api_version, kind, namespace, name) = subject(problem)?;
    // Without random keys: the same on every node.
    let mut hasher = DefaultHasher::new();
    problem.hash(&mut hasher);
    let now = Time(Timestamp::now());
    let mut message = format!("Penstock: {}", problem.text);
    message.truncate(message.floor_char_boundary(LONGEST));
    Some(Event {
        metadata: ObjectMeta {
            name: Some(format!("{name}.{:016x}", hasher.finish())),
            // Events of what is in no namespace are in this one (kubernetes/client-go, tools/record).
            namespace: Some(namespace.unwrap_or("default").to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            namespace: namespace.map(str::to_owned),
            name: Some(name.to_owned()),
            uid: Some(problem.uid.clone()),
            resource_version: problem.version.map(|version| version.to_string()),
            ..ObjectReference::default()
        },
        reason: Some(if kind == "Pod" { "NotEnforced" } else { "NotUnderstood" }.to_owned()),
        message: Some(message),
        type_: Some("Warning".to_owned()),
        source: Some(EventSource { component: Some("penstock".to_owned()), host: Some(node.to_owned()) }),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        ..Event::default()
    })
}

#[cfg(test)]
mod tests {
    use penstock_policy::model::ObjectKey;

    use super::*;

    fn problem(name: &str, version: u64, text: &str) -> Problem {
        let key = ObjectKey { namespace: "shop".to_owned(), name: name.to_owned() };
        let reference = ObjectRef::NetworkPolicy(key);
        Problem { reference, uid: "u-1".to_owned(), version: Some(version), text: text.to_owned() }
    }

    #[test]
    fn all_nodes_write_one_event_for_one_problem() {
        let name = |problem: &Problem, node| event(problem, node).unwrap().metadata.name.unwrap();
        let first = problem("web", 7, "spec.ingress: why");
        assert_eq!(name(&first, "a"), name(&first, "b"));
        assert!(name(&first, "a").starts_with("web."), "{}", name(&first, "a"));
        for other in [problem("web", 8, "spec.ingress: why"), problem("web", 7, "spec.egress: why")] {
            assert_ne!(name(&first, "a"), name(&other, "a"));
        }
    }

    #[test]
    fn a_pod_without_enforcement_has_an_event_of_its_own() {
        let pod = ObjectKey { namespace: "shop".to_owned(), name: "web-0".to_owned() };
        let event = event(&PodNotEnforced { pod, reason: "no interface".to_owned() }.into(), "a").unwrap();
        assert_eq!(
            (event.reason.as_deref(), event.involved_object.kind.as_deref()),
            (Some("NotEnforced"), Some("Pod"))
        );
        assert_eq!(event.metadata.namespace.as_deref(), Some("shop"));
        assert_eq!(event.message.as_deref(), Some("Penstock: no interface"));
    }

    #[test]
    fn a_long_problem_is_cut_where_a_character_ends() {
        let long = event(&problem("web", 7, &"é".repeat(2000)), "a").unwrap().message.unwrap();
        assert!(long.len() <= LONGEST && long.len() > LONGEST - 2 && long.ends_with('é'), "{} bytes", long.len());
    }

    #[test]
    fn a_cluster_policys_events_are_in_the_default_namespace() {
        let of_cluster =
            Problem { reference: ObjectRef::ClusterNetworkPolicy("admin".to_owned()), ..problem("", 7, "why") };
        let event = event(&of_cluster, "a").unwrap();
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.involved_object.namespace, None);
        assert_eq!(event.involved_object.kind.as_deref(), Some("ClusterNetworkPolicy"));
    }

    #[test]
    fn only_policies_problems_wait_and_no_more_than_the_most() {
        let mut problems = Problems::default();
        problems.add(Problem { reference: ObjectRef::Namespace("shop".to_owned()), ..problem("", 1, "why") });
        assert_eq!(problems.take(), None);
        for version in 0..MOST as u64 + 3 {
            problems.add(problem("web", version, "why"));
        }
        assert_eq!(problems.take().and_then(|oldest| oldest.version), Some(3));
        assert_eq!(std::iter::from_fn(|| problems.take()).count(), MOST - 1);
    }
}

//! Policies that were deleted just before their namespace was seen to be deleted.
//!
//! The API server marks a namespace as being deleted, and then its controller deletes what is in it. But each kind of objects is followed
//! by a watch of its own, so that a policy's deletion may be seen first: it was the namespace's all the same, and the policy stays in effect
//! for the pods that are left.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_policy::model::{NetworkPolicy, Object, ObjectChange, ObjectRef};
use penstock_policy::state::ClusterState;

/// How long one watch may be behind another. A policy that somebody deletes so shortly before its namespace stays in effect, too.
const BEHIND: Duration = Duration::from_secs(60);
const MOST: usize = 4096;

/// The policies that were deleted lately from namespaces that were not being deleted, oldest first.
#[derive(Default)]
pub(super) struct DeletedPolicies(VecDeque<(Instant, Arc<NetworkPolicy>)>);

impl DeletedPolicies {
    /// Changes of the source, with those that follow from a namespace's end: its policies are there again, and are deleted after it.
    /// `state` is that before the changes.
    pub(super) fn complete(
        &mut self,
        changes: Vec<ObjectChange>,
        state: &ClusterState,
        now: Instant,
    ) -> Vec<ObjectChange> {
        let mut completed = Vec::with_capacity(changes.len());
        for change in changes {
            let ended = match &change {
                ObjectChange::Set(Object::Namespace(namespace)) if namespace.terminating => {
                    Some(namespace.name.clone()).filter(|name| !state.is_terminating(name))
                }
                ObjectChange::Set(Object::NetworkPolicy(policy)) => {
                    self.0.retain(|(_, deleted)| deleted.key != policy.key);
                    None
                }
                ObjectChange::Delete(ObjectRef::NetworkPolicy(key)) if !state.is_terminating(&key.namespace) => {
                    if let Some(policy) = state.find_policy(key) {
                        self.remember(Arc::clone(policy), now);
                    }
                    None
                }
                _ => None,
            };
            completed.push(change);
            if let Some(namespace) = ended {
                completed.extend(self.deleted_with(&namespace, now));
            }
        }
        completed
    }

    fn remember(&mut self, policy: Arc<NetworkPolicy>, now: Instant) {
        self.forget_old(now);
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back((now, policy));
    }

    fn forget_old(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(deleted, _)| now.duration_since(*deleted) > BEHIND) {
            self.0.pop_front();
        }
    }

    fn deleted_with(&mut self, namespace: &str, now: Instant) -> Vec<ObjectChange> {
        self.forget_old(now);
        let (of_it, others): (VecDeque<_>, VecDeque<_>) =
            self.0.drain(..).partition(|(_, policy)| policy.key.namespace == namespace);
        self.0 = others;
        let again = of_it.into_iter().flat_map(|(_, policy)| {
            let deleted = ObjectChange::Delete(ObjectRef::NetworkPolicy(policy.key.clone()));
            [ObjectChange::Set(Object::NetworkPolicy(NetworkPolicy::clone(&policy))), deleted]
        });
        again.collect()
    }
}

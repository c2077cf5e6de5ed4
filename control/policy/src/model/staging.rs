//! Whether a policy is in effect, or staged: judged beside what is in effect.

use serde::{Deserialize, Serialize};

use super::{Object, ObjectKey, ObjectRef};

/// A policy's part in what is in effect, by its annotations.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub enum Staging {
    /// It is in effect: no annotation says otherwise.
    #[default]
    InForce,
    /// A new policy that is not in effect yet.
    New,
    /// Not in effect; its spec would replace that of the policy of this name, of the same kind and in the same namespace.
    Replaces(String),
    /// In effect, and would be deleted.
    Deleted,
}

impl Staging {
    /// Whether the policy is in effect and stays so.
    pub fn is_in_force(&self) -> bool {
        *self == Self::InForce
    }

    pub fn is_enforced(&self) -> bool {
        matches!(self, Self::InForce | Self::Deleted)
    }
}

impl Object {
    /// The meaning of a policy's annotations; `None` of an object that is no policy.
    pub fn staging(&self) -> Option<&Staging> {
        match self {
            Self::NetworkPolicy(policy) => Some(&policy.staging),
            Self::ClusterNetworkPolicy(policy) => Some(&policy.staging),
            Self::Namespace(_) | Self::Node(_) | Self::Pod(_) | Self::Service(_) | Self::EndpointSlice(_) => None,
        }
    }

    /// Whether it is a policy that workers do not enforce, since it is staged.
    pub fn is_staged(&self) -> bool {
        self.staging().is_some_and(|staging| !staging.is_enforced())
    }

    /// A policy under this name and in effect; any other object as it is.
    #[must_use]
    pub fn in_force_as(mut self, target: &ObjectRef) -> Self {
        match (&mut self, target) {
            (Self::NetworkPolicy(policy), ObjectRef::NetworkPolicy(key)) => {
                (policy.key, policy.staging) = (key.clone(), Staging::InForce);
            }
            (Self::ClusterNetworkPolicy(policy), ObjectRef::ClusterNetworkPolicy(name)) => {
                (policy.name, policy.staging) = (name.clone(), Staging::InForce);
            }
            _ => {}
        }
        self
    }

    /// The policy that this one would replace, if it is staged for one.
    pub fn replaced(&self) -> Option<ObjectRef> {
        let Some(Staging::Replaces(name)) = self.staging() else { return None };
        match self {
            Self::NetworkPolicy(policy) => {
                let key = ObjectKey { namespace: policy.key.namespace.clone(), name: name.clone() };
                Some(ObjectRef::NetworkPolicy(key))
            }
            Self::ClusterNetworkPolicy(_) => Some(ObjectRef::ClusterNetworkPolicy(name.clone())),
            _ => None,
        }
    }
}

impl ObjectRef {
    /// Whether it names a NetworkPolicy or a ClusterNetworkPolicy.
    pub fn is_policy(&self) -> bool {
        matches!(self, Self::NetworkPolicy(_) | Self::ClusterNetworkPolicy(_))
    }
}

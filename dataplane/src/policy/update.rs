//! Builds the next set from the previous one.

use std::sync::Arc;

use super::{AddressOwner, AddressSet, Endpoint, EndpointId, PolicySet, RuleScope};
use crate::forward::Forwarding;
use crate::names::LearntNames;
use crate::packet::Address;

/// Builds the next [`PolicySet`] from the previous one. It is not visible before [`PolicySetUpdate::finish`].
#[derive(Debug)]
pub struct PolicySetUpdate {
    pub(super) set: PolicySet,
}

impl PolicySetUpdate {
    /// Sets the owner of an address; `None` removes it.
    pub fn set_address(&mut self, address: Address, owner: Option<AddressOwner>) -> &mut Self {
        self.set.addresses.set_owner(address, owner);
        self
    }

    /// Sets which addresses are at pods of this node, and at which ports: those of `forwarding` and no others.
    pub fn set_local(&mut self, forwarding: &Forwarding) -> &mut Self {
        self.set.addresses.set_local(forwarding);
        self
    }

    /// Sets the addresses at which pods may send to Services that the node's kernel translates: egress to them is postponed until it
    /// is known what answers. The caller sees to it that it is then asked.
    pub fn set_services(&mut self, services: &Arc<AddressSet>) -> &mut Self {
        self.set.addresses.set_services(services);
        self
    }

    /// Sets an endpoint's policy; `None` removes it. Addresses of an endpoint without policy are denied everything.
    pub fn set_endpoint(&mut self, id: EndpointId, endpoint: Option<Endpoint>) -> &mut Self {
        self.set.endpoints.set(id, endpoint);
        self
    }

    /// Sets what an endpoint learns of domain names; `None`: its egress rules have none.
    pub fn set_names(&mut self, id: EndpointId, names: Option<Arc<LearntNames>>) -> &mut Self {
        let is_known = match (self.set.names.get(&id.0), &names) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            (None, None) => true,
            _ => false,
        };
        if !is_known {
            let all = Arc::make_mut(&mut self.set.names);
            match names {
                Some(names) => all.insert(id.0, names),
                None => all.remove(&id.0),
            };
        }
        self
    }

    /// Sets whether rules are honoured cluster-wide.
    pub fn set_rule_scope(&mut self, rule_scope: RuleScope) -> &mut Self {
        self.set.rule_scope = rule_scope;
        self
    }

    pub fn finish(self) -> PolicySet {
        self.set
    }
}

//! Services for who replays captures: a capture may show a packet on either side of its translation, and names no chance.

use super::flows::{inner_flow, policy_flow};
use super::sources::Opener;
use crate::conntrack::{ConnTable, Timestamp};
use crate::names::NameTime;
use crate::packet::Flow;
use crate::policy::{PolicySet, PolicyVerdict};
use crate::services::Backend;

/// A connection to a Service, as one of its packets finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServiceConnection {
    /// The flow of its first packet, as the client sent it.
    pub frontend: Flow,
    /// The same flow between client and backend.
    pub inner: Flow,
    /// The flow with which a worker received the packet, if what found the connection is what a worker sent on: the reply as the
    /// client gets it, or the client's packet as the backend gets it.
    pub received: Option<Flow>,
}

impl ServiceConnection {
    /// The connection to a Service that a packet with this flow belongs to.
    pub fn find(connections: &ConnTable, flow: &Flow, now: Timestamp) -> Option<Self> {
        let found = connections.find(&connections.prepare(flow), now).filter(|found| found.is_translated())?;
        let translated = connections.translated(&found, now)?;
        let is_of_client = !translated.connection.is_reply(translated.inner.orientation());
        let received = match (translated.by_frontend, is_of_client) {
            (true, false) => Some(translated.inner.flow()),
            (false, true) => Some(translated.frontend),
            _ => None,
        };
        Some(Self { frontend: translated.frontend, inner: translated.connection.original_flow(), received })
    }

    pub fn backend(&self) -> Backend {
        Backend { address: self.inner.dst, port: self.inner.dst_port }
    }

    /// The verdict of policy on it.
    pub fn evaluate(&self, policy: &PolicySet) -> PolicyVerdict {
        evaluate_client(policy, &policy_flow(self.inner, Some(&self.frontend)), NameTime::Ever)
    }
}

/// The verdict of policy on a client's first packet to a Service, with this flow, if it goes to this backend.
pub fn evaluate_backend(policy: &PolicySet, flow: &Flow, backend: &Backend, time: NameTime) -> PolicyVerdict {
    evaluate_client(policy, &policy_flow(inner_flow(flow, backend), Some(flow)), time)
}

fn evaluate_client(policy: &PolicySet, flow: &Flow, time: NameTime) -> PolicyVerdict {
    Opener::ClientOfService.evaluate(policy, None, flow, policy.ends(flow), time).1
}

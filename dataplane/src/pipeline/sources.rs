//! Policy for what the node's stack forwards: evaluated for who sent it, not for the address that the node gave it.

use std::fmt;

use crate::batch::StackSender;
use crate::packet::{Address, Flow};
use crate::policy::{FlowEnds, PolicySet, PolicyVerdict};

/// The senders of connections whose source the node's stack has translated (masquerade, as kube-proxy does for NodePorts).
pub trait OriginalSources: fmt::Debug + Send + Sync {
    /// Source address of the connection that is `flow` after its translation, in the direction in which it was opened.
    fn source_of(&self, flow: &Flow) -> Option<Address>;
}

/// Evaluates policy for a flow that `sender` opens. Returns the flow as it was before the node translated its source, and
/// the verdict on it.
#[inline]
pub(super) fn evaluate(
    policy: &PolicySet,
    sources: Option<&dyn OriginalSources>,
    flow: &Flow,
    ends: FlowEnds<'_>,
    sender: StackSender,
) -> (Flow, PolicyVerdict) {
    let may_be_translated = matches!(sender, StackSender::Forwarded | StackSender::Translated) || ends.dst.is_node();
    match sources {
        Some(sources) if may_be_translated => evaluate_sent(policy, sources, flow, ends, sender),
        _ => (*flow, policy.evaluate_between(flow, ends)),
    }
}

#[cold]
fn evaluate_sent(
    policy: &PolicySet,
    sources: &dyn OriginalSources,
    flow: &Flow,
    ends: FlowEnds<'_>,
    sender: StackSender,
) -> (Flow, PolicyVerdict) {
    let from = |flow: &Flow| sources.source_of(flow).map(|src| Flow { src, ..*flow });
    let original = match sender {
        StackSender::Translated => from(flow),
        StackSender::Forwarded => None,
        // The reply to a translated connection that is not in the table.
        StackSender::Process | StackSender::Unknown => from(&flow.reversed()),
    };
    match (original, sender) {
        (Some(original), _) => (original, policy.evaluate(&original)),
        (None, StackSender::Forwarded | StackSender::Translated) => (*flow, policy.evaluate_forwarded(flow, ends)),
        (None, _) => (*flow, policy.evaluate_between(flow, ends)),
    }
}

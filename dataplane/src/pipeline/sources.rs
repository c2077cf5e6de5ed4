//! Policy for what the node's stack forwards: evaluated for who sent it, not for the address that the node gave it.

use std::fmt;

use crate::batch::StackSender;
use crate::conntrack::ConnectionInfo;
use crate::names::NameTime;
use crate::packet::{Address, Flow};
use crate::policy::{EvaluationForm, FlowEnds, PolicySet, PolicyVerdict};

/// The senders of connections whose source the node's stack has translated (masquerade, as kube-proxy does for NodePorts).
pub trait OriginalSources: fmt::Debug + Send + Sync {
    /// Source address of the connection that is `flow` after its translation, in the direction in which it was opened.
    fn source_of(&self, flow: &Flow) -> Option<Address>;
}

/// The flow that policy was asked about, and the verdict: the flow as it was before the node translated its source.
pub(super) type Evaluated = (Flow, PolicyVerdict, EvaluationForm);

/// Evaluates policy for a flow that `sender` opens.
#[inline]
pub(super) fn evaluate(
    policy: &PolicySet,
    sources: Option<&dyn OriginalSources>,
    flow: &Flow,
    ends: FlowEnds<'_>,
    sender: StackSender,
    time: NameTime,
) -> Evaluated {
    let may_be_translated = sender.is_forwarded() || ends.dst.is_node();
    match sources {
        Some(sources) if may_be_translated => evaluate_sent(policy, sources, flow, ends, sender, time),
        _ => (*flow, policy.evaluate_between(flow, ends, time), EvaluationForm::Plain),
    }
}

#[cold]
fn evaluate_sent(
    policy: &PolicySet,
    sources: &dyn OriginalSources,
    flow: &Flow,
    ends: FlowEnds<'_>,
    sender: StackSender,
    time: NameTime,
) -> Evaluated {
    let from = |flow: &Flow| sources.source_of(flow).map(|src| Flow { src, ..*flow });
    let original = match sender {
        StackSender::Translated => from(flow),
        StackSender::Forwarded | StackSender::Unchanged | StackSender::Untranslated => None,
        // The reply to a translated connection that is not in the table.
        StackSender::Process | StackSender::Unknown | StackSender::Leaving { .. } => from(&flow.reversed()),
    };
    match (original, sender) {
        (Some(original), _) => evaluate_original(policy, original, time),
        (None, StackSender::Translated) => (*flow, policy.evaluate_without_source(flow, ends), EvaluationForm::Unknown),
        (None, StackSender::Forwarded | StackSender::Unchanged | StackSender::Untranslated) => {
            (*flow, policy.evaluate_forwarded(flow, ends, time), EvaluationForm::Forwarded)
        }
        (None, _) => (*flow, policy.evaluate_between(flow, ends, time), EvaluationForm::Plain),
    }
}

/// Evaluates policy for a flow with the source that it had before the node translated it.
fn evaluate_original(policy: &PolicySet, original: Flow, time: NameTime) -> Evaluated {
    if original.src == original.dst {
        // A pod that is its own backend.
        return (original, policy.evaluate_hairpin(&original, time), EvaluationForm::Hairpin);
    }
    // Nothing that the node forwards is of a process of its own, whatever the source that it came with.
    (original, policy.evaluate_forwarded(&original, policy.ends(&original), time), EvaluationForm::Forwarded)
}

/// Who opens a connection.
#[derive(Clone, Copy)]
pub(super) enum Opener {
    /// The packet's sender; `Unknown` for one that did not come from the node's stack.
    Sender(StackSender),
    /// A known connection, whose source the node's stack has translated: what is kept beside it.
    Kept(Option<Address>),
}

impl Opener {
    /// Who opened a connection of the table.
    pub(super) fn of_connection(
        via_host: bool,
        ends: FlowEnds<'_>,
        kept: impl FnOnce() -> Option<Option<Address>>,
    ) -> Self {
        if !via_host || ends.src.is_local_pod() {
            return Self::Sender(StackSender::Unknown);
        }
        // It is of no pod, and forwarded.
        kept().map_or(Self::Sender(StackSender::Forwarded), Self::Kept)
    }

    /// Evaluates policy in the direction in which the connection is opened.
    #[inline(always)]
    pub(super) fn evaluate(
        self,
        policy: &PolicySet,
        sources: Option<&dyn OriginalSources>,
        flow: &Flow,
        ends: FlowEnds<'_>,
        time: NameTime,
    ) -> Evaluated {
        match self {
            Self::Sender(sender) => evaluate(policy, sources, flow, ends, sender, time),
            Self::Kept(Some(src)) => evaluate_original(policy, Flow { src, ..*flow }, time),
            Self::Kept(None) => (*flow, policy.evaluate_without_source(flow, ends), EvaluationForm::Unknown),
        }
    }
}

/// Evaluates a set of policies for a connection of the table, in the direction in which it was opened: the verdict that a worker
/// would give its next packet if this set were published. Returns the flow that the set is asked about, too.
pub fn evaluate_connection(
    policy: &PolicySet,
    sources: Option<&dyn OriginalSources>,
    connection: &ConnectionInfo,
) -> (Flow, PolicyVerdict) {
    let flow = &connection.original;
    let ends = policy.ends(flow);
    let opener = Opener::of_connection(connection.via_host, ends, || connection.opener);
    let (flow, verdict, _) = opener.evaluate(policy, sources, flow, ends, NameTime::Ever);
    (flow, verdict)
}

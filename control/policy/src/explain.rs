//! Why a flow is allowed or denied, for a person.

use std::fmt::{Display, Write as _};

use penstock_dataplane::policy::{Direction, DirectionVerdict};

use crate::compile::{Lack, Provenance, rules_of};
use crate::engine::{Engine, Near, SideExplanation};
use crate::flow::{End, NoFlow, Service};
use crate::model::{NetworkPolicy, ObjectKey, Rule};
use crate::{describe, flow};

/// How words stand out where the text is shown: not at all, unless it is said how.
pub trait Paint {
    /// What is allowed.
    fn good(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// What is denied.
    fn bad(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// What is doubtful.
    fn mixed(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// What the rest is about.
    fn strong(&self, text: &dyn Display) -> String {
        text.to_string()
    }
}

/// Text alone: for whoever reads it elsewhere than on a terminal.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

impl Paint for Plain {}

/// Whether a flow is allowed, and why, for a person.
pub fn answer(
    engine: &Engine,
    paint: &dyn Paint,
    from: &End,
    to: &End,
    port: &Service,
) -> Result<(bool, String), NoFlow> {
    let state = engine.state();
    let flow = flow::flow(state, from, to, port)?;
    let (src, dst) = (flow::describe(state, flow.src.into()), flow::describe(state, flow.dst.into()));
    let explanation = engine.explain(&flow);
    let is_allowed = explanation.egress.side.is_allowed() && explanation.ingress.side.is_allowed();
    let verdict = if is_allowed { paint.good(&"allowed") } else { paint.bad(&"denied") };
    let port = match flow.protocol.has_ports() {
        true => format!("{}/{}", flow.dst_port, flow.protocol),
        false => flow.protocol.to_string(),
    };
    let mut text = format!("{}: {src} -> {dst}, {port}\n", paint.strong(&verdict));
    let ends = (src.as_str(), dst.as_str());
    side(&mut text, engine, paint, Direction::Egress, ends, &explanation.egress);
    side(&mut text, engine, paint, Direction::Ingress, ends, &explanation.ingress);
    Ok((is_allowed, text))
}

fn side(
    text: &mut String,
    engine: &Engine,
    paint: &dyn Paint,
    direction: Direction,
    ends: (&str, &str),
    side: &SideExplanation,
) {
    let (word, own, peer) = match direction {
        Direction::Egress => ("egress", ends.0, ends.1),
        Direction::Ingress => ("ingress", ends.1, ends.0),
    };
    let name = side.pod.as_ref().map_or_else(|| own.to_owned(), ToString::to_string);
    let verdict = match side.side {
        DirectionVerdict::Denied => paint.bad(&"denied"),
        DirectionVerdict::NotLocal if side.pod.is_some() => {
            format!("{} here, its own node enforces it", paint.good(&"allowed"))
        }
        DirectionVerdict::NotLocal => format!("{}, it is no pod: no policy is about it", paint.good(&"allowed")),
        DirectionVerdict::Open => format!("{}, no policy isolates it", paint.good(&"allowed")),
        DirectionVerdict::Exempt => {
            format!("{}, a pod and its node, and a pod and itself, always reach each other", paint.good(&"allowed"))
        }
        DirectionVerdict::Allowed(_) => paint.good(&"allowed"),
        DirectionVerdict::AllowedByPeer(_) => {
            format!("{}, by a rule of the other side, cluster-wide", paint.good(&"allowed"))
        }
    };
    line(text, &format!("\n{} of {name}: {verdict}", paint.strong(&word)));
    for key in &side.policies {
        let Some(policy) = find(engine, key) else { continue };
        let rules = rules_of(policy, direction).unwrap_or_default().len();
        let isolates = if policy.isolates { "isolates it" } else { "selects it" };
        let rules = match rules {
            0 => format!("{isolates}, without {word} rules"),
            1 => format!("{isolates}, 1 {word} rule"),
            more => format!("{isolates}, {more} {word} rules"),
        };
        line(text, &format!("  policy   {key} ({rules})"));
    }
    if side.default_deny {
        line(text, "  policy   the DefaultDeny annotation of its namespace (isolates it)");
    }
    if let Some(provenance) = &side.rule {
        line(text, &format!("  rule     {}", paint.good(provenance)));
        describe_rule(text, engine, provenance);
    }
    match &side.nearest {
        Some(near) => nearest(text, engine, paint, near, peer),
        None if side.side == DirectionVerdict::Denied => {
            line(text, "  nearest  none of these has a rule for it: denied by default")
        }
        None => {}
    }
}

fn nearest(text: &mut String, engine: &Engine, paint: &dyn Paint, near: &Near, peer: &str) {
    line(text, &format!("  nearest  {}", paint.mixed(&near.rule)));
    describe_rule(text, engine, &near.rule);
    for lack in &near.lacks {
        let lack = match lack {
            Lack::Peer => format!("{peer} is not among its peers"),
            Lack::Excepted(except) => format!("{peer} is in its except {except}"),
            Lack::Port => "the port is not among its ports".to_owned(),
            Lack::PortName(name) => format!("the receiving pod has no port named {name} with this protocol"),
        };
        line(text, &format!("           lacks: {lack}"));
    }
}

fn describe_rule(text: &mut String, engine: &Engine, provenance: &Provenance) {
    let Some(rule) = find_rule(engine, provenance) else { return };
    let (peers, ports) = (describe::peers(&rule.peers, &provenance.policy.namespace), describe::ports(&rule.ports));
    let word = match provenance.direction {
        Direction::Egress => "to",
        Direction::Ingress => "from",
    };
    line(text, &format!("           {word} {peers}, on {ports}"));
}

/// The policy's rule that a provenance names.
fn find_rule<'a>(engine: &'a Engine, provenance: &Provenance) -> Option<&'a Rule> {
    rules_of(find(engine, &provenance.policy)?, provenance.direction)?.get(provenance.rule)
}

fn find<'a>(engine: &'a Engine, key: &ObjectKey) -> Option<&'a NetworkPolicy> {
    engine.state().policies().map(|(policy, _)| policy).find(|policy| policy.key == *key)
}

fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{line}");
}

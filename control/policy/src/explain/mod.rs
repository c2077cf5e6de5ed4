//! Why a flow is allowed or denied, as text.

mod by_name;

use std::fmt::{Display, Write as _};

use penstock_dataplane::names::Moment;
use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::{Direction, DirectionVerdict, RuleAction};

use crate::compile::{Mismatch, PolicyName, Provenance, Tier, cluster_rules_of, rules_of};
use crate::engine::{DirectionExplanation, Engine, Explanation, NearestRule, TierOutcome, TierStep};
use crate::flow::{FlowEndpoint, FlowError, ProtocolPort};
use crate::model::{NetworkPolicy, ObjectKey, Rule};
use crate::service_flows::{ServiceFlows, Without, service_flows, service_flows_at};
use crate::{describe, flow};

/// How to highlight words. The default is no highlighting.
pub trait TextStyle {
    /// Something allowed.
    fn good(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// Something denied.
    fn bad(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// Something doubtful.
    fn mixed(&self, text: &dyn Display) -> String {
        text.to_string()
    }

    /// A heading.
    fn strong(&self, text: &dyn Display) -> String {
        text.to_string()
    }
}

/// No highlighting: for text that is not shown on a terminal.
#[derive(Clone, Copy, Debug)]
pub struct PlainText;

impl TextStyle for PlainText {}

/// Whether the flow between each pair of the ends' addresses is allowed, and the explanation as text: one, or one for each
/// pair if they differ.
pub fn text(
    engine: &Engine,
    style: &dyn TextStyle,
    from: &FlowEndpoint,
    to: &FlowEndpoint,
    port: &ProtocolPort,
) -> Result<(bool, String), FlowError> {
    text_at(engine, style, from, to, port, None)
}

/// The same at a time by which what pods have learnt of domain names counts.
pub fn text_at(
    engine: &Engine,
    style: &dyn TextStyle,
    from: &FlowEndpoint,
    to: &FlowEndpoint,
    port: &ProtocolPort,
    now: Option<Moment>,
) -> Result<(bool, String), FlowError> {
    let by_service = match to {
        FlowEndpoint::Service(key) => Some(service_flows(engine, from, key, port)?),
        FlowEndpoint::Address(address) => service_flows_at(engine, from, *address, port),
        FlowEndpoint::Pod(_) => None,
        FlowEndpoint::Name(name) => return by_name::text(engine, style, from, (name, port), now),
    };
    if let Some(flows) = by_service {
        return match is_judged_at_address(engine, &flows) {
            true => Ok(text_of_address(engine, style, &flows)),
            false => Ok(service_text(engine, style, &flows, port)),
        };
    }
    let flows = flow::flows(engine.state(), from, to, port)?;
    let explained: Vec<(Flow, Explanation)> = flows.into_iter().map(|flow| (flow, engine.explain(&flow))).collect();
    let allowed = explained.iter().filter(|(_, explanation)| explanation.is_allowed()).count();
    let differ = explained.iter().any(|(_, explanation)| !explanation.is_same(&explained[0].1));
    let shown = if differ { &explained[..] } else { &explained[..1] };
    let texts: Vec<String> =
        shown.iter().map(|(flow, explanation)| of_flow(engine, style, flow, explanation)).collect();
    let head = match allowed {
        0 => String::new(),
        _ if allowed == explained.len() => String::new(),
        _ => {
            let verdict = style.mixed(&"partial");
            let count = explained.len();
            format!("{}: {from} -> {to}, {allowed} of {count} pairs of addresses allowed\n\n", style.strong(&verdict))
        }
    };
    let hint = flow::service_at(engine.state(), to).map_or_else(String::new, |service| {
        format!("\n{to} is an address of Service {service}, which has no such port\n")
    });
    Ok((allowed == explained.len(), head + &texts.join("\n") + &hint))
}

fn of_flow(engine: &Engine, style: &dyn TextStyle, flow: &Flow, explanation: &Explanation) -> String {
    let state = engine.state();
    let (src, dst) = (flow::describe(state, flow.src.into()), flow::describe(state, flow.dst.into()));
    let verdict = if explanation.is_allowed() { style.good(&"allowed") } else { style.bad(&"denied") };
    let unseen = explanation.unseen().map_or_else(String::new, |reason| format!("{reason}: "));
    let port = match flow.protocol.has_ports() {
        true => format!("{}/{}", flow.dst_port, flow.protocol),
        false => flow.protocol.to_string(),
    };
    let mut text = format!("{}: {unseen}{src} -> {dst}, {port}\n", style.strong(&verdict));
    let ends = (src.as_str(), dst.as_str());
    explain_direction(&mut text, engine, style, Direction::Egress, ends, &explanation.egress);
    explain_direction(&mut text, engine, style, Direction::Ingress, ends, &explanation.ingress);
    text
}

/// Whether the client's egress policy is for the Service's address, since this node cannot ask about what answers.
fn is_judged_at_address(engine: &Engine, to: &ServiceFlows) -> bool {
    let decides = |verdict| {
        use DirectionVerdict::{Allowed, AllowedByPeer, Denied, DeniedBy};
        matches!(verdict, Allowed(_) | AllowedByPeer(_) | Denied | DeniedBy(_))
    };
    !engine.is_judged_behind(to.frontend.ip()) && decides(engine.evaluate(&to.sent).egress)
}

/// Whether a flow to a Service's address is allowed as it is, and why.
fn text_of_address(engine: &Engine, style: &dyn TextStyle, to: &ServiceFlows) -> (bool, String) {
    let explanation = engine.explain(&to.sent);
    let text = of_flow(engine, style, &to.sent, &explanation);
    let name = &to.name;
    let hint =
        format!("\nthis is Service {name}; on this node egress policy is for its address, and not for what answers\n");
    (explanation.is_allowed(), text + &hint)
}

/// Whether a flow to a Service is allowed to each backend, and the explanation for each.
fn service_text(engine: &Engine, style: &dyn TextStyle, to: &ServiceFlows, port: &ProtocolPort) -> (bool, String) {
    let mut allowed = 0;
    let mut of_backends = String::new();
    for flow in &to.flows {
        let explanation = engine.explain_through_service(flow);
        allowed += usize::from(explanation.is_allowed());
        of_backends += &format!("\n{}", of_flow(engine, style, flow, &explanation));
    }
    let count = to.flows.len();
    let verdict = match (allowed, count) {
        (_, 0) if to.without == Without::Knowledge => style.mixed(&"unknown"),
        (0, _) => style.bad(&"denied"),
        _ if allowed == count => style.good(&"allowed"),
        _ => style.mixed(&"partial"),
    };
    let backends = match count {
        0 => to.without.describe().to_owned(),
        1 => "1 backend".to_owned(),
        _ => format!("{count} backends, {allowed} of them allowed"),
    };
    let (name, at, protocol) = (&to.name, to.frontend, port.protocol());
    let head = format!("{}: Service {name} at {at}/{protocol}, {backends}\n", style.strong(&verdict));
    (count > 0 && allowed == count, head + &of_backends)
}

fn explain_direction(
    text: &mut String,
    engine: &Engine,
    style: &dyn TextStyle,
    direction: Direction,
    ends: (&str, &str),
    explanation: &DirectionExplanation,
) {
    let (word, own, peer) = match direction {
        Direction::Egress => ("egress", ends.0, ends.1),
        Direction::Ingress => ("ingress", ends.1, ends.0),
    };
    let name = explanation.pod.as_ref().map_or_else(|| own.to_owned(), ToString::to_string);
    let verdict = verdict(style, explanation);
    line(text, &format!("\n{} of {name}: {verdict}", style.strong(&word)));
    explanation.tiers.iter().for_each(|step| tier(text, style, step));
    policies(text, engine, direction, explanation);
    if let Some(provenance) = &explanation.rule {
        let is_denied = matches!(explanation.verdict, DirectionVerdict::DeniedBy(_));
        let shown = if is_denied { style.bad(provenance) } else { style.good(provenance) };
        line(text, &format!("  rule     {shown}"));
        describe_rule(text, engine, provenance);
    }
    for rule in &explanation.by_name {
        line(text, &format!("  by name  {}", style.mixed(rule)));
        describe_rule(text, engine, rule);
        line(
            text,
            &format!("           accepts once a DNS answer has given {name} the address {peer} for one of these names"),
        );
    }
    match &explanation.nearest {
        Some(rule) => nearest(text, engine, style, rule, peer),
        None if explanation.verdict == DirectionVerdict::Denied => {
            line(text, "  nearest  these policies have no rules for it: denied by default")
        }
        None => {}
    }
}

fn verdict(style: &dyn TextStyle, explanation: &DirectionExplanation) -> String {
    match explanation.verdict {
        DirectionVerdict::Denied | DirectionVerdict::DeniedBy(_) => style.bad(&"denied"),
        DirectionVerdict::NotReady => format!("{}, its policies are not known yet", style.bad(&"denied")),
        DirectionVerdict::NotLocal if explanation.pod.is_some() => {
            format!("{} here, its own node enforces it", style.good(&"allowed"))
        }
        DirectionVerdict::NotLocal => format!("{}, not a pod: no policy applies to it", style.good(&"allowed")),
        DirectionVerdict::Open => format!("{}, no policy isolates it", style.good(&"allowed")),
        DirectionVerdict::Default => format!("{}, no rule of any tier decides", style.good(&"allowed")),
        DirectionVerdict::Postponed => {
            format!(
                "{} to the Service's address; policy is for the pod, node or address that answers",
                style.good(&"allowed")
            )
        }
        DirectionVerdict::Exempt => {
            format!("{}, a pod and its node, and a pod and itself, always reach each other", style.good(&"allowed"))
        }
        DirectionVerdict::Allowed(_) => style.good(&"allowed"),
        DirectionVerdict::AllowedByPeer(_) => {
            format!("{}, by a rule of the other direction, cluster-wide", style.good(&"allowed"))
        }
    }
}

/// The NetworkPolicies that select the pod. Where the Admin tier decides, they are not evaluated.
fn policies(text: &mut String, engine: &Engine, direction: Direction, explanation: &DirectionExplanation) {
    let word = describe::direction(direction);
    let is_by_admin = explanation.tiers.first().is_some_and(|step| step.outcome.is_final());
    for key in explanation.policies.iter().filter(|_| !is_by_admin) {
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
    if explanation.default_deny && !is_by_admin {
        line(text, "  policy   the DefaultDeny annotation of its namespace (isolates it)");
    }
}

/// The decision of one tier: `Admin: rule 2 of lockdown passes`.
fn tier(text: &mut String, style: &dyn TextStyle, TierStep { tier, outcome }: &TierStep) {
    let outcome = match outcome {
        TierOutcome::NoPolicy if *tier == Tier::NetworkPolicy => "none isolates it".to_owned(),
        TierOutcome::NoPolicy => "no policy applies".to_owned(),
        TierOutcome::NoMatch => "no rule matches".to_owned(),
        TierOutcome::Isolated => "decides, since it isolates the pod".to_owned(),
        TierOutcome::Rule { action, rule, name } => {
            let policy = match &rule.policy {
                PolicyName::Cluster { name, .. } => name,
                PolicyName::Network(key) => &key.name,
            };
            let name = name.as_ref().map(|name| format!(" ({name:?})")).unwrap_or_default();
            let does = describe::action(*action);
            let action = match action {
                RuleAction::Accept => style.good(&does),
                RuleAction::Deny => style.bad(&does),
                RuleAction::Pass => style.mixed(&does),
            };
            format!("rule {} of {policy}{name} {action}", rule.rule)
        }
    };
    line(text, &format!("  tier     {tier}: {outcome}"));
}

fn nearest(text: &mut String, engine: &Engine, style: &dyn TextStyle, rule: &NearestRule, peer: &str) {
    line(text, &format!("  nearest  {}", style.mixed(&rule.rule)));
    describe_rule(text, engine, &rule.rule);
    for mismatch in &rule.mismatches {
        let mismatch = match mismatch {
            Mismatch::Peer => format!("{peer} is not among its peers"),
            Mismatch::Excepted(except) => format!("{peer} is in its except {except}"),
            Mismatch::Port => "the port is not among its ports".to_owned(),
            Mismatch::PortName(name) => format!("the receiving pod has no port named {name} with this protocol"),
        };
        line(text, &format!("           lacks: {mismatch}"));
    }
}

fn describe_rule(text: &mut String, engine: &Engine, provenance: &Provenance) {
    let Some(rule) = find_rule(engine, provenance) else { return };
    let (peers, ports) = (describe::peers(&rule.peers, provenance.policy.namespace()), describe::ports(&rule.ports));
    let word = match provenance.direction {
        Direction::Egress => "to",
        Direction::Ingress => "from",
    };
    line(text, &format!("           {word} {peers}, on {ports}"));
}

/// The policy's rule to which a provenance points.
fn find_rule<'a>(engine: &'a Engine, provenance: &Provenance) -> Option<&'a Rule> {
    match &provenance.policy {
        PolicyName::Network(key) => rules_of(find(engine, key)?, provenance.direction)?.get(provenance.rule),
        PolicyName::Cluster { name, .. } => {
            let (policy, _) = engine.state().cluster_policies().find(|(policy, _)| policy.name == *name)?;
            cluster_rules_of(policy, provenance.direction).get(provenance.rule).map(|rule| &rule.matches)
        }
    }
}

fn find<'a>(engine: &'a Engine, key: &ObjectKey) -> Option<&'a NetworkPolicy> {
    engine.state().policies().map(|(policy, _)| policy).find(|policy| policy.key == *key)
}

fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{line}");
}

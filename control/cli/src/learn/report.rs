//! Reports on the input and on what was written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use penstock_admin::printable::Printable;
use penstock_dataplane::packet::{Address, Flow};
use penstock_policy::engine::Engine;
use penstock_policy::learn::{
    ClosedWays, DeniedFlow, Evidence, LearnSettings, LearnableFlow, LearnedPolicy, ObservedEnd, ObservedFlow,
    PolicyUsage, Resolution, SeenTimes, Workloads, denied as find_denied,
};
use penstock_policy::model::NetworkPolicy;
use penstock_policy::{describe, flow};
use serde::Serialize;
use serde_json::{Value, json};

use super::input::Input;
use super::manifest::{Manifest, connections, plural};

/// The flows of which lists name at most so many.
const LISTED: usize = 10;

pub(super) struct Report {
    /// Notes, one a line.
    pub(super) notes: Vec<String>,
    observed: usize,
    pub(super) learnt: usize,
    not_learnt: Vec<NotLearntLine>,
    pub(super) closed: Option<ClosedWays>,
    /// With --tighten: how many policies change.
    pub(super) changed: Option<usize>,
    held_out: Option<HeldOut>,
}

#[derive(Serialize)]
struct NotLearntLine {
    flows: u64,
    reason: String,
    first: String,
}

#[derive(Serialize)]
struct HeldOut {
    flows: usize,
    denied: Vec<String>,
}

impl Report {
    pub(super) fn new(engine: &Engine, input: &Input, resolution: &Resolution) -> Self {
        let line =
            |(reason, unusable): (&penstock_policy::learn::NotLearnt, &penstock_policy::learn::UnusableFlows)| {
                let first = observed(engine, &input.flows[unusable.first]);
                NotLearntLine { flows: unusable.count, reason: reason.to_string(), first }
            };
        Self {
            notes: input.notes.clone(),
            observed: input.flows.len(),
            learnt: 0,
            not_learnt: resolution.not_learnt.iter().map(line).collect(),
            closed: None,
            changed: None,
            held_out: None,
        }
    }

    /// Notes workloads that already have policies, and those of which nothing was seen.
    pub(super) fn note_coverage(
        &mut self,
        engine: &Engine,
        workloads: &Workloads,
        policies: &[LearnedPolicy],
        settings: &LearnSettings,
    ) {
        let state = engine.state();
        let mut present: BTreeMap<String, usize> = BTreeMap::new();
        for (id, workload) in workloads.iter() {
            if settings.namespace.as_ref().is_some_and(|only| *only != workload.namespace) {
                continue;
            }
            let first = workload.pods.first().and_then(|pod| state.pod(*pod));
            let Some(name) = first.map(|pod| pod.key.to_string()) else { continue };
            if !policies.iter().any(|policy| policy.workload == id) {
                let labels = describe::selector(&workload.selector);
                self.notes.push(format!(
                    "namespace {}: no flow of the pods with {labels} (such as {name}): no policy is written for them",
                    workload.namespace
                ));
                continue;
            }
            let count = workload.pods.first().map_or(0, |pod| state.policies_of(*pod).count());
            if count > 0 {
                present.insert(name, count);
            }
        }
        if !present.is_empty() {
            let pods = Vec::from_iter(present.into_keys()).join(", ");
            self.notes.push(format!(
                "NetworkPolicies that select {pods} stay in effect, with all that they allow: --tighten narrows them"
            ));
        }
    }

    /// Notes what of an existing policy was not used.
    pub(super) fn note_usage(&mut self, policy: &NetworkPolicy, usage: &PolicyUsage) {
        let key = &policy.key;
        if usage.connections == 0 {
            self.notes.push(format!("NetworkPolicy {key}: no flow concerns a pod that it selects: left as it is"));
            return;
        }
        for (field, rules) in [("ingress", &usage.ingress), ("egress", &usage.egress)] {
            for (number, rule) in rules.iter().enumerate() {
                let side = if field == "ingress" { "from" } else { "to" };
                let mut unused = Vec::new();
                if rule.connections == 0 {
                    unused.push(format!("{field}[{number}]"));
                } else {
                    unused.extend(unused_of(&rule.peers).map(|place| format!("{field}[{number}].{side}[{place}]")));
                    unused.extend(unused_of(&rule.ports).map(|place| format!("{field}[{number}].ports[{place}]")));
                }
                self.notes.extend(unused.iter().map(|what| format!("NetworkPolicy {key}: spec.{what}: never used")));
            }
        }
    }

    /// Evaluates what was held out. Returns whether some of it would be denied.
    pub(super) fn hold_out(&mut self, after: &Engine, flows: &[&LearnableFlow]) -> bool {
        if flows.is_empty() {
            return false;
        }
        let found = find_denied(after, flows.iter().copied());
        let denied: Vec<String> = found.iter().map(|found| denied(after, found)).collect();
        let some = !denied.is_empty();
        self.held_out = Some(HeldOut { flows: flows.len(), denied });
        some
    }

    pub(super) fn head(&self, learnt: &[&LearnableFlow], tighten: bool) -> String {
        let mut evidence = Evidence { connections: learnt.len() as u64, seen: None };
        let times: Vec<SeenTimes> = learnt.iter().filter_map(|flow| flow.seen).collect();
        evidence.seen =
            times.into_iter().reduce(|a, b| SeenTimes { first: a.first.min(b.first), last: a.last.max(b.last) });
        let what = match (tighten, self.changed) {
            (true, Some(0)) => "Every rule, peer and port was used by",
            (true, _) => "Without what was not used by",
            (false, _) => "Learnt from",
        };
        format!("# {what} {}.\n", connections(&evidence))
    }

    pub(super) fn print(&self) {
        self.lines().iter().for_each(|line| eprintln!("penstock: {}", Printable(line)));
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = self.notes.clone();
        lines.extend(self.not_learnt.iter().map(|NotLearntLine { flows, reason, first }| {
            format!("{} {reason}; the first: {first}", plural(*flows, "flow"))
        }));
        if self.learnt > 0 {
            let observed = plural(self.observed as u64, "flow");
            lines.push(format!("proven: all {} that were learnt, of {observed}, are allowed", self.learnt));
        }
        lines.extend(self.closed.as_ref().map(closed_line));
        if let Some(HeldOut { flows, denied }) = &self.held_out {
            let held_out = plural(*flows as u64, "flow");
            lines.push(format!("held out: {held_out}, of which {} would be denied", denied.len()));
            lines.extend(denied.iter().take(LISTED).map(|denied| format!("  {denied}")));
            if denied.len() > LISTED {
                lines.push(format!("  and {} more", denied.len() - LISTED));
            }
        }
        lines
    }

    pub(super) fn json(&self, written: &[Manifest]) -> String {
        let policies = written.iter().map(|one| json!({ "manifest": one.value, "comments": one.comments }));
        let closed = self.closed.map(|closed| {
            let ClosedWays { pairs, pairs_before, pairs_after, ways, ways_before, ways_after } = closed;
            json!({
                "pairs": { "all": pairs, "open_before": pairs_before, "open_after": pairs_after },
                "ports": { "all": ways, "open_before": ways_before, "open_after": ways_after },
            })
        });
        let value = json!({
            "policies": policies.collect::<Vec<Value>>(),
            "observed": self.observed,
            "learnt": self.learnt,
            "not_learnt": self.not_learnt,
            "held_out": self.held_out,
            "closed": closed,
            "notes": self.notes,
        });
        penstock_text::number::json(&value)
    }
}

/// The places of what was never used.
fn unused_of(counts: &[u64]) -> impl Iterator<Item = usize> {
    (0..counts.len()).filter(|place| counts[*place] == 0)
}

fn closed_line(closed: &ClosedWays) -> String {
    let ClosedWays { pairs_before, pairs_after, ways_before, ways_after, .. } = closed;
    format!(
        "closed: {} of the {pairs_before} pairs of pods with an open port, and {} of their {ways_before} open ports",
        pairs_before.saturating_sub(*pairs_after),
        ways_before.saturating_sub(*ways_after)
    )
}

/// `shop/web (10.1.0.1) -> 203.0.113.9, 443/TCP: egress denied`.
pub(super) fn denied(engine: &Engine, denied: &DeniedFlow) -> String {
    let Flow { src, dst, protocol, dst_port, .. } = denied.flow;
    let mut text = format!("{} -> {}, ", end(engine, src), end(engine, dst));
    // Writing to a string does not fail.
    let _ = match protocol.has_ports() {
        true => write!(text, "{dst_port}/{protocol}"),
        false => write!(text, "{protocol}"),
    };
    let _ = write!(text, ": {} denied", describe::direction(denied.direction));
    if let Some(rule) = rule(engine, denied) {
        let _ = write!(text, " by {rule}");
    }
    text
}

/// The rule of a ClusterNetworkPolicy that denies it.
fn rule(engine: &Engine, denied: &DeniedFlow) -> Option<String> {
    let verdict = engine.evaluate(&denied.flow);
    let side = match denied.direction {
        penstock_dataplane::policy::Direction::Egress => verdict.egress,
        penstock_dataplane::policy::Direction::Ingress => verdict.ingress,
    };
    engine.provenance(side.rule()?, &denied.flow).map(|rule| rule.to_string())
}

fn end(engine: &Engine, address: Address) -> String {
    let address = IpAddr::from(address);
    flow::name(engine.state(), address).map_or_else(|| address.to_string(), |name| format!("{name} ({address})"))
}

fn observed(engine: &Engine, observed: &ObservedFlow) -> String {
    let end = |end: &ObservedEnd| {
        // The identifier of a query is no port.
        let port = if observed.protocol.has_ports() { end.port } else { 0 };
        let address = end.address.map(|address| match port {
            0 => address.to_string(),
            port => SocketAddr::new(address, port).to_string(),
        });
        let known = || flow::name(engine.state(), end.address?);
        match (end.pod.as_ref().map(ToString::to_string).or_else(known), address) {
            (Some(name), Some(address)) => format!("{name} ({address})"),
            (Some(name), None) if port == 0 => name,
            (Some(name), None) => format!("{name}:{port}"),
            (None, Some(address)) => address,
            (None, None) => "an unknown end".to_owned(),
        }
    };
    format!("{} -> {}, {}", end(&observed.from), end(&observed.to), observed.protocol)
}

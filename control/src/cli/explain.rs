//! `penstock explain`: why a flow is allowed or denied, for a person.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use penstock_dataplane::policy::{Direction, DirectionVerdict};

use super::Failure;
use super::cluster::OptionalManifestArgs;
use super::daemon::DaemonArgs;
use super::flow::{End, NoFlow, Service};
use super::{describe, flow, style};
use crate::compile::{Lack, Provenance, rules_of};
use crate::engine::{Engine, Near, SideExplanation};
use crate::model::{NetworkPolicy, ObjectKey, Rule};
use crate::render::tables::Scope;
use crate::service::admin::types::{ExplainQuery, Explanation};

/// Say why a flow is allowed or denied
///
/// Tells which policies select each end, which rule allowed the flow, or which came nearest and what it lacked, and,
/// where no rule is for this flow at all, which policies isolate the pod.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  penstock explain --manifests policies/ --from shop/web-1 --to shop/db-0 --port 5432/TCP
  penstock explain --manifests policies/ --from shop/web-1 --to 10.1.2.3 --port ICMP
  penstock explain --live --from shop/web-1 --to shop/db-0 --port 5432/TCP")]
#[command(group(clap::ArgGroup::new("cluster").required(true).args(["live", "manifests"])))]
pub(super) struct Args {
    #[command(flatten)]
    manifests: OptionalManifestArgs,
    /// Ask the daemon that runs on this node, which knows the sides of its own pods only
    #[arg(long)]
    live: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Who sends: NAMESPACE/POD or an address
    #[arg(long, value_name = "END")]
    from: End,
    /// Who receives: NAMESPACE/POD or an address
    #[arg(long, value_name = "END")]
    to: End,
    /// PORT/PROTOCOL, the port by its number or its name; or a protocol without ports
    #[arg(long, value_name = "PORT/PROTOCOL")]
    port: Service,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let text = match args.manifests.given() {
        Some(manifests) => {
            let engine = manifests.engine(Scope::AllPods)?;
            answer(&engine, &args.from, &args.to, &args.port).map_err(Failure::bad_input)?.1
        }
        None => {
            let query =
                ExplainQuery { from: args.from.to_string(), to: args.to.to_string(), port: args.port.to_string() };
            let explanation: Explanation = args.daemon.get("/v1/explain", &query)?;
            format!(
                "{}\nby snapshot {} of the daemon at {}\n",
                explanation.text,
                explanation.epoch,
                args.daemon.socket.display()
            )
        }
    };
    io::stdout().write_all(text.as_bytes()).or_else(Failure::from_output)
}

/// Whether a flow is allowed, and why, for a person.
pub(crate) fn answer(engine: &Engine, from: &End, to: &End, port: &Service) -> Result<(bool, String), NoFlow> {
    let state = engine.state();
    let flow = flow::flow(state, from, to, port)?;
    let (src, dst) = (flow::describe(state, flow.src.into()), flow::describe(state, flow.dst.into()));
    let explanation = engine.explain(&flow);
    let is_allowed = explanation.egress.side.is_allowed() && explanation.ingress.side.is_allowed();
    let verdict = if is_allowed { style::good("allowed") } else { style::bad("denied") };
    let port = match flow.protocol.has_ports() {
        true => format!("{}/{}", flow.dst_port, flow.protocol),
        false => flow.protocol.to_string(),
    };
    let mut text = format!("{}: {src} -> {dst}, {port}\n", style::strong(verdict));
    let ends = (src.as_str(), dst.as_str());
    side(&mut text, engine, Direction::Egress, ends, &explanation.egress);
    side(&mut text, engine, Direction::Ingress, ends, &explanation.ingress);
    Ok((is_allowed, text))
}

fn side(text: &mut String, engine: &Engine, direction: Direction, ends: (&str, &str), side: &SideExplanation) {
    let (word, own, peer) = match direction {
        Direction::Egress => ("egress", ends.0, ends.1),
        Direction::Ingress => ("ingress", ends.1, ends.0),
    };
    let name = side.pod.as_ref().map_or_else(|| own.to_owned(), ToString::to_string);
    let verdict = match side.side {
        DirectionVerdict::Denied => style::bad("denied"),
        DirectionVerdict::NotLocal if side.pod.is_some() => {
            format!("{} here, its own node enforces it", style::good("allowed"))
        }
        DirectionVerdict::NotLocal => format!("{}, it is no pod: no policy is about it", style::good("allowed")),
        DirectionVerdict::Open => format!("{}, no policy isolates it", style::good("allowed")),
        DirectionVerdict::Exempt => {
            format!("{}, a pod and its node, and a pod and itself, always reach each other", style::good("allowed"))
        }
        DirectionVerdict::Allowed(_) => style::good("allowed"),
        DirectionVerdict::AllowedByPeer(_) => {
            format!("{}, by a rule of the other side, cluster-wide", style::good("allowed"))
        }
    };
    line(text, &format!("\n{} of {name}: {verdict}", style::strong(word)));
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
        line(text, &format!("  rule     {}", style::good(provenance)));
        describe_rule(text, engine, provenance);
    }
    match &side.nearest {
        Some(near) => nearest(text, engine, near, peer),
        None if side.side == DirectionVerdict::Denied => {
            line(text, "  nearest  none of these has a rule for it: denied by default")
        }
        None => {}
    }
}

fn nearest(text: &mut String, engine: &Engine, near: &Near, peer: &str) {
    line(text, &format!("  nearest  {}", style::mixed(&near.rule)));
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
pub(super) fn find_rule<'a>(engine: &'a Engine, provenance: &Provenance) -> Option<&'a Rule> {
    rules_of(find(engine, &provenance.policy)?, provenance.direction)?.get(provenance.rule)
}

fn find<'a>(engine: &'a Engine, key: &ObjectKey) -> Option<&'a NetworkPolicy> {
    engine.state().policies().map(|(policy, _)| policy).find(|policy| policy.key == *key)
}

fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{line}");
}

//! How connections, their ends and what decides about them are named: in the same words for answers, the verdict log, captures and
//! records.

use penstock_admin::types;
use penstock_dataplane::Epoch;
use penstock_dataplane::conntrack::{ConnectionInfo, Traffic};
use penstock_dataplane::names::NameTime;
use penstock_dataplane::packet::{Address, Flow};
use penstock_dataplane::policy::{DirectionVerdict, PolicyVerdict};
use penstock_dataplane::worker::LoggedEvaluation;
use penstock_policy::engine::Engine;
use penstock_policy::flow;

use super::ports::OpenPorts;

/// Packets are named by these: the objects and the ports of one moment.
pub(super) struct PacketNames<'a> {
    pub(super) engine: &'a Engine,
    pub(super) ports: &'a OpenPorts,
    pub(super) epoch: Epoch,
}

pub(super) fn identifier(connection: u64) -> String {
    format!("{connection:016x}")
}

/// An address with the name of its owner.
pub(super) fn end(engine: &Engine, address: Address, port: u16) -> types::FlowEnd {
    let address = address.into();
    types::FlowEnd { address, port, name: flow::name(engine.state(), address) }
}

/// Traffic of both ends of a connection, the one that opened it first.
pub(super) fn traffic(connection: &ConnectionInfo) -> [Option<types::Traffic>; 2] {
    let sent = |Traffic { packets, bytes }| types::Traffic { packets, bytes };
    connection.traffic.map_or([None; 2], |traffic| traffic.map(|direction| Some(sent(direction))))
}

/// The rules that decide a connection under the current policy, or the verdict in words: the egress of the end that opened it, and
/// the ingress of the other.
pub(super) fn sides(engine: &Engine, original: &Flow) -> (String, String) {
    // As for the connection's next packet: names that it was allowed by may have expired.
    let PolicyVerdict { egress, ingress } = engine.policy_set().evaluate_named(original, NameTime::Ever);
    let side = |side: DirectionVerdict| {
        let rule = side.rule().and_then(|rule| engine.provenance(rule, original));
        words(side, rule.map(|provenance| provenance.to_string()), "denied by a rule")
    };
    (side(egress), side(ingress))
}

/// The same of a packet, as the worker evaluated it.
pub(super) fn evaluated_sides(evaluation: &LoggedEvaluation) -> (String, String) {
    let verdict = &evaluation.policy_verdict;
    let egress = evaluation.egress_rule.as_ref().map(ToString::to_string);
    let ingress = evaluation.ingress_rule.as_ref().map(ToString::to_string);
    (words(verdict.egress, egress, "denied"), words(verdict.ingress, ingress, "denied"))
}

/// The rule that decides a direction, or the verdict in words. `unnamed`: denied by a rule that is not known any more.
fn words(side: DirectionVerdict, rule: Option<String>, unnamed: &str) -> String {
    match side {
        DirectionVerdict::Denied => "denied".to_owned(),
        DirectionVerdict::NotLocal => "not here".to_owned(),
        DirectionVerdict::NotReady => "not ready".to_owned(),
        DirectionVerdict::Open => "open".to_owned(),
        DirectionVerdict::Exempt => "exempt".to_owned(),
        DirectionVerdict::Default => "default".to_owned(),
        DirectionVerdict::Postponed => "for what answers".to_owned(),
        DirectionVerdict::DeniedBy(_) => rule.map_or_else(|| unnamed.to_owned(), |rule| format!("denied by {rule}")),
        DirectionVerdict::Allowed(_) | DirectionVerdict::AllowedByPeer(_) => {
            rule.unwrap_or_else(|| "allowed".to_owned())
        }
    }
}

//! Why a pod may reach a domain name, or not.

use std::net::IpAddr;

use penstock_dataplane::names::{DomainName, Moment};
use penstock_dataplane::packet::Flow;

use super::{TextStyle, describe_rule, line, of_flow};
use crate::engine::Engine;
use crate::flow::{FlowEndpoint, FlowError, ProtocolPort, addresses, flows};

/// Whether a pod may open connections to what DNS answers have given it for a name, at this time if that is known, and the explanation.
pub(super) fn text(
    engine: &Engine,
    style: &dyn TextStyle,
    from: &FlowEndpoint,
    (name, port): (&DomainName, &ProtocolPort),
    now: Option<Moment>,
) -> Result<(bool, String), FlowError> {
    let own = addresses(engine.state(), from)?;
    let rules = rules(engine, &own, name, port, from)?;
    let learnt = now.map(|now| learnt(engine, &own, name, now)).unwrap_or_default();
    let (mut allowed, mut of_addresses) = (0, String::new());
    for (address, seconds) in &learnt {
        let to = FlowEndpoint::Address(*address);
        for flow in flows(engine.state(), from, &to, port)? {
            let explanation = engine.explain_named(&flow, now);
            allowed += usize::from(explanation.is_allowed());
            of_addresses += &format!("\n{address} is {name} for {seconds} s more\n");
            of_addresses += &of_flow(engine, style, &flow, &explanation);
        }
    }
    let (verdict, why) = match (rules.is_empty(), learnt.len()) {
        (true, 0) => (style.bad(&"denied"), "no rule accepts this name, unless one accepts its address".to_owned()),
        (false, 0) if now.is_none() => (style.mixed(&"unknown"), "an answer of DNS decides".to_owned()),
        (_, 0) => {
            (style.bad(&"denied"), "no answer of DNS has given the pod an address for it that still holds".to_owned())
        }
        (_, count) if allowed == count => (style.good(&"allowed"), count_of(count)),
        (_, count) if allowed == 0 => (style.bad(&"denied"), count_of(count)),
        (_, count) => (style.mixed(&"partial"), format!("{allowed} of {}", count_of(count))),
    };
    let mut text = format!("{}: {from} -> {name}, {port}: {why}\n", style.strong(&verdict));
    for rule in &rules {
        line(&mut text, &format!("  by name  {}", style.mixed(rule)));
        describe_rule(&mut text, engine, rule);
    }
    Ok((!learnt.is_empty() && allowed == learnt.len(), text + &of_addresses))
}

fn count_of(addresses: usize) -> String {
    format!("{addresses} address{} learnt", if addresses == 1 { "" } else { "es" })
}

/// The rules of the pod's egress that accept this name there, in order.
fn rules(
    engine: &Engine,
    own: &[IpAddr],
    name: &DomainName,
    port: &ProtocolPort,
    from: &FlowEndpoint,
) -> Result<Vec<crate::compile::Provenance>, FlowError> {
    // An address of each family that is nobody's (RFC 5737, RFC 3849): a name is asked, not it.
    let nobodys = |own: &IpAddr| if own.is_ipv4() { "192.0.2.0" } else { "2001:db8::" };
    let to = own.first().map(|own| FlowEndpoint::Address(nobodys(own).parse().expect("an address")));
    let flow: Option<Flow> =
        to.map(|to| flows(engine.state(), from, &to, port)).transpose()?.and_then(|all| all.first().copied());
    Ok(flow.map(|flow| engine.rules_accepting_name(&flow, name)).unwrap_or_default())
}

/// The addresses that the pod has learnt for a name, each with for how many more seconds.
fn learnt(engine: &Engine, own: &[IpAddr], name: &DomainName, now: Moment) -> Vec<(IpAddr, u64)> {
    let names = own.iter().find_map(|address| engine.policy_set().learnt_by((*address).into()));
    let all = names.map(|names| names.all()).unwrap_or_default().into_iter();
    let holds = all.filter(|it| it.name == *name && now < it.expires);
    let mut found: Vec<_> = holds.map(|it| (IpAddr::from(it.address), (it.expires.0 - now.0).div_ceil(1000))).collect();
    found.sort_unstable();
    found
}

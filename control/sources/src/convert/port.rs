//! Ports of policies and of containers.

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::api::networking::v1::NetworkPolicyPort;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use penstock_policy::model::{NamedPort, PolicyPort, PortMatch, PortProtocol};

use super::{FieldError, FieldPathRef, FieldProblem, names};

pub(super) fn policy_port(port: &NetworkPolicyPort, at: &FieldPathRef<'_>) -> Result<PolicyPort, FieldError> {
    let protocol = protocol(port.protocol.as_deref(), &at.field("protocol"))?;
    let port_at = at.field("port");
    let end_at = at.field("endPort");
    let which = match (&port.port, port.end_port) {
        (None, None) => PortMatch::Every,
        (None, Some(end)) => return Err(end_at.invalid(FieldProblem::EndWithoutPort(end))),
        (Some(IntOrString::Int(first)), end) => {
            let first = number(*first, &port_at)?;
            let last = match end {
                None => first,
                Some(end) if end > i32::from(u16::MAX) => return Err(end_at.invalid(FieldProblem::PortNumber(end))),
                Some(end) => u16::try_from(end)
                    .ok()
                    .filter(|&last| last >= first)
                    .ok_or_else(|| end_at.invalid(FieldProblem::EndBelowPort { port: first, end }))?,
            };
            PortMatch::Range { first, last }
        }
        (Some(IntOrString::String(name)), Some(end)) => {
            return Err(end_at.invalid(FieldProblem::EndWithName { end, name: name.clone() }));
        }
        (Some(IntOrString::String(name)), None) => {
            names::port_name(name).map_err(|problem| port_at.invalid(problem))?;
            PortMatch::Name(name.clone())
        }
    };
    Ok(PolicyPort { protocol, which })
}

/// A container's named port; `None` if it has no name.
pub(super) fn container_port(port: &ContainerPort, at: &FieldPathRef<'_>) -> Result<Option<NamedPort>, FieldError> {
    let number = number(port.container_port, &at.field("containerPort"))?;
    let protocol = protocol(port.protocol.as_deref(), &at.field("protocol"))?;
    let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) else { return Ok(None) };
    names::port_name(name).map_err(|problem| at.field("name").invalid(problem))?;
    Ok(Some(NamedPort { name: name.to_owned(), protocol, number }))
}

pub(super) fn number(number: i32, at: &FieldPathRef<'_>) -> Result<u16, FieldError> {
    match u16::try_from(number) {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(at.invalid(FieldProblem::PortNumber(number))),
    }
}

pub(super) fn protocol(name: Option<&str>, at: &FieldPathRef<'_>) -> Result<PortProtocol, FieldError> {
    match name {
        None | Some("TCP") => Ok(PortProtocol::Tcp),
        Some("UDP") => Ok(PortProtocol::Udp),
        Some("SCTP") => Ok(PortProtocol::Sctp),
        Some(other) => Err(at.invalid(FieldProblem::Protocol(other.to_owned()))),
    }
}

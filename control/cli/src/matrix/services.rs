//! The matrix of pods and Services: which backends of each Service's port a pod reaches.

use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_policy::engine::Engine;
use penstock_policy::flow::{FlowEndpoint, FlowError, PortRef, ProtocolPort};
use penstock_policy::model::{ObjectKey, Service, ServicePort};
use penstock_policy::service_flows::service_flows;

use super::rows::{Matrix, Row};
use super::table::equal_pods;
use crate::style;

/// A pod's way to a Service's port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Every backend that it may get is allowed.
    Every,
    Partial,
    No,
    NoBackend,
    /// No address family in common.
    Nothing,
}

impl Reach {
    const ALL: [Self; 4] = [Self::Every, Self::Partial, Self::No, Self::NoBackend];

    fn symbol(self) -> String {
        match self {
            Self::Every => style::good("+"),
            Self::Partial => style::mixed("~"),
            Self::No => style::bad("."),
            Self::NoBackend => style::bad("0"),
            Self::Nothing => " ".to_owned(),
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Every => "every backend allowed",
            Self::Partial => "some",
            Self::No => "none",
            Self::NoBackend => "no backend",
            Self::Nothing => "",
        }
    }
}

/// A column: a Service's port.
struct Column {
    service: ObjectKey,
    port: ProtocolPort,
    /// For people: name, addresses, port.
    text: String,
}

/// A row for equal pods, by namespaces; columns are the ports of Services with a cluster address, by their numbers. Without `ports`
/// it is all of them.
pub(super) fn render(matrix: &Matrix, ports: &[ProtocolPort]) -> String {
    let engine = matrix.engine;
    let columns = columns(engine, ports);
    if columns.is_empty() {
        return "no Service has a cluster address and such a port\n".to_owned();
    }
    let digits = columns.len().to_string().len();
    let rows = || matrix.rows.iter().filter(|row| row.is_chosen);
    let width = rows().map(|row| row.name().len()).max().unwrap_or(0);
    let mut text = "From each pod (row) to each Service's port (column):\n\n".to_owned();
    for (number, column) in (1..).zip(&columns) {
        text += &format!("  {number:>digits$} {}\n", column.text);
    }
    let numbers = (1..=columns.len()).map(|number| format!("  {number:>digits$}")).collect::<String>();
    text += &format!("\n{}{}\n", " ".repeat(2 + width), style::faint(&numbers));
    let (mut namespace, mut seen) = (None, Vec::new());
    for row in rows() {
        if namespace != Some(row.namespace()) {
            namespace = Some(row.namespace());
            text += &format!("{}\n", style::strong(row.namespace()));
        }
        text += &format!("  {:width$}", row.name());
        let pods = one_a_node(engine, row);
        for column in &columns {
            let reach = reach(engine, &pods, column);
            seen.push(reach);
            text += &format!("  {}{}", " ".repeat(digits - 1), reach.symbol());
        }
        text += "\n";
    }
    let legend = Reach::ALL.into_iter().filter(|reach| seen.contains(reach));
    let legend: Vec<String> = legend.map(|reach| format!("{} {}", reach.symbol(), reach.meaning())).collect();
    text + &format!("\n{}\n{}", legend.join("  "), equal_pods(matrix))
}

/// The first of equal pods on each node: which backends a pod may get depends on where it is.
fn one_a_node<'a>(engine: &Engine, row: &'a Row) -> Vec<&'a ObjectKey> {
    let node = |pod: &ObjectKey| engine.state().node_of(engine.state().find_pod(pod)?);
    let mut nodes = BTreeSet::new();
    row.pods.iter().filter(|pod| nodes.insert(node(pod))).collect()
}

/// The ports of all Services, by name; those that are asked for, if any are.
fn columns(engine: &Engine, ports: &[ProtocolPort]) -> Vec<Column> {
    let mut services: Vec<&Service> = engine.state().services().map(|service| &**service).collect();
    services.sort_by(|a, b| a.key.cmp(&b.key));
    let of_service = |service: &&Service| {
        let service: &Service = service;
        let wanted = service.ports.iter().filter(|port| ports.is_empty() || ports.iter().any(|it| is_it(port, it)));
        let columns = wanted.filter(|_| !service.addresses.is_empty()).map(|port| column(service, port));
        columns.collect::<Vec<_>>()
    };
    services.iter().flat_map(of_service).collect()
}

fn column(service: &Service, port: &ServicePort) -> Column {
    let protocol = penstock_dataplane::policy::PortProtocol::from(port.protocol).number();
    let number = ProtocolPort::number(protocol, port.number);
    let name = if port.name.is_empty() { String::new() } else { format!(":{}", port.name) };
    let addresses: Vec<String> = service.addresses.iter().map(IpAddr::to_string).collect();
    let text = format!("{}{name}  {number} at {}", service.key, addresses.join(", "));
    Column { service: service.key.clone(), port: number, text }
}

fn is_it(port: &ServicePort, asked: &ProtocolPort) -> bool {
    let protocol = penstock_dataplane::policy::PortProtocol::from(port.protocol).number();
    protocol == asked.protocol()
        && match asked.port() {
            Some(PortRef::Number(number)) => *number == port.number,
            Some(PortRef::Name(name)) => *name == port.name,
            None => false,
        }
}

/// Over each of the pods' addresses with one of the Service's: policy may decide differently by family.
fn reach(engine: &Engine, pods: &[&ObjectKey], column: &Column) -> Reach {
    let state = engine.state();
    let addresses = pods.iter().filter_map(|pod| state.pod(state.find_pod(pod)?)).flat_map(|pod| &pod.addresses);
    let (mut allowed, mut denied, mut has_way) = (false, false, false);
    for address in addresses {
        let from = FlowEndpoint::Address(*address);
        let found = match service_flows(engine, &from, &column.service, &column.port) {
            Ok(found) => found,
            // Every other reason would concern all pods, and has no column.
            Err(FlowError::Families(..)) => continue,
            Err(_) => return Reach::Nothing,
        };
        has_way = true;
        for flow in &found.flows {
            match engine.evaluate_through_service(flow).is_allowed() {
                true => allowed = true,
                false => denied = true,
            }
        }
    }
    match (allowed, denied) {
        (true, false) => Reach::Every,
        (true, true) => Reach::Partial,
        (false, true) => Reach::No,
        (false, false) if has_way => Reach::NoBackend,
        (false, false) => Reach::Nothing,
    }
}

//! Expected results of probes, derived from the policies.

use std::fmt;
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol as IpProtocol};
use penstock_dataplane::policy::{Direction, DirectionVerdict};
use penstock_policy::engine::{DirectionExplanation, Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange};

use crate::probe::{Probe, Protocol};

/// Port at the client's end of a probe; no policy matches on it.
const EPHEMERAL: u16 = 50_000;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expectation {
    Allowed,
    Denied {
        /// The isolated pod, the direction, and the policies that isolate it.
        by: String,
    },
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed => f.write_str("allowed"),
            Self::Denied { by } => write!(f, "denied by {by}"),
        }
    }
}

/// Evaluates the policies of a set of objects with the control plane's engine, from scratch and for all pods.
pub struct PolicyOracle {
    engine: Engine,
}

impl PolicyOracle {
    pub fn new(objects: &[Object]) -> Self {
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(objects.iter().cloned().map(ObjectChange::Set));
        Self { engine }
    }

    /// Expected result of a probe sent from this address.
    pub fn expect(&self, source: IpAddr, probe: &Probe) -> Expectation {
        self.expect_at(source, (probe.destination, probe.protocol))
    }

    /// The same for what answers there.
    pub fn expect_at(&self, source: IpAddr, (destination, protocol): (IpAddr, Protocol)) -> Expectation {
        let (protocol, dst_port) = match protocol {
            Protocol::Tcp(port) => (IpProtocol::TCP, port),
            Protocol::Udp(port) => (IpProtocol::UDP, port),
            Protocol::Sctp(port) => (IpProtocol::SCTP, port),
            Protocol::Icmp if source.is_ipv6() => (IpProtocol::ICMPV6, EPHEMERAL),
            Protocol::Icmp => (IpProtocol::ICMP, EPHEMERAL),
        };
        let (src, dst) = (source.into(), destination.into());
        let explained = self.engine.explain(&Flow { src, dst, protocol, src_port: EPHEMERAL, dst_port });
        let (egress, ingress) = (explained.egress, explained.ingress);
        let sides = [(Direction::Egress, &egress), (Direction::Ingress, &ingress)];
        match sides.into_iter().find(|(_, side)| !side.verdict.is_allowed()) {
            Some((direction, side)) => Expectation::Denied { by: reason(direction, side) },
            None => Expectation::Allowed,
        }
    }
}

fn reason(direction: Direction, side: &DirectionExplanation) -> String {
    let direction = match direction {
        Direction::Egress => "egress",
        Direction::Ingress => "ingress",
    };
    if let (DirectionVerdict::DeniedBy(_), Some(rule)) = (side.verdict, &side.rule) {
        return format!("{direction}, by {rule}");
    }
    let pod = side.pod.as_ref().map_or_else(|| "an unknown pod".to_owned(), ToString::to_string);
    let mut by: Vec<&str> = side.policies.iter().map(|policy| policy.name.as_str()).collect();
    if side.default_deny {
        by.push("its namespace's DefaultDeny annotation");
    }
    format!("{direction} of {pod}, isolated by {}", by.join(", "))
}

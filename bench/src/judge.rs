//! What the policies say of a probe.

use std::fmt;
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol as IpProtocol};
use penstock_dataplane::policy::{Direction, Side};
use penstock_policy::engine::{DirectionExplanation, Engine, EngineSettings};
use penstock_policy::model::{Change, Object};

use crate::probe::{Probe, Protocol};

/// The port that a probe's own end stands for: no policy looks at it.
const EPHEMERAL: u16 = 50_000;

/// What should come of a probe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expectation {
    /// It is answered.
    Allowed,
    /// It is dropped.
    Denied {
        /// Which pod is isolated in which direction, and by which policies.
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

/// The policies of a set of objects, judged by the control side's own library, from scratch and for all pods.
pub struct Judge {
    engine: Engine,
}

impl Judge {
    /// Takes all objects at once.
    pub fn new(objects: &[Object]) -> Self {
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(objects.iter().cloned().map(Change::Set));
        Self { engine }
    }

    /// What should come of a probe that is sent from this address.
    pub fn expect(&self, source: IpAddr, probe: &Probe) -> Expectation {
        let (protocol, dst_port) = match probe.protocol {
            Protocol::Tcp(port) => (IpProtocol::TCP, port),
            Protocol::Udp(port) => (IpProtocol::UDP, port),
            Protocol::Icmp if source.is_ipv6() => (IpProtocol::ICMPV6, EPHEMERAL),
            Protocol::Icmp => (IpProtocol::ICMP, EPHEMERAL),
        };
        let (src, dst) = (source.into(), probe.destination.into());
        let explanation = self.engine.explain(&Flow { src, dst, protocol, src_port: EPHEMERAL, dst_port });
        let sides = [(Direction::Egress, &explanation.egress), (Direction::Ingress, &explanation.ingress)];
        match sides.into_iter().find(|(_, side)| side.verdict == Side::Denied) {
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
    let pod = side.pod.as_ref().map_or_else(|| "an unknown pod".to_owned(), ToString::to_string);
    let mut by: Vec<&str> = side.policies.iter().map(|policy| policy.name.as_str()).collect();
    if side.default_deny {
        by.push("its namespace's DefaultDeny annotation");
    }
    format!("{direction} of {pod}, isolated by {}", by.join(", "))
}

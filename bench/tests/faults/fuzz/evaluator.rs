//! Whose an address is, and what the policies of the fuzzed node mean: written for them alone, without the code of policy.

use std::net::IpAddr;

use crate::fixture::policy;

/// Who can send and receive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum End {
    /// A pod that may send to two places, and takes in nothing.
    Narrow,
    /// A pod that takes in what the narrow one may send to it, and sends nothing.
    Served,
    /// A pod without policy.
    Free,
    /// A pod that may do nothing.
    Shut,
    /// The machine outside, at any of its addresses.
    Outside,
}

pub(super) const UDP: u8 = 17;
pub(super) const TCP: u8 = 6;
pub(super) const SCTP: u8 = 132;
pub(super) const ICMP: u8 = 1;
pub(super) const ICMPV6: u8 = 58;

/// Ports of the served pod, and that of the machine outside, which the narrow pod may use; one that nobody may.
pub(super) const SERVED_UDP: u16 = 1053;
pub(super) const SERVED_TCP: u16 = 8080;
pub(super) const OUTSIDE_UDP: u16 = 2053;
pub(super) const DENIED: u16 = 2222;
/// Where the rules of the node translate to these: at the Service, and at the node. The last leads where nobody may send to.
pub(super) const SERVICE_PORT: u16 = 80;
pub(super) const NODE_PORT: u16 = 30_053;
pub(super) const NODE_PORT_OUTSIDE: u16 = 30_066;
/// Ports from which the narrow pod opens connections.
pub(super) const CLIENT: std::ops::Range<u16> = 5000..5006;

pub(super) const SERVICE: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Addresses of the machine outside: one that the narrow pod may reach, and one that it may not.
pub(super) const NEAR: [&str; 2] = ["198.51.100.2", "fd00:51:100::2"];
pub(super) const FAR: [&str; 2] = ["198.51.100.66", "fd00:51:100::66"];
/// Addresses of nobody here, as pods of another node have them.
pub(super) const ELSEWHERE: [&str; 2] = ["10.244.9.9", "fd00:10:244:9::9"];
/// Addresses of the node; the last one only in its configuration, or at its uplink.
pub(super) const NODE: [[&str; 4]; 2] = [
    ["172.18.0.2", "10.244.1.1", "198.51.100.1", "203.0.113.9"],
    ["fd00:172:18::2", "fd00:10:244:1::1", "fd00:51:100::1", "fd00:51:100::1"],
];

impl End {
    pub(super) const ALL: [Self; 5] = [Self::Narrow, Self::Served, Self::Free, Self::Shut, Self::Outside];
    pub(super) const PODS: [Self; 4] = [Self::Narrow, Self::Served, Self::Free, Self::Shut];

    /// The pod's name.
    pub(super) fn pod(self) -> String {
        format!("test/pod-{}", self as usize)
    }

    /// Its address; one of the machine's.
    pub(super) fn address(self, v6: bool) -> IpAddr {
        let number = 10 + self as usize;
        match (self, v6) {
            (Self::Outside, _) => NEAR[usize::from(v6)].parse().unwrap(),
            (_, false) => format!("10.244.1.{number}").parse().unwrap(),
            (_, true) => format!("fd00:10:244:1::{number}").parse().unwrap(),
        }
    }

    /// Whose pod's address this is.
    fn pod_with(address: IpAddr) -> Option<Self> {
        Self::PODS.into_iter().find(|pod| pod.address(address.is_ipv6()) == address)
    }
}

/// The policies of which [`may`] says the meaning.
pub(super) fn policies() -> String {
    let ports = format!("ports: [{{port: {SERVED_UDP}, protocol: UDP}}, {{port: {SERVED_TCP}}}]");
    let near = format!("{{ipBlock: {{cidr: {}/32}}}}, {{ipBlock: {{cidr: \"{}/128\"}}}}", NEAR[0], NEAR[1]);
    let narrow = format!(
        "  policyTypes: [Egress, Ingress]\n  egress:\n  - {{to: [{{podSelector: {{matchLabels: {{app: pod-1}}}}}}], {ports}}}\n  \
         - {{to: [{near}], ports: [{{port: {OUTSIDE_UDP}, protocol: UDP}}]}}\n"
    );
    let served = format!(
        "  policyTypes: [Egress, Ingress]\n  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: pod-0}}}}}}], {ports}}}]\n"
    );
    policy("narrow", "pod-0", &narrow)
        + &policy("served", "pod-1", &served)
        + &policy("shut", "pod-3", "  policyTypes: [Egress, Ingress]\n")
}

/// Addresses, protocol and ports of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Flow {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    pub(super) ports: [u16; 2],
}

/// Whether no policy is about a packet between these.
pub(super) fn are_free(from: End, to: End) -> bool {
    [from, to].iter().all(|end| matches!(end, End::Free | End::Outside))
}

/// Whether the policies let `from` open a connection to `to`, at this address and port.
fn may(from: End, (to, address): (End, IpAddr), protocol: u8, port: u16) -> bool {
    let is_near = NEAR.iter().any(|near| near.parse() == Ok(address));
    match (from, to) {
        (End::Narrow, End::Served) => [(UDP, SERVED_UDP), (TCP, SERVED_TCP)].contains(&(protocol, port)),
        (End::Narrow, End::Outside) => is_near && (protocol, port) == (UDP, OUTSIDE_UDP),
        _ => are_free(from, to),
    }
}

/// The port at the backend behind one of the Service or the node.
fn behind(protocol: u8, port: u16) -> u16 {
    match (protocol, port) {
        (UDP, SERVICE_PORT | NODE_PORT) => SERVED_UDP,
        (TCP, SERVICE_PORT | NODE_PORT) => SERVED_TCP,
        _ => port,
    }
}

/// Whether a packet of this flow, as it arrives, may be one that `from` has sent to `to`.
pub(super) fn passes(from: End, to: End, flow: &Flow) -> bool {
    let [_, destination] = flow.ports;
    may(from, (to, flow.to), flow.protocol, behind(flow.protocol, destination))
        || CLIENT.contains(&destination) && is_answer(from, to, flow)
}

/// Whether a packet of this flow may be an answer of `from` to what `to` has sent.
pub(super) fn is_answer(from: End, to: End, flow: &Flow) -> bool {
    may(to, (from, flow.from), flow.protocol, behind(flow.protocol, flow.ports[0]))
}

/// Whether something that `from` has sent may arrive with this source: its own, or one of those that the node gives it.
pub(super) fn has_own_source(from: End, source: IpAddr) -> bool {
    match (End::pod_with(source), from) {
        (Some(pod), _) => pod == from,
        (None, End::Outside) => true,
        (None, _) => is_of_node(source) || SERVICE.iter().any(|of| of.parse() == Ok(source)),
    }
}

pub(super) fn is_of_node(address: IpAddr) -> bool {
    NODE.iter().flatten().any(|of| of.parse() == Ok(address))
}

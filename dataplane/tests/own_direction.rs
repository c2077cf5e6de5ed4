//! A packet without an entry passes exactly if policy allows its own direction, whatever its sender writes into it.

use std::net::IpAddr;
use std::sync::Arc;

use etherparse::IpNumber;
use penstock_dataplane::Snapshot;
use penstock_dataplane::conntrack::Timestamp;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::Address;
use penstock_dataplane::pipeline::{DropReason, StackSender, Verdict};
use penstock_dataplane::policy::{
    AddressBlock, Endpoint, EndpointId, EndpointPolicy, PeerSpec, PortProtocol, PortRange, PortSpec, RuleAction,
    RuleName, RuleSpec, RuleTable, TieredTable,
};
use proptest::prelude::*;
use proptest::sample::select;

use crate::via_host::{A, A_IPS, B, B_IPS, CLIENT, HOST, NODE_IPS, Node, UPLINK, builder, masquerading};

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// One direction of a pod's policy. Each rule has a peer, a protocol and the ports from one on; protocol 0 is all of them.
#[derive(Clone, Debug)]
struct Direction {
    admin: Vec<(Rule, RuleAction)>,
    /// None, or those of the NetworkPolicies that isolate the pod.
    network_policy: Option<Vec<Rule>>,
}

#[derive(Clone, Debug)]
struct Rule {
    peer: &'static str,
    protocol: u8,
    first_port: u16,
}

/// Egress and ingress of `a`, then of `b`.
type Policies = [Direction; 4];

/// The oracle.
impl Direction {
    fn allows(&self, peer: &str, protocol: u8, port: u16) -> bool {
        let matches = |rule: &Rule| {
            let is_of_port = rule.protocol == protocol && port >= rule.first_port;
            rule.peer == peer && (rule.protocol == 0 || is_of_port)
        };
        match self.admin.iter().find(|(rule, _)| matches(rule)) {
            Some((_, RuleAction::Accept)) => true,
            Some((_, RuleAction::Deny)) => false,
            _ => self.network_policy.as_ref().is_none_or(|rules| rules.iter().any(matches)),
        }
    }

    fn is_open(&self) -> bool {
        self.admin.is_empty() && self.network_policy.is_none()
    }

    fn compiled(&self) -> EndpointPolicy {
        if self.is_open() {
            return EndpointPolicy::Open;
        }
        let rules = self.admin.iter().map(|(rule, _)| rule).chain(self.network_policy.iter().flatten());
        let rules: Vec<RuleSpec> = rules.enumerate().map(|(number, rule)| rule.spec(number)).collect();
        let actions = self.admin.iter().map(|(_, action)| *action);
        let actions: Vec<_> = actions.chain(std::iter::repeat(RuleAction::Accept)).take(rules.len()).collect();
        let (table, admin) = (RuleTable::new(&rules, []), self.admin.len() as u32);
        EndpointPolicy::Tiered(Arc::new(TieredTable::new(table, actions, admin, self.network_policy.is_some())))
    }
}

impl Rule {
    fn spec(&self, number: usize) -> RuleSpec {
        let length = if self.peer.contains(':') { 128 } else { 32 };
        let block = AddressBlock { cidr: format!("{}/{length}", self.peer).parse().unwrap(), except: Vec::new() };
        let of = |protocol| PortSpec::AnyOf(vec![PortRange { protocol, first: self.first_port, last: u16::MAX }]);
        RuleSpec {
            name: RuleName::new("test/policy", number.to_string()),
            peers: PeerSpec::AnyOf { every_pod: false, blocks: vec![block] },
            ports: match self.protocol {
                TCP => of(PortProtocol::Tcp),
                UDP => of(PortProtocol::Udp),
                SCTP => of(PortProtocol::Sctp),
                _ => PortSpec::Every,
            },
        }
    }
}

fn policies() -> impl Strategy<Value = Policies> {
    let peer = select([A_IPS, B_IPS, CLIENT].concat());
    let rule = (peer, select(vec![0, TCP, TCP, UDP, SCTP]), select(vec![1, 80, 32_768, 40_000]))
        .prop_map(|(peer, protocol, first_port)| Rule { peer, protocol, first_port });
    let action = select(vec![RuleAction::Accept, RuleAction::Deny, RuleAction::Pass]);
    let admin = prop::collection::vec((rule.clone(), action), 0..3);
    let network_policy = prop::option::of(prop::collection::vec(rule, 0..3));
    let direction = (admin, network_policy).prop_map(|(admin, network_policy)| Direction { admin, network_policy });
    prop::array::uniform4(direction)
}

/// The way of a packet: where it enters, its ends, and whose policies are to allow which peers.
#[derive(Clone, Copy, Debug)]
enum Way {
    Between {
        from_a: bool,
        by_stack: bool,
    },
    FromOutside {
        to_a: bool,
        by_uplink: bool,
    },
    ToOutside {
        from_a: bool,
    },
    /// The node has given a client's packet its own address.
    Masqueraded,
    /// It has sent a packet of `a` on to a machine outside, with this source.
    Leaving {
        with_nodes_source: bool,
    },
}

fn way() -> impl Strategy<Value = Way> {
    prop_oneof![
        (any::<bool>(), any::<bool>()).prop_map(|(from_a, by_stack)| Way::Between { from_a, by_stack }),
        (any::<bool>(), any::<bool>()).prop_map(|(to_a, by_uplink)| Way::FromOutside { to_a, by_uplink }),
        any::<bool>().prop_map(|from_a| Way::ToOutside { from_a }),
        Just(Way::Masqueraded),
        any::<bool>().prop_map(|with_nodes_source| Way::Leaving { with_nodes_source }),
    ]
}

#[derive(Clone, Debug)]
struct Sent {
    way: Way,
    is_v6: bool,
    protocol: u8,
    ports: (u16, u16),
    /// TCP's flags, the type of SCTP's first chunk, or ICMP's type.
    kind: u8,
    /// Whether an ICMP error is about a packet to another than its sender.
    quotes_other: bool,
}

fn sent() -> impl Strategy<Value = Sent> {
    let port = || prop_oneof![select(vec![53, 80, 32_767, 32_768, 40_000, 60_999]), 1..u16::MAX];
    // TCP with only SYN or ACK, ICMP's queries and errors, or anything.
    let kind = prop_oneof![select(vec![0x02, 0x10, 0, 1, 3, 8, 128, 129]), any::<u8>()];
    let protocol = prop_oneof![select(vec![TCP, TCP, UDP, SCTP, 1]), select(vec![50, 253])];
    let parts = (way(), any::<bool>(), protocol, (port(), port()), kind, any::<bool>());
    parts.prop_map(|(way, is_v6, protocol, ports, kind, quotes_other)| {
        // Of these alone the node knows the client.
        let (protocol, ports) = match (way, protocol) {
            (Way::Masqueraded, TCP | UDP | SCTP) => (protocol, (40_000, ports.1)),
            (Way::Masqueraded, _) => (UDP, (40_000, ports.1)),
            (_, 1) if is_v6 => (58, ports),
            _ => (protocol, ports),
        };
        Sent { way, is_v6, protocol, ports, kind, quotes_other }
    })
}

impl Sent {
    /// Source, destination, the port by which it enters and its sender.
    fn path(&self) -> (&'static str, &'static str, PortId, StackSender) {
        let [a, b, client, own] = [A_IPS, B_IPS, CLIENT, NODE_IPS].map(|ends| ends[usize::from(self.is_v6)]);
        let between = |is_a: bool| if is_a { (a, b, A) } else { (b, a, B) };
        match self.way {
            Way::Between { from_a, by_stack } => {
                let (src, dst, port) = between(from_a);
                if by_stack { (src, dst, HOST, StackSender::Forwarded) } else { (src, dst, port, StackSender::Unknown) }
            }
            Way::FromOutside { to_a, by_uplink: true } => (client, between(to_a).0, UPLINK, StackSender::Unknown),
            Way::FromOutside { to_a, by_uplink: false } => (client, between(to_a).0, HOST, StackSender::Forwarded),
            Way::ToOutside { from_a } => {
                let (src, _, port) = between(from_a);
                (src, client, port, StackSender::Unknown)
            }
            Way::Masqueraded => (own, b, HOST, StackSender::Translated),
            Way::Leaving { with_nodes_source } => {
                let sender = StackSender::Leaving { port: A.0, uplink: 7 };
                (if with_nodes_source { own } else { a }, client, HOST, sender)
            }
        }
    }

    fn frame(&self) -> Vec<u8> {
        let (src, dst, ..) = self.path();
        let [from, to] = [self.ports.0, self.ports.1].map(u16::to_be_bytes);
        let payload = match self.protocol {
            TCP => [&from[..], &to, &[0, 0, 0, 77, 0, 0, 0, 88, 0x50, self.kind, 16, 0, 0, 0, 0, 0]].concat(),
            UDP => [&from[..], &to, &[0, 8, 0, 0]].concat(),
            // An INIT has no verification tag (RFC 9260 section 8.5.1).
            SCTP => [&from[..], &to, &[0, 0, 0, u8::from(self.kind != 1), 0, 0, 0, 0, self.kind, 3, 0, 4]].concat(),
            // An error quotes a packet of its receiver, which was never sent.
            1 | 58 => {
                let receiver = if self.quotes_other { B_IPS[usize::from(self.is_v6)] } else { src };
                let mut frame = Vec::new();
                builder(dst, receiver, 64).udp(self.ports.1, self.ports.0).write(&mut frame, &[]).unwrap();
                [&[self.kind, 0, 0, 0], &from[..], &to, &frame[14..]].concat()
            }
            _ => vec![0; 16],
        };
        let mut frame = Vec::new();
        builder(src, dst, 64).write(&mut frame, IpNumber(self.protocol), &payload).unwrap();
        frame
    }

    /// Whether the policies of its ends allow it from its sender to its receiver.
    fn is_allowed_by(&self, [a_egress, a_ingress, b_egress, b_ingress]: &Policies) -> bool {
        let [a, b, client] = [A_IPS, B_IPS, CLIENT].map(|ends| ends[usize::from(self.is_v6)]);
        let by = |direction: &Direction, peer| direction.allows(peer, self.protocol, self.ports.1);
        match self.way {
            Way::Between { from_a: true, .. } => by(a_egress, b) && by(b_ingress, a),
            Way::Between { from_a: false, .. } => by(b_egress, a) && by(a_ingress, b),
            Way::FromOutside { to_a: true, .. } => by(a_ingress, client),
            Way::FromOutside { to_a: false, .. } | Way::Masqueraded => by(b_ingress, client),
            Way::ToOutside { from_a: false } => by(b_egress, client),
            // It is of the connection that it quotes, which no table has.
            Way::Leaving { .. } if self.is_error() => !self.quotes_other && a_egress.allows(client, UDP, self.ports.1),
            Way::ToOutside { from_a: true } | Way::Leaving { .. } => by(a_egress, client),
        }
    }

    fn is_error(&self) -> bool {
        matches!((self.protocol, self.kind), (1, 3 | 11 | 12) | (58, 1..=4))
    }

    /// Whether it may be the first that is seen of a connection: a SYN, or a segment from the middle as `nf_conntrack` picks it up.
    fn may_be_first(&self) -> bool {
        match self.protocol {
            TCP => matches!(self.kind & 0x17, 0x02 | 0x10),
            SCTP => matches!(self.kind, 0 | 1 | 4),
            1 => self.kind == 8,
            58 => self.kind == 128,
            _ => true,
        }
    }
}

fn publish(node: &mut Node, policies: &Policies) {
    let [a_egress, a_ingress, b_egress, b_ingress] = policies.each_ref().map(Direction::compiled);
    let mut update = node.snapshot.policy.update();
    update
        .set_endpoint(EndpointId(1), Some(Endpoint { egress: a_egress, ingress: a_ingress }))
        .set_endpoint(EndpointId(2), Some(Endpoint { egress: b_egress, ingress: b_ingress }));
    node.snapshot = Snapshot::new(node.snapshot.epoch, update.finish(), node.snapshot.forwarding.clone());
}

proptest! {
    #[test]
    fn a_packet_without_an_entry_is_judged_in_its_own_direction(
        policies in policies(), packets in prop::collection::vec(sent(), 8)
    ) {
        for packet in packets {
            let mut node = masquerading();
            publish(&mut node, &policies);
            let (src, _, port, sender) = packet.path();
            let (verdict, _) = node.forward(port, sender, packet.frame());
            let passes = matches!(verdict, Verdict::Forward(_));
            if packet.is_allowed_by(&policies) {
                prop_assert!(passes || !packet.may_be_first(), "allowed, and {verdict:?}: {packet:?}");
            } else {
                prop_assert!(!passes, "denied, and {verdict:?}: {packet:?}");
                prop_assert_ne!(verdict, Verdict::Drop(DropReason::NotReady));
            }
            // What it opens is its sender's.
            let openers = node.pipeline.connections().iter(Timestamp::from_millis(1_000_000));
            let openers: Vec<Address> = openers.map(|found| found.original.src).collect();
            let is_senders = |opener: &Address| *opener == src.parse::<IpAddr>().unwrap().into();
            prop_assert!(openers.iter().all(is_senders) && (passes || openers.is_empty()), "{openers:?}: {packet:?}");
        }
    }
}

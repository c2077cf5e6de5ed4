use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::DropReason;
use crate::forward::{Forwarding, Mac, Port, PortId, PortKind};
use crate::packet::Protocol;

use super::*;

const WEB: &str = "10.0.0.1";
const DB: &str = "10.0.0.2";
const REMOTE: &str = "10.0.1.1";
const NODE: &str = "192.168.0.1";
const OTHER_NODE: &str = "192.168.0.2";

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

fn flow(src: &str, dst: &str, protocol: Protocol, dst_port: u16) -> Flow {
    Flow { src: address(src), dst: address(dst), protocol, src_port: 40000, dst_port }
}

fn pod(identity: u32, endpoint: Option<u32>, node: u32) -> Option<AddressOwner> {
    let identity = Identity(NonZeroU32::new(identity).unwrap());
    Some(AddressOwner::Pod { identity, endpoint: endpoint.map(EndpointId), node: Some(NodeId(node)) })
}

fn rule(name: &str, peers: PeerSpec, ports: &[(PortProtocol, u16, u16)]) -> RuleSpec {
    let ranges =
        ports.iter().map(|(protocol, first, last)| PortRange { protocol: *protocol, first: *first, last: *last });
    let ports = if ports.is_empty() { PortSpec::Every } else { PortSpec::AnyOf(ranges.collect()) };
    RuleSpec { name: RuleName::new("test/policy", name), peers, ports }
}

fn selected() -> PeerSpec {
    PeerSpec::AnyOf { every_pod: false, blocks: Vec::new() }
}

fn named(identity: u32, rules: &[u32]) -> (Identity, RuleSet) {
    (Identity(NonZeroU32::new(identity).unwrap()), rules.iter().copied().collect())
}

fn isolated(rules: &[RuleSpec], identities: &[(Identity, RuleSet)]) -> EndpointPolicy {
    EndpointPolicy::Isolated(Arc::new(RuleTable::new(rules, identities.iter().cloned())))
}

/// `web` (identity 1) and `db` (identity 2) on node 0, a pod (identity 1) and node 1 elsewhere. `db` is isolated for
/// ingress: identity 1 on TCP 5432, every address on UDP 53, every peer by ICMP from 172.16.0.0/12.
fn example() -> PolicySet {
    let ingress = isolated(
        &[
            rule("web", selected(), &[(PortProtocol::Tcp, 5432, 5432)]),
            rule("dns", PeerSpec::Every, &[(PortProtocol::Udp, 53, 53)]),
            rule(
                "block",
                PeerSpec::AnyOf {
                    every_pod: false,
                    blocks: vec![AddressBlock { cidr: "172.16.0.0/12".parse().unwrap(), except: Vec::new() }],
                },
                &[],
            ),
        ],
        &[named(1, &[0])],
    );
    let mut update = PolicySet::default().update();
    update
        .set_address(address(WEB), pod(1, Some(0), 0))
        .set_address(address("fd00::1"), pod(1, Some(0), 0))
        .set_address(address(DB), pod(2, Some(1), 0))
        .set_address(address(REMOTE), pod(1, None, 1))
        .set_address(address(NODE), Some(AddressOwner::Node(NodeId(0))))
        .set_address(address(OTHER_NODE), Some(AddressOwner::Node(NodeId(1))))
        .set_endpoint(EndpointId(0), Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open }))
        .set_endpoint(EndpointId(1), Some(Endpoint { egress: isolated(&[], &[]), ingress }));
    update.finish()
}

#[test]
fn each_direction_of_a_flow_follows_its_own_tables() {
    let set = example();
    let allowed =
        |rule| DirectionVerdict::Allowed(RuleRef { endpoint: EndpointId(1), direction: Direction::Ingress, rule });
    for (src, dst, protocol, port, egress, ingress) in [
        (WEB, DB, Protocol::TCP, 5432, DirectionVerdict::Open, allowed(0)),
        (WEB, DB, Protocol::TCP, 5433, DirectionVerdict::Open, DirectionVerdict::Denied),
        (WEB, DB, Protocol::UDP, 53, DirectionVerdict::Open, allowed(1)),
        (WEB, DB, Protocol::ICMP, 53, DirectionVerdict::Open, DirectionVerdict::Denied),
        (REMOTE, DB, Protocol::TCP, 5432, DirectionVerdict::NotLocal, allowed(0)),
        ("172.16.9.9", DB, Protocol::ICMP, 0, DirectionVerdict::NotLocal, allowed(2)),
        ("172.16.9.9", DB, Protocol::TCP, 5432, DirectionVerdict::NotLocal, allowed(2)),
        ("8.8.8.8", DB, Protocol::TCP, 5432, DirectionVerdict::NotLocal, DirectionVerdict::Denied),
        (DB, WEB, Protocol::TCP, 80, DirectionVerdict::Denied, DirectionVerdict::Open),
        (DB, REMOTE, Protocol::TCP, 80, DirectionVerdict::Denied, DirectionVerdict::NotLocal),
        (NODE, DB, Protocol::TCP, 1, DirectionVerdict::NotLocal, DirectionVerdict::Exempt),
        (DB, NODE, Protocol::ICMP, 0, DirectionVerdict::Exempt, DirectionVerdict::NotLocal),
        (OTHER_NODE, DB, Protocol::TCP, 1, DirectionVerdict::NotLocal, DirectionVerdict::Denied),
        (DB, OTHER_NODE, Protocol::TCP, 1, DirectionVerdict::Denied, DirectionVerdict::NotLocal),
        (DB, DB, Protocol::TCP, 1, DirectionVerdict::Exempt, DirectionVerdict::Exempt),
        (WEB, "fd00::1", Protocol::TCP, 1, DirectionVerdict::Exempt, DirectionVerdict::Exempt),
        (REMOTE, "8.8.8.8", Protocol::TCP, 1, DirectionVerdict::NotLocal, DirectionVerdict::NotLocal),
    ] {
        let expected = PolicyVerdict { egress, ingress };
        assert_eq!(set.evaluate(&flow(src, dst, protocol, port)), expected, "{src} to {dst} {protocol} {port}");
    }
}

#[test]
fn unknown_ends_are_denied() {
    assert_eq!(PolicyVerdict::default().drop_reason(), Some(DropReason::EgressDenied));
    let nothing = PolicySet::default();
    assert_eq!(nothing.evaluate(&flow(WEB, DB, Protocol::TCP, 80)).drop_reason(), Some(DropReason::NotReady));
    let mut update = nothing.update();
    update.set_address(address(WEB), pod(1, Some(0), 0));
    let no_tables = update.finish();
    assert_eq!(no_tables.evaluate(&flow(WEB, DB, Protocol::TCP, 80)).drop_reason(), Some(DropReason::EgressDenied));
    assert_eq!(no_tables.evaluate(&flow(DB, WEB, Protocol::TCP, 80)).drop_reason(), Some(DropReason::IngressDenied));
}

#[test]
fn a_pod_with_a_port_is_denied_until_policy_knows_it() {
    let mac = Mac::default();
    let addresses = [WEB, DB].map(address).to_vec();
    let port = Port::new(PortKind::Pod, mac, mac, 1500, addresses);
    let mut forwarding = Forwarding::new([]).with_portless([address(REMOTE)]);
    forwarding.insert(PortId(0), port).unwrap();
    let mut update = example().update();
    update.set_local(&forwarding).set_address(address(WEB), None);
    let set = update.finish();
    for (src, dst) in [(WEB, DB), (DB, WEB), (WEB, REMOTE), (REMOTE, WEB), (NODE, WEB), (WEB, NODE), (WEB, WEB)] {
        let policy_verdict = set.evaluate(&flow(src, dst, Protocol::TCP, 5432));
        assert_eq!(policy_verdict.drop_reason(), Some(DropReason::NotReady), "{src} to {dst}");
    }
    let ready = set.evaluate(&flow(REMOTE, DB, Protocol::TCP, 5432));
    assert!(ready.is_allowed() && ready.egress == DirectionVerdict::NotLocal, "a pod that has no port: {ready:?}");
    assert_eq!(set.owner(address(WEB)), None);
    assert_eq!(set.statistics().addresses, example().statistics().addresses - 1);
}

#[test]
fn egress_is_reported_before_ingress_if_both_deny() {
    let both = PolicyVerdict { egress: DirectionVerdict::Denied, ingress: DirectionVerdict::Denied };
    assert_eq!(both.drop_reason(), Some(DropReason::EgressDenied));
}

#[test]
fn a_later_set_shares_tables_and_changes_no_earlier_one() {
    let before = example();
    let mut update = before.update();
    update.set_address(address(REMOTE), pod(3, None, 1)).set_endpoint(EndpointId(0), None);
    let after = update.finish();
    let probe = flow(REMOTE, DB, Protocol::TCP, 5432);
    assert!(before.evaluate(&probe).is_allowed());
    assert!(!after.evaluate(&probe).is_allowed());
    let table = |set: &PolicySet| match &set.endpoint(EndpointId(1)).unwrap().ingress {
        EndpointPolicy::Isolated(table) => Arc::as_ptr(table),
        EndpointPolicy::Open | EndpointPolicy::Tiered(_) => panic!("isolated above"),
    };
    assert_eq!(table(&before), table(&after));
    assert_eq!((before.statistics().endpoints, after.statistics().endpoints), (2, 1));
}

#[test]
fn peers_of_one_rule_never_combine_with_ports_of_another() {
    let rules = [
        rule("first", selected(), &[(PortProtocol::Tcp, 80, 80)]),
        rule("second", selected(), &[(PortProtocol::Tcp, 90, 99)]),
        rule("every pod", PeerSpec::AnyOf { every_pod: true, blocks: Vec::new() }, &[(PortProtocol::Tcp, 7, 7)]),
    ];
    let table = RuleTable::new(&rules, [named(1, &[0, 2]), named(2, &[1, 2])]);
    let (peer, tcp) = (address(WEB), Protocol::TCP);
    for (identity, port, expected) in [
        (1, 80, Some(0)),
        (1, 95, None),
        (2, 95, Some(1)),
        (2, 80, None),
        (9, 7, Some(2)),
        (1, 7, Some(2)),
        (0, 7, None),
    ] {
        assert_eq!(table.find(identity, peer, tcp, port), expected, "identity {identity}, port {port}");
    }
    assert_eq!(table.name(1).unwrap().to_string(), "second");
    let given = |identity, rules| {
        let (identity, rules) = named(identity, rules);
        (identity, Some(rules))
    };
    let changed = table.with_identities([(named(1, &[]).0, None), given(8, &[]), given(9, &[0, 1])]);
    for (identity, port, expected) in
        [(1, 80, None), (1, 7, Some(2)), (8, 7, None), (9, 80, Some(0)), (9, 90, Some(1)), (9, 7, None)]
    {
        assert_eq!(changed.find(identity, peer, tcp, port), expected, "changed: identity {identity}, port {port}");
    }
    assert_eq!(table.find(1, peer, tcp, 80), Some(0));
}

#[test]
fn more_than_64_rules_work() {
    let rules: Vec<_> =
        (0..1000).map(|n| rule(&n.to_string(), selected(), &[(PortProtocol::Tcp, n + 1, n + 1)])).collect();
    let table = RuleTable::new(&rules, [named(1, &(0..1000).step_by(2).collect::<Vec<_>>())]);
    for n in 0..1000u16 {
        let expected = n.is_multiple_of(2).then_some(n as u32);
        assert_eq!(table.find(1, address(WEB), Protocol::TCP, n + 1), expected, "rule {n}");
    }
}

#[test]
fn cluster_wide_rules_allow_both_ways_but_open_ones_do_not() {
    // `db` may receive TCP 5432 from identity 1; now identity 1 may send nothing.
    let mut update = example().update();
    update.set_rule_scope(RuleScope::ClusterWide);
    update.set_endpoint(EndpointId(0), Some(Endpoint { egress: isolated(&[], &[]), ingress: EndpointPolicy::Open }));
    let set = update.finish();
    let policy_verdict = set.evaluate(&flow(WEB, DB, Protocol::TCP, 5432));
    assert_eq!(policy_verdict.egress, DirectionVerdict::AllowedByPeer(policy_verdict.ingress.rule().unwrap()));
    assert!(policy_verdict.is_allowed());
    assert_eq!(set.evaluate(&flow(WEB, DB, Protocol::TCP, 1)).drop_reason(), Some(DropReason::EgressDenied));
    assert_eq!(set.evaluate(&flow(DB, WEB, Protocol::TCP, 1)).drop_reason(), Some(DropReason::EgressDenied));
    assert_eq!(set.evaluate(&flow("8.8.8.8", DB, Protocol::TCP, 1)).drop_reason(), Some(DropReason::IngressDenied));
}

/// Rules on TCP ports from `web`: 1 accepted, 2 denied, 3 passed by the Admin tier; then 1 to 3 and 5 by the next tier.
fn tiers(is_isolated: bool) -> EndpointPolicy {
    use RuleAction::{Accept, Deny, Pass};
    let ports = [(Accept, 1), (Deny, 2), (Pass, 3), (if is_isolated { Accept } else { Deny }, 3), (Accept, 5)];
    let rules: Vec<_> = ports
        .iter()
        .map(|(_, port)| rule("of a tier", PeerSpec::Every, &[(PortProtocol::Tcp, *port, *port)]))
        .collect();
    let actions = ports.map(|(action, _)| action);
    EndpointPolicy::Tiered(Arc::new(TieredTable::new(RuleTable::new(&rules, []), actions, 3, is_isolated)))
}

#[test]
fn tiers_have_an_order_and_do_not_spare_the_own_node() {
    for is_isolated in [true, false] {
        let mut update = example().update();
        update
            .set_endpoint(EndpointId(0), Some(Endpoint { egress: tiers(is_isolated), ingress: EndpointPolicy::Open }));
        let set = update.finish();
        let verdict = |dst: &str, port| set.evaluate(&flow(WEB, dst, Protocol::TCP, port)).egress;
        let of = |rule| RuleRef { endpoint: EndpointId(0), direction: Direction::Egress, rule };
        let (allowed, denied) =
            (|rule| DirectionVerdict::Allowed(of(rule)), |rule| DirectionVerdict::DeniedBy(of(rule)));
        let (passed, rest) = match is_isolated {
            true => (allowed(3), DirectionVerdict::Denied),
            false => (denied(3), DirectionVerdict::Default),
        };
        for (port, expected) in [(1, allowed(0)), (2, denied(1)), (3, passed), (4, rest), (5, allowed(4))] {
            assert_eq!(verdict(REMOTE, port), expected, "isolated {is_isolated}, port {port}");
        }
        let spared = if is_isolated { [DirectionVerdict::Exempt; 3] } else { [passed, rest, allowed(4)] };
        let to_node = [1, 2, 3, 4, 5].map(|port| verdict(NODE, port));
        assert_eq!(to_node, [allowed(0), denied(1), spared[0], spared[1], spared[2]], "isolated {is_isolated}");
        assert_eq!(verdict(WEB, 2), DirectionVerdict::Exempt, "a pod and itself");
        assert_eq!(set.passes(&flow(WEB, REMOTE, Protocol::TCP, 3), Direction::Egress, verdict(REMOTE, 3)), [of(2)]);
        assert_eq!(set.passes(&flow(WEB, REMOTE, Protocol::TCP, 1), Direction::Egress, verdict(REMOTE, 1)), []);
        let drop_reason = set.evaluate(&flow(WEB, REMOTE, Protocol::TCP, 2)).drop_reason();
        assert_eq!(drop_reason, Some(DropReason::EgressDenied));
    }
}

/// The verdict on a flow that the node's stack forwards to `db` under the node's address.
fn of_unknown_source(ingress: EndpointPolicy, port: u16) -> DirectionVerdict {
    let mut update = example().update();
    update.set_endpoint(EndpointId(1), Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
    let (set, flow) = (update.finish(), flow(NODE, DB, Protocol::TCP, port));
    set.evaluate_as(&flow, EvaluationForm::Forwarded, NameTime::Never).ingress
}

#[test]
fn a_source_that_nobody_knows_has_what_every_source_has() {
    let port = |number| [(PortProtocol::Tcp, number, number)];
    let blocks = |cidr: &str| PeerSpec::AnyOf {
        every_pod: true,
        blocks: vec![AddressBlock { cidr: cidr.parse().unwrap(), except: vec!["10.0.0.0/8".parse().unwrap()] }],
    };
    let rules = [
        rule("one", selected(), &port(1)),
        rule("the node's network", blocks("192.168.0.0/16"), &port(2)),
        rule("all but some", blocks("0.0.0.0/0"), &port(3)),
        rule("every", PeerSpec::Every, &port(4)),
    ];
    let table = isolated(&rules, &[named(1, &[0])]);
    let allowed =
        DirectionVerdict::Allowed(RuleRef { endpoint: EndpointId(1), direction: Direction::Ingress, rule: 3 });
    for number in 1..=5 {
        let expected = if number == 4 { allowed } else { DirectionVerdict::Denied };
        assert_eq!(of_unknown_source(table.clone(), number), expected, "port {number}");
    }
    assert_eq!(of_unknown_source(EndpointPolicy::Open, 1), DirectionVerdict::Open);
}

#[test]
fn an_unknown_source_is_denied_what_a_tier_denies_to_any() {
    use RuleAction::{Accept, Deny, Pass};
    // Each case: rules of the Admin tier, each for every source or for one, and a NetworkPolicy's rule or none.
    for (admin, of_policy, is_allowed) in [
        (&[(Accept, true)][..], None, true),
        (&[(Accept, false)], None, true),
        (&[(Accept, false), (Deny, true)], None, false),
        (&[(Deny, false), (Accept, true)], None, false),
        (&[(Deny, true)], Some(true), false),
        (&[(Pass, true), (Deny, true)], Some(true), true),
        (&[(Pass, true), (Accept, true)], Some(false), false),
        (&[(Pass, false), (Accept, true)], Some(false), false),
        (&[(Pass, false), (Accept, true)], Some(true), true),
        (&[(Pass, false), (Deny, true)], Some(true), false),
        (&[(Accept, false)], Some(false), false),
        (&[], Some(true), true),
    ] {
        let of_policy: Vec<_> = of_policy.into_iter().map(|every| (Accept, every)).collect();
        let all = || admin.iter().chain(&of_policy);
        let peers = |every: bool| if every { PeerSpec::Every } else { selected() };
        let rules: Vec<_> = all().map(|(_, every)| rule("of a tier", peers(*every), &[])).collect();
        let (table, actions) = (RuleTable::new(&rules, []), all().map(|(action, _)| *action));
        let table = TieredTable::new(table, actions, admin.len() as u32, !of_policy.is_empty());
        let verdict = of_unknown_source(EndpointPolicy::Tiered(Arc::new(table)), 80);
        assert_eq!(verdict.is_allowed(), is_allowed, "{admin:?}, then {of_policy:?}: {verdict:?}");
    }
}

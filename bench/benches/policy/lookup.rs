//! Cost of a policy lookup, and what it does not depend on.

use std::hint::black_box;
use std::time::Instant;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::{PolicySet, PortProtocol};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{
    ClusterNetworkPolicy, ClusterRule, ClusterTier, LabelOperator, Object, ObjectChange, Peer, Peers, Pod, PolicyPorts,
    Requirement, Rule, RuleAction, Selector, Staging, Subject,
};

use super::alternatives::{LinearList, MizarTables};
use super::cluster::{address, namespace, node, pod, policy, selector, tcp, typical_policy};
use super::row;

/// Flows per measurement; few enough to stay in the L1 cache together with the looked-up data.
const FLOWS: usize = 512;

/// Best nanoseconds a flow of each contender, measured in alternation.
fn race<const N: usize>(rounds: usize, mut contenders: [&mut dyn FnMut() -> u64; N]) -> [f64; N] {
    let mut best = [f64::INFINITY; N];
    for _ in 0..rounds {
        for (best, contender) in best.iter_mut().zip(&mut contenders) {
            let start = Instant::now();
            for _ in 0..8 {
                black_box(contender());
            }
            *best = best.min(start.elapsed().as_nanos() as f64 / (8 * FLOWS) as f64);
        }
    }
    best
}

fn evaluate_all(set: &PolicySet, flows: &[Flow]) -> u64 {
    flows.iter().map(|flow| u64::from(black_box(set).evaluate(flow).is_allowed())).sum()
}

fn flow(src: std::net::IpAddr, dst: std::net::IpAddr, dst_port: u16) -> Flow {
    Flow { src: src.into(), dst: dst.into(), protocol: Protocol::TCP, src_port: 40000, dst_port }
}

/// Pseudo-random numbers that are the same in every run (a 64-bit linear congruential generator with Knuth's
/// constants).
fn numbers() -> impl Iterator<Item = usize> {
    let mut state = 42u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    })
}

fn set(objects: impl IntoIterator<Item = Object>) -> PolicySet {
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    engine.apply(objects.into_iter().map(ObjectChange::Set));
    engine.policy_set().clone()
}

/// Pods `0..count` in namespaces of a hundred, with rotating app labels.
fn pods(count: usize) -> impl Iterator<Item = Object> {
    let namespaces = (0..count.div_ceil(100)).map(namespace);
    let pods = (0..count).map(|number| Object::Pod(pod(number, number / 100, number % 4, number % 5)));
    namespaces.chain((0..4).map(node)).chain(pods)
}

/// The policy on namespace 0 that all comparisons share.
fn the_policy() -> Object {
    let rules = vec![Rule {
        peers: Peers::AnyOf(vec![Peer::Pods(selector(&[("app", "app-1".to_owned())]))]),
        ports: PolicyPorts::AnyOf(vec![tcp(80, 90)]),
    }];
    policy(0, "the-policy".to_owned(), Selector::default(), Some(rules), None)
}

pub(crate) fn run(rounds: usize) -> Vec<bool> {
    let mut results = Vec::new();
    let mut number = numbers();
    let among_100: Vec<Flow> = (0..FLOWS)
        .map(|_| {
            flow(
                address(number.next().unwrap() % 100),
                address(number.next().unwrap() % 100),
                75 + (number.next().unwrap() % 20) as u16,
            )
        })
        .collect();

    let one = set(pods(1_000).chain([the_policy()]));
    let many = set(pods(1_000)
        .chain([the_policy()])
        .chain((0..10_000).map(|number| typical_policy(number, 1 + number % 9, 0))));
    let [one_ns, many_ns] =
        race(rounds, [&mut || evaluate_all(&one, &among_100), &mut || evaluate_all(&many, &among_100)]);
    results.push(ratio("lookup, 10,000 policies in the cluster against 1", many_ns, one_ns, 1.05));

    let few = set(pods(100).chain([the_policy()]));
    let crowd = set(pods(100_000).chain([the_policy()]));
    let [few_ns, crowd_ns] =
        race(rounds, [&mut || evaluate_all(&few, &among_100), &mut || evaluate_all(&crowd, &among_100)]);
    results.push(ratio("lookup, 100,000 pods against 100, the same flows", crowd_ns, few_ns, 1.25));
    let all_over: Vec<Flow> = (0..FLOWS)
        .map(|_| flow(address(number.next().unwrap() % 100_000), address(number.next().unwrap() % 100), 80))
        .collect();
    let [all_over_ns] = race(rounds, [&mut || evaluate_all(&crowd, &all_over)]);
    println!("  (from {FLOWS} random ones of the 100,000 pods: {all_over_ns:.1} ns)");

    results.extend(rules(rounds));
    results.extend(tiers(rounds));
    results.push(linear(rounds));
    results.push(mizar(rounds));
    results
}

/// The same flows, all allowed: each by its own rule, or all by one.
fn rules(rounds: usize) -> Vec<bool> {
    let with = |rules: Vec<Rule>| {
        let client = |number: usize| {
            Object::Pod(Pod {
                labels: super::cluster::labels(&[("client", number.to_string())]),
                ..pod(number, 0, 0, 0)
            })
        };
        let server =
            Object::Pod(Pod { labels: super::cluster::labels(&[("server", String::new())]), ..pod(2_000, 0, 0, 0) });
        let policy = policy(0, "rules".to_owned(), selector(&[("server", String::new())]), Some(rules), None);
        set([namespace(0), server, policy].into_iter().chain((0..1_024).map(client)))
    };
    let own = |number: usize| Rule {
        peers: Peers::AnyOf(vec![Peer::Pods(selector(&[("client", number.to_string())]))]),
        ports: PolicyPorts::AnyOf(vec![tcp(1 + number as u16, 1 + number as u16)]),
    };
    let any = Rule {
        peers: Peers::AnyOf(vec![Peer::Pods(Selector {
            requirements: vec![Requirement { key: "client".to_owned(), operator: LabelOperator::Exists }],
        })]),
        ports: PolicyPorts::AnyOf(vec![tcp(1, 1_024)]),
    };
    let (one, many) = (with(vec![any]), with((0..1_024).map(own).collect()));
    let mut number = numbers();
    let mut flows = |clients: usize| -> Vec<Flow> {
        let picked = std::iter::repeat_with(|| number.next().unwrap() % clients * (1_024 / clients)).take(FLOWS);
        picked.map(|client| flow(address(client), address(2_000), 1 + client as u16)).collect()
    };
    let (busy, wide) = (flows(64), flows(1_024));
    for flows in [&busy, &wide] {
        assert_eq!(
            (evaluate_all(&one, flows), evaluate_all(&many, flows)),
            (FLOWS as u64, FLOWS as u64),
            "all are allowed"
        );
    }
    let [one_ns, many_ns, one_wide_ns, many_wide_ns] = race(
        rounds,
        [
            &mut || evaluate_all(&one, &busy),
            &mut || evaluate_all(&many, &busy),
            &mut || evaluate_all(&one, &wide),
            &mut || evaluate_all(&many, &wide),
        ],
    );
    vec![
        ratio("lookup, 1,024 rules on the endpoint against 1, flows of 64 clients", many_ns, one_ns, 1.25),
        ratio(
            "lookup, 1,024 rules on the endpoint against 1, flows of all 1,024 clients",
            many_wide_ns,
            one_wide_ns,
            1.25,
        ),
    ]
}

/// A pod with 1,000 rules of ClusterNetworkPolicies in both tiers, half of them before NetworkPolicy and half behind it,
/// against the same without, and against one with a single rule.
fn tiers(rounds: usize) -> Vec<bool> {
    let isolating = || {
        let rule = || Rule {
            peers: Peers::AnyOf(vec![Peer::Pods(selector(&[("app", "app-1".to_owned())]))]),
            ports: PolicyPorts::AnyOf(vec![tcp(1, 400)]),
        };
        policy(0, "both".to_owned(), Selector::default(), Some(vec![rule()]), Some(vec![rule()]))
    };
    let policies = |each: usize| {
        [ClusterTier::Admin, ClusterTier::Baseline]
            .into_iter()
            .flat_map(move |tier| (0..each.div_ceil(25)).map(move |number| cluster_policy(tier, number, each.min(25))))
    };
    let small = |more: Vec<Object>| set(pods(100).chain(more));
    let alone = small(vec![isolating()]);
    let within = small(policies(500).chain([isolating()]).collect());
    let (one, many) = (small(policies(1).collect()), small(policies(500).collect()));
    let mut number = numbers();
    let mut next = |below: usize| number.next().unwrap() % below;
    let flows: Vec<Flow> =
        (0..FLOWS).map(|_| flow(address(next(100)), address(next(100)), 1 + next(500) as u16)).collect();
    let [alone_ns, within_ns, one_ns, many_ns] = race(
        rounds,
        [
            &mut || evaluate_all(&alone, &flows),
            &mut || evaluate_all(&within, &flows),
            &mut || evaluate_all(&one, &flows),
            &mut || evaluate_all(&many, &flows),
        ],
    );
    vec![
        ratio(
            "lookup, 1,000 ClusterNetworkPolicy rules around a NetworkPolicy against none",
            within_ns,
            alone_ns,
            1.25,
        ),
        ratio("lookup, 1,000 ClusterNetworkPolicy rules in two tiers against 2", many_ns, one_ns, 1.25),
    ]
}

/// Policy `number` of a tier, on all pods: a different port for each rule, in turn accepted, denied and passed.
fn cluster_policy(tier: ClusterTier, number: usize, rules: usize) -> Object {
    let rule = |place: usize| {
        let port = 1 + (number * 25 + place) as u16;
        let action = [RuleAction::Accept, RuleAction::Deny, RuleAction::Pass][place % 3];
        let peers = Peers::AnyOf(vec![Peer::PodsInNamespaces {
            namespaces: Selector::default(),
            pods: selector(&[("app", format!("app-{}", place % 5))]),
        }]);
        let matches = Rule { peers, ports: PolicyPorts::AnyOf(vec![tcp(port, port)]) };
        ClusterRule { name: None, action, matches, is_understood: true }
    };
    let all: Vec<ClusterRule> = (0..rules).map(rule).collect();
    Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
        name: format!("{tier}-{number}").to_lowercase(),
        tier,
        priority: number as u16,
        subject: Subject::default(),
        ingress: all.clone(),
        egress: all,
        staging: Staging::InForce,
        notes: Default::default(),
    })
}

/// Against an equivalent first-match list of 1,000 six-tuples.
fn linear(rounds: usize) -> bool {
    let rules = (0..500).map(|n: usize| Rule {
        peers: Peers::AnyOf(vec![
            super::cluster::block(&format!("172.16.{}.0/24", n / 2), &[]),
            super::cluster::block(&format!("172.17.{}.0/24", n / 2), &[]),
        ]),
        ports: PolicyPorts::AnyOf(vec![tcp(1_000 + n as u16, 1_000 + n as u16)]),
    });
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    let policy = policy(0, "p".to_owned(), Selector::default(), Some(rules.collect()), None);
    engine.apply([namespace(0), Object::Pod(pod(0, 0, 0, 0)), policy].map(ObjectChange::Set));
    let lists = penstock_bench::rulesets::acl::render(engine.state(), engine.tables());
    let list = LinearList::new(&lists[0].entries);
    assert!((1_000..1_010).contains(&list.len()), "{} six-tuples", list.len());
    let mut number = numbers();
    let flows: Vec<Flow> = (0..FLOWS)
        .map(|_| {
            let n = number.next().unwrap() % 500;
            let src = std::net::Ipv4Addr::new(172, 16 + (n % 2) as u8, (n / 2) as u8, 9);
            // One in four is denied.
            flow(
                src.into(),
                address(0),
                1_000 + n as u16 + if number.next().unwrap().is_multiple_of(4) { 2 } else { 0 },
            )
        })
        .collect();
    let set = engine.policy_set().clone();
    let rendered = |flows: &[Flow]| -> u64 {
        flows
            .iter()
            .map(|flow| u64::from(lists[0].permits(flow.src.into(), Some((PortProtocol::Tcp, flow.dst_port)))))
            .sum()
    };
    let said = evaluate_all(&set, &flows);
    assert_eq!((said, said), (list.evaluate_all(&flows), rendered(&flows)), "all say the same");
    let [ours, packed, theirs] = race(
        rounds.min(50),
        [&mut || evaluate_all(&set, &flows), &mut || list.evaluate_all(&flows), &mut || rendered(&flows)],
    );
    println!("  (the same list packed into masks for one comparison an entry: {packed:.0} ns, {:.0}x)", packed / ours);
    let times = theirs / ours;
    let figure = format!("{times:.0}x ({ours:.1} : {theirs:.0} ns)");
    row("lookup against the first-match list of 1,000 six-tuples that is rendered", figure, ">= 50x", times >= 50.0)
}

/// Against Mizar's four tables for one direction of one endpoint: 64 policies with a block, an except and a port each.
fn mizar(rounds: usize) -> bool {
    let policies: Vec<(String, String, u16)> = (0..64)
        .map(|n| (format!("172.{}.0.0/16", 16 + n % 16), format!("172.{}.{}.0/24", 16 + n % 16, n), 1_000 + n as u16))
        .collect();
    let objects = policies.iter().enumerate().map(|(n, (cidr, except, port))| {
        let rule = Rule {
            peers: Peers::AnyOf(vec![super::cluster::block(cidr, &[except])]),
            ports: PolicyPorts::AnyOf(vec![tcp(*port, *port)]),
        };
        policy(0, format!("p-{n}"), Selector::default(), Some(vec![rule]), None)
    });
    let set = set([namespace(0), Object::Pod(pod(0, 0, 0, 0))].into_iter().chain(objects));
    let mizar = MizarTables::new(address(0), &policies);
    let mut number = numbers();
    let flows: Vec<Flow> = (0..FLOWS)
        .map(|_| {
            let n = number.next().unwrap() % 64;
            let src = std::net::Ipv4Addr::new(172, 16 + (n % 16) as u8, (number.next().unwrap() % 64) as u8, 9);
            flow(src.into(), address(0), 1_000 + n as u16)
        })
        .collect();
    // Policies share blocks here. In Mizar's form an except of one policy also applies to the other policies of the
    // longest prefix, so it denies more.
    let (ours, theirs) = (evaluate_all(&set, &flows), mizar.evaluate_all(&flows));
    assert!(ours >= theirs && theirs > 0, "{ours} and {theirs} allowed");
    let [ours, theirs] = race(rounds, [&mut || evaluate_all(&set, &flows), &mut || mizar.evaluate_all(&flows)]);
    let times = theirs / ours;
    let figure = format!("{times:.1}x ({ours:.1} : {theirs:.1} ns)");
    row("lookup against Mizar's four tables, 64 policies", figure, ">= 2x", times >= 2.0)
}

fn ratio(measure: &str, many: f64, one: f64, bound: f64) -> bool {
    let ratio = many / one;
    row(measure, format!("{ratio:.2} ({many:.1} : {one:.1} ns)"), &format!("<= {bound}"), ratio <= bound)
}

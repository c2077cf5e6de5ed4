//! Policies that are learnt from flows allow these flows, and of the rest no more than they state.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::{Direction, DirectionVerdict};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::learn::*;
use penstock_policy::model::*;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::agreement::without_conflict;
use super::build::{destination, key, namespace, node, pod, policy, rule};
use super::naive::ClusterObjects;
use super::random::{ADDRESSES, OTHERS, history};

/// Cluster addresses of Services, and addresses outside.
const MORE: [&str; 10] = [
    "10.96.0.1",
    "fd96::1",
    "203.0.113.1",
    "203.0.113.2",
    "203.0.113.7",
    "203.0.113.130",
    "198.51.100.1",
    "2001:db8::1",
    "2001:db8::2",
    "2001:db8::ff",
];
const PORTS: [u16; 5] = [53, 80, 81, 255, 40000];
const PROTOCOLS: [Protocol; 4] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP, Protocol::ICMP];

fn engine(objects: impl IntoIterator<Item = Object>) -> Engine {
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    engine.apply(objects.into_iter().map(ObjectChange::Set));
    engine
}

pub(super) fn seen(flow: Flow) -> ObservedFlow {
    let end = |address: penstock_dataplane::packet::Address, port| ObservedEnd {
        address: Some(address.into()),
        port,
        pod: None,
    };
    ObservedFlow {
        from: end(flow.src, flow.src_port),
        to: end(flow.dst, flow.dst_port),
        protocol: flow.protocol,
        opening: Opening::Seen,
        outcome: Outcome::Passed,
        seen: None,
    }
}

pub(super) fn flow(src: &str, dst: &str, to: &str) -> Flow {
    let (protocol, dst_port) = destination(to);
    let address = |text: &str| text.parse::<IpAddr>().unwrap().into();
    Flow { src: address(src), dst: address(dst), protocol, src_port: 40000, dst_port }
}

fn with(objects: &[Object], policies: &[LearnedPolicy]) -> Engine {
    let new = policies.iter().map(|learned| Object::NetworkPolicy(learned.policy.clone()));
    engine(objects.iter().cloned().chain(new))
}

/// The policies learnt from flows.
pub(super) struct Learnt {
    before: Engine,
    after: Engine,
    resolution: Resolution,
    policies: Vec<LearnedPolicy>,
}

pub(super) fn learn(objects: &[Object], flows: &[ObservedFlow], settings: &LearnSettings) -> Learnt {
    let before = engine(objects.iter().cloned());
    let resolution = resolve(before.state(), flows, settings);
    let workloads = Workloads::new(before.state(), settings);
    let policies = policies(before.state(), &workloads, &resolution.learnable, settings);
    Learnt { after: with(objects, &policies), before, resolution, policies }
}

impl Learnt {
    pub(super) fn reasons(&self) -> Vec<(NotLearnt, u64)> {
        self.resolution.not_learnt.iter().map(|(reason, unusable)| (reason.clone(), unusable.count)).collect()
    }

    fn policy(&self, name: &str) -> &NetworkPolicy {
        let found = self.policies.iter().find(|learned| learned.policy.key == key(name));
        &found.unwrap_or_else(|| panic!("{name}: {:?}", self.names())).policy
    }

    fn names(&self) -> Vec<String> {
        self.policies.iter().map(|learned| learned.policy.key.to_string()).collect()
    }

    pub(super) fn allows(&self, src: &str, dst: &str, to: &str) -> bool {
        self.after.evaluate(&flow(src, dst, to)).is_allowed()
    }
}

/// A separate judgement of what may be allowed: from the objects and the flows, without the module's types.
struct Oracle<'a> {
    objects: &'a ClusterObjects,
    /// All flows that were learnt, as policy judges them.
    judged: Vec<Flow>,
    own: BTreeSet<IpAddr>,
    widening: u128,
    reasons: BTreeSet<&'static str>,
}

impl Oracle<'_> {
    fn alike(&self, a: IpAddr, b: IpAddr) -> bool {
        match (self.objects.pod_at(a), self.objects.pod_at(b)) {
            (Some(a), Some(b)) => a.key.namespace == b.key.namespace && stable(a) == stable(b),
            _ => false,
        }
    }

    /// Whether the pods like the one at an address are an end of a learnt flow, and so have a policy.
    fn has_policy(&self, address: IpAddr) -> bool {
        self.judged.iter().any(|flow| self.alike(flow.src.into(), address) || self.alike(flow.dst.into(), address))
    }

    fn names(&self, address: IpAddr, protocol: Protocol, number: u16) -> BTreeSet<String> {
        let is_it = |port: &&NamedPort| {
            let protocol_of = penstock_dataplane::policy::PortProtocol::from(port.protocol).number();
            protocol_of == protocol && port.number == number
        };
        let pod = self.objects.pod_at(address);
        pod.into_iter().flat_map(|pod| &pod.ports).filter(is_it).map(|port| port.name.clone()).collect()
    }

    /// Whether one flow's destination port follows from another's.
    fn same_port(&mut self, known: &Flow, asked: &Flow) -> bool {
        let mut wanted = vec![(known.protocol, known.dst_port, None)];
        if known.protocol == Protocol::UDP && known.dst_port == 53 {
            wanted.push((Protocol::TCP, 53, Some("DNS over TCP")));
        }
        wanted.into_iter().any(|(protocol, number, why)| {
            let names = self.names(known.dst.into(), protocol, number);
            let by_name = || !names.is_disjoint(&self.names(asked.dst.into(), protocol, asked.dst_port));
            let is_equal = asked.dst_port == number;
            let matches = protocol == asked.protocol && (is_equal || by_name());
            if matches {
                self.reasons.extend(why.or((!is_equal).then_some("name")));
            }
            matches
        })
    }

    /// The addresses outside that flows of pods like this had as their other end, on this port.
    fn outside(&mut self, direction: Direction, own: IpAddr, asked: &Flow) -> Vec<IpAddr> {
        let known: Vec<Flow> = self.judged.clone();
        let mut found: BTreeSet<IpAddr> = BTreeSet::new();
        for flow in known {
            let (a, b) = ends(direction, &flow);
            if self.alike(a, own) && self.objects.pod_at(b).is_none() && self.same_port(&flow, asked) {
                found.insert(b);
            }
        }
        found.into_iter().collect()
    }

    /// Whether some block around an address holds at least one that was seen, few others, and none of the cluster.
    fn is_widened(&self, address: IpAddr, seen: &[IpAddr]) -> bool {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        (0..=longest).any(|length| {
            let net = IpNet::new(address, length).unwrap().trunc();
            let inside = seen.iter().filter(|seen| net.contains(*seen)).count() as u128;
            let holds = 1u128.checked_shl(u32::from(longest - length)).unwrap_or(u128::MAX);
            inside > 0 && holds - inside <= self.widening && !self.own.iter().any(|own| net.contains(own))
        })
    }

    fn may(&mut self, direction: Direction, asked: &Flow) -> bool {
        let (own, peer) = ends(direction, asked);
        let known: Vec<Flow> = self.judged.clone();
        let by_pods = known.iter().any(|flow| {
            let (a, b) = ends(direction, flow);
            self.alike(a, own) && (self.alike(b, peer) || b == peer) && self.same_port(flow, asked)
        });
        if by_pods {
            self.reasons.insert("seen or alike");
            return true;
        }
        let outside = self.outside(direction, own, asked);
        let is_widened = !self.own.contains(&peer) && self.is_widened(peer, &outside);
        self.reasons.extend(is_widened.then_some("block"));
        is_widened
    }
}

/// The labels of a pod that identify its workload.
fn stable(pod: &Pod) -> Labels {
    let stable = pod.labels.iter().filter(|(key, _)| *key != "pod-template-hash");
    stable.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn ends(direction: Direction, flow: &Flow) -> (IpAddr, IpAddr) {
    match direction {
        Direction::Egress => (flow.src.into(), flow.dst.into()),
        Direction::Ingress => (flow.dst.into(), flow.src.into()),
    }
}

pub(super) fn service(backends: &[&str]) -> Vec<Object> {
    let mut objects = vec![Object::Service(Service {
        key: key("a/svc"),
        addresses: vec!["10.96.0.1".parse().unwrap(), "fd96::1".parse().unwrap()],
        ports: vec![ServicePort {
            name: String::new(),
            protocol: PortProtocol::Tcp,
            number: 80,
            target: TargetPort::Number(81),
            node_port: None,
        }],
        external: Vec::new(),
        local_only: false,
        selector: None,
    })];
    for (name, is_v4) in [("a/four", true), ("a/six", false)] {
        let of_family = backends.iter().map(|at| at.parse::<IpAddr>().unwrap()).filter(|at| at.is_ipv4() == is_v4);
        let endpoint = |address| ServiceEndpoint {
            address,
            ready: true,
            serving: true,
            terminating: false,
            node: None,
            node_hints: Vec::new(),
            zone_hints: Vec::new(),
        };
        objects.push(Object::EndpointSlice(EndpointSlice {
            key: key(name),
            service: Some("svc".to_owned()),
            ports: vec![EndpointPort { name: String::new(), protocol: PortProtocol::Tcp, number: 81 }],
            endpoints: of_family.map(endpoint).collect(),
        }));
    }
    objects
}

/// A pod for each of the pods' addresses: few labels and ports, so that workloads and names of ports are shared.
fn some_pods() -> impl Strategy<Value = Vec<Pod>> {
    let labels = select(vec!["", "k=x", "k=y", "k=x l=x", "l=x pod-template-hash=1", "l=x pod-template-hash=2"]);
    let ports = select(vec![
        &[][..],
        &["http:tcp/80"],
        &["http:tcp/81", "dns:udp/53"],
        &["http:tcp/80", "dns:udp/53", "dns-tcp:tcp/53"],
        &["http:tcp/80", "web:tcp/80", "dns:udp/255"],
    ]);
    let one = (select(vec!["a", "b"]), labels, ports, select(vec!["n1", "n2"]), prop::bool::weighted(0.1));
    prop::collection::vec(one, ADDRESSES.len()).prop_map(|all| {
        let pods = all.into_iter().zip(ADDRESSES).enumerate();
        let pods = pods.map(|(number, ((namespace, labels, ports, node, host_network), address))| Pod {
            node: Some(node.to_owned()),
            host_network,
            ..pod(&format!("{namespace}/p{number}"), labels, &[address], ports)
        });
        pods.collect()
    })
}

/// These pods with their namespaces and nodes, and a Service.
fn cluster(pods: Vec<Pod>, backends: &[&str]) -> (ClusterObjects, Vec<Object>) {
    let mut objects = ClusterObjects::default();
    let nodes = [node("n1", &["192.168.0.1", "fd00:ffff::1"]), node("n2", &["192.168.0.2"])];
    let others = [namespace("a", ""), namespace("b", "")].into_iter().chain(nodes);
    for object in others.chain(pods.into_iter().map(Object::Pod)) {
        objects.apply(&ObjectChange::Set(object));
    }
    let all = objects.objects().into_iter().chain(service(backends)).collect();
    (objects, all)
}

fn addresses() -> Vec<&'static str> {
    ADDRESSES.iter().chain(&OTHERS).chain(&MORE).copied().collect()
}

fn some_flow() -> impl Strategy<Value = Flow> {
    let end = || prop_oneof![4 => select(ADDRESSES.to_vec()), 2 => select(MORE.to_vec()), 1 => select(OTHERS.to_vec())];
    let pair = (end(), end()).prop_filter("one family", |(a, b)| a.contains(':') == b.contains(':'));
    (pair, select(PROTOCOLS.to_vec()), select(PORTS.to_vec())).prop_map(|((src, dst), protocol, port)| {
        let address = |text: &str| text.parse::<IpAddr>().unwrap().into();
        let dst_port = if protocol.has_ports() { port } else { 0 };
        Flow { src: address(src), dst: address(dst), protocol, src_port: 40000, dst_port }
    })
}

/// Flows between one pod and some addresses outside on one port: these become blocks.
fn some_flows_outside() -> impl Strategy<Value = Vec<Flow>> {
    let outside = subsequence(MORE[2..7].to_vec(), 0..4);
    (select(ADDRESSES[..8].to_vec()), outside, any::<bool>(), select(vec!["tcp/80", "udp/53"])).prop_map(
        |(own, outside, is_egress, port)| {
            let one = |other| if is_egress { flow(own, other, port) } else { flow(other, own, port) };
            outside.into_iter().map(one).collect()
        },
    )
}

/// Coverage of the random cases: why flows that were not seen were allowed, and how many were denied.
fn check(mut runner: TestRunner) -> BTreeMap<&'static str, u64> {
    let covered = RefCell::new(BTreeMap::new());
    let backends = prop::collection::vec(select(ADDRESSES.iter().chain(&OTHERS).copied().collect::<Vec<_>>()), 0..4);
    let flows = prop::collection::vec(some_flow(), 0..40);
    let widening = select(vec![0u64, 2, 254, u64::MAX]);
    let outcome =
        runner.run(&(some_pods(), backends, (flows, some_flows_outside()), widening, any::<bool>()), |case| {
            let (pods, backends, (flows, outside), widening, service_addresses) = case;
            let (objects, all) = cluster(pods, &backends);
            let observed: Vec<ObservedFlow> = flows.into_iter().chain(outside).map(seen).collect();
            let settings = LearnSettings { widening, service_addresses, ..LearnSettings::default() };
            let learnt = learn(&all, &observed, &settings);
            let found = denied(&learnt.after, &learnt.resolution.learnable);
            prop_assert!(found.is_empty(), "{:?}", found);
            let mut own: BTreeSet<IpAddr> = learnt.before.state().addresses().map(|(address, _)| address).collect();
            own.extend(["10.96.0.1", "fd96::1"].map(|address| address.parse::<IpAddr>().unwrap()));
            let judged = learnt.resolution.learnable.iter().flat_map(LearnableFlow::judged).copied().collect();
            let widening = u128::from(widening);
            let mut oracle = Oracle { objects: &objects, judged, own, widening, reasons: BTreeSet::new() };
            let mut count = 0;
            for asked in questions() {
                let verdict = learnt.after.evaluate(&asked);
                for (direction, side) in [(Direction::Egress, verdict.egress), (Direction::Ingress, verdict.ingress)] {
                    let own = ends(direction, &asked).0;
                    match side {
                        DirectionVerdict::Allowed(_) => {
                            prop_assert!(
                                oracle.may(direction, &asked),
                                "{:?} of {:?} in {:#?}",
                                direction,
                                asked,
                                learnt.policies
                            );
                        }
                        DirectionVerdict::Open => {
                            prop_assert!(!oracle.has_policy(own), "{:?} of {:?} is open", direction, asked);
                        }
                        DirectionVerdict::Denied => count += 1,
                        _ => {}
                    }
                }
            }
            let mut covered = covered.borrow_mut();
            *covered.entry("denied").or_insert(0u64) += count;
            oracle.reasons.iter().for_each(|reason| *covered.entry(reason).or_insert(0) += 1);
            Ok(())
        });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    covered.into_inner()
}

/// Every pair of addresses of one family, on every port of TCP and UDP.
fn questions() -> impl Iterator<Item = Flow> {
    let all: Vec<IpAddr> = addresses().into_iter().map(|address| address.parse().unwrap()).collect();
    let pairs: Vec<(IpAddr, IpAddr)> = all.iter().flat_map(|src| all.iter().map(move |dst| (*src, *dst))).collect();
    let pairs = pairs.into_iter().filter(|(src, dst)| src.is_ipv4() == dst.is_ipv4() && src != dst);
    pairs.flat_map(|(src, dst)| {
        let ports = PORTS.into_iter().flat_map(|port| [(Protocol::TCP, port), (Protocol::UDP, port)]);
        ports.map(move |(protocol, dst_port)| Flow {
            src: src.into(),
            dst: dst.into(),
            protocol,
            src_port: 50000,
            dst_port,
        })
    })
}

#[test]
fn learnt_policies_allow_learnt_flows_and_what_they_state() {
    check(TestRunner::new(Config { cases: 100, failure_persistence: None, ..Config::default() }));
}

/// Uses the same clusters in every run, so that their coverage is the same.
#[test]
fn random_flows_cover_every_way_of_widening() {
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let covered = check(TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)));
    for reason in ["denied", "seen or alike", "block", "DNS over TCP", "name"] {
        assert!(covered.get(reason).is_some_and(|count| *count > 0), "{reason}: {covered:?}");
    }
}

/// A web server in front of an API and a database; names of ports where all pods have them.
pub(super) fn shop() -> Vec<Object> {
    let mut api_2 = pod("shop/api-2", "app=api pod-template-hash=b", &["10.0.1.2"], &["http:tcp/8001"]);
    api_2.node = Some("n2".to_owned());
    let pods = [
        pod("shop/api-1", "app=api pod-template-hash=a", &["10.0.0.1"], &["http:tcp/8000", "admin:tcp/9000"]),
        api_2,
        pod("shop/db", "app=db", &["10.0.0.2"], &[]),
        pod("shop/db-backup", "app=db role=backup", &["10.0.0.3"], &[]),
        pod("web/front", "app=front", &["10.0.0.4", "fd00::4"], &["http:tcp/80"]),
        pod("dns/server", "k8s-app=dns", &["10.0.0.5"], &["dns:udp/53", "dns-tcp:tcp/53"]),
    ];
    let others = [
        namespace("shop", ""),
        namespace("web", ""),
        namespace("dns", ""),
        node("n1", &["192.168.0.1"]),
        node("n2", &["192.168.0.2"]),
    ];
    others.into_iter().chain(pods.map(Object::Pod)).collect()
}

fn selector(text: &str) -> Selector {
    super::build::selector(text)
}

#[test]
fn selectors_are_the_stable_labels_and_tell_workloads_apart() {
    let flows = [("10.0.0.4", "10.0.0.1", "tcp/8000"), ("10.0.0.1", "10.0.0.2", "tcp/5432")];
    let learnt = learn(&shop(), &flows.map(|(a, b, to)| seen(flow(a, b, to))), &LearnSettings::default());
    assert_eq!(learnt.names(), ["shop/learned-api", "shop/learned-db", "web/learned-front"]);
    assert_eq!(learnt.policy("shop/learned-api").pod_selector, selector("app=api"));
    assert_eq!(learnt.policy("shop/learned-db").pod_selector, selector("app=db !role"));
    assert!(learnt.allows("10.0.1.2", "10.0.0.2", "tcp/5432"), "the other pod of the workload");
    assert!(!learnt.allows("10.0.0.4", "10.0.0.2", "tcp/5432"), "who was not seen");
    assert!(!learnt.allows("10.0.0.1", "10.0.0.4", "tcp/80"), "the other direction");
    assert!(learnt.allows("10.0.0.5", "10.0.0.3", "tcp/5432"), "no flow of the backup was seen, so it has no policy");
    let settings = LearnSettings { unstable_labels: vec!["ro*".to_owned()], ..LearnSettings::default() };
    let learnt = learn(&shop(), &flows.map(|(a, b, to)| seen(flow(a, b, to))), &settings);
    assert_eq!(learnt.policy("shop/learned-db").pod_selector, selector("app=db"));
    assert_eq!(learnt.policy("shop/learned-api-a").pod_selector, selector("app=api pod-template-hash=a"));
}

#[test]
fn ports_are_named_where_all_pods_name_them() {
    let flows = [("10.0.0.4", "10.0.0.1", "tcp/8000"), ("10.0.0.4", "10.0.0.1", "tcp/9000")];
    let learnt = learn(&shop(), &flows.map(|(a, b, to)| seen(flow(a, b, to))), &LearnSettings::default());
    let expected = rule(&["namespaces kubernetes.io/metadata.name=web / pods app=front"], &["tcp/9000", "tcp/http"]);
    assert_eq!(learnt.policy("shop/learned-api").ingress, Some(vec![expected]));
    let expected = rule(&["namespaces kubernetes.io/metadata.name=shop / pods app=api"], &["tcp/9000", "tcp/http"]);
    assert_eq!(learnt.policy("web/learned-front").egress, Some(vec![expected]));
    assert!(learnt.allows("10.0.0.4", "10.0.1.2", "tcp/8001"), "what the other pod calls by this name");
}

#[test]
fn dns_over_udp_allows_dns_over_tcp() {
    let learnt = learn(&shop(), &[seen(flow("10.0.0.4", "10.0.0.5", "udp/53"))], &LearnSettings::default());
    assert!(learnt.allows("10.0.0.4", "10.0.0.5", "tcp/53"));
    assert!(!learnt.allows("10.0.0.4", "10.0.0.5", "tcp/54"));
    let egress = &learnt.policies.iter().find(|learned| learned.policy.key.namespace == "web").unwrap().egress;
    let added: Vec<bool> = egress[0].ports.iter().map(|(port, _)| port.is_added).collect();
    assert_eq!(added, [true, false], "{egress:?}");
}

#[test]
fn a_flow_to_a_service_allows_its_backends_and_its_address() {
    let mut objects = shop();
    objects.extend(service(&["10.0.0.1", "10.0.1.2", "203.0.113.9"]));
    let observed = [seen(flow("10.0.0.4", "10.96.0.1", "tcp/80"))];
    let learnt = learn(&objects, &observed, &LearnSettings::default());
    for (to, port, is_allowed) in [
        ("10.0.0.1", "tcp/81", true),
        ("10.0.1.2", "tcp/81", true),
        ("203.0.113.9", "tcp/81", true),
        ("203.0.113.8", "tcp/81", false),
        ("10.96.0.1", "tcp/80", true),
        ("10.96.0.1", "tcp/81", false),
        ("10.0.0.1", "tcp/80", false),
    ] {
        assert_eq!(learnt.allows("10.0.0.4", to, port), is_allowed, "{to} {port}");
    }
    let connections =
        learnt.policies.iter().flat_map(|learned| &learned.ingress).map(|rule| rule.peers[0].1.connections);
    assert_eq!(connections.collect::<Vec<_>>(), [1], "two backends of one workload are one connection");
    let settings = LearnSettings { service_addresses: false, ..LearnSettings::default() };
    let learnt = learn(&objects, &observed, &settings);
    assert!(learnt.allows("10.0.0.4", "10.0.0.1", "tcp/81") && !learnt.allows("10.0.0.4", "10.96.0.1", "tcp/80"));
    let learnt = learn(&objects, &[seen(flow("10.0.0.4", "10.96.0.1", "tcp/82"))], &settings);
    assert_eq!(learnt.reasons(), [(NotLearnt::NoServicePort(key("a/svc")), 1)]);
    let mut objects = shop();
    objects.extend(service(&[]));
    let learnt = learn(&objects, &observed, &settings);
    assert_eq!(learnt.reasons(), [(NotLearnt::NoBackend(key("a/svc")), 1)]);
}

#[test]
fn nodes_are_exempt_at_home_and_single_addresses_elsewhere() {
    let flows = [
        seen(flow("192.168.0.1", "10.0.0.1", "tcp/8000")),
        seen(flow("10.0.0.1", "192.168.0.1", "tcp/10250")),
        seen(flow("10.0.0.1", "10.0.0.1", "tcp/8000")),
        seen(flow("192.168.0.2", "10.0.0.1", "tcp/8000")),
    ];
    let learnt = learn(&shop(), &flows, &LearnSettings::default());
    assert_eq!(learnt.reasons(), [(NotLearnt::Exempt, 3)]);
    assert_eq!(learnt.policy("shop/learned-api").ingress, Some(vec![rule(&["192.168.0.2/32"], &["tcp/http"])]));
    assert!(learnt.allows("192.168.0.1", "10.0.0.1", "tcp/8000"), "probes go on");
}

#[test]
fn flows_that_cannot_be_learnt_are_counted_by_reason() {
    let good = seen(flow("10.0.0.4", "10.0.0.1", "tcp/8000"));
    let unknown = key("shop/gone");
    let reply = Flow { src_port: 53, dst_port: 40001, ..flow("10.0.0.5", "10.0.0.4", "udp/1") };
    let cases: Vec<(ObservedFlow, NotLearnt)> = vec![
        (ObservedFlow { outcome: Outcome::Denied, ..good.clone() }, NotLearnt::Denied),
        (ObservedFlow { outcome: Outcome::Unanswered, ..good.clone() }, NotLearnt::Unanswered),
        (ObservedFlow { opening: Opening::Missing, ..good.clone() }, NotLearnt::NoOpening),
        (ObservedFlow { opening: Opening::Assumed, ..seen(reply) }, NotLearnt::Reply),
        (
            ObservedFlow { from: ObservedEnd { pod: Some(unknown.clone()), ..good.from.clone() }, ..good.clone() },
            NotLearnt::UnknownPod(unknown.to_string()),
        ),
        (seen(flow("10.0.0.4", "10.0.0.77", "tcp/80")), NotLearnt::PodNetwork("10.0.0.77".parse().unwrap())),
        (seen(flow("192.0.2.1", "192.0.2.2", "tcp/80")), NotLearnt::NoPod),
        (ObservedFlow { from: ObservedEnd::default(), ..good.clone() }, NotLearnt::NoAddress),
        (seen(flow("10.0.0.4", "224.0.0.251", "udp/5353")), NotLearnt::NotUnicast),
        (seen(flow("10.0.0.4", "10.0.0.1", "icmp")), NotLearnt::Protocol(Protocol::ICMP)),
        (seen(flow("10.0.0.4", "10.0.0.1", "tcp/0")), NotLearnt::PortZero),
        (seen(flow("10.0.0.4", "10.0.0.5", "tcp/80")), NotLearnt::OtherNamespace),
    ];
    let pod_networks = vec!["10.0.0.0/24".parse().unwrap()];
    let settings = LearnSettings { namespace: Some("shop".to_owned()), pod_networks, ..LearnSettings::default() };
    for (bad, reason) in cases {
        let of_shop = reason != NotLearnt::NotUnicast && reason != NotLearnt::Reply;
        let settings = if of_shop { settings.clone() } else { LearnSettings::default() };
        let learnt = learn(&shop(), &[bad, good.clone()], &settings);
        assert_eq!(learnt.reasons(), [(reason.clone(), 1)]);
        assert_eq!(learnt.resolution.learnable.len(), 1, "{reason}");
        assert!(learnt.allows("10.0.0.4", "10.0.0.1", "tcp/8000"), "{reason}");
    }
}

#[test]
fn only_ephemeral_ports_of_clients_are_taken_for_replies() {
    let assumed = |src: (&str, u16), dst: (&str, u16)| {
        let flow = Flow { src_port: src.1, dst_port: dst.1, ..flow(src.0, dst.0, "udp/1") };
        ObservedFlow { opening: Opening::Assumed, ..seen(flow) }
    };
    let query = assumed(("10.0.0.4", 40000), ("10.0.0.1", 5000));
    for (flow, is_reply) in [
        (assumed(("10.0.0.5", 53), ("10.0.0.4", 40000)), true),
        (assumed(("8.8.8.8", 53), ("10.0.0.4", 40000)), true),
        (assumed(("10.0.0.1", 5000), ("10.0.0.4", 40000)), true),
        (assumed(("10.0.0.1", 5001), ("10.0.0.4", 40000)), false),
        (assumed(("10.0.0.4", 123), ("10.0.0.1", 123)), false),
        (assumed(("10.0.0.4", 40000), ("10.0.0.5", 53)), false),
    ] {
        let learnt = learn(&shop(), &[flow.clone(), query.clone()], &LearnSettings::default());
        assert_eq!(learnt.reasons().contains(&(NotLearnt::Reply, 1)), is_reply, "{flow:?}");
    }
}

#[test]
fn a_pod_is_found_by_name_if_its_address_is_anothers_now() {
    let mut observed = seen(flow("10.0.0.4", "10.0.0.2", "tcp/8000"));
    observed.to.pod = Some(key("shop/api-1"));
    let learnt = learn(&shop(), &[observed], &LearnSettings::default());
    assert_eq!(learnt.names(), ["shop/learned-api", "web/learned-front"]);
}

#[test]
fn a_learnt_policy_replaces_no_other() {
    let mut objects = shop();
    objects.push(policy("shop/learned-api", "app=db", Some(Vec::new()), None));
    let learnt = learn(&objects, &[seen(flow("10.0.0.4", "10.0.0.1", "tcp/8000"))], &LearnSettings::default());
    assert_eq!(learnt.names(), ["shop/learned-api-2", "web/learned-front"]);
}

#[test]
fn what_is_held_out_depends_on_the_seed_and_not_on_the_order() {
    let flows: Vec<ObservedFlow> =
        (1..1000u16).map(|port| seen(Flow { src_port: port, ..flow("10.0.0.4", "10.0.0.1", "tcp/8000") })).collect();
    let learnt = learn(&shop(), &flows, &LearnSettings::default());
    let mut all = learnt.resolution.learnable;
    let ports = |flows: Vec<&LearnableFlow>| -> BTreeSet<u16> { flows.iter().map(|flow| flow.flow.src_port).collect() };
    let held_out = ports(split(&all, 0.2, 1).1);
    assert!((100..300).contains(&held_out.len()), "{}", held_out.len());
    let other = ports(split(&all, 0.2, 2).1);
    all.reverse();
    assert_eq!(ports(split(&all, 0.2, 1).1), held_out);
    assert_ne!(other, held_out);
    let (learnt, rest) = split(&all, 0.2, 1);
    assert_eq!(learnt.len() + rest.len(), all.len());
}

#[test]
fn what_becomes_closed_is_counted_by_pairs_and_ports() {
    let learnt = learn(&shop(), &[seen(flow("10.0.0.4", "10.0.0.1", "tcp/8000"))], &LearnSettings::default());
    let found = closed(&learnt.before, &learnt.after, &learnt.resolution.learnable);
    // api-1 has 2 ports, api-2, front and server 1, 1 and 2; the databases none. Five pods can reach each.
    assert_eq!((found.pairs, found.ways), (4 * 5, (2 + 1 + 1 + 2) * 5));
    assert_eq!((found.pairs_before, found.ways_before), (found.pairs, found.ways));
    // The front end reaches both APIs on http; the pods of which nothing was seen, each other: the databases the server.
    assert_eq!((found.pairs_after, found.ways_after), (2 + 2, 2 + 2 * 2));
}

#[test]
fn tightening_denies_no_flow_that_was_seen() {
    let mut objects = shop();
    let ingress = vec![
        rule(&["namespaces kubernetes.io/metadata.name=web", "pods app=db"], &["tcp/http", "udp/53"]),
        rule(&["namespaces kubernetes.io/metadata.name=dns"], &[]),
        rule(&[], &["tcp/9000"]),
    ];
    objects.push(policy("shop/api", "app=api", Some(ingress), None));
    objects.push(policy("shop/db", "app=db", Some(vec![rule(&[], &[])]), None));
    let flows = [seen(flow("10.0.0.4", "10.0.0.1", "tcp/8000")), seen(flow("203.0.113.1", "10.0.0.1", "tcp/9000"))];
    let learnt = learn(&objects, &flows, &LearnSettings::default());
    let usage = usage(learnt.before.state(), &learnt.resolution.learnable);
    let narrow = |name: &str| {
        let (policy, _) = learnt.before.state().policies().find(|(policy, _)| policy.key == key(name)).unwrap();
        narrowed(policy, &usage[&key(name)])
    };
    assert_eq!(narrow("shop/db"), None, "no flow concerns it");
    let found = narrow("shop/api").unwrap();
    let expected = vec![rule(&["namespaces kubernetes.io/metadata.name=web"], &["tcp/http"]), rule(&[], &["tcp/9000"])];
    assert_eq!((found.ingress.clone(), found.egress.clone()), (Some(expected), None));
    objects.push(Object::NetworkPolicy(found));
    let after = engine(objects);
    assert_eq!(denied(&after, &learnt.resolution.learnable), vec![]);
    assert!(!after.evaluate(&flow("10.0.0.5", "10.0.0.1", "tcp/8000")).is_allowed());
}

/// On random clusters with random policies, tightening denies no flow that was allowed.
#[test]
fn tightening_random_policies_denies_no_flow_that_was_allowed() {
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    let flows = prop::collection::vec(some_flow(), 1..25);
    let outcome = runner.run(&(history(), flows), |((start, _), flows)| {
        let mut objects = ClusterObjects::default();
        for object in start {
            let change = without_conflict(&objects, ObjectChange::Set(object));
            objects.apply(&change);
        }
        let all: Vec<Object> = objects.objects();
        let before = engine(all.clone());
        let observed: Vec<ObservedFlow> = flows.into_iter().map(seen).collect();
        let learnable = resolve(before.state(), &observed, &LearnSettings::default()).learnable;
        let usage = usage(before.state(), &learnable);
        let narrower = before.state().policies().filter_map(|(policy, _)| narrowed(policy, &usage[&policy.key]));
        let after = engine(all.into_iter().chain(narrower.map(Object::NetworkPolicy)));
        for flow in learnable.iter().flat_map(LearnableFlow::judged) {
            let (was, is) = (before.evaluate(flow).is_allowed(), after.evaluate(flow).is_allowed());
            prop_assert!(was <= is, "{:?}", flow);
        }
        for asked in questions() {
            let (was, is) = (before.evaluate(&asked).is_allowed(), after.evaluate(&asked).is_allowed());
            prop_assert!(is <= was, "tightening allows {:?}", asked);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

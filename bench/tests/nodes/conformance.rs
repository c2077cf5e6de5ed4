//! The cases of a NetworkPolicy conformance tool, with its expectations, as packets between pods of two nodes. The data
//! is not part of the project: `../shared/conformance/` beside the repository, or the directory in
//! `PENSTOCK_CONFORMANCE`. Without it the tests print a message and skip.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, EchoService, Probe, ProbeOutcome, Protocol, RetryPolicy, Site};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::fixture::{Fixture, Wiring};

#[derive(Deserialize)]
pub(crate) struct Suite {
    pub(crate) cases: Vec<SuiteCase>,
}

#[derive(Deserialize)]
pub(crate) struct SuiteCase {
    pub(crate) id: u32,
    description: String,
    tags: BTreeSet<String>,
    pub(crate) steps: Vec<SuiteStep>,
}

#[derive(Deserialize)]
pub(crate) struct SuiteStep {
    pub(crate) state: SuiteState,
    pub(crate) expected: Vec<SuiteExpectation>,
}

#[derive(Deserialize)]
pub(crate) struct SuiteState {
    namespaces: Vec<SuiteNamespace>,
    pods: Vec<SuitePod>,
    policies: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct SuiteNamespace {
    name: String,
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
pub(crate) struct SuitePod {
    namespace: String,
    name: String,
    pub(crate) ip: IpAddr,
    labels: BTreeMap<String, String>,
    ports: Vec<SuitePort>,
}

#[derive(Deserialize)]
struct SuitePort {
    name: String,
    port: u16,
    protocol: String,
}

#[derive(Deserialize)]
pub(crate) struct SuiteExpectation {
    from: String,
    to: String,
    resolved_port: u16,
    protocol: String,
    pub(crate) allowed: bool,
    /// From a pod to itself: the suite lets a policy cut these off, Kubernetes does not.
    #[serde(default, rename = "self")]
    pub(crate) is_self: bool,
}

/// Ports that the suite uses, each over TCP, UDP and SCTP.
pub(crate) const SERVICES: [EchoService; 6] = [
    EchoService::Tcp(80),
    EchoService::Tcp(81),
    EchoService::Udp(80),
    EchoService::Udp(81),
    EchoService::Sctp(80),
    EchoService::Sctp(81),
];
/// One case in so many is run by the short test.
const SHARE: usize = 8;
/// A denied probe is sent this often with this timeout.
const RETRIES: RetryPolicy = RetryPolicy { timeout: Duration::from_millis(150), attempts: 2 };

pub(crate) fn suite() -> Option<Suite> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/conformance");
    let folder = std::env::var_os("PENSTOCK_CONFORMANCE").map_or(beside, PathBuf::from);
    let Ok(file) = File::open(folder.join("cyclonus-cases.json.gz")) else {
        eprintln!("SKIPPED: no conformance data in {}; PENSTOCK_CONFORMANCE names another folder", folder.display());
        return None;
    };
    Some(serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents"))
}

/// Node of a pod, by its index among all pods of the suite.
pub(crate) type Placement = fn(usize) -> usize;

pub(crate) fn by_turns(place: usize) -> usize {
    place % 2
}

fn by_pairs(place: usize) -> usize {
    place / 2 % 2
}

fn node_name(node: usize) -> String {
    format!("node-{node}")
}

/// Node of each pod of the suite.
pub(crate) struct PodPlacement(BTreeMap<String, usize>);

impl PodPlacement {
    pub(crate) fn new(suite: &Suite, placement: Placement) -> Self {
        let pods: BTreeSet<String> = suite.all_pods().map(SuitePod::full_name).collect();
        Self(pods.into_iter().enumerate().map(|(place, pod)| (pod, placement(place))).collect())
    }
}

impl Suite {
    pub(crate) fn all_pods(&self) -> impl Iterator<Item = &SuitePod> {
        self.cases.iter().flat_map(|case| &case.steps).flat_map(|step| &step.state.pods)
    }
}

impl SuitePod {
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn manifest(&self, places: &PodPlacement) -> Value {
        let port = |port: &SuitePort| json!({"name": port.name, "containerPort": port.port, "protocol": port.protocol});
        let ports: Vec<Value> = self.ports.iter().map(port).collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
            "spec": {
                "nodeName": node_name(places.0[&self.full_name()]),
                "containers": [{"name": "main", "image": "example.invalid/test", "ports": ports}],
            },
            "status": {"phase": "Running", "podIPs": [{"ip": self.ip}]},
        })
    }
}

impl SuiteState {
    pub(crate) fn manifests(&self, places: &PodPlacement) -> String {
        let namespace = |it: &SuiteNamespace| {
            let mut labels = it.labels.clone();
            labels.insert("kubernetes.io/metadata.name".to_owned(), it.name.clone());
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": it.name, "labels": labels}})
        };
        let policy = |it: &Value| {
            let mut policy = it.clone();
            (policy["apiVersion"], policy["kind"]) = (json!("networking.k8s.io/v1"), json!("NetworkPolicy"));
            policy
        };
        let pods = self.pods.iter().map(|pod| pod.manifest(places));
        let policies = self.policies.iter().flatten().map(policy);
        documents(self.namespaces.iter().map(namespace).chain(pods).chain(policies))
    }
}

pub(crate) fn documents(objects: impl Iterator<Item = Value>) -> String {
    objects.map(|object| format!("{object}\n")).collect::<Vec<_>>().join("---\n")
}

fn nodes() -> String {
    let node = |number: usize| {
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name(number)},
            "status": {"addresses": [
                {"type": "InternalIP", "address": format!("172.18.{}.2", number + 1)},
                {"type": "InternalIP", "address": format!("fd00:172:18:{}::2", number + 1)},
            ]},
        })
    };
    documents([0, 1].map(node).into_iter())
}

/// Nodes with all pods of the suite, and daemons without any manifest yet.
struct SuiteRunner {
    fixture: Fixture,
    places: PodPlacement,
    marks: u32,
}

impl SuiteRunner {
    fn new(suite: &Suite, placement: Placement) -> Self {
        let places = PodPlacement::new(suite, placement);
        // Any pod of an address will do: they differ only in their labels.
        let pods: BTreeMap<String, &SuitePod> = suite.all_pods().map(|pod| (pod.full_name(), pod)).collect();
        let namespaces: BTreeSet<&str> = pods.values().map(|pod| pod.namespace.as_str()).collect();
        let namespace = |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let pods = pods.values().map(|pod| pod.manifest(&places));
        let all = nodes() + "---\n" + &documents(namespaces.into_iter().map(namespace).chain(pods));
        let mut wiring = Wiring::routed(true);
        // Pods of one network are on both nodes.
        wiring.layout.prefixes = (32, 128);
        let fixture =
            Fixture::start_with(&all, wiring, &SERVICES, |config| config.sections += "[log]\nlevel = \"debug\"\n");
        Self { fixture, places, marks: 0 }
    }

    /// Applies a state to the cluster and waits until both nodes have adopted it.
    fn set(&mut self, state: &SuiteState) {
        self.fixture.save("all.yaml", &(nodes() + "---\n" + &state.manifests(&self.places)));
        wait_until_adopted(&self.fixture, &mut self.marks);
    }

    /// Sends a probe for each expectation of a step; returns the differences.
    fn check(&self, expected: &[SuiteExpectation], tally: &mut Tally) -> Vec<String> {
        let rows: Vec<&SuiteExpectation> = expected.iter().filter(|row| !row.is_self).collect();
        let probes: Vec<Probe> = rows.iter().map(|row| row.probe(&self.fixture.sites)).collect();
        let outcomes = send(&self.fixture, &probes, |at| rows[at].allowed);
        let mut wrong = Vec::new();
        for (row, outcome) in rows.iter().zip(outcomes) {
            let SuiteExpectation { from, to, allowed, .. } = row;
            let apart = self.places.0[from] != self.places.0[to];
            tally.cells[usize::from(apart)][usize::from(!allowed)] += 1;
            if !row.agrees(outcome) {
                wrong.push(format!("{row}; observed {outcome}"));
            }
        }
        wrong
    }
}

impl SuiteExpectation {
    /// The probe for it between sites with the names of pods.
    pub(crate) fn probe(&self, sites: &[Site]) -> Probe {
        let site = |name: &str| sites.iter().position(|site| site.name == name).expect("each pod is a site");
        let (from, to) = (site(&self.from), site(&self.to));
        let destination = sites[to].address(false).expect("pods have IPv4 addresses");
        let protocol = match self.protocol.as_str() {
            "TCP" => Protocol::Tcp(self.resolved_port),
            "UDP" => Protocol::Udp(self.resolved_port),
            "SCTP" => Protocol::Sctp(self.resolved_port),
            other => panic!("no such protocol: {other}"),
        };
        Probe { from, to, source: None, destination, protocol }
    }

    /// Whether its probe has ended as expected.
    pub(crate) fn agrees(&self, outcome: ProbeOutcome) -> bool {
        outcome == if self.allowed { ProbeOutcome::Reached } else { ProbeOutcome::Silent }
    }
}

impl fmt::Display for SuiteExpectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, protocol, resolved_port, .. } = self;
        let expected = if self.allowed { "allowed" } else { "denied" };
        write!(f, "{from} to {to}, {protocol} {resolved_port}: expected {expected}")
    }
}

/// Waits until every node has adopted what was saved last.
pub(crate) fn wait_until_adopted(fixture: &Fixture, marks: &mut u32) {
    for (node, daemon) in fixture.daemons.iter().enumerate() {
        let deadline = Instant::now() + Duration::from_secs(20);
        // Later saves are read later. If a batch contains both, its log line may be truncated: then save once more.
        loop {
            *marks += 1;
            let mark = format!("mark-{marks}");
            let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": mark}});
            let seen = daemon.log().len();
            fixture.save("mark.yaml", &format!("{object}\n"));
            if daemon.log().wait_for_after(seen, &mark, Duration::from_millis(500)).is_ok() {
                break;
            }
            assert!(Instant::now() < deadline, "node {node} does not follow:\n{}", fixture.logs());
        }
    }
}

/// Sends probes; those that should get an answer and do not are sent again with more patience.
pub(crate) fn send(fixture: &Fixture, probes: &[Probe], is_allowed: impl Fn(usize) -> bool) -> Vec<ProbeOutcome> {
    send_between(&fixture.sites, probes, is_allowed)
}

/// The same between any sites.
pub(crate) fn send_between(sites: &[Site], probes: &[Probe], is_allowed: impl Fn(usize) -> bool) -> Vec<ProbeOutcome> {
    let mut outcomes = probe::run(sites, probes, RETRIES).unwrap();
    // On a busy machine a reply may take longer, which is not a denial.
    let late: Vec<usize> =
        (0..probes.len()).filter(|&at| is_allowed(at) && outcomes[at] == ProbeOutcome::Silent).collect();
    let again: Vec<Probe> = late.iter().map(|&at| probes[at]).collect();
    let patience = RetryPolicy { timeout: Duration::from_secs(1), attempts: 3 };
    for (at, outcome) in late.into_iter().zip(probe::run(sites, &again, patience).unwrap()) {
        outcomes[at] = outcome;
    }
    outcomes
}

/// Number of cells: on one node and on two, allowed and denied.
#[derive(Default)]
struct Tally {
    cells: [[usize; 2]; 2],
}

fn run(suite: &Suite, placement: Placement, is_taken: impl Fn(usize) -> bool) {
    let start = Instant::now();
    let mut bench = SuiteRunner::new(suite, placement);
    let (mut tally, mut wrong, mut cases) = (Tally::default(), Vec::new(), 0);
    for (_, case) in suite.cases.iter().enumerate().filter(|(number, _)| is_taken(*number)) {
        cases += 1;
        for (number, step) in case.steps.iter().enumerate() {
            bench.set(&step.state);
            let place = format!("case {} ({}), step {number}", case.id, case.description);
            let differences = bench.check(&step.expected, &mut tally);
            wrong.extend(differences.into_iter().map(|difference| format!("{place}: {difference}")));
        }
    }
    let [[allowed, denied], [allowed_apart, denied_apart]] = tally.cells;
    println!(
        "{cases} cases of {} in {:.1?}: on one node {allowed} allowed and {denied} denied, on two {allowed_apart} and \
         {denied_apart}",
        suite.cases.len(),
        start.elapsed(),
    );
    assert!(wrong.is_empty(), "{} cells differ:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
    assert!(tally.cells.iter().flatten().all(|&count| count > 100), "{:?}", tally.cells);
}

/// Tags that the selected cases must include.
const MUST_HAVE: [&str; 5] = ["named-port", "ip-block-with-except", "end-port", "action", "pathological"];

#[test]
fn a_sample_of_the_conformance_cases_passes_between_pods_of_two_nodes() {
    let mut seen: BTreeMap<&str, usize> = MUST_HAVE.map(|tag| (tag, 0)).into();
    let Some(suite) = suite() else { return };
    let mut taken = BTreeSet::new();
    for (number, case) in suite.cases.iter().enumerate() {
        // Include the first two cases of each of the most important tags.
        let tags = seen.iter_mut().filter(|(tag, count)| case.tags.contains(**tag) && **count < 2);
        let tags: Vec<_> = tags.collect();
        if !tags.is_empty() || number % SHARE == 0 {
            taken.insert(number);
            tags.into_iter().for_each(|(_, count)| *count += 1);
        }
    }
    assert!(seen.values().all(|&count| count == 2), "{seen:?}");
    run(&suite, by_turns, |number| taken.contains(&number));
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn all_conformance_cases_pass_between_pods_of_two_nodes() {
    let Some(suite) = suite() else { return };
    run(&suite, by_turns, |_| true);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn all_conformance_cases_pass_with_the_other_placement_of_pods() {
    let Some(suite) = suite() else { return };
    run(&suite, by_pairs, |_| true);
}

//! The cases of a NetworkPolicy conformance tool, with its expectations, as packets between pods of two nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use penstock_bench::conformance::{
    Placement, PodPlacement, SERVICES, Suite, SuiteExpectation, SuitePod, SuiteState, by_turns, node_name, send_between,
};
use penstock_bench::probe::{Probe, ProbeOutcome};
use serde_json::{Value, json};

use crate::nodes::fixture::{Fixture, Wiring};

/// One case in so many is run by the short test.
const SHARE: usize = 8;

fn by_pairs(place: usize) -> usize {
    place / 2 % 2
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
        let namespaces: BTreeSet<&str> = pods.values().map(|pod| pod.namespace()).collect();
        let namespace = |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let pods = pods.values().map(|pod| pod.object(&places));
        let all = nodes() + "---\n" + &documents(namespaces.into_iter().map(namespace).chain(pods));
        let mut wiring = Wiring::routed();
        // Pods of one network are on both nodes.
        wiring.layout.prefixes = (32, 128);
        let fixture = Fixture::start(&all, wiring, &SERVICES);
        Self { fixture, places, marks: 0 }
    }

    /// Applies a state to the cluster and waits until both nodes have adopted it.
    fn set(&mut self, state: &SuiteState) {
        self.fixture.save("all.yaml", &(nodes() + "---\n" + &documents(state.objects(&self.places).into_iter())));
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
            let apart = self.places.node_of(from) != self.places.node_of(to);
            tally.cells[usize::from(apart)][usize::from(!allowed)] += 1;
            if !row.agrees(outcome) {
                wrong.push(format!("{row}; observed {outcome}"));
            }
        }
        wrong
    }
}

/// Waits until what was saved last is in effect on every node.
pub(crate) fn wait_until_adopted(fixture: &Fixture, marks: &mut u32) {
    for (node, daemon) in fixture.daemons.iter().enumerate() {
        let deadline = Instant::now() + Duration::from_secs(30);
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
        let is_left_aside = || {
            let lines = daemon.log().lines();
            let last = lines.iter().rev().find(|line| line.contains("left aside"));
            last.is_some_and(|line| line.contains("tables are left aside"))
        };
        while is_left_aside() {
            assert!(Instant::now() < deadline, "node {node} still builds tables:\n{}", fixture.logs());
            thread::sleep(Duration::from_millis(1));
        }
    }
    fixture.wait_until_in_effect();
}

/// Sends probes between the pods of a fixture; those that should get an answer and do not are sent again.
pub(crate) fn send(fixture: &Fixture, probes: &[Probe], is_allowed: impl Fn(usize) -> bool) -> Vec<ProbeOutcome> {
    send_between(&fixture.sites, probes, is_allowed).unwrap()
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
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn a_sample_of_conformance_cases_passes_on_two_nodes() {
    let mut seen: BTreeMap<&str, usize> = MUST_HAVE.map(|tag| (tag, 0)).into();
    let suite = Suite::find();
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
    let suite = Suite::find();
    run(&suite, by_turns, |_| true);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn all_conformance_cases_pass_with_the_other_placement_of_pods() {
    let suite = Suite::find();
    run(&suite, by_pairs, |_| true);
}

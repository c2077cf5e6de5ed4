//! An nftables ruleset of the same policy, loaded without a daemon: the same packets pass as `evaluate` says. The ruleset filters what a machine forwards, so every end is a namespace behind one machine: pods, and nodes
//! and machines outside with all of their addresses.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::path::Path;
use std::process::Stdio;

use penstock_bench::cluster::read_objects;
use penstock_bench::conformance::{self, PodPlacement, Suite, by_turns, send_between};
use penstock_bench::expectation::{Expectation, PolicyOracle};
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::{EchoServers, EchoService, Site};
use penstock_bench::rulesets::nft;
use penstock_bench::testbed::{Node, ScratchDir};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange};

use crate::nodes::conformance::documents;
use crate::nodes::fixture::{PROTOCOLS, SERVICES};
use crate::nodes::suite::{Case, EndKind, Participants, Tally, suite};

/// One case in so many is run by the short test.
const SHARE: usize = 8;
/// Cases that the short test runs as well: tiers, nodes, outside, SCTP, and names and ranges of ports.
const ALWAYS: [&str; 6] = [
    "CNPAdminTierEgressNodePeers/ipv6",
    "own/networks-and-pods",
    "own/own-node",
    "own/pass-in-each-tier",
    "own/protocols",
    "own/tiers-over-networkpolicy",
];

/// A machine that forwards between all ends.
struct Filter {
    node: Node,
    sites: Vec<Site>,
    scratch: ScratchDir,
    /// Number of rulesets so far.
    loaded: Cell<u16>,
    _servers: Vec<EchoServers>,
}

impl Filter {
    /// Between ends with these names and addresses, with servers on all of them.
    fn start(ends: &BTreeMap<String, Vec<IpAddr>>, services: &[EchoService]) -> Self {
        let mut node = Node::new("filter", &[]).unwrap();
        for (name, addresses) in ends {
            node.add_pod(name, addresses).unwrap();
        }
        node.settle().unwrap();
        let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
        let servers = EchoServers::start_all(&sites, services).unwrap();
        Self { node, sites, scratch: ScratchDir::new().unwrap(), loaded: Cell::new(0), _servers: servers }
    }

    /// Renders manifests and loads the ruleset in the place of the one before. What that one had accepted would go on, and a
    /// probe may have the ports of an earlier one: so each ruleset has its own zone of conntrack.
    fn load(&self, manifests: &Path) {
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(read_objects(manifests).unwrap().into_iter().map(ObjectChange::Set));
        let ruleset = nft::render(engine.state(), engine.tables());
        let mut nft = self.node.namespace().command("nft");
        let mut nft = nft.args(["-f", "-"]).stdin(Stdio::piped()).spawn().expect("nftables is installed");
        self.loaded.set(self.loaded.get() + 1);
        let zone = format!(
            "table inet zone\ndelete table inet zone\ntable inet zone {{\n\tchain first {{\n\t\ttype filter hook prerouting \
             priority raw;\n\t\tct zone set {}\n\t}}\n}}\n",
            self.loaded.get()
        );
        let input = zone + &ruleset;
        nft.stdin.take().expect("it reads the ruleset").write_all(input.as_bytes()).unwrap();
        assert!(nft.wait().unwrap().success(), "nft refuses:\n{ruleset}");
    }

    /// The same for some text of manifests.
    fn load_text(&self, manifests: &str) {
        let file = self.scratch.path().join("all.yaml");
        std::fs::write(&file, manifests).unwrap();
        self.load(&file);
    }
}

/// Sends all rows of cases that share a cluster.
fn run(cases: &[&Case], tally: &mut Tally) {
    let all = Participants::of(cases);
    let mut ends: BTreeMap<String, Vec<IpAddr>> =
        all.pods.iter().map(|(name, pod)| (name.clone(), pod.ips.clone())).collect();
    ends.extend(all.nodes.iter().map(|(name, addresses)| ((*name).to_owned(), addresses.iter().copied().collect())));
    ends.insert("outside".to_owned(), all.outside.iter().copied().collect());
    let filter = Filter::start(&ends, &all.services);
    for case in cases {
        for (number, step) in case.steps.iter().enumerate() {
            filter.load_text(&documents(step.state.objects()));
            let rows = step.rows();
            let probes: Vec<_> = rows.iter().map(|row| row.probe(&filter.sites)).collect();
            let outcomes = send_between(&filter.sites, &probes, |at| rows[at].allowed).unwrap();
            let place = format!("{} step {number}", case.id);
            rows.iter().zip(outcomes).for_each(|(row, outcome)| tally.add(&place, row, outcome));
        }
    }
}

/// Runs cases; one with a finished pod, whose address is another's, has a cluster of its own.
fn run_all<'a>(cases: impl Iterator<Item = &'a Case>) -> Tally {
    let mut tally = Tally::default();
    let (alone, together): (Vec<&Case>, Vec<&Case>) = cases.partition(|case| case.has_finished_pod());
    run(&together, &mut tally);
    alone.into_iter().for_each(|case| run(&[case], &mut tally));
    tally.finish();
    for kind in [EndKind::Pod, EndKind::Node, EndKind::Outside] {
        let count = tally.count(|from, to, _| [from, to].contains(&kind));
        assert!(count.iter().all(|&rows| rows > 0), "{kind:?}: {count:?}");
    }
    let sctp = tally.count(|_, _, protocol| protocol == "SCTP");
    assert!(sctp.iter().all(|&rows| rows > 0), "SCTP: {sctp:?}");
    tally
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn a_sample_of_cluster_policy_cases_holds_as_a_ruleset() {
    let suite = suite();
    run_all(suite.sample(SHARE, &ALWAYS));
}

/// Rows of cases whose manifests `render` refuses: peers that are not understood, and domain names.
const REFUSED: usize = 13;

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
#[cfg_attr(conformance_data, ignore = "takes minutes; make test-long runs it")]
fn every_row_of_cluster_policy_cases_holds_as_a_ruleset() {
    let suite = suite();
    let tally = run_all(suite.cases.iter().filter(|case| !case.may_refuse));
    assert_eq!(tally.rows() + REFUSED, suite.rows(), "each other row is sent");
}

/// Sends all rows of one in so many cases of NetworkPolicy.
fn run_network_policies(share: usize) {
    let suite = Suite::find();
    let places = PodPlacement::new(&suite, by_turns);
    let ends = suite.all_pods().map(|pod| (pod.full_name(), vec![pod.ip])).collect();
    let filter = Filter::start(&ends, &conformance::SERVICES);
    let (mut counts, mut wrong) = ([0; 2], Vec::new());
    for case in suite.cases.iter().step_by(share) {
        for (number, step) in case.steps.iter().enumerate() {
            filter.load_text(&documents(step.state.objects(&places).into_iter()));
            let rows: Vec<_> = step.expected.iter().filter(|row| !row.is_self).collect();
            let probes: Vec<_> = rows.iter().map(|row| row.probe(&filter.sites)).collect();
            let outcomes = send_between(&filter.sites, &probes, |at| rows[at].allowed).unwrap();
            for (row, outcome) in rows.iter().zip(outcomes) {
                counts[usize::from(!row.allowed)] += 1;
                if !row.agrees(outcome) {
                    wrong.push(format!("case {}, step {number}: {row}; observed {outcome}", case.id));
                }
            }
        }
    }
    println!("{} rows allowed, {} denied, {} wrong", counts[0], counts[1], wrong.len());
    assert!(wrong.is_empty(), "{} rows differ:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
    assert!(counts.iter().all(|&rows| rows > 100), "{counts:?}");
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn a_sample_of_network_policy_cases_holds_as_a_ruleset() {
    run_network_policies(40);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn every_row_of_network_policy_cases_holds_as_a_ruleset() {
    run_network_policies(1);
}

#[test]
fn every_pair_of_the_demo_gets_its_verdict_as_a_ruleset() {
    let manifests = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/demo"));
    let objects = read_objects(manifests).unwrap();
    let end = |object: &Object| match object {
        Object::Node(node) => Some((node.name.clone(), node.addresses.clone())),
        Object::Pod(pod) if !pod.host_network && !pod.finished => Some((pod.key.to_string(), pod.addresses.clone())),
        _ => None,
    };
    let ends = objects.iter().filter_map(end).collect();
    let filter = Filter::start(&ends, &SERVICES);
    filter.load(manifests);
    let matrix = Matrix::between(&filter.sites, &[], &PolicyOracle::new(&objects), &PROTOCOLS).unwrap();
    let denied = matrix.entries().iter().filter(|entry| entry.expected != Expectation::Allowed).count();
    println!("{} probes, {denied} denied", matrix.entries().len());
    assert!(denied > 0 && denied < matrix.entries().len());
    assert_eq!(matrix.differences(), Vec::<String>::new());
}

//! The conformance cases of ClusterNetworkPolicy as packets between pods of two nodes: all expectations between two pods,
//! over TCP, UDP and ICMP. Expectations about other addresses and SCTP are evaluated without packets only. The data is
//! found, or not, as for the other conformance cases.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;

use penstock_bench::probe::{EchoService, Probe, ProbeOutcome, Protocol};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::conformance::{documents, node_name, nodes, send, wait_until_adopted};
use crate::fixture::{Fixture, Wiring};

#[derive(Deserialize)]
struct Suite {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    #[serde(default)]
    may_refuse: bool,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    state: State,
    expected: Vec<Expectation>,
}

#[derive(Deserialize)]
struct State {
    namespaces: Vec<Value>,
    pods: Vec<SuitePod>,
    #[serde(default)]
    policies: Vec<Value>,
    #[serde(default)]
    cluster_policies: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SuitePod {
    namespace: String,
    name: String,
    ip: IpAddr,
    ips: Vec<IpAddr>,
    node: Option<String>,
    labels: Value,
    #[serde(default)]
    host_network: bool,
    phase: Option<String>,
    #[serde(default)]
    ports: Vec<Value>,
}

#[derive(Deserialize)]
struct Expectation {
    from: String,
    to: String,
    port: Option<u16>,
    protocol: String,
    allowed: bool,
}

/// One case in so many is run by the short test.
const SHARE: usize = 6;

fn suite() -> Option<Suite> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/conformance");
    let folder = std::env::var_os("PENSTOCK_CONFORMANCE").map_or(beside, PathBuf::from);
    let Ok(file) = File::open(folder.join("cnp-cases.json.gz")) else {
        eprintln!("SKIPPED: no conformance data in {}; PENSTOCK_CONFORMANCE names another folder", folder.display());
        return None;
    };
    let mut suite: Suite =
        serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents");
    // A daemon refuses these manifests, and one address is that of two pods in turn in the others.
    let has_turns = |case: &Case| case.steps.iter().flat_map(|step| &step.state.pods).any(|pod| pod.phase.is_some());
    suite.cases.retain(|case| !case.may_refuse && !has_turns(case));
    Some(suite)
}

impl SuitePod {
    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn manifest(&self) -> Value {
        // A name may stand for two protocols; each has a container of its own.
        let container = |(i, port): (usize, &Value)| {
            json!({"name": format!("c{i}"), "image": "example.invalid/test", "ports":
                [{"name": port["name"], "containerPort": port["port"], "protocol": port["protocol"]}]})
        };
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
            "spec": {
                "nodeName": node_name(usize::from(self.node.as_deref() != Some("node-1"))),
                "containers": self.ports.iter().enumerate().map(container).collect::<Vec<_>>(),
            },
            "status": {"phase": "Running", "podIPs": self.ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>()},
        })
    }
}

impl State {
    fn pods(&self) -> impl Iterator<Item = &SuitePod> {
        self.pods.iter().filter(|pod| !pod.host_network)
    }

    fn manifests(&self) -> String {
        let namespace = |it: &Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": it["name"], "labels": it["labels"]}});
        let policy = |it: &Value| {
            let mut policy = it.clone();
            (policy["apiVersion"], policy["kind"]) = (json!("networking.k8s.io/v1"), json!("NetworkPolicy"));
            policy
        };
        let policies = self.policies.iter().map(policy).chain(self.cluster_policies.iter().cloned());
        let objects = self.namespaces.iter().map(namespace).chain(self.pods().map(SuitePod::manifest)).chain(policies);
        nodes() + "---\n" + &documents(objects)
    }
}

fn protocol(row: &Expectation) -> Option<Protocol> {
    match (row.protocol.as_str(), row.port) {
        ("TCP", Some(port)) => Some(Protocol::Tcp(port)),
        ("UDP", Some(port)) => Some(Protocol::Udp(port)),
        ("ICMP", None) => Some(Protocol::Icmp),
        _ => None,
    }
}

/// The expectations of a step that can be sent: from one pod to another.
fn sent(step: &Step) -> impl Iterator<Item = (&Expectation, Protocol)> {
    let pods: BTreeSet<String> = step.state.pods().map(SuitePod::full_name).collect();
    let between_pods =
        move |row: &&Expectation| pods.contains(&row.from) && pods.contains(&row.to) && row.from != row.to;
    step.expected.iter().filter(between_pods).filter_map(|row| Some((row, protocol(row)?)))
}

/// Nodes with all pods of these cases, and servers for what they probe.
fn start(cases: &[&Case]) -> Fixture {
    let steps = || cases.iter().flat_map(|case| &case.steps);
    let pods: BTreeMap<String, &SuitePod> =
        steps().flat_map(|step| step.state.pods()).map(|pod| (pod.full_name(), pod)).collect();
    let namespaces: BTreeSet<&str> = pods.values().map(|pod| pod.namespace.as_str()).collect();
    let namespace = |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let objects = namespaces.into_iter().map(namespace).chain(pods.values().map(|pod| pod.manifest()));
    let ports: BTreeSet<(bool, u16)> = steps()
        .flat_map(sent)
        .filter_map(|(row, protocol)| match protocol {
            Protocol::Tcp(port) if row.allowed => Some((true, port)),
            Protocol::Udp(port) if row.allowed => Some((false, port)),
            _ => None,
        })
        .collect();
    let services: Vec<EchoService> = ports
        .into_iter()
        .map(|(tcp, port)| if tcp { EchoService::Tcp(port) } else { EchoService::Udp(port) })
        .collect();
    let mut wiring = Wiring::routed(true);
    // Pods of one network are on both nodes.
    wiring.layout.prefixes = (32, 128);
    let all = nodes() + "---\n" + &documents(objects);
    Fixture::start_with(&all, wiring, &services, |config| config.sections += "[log]\nlevel = \"debug\"\n")
}

fn run(cases: &[&Case], least: usize) {
    let fixture = start(cases);
    let (mut marks, mut cells, mut wrong) = (0, [0; 2], Vec::new());
    for case in cases {
        for (number, step) in case.steps.iter().enumerate() {
            let rows: Vec<_> = sent(step).collect();
            if rows.is_empty() {
                continue;
            }
            fixture.save("all.yaml", &step.state.manifests());
            wait_until_adopted(&fixture, &mut marks);
            let address = |name: &str| step.state.pods().find(|pod| pod.full_name() == name).expect("a pod").ip;
            let probe = |(row, protocol): &(&Expectation, Protocol)| {
                let v6 = address(&row.to).is_ipv6();
                let (from, (to, destination)) = (fixture.target(&row.from, v6).0, fixture.target(&row.to, v6));
                Probe { from: from as usize, to: to as usize, destination, protocol: *protocol }
            };
            let probes: Vec<Probe> = rows.iter().map(probe).collect();
            let outcomes = send(&fixture, &probes, |at| rows[at].0.allowed);
            for ((row, protocol), outcome) in rows.iter().zip(outcomes) {
                let Expectation { from, to, allowed, .. } = row;
                cells[usize::from(!allowed)] += 1;
                // A denial is silent: nothing answers it.
                if outcome != if *allowed { ProbeOutcome::Reached } else { ProbeOutcome::Silent } {
                    let id = &case.id;
                    wrong.push(format!("{id} step {number}: {from} to {to}, {protocol}: {outcome}, not {allowed}"));
                }
            }
        }
    }
    println!("{} cases: {} expectations allowed, {} denied", cases.len(), cells[0], cells[1]);
    assert!(wrong.is_empty(), "{} cells differ:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
    assert!(cells.iter().all(|&count| count >= least), "{cells:?}");
}

#[test]
fn a_sample_of_the_cluster_policy_cases_passes_between_pods_of_two_nodes() {
    let Some(suite) = suite() else { return };
    let sample: Vec<&Case> = suite.cases.iter().step_by(SHARE).collect();
    run(&sample, 10);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn all_cluster_policy_cases_pass_between_pods_of_two_nodes() {
    let Some(suite) = suite() else { return };
    run(&suite.cases.iter().collect::<Vec<_>>(), 100);
}

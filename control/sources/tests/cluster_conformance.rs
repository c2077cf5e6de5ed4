//! The conformance cases of ClusterNetworkPolicy, by state and again by single changes on one running engine, and the
//! objects that its CustomResourceDefinition accepts or refuses. The data is not part of the project:
//! `../shared/conformance/` beside the repository, or the directory in `PENSTOCK_CONFORMANCE`. Where it is absent, the
//! tests are ignored.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::Path;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::manifest::{ManifestErrors, Manifests, Options, UnknownFields, read_manifests};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Suite {
    cluster: State,
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
    actions: Vec<Value>,
    state: State,
    expected: Vec<Expectation>,
}

#[derive(Clone, Deserialize)]
struct State {
    namespaces: Vec<Value>,
    nodes: Vec<Value>,
    pods: Vec<SuitePod>,
    #[serde(default)]
    policies: Vec<Value>,
    #[serde(default)]
    cluster_policies: Vec<Value>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SuitePod {
    namespace: String,
    name: String,
    ip: IpAddr,
    #[serde(default)]
    ips: Vec<IpAddr>,
    node: Option<String>,
    labels: Value,
    #[serde(default)]
    host_network: bool,
    phase: Option<String>,
    #[serde(default)]
    ports: Vec<SuitePort>,
}

#[derive(Clone, Deserialize)]
struct SuitePort {
    name: Option<String>,
    port: u16,
    protocol: String,
}

#[derive(Deserialize)]
struct Expectation {
    from: String,
    to: String,
    port: Option<u16>,
    protocol: String,
    allowed: bool,
}

fn data<T: DeserializeOwned>(file: &str) -> T {
    let path = Path::new(env!("CONFORMANCE_DATA")).join(file);
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents")
}

impl SuitePod {
    fn manifest(&self) -> Value {
        // A name may stand for two protocols; each has a container of its own.
        let container = |(i, port): (usize, &SuitePort)| {
            json!({"name": format!("c{i}"), "ports":
                [{"name": port.name, "containerPort": port.port, "protocol": port.protocol}]})
        };
        let ips = if self.ips.is_empty() { vec![self.ip] } else { self.ips.clone() };
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
            "spec": {
                "nodeName": self.node,
                "hostNetwork": self.host_network,
                "containers": self.ports.iter().enumerate().map(container).collect::<Vec<_>>(),
            },
            "status": {
                "phase": self.phase.as_deref().unwrap_or("Running"),
                "podIPs": ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
            },
        })
    }
}

impl State {
    fn manifests(&self) -> Vec<Value> {
        let namespace = |it: &Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": it["name"], "labels": it["labels"]}});
        let node = |it: &Value| {
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": it["name"], "labels": it["labels"]},
                "status": {"addresses": it["addresses"]}})
        };
        let policy = |it: &Value| {
            let mut policy = it.clone();
            (policy["apiVersion"], policy["kind"]) = (json!("networking.k8s.io/v1"), json!("NetworkPolicy"));
            policy
        };
        let pods = self.pods.iter().map(SuitePod::manifest);
        let policies = self.policies.iter().map(policy).chain(self.cluster_policies.iter().cloned());
        self.namespaces.iter().map(namespace).chain(self.nodes.iter().map(node)).chain(pods).chain(policies).collect()
    }

    fn objects(&self) -> Result<Vec<Object>, ManifestErrors> {
        read(&self.manifests())
            .map(|manifests| manifests.documents.into_iter().map(|document| document.object).collect())
    }
}

/// Reads objects as a manifest file.
fn read(objects: &[Value]) -> Result<Manifests, ManifestErrors> {
    read_with(objects, ConversionSettings::default())
}

fn read_with(objects: &[Value], settings: ConversionSettings) -> Result<Manifests, ManifestErrors> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("all.yaml");
    let text: Vec<String> = objects.iter().map(ToString::to_string).collect();
    fs::write(&file, text.join("\n---\n")).expect("a writable folder");
    let options = Options { unknown_fields: UnknownFields::Refuse, settings, ..Options::default() };
    read_manifests(&[&file], &options)
}

#[derive(Default)]
struct Tally {
    checked: usize,
    denied: usize,
    refused: usize,
    wrong: Vec<String>,
}

impl Tally {
    fn check(&mut self, engine: &Engine, state: &State, expected: &[Expectation], place: &str) {
        let addresses: BTreeMap<String, &SuitePod> =
            state.pods.iter().map(|pod| (format!("{}/{}", pod.namespace, pod.name), pod)).collect();
        let address = |end: &str| end.parse::<IpAddr>().unwrap_or_else(|_| addresses[end].ip);
        for row in expected {
            let (src, dst) = (address(&row.from), address(&row.to));
            let protocol = match row.protocol.as_str() {
                "TCP" => Protocol::TCP,
                "UDP" => Protocol::UDP,
                "SCTP" => Protocol::SCTP,
                "ICMP" if src.is_ipv6() => Protocol::ICMPV6,
                "ICMP" => Protocol::ICMP,
                other => panic!("no such protocol: {other}"),
            };
            let dst_port = row.port.unwrap_or(0);
            let flow = Flow { src: src.into(), dst: dst.into(), protocol, src_port: 40000, dst_port };
            let verdict = engine.evaluate(&flow);
            self.checked += 1;
            self.denied += usize::from(!row.allowed);
            if (verdict.egress.is_allowed() && verdict.ingress.is_allowed()) != row.allowed {
                let Expectation { from, to, protocol, allowed, .. } = row;
                self.wrong.push(format!("{place}: {from} to {to} {protocol} {dst_port}: {verdict:?}, not {allowed}"));
            }
        }
    }

    fn finish(self) {
        assert!(self.wrong.is_empty(), "{} of {} wrong: {:#?}", self.wrong.len(), self.checked, self.wrong);
        assert!(self.denied > 200 && self.checked > 500, "{} checked, {} denied", self.checked, self.denied);
        println!("{} expectations hold, {} of them denials; {} steps refused", self.checked, self.denied, self.refused);
    }
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn cluster_policy_cases_hold_for_each_state() {
    let suite: Suite = data("cnp-cases.json.gz");
    let mut tally = Tally::default();
    for case in &suite.cases {
        for (number, step) in case.steps.iter().enumerate() {
            let objects = match step.state.objects() {
                Ok(objects) => objects,
                Err(_) if case.may_refuse => {
                    tally.refused += 1;
                    continue;
                }
                Err(errors) => panic!("{} step {number}: {errors}", case.id),
            };
            let mut engine = Engine::new(EngineSettings::for_all_pods());
            engine.apply(objects.into_iter().map(ObjectChange::Set));
            tally.check(&engine, &step.state, &step.expected, &format!("{} step {number}", case.id));
        }
    }
    tally.finish();
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn cluster_policy_cases_hold_for_incremental_changes() {
    let suite: Suite = data("cnp-cases.json.gz");
    let mut tally = Tally::default();
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    let by_name = |objects: Vec<Object>| -> BTreeMap<ObjectRef, Object> {
        objects.into_iter().map(|object| (object.reference(), object)).collect()
    };
    let mut present = by_name(suite.cluster.objects().expect("valid objects"));
    engine.apply(present.values().cloned().map(ObjectChange::Set));
    for case in &suite.cases {
        for (number, step) in case.steps.iter().enumerate() {
            let Ok(objects) = step.state.objects() else {
                assert!(case.may_refuse, "{} step {number} is refused", case.id);
                tally.refused += 1;
                continue;
            };
            assert!(number == 0 || !step.actions.is_empty(), "{} step {number} changes nothing", case.id);
            let next = by_name(objects);
            let gone = present.keys().filter(|reference| !next.contains_key(reference)).cloned();
            let news = next.iter().filter(|(reference, object)| present.get(*reference) != Some(*object));
            // One change at a time, each of which updates the tables.
            for change in
                gone.map(ObjectChange::Delete).chain(news.map(|(_, object)| ObjectChange::Set(object.clone())))
            {
                engine.apply([change]);
            }
            tally.check(&engine, &step.state, &step.expected, &format!("{} step {number}", case.id));
            present = next;
        }
    }
    tally.finish();
}

#[derive(Deserialize)]
struct ValiditySuite {
    objects: Vec<Candidate>,
}

#[derive(Deserialize)]
struct Candidate {
    id: String,
    object: Value,
    valid: bool,
    why: String,
    /// Both answers are right.
    #[serde(default)]
    either: bool,
    /// An object of another kind, group or version is not read.
    #[serde(default)]
    foreign: bool,
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn cluster_policies_are_refused_as_their_definition_says() {
    let suite: ValiditySuite = data("cnp-validity.json.gz");
    let (mut accepted, mut refused) = (0, 0);
    for Candidate { id, object, valid, why, either, foreign } in &suite.objects {
        let settings = ConversionSettings { domain_names: true, ..ConversionSettings::default() };
        match read_with(std::slice::from_ref(object), settings) {
            Ok(manifests) if *foreign => assert!(manifests.documents.is_empty(), "{id} is read: {why}"),
            Ok(manifests) => {
                assert!(*valid || *either, "{id} is accepted: {why}: {object}");
                assert_eq!(manifests.documents.len(), 1, "{id}");
                accepted += 1;
            }
            Err(errors) => {
                assert!(!*valid || *either, "{id} is refused: {why}: {errors}");
                assert_eq!(errors.0.len(), 1, "{id}: {errors}");
                refused += 1;
            }
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 50 && refused > 200, "{accepted} accepted, {refused} refused");
}

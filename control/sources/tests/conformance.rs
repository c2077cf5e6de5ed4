//! The cases of a NetworkPolicy conformance tool, with its own expectations: by state, and again by replaying the
//! actions on one running engine. The data is not part of the project: `../shared/conformance/` beside the repository,
//! or the directory in `PENSTOCK_CONFORMANCE`. Where it is absent, the tests are ignored.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::path::Path;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{
    Labels, NamedPort, Namespace, Object, ObjectChange, ObjectKey, ObjectRef, Pod, PortProtocol,
};
use penstock_sources::convert;
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct Suite {
    cluster: State,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: u32,
    description: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    actions: Vec<Action>,
    state: State,
    expected: Vec<Expectation>,
}

#[derive(Deserialize)]
struct State {
    namespaces: Vec<SuiteNamespace>,
    pods: Vec<SuitePod>,
    #[serde(default)]
    policies: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct SuiteNamespace {
    name: String,
    labels: Labels,
}

#[derive(Deserialize)]
struct SuitePod {
    namespace: String,
    name: String,
    ip: IpAddr,
    labels: Labels,
    ports: Vec<SuitePort>,
}

#[derive(Deserialize)]
struct SuitePort {
    name: String,
    port: u16,
    protocol: String,
}

#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
enum Action {
    #[serde(alias = "update_policy")]
    CreatePolicy {
        policy: serde_json::Value,
    },
    DeletePolicy {
        namespace: String,
        name: String,
    },
    #[serde(alias = "set_namespace_labels")]
    CreateNamespace {
        namespace: String,
        labels: Labels,
    },
    DeleteNamespace {
        namespace: String,
    },
    #[serde(alias = "set_pod_labels")]
    CreatePod {
        namespace: String,
        pod: String,
        labels: Labels,
    },
    DeletePod {
        namespace: String,
        pod: String,
    },
}

#[derive(Deserialize)]
struct Expectation {
    from: String,
    to: String,
    resolved_port: u16,
    protocol: String,
    ingress: bool,
    egress: bool,
    #[serde(default, rename = "self")]
    is_self: bool,
}

fn suite() -> Suite {
    let path = Path::new(env!("CONFORMANCE_DATA")).join("cyclonus-cases.json.gz");
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents")
}

fn namespace(name: &str, labels: &Labels) -> Object {
    let mut labels = labels.clone();
    labels.insert("kubernetes.io/metadata.name".to_owned(), name.to_owned());
    Object::Namespace(Namespace { name: name.to_owned(), labels, default_deny_ingress: false, terminating: false })
}

fn key(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn pod(pod: &SuitePod) -> Pod {
    let protocol = |name: &str| match name {
        "TCP" => PortProtocol::Tcp,
        "UDP" => PortProtocol::Udp,
        "SCTP" => PortProtocol::Sctp,
        other => panic!("no port protocol: {other}"),
    };
    let port =
        |port: &SuitePort| NamedPort { name: port.name.clone(), protocol: protocol(&port.protocol), number: port.port };
    Pod {
        key: key(&pod.namespace, &pod.name),
        labels: pod.labels.clone(),
        node: Some("node".to_owned()),
        addresses: vec![pod.ip],
        ports: pod.ports.iter().map(port).collect(),
        ..Pod::default()
    }
}

fn read<T: DeserializeOwned>(value: &serde_json::Value) -> T {
    serde_json::from_value(value.clone()).expect("an object of the API")
}

fn policy(value: &serde_json::Value) -> Object {
    Object::NetworkPolicy(convert::network_policy(&read(value)).expect("the suite's policies are valid"))
}

fn objects(state: &State) -> Vec<Object> {
    let namespaces = state.namespaces.iter().map(|it| namespace(&it.name, &it.labels));
    let pods = state.pods.iter().map(|it| Object::Pod(pod(it)));
    namespaces.chain(pods).chain(state.policies.iter().map(policy)).collect()
}

/// The changes of an action. A pod that it creates or labels is that of the state after it, except for the labels.
fn change(action: &Action, after: &State) -> ObjectChange {
    match action {
        Action::CreatePolicy { policy: value } => ObjectChange::Set(policy(value)),
        Action::DeletePolicy { namespace, name } => {
            ObjectChange::Delete(ObjectRef::NetworkPolicy(key(namespace, name)))
        }
        Action::CreateNamespace { namespace: name, labels } => ObjectChange::Set(namespace(name, labels)),
        Action::DeleteNamespace { namespace } => ObjectChange::Delete(ObjectRef::Namespace(namespace.clone())),
        Action::CreatePod { namespace, pod: name, labels } => {
            let found = after.pods.iter().find(|it| it.namespace == *namespace && it.name == *name);
            let mut pod = pod(found.expect("the state after the action has the pod"));
            pod.labels = labels.clone();
            ObjectChange::Set(Object::Pod(pod))
        }
        Action::DeletePod { namespace, pod } => ObjectChange::Delete(ObjectRef::Pod(key(namespace, pod))),
    }
}

#[derive(Default)]
struct Tally {
    checked: usize,
    denied: usize,
    wrong: Vec<String>,
}

impl Tally {
    fn check(&mut self, engine: &Engine, state: &State, expected: &[Expectation], place: &str) {
        let addresses: BTreeMap<String, IpAddr> =
            state.pods.iter().map(|pod| (format!("{}/{}", pod.namespace, pod.name), pod.ip)).collect();
        for row in expected.iter().filter(|row| !row.is_self) {
            let protocol = match row.protocol.as_str() {
                "TCP" => Protocol::TCP,
                "UDP" => Protocol::UDP,
                "SCTP" => Protocol::SCTP,
                other => panic!("no such protocol: {other}"),
            };
            let (src, dst) = (addresses[&row.from].into(), addresses[&row.to].into());
            let flow = Flow { src, dst, protocol, src_port: 40000, dst_port: row.resolved_port };
            let policy_verdict = engine.evaluate(&flow);
            self.checked += 1;
            self.denied += usize::from(!(row.ingress && row.egress));
            let sides = (policy_verdict.egress.is_allowed(), policy_verdict.ingress.is_allowed());
            if sides != (row.egress, row.ingress) {
                self.wrong.push(format!("{place}: {} to {} {} {}", row.from, row.to, row.protocol, row.resolved_port));
            }
        }
    }

    fn finish(self) {
        assert!(
            self.wrong.is_empty(),
            "{} of {} wrong: {:#?}",
            self.wrong.len(),
            self.checked,
            &self.wrong[..self.wrong.len().min(10)]
        );
        assert!(self.denied > 10_000 && self.checked > 100_000, "{} checked, {} denied", self.checked, self.denied);
        println!("{} expectations hold, {} of them denials", self.checked, self.denied);
    }
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn conformance_cases_hold_for_each_state() {
    let suite = suite();
    let mut tally = Tally::default();
    for case in &suite.cases {
        for (number, step) in case.steps.iter().enumerate() {
            let mut engine = Engine::new(EngineSettings::for_all_pods());
            engine.apply(objects(&step.state).into_iter().map(ObjectChange::Set));
            let place = format!("case {} ({}) step {number}", case.id, case.description);
            tally.check(&engine, &step.state, &step.expected, &place);
        }
    }
    tally.finish();
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn conformance_cases_hold_for_incremental_changes() {
    let suite = suite();
    let mut tally = Tally::default();
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    let cluster: BTreeMap<ObjectRef, Object> =
        objects(&suite.cluster).into_iter().map(|object| (object.reference(), object)).collect();
    let mut present: BTreeMap<ObjectRef, Object> = BTreeMap::new();
    for case in &suite.cases {
        // Return to the initial cluster of every case, also by changes.
        let gone =
            present.keys().filter(|reference| !cluster.contains_key(reference)).cloned().map(ObjectChange::Delete);
        let back = cluster.iter().filter(|(reference, object)| present.get(*reference) != Some(*object));
        engine.apply(gone.chain(back.map(|(_, object)| ObjectChange::Set(object.clone()))).collect::<Vec<_>>());
        for (number, step) in case.steps.iter().enumerate() {
            for action in &step.actions {
                engine.apply([change(action, &step.state)]);
            }
            let place = format!("case {} ({}) step {number}", case.id, case.description);
            tally.check(&engine, &step.state, &step.expected, &place);
            present = objects(&step.state).into_iter().map(|object| (object.reference(), object)).collect();
        }
    }
    tally.finish();
}

//! The cases of a NetworkPolicy conformance tool with its expectations: pods of three namespaces, policies step by step, and
//! what each pod reaches then. The data is not part of the project: `../shared/conformance/` beside the repository, or the
//! directory in `PENSTOCK_CONFORMANCE`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::probe::{self, EchoService, Probe, ProbeOutcome, Protocol, RetryPolicy, Site};

#[derive(Deserialize)]
pub struct Suite {
    /// In the tool's order.
    pub cases: Vec<SuiteCase>,
}

/// One case: a cluster that changes step by step.
#[derive(Deserialize)]
pub struct SuiteCase {
    /// Its number in the data.
    pub id: u32,
    pub description: String,
    /// The features that it uses, such as `named-port`.
    pub tags: BTreeSet<String>,
    /// At least one.
    pub steps: Vec<SuiteStep>,
}

/// The cluster at one time, and what holds then.
#[derive(Deserialize)]
pub struct SuiteStep {
    pub state: SuiteState,
    /// One row for each pair of pods and each port and protocol.
    pub expected: Vec<SuiteExpectation>,
}

#[derive(Deserialize)]
pub struct SuiteState {
    namespaces: Vec<SuiteNamespace>,
    /// Objects of all namespaces.
    pub pods: Vec<SuitePod>,
    policies: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct SuiteNamespace {
    name: String,
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
pub struct SuitePod {
    namespace: String,
    name: String,
    pub ip: IpAddr,
    labels: BTreeMap<String, String>,
    ports: Vec<SuitePort>,
}

#[derive(Deserialize)]
struct SuitePort {
    name: String,
    port: u16,
    protocol: String,
}

/// Whether one pod reaches a port of another.
#[derive(Deserialize)]
pub struct SuiteExpectation {
    /// The sender, `NAMESPACE/NAME`.
    pub from: String,
    /// The receiver, `NAMESPACE/NAME`.
    pub to: String,
    resolved_port: u16,
    protocol: String,
    pub allowed: bool,
    /// From a pod to itself: the suite lets a policy cut these off, Kubernetes does not.
    #[serde(default, rename = "self")]
    pub is_self: bool,
}

/// Ports that the suite uses, each over TCP, UDP and SCTP.
pub const SERVICES: [EchoService; 6] = [
    EchoService::Tcp(80),
    EchoService::Tcp(81),
    EchoService::Udp(80),
    EchoService::Udp(81),
    EchoService::Sctp(80),
    EchoService::Sctp(81),
];
/// A denied probe is sent this often with this timeout.
const RETRIES: RetryPolicy = RetryPolicy { timeout: Duration::from_millis(150), attempts: 2 };

/// Node of a pod, by its index among all pods of the suite.
pub type Placement = fn(usize) -> usize;

/// Pods on two nodes in turn.
pub fn by_turns(place: usize) -> usize {
    place % 2
}

/// Node of each pod of the suite.
pub struct PodPlacement(BTreeMap<String, usize>);

impl PodPlacement {
    pub fn new(suite: &Suite, placement: Placement) -> Self {
        let pods: BTreeSet<String> = suite.all_pods().map(SuitePod::full_name).collect();
        Self(pods.into_iter().enumerate().map(|(place, pod)| (pod, placement(place))).collect())
    }

    /// The index of the node of the pod `NAMESPACE/NAME`, which is one of the suite's.
    pub fn node_of(&self, pod: &str) -> usize {
        self.0[pod]
    }
}

/// Name of a node in the suite's objects, by its index.
pub fn node_name(node: usize) -> String {
    format!("node-{node}")
}

/// A file of the conformance cases.
///
/// # Panics
/// If it is not at hand, or has another form.
pub fn data<T: DeserializeOwned>(file: &str) -> T {
    let path = Path::new(env!("CONFORMANCE_DATA")).join(file);
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents")
}

impl Suite {
    /// The cases.
    ///
    /// # Panics
    /// If the data is not at hand.
    pub fn find() -> Self {
        data("cyclonus-cases.json.gz")
    }

    /// The pods of all steps of all cases.
    pub fn all_pods(&self) -> impl Iterator<Item = &SuitePod> {
        self.cases.iter().flat_map(|case| &case.steps).flat_map(|step| &step.state.pods)
    }
}

impl SuiteStep {
    /// Its pods, `NAMESPACE/NAME`.
    pub fn pods(&self) -> BTreeSet<String> {
        self.state.pods.iter().map(SuitePod::full_name).collect()
    }
}

impl SuitePod {
    /// `NAMESPACE/NAME`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn object(&self, places: &PodPlacement) -> Value {
        let port = |port: &SuitePort| json!({"name": port.name, "containerPort": port.port, "protocol": port.protocol});
        let ports: Vec<Value> = self.ports.iter().map(port).collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
            "spec": {
                "nodeName": node_name(places.node_of(&self.full_name())),
                "containers": [{"name": "main", "image": "example.invalid/test", "ports": ports}],
            },
            "status": {"phase": "Running", "podIPs": [{"ip": self.ip}]},
        })
    }
}

impl SuiteState {
    /// Namespaces, then pods, then policies.
    pub fn objects(&self, places: &PodPlacement) -> Vec<Value> {
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
        let pods = self.pods.iter().map(|pod| pod.object(places));
        let policies = self.policies.iter().flatten().map(policy);
        self.namespaces.iter().map(namespace).chain(pods).chain(policies).collect()
    }
}

impl SuiteExpectation {
    /// The probe for it between sites with the names of pods.
    pub fn probe(&self, sites: &[Site]) -> Probe {
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
    pub fn agrees(&self, outcome: ProbeOutcome) -> bool {
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

/// Sends probes; those that should get an answer and do not are sent again with more patience: on a busy machine a reply may
/// take longer, which is not a denial.
pub fn send_between(sites: &[Site], probes: &[Probe], is_allowed: impl Fn(usize) -> bool) -> Result<Vec<ProbeOutcome>> {
    let mut outcomes = probe::run(sites, probes, RETRIES)?;
    let late: Vec<usize> =
        (0..probes.len()).filter(|&at| is_allowed(at) && outcomes[at] == ProbeOutcome::Silent).collect();
    let again: Vec<Probe> = late.iter().map(|&at| probes[at]).collect();
    let patience = RetryPolicy { timeout: Duration::from_secs(1), attempts: 3 };
    for (at, outcome) in late.into_iter().zip(probe::run(sites, &again, patience)?) {
        outcomes[at] = outcome;
    }
    Ok(outcomes)
}

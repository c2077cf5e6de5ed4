//! The conformance cases of ClusterNetworkPolicy: data that is not part of the project. Where it is absent, the tests
//! are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use penstock_bench::probe::{EchoService, Probe, ProbeOutcome, Protocol, Site};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
pub(crate) struct Suite {
    pub(crate) cases: Vec<Case>,
}

#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) id: String,
    /// Manifests with these objects are refused; an API server may have them all the same.
    #[serde(default)]
    pub(crate) may_refuse: bool,
    pub(crate) steps: Vec<Step>,
}

#[derive(Deserialize)]
pub(crate) struct Step {
    pub(crate) state: State,
    expected: Vec<Expectation>,
}

#[derive(Deserialize)]
pub(crate) struct State {
    namespaces: Vec<Value>,
    nodes: Vec<SuiteNode>,
    pods: Vec<SuitePod>,
    #[serde(default)]
    policies: Vec<Value>,
    #[serde(default)]
    cluster_policies: Vec<Value>,
}

#[derive(Deserialize)]
pub(crate) struct SuiteNode {
    pub(crate) name: String,
    labels: Value,
    addresses: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SuitePod {
    namespace: String,
    name: String,
    ip: IpAddr,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) node: String,
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

/// The suite.
pub(crate) fn suite() -> Suite {
    penstock_bench::conformance::data("cnp-cases.json.gz")
}

impl Suite {
    /// Number of expectations.
    pub(crate) fn rows(&self) -> usize {
        self.cases.iter().flat_map(|case| &case.steps).map(|step| step.expected.len()).sum()
    }

    /// One case in so many, and those with these names, of the cases that share a cluster and that manifests may contain.
    pub(crate) fn sample<'a>(&'a self, share: usize, always: &[&str]) -> impl Iterator<Item = &'a Case> {
        let all = self.cases.iter().filter(|case| !case.may_refuse && !case.has_finished_pod()).enumerate();
        let is_named = |case: &Case| always.contains(&case.id.as_str());
        let taken: Vec<&Case> =
            all.filter(|(place, case)| place % share == 0 || is_named(case)).map(|(_, case)| case).collect();
        let named = taken.iter().filter(|case| is_named(case)).count();
        assert_eq!(named, always.len(), "the suite has each of {always:?}");
        taken.into_iter()
    }
}

impl Case {
    pub(crate) fn has_finished_pod(&self) -> bool {
        self.steps.iter().flat_map(|step| &step.state.pods).any(|pod| pod.phase.is_some())
    }
}

impl SuiteNode {
    /// Its addresses; a host name is none.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter_map(|entry| entry["address"].as_str()?.parse().ok())
    }
}

impl SuitePod {
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub(crate) fn manifest(&self) -> Value {
        // A name may stand for two protocols; each has a container of its own.
        let container = |(i, port): (usize, &Value)| {
            json!({"name": format!("c{i}"), "image": "example.invalid/test", "ports":
                [{"name": port["name"], "containerPort": port["port"], "protocol": port["protocol"]}]})
        };
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
            "spec": {
                "nodeName": self.node, "hostNetwork": self.host_network,
                "containers": self.ports.iter().enumerate().map(container).collect::<Vec<_>>(),
            },
            "status": {
                "phase": self.phase.as_deref().unwrap_or("Running"),
                "podIP": self.ip, "podIPs": self.ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
            },
        })
    }
}

impl State {
    /// Running pods with a network of their own.
    pub(crate) fn pods(&self) -> impl Iterator<Item = &SuitePod> {
        self.pods.iter().filter(|pod| !pod.host_network && pod.phase.is_none())
    }

    /// All of its objects.
    pub(crate) fn objects(&self) -> impl Iterator<Item = Value> {
        let namespace = |it: &Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": it["name"], "labels": it["labels"]}});
        let node = |it: &SuiteNode| {
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": it.name, "labels": it.labels},
                "status": {"addresses": it.addresses}})
        };
        let policy = |it: &Value| {
            let mut policy = it.clone();
            (policy["apiVersion"], policy["kind"]) = (json!("networking.k8s.io/v1"), json!("NetworkPolicy"));
            policy
        };
        let policies = self.policies.iter().map(policy).chain(self.cluster_policies.iter().cloned());
        let namespaces = self.namespaces.iter().map(namespace);
        namespaces.chain(self.nodes.iter().map(node)).chain(self.pods.iter().map(SuitePod::manifest)).chain(policies)
    }

    /// The address of an expectation's end: a pod's name, or an address.
    fn address(&self, end: &str) -> IpAddr {
        let of_pod = || self.pods.iter().find(|pod| pod.full_name() == end).expect("an end is an address or a pod").ip;
        end.parse().unwrap_or_else(|_| of_pod())
    }

    fn kind(&self, address: IpAddr) -> EndKind {
        if self.nodes.iter().any(|node| node.addresses().any(|own| own == address)) {
            EndKind::Node
        } else if self.pods().any(|pod| pod.ips.contains(&address)) {
            EndKind::Pod
        } else {
            EndKind::Outside
        }
    }
}

/// The owner of an address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum EndKind {
    Pod,
    /// A node's own processes and its pods of the host network.
    Node,
    Outside,
}

/// An expectation between two addresses.
pub(crate) struct Row {
    from: IpAddr,
    to: IpAddr,
    kinds: (EndKind, EndKind),
    protocol: Protocol,
    pub(crate) allowed: bool,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expected = if self.allowed { "allowed" } else { "denied" };
        write!(f, "{} to {}, {}, is {expected}", self.from, self.to, self.protocol)
    }
}

impl Row {
    /// The probe for it. Each address belongs to one site.
    pub(crate) fn probe(&self, sites: &[Site]) -> Probe {
        let site = |address: IpAddr| {
            let found = sites.iter().position(|site| site.addresses.contains(&address));
            found.unwrap_or_else(|| panic!("no site has the address {address}"))
        };
        let Self { from, to, protocol, .. } = *self;
        Probe { from: site(from), to: site(to), source: Some(from), destination: to, protocol }
    }

    /// Whether a probe has ended as expected. A denial is silent: nothing answers it.
    pub(crate) fn agrees(&self, outcome: ProbeOutcome) -> bool {
        outcome == if self.allowed { ProbeOutcome::Reached } else { ProbeOutcome::Silent }
    }
}

impl Step {
    /// All expectations.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let row = |it: &Expectation| {
            let (from, to) = (self.state.address(&it.from), self.state.address(&it.to));
            let protocol = match (it.protocol.as_str(), it.port) {
                ("TCP", Some(port)) => Protocol::Tcp(port),
                ("UDP", Some(port)) => Protocol::Udp(port),
                ("SCTP", Some(port)) => Protocol::Sctp(port),
                ("ICMP", None) => Protocol::Icmp,
                (other, port) => panic!("no such probe: {other}, {port:?}"),
            };
            Row { from, to, kinds: (self.state.kind(from), self.state.kind(to)), protocol, allowed: it.allowed }
        };
        self.expected.iter().map(row).collect()
    }
}

/// Everything that takes part in some cases.
pub(crate) struct Participants<'a> {
    /// Pods by their full names. Those of a name differ in their labels at most.
    pub(crate) pods: BTreeMap<String, &'a SuitePod>,
    /// Nodes' names with all addresses that each has in some step.
    pub(crate) nodes: BTreeMap<&'a str, BTreeSet<IpAddr>>,
    /// Addresses outside of the cluster.
    pub(crate) outside: BTreeSet<IpAddr>,
    /// Servers for everything that may arrive.
    pub(crate) services: Vec<EchoService>,
}

impl<'a> Participants<'a> {
    pub(crate) fn of(cases: &[&'a Case]) -> Self {
        let steps = || cases.iter().flat_map(|case| &case.steps);
        let pods = steps().flat_map(|step| step.state.pods()).map(|pod| (pod.full_name(), pod)).collect();
        let mut nodes: BTreeMap<&str, BTreeSet<IpAddr>> = BTreeMap::new();
        for node in steps().flat_map(|step| &step.state.nodes) {
            nodes.entry(&node.name).or_default().extend(node.addresses());
        }
        let rows: Vec<Row> = steps().flat_map(Step::rows).collect();
        let ends = rows.iter().flat_map(|row| [(row.from, row.kinds.0), (row.to, row.kinds.1)]);
        let outside = ends.filter(|(_, kind)| *kind == EndKind::Outside).map(|(address, _)| address).collect();
        Self { pods, nodes, outside, services: services(&rows) }
    }

    /// Namespaces and pods, for whoever wires them.
    pub(crate) fn pod_manifests(&self) -> impl Iterator<Item = Value> {
        let namespaces: BTreeSet<&str> = self.pods.values().map(|pod| pod.namespace.as_str()).collect();
        let namespace = |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        namespaces.into_iter().map(namespace).chain(self.pods.values().map(|pod| pod.manifest()))
    }
}

/// Servers for rows. Where TCP and UDP are denied, a kernel's refusal tells that a packet has arrived; SCTP's servers tell
/// it alone.
fn services(rows: &[Row]) -> Vec<EchoService> {
    let mut services: Vec<EchoService> = Vec::new();
    for row in rows {
        let service = match row.protocol {
            Protocol::Tcp(port) if row.allowed => EchoService::Tcp(port),
            Protocol::Udp(port) if row.allowed => EchoService::Udp(port),
            Protocol::Sctp(port) => EchoService::Sctp(port),
            Protocol::Tcp(_) | Protocol::Udp(_) | Protocol::Icmp => continue,
        };
        if !services.contains(&service) {
            services.push(service);
        }
    }
    services
}

/// Rows that were sent.
#[derive(Default)]
pub(crate) struct Tally {
    /// Allowed and denied ones of each kind.
    by_kind: BTreeMap<(EndKind, EndKind, &'static str), [usize; 2]>,
    wrong: Vec<String>,
}

impl Tally {
    pub(crate) fn add(&mut self, place: &str, row: &Row, outcome: ProbeOutcome) {
        let protocol = match row.protocol {
            Protocol::Tcp(_) => "TCP",
            Protocol::Udp(_) => "UDP",
            Protocol::Sctp(_) => "SCTP",
            Protocol::Icmp => "ICMP",
        };
        self.by_kind.entry((row.kinds.0, row.kinds.1, protocol)).or_default()[usize::from(!row.allowed)] += 1;
        if !row.agrees(outcome) {
            self.wrong.push(format!("{place}: {row}: {outcome}"));
        }
    }

    /// Allowed and denied rows whose ends and protocol are of some kinds.
    pub(crate) fn count(&self, is_counted: impl Fn(EndKind, EndKind, &str) -> bool) -> [usize; 2] {
        let counted = self.by_kind.iter().filter(|((from, to, protocol), _)| is_counted(*from, *to, protocol));
        counted.fold([0; 2], |sum, (_, count)| [sum[0] + count[0], sum[1] + count[1]])
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.count(|_, _, _| true).iter().sum()
    }

    /// Prints the numbers, and fails if a row was wrong.
    pub(crate) fn finish(&self) {
        for ((from, to, protocol), [allowed, denied]) in &self.by_kind {
            println!("{from:?} to {to:?}, {protocol}: {allowed} allowed, {denied} denied");
        }
        let [allowed, denied] = self.count(|_, _, _| true);
        println!("{allowed} rows allowed, {denied} denied, {} wrong", self.wrong.len());
        assert!(self.wrong.is_empty(), "{} rows differ:\n{}", self.wrong.len(), self.wrong.join("\n"));
    }
}

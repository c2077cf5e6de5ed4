//! The cluster that all peers are configured with: pods on one node and a given number of policies.

use std::net::Ipv4Addr;

use anyhow::Result;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::ObjectChange;
use penstock_sources::manifest::{Options, read_manifests};

use crate::load::ALL_PORTS;
use crate::testbed::ScratchDir;

/// The node's name in the manifests.
pub const NODE: &str = "bench";
/// The name of the second node in the manifests, where there is one.
const OTHER_NODE: &str = "bench-other";
/// The address of its pod.
pub(super) const REMOTE: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 10);
pub(super) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 2);
/// The second node's address: that of the machine behind the node.
const OTHER_NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// A port that no policy allows.
pub(super) const DENIED: u16 = 9100;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ClusterSize {
    /// Pods; every even one sends to the next.
    pub pods: usize,
    /// Policies. All but two each admit one address that sends nothing.
    pub policies: usize,
    /// Services. The first one's backend is the second pod, the others have ten backends each that do not exist.
    pub services: usize,
    /// Whether traffic goes to the first Service, not to its backend directly.
    pub to_service: bool,
    /// Whether there is a second node, with one pod that receives.
    pub other_node: bool,
    /// UDP connections that are open all the time: those that are measured, and others of all pods that send.
    pub open: u32,
}

pub fn pod_name(number: usize) -> String {
    format!("bench/pod-{number}")
}

pub(super) fn pod_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 244, 1, 10).to_bits() + number as u32)
}

pub(super) fn cluster_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 0, 10).to_bits() + number as u32)
}

/// A Service and its backends. The first has all ports that are measured.
fn service(number: usize) -> String {
    let (address, name) = (cluster_address(number), format!("service-{number}"));
    let ports = if number == 0 { ALL_PORTS } else { 80..81 };
    let each = |form: &dyn Fn(&str, u16) -> String| -> String {
        let both = ports.clone().flat_map(|port| [("UDP", port), ("TCP", port)]);
        both.map(|(protocol, port)| form(protocol, port)).collect()
    };
    let named = |protocol: &str, port: u16| format!("{}-{port}", protocol.to_lowercase());
    let fronts = each(&|protocol, port| {
        format!("    - {{ name: {}, protocol: {protocol}, port: {port} }}\n", named(protocol, port))
    });
    let targets = each(&|protocol, port| {
        format!("  - {{ name: {}, protocol: {protocol}, port: {port} }}\n", named(protocol, port))
    });
    let backends: Vec<Ipv4Addr> = match number {
        0 => vec![pod_address(1)],
        // Addresses of no pod.
        _ => (0..10)
            .map(|n| Ipv4Addr::from_bits(Ipv4Addr::new(10, 128, 0, 0).to_bits() + 16 * number as u32 + n))
            .collect(),
    };
    let endpoints: String =
        backends.iter().map(|it| format!("  - {{ addresses: [{it}], conditions: {{ ready: true }} }}\n")).collect();
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{ namespace: bench, name: {name} }}\n\
         spec:\n  clusterIP: {address}\n  clusterIPs: [{address}]\n  ports:\n{fronts}\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{ namespace: bench, name: {name}, labels: {{ kubernetes.io/service-name: {name} }} }}\n\
         addressType: IPv4\nports:\n{targets}endpoints:\n{endpoints}"
    )
}

/// The manifests of a cluster. `turn` changes the ports of the policies that admit unused addresses.
pub fn manifests(size: ClusterSize, turn: usize) -> String {
    let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: { name: bench }\n".to_owned();
    text.push_str(&node(NODE, NODE_ADDRESS));
    for number in 0..size.pods {
        let role = if number % 2 == 0 { "sender" } else { "receiver" };
        text.push_str(&pod(&format!("pod-{number}"), role, NODE, pod_address(number)));
    }
    if size.other_node {
        text.push_str(&node(OTHER_NODE, OTHER_NODE_ADDRESS));
        text.push_str(&pod("remote", "receiver", OTHER_NODE, REMOTE));
    }
    for number in 0..size.policies {
        text.push_str(&policy(number, turn));
    }
    (0..size.services).for_each(|number| text.push_str(&service(number)));
    text
}

fn node(name: &str, address: Ipv4Addr) -> String {
    format!(
        "---\napiVersion: v1\nkind: Node\nmetadata: {{ name: {name} }}\n\
         status: {{ addresses: [{{ type: InternalIP, address: {address} }}] }}\n"
    )
}

fn pod(name: &str, role: &str, node: &str, address: Ipv4Addr) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{ namespace: bench, name: {name}, labels: {{ role: {role} }} }}\n\
         spec: {{ nodeName: {node}, containers: [{{ name: main, image: example.invalid/main }}] }}\n\
         status: {{ phase: Running, podIPs: [{{ ip: {address} }}] }}\n"
    )
}

pub(super) fn policy(number: usize, turn: usize) -> String {
    let (first, last) = (ALL_PORTS.start, ALL_PORTS.end - 1);
    let ports = format!(
        "ports: [{{ protocol: UDP, port: {first}, endPort: {last} }}, {{ protocol: TCP, port: {first}, endPort: {last} }}]"
    );
    let head = |name: &str, role: &str| {
        format!(
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{ namespace: bench, name: {name} }}\n\
             spec:\n  podSelector: {{ matchLabels: {{ role: {role} }} }}\n"
        )
    };
    match number {
        0 => {
            head("receivers", "receiver")
                + &format!(
                    "  ingress:\n    - from: [{{ podSelector: {{ matchLabels: {{ role: sender }} }} }}]\n      {ports}\n"
                )
        }
        1 => {
            head("senders", "sender")
                + &format!(
                    "  policyTypes: [Egress]\n  egress:\n    - to: [{{ podSelector: {{ matchLabels: {{ role: receiver }} }} }}]\n      {ports}\n"
                )
        }
        _ => {
            // Addresses reserved for benchmarks (RFC 2544). They sort before the pods' addresses in an ordered list.
            let from = Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number as u32);
            let port = 7000 + (number + turn) % 64;
            head(&format!("policy-{number}"), "receiver")
                + &format!(
                    "  ingress:\n    - from: [{{ ipBlock: {{ cidr: {from}/32 }} }}]\n      ports: [{{ protocol: UDP, port: {port} }}]\n"
                )
        }
    }
}

/// One more policy that selects the second pod and admits an unused address; its port is another one each turn.
pub fn further_policy(turn: usize) -> String {
    policy(FURTHER, turn)
}

/// Its number: more than there are policies in any cluster.
const FURTHER: usize = 60_000;

/// Writes the manifests into a directory of their own and returns it.
pub(super) fn write(scratch: &ScratchDir, size: ClusterSize) -> Result<std::path::PathBuf> {
    let directory = scratch.path().join("manifests");
    std::fs::create_dir(&directory)?;
    std::fs::write(directory.join("all.yaml"), manifests(size, 0))?;
    Ok(directory)
}

/// The engine whose tables the workers read.
pub(super) fn engine(directory: &std::path::Path) -> Result<Engine> {
    let documents = read_manifests(&[directory], &Options::default())?.documents;
    let mut engine = Engine::new(EngineSettings::for_node(NODE));
    engine.apply(documents.into_iter().map(|document| ObjectChange::Set(document.object)));
    Ok(engine)
}

//! The cluster's objects: nodes, pods and policies, the same for all engines.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use http::Method;
use penstock_bench::testbed::api_server::{Admin, ApiServer, Resource};
use serde_json::{Value, json};

pub(crate) struct NodePlan {
    pub(crate) name: &'static str,
    pub(crate) address: Ipv4Addr,
    pub(crate) pods: &'static str,
}

/// The nodes; the third one is known to the API alone.
pub(crate) const NODES: [NodePlan; 3] = [
    NodePlan { name: "node-a", address: Ipv4Addr::new(192, 168, 50, 1), pods: "10.1.0.0/24" },
    NodePlan { name: "node-b", address: Ipv4Addr::new(192, 168, 50, 2), pods: "10.2.0.0/24" },
    NodePlan { name: "node-c", address: Ipv4Addr::new(192, 168, 50, 3), pods: "10.3.0.0/24" },
];

pub(crate) struct PodPlan {
    pub(crate) name: &'static str,
    pub(crate) namespace: &'static str,
    pub(crate) node: usize,
    pub(crate) address: Ipv4Addr,
    role: &'static str,
    app: &'static str,
    /// Its interface after the prefix: the first eleven digits of SHA-1 of `NAMESPACE.NAME`, by which Calico and the CNI plugin of AWS
    /// name it.
    pub(crate) digest: &'static str,
}

/// Indices of [`PODS`].
pub(crate) const CLIENT: usize = 0;
/// See [`CLIENT`].
pub(crate) const SERVER: usize = 1;
/// See [`CLIENT`]. No policy selects it, and none admits it.
pub(crate) const STRANGER: usize = 2;
/// See [`CLIENT`]. It is on the other node.
pub(crate) const REMOTE: usize = 3;

pub(crate) const PODS: [PodPlan; 4] = [
    PodPlan {
        name: "client",
        namespace: "bench",
        node: 0,
        address: Ipv4Addr::new(10, 1, 0, 10),
        role: "peer",
        app: "client",
        digest: "199ff2007bf",
    },
    PodPlan {
        name: "server",
        namespace: "bench",
        node: 0,
        address: Ipv4Addr::new(10, 1, 0, 11),
        role: "peer",
        app: "server",
        digest: "d3bcb587d23",
    },
    PodPlan {
        name: "stranger",
        namespace: "free",
        node: 0,
        address: Ipv4Addr::new(10, 1, 0, 12),
        role: "other",
        app: "stranger",
        digest: "63cc7ba085d",
    },
    PodPlan {
        name: "remote",
        namespace: "bench",
        node: 1,
        address: Ipv4Addr::new(10, 2, 0, 10),
        role: "peer",
        app: "server",
        digest: "87e3ee8df51",
    },
];

/// Pods of the third node, which policies select by label.
const OTHERS: u8 = 100;
/// Labels that they share.
const APPS: usize = 50;

/// The port that the policy opens and that changes close.
pub(crate) const OPEN: u16 = 6000;
/// A port that no policy opens.
pub(crate) const CLOSED: u16 = 7777;
/// The first of 64 ports that stay open, for load.
pub(crate) const LOAD: u16 = 5001;

/// The API server with the cluster in it.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    policies: usize,
}

impl Cluster {
    /// Starts the server and creates nodes and pods.
    pub(crate) fn start() -> Result<Self> {
        let server = ApiServer::start(None)?;
        let admin = server.admin();
        admin.create_all(&["bench", "free"].map(namespace))?;
        admin.create_all(&NODES.each_ref().map(node)).context("cannot create the nodes")?;
        let mut pods: Vec<Value> = PODS
            .iter()
            .map(|it| pod(it.namespace, it.name, it.node, it.address, &json!({ "role": it.role, "app": it.app })))
            .collect();
        pods.extend((0..OTHERS).map(|number| {
            let address = Ipv4Addr::new(10, 3, 0, 10 + number);
            let labels = json!({ "app": format!("app-{}", usize::from(number) % APPS) });
            pod("bench", &format!("other-{number}"), 2, address, &labels)
        }));
        admin.create_all(&pods).context("cannot create the pods")?;
        admin.create(&allowing(true)).context("cannot create the policy")?;
        Ok(Self { server, policies: 1 })
    }

    /// Whether the server is a real one, which knows CustomResourceDefinitions.
    pub(crate) fn is_real(&self) -> bool {
        self.server.is_real()
    }

    pub(crate) fn version(&self) -> String {
        let version = self.server.admin().call(Method::GET, "/version", &Value::Null);
        let version = version.ok().and_then(|it| it["gitVersion"].as_str().map(str::to_owned));
        version.unwrap_or_else(|| "the small one of the tests".to_owned())
    }

    /// Creates the definitions in this folder that are not there yet.
    pub(crate) fn define(&self, folder: &Path) -> Result<()> {
        const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        for document in documents(folder)? {
            let name = document["metadata"]["name"].as_str().context("a definition without a name")?.to_owned();
            let admin: &Admin = self.server.admin();
            if admin.call(Method::GET, &format!("{DEFINITIONS}/{name}"), &Value::Null).is_err() {
                admin.call(Method::POST, DEFINITIONS, &document).with_context(|| format!("cannot define {name}"))?;
            }
        }
        Ok(())
    }

    /// Creates an object that is not there yet; a server serves a kind a moment after its definition.
    pub(crate) fn create_once(&self, path: &str, object: &str) -> Result<()> {
        let object: Value = serde_json::from_str(object)?;
        let name = object["metadata"]["name"].as_str().context("an object without a name")?;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let admin = self.server.admin();
            let is_there = || admin.call(Method::GET, &format!("{path}/{name}"), &Value::Null).is_ok();
            match admin.call(Method::POST, path, &object) {
                Ok(_) => return Ok(()),
                Err(_) if is_there() => return Ok(()),
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(200)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Brings the number of policies to this.
    pub(crate) fn set_policies(&mut self, wanted: usize) -> Result<()> {
        let wanted = wanted.max(1);
        let numbered = |from: usize, to: usize| (from..to).map(idle).collect::<Vec<_>>();
        let admin = self.server.admin();
        // In parts, so that a server which is slow fails by one of them.
        for part in numbered(self.policies - 1, wanted.max(self.policies) - 1).chunks(500) {
            admin.create_all(part).context("cannot create the policies")?;
        }
        for part in numbered(wanted.min(self.policies) - 1, self.policies - 1).chunks(500) {
            admin.delete_all(part).context("cannot delete policies")?;
        }
        self.policies = wanted;
        Ok(())
    }

    /// Opens or closes [`OPEN`] between the pods.
    pub(crate) fn set_open(&self, open: bool) -> Result<()> {
        self.server.admin().replace(&allowing(open)).context("cannot change the policy")
    }

    /// Number of policies that the server has.
    pub(crate) fn count_policies(&self) -> Result<usize> {
        Ok(self.server.admin().list(Resource::NetworkPolicies)?.len())
    }
}

fn documents(folder: &Path) -> Result<Vec<Value>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        files.push(entry?.path());
    }
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        for document in text.split("\n---").filter(|part| part.contains("kind:")) {
            all.push(serde_saphyr::from_str(document).with_context(|| file.display().to_string())?);
        }
    }
    Ok(all)
}

fn namespace(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } })
}

fn node(plan: &NodePlan) -> Value {
    let address = plan.address.to_string();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": plan.name,
            "labels": { "kubernetes.io/hostname": plan.name, "kubernetes.io/os": "linux" },
            // Calico's start-up container writes this.
            "annotations": { "projectcalico.org/IPv4Address": format!("{address}/24") },
        },
        "spec": { "podCIDR": plan.pods, "podCIDRs": [plan.pods] },
        "status": {
            "addresses": [
                { "type": "InternalIP", "address": address },
                { "type": "Hostname", "address": plan.name },
            ],
        },
    })
}

fn pod(namespace: &str, name: &str, node: usize, address: Ipv4Addr, labels: &Value) -> Value {
    let (host, address) = (NODES[node].address.to_string(), address.to_string());
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": namespace, "name": name, "labels": labels },
        "spec": {
            "nodeName": NODES[node].name,
            "containers": [{ "name": "main", "image": "example.invalid/main" }],
        },
        "status": {
            "phase": "Running",
            "podIP": address, "podIPs": [{ "ip": address }],
            "hostIP": host, "hostIPs": [{ "ip": host }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

fn policy(name: &str, peer: &Value, ports: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": "bench", "name": name },
        "spec": {
            "podSelector": {},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{ "from": [peer], "ports": ports }],
            "egress": [{ "to": [peer], "ports": ports }],
        },
    })
}

/// Allows the load: between the pods of this role, on the ports of load, and on [`OPEN`].
fn allowing(open: bool) -> Value {
    let peer = json!({ "podSelector": { "matchLabels": { "role": "peer" } } });
    let mut ports = Vec::new();
    for protocol in ["TCP", "UDP"] {
        ports.push(json!({ "protocol": protocol, "port": LOAD, "endPort": LOAD + 63 }));
        if open {
            ports.push(json!({ "protocol": protocol, "port": OPEN }));
        }
    }
    policy("allow", &peer, &json!(ports))
}

/// The policy of this number, which selects the same pods and allows what nobody sends: by address, or by labels of pods of another
/// node.
fn idle(number: usize) -> Value {
    let peer = match number % 2 {
        0 => json!({ "podSelector": { "matchLabels": { "app": format!("app-{}", number / 2 % APPS) } } }),
        _ => json!({ "ipBlock": { "cidr": format!("198.18.{}.{}/32", number / 250, number % 250) } }),
    };
    policy(&format!("idle-{number:05}"), &peer, &json!([{ "protocol": "TCP", "port": 7000 + number % 64 }]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_policies_differ_and_allow_nothing_that_is_measured() {
        let texts: std::collections::BTreeSet<String> = (0..10_000).map(|number| idle(number).to_string()).collect();
        assert_eq!(texts.len(), 10_000);
        let allowed =
            |text: &String| [OPEN, CLOSED, LOAD].iter().any(|port| text.contains(&format!("\"port\":{port}")));
        assert!(!texts.iter().any(allowed));
    }

    #[test]
    fn a_change_closes_one_port_and_keeps_the_load() {
        let text = allowing(false).to_string();
        assert!(!text.contains(&format!("\"port\":{OPEN}")) && text.contains(&format!("\"port\":{LOAD}")), "{text}");
    }
}

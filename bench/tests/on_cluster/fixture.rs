//! Test fixture: a node with a daemon that follows an API server on the node's loopback.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use penstock_bench::testbed::api_server::{Account, ApiServer};
use penstock_bench::testbed::{Daemon, Node, Privileges, ScratchDir};
use serde_json::{Value, json};

/// From the change of a pod that is being deleted until the kubelet sends SIGTERM, as seen on a node: longer than a daemon takes to publish a
/// change, and too short for most pairs to open a connection meanwhile.
const KUBELET_DELAY: Duration = Duration::from_millis(120);

pub(crate) struct Fixture {
    pub(crate) daemon: Daemon,
    pub(crate) node: Node,
    pub(crate) server: ApiServer,
    toml: String,
    /// Directory of the connection table and what stands beside it, which outlasts a daemon.
    scratch: ScratchDir,
}

impl Fixture {
    /// A cluster with only the namespace `test`; `sections` are further ones of the configuration.
    pub(crate) fn start(sections: &str) -> Self {
        let node = Node::new("node", &["172.18.0.2".parse().unwrap()]).unwrap();
        let server = ApiServer::start(Some(node.namespace())).unwrap();
        server.admin().create(&namespace("test")).unwrap();
        server.admin().create(&node_object()).unwrap();
        server.admin().create(&own_pod(true)).unwrap();
        let scratch = ScratchDir::new().unwrap();
        let mapping = scratch.path().join("conntrack").display().to_string();
        let toml = configuration(&server.kubeconfig(Account::Penstock), &mapping, sections);
        let daemon = launch(&node, &toml);
        Self { daemon, node, server, toml, scratch }
    }

    /// A cluster with the pods `web`, `db` and `lab` in `test`, of which only `web` may reach `db`.
    pub(crate) fn with_three_pods() -> Self {
        let mut fixture = Self::start("");
        for (name, address) in [("web", "10.244.1.10"), ("db", "10.244.1.11"), ("lab", "10.244.1.12")] {
            fixture.add_pod(name, address);
        }
        fixture.server.admin().create(&policy("db", "web")).unwrap();
        fixture
    }

    /// Ends the daemon as a rollout does: its pod is being deleted, then the kubelet sends SIGTERM and reports the pod
    /// as not ready, and deletes it once the daemon has ended.
    pub(crate) fn delete_daemon(&self) {
        let admin = self.server.admin();
        admin.terminate(&own_pod(true)).unwrap();
        std::thread::sleep(KUBELET_DELAY);
        self.daemon.signal(Signal::SIGTERM).unwrap();
        self.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
        admin.set_status(&own_pod(false)).unwrap();
        admin.delete(&own_pod(false)).unwrap();
    }

    /// The DaemonSet's next pod, and the daemon in it.
    pub(crate) fn create_daemon(&mut self) {
        self.server.admin().create(&own_pod(false)).unwrap();
        self.restart();
        self.server.admin().set_status(&own_pod(true)).unwrap();
    }

    /// Kills the daemon and waits until it has ended.
    pub(crate) fn kill(&self) {
        self.daemon.signal(Signal::SIGKILL).unwrap();
        self.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
    }

    /// Starts the next daemon with the same configuration.
    pub(crate) fn restart(&mut self) {
        self.daemon = launch(&self.node, &self.toml);
    }

    /// Starts the next daemon with further keys of the section `source`, and does not wait until it is ready.
    pub(crate) fn restart_with(&mut self, source: &str) {
        self.toml = self.toml.replace("[source]\n", &format!("[source]\n{source}\n"));
        self.restart_without_waiting();
    }

    /// Starts the next daemon with the same configuration, and does not wait until it is ready.
    pub(crate) fn restart_without_waiting(&mut self) {
        self.daemon = Daemon::launch(self.node.namespace(), &self.toml, Privileges::All).unwrap();
    }

    /// A file of the state directory.
    pub(crate) fn state(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Wires a pod as its CNI plugin does, then creates it in the API as the scheduler and kubelet do.
    pub(crate) fn add_pod(&mut self, name: &str, address: &str) {
        self.wire_pod(name, address);
        self.server.admin().create(&pod(name, address)).unwrap();
    }

    /// Wires a pod that the API server does not know yet.
    pub(crate) fn wire_pod(&mut self, name: &str, address: &str) {
        let address: IpAddr = address.parse().unwrap();
        self.node.add_pod(&format!("test/{name}"), &[address]).unwrap();
        self.node.settle().unwrap();
    }
}

fn launch(node: &Node, toml: &str) -> Daemon {
    let daemon = Daemon::launch(node.namespace(), toml, Privileges::All).unwrap();
    let ready = daemon.log().wait_for_after(0, "ready: ", Duration::from_secs(30));
    assert!(ready.is_ok(), "not ready:\n{}", daemon.log().lines().join("\n"));
    daemon
}

/// Configuration of a daemon that follows an API server. It uses nothing outside its network namespace that another
/// daemon could use too. `mapping` is the connection table's file, or `off`.
pub(crate) fn configuration(kubeconfig: &Path, mapping: &str, sections: &str) -> String {
    format!(
        "node = \"node\"\n[source]\nkubeconfig = \"{}\"\n[admin]\nsocket = \"off\"\n\
         [conntrack]\nmapping = \"{mapping}\"\nentries = 65536\n{sections}",
        kubeconfig.display()
    )
}

pub(crate) fn namespace(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } })
}

pub(crate) fn node_object() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node" },
        "status": { "addresses": [{ "type": "InternalIP", "address": "172.18.0.2" }] },
    })
}

/// A running pod in the namespace `test` on the node, labelled `app: NAME`.
pub(crate) fn pod(name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": "test", "name": name, "labels": { "app": name } },
        "spec": { "nodeName": "node", "containers": [{ "name": "main", "image": "example.invalid/test" }] },
        "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] },
    })
}

/// The daemon's own pod, in the node's network.
pub(crate) fn own_pod(ready: bool) -> Value {
    let ready = if ready { "True" } else { "False" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": "test", "name": "penstock", "labels": { "app.kubernetes.io/name": "penstock" } },
        "spec": {
            "nodeName": "node", "hostNetwork": true,
            "containers": [{ "name": "penstock", "image": "example.invalid/penstock" }],
        },
        "status": {
            "phase": "Running", "podIP": "172.18.0.2", "podIPs": [{ "ip": "172.18.0.2" }],
            "conditions": [{ "type": "Ready", "status": ready }],
        },
    })
}

/// A policy that admits only pods labelled `app: FROM` to `to`.
pub(crate) fn policy(to: &str, from: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": "test", "name": format!("to-{to}") },
        "spec": {
            "podSelector": { "matchLabels": { "app": to } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "app": from } } }] }],
        },
    })
}

//! Egress policy at Services' addresses, with Penstock as it is shipped: it is for the pod that answers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use serde_json::{Value, json};

use crate::kubectl;
use crate::node::Cni;
use crate::real_cluster::RealCluster;
use crate::shell::eventually;

/// Pods by namespace, app and node; each but a client is behind a Service of its own, of both families.
const PODS: [(&str, &str, u8); 9] = [
    ("first", "frontend", 1),
    ("first", "api", 1),
    ("first", "api", 2),
    ("first", "db", 1),
    ("first", "db", 2),
    ("names", "dns", 1),
    ("names", "dns", 2),
    ("stranger", "walled", 1),
    ("stranger", "open", 2),
];
const NAMESPACES: [&str; 3] = ["first", "names", "stranger"];

fn name(app: &str, node: u8) -> String {
    format!("{app}-{node}")
}

/// The pods and their Services, with one of somebody else that names a pod which policy denies.
fn objects() -> Value {
    let metadata =
        |namespace: &str, name: &str| json!({"namespace": namespace, "name": name, "labels": {"name": name}});
    let mut items = Vec::new();
    for (namespace, app, node) in PODS {
        let name = name(app, node);
        let mut pod = metadata(namespace, &name);
        pod["labels"]["app"] = json!(app);
        let container =
            json!({"name": "main", "image": "docker.io/library/penstock-test-pause:1", "imagePullPolicy": "Never"});
        items.push(json!({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": {
            "nodeName": format!("n{node}"), "terminationGracePeriodSeconds": 0, "containers": [container]}}));
        items.push(json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(namespace, &name), "spec": {
            "selector": {"name": name}, "ipFamilyPolicy": "RequireDualStack", "ports": [
                {"name": "tcp", "port": 80, "targetPort": 8080}, {"name": "udp", "port": 53, "targetPort": 5353, "protocol": "UDP"}]}}));
    }
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

/// The Service of somebody else.
fn borrowed(address: &IpAddr) -> Value {
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "stranger", "name": "borrowed"},
        "spec": {"ports": [{"name": "tcp", "port": 80, "targetPort": 8080}]}});
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "stranger", "name": "borrowed", "labels": {"kubernetes.io/service-name": "borrowed"}},
        "endpoints": [{"addresses": [address.to_string()], "conditions": {"ready": true}}],
        "ports": [{"name": "tcp", "port": 8080, "protocol": "TCP"}]});
    json!({"apiVersion": "v1", "kind": "List", "items": [service, slice]})
}

struct Pods<'c> {
    cluster: &'c RealCluster,
    sites: BTreeMap<String, (u32, Site)>,
    _servers: Vec<EchoServers>,
}

impl<'c> Pods<'c> {
    fn start(cluster: &'c RealCluster) -> Result<Self> {
        cluster.apply(include_str!("first-policies.yaml"))?;
        // A new namespace has no service account at once, without which no pod is admitted.
        eventually(Duration::from_secs(60), || cluster.apply(&objects().to_string()))?;
        let (mut sites, mut servers) = (BTreeMap::new(), Vec::new());
        for (identity, (namespace, app, node)) in (2_000..).zip(PODS) {
            let name = name(app, node);
            let pod = eventually(Duration::from_secs(120), || cluster.running(namespace, &name))?;
            let site = cluster.enter(&pod)?;
            servers.push(EchoServers::start(&site, identity, &[EchoService::Tcp(8080), EchoService::Udp(5353)])?);
            sites.insert(name, (identity, site));
        }
        let db = sites["db-2"].1.address(false).context("both families")?;
        cluster.apply(&borrowed(&db).to_string())?;
        kubectl::run(cluster, &["wait", "--for", "enforced", "--timeout", "60s"], 0)?;
        Ok(Self { cluster, sites, _servers: servers })
    }

    /// The addresses of a Service, IPv4 and then IPv6, which has endpoints.
    fn addresses(&self, namespace: &str, service: &str) -> Result<Vec<IpAddr>> {
        let addresses = self.cluster.get(&["service", "-n", namespace, service])?["spec"]["clusterIPs"].clone();
        let addresses = addresses.as_array().into_iter().flatten();
        addresses.map(|address| Ok(address.as_str().context("an address")?.parse()?)).collect()
    }

    /// Fails with all probes that do not have the outcome that is right.
    fn expect(&self, from: &str, rows: &[(&str, Vec<IpAddr>, Protocol, bool)]) -> Result<()> {
        let mut wrong = Vec::new();
        for (to, addresses, protocol, reached) in rows {
            for &address in addresses {
                let target = (self.sites[*to].0, address);
                let outcome = probe::run_one(&self.sites[from].1, target, *protocol, RetryPolicy::expecting(*reached))?;
                if (outcome == ProbeOutcome::Reached) != *reached {
                    let right = if *reached { "allowed" } else { "denied" };
                    wrong.push(format!("{from} to {to} by {address}, {protocol}: {outcome}, which is {right}"));
                }
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }

    fn pod(&self, name: &str) -> Vec<IpAddr> {
        self.sites[name].1.addresses.clone()
    }
}

/// Waits until kube-proxies have the Services: an open pod of the other node reaches what is behind each.
fn services_are_there(pods: &Pods) -> Result<()> {
    let (tcp, udp) = (Protocol::Tcp(80), Protocol::Udp(53));
    eventually(Duration::from_secs(60), || {
        let names = |node| pods.addresses("names", &name("dns", node));
        pods.expect("open-2", &[("dns-1", names(1)?, tcp, true), ("dns-2", names(2)?, udp, true)])?;
        pods.expect("walled-1", &[("dns-1", pods.pod("dns-1"), Protocol::Tcp(8080), false)])
    })
}

/// A namespace that denies by default in both directions, and allows names and one API by labels.
pub(crate) fn a_first_egress_policy_by_labels_works(cluster: &mut RealCluster) -> Result<()> {
    let tested = (|| {
        let pods = Pods::start(cluster)?;
        services_are_there(&pods)?;
        let (tcp, udp, pod_tcp) = (Protocol::Tcp(80), Protocol::Udp(53), Protocol::Tcp(8080));
        let mut rows = Vec::new();
        for node in [1, 2] {
            let of = |namespace, app| pods.addresses(namespace, &name(app, node));
            let (api, db, dns) = [("api-1", "db-1", "dns-1"), ("api-2", "db-2", "dns-2")][usize::from(node) - 1];
            // With --masquerade-all the other node's pod sees the client's node, which its ingress policy does not name.
            let is_masqueraded = cluster.cni == Cni::Bridge && node == 2;
            rows.extend([
                (api, of("first", "api")?, tcp, !is_masqueraded),
                (api, pods.pod(api), pod_tcp, true),
                (api, of("first", "api")?, udp, false),
                (dns, of("names", "dns")?, udp, true),
                (dns, of("names", "dns")?, tcp, true),
                (db, of("first", "db")?, tcp, false),
                (db, pods.pod(db), pod_tcp, false),
            ]);
        }
        rows.push(("db-2", pods.addresses("stranger", "borrowed")?, tcp, false));
        pods.expect("frontend-1", &rows)?;
        let mut walled = Vec::new();
        for (node, api, dns) in [(1, "api-1", "dns-1"), (2, "api-2", "dns-2")] {
            walled.push((dns, pods.addresses("names", &name("dns", node))?, udp, false));
            walled.push((dns, pods.addresses("names", &name("dns", node))?, tcp, false));
            walled.push((dns, pods.pod(dns), pod_tcp, false));
            walled.push((api, pods.addresses("first", &name("api", node))?, tcp, false));
        }
        pods.expect("walled-1", &walled)?;
        let api = pods.addresses("first", "api-1")?;
        pods.expect(
            "open-2",
            &[("api-1", api, tcp, false), ("db-2", pods.addresses("stranger", "borrowed")?, tcp, false)],
        )
    })();
    let delete = ["delete", "namespace", "--ignore-not-found", "--timeout=120s"].into_iter().chain(NAMESPACES);
    cluster.kubectl(&delete.collect::<Vec<_>>())?;
    tested
}

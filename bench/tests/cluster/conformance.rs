//! Cases of another project's conformance suite between pods that kubelets have started.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use penstock_bench::conformance::{
    PodPlacement, SERVICES, Suite, SuiteCase, SuiteStep, by_turns, node_name, send_between,
};
use penstock_bench::probe::{EchoServers, Probe, Site};
use serde_json::{Value, json};

use crate::kubectl;
use crate::node::Cni;
use crate::real_cluster::RealCluster;
use crate::shell::eventually;

/// One case in so many, others with each CNI plugin. All of them run between namespaces (`make test-long`).
const SHARE: usize = 12;

/// From each pod to each other pod, over TCP, UDP and SCTP, on one node and on two: as soon as the plugin says that policy is in effect.
pub(crate) fn conformance_cases_hold(cluster: &mut RealCluster) -> Result<()> {
    let suite = Suite::find();
    let places = PodPlacement::new(&suite, by_turns);
    let pods = suite.cases[0].steps[0].pods();
    let first = if cluster.cni == Cni::Ptp { 0 } else { SHARE / 2 };
    let cases: Vec<&SuiteCase> =
        suite.cases.iter().filter(|case| can_run(case, &pods, &places)).skip(first).step_by(SHARE).collect();
    ensure!(cases.len() >= 10, "{} cases", cases.len());
    let tested = run(cluster, &cases, &places);
    let namespaces: BTreeSet<&str> = pods.iter().filter_map(|pod| Some(pod.split_once('/')?.0)).collect();
    let delete = ["delete", "namespace", "--ignore-not-found", "--timeout=120s"].into_iter().chain(namespaces);
    cluster.kubectl(&delete.collect::<Vec<_>>())?;
    tested
}

/// Whether it has these pods all the time, whose addresses the cluster chooses, and only what Kubernetes 1.20 knows.
fn can_run(case: &SuiteCase, pods: &BTreeSet<String>, places: &PodPlacement) -> bool {
    case.steps.iter().all(|step| {
        let objects = Value::from(step.state.objects(places)).to_string();
        step.pods() == *pods && !objects.contains("\"cidr\"") && !objects.contains("\"endPort\"")
    })
}

fn run(cluster: &RealCluster, cases: &[&SuiteCase], places: &PodPlacement) -> Result<()> {
    let mut applied = Applied::default();
    applied.bring(cluster, objects(cluster, &cases[0].steps[0], places))?;
    let sites = enter(cluster, &cases[0].steps[0].pods())?;
    let _servers = EchoServers::start_all(&sites, &SERVICES)?;
    let (mut counts, mut wrong) = (BTreeMap::new(), Vec::new());
    for case in cases {
        for (number, step) in case.steps.iter().enumerate() {
            applied.bring(cluster, objects(cluster, step, places))?;
            kubectl::run(cluster, &["wait", "--for", "enforced", "--timeout", "60s"], 0)?;
            let rows: Vec<_> = step.expected.iter().filter(|row| !row.is_self).collect();
            let probes: Vec<Probe> = rows.iter().map(|row| row.probe(&sites)).collect();
            for (row, outcome) in rows.iter().zip(send_between(&sites, &probes, |at| rows[at].allowed)?) {
                let is_apart = places.node_of(&row.from) != places.node_of(&row.to);
                *counts.entry((is_apart, row.allowed)).or_insert(0) += 1;
                if !row.agrees(outcome) {
                    wrong.push(format!("case {} ({}), step {number}: {row}; {outcome}", case.id, case.description));
                }
            }
        }
    }
    println!(
        "{} cases; rows by whether they go to another node, and whether they are allowed: {counts:?}",
        cases.len()
    );
    ensure!(wrong.is_empty(), "{} rows differ:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
    ensure!(counts.len() == 4 && counts.values().all(|&count| count > 100), "{counts:?}");
    Ok(())
}

/// The objects of a step, as this cluster can run them.
fn objects(cluster: &RealCluster, step: &SuiteStep, places: &PodPlacement) -> Vec<Value> {
    let mut objects = step.state.objects(places);
    for pod in objects.iter_mut().filter(|object| object["kind"] == "Pod") {
        let nodes = cluster.nodes.iter().enumerate();
        let mut names = nodes.map(|(number, node)| (node_name(number), node.number.name()));
        let on = names.find(|(name, _)| pod["spec"]["nodeName"] == *name).map(|(_, real)| real);
        pod["spec"]["nodeName"] = json!(on);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(0);
        pod["spec"]["containers"][0]["image"] = json!("docker.io/library/penstock-test-pause:1");
        pod["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
        pod["status"] = json!({});
    }
    objects
}

/// Waits until these pods run, and enters them.
fn enter(cluster: &RealCluster, pods: &BTreeSet<String>) -> Result<Vec<Site>> {
    pods.iter()
        .map(|pod| {
            let (namespace, name) = pod.split_once('/').context("NAMESPACE/NAME")?;
            let running = eventually(Duration::from_secs(120), || cluster.running(namespace, name))?;
            cluster.enter(&running)
        })
        .collect()
}

/// Objects of the suite at the API server, by kind, namespace and name.
#[derive(Default)]
struct Applied(BTreeMap<[String; 3], Value>);

impl Applied {
    /// Brings the server to these objects: what differs is applied, and policies that are gone are deleted.
    fn bring(&mut self, cluster: &RealCluster, objects: Vec<Value>) -> Result<()> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let key =
            |object: &Value| [&object["kind"], &object["metadata"]["namespace"], &object["metadata"]["name"]].map(text);
        let now: BTreeMap<_, _> = objects.iter().map(|object| (key(object), object.clone())).collect();
        for [kind, namespace, name] in self.0.keys().filter(|gone| !now.contains_key(*gone)) {
            ensure!(kind == "NetworkPolicy", "{kind} {namespace}/{name} comes and goes");
            cluster.kubectl(&["delete", "networkpolicy", "-n", namespace, name])?;
        }
        // In their order: namespaces come first.
        let changed: Vec<&Value> = objects.iter().filter(|object| self.0.get(&key(object)) != Some(*object)).collect();
        if !changed.is_empty() {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": changed}).to_string();
            // A new namespace has no service account at once, without which no pod is admitted.
            eventually(Duration::from_secs(30), || cluster.apply(&list))?;
        }
        self.0 = now;
        Ok(())
    }
}

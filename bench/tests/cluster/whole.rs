//! What anyone expects of Penstock in a cluster.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use penstock_bench::expectation::{Expectation, PolicyOracle};
use penstock_bench::probe::{self, EchoServers, EchoService, Protocol, RetryPolicy, Site};

use crate::real_cluster::RealCluster;
use crate::shell::eventually;

/// Of each pod to each pod, both families, three ports: as the engine evaluates the objects that the API server has.
pub(crate) fn pods_reach_each_other_as_policy_says(cluster: &mut RealCluster) -> Result<()> {
    pods_reach_each_other(cluster)
}

fn pods_reach_each_other(cluster: &RealCluster) -> Result<()> {
    let oracle = PolicyOracle::new(&cluster.objects()?);
    let probes = probe::all_pairs(&cluster.sites, &[Protocol::Tcp(8080), Protocol::Tcp(9090), Protocol::Udp(5353)]);
    let outcomes = probe::run(&cluster.sites, &probes, RetryPolicy::default())?;
    let (mut allowed, mut wrong) = (0, Vec::new());
    for (probe, outcome) in probes.iter().zip(&outcomes) {
        let from = &cluster.sites[probe.from];
        let source = from.address(probe.destination.is_ipv6()).expect("every pod has both families");
        let expected = oracle.expect(source, probe);
        allowed += usize::from(expected == Expectation::Allowed);
        if (expected == Expectation::Allowed) != outcome.arrived() {
            let to = &cluster.sites[probe.to].name;
            wrong.push(format!(
                "{} to {to} {} {}: {outcome}, but {expected}",
                from.name, probe.destination, probe.protocol
            ));
        }
    }
    ensure!(wrong.is_empty(), "{} of {} probes:\n{}", wrong.len(), probes.len(), wrong.join("\n"));
    ensure!(
        allowed > 20 && probes.len() - allowed > 20,
        "{allowed} of {} are allowed: both outcomes occur",
        probes.len()
    );
    Ok(())
}

/// A node whose configuration names its NIC, beside kube-proxy, which drops what connection tracking calls invalid.
pub(crate) fn uplinks_are_no_obstacle_beside_kube_proxy(cluster: &mut RealCluster) -> Result<()> {
    cluster.with_settings(("uplinks = [\"eth0\"]", ""), || pods_reach_each_other(cluster))
}

/// What docs and README show: status, flows and a bundle, by `kubectl exec`.
pub(crate) fn commands_answer_in_the_pods(cluster: &mut RealCluster) -> Result<()> {
    for node in 0..cluster.nodes.len() {
        let status = cluster.penstock(node, &["status"])?;
        ensure!(
            status.contains("is in force on every worker") && status.contains("tcx"),
            "the default attach mode: {status}"
        );
        cluster.penstock(node, &["flows"])?;
        cluster.penstock(node, &["dump", "/tmp/bundle.tar.gz"])?;
    }
    Ok(())
}

/// Ordinary churn is nothing that anyone must look at.
pub(crate) fn a_deleted_pod_leaves_no_warning(cluster: &mut RealCluster) -> Result<()> {
    for node in &cluster.nodes {
        let name = node.number.name();
        cluster.apply(&waiting_pod("lab", &format!("short-{name}"), &name))?;
    }
    for node in 0..cluster.nodes.len() {
        let pod = format!("pod/short-{}", cluster.nodes[node].number.name());
        cluster.kubectl(&["-n", "lab", "wait", "--for=condition=Ready", &pod, "--timeout=60s"])?;
        cluster.kubectl(&["-n", "lab", "delete", &pod, "--wait=true", "--timeout=60s"])?;
    }
    // The daemon hears of the interface and of the object one after the other.
    std::thread::sleep(Duration::from_secs(2));
    for node in 0..cluster.nodes.len() {
        let log = cluster.log_of_penstock(node, "60s")?;
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
        ensure!(warnings.is_empty(), "{}", warnings.join("\n"));
    }
    Ok(())
}

/// A pod that starts while no daemon runs, as at boot: its first packet is policy's.
pub(crate) fn a_pod_that_starts_without_a_daemon_is_closed(cluster: &mut RealCluster) -> Result<()> {
    let selector = |value: &str| {
        let patch =
            format!(r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kubernetes.io/os":"{value}"}}}}}}}}}}"#);
        cluster.kubectl(&["-n", "kube-system", "patch", "daemonset/penstock", "-p", &patch])
    };
    selector("none")?;
    let daemons = ["-n", "kube-system", "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=penstock"];
    cluster.kubectl(&[daemons.as_slice(), &["--timeout=120s"]].concat())?;
    // The namespace denies all that its policies do not allow; both pods are new, and on one node.
    let node = &cluster.nodes[0];
    for name in ["early", "open"] {
        let namespace = if name == "early" { "shop" } else { "lab" };
        cluster.apply(&waiting_pod(namespace, name, &node.number.name()))?;
    }
    let enter = |namespace, name| {
        let pod = eventually(Duration::from_secs(60), || cluster.running(namespace, name))?;
        cluster.enter(&pod)
    };
    let (early, open) = (enter("shop", "early")?, enter("lab", "open")?);
    let servers = [(&early, EARLY), (&open, OPEN)]
        .map(|(site, identity)| EchoServers::start(site, identity, &[EchoService::Tcp(8080)]));
    let (to_early, to_open) = ((EARLY, early.addresses[0]), (OPEN, open.addresses[0]));
    let guest = cluster.site("lab/guest");
    let reaches = |from: &Site, to| -> Result<bool> {
        Ok(probe::run_one(from, to, Protocol::Tcp(8080), RetryPolicy::default())?.arrived())
    };
    ensure!(!reaches(guest, to_early)? && !reaches(guest, to_open)?, "without a daemon a new pod is closed");
    ensure!(!reaches(&open, cluster.target("ops/monitor", false))?, "and sends nothing");
    selector("linux")?;
    cluster.wait_for_penstock()?;
    eventually(Duration::from_secs(20), || match reaches(guest, to_open)? {
        true => Ok(()),
        false => bail!("a pod without policies stays closed"),
    })?;
    ensure!(!reaches(guest, to_early)?, "policy denies it");
    ensure!(reaches(&open, cluster.target("ops/monitor", false))?, "no policy denies it");
    drop(servers);
    cluster.kubectl(&["delete", "pod", "-n", "shop", "early"])?;
    cluster.kubectl(&["delete", "pod", "-n", "lab", "open"]).map(drop)
}

/// The first thing that a pod's container does is to send one packet, and it has no other try.
pub(crate) fn the_first_packet_of_a_new_pod_passes(cluster: &mut RealCluster) -> Result<()> {
    let [v4, v6] = [false, true].map(|v6| cluster.target("lab/guest", v6).1);
    let names: Vec<(String, String)> = (cluster.nodes.iter())
        .flat_map(|node| (0..3).map(|number| (node.number.name(), number)))
        .map(|(node, number)| (format!("first-{node}-{number}"), node))
        .collect();
    for (name, node) in &names {
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: lab, name: {name}}}\n\
             spec: {{nodeName: {node}, restartPolicy: Never, terminationGracePeriodSeconds: 0, containers: \
             [{{name: main, image: \"docker.io/library/penstock-test-pause:1\", imagePullPolicy: Never, \
             command: [/bin/sh, -c, \"ping -c 1 -W 10 {v4} && ping -6 -c 1 -W 10 {v6}\"]}}]}}\n"
        ))?;
    }
    for (name, _) in &names {
        eventually(Duration::from_secs(60), || {
            let pod = cluster.get(&["pod", "-n", "lab", name])?;
            match pod["status"]["phase"].as_str() {
                Some("Succeeded" | "Failed") => Ok(()),
                other => bail!("{name} is {other:?}"),
            }
        })?;
        let pod = cluster.get(&["pod", "-n", "lab", name])?;
        ensure!(pod["status"]["phase"] == "Succeeded", "{name}: {}", pod["status"]["containerStatuses"]);
        cluster.kubectl(&["delete", "pod", "-n", "lab", name, "--timeout=60s"])?;
    }
    Ok(())
}

/// Identities of servers in pods that are not the workload's.
const EARLY: u32 = 1_000;
const OPEN: u32 = 1_001;

/// A pod whose container only waits.
fn waiting_pod(namespace: &str, name: &str, node: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: {namespace}, name: {name}}}\n\
         spec: {{nodeName: {node}, terminationGracePeriodSeconds: 0, containers: \
         [{{name: main, image: \"docker.io/library/penstock-test-pause:1\", imagePullPolicy: Never}}]}}\n"
    )
}

/// Waits until a probe of `from` has the outcome that policy gives it, and fails otherwise.
pub(crate) fn expect_reached(cluster: &RealCluster, from: &str, to: &str, port: u16, reached: bool) -> Result<()> {
    eventually(Duration::from_secs(20), || {
        let outcome =
            probe::run_one(cluster.site(from), cluster.target(to, false), Protocol::Tcp(port), RetryPolicy::default())?;
        match outcome.arrived() == reached {
            true => Ok(()),
            false => bail!("{from} to {to}, TCP {port}: {outcome}"),
        }
    })
}

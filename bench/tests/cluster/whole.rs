//! Tests what anyone expects of Penstock in a cluster.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use penstock_bench::expectation::{Expectation, PolicyOracle};
use penstock_bench::probe::{self, EchoConnection, EchoServers, EchoService, Protocol, RetryPolicy, Site};

use crate::node::RealNode;
use crate::real_cluster::{RealCluster, STARTUP_TAINT};
use crate::shell::eventually;

/// From each pod to each pod, both families, three ports: as the engine evaluates the objects that the API server has.
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

/// Commands of docs and README: status, flows and a bundle, by `kubectl exec`.
pub(crate) fn commands_answer_in_the_pods(cluster: &mut RealCluster) -> Result<()> {
    for node in 0..cluster.nodes.len() {
        let status = cluster.penstock(node, &["status"])?;
        ensure!(status.contains("is in effect on every worker"), "{status}");
        cluster.penstock(node, &["flows"])?;
        cluster.penstock(node, &["dump", "/tmp/bundle.tar.gz"])?;
    }
    let shown = cluster.kubectl(&["-n", "kube-system", "exec", "ds/penstock", "--", "penstock", "status"])?;
    ensure!(shown.contains("is in effect on every worker"), "as README has it: {shown}");
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

/// Ends the daemons of all nodes, carries out `test`, and lets them start again.
fn without_daemons(cluster: &RealCluster, test: impl FnOnce() -> Result<()>) -> Result<()> {
    let selector = |value: &str| {
        let patch =
            format!(r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kubernetes.io/os":"{value}"}}}}}}}}}}"#);
        cluster.kubectl(&["-n", "kube-system", "patch", "daemonset/penstock", "-p", &patch])
    };
    selector("none")?;
    let daemons = ["-n", "kube-system", "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=penstock"];
    let ended = cluster.kubectl(&[daemons.as_slice(), &["--timeout=120s"]].concat());
    let result = ended.and_then(|_| test());
    selector("linux")?;
    cluster.wait_for_penstock()?;
    result
}

fn reaches(from: &Site, to: (u32, IpAddr)) -> Result<bool> {
    Ok(probe::run_one(from, to, Protocol::Tcp(8080), RetryPolicy::default())?.arrived())
}

/// A pod that starts while no daemon runs, as at boot: its first packet is policy's. On both nodes.
pub(crate) fn a_pod_that_starts_without_a_daemon_is_closed(cluster: &mut RealCluster) -> Result<()> {
    // The namespace of the first denies all that its policies do not allow; both are new, and on one node.
    let names = |node: &RealNode| {
        [("shop", format!("early-{}", node.number.name())), ("lab", format!("open-{}", node.number.name()))]
    };
    let (outside, guest) = (cluster.outside(), cluster.site("lab/guest"));
    let mut started = Vec::new();
    without_daemons(cluster, || {
        for node in &cluster.nodes {
            let mut pods = Vec::new();
            for (identity, (namespace, name)) in (NEW..).zip(names(node)) {
                cluster.apply(&waiting_pod(namespace, &name, &node.number.name()))?;
                let pod = eventually(Duration::from_secs(60), || cluster.running(namespace, &name))?;
                let site = cluster.enter(&pod)?;
                let server = EchoServers::start(&site, identity, &[EchoService::Tcp(8080)])?;
                pods.push(((identity, site.addresses[0]), site, server));
            }
            let [(to_early, early, _), (to_open, open, _)] = pods.as_slice() else { bail!("two pods") };
            // The first and the last have no other end that a program would close.
            for (from, to) in
                [(&outside, to_early), (&outside, to_open), (guest, to_open), (open, to_early), (early, to_open)]
            {
                ensure!(!reaches(from, *to)?, "{} reaches a new pod without a daemon: {to:?}", from.name);
            }
            ensure!(!reaches(open, cluster.target("ops/monitor", false))?, "{} sends without a daemon", open.name);
            started.push(pods);
        }
        Ok(())
    })?;
    for pods in &started {
        let [(to_early, ..), (to_open, open, _)] = pods.as_slice() else { bail!("two pods") };
        eventually(Duration::from_secs(20), || match reaches(guest, *to_open)? && reaches(&outside, *to_open)? {
            true => Ok(()),
            false => bail!("a pod without policies stays closed"),
        })?;
        ensure!(!reaches(guest, *to_early)? && !reaches(&outside, *to_early)?, "policy denies it");
        ensure!(reaches(open, cluster.target("ops/monitor", false))?, "no policy denies it");
    }
    drop(started);
    for (namespace, name) in cluster.nodes.iter().flat_map(names) {
        cluster.kubectl(&["delete", "pod", "-n", namespace, &name])?;
    }
    Ok(())
}

/// On both nodes, of which one has no BPF file system of its own: what is pinned outlasts the containers.
pub(crate) fn what_policy_denies_stays_denied_without_a_daemon(cluster: &mut RealCluster) -> Result<()> {
    let outside = cluster.outside();
    let mut connections = Vec::new();
    for from in ["shop/web", "ops/dash"] {
        let to = cluster.target("ops/monitor", false);
        connections.push(EchoConnection::open(&cluster.site(from).namespace, to, 8080, Duration::from_secs(60))?);
    }
    without_daemons(cluster, || {
        for node in &cluster.nodes {
            let pinned = node.path("/sys/fs/bpf/penstock");
            ensure!(pinned.exists(), "nothing is pinned on {}", node.number.name());
        }
        for to in ["shop/api", "shop/db"] {
            ensure!(!reaches(&outside, cluster.target(to, false))?, "{to} is open without a daemon");
        }
        connections.iter().try_for_each(|connection| connection.wait_for(20, Duration::from_secs(60)))
    })
}

/// Nodes that are registered with a taint take pods once policy is in effect there.
pub(crate) fn a_ready_daemon_removes_the_startup_taint(cluster: &mut RealCluster) -> Result<()> {
    let node = cluster.nodes[1].number.name();
    for taint in [STARTUP_TAINT, "dedicated"] {
        cluster.kubectl(&["taint", "node", &node, &format!("{taint}=:NoSchedule")])?;
    }
    // The daemons start again.
    cluster.switch_all_on()?;
    let removed = eventually(Duration::from_secs(60), || {
        let taints = cluster.get(&["node", &node])?["spec"]["taints"].to_string();
        ensure!(!taints.contains(STARTUP_TAINT) && taints.contains("dedicated"), "{taints}");
        Ok(())
    });
    cluster.kubectl(&["taint", "node", &node, "dedicated-"])?;
    removed
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

/// The first identity of servers in pods that are not the workload's.
const NEW: u32 = 1_000;

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

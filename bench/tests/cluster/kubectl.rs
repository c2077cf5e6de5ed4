//! `kubectl penstock` on the cluster: commands run in Penstock's pods by the real API server and kubelets.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use penstock_bench::probe::{self, EchoConnection, Protocol, RetryPolicy};
use penstock_bench::testbed::{ScratchDir, penstock_binary};
use penstock_replay::capture::Captures;
use serde_json::Value;

use crate::real_cluster::RealCluster;
use crate::shell::eventually;
use crate::whole::expect_reached;

const LIMIT: Duration = Duration::from_secs(60);
/// From one node to the other; no policy is about them.
const FROM: &str = "lab/guest";
const TO: &str = "ops/monitor";

/// The plugin, with full rights unless `arguments` say otherwise.
fn plugin(cluster: &RealCluster, arguments: &[&str]) -> Result<Command> {
    let binary = penstock_binary()?.with_file_name("kubectl-penstock");
    ensure!(binary.is_file(), "{}: build it (make build)", binary.display());
    let mut command = cluster.plane.kubectl_plugin(&binary);
    command.args(arguments).stdin(Stdio::null());
    Ok(command)
}

/// The output of the command, once it has ended with this code.
pub(crate) fn run(cluster: &RealCluster, arguments: &[&str], code: i32) -> Result<(String, String)> {
    let output = plugin(cluster, arguments)?.output()?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.code() == Some(code), "{arguments:?} ended with {}:\n{stdout}{stderr}", output.status);
    Ok((stdout, stderr))
}

fn json(cluster: &RealCluster, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&run(cluster, &[arguments, &["--json"]].concat(), 0)?.0)?)
}

/// Status of both nodes, and a connection that is listed by the nodes of its ends.
pub(crate) fn the_plugin_answers_for_all_nodes(cluster: &mut RealCluster) -> Result<()> {
    eventually(LIMIT, || match run(cluster, &["status"], 0)?.0.contains("enforced on 2 of 2 nodes") {
        true => Ok(()),
        false => bail!("{}", run(cluster, &["status"], 0)?.0),
    })?;
    let (from, to) = (cluster.site(FROM), cluster.target(TO, false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT)?;
    flow.wait_for(3, LIMIT)?;
    let flows = json(cluster, &["flows", "--pod", FROM, "--port", "8080"])?;
    let nodes: Vec<&str> =
        flows["flows"].as_array().into_iter().flatten().filter_map(|it| it["node"].as_str()).collect();
    ensure!(nodes.contains(&"n1") && nodes.contains(&"n2"), "{flows}");
    let explained = json(cluster, &["explain", "--from", FROM, "--to", TO, "--port", "8080/TCP"])?;
    ensure!(
        explained["allowed"] == true && explained["nodes"].as_array().is_some_and(|nodes| nodes.len() == 2),
        "{explained}"
    );
    flows_are_watched(cluster)?;
    let top = json(cluster, &["top"])?;
    let pods = top["pods"].as_array().context("pods")?;
    ensure!(top["nodes"].as_object().is_some_and(|nodes| nodes.len() == 2), "{top}");
    ensure!([FROM, TO].iter().all(|name| pods.iter().any(|pod| pod["pod"] == *name)), "{top}");
    let folder = ScratchDir::new()?;
    let folder = folder.path().join("dump");
    run(cluster, &["dump", &folder.display().to_string()], 0)?;
    ensure!(folder.join("n1/status.json").is_file() && folder.join("n2/status.json").is_file(), "a folder each");
    Ok(())
}

/// The second listing has the rate of the connection, of each node.
fn flows_are_watched(cluster: &RealCluster) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("watched");
    let mut command = plugin(cluster, &["flows", "--pod", FROM, "--port", "8080", "--watch", "1"])?;
    let mut watch = command.stdout(File::create(&file)?).spawn()?;
    let watched = eventually(LIMIT, || {
        let text = std::fs::read_to_string(&file)?;
        let has_rate = |node: &str| text.lines().any(|line| line.starts_with(node) && line.contains("bit/s"));
        ensure!(has_rate("n1") && has_rate("n2"), "no rates: {text}");
        Ok(())
    });
    interrupt(&mut watch)?;
    watched
}

/// A connection counts for the rule that decides it, whatever node that is on.
pub(crate) fn the_plugin_counts_hits_of_rules_of_all_nodes(cluster: &mut RealCluster) -> Result<()> {
    let hits = |policy: &str| -> Result<(u64, u64)> {
        let rules = json(cluster, &["rules"])?;
        let rule = rules["rules"].as_array().into_iter().flatten().find(|rule| rule["policy"] == policy);
        let rule = rule.with_context(|| format!("{policy} is not listed: {rules}"))?;
        Ok((rule["hits"].as_u64().context("hits")?, rule["nodes"].as_u64().context("nodes")?))
    };
    // One pod is on the first node, the other on the second.
    for (policy, from, to, port) in
        [("shop/web-is-open", FROM, "shop/web", 8080), ("shop/db-from-api", "shop/api", "shop/db", 9090)]
    {
        let before = hits(policy)?.0;
        expect_reached(cluster, from, to, port, true)?;
        eventually(LIMIT, || {
            let (hits, nodes) = hits(policy)?;
            ensure!(hits > before && nodes >= 1, "{policy}: {hits} hits on {nodes} nodes, {before} before");
            Ok(())
        })?;
    }
    Ok(())
}

/// When the wait ends, the next packet is judged by the policy: a probe is not repeated.
pub(crate) fn the_plugin_waits_until_a_policy_is_in_force(cluster: &mut RealCluster) -> Result<()> {
    expect_reached(cluster, FROM, TO, 8080, true)?;
    for allowed in [false, true, false] {
        let rule = if allowed { "[{}]" } else { "[]" };
        cluster.apply(&format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: ops, name: waited-for}}\n\
             spec: {{podSelector: {{matchLabels: {{app: monitor}}}}, policyTypes: [Ingress], ingress: {rule}}}\n"
        ))?;
        let object = "networkpolicy/ops/waited-for";
        let said = run(cluster, &["wait", "--for", "enforced", object, "--timeout", "60s"], 0)?.0;
        ensure!(said == format!("{object}: enforced on 2 nodes\n"), "{said}");
        let once = RetryPolicy { attempts: 1, ..RetryPolicy::default() };
        let outcome = probe::run_one(cluster.site(FROM), cluster.target(TO, false), Protocol::Tcp(8080), once)?;
        ensure!(outcome.arrived() == allowed, "allowed is {allowed}, and {outcome}");
    }
    cluster.kubectl(&["-n", "ops", "delete", "networkpolicy", "waited-for"])?;
    run(cluster, &["wait", "--for", "enforced", "pod/ops/monitor", "--timeout", "60s"], 0)?;
    run(cluster, &["wait", "--for", "enforced", "--timeout", "60s"], 0)?;
    let (_, none) = run(cluster, &["wait", "--for", "enforced", "networkpolicy/ops/waited-for"], 2)?;
    ensure!(none.contains("there is none"), "{none}");
    expect_reached(cluster, FROM, TO, 8080, true)
}

/// Settings that must be switched on: captures, of both ends in one file and as bundles, and policies to try.
pub(crate) fn the_plugin_captures_and_tries_on_all_nodes(cluster: &mut RealCluster) -> Result<()> {
    cluster.switch_all_on()?;
    both_ends_are_in_one_file(cluster)?;
    a_bundle_of_each_node_replays_to_the_same_verdicts(cluster)?;
    a_policy_is_tried_on_the_node_of_its_pod(cluster)
}

/// In the order of the times, until Ctrl-C ends the captures on both nodes.
fn both_ends_are_in_one_file(cluster: &RealCluster) -> Result<()> {
    let (from, to) = (cluster.site(FROM), cluster.target(TO, false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT)?;
    flow.wait_for(3, LIMIT)?;
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("both.pcapng");
    let options = ["--from", FROM, "--to", TO, "-o", &file.display().to_string()];
    capture(cluster, &options, || flow.wait_for(20, LIMIT))?;
    expect_both_ends(&file)?;
    expect_no_capture(cluster)
}

fn expect_no_capture(cluster: &RealCluster) -> Result<()> {
    let status = json(cluster, &["status"])?;
    let is_over =
        status["nodes"].as_array().is_some_and(|nodes| nodes.iter().all(|it| it["status"]["capture"].is_null()));
    ensure!(is_over, "a capture is left on a node: {status}");
    Ok(())
}

/// Denied and allowed connections, by the nodes of both ends; then without the cluster.
fn a_bundle_of_each_node_replays_to_the_same_verdicts(cluster: &RealCluster) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let directory = scratch.path().join("incident");
    let options =
        ["--bundle", &directory.display().to_string(), "--filter", "tcp port 8080 or tcp port 9090 or udp port 5353"];
    let said = capture(cluster, &options, || {
        // Each node has packets that pass. The second one denies those for its pod, and the first one those of its own.
        for (from, to, port, allowed) in
            [(FROM, TO, 8080, true), ("ops/monitor", "shop/db", 9090, false), ("lab/builder", "lab/guest", 9090, false)]
        {
            expect_reached(cluster, from, to, port, allowed)?;
        }
        Ok(())
    })?;
    for node in ["n1", "n2"] {
        let bundle = directory.join(node);
        let mut replay = Command::new(penstock_binary()?);
        let output = replay.arg("replay").arg(&bundle).args(["--summary", "json"]).output()?;
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.code() == Some(0), "{node}: {}: {text}{errors}\n{said}", output.status);
        let summary: Value = serde_json::from_str(&text)?;
        let (same, different) = (&summary["recorded"]["same"], &summary["recorded"]["different"]);
        ensure!(same.as_u64() > Some(0) && different == 0, "{node}: {summary:#}");
        let is_there = |verdict: &str| summary["verdicts"][verdict].as_u64() > Some(0);
        ensure!(is_there("allow") && is_there("deny"), "{node}: {summary:#}");
    }
    Ok(())
}

/// It would cut a connection of the pod, and cuts none.
fn a_policy_is_tried_on_the_node_of_its_pod(cluster: &RealCluster) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("tried.yaml");
    let policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: ops, name: tried}\n\
                  spec: {podSelector: {matchLabels: {app: monitor}}, policyTypes: [Ingress]}\n";
    std::fs::write(&file, policy)?;
    let (from, to) = (cluster.site(FROM), cluster.target(TO, false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT)?;
    flow.wait_for(3, LIMIT)?;
    run(cluster, &["trial", "start", "--manifests", &file.display().to_string()], 0)?;
    let found = eventually(LIMIT, || {
        let (shown, said) = run(cluster, &["trial", "status", "--json"], 3)?;
        let status: Value = serde_json::from_str(&shown)?;
        let changes = status["changes"].as_array().into_iter().flatten();
        let mut cut = changes.filter(|it| it["from"] == FROM && it["to"] == TO && it["port"] == 8080);
        let cut = cut.next().with_context(|| format!("not among what would change: {shown}{said}"))?;
        ensure!(cut["present"]["allowed"] == true && cut["promoted"]["allowed"] == false, "{cut}");
        ensure!(status["nodes"] == 2, "each node judges: {status}");
        Ok(())
    });
    let stopped = run(cluster, &["trial", "stop"], 0);
    found?;
    stopped?;
    flow.wait_for(3, LIMIT)?;
    run(cluster, &["trial", "status"], 0).map(drop)
}

/// Captures with these options on both nodes while something happens, until Ctrl-C. Returns what the plugin says.
fn capture(cluster: &RealCluster, options: &[&str], meanwhile: impl FnOnce() -> Result<()>) -> Result<String> {
    let scratch = ScratchDir::new()?;
    let log = scratch.path().join("log");
    let mut capture = plugin(cluster, &[&["capture"], options].concat())?.stderr(File::create(&log)?).spawn()?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let captured = eventually(LIMIT, || match said().contains("capturing on n1, n2") {
        true => Ok(()),
        false => bail!("it does not begin: {}", said()),
    })
    .and_then(|()| meanwhile());
    let ended = interrupt(&mut capture)?;
    captured?;
    ensure!(ended.code() == Some(0), "{ended}: {}", said());
    Ok(said())
}

/// Ctrl-C. Returns how it has ended; by force after a while.
fn interrupt(child: &mut Child) -> Result<ExitStatus> {
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT)?;
    let deadline = Instant::now() + LIMIT;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status),
            None if Instant::now() > deadline => {
                child.kill()?;
                return Ok(child.wait()?);
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn expect_both_ends(file: &Path) -> Result<()> {
    let (mut captures, mut frames, mut found) = (Captures::open(&[file])?, Vec::new(), Vec::new());
    while let Some(record) = captures.next(&mut frames)? {
        let name = captures.interfaces()[record.interface.index()].name.clone().unwrap_or_default();
        found.push((record.time, name));
    }
    for interface in ["lab/guest on n2", "ops/monitor on n1"] {
        let packets = found.iter().filter(|(_, name)| name == interface).count();
        ensure!(packets >= 10, "{packets} packets of {interface}: {found:?}");
    }
    ensure!(found.is_sorted_by_key(|(time, _)| *time), "the nodes have one clock: {found:?}");
    Ok(())
}

/// The rights that are shipped are enough, and less is an error that names what is missing.
pub(crate) fn the_plugin_needs_the_rights_that_are_shipped(cluster: &mut RealCluster) -> Result<()> {
    let (_, refused) = run(cluster, &["status", "--as", "reader"], 2)?;
    ensure!(refused.contains("needs list on pods in kube-system"), "{refused}");
    cluster.kubectl(&["create", "clusterrolebinding", "reader", "--clusterrole=view", "--user=reader"])?;
    let (_, refused) = run(cluster, &["status", "--as", "reader"], 2)?;
    ensure!(refused.contains("needs create and get on pods/exec in kube-system"), "{refused}");
    cluster.kubectl(&["delete", "clusterrolebinding", "reader"])?;
    cluster.kubectl(&["apply", "-k", &cluster.manifests("install", "kubectl")?])?;
    let user = ["--as", "operator", "--as-group", "penstock-users"];
    eventually(LIMIT, || run(cluster, &[&["status"], user.as_slice()].concat(), 0))?;
    run(cluster, &[&["flows", "--pod", FROM], user.as_slice()].concat(), 0)?;
    run(cluster, &[&["wait", "--for", "enforced"], user.as_slice()].concat(), 0)?;
    cluster.kubectl(&["delete", "-k", &cluster.manifests("install", "kubectl")?]).map(drop)
}

/// A node without a daemon is no silence.
pub(crate) fn the_plugin_names_a_node_without_a_daemon(cluster: &mut RealCluster) -> Result<()> {
    let only = |value: &str| {
        let patch =
            format!(r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kubernetes.io/hostname":{value}}}}}}}}}}}"#);
        cluster.kubectl(&["-n", "kube-system", "patch", "daemonset/penstock", "-p", &patch])
    };
    only("\"n1\"")?;
    let named = eventually(Duration::from_secs(120), || {
        let (shown, said) = run(cluster, &["status"], 4)?;
        let line = said.lines().find(|line| line.contains("node n2: ")).context("n2 is not named")?.to_owned();
        ensure!(line.contains("no pod of Penstock is there") && shown.contains("of 2 nodes"), "{shown}{said}");
        Ok(())
    });
    only("null")?;
    cluster.wait_for_penstock()?;
    named?;
    run(cluster, &["status"], 0).map(drop)
}

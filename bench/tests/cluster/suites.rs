//! Suites that others wrote, as they are, against Penstock as it is shipped: Kubernetes' end-to-end tests, and the conformance suite of
//! ClusterNetworkPolicy.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use penstock_bench::testbed::ScratchDir;
use serde_json::Value;

use crate::real_cluster::RealCluster;
use crate::shell::output;

/// Which of Kubernetes' tests.
struct Selection {
    /// The name of the file with the results.
    name: &'static str,
    title: &'static str,
    /// Ginkgo's label filter, and expressions that the tests' names match, or may not match.
    labels: &'static str,
    focus: &'static [&'static str],
    skip: &'static [&'static str],
    at_least: usize,
}

const NETWORK_POLICY: Selection = Selection {
    name: "kubernetes-network-policy",
    title: "NetworkPolicy, Kubernetes' end-to-end tests",
    labels: "Feature: containsAny NetworkPolicy",
    focus: &[],
    skip: &[],
    at_least: 45,
};

/// Tests that need a cloud, a feature that is off by default or a cluster of their own are not selected.
const SIG_NETWORK: Selection = Selection {
    name: "kubernetes-sig-network",
    title: "Services, networking, host ports, connection tracking and DNS, Kubernetes' end-to-end tests",
    labels: "Feature: isEmpty && !Serial && !Disruptive && !Slow && !Flaky",
    focus: &[r"\[sig-network\] (Services|Networking|HostPort|Conntrack|DNS)"],
    skip: &[],
    at_least: 60,
};

/// Ten of each, which take a minute or two: that the suites run, and that what is most ordinary holds.
const QUICK: Selection = Selection {
    name: "kubernetes-quick",
    title: "A choice of Kubernetes' end-to-end tests",
    labels: "!Serial && !Disruptive && !Flaky",
    focus: &[
        "Netpol .*should support a 'default-deny-ingress' policy",
        "Netpol .*should allow egress access on one named port",
        "Netpol .*should deny egress from pods based on PodSelector",
        "Netpol .*should ensure an IP overlapping both IPBlock.CIDR and IPBlock.Except is allowed",
        "Netpol .*should enforce except clause while egress access to server in CIDR block",
        "Services should serve a basic endpoint from pods",
        "Services should be able to create a functioning NodePort service",
        "DNS should provide DNS for services",
        "Networking Granular Checks: Pods should function for intra-pod communication: udp",
        "HostPort validates that there is no conflict",
        "Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service",
    ],
    skip: &["SCTPConnectivity", "sig-windows"],
    at_least: 10,
};

pub(crate) fn network_policy(cluster: &mut RealCluster) -> Result<()> {
    run_end_to_end(cluster, &NETWORK_POLICY)
}

pub(crate) fn sig_network(cluster: &mut RealCluster) -> Result<()> {
    run_end_to_end(cluster, &SIG_NETWORK)
}

pub(crate) fn ten_of_each_suite_pass(cluster: &mut RealCluster) -> Result<()> {
    run_end_to_end(cluster, &QUICK)?;
    run_conformance(
        cluster,
        "^TestConformanceProfiles$/^CNP(AdminTier|BaselineTier)(Gress|PodSelector|PortRange|EgressTCP|IngressUDP)$",
    )
    .map(drop)
}

/// The SIG's suite, with the report that it writes for the SIG's list of implementations.
pub(crate) fn cluster_network_policy(cluster: &mut RealCluster) -> Result<()> {
    let report = run_conformance(cluster, "^TestConformanceProfiles$")?;
    let release = report.lines().find_map(|line| line.strip_prefix("networkPolicyBundleVersion: "));
    let release = release.context("the report names no release")?;
    fs::write(results_folder()?.join(format!("network-policy-api-{release}.yaml")), &report)?;
    ensure!(!report.contains("result: failure"), "{report}");
    Ok(())
}

/// Tests that do not pass, or skip themselves, and why: lines such as `PART OF ITS NAME: REASON`.
const EXPLAINED: &str = include_str!("suites-explained.txt");

fn explanation(test: &str) -> Option<&'static str> {
    let lines = EXPLAINED.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.rsplit_once(": ")).find(|(part, _)| test.contains(part)).map(|(_, reason)| reason)
}

/// Outcome of one test.
struct Outcome {
    test: String,
    state: String,
    message: String,
}

fn run_end_to_end(cluster: &RealCluster, selection: &Selection) -> Result<()> {
    cluster.start_dns()?;
    let scratch = ScratchDir::new()?;
    let folder = scratch.path();
    let mut ginkgo = program(cluster, "ginkgo");
    ginkgo.args(["--procs=4", "--no-color", "--timeout=2h", "--label-filter", selection.labels]);
    ginkgo.args(selection.focus.iter().map(|expression| format!("--focus={expression}")));
    ginkgo.args(selection.skip.iter().map(|expression| format!("--skip={expression}")));
    ginkgo
        .arg("--output-dir")
        .arg(folder)
        .arg("--json-report=report.json")
        .arg(cluster.plane.kubernetes().program("e2e.test"));
    ginkgo.args(["--", "--provider=skeleton", "--num-nodes=2", "--minStartupPods=0", "--disable-log-dump"]);
    ginkgo.arg("--kubeconfig").arg(cluster.plane.admin_kubeconfig()).arg("--kubectl-path");
    ginkgo.arg(cluster.plane.kubernetes().program("kubectl"));
    let log = log_of(selection.name)?;
    // It fails if a test does: the report says which.
    let ended = ginkgo.stdout(File::create(&log)?).stderr(Stdio::null()).status()?;
    let report = folder.join("report.json");
    let text = fs::read_to_string(&report).with_context(|| format!("ginkgo ended with {ended}: {}", log.display()))?;
    let outcomes = outcomes(&serde_json::from_str(&text)?)?;
    fs::copy(&report, log.with_extension("json"))?;
    let text = described(cluster, selection.title, &outcomes)?;
    if selection.name != QUICK.name {
        fs::write(results_folder()?.join(format!("{}.txt", selection.name)), &text)?;
    }
    let passed = outcomes.iter().filter(|outcome| outcome.state == "passed").count();
    let unexplained: Vec<&str> = text.lines().filter(|line| line.contains(UNEXPLAINED)).collect();
    ensure!(unexplained.is_empty(), "{}; see {}:\n{}", summary(&outcomes), log.display(), unexplained.join("\n"));
    ensure!(passed >= selection.at_least, "{passed} passed: {}", log.display());
    Ok(())
}

/// Tests that ran, or that skipped themselves; those that were not selected say nothing.
fn outcomes(report: &Value) -> Result<Vec<Outcome>> {
    let specs =
        report.as_array().into_iter().flatten().flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
    let mut outcomes = Vec::new();
    for spec in specs {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (state, message) = (text(&spec["State"]), text(&spec["Failure"]["Message"]));
        let is_setup = spec["LeafNodeType"] != "It";
        if is_setup && state == "passed" || state == "pending" || state == "skipped" && message.is_empty() {
            continue;
        }
        let containers = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().map(text);
        let names: Vec<String> =
            containers.chain([text(&spec["LeafNodeText"])]).filter(|name| !name.is_empty()).collect();
        let test = if is_setup { text(&spec["LeafNodeType"]) } else { names.join(" ") };
        outcomes.push(Outcome { test, state, message });
    }
    outcomes.sort_by(|one, other| (&one.state, &one.test).cmp(&(&other.state, &other.test)));
    ensure!(!outcomes.is_empty(), "no test ran");
    Ok(outcomes)
}

const UNEXPLAINED: &str = "not explained";

/// Results as they are kept: what ran, then each test that did not pass with its reason, then those that did.
fn described(cluster: &RealCluster, title: &str, outcomes: &[Outcome]) -> Result<String> {
    let mut text = format!("{title}: {}\n{}\n\n", summary(outcomes), versions(cluster)?);
    for Outcome { test, state, message } in outcomes.iter().filter(|outcome| outcome.state != "passed") {
        let first = message.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
        let reason = explanation(test).map_or_else(|| format!("{UNEXPLAINED}: {first}"), str::to_owned);
        text += &format!("{state}  {test}: {reason}\n");
    }
    for outcome in outcomes.iter().filter(|outcome| outcome.state == "passed") {
        text += &format!("passed  {}\n", outcome.test);
    }
    Ok(text)
}

fn summary(outcomes: &[Outcome]) -> String {
    let count = |state: &str| outcomes.iter().filter(|outcome| outcome.state == state).count();
    let (passed, skipped) = (count("passed"), count("skipped"));
    format!("{passed} passed, {} failed, {skipped} skipped", outcomes.len() - passed - skipped)
}

/// Versions of all that ran, with the commit and the day.
fn versions(cluster: &RealCluster) -> Result<String> {
    let containerd = output(Command::new(cluster.plane.kubernetes().program("containerd")).arg("--version"))?;
    let kernel = output(Command::new("uname").arg("-r"))?;
    let day = output(Command::new("date").args(["-u", "+%F"]))?;
    Ok(format!(
        "Penstock {} with its default manifests; {}, CNI plugin {}, containerd {}, Linux {}; {}",
        commit()?,
        cluster.plane.kubernetes().versions()?,
        cluster.cni.name(),
        containerd.split_whitespace().nth(2).unwrap_or("of no version"),
        kernel.trim(),
        day.trim()
    ))
}

/// As `git describe` names it, `-dirty` if anything else than results has changed: a suite that ran before has written its own.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| {
        output(Command::new("git").args(["-C", concat!(env!("CARGO_MANIFEST_DIR"), "/..")]).args(arguments))
    };
    let changes = git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/conformance"])?;
    let mark = if changes.trim().is_empty() { "" } else { "-dirty" };
    Ok(format!("{}{mark}", git(&["describe", "--always", "--abbrev=12"])?.trim()))
}

/// Runs these tests of the SIG's suite; returns its report.
fn run_conformance(cluster: &RealCluster, tests: &str) -> Result<String> {
    let definition = cluster.plane.kubernetes().program("clusternetworkpolicies.yaml");
    cluster.kubectl(&["apply", "--server-side", "-f", &definition.display().to_string()])?;
    let scratch = ScratchDir::new()?;
    let report = scratch.path().join("report.yaml");
    let log = log_of("network-policy-api")?;
    let mut suite = program(cluster, "cnp-conformance.test");
    suite.args(["-test.v", "-test.timeout=60m", "-test.run", tests, "--conformance-profiles=ClusterNetworkPolicy"]);
    suite.args([
        "--supported-features=ClusterNetworkPolicyNamedPorts,ClusterNetworkPolicyEgressNodePeers",
        "--all-features",
    ]);
    suite.args(["--organization=penstock", "--project=penstock", "--url=https://penstock.dev"]);
    suite.args(["--contact=https://penstock.dev/security", "--version", &commit()?]);
    suite.arg(format!("--additional-info={}", versions(cluster)?));
    suite.arg("--report-output").arg(&report).current_dir(scratch.path());
    let ended = suite.stdout(File::create(&log)?).stderr(Stdio::null()).status()?;
    cluster.kubectl(&["delete", "clusternetworkpolicy", "--all", "--timeout=60s"])?;
    cluster.kubectl(&["delete", "-f", &definition.display().to_string(), "--timeout=60s"])?;
    let printed = fs::read_to_string(&log)?;
    let lines = |what: &str| printed.lines().filter(|line| line.trim_start().starts_with(what)).collect::<Vec<_>>();
    let (failed, passed) = (lines("--- FAIL"), lines("--- PASS"));
    ensure!(ended.success() && !passed.is_empty(), "{ended}; see {}:\n{}", log.display(), failed.join("\n"));
    fs::read_to_string(&report).with_context(|| format!("no report: {}", log.display()))
}

/// A program of the suites in front of the nodes, with `kubectl` beside it. It ends with this process.
fn program(cluster: &RealCluster, name: &str) -> Command {
    let kubernetes = cluster.plane.kubernetes();
    let mut command = cluster.plane.kubectl_plugin(Path::new("setpriv"));
    command.args(["--pdeathsig", "TERM", "--"]).arg(kubernetes.program(name));
    command.env("PATH", kubernetes.path()).stdin(Stdio::null());
    command
}

/// Where results are kept: `PENSTOCK_RESULTS`, or else beside the logs.
fn results_folder() -> Result<PathBuf> {
    let folder = std::env::var_os("PENSTOCK_RESULTS").map_or_else(logs, PathBuf::from);
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// `target/suites` of the workspace.
fn logs() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("suites")
}

fn log_of(name: &str) -> Result<PathBuf> {
    fs::create_dir_all(logs())?;
    match logs().canonicalize() {
        Ok(folder) => Ok(folder.join(format!("{name}.log"))),
        Err(error) => bail!("{}: {error}", logs().display()),
    }
}

//! A pod's network is made before the source tells its addresses: the CNI plugin waits for the daemon, and the pod's first packets pass
//! as policy says.

use std::io::Write as _;
use std::net::IpAddr;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::penstock_binary;
use serde_json::json;

use crate::fixture::{Fixture, pod, pods, policy};

const ADDRESSES: [&str; 2] = ["10.244.1.77", "fd00:10:244:1::77"];
const TIMEOUT: Duration = Duration::from_secs(30);

/// The object of the new pod as the API server has it until its containers have started.
fn without_addresses() -> String {
    let whole = pod("new", ADDRESSES[0], ADDRESSES[1]);
    let (object, _) = whole.split_once("status:").unwrap();
    format!("{}status: {{phase: Pending}}\n", object.trim_start_matches("---\n"))
}

/// Does for a new pod what the container runtime does, after other plugins have made its interface.
fn add(fixture: &mut Fixture, wait_seconds: u64) -> (Output, Duration) {
    let addresses = ADDRESSES.map(|text| text.parse::<IpAddr>().unwrap());
    let interface = fixture.cluster.node.add_pod("test/new", &addresses).unwrap().interface().to_owned();
    fixture.cluster.node.settle().unwrap();
    let config = json!({
        "cniVersion": "1.0.0", "name": "pods", "type": "penstock-cni",
        "socket": fixture.admin().with_extension("cni"), "waitSeconds": wait_seconds,
        "prevResult": {
            "cniVersion": "1.0.0",
            "interfaces": [{ "name": interface }, { "name": "eth0", "sandbox": "/run/netns/new" }],
            "ips": [{ "address": "10.244.1.77/32" }, { "address": "fd00:10:244:1::77/128" }],
        },
    });
    let plugin = penstock_binary().unwrap().with_file_name("penstock-cni");
    let began = Instant::now();
    let mut child = fixture
        .cluster
        .node
        .namespace()
        .command(plugin)
        .envs(fixture.environment())
        .env("CNI_COMMAND", "ADD")
        .env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=new")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("penstock-cni is beside penstock");
    child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
    (child.wait_with_output().unwrap(), began.elapsed())
}

/// The new pod's attempts, one each, and how they must end.
fn assert_first(fixture: &Fixture, to: &str, v6: bool, expected: ProbeOutcome) {
    let new = Site::from(fixture.cluster.node.pod("test/new").unwrap());
    // On a busy machine an answer may take long, but none is lost.
    let timeout = Duration::from_millis(if expected == ProbeOutcome::Reached { 10_000 } else { 300 });
    let outcome = probe::run_one(&new, fixture.target(to, v6), Protocol::Udp(53), RetryPolicy { timeout, attempts: 1 });
    assert_eq!(outcome.unwrap(), expected, "to {to}, v6: {v6}: {}", fixture.daemon.log().lines().join("\n"));
}

#[test]
fn a_new_pods_first_packets_pass_by_its_policy() {
    let only_new = "  ingress: [{from: [{podSelector: {matchLabels: {app: new}}}]}]\n";
    let to_pod_1 = "  policyTypes: [Egress]\n  egress: [{to: [{podSelector: {matchLabels: {app: pod-1}}}]}]\n";
    let policies = policy("only", "pod-1", only_new) + &policy("new", "new", to_pod_1);
    let mut fixture = Fixture::of(&(pods(3) + &policies), |_, _| {});
    // The daemon hears of it while the plugin waits already, or before.
    fixture.save("new.yaml", &without_addresses());
    let (output, _) = add(&mut fixture, 60);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    for v6 in [false, true] {
        assert_first(&fixture, "test/pod-1", v6, ProbeOutcome::Reached);
        assert_first(&fixture, "test/pod-2", v6, ProbeOutcome::Silent);
    }
    // The source tells the same, and a policy with it; then the pod goes.
    let more = policy("more", "new", &to_pod_1.replace("pod-1", "pod-2"));
    let seen = fixture.daemon.log().len();
    let whole = pod("new", ADDRESSES[0], ADDRESSES[1]) + &more;
    fixture.save("new.yaml", whole.trim_start_matches("---\n"));
    fixture.daemon.log().wait_for_after(seen, "NetworkPolicy test/more", TIMEOUT).unwrap();
    for to in ["test/pod-1", "test/pod-2"] {
        assert_first(&fixture, to, true, ProbeOutcome::Reached);
    }
    let seen = fixture.daemon.log().len();
    std::fs::remove_file(fixture.manifests.join("new.yaml")).unwrap();
    fixture.daemon.log().wait_for_after(seen, "Pod test/new deleted", TIMEOUT).unwrap();
    assert_first(&fixture, "test/pod-1", false, ProbeOutcome::Silent);
}

#[test]
fn a_new_pod_unknown_to_the_source_starts_closed() {
    let mut fixture = Fixture::of(&pods(2), |_, _| {});
    let (output, took) = add(&mut fixture, 1);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && took >= Duration::from_secs(1), "{took:?}");
    assert!(said.contains("test/new starts before its policy is in effect: the source has not told"), "{said}");
    assert_first(&fixture, "test/pod-1", false, ProbeOutcome::Silent);
}

#[test]
fn without_a_daemon_a_new_pod_starts_closed_at_once() {
    // As tcx links, and as the filters that kernels before Linux 6.6 have.
    for forced in [None, Some(("FORCE_CLSACT".to_owned(), "1".to_owned()))] {
        let mut fixture = Fixture::of(&pods(2), |_, config| config.environment.extend(forced));
        fixture.stop();
        let (output, took) = add(&mut fixture, 60);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(took < TIMEOUT, "it did not wait: {took:?}");
        assert_first(&fixture, "test/pod-1", false, ProbeOutcome::Silent);
        // The daemon takes it over.
        fixture.save("new.yaml", pod("new", ADDRESSES[0], ADDRESSES[1]).trim_start_matches("---\n"));
        fixture.restart();
        assert_first(&fixture, "test/pod-1", false, ProbeOutcome::Reached);
    }
}

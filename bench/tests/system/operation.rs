//! Inspection of a running daemon: what it reports matches what real packets did.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_admin::client::Client;
use penstock_admin::types::{Flows, FlowsQuery, PodStatus, Status};
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, Namespace, Privileges, ScratchDir, penstock_binary};
use serde_json::Value;

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(20);
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9469);

/// Allows TCP to one port of `test/pod-1`, from everyone.
fn only_port(port: u16) -> String {
    policy("only", "pod-1", &format!("  ingress: [{{ports: [{{port: {port}}}]}}]\n"))
}

/// A fixture whose daemon has an admin socket and metrics.
struct AdminFixture {
    fixture: Fixture,
    socket: PathBuf,
    files: ScratchDir,
}

impl AdminFixture {
    fn start(yaml: &str, sections: &str) -> Self {
        Self::start_with(yaml, |config| config.sections.push_str(sections))
    }

    fn start_with(yaml: &str, change: impl FnOnce(&mut DaemonConfig)) -> Self {
        let files = ScratchDir::new().unwrap();
        let socket = files.path().join("admin.sock");
        let fixture = Fixture::of(yaml, |_, config| {
            config.admin = Some(socket.clone());
            config.metrics = Some(METRICS);
            change(config);
            config.sections = config.sections.replace("FILES", &files.path().display().to_string());
        });
        Self { fixture, socket, files }
    }

    fn status(&self) -> Status {
        Client::new(&self.socket).unwrap().get("/v1/status", &()).unwrap()
    }

    fn flows(&self, query: &FlowsQuery) -> Flows {
        Client::new(&self.socket).unwrap().get("/v1/flows", query).unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(penstock_binary().unwrap());
        command.args(arguments).arg("--socket").arg(&self.socket).env("NO_COLOR", "1");
        command.output().unwrap()
    }

    fn print(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Status line and body of a page of the metrics endpoint.
    fn page(&self, path: &str) -> (String, String) {
        http(self.fixture.cluster.node.namespace(), path)
    }

    /// All samples, by name and labels.
    fn metrics(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.page("/metrics");
        assert!(status.contains(" 200 "), "{status}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let pair = |line: &str| {
            let (name, value) = line.rsplit_once(' ').expect(line);
            (name.to_owned(), value.parse().expect(line))
        };
        samples.map(pair).collect()
    }

    fn denied(&self) -> ProbeOutcome {
        let (client, target) = (self.fixture.site("test/pod-0"), self.fixture.target("test/pod-1", false));
        probe::run_one(client, target, Protocol::Tcp(9090), RetryPolicy::default()).unwrap()
    }
}

fn http(namespace: &Namespace, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    let answer = namespace.run(|| {
        let mut stream = TcpStream::connect_timeout(&METRICS, LIMIT).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(!head.to_ascii_lowercase().contains("transfer-encoding"), "{head}");
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

fn pod<'a>(status: &'a Status, name: &str) -> &'a PodStatus {
    status.pods.iter().find(|pod| pod.pod == name).expect("a pod of this name")
}

/// The sum of all samples of a family whose labels include all of these.
fn sum(metrics: &BTreeMap<String, f64>, family: &str, labels: &[&str]) -> f64 {
    let of = |name: &&String| {
        let (own, rest) = name.split_once('{').unwrap_or((name, ""));
        own == family && labels.iter().all(|label| rest.contains(label))
    };
    metrics.keys().filter(of).map(|name| metrics[name]).sum()
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>, what: &str) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn status_flows_and_metrics_match_the_packets() {
    let open = AdminFixture::start(&(pods(2) + &only_port(8080)), "");
    let client = open.fixture.site("test/pod-0");
    let flow = EchoConnection::open(&client.namespace, open.fixture.target("test/pod-1", false), 8080, LIMIT).unwrap();
    flow.wait_for(2_000, LIMIT).unwrap();
    assert_eq!(open.denied(), ProbeOutcome::Silent);

    let status = open.status();
    assert!(status.in_force, "{status:?}");
    assert!(status.workers.iter().all(|worker| worker.epoch == status.published), "{status:?}");
    assert!(status.workers.iter().any(|worker| worker.busy > 0.0), "{status:?}");
    for name in ["test/pod-0", "test/pod-1"] {
        let pod = pod(&status, name);
        assert!(pod.enforced && pod.published == Some(status.published) && pod.interface.is_some(), "{pod:?}");
        assert_eq!(pod.connections > 0, name == "test/pod-0", "who opens a connection has it: {pod:?}");
        let port = status.ports.iter().find(|port| port.pod.as_deref() == Some(name)).unwrap();
        assert!(port.rate.rx_packets > 100.0 && port.total.tx_bytes > 100_000, "{port:?}");
    }
    for worker in &status.workers {
        assert!(worker.rings.receiving > 0 && worker.rings.size >= worker.rings.receiving, "{worker:?}");
    }
    assert_eq!(status.drops.get("ingress_denied"), Some(&3), "three attempts: {:?}", status.drops);
    let frames = status.frames;
    assert_eq!(status.source["pods"].objects, 2);

    let established =
        FlowsQuery { end: Some("test/pod-1".into()), state: Some("established".into()), ..Default::default() };
    let flows = open.flows(&established);
    assert_eq!((flows.matching, flows.flows.len()), (1, 1), "{flows:?}");
    let found = &flows.flows[0];
    assert_eq!((found.from.name.as_deref(), found.to.name.as_deref()), (Some("test/pod-0"), Some("test/pod-1")));
    assert_eq!((found.to.port, found.protocol.as_str(), found.egress.as_str()), (8080, "TCP", "open"));
    assert!(found.ingress.starts_with("test-ingress-only-0"), "{found:?}");
    for sent in [found.sent, found.received] {
        // Each message is a segment with at least its headers.
        let is_counted = sent.map(|sent| sent.packets >= 2_000 && sent.bytes >= 40 * sent.packets);
        assert_eq!(is_counted, Some(true), "{found:?}");
    }
    assert_eq!(open.flows(&FlowsQuery { protocol: Some("SCTP".into()), ..Default::default() }).matching, 0);

    let metrics = open.metrics();
    assert_eq!(sum(&metrics, "penstock_drops_total", &["reason=\"ingress_denied\""]), 3.0);
    assert_eq!(sum(&metrics, "penstock_port_drops_total", &["pod=\"pod-0\"", "ingress_denied"]), 3.0);
    assert!(sum(&metrics, "penstock_packets_total", &["forwarded"]) >= 4_000.0);
    assert!(sum(&metrics, "penstock_port_bytes_total", &["pod=\"pod-1\"", "ingress", "forwarded"]) > 100_000.0);
    assert_eq!(sum(&metrics, "penstock_connections", &["state=\"ESTABLISHED\""]), 1.0);
    assert_eq!(sum(&metrics, "penstock_umem_capacity_frames", &[]), f64::from(frames.total));
    let iterations = sum(&metrics, "penstock_worker_poll_iteration_seconds_count", &[]);
    // Nearly all packets pass without a worker.
    let offloaded = sum(&metrics, "penstock_offloaded_packets_total", &[]);
    let busy = sum(&metrics, "penstock_worker_busy_seconds_total", &[]);
    assert!(iterations + offloaded >= 1_000.0 && busy > 0.0, "{iterations} {offloaded}");
    assert_eq!(sum(&metrics, "penstock_source_synced", &[]), 6.0, "one for each kind of object");
    assert_eq!(open.page("/healthz"), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
    assert_eq!(open.page("/readyz"), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
}

#[test]
fn a_log_line_says_what_starts_and_where_it_is_asked() {
    let open = AdminFixture::start(&pods(1), "");
    let lines = open.fixture.daemon.log().lines();
    let starts: Vec<&String> = lines.iter().filter(|line| line.contains(" starts ")).collect();
    let [line] = starts[..] else { panic!("one line: {lines:#?}") };
    let output = Command::new(penstock_binary().unwrap()).arg("--version").output().unwrap();
    let version = String::from_utf8(output.stdout).unwrap();
    let status = open.status();
    let cores: Vec<_> = status.workers.iter().map(|worker| worker.core).collect();
    for part in [
        format!(" {} starts ", version.trim()),
        format!(" node={} ", open.fixture.cluster.name),
        format!(" cores={cores:?} "),
        format!(" source=\"manifests in {}\" ", open.fixture.manifests.display()),
        format!(" admin={} ", open.socket.display()),
        format!(" metrics={METRICS}"),
    ] {
        assert!(line.contains(&part), "{part:?} in {line}");
    }
}

#[test]
fn every_sample_has_help_and_type_and_counters_end_in_total() {
    let open = AdminFixture::start(&pods(1), "");
    let (_, text) = open.page("/metrics");
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut helped = Vec::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            assert!(!help.is_empty() && !helped.contains(&name), "{line}");
            helped.push(name);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            assert!(kinds.insert(name, kind).is_none() && helped.contains(&name), "{line}");
            assert!(
                name.starts_with("penstock_") && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                "{line}"
            );
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            let labels: Vec<&str> =
                line.split(['{', ',']).skip(1).filter_map(|pair| Some(pair.split_once('=')?.0)).collect();
            assert!(labels.iter().enumerate().all(|(n, label)| !labels[..n].contains(label)), "a label twice: {line}");
            let suffixes = ["_total", "_bucket", "_sum", "_count", ""];
            let family = suffixes.iter().find_map(|suffix| Some((*kinds.get(name.strip_suffix(suffix)?)?, *suffix)));
            let (kind, suffix) = family.unwrap_or_else(|| panic!("no family: {line}"));
            match kind {
                "counter" => assert_eq!(suffix, "_total", "{line}"),
                "gauge" => assert_eq!(suffix, "", "{line}"),
                "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}"),
                other => panic!("{other}: {line}"),
            }
            assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
        }
    }
    assert!(kinds.len() > 40, "{}", kinds.len());
}

#[test]
fn status_shows_a_change_for_its_pods_and_when_it_is_in_force() {
    let open = AdminFixture::start(&(pods(2) + &only_port(8080)), "");
    let before = open.status();
    let saving = Instant::now();
    open.fixture.save("all.yaml", &(pods(2) + &only_port(9090)));
    let after = wait_for(
        || {
            let status = open.status();
            (status.published > before.published && status.in_force).then_some(status)
        },
        "the change is in effect",
    );
    let (first, second) = (pod(&after, "test/pod-0"), pod(&after, "test/pod-1"));
    assert_eq!(first.changed, pod(&before, "test/pod-0").changed, "its own rules are as they were");
    assert_eq!(second.changed, Some(after.published), "{second:?}");
    assert!(first.enforced && second.enforced, "{after:?}");
    // It is counted a moment after it is in effect.
    let counted = |metrics: &_| sum(metrics, "penstock_enforced_seconds_count", &[]);
    let metrics = wait_for(|| Some(open.metrics()).filter(|metrics| counted(metrics) > 0.0), "the change is counted");
    assert_eq!(counted(&metrics), 1.0, "one event, the start not counted");
    let took = metrics["penstock_enforced_seconds_sum"];
    let longest = saving.elapsed().as_secs_f64();
    assert!(took > 0.0 && took < longest, "{took} s from the event to a snapshot in effect, of {longest} s");
    // The status names what a pod without an interface waits for.
    let lost = crate::fixture::pod("lost", "10.244.1.99", "fd00:10:244:1::99");
    open.fixture.save("all.yaml", &(pods(2) + &lost));
    let waits = |waiting: &str| waiting.contains("no host route to");
    let reported = || {
        let pod = open.status().pods.into_iter().find(|pod| pod.pod == "test/lost")?;
        pod.waiting.as_deref().is_some_and(waits).then_some(pod)
    };
    let reported = wait_for(reported, "the pod is reported with what it waits for");
    assert!(!reported.enforced && reported.interface.is_none(), "{reported:?}");
    assert!(open.print(&["status"]).contains("not attached: pod test/lost: no host route to 10.244.1.99"));
}

#[test]
fn a_pod_under_policy_is_served_or_closed_or_named() {
    let (lost, long) = (["10.244.1.90", "fd00:10:244:1::90"], ["10.244.1.91", "fd00:10:244:1::91"]);
    let mut open = AdminFixture::start(&pods(2), "");
    let addresses = long.map(|address| address.parse().unwrap());
    let node = &mut open.fixture.cluster.node;
    node.add_pod_with_mtu("test/long", &addresses, 9000).unwrap();
    node.settle().unwrap();
    let added = crate::fixture::pod("lost", lost[0], lost[1]) + &crate::fixture::pod("long", long[0], long[1]);
    open.fixture.save("all.yaml", &(pods(2) + &added));
    wait_for(|| open.status().pods.iter().any(|pod| pod.pod == "test/long").then_some(()), "the pods are known");
    assert_eq!(open.page("/readyz").1, "ok\n", "nothing is to be enforced on them");
    let closed = ["lost", "long"].map(|name| crate::fixture::policy(name, name, "  policyTypes: [Ingress, Egress]\n"));
    open.fixture.save("all.yaml", &(pods(2) + &added + &closed.concat()));
    let named = || Some(open.status().not_enforced).filter(|named| !named.is_empty());
    let named = wait_for(named, "the pod without an interface is named");
    assert_eq!(named.len(), 1, "the one that no frame holds is closed: {named:?}");
    assert_eq!(named[0].pod.as_deref(), Some("test/lost"));
    assert!(named[0].reason.contains("no host route to 10.244.1.90"), "{named:?}");
    let (status, text) = open.page("/readyz");
    assert!(status.contains("503") && text.contains("pod test/lost: no host route"), "{status} {text}");
    assert_eq!(sum(&open.metrics(), "penstock_not_enforced", &["of=\"pods\""]), 1.0);
    assert!(open.print(&["status"]).contains("policy is not enforced on test/lost: "));
    let site = Site::from(open.fixture.cluster.node.pod("test/long").unwrap());
    let policy = RetryPolicy { timeout: Duration::from_millis(300), attempts: 1 };
    let outcome = probe::run_one(&site, open.fixture.target("test/pod-0", false), Protocol::Udp(53), policy).unwrap();
    assert_eq!(outcome, ProbeOutcome::Silent, "it is closed");
    // And open again without a policy.
    open.fixture.save("all.yaml", &(pods(2) + &added));
    wait_for(|| open.status().not_enforced.is_empty().then_some(()), "nobody is named");
    assert_eq!(open.page("/readyz").1, "ok\n");
    let outcome =
        probe::run_one(&site, open.fixture.target("test/pod-0", false), Protocol::Udp(53), RetryPolicy::default());
    assert_eq!(outcome.unwrap(), ProbeOutcome::Reached);
}

#[test]
fn commands_query_the_daemon_and_report_errors() {
    let open = AdminFixture::start(&(pods(2) + &only_port(8080)), "");
    let client = open.fixture.site("test/pod-0");
    let flow = EchoConnection::open(&client.namespace, open.fixture.target("test/pod-1", true), 8080, LIMIT).unwrap();
    flow.wait_for(100, LIMIT).unwrap();

    let status = open.print(&["status"]);
    assert!(status.contains("is in effect on every worker") && status.contains("test/pod-1"), "{status}");
    let json: Value = serde_json::from_str(&open.print(&["status", "--json"])).unwrap();
    assert_eq!(json["node"], "node");
    let flows = open.print(&["flows", "--pod", "test/pod-0", "--protocol", "tcp"]);
    assert!(
        flows.contains("test/pod-1 [fd00:10:244:1::11]:8080  ESTABLISHED") && flows.contains("1 connection\n"),
        "{flows}"
    );
    let explain = ["explain", "--live", "--from", "test/pod-0", "--to", "test/pod-1", "--port"];
    let allowed = open.print(&[&explain[..], &["8080/TCP"]].concat());
    assert!(
        allowed.starts_with("allowed: test/pod-0 (10.244.1.10) -> test/pod-1") && allowed.contains("by snapshot "),
        "{allowed}"
    );
    assert!(open.print(&[&explain[..], &["9090/TCP"]].concat()).starts_with("denied: "));

    let bundle = open.files.path().join("dump.tar.gz");
    open.print(&["dump", bundle.to_str().unwrap()]);
    // Where the file system is read-only, as in a container.
    let printed = open.files.path().join("printed.tar.gz");
    std::fs::write(&printed, open.command(&["dump", "-"]).stdout).unwrap();
    let expected = [
        "config.toml",
        "flows.json",
        "log.txt",
        "metrics.txt",
        "policy.json",
        "preflight.txt",
        "status.json",
        "trial.json",
        "versions.txt",
    ];
    for bundle in [&bundle, &printed] {
        let listed = Command::new("tar").arg("tzf").arg(bundle).output().unwrap();
        let mut names: Vec<String> = String::from_utf8(listed.stdout).unwrap().lines().map(str::to_owned).collect();
        names.sort();
        assert_eq!(names, expected.map(|name| format!("penstock-dump/{name}")));
    }
    let log = Command::new("tar").arg("xzOf").arg(&bundle).arg("penstock-dump/log.txt").output().unwrap();
    assert!(String::from_utf8_lossy(&log.stdout).contains("ready: 2 pods"), "the log is in it");

    for (arguments, logged) in [
        (&["flows", "--state", "LOUD"][..], "penstock: state \"LOUD\": unknown; use one of "),
        (&["flows", "--pod", "test/none"], "penstock: pod test/none is unknown"),
        (&["dump", bundle.to_str().unwrap()], "exists already; give another name"),
        (&["top"], "standard output is not a terminal: use penstock status"),
    ] {
        let output = open.command(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(2) && error.contains(logged) && error.lines().count() == 1,
            "{arguments:?}: {error}"
        );
    }
    // The daemon removes its socket.
    let socket = open.socket.clone();
    let (status, log) = open.fixture.daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
    assert!(!socket.exists());
    let output = Command::new(penstock_binary().unwrap()).args(["status", "--socket"]).arg(&socket).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("no daemon listens there"), "{error}");
}

#[test]
fn the_verdict_log_names_rules_and_counts_beyond_its_budget() {
    let log = "[verdict_log]\noutput = \"FILES/verdicts.jsonl\"\neach_second = 2\nopened = true\n";
    let open = AdminFixture::start(&(pods(2) + &only_port(8080)), log);
    let (client, target) = (open.fixture.site("test/pod-0"), open.fixture.target("test/pod-1", false));
    let allowed = probe::run_one(client, target, Protocol::Tcp(8080), RetryPolicy::default()).unwrap();
    assert_eq!(allowed, ProbeOutcome::Reached);
    // Each attempt is a denied SYN; those beyond two in a second are counted, not logged.
    for _ in 0..5 {
        assert_eq!(open.denied(), ProbeOutcome::Silent);
    }
    let file = open.files.path().join("verdicts.jsonl");
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    };
    let logged = wait_for(
        || {
            let lines = lines();
            let denied = lines.iter().filter(|line| line["outcome"] == "ingress_denied").count();
            (denied >= 2 && lines.iter().any(|line| line["outcome"] == "opened")).then_some(lines)
        },
        "both outcomes are logged",
    );
    let opened = logged.iter().find(|line| line["outcome"] == "opened" && line["dst"]["port"] == 8080).unwrap();
    assert_eq!((&opened["src"]["name"], &opened["dst"]["name"]), (&"test/pod-0".into(), &"test/pod-1".into()));
    assert_eq!(opened["policy"]["ingress"], "test-ingress-only-0");
    let denied = logged.iter().find(|line| line["outcome"] == "ingress_denied").unwrap();
    assert_eq!(denied["policy"]["ingress"], "denied");
    assert_eq!(denied["ingress"]["pod"], "test/pod-0");
    assert!(denied["connection"].as_str().is_some_and(|id| id.len() == 16), "{denied}");

    let dropped = open.status().drops["ingress_denied"];
    let suppressed = || open.metrics()["penstock_verdict_log_suppressed_total{outcome=\"ingress_denied\"}"] as u64;
    let written = || lines().iter().filter(|line| line["outcome"] == "ingress_denied").count() as u64;
    wait_for(|| (written() + suppressed() == dropped).then_some(()), "every drop is logged or counted");
    // The budget of a second may begin between any two attempts.
    assert!(dropped == 15 && suppressed() > 0, "{dropped} dropped, {} suppressed", suppressed());
    let counted: u64 = lines().iter().filter_map(|line| line["suppressed"]["ingress_denied"].as_u64()).sum();
    assert_eq!(counted, suppressed(), "the log says so itself");
}

/// Also where programs open what repeats: what a policy wants recorded, each time a worker sees.
#[test]
fn a_policy_has_what_it_decides_in_the_verdict_log() {
    const OPENED: usize = 20;
    let log = "[verdict_log]\noutput = \"FILES/verdicts.jsonl\"\neach_second = 1000\n";
    let yaml = |log: &str| {
        let annotated = format!("name: only, annotations: {{policy.penstock.dev/log: {log}}}");
        let other = policy("other", "pod-2", "  ingress: [{ports: [{port: 8080}]}]\n");
        pods(3) + &only_port(8080).replace("name: only", &annotated) + &other
    };
    let open = AdminFixture::start(&yaml("all"), log);
    let connect = |to: &str, port, count| {
        let target = open.fixture.target(to, false);
        let outcome =
            |_| probe::run_one(open.fixture.site("test/pod-0"), target, Protocol::Tcp(port), RetryPolicy::default());
        (0..count).filter(|n| outcome(*n).unwrap() == ProbeOutcome::Reached).count()
    };
    let file = open.files.path().join("verdicts.jsonl");
    let lines = |outcome: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
        lines.filter(|line| line["outcome"] == outcome).collect()
    };
    assert_eq!((connect("test/pod-1", 8080, OPENED), connect("test/pod-2", 8080, 3)), (OPENED, 3));
    assert_eq!((connect("test/pod-1", 9090, 1), connect("test/pod-2", 9090, 1)), (0, 0));
    let denied = |pod: &str, lines: &[Value]| lines.iter().find(|line| line["dst"]["name"] == pod).cloned();
    let [of_policy, of_other] = ["test/pod-1", "test/pod-2"]
        .map(|pod| wait_for(|| denied(pod, &lines("ingress_denied")), "what is denied is logged"));
    assert_eq!(of_policy["policy"]["recorded_for"], serde_json::json!(["test/only"]), "{of_policy}");
    assert_eq!(of_other["policy"]["recorded_for"], Value::Null, "{of_other}");
    let opened = wait_for(|| Some(lines("opened")).filter(|all| all.len() >= OPENED), "each is logged");
    assert_eq!(opened.len(), OPENED, "those of the other policy are not");
    for line in &opened {
        assert_eq!(
            (&line["dst"]["name"], &line["policy"]["recorded_for"][0]),
            (&"test/pod-1".into(), &"test/only".into())
        );
    }
    // From now on only what it denies.
    open.fixture.enforce(&yaml("denied"));
    let before = lines("ingress_denied").len();
    assert_eq!((connect("test/pod-1", 8080, 3), connect("test/pod-1", 9090, 1)), (3, 0));
    wait_for(|| (lines("ingress_denied").len() > before).then_some(()), "what is denied is logged");
    assert_eq!(lines("opened").len(), OPENED);
}

#[test]
fn sighup_applies_what_can_change_and_reports_what_cannot() {
    let open = AdminFixture::start(&(pods(2) + &only_port(8080)), "");
    let daemon = &open.fixture.daemon;
    let text = std::fs::read_to_string(daemon.config()).unwrap();
    let file = open.files.path().join("verdicts.jsonl");
    let changed = text.replace("64MiB", "65MiB")
        + &format!("[verdict_log]\noutput = \"{}\"\n[log]\nlevel = \"debug\"\n", file.display());
    std::fs::write(daemon.config(), changed).unwrap();
    let seen = daemon.log().len();
    daemon.signal(Signal::SIGHUP).unwrap();
    let logged = daemon.log().wait_for_after(seen, "configuration reloaded: ", LIMIT).unwrap();
    assert!(logged.contains("log.level, verdict_log.output"), "{logged}");
    let kept = daemon.log().wait_for_after(seen, "restart penstock", LIMIT).unwrap();
    assert!(kept.contains("umem.memory"), "{kept}");
    assert_eq!(open.denied(), ProbeOutcome::Silent);
    wait_for(|| std::fs::read_to_string(&file).unwrap().contains("ingress_denied").then_some(()), "the log is written");

    std::fs::write(daemon.config(), "node = 7\n").unwrap();
    let seen = daemon.log().len();
    daemon.signal(Signal::SIGHUP).unwrap();
    let logged = daemon.log().wait_for_after(seen, "all settings stay", LIMIT).unwrap();
    assert!(logged.contains("node = 7"), "{logged}");
    assert!(open.status().in_force);
}

#[test]
fn status_shows_the_rings_that_the_kernel_has() {
    for (memory, entries) in [("8MiB", 1024), ("64MiB", 4096)] {
        let open = AdminFixture::start_with(&pods(1), |config| {
            config.sections = config.sections.replace("64MiB", memory);
        });
        let status = open.status();
        let shown: Vec<u64> = status.workers.iter().map(|worker| worker.rings.size.into()).collect();
        assert!(!shown.is_empty() && shown.iter().all(|&size| size == entries), "{memory}: {shown:?}");
        // The kernel's rings are mapped: the longest have 16 bytes for each entry, behind a head in the first page.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", status.process)).unwrap();
        let rings = maps.lines().filter(|line| line.contains("socket:["));
        let length = |line: &str| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            u64::from_str_radix(to, 16).unwrap() - u64::from_str_radix(from, 16).unwrap()
        };
        assert_eq!(rings.map(length).max(), Some(16 * entries + 4096), "{memory}: {maps}");
    }
}

#[test]
fn a_live_daemons_socket_is_refused_a_stale_one_replaced() {
    let open = AdminFixture::start(&pods(1), "");
    let text = std::fs::read_to_string(open.fixture.daemon.config()).unwrap();
    let node = Namespace::new("other").unwrap();
    let other = Daemon::launch(&node, &text, Privileges::All).unwrap();
    let (status, log) = other.wait(Duration::from_secs(30)).unwrap();
    assert_eq!(status.code(), Some(2), "{}", log.join("\n"));
    assert!(log.iter().any(|line| line.contains("another daemon listens there")), "{}", log.join("\n"));
    open.fixture.daemon.signal(Signal::SIGKILL).unwrap();
    wait_for(|| std::os::unix::net::UnixStream::connect(&open.socket).is_err().then_some(()), "it is dead");
    assert!(open.socket.exists(), "nobody has removed it");
    let config =
        DaemonConfig { admin: Some(open.socket.clone()), ..DaemonConfig::new("node", &open.fixture.manifests) };
    let again = Daemon::start(open.fixture.cluster.node.namespace(), &config).unwrap();
    assert_eq!(open.status().process, again.id().as_raw() as u32);
    again.stop().unwrap();
}

#[test]
fn a_daemon_that_waits_for_its_source_is_not_ready() {
    let files = ScratchDir::new().unwrap();
    let (kubeconfig, socket) = (files.path().join("kubeconfig"), files.path().join("admin.sock"));
    // A closed port.
    std::fs::write(
        &kubeconfig,
        "{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}], \
         clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: a, user: {}}]}",
    )
    .unwrap();
    let config =
        DaemonConfig { admin: Some(socket.clone()), metrics: Some(METRICS), ..DaemonConfig::new("node", &kubeconfig) };
    let toml = config.to_toml().replace("manifests = ", "kubeconfig = ");
    let node = Namespace::new("waits").unwrap();
    let daemon = Daemon::launch(&node, &toml, Privileges::All).unwrap();
    wait_for(|| socket.exists().then_some(()), "it listens");
    assert_eq!(http(&node, "/healthz").0, "HTTP/1.1 200 OK");
    for path in ["/readyz", "/metrics"] {
        let (status, body) = http(&node, path);
        assert!(status.contains(" 503 ") && body.contains("the daemon is starting"), "{path}: {status} {body}");
    }
    let refused = Client::new(&socket).unwrap().get::<Status>("/v1/status", &()).unwrap_err().to_string();
    assert!(refused.contains("the daemon is starting"), "{refused}");
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
}

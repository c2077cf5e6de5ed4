//! `kubectl penstock` against the daemons of two nodes, by an API server that runs commands of `pods/exec`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use penstock_bench::probe::{self, EchoConnection, Protocol, RetryPolicy};
use penstock_bench::testbed::{DaemonConfig, ScratchDir, penstock_binary};
use penstock_replay::capture::{Captures, Time};
use serde_json::{Value, json};

use crate::nodes::exec_server::{ExecServer, Runner, Served, WITHOUT_EXEC};
use crate::nodes::fixture::{Fixture, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");
const NODES: [&str; 2] = ["node-a", "node-b"];
const LIMIT: Duration = Duration::from_secs(30);

/// Two nodes whose daemons answer and offer captures, and a server in front of them.
struct Setup {
    fixture: Fixture,
    _server: ExecServer,
    scratch: ScratchDir,
}

fn socket(config: &DaemonConfig, kind: &str) -> PathBuf {
    config.manifests.parent().unwrap().join(format!("{}-{kind}.sock", config.node))
}

fn answering(config: &mut DaemonConfig) {
    config.admin = Some(socket(config, "admin"));
    config.sections += &format!("[capture]\nsocket = \"{}\"\n", socket(config, "capture").display());
    // Connections are counted where they are recorded.
    let records = config.manifests.parent().unwrap().join(format!("{}-flows.jsonl", config.node));
    config.sections += &format!("[flow_records]\nfile = \"{}\"\n", records.display());
    config.environment.push(("PENSTOCK_ADMIN__TRIALS".to_owned(), "true".to_owned()));
}

impl Setup {
    fn start() -> Self {
        let fixture = Fixture::start_with(CLUSTER, Wiring::routed(), &SERVICES, answering);
        let server = ExecServer::start(served(fixture.manifests.parent().unwrap()));
        let scratch = ScratchDir::new().unwrap();
        std::fs::write(scratch.path().join("kubeconfig"), server.kubeconfig()).unwrap();
        Self { fixture, _server: server, scratch }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let binary = penstock_binary().unwrap().with_file_name("kubectl-penstock");
        assert!(binary.is_file(), "{}: build it (cargo build -p penstock-kubectl)", binary.display());
        let mut command = Command::new(binary);
        command
            .args(arguments)
            .env("KUBECONFIG", self.scratch.path().join("kubeconfig"))
            .env_remove("KUBERNETES_SERVICE_HOST");
        command
    }

    /// Runs the plugin and returns what it prints, after it has ended with this code.
    fn run(&self, arguments: &[&str], code: i32) -> (String, String) {
        let Output { status, stdout, stderr } = self.command(arguments).stdin(Stdio::null()).output().unwrap();
        let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert_eq!(status.code(), Some(code), "{arguments:?}:\n{stdout}{stderr}");
        (stdout, stderr)
    }

    /// Captures with these options while something happens, until Ctrl-C. Returns what the plugin says.
    fn capture(&self, options: &[&str], meanwhile: impl FnOnce()) -> String {
        let errors = self.scratch.path().join("capture.log");
        let said = || std::fs::read_to_string(&errors).unwrap();
        let mut command = self.command(&[&["capture"], options].concat());
        let mut capture = command.stderr(std::fs::File::create(&errors).unwrap()).spawn().unwrap();
        let deadline = Instant::now() + LIMIT;
        while !said().contains("capturing on node-a, node-b") {
            let runs = Instant::now() < deadline && capture.try_wait().unwrap().is_none();
            assert!(runs, "it does not begin: {}", said());
            std::thread::sleep(Duration::from_millis(50));
        }
        meanwhile();
        interrupt(&mut capture);
        said()
    }

    fn json(&self, arguments: &[&str], code: i32) -> Value {
        serde_json::from_str(&self.run(&[arguments, &["--json"]].concat(), code).0).unwrap()
    }
}

/// Objects of the server: nodes, Penstock's pods, and two of the workload's.
fn served(sockets: &Path) -> Served {
    let mut served = Served::default();
    let nodes = NODES.map(|node| json!({"metadata": {"name": node}}));
    let pods = NODES.map(|node| {
        json!({
            "metadata": {"name": format!("penstock-{node}"), "namespace": "kube-system"},
            "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "containerStatuses": [{
                "name": "penstock", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}}]},
        })
    });
    let list = |kind: &str, items: &[Value]| json!({"apiVersion": "v1", "kind": kind, "metadata": {}, "items": items});
    served.objects.insert("/api/v1/nodes".to_owned(), list("NodeList", &nodes));
    served.objects.insert("/api/v1/namespaces/kube-system/pods".to_owned(), list("PodList", &pods));
    for (name, node, address) in [("web-a", "node-a", "10.244.1.10"), ("db-b", "node-b", "10.244.2.11")] {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop", "resourceVersion": "7"},
            "spec": {"nodeName": node, "containers": []}, "status": {"podIP": address, "podIPs": [{"ip": address}]},
        });
        served.objects.insert(format!("/api/v1/namespaces/shop/pods/{name}"), pod);
    }
    // A node as of Kubernetes 1.20, and one as of 1.30.
    for (node, protocol) in NODES.into_iter().zip(["v4.channel.k8s.io", "v5.channel.k8s.io"]) {
        let sockets = sockets.to_owned();
        let command = Box::new(move |words: &[String]| {
            let kind = if words[1] == "capture" { "capture" } else { "admin" };
            let mut command = Command::new(penstock_binary().unwrap());
            command.args(&words[1..]).arg("--socket").arg(sockets.join(format!("{node}-{kind}.sock")));
            command
        });
        served.pods.insert(format!("penstock-{node}"), Runner { protocol, command });
    }
    served
}

#[test]
fn one_command_answers_for_both_nodes() {
    let setup = Setup::start();
    let (from, to) = (setup.fixture.site("shop/web-a"), setup.fixture.target("shop/db-b", false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT).unwrap();
    flow.wait_for(3, LIMIT).unwrap();

    let status = setup.json(&["status"], 0);
    let found: Vec<&str> = status["nodes"].as_array().unwrap().iter().map(|it| it["node"].as_str().unwrap()).collect();
    assert_eq!((found, status["enforced"].as_bool()), (NODES.to_vec(), Some(true)), "{status}");
    assert!(setup.run(&["status"], 0).0.contains("\nenforced on 2 of 2 nodes, 6 pods\n"));
    assert_eq!(setup.json(&["status", "--node", "node-b"], 0)["nodes"].as_array().unwrap().len(), 1);

    let flows = setup.json(&["flows", "--pod", "shop/db-b", "--port", "8080"], 0);
    let rows = flows["flows"].as_array().unwrap();
    let rows: Vec<_> = rows
        .iter()
        .map(|row| (row["node"].as_str().unwrap(), row["egress"].as_str().unwrap(), row["ingress"].as_str().unwrap()))
        .collect();
    assert_eq!(
        rows,
        [("node-a", "open", "not here"), ("node-b", "not here", "shop-ingress-db-0-podSelector-0-0")],
        "both ends"
    );
    let refused = setup.run(&["flows", "--pod", "shop/nobody"], 2).1;
    assert!(refused.starts_with("kubectl penstock: nodes node-a, node-b: "), "{refused}");

    let rules = setup.json(&["rules"], 0);
    let db = rules["rules"].as_array().unwrap().iter().find(|rule| rule["rule"] == "shop-ingress-db-0").unwrap();
    assert!(db["nodes"] == 2 && db["hits"].as_u64().unwrap() >= 1, "{db}");

    let explained = setup.json(&["explain", "--from", "shop/web-a", "--to", "shop/db-b", "--port", "8080/TCP"], 0);
    assert!(explained["allowed"] == true && explained["nodes"].as_array().unwrap().len() == 2, "{explained}");
    let denied = setup.run(&["explain", "--from", "shop/web-a", "--to", "shop/db-b", "--port", "9090/TCP"], 0).0;
    assert!(denied.contains("node node-a (snapshot") && denied.ends_with("\ndenied\n"), "{denied}");

    let load = setup.json(&["top"], 0);
    assert!(load["nodes"]["node-b"].is_object() && load["pods"].as_array().unwrap().len() == 6, "{load}");

    let folder = setup.scratch.path().join("dump");
    setup.run(&["dump", folder.to_str().unwrap()], 0);
    assert!(NODES.iter().all(|node| folder.join(node).join("status.json").is_file()), "a folder each");

    let reader = setup.run(&["status", "--as", WITHOUT_EXEC], 2).1;
    assert!(reader.contains("needs create and get on pods/exec in kube-system"), "{reader}");
}

#[test]
fn a_trial_runs_on_both_nodes_and_is_summed() {
    let setup = Setup::start();
    let (from, to) = (setup.fixture.site("shop/web-a"), setup.fixture.target("shop/db-b", false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT).unwrap();
    flow.wait_for(3, LIMIT).unwrap();
    let staged = setup.scratch.path().join("closed.yaml");
    let policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: shop, name: db}\n\
                  spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}\n";
    std::fs::write(&staged, policy).unwrap();
    let started = setup.run(&["trial", "start", "--manifests", staged.to_str().unwrap()], 0).0;
    assert!(started.starts_with("node-a, node-b: judged beside what is in effect"), "{started}");
    let deadline = Instant::now() + LIMIT;
    let change = loop {
        let status = Command::output(&mut setup.command(&["trial", "status", "--json"])).unwrap();
        let value: Value = serde_json::from_slice(&status.stdout).unwrap();
        assert_eq!(value["nodes"], 2, "{value}");
        let changes = value["changes"].as_array().unwrap().clone();
        if let Some(change) = changes.into_iter().find(|change| change["to"] == "shop/db-b" && change["live"] == 1) {
            assert_eq!(status.status.code(), Some(3));
            break change;
        }
        assert!(Instant::now() < deadline, "{value}");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(change["promoted"]["allowed"] == false && change["present"]["allowed"] == true, "{change}");
    setup.run(&["trial", "stop"], 0);
    assert!(setup.run(&["trial", "status"], 0).0.starts_with("nothing is staged\n"));
}

#[test]
fn one_capture_has_both_ends_until_it_is_interrupted() {
    let setup = Setup::start();
    let (from, to) = (setup.fixture.site("shop/web-a"), setup.fixture.target("shop/db-b", false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT).unwrap();
    flow.wait_for(3, LIMIT).unwrap();
    let file = setup.scratch.path().join("both.pcapng");
    let arguments = ["--from", "shop/web-a", "--to", "shop/db-b", "-o", file.to_str().unwrap()];
    let said = setup.capture(&arguments, || flow.wait_for(20, LIMIT).unwrap());
    assert!(said.contains(" packets: node-a ") && said.contains("node-b "), "{said}");
    let found = packets(&file);
    let of = |node: &str| found.iter().filter(|packet| packet.interface.ends_with(&format!(" on {node}"))).count();
    assert!(of("node-a") >= 20 && of("node-b") >= 20, "{found:?}");
    assert!(found.iter().any(|packet| packet.interface == "shop/web-a on node-a"), "{found:?}");
    // Both nodes have one clock here.
    assert!(found.is_sorted_by_key(|packet| packet.time), "{found:?}");
    // Its end is that of the daemons' captures.
    let running = setup.json(&["status"], 0);
    assert!(running["nodes"].as_array().unwrap().iter().all(|node| node["status"]["capture"].is_null()), "{running}");
}

/// From an incident on two nodes to a regression test: what is allowed and what is denied, and nothing that the filter leaves out.
#[test]
fn each_nodes_bundle_is_filtered_and_replays_to_its_verdicts() {
    let setup = Setup::start();
    let (from, to) = (setup.fixture.site("shop/web-a"), setup.fixture.target("shop/db-b", false));
    let directory = setup.scratch.path().join("incident");
    let arguments = ["--bundle", directory.to_str().unwrap(), "--filter", "tcp port 8080 or tcp port 9090"];
    let said = setup.capture(&arguments, || {
        EchoConnection::open(&from.namespace, to, 8080, LIMIT).unwrap().wait_for(5, LIMIT).unwrap();
        let reached = |protocol| probe::run_one(from, to, protocol, RetryPolicy::default()).unwrap().arrived();
        assert!(!reached(Protocol::Tcp(9090)), "policy denies it");
        reached(Protocol::Udp(53));
    });
    for node in NODES {
        let bundle = directory.join(node);
        let frames = packets(&bundle.join("packets.pcapng"));
        assert!(!frames.is_empty(), "{said}");
        assert!(frames.iter().all(|packet| packet.frame[14 + 9] == 6), "IPv4 packets, of TCP alone");
        let mut replay = Command::new(penstock_binary().unwrap());
        let output = replay.arg("replay").arg(&bundle).args(["--summary", "json"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{node}: {output:?}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (same, different) = (&summary["recorded"]["same"], &summary["recorded"]["different"]);
        assert!(same.as_u64() > Some(0) && different == 0, "{node}: {summary:#}");
        // The answering side decides about what its policy denies.
        let denied = summary["verdicts"]["deny"].as_u64();
        assert_eq!(denied > Some(0), node == "node-b", "{node}: {summary:#}");
    }
}

#[test]
fn watching_flows_shows_what_each_connection_of_each_node_sends() {
    let setup = Setup::start();
    let (from, to) = (setup.fixture.site("shop/web-a"), setup.fixture.target("shop/db-b", false));
    let flow = EchoConnection::open(&from.namespace, to, 8080, LIMIT).unwrap();
    flow.wait_for(3, LIMIT).unwrap();
    let mut command = setup.command(&["flows", "--pod", "shop/db-b", "--port", "8080", "--watch", "1"]);
    let mut watch = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    // In the first listing nothing is known of a rate yet.
    let with_rate = |node: &str, line: &str| line.starts_with(node) && line.contains("bit/s");
    let mut missing = NODES.to_vec();
    let seen: Vec<String> = lines
        .take(100)
        .take_while(|line| {
            missing.retain(|node| !with_rate(node, line));
            !missing.is_empty()
        })
        .collect();
    kill(Pid::from_raw(watch.id() as i32), Signal::SIGINT).unwrap();
    watch.wait().unwrap();
    assert!(missing.is_empty(), "no rate of {missing:?}: {seen:#?}");
}

/// A packet of a capture.
#[derive(Debug)]
struct Captured {
    time: Time,
    interface: String,
    frame: Vec<u8>,
}

fn packets(file: &Path) -> Vec<Captured> {
    let (mut captures, mut frames, mut found) = (Captures::open(&[file]).unwrap(), Vec::new(), Vec::new());
    while let Some(record) = captures.next(&mut frames).unwrap() {
        let interface = captures.interfaces()[record.interface.index()].name.clone().unwrap_or_default();
        found.push(Captured { time: record.time, interface, frame: std::mem::take(&mut frames) });
    }
    found
}

/// Ctrl-C, after which the plugin ends by itself.
fn interrupt(capture: &mut Child) {
    kill(Pid::from_raw(capture.id() as i32), Signal::SIGINT).unwrap();
    let deadline = Instant::now() + LIMIT;
    loop {
        match capture.try_wait().unwrap() {
            Some(status) => return assert_eq!(status.code(), Some(0)),
            None => assert!(Instant::now() < deadline, "it does not end"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The output of `kubectl penstock status` in the documentation.
fn status_of_page() -> String {
    const PAGE: &str = include_str!("../../../docs/operate/cluster.md");
    let block = PAGE.split_once("\n## Status\n").and_then(|(_, section)| section.split_once("```text\n"));
    block.and_then(|(_, block)| block.split_once("```")).expect("an example of the status").0.to_owned()
}

/// The words of a text, with 0 for each of their numbers: figures differ from run to run, and so do the columns' widths.
fn shape(text: &str) -> Vec<String> {
    let numbers = |word: &str| {
        word.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("0")
    };
    text.split_whitespace().map(numbers).collect()
}

#[test]
fn a_node_whose_daemon_is_away_is_named_and_the_other_answers() {
    let mut setup = Setup::start();
    setup.fixture.daemons.remove(1).stop().unwrap();
    let (shown, said) = setup.run(&["status"], 4);
    assert!(shown.contains("\nenforced on 1 of 2 nodes, 3 pods\n"), "{shown}");
    assert!(said.contains("node node-b: ") && said.contains("no daemon listens there"), "{said}");
    let away = socket(&setup.fixture.configs[1], "admin").display().to_string();
    let printed = (shown + &said).replace(&away, "/run/penstock/admin.sock");
    assert_eq!(shape(&status_of_page()), shape(&printed), "docs/operate/cluster.md: {printed}");
    let value = setup.json(&["rules"], 4);
    assert_eq!(
        (value["missing"][0]["node"].as_str(), value["missing"][0]["problem"].as_str()),
        (Some("node-b"), Some("no_daemon"))
    );
    let (_, said) = setup.run(&["wait", "--for", "enforced", "pod/shop/web-a", "--timeout", "1s"], 1);
    assert!(said.contains("node node-a: does not say which pods it knows"), "manifests have no versions: {said}");
}

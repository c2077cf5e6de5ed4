//! Captures of a running daemon: what they have, what they cost others, and who gets them.

use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::probe::{EchoConnection, Site};
use penstock_bench::testbed::{CapturedFrame, PacketCapture, penstock_binary, read_packets};
use penstock_replay::capture::Captures;

use crate::fixture::{Fixture, pod, pods, policy};

const LIMIT: Duration = Duration::from_secs(20);
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9469);
const PORT: u16 = 7000;
/// `pod-1` admits only `pod-0`.
const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";

/// Bytes of Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

/// Three pods, and a daemon that offers captures with these settings of `[capture]`.
struct Offered {
    fixture: Fixture,
    socket: PathBuf,
}

impl Offered {
    fn with(settings: &str) -> Self {
        Self::asked(settings, &[])
    }

    fn asked(settings: &str, environment: &[(&str, &str)]) -> Self {
        let mut socket = PathBuf::new();
        let fixture = Fixture::of(&(pods(3) + &policy("served", "pod-1", ONLY_POD_0)), |_, config| {
            let directory = config.manifests.parent().unwrap();
            socket = directory.join("capture.sock");
            config.metrics = Some(METRICS);
            config.conntrack = format!("mapping = \"{}/run/conntrack\"\nentries = 4096\n", directory.display());
            config.sections += &format!("[capture]\nsocket = \"{}\"\n{settings}", socket.display());
            config.environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        });
        Self { fixture, socket }
    }

    fn start() -> Self {
        Self::with("")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.fixture.scratch.path().join(name)
    }

    fn capture(&self, file: &str, arguments: &[&str]) -> PacketCapture {
        PacketCapture::start(&self.socket, &self.file(file), arguments)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.fixture.daemon.log().lines().join("\n")))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(penstock_binary().unwrap());
        command.arg("capture").args(arguments).arg("--socket").arg(&self.socket);
        command
    }

    /// A capture that is expected to be refused.
    fn refused(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn site(&self, name: &str) -> &Site {
        self.fixture.site(name)
    }

    /// Packets that programs forwarded by themselves so far.
    fn offloaded(&self) -> u64 {
        self.metric("penstock_offloaded_packets_total") as u64
    }

    /// The sum of a metric's samples.
    fn metric(&self, name: &str) -> f64 {
        let deadline = Instant::now() + LIMIT;
        loop {
            // Empty if a busy machine keeps the daemon from answering.
            let page = self.fixture.http(METRICS, "/metrics");
            if page.trim_end().ends_with("# EOF") {
                let samples = page.lines().filter(|line| line.starts_with(name));
                return samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
            }
            assert!(Instant::now() < deadline, "no metrics: {page}");
        }
    }

    /// Waits until programs forward again.
    fn wait_for_offload(&self, flow: &EchoConnection, why: &str) {
        let before = self.offloaded();
        let deadline = Instant::now() + LIMIT;
        while self.offloaded() < before + 20 {
            assert!(Instant::now() < deadline, "{why}: programs do not forward");
            flow.wait_for(20, LIMIT).unwrap();
        }
    }
}

fn socket(site: &Site, port: u16) -> UdpSocket {
    let here = SocketAddr::new(site.address(false).unwrap(), port);
    let socket = site.namespace.udp(here).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Sends datagrams with these payloads.
fn send(from: &UdpSocket, to: &Site, payloads: &[String]) {
    let to = SocketAddr::new(to.address(false).unwrap(), PORT);
    for payload in payloads {
        assert_eq!(from.send_to(payload.as_bytes(), to).unwrap(), payload.len());
    }
}

fn payloads(of: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{of} {number}")).collect()
}

fn payload(frame: &CapturedFrame) -> String {
    String::from_utf8_lossy(&frame.bytes[HEADERS..]).into_owned()
}

#[test]
fn a_capture_of_a_pod_has_exactly_its_packets_with_verdicts() {
    let node = Offered::start();
    let [pod_0, pod_1, pod_2] = ["test/pod-0", "test/pod-1", "test/pod-2"].map(|name| node.site(name));
    let (from_0, from_2, at_1) = (socket(pod_0, PORT), socket(pod_2, PORT), socket(pod_1, PORT));
    // Before the capture: the connection is established, and with tcx the kernel forwards it.
    send(&from_0, pod_1, &payloads("before", 3));
    let mut bytes = [0; 64];
    for _ in 0..3 {
        at_1.recv_from(&mut bytes).unwrap();
    }
    let capture = node.capture("pod-1.pcapng", &["--pod", "test/pod-1", "--protocol", "UDP"]);
    let (allowed, denied) = (payloads("allowed", 20), payloads("denied", 10));
    send(&from_0, pod_1, &allowed);
    send(&from_2, pod_1, &denied);
    send(&from_2, pod_0, &payloads("of others", 5));
    for expected in &allowed {
        let (length, _) = at_1.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], expected.as_bytes(), "traffic is as without a capture");
    }
    capture.wait_for(30, LIMIT).unwrap();
    let (packets, summary) = capture.end().unwrap();
    assert!(summary.contains("30 packets captured, 0 lost"), "{summary}");
    let of = |verdict: &str| -> Vec<&CapturedFrame> {
        packets.iter().filter(|packet| packet.comment.starts_with(&format!("verdict={verdict} "))).collect()
    };
    let (passed, dropped) = (of("allow"), of("deny"));
    assert_eq!(passed.iter().map(|it| payload(it)).collect::<Vec<_>>(), allowed, "each once, in order");
    assert_eq!(dropped.iter().map(|it| payload(it)).collect::<Vec<_>>(), denied);
    assert_eq!(packets.len(), 30, "nothing else");
    for packet in &passed {
        assert_eq!(packet.interface, "test/pod-0");
        let comment = &packet.comment;
        assert!(comment.contains("egress=open ingress=") && comment.contains("served"), "the rule: {comment}");
        assert!(comment.contains(" connection=") && !comment.contains("reason="), "{comment}");
    }
    for packet in &dropped {
        assert_eq!(packet.interface, "test/pod-2");
        assert!(packet.comment.contains("reason=ingress_denied egress=open ingress=denied"), "{}", packet.comment);
    }
    node.check_by_others("pod-1.pcapng", &packets);
}

/// The answer of `penstock replay` on a bundle as JSON, and its exit code.
fn replay(bundle: &Path, arguments: &[&str]) -> (serde_json::Value, Option<i32>) {
    let mut command = Command::new(penstock_binary().unwrap());
    let output = command.arg("replay").arg(bundle).args(arguments).args(["--summary", "json"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let summary = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (summary, output.status.code())
}

#[test]
fn a_bundle_with_a_policy_change_replays_to_its_verdicts() {
    let node = Offered::start();
    let [pod_0, pod_1, pod_2] = ["test/pod-0", "test/pod-1", "test/pod-2"].map(|name| node.site(name));
    let (before, at_1) = (socket(pod_0, 7001), socket(pod_1, PORT));
    send(&before, pod_1, &payloads("before", 3));
    let mut bytes = [0; 64];
    (0..3).for_each(|_| _ = at_1.recv_from(&mut bytes).unwrap());
    let directory = node.file("incident");
    let capture =
        PacketCapture::start_bundle(&node.socket, &directory, &["--pod", "test/pod-1", "--protocol", "UDP"]).unwrap();
    let (from_0, from_2) = (socket(pod_0, PORT), socket(pod_2, PORT));
    send(&before, pod_1, &payloads("still", 5));
    send(&from_0, pod_1, &payloads("allowed", 20));
    send(&from_2, pod_1, &payloads("denied", 10));
    for _ in 0..25 {
        let (_, from) = at_1.recv_from(&mut bytes).unwrap();
        if from.port() == PORT {
            at_1.send_to(b"answer", from).unwrap();
        }
    }
    capture.wait_for(55, LIMIT).unwrap();
    let only_pod_2 = ONLY_POD_0.replace("pod-0", "pod-2");
    node.fixture.enforce(&(pods(3) + &policy("served", "pod-1", &only_pod_2)));
    send(&from_0, pod_1, &payloads("revoked", 10));
    send(&from_2, pod_1, &payloads("allowed now", 10));
    (0..10).for_each(|_| _ = at_1.recv_from(&mut bytes).unwrap());
    capture.wait_for(75, LIMIT).unwrap();
    let (packets, summary) = capture.end().unwrap();
    assert!(summary.contains("75 packets captured, 0 lost"), "{summary}");
    assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);

    let verdicts = node.file("verdicts.jsonl");
    let (answer, code) = replay(&directory, &["--verdicts", verdicts.to_str().unwrap()]);
    let recorded = &answer["recorded"];
    assert_eq!((code, recorded["different"].as_u64()), (Some(0), Some(0)), "{answer:#}");
    assert_eq!(
        (recorded["same"].as_u64(), recorded["earlier_connections"].as_u64()),
        (Some(70), Some(5)),
        "{answer:#}"
    );
    let decided: Vec<serde_json::Value> =
        std::fs::read_to_string(&verdicts).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let compared = packets.iter().filter(|packet| !payload(packet).starts_with("still"));
    for (packet, again) in compared.zip(&decided) {
        let part = |key: &str| packet.comment.split(' ').find_map(|part| part.strip_prefix(key));
        let here = (again["verdict"].as_str(), again["reason"].as_str());
        assert_eq!(here, (part("verdict="), part("reason=")), "{}: {again}", packet.comment);
    }
    assert_eq!(decided.len(), 70);

    let both = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}, {podSelector: {matchLabels: {app: pod-2}}}]}]\n";
    let fix = node.file("fix.yaml");
    std::fs::write(&fix, policy("served", "pod-1", both).trim_start_matches("---\n")).unwrap();
    let (answer, code) = replay(&directory, &["--compare", fix.to_str().unwrap()]);
    let changes = answer["changes"].as_array().unwrap();
    let packets: Vec<_> = changes.iter().map(|it| (&it["src"], &it["after"]["verdict"], &it["packets"])).collect();
    assert_eq!(code, Some(3), "{answer:#}");
    assert_eq!(
        serde_json::json!(packets),
        serde_json::json!([["test/pod-0", "allow", 10], ["test/pod-2", "allow", 10]])
    );
}

impl Offered {
    /// The replay's reader and tcpdump read a file as the test does.
    fn check_by_others(&self, file: &str, packets: &[CapturedFrame]) {
        let mut read = Captures::open(&[self.file(file)]).unwrap();
        let (mut frames, mut found) = (Vec::new(), Vec::new());
        while let Some(record) = read.next(&mut frames).unwrap() {
            let name = read.interfaces()[record.interface.index()].name.clone().unwrap();
            found.push((name, record.time.0, std::mem::take(&mut frames)));
        }
        let expected: Vec<_> =
            packets.iter().map(|packet| (packet.interface.clone(), packet.time, packet.bytes.clone())).collect();
        assert_eq!(found, expected);
        let output = Command::new("tcpdump").args(["-n", "-r"]).arg(self.file(file)).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), packets.len());
    }
}

#[test]
fn a_filter_and_limits_leave_out_the_rest() {
    // Beside the verdict log, which has the same packets.
    let node = Offered::with("[verdict_log]\noutput = \"verdicts.jsonl\"\neach_second = 1000\n");
    let [pod_0, pod_1, pod_2] = ["test/pod-0", "test/pod-1", "test/pod-2"].map(|name| node.site(name));
    let (from_0, from_2, _at_1) = (socket(pod_0, PORT), socket(pod_2, PORT), socket(pod_1, PORT));
    let expression = format!("udp dst port {PORT} and host {}", pod_2.address(false).unwrap());
    let arguments = ["--filter", &expression, "--verdict", "deny", "--packets", "4", "--snaplen", "64"];
    let capture = node.capture("filtered.pcapng", &arguments);
    for round in 0..10 {
        send(&from_0, pod_1, &payloads("allowed", 2));
        send(&from_2, pod_1, &[format!("{round} {}", "denied ".repeat(10))]);
    }
    let (packets, summary) = capture.wait().unwrap();
    assert!(summary.contains("4 packets captured, 0 lost to the capture (4 packets)"), "{summary}");
    let lengths: Vec<_> = packets.iter().map(|packet| (packet.bytes.len(), packet.length as usize)).collect();
    assert_eq!(lengths, [(64, HEADERS + 72); 4]);
    assert!(packets.iter().all(|packet| packet.comment.contains("reason=ingress_denied")), "{packets:?}");
    let log = node.fixture.daemon.config().with_file_name("verdicts.jsonl");
    let denied = || std::fs::read_to_string(&log).unwrap_or_default().matches("\"ingress_denied\"").count();
    let deadline = Instant::now() + LIMIT;
    while denied() < 10 {
        assert!(Instant::now() < deadline, "{} of 10 in the verdict log", denied());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_limit_ends_a_capture_and_filters_leave_out_the_rest() {
    let node = Offered::start();
    let [pod_0, pod_1, pod_2] = ["test/pod-0", "test/pod-1", "test/pod-2"].map(|name| node.site(name));
    let (from_0, other, from_2) = (socket(pod_0, PORT), socket(pod_0, PORT + 1), socket(pod_2, PORT));
    let _at_1 = socket(pod_1, PORT);
    // Each round: from two ports of one pod, and from another pod, which policy denies.
    let round = |name: &str| {
        send(&from_0, pod_1, &payloads(&format!("{name} first"), 2));
        send(&other, pod_1, &payloads(&format!("{name} second"), 2));
        send(&from_2, pod_1, &payloads(&format!("{name} denied"), 2));
    };
    let captured = |name: &str, arguments: &[&str], expected: &[&str]| {
        let capture = node.capture(&format!("{name}.pcapng"), arguments);
        round(name);
        // Packets behind the last that is expected would be seen, too.
        round(name);
        let all: Vec<String> = expected.iter().flat_map(|kind| payloads(&format!("{name} {kind}"), 2)).collect();
        capture.wait_for(2 * all.len(), LIMIT).unwrap();
        let (packets, summary) = capture.end().unwrap();
        let mut found: Vec<String> = packets.iter().map(payload).collect();
        let mut wanted = [all.clone(), all].concat();
        found.sort();
        wanted.sort();
        assert_eq!(found, wanted, "{arguments:?}: {summary}");
        packets
    };
    let [host_0, host_2] = [pod_0, pod_2].map(|site| site.address(false).unwrap().to_string());
    let of_host = captured("host", &["--protocol", "UDP", "--host", &host_0], &["first", "second"]);
    captured("other", &["--protocol", "UDP", "--host", &host_2], &["denied"]);
    let of_first = of_host.iter().find(|packet| payload(packet) == "host first 0").unwrap();
    let number = of_first.comment.split(' ').find_map(|part| part.strip_prefix("connection=")).unwrap();
    let of_one = captured("connection", &["--connection", number], &["first"]);
    assert!(of_one.iter().all(|packet| packet.comment.contains(number)), "{of_one:?}");

    // The packet that reaches the limit is the last one.
    let length = HEADERS + "bytes first 0".len();
    let bytes = (length + 1).to_string();
    let capture = node.capture("bytes.pcapng", &["--protocol", "UDP", "--host", &host_0, "--bytes", &bytes]);
    round("bytes");
    let (packets, summary) = capture.wait().unwrap();
    assert!(summary.contains(&format!("({bytes} bytes)")), "{summary}");
    assert_eq!(packets.iter().map(payload).collect::<Vec<_>>(), payloads("bytes first", 2));
    let started = Instant::now();
    let capture = node.capture("seconds.pcapng", &["--protocol", "UDP", "--host", &host_0, "--seconds", "1"]);
    let (packets, summary) = capture.wait().unwrap();
    assert!(summary.contains("(1 seconds)") && packets.is_empty(), "{summary}");
    assert!(started.elapsed() >= Duration::from_secs(1), "it waits for packets that long");
}

#[test]
fn offloaded_connections_are_captured_and_go_back_afterwards() {
    let mut node = Offered::with("");
    let flow = {
        let client = node.site("test/pod-0");
        let target = node.fixture.target("test/pod-1", false);
        EchoConnection::open(&client.namespace, target, 8080, LIMIT).unwrap()
    };
    flow.wait_for(50, LIMIT).unwrap();
    node.wait_for_offload(&flow, "before the capture");
    let capture = node.capture("established.pcapng", &["--pod", "test/pod-1", "--protocol", "TCP"]);
    // Packets that were on their way when it began.
    flow.wait_for(5, LIMIT).unwrap();
    let before = node.offloaded();
    flow.wait_for(50, LIMIT).unwrap();
    assert_eq!(node.offloaded(), before, "all packets of the pod meet workers");
    capture.wait_for(120, LIMIT).unwrap();
    let (packets, _) = capture.end().unwrap();
    let from = |name: &str| packets.iter().filter(|packet| packet.interface == name).count();
    assert!(from("test/pod-0") >= 50 && from("test/pod-1") >= 50, "{} packets", packets.len());
    assert!(packets.iter().all(|packet| packet.comment.starts_with("verdict=allow egress=")), "{packets:?}");
    let connection = packets[0].comment.split(' ').find(|part| part.starts_with("connection=")).unwrap().to_owned();
    assert!(packets.iter().all(|packet| packet.comment.contains(&connection)), "one connection");
    node.wait_for_offload(&flow, "after the capture");

    // A client that is killed in the middle: the next one finds no capture.
    let capture = node.capture("killed.pcapng", &[]);
    capture.wait_for(20, LIMIT).unwrap();
    drop(capture);
    node.wait_for_offload(&flow, "after the client's death");

    // One whose reader leaves while no packet comes.
    let mut quiet = node.command(&["--port", "1", "-o", "-"]);
    let mut quiet = quiet.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    while node.fixture.status().capture.is_none() {
        assert!(Instant::now() < deadline, "it captures");
    }
    drop(quiet.stdout.take());
    assert_eq!(quiet.wait().unwrap().code(), Some(0));
    node.wait_for_offload(&flow, "after the reader has left");

    // A capture of what is denied has nothing of them, and leaves them alone.
    let capture = node.capture("denied.pcapng", &["--verdict", "deny", "--port", "8080"]);
    node.wait_for_offload(&flow, "while packets that are denied are captured");
    assert_eq!(capture.end().unwrap().0, []);

    // A daemon that is killed in the middle: established connections go on without it.
    let capture = node.capture("no-daemon.pcapng", &[]);
    capture.wait_for(20, LIMIT).unwrap();
    node.fixture.kill();
    flow.wait_for(50, LIMIT).unwrap();
    drop(capture);
    node.fixture.restart();
    node.wait_for_offload(&flow, "with the next daemon");
}

#[test]
fn a_capture_follows_its_pod_to_another_interface() {
    let mut node = Offered::with("[workers]\ncores = [0, 1]\n");
    let (v4, v6) = ("10.244.1.77", "fd00:10:244:1::77");
    node.fixture.save("late.yaml", pod("late", v4, v6).trim_start_matches("---\n"));
    let deadline = Instant::now() + LIMIT;
    while !node.fixture.status().pods.iter().any(|pod| pod.pod == "test/late") {
        assert!(Instant::now() < deadline, "the pod is known");
        std::thread::sleep(Duration::from_millis(5));
    }
    // It has no interface yet.
    let capture = node.capture("late.pcapng", &["--pod", "test/late", "--protocol", "UDP"]);
    let running = node.fixture.status().capture.expect("status shows it");
    assert_eq!((running.pod.as_deref(), running.packets, running.lost), (Some("test/late"), 0, 0));
    for turn in 1..=2 {
        let seen = node.fixture.daemon.log().len();
        node.fixture.cluster.node.add_pod("test/late", &[v4.parse().unwrap(), v6.parse().unwrap()]).unwrap();
        node.fixture.cluster.node.settle().unwrap();
        node.fixture.daemon.log().wait_for_after(seen, "attached", LIMIT).unwrap();
        let late = Site::from(node.fixture.cluster.node.pod("test/late").unwrap());
        let from_it = socket(&late, PORT);
        let deadline = Instant::now() + LIMIT;
        let mut sent = 0;
        // Until its port is in effect its packets are dropped, and captured as such.
        while !capture.packets().unwrap().iter().any(|it| payload(it).starts_with(&format!("late {turn} "))) {
            assert!(Instant::now() < deadline, "its packets are captured, turn {turn}");
            send(&from_it, node.site("test/pod-0"), &[format!("late {turn} {sent}")]);
            sent += 1;
            std::thread::sleep(Duration::from_millis(5));
        }
        // The connection is established by now.
        let more = payloads(&format!("late {turn} more"), 20);
        send(&from_it, node.site("test/pod-0"), &more);
        let has_all = |packets: &[CapturedFrame]| more.iter().all(|sent| packets.iter().any(|it| payload(it) == *sent));
        while !has_all(&capture.packets().unwrap()) {
            assert!(Instant::now() < deadline, "all of its packets are captured, turn {turn}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let attached = node.fixture.daemon.log().len();
        drop(from_it);
        node.fixture.cluster.node.remove_pod("test/late").unwrap();
        node.fixture.daemon.log().wait_for_after(attached, "closed", LIMIT).unwrap();
    }
    // Nothing is sent any more.
    let packets = capture.wait_for(node.metric("penstock_capture_packets_total") as usize, LIMIT).unwrap();
    assert!(packets.iter().all(|it| it.interface == "test/late" && payload(it).starts_with("late ")), "{packets:?}");
    assert_eq!(node.metric("penstock_capture_running"), 1.0);
    assert_eq!(node.metric("penstock_capture_packets_total"), packets.len() as f64);
    node.fixture.daemon.signal(Signal::SIGTERM).unwrap();
    assert_eq!(capture.wait_for_failure().unwrap(), 1, "the daemon has ended it");
    assert_eq!(read_packets(&node.file("late.pcapng")).unwrap(), packets, "the file is whole");
    node.check_by_others("late.pcapng", &packets);
}

#[test]
fn an_unread_capture_loses_only_packets_of_its_own() {
    let node = Offered::asked("", &[("CAPTURE_QUEUE", "8")]);
    let client = node.site("test/pod-0");
    let target = node.fixture.target("test/pod-1", false);
    let flow = EchoConnection::open(&client.namespace, target, 8080, LIMIT).unwrap();
    let capture = node.capture("lost.pcapng", &[]);
    capture.signal(Signal::SIGSTOP).unwrap();
    // Drops of a slow worker would be these; pods' own multicast is dropped at any time.
    let lost = |node: &Offered| -> u64 {
        let drops = node.fixture.status().all_drops();
        drops.iter().filter(|(name, _)| name.starts_with("kernel_") || name.ends_with("_full")).map(|it| it.1).sum()
    };
    let before = lost(&node);
    flow.wait_for(3_000, Duration::from_secs(60)).unwrap();
    assert_eq!(lost(&node), before, "no packet of the pods was lost: {:?}", node.fixture.status().all_drops());
    capture.signal(Signal::SIGCONT).unwrap();
    // It has read what waits once it hears of losses.
    let deadline = Instant::now() + LIMIT;
    while !capture.packets().unwrap().iter().any(|packet| packet.comment.contains(" lost=")) {
        assert!(Instant::now() < deadline, "no comment says what was lost");
        flow.wait_for(10, LIMIT).unwrap();
    }
    let (packets, summary) = capture.end().unwrap();
    let numbers: Vec<u64> = summary.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(numbers[0] == packets.len() as u64 && numbers[1] > 0, "{summary}");
}

#[test]
fn captures_are_refused_unless_they_are_offered_and_understood() {
    let node = Offered::start();
    assert_eq!(std::fs::metadata(&node.socket).unwrap().permissions().mode() & 0o777, 0o600);
    let file = node.file("out.pcapng").display().to_string();
    let capture = node.capture("first.pcapng", &["--pod", "test/pod-1"]);
    let refused = |arguments: &[&str], expected: &str| {
        let output = node.refused(&[arguments, &["-o", &file]].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(expected), "{arguments:?}: {error}");
        assert!(!std::path::Path::new(&file).exists(), "no file is left");
    };
    refused(&[], "another capture runs, and there is one at a time");
    capture.end().unwrap();
    refused(&["--pod", "test/pod-9"], "pod test/pod-9: not on this node (");
    refused(&["--reason", "bad_luck"], "reason \"bad_luck\": unknown; use one of");
    refused(&["--seconds", "3601"], "seconds = 3601: out of range; give 1 to 3600");
    refused(&["--filter", "tcp prot 80"], "--filter \"tcp prot 80\": can't parse filter expression");
    let first = node.file("first.pcapng").display().to_string();
    let output = node.refused(&["-o", &first]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("exists already; give another name"));

    let without = Fixture::of(&pods(1), |_, _| {});
    let socket = without.scratch.path().join("capture.sock");
    let nothing = Offered { fixture: without, socket };
    let output = nothing.refused(&["-o", &file]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && error.contains("set capture.socket in its configuration"), "{error}");
}

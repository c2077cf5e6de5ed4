//! Records of flows in a file, by a daemon on veths.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};
use penstock_bench::cluster::Cluster;
use penstock_bench::probe::Site;
use penstock_bench::testbed::{DaemonConfig, ScratchDir, ServiceProcess};
use serde_json::Value;

use crate::fixture::{Fixture, pods, policy};

/// For a machine that is busy.
const LIMIT: Duration = Duration::from_secs(90);
const TCP: u16 = 7000;
const UDP: u16 = 7001;
const DENIED: u16 = 7002;
/// `pod-1` admits all but one port.
const SERVED: &str = "  ingress: [{from: [{podSelector: {}}], ports: [{port: 7000}, {port: 7001, protocol: UDP}]}]\n";

struct Recorded {
    fixture: Fixture,
    file: PathBuf,
}

impl Recorded {
    /// `more`: of the configuration, where the section of flow records is the last one.
    fn configured(more: impl FnOnce(&mut Cluster, &mut DaemonConfig)) -> Self {
        let mut file = PathBuf::new();
        let fixture = Fixture::of(&(pods(2) + &policy("served", "pod-1", SERVED)), |cluster, config| {
            config.conntrack += "timeouts = { tcp_timeout_time_wait = \"1s\", tcp_timeout_close = \"1s\", \
                                 tcp_timeout_last_ack = \"1s\", udp_timeout = \"2s\", udp_timeout_stream = \"2s\" }\n";
            file = config.manifests.parent().unwrap().join("flows.jsonl");
            config.sections += &format!("[flow_records]\nfile = \"{}\"\ninterval = \"1s\"\n", file.display());
            more(cluster, config);
        });
        Self { fixture, file }
    }

    fn site(&self, name: &str) -> &Site {
        self.fixture.site(name)
    }

    fn target(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.site("test/pod-1").address(false).unwrap(), port)
    }

    /// The records once `is_there` finds all that it wants among them.
    fn wait(&self, what: &str, is_there: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let records = read(&self.file);
            if is_there(&records) {
                return records;
            }
            let log = self.fixture.daemon.log().lines().join("\n");
            assert!(Instant::now() < deadline, "no record {what}: {records:#?}\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The record of the end of the connection from this port.
    fn end_of(&self, port: u16) -> (Value, Vec<Value>) {
        let is_its = |record: &Value| record["from"]["port"] == port && record["protocol"] != "ICMP";
        let is_end = |record: &Value| is_its(record) && record["event"] == "end";
        let all = self.wait(&format!("of the end of port {port}"), |records| records.iter().any(is_end));
        let own: Vec<Value> = all.into_iter().filter(is_its).collect();
        (own.iter().find(|record| is_end(record)).unwrap().clone(), own)
    }
}

/// The whole lines of a file.
fn read(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// Packets that a pod's interface has sent and received so far.
fn counted(site: &Site) -> [u64; 2] {
    ["tx_packets", "rx_packets"].map(|name| {
        let read = || std::fs::read_to_string(format!("/sys/class/net/eth0/statistics/{name}"));
        site.namespace.run(read).unwrap().trim().parse().unwrap()
    })
}

fn number(record: &Value, direction: &str, what: &str) -> u64 {
    record[direction][what].as_u64().unwrap_or_else(|| panic!("{direction}.{what} in {record}"))
}

/// Each count since the last record adds up to the total of the last one.
fn assert_adds_up(records: &[Value]) {
    for (direction, since) in [("sent", "sent_since"), ("received", "received_since")] {
        for what in ["packets", "bytes"] {
            let sum: u64 = records.iter().map(|record| number(record, since, what)).sum();
            assert_eq!(sum, number(records.last().unwrap(), direction, what), "{direction} {what}: {records:#?}");
        }
    }
}

/// Sends datagrams there and back. Returns the client's port.
fn datagrams(node: &Recorded, count: u64, length: usize) -> u16 {
    let there = node.target(UDP);
    let server = node.site("test/pod-1").namespace.udp(there).unwrap();
    let client = node.site("test/pod-0").namespace.udp("0.0.0.0:0").unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
    }
    let mut buffer = vec![0; 2048];
    for _ in 0..count {
        client.send_to(&vec![1; length], there).unwrap();
        let (_, from) = server.recv_from(&mut buffer).unwrap();
        server.send_to(&[2; 10], from).unwrap();
        client.recv_from(&mut buffer).unwrap();
    }
    client.local_addr().unwrap().port()
}

fn connect(node: &Recorded) -> (TcpStream, TcpStream) {
    let there = node.target(TCP);
    let listener = node.site("test/pod-1").namespace.listen(there).unwrap();
    let client = node.site("test/pod-0").namespace.run(|| TcpStream::connect_timeout(&there, LIMIT)).unwrap();
    let (server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(LIMIT)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (client, server)
}

fn exchange((client, server): &mut (TcpStream, TcpStream), length: usize) {
    let mut buffer = vec![0; length];
    client.write_all(&vec![1; length]).unwrap();
    server.read_exact(&mut buffer).unwrap();
    server.write_all(b"answer").unwrap();
    client.read_exact(&mut buffer[..6]).unwrap();
}

#[test]
fn each_kind_of_flow_has_its_records() {
    let node = Recorded::configured(|_, _| {});
    assert_eq!(std::fs::metadata(&node.file).unwrap().permissions().mode() & 0o777, 0o600);

    // Datagrams are counted to the byte: the IP and UDP headers, and what they carry.
    let port = datagrams(&node, 20, 100);
    let (udp, records) = node.end_of(port);
    assert_eq!(
        (&udp["ended"], &udp["verdict"], &udp["protocol"]),
        (&"expired".into(), &"allowed".into(), &"UDP".into())
    );
    assert_eq!((number(&udp, "sent", "packets"), number(&udp, "sent", "bytes")), (20, 20 * 128), "{udp}");
    assert_eq!((number(&udp, "received", "packets"), number(&udp, "received", "bytes")), (20, 20 * 38), "{udp}");
    assert_adds_up(&records);
    assert_eq!((&udp["from"]["pod"], &udp["from"]["namespace"]), (&"pod-0".into(), &"test".into()));
    assert_eq!((&udp["to"]["name"], &udp["to"]["port"]), (&"test/pod-1".into(), &UDP.into()));
    assert!(udp["ingress"].as_str().unwrap().starts_with("test-ingress-served-0"), "{udp}");
    assert_eq!(udp["ingress_tier"], "NetworkPolicy");

    // A connection that lives for some intervals, and then closes: as many packets as passed the pod's interface.
    let before = counted(node.site("test/pod-0"));
    let mut connection = connect(&node);
    let port = connection.0.local_addr().unwrap().port();
    let is_interval = |record: &&Value| record["from"]["port"] == port && record["event"] == "interval";
    let intervals = |records: &[Value]| records.iter().filter(is_interval).count();
    for _ in 0..3 {
        exchange(&mut connection, 50_000);
        let had = intervals(&read(&node.file));
        node.wait("of an interval", |records| intervals(records) > had);
    }
    // An idle one is still open. The first interval may have its last packets.
    let had = intervals(&read(&node.file));
    let records = node.wait("of an idle interval", |records| intervals(records) >= had + 2);
    let last = records.iter().rfind(is_interval).unwrap();
    assert_eq!((number(last, "sent_since", "bytes"), number(last, "received_since", "bytes")), (0, 0), "{last}");
    drop(connection);
    let (closed, records) = node.end_of(port);
    let passed = counted(node.site("test/pod-0"));
    assert!(records.len() >= 4, "{records:#?}");
    assert_adds_up(&records);
    assert_eq!((&closed["ended"], &closed["protocol"]), (&"closed".into(), &"TCP".into()), "{closed}");
    for flag in ["SYN", "ACK", "FIN"] {
        assert!(closed["tcp_flags"].as_array().unwrap().contains(&flag.into()), "{closed}");
    }
    assert!(number(&closed, "sent", "bytes") > 150_000, "{closed}");
    for (direction, (before, passed)) in ["sent", "received"].into_iter().zip(before.into_iter().zip(passed)) {
        let (recorded, passed) = (number(&closed, direction, "packets"), passed - before);
        // Neighbour discovery is no connection's. Long segments count once at the interface, and as they are cut up here.
        assert!(recorded + 12 >= passed && recorded > 0, "{direction}: {recorded} recorded, {passed} passed");
    }

    // One that its client resets.
    let reset = connect(&node);
    let port = reset.0.local_addr().unwrap().port();
    setsockopt(&reset.0, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
    drop(reset.0);
    let (reset, _) = node.end_of(port);
    assert_eq!(reset["ended"], "reset", "{reset}");
    assert!(reset["tcp_flags"].as_array().unwrap().contains(&"RST".into()), "{reset}");

    // A flood that is denied is few records, and no packet is missing from their count.
    let denied = node.target(DENIED);
    let sockets: Vec<_> =
        node.site("test/pod-0").namespace.run(|| (0..50).map(|_| UdpSocket::bind("0.0.0.0:0").unwrap()).collect());
    sockets.iter().for_each(|socket| _ = socket.send_to(b"denied", denied).unwrap());
    let of_flood = |record: &&Value| record["event"] == "denied" && record["to"]["port"] == DENIED;
    let packets = |records: &[Value]| -> u64 {
        records.iter().filter(of_flood).filter_map(|record| record["packets"].as_u64()).sum()
    };
    let records = node.wait("of what was denied", |records| packets(records) >= 50);
    let flood: Vec<&Value> = records.iter().filter(of_flood).collect();
    assert_eq!(packets(&records), 50);
    assert!(flood.len() <= 3, "{flood:#?}");
    assert_eq!((&flood[0]["reason"], &flood[0]["verdict"]), (&"ingress_denied".into(), &"denied".into()));
    assert_eq!((&flood[0]["from"]["name"], &flood[0]["ingress"]), (&"test/pod-0".into(), &"denied".into()));

    let status = node.fixture.status().flow_records.expect("records are on");
    assert!(status.lost.values().all(|lost| *lost == 0), "{status:?}");
    assert!(status.made["end"] >= 3 && status.made["interval"] >= 3 && status.made["denied"] >= 1, "{status:?}");
}

#[test]
fn traffic_until_the_end_of_the_daemon_is_recorded() {
    let node = Recorded::configured(|_, _| {});
    let mut connection = connect(&node);
    let port = connection.0.local_addr().unwrap().port();
    exchange(&mut connection, 10_000);
    node.fixture.daemon.signal(Signal::SIGTERM).unwrap();
    node.fixture.daemon.wait_until_ended(LIMIT).unwrap();
    let records: Vec<Value> = read(&node.file).into_iter().filter(|record| record["from"]["port"] == port).collect();
    assert!(number(records.last().expect("a record"), "sent", "bytes") > 10_000, "{records:#?}");
    assert_adds_up(&records);
}

/// A collector that nobody here wrote has each record that the file has.
#[test]
#[ignore = "needs an OpenTelemetry collector: `make test-collector` gets one"]
fn a_collector_takes_every_record() {
    let program = std::env::var_os("PENSTOCK_COLLECTOR").expect("PENSTOCK_COLLECTOR: the program rotel");
    let scratch = ScratchDir::new().unwrap();
    let log = scratch.path().join("collector.log");
    let mut collector = None;
    let node = Recorded::configured(|cluster, config| {
        let mut command = cluster.node.namespace().command(&program);
        command.args(["start", "--otlp-http-endpoint", "127.0.0.1:4318"]);
        command.args(["--exporter", "blackhole", "--debug-log", "logs", "--debug-log-verbosity", "detailed"]);
        command.stdout(File::create(&log).unwrap());
        collector = Some(ServiceProcess::start(command).unwrap());
        config.sections += "otlp = \"http://127.0.0.1:4318\"\n";
    });
    node.end_of(datagrams(&node, 20, 100));
    let denied = node.site("test/pod-0").namespace.udp("0.0.0.0:0").unwrap();
    denied.send_to(b"denied", node.target(DENIED)).unwrap();
    node.wait("of what was denied", |records| records.iter().any(|record| record["event"] == "denied"));
    node.fixture.daemon.signal(Signal::SIGTERM).unwrap();
    node.fixture.daemon.wait_until_ended(LIMIT).unwrap();

    let mut expected: Vec<_> = read(&node.file).iter().map(as_collected).collect();
    expected.sort();
    let kinds: Vec<&str> = expected.iter().map(|record| record["EventName"].as_str()).collect();
    assert!(["interval", "end", "denied"].iter().all(|kind| kinds.contains(&format!("penstock.flow.{kind}").as_str())));
    let deadline = Instant::now() + LIMIT;
    loop {
        let log = std::fs::read_to_string(&log).unwrap();
        let mut found = collected(&log);
        found.sort();
        if found == expected {
            break;
        }
        assert!(Instant::now() < deadline, "{expected:#?}\nand the collector has\n{log}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The parts of a record that are compared: names of the collector's log, and the fields of the file.
const COLLECTED: [(&str, &str); 7] = [
    ("source.k8s.pod.name", "/from/pod"),
    ("source.port", "/from/port"),
    ("destination.k8s.pod.name", "/to/pod"),
    ("destination.port", "/to/port"),
    ("penstock.verdict", "/verdict"),
    ("penstock.connection.ended", "/ended"),
    ("penstock.sent.bytes", "/sent/bytes"),
];

/// A record of the file, as the collector should have it.
fn as_collected(record: &Value) -> BTreeMap<String, String> {
    let event = ("EventName".to_owned(), format!("penstock.flow.{}", record["event"].as_str().unwrap()));
    let fields = COLLECTED.iter().filter_map(|(name, field)| {
        let value = record.pointer(field).filter(|value| !value.is_null())?;
        Some(((*name).to_owned(), value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
    });
    fields.chain([event]).collect()
}

/// The records of a collector's log: a line for a field, and for an attribute `-> name: Type(value)`.
fn collected(log: &str) -> Vec<BTreeMap<String, String>> {
    let of_record = |text: &str| {
        let event = text.lines().find_map(|line| line.strip_prefix("EventName: "));
        let attributes = text.lines().filter_map(|line| line.trim().strip_prefix("-> ")?.split_once(": "));
        let values = attributes.filter_map(|(name, typed)| {
            let value = typed.split_once('(')?.1.strip_suffix(')')?;
            COLLECTED.iter().any(|(known, _)| *known == name).then(|| (name.to_owned(), value.to_owned()))
        });
        let event = event.map(|event| ("EventName".to_owned(), event.to_owned()));
        values.chain(event).collect()
    };
    log.split("LogRecord #").skip(1).map(of_record).collect()
}

/// A file system that fills up: the error is logged once, records are counted as lost, packets pass, and once there is room
/// again records are whole.
#[test]
fn a_full_disk_loses_records_and_nothing_else() {
    let directory = tempfile_in_memory();
    let file = directory.path.join("flows.jsonl");
    let fixture = Fixture::of(&pods(2), |_, config| {
        config.conntrack += "timeouts = { udp_timeout = \"1s\", udp_timeout_stream = \"1s\" }\n";
        config.sections += &format!("[flow_records]\nfile = \"{}\"\ninterval = \"1s\"\n", file.display());
    });
    let node = Recorded { fixture, file };
    std::fs::write(directory.path.join("ballast"), vec![0; 2 << 20]).unwrap_err();
    let deadline = Instant::now() + LIMIT;
    let lost = || node.fixture.status().flow_records.unwrap().lost["file"];
    while lost() == 0 {
        datagrams(&node, 1, 10);
        assert!(Instant::now() < deadline, "nothing is lost");
        std::thread::sleep(Duration::from_millis(200));
    }
    let errors = node.fixture.daemon.log().lines();
    assert_eq!(errors.iter().filter(|line| line.contains("cannot write flow_records.file")).count(), 1);
    std::fs::remove_file(directory.path.join("ballast")).unwrap();
    let port = datagrams(&node, 3, 10);
    let (record, _) = node.end_of(port);
    assert_eq!(number(&record, "sent", "packets"), 3);
    let by_event = read(&node.file).iter().fold(BTreeMap::<String, u64>::new(), |mut counts, record| {
        *counts.entry(record["event"].as_str().unwrap().to_owned()).or_default() += 1;
        counts
    });
    assert!(by_event["end"] >= 1, "{by_event:?}");
}

/// A small file system in memory, until it is dropped.
struct Mounted {
    path: PathBuf,
    _directory: ScratchDir,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        nix::mount::umount2(&self.path, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

fn tempfile_in_memory() -> Mounted {
    let directory = ScratchDir::new().unwrap();
    let path = directory.path().join("small");
    std::fs::create_dir(&path).unwrap();
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), &path, Some("tmpfs"), flags, Some("size=1m")).unwrap();
    Mounted { path, _directory: directory }
}

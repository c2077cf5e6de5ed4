//! Floods against a small connection table, as captures: unanswered connections are evicted, established ones stay.
//!
//! The table holds 4,096 connections, a pod at most 1,024 unless a test says otherwise. That is a 256th of the
//! defaults, so some thousand packets have the effect of a million.

use std::fs;
use std::path::PathBuf;

use penstock_dataplane::conntrack::Config;
use penstock_pcap_tests::CorpusCase;
use penstock_pcap_tests::script::{CaseScript, PacketLine};
use serde_json::Value;

const ENTRIES: usize = 4096;
/// Packets of a flood: three times a pod's quota.
const FLOOD: u32 = 3 * 1024;
/// Seconds between packets of a flood: 100,000 packets/s.
const INTERVAL: f64 = 10e-6;

/// Builds a capture. Every packet is identified by its number.
struct CaptureBuilder {
    lines: String,
    count: usize,
    now: f64,
    timeline: String,
}

impl CaptureBuilder {
    fn new() -> Self {
        Self { lines: String::new(), count: 0, now: 0.0, timeline: String::new() }
    }

    fn wait(&mut self, seconds: f64) {
        self.now += seconds;
    }

    /// Adds a packet in the corpus' notation, without its time.
    fn add(&mut self, packet: &str) -> usize {
        self.lines += &format!("{:.6} {packet}\n", self.now);
        self.now += INTERVAL;
        self.count += 1;
        self.count - 1
    }

    /// A TCP connection that is established on both sides.
    fn open(&mut self, from: &str, to: &str) -> [usize; 4] {
        [
            self.add(&format!("{from} > {to} tcp S seq=1000")),
            self.add(&format!("{to} > {from} tcp S A seq=5000 ack=1001")),
            self.add(&format!("{from} > {to} tcp A P seq=1001 ack=5001 len=10")),
            self.add(&format!("{to} > {from} tcp A seq=5001 ack=1011")),
        ]
    }

    /// The verdicts, by packet.
    fn replay(self, connections: Config) -> Vec<Value> {
        let script = CaseScript {
            cluster: "shop".to_owned(),
            timeline: self.timeline,
            packets: CaseScript::parse("flood", &format!("purpose: A flood.\ncluster: shop\n{}", self.lines))
                .unwrap()
                .packets,
            ..CaseScript::default()
        };
        assert_eq!(
            script.packets.iter().map(|line: &PacketLine| line.time).max(),
            script.packets.last().map(|line| line.time)
        );
        let case = CorpusCase { file: PathBuf::from("flood.case"), name: "flood".to_owned(), script };
        let scratch = tempfile::tempdir().unwrap();
        let (capture, verdicts) = (scratch.path().join("flood.pcapng"), scratch.path().join("verdicts.jsonl"));
        fs::write(&capture, case.capture()).unwrap();
        let mut options = case.options(&capture, scratch.path());
        options.connections = connections;
        options.outputs.verdicts = Some(verdicts.clone());
        penstock_replay::run(&options).unwrap();
        let verdicts = fs::read_to_string(verdicts).unwrap();
        verdicts.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn small() -> Config {
    Config { entries: ENTRIES, ..Config::default() }
}

fn passed(verdict: &Value) -> bool {
    verdict["verdict"] == "allow"
}

/// Whether it passed as part of an existing connection.
fn belonged(verdict: &Value) -> bool {
    passed(verdict) && verdict["conn"] == "established"
}

/// A kind of flood: packets of a source, which is written `FROM`.
struct Flood {
    name: &'static str,
    packets: &'static [&'static str],
}

const FLOODS: [Flood; 5] = [
    Flood { name: "ACK", packets: &["FROM > open:80 tcp A seq=1000 ack=7"] },
    Flood { name: "SYN", packets: &["FROM > open:80 tcp S seq=1000"] },
    Flood { name: "UDP", packets: &["FROM > open:53 udp len=20"] },
    Flood {
        name: "ACK, each answered by a RST",
        packets: &["FROM > open:80 tcp A seq=1000 ack=7", "open:80 > FROM tcp R seq=7"],
    },
    Flood {
        name: "SYN, each answered",
        packets: &["FROM > open:80 tcp S seq=1000", "open:80 > FROM tcp S A seq=5000 ack=1001"],
    },
];

/// From a different address each, or from one.
fn source(spoofed: bool, number: u32) -> String {
    match spoofed {
        true => format!("203.0.113.{}:{}", 10 + number % 50, 1024 + number / 50),
        false => format!("203.0.113.9:{}", 1024 + number),
    }
}

#[test]
fn an_outside_flood_evicts_no_established_connection() {
    let mut failures = Vec::new();
    for Flood { name, packets } in FLOODS {
        for spoofed in [true, false] {
            let mut capture = CaptureBuilder::new();
            capture.open("203.0.113.200:4000", "open:80");
            capture.open("open:4001", "198.51.100.1:443");
            capture.open("web:4002", "api:8080");
            // Streams: their openers send again two seconds after the first packet.
            for seconds in [0.0, 3.0, 3.0] {
                capture.wait(seconds);
                for (from, to) in [("203.0.113.200:4000", "open:53"), ("web:4002", "db:53")] {
                    capture.add(&format!("{from} > {to} udp len=20"));
                    capture.add(&format!("{to} > {from} udp len=90"));
                }
            }
            let (mut opened, mut next) = (Vec::new(), 5000);
            for number in 0..FLOOD {
                let from = source(spoofed, number);
                packets.iter().for_each(|packet| _ = capture.add(&packet.replace("FROM", &from)));
                if number % 16 == 0 {
                    opened.push(capture.open(&format!("203.0.113.201:{next}"), "open:80"));
                    next += 1;
                }
            }
            let of_the_pod = [
                capture.add("203.0.113.200:4000 > open:80 tcp A P seq=1011 ack=5001 len=10"),
                capture.add("open:80 > 203.0.113.200:4000 tcp A P seq=5001 ack=1021 len=10"),
                capture.add("198.51.100.1:443 > open:4001 tcp A P seq=5001 ack=1011 len=10"),
                capture.add("open:53 > 203.0.113.200:4000 udp len=90"),
            ];
            let of_others = [
                capture.add("api:8080 > web:4002 tcp A P seq=5001 ack=1011 len=10"),
                capture.add("db:53 > web:4002 udp len=90"),
            ];
            let itself = capture.open("open:4010", "198.51.100.1:443");
            let verdicts = capture.replay(small());
            let good = opened.iter().filter(|packets| packets[1..].iter().all(|packet| belonged(&verdicts[*packet])));
            let (good, all) = (good.count(), opened.len());
            let lost = of_the_pod.into_iter().chain(of_others).filter(|packet| !belonged(&verdicts[*packet]));
            let lost = lost.chain(itself.into_iter().filter(|packet| !passed(&verdicts[*packet])));
            let lost: Vec<_> = lost.map(|packet| verdicts[packet].to_string()).collect();
            assert!(all >= 190, "{all}");
            if good * 100 < all * 99 || !lost.is_empty() {
                failures.push(format!("{name}, spoofed {spoofed}: {good} of {all} opened; {lost:#?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Pods that each have as many established connections as they can get.
const GREEDY: [&str; 4] = ["web", "open", "far", "guest"];

#[test]
fn pods_at_their_limit_leave_room_for_others() {
    let mut capture = CaptureBuilder::new();
    for number in 0..ENTRIES / 2 {
        for pod in GREEDY {
            capture.open(&format!("{pod}:{}", 10_000 + number), "198.51.100.1:443");
        }
    }
    let opened: Vec<_> = (0..100).map(|n| capture.open(&format!("203.0.113.201:{}", 5000 + n), "api:8000")).collect();
    // Four quotas are twice the table.
    let verdicts = capture.replay(Config { quota: Some(ENTRIES as u32 / 2), ..small() });
    let refused = verdicts.iter().filter(|verdict| verdict["reason"] == "table_full").count();
    let good = opened.iter().filter(|packets| packets.iter().all(|packet| passed(&verdicts[*packet]))).count();
    assert_eq!(good, opened.len(), "opened for the pod that had nothing; {refused} times was the table full");
}

#[test]
fn a_pods_new_connections_do_not_evict_its_revoked_ones() {
    let mut capture = CaptureBuilder::new();
    capture.timeline = "[[step]]\nat = \"+5s\"\napply = [\"CLUSTERS/changes/open-closed.yaml\"]\n".to_owned();
    let ended = 4000..4032;
    for port in ended.clone() {
        capture.open(&format!("web:{port}"), "open:80");
    }
    // A segment that the server never gets, and a RST behind it, which it does not accept.
    for port in ended.clone() {
        capture.add(&format!("web:{port} > open:80 tcp A P seq=1011 ack=5001 len=1"));
        capture.add(&format!("web:{port} > open:80 tcp R seq=1012"));
    }
    capture.wait(8.0);
    for port in ended.clone() {
        capture.add(&format!("web:{port} > open:80 tcp A P seq=1011 ack=5001 len=10"));
    }
    for number in 0..FLOOD {
        capture.add(&format!("web:{} > 198.51.100.1:443 tcp S seq=1000", 10_000 + number));
    }
    let again: Vec<_> =
        ended.map(|port| capture.add(&format!("open:80 > web:{port} tcp A P seq=5001 ack=1011 len=10"))).collect();
    let verdicts = capture.replay(Config { quota: Some(256), ..small() });
    let still = again.iter().filter(|packet| verdicts[**packet]["reason"] == "connection_revoked").count();
    assert_eq!(still, again.len(), "of the connections that policy has revoked");
}

#[test]
fn a_stray_segment_does_not_block_a_connection_on_its_ports() {
    let mut capture = CaptureBuilder::new();
    let opened: Vec<_> = (0..200)
        .map(|number| {
            let from = format!("203.0.113.201:{}", 5000 + number);
            capture.add(&format!("{from} > open:80 tcp A seq=77000 ack=7"));
            capture.open(&from, "open:80")
        })
        .collect();
    let verdicts = capture.replay(small());
    let good = opened.iter().filter(|packets| packets.iter().all(|packet| passed(&verdicts[*packet]))).count();
    assert_eq!(good, opened.len());
}

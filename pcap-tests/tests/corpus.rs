//! Every case of the corpus: its capture matches its description, and its verdicts match the expected ones.
//!
//! `PENSTOCK_BLESS=1 cargo test -p penstock-pcap-tests` writes captures and expected verdicts again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use penstock_pcap_tests::capture::{EPOCH, pcapng};
use penstock_pcap_tests::script::LinkLayer;
use penstock_pcap_tests::{CorpusCase, cases, real};
use serde_json::Value;

fn is_blessing() -> bool {
    std::env::var_os("PENSTOCK_BLESS").is_some_and(|value| value == "1")
}

/// The verdicts in readable form: one line per packet, aligned for reviewing diffs.
fn readable(case: &CorpusCase, lines: &[String]) -> String {
    let mut text = format!("# {}\n", case.script.purpose);
    let rows: Vec<[String; 8]> = lines.iter().map(|line| row(line)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..8).map(width).collect();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            write!(line, "{cell:<width$}  ").expect("writing to a string does not fail");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn row(line: &str) -> [String; 8] {
    let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    let text = |field: &str| value[field].as_str().unwrap_or("-").to_owned();
    let end = |name: &str, port: &str| match value[port].as_u64() {
        Some(port) => format!("{}:{port}", text(name)),
        None => text(name),
    };
    let verdict = match value["reason"].as_str() {
        Some(reason) => format!("{} {reason}", text("verdict")),
        None => text("verdict"),
    };
    let time = text("time").replace("2026-01-01T00:00:", "").replace("000000Z", "").replace("000Z", "");
    let time = time.trim_start_matches("2026-").to_owned();
    let (src, dst) = (end("src", "sport"), format!("> {}", end("dst", "dport")));
    [value["n"].to_string(), time, src, dst, text("protocol"), verdict, text("conn"), text("rule")]
}

fn bless_or_compare(file: &Path, made: &[u8], what: &str, failures: &mut Vec<String>) {
    if is_blessing() {
        fs::write(file, made).expect("the corpus can be written");
        return;
    }
    let kept = fs::read(file).unwrap_or_default();
    if kept == made {
        return;
    }
    let mut failure = format!("{}: {what}", file.display());
    if let (Ok(kept), Ok(made)) = (std::str::from_utf8(&kept), std::str::from_utf8(made)) {
        for (kept, made) in kept.lines().zip(made.lines()).filter(|(kept, made)| kept != made) {
            write!(failure, "\n  - {kept}\n  + {made}").expect("writing to a string does not fail");
        }
    }
    failures.push(failure);
}

fn fail(failures: &[String]) {
    assert!(failures.is_empty(), "{}\nPENSTOCK_BLESS=1 writes them anew", failures.join("\n"));
}

#[test]
fn every_description_builds_its_capture() {
    let mut failures = Vec::new();
    for case in cases() {
        bless_or_compare(&case.capture_file(), &case.capture(), "is not what its description makes", &mut failures);
    }
    fail(&failures);
}

#[test]
fn every_packet_gets_its_expected_verdict() {
    let mut failures = Vec::new();
    for case in cases() {
        let scratch = tempfile::tempdir().unwrap();
        let capture = scratch.path().join("case.pcapng");
        fs::write(&capture, case.capture()).unwrap();
        let (lines, report) = case.replay(&capture, scratch.path());
        let verdicts = report.summary.verdicts;
        assert_eq!(verdicts.allow + verdicts.deny + verdicts.kernel, lines.len() as u64, "{}", case.name);
        assert_eq!(report.summary.packets, lines.len() as u64 + report.summary.duplicates, "{}", case.name);
        let text = readable(&case, &lines);
        bless_or_compare(&case.expected_file(), text.as_bytes(), "verdicts differ", &mut failures);
    }
    fail(&failures);
}

#[test]
fn captures_of_real_tools_get_their_expected_verdicts() {
    let mut failures = Vec::new();
    let cases = real();
    assert!(cases.len() >= 8, "{} captures", cases.len());
    for case in cases {
        let scratch = tempfile::tempdir().unwrap();
        let (lines, _) = case.replay(&case.file, scratch.path());
        let text = readable(&case, &lines);
        bless_or_compare(&case.expected_file(), text.as_bytes(), "verdicts differ", &mut failures);
    }
    fail(&failures);
}

#[test]
fn the_corpus_is_large_and_each_case_has_a_unique_purpose() {
    let cases = cases();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let purposes: BTreeSet<&str> = cases.iter().map(|case| case.script.purpose.as_str()).collect();
    assert_eq!(purposes.len(), cases.len());
    for case in &cases {
        assert!(case.script.purpose.ends_with('.') && !case.script.packets.is_empty(), "{}", case.name);
    }
}

#[test]
fn the_corpus_covers_every_verdict_reason_and_connection_state() {
    let mut met = BTreeSet::new();
    for case in cases() {
        let expected = fs::read_to_string(case.expected_file()).unwrap_or_default();
        met.extend(expected.split_whitespace().map(str::to_owned));
    }
    let causes = [
        "truncated",
        "malformed",
        "not_ip",
        "vlan_tag",
        "extension_headers",
        "source_route",
        "redirect",
        "neighbour_discovery",
        "invalid_discovery",
        "header_checksum",
        "spoofed_source",
        "encapsulation",
        "not_routable",
        "ttl_expired",
        "egress_denied",
        "ingress_denied",
        "connection_revoked",
        "no_connection",
        "invalid_state",
        "fragment",
        "service_denied",
        "arp",
        "not_local",
        "allow",
        "deny",
        "kernel",
        "new",
        "established",
        "related",
        "revoked",
    ];
    let missing: Vec<_> = causes.iter().filter(|name| !met.contains(**name)).collect();
    assert!(missing.is_empty(), "no case meets {missing:?}");
}

#[test]
fn replay_output_is_reproducible() {
    for case in cases().into_iter().step_by(7) {
        let scratch = tempfile::tempdir().unwrap();
        let first = case.replay(&case.capture_file(), scratch.path()).0;
        assert_eq!(first, case.replay(&case.capture_file(), scratch.path()).0, "{}", case.name);
        assert!(first.iter().all(|line| line.contains("\"time\":\"2026-01-0")), "{} {EPOCH}", case.name);
    }
}

#[test]
fn the_link_layer_makes_no_difference_to_ip_packets() {
    let scratch = tempfile::tempdir().unwrap();
    let is_ip = |frame: &[u8]| matches!(frame.get(12..14), Some([0x08, 0x00] | [0x86, 0xdd]));
    let mut compared = 0;
    for case in cases().into_iter().filter(|case| case.script.link == LinkLayer::Ethernet && !case.script.dedup) {
        let packets: Vec<_> = case.packets().into_iter().filter(|(_, packet)| is_ip(&packet.frame)).collect();
        // Raw IP captures derive the family from the packet's first byte, which is wrong in these cases.
        if packets.is_empty() || case.name == "ip/bad-lengths" || case.name == "ip/truncated" {
            continue;
        }
        let verdicts = |link| {
            let capture = scratch.path().join("case.pcapng");
            fs::write(&capture, pcapng(link, &packets)).unwrap();
            case.replay(&capture, scratch.path()).0
        };
        let ethernet = verdicts(LinkLayer::Ethernet);
        for link in [LinkLayer::Cooked, LinkLayer::Cooked2, LinkLayer::Raw] {
            assert_eq!(verdicts(link), ethernet, "{} as {link:?}", case.name);
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared} captures compared");
}

#[test]
fn the_pull_request_of_the_readme_changes_verdicts() {
    let clusters = penstock_pcap_tests::root().join("clusters");
    let captures = cases().into_iter().filter(|case| case.name.starts_with("udp/")).map(|case| case.capture_file());
    let options = penstock_replay::ReplayOptions {
        captures: captures.collect(),
        manifests: vec![clusters.join("shop")],
        compare: ["shop/cluster.yaml", "shop/pods.yaml", "pull-request"].map(|path| clusters.join(path)).to_vec(),
        ..Default::default()
    };
    let changes = penstock_replay::run(&options).unwrap().comparison.unwrap().changes();
    assert!(!changes.is_empty());
    for change in changes {
        let ends = (change.group.src.as_str(), change.group.dst.as_str(), change.group.dport);
        assert_eq!(ends, ("shop/web", "shop/db", Some(53)));
        assert_eq!((change.group.before.verdict, change.group.after.verdict), ("allow", "deny"));
    }
}

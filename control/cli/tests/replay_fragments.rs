//! Fragments that come before the first of their datagram: replay decides them as a daemon does, which holds them for a second.

use serde_json::Value;

use crate::replay_command::ReplayDirectory;

/// A part of a datagram from `web`, whose port tells its identification: milliseconds, destination port, bytes.
type Part = (u32, u16, (usize, usize));

const FIRST: (usize, usize) = (0, 512);
const SECOND: (usize, usize) = (512, 1024);
const LAST: (usize, usize) = (1024, 1508);

fn capture(parts: &[(u16, Part)]) -> Vec<u8> {
    let mut file =
        [&0xa1b2_c3d4u32.to_le_bytes()[..], &[2, 0, 4, 0], &[0; 8], &[0xff, 0xff, 0, 0, 1, 0, 0, 0]].concat();
    for &(id, (milliseconds, port, (from, to))) in parts {
        let mut whole = Vec::new();
        let ip = etherparse::PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        ip.udp(40_000 + id, port).write(&mut whole, &[7; 1500]).unwrap();
        let mut frame = [&whole[..34], &whole[34 + from..34 + to]].concat();
        frame[16..18].copy_from_slice(&(20 + (to - from) as u16).to_be_bytes());
        frame[18..20].copy_from_slice(&id.to_be_bytes());
        frame[20..22].copy_from_slice(&((from as u16 / 8) | (u16::from(to < 1508) << 13)).to_be_bytes());
        let header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
        let length = frame.len() as u32;
        for word in [1_700_000_000 + milliseconds / 1000, milliseconds % 1000 * 1000, length, length] {
            file.extend(word.to_le_bytes());
        }
        file.extend(frame);
    }
    file
}

/// Port 53 is allowed, 54 denied.
const PARTS: [(u16, Part); 13] = [
    (1, (0, 53, LAST)),
    (1, (1, 53, SECOND)),
    (2, (2, 54, LAST)),
    (3, (3, 53, (0, 1508))),
    (1, (4, 53, FIRST)),
    (2, (5, 54, FIRST)),
    // Longer than a second before its first.
    (4, (10, 53, LAST)),
    (5, (20, 53, SECOND)),
    (4, (1011, 53, FIRST)),
    (4, (1012, 53, SECOND)),
    // Over its first.
    (6, (1020, 53, (8, 1508))),
    (6, (1021, 53, FIRST)),
    // Held until the end.
    (7, (1030, 53, LAST)),
];

#[test]
fn early_fragments_are_decided_as_by_a_daemon_and_stay_in_order() {
    let directory = ReplayDirectory::new();
    directory.write("f.pcap", &capture(&PARTS));
    let output = directory.replay(&[
        "--manifests",
        "cluster",
        "--pcap",
        "f.pcap",
        "--verdicts",
        "v.jsonl",
        "--allowed",
        "a.pcapng",
        "--denied",
        "d.pcapng",
        "--summary",
        "json",
    ]);
    assert!(output.status.success(), "{output:?}");
    let lines = std::fs::read_to_string(directory.path("v.jsonl")).unwrap();
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<_> = rows.iter().map(|row| row["n"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=13).collect::<Vec<_>>(), "in the capture's order");
    let decided: Vec<_> = rows.iter().map(|row| row["reason"].as_str().unwrap_or("allow")).collect();
    let expected = [
        "allow",
        "allow",
        "fragment",
        "allow",
        "allow",
        "ingress_denied",
        "fragment",
        "fragment",
        "allow",
        "allow",
        "fragment",
        "allow",
        "fragment",
    ];
    assert_eq!(decided, expected);
    assert_eq!(rows[0]["time"], "2023-11-14T22:13:20.000000000Z", "its own time");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["verdicts"]["allow"], &summary["verdicts"]["deny"]), (&7.into(), &6.into()), "each once");
    for (file, verdict) in [("a.pcapng", "allow"), ("d.pcapng", "deny")] {
        let again = directory.replay(&["--manifests", "cluster", "--pcap", file, "--verdicts", "-"]);
        let times = |text: &str| -> Vec<String> {
            let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            rows.map(|row| row["time"].as_str().unwrap().to_owned()).collect()
        };
        let written: Vec<_> =
            rows.iter().filter(|row| row["verdict"] == verdict).map(|row| row["time"].clone()).collect();
        assert_eq!(times(&String::from_utf8(again.stdout).unwrap()), written, "{file}");
    }
}

#[test]
fn early_fragments_are_compared_once_both_sides_have_decided() {
    let directory = ReplayDirectory::new();
    directory.write("f.pcap", &capture(&PARTS[..6]));
    let same = directory.replay(&["--manifests", "cluster", "--compare", "cluster", "--pcap", "f.pcap"]);
    assert_eq!(same.status.code(), Some(0), "{same:?}");
    let output =
        directory.replay(&["--manifests", "cluster", "--compare", "other", "--pcap", "f.pcap", "--summary", "json"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let changes: Value = serde_json::from_slice(&output.stdout).unwrap();
    let changes = changes["changes"].as_array().unwrap();
    let packets = |before: &str, after: &str| -> u64 {
        let is_this = |change: &&Value| {
            let side = |side: &str| change[side]["reason"].as_str().unwrap_or("allow").to_owned();
            side("before") == before && side("after") == after
        };
        changes.iter().filter(is_this).map(|change| change["packets"].as_u64().unwrap()).sum()
    };
    let counts = [
        packets("allow", "fragment"),
        packets("allow", "ingress_denied"),
        packets("fragment", "allow"),
        packets("ingress_denied", "allow"),
    ];
    assert_eq!(counts, [2, 2, 1, 1], "{changes:#?}");
}

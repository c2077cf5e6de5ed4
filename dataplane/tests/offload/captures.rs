//! The frames of the captures in `pcap-tests`, with the addresses of this node's pods.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pcap_parser::{Block, PcapBlockOwned, PcapNGSlice};

use super::*;

fn captures(below: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            captures(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "pcapng") {
            found.push(path);
        }
    }
}

/// The packets of a pcapng file.
fn frames(file: &[u8]) -> Vec<Vec<u8>> {
    let capture = PcapNGSlice::from_slice(file).unwrap();
    let packet = |block: PcapBlockOwned| match block {
        PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => Some(packet.data[..packet.caplen as usize].to_vec()),
        _ => None,
    };
    capture.filter_map(|block| packet(block.unwrap())).collect()
}

/// The bytes of both addresses, if the frame has an IP header.
fn addresses(frame: &[u8]) -> Option<(&[u8], &[u8])> {
    match frame.get(12..14)? {
        [8, 0] if frame.len() >= 34 => Some((&frame[26..30], &frame[30..34])),
        [0x86, 0xdd] if frame.len() >= 54 => Some((&frame[22..38], &frame[38..54])),
        _ => None,
    }
}

/// Gives a frame the addresses of these ends, and their MACs.
fn between(frame: &[u8], from: End, to: End) -> Vec<u8> {
    let of = Sent { from, to, ..sent(from, to, false, 0) };
    let mut changed = frame.to_vec();
    changed[..12].copy_from_slice(&of.frame()[..12]);
    match (address(from, frame[12] == 8), address(to, frame[12] == 8)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let was_sound = headers::is_sound(frame);
            changed[26..30].copy_from_slice(&from.octets());
            changed[30..34].copy_from_slice(&to.octets());
            if was_sound {
                headers::seal(&mut changed);
            }
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            changed[22..38].copy_from_slice(&from.octets());
            changed[38..54].copy_from_slice(&to.octets());
        }
        _ => unreachable!("one family"),
    }
    changed
}

/// The ends whose connections a capture's pairs of addresses become, in turn.
const ENDS: [(End, End); 3] = [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)];

/// The frames of a capture, and between which ends each is. The first address that sends to another one is the first end.
fn mapped(file: &[u8]) -> Vec<(End, End, Vec<u8>)> {
    let mut known: BTreeMap<[Vec<u8>; 2], (End, End)> = BTreeMap::new();
    let mut found = Vec::new();
    for frame in frames(file) {
        let Some((from, to)) = addresses(&frame) else { continue };
        let (from, to) = (from.to_vec(), to.to_vec());
        let back = known.get(&[to.clone(), from.clone()]).map(|&(a, b)| (b, a));
        let next = ENDS[known.len() % ENDS.len()];
        let (from, to) = back.unwrap_or_else(|| *known.entry([from, to]).or_insert(next));
        found.push((from, to, between(&frame, from, to)));
    }
    found
}

#[test]
fn programs_forward_captured_frames_as_a_worker_would() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-tests/cases");
    let mut files = Vec::new();
    captures(&cases, &mut files);
    assert!(files.len() > 100, "{}: {} captures", cases.display(), files.len());
    in_namespace(|| {
        let mut node = Node::new();
        let (mut all, mut forwarded) = (0, 0);
        for file in &files {
            forget(&node);
            node.next_epoch(true);
            let frames = mapped(&std::fs::read(file).unwrap());
            // Once more: then the connections that it opens are there from its beginning.
            for (from, to, frame) in frames.iter().chain(&frames) {
                let now = Timestamp::now();
                // The kernel's function wants a whole Ethernet header, and no more than a page.
                if frame.len() > 3000 {
                    continue;
                }
                all += 1;
                let packet = sent(*from, *to, false, 0);
                match node.program(*from, *to, frame, 0) {
                    Some(done) => {
                        assert_alike(&mut node, packet, frame, &done, now);
                        forwarded += 1;
                    }
                    None => _ = node.worker(*from, frame, now),
                }
            }
        }
        println!("{forwarded} of {all} frames without a worker");
        assert!(all > 1000 && forwarded > 50, "{forwarded} of {all} frames without a worker");
    });
}

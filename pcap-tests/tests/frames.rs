//! Random and mutated frames, and mutated captures: nothing panics, and the invariants hold.

use std::fs;

use penstock_pcap_tests::cases;
use penstock_pcap_tests::fuzz::{FuzzNode, capture, frames, frames_input};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A mutated frame of the corpus, or random bytes.
fn mutated(corpus: &[Vec<u8>], random: &mut SmallRng) -> Vec<u8> {
    let mut frame = corpus[random.random_range(0..corpus.len())].clone();
    match random.random_range(0..12) {
        0 => frame = (0..random.random_range(0..200)).map(|_| random.random()).collect(),
        1 => frame.truncate(random.random_range(0..=frame.len())),
        2 => frame.extend((0..random.random_range(0..64)).map(|_| random.random::<u8>())),
        3 => {
            // The head of one and the tail of another.
            let other = &corpus[random.random_range(0..corpus.len())];
            let at = random.random_range(0..=frame.len().min(other.len()));
            frame.truncate(at);
            frame.extend(&other[at..]);
        }
        4..=6 => {
            for _ in 0..random.random_range(1..4) {
                if !frame.is_empty() {
                    let at = random.random_range(0..frame.len());
                    frame[at] = *[0, 1, 0x7f, 0x80, 0xff, random.random()].get(random.random_range(0..6)).unwrap();
                }
            }
        }
        7..=9 if frame.len() > 34 => {
            // A field behind the IPv4 header checksum, so that the packet gets further.
            let at = random.random_range(34..frame.len());
            frame[at] = random.random();
        }
        _ => {}
    }
    frame
}

const TWO_MILLION: usize = 2_000_000;

fn corpus() -> Vec<Vec<u8>> {
    cases().iter().flat_map(|case| case.packets()).map(|(_, packet)| packet.frame).collect()
}

#[test]
fn two_million_random_and_mutated_frames_get_one_verdict_each() {
    let corpus = corpus();
    let mut random = SmallRng::seed_from_u64(0x5eed);
    let mut node = FuzzNode::default();
    for number in 0..TWO_MILLION {
        node.push(&mutated(&corpus, &mut random));
        if random.random_ratio(1, 16) {
            node.evaluate(random.random());
        }
        if number % 50_000 == 0 {
            node.change();
        }
    }
    node.evaluate(1);
    let (passed, evaluated) = node.passed();
    assert_eq!(evaluated, TWO_MILLION as u64);
    assert!(
        passed > evaluated / 50 && passed < evaluated,
        "{passed} of {evaluated} passed: the frames are too good or too bad"
    );
}

#[test]
fn the_frames_target_accepts_any_bytes() {
    let mut random = SmallRng::seed_from_u64(0xf0);
    let mut node = FuzzNode::default();
    for _ in 0..40_000 {
        let bytes: Vec<u8> = (0..random.random_range(0..600)).map(|_| random.random()).collect();
        frames(&mut node, &bytes);
    }
    assert!(node.passed().1 > 100);
}

#[test]
fn the_corpus_seeds_the_frames_target() {
    let (mut node, corpus) = (FuzzNode::default(), corpus());
    frames(&mut node, &frames_input(&corpus));
    let (passed, evaluated) = node.passed();
    assert_eq!(evaluated, corpus.len() as u64);
    assert!(passed > 0, "no frame passed on the port that it was given to");
}

#[test]
fn damaged_captures_are_read_up_to_the_damage() {
    let captures: Vec<Vec<u8>> = cases().iter().map(|case| fs::read(case.capture_file()).unwrap()).collect();
    let mut random = SmallRng::seed_from_u64(0xcafe);
    let (mut whole, mut read) = (0, 0);
    for number in 0..40_000 {
        let mut bytes = captures[number % captures.len()].clone();
        whole += capture(&bytes);
        for _ in 0..random.random_range(1..6) {
            let at = random.random_range(0..bytes.len());
            bytes[at] = random.random();
        }
        if random.random_ratio(1, 3) {
            bytes.truncate(random.random_range(0..bytes.len()));
        }
        read += capture(&bytes);
    }
    assert!(read > whole / 10 && read < whole, "{read} of {whole} packets read");
}

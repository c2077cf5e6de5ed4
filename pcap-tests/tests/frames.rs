//! Random and mutated frames, and mutated captures: nothing panics, and the invariants hold.

use std::fs;

use penstock_pcap_tests::cases;
use penstock_pcap_tests::fuzz::{Subject, capture, frames, frames_input};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Fewer without optimisation, where each takes twenty times as long.
const fn scaled(count: usize) -> usize {
    if cfg!(debug_assertions) { count / 20 } else { count }
}

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

fn corpus() -> Vec<Vec<u8>> {
    cases().iter().flat_map(|case| case.packets()).map(|(_, packet)| packet.frame).collect()
}

#[test]
fn two_million_random_and_mutated_frames_each_get_one_verdict() {
    let corpus = corpus();
    let mut random = SmallRng::seed_from_u64(0x5eed);
    let mut subject = Subject::default();
    for number in 0..scaled(2_000_000) {
        subject.give(&mutated(&corpus, &mut random));
        if random.random_ratio(1, 16) {
            subject.judge(random.random());
        }
        if number % 50_000 == 0 {
            subject.change();
        }
    }
    subject.judge(1);
    let (passed, judged) = subject.passed();
    assert_eq!(judged, scaled(2_000_000) as u64);
    assert!(passed > judged / 50 && passed < judged, "{passed} of {judged} passed: the frames are too good or too bad");
}

#[test]
fn the_frames_target_takes_any_octets() {
    let mut random = SmallRng::seed_from_u64(0xf0);
    let mut subject = Subject::default();
    for _ in 0..scaled(40_000) {
        let octets: Vec<u8> = (0..random.random_range(0..600)).map(|_| random.random()).collect();
        frames(&mut subject, &octets);
    }
    assert!(subject.passed().1 > 100);
}

#[test]
fn the_corpus_seeds_the_frames_target() {
    let (mut subject, corpus) = (Subject::default(), corpus());
    frames(&mut subject, &frames_input(&corpus));
    let (passed, judged) = subject.passed();
    assert_eq!(judged, corpus.len() as u64);
    assert!(passed > 0, "no frame passed on the port that it was given to");
}

#[test]
fn damaged_captures_are_read_to_their_damage() {
    let captures: Vec<Vec<u8>> = cases().iter().map(|case| fs::read(case.capture_file()).unwrap()).collect();
    let mut random = SmallRng::seed_from_u64(0xcafe);
    let (mut whole, mut read) = (0, 0);
    for number in 0..scaled(40_000) {
        let mut octets = captures[number % captures.len()].clone();
        whole += capture(&octets);
        for _ in 0..random.random_range(1..6) {
            let at = random.random_range(0..octets.len());
            octets[at] = random.random();
        }
        if random.random_ratio(1, 3) {
            octets.truncate(random.random_range(0..octets.len()));
        }
        read += capture(&octets);
    }
    assert!(read > whole / 10 && read < whole, "{read} of {whole} packets read");
}

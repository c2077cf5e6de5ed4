//! Services, policies and histories made at random: packets get the verdicts of an evaluator that is written apart.
//!
//! A failure prints its seed and the parts of its case that are enough for it. `SERVICES_SEED` repeats a seed, `SERVICES_CASES` sets how
//! many there are.

mod captures;
mod made;
mod node;
mod shrink;
mod verdicts;

use std::ops::Range;

use made::Part;
use shrink::shrink;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn seeds(count: u64) -> Range<u64> {
    match variable("SERVICES_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SERVICES_CASES").unwrap_or(count),
    }
}

/// Fails with the parts of a case that are enough for its differences.
fn fail(seed: u64, differences: &[String], base: &str, parts: &[Part], fails: impl Fn(&[Part]) -> Vec<String>) -> ! {
    let shortest = shrink(parts, |parts| !fails(parts).is_empty());
    let left = fails(&shortest);
    let enough: Vec<String> = shortest.iter().map(Part::to_string).collect();
    panic!(
        "SERVICES_SEED={seed}:\n{}\n\nthese parts are enough for\n{}\n\n{base}{}",
        differences.join("\n"),
        left.join("\n"),
        enough.join("\n")
    );
}

/// As captures of the clients' interfaces.
#[test]
fn replay_agrees_with_the_oracle() {
    let (mut compared, mut silent) = (0, 0);
    for seed in seeds(12) {
        let (base, parts) = made::case(seed);
        let found = captures::differences(seed, &base, &parts);
        if !found.differences.is_empty() {
            let again = |parts: &[Part]| captures::differences(seed, &base, parts).differences;
            fail(seed, &found.differences, &base, &parts, again);
        }
        (compared, silent) = (compared + found.compared, silent + found.silent);
    }
    assert!(silent * 4 < compared, "{compared} compared, {silent} without an opinion");
}

/// Through the pipeline, with a model of the node's stack around it.
#[test]
fn policy_is_for_who_answers_behind_the_nodes_translation() {
    let mut found = verdicts::Found::default();
    for seed in seeds(40) {
        let (base, parts) = made::case(seed);
        let of_seed = verdicts::play(&base, &parts);
        if !of_seed.differences.is_empty() {
            let again = |parts: &[Part]| verdicts::play(&base, parts).differences;
            fail(seed, &of_seed.differences, &base, &parts, again);
        }
        found.add(&of_seed);
    }
    // With one seed there may be no such packets.
    if variable("SERVICES_SEED").is_none() {
        let is_enough = |count: u64| count > 200;
        assert!(is_enough(found.arrived) && is_enough(found.denied) && is_enough(found.answered), "{found:?}");
    }
}

//! Mutation test of what the programs ask before they forward a packet: breaks one condition at a time in a copy of their source; the
//! tests of this program must then fail.
//!
//! Run by `make test-long`, or by `cargo test -p penstock-dataplane --features replaceable-programs --test offload -- --ignored
//! --nocapture`; with `PENSTOCK_MUTATION=TEXT` only mutants with this in their name, or of this file. Each is compiled by clang alone, and tested by
//! this very program, which loads it instead of the one that is built in.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use self::mutants::{Source, occurs_once};

mod lookup;
mod opened;
mod packets;

#[path = "../../../../xdp-redirect/tests/mutants/mod.rs"]
mod mutants;

/// A mutation: a part of the source, which occurs once, and its replacement.
pub(crate) struct Mutation {
    /// The test to ask first whether it notices.
    noticed_by: &'static str,
    breaks: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// Why no test can notice it.
    equivalent: Option<&'static str>,
}

pub(crate) const fn mutation(
    noticed_by: &'static str,
    breaks: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutation {
    Mutation { noticed_by, breaks, file, from, to, equivalent: None }
}

const fn equivalent(because: &'static str, of: Mutation) -> Mutation {
    Mutation { equivalent: Some(because), ..of }
}

const TABLE: &str = "conntrack_maps.h";
const PACKET: &str = "packet.h";
pub(crate) const LOOKUP: &str = "established.h";
pub(crate) const FORWARD: &str = "forward.h";
pub(crate) const PODS: &str = "pods.h";
const REWRITE: &str = "rewrite.h";
pub(crate) const REPEAT: &str = "repeat.h";

// Tests that notice mutants, of which each is asked first: to load the programs takes longer than to test them.
const OF_ENTRY: &str = "entry::a_packet_passes_only_if_each_field_of_its_entry_allows";
const GROUPS: &str = "entry::a_connection_is_found_in_either_of_its_groups";
const REREAD: &str = "entry::races::a_packet_never_passes_by_the_entrys_last_verdict";
const CHANGED: &str = "entry::races::a_fin_never_brings_back_a_path_that_a_worker_changed";
const HEADERS: &str = "headers::a_packet_passes_only_if_each_field_of_its_headers_allows_it";
const LAST_HOP: &str = "headers::a_last_hop_or_a_wrong_checksum_meets_a_worker";
const MAPPED: &str = "headers::mapped_ipv6_addresses_are_not_of_the_ipv4_connection";
const LENGTH: &str = "headers::segments_too_long_for_a_pod_meet_a_worker";
const WRAP: &str = "epochs::a_stale_epoch_is_no_hit_across_the_wrap_of_its_numbers";
const HANDSHAKE: &str = "states::a_handshake_ends_without_a_worker_by_both_syns_numbers";
const ANSWER: &str = "states::of_a_handshake_only_the_syn_meets_a_worker";
const QUESTION: &str = "states::only_the_question_of_a_pair_meets_a_worker";
const OF_ANSWER: &str = "entry::an_answer_to_a_syn_passes_only_if_each_field_allows_it";
const LATE_ANSWER: &str = "entry::races::a_late_answer_leaves_the_entrys_next_window";
const CLOSED: &str = "states::a_close_without_a_worker_counts_for_workers";
const UNEXPIRED: &str = "states::a_connection_that_the_kernel_forwards_does_not_expire";
const COUNTS: &str = "states::a_connection_counts_traffic_of_workers_and_programs";
const CAPTURED: &str = "hits::only_a_captured_pods_packets_all_go_to_workers";
const NEIGHBOURS: &str = "hits::between_neighbours_on_a_bridge_no_hop_is_spent";
const LEFT: &str = "hits::what_needs_a_worker_is_left_to_it";
const BOTH_WAYS: &str = "hits::established_packets_pass_without_a_worker_both_ways";
const OF_REPEATED: &str = "repeat::a_connection_opens_only_if_each_field_of_an_answer_allows";
const OPENING: &str = "repeat::a_packet_opens_only_what_a_worker_has_opened_before";
const OPENED: &str = "repeat::a_connection_like_one_that_a_worker_opened_meets_no_worker";
const WRITTEN: &str = "repeat::what_a_program_opens_is_written_as_a_worker_writes_it";
const NO_ANSWER: &str = "repeat::what_a_program_does_not_repeat_has_no_answer_or_no_way";
const OF_STACK: &str = "repeat::of_the_nodes_stack_only_what_it_forwards_is_repeated";
const FLOOD: &str = "repeat::a_flood_ends_at_the_credit_of_its_pod_which_is_of_its_share";
const PAIR: &str = "repeat::an_answer_is_found_in_either_place_of_its_pair";
const FULL: &str = "repeat::a_connection_without_a_free_entry_in_its_group_is_a_workers";
const ALONE: &str = "repeat::answers_end_with_the_daemon_where_they_must_not_outlast_it";

/// Those of this file and of others, which have them beside their tests.
fn mutations() -> impl Iterator<Item = &'static Mutation> {
    MUTATIONS.into_iter().flatten()
}

const MUTATIONS: [&[Mutation]; 6] = [
    lookup::MUTATIONS,
    packets::MUTATIONS,
    opened::MUTATIONS,
    super::ended::MUTATIONS,
    super::translated::MUTATIONS,
    super::unserved::MUTATIONS,
];

/// The tests' answer about changed programs.
enum Outcome {
    Passed,
    /// This test fails.
    Failed(String),
    /// The kernel does not load them, so that every test fails.
    NotLoaded(Vec<String>),
}

/// Runs tests of this program with these programs, until one fails.
fn run(objects: &[(&str, PathBuf)], tests: &[&str]) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(tests).envs(objects.iter().map(|(variable, object)| (variable, object)));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("this program runs");
    let mut lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines().map_while(Result::ok);
    let failed = lines.find(|line| line.starts_with("test ") && line.ends_with("FAILED"));
    if failed.is_some() && tests.is_empty() {
        // It may have ended.
        let _ = child.kill();
    }
    // A failed test's output comes at the end.
    let printed: Vec<String> = lines.collect();
    let status = child.wait().expect("it was started");
    if printed.iter().any(|line| line.contains(NOT_LOADED)) {
        return Outcome::NotLoaded(printed);
    }
    match failed {
        Some(test) => Outcome::Failed(test.trim_start_matches("test ").trim_end_matches(" ... FAILED").to_owned()),
        None if status.success() => Outcome::Passed,
        None => Outcome::Failed(format!("the test program: {status}")),
    }
}

/// The error of programs that do not pass the verifier.
const NOT_LOADED: &str = "the tcx programs";

/// The test that notices a mutant.
fn noticed_by(objects: &[(&str, PathBuf)], mutation: &Mutation) -> Option<String> {
    for tests in [&["--exact", mutation.noticed_by][..], &[]] {
        match run(objects, tests) {
            Outcome::Failed(test) => return Some(test),
            Outcome::NotLoaded(printed) => panic!("{}: the kernel does not load it: {printed:#?}", mutation.breaks),
            Outcome::Passed => {}
        }
    }
    None
}

#[test]
fn every_mutated_part_of_the_programs_occurs_exactly_once() {
    let others = mutations().filter(|mutation| !occurs_once(mutation.file, mutation.from));
    let others: Vec<_> = others.map(|mutation| (mutation.breaks, mutation.from)).collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
#[ignore = "tests each broken version of the programs: some minutes"]
fn the_tests_fail_for_each_broken_condition_of_the_programs() {
    let source = Source::new("mutations");
    let nothing = run(&[("TCX_OBJECT", Path::new("/dev/null").to_owned())], &[MAPPED]);
    assert!(
        matches!(nothing, Outcome::NotLoaded(_)),
        "built without --features replaceable-programs: no mutant is loaded"
    );
    let unbroken = run(&source.compile(FORWARD, "the unbroken programs"), &[]);
    assert!(matches!(unbroken, Outcome::Passed), "the tests fail for the unbroken programs");
    let wanted = std::env::var("PENSTOCK_MUTATION").unwrap_or_default();
    let is_wanted = |of: &&Mutation| of.equivalent.is_none() && (of.breaks.contains(&wanted) || of.file == wanted);
    let mut missed = Vec::new();
    for mutation in mutations().filter(is_wanted) {
        source.restore();
        source.replace(mutation.file, mutation.from, mutation.to);
        let objects = source.compile(mutation.file, mutation.breaks);
        match noticed_by(&objects, mutation) {
            Some(test) => println!("noticed {}: {test}", mutation.breaks),
            None => {
                println!("MISSED  {}", mutation.breaks);
                missed.push(mutation.breaks);
            }
        }
    }
    for mutation in mutations() {
        if let Some(reason) = mutation.equivalent {
            println!("not run {}: {reason}", mutation.breaks);
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}

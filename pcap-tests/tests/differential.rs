//! Every capture of the corpus against an independent oracle that shares only the objects with the pipeline: policy as
//! the API documents it, another parser, and a map of connections.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use crate::oracle::connections::{EntryPoint, Oracle};
use crate::oracle::policy::ClusterObjects;
use penstock_pcap_tests::{CorpusCase, cases, real, root};
use penstock_policy::model::{Object, ObjectChange, ObjectKey, ObjectRef};
use penstock_replay::capture::Captures;
use penstock_sources::convert::ConversionSettings;
use penstock_sources::manifest::{Options, read_manifests};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Timeline {
    step: Vec<TimelineStep>,
}

#[derive(Deserialize)]
struct TimelineStep {
    at: String,
    #[serde(default)]
    apply: Vec<String>,
    #[serde(default)]
    delete: Vec<String>,
    replace: Option<Vec<String>>,
}

fn objects(case: &CorpusCase, paths: &[PathBuf]) -> Vec<Object> {
    let options = Options {
        settings: ConversionSettings { v1beta1: case.script.v1beta1, ..ConversionSettings::default() },
        ..Options::default()
    };
    let manifests = read_manifests(paths, &options).unwrap_or_else(|errors| panic!("{}: {errors}", case.name));
    manifests.documents.into_iter().map(|document| document.object).collect()
}

/// The changes of a case's timeline, each with its time in nanoseconds.
fn steps(case: &CorpusCase) -> Vec<(u64, TimelineStep)> {
    if case.script.timeline.is_empty() {
        return Vec::new();
    }
    let timeline: Timeline = toml::from_str(&case.script.timeline).unwrap();
    let after = |step: &TimelineStep| step.at.trim_matches(['+', 's']).parse::<u64>().unwrap() * 1_000_000_000;
    timeline.step.into_iter().map(|step| (case.script.packets[0].time + after(&step), step)).collect()
}

fn changes(case: &CorpusCase, step: &TimelineStep, cluster: &ClusterObjects) -> Vec<ObjectChange> {
    let path = |text: &String| PathBuf::from(text.replace("CLUSTERS", &root().join("clusters").display().to_string()));
    if let Some(paths) = &step.replace {
        let gone = cluster.references().into_iter().map(ObjectChange::Delete);
        let there = objects(case, &paths.iter().map(path).collect::<Vec<_>>()).into_iter().map(ObjectChange::Set);
        return gone.chain(there).collect();
    }
    let deleted = step.delete.iter().map(|text| {
        let (kind, name) = text.split_once(' ').unwrap();
        let (namespace, name) = name.split_once('/').unwrap();
        let key = ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() };
        ObjectChange::Delete(match kind {
            "Pod" => ObjectRef::Pod(key),
            "Service" => ObjectRef::Service(key),
            _ => ObjectRef::NetworkPolicy(key),
        })
    });
    let paths: Vec<PathBuf> = step.apply.iter().map(path).collect();
    let applied = if paths.is_empty() { Vec::new() } else { objects(case, &paths) };
    deleted.chain(applied.into_iter().map(ObjectChange::Set)).collect()
}

/// Applies a step and forgets pods' addresses that have another owner afterwards.
fn take(case: &CorpusCase, step: &TimelineStep, oracle: &mut Oracle) {
    let holders = |cluster: &ClusterObjects| -> BTreeSet<_> {
        let pods = cluster.objects.iter().filter_map(|object| match object {
            Object::Pod(pod) => Some(pod),
            _ => None,
        });
        pods.flat_map(|pod| pod.addresses.iter().map(|address| (*address, pod.key.clone()))).collect()
    };
    let before = holders(&oracle.cluster);
    let changes = changes(case, step, &oracle.cluster);
    oracle.cluster.apply(changes);
    let after = holders(&oracle.cluster);
    let moved: Vec<_> = before.difference(&after).map(|(address, _)| *address).collect();
    oracle.forget(&moved);
    oracle.reevaluate();
}

fn entry(case: &CorpusCase, interface: Option<&str>) -> EntryPoint {
    let port = case.script.ports.iter().find_map(|mapping| {
        let (name, port) = mapping.split_once('=')?;
        (Some(name) == interface).then_some(port)
    });
    match port {
        None => EntryPoint::Unknown,
        Some("host") => EntryPoint::Host,
        Some("uplink") => EntryPoint::Uplink,
        Some(pod) => EntryPoint::Pod(pod.to_owned()),
    }
}

/// How long a fragment that comes before its first is held, in nanoseconds.
const LONGEST_HOLD: u64 = 1_000_000_000;

/// Where replay and the oracle agree on a case, and where not.
#[derive(Default)]
pub(crate) struct Comparison {
    /// Packets on which both have a verdict.
    pub(crate) compared: usize,
    /// Packets of which the oracle says nothing.
    pub(crate) silent: usize,
    /// Packets on which they differ.
    pub(crate) differences: Vec<String>,
}

/// Replays a case, whose capture is in its file, and asks the oracle about each packet.
pub(crate) fn compare(case: &CorpusCase) -> Comparison {
    let scratch = tempfile::tempdir().unwrap();
    let (lines, _) = case.replay(&case.capture_file(), scratch.path());
    let mut oracle = Oracle::default();
    oracle.cluster.node = case.script.node.clone();
    oracle.cluster.cluster_wide = case.script.cluster_wide;
    oracle.cluster.objects = objects(case, &[case.manifests()]);
    let mut steps = steps(case).into_iter().peekable();
    let (packets, mut now, mut found) = (case.packets(), 0, Comparison::default());
    // Later fragments without their first, by number: asked about again after each packet, as long as they may be held.
    let mut early: Vec<usize> = Vec::new();
    for (number, (time, _)) in packets.iter().enumerate() {
        while let Some((_, step)) = steps.next_if(|(at, _)| at <= time) {
            take(case, &step, &mut oracle);
        }
        now = now.max(*time);
        early.insert(0, number);
        early.retain(|&number| {
            let (since, packet) = &packets[number];
            let entry = entry(case, packet.interface.as_deref());
            let verdict = oracle.evaluate(now / 1_000_000_000, &entry, &packet.frame);
            let is_early = oracle.is_early(now / 1_000_000_000, &packet.frame);
            let is_held = is_early && verdict == Some("deny") && now - since <= LONGEST_HOLD;
            if !is_held {
                found.add(case, verdict, &lines[number]);
            }
            is_held
        });
    }
    early.into_iter().for_each(|number| found.add(case, Some("deny"), &lines[number]));
    found
}

impl Comparison {
    /// Compares what the oracle says of a packet with its line of replay's output.
    fn add(&mut self, case: &CorpusCase, verdict: Option<&str>, line: &str) {
        let value: Value = serde_json::from_str(line).unwrap();
        match verdict {
            None => self.silent += 1,
            Some(verdict) if value["verdict"] == verdict => self.compared += 1,
            Some(verdict) => self.differences.push(format!("{}: the oracle says {verdict}: {line}", case.name)),
        }
    }
}

#[test]
fn the_pipeline_and_the_oracle_agree_on_every_capture() {
    let mut all = Comparison::default();
    // The oracle sees what was captured: it does not restore truncated packets or recognise duplicates.
    for case in cases().iter().filter(|case| !case.script.dedup && case.name != "ip/snap-length") {
        let Comparison { compared, silent, differences } = compare(case);
        (all.compared, all.silent) = (all.compared + compared, all.silent + silent);
        all.differences.extend(differences);
    }
    assert!(all.differences.is_empty(), "{}", all.differences.join("\n"));
    let Comparison { compared, silent, .. } = all;
    assert!(compared > 400 && silent * 20 < compared, "{compared} compared, {silent} without an opinion");
}

#[test]
fn the_pipeline_and_the_oracle_agree_on_captures_of_real_tools() {
    let (mut compared, mut differences) = (0, Vec::new());
    for case in real() {
        let scratch = tempfile::tempdir().unwrap();
        let (lines, _) = case.replay(&case.file, scratch.path());
        let mut oracle = Oracle::default();
        oracle.cluster.objects = objects(&case, &[case.manifests()]);
        let mut captures = Captures::open(&[&case.file]).unwrap();
        let mut frame = Vec::new();
        for line in &lines {
            frame.clear();
            let record = captures.next(&mut frame).unwrap().expect("a line a packet");
            let verdict = oracle.evaluate(record.time.0 / 1_000_000_000, &EntryPoint::Unknown, &frame);
            let value: Value = serde_json::from_str(line).unwrap();
            match verdict {
                Some(verdict) if value["verdict"] == verdict => compared += 1,
                verdict => differences.push(format!("{}: the oracle says {verdict:?}: {line}", case.name)),
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(compared > 150, "{compared} compared");
}

#[test]
fn every_expected_file_belongs_to_a_case() {
    let known: BTreeSet<PathBuf> =
        cases().iter().flat_map(|case| [case.file.clone(), case.capture_file(), case.expected_file()]).collect();
    for group in fs::read_dir(root().join("cases")).unwrap() {
        for file in fs::read_dir(group.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            assert!(known.contains(&path), "{} belongs to no case", path.display());
        }
    }
}

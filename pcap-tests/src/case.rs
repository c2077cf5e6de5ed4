//! The cases of the corpus, and how to replay one.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_dataplane::policy::RuleScope;
use penstock_replay::{OutputPaths, ReplayOptions, ReplayReport, run};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::manifest;

use crate::capture::pcapng;
use crate::packet::{BuiltPacket, build};
use crate::script::CaseScript;

/// A case of the corpus: `cases/<group>/<name>.case`, with the capture in `.pcapng` and the verdicts in `.expected`
/// beside it.
#[derive(Clone, Debug)]
pub struct CorpusCase {
    /// The `.case` file.
    pub file: PathBuf,
    /// `<group>/<name>`.
    pub name: String,
    pub script: CaseScript,
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All cases, by name.
///
/// # Panics
/// If a case cannot be read.
pub fn cases() -> Vec<CorpusCase> {
    let mut cases = Vec::new();
    for group in entries(&root().join("cases")) {
        for file in entries(&group).into_iter().filter(|file| file.extension().is_some_and(|end| end == "case")) {
            let name = file.strip_prefix(root().join("cases")).expect("it lies there").with_extension("");
            let name = name.display().to_string();
            let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
            let script = CaseScript::parse(&name, &text).unwrap_or_else(|problem| panic!("{problem}"));
            cases.push(CorpusCase { file, name, script });
        }
    }
    cases
}

/// The captures of real tools under `real/`, as cases without a description; `make.sh` beside them made them.
///
/// # Panics
/// If the directory cannot be read.
pub fn real() -> Vec<CorpusCase> {
    let files =
        entries(&root().join("real")).into_iter().filter(|file| file.extension().is_some_and(|end| end == "pcap"));
    files
        .map(|file| {
            let name = file.with_extension("").file_name().unwrap_or_default().display().to_string();
            let purpose = format!("{name}: a capture of real tools.");
            CorpusCase {
                file,
                name,
                script: CaseScript { purpose, cluster: "shop".to_owned(), ..CaseScript::default() },
            }
        })
        .collect()
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut entries: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    entries.sort();
    entries
}

impl CorpusCase {
    pub fn packets(&self) -> Vec<(u64, BuiltPacket)> {
        let mut built: Vec<BuiltPacket> = Vec::new();
        for line in &self.script.packets {
            let packet = build(line, &built);
            built.push(packet);
        }
        self.script.packets.iter().map(|line| line.time).zip(built).collect()
    }

    pub fn capture(&self) -> Vec<u8> {
        pcapng(self.script.link, &self.packets())
    }

    pub fn capture_file(&self) -> PathBuf {
        self.file.with_extension("pcapng")
    }

    pub fn expected_file(&self) -> PathBuf {
        self.file.with_extension("expected")
    }

    pub fn manifests(&self) -> PathBuf {
        root().join("clusters").join(&self.script.cluster)
    }

    /// The options that the replay command would be given.
    ///
    /// # Panics
    /// If the timeline cannot be written to `scratch`, or the case's ports are invalid.
    pub fn options(&self, capture: &Path, scratch: &Path) -> ReplayOptions {
        let timeline = (!self.script.timeline.is_empty()).then(|| {
            let file = scratch.join("timeline.toml");
            let clusters = root().join("clusters").display().to_string();
            fs::write(&file, self.script.timeline.replace("CLUSTERS", &clusters))
                .expect("a scratch file can be written");
            file
        });
        let ports = self.script.ports.iter().map(|text| text.parse().expect("a case's ports are right"));
        let blocks = self.script.service_cidrs.iter();
        let service_cidrs = blocks.map(|text| text.parse().expect("a case's blocks of addresses are right"));
        ReplayOptions {
            captures: vec![capture.to_owned()],
            manifests: vec![self.manifests()],
            node: self.script.node.clone(),
            ports: ports.collect(),
            dedup: self.script.dedup,
            reading: manifest::Options {
                settings: ConversionSettings { v1beta1: self.script.v1beta1, ..ConversionSettings::default() },
                ..manifest::Options::default()
            },
            reach: if self.script.cluster_wide { RuleScope::ClusterWide } else { RuleScope::BothSides },
            timeline,
            service_cidrs: service_cidrs.collect(),
            ..ReplayOptions::default()
        }
    }

    /// Replays its capture; returns the lines of verdicts and the report.
    ///
    /// # Panics
    /// If the replay is rejected.
    pub fn replay(&self, capture: &Path, scratch: &Path) -> (Vec<String>, ReplayReport) {
        let verdicts = scratch.join("verdicts.jsonl");
        let outputs = OutputPaths { verdicts: Some(verdicts.clone()), ..OutputPaths::default() };
        let options = ReplayOptions { outputs, ..self.options(capture, scratch) };
        let report = run(&options).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let text = fs::read_to_string(&verdicts).expect("the verdicts were written");
        (text.lines().map(str::to_owned).collect(), report)
    }
}

//! A replay from its options to its report.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use penstock_dataplane::conntrack;
use penstock_dataplane::packet::parse;
use penstock_dataplane::policy::RuleScope;

use crate::model::Object;
use crate::source::manifest::{self, ManifestErrors, read_manifests};

use super::batch::Batch;
use super::capture::{CaptureError, Captures, Record};
use super::cluster::{Cluster, ClusterError};
use super::compare::{Comparison, View};
use super::dedup::Deduplicator;
use super::output::OutputError;
use super::player::{Decision, Place, Player, fill_up};
use super::ports::{Mapping, PortError, PortMap};
use super::sinks::{Paths, Sinks};
use super::summary::{Input, Summary};
use super::timeline::{Timeline, TimelineError};

/// What to replay, under what, and what to write.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Captures, merged by time.
    pub captures: Vec<PathBuf>,
    /// Manifests of the cluster.
    pub manifests: Vec<PathBuf>,
    /// How manifests are read.
    pub reading: manifest::Options,
    /// Whether a rule's action is honoured cluster-wide.
    pub reach: RuleScope,
    /// Whose pods are local; all pods are, if not given.
    pub node: Option<String>,
    /// Which interfaces of the captures are known to be which ports.
    pub ports: Vec<Mapping>,
    /// Whether a packet that was captured at two places counts once.
    pub dedup: bool,
    /// Manifests that change on the way.
    pub timeline: Option<PathBuf>,
    /// A second set of manifests to compare with; none, if empty.
    pub compare: Vec<PathBuf>,
    /// Files to write.
    pub outputs: Paths,
    /// The connection table.
    pub connections: conntrack::Config,
}

/// What a replay came to.
#[derive(Debug)]
pub struct Report {
    /// Its counts.
    pub summary: Summary,
    /// What changes under the second set of manifests, if there was one.
    pub comparison: Option<Comparison>,
    /// What the user should know of the input, a line each.
    pub notes: Vec<String>,
}

/// Why a replay was not made.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A capture cannot be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// Manifests are bad.
    #[error(transparent)]
    Manifests(#[from] ManifestErrors),
    /// The cluster cannot be replayed on.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A port is not there.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The timeline is bad.
    #[error(transparent)]
    Timeline(#[from] TimelineError),
    /// A file cannot be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The connection table cannot be made.
    #[error(transparent)]
    Connections(#[from] conntrack::OpenError),
}

/// Replays.
///
/// # Errors
/// An input is bad or an output cannot be written. No output is left then.
pub fn run(options: &Options) -> Result<Report, ReplayError> {
    let objects = read_objects(&options.manifests, options)?;
    let timeline = options.timeline.as_deref().map(|file| Timeline::read(file, &objects, &options.reading));
    let timeline = timeline.transpose()?.unwrap_or_default();
    let before = Side::new(objects, options)?;
    let after = match options.compare.as_slice() {
        [] => None,
        paths => Some((Side::new(read_objects(paths, options)?, options)?, Comparison::default())),
    };
    let captures = Captures::open(&options.captures)?;
    let sinks = Sinks::create(&options.outputs)?;
    let run = Run {
        progress: Progress::new(options, &captures),
        captures,
        before,
        after,
        timeline,
        sinks,
        dedup: options.dedup.then(Deduplicator::default),
        input: Input::default(),
        batch: Batch::default(),
        originals: Batch::default(),
        key: None,
    };
    run.play_all(options)
}

fn read_objects(paths: &[PathBuf], options: &Options) -> Result<Vec<Object>, ManifestErrors> {
    let manifests = read_manifests(paths, &options.reading)?;
    Ok(manifests.documents.into_iter().map(|document| document.object).collect())
}

/// One set of objects and what plays under it.
struct Side {
    player: Player,
    ports: PortMap,
}

impl Side {
    fn new(objects: Vec<Object>, options: &Options) -> Result<Self, ReplayError> {
        let cluster = Cluster::new(objects, options.node.as_deref(), options.reach)?;
        let ports = PortMap::new(&options.ports, &cluster)?;
        Ok(Self { player: Player::new(cluster, &options.connections)?, ports })
    }

    #[inline]
    fn place(&mut self, record: &Record, frame: &[u8], captures: &Captures) -> Place {
        let port = self.ports.port(record.interface.index(), captures.interfaces());
        self.player.place(port, frame)
    }
}

/// What the packets of a batch have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key {
    before: Place,
    after: Option<Place>,
    /// The connection table's unit of time.
    millisecond: u64,
}

struct Run {
    captures: Captures,
    before: Side,
    after: Option<(Side, Comparison)>,
    timeline: Timeline,
    sinks: Sinks,
    dedup: Option<Deduplicator>,
    input: Input,
    batch: Batch,
    /// The batch before it was judged.
    originals: Batch,
    key: Option<Key>,
    progress: Progress,
}

impl Run {
    fn play_all(mut self, options: &Options) -> Result<Report, ReplayError> {
        let mut start = 0;
        while let Some(record) = self.captures.next(self.batch.space())? {
            self.input.packets += 1;
            if self.input.packets == 1 {
                self.timeline.begin(record.time)?;
            }
            if self.is_duplicate(&record, start) {
                self.batch.space().truncate(start);
                continue;
            }
            if record.captured < record.original && fill_up(start, record.captured, record.original, self.batch.space())
            {
                self.input.filled_up += 1;
            }
            while let Some(changes) = self.timeline.due(record.time) {
                start = self.flush(start)?;
                self.before.player.apply(changes)?;
                self.before.ports = PortMap::new(&options.ports, self.before.player.cluster())?;
                self.sinks.forget_names();
            }
            let key = self.key_of(&record, start);
            if self.batch.is_full() || self.key.is_some_and(|current| current != key) {
                start = self.flush(start)?;
            }
            self.key = Some(key);
            self.batch.push(self.input.packets, record, start);
            start = self.batch.octets().len();
            self.progress.tick(self.input.packets, &self.captures);
        }
        self.flush(start)?;
        self.progress.finish();
        self.sinks.complete()?;
        Ok(Report {
            summary: Summary::new(self.input, &self.before.player),
            comparison: self.after.map(|(_, comparison)| comparison),
            notes: notes(&self.captures, &self.timeline),
        })
    }

    #[inline]
    fn is_duplicate(&mut self, record: &Record, start: usize) -> bool {
        let Some(dedup) = &mut self.dedup else { return false };
        let duplicate = dedup.is_duplicate(record.time, record.interface, &self.batch.octets()[start..]);
        self.input.duplicates += u64::from(duplicate);
        duplicate
    }

    #[inline]
    fn key_of(&mut self, record: &Record, start: usize) -> Key {
        let frame = &self.batch.octets()[start..];
        Key {
            before: self.before.place(record, frame, &self.captures),
            after: self.after.as_mut().map(|(side, _)| side.place(record, frame, &self.captures)),
            millisecond: record.time.0 / 1_000_000,
        }
    }

    /// Plays the batch. What was read behind it stays; gives where that begins now, if it began at `start`.
    #[inline]
    fn flush(&mut self, start: usize) -> Result<usize, ReplayError> {
        let Some(key) = self.key.filter(|_| !self.batch.is_empty()) else { return Ok(start) };
        let time = self.batch.members()[0].record.time;
        if self.sinks.writes_captures() {
            self.originals.copy_from(&self.batch);
        }
        match &mut self.after {
            None => self.before.player.play(key.before, time, &mut self.batch),
            Some((after, comparison)) => {
                let place = key.after.unwrap_or(key.before);
                let mut copy = Batch::default();
                copy.copy_from(&self.batch);
                self.before.player.play(key.before, time, &mut self.batch);
                after.player.play(place, time, &mut copy);
                compare((&mut self.before.player, key.before), (&mut after.player, place), &self.batch, comparison);
            }
        }
        if !self.sinks.is_empty() {
            let (player, interfaces) = (&mut self.before.player, self.captures.interfaces());
            self.sinks.tell(key.before, &self.batch, &self.originals, player, interfaces)?;
        }
        self.batch.clear();
        self.key = None;
        Ok(0)
    }
}

/// Notes the packets of a batch whose verdict differs.
fn compare(before: (&mut Player, Place), after: (&mut Player, Place), batch: &Batch, comparison: &mut Comparison) {
    for (index, member) in batch.members().iter().enumerate() {
        let decisions = (before.0.decision(before.1, index), after.0.decision(after.1, index));
        if kind(decisions.0) == kind(decisions.1) {
            continue;
        }
        let frame = batch.frame(member);
        let packet = parse(frame).ok();
        let rules = |(player, place): (&mut Player, Place)| match &packet {
            Some(packet) => player.standing(place, index, packet, frame).1,
            None => Default::default(),
        };
        let rules = (rules((&mut *before.0, before.1)), rules((&mut *after.0, after.1)));
        let flow = packet
            .as_ref()
            .and_then(|packet| before.0.original_flow(packet, frame).or_else(|| after.0.original_flow(packet, frame)));
        let view = |player, decision, rules| View { cluster: Player::cluster(player), decision, rules };
        let views = (view(&*before.0, decisions.0, rules.0), view(&*after.0, decisions.1, rules.1));
        comparison.note(flow, packet.as_ref(), member.record.original, &views.0, &views.1);
    }
}

/// What counts as a change: another reason for the same verdict is none.
fn kind(decision: Decision) -> u8 {
    match decision {
        Decision::Allow => 0,
        Decision::Deny(_) => 1,
        Decision::Kernel(_) => 2,
    }
}

fn notes(captures: &Captures, timeline: &Timeline) -> Vec<String> {
    let mut notes = Vec::new();
    for file in captures.files() {
        if let Some(at) = file.cut_at() {
            notes.push(format!(
                "{}: ends in the middle of a packet, at octet {at}: read to there",
                file.path().display()
            ));
        }
    }
    match timeline.left() {
        0 => {}
        left => notes.push(format!("{left} steps of the timeline are after the last packet: not taken")),
    }
    notes
}

/// A progress bar, on a terminal, once it is worth it.
struct Progress {
    started: Instant,
    total: u64,
    is_terminal: bool,
    bar: Option<ProgressBar>,
}

/// Packets between two looks at the clock, less one.
const TICK: u64 = (1 << 16) - 1;

impl Progress {
    fn new(options: &Options, captures: &Captures) -> Self {
        let total = captures.files().iter().filter_map(|file| file.path().metadata().ok()).map(|file| file.len()).sum();
        let is_stdout = |path: &Option<PathBuf>| path.as_deref() == Some(std::path::Path::new("-"));
        let is_terminal = std::io::stderr().is_terminal() && !is_stdout(&options.outputs.verdicts);
        Self { started: Instant::now(), total, is_terminal, bar: None }
    }

    #[inline]
    fn tick(&mut self, packets: u64, captures: &Captures) {
        if packets & TICK == 0 && self.is_terminal {
            self.draw(packets, captures);
        }
    }

    #[cold]
    fn draw(&mut self, packets: u64, captures: &Captures) {
        if self.started.elapsed() < Duration::from_secs(1) {
            return;
        }
        let total = self.total;
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{bar:40} {percent}%  {msg}  {eta} left");
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let rate = packets as f64 / self.started.elapsed().as_secs_f64() / 1e6;
        bar.set_message(format!("{} packets, {rate:.1} M/s", super::summary::grouped(packets)));
        bar.set_position(captures.octets_read());
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

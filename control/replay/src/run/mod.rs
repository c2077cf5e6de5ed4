//! Runs a replay from its options to its report.

mod early;

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ipnet::IpNet;
use penstock_dataplane::ProgramOutcome;
use penstock_dataplane::conntrack;
use penstock_dataplane::packet::parse;
use penstock_dataplane::policy::RuleScope;
use penstock_policy::model::{ObjectChange, ObjectRef};
use penstock_sources::manifest::{self, ManifestErrors};
use rustc_hash::FxHashMap;

use super::batch::PacketBatch;
use super::bundle::{Bundle, BundleError};
use super::capture::{CaptureError, Captures, Record};
use super::cluster::{ClusterError, HOST, ReplayCluster};
use super::compare::{Comparison, PacketOutcome, compare};
use super::dedup::Deduplicator;
use super::kernel::is_encapsulated;
use super::objects::ReplayObjects;
use super::output::OutputError;
use super::player::{Decision, EntryPoint, Player};
use super::ports::{Mapping, PortMap, PortMappingError};
use super::recorded::{RecordedCounts, RecordedError, RecordedPacket, RecordedPackets};
use super::rules::Rules;
use super::sinks::{OutputPaths, Sinks};
use super::summary::{InputCounts, Summary};
use super::timeline::{Timeline, TimelineError};
use super::truncated::fill_up;
use early::EarlyPacket;

#[derive(Clone, Debug, Default)]
pub struct ReplayOptions {
    /// A bundle that `penstock capture --bundle` has written; instead of captures, manifests, node, ports and timeline.
    pub bundle: Option<PathBuf>,
    /// Captures, merged by time.
    pub captures: Vec<PathBuf>,
    pub manifests: Vec<PathBuf>,
    pub reading: manifest::Options,
    /// Whether one direction's allow applies cluster-wide.
    pub reach: RuleScope,
    /// The node whose pods are local; all pods are local without it.
    pub node: Option<String>,
    /// Ports of the captures' interfaces.
    pub ports: Vec<Mapping>,
    /// Whether a packet captured at two places counts once.
    pub dedup: bool,
    /// The blocks of cluster addresses, as the setting `service_cidrs`.
    pub service_cidrs: Vec<IpNet>,
    pub timeline: Option<PathBuf>,
    /// A second set of manifests to compare with; empty for none. With a bundle they are objects that replace those of the same name in it.
    pub compare: Vec<PathBuf>,
    pub outputs: OutputPaths,
    pub connections: conntrack::Config,
}

#[derive(Debug)]
pub struct ReplayReport {
    pub summary: Summary,
    /// The changes under the second set of manifests, if given.
    pub comparison: Option<Comparison>,
    /// For a bundle: whether replay decides as the daemon did.
    pub recorded: Option<RecordedCounts>,
    /// Notes about the input for the user, one per line.
    pub notes: Vec<String>,
    /// The packets that were not evaluated, and why, one reason a line.
    pub unread: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Manifests(#[from] ManifestErrors),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Port(#[from] PortMappingError),
    #[error(transparent)]
    Timeline(#[from] TimelineError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Connections(#[from] conntrack::OpenError),
}

impl From<RecordedError> for ReplayError {
    fn from(error: RecordedError) -> Self {
        match error {
            RecordedError::Capture(error) => Self::Capture(error),
            RecordedError::Bundle(error) => Self::Bundle(error),
        }
    }
}

/// Runs a replay.
///
/// # Errors
/// An input is invalid or an output cannot be written. Leaves no output then.
pub fn run(options: &ReplayOptions) -> Result<ReplayReport, ReplayError> {
    let (inputs, options) = ReplayInputs::read(options)?;
    let options = &options;
    let ReplayInputs { objects, timeline, other, recorded, fixed } = inputs;
    let before = ReplayRun::new(&objects, options)?;
    let after = match &other {
        Some(other) => Some((ReplayRun::new(other, options)?, Comparison::default())),
        None => None,
    };
    let captures = Captures::open(&options.captures)?;
    let captures = if recorded.is_some() { captures.with_comments() } else { captures };
    let sinks = Sinks::create(&options.outputs)?;
    let run = Replay {
        progress: ProgressDisplay::new(options, &captures),
        captures,
        before,
        after,
        timeline,
        recorded,
        fixed,
        sinks,
        dedup: options.dedup.then(Deduplicator::default),
        input: InputCounts::default(),
        encapsulated: 0,
        batch: PacketBatch::default(),
        originals: PacketBatch::default(),
        key: None,
        early: FxHashMap::default(),
    };
    run.play_all(options)
}

/// The input that a replay reads before the first packet.
struct ReplayInputs {
    objects: ReplayObjects,
    timeline: Timeline,
    /// The second set.
    other: Option<ReplayObjects>,
    /// The packets of a bundle.
    recorded: Option<RecordedPackets>,
    /// Objects that the timeline does not change in the second set.
    fixed: BTreeSet<ObjectRef>,
}

impl ReplayInputs {
    /// Reads them. Returns the options with what a bundle says of the daemon.
    fn read(options: &ReplayOptions) -> Result<(Self, ReplayOptions), ReplayError> {
        let compared = match options.compare.as_slice() {
            [] => None,
            paths => Some(ReplayObjects::read(paths, &options.reading)?),
        };
        let Some(directory) = &options.bundle else {
            let objects = ReplayObjects::read(&options.manifests, &options.reading)?;
            let timeline = options.timeline.as_deref().map(|file| Timeline::read(file, &objects, &options.reading));
            let timeline = timeline.transpose()?.unwrap_or_default();
            let inputs = Self { objects, timeline, other: compared, recorded: None, fixed: BTreeSet::new() };
            return Ok((inputs, options.clone()));
        };
        let mut bundle = Bundle::read(directory)?;
        let (objects, timeline) = (std::mem::take(&mut bundle.objects), std::mem::take(&mut bundle.timeline));
        let fixed = compared.iter().flat_map(ReplayObjects::references).cloned().collect();
        let other = compared.map(|compared| {
            let mut other = objects.clone();
            other.add(compared);
            other
        });
        let options = ReplayOptions {
            captures: vec![bundle.packets()],
            node: Some(bundle.node().to_owned()),
            service_cidrs: bundle.service_cidrs().to_vec(),
            connections: conntrack::Config {
                midstream_pickup: bundle.midstream_pickup(),
                ..options.connections.clone()
            },
            ..options.clone()
        };
        let recorded = Some(RecordedPackets::new(bundle));
        Ok((Self { objects, timeline, other, recorded, fixed }, options))
    }
}

struct ReplayRun {
    player: Player,
    ports: PortMap,
}

impl ReplayRun {
    fn new(objects: &ReplayObjects, options: &ReplayOptions) -> Result<Self, ReplayError> {
        let cluster = ReplayCluster::new(objects.all(), options.node.as_deref(), options.reach)?;
        let cluster = cluster.with_service_cidrs(&options.service_cidrs)?;
        let ports = port_map(options, &cluster)?;
        let player = Player::new(cluster, &options.connections)?;
        // The daemon has held what is in a bundle.
        let player = if options.bundle.is_none() { player.holding() } else { player };
        Ok(Self { player, ports })
    }

    #[inline]
    fn entry_point(&mut self, record: &Record, frame: &[u8], captures: &Captures) -> EntryPoint {
        let port = self.ports.port(record.interface.index(), captures.interfaces());
        self.player.entry_point(port, frame)
    }

    /// Where a packet entered that a worker has received.
    fn entry_of_worker(&mut self, record: &Record, captures: &Captures) -> EntryPoint {
        let port = self.ports.port(record.interface.index(), captures.interfaces());
        self.player.entry_of_worker(port)
    }

    fn apply(&mut self, changes: Vec<ObjectChange>, options: &ReplayOptions) -> Result<(), ReplayError> {
        // Ports alone have changed, and packets say by which they came in.
        if changes.is_empty() {
            return Ok(());
        }
        self.player.apply(changes)?;
        self.ports = port_map(options, self.player.cluster())?;
        Ok(())
    }
}

fn port_map(options: &ReplayOptions, cluster: &ReplayCluster) -> Result<PortMap, PortMappingError> {
    match options.bundle {
        Some(_) => Ok(PortMap::of_daemon(cluster)),
        None => PortMap::new(&options.ports, cluster),
    }
}

/// The facts that the packets of a batch share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PacketKey {
    before: EntryPoint,
    after: Option<EntryPoint>,
    /// Time in the connection table's unit.
    millisecond: u64,
}

struct Replay {
    captures: Captures,
    before: ReplayRun,
    after: Option<(ReplayRun, Comparison)>,
    timeline: Timeline,
    recorded: Option<RecordedPackets>,
    fixed: BTreeSet<ObjectRef>,
    sinks: Sinks,
    dedup: Option<Deduplicator>,
    input: InputCounts,
    /// Packets behind a header that is not evaluated.
    encapsulated: u64,
    batch: PacketBatch,
    /// The batch before processing.
    originals: PacketBatch,
    key: Option<PacketKey>,
    /// Packets that are held, by number.
    early: FxHashMap<u64, EarlyPacket>,
    progress: ProgressDisplay,
}

impl Replay {
    fn play_all(mut self, options: &ReplayOptions) -> Result<ReplayReport, ReplayError> {
        let mut start = 0;
        while let Some((record, recorded)) = self.next_packet()? {
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
            while let Some(changes) = self.timeline.due(record.time, recorded.map(|packet| packet.verdict.epoch)) {
                start = self.flush(start)?;
                self.apply(changes, options)?;
            }
            let key = self.key_of(&record, start);
            if key.before == EntryPoint::Kernel(ProgramOutcome::NotIp) {
                self.encapsulated += u64::from(is_encapsulated(&self.batch.bytes()[start..]));
            }
            if self.batch.is_full() || self.key.is_some_and(|current| current != key) {
                start = self.flush(start)?;
            }
            self.key = Some(key);
            self.batch.push(self.input.packets, record, start);
            if let (Some(packets), Some(packet)) = (&mut self.recorded, recorded) {
                packets.push(packet);
            }
            start = self.batch.bytes().len();
            self.progress.tick(self.input.packets, &self.captures);
        }
        self.flush(start)?;
        self.end_early()?;
        self.progress.finish();
        self.sinks.complete()?;
        let lost = self.recorded.as_ref().and_then(|packets| note_lost(packets.lost()));
        let remaining = note_remaining(&self.timeline).filter(|_| self.recorded.is_none());
        Ok(ReplayReport {
            summary: Summary::new(self.input, &self.before.player),
            comparison: self.after.map(|(_, comparison)| comparison),
            recorded: self.recorded.map(RecordedPackets::into_counts),
            notes: remaining.into_iter().chain(lost).collect(),
            unread: unread_parts(&self.captures).into_iter().chain(note_encapsulated(self.encapsulated)).collect(),
        })
    }

    /// Appends the next packet's frame to the batch's space.
    #[inline]
    fn next_packet(&mut self) -> Result<Option<(Record, Option<RecordedPacket>)>, ReplayError> {
        let space = self.batch.space();
        Ok(match &mut self.recorded {
            None => self.captures.next(space)?.map(|record| (record, None)),
            Some(packets) => packets.next(&mut self.captures, space)?.map(|(record, packet)| (record, Some(packet))),
        })
    }

    /// Changes the objects, in the second set those that are not fixed there.
    fn apply(&mut self, changes: Vec<ObjectChange>, options: &ReplayOptions) -> Result<(), ReplayError> {
        if let Some((after, _)) = &mut self.after {
            let is_free = |change: &&ObjectChange| match change {
                ObjectChange::Set(object) => !self.fixed.contains(&object.reference()),
                ObjectChange::Delete(reference) => !self.fixed.contains(reference),
            };
            after.apply(changes.iter().filter(is_free).cloned().collect(), options)?;
        }
        self.before.apply(changes, options)?;
        self.sinks.forget_names();
        Ok(())
    }

    #[inline]
    fn is_duplicate(&mut self, record: &Record, start: usize) -> bool {
        let Some(dedup) = &mut self.dedup else { return false };
        let duplicate = dedup.is_duplicate(record.time, record.interface, &self.batch.bytes()[start..]);
        self.input.duplicates += u64::from(duplicate);
        duplicate
    }

    #[inline]
    fn key_of(&mut self, record: &Record, start: usize) -> PacketKey {
        let frame = &self.batch.bytes()[start..];
        let is_recorded = self.recorded.is_some();
        let captures = &self.captures;
        let entry_point = |side: &mut ReplayRun| match is_recorded {
            true => side.entry_of_worker(record, captures),
            false => side.entry_point(record, frame, captures),
        };
        PacketKey {
            before: entry_point(&mut self.before),
            after: self.after.as_mut().map(|(side, _)| entry_point(side)),
            millisecond: record.time.0 / 1_000_000,
        }
    }

    /// Plays the batch. Keeps what was appended behind it, from `start`; returns where that starts now.
    #[inline]
    fn flush(&mut self, start: usize) -> Result<usize, ReplayError> {
        let Some(key) = self.key.filter(|_| !self.batch.is_empty()) else { return Ok(start) };
        let time = self.batch.packets()[0].record.time;
        self.try_early(time)?;
        if self.sinks.writes_captures() {
            self.originals.copy_from(&self.batch);
        }
        match &mut self.after {
            None => self.before.player.play(key.before, time, &mut self.batch),
            Some((after, comparison)) => {
                let entry = key.after.unwrap_or(key.before);
                let mut copy = PacketBatch::default();
                copy.copy_from(&self.batch);
                self.before.player.play(key.before, time, &mut self.batch);
                after.player.play(entry, time, &mut copy);
                compare((&mut self.before.player, key.before), (&mut after.player, entry), &self.batch, comparison);
            }
        }
        if let Some(recorded) = &mut self.recorded {
            compare_recorded(recorded, (&mut self.before.player, key.before), &self.batch);
        }
        let evicted = if self.has_early() { self.hold_early(key) } else { Vec::new() };
        if !self.sinks.is_empty() {
            let (player, interfaces) = (&mut self.before.player, self.captures.interfaces());
            self.sinks.write_verdict(key.before, &self.batch, &self.originals, player, interfaces)?;
        }
        for (side, number) in evicted {
            self.try_again(side, number, time)?;
        }
        self.try_early(time)?;
        self.batch.clear();
        self.key = None;
        Ok(0)
    }
}

/// Counts the packets of a batch by whether the daemon decided the same, and records those that it decided otherwise.
fn compare_recorded(recorded: &mut RecordedPackets, (player, entry): (&mut Player, EntryPoint), batch: &PacketBatch) {
    for (index, (member, packet)) in batch.packets().iter().zip(recorded.take_batch()).enumerate() {
        let decision = player.decision(entry, index);
        let frame = batch.frame(member);
        let is_by_kernel = || {
            let flow = parse(frame).ok().map(|packet| packet.flow);
            entry == EntryPoint::Port(HOST) && flow.is_some_and(|flow| player.cluster().may_be_translated(&flow))
        };
        if !recorded.count(&packet, decision, is_by_kernel) {
            continue;
        }
        let parsed = parse(frame).ok();
        let rules = parsed.as_ref().map(|packet| player.connection_state(entry, index, packet, frame).1);
        let flow = parsed.as_ref().and_then(|packet| player.original_flow(packet, frame));
        let before = packet.verdict.dropped.map_or(Decision::Allow, Decision::Deny);
        let outcome = |decision, rules| PacketOutcome { cluster: Player::cluster(player), decision, rules };
        let outcomes = (outcome(before, Rules::default()), outcome(decision, rules.unwrap_or_default()));
        recorded.differences().note(flow, parsed.as_ref(), member.record.original, &outcomes.0, &outcomes.1);
    }
}

/// Parts of the captures that could not be read.
pub(super) fn unread_parts(captures: &Captures) -> Vec<String> {
    let parts = captures.files().iter().flat_map(|file| {
        let path = file.path().display();
        let cut = file.truncated_at().map(|at| format!("{path}: is cut off at byte {at}: replayed up to there"));
        let unread = Some(file.unread_packets()).filter(|count| *count > 0).map(|count| {
            format!(
                "{path}: {count} packets are in obsolete packet blocks, which are not read: convert it with editcap"
            )
        });
        [cut, unread].into_iter().flatten()
    });
    parts.collect()
}

fn note_encapsulated(count: u64) -> Option<String> {
    (count > 0).then(|| {
        format!(
            "{count} packets from outside are behind a VLAN tag, MPLS or PPPoE, and were not evaluated: capture on the \
             interface that takes it off"
        )
    })
}

/// The part of the timeline that was not reached.
fn note_remaining(timeline: &Timeline) -> Option<String> {
    match timeline.remaining() {
        0 => None,
        count => Some(format!("{count} steps of the timeline are after the last packet and were not applied")),
    }
}

fn note_lost(lost: u64) -> Option<String> {
    (lost > 0)
        .then(|| format!("the capture has lost {lost} packets: verdicts on later ones of their connections may differ"))
}

/// A progress bar, shown on a terminal after a while.
struct ProgressDisplay {
    started: Instant,
    total: u64,
    is_terminal: bool,
    bar: Option<ProgressBar>,
}

/// Packets between two clock reads, minus one.
const TICK: u64 = (1 << 16) - 1;

impl ProgressDisplay {
    fn new(options: &ReplayOptions, captures: &Captures) -> Self {
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
        bar.set_position(captures.bytes_read());
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

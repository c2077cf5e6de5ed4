//! A bundle: a directory with the packets of a daemon's capture, the objects under which it processed them, and their changes.
//!
//! | file | contents |
//! |---|---|
//! | `bundle.json` | what it is, and of when (`Manifest`); written last, so that only a whole bundle has one |
//! | `packets.pcapng` | the packets, each with what the daemon decided on it as its comment |
//! | `objects.jsonl` | the objects in effect when the capture began, one a line |
//! | `timeline.jsonl` | their changes in order, each line with the epoch from which it was in effect |
//!
//! Objects are in the daemon's own form rather than that of manifests: it has also what a manifest cannot say, as a policy of
//! which a part was not understood.

mod write;

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use penstock_admin::capture::PickupInForce;
use penstock_dataplane::Epoch;
use penstock_dataplane::conntrack::MidStreamPickup;
use penstock_policy::model::{Object, ObjectChange};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::capture::{SECOND, Time};
use super::objects::ReplayObjects;
use super::timeline::Timeline;

pub use write::BundleWriter;

/// The version of the form of a bundle.
pub const VERSION: u32 = 3;

const MANIFEST: &str = "bundle.json";
const PACKETS: &str = "packets.pcapng";
const OBJECTS: &str = "objects.jsonl";
const TIMELINE: &str = "timeline.jsonl";

/// How far a packet's time may be outside of the capture's: clocks are set.
const SLACK: u64 = 60 * SECOND;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    /// [`VERSION`].
    version: u32,
    /// The daemon's version.
    penstock: String,
    node: String,
    /// When the capture began and ended, in nanoseconds since 1970.
    began: u64,
    ended: u64,
    /// The first epoch: that of `objects.jsonl`.
    epoch: u32,
    /// Lines of `objects.jsonl` and `timeline.jsonl`.
    objects: u64,
    changes: u64,
    /// Packets in `packets.pcapng`, and packets that fit the capture and are not in it.
    packets: u64,
    lost: u64,
    service_cidrs: Vec<IpNet>,
    /// When a segment from the middle of a connection opened one.
    midstream_pickup: PickupInForce,
}

/// The version alone: the rest of another version may be anything.
#[derive(Deserialize)]
struct ManifestVersion {
    version: u32,
}

/// A line of `timeline.jsonl`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TimelineLine {
    epoch: u32,
    /// When the epoch was published, in nanoseconds since 1970. Packets have their epoch, which decides.
    #[serde(rename = "time")]
    _time: u64,
    changes: Vec<ObjectChange>,
}

#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The directory is not there, or is no bundle.
    #[error("{}: is not a bundle: it has no {MANIFEST}; give a directory that penstock capture --bundle has written to its end", .0.display())]
    NoManifest(PathBuf),
    #[error("{}: cannot be read ({cause}); copy the whole directory of the capture again", file.display())]
    Unreadable { file: PathBuf, cause: io::Error },
    #[error("{}: version = {found}: this penstock reads version {VERSION}; replay it with the penstock that wrote it", file.display())]
    Version { file: PathBuf, found: u32 },
    #[error("{}: line {line}: {problem}; the file is damaged: copy the whole directory of the capture again", file.display())]
    Line {
        file: PathBuf,
        /// The line's number, from 1.
        line: usize,
        problem: String,
    },
    /// A file is shorter or longer than the manifest says.
    #[error("{}: has {found} {what}, and {MANIFEST} says {expected}; the file is cut or another's: copy the whole directory of the capture again", file.display())]
    Count { file: PathBuf, what: &'static str, found: u64, expected: u64 },
    /// A packet's comment is not one of a daemon's capture.
    #[error("{}: packet {packet}: comment {comment:?} is not what a capture writes; use the bundle's own packets, with their comments", file.display())]
    Comment {
        file: PathBuf,
        /// The packet's number, from 1.
        packet: u64,
        comment: String,
    },
    /// A packet is of another time than the objects.
    #[error("{}: packet {packet}: {what} is outside of the bundle's {range}; use packets and objects of one capture", file.display())]
    OtherTime {
        file: PathBuf,
        /// The packet's number, from 1.
        packet: u64,
        /// Its epoch or time.
        what: String,
        range: String,
    },
    #[error("{}: is not empty; give the name of a directory that does not exist, or of an empty one", .0.display())]
    NotEmpty(PathBuf),
    #[error("{}: cannot be created ({cause}); give a path that can be written", file.display())]
    Uncreated { file: PathBuf, cause: io::Error },
}

/// A bundle without its packets.
#[derive(Debug)]
pub(super) struct Bundle {
    directory: PathBuf,
    manifest: Manifest,
    pub(super) objects: ReplayObjects,
    pub(super) timeline: Timeline,
    /// The last epoch whose objects are known.
    last: Epoch,
}

impl Bundle {
    /// Reads a bundle's manifest and objects.
    ///
    /// # Errors
    /// A file is missing, damaged, cut, or of another version.
    pub(super) fn read(directory: &Path) -> Result<Self, BundleError> {
        let manifest = Manifest::read(directory)?;
        let objects: Vec<Object> = lines(&directory.join(OBJECTS), "objects", manifest.objects)?;
        let file = directory.join(TIMELINE);
        let steps: Vec<TimelineLine> = lines(&file, "changes", manifest.changes)?;
        let mut last = Epoch(manifest.epoch);
        for (place, step) in steps.iter().enumerate() {
            let epoch = Epoch(step.epoch);
            if epoch.is_before(last) {
                let problem = format!("epoch = {} is before the line before, {}", step.epoch, last.0);
                return Err(BundleError::Line { file, line: place + 1, problem });
            }
            last = epoch;
        }
        let steps = steps.into_iter().map(|step| (Epoch(step.epoch), step.changes));
        let timeline = Timeline::of_epochs(&file, steps);
        let directory = directory.to_owned();
        Ok(Self { directory, manifest, objects: objects.into_iter().collect(), timeline, last })
    }

    pub(super) fn packets(&self) -> PathBuf {
        self.directory.join(PACKETS)
    }

    /// The node whose pods are local.
    pub(super) fn node(&self) -> &str {
        &self.manifest.node
    }

    pub(super) fn service_cidrs(&self) -> &[IpNet] {
        &self.manifest.service_cidrs
    }

    /// When a segment from the middle of a connection opened one.
    pub(super) fn midstream_pickup(&self) -> MidStreamPickup {
        match self.manifest.midstream_pickup {
            PickupInForce::Always => MidStreamPickup::Always,
            PickupInForce::Never => MidStreamPickup::Never,
            PickupInForce::Until(end) => MidStreamPickup::Until(Time(end).on_table_clock()),
        }
    }

    pub(super) fn first_epoch(&self) -> Epoch {
        Epoch(self.manifest.epoch)
    }

    pub(super) fn lost(&self) -> u64 {
        self.manifest.lost
    }

    /// That a packet is of the time and the epochs of the objects.
    pub(super) fn check_packet(&self, packet: u64, time: Time, epoch: Epoch) -> Result<(), BundleError> {
        let Manifest { began, ended, epoch: first, .. } = self.manifest;
        let outside = |what, range| Err(BundleError::OtherTime { file: self.packets(), packet, what, range });
        if epoch.is_before(Epoch(first)) || self.last.is_before(epoch) {
            return outside(format!("epoch {}", epoch.0), format!("epochs {first} to {}", self.last.0));
        }
        if time.0 < began.saturating_sub(SLACK) || time.0 > ended.saturating_add(SLACK) {
            return outside(format!("time {}", text(time.0)), format!("time, {} to {}", text(began), text(ended)));
        }
        Ok(())
    }

    pub(super) fn check_count(&self, packets: u64) -> Result<(), BundleError> {
        count(&self.packets(), "packets", packets, self.manifest.packets)
    }

    /// That a packet's comment is none of a capture.
    pub(super) fn bad_comment(&self, packet: u64, comment: &str) -> BundleError {
        BundleError::Comment { file: self.packets(), packet, comment: comment.to_owned() }
    }
}

impl Manifest {
    fn read(directory: &Path) -> Result<Self, BundleError> {
        let file = directory.join(MANIFEST);
        let content = match std::fs::read(&file) {
            Ok(content) => content,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                return Err(BundleError::NoManifest(directory.to_owned()));
            }
            Err(cause) => return Err(BundleError::Unreadable { file, cause }),
        };
        let ManifestVersion { version } = value(&file, 1, &content)?;
        if version != VERSION {
            return Err(BundleError::Version { file, found: version });
        }
        value(&file, 1, &content)
    }
}

fn value<T: DeserializeOwned>(file: &Path, line: usize, content: &[u8]) -> Result<T, BundleError> {
    serde_json::from_slice(content).map_err(|error| {
        // A manifest has several lines, a line of another file one.
        let line = line + error.line().saturating_sub(1);
        BundleError::Line { file: file.to_owned(), line, problem: error.to_string() }
    })
}

/// The lines of a file, which must be so many.
fn lines<T: DeserializeOwned>(file: &Path, what: &'static str, expected: u64) -> Result<Vec<T>, BundleError> {
    let unreadable = |cause| BundleError::Unreadable { file: file.to_owned(), cause };
    let mut reader = BufReader::new(File::open(file).map_err(unreadable)?);
    let (mut values, mut line) = (Vec::new(), Vec::new());
    while reader.read_until(b'\n', &mut line).map_err(unreadable)? > 0 {
        values.push(value(file, values.len() + 1, &line)?);
        line.clear();
    }
    count(file, what, values.len() as u64, expected)?;
    Ok(values)
}

fn count(file: &Path, what: &'static str, found: u64, expected: u64) -> Result<(), BundleError> {
    match found == expected {
        true => Ok(()),
        false => Err(BundleError::Count { file: file.to_owned(), what, found, expected }),
    }
}

fn text(time: u64) -> String {
    jiff::Timestamp::from_nanosecond(time.into()).map_or_else(|_| time.to_string(), |time| time.to_string())
}

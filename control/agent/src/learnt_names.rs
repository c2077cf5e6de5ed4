//! Keeps on disk what pods have learnt from DNS answers, for the next start: pods go on to reach what they have resolved.
//!
//! Names that have expired are kept as such: they let no new connection pass, but those that they allowed are still
//! allowed when policy is evaluated again. Times count from boot, so the file is not used after one.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_dataplane::names::{DomainName, LearntName, Moment, NameLimits, NameTable, NamedPod, PodNames};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::state_file::{Identity, StateFile, StateFileError};

/// How often the file is written at most, if something has changed. It is also this multiple of the last write's duration.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL_FACTOR: u32 = 50;
/// How long names of the last run wait for their pods.
const PATIENCE: Duration = Duration::from_secs(600);
/// The version of the file's form.
const VERSION: u32 = 1;
/// Suffix of the file, after the name of the connection table's file.
pub(super) const SUFFIX: &str = ".names";
/// Changes with every boot of the machine.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// A pod in the file, with its names: when each expires, in milliseconds since boot, its address, and the name.
#[derive(Serialize, Deserialize)]
struct StoredPod {
    pod: String,
    created: Option<i64>,
    addresses: Vec<IpAddr>,
    names: Vec<(u64, IpAddr, String)>,
}

/// The table of names, and its file.
pub(super) struct LearntNamesFile {
    table: Arc<NameTable>,
    file: Option<(StateFile, Identity)>,
    started: Instant,
    written: Instant,
    /// The table's number of changes when it was written.
    changes: u64,
    is_writing: Arc<AtomicBool>,
    /// How long the last write took, in milliseconds.
    took: Arc<AtomicU64>,
}

impl LearntNamesFile {
    /// A table with what the last run has learnt, if there is a state directory. `None` if names are not followed.
    pub(super) fn open(config: &Config) -> Option<Self> {
        if !config.domain_names.enabled {
            return None;
        }
        let boot = fs::read_to_string(BOOT).ok();
        let file = boot.and_then(|boot| {
            let identity = Identity {
                kind: "learnt names".to_owned(),
                version: VERSION,
                node: config.node.to_string(),
                origin: format!("boot {}", boot.trim()),
            };
            Some((StateFile::beside(&config.conntrack.mapping, SUFFIX)?, identity))
        });
        Some(Self::of(file, config.domain_names.min_ttl.duration()))
    }

    fn of(file: Option<(StateFile, Identity)>, least: Duration) -> Self {
        let this = Self {
            table: Arc::new(NameTable::new(NameLimits { least, ..NameLimits::default() })),
            file,
            started: Instant::now(),
            written: Instant::now(),
            changes: 0,
            is_writing: Arc::default(),
            took: Arc::default(),
        };
        this.read();
        this
    }

    /// Reads what the last run has learnt: again, once one has ended that ran beside this one.
    pub(super) fn read(&self) {
        match self.file.as_ref().map_or(Ok(Vec::new()), |(file, identity)| read(file, identity)) {
            Ok(recorded) => self.table.restore(recorded),
            // A boot is no fault.
            Err(error @ StateFileError::Other { .. }) => tracing::info!("names of the last run: {error}"),
            Err(error) => tracing::warn!("names of the last run: {error}"),
        }
    }

    pub(super) fn table(&self) -> &Arc<NameTable> {
        &self.table
    }

    /// Writes the file, if it is time and something was learnt, on a thread of its own.
    pub(super) fn keep(&mut self) {
        if self.started.elapsed() > PATIENCE {
            self.table.forget_recorded();
        }
        let pause = INTERVAL.max(Duration::from_millis(self.took.load(Ordering::Relaxed)) * INTERVAL_FACTOR);
        let changes = self.table.changes();
        if changes == self.changes || self.written.elapsed() < pause || self.is_writing.load(Ordering::Acquire) {
            return;
        }
        (self.changes, self.written) = (changes, Instant::now());
        let Some((file, identity)) = self.file.clone() else { return };
        let (table, is_writing, took) = (Arc::clone(&self.table), Arc::clone(&self.is_writing), Arc::clone(&self.took));
        is_writing.store(true, Ordering::Release);
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            write(&file, &identity, &table);
            took.store(began.elapsed().as_millis() as u64, Ordering::Relaxed);
            is_writing.store(false, Ordering::Release);
        });
    }

    /// Writes the file, for the next run. Call it once no worker learns any more.
    pub(super) fn finish(&self) {
        // One that is being written has the same temporary file.
        let until = Instant::now() + Duration::from_secs(1);
        while self.is_writing.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some((file, identity)) = self.file.as_ref().filter(|_| !self.is_writing.load(Ordering::Acquire)) {
            write(file, identity, &self.table);
        }
    }
}

fn read(file: &StateFile, identity: &Identity) -> Result<Vec<PodNames>, StateFileError> {
    let Some(stored) = file.read(identity)? else { return Ok(Vec::new()) };
    let pods: Result<Vec<StoredPod>, _> = serde_json::from_slice(&stored.content);
    let damaged = |error| StateFileError::Damaged { path: file.path().to_owned(), error: io::Error::from(error) };
    let name = |(expires, address, name): (u64, IpAddr, String)| {
        Some(LearntName { expires: Moment(expires), address: address.into(), name: DomainName::new(&name)? })
    };
    let pod = |StoredPod { pod, created, addresses, names }| PodNames {
        pod: NamedPod { name: pod, created, addresses },
        names: names.into_iter().filter_map(name).collect(),
    };
    Ok(pods.map_err(damaged)?.into_iter().map(pod).collect())
}

fn write(file: &StateFile, identity: &Identity, table: &NameTable) {
    let stored = |PodNames { pod, names }: PodNames| StoredPod {
        pod: pod.name,
        created: pod.created,
        addresses: pod.addresses,
        names: names.iter().map(|it| (it.expires.0, it.address.into(), it.name.to_string())).collect(),
    };
    let pods: Vec<StoredPod> = table.all().into_iter().map(stored).collect();
    let lines = serde_json::to_vec(&pods).expect("text and numbers are JSON");
    if let Err(error) = file.write(identity, [lines.as_slice()]) {
        tracing::warn!("names that pods have learnt are not kept for the next run: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use penstock_dataplane::names::Answer;

    use super::*;
    use crate::config::TableMapping;

    const LEAST: Duration = Duration::from_secs(1);

    fn file(directory: &Path, boot: &str) -> Option<(StateFile, Identity)> {
        let identity =
            Identity { kind: "learnt names".into(), version: VERSION, node: "here".into(), origin: boot.into() };
        Some((StateFile::beside(&TableMapping::File(directory.join("conntrack")), SUFFIX).unwrap(), identity))
    }

    fn pod() -> NamedPod {
        NamedPod { name: "shop/web".into(), created: Some(7), addresses: vec![[10, 0, 0, 1].into()] }
    }

    fn learn(table: &NameTable, name: &str, seconds: u64) {
        let address: IpAddr = "2001:db8::7".parse().unwrap();
        let name = DomainName::new(name).unwrap();
        let lifetime = Duration::from_secs(seconds);
        let answer = Answer { names: vec![(name, lifetime)], addresses: vec![(address.into(), lifetime)] };
        table.of(pod()).learn(&answer, Moment(5_000));
    }

    #[tokio::test]
    async fn learnt_names_survive_a_restart_and_not_a_boot() {
        let directory = tempfile::tempdir().unwrap();
        let mut names = LearntNamesFile::of(file(directory.path(), "boot 1"), LEAST);
        let held = names.table().of(pod());
        learn(names.table(), "a.org", 60);
        names.keep();
        let path = directory.path().join(format!("conntrack{SUFFIX}"));
        assert!(!path.exists(), "not before a second has passed");
        names.written = Instant::now() - INTERVAL;
        names.keep();
        names.finish();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        learn(names.table(), "b.org", 0);
        names.finish();
        let next = LearntNamesFile::of(file(directory.path(), "boot 1"), LEAST);
        assert_eq!(next.table().all(), names.table().all());
        assert_eq!(next.table().of(pod()).all(), held.all());
        assert_eq!(held.all().iter().map(|it| it.expires).collect::<Vec<_>>(), [Moment(6_000), Moment(65_000)]);
        assert!(LearntNamesFile::of(file(directory.path(), "boot 2"), LEAST).table().all().is_empty());
        let wrong = [&b"junk"[..], b"", b"\x1f\x8b\x08"];
        for content in wrong {
            fs::write(&path, content).unwrap();
            assert!(LearntNamesFile::of(file(directory.path(), "boot 1"), LEAST).table().all().is_empty());
        }
        assert!(LearntNamesFile::of(None, LEAST).table().all().is_empty());
    }
}

//! Keeps on disk what pods have learnt from DNS answers, for the next start: pods go on to reach what they have resolved.
//!
//! Names that have expired are kept as such: they let no new connection pass, but those that they allowed are still
//! allowed when policy is evaluated again. Times count from boot, so the file is not used after one.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_dataplane::names::{DomainName, LearntName, Moment, NameLimits, NameTable, NamedPod, PodNames};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::state_file::{Identity, KeptFile, StateFile, StateFileError};
use crate::testing;

/// How often the file is written at most, if something has changed.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// How long names of the last run wait for their pods.
const PATIENCE: Duration = Duration::from_secs(600);
const VERSION: u32 = 1;
/// An answer counts for at least this long, also if its TTL is shorter: for clients that try one address after the other.
const MIN_TTL: Duration = Duration::from_secs(60);
/// Suffix of the file, after the name of the connection table's file.
pub(super) const SUFFIX: &str = ".names";

/// A pod in the file, with its names: when each expires, in milliseconds since boot, its address, and the name.
#[derive(Serialize, Deserialize)]
struct StoredPod {
    pod: String,
    created: Option<i64>,
    addresses: Vec<IpAddr>,
    names: Vec<(u64, IpAddr, String)>,
}

pub(super) struct LearntNamesFile {
    table: Arc<NameTable>,
    file: KeptFile,
    started: Instant,
    /// The table's number of changes when it was written.
    changes: u64,
}

impl LearntNamesFile {
    /// A table with what the last run has learnt, if there is a state directory. `None` if names are not followed.
    pub(super) fn open(config: &Config) -> Option<Self> {
        if !config.domain_names.enabled {
            return None;
        }
        let file = Identity::of_boot().and_then(|boot| {
            let identity = Identity::new("learnt names", VERSION, config.node.as_str(), boot);
            StateFile::beside(&config.conntrack.mapping, SUFFIX, identity)
        });
        Some(Self::of(file, testing::min_ttl().unwrap_or(MIN_TTL)))
    }

    fn of(file: Option<StateFile>, least: Duration) -> Self {
        let this = Self {
            table: Arc::new(NameTable::new(NameLimits { least, ..NameLimits::default() })),
            file: KeptFile::new(file, "names that pods have learnt"),
            started: Instant::now(),
            changes: 0,
        };
        this.read();
        this
    }

    /// Reads what the last run has learnt: again, once one has ended that ran beside this one.
    pub(super) fn read(&self) {
        match self.file.read_json::<Vec<StoredPod>>() {
            Ok(stored) => self.table.restore(stored.into_iter().flatten().map(PodNames::from).collect()),
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
        let changes = self.table.changes();
        if changes == self.changes || !self.file.is_due(INTERVAL) {
            return;
        }
        self.changes = changes;
        let table = Arc::clone(&self.table);
        self.file.write(move || content(&table));
    }

    /// Writes the file, for the next run. Call it once no worker learns any more.
    pub(super) fn finish(&self) {
        self.file.finish(|| content(&self.table));
    }
}

impl From<StoredPod> for PodNames {
    fn from(StoredPod { pod, created, addresses, names }: StoredPod) -> Self {
        let name = |(expires, address, name): (u64, IpAddr, String)| {
            Some(LearntName { expires: Moment(expires), address: address.into(), name: DomainName::new(&name)? })
        };
        Self { pod: NamedPod { name: pod, created, addresses }, names: names.into_iter().filter_map(name).collect() }
    }
}

fn content(table: &NameTable) -> Vec<u8> {
    let stored = |PodNames { pod, names }: PodNames| StoredPod {
        pod: pod.name,
        created: pod.created,
        addresses: pod.addresses,
        names: names.iter().map(|it| (it.expires.0, it.address.into(), it.name.to_string())).collect(),
    };
    let pods: Vec<StoredPod> = table.all().into_iter().map(stored).collect();
    serde_json::to_vec(&pods).expect("text and numbers are JSON")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use penstock_dataplane::names::Answer;

    use super::*;
    use crate::config::TableMapping;

    const LEAST: Duration = Duration::from_secs(1);

    fn file(directory: &Path, boot: &str) -> Option<StateFile> {
        let identity = Identity::new("learnt names", VERSION, "here", boot.into());
        StateFile::beside(&TableMapping::File(directory.join("conntrack")), SUFFIX, identity)
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
        names.file.written = Instant::now() - INTERVAL;
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

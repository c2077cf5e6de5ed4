//! Files of the state directory, beside the connection table's file: what the next start may need.
//!
//! A file is a gzip stream, whose checksum finds damage: a line with its [`Identity`], then its content. It is written to a
//! temporary file that takes the name at once, and only its owner can read or write it. A file that is damaged, of another
//! form, node or source, or that others can write is not used.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use nix::libc;
use nix::unistd::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::TableMapping;

const MAX_BYTES: u64 = 256 << 20;

/// The subject of a file. A file of another identity is not used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) kind: String,
    /// The version of the content's form.
    pub(crate) version: u32,
    pub(crate) node: String,
    pub(crate) origin: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    identity: Identity,
    /// Seconds since the epoch.
    written: i64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Stored {
    pub(crate) written: Timestamp,
    pub(crate) content: Vec<u8>,
}

/// Why a file is not used, or not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateFileError {
    #[error("{}: {error}; it must be readable and writable for this process", .path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{}: not used, because others than its owner could have written it; remove it", .0.display())]
    Untrusted(PathBuf),
    #[error("{}: not used, because it is damaged ({error}); the next run writes it again", .path.display())]
    Damaged { path: PathBuf, error: io::Error },
    #[error("{}: not used, because it is {found}, not {expected}; the next run writes it again", .path.display())]
    Other { path: PathBuf, found: String, expected: String },
    #[error("{}: not written, because more than {} MiB are too much to keep", .0.display(), MAX_BYTES >> 20)]
    TooLarge(PathBuf),
}

#[derive(Clone, Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    identity: Identity,
}

impl Identity {
    pub(crate) fn new(kind: &str, version: u32, node: &str, origin: String) -> Self {
        Self { kind: kind.to_owned(), version, node: node.to_owned(), origin }
    }

    /// The origin of what is of no use after another boot of the machine.
    pub(crate) fn of_boot() -> Option<String> {
        Some(format!("boot {}", fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim()))
    }
}

impl StateFile {
    /// The file with this suffix beside the connection table's file; `None` if the table is in private memory, so that there
    /// is no state directory.
    pub(crate) fn beside(mapping: &TableMapping, suffix: &str, identity: Identity) -> Option<Self> {
        let TableMapping::File(path) = mapping else { return None };
        Some(Self { path: with_suffix(path, suffix), identity })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn write<'a>(&self, content: impl IntoIterator<Item = &'a [u8]> + Clone) -> Result<(), StateFileError> {
        let bytes: u64 = content.clone().into_iter().map(|part| part.len() as u64).sum();
        if bytes > MAX_BYTES {
            return Err(StateFileError::TooLarge(self.path.clone()));
        }
        let temporary = with_suffix(&self.path, ".new");
        let written = self.write_to(&temporary, content);
        let renamed = written.and_then(|()| fs::rename(&temporary, &self.path));
        renamed.map_err(|error| {
            // There may be none.
            let _ = fs::remove_file(&temporary);
            self.unreadable(error)
        })
    }

    fn write_to<'a>(&self, temporary: &Path, content: impl IntoIterator<Item = &'a [u8]>) -> io::Result<()> {
        match fs::remove_file(temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // A new file: nobody else has it open.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
        let mut stream = GzEncoder::new(io::BufWriter::new(file), Compression::fast());
        let header = Header { identity: self.identity.clone(), written: Timestamp::now().as_second() };
        serde_json::to_writer(&mut stream, &header)?;
        stream.write_all(b"\n")?;
        for part in content {
            stream.write_all(part)?;
        }
        stream.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?.sync_data()
    }

    /// Reads the file if it has its identity; `None` if there is none.
    pub(crate) fn read(&self) -> Result<Option<Stored>, StateFileError> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&self.path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.unreadable(error)),
        };
        let metadata = file.metadata().map_err(|error| self.unreadable(error))?;
        if !metadata.is_file() || metadata.uid() != geteuid().as_raw() || metadata.mode() & 0o077 != 0 {
            return Err(StateFileError::Untrusted(self.path.clone()));
        }
        let (header, content) = decode(file).map_err(|error| self.damaged(error))?;
        if header.identity != self.identity {
            let (found, expected) = difference(&header.identity, &self.identity);
            return Err(StateFileError::Other { path: self.path.clone(), found, expected });
        }
        let written = Timestamp::from_second(header.written)
            .map_err(|error| self.damaged(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        Ok(Some(Stored { written, content }))
    }

    /// The same of a file whose content is one value in JSON.
    pub(crate) fn read_json<T: DeserializeOwned>(&self) -> Result<Option<T>, StateFileError> {
        let Some(stored) = self.read()? else { return Ok(None) };
        serde_json::from_slice(&stored.content).map(Some).map_err(|error| self.damaged(error.into()))
    }

    pub(crate) fn damaged(&self, error: io::Error) -> StateFileError {
        StateFileError::Damaged { path: self.path.clone(), error }
    }

    fn unreadable(&self, error: io::Error) -> StateFileError {
        StateFileError::Unreadable { path: self.path.clone(), error }
    }
}

/// A write may take a fiftieth of the time.
const PAUSE_FACTOR: u32 = 50;

/// A file that a loop keeps up to date: it is written on a thread of its own, one write at a time.
pub(crate) struct KeptFile {
    /// `None` without a state directory.
    file: Option<StateFile>,
    /// The content, for a warning.
    name: &'static str,
    pub(crate) written: Instant,
    is_writing: Arc<AtomicBool>,
    /// How long the last write took, in milliseconds.
    took: Arc<AtomicU64>,
}

impl KeptFile {
    pub(crate) fn new(file: Option<StateFile>, name: &'static str) -> Self {
        Self { file, name, written: Instant::now(), is_writing: Arc::default(), took: Arc::default() }
    }

    /// The value that the last run has kept.
    pub(crate) fn read_json<T: DeserializeOwned>(&self) -> Result<Option<T>, StateFileError> {
        self.file.as_ref().map_or(Ok(None), StateFile::read_json)
    }

    /// Whether so much time has passed since it was written last, and its writes have not taken long.
    pub(crate) fn is_due(&self, pause: Duration) -> bool {
        let took = Duration::from_millis(self.took.load(Ordering::Relaxed));
        self.written.elapsed() >= pause.max(took * PAUSE_FACTOR) && !self.is_writing.load(Ordering::Acquire)
    }

    pub(crate) fn write(&mut self, content: impl FnOnce() -> Vec<u8> + Send + 'static) {
        self.written = Instant::now();
        let (Some(file), name) = (self.file.clone(), self.name) else { return };
        let (is_writing, took) = (Arc::clone(&self.is_writing), Arc::clone(&self.took));
        is_writing.store(true, Ordering::Release);
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            write_or_warn(&file, name, &content());
            took.store(began.elapsed().as_millis() as u64, Ordering::Relaxed);
            is_writing.store(false, Ordering::Release);
        });
    }

    /// Writes it for the next run, on this thread.
    pub(crate) fn finish(&self, content: impl FnOnce() -> Vec<u8>) {
        // A write that has begun has the same temporary file.
        let until = Instant::now() + Duration::from_secs(1);
        while self.is_writing.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(file) = self.file.as_ref().filter(|_| !self.is_writing.load(Ordering::Acquire)) {
            write_or_warn(file, self.name, &content());
        }
    }
}

fn write_or_warn(file: &StateFile, name: &str, content: &[u8]) {
    if let Err(error) = file.write([content]) {
        tracing::warn!("{name} are not kept for the next run: {error}");
    }
}

fn decode(file: File) -> io::Result<(Header, Vec<u8>)> {
    let mut bytes = Vec::new();
    // The stream's checksum is compared at its end.
    let read = GzDecoder::new(io::BufReader::new(file)).take(2 * MAX_BYTES).read_to_end(&mut bytes)?;
    if read as u64 == 2 * MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let end = bytes.iter().position(|&byte| byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
    let header = serde_json::from_slice(&bytes[..end])?;
    bytes.drain(..=end);
    Ok((header, bytes))
}

/// The first part in which two identities differ.
fn difference(found: &Identity, expected: &Identity) -> (String, String) {
    let text = |one: &Identity| {
        [one.kind.clone(), format!("version {}", one.version), format!("of node {}", one.node), one.origin.clone()]
    };
    let mut pairs = text(found).into_iter().zip(text(expected));
    pairs.find(|(one, other)| one != other).unwrap_or_default()
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.into();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn identity() -> Identity {
        Identity::new("test", 1, "a", "here".into())
    }

    fn file() -> (tempfile::TempDir, StateFile) {
        let directory = tempfile::tempdir().unwrap();
        let file =
            StateFile::beside(&TableMapping::File(directory.path().join("conntrack")), ".test", identity()).unwrap();
        (directory, file)
    }

    #[test]
    fn a_file_is_read_as_written_and_only_its_owner_can_read_it() {
        let (directory, file) = file();
        assert_eq!(file.read().unwrap(), None);
        for content in ["first", "second, which takes its place"] {
            file.write([content.as_bytes(), b"\n"]).unwrap();
            assert_eq!(file.read().unwrap().unwrap().content, format!("{content}\n").as_bytes());
        }
        assert_eq!(fs::metadata(file.path()).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
        assert!(StateFile::beside(&TableMapping::Off, ".test", identity()).is_none());
    }

    #[test]
    fn a_file_that_is_damaged_in_any_byte_or_cut_is_not_used() {
        let (_directory, file) = file();
        file.write([&b"something to keep"[..]]).unwrap();
        let whole = fs::read(file.path()).unwrap();
        // The header of a gzip stream has a time and a system that no checksum covers.
        for at in (0..4).chain(10..whole.len()) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(file.path(), &damaged).unwrap();
            let read = file.read();
            let same = matches!(&read, Ok(Some(stored)) if stored.content == b"something to keep");
            assert!(same || read.is_err(), "byte {at}: {read:?}");
        }
        for length in 0..whole.len() {
            fs::write(file.path(), &whole[..length]).unwrap();
            assert!(matches!(file.read(), Err(StateFileError::Damaged { .. })), "{length} bytes");
        }
    }

    #[test]
    fn more_than_a_file_may_hold_is_not_written() {
        let (_directory, file) = file();
        let megabyte = vec![0; 1 << 20];
        let most = usize::try_from(MAX_BYTES >> 20).unwrap();
        let error = file.write(std::iter::repeat_n(&megabyte[..], most + 1)).unwrap_err();
        assert!(matches!(error, StateFileError::TooLarge(_)) && !file.path().exists(), "{error}");
    }

    #[test]
    fn a_file_of_another_identity_is_refused_by_name() {
        let (_directory, file) = file();
        file.write([&b"x"[..]]).unwrap();
        for (expected, said) in [
            (Identity { kind: "other".into(), ..identity() }, "it is test, not other"),
            (Identity { version: 2, ..identity() }, "it is version 1, not version 2"),
            (Identity { node: "b".into(), ..identity() }, "it is of node a, not of node b"),
            (Identity { origin: "there".into(), ..identity() }, "it is here, not there"),
        ] {
            let other = StateFile { identity: expected, ..file.clone() };
            let error = other.read().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_could_have_written_is_not_used() {
        let (directory, file) = file();
        file.write([&b"x"[..]]).unwrap();
        for mode in [0o620, 0o602, 0o644] {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(file.read(), Err(StateFileError::Untrusted(_))), "{mode:o}");
        }
        let elsewhere = directory.path().join("elsewhere");
        fs::rename(file.path(), &elsewhere).unwrap();
        symlink(&elsewhere, file.path()).unwrap();
        assert!(matches!(file.read(), Err(StateFileError::Unreadable { .. })), "a symbolic link");
        // A new file takes the link's place, and the link's target stays.
        file.write([&b"y"[..]]).unwrap();
        assert!(!fs::symlink_metadata(file.path()).unwrap().is_symlink() && elsewhere.exists());
    }
}

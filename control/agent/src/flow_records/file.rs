//! The file of records, renamed when it is long enough.
//!
//! `file-rotate` (0.8) does this too, but it cuts lines in two at the limit, panics where it cannot make its directory, and
//! counts lines as written while it has no file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::private_file;

#[derive(Debug, thiserror::Error)]
#[error("flow_records.file = {}: cannot open it ({source}); set a file in a directory that exists and is writable, or \"off\"", .path.display())]
pub(crate) struct RecordsFileError {
    path: PathBuf,
    source: io::Error,
}

/// Appends whole lines. Where it cannot, it counts them as lost, and tries again with the next ones.
pub(super) struct RotatingFile {
    path: PathBuf,
    /// The length at which the file is renamed, in bytes.
    limit: u64,
    kept: u16,
    /// `None` after an error.
    open: Option<OpenFile>,
    lost: Arc<AtomicU64>,
}

struct OpenFile {
    file: File,
    len: u64,
    /// Device and inode.
    id: (u64, u64),
}

impl RotatingFile {
    /// Opens the file. `lost` counts the lines that cannot be written.
    pub(super) fn open(path: &Path, limit: u64, kept: u16, lost: Arc<AtomicU64>) -> Result<Self, RecordsFileError> {
        let open = OpenFile::open(path).map_err(|source| RecordsFileError { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), limit, kept, open: Some(open), lost })
    }

    /// Writes as many of these lines as the file has room for. Returns how many bytes.
    fn write_lines(&mut self, lines: &[u8]) -> io::Result<usize> {
        let open = match &mut self.open {
            Some(open) if open.is_at(&self.path) => open,
            // Moved or removed by someone else, or not opened since an error.
            open => open.insert(OpenFile::open(&self.path)?),
        };
        let room = self.limit.saturating_sub(open.len).min(lines.len() as u64) as usize;
        let end_of = |line: &[u8]| line.iter().position(|byte| *byte == b'\n').map_or(line.len(), |at| at + 1);
        let fits = match lines[..room].iter().rposition(|byte| *byte == b'\n') {
            _ if room == lines.len() => room,
            Some(last) => last + 1,
            // A line longer than a whole file.
            None if open.len == 0 => end_of(lines),
            None => {
                self.rotate()?;
                return Ok(0);
            }
        };
        open.append(&lines[..fits])?;
        Ok(fits)
    }

    /// Renames the file, and those that were renamed before, and removes the oldest.
    fn rotate(&mut self) -> io::Result<()> {
        self.open = None;
        let oldest = self.numbered(self.kept - 1);
        if let Err(error) = fs::remove_file(&oldest)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        for number in (0..self.kept - 1).rev() {
            match fs::rename(self.numbered(number), self.numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn numbered(&self, number: u16) -> PathBuf {
        let mut name = OsString::from(&self.path);
        if number > 0 {
            name.push(format!(".{number}"));
        }
        name.into()
    }
}

impl OpenFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = private_file::append(path)?;
        let found = file.metadata()?;
        Ok(Self { file, len: found.len(), id: (found.dev(), found.ino()) })
    }

    fn is_at(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == self.id)
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(lines);
        match written {
            Ok(()) => self.len += lines.len() as u64,
            // No half line: the next one would be part of it.
            Err(_) => self.file.set_len(self.len)?,
        }
        written
    }
}

impl Write for RotatingFile {
    /// Takes all lines, or fails with some of them lost.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let mut left = lines;
        while !left.is_empty() {
            match self.write_lines(left) {
                Ok(written) => left = &left[written..],
                Err(error) => {
                    self.open = None;
                    let lost = left.iter().filter(|byte| **byte == b'\n').count();
                    self.lost.fetch_add(lost as u64, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn open(path: &Path, limit: u64, kept: u16) -> (RotatingFile, Arc<AtomicU64>) {
        let lost = Arc::<AtomicU64>::default();
        (RotatingFile::open(path, limit, kept, lost.clone()).unwrap(), lost)
    }

    /// The lines of all files, the oldest first.
    fn lines(path: &Path, kept: u16) -> Vec<String> {
        let names = (1..kept).rev().map(|number| PathBuf::from(format!("{}.{number}", path.display())));
        let texts = names.chain([path.to_owned()]).filter_map(|name| fs::read_to_string(name).ok());
        texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

        /// Against the list of lines: the files have its last lines, whole and in order, each file within the limit, and
        /// as many files as are kept.
        #[test]
        fn files_have_the_last_lines_whole_and_in_order(
            chunks in prop::collection::vec(prop::collection::vec(0..60_usize, 1..8), 0..40),
            limit in 100..400_u64,
            kept in 1..5_u16,
        ) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("flows.jsonl");
            let (mut file, lost) = open(&path, limit, kept);
            let mut expected = Vec::new();
            for chunk in chunks {
                let lines: Vec<String> =
                    chunk.iter().map(|length| format!("{} {}", expected.len(), "x".repeat(*length))).collect();
                file.write_all((lines.join("\n") + "\n").as_bytes()).unwrap();
                expected.extend(lines);
            }
            let found = lines(&path, kept);
            prop_assert!(expected.ends_with(&found), "{found:?}");
            let files: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
            prop_assert!(files.len() <= usize::from(kept), "{files:?}");
            prop_assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= limit));
            // All but the newest are full to within a line.
            let all: usize = expected.iter().map(|line| line.len() + 1).sum();
            let has: usize = found.iter().map(|line| line.len() + 1).sum();
            prop_assert!(has == all || has as u64 >= u64::from(kept - 1) * (limit - 70), "{has} of {all}");
            prop_assert_eq!(lost.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn only_its_owner_may_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("flows.jsonl");
        fs::write(&path, "before\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let (mut file, _) = open(&path, 100, 2);
        (0..20).for_each(|_| file.write_all(b"after\n").unwrap());
        for entry in fs::read_dir(directory.path()).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().mode() & 0o777, 0o600);
        }
        assert_eq!(lines(&path, 2)[0], "before");
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted_not_later_ones() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("inside");
        fs::create_dir(&inside).unwrap();
        let path = inside.join("flows.jsonl");
        let (mut file, lost) = open(&path, 1000, 2);
        file.write_all(b"one\n").unwrap();
        fs::remove_dir_all(&inside).unwrap();
        assert_eq!(file.write_all(b"two\nthree\n").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(lost.load(Ordering::Relaxed), 2);
        fs::create_dir(&inside).unwrap();
        file.write_all(b"four\n").unwrap();
        // Moved away by logrotate.
        fs::rename(&path, inside.join("moved")).unwrap();
        file.write_all(b"five\n").unwrap();
        assert_eq!(lines(&path, 2), ["five"]);
        assert_eq!(fs::read_to_string(inside.join("moved")).unwrap(), "four\n");
        assert_eq!(lost.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", directory.path().join("link")).unwrap();
        for name in ["missing/flows.jsonl", "", "link"] {
            let path = directory.path().join(name);
            let error = RotatingFile::open(&path, 100, 2, Arc::default()).map(drop).unwrap_err().to_string();
            assert!(error.contains("flow_records.file = ") && error.contains("or \"off\""), "{error}");
        }
    }
}

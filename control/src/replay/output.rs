//! Files that are there when they are complete, and not before.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// An output that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {cause}", file.display())]
pub struct OutputError {
    /// The file.
    pub file: PathBuf,
    /// Why.
    pub cause: io::Error,
}

/// A file being written. Under its own name it appears by [`Output::complete`]; dropped before, it leaves nothing. What
/// is no regular file (a pipe, a device) and `-`, standard output, are written as it goes.
pub(super) struct Output {
    path: PathBuf,
    writer: BufWriter<Sink>,
}

enum Sink {
    Temporary(NamedTempFile),
    Direct(File),
    Standard(io::Stdout),
}

impl Write for Sink {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        match self {
            Self::Temporary(file) => file.write(octets),
            Self::Direct(file) => file.write(octets),
            Self::Standard(stdout) => stdout.write(octets),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Temporary(file) => file.flush(),
            Self::Direct(file) => file.flush(),
            Self::Standard(stdout) => stdout.flush(),
        }
    }
}

impl Output {
    /// Begins a file.
    ///
    /// # Errors
    /// The directory is not there or cannot be written to, or the path is one.
    pub(super) fn create(path: &Path) -> Result<Self, OutputError> {
        let sink = sink(path).map_err(|cause| OutputError { file: path.to_owned(), cause })?;
        Ok(Self { path: path.to_owned(), writer: BufWriter::with_capacity(1 << 18, sink) })
    }

    /// Ends the file and gives it its name.
    ///
    /// # Errors
    /// The rest cannot be written.
    pub(super) fn complete(self) -> Result<(), OutputError> {
        let Self { path, writer } = self;
        let complete = || -> io::Result<()> {
            match writer.into_inner().map_err(io::IntoInnerError::into_error)? {
                Sink::Temporary(file) => file.persist(&path).map(drop).map_err(|error| error.error),
                Sink::Direct(_) => Ok(()),
                Sink::Standard(mut stdout) => stdout.flush(),
            }
        };
        complete().map_err(|cause| OutputError { file: path.clone(), cause })
    }

    /// Writes octets.
    ///
    /// # Errors
    /// The disk is full, the reader of a pipe went away, and so on.
    #[inline]
    pub(super) fn write(&mut self, octets: &[u8]) -> Result<(), OutputError> {
        self.writer.write_all(octets).map_err(|cause| self.error(cause))
    }

    /// Names the file in an error.
    pub(super) fn error(&self, cause: io::Error) -> OutputError {
        OutputError { file: self.path.clone(), cause }
    }
}

fn sink(path: &Path) -> io::Result<Sink> {
    if path == Path::new("-") {
        return Ok(Sink::Standard(io::stdout()));
    }
    match path.metadata() {
        Ok(there) if there.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(there) if !there.is_file() => OpenOptions::new().write(true).open(path).map(Sink::Direct),
        _ => {
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // As any file that is created, it gets what the umask leaves of these.
            let permissions = std::fs::Permissions::from_mode(0o666);
            let file = tempfile::Builder::new().prefix(".penstock-").permissions(permissions).tempfile_in(directory)?;
            Ok(Sink::Temporary(file))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_when_it_is_complete_and_leaves_nothing_when_it_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let entries = || std::fs::read_dir(directory.path()).unwrap().count();
        let mut output = Output::create(&path).unwrap();
        output.write(b"half").unwrap();
        assert!(!path.exists());
        drop(output);
        assert_eq!(entries(), 0);
        let mut output = Output::create(&path).unwrap();
        output.write(b"whole").unwrap();
        output.complete().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert_eq!(entries(), 1);
    }

    #[test]
    fn a_path_that_cannot_be_is_told() {
        let directory = tempfile::tempdir().unwrap();
        for path in [directory.path().to_owned(), directory.path().join("absent/out")] {
            let message = Output::create(&path).err().unwrap().to_string();
            assert!(message.starts_with(&path.display().to_string()) && !message.contains('\n'), "{message}");
        }
    }
}

//! Output files that appear only when complete.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::unistd::linkat;
use tempfile::NamedTempFile;

#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {cause}", file.display())]
pub struct OutputError {
    pub file: PathBuf,
    pub cause: io::Error,
}

/// A file being written. [`Output::complete`] gives it its name; a file dropped before, or left by an interrupted or
/// killed process, leaves nothing, because it has no name until then where the file system supports that (`O_TMPFILE`).
/// Standard output (`-`) and anything but a regular file (a pipe, a device) are written directly.
pub(super) struct Output {
    path: PathBuf,
    writer: BufWriter<Sink>,
}

enum Sink {
    Unnamed(File),
    Temporary(NamedTempFile),
    Direct(File),
    Standard(io::Stdout),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Temporary(file) => file.write(bytes),
            Self::Unnamed(file) | Self::Direct(file) => file.write(bytes),
            Self::Standard(stdout) => stdout.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Temporary(file) => file.flush(),
            Self::Unnamed(file) | Self::Direct(file) => file.flush(),
            Self::Standard(stdout) => stdout.flush(),
        }
    }
}

impl Output {
    /// Starts a file.
    ///
    /// # Errors
    /// The directory does not exist or is not writable, or the path is a directory.
    pub(super) fn create(path: &Path) -> Result<Self, OutputError> {
        let sink = sink(path).map_err(|cause| OutputError { file: path.to_owned(), cause })?;
        Ok(Self { path: path.to_owned(), writer: BufWriter::with_capacity(1 << 18, sink) })
    }

    /// Writes the rest and gives the file its name.
    pub(super) fn complete(self) -> Result<(), OutputError> {
        let Self { path, writer } = self;
        let complete = || -> io::Result<()> {
            match writer.into_inner().map_err(io::IntoInnerError::into_error)? {
                Sink::Unnamed(file) => name(&file, &path),
                Sink::Temporary(file) => file.persist(&path).map(drop).map_err(|error| error.error),
                Sink::Direct(_) => Ok(()),
                Sink::Standard(mut stdout) => stdout.flush(),
            }
        };
        complete().map_err(|cause| OutputError { file: path.clone(), cause })
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// For example, the disk is full or the reader of a pipe is gone.
    #[inline]
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        self.writer.write_all(bytes).map_err(|cause| self.error(cause))
    }

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
            // The umask applies, as to any new file.
            const PERMISSIONS: u32 = 0o666;
            let mut unnamed = OpenOptions::new();
            unnamed.write(true).mode(PERMISSIONS).custom_flags(OFlag::O_TMPFILE.bits());
            if let Ok(file) = unnamed.open(directory(path)) {
                return Ok(Sink::Unnamed(file));
            }
            let permissions = std::fs::Permissions::from_mode(PERMISSIONS);
            let mut named = tempfile::Builder::new();
            named.prefix(PREFIX).permissions(permissions).tempfile_in(directory(path)).map(Sink::Temporary)
        }
    }
}

const PREFIX: &str = ".penstock-";

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Links an unnamed file as `path`, replacing an existing file.
fn name(file: &File, path: &Path) -> io::Result<()> {
    // open(2) describes how to link an O_TMPFILE file. A link does not replace, so it gets a temporary name first.
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |name: &Path| Ok(linkat(AT_FDCWD, unnamed.as_str(), AT_FDCWD, name, AtFlags::AT_SYMLINK_FOLLOW)?);
    let named = tempfile::Builder::new().prefix(PREFIX).make_in(directory(path), link)?;
    named.persist(path).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_when_complete_and_leaves_nothing_else() {
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
    fn an_impossible_path_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        for path in [directory.path().to_owned(), directory.path().join("absent/out")] {
            let message = Output::create(&path).err().unwrap().to_string();
            assert!(message.starts_with(&path.display().to_string()) && !message.contains('\n'), "{message}");
        }
    }
}

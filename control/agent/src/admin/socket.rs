//! The unix socket that the admin API listens on.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Why the socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminSocketError {
    /// Another daemon listens there.
    #[error("admin.socket = {}: another daemon listens there; stop it, or set another path", .0.display())]
    Live(PathBuf),
    /// The path is something other than a socket.
    #[error("admin.socket = {}: not a socket; remove the file, or set another path", .0.display())]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("admin.socket = {}: cannot create it ({source}); set a path in a writable directory, or \"off\"", .path.display())]
    System {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// A listening socket; its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // If someone else has removed it, nothing is left to do.
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens at `path`, with access for the owner only. Replaces the socket of a dead daemon.
pub(crate) fn listen(path: &Path) -> Result<(UnixListener, SocketFile), AdminSocketError> {
    let system = |source| AdminSocketError::System { path: path.to_owned(), source };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(system)?;
    }
    clear(path)?;
    // Bound under another name and then moved, so that nobody can connect before the permissions are set.
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}", std::process::id()));
    let fresh = PathBuf::from(fresh);
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(system)?;
    let moved = fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600)).and_then(|()| fs::rename(&fresh, path));
    if let Err(error) = moved {
        let _ = fs::remove_file(&fresh);
        return Err(system(error));
    }
    Ok((listener, SocketFile(path.to_owned())))
}

/// Checks that `path` is free, or a dead socket that may be replaced.
fn clear(path: &Path) -> Result<(), AdminSocketError> {
    use std::os::unix::fs::FileTypeExt;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(AdminSocketError::System { path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(AdminSocketError::NoSocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path) {
            // Nobody listens: a dead daemon left it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            _ => Err(AdminSocketError::Live(path.to_owned())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_live_socket_is_rejected_a_dead_one_replaced_and_other_files_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/admin.sock");
        let (listener, file) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path), Err(AdminSocketError::Live(at)) if at == path));
        assert!(UnixStream::connect(&path).is_ok(), "the rejected attempt left it working");
        drop(listener);
        // As after a kill: the file exists, and nobody listens.
        assert!(path.exists());
        let (listener, again) = listen(&path).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop((listener, again, file));
        assert!(!path.exists(), "removed at the end");
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");

        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path), Err(AdminSocketError::NoSocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let under_a_file = path.join("admin.sock");
        let error = listen(&under_a_file).unwrap_err().to_string();
        assert!(error.contains("cannot create it") && !error.contains('\n'), "{error}");
    }
}

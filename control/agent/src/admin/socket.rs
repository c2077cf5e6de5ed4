//! The unix socket that the admin API listens on.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Why the socket could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// Somebody listens there.
    #[error("admin.socket = {}: a daemon listens there already; end it, or give this one another path", .0.display())]
    Live(PathBuf),
    /// Something else is there.
    #[error("admin.socket = {}: this is no socket; remove it, or give another path", .0.display())]
    NoSocket(PathBuf),
    /// It cannot be made.
    #[error("admin.socket = {}: cannot be made ({source}); give a path in a directory that can be written to, or \"off\"", .path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket; its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // If somebody has removed it, there is nothing left to do.
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens at `path`, for its owner alone. The socket of a daemon that has died is replaced.
pub(crate) fn listen(path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
    let system = |source| SocketError::System { path: path.to_owned(), source };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(system)?;
    }
    clear(path)?;
    // Bound under another name and moved, so that nobody can connect before it is the owner's alone.
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

/// Sees to it that there is nothing at `path` that is worth keeping.
fn clear(path: &Path) -> Result<(), SocketError> {
    use std::os::unix::fs::FileTypeExt;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(SocketError::System { path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(SocketError::NoSocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path) {
            // Nobody listens: it was left behind, and is replaced.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            _ => Err(SocketError::Live(path.to_owned())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_live_socket_is_refused_a_dead_one_replaced_and_anything_else_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/admin.sock");
        let (listener, file) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path), Err(SocketError::Live(at)) if at == path));
        assert!(UnixStream::connect(&path).is_ok(), "the one that was refused did no harm");
        drop(listener);
        // As after a kill: the file is there, and nobody listens.
        assert!(path.exists());
        let (listener, again) = listen(&path).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop((listener, again, file));
        assert!(!path.exists(), "removed at the end");
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");

        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path), Err(SocketError::NoSocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let under_a_file = path.join("admin.sock");
        let told = listen(&under_a_file).unwrap_err().to_string();
        assert!(told.contains("cannot be made") && !told.contains('\n'), "{told}");
    }
}

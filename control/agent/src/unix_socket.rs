//! The unix sockets that the admin API, captures and another daemon's takeover listen on.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminSocketError {
    #[error("{key} = {}: another daemon listens there; stop it, or set another path", .path.display())]
    Live { key: &'static str, path: PathBuf },
    #[error("{key} = {}: not a socket; remove the file, or set another path", .path.display())]
    NoSocket { key: &'static str, path: PathBuf },
    #[error("{key} = {}: cannot create it ({source}); set a path in a writable directory, or \"off\"", .path.display())]
    System { key: &'static str, path: PathBuf, source: io::Error },
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

/// Listens at `path`, the value of the setting `key`, with access for the owner only. Replaces the socket of a dead daemon.
pub(crate) fn listen(path: &Path, key: &'static str) -> Result<(UnixListener, SocketFile), AdminSocketError> {
    let system = |source| AdminSocketError::System { key, path: path.to_owned(), source };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(system)?;
    }
    clear(path, key)?;
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
fn clear(path: &Path, key: &'static str) -> Result<(), AdminSocketError> {
    use std::os::unix::fs::FileTypeExt;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(AdminSocketError::System { key, path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(AdminSocketError::NoSocket { key, path: path.to_owned() }),
        Ok(_) => match UnixStream::connect(path) {
            // Nobody listens: a dead daemon left it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            _ => Err(AdminSocketError::Live { key, path: path.to_owned() }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "admin.socket";

    #[tokio::test]
    async fn only_a_dead_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/admin.sock");
        let (listener, file) = listen(&path, KEY).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path, KEY), Err(AdminSocketError::Live { path: at, .. }) if at == path));
        assert!(UnixStream::connect(&path).is_ok(), "the rejected attempt left it working");
        drop(listener);
        // As after a kill: the file exists, and nobody listens.
        assert!(path.exists());
        let (listener, again) = listen(&path, KEY).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop((listener, again, file));
        assert!(!path.exists(), "removed at the end");
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");

        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path, KEY), Err(AdminSocketError::NoSocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let under_a_file = path.join("admin.sock");
        let error = listen(&under_a_file, KEY).unwrap_err().to_string();
        assert!(
            error.starts_with("admin.socket = ") && error.contains("cannot create it") && !error.contains('\n'),
            "{error}"
        );
    }
}

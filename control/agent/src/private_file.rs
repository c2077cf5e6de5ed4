//! A file of what pods say to each other: for its owner alone, whoever made it, and never behind a link.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Opens a regular file to append to, with mode 0600; creates it if it is not there. A symbolic link, a pipe and a device are
/// refused: whoever may write to the directory could lead the lines elsewhere.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_file_is_for_its_owner_and_links_and_pipes_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("open"), "before\n").unwrap();
        fs::set_permissions(at("open"), Permissions::from_mode(0o644)).unwrap();
        for name in ["open", "new"] {
            append(&at(name)).unwrap();
            assert_eq!(fs::metadata(at(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
        assert_eq!(fs::read_to_string(at("open")).unwrap(), "before\n");
        symlink(at("elsewhere"), at("link")).unwrap();
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        for name in ["link", "pipe", "."] {
            append(&at(name)).unwrap_err();
        }
        assert!(!at("elsewhere").exists());
    }
}

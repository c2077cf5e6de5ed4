//! Kernel settings under `/proc/sys/net` (`/host/proc/sys/net` if mounted). They belong to the network namespace of the
//! thread that opens them.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// One setting of one interface (or `all`): `net.<family>.conf.<interface>.<name>`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sysctl {
    family: &'static str,
    interface: String,
    name: &'static str,
}

impl Sysctl {
    pub fn v4(interface: &str, name: &'static str) -> Self {
        Self { family: "ipv4", interface: interface.to_owned(), name }
    }

    pub fn v6(interface: &str, name: &'static str) -> Self {
        Self { family: "ipv6", interface: interface.to_owned(), name }
    }

    /// Its value, `None` where the kernel has no such setting.
    pub fn read(&self) -> Option<i64> {
        fs::read_to_string(self.path()).ok()?.trim().parse().ok()
    }

    pub fn write(&self, value: i64) -> io::Result<()> {
        fs::write(self.path(), value.to_string())
    }

    // In an unprivileged container /proc/sys is read-only; the node's may be mounted beside it. Both show the same
    // network namespace.
    fn root() -> &'static Path {
        static ROOT: OnceLock<PathBuf> = OnceLock::new();
        ROOT.get_or_init(|| {
            let candidates = ["/host/proc/sys/net", "/proc/sys/net"].map(Path::new);
            let found = candidates.into_iter().find(|path| path.is_dir());
            found.unwrap_or(candidates[1]).to_owned()
        })
    }

    // An interface name may contain dots, but no slash: unlike sysctl(8)'s notation, the path is unambiguous.
    fn path(&self) -> PathBuf {
        Self::root().join(self.family).join("conf").join(&self.interface).join(self.name)
    }
}

impl fmt::Display for Sysctl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net/{}/conf/{}/{}", self.family, self.interface, self.name)
    }
}

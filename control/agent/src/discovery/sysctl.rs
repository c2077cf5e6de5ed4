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

/// Changed settings with their previous values; restored when dropped.
#[derive(Debug, Default)]
pub struct Sysctls {
    changed: Vec<(Sysctl, i64)>,
}

impl Sysctls {
    /// Sets `sysctl`, unless it already has the value or the kernel does not know it.
    pub fn set(&mut self, sysctl: Sysctl, value: i64) -> io::Result<()> {
        let Some(before) = sysctl.read().filter(|&before| before != value) else { return Ok(()) };
        sysctl.write(value)?;
        if !self.changed.iter().any(|(known, _)| *known == sysctl) {
            self.changed.push((sysctl, before));
        }
        Ok(())
    }

    /// Records that another process changed `sysctl` without restoring it. The previous value is taken to be the
    /// kernel's default for new interfaces (`conf/default`).
    pub fn was_default(&mut self, sysctl: Sysctl) {
        let default = Sysctl { interface: "default".to_owned(), ..sysctl.clone() }.read();
        if let Some(before) = default.filter(|&before| sysctl.read().is_some_and(|now| now != before)) {
            self.changed.push((sysctl, before));
        }
    }

    /// Keeps all settings: nothing is restored.
    pub fn keep(mut self) {
        self.changed.clear();
    }

    /// Forgets the settings of an interface that is gone.
    pub fn forget(&mut self, interface: &str) {
        self.changed.retain(|(sysctl, _)| sysctl.interface != interface);
    }
}

impl Drop for Sysctls {
    fn drop(&mut self) {
        for (sysctl, before) in self.changed.drain(..).rev() {
            // A deleted interface takes its settings with it.
            if let Err(error) = sysctl.write(before)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%sysctl, value = before, %error, "cannot restore the setting");
            }
        }
    }
}

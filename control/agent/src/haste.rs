//! What makes a start short on a busy node.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_dataplane::worker::Hurry;

/// Whether the kernel ends grace periods at once. `rcupdate.rcu_normal` comes before it, for who wants no core interrupted.
const EXPEDITED: &str = "/sys/kernel/rcu_expedited";
/// Exists as long as a daemon has set that: one that is killed meanwhile leaves both to the next.
const MARKER: &str = "/run/penstock/rcu_expedited";

/// While this lives, the thread that made it, and those that it starts, come before ordinary ones, and the kernel ends its grace periods at
/// once, each as far as this process may: with every program that is attached the kernel waits for one, with its lock on all interfaces
/// held (`tcx_entry_sync` in include/net/tcx.h).
pub(crate) struct Haste {
    _hurry: Hurry,
    _expedited: Option<ExpeditedGracePeriods>,
}

impl Haste {
    pub(crate) fn begin() -> Self {
        Self {
            _hurry: Hurry::begin(),
            _expedited: ExpeditedGracePeriods::begin(Path::new(EXPEDITED), Path::new(MARKER)),
        }
    }
}

/// Takes back what a daemon that was killed in its start has left.
pub(crate) fn restore_after_kill() {
    if Path::new(MARKER).exists() {
        drop(ExpeditedGracePeriods { setting: EXPEDITED.into(), marker: MARKER.into() });
    }
}

/// The setting is on; it is off again once this is dropped.
struct ExpeditedGracePeriods {
    setting: PathBuf,
    marker: PathBuf,
}

impl ExpeditedGracePeriods {
    /// `None` where somebody else has it on already, or it may not be changed, as in a container.
    fn begin(setting: &Path, marker: &Path) -> Option<Self> {
        let before = fs::read_to_string(setting).ok()?;
        let is_left = marker.exists();
        if before.trim() != "0" && !is_left {
            return None;
        }
        // With other paths set, nothing else is in this directory.
        fs::create_dir_all(marker.parent()?).ok()?;
        fs::write(marker, "").ok()?;
        if fs::write(setting, "1").is_err() {
            // One that a killed daemon has left is for who may change the setting.
            if !is_left {
                let _ = fs::remove_file(marker);
            }
            return None;
        }
        Some(Self { setting: setting.to_owned(), marker: marker.to_owned() })
    }
}

impl Drop for ExpeditedGracePeriods {
    fn drop(&mut self) {
        match fs::write(&self.setting, "0") {
            Ok(()) => drop(fs::remove_file(&self.marker)),
            Err(error) => tracing::warn!(setting = %self.setting.display(), %error, "cannot restore the setting"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_are_as_before_once_a_start_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let (setting, marker) = (folder.path().join("rcu_expedited"), folder.path().join("run/marker"));
        let begin = || ExpeditedGracePeriods::begin(&setting, &marker);
        assert!(begin().is_none(), "a kernel without it");
        let cases = [("0\n", false, "1", "0"), ("1\n", false, "1\n", "1\n"), ("1\n", true, "1", "0")];
        for (before, was_killed, during, after) in cases {
            fs::write(&setting, before).unwrap();
            if was_killed {
                fs::write(&marker, "").unwrap();
            }
            let expedited = begin();
            assert_eq!(fs::read_to_string(&setting).unwrap(), during);
            drop(expedited);
            assert_eq!((fs::read_to_string(&setting).unwrap().trim(), marker.exists()), (after.trim(), false));
        }
    }
}

//! What makes a start short on a busy node.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_dataplane::worker::Hurry;

/// Whether the kernel ends grace periods at once. `rcupdate.rcu_normal` comes before it, for who wants no core interrupted.
const EXPEDITED: &str = "/sys/kernel/rcu_expedited";

/// While this lives, the thread that made it, and those that it starts, come before ordinary ones, and the kernel ends its grace periods at
/// once, each as far as this process may: with every program that is attached the kernel waits for one, with its lock on all interfaces
/// held (`tcx_entry_sync` in include/net/tcx.h).
pub(crate) struct Haste {
    _hurry: Hurry,
    _expedited: Option<ExpeditedGracePeriods>,
}

impl Haste {
    pub(crate) fn begin() -> Self {
        Self { _hurry: Hurry::begin(), _expedited: ExpeditedGracePeriods::begin(Path::new(EXPEDITED)) }
    }
}

/// The setting is on; it is off again once this is dropped.
struct ExpeditedGracePeriods {
    setting: PathBuf,
}

impl ExpeditedGracePeriods {
    /// `None` where it is on already, or may not be changed, as in a container.
    fn begin(setting: &Path) -> Option<Self> {
        let before = fs::read_to_string(setting).ok()?;
        (before.trim() == "0" && fs::write(setting, "1").is_ok()).then(|| Self { setting: setting.to_owned() })
    }
}

impl Drop for ExpeditedGracePeriods {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.setting, "0") {
            tracing::warn!(setting = %self.setting.display(), %error, "cannot restore the setting");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_are_as_before_once_a_start_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let setting = folder.path().join("rcu_expedited");
        assert!(ExpeditedGracePeriods::begin(&setting).is_none(), "a kernel without it");
        for (before, during) in [("0\n", "1"), ("1\n", "1\n")] {
            fs::write(&setting, before).unwrap();
            let expedited = ExpeditedGracePeriods::begin(&setting);
            assert_eq!(fs::read_to_string(&setting).unwrap(), during);
            drop(expedited);
            assert_eq!(fs::read_to_string(&setting).unwrap().trim(), before.trim());
        }
    }
}

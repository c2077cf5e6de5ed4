//! Checks that the cluster leaves nothing on the machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use penstock_bench::testbed::Inventory;

use crate::node::CONTROL_GROUPS;
use crate::real_cluster::kept_settings;

/// Namespaces, processes, links, routes and pinned objects; mounts, control groups of these tests, and settings that a kubelet makes.
pub(crate) struct Machine {
    inventory: Inventory,
    rest: BTreeSet<String>,
}

impl Machine {
    pub(crate) fn now() -> Result<Self> {
        let mut rest = BTreeSet::new();
        // The fields after the identifiers: root, mount point, options (proc_pid_mountinfo(5)).
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        // The inventory has this process's network namespaces. Others may come and go meanwhile.
        let mounts = mounts.lines().filter(|line| !line.contains(" /run/netns/"));
        rest.extend(mounts.map(|line| format!("mount {}", line.splitn(4, ' ').last().unwrap_or(line))));
        for hierarchy in fs::read_dir("/sys/fs/cgroup")?.flatten() {
            let groups = fs::read_dir(hierarchy.path()).into_iter().flatten().flatten();
            let own = groups.filter(|group| is_left_or_own(&group.file_name().to_string_lossy()));
            rest.extend(own.map(|group| format!("control group {}", group.path().display())));
        }
        rest.extend(kept_settings().into_iter().map(|(file, value)| format!("{}: {}", file.display(), value.trim())));
        ensure!(Path::new("/sys/fs/cgroup").exists() && !rest.is_empty(), "nothing to compare");
        Ok(Self { inventory: Inventory::take()?, rest })
    }

    /// Fails if something is there now that was not there then, or is gone.
    pub(crate) fn expect_unchanged(&self) -> Result<()> {
        let now = Self::now()?;
        let mut changes = now.inventory.difference(&self.inventory);
        changes.extend(now.rest.difference(&self.rest).map(|item| format!("left behind: {item}")));
        changes.extend(self.rest.difference(&now.rest).map(|item| format!("gone: {item}")));
        ensure!(changes.is_empty(), "{}", changes.join("\n"));
        Ok(())
    }
}

/// Whether this is a control group of these tests, of this process or of one that has ended. Others may run meanwhile.
fn is_left_or_own(group: &str) -> bool {
    let process = group.strip_prefix(CONTROL_GROUPS).and_then(|rest| rest.split('-').next());
    process.is_some_and(|id| id == std::process::id().to_string() || !Path::new("/proc").join(id).exists())
}

//! Control groups: what all processes of an engine use, those that it has run and that have ended included.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cleanup::CleanupGuard;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A group of version 2. Dropping it kills what is in it and removes it.
///
/// The kernel counts processor time in each group of this version, whichever controllers are in use, also where the controllers
/// themselves are mounted as version 1 (Documentation/admin-guide/cgroup-v2.rst, `cpu.stat`).
pub struct ControlGroup {
    path: PathBuf,
    _guard: CleanupGuard,
}

impl ControlGroup {
    pub fn new(label: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
        let root = mount_point(&mounts).context(
            "no control groups of version 2 are mounted; mount them: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified",
        )?;
        let name = format!("pen-{}-{}-{label}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let path = root.join(name);
        fs::create_dir(&path)
            .with_context(|| format!("cannot make the control group {}: run it as root", path.display()))?;
        let guard = CleanupGuard::new({
            let path = path.clone();
            move || remove(&path)
        });
        Ok(Self { path, _guard: guard })
    }

    /// Has a command's process enter it before its program runs.
    pub fn take_in(&self, command: &mut Command) -> Result<()> {
        let file = self.path.join("cgroup.procs");
        let file =
            File::options().write(true).open(&file).with_context(|| format!("cannot open {}", file.display()))?;
        let enter = move || (&file).write_all(b"0");
        // SAFETY: between fork and exec the closure makes one system call on a descriptor that it owns; it neither allocates
        // nor takes a lock.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Processor time of all that were ever in it.
    pub fn processor_time(&self) -> Result<Duration> {
        let file = self.path.join("cpu.stat");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        usage(&text).with_context(|| format!("{} has no usage_usec", file.display()))
    }

    pub fn processes(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills all processes in it, as a container runtime does.
    pub fn kill(&self) -> Result<()> {
        let file = self.path.join("cgroup.kill");
        fs::write(&file, "1").with_context(|| format!("cannot write {}; it is there since Linux 5.14", file.display()))
    }

    /// Resident memory of all processes in it, in bytes.
    pub fn resident(&self) -> u64 {
        let of =
            |process: i32| fs::read_to_string(format!("/proc/{process}/status")).ok().and_then(|text| resident(&text));
        self.processes().into_iter().filter_map(of).sum()
    }

    /// Memory of the BPF maps that its processes hold, each once, in bytes.
    pub fn bpf_maps(&self) -> u64 {
        let mut maps = std::collections::BTreeMap::new();
        for process in self.processes() {
            let files = fs::read_dir(format!("/proc/{process}/fdinfo")).into_iter().flatten().flatten();
            let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
            maps.extend(texts.filter_map(|text| bpf_map(&text)));
        }
        maps.values().sum()
    }
}

/// Where control groups of version 2 are mounted: the second field of a line whose third is `cgroup2` (proc_pid_mounts(5)).
fn mount_point(mounts: &str) -> Option<PathBuf> {
    let fields = |line: &str| -> Option<PathBuf> {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| place.into())
    };
    mounts.lines().find_map(fields)
}

fn usage(stat: &str) -> Option<Duration> {
    let value = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    value.trim().parse().ok().map(Duration::from_micros)
}

/// `VmRSS` in kilobytes (proc_pid_status(5)).
fn resident(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    value.split_whitespace().next()?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// A map's number and the memory that the kernel accounts to it (`bpf_map_show_fdinfo` in kernel/bpf/syscall.c).
fn bpf_map(fdinfo: &str) -> Option<(u64, u64)> {
    let field = |name: &str| -> Option<u64> {
        fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
    };
    field("map_id").zip(field("memlock"))
}

fn remove(path: &Path) {
    // Errors are ignored: there may be nothing to kill, and a group without processes goes at once.
    let _ = fs::write(path.join("cgroup.kill"), "1");
    let deadline = Instant::now() + Duration::from_secs(5);
    while fs::remove_dir(path).is_err() && path.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_is_found_beside_version_1() {
        let hybrid = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mount_point(hybrid), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_point("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"), None);
    }

    #[test]
    fn kernel_files_are_read_by_field() {
        assert_eq!(usage("usage_usec 1500\nuser_usec 1000\n"), Some(Duration::from_micros(1500)));
        assert_eq!(resident("Name:\tx\nVmRSS:\t    2048 kB\nRssAnon:\t 8 kB\n"), Some(2 << 20));
        assert_eq!(bpf_map("pos:\t0\nmap_type:\t1\nmemlock:\t4096\nmap_id:\t17\nfrozen:\t0\n"), Some((17, 4096)));
        assert_eq!(bpf_map("pos:\t0\nprog_id:\t3\nmemlock:\t4096\n"), None);
    }
}

//! Whether pinned programs outlive this process: is the BPF file system the node's, or that of a container alone?

use std::fs;
use std::path::Path;

use super::PreflightFinding;

const BPFFS: &str = "/sys/fs/bpf";

/// A mount, from a line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
#[derive(Clone, PartialEq, Eq, Debug)]
struct Mount {
    /// Unique among all mounts of the machine.
    id: String,
    device: String,
    is_bpf: bool,
    /// Mounts made below it are made at its peers, too.
    is_shared: bool,
    /// Its peers' mounts are made here, too: somebody outside of this mount namespace has the same.
    is_slave: bool,
}

/// Checks /sys/fs/bpf, for `fail.mode = "closed"`.
pub(super) fn finding(may_mount: bool) -> PreflightFinding {
    let mounts_of = |process: &str| fs::read_to_string(format!("/proc/{process}/mountinfo")).ok();
    let own = mounts_of("self").and_then(|text| mount_of(&text));
    // In a container it is often this process.
    let first = mounts_of("1").filter(|_| std::process::id() != 1).and_then(|text| mount_of(&text));
    judge(own.as_ref(), first.as_ref(), may_mount)
}

/// The mount that /sys/fs/bpf is in: of those at the longest path the last, which covers the others.
fn mount_of(mountinfo: &str) -> Option<Mount> {
    let mut found: Option<(usize, Mount)> = None;
    for line in mountinfo.lines() {
        let Some((place, mount)) = parse(line) else { continue };
        let is_longer = found.as_ref().is_none_or(|(length, _)| place.len() >= *length);
        if is_longer && Path::new(BPFFS).starts_with(place) {
            found = Some((place.len(), mount));
        }
    }
    found.map(|(_, mount)| mount)
}

fn parse(line: &str) -> Option<(&str, Mount)> {
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ');
    let (id, device, place) = (fields.next()?, fields.nth(1)?, fields.nth(1)?);
    let propagation: Vec<&str> = fields.skip(1).collect();
    let has = |kind: &str| propagation.iter().any(|field| field.starts_with(kind));
    let mount = Mount {
        id: id.to_owned(),
        device: device.to_owned(),
        is_bpf: after.split(' ').next() == Some("bpf"),
        is_shared: has("shared:"),
        is_slave: has("master:"),
    };
    Some((place, mount))
}

/// `first`: the same of the machine's first process, if it is another one than this and can be seen.
fn judge(own: Option<&Mount>, first: Option<&Mount>, may_mount: bool) -> PreflightFinding {
    let Some(own) = own else {
        return PreflightFinding::warning(
            "/sys/fs/bpf: its mount cannot be read from /proc/self/mountinfo, so that it is not known whether pods stay closed without a daemon; mount /proc",
        );
    };
    // The first process has this very mount, or the same file system.
    let is_first = first.is_some_and(|first| first.id == own.id || (own.is_bpf && first.device == own.device));
    let outlives = is_first || own.is_shared || (own.is_bpf && own.is_slave);
    match (own.is_bpf, outlives, may_mount) {
        (true, true, _) => PreflightFinding::ok("/sys/fs/bpf: a BPF file system"),
        (false, true, true) => PreflightFinding::ok("/sys/fs/bpf: no BPF file system yet; the start mounts it"),
        (false, _, false) => PreflightFinding::error(
            "/sys/fs/bpf: no BPF file system, which fail.mode = \"closed\" needs; mount it on the node (mount -t bpf bpf /sys/fs/bpf)",
        ),
        (true, false, _) => PreflightFinding::error(
            "/sys/fs/bpf: this BPF file system is the container's own, or cannot be told from one: when the container ends, so do the pinned programs, and pods are open; mount it on the node (mount -t bpf bpf /sys/fs/bpf) and into the container with mountPropagation: HostToContainer, or set fail.mode = \"open\"",
        ),
        (false, false, true) => PreflightFinding::error(
            "/sys/fs/bpf: no BPF file system on the node, and one that is mounted here would end with this container, so that pods are open; mount it on the node (mount -t bpf bpf /sys/fs/bpf, or an init container with mountPropagation: Bidirectional), or set fail.mode = \"open\"",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Level;

    const PLAIN: &str = "22 27 0:21 / /proc rw,relatime - proc proc rw
23 27 0:22 / /sys rw,relatime - sysfs sysfs rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
";
    const OF_NODE: &str = "48 23 0:39 / /sys/fs/bpf rw,nosuid,relatime - bpf bpf rw,mode=700\n";

    /// The level of what is found with these mounts, of this process and of the first.
    fn level(own: &str, first: Option<&str>, may_mount: bool) -> Level {
        let found = judge(mount_of(own).as_ref(), first.and_then(mount_of).as_ref(), may_mount);
        let has_remedy =
            ["mount it on the node", "HostToContainer", "Bidirectional"].iter().any(|part| found.line.contains(part));
        assert_eq!(has_remedy, found.level == Level::Error, "{found:?}");
        found.level
    }

    #[test]
    fn on_the_node_itself_every_bpf_file_system_is_the_nodes() {
        let with = PLAIN.to_owned() + OF_NODE;
        assert_eq!(level(&with, Some(&with), false), Level::Ok);
        assert_eq!(level(PLAIN, Some(PLAIN), true), Level::Ok, "the start mounts it");
        assert_eq!(level(PLAIN, Some(PLAIN), false), Level::Error);
        // A service in a mount namespace of its own has another mount of the same file system.
        let service = PLAIN.to_owned() + "148 123 0:39 / /sys/fs/bpf rw - bpf bpf rw\n";
        assert_eq!(level(&service, Some(&with), false), Level::Ok);
    }

    #[test]
    fn in_a_container_it_must_come_from_the_node() {
        // As runtimes mount a host path: HostToContainer, Bidirectional, and neither.
        let with = |file_system: &str, propagation: &str| {
            format!("{PLAIN}148 23 0:39 / /sys/fs/bpf rw,relatime{propagation} - {file_system} {file_system} rw\n")
        };
        for (file_system, propagation, expected) in [
            ("bpf", " master:7", Level::Ok),
            ("bpf", " shared:9 master:7", Level::Ok),
            ("bpf", " shared:9", Level::Ok),
            ("bpf", "", Level::Error),
            ("sysfs", " shared:9", Level::Ok),
            ("sysfs", " master:7", Level::Error),
            ("sysfs", "", Level::Error),
        ] {
            assert_eq!(level(&with(file_system, propagation), None, true), expected, "{file_system}{propagation}");
        }
        // A second BPF file system, mounted over what came from the node, covers it.
        let own = with("sysfs", " master:7") + "149 148 0:50 / /sys/fs/bpf rw - bpf bpf rw\n";
        assert_eq!(level(&own, None, true), Level::Error);
        // With hostPID the node's first process can be seen, and has another one.
        assert_eq!(level(&own, Some(&(PLAIN.to_owned() + OF_NODE)), true), Level::Error);
    }

    #[test]
    fn the_mounts_of_this_process_can_be_read() {
        assert!(mount_of(&fs::read_to_string("/proc/self/mountinfo").unwrap()).is_some());
    }
}

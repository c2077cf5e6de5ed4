//! Lists what this process has created on the machine, to verify that it leaves nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;

use super::namespace::{DIRECTORY, made, owner};
use super::namespace::{Netlink, network_state};

/// Namespaces and child processes of this process, the machine's links, addresses and routes, and objects pinned in the
/// BPF file system for this process' namespaces. Two inventories, before and after, must not differ.
///
/// Namespaces, processes and pinned objects of other processes are left out, since they may come and go meanwhile, also where a
/// namespace of theirs has the inode of one of this process that is gone. So
/// are the objects that the kernel creates when a BPF file system is mounted (`maps.debug`, `progs.debug`:
/// kernel/bpf/preload).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inventory {
    items: BTreeSet<String>,
}

impl Inventory {
    /// Takes the inventory, from the calling thread's network namespace.
    pub fn take() -> Result<Self> {
        let mut items: BTreeSet<String> = network_state(&Netlink::open_here()?)?.into_iter().collect();
        items.extend(own_namespaces().map(|name| format!("namespace {name}")));
        items.extend(own_children().map(|process| format!("process {process}")));
        let (alive, used) = (own_inodes(), used_inodes());
        let own = made().into_iter().filter(|inode| alive.contains(inode) || !used.contains(inode));
        pinned(Path::new("/sys/fs/bpf"), &own.map(|inode| inode.to_string()).collect(), false, &mut items);
        Ok(Self { items })
    }

    /// Items here that are not in `earlier`, and the other way round, one line each.
    pub fn difference(&self, earlier: &Self) -> Vec<String> {
        let more = self.items.difference(&earlier.items).map(|item| format!("left behind: {item}"));
        let less = earlier.items.difference(&self.items).map(|item| format!("gone: {item}"));
        more.chain(less).collect()
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

fn own_namespaces() -> impl Iterator<Item = String> {
    let entries = fs::read_dir(DIRECTORY).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| owner(name) == Some(std::process::id()))
}

/// Inodes of the namespaces of this process that exist.
fn own_inodes() -> BTreeSet<u64> {
    own_namespaces().filter_map(|name| Some(fs::metadata(Path::new(DIRECTORY).join(name)).ok()?.ino())).collect()
}

/// Inodes of network namespaces that processes are in. The kernel gives the inode of one that is gone to a new one, which may be
/// another process's.
fn used_inodes() -> BTreeSet<u64> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| Some(fs::metadata(process.path().join("ns/net")).ok()?.ino())).collect()
}

fn own_children() -> impl Iterator<Item = String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    processes.filter(|&process| parent(process) == Some(std::process::id())).map(|process| process.to_string())
}

/// The parent of a process: the second field after its name, which is in parentheses and may hold anything
/// (proc_pid_stat(5)).
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Files in directories with these names (inodes of namespaces), and the directories themselves.
fn pinned(directory: &Path, own: &BTreeSet<String>, inside: bool, items: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_own = inside || entry.file_name().to_str().is_some_and(|name| own.contains(name));
        if is_own {
            items.insert(format!("pinned {}", entry.path().display()));
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pinned(&entry.path(), own, is_own, items);
        }
    }
}

//! A network namespace that only this process holds.
//!
//! The kernel deletes a namespace's interfaces with its last user, so they go when the process ends, however it ends. A
//! veth pair with one end in it goes too, with every route through it.

use std::fs::File;
use std::io;

use nix::sched::{CloneFlags, setns, unshare};

/// The namespace; it lives as long as this value.
#[derive(Debug)]
pub(super) struct PrivateNetns {
    inside: File,
}

/// Keeps the calling thread inside; dropping it returns the thread to its previous namespace.
#[derive(Debug)]
pub struct NetnsGuard {
    outside: File,
}

impl PrivateNetns {
    /// Makes an empty namespace. Needs CAP_SYS_ADMIN.
    pub(super) fn new() -> io::Result<Self> {
        let outside = namespace()?;
        unshare(CloneFlags::CLONE_NEWNET)?;
        let back = NetnsGuard { outside };
        let private_netns = Self { inside: namespace()? };
        drop(back);
        Ok(private_netns)
    }

    pub(super) fn file(&self) -> &File {
        &self.inside
    }

    /// Moves the calling thread inside. Sockets that it opens and interfaces that it names then belong to the
    /// namespace.
    pub(super) fn enter(&self) -> io::Result<NetnsGuard> {
        let outside = namespace()?;
        setns(&self.inside, CloneFlags::CLONE_NEWNET)?;
        Ok(NetnsGuard { outside })
    }
}

impl Drop for NetnsGuard {
    fn drop(&mut self) {
        // Otherwise the thread would continue in the wrong namespace and take its contents for the node's.
        setns(&self.outside, CloneFlags::CLONE_NEWNET).expect("a thread may return to its previous namespace");
    }
}

fn namespace() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

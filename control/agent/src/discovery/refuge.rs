//! A network namespace that only this process has.
//!
//! What is in it goes when the process does, however it ends: the kernel takes a namespace's interfaces away with its
//! last user. A veth pair with one end in here is gone then, and every route that led into it.

use std::fs::File;
use std::io;

use nix::sched::{CloneFlags, setns, unshare};

/// The namespace; held as long as this lives.
#[derive(Debug)]
pub(super) struct Refuge {
    inside: File,
}

/// The calling thread is inside; it is back where it was when this is dropped.
#[derive(Debug)]
pub struct Inside {
    outside: File,
}

impl Refuge {
    /// Makes an empty namespace. Needs CAP_SYS_ADMIN.
    pub(super) fn new() -> io::Result<Self> {
        let outside = namespace()?;
        unshare(CloneFlags::CLONE_NEWNET)?;
        let back = Inside { outside };
        let refuge = Self { inside: namespace()? };
        drop(back);
        Ok(refuge)
    }

    /// Its descriptor.
    pub(super) fn file(&self) -> &File {
        &self.inside
    }

    /// Puts the calling thread inside. Sockets that it opens and interfaces that it names are the namespace's then.
    pub(super) fn enter(&self) -> io::Result<Inside> {
        let outside = namespace()?;
        setns(&self.inside, CloneFlags::CLONE_NEWNET)?;
        Ok(Inside { outside })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // The thread would go on in a namespace that is not its own, and take what it finds there for the node.
        setns(&self.outside, CloneFlags::CLONE_NEWNET).expect("a thread may return to the namespace that it came from");
    }
}

/// The calling thread's namespace.
fn namespace() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

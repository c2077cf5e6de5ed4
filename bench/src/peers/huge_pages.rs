//! Huge pages that are free while a daemon starts.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::MEMORY;
use crate::testbed::CleanupGuard;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Number of 2 MiB pages in a UMEM.
const PAGES: usize = MEMORY / 2;

/// Huge pages reserved in addition to those of the kernel's pool. Dropping this restores the pool's size; pages still
/// in use are freed when their owner unmaps them.
pub(super) struct HugePages {
    free: usize,
    _guard: CleanupGuard,
}

impl HugePages {
    /// Reserves as many as a UMEM takes.
    pub(super) fn reserve() -> Result<Self> {
        let before = number(POOL, &fs::read_to_string(POOL)?)?;
        let guard = CleanupGuard::new(move || drop(fs::write(POOL, before.to_string())));
        fs::write(POOL, (before + PAGES).to_string()).with_context(|| format!("cannot set {POOL}"))?;
        let free = free()?;
        ensure!(free >= PAGES, "the kernel has no room for {PAGES} huge pages; {free} are free");
        Ok(Self { free, _guard: guard })
    }

    /// Verifies that a UMEM uses them.
    pub(super) fn were_taken(self) -> Result<()> {
        let free = free()?;
        ensure!(self.free >= free + PAGES, "of {} huge pages {free} are still free: the daemon took none", self.free);
        Ok(())
    }
}

fn free() -> Result<usize> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    number("HugePages_Free", line.context("this kernel has no huge pages")?)
}

fn number(name: &str, text: &str) -> Result<usize> {
    text.trim().parse().with_context(|| format!("{name} is {text:?}, which is no number"))
}

//! What the kernel says of the programs that a daemon has loaded.

use std::fs;

use anyhow::{Context, Result};
use nix::unistd::Pid;
use penstock_bench::testbed::CleanupGuard;

const SETTING: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// The kernel counts and times each run of a program.
pub(crate) struct Statistics {
    _guard: CleanupGuard,
}

impl Statistics {
    pub(crate) fn on() -> Result<Self> {
        let before = fs::read_to_string(SETTING)?;
        fs::write(SETTING, "1").context("cannot have the kernel time programs")?;
        Ok(Self { _guard: CleanupGuard::new(move || drop(fs::write(SETTING, before))) })
    }
}

/// Nanoseconds and number of all runs so far.
pub(crate) struct ProgramRuns {
    nanoseconds: u64,
    runs: u64,
}

impl ProgramRuns {
    /// Of all programs that a process has open.
    pub(crate) fn of(process: Pid) -> Result<Self> {
        let (mut sum, mut seen) = (Self { nanoseconds: 0, runs: 0 }, Vec::new());
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))?.flatten() {
            let Ok(text) = fs::read_to_string(entry.path()) else { continue };
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
            let (Some(program), Some(nanoseconds), Some(runs)) =
                (field("prog_id:"), field("run_time_ns:"), field("run_cnt:"))
            else {
                continue;
            };
            if !seen.contains(&program) {
                seen.push(program);
                (sum.nanoseconds, sum.runs) = (sum.nanoseconds + nanoseconds, sum.runs + runs);
            }
        }
        Ok(sum)
    }

    pub(crate) fn since(&self, before: &Self) -> (f64, f64) {
        ((self.nanoseconds - before.nanoseconds) as f64, (self.runs - before.runs) as f64)
    }
}

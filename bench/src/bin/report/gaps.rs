//! Scheduling gaps: intervals in which the machine does not run a spinning thread. No packet can be faster than these.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::host::on_each;

/// Shortest interval between two clock reads that counts as a gap.
const GAP: Duration = Duration::from_millis(1);
/// How long the threads spin.
const LOOK: Duration = Duration::from_secs(1);

/// Scheduling gaps of one thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Gaps {
    count: u32,
    longest: Duration,
}

/// Reads the clock in a loop.
fn look() -> Gaps {
    let mut gaps = Gaps::default();
    let begin = Instant::now();
    let mut last = begin;
    while last - begin < LOOK {
        let now = Instant::now();
        let gap = now - last;
        gaps.count += u32::from(gap >= GAP);
        (gaps.longest, last) = (gaps.longest.max(gap), now);
    }
    gaps
}

/// Runs a thread on each of these cores at the same time; returns a sentence for each.
pub(crate) fn on(cores: &[usize]) -> Result<String> {
    let told = cores.iter().zip(on_each(cores, look)?).map(|(core, gaps)| {
        format!(
            "core {core}: {} of 1 ms or more in a second, the longest {:.1} ms",
            gaps.count,
            gaps.longest.as_secs_f64() * 1e3
        )
    });
    Ok(told.collect::<Vec<_>>().join("; "))
}

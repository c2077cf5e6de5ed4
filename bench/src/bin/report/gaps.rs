//! What the machine takes from threads that do nothing but look at the clock: no packet can be quicker than that.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::host::on_each;

/// How long a look at the clock takes too long.
const GAP: Duration = Duration::from_millis(1);
/// How long the threads look.
const LOOK: Duration = Duration::from_secs(1);

/// The times in which a thread did not get to look at the clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Gaps {
    count: u32,
    longest: Duration,
}

/// Looks at the clock and at nothing else.
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

/// A thread on each of these cores at the same time; what they saw in a sentence each.
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

//! How busy the machine's cores were.

use std::time::Duration;

use anyhow::{Context, Result};

/// The time that each core has not been idle since the machine started, by core.
///
/// The kernel tells it in hundredths of a second, time in interrupts included.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CoreTimes(Vec<Duration>);

impl CoreTimes {
    /// Reads it now.
    pub fn read() -> Result<Self> {
        parse(&std::fs::read_to_string("/proc/stat")?)
    }

    /// How long each core was busy since `earlier`.
    pub fn since(&self, earlier: &Self) -> Vec<Duration> {
        self.0.iter().zip(&earlier.0).map(|(now, then)| now.saturating_sub(*then)).collect()
    }
}

/// A line for each core: its name, then user, nice, system, idle, iowait, irq, softirq and steal (proc_stat(5)).
fn parse(text: &str) -> Result<CoreTimes> {
    let is_core = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    let busy = |line: &str| -> Result<Duration> {
        let fields: Vec<u64> = line.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
        let [user, nice, system, _idle, _iowait, irq, softirq, ..] = fields.as_slice() else {
            anyhow::bail!("/proc/stat has a line that is not understood: {line}");
        };
        Ok(Duration::from_millis((user + nice + system + irq + softirq) * 10))
    };
    let times: Result<Vec<Duration>> = text.lines().filter(is_core).map(busy).collect();
    times.map(CoreTimes).context("cannot tell how busy the cores are")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_and_the_line_of_all_cores_are_left_out() {
        let then =
            parse("cpu 9 9 9 9 9 9 9 9\ncpu0 1 2 3 400 50 6 7 8 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n").unwrap();
        let now =
            parse("cpu 9 9 9 9 9 9 9 9\ncpu0 2 2 4 900 60 7 8 9 0 0\ncpu1 1 0 0 5 0 0 0 0 0 0\nintr 5\n").unwrap();
        assert_eq!(now.since(&then), [Duration::from_millis(40), Duration::from_millis(10)]);
    }
}

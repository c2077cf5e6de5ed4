//! CPU time of each core: busy, and stolen by the hypervisor.

use std::time::Duration;

use anyhow::{Context, Result};

/// Per core since boot: time not idle, and time that the host of a virtual machine gave to others while the core had
/// work.
///
/// The kernel reports it in units of 10 ms; time in interrupts is included.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CoreTimes(Vec<CoreTime>);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct CoreTime {
    busy: Duration,
    stolen: Duration,
}

impl CoreTimes {
    pub fn read() -> Result<Self> {
        parse(&std::fs::read_to_string("/proc/stat")?)
    }

    /// How long each core was busy since `earlier`.
    pub fn since(&self, earlier: &Self) -> Vec<Duration> {
        self.0.iter().zip(&earlier.0).map(|(now, then)| now.busy.saturating_sub(then.busy)).collect()
    }

    /// Time stolen from all cores together since `earlier`.
    pub fn stolen_since(&self, earlier: &Self) -> Duration {
        self.0.iter().zip(&earlier.0).map(|(now, then)| now.stolen.saturating_sub(then.stolen)).sum()
    }

    /// Stolen share of all cores' time since `earlier`, which was `took` ago; from 0 to 1.
    pub fn stolen_share(&self, earlier: &Self, took: Duration) -> f64 {
        self.stolen_since(earlier).as_secs_f64() / (took.as_secs_f64() * self.0.len() as f64)
    }
}

/// Parses one line per core: name, then user, nice, system, idle, iowait, irq, softirq and steal (proc_stat(5)).
fn parse(text: &str) -> Result<CoreTimes> {
    let is_core = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    let time = |line: &str| -> Result<CoreTime> {
        let fields: Vec<u64> = line.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
        let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = fields.as_slice() else {
            anyhow::bail!("/proc/stat has a line that is not understood: {line}");
        };
        let hundredths = |ticks: u64| Duration::from_millis(ticks * 10);
        Ok(CoreTime { busy: hundredths(user + nice + system + irq + softirq), stolen: hundredths(*steal) })
    };
    let times: Result<Vec<CoreTime>> = text.lines().filter(is_core).map(time).collect();
    times.map(CoreTimes).context("cannot read the cores' busy time")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_and_the_total_line_are_ignored() {
        let then =
            parse("cpu 9 9 9 9 9 9 9 9\ncpu0 1 2 3 400 50 6 7 8 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n").unwrap();
        let now =
            parse("cpu 9 9 9 9 9 9 9 9\ncpu0 2 2 4 900 60 7 8 9 0 0\ncpu1 1 0 0 5 0 0 0 0 0 0\nintr 5\n").unwrap();
        assert_eq!(now.since(&then), [Duration::from_millis(40), Duration::from_millis(10)]);
        assert_eq!(now.stolen_since(&then), Duration::from_millis(10));
        assert!((now.stolen_share(&then, Duration::from_millis(50)) - 0.1).abs() < 1e-9);
    }
}

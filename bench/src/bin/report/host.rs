//! Interference by the host of a virtual machine: cores that it takes away or slows down.
//!
//! The kernel counts time in which a core is not scheduled as stolen. A core that shares its execution units with
//! another machine runs at about half speed, which nothing counts; a calibrated piece of work shows it.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use penstock_bench::load::{CoreTimes, pin, raise_priority};
use penstock_bench::peers::Cores;

const LOOK: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_millis(8);
/// Speed measurements at the start. The best one counts as full speed until a better one is seen.
const FIRST_LOOKS: u32 = 50;
/// Share of the full speed from which a core counts as undisturbed.
const WHOLE: f64 = 0.85;

/// The measured cores and their full speed.
pub(crate) struct Host {
    cores: [usize; 2],
    /// Rounds of the calibrated work per second.
    fastest: f64,
}

/// Interference of the host during a measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct HostInterference {
    /// Stolen time of the cores, in percent.
    pub(crate) stolen: f64,
    /// Speed of the slower core in percent of its full speed, before or after: the lower of both.
    pub(crate) speed: f64,
}

impl HostInterference {
    /// Degree of interference; 0 if it is negligible.
    pub(crate) fn degree(&self) -> f64 {
        let slow = if self.speed < 100.0 * WHOLE { 100.0 - self.speed } else { 0.0 };
        self.stolen + slow
    }
}

impl Host {
    /// Measures how fast the two cores are without interference.
    pub(crate) fn new(cores: Cores) -> Result<Self> {
        let mut host = Self { cores: [cores.generator, cores.worker], fastest: 0.0 };
        for _ in 0..FIRST_LOOKS {
            host.speed()?;
            thread::sleep(PAUSE);
        }
        Ok(host)
    }

    /// Current speed of the slower core in percent of the full speed.
    fn speed(&mut self) -> Result<f64> {
        let looked = on_each(&self.cores, work)?;
        Ok(self.share_of_fastest(&looked))
    }

    /// The slower of these in percent of the fastest seen so far, these included.
    fn share_of_fastest(&mut self, looked: &[f64]) -> f64 {
        self.fastest = looked.iter().copied().fold(self.fastest, f64::max);
        100.0 * looked.iter().copied().fold(f64::INFINITY, f64::min) / self.fastest
    }

    /// Waits until both cores are undisturbed, at most for `limit`; returns how long it waited.
    pub(crate) fn wait_until_whole(&mut self, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        while self.speed()? < 100.0 * WHOLE && began.elapsed() < limit {
            thread::sleep(PAUSE);
        }
        Ok(began.elapsed())
    }

    /// Runs `work` and measures the host's interference meanwhile.
    pub(crate) fn watch<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<(T, HostInterference)> {
        let (before, cores, began) = (self.speed()?, CoreTimes::read()?, Instant::now());
        let value = work()?;
        let stolen = 100.0 * CoreTimes::read()?.stolen_share(&cores, began.elapsed());
        Ok((value, HostInterference { stolen, speed: before.min(self.speed()?) }))
    }
}

/// Runs `work` on each of these cores at the same time, at high priority.
pub(crate) fn on_each<T: Send>(cores: &[usize], work: impl Fn() -> T + Sync) -> Result<Vec<T>> {
    let on = |core| -> Result<T> {
        pin(core)?;
        raise_priority()?;
        Ok(work())
    };
    thread::scope(|scope| {
        let on = &on;
        let threads: Vec<_> = cores.iter().map(|&core| scope.spawn(move || on(core))).collect();
        threads.into_iter().map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Rounds per second of work that keeps a core's execution units busy and needs no memory.
fn work() -> f64 {
    let (begin, mut rounds) = (Instant::now(), 0.0);
    let mut state = [1_u64; 8];
    loop {
        for _ in 0..500 {
            for (index, number) in state.iter_mut().enumerate() {
                *number = number.wrapping_mul(5).wrapping_add(index as u64);
            }
        }
        black_box(&mut state);
        rounds += 1.0;
        let elapsed = begin.elapsed();
        if elapsed >= LOOK {
            return rounds / elapsed.as_secs_f64();
        }
    }
}

/// Shortest interval between two clock reads that counts as a gap.
const GAP: Duration = Duration::from_millis(1);
const SPIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct SchedulingGaps {
    count: u32,
    longest: Duration,
}

fn spin() -> SchedulingGaps {
    let mut gaps = SchedulingGaps::default();
    let begin = Instant::now();
    let mut last = begin;
    while last - begin < SPIN {
        let now = Instant::now();
        let gap = now - last;
        gaps.count += u32::from(gap >= GAP);
        (gaps.longest, last) = (gaps.longest.max(gap), now);
    }
    gaps
}

/// Runs a thread on each of these cores at the same time; returns a sentence for each.
pub(crate) fn scheduling_gaps(cores: &[usize]) -> Result<String> {
    let sentences = cores.iter().zip(on_each(cores, spin)?).map(|(core, gaps)| {
        format!(
            "core {core}: {} of 1 ms or more in a second, the longest {:.1} ms",
            gaps.count,
            gaps.longest.as_secs_f64() * 1e3
        )
    });
    Ok(sentences.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interference_is_stolen_time_or_a_significant_slowdown() {
        for (stolen, speed, degree) in [(0.0, 100.0, 0.0), (0.0, 86.0, 0.0), (0.0, 52.0, 48.0), (2.0, 60.0, 42.0)] {
            assert_eq!(HostInterference { stolen, speed }.degree(), degree);
        }
    }

    #[test]
    fn the_slower_core_is_compared_with_the_fastest_measurement() {
        let mut host = Host { cores: [0, 1], fastest: 0.0 };
        for (looked, share) in [([10.0, 8.0], 80.0), ([20.0, 5.0], 25.0), ([10.0, 10.0], 50.0)] {
            assert_eq!(host.share_of_fastest(&looked), share, "{looked:?}");
        }
    }

    #[test]
    fn the_calibrated_work_runs_on_both_cores() {
        let cores = Cores::first_two().unwrap();
        let done = on_each(&[cores.generator, cores.worker], || (nix::sched::sched_getcpu().unwrap(), work())).unwrap();
        assert_eq!([done[0].0, done[1].0], [cores.generator, cores.worker]);
        assert!(done.iter().all(|&(_, rounds)| rounds > 0.0), "{done:?}");
    }
}

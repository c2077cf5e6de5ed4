//! What the host of a virtual machine leaves to it: all of its cores' time and speed, or a part.
//!
//! Time that a core is not given at all the kernel counts as stolen. A core that shares its execution units with another
//! machine's runs on, about half as fast, and nothing counts that: a piece of work of known length tells.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use penstock_bench::load::{CoreTimes, go_first, pin};
use penstock_bench::peers::Cores;

/// How long a look at the speed takes.
const LOOK: Duration = Duration::from_millis(2);
/// Between two looks of one who waits.
const PAUSE: Duration = Duration::from_millis(8);
/// Looks at the start, the best of which is taken for full speed; a later one that is better replaces it.
const FIRST_LOOKS: u32 = 50;
/// Share of the full speed from which on a core counts as whole.
const WHOLE: f64 = 0.85;

/// The cores that are measured on, and what they can do.
pub(crate) struct Host {
    cores: [usize; 2],
    /// Rounds of the known work in a second.
    fastest: f64,
}

/// What the host kept from this machine during a measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Kept {
    /// Percentage of the cores' time that it took.
    pub(crate) stolen: f64,
    /// Percentage of their full speed that the slower of the two had, before or after: the less of both.
    pub(crate) speed: f64,
}

impl Kept {
    /// How much that is; 0 if it is nothing worth mentioning.
    pub(crate) fn degree(&self) -> f64 {
        let slow = if self.speed < 100.0 * WHOLE { 100.0 - self.speed } else { 0.0 };
        self.stolen + slow
    }
}

impl Host {
    /// Sees how fast the two cores are when nobody else has a part of them.
    pub(crate) fn new(cores: Cores) -> Result<Self> {
        let mut host = Self { cores: [cores.generator, cores.worker], fastest: 0.0 };
        for _ in 0..FIRST_LOOKS {
            host.speed()?;
            thread::sleep(PAUSE);
        }
        Ok(host)
    }

    /// The speed of the slower core now, as a percentage of the full one.
    fn speed(&mut self) -> Result<f64> {
        let looked = on_each(&self.cores, work)?;
        Ok(self.share_of_fastest(&looked))
    }

    /// The slower of these as a percentage of the fastest seen so far, these included.
    fn share_of_fastest(&mut self, looked: &[f64]) -> f64 {
        self.fastest = looked.iter().copied().fold(self.fastest, f64::max);
        100.0 * looked.iter().copied().fold(f64::INFINITY, f64::min) / self.fastest
    }

    /// Waits until both cores are whole, at most until `limit` is over; how long it waited.
    pub(crate) fn wait_until_whole(&mut self, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        while self.speed()? < 100.0 * WHOLE && began.elapsed() < limit {
            thread::sleep(PAUSE);
        }
        Ok(began.elapsed())
    }

    /// Does something, and sees what the host kept meanwhile.
    pub(crate) fn watch<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<(T, Kept)> {
        let (before, cores, began) = (self.speed()?, CoreTimes::read()?, Instant::now());
        let value = work()?;
        let stolen = 100.0 * CoreTimes::read()?.stolen_share(&cores, began.elapsed());
        Ok((value, Kept { stolen, speed: before.min(self.speed()?) }))
    }
}

/// Does something on each of these cores at the same time, before what else runs there.
pub(crate) fn on_each<T: Send>(cores: &[usize], work: impl Fn() -> T + Sync) -> Result<Vec<T>> {
    let on = |core| -> Result<T> {
        pin(core)?;
        go_first()?;
        Ok(work())
    };
    thread::scope(|scope| {
        let on = &on;
        let threads: Vec<_> = cores.iter().map(|&core| scope.spawn(move || on(core))).collect();
        threads.into_iter().map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Rounds a second of something that keeps a core's execution units busy and needs no memory.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_time_and_more_than_a_little_speed() {
        for (stolen, speed, degree) in [(0.0, 100.0, 0.0), (0.0, 86.0, 0.0), (0.0, 52.0, 48.0), (2.0, 60.0, 42.0)] {
            assert_eq!(Kept { stolen, speed }.degree(), degree);
        }
    }

    #[test]
    fn the_slower_core_is_compared_with_the_fastest_look_of_either() {
        let mut host = Host { cores: [0, 1], fastest: 0.0 };
        for (looked, share) in [([10.0, 8.0], 80.0), ([20.0, 5.0], 25.0), ([10.0, 10.0], 50.0)] {
            assert_eq!(host.share_of_fastest(&looked), share, "{looked:?}");
        }
    }

    #[test]
    fn the_known_work_is_done_on_both_cores() {
        let cores = Cores::first_two().unwrap();
        let done = on_each(&[cores.generator, cores.worker], || (nix::sched::sched_getcpu().unwrap(), work())).unwrap();
        assert_eq!([done[0].0, done[1].0], [cores.generator, cores.worker]);
        assert!(done.iter().all(|&(_, rounds)| rounds > 0.0), "{done:?}");
    }
}

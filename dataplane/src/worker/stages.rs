//! Cost of the stages of a poll iteration; one iteration in many is timed.

use super::statistics::Counter;
use crate::clocks;
use crate::pipeline::StageClocks;

/// Iterations with packets between two timed ones. A timed one reads the clock more than ten times, a few hundred
/// clocks in total, which is a few clocks per iteration. Those are not included in the result.
const INTERVAL: u32 = 64;
/// Clocks above which an iteration was interrupted: the system or the hypervisor took the core away in between.
const INTERRUPTED: u64 = 1 << 22;

/// Stages of packet processing, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// Reading descriptors from RX rings.
    RingRead,
    /// Parsing, source checks, prefetching the connection table.
    Parse,
    /// Finding, updating and opening connections.
    Connection,
    /// Evaluating policy.
    Policy,
    /// Finding the next hop and rewriting headers.
    Rewrite,
    /// Everything else outside of system calls: descriptors for TX and fill rings, completed frames, counters.
    RingWrite,
    /// The system calls that make the kernel send.
    Send,
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = 7;
    /// All stages, in order.
    pub const ALL: [Self; Self::COUNT] =
        [Self::RingRead, Self::Parse, Self::Connection, Self::Policy, Self::Rewrite, Self::RingWrite, Self::Send];

    /// Its name in statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RingRead => "ring_read",
            Self::Parse => "parse",
            Self::Connection => "connection",
            Self::Policy => "policy",
            Self::Rewrite => "rewrite",
            Self::RingWrite => "ring_write",
            Self::Send => "send",
        }
    }
}

/// Sums over the timed iterations; written only by the worker.
#[derive(Default, Debug)]
pub(crate) struct StageCounters {
    packets: Counter,
    interrupted: Counter,
    clocks: [Counter; Stage::COUNT],
}

/// Sums over the timed iterations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageStatistics {
    /// Packets received in them.
    pub packets: u64,
    /// Timed iterations that are not included because the core was taken away in between.
    pub interrupted: u64,
    clocks: [u64; Stage::COUNT],
}

impl StageStatistics {
    /// Clocks of a stage: ticks of the CPU's time stamp counter, or nanoseconds without one.
    pub fn clocks(&self, stage: Stage) -> u64 {
        self.clocks[stage as usize]
    }
}

impl StageCounters {
    pub(crate) fn read(&self) -> StageStatistics {
        let clocks = Stage::ALL.map(|stage| self.clocks[stage as usize].get());
        StageStatistics { packets: self.packets.get(), interrupted: self.interrupted.get(), clocks }
    }

    /// Adds an iteration that took `total` clocks.
    fn add(&self, iteration: &TimedIteration, total: u64) {
        if total >= INTERRUPTED {
            self.interrupted.add(1);
            return;
        }
        self.packets.add(iteration.packets);
        for (counter, clocks) in self.clocks.iter().zip(iteration.clocks) {
            counter.add(clocks);
        }
        let named: u64 = iteration.clocks.iter().sum();
        self.clocks[Stage::RingWrite as usize]
            .add(total.saturating_sub(named + iteration.clock_reads * iteration.read_clock));
    }
}

/// A timed poll iteration.
#[derive(Default)]
pub(super) struct TimedIteration {
    start: u64,
    packets: u64,
    /// Without the cost of reading the clock.
    clocks: [u64; Stage::COUNT],
    /// Clock reads since the start, and the cost of each.
    clock_reads: u64,
    read_clock: u64,
}

impl TimedIteration {
    /// Reads the clock and counts the read.
    pub(super) fn read_clock(&mut self) -> u64 {
        self.clock_reads += 1;
        clocks::now()
    }

    /// Adds a batch: the clocks of reading it from the ring, one clock read included, and those of its stages.
    pub(super) fn received(&mut self, packets: usize, ring_read: u64, stages: StageClocks) {
        self.packets += packets as u64;
        let StageClocks { parse, connection, policy, rewrite, evaluations } = stages;
        self.clock_reads += 4 + 2 * evaluations;
        let times = [
            (Stage::RingRead, ring_read, 1),
            (Stage::Parse, parse, 1),
            (Stage::Connection, connection, 1 + evaluations),
            (Stage::Policy, policy, evaluations),
            (Stage::Rewrite, rewrite, 1),
        ];
        for (stage, clocks, clock_reads) in times {
            self.clocks[stage as usize] += clocks.saturating_sub(clock_reads * self.read_clock);
        }
    }

    /// Calls `send`, and times it if the iteration is timed.
    #[inline]
    pub(super) fn send_in<T>(iteration: &mut Option<Self>, send: impl FnOnce() -> T) -> T {
        match iteration {
            None => send(),
            Some(iteration) => iteration.send(send),
        }
    }

    fn send<T>(&mut self, send: impl FnOnce() -> T) -> T {
        let before = self.read_clock();
        let result = send();
        let took = self.read_clock().saturating_sub(before);
        self.clocks[Stage::Send as usize] += took.saturating_sub(self.read_clock);
        result
    }
}

/// Selects the iterations to be timed.
pub(super) struct StageTimer {
    on: bool,
    until_next: u32,
    /// Cost of a clock read.
    read_clock: u64,
}

impl StageTimer {
    pub(super) fn new(on: bool) -> Self {
        Self { on, until_next: INTERVAL, read_clock: clocks::cost_of_a_read() }
    }

    /// Begins an iteration.
    #[inline]
    pub(super) fn begin(&mut self) -> Option<TimedIteration> {
        let due = self.on && self.until_next == 0;
        due.then(|| TimedIteration { read_clock: self.read_clock, start: clocks::now(), ..TimedIteration::default() })
    }

    /// Ends an iteration. One without packets does not count: the next one is timed instead.
    #[inline]
    pub(super) fn end(&mut self, iteration: Option<TimedIteration>, busy: bool, counters: &StageCounters) {
        match iteration {
            Some(mut iteration) if iteration.packets > 0 => {
                let total = iteration.read_clock().saturating_sub(iteration.start);
                counters.add(&iteration, total);
                self.until_next = INTERVAL;
            }
            Some(_) => {}
            None => self.until_next = self.until_next.saturating_sub(u32::from(busy)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_iteration_in_many_is_timed_and_its_stages_add_up() {
        let (mut timer, counters) = (StageTimer::new(true), StageCounters::default());
        let mut timed = 0;
        for _ in 0..10 * (INTERVAL + 1) {
            let mut iteration = timer.begin();
            if let Some(iteration) = &mut iteration {
                timed += 1;
                let stages = StageClocks { parse: 1000, connection: 2000, policy: 0, rewrite: 4000, evaluations: 0 };
                iteration.received(8, 5000, stages);
                iteration.send(|| {
                    let began = clocks::now();
                    while clocks::now() < began + 1000 {}
                });
            }
            timer.end(iteration, true, &counters);
        }
        let read = counters.read();
        assert_eq!((timed, read.packets + 8 * read.interrupted), (10, 80));
        let counted = read.packets / 8;
        let stages = [Stage::RingRead, Stage::Parse, Stage::Connection, Stage::Policy, Stage::Rewrite];
        let alone = [5000, 1000, 2000, 0, 4000_u64].map(|clocks| clocks.saturating_sub(timer.read_clock) * counted);
        assert_eq!(stages.map(|stage| read.clocks(stage)), alone);
        assert!(read.clocks(Stage::Send) >= 900 * counted);
    }

    #[test]
    fn iterations_without_packets_are_not_counted_and_disabled_timing_counts_none() {
        for on in [true, false] {
            let (mut timer, counters) = (StageTimer::new(on), StageCounters::default());
            for _ in 0..3 * INTERVAL {
                let iteration = timer.begin();
                assert!(on || iteration.is_none());
                timer.end(iteration, true, &counters);
            }
            assert_eq!(counters.read(), StageStatistics::default());
        }
    }

    #[test]
    fn the_cost_of_clock_reads_is_excluded() {
        let counters = StageCounters::default();
        let mut iteration = TimedIteration { read_clock: 20, ..TimedIteration::default() };
        // Before and after reading a ring.
        iteration.read_clock();
        iteration.read_clock();
        iteration.received(
            8,
            100,
            StageClocks { parse: 200, connection: 300, policy: 130, rewrite: 50, evaluations: 3 },
        );
        let total = 1000;
        counters.add(&iteration, total);
        let read = counters.read();
        let stages = [Stage::RingRead, Stage::Parse, Stage::Connection, Stage::Policy, Stage::Rewrite];
        let alone = [80, 180, 300 - 4 * 20, 130 - 3 * 20, 30];
        assert_eq!(stages.map(|stage| read.clocks(stage)), alone);
        // Two around reading the ring, four around the stages, six around three policy evaluations.
        assert_eq!(read.clocks(Stage::RingWrite), total - alone.iter().sum::<u64>() - 12 * 20);
    }

    #[test]
    fn an_interrupted_iteration_is_not_counted() {
        let counters = StageCounters::default();
        counters.add(&TimedIteration { packets: 3, ..TimedIteration::default() }, INTERRUPTED);
        assert_eq!(counters.read(), StageStatistics { interrupted: 1, ..StageStatistics::default() });
    }
}

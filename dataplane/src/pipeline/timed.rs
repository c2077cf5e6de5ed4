//! Measures the stages of a batch, for one batch in many.

use crate::clocks;

/// Clocks of the stages of a batch, on the CPU's time stamp counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageClocks {
    /// Parsing, source checks, and prefetching the connection table.
    pub parse: u64,
    /// Finding, updating and opening connections.
    pub connection: u64,
    /// Evaluating policy.
    pub policy: u64,
    /// Finding the next hop and rewriting headers.
    pub rewrite: u64,
    /// Number of policy evaluations. Each cost two clock reads, one included in `policy` and one in `connection`. The
    /// other fields include one clock read each.
    pub evaluations: u64,
}

/// Notified between the stages. `()` measures nothing and costs nothing.
pub(super) trait StageTimer {
    /// Whether the whole batch goes through a stage before the next one, so that the clock is read once per stage and
    /// not once per packet. It costs a copy of what the stage has found.
    const WHOLE_BATCH: bool = false;

    /// The batch's packets are parsed.
    #[inline(always)]
    fn parsed(&mut self) {}

    /// Policy is about to be evaluated.
    #[inline(always)]
    fn before_evaluation(&mut self) {}

    /// Policy was evaluated.
    #[inline(always)]
    fn evaluated(&mut self) {}

    /// The batch's connections are found or opened.
    #[inline(always)]
    fn tracked(&mut self) {}

    /// The batch's packets have their verdicts.
    #[inline(always)]
    fn dispatched(&mut self) {}
}

impl StageTimer for () {}

/// Reads the clock between the stages.
pub(super) struct StageStopwatch {
    last: u64,
    evaluation: u64,
    clocks: StageClocks,
}

impl StageStopwatch {
    pub(super) fn start() -> Self {
        Self { last: clocks::now(), evaluation: 0, clocks: StageClocks::default() }
    }

    /// What it measured. A packet's connection is found around the evaluation of policy.
    pub(super) fn clocks(self) -> StageClocks {
        let StageClocks { connection, policy, .. } = self.clocks;
        StageClocks { connection: connection.saturating_sub(policy), ..self.clocks }
    }

    fn lap(&mut self) -> u64 {
        let now = clocks::now();
        now.saturating_sub(std::mem::replace(&mut self.last, now))
    }
}

impl StageTimer for StageStopwatch {
    const WHOLE_BATCH: bool = true;

    fn parsed(&mut self) {
        self.clocks.parse += self.lap();
    }

    fn before_evaluation(&mut self) {
        self.evaluation = clocks::now();
    }

    fn evaluated(&mut self) {
        self.clocks.policy += clocks::now().saturating_sub(self.evaluation);
        self.clocks.evaluations += 1;
    }

    fn tracked(&mut self) {
        self.clocks.connection += self.lap();
    }

    fn dispatched(&mut self) {
        self.clocks.rewrite += self.lap();
    }
}

//! The processor's own clock: the cheapest there is, for what takes less than a microsecond.

/// Clocks of the time stamp counter since some moment. Differences of one thread's are what they are for.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: every x86_64 processor has the instruction, and the kernel does not forbid it to user programs.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Nanoseconds since the first call, where there is no counter that user programs may read.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn now() -> u64 {
    use std::sync::LazyLock;
    use std::time::Instant;
    static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
    FIRST.elapsed().as_nanos() as u64
}

/// What a look at the clock takes, in clocks: the median of many, since some are interrupted and some overlap.
pub(crate) fn cost_of_a_look() -> u64 {
    let mut looks = [0; 1001];
    for look in &mut looks {
        let before = now();
        *look = now().saturating_sub(before);
    }
    let (_, median, _) = looks.select_nth_unstable(500);
    *median
}

//! The CPU's time stamp counter: the cheapest clock for durations below a microsecond.

/// Current value of the time stamp counter. Only differences within one thread are meaningful.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: every x86_64 CPU has the instruction, and the kernel permits it in user mode.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Nanoseconds since the first call, on architectures without a counter readable in user mode.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn now() -> u64 {
    use std::sync::LazyLock;
    use std::time::Instant;
    static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
    FIRST.elapsed().as_nanos() as u64
}

/// Cost of a clock read in clocks: the median of many, since some are interrupted and some overlap.
pub(crate) fn cost_of_a_read() -> u64 {
    let mut looks = [0; 1001];
    for read in &mut looks {
        let before = now();
        *read = now().saturating_sub(before);
    }
    let (_, median, _) = looks.select_nth_unstable(500);
    *median
}

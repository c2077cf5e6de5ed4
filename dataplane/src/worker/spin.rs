//! How long a worker spins without a packet before it sleeps.

use std::time::Duration;

/// The spin time. It grows while packets come soon after the worker fell asleep, as KVM's halt polling does
/// (`kvm_vcpu_halt`, virt/kvm/kvm_main.c): a wake-up costs a packet more than the spinning costs the core. A longer pause takes it
/// back to the shortest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spin {
    shortest: Duration,
    current: Duration,
    has_slept: bool,
}

/// The longest spin time, in shortest ones.
const LONGEST: u32 = 4;

impl Spin {
    pub(super) fn new(shortest: Duration) -> Self {
        Self { shortest, current: shortest, has_slept: false }
    }

    /// Whether to sleep, this long after the last packet.
    #[inline]
    pub(super) fn is_over(&self, idle: Duration) -> bool {
        idle >= self.current
    }

    pub(super) fn slept(&mut self) {
        self.has_slept = true;
    }

    /// A packet came this long after the last one.
    #[inline]
    pub(super) fn received(&mut self, idle: Duration) {
        if std::mem::take(&mut self.has_slept) {
            let longest = LONGEST * self.shortest;
            self.current = if idle < longest { longest.min(2 * self.current) } else { self.shortest };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_micros(50);

    /// The spin time after packets that came so many microseconds apart.
    fn after(pauses: &[u64]) -> u128 {
        let mut spin = Spin::new(SHORTEST);
        for pause in pauses.iter().copied().map(Duration::from_micros) {
            if spin.is_over(pause) {
                spin.slept();
            }
            spin.received(pause);
        }
        spin.current.as_micros()
    }

    #[test]
    fn it_grows_up_to_fourfold_while_packets_come_soon() {
        for (pauses, expected) in [
            (&[][..], 50),
            (&[49; 9], 50),
            (&[50], 100),
            (&[199], 100),
            (&[60, 90, 99], 100),
            (&[60, 100], 200),
            (&[60, 100, 199], 200),
            (&[200], 50),
            (&[60, 100, 200], 50),
            (&[60, 1_000_000], 50),
        ] {
            assert_eq!(after(pauses), expected, "{pauses:?}");
        }
    }

    #[test]
    fn a_worker_that_is_not_to_spin_never_does() {
        let mut spin = Spin::new(Duration::ZERO);
        for _ in 0..3 {
            assert!(spin.is_over(Duration::ZERO));
            spin.slept();
            spin.received(Duration::ZERO);
        }
    }
}

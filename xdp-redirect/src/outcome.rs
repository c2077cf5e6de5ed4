//! Counters of packets in the tc programs, by outcome.

use libbpf_rs::{MapCore, MapFlags};
use penstock_dataplane::ProgramOutcome;

/// Packets by outcome since the program was attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProgramOutcomeCounts([u64; ProgramOutcome::COUNT]);

impl ProgramOutcomeCounts {
    /// Reads and sums the per-CPU counters.
    pub(crate) fn read(map: &impl MapCore) -> Result<Self, libbpf_rs::Error> {
        let mut total = Self::default();
        for &outcome in ProgramOutcome::ALL {
            let key = u32::from(outcome as u8).to_ne_bytes();
            let per_cpu = map.lookup_percpu(&key, MapFlags::ANY)?.unwrap_or_default();
            total.0[outcome as usize] =
                per_cpu.iter().filter_map(|value| Some(u64::from_ne_bytes(value.get(..8)?.try_into().ok()?))).sum();
        }
        Ok(total)
    }

    /// Packets with this outcome.
    pub fn get(&self, outcome: ProgramOutcome) -> u64 {
        self.0[outcome as usize]
    }

    /// Each outcome with its packets.
    pub fn iter(&self) -> impl Iterator<Item = (ProgramOutcome, u64)> + '_ {
        ProgramOutcome::ALL.iter().map(|outcome| (*outcome, self.get(*outcome)))
    }

    /// All packets that the program saw.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

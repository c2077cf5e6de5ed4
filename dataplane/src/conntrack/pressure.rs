//! Shares that are nearly used up: what has ended gives its entry back sooner.
//!
//! A pod that opens thousands of connections a second fills its share with what has ended, since a connection in TIME_WAIT stays for two
//! minutes. Workers replace such entries one by one. But a share without room has no credit, and the programs open none of its connections
//! (`repeat`). So from three quarters of a share on, timeouts of what has ended, and of datagrams with one answer, shrink, until at seven eighths
//! two seconds are left, as pf's do (`adaptive.start` and `adaptive.end` in pf.conf(5)). The kernel's connection tracking gives up closing connections
//! before their time, too, when its table is nearly full (`gc_worker_can_early_drop` in net/netfilter/nf_conntrack_core.c).

use super::entry::{OwnerId, SlotRef};
use super::state::{EvictionClass, State};
use super::table::ConnTable;
use super::time::Tick;

/// Timeouts shrink once less room than this part of a share is left, and no further at half of it.
const LAST: u32 = 4;
/// Ticks that remain of a timeout at least, two seconds: for what is sent again, or was on its way.
const LEAST: u32 = 4;

impl ConnTable {
    /// Whether this connection gives its entry back before its time, for the sake of its owner's credit.
    pub(super) fn gives_way(&self, (slot, control): SlotRef, now: Tick) -> bool {
        let entry = self.entry(slot);
        if self.repeats_for.is_none() || !control.is_live() || control.is_revoked() {
            return false;
        }
        let Some(room) = self.last_room(entry.owner()) else { return false };
        let protocol = entry.protocol();
        let current = self.current(protocol, (slot, control));
        let state = State::of(protocol, current).map(State::eviction_class);
        let is_over = matches!(state, Some(EvictionClass::Closing | EvictionClass::Answered));
        is_over && self.is_idle((slot, control), room.shortened(self.timeout_ticks.of(protocol, current)), now)
    }

    /// The room in an owner's share, once it is less than the last quarter.
    fn last_room(&self, owner: OwnerId) -> Option<LastRoom> {
        let (limit, counted) = (self.limit(), self.counted(owner));
        let room = LastRoom { left: limit.saturating_sub(counted), of: limit / LAST };
        (room.left < room.of).then_some(room)
    }
}

/// So many connections are left of so many.
#[derive(Clone, Copy, Debug)]
struct LastRoom {
    left: u32,
    of: u32,
}

impl LastRoom {
    /// The rest of a timeout, in ticks.
    fn shortened(self, timeout: u32) -> u32 {
        let (above, half) = (self.left.saturating_sub(self.of / 2), self.of - self.of / 2);
        let part = u64::from(timeout) * u64::from(above) / u64::from(half);
        timeout.min(LEAST.max(part as u32))
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn timeouts_shrink_with_the_room_that_is_left() {
        for (left, of, timeout, expected) in [
            (99, 100, 240, 235),
            (75, 100, 240, 120),
            (51, 100, 240, LEAST),
            (50, 100, 240, LEAST),
            (0, 100, 240, LEAST),
            (0, 1, 240, LEAST),
            (0, 100, 2, 2),
            ((1 << 30) - 1, 1 << 30, u32::MAX, u32::MAX - 8),
        ] {
            assert_eq!(LastRoom { left, of }.shortened(timeout), expected, "{left} of {of}");
        }
    }
}

//! Going through the table: expiry in small steps, listings, and removal of all that a pod leaves behind.

use std::time::Duration;

use super::counters::Event;
use super::entry::{EpochTag, Loaded, OwnerId};
use super::hash::key_of;
use super::state::State;
use super::table::ConnTable;
use super::tags::{LANES, bits};
use super::time::{TICK, Timestamp};
use crate::packet::{Address, Flow};
use crate::snapshot::Epoch;

/// Where a sweep goes on. Several sweeps may run at once, each with its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SweepCursor {
    group: u32,
}

/// What one step of a sweep did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Swept {
    /// Entries passed over, free ones included.
    pub examined: usize,
    /// Connections removed because their timeout had passed.
    pub expired: usize,
    /// Whether the sweep has come to the table's end and begins anew.
    pub wrapped: bool,
}

/// A connection in a listing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// The flow of the packet that opened it.
    pub original: Flow,
    /// Its state.
    pub state: State,
    /// Whose quota it counts against.
    pub owner: OwnerId,
    /// How long ago its last packet was, to within a second.
    pub idle: Duration,
    /// How much longer it is kept without another packet, to within a second.
    pub expires_in: Duration,
}

impl ConnTable {
    /// Removes expired connections among the next `steps` entries (rounded up to a whole group), and takes the epoch from
    /// those whose epoch is so old, as of `epoch`, that its number may come again: policy is asked about them at their next
    /// packet.
    ///
    /// A million entries take some 30 ms; swept every few seconds in steps of a few hundred between batches, a
    /// connection outlives its timeout by no more than one round, and is not found meanwhile.
    pub fn sweep(&self, cursor: &mut SweepCursor, steps: usize, now: Timestamp, epoch: Epoch) -> Swept {
        let (now, epoch) = (now.tick(), EpochTag::of(epoch));
        let mut swept = Swept::default();
        while swept.examined < steps {
            let group = cursor.group % self.groups;
            for slot in self.occupied(group) {
                let control = self.entry(slot).control();
                swept.expired += usize::from(self.expire(slot, control, now));
                if control.is_live() && control.epoch().is_stale(epoch) {
                    // If it fails, a packet was just there, and policy was asked.
                    let unasked = control.with_verdict(EpochTag::NONE, !control.is_revoked());
                    let _ = self.entry(slot).exchange(control, unasked);
                }
            }
            swept.examined += LANES as usize;
            cursor.group = group + 1;
            if cursor.group == self.groups {
                cursor.group = 0;
                swept.wrapped = true;
                break;
            }
        }
        swept
    }

    /// The connections in the table, in no order. One that comes or goes meanwhile may or may not be among them.
    pub fn iter(&self, now: Timestamp) -> impl Iterator<Item = Connection> + '_ {
        (0..self.groups).flat_map(|group| self.occupied(group)).filter_map(move |slot| {
            let Loaded { control, key, owner, .. } = self.entry(slot).load()?;
            let key = key_of(&key);
            let (age, lifetime) = (control.tick().age(now.tick()), self.lifetimes.of(key.protocol, control));
            (control.is_live() && age <= lifetime).then_some(())?;
            Some(Connection {
                original: key.flow(control.original()),
                state: State::of(key.protocol, control)?,
                owner,
                idle: TICK * age,
                expires_in: TICK * (lifetime - age),
            })
        })
    }

    /// Removes all connections of an owner; how many there were. For a pod that goes.
    ///
    /// A worker that is just entering one may do so after this has passed by: publish a snapshot without the pod
    /// first, and such an entry is of an older epoch, and is judged again at its next packet.
    pub fn remove_owner(&self, owner: OwnerId) -> usize {
        self.remove_where(|_, found| found == owner)
    }

    /// Removes all connections that have one of these addresses on either end; how many there were. For addresses that
    /// may come back as another pod's. What is said of [`ConnTable::remove_owner`] holds here too.
    pub fn remove_addresses(&self, addresses: &[Address]) -> usize {
        self.remove_where(|flow, _| addresses.contains(&flow.src) || addresses.contains(&flow.dst))
    }

    fn remove_where(&self, mut unwanted: impl FnMut(&Flow, OwnerId) -> bool) -> usize {
        let mut removed = 0;
        for slot in (0..self.groups).flat_map(|group| self.occupied(group)) {
            // Until it is gone or another's: a packet may touch it in between.
            while let Some(Loaded { control, key, owner, .. }) = self.entry(slot).load()
                && control.is_live()
                && unwanted(&key_of(&key).flow(control.original()), owner)
            {
                if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                    self.release(slot, control);
                    removed += 1;
                }
            }
        }
        self.counters.add(Event::Removed, removed as u64);
        removed
    }

    /// The entries of a group that have a tag.
    pub(super) fn occupied(&self, group: u32) -> impl Iterator<Item = u32> + use<> {
        bits(self.tags(group).used_lanes()).map(move |lane| group * LANES + lane)
    }
}

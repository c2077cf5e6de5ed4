//! Table walks: incremental expiry, listings, and removal of a pod's connections.

use std::time::Duration;

use super::counters::TableEvent;
use super::ended::in_order;
use super::entry::{EntrySnapshot, EpochTag, OwnerId};
use super::hash::key_of;
use super::journal::Ending;
use super::path::{ForwardedConnection, KernelUse, Traffic};
use super::state::{State, TcpState};
use super::table::ConnTable;
use super::tags::{LANES, bits};
use super::time::{TICK, Timestamp};
use crate::epoch::Epoch;
use crate::packet::{Address, Flow, Protocol, TcpFlags};

/// Position of a sweep. Several sweeps may run at once, each with its own cursor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SweepCursor {
    group: u32,
}

/// Result of one step of a sweep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SweepResult {
    /// Entries examined, free ones included.
    pub examined: usize,
    /// Connections removed by their timeout, or before it.
    pub expired: usize,
    /// Whether the sweep reached the end of the table and starts again.
    pub wrapped: bool,
}

/// A connection in a listing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The flow of the packet that opened it.
    pub original: Flow,
    /// Whether its packets traverse the node's own stack.
    pub via_host: bool,
    /// Whose source the node's stack has translated: who opened it, `Some(None)` if that is not known.
    pub opener: Option<Option<Address>>,
    pub state: State,
    /// Owner whose quota it counts against.
    pub owner: OwnerId,
    /// Time since its last packet, to within a second.
    pub idle: Duration,
    /// Time until it expires without another packet, to within a second.
    pub expires_in: Duration,
    /// The opener's traffic, and the other end's; `None` where the table [counts](ConnTable::counts) nothing.
    pub traffic: Option<[Traffic; 2]>,
    /// When it was opened; `None`: by an earlier process, or without [`Config::ended`](super::Config::ended).
    pub begun: Option<Timestamp>,
    /// The flags of all TCP segments that workers forwarded, with [`Config::ended`](super::Config::ended).
    pub flags: TcpFlags,
}

impl ConnTable {
    /// Removes expired connections among the next `steps` entries (rounded up to a whole group), and of an owner whose share is
    /// nearly used up those that have ended before their time. Clears the epoch tag
    /// of entries that are so far behind `epoch` that the tag may be reused; policy is evaluated again at their next
    /// packet.
    ///
    /// A million entries take some 30 ms. With a sweep every few seconds, in steps of a few hundred between batches, a
    /// connection outlives its timeout by at most one round, and is not found meanwhile.
    pub fn sweep(&self, cursor: &mut SweepCursor, steps: usize, now: Timestamp, epoch: Epoch) -> SweepResult {
        let (now, epoch) = (now.tick(), EpochTag::of(epoch));
        let mut swept = SweepResult::default();
        while swept.examined < steps {
            let group = cursor.group % self.groups;
            for slot in self.occupied(group) {
                let control = self.entry(slot).control();
                let gives_way = || self.gives_way((slot, control), now) && self.end(slot, control);
                swept.expired += usize::from(self.expire(slot, control, now) || gives_way());
                if let Some(uses) = self.uses() {
                    uses[slot as usize].clear_stale(control.generation(), epoch);
                }
                if control.is_live() && control.epoch().is_stale(epoch) {
                    // If it fails, a packet was just processed, and policy was evaluated.
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

    /// The connections of the table, in no order. One that is inserted or removed meanwhile may or may not be included.
    pub fn iter(&self, now: Timestamp) -> impl Iterator<Item = ConnectionInfo> + '_ {
        (0..self.groups).flat_map(|group| self.occupied(group)).filter_map(move |slot| {
            let EntrySnapshot { control, key, owner, .. } = self.entry(slot).load()?;
            let key = key_of(&key);
            let current = self.current(key.protocol, (slot, control));
            let (age, lifetime) = (control.tick().age(now.tick()), self.timeout_ticks.of(key.protocol, current));
            let age = self.kernel_age(slot, now.tick()).map_or(age, |kernel| age.min(kernel));
            let (begun, flags) = self.beside(slot);
            (control.is_live() && age <= lifetime).then_some(())?;
            Some(ConnectionInfo {
                original: key.flow(control.original()),
                via_host: control.is_via_host(),
                opener: self.opener_at((slot, control)),
                state: State::of(key.protocol, current)?,
                owner,
                idle: TICK * age,
                expires_in: TICK * (lifetime - age),
                traffic: self.uses().map(|uses| in_order(uses[slot as usize].traffic(), control.original())),
                begun,
                flags,
            })
        })
    }

    /// Gives established TCP connections, and then UDP connections, that the kernel's programs forward the verdict of `epoch`,
    /// where `is_kept` finds them allowed and their path unchanged: none of their packets has to meet a worker for it. Others
    /// stay as they are: a worker evaluates them at their next packet. Ends early when `is_late`. Returns how many were kept.
    ///
    /// It looks only at groups that have had such a connection. One that is missed, since it was just forwarded for the first
    /// time, meets a worker.
    pub(crate) fn keep_forwarded(
        &self,
        epoch: Epoch,
        mut is_late: impl FnMut() -> bool,
        mut is_kept: impl FnMut(&ForwardedConnection) -> bool,
    ) -> usize {
        const GROUPS_BETWEEN_CLOCKS: usize = 64;
        const SLOTS_BETWEEN_CLOCKS: usize = 32;
        let Some(uses) = self.uses() else { return 0 };
        let (tag, mut kept, mut datagrams) = (EpochTag::of(epoch), 0, Vec::new());
        for (index, group) in self.offloaded.iter().enumerate() {
            if index % GROUPS_BETWEEN_CLOCKS == 0 && is_late() {
                return kept;
            }
            if self.tags(group).is_empty() {
                self.offloaded.remove(group);
                continue;
            }
            for slot in self.occupied(group) {
                match self.keep_slot(uses, slot, tag, Protocol::TCP, &mut is_kept) {
                    Err(Protocol::UDP) => datagrams.push(slot),
                    Err(_) => {}
                    Ok(is_kept) => kept += usize::from(is_kept),
                }
            }
        }
        // Last: the next segments of TCP overtake those that a worker cuts up.
        for slots in datagrams.chunks(SLOTS_BETWEEN_CLOCKS) {
            if is_late() {
                break;
            }
            for slot in slots {
                kept += usize::from(self.keep_slot(uses, *slot, tag, Protocol::UDP, &mut is_kept) == Ok(true));
            }
        }
        kept
    }

    /// Gives one connection of this protocol the verdict of an epoch, where `is_kept` finds it allowed. An error is the protocol
    /// that the connection has instead.
    fn keep_slot(
        &self,
        uses: &[KernelUse],
        slot: u32,
        tag: EpochTag,
        protocol: Protocol,
        is_kept: &mut impl FnMut(&ForwardedConnection) -> bool,
    ) -> Result<bool, Protocol> {
        let Some(EntrySnapshot { control, key, .. }) = self.entry(slot).load() else { return Ok(false) };
        let key = key_of(&key);
        if key.protocol != protocol {
            return Err(key.protocol);
        }
        let current = self.current(protocol, (slot, control));
        let is_open = match protocol {
            Protocol::TCP => current.is_in(TcpState::Established as u8),
            _ => !current.is_revoked(),
        };
        if !current.is_live() || !is_open || control.epoch().covers(tag) {
            return Ok(false);
        }
        let Some((path, ends)) = uses[slot as usize].path_under(control.epoch()) else { return Ok(false) };
        let original = control.original();
        let found = ForwardedConnection {
            original: key.flow(original),
            ends: [ends[original as usize], ends[original.opposite() as usize]],
            via_host: control.is_via_host(),
        };
        // If it fails, a packet has just come, and has met a worker.
        let is_kept = is_kept(&found) && self.entry(slot).exchange(control, control.with_verdict(tag, true)).is_ok();
        if is_kept {
            uses[slot as usize].renew(path, tag);
        }
        Ok(is_kept)
    }

    /// Removes all connections of an owner when its pod is removed; returns how many.
    ///
    /// A worker may insert one after this has passed its group. Publish a snapshot without the pod first: such an entry
    /// then has an older epoch and is evaluated again at its next packet.
    pub fn remove_owner(&self, owner: OwnerId) -> usize {
        self.remove_where(|_, found| found == owner)
    }

    /// Removes all connections with one of these addresses on either end; returns how many. For addresses that may be
    /// reused by another pod. The remark at [`ConnTable::remove_owner`] applies here too.
    pub fn remove_addresses(&self, addresses: &[Address]) -> usize {
        self.remove_where(|flow, _| addresses.contains(&flow.src) || addresses.contains(&flow.dst))
    }

    fn remove_where(&self, mut unwanted: impl FnMut(&Flow, OwnerId) -> bool) -> usize {
        let mut removed = 0;
        for slot in (0..self.groups).flat_map(|group| self.occupied(group)) {
            // Repeat until it is removed or replaced: a packet may update it in between.
            while let Some(EntrySnapshot { control, key, owner, .. }) = self.entry(slot).load()
                && control.is_live()
                && unwanted(&key_of(&key).flow(control.original()), owner)
            {
                if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                    self.release(slot, control, Ending::Removed);
                    removed += 1;
                }
            }
        }
        self.counters.add(TableEvent::Removed, removed as u64);
        removed
    }

    /// The used entries of a group.
    pub(super) fn occupied(&self, group: u32) -> impl Iterator<Item = u32> + use<> {
        let tags = self.tags(group);
        bits(if tags.is_empty() { 0 } else { tags.used_lanes() }).map(move |lane| group * LANES + lane)
    }
}

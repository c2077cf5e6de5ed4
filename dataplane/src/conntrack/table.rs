//! The table: lookup and insertion.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering as CountOrdering};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::affinity::AffinityTable;
use super::config::{Config, MidStreamPickup, TimeoutTicks};
use super::conn::Conn;
use super::counters::{ConnTableStatistics, Counters, TableEvent};
use super::entry::{ControlWord, EntryContents, EpochTag, OwnerId, TableEntry};
use super::fragments::Fragments;
use super::groups::GroupSet;
use super::hash::{NO_HINT, PreparedFlow, Seed, alternate, home};
#[cfg(all(test, feature = "loom"))]
use super::interleavings::storage::Storage;
use super::journal::{Ending, Journal};
#[cfg(not(all(test, feature = "loom")))]
use super::mapping::Storage;
use super::origin::{OpenError, TableOrigin};
use super::path::{KernelUse, Noted};
use super::shared::SharedMaps;
use super::state::{State, TcpState};
use super::sync::{Ordering, fence};
use super::tags::{LANES, Tags, bits};
use super::tcp::Window;
use super::time::{Tick, Timestamp};
use super::track;
use crate::epoch::Epoch;
use crate::packet::{Flow, Protocol, TcpFlags, Transport};
use crate::prefetch::prefetch;

/// The connections of all workers. See the [module](super) for its guarantees.
pub struct ConnTable {
    pub(super) storage: Storage,
    pub(super) seed: Seed,
    pub(super) groups: u32,
    pub(super) timeout_ticks: TimeoutTicks,
    pub(super) counters: Counters,
    pub(super) origin: TableOrigin,
    /// Number of connections of each owner.
    owners: Box<[AtomicU32]>,
    /// Number of connections of all owners. It may be off by the few that are being inserted or removed.
    total: CachePadded<AtomicU32>,
    fragments: Fragments,
    affinities: AffinityTable,
    entries: u32,
    quota: u32,
    midstream_pickup: MidStreamPickup,
    /// Whether published epochs are those of the kernel's programs ([`ConnTable::take_over`]).
    is_published: AtomicBool,
    /// The groups that may have a connection which the kernel's programs forward.
    pub(super) offloaded: GroupSet,
    /// Counts of connections, where the storage has none and records are wanted.
    counted: Option<Box<[KernelUse]>>,
    /// Where those that end are noted.
    pub(super) journal: Option<Journal>,
    /// How long programs may open connections by themselves after the process has ended; `None`: they open none.
    pub(super) repeats_for: Option<Duration>,
    /// The first event that is of this process.
    pub(super) first_event: u64,
}

/// A connection to insert.
#[derive(Clone, Copy, Debug)]
pub struct NewConnection<'a> {
    /// The prepared flow of the first packet; its direction becomes the original one, but for an [answer](Self::is_answer).
    pub hashed: &'a PreparedFlow,
    /// The first packet.
    pub transport: &'a Transport,
    /// Owner whose quota it counts against.
    pub owner: OwnerId,
    /// Whether the packet is of the answering side, of a connection that is picked up in mid-stream: the other direction is the
    /// original one.
    pub is_answer: bool,
    /// Whether its packets traverse the node's own stack, in both directions.
    pub via_host: bool,
    /// The snapshot under which policy allowed it.
    pub epoch: Epoch,
    /// Current time.
    pub now: Timestamp,
}

/// Result of [`ConnTable::insert`].
pub enum Insertion<'t> {
    /// The connection was inserted, with the state of its first packet.
    Created(Conn<'t>),
    /// It was inserted by another thread meanwhile: handle it as if it had been found.
    Found(Conn<'t>),
}

/// Why a connection was not inserted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum InsertError {
    /// Both of its groups are full of connections that cannot be evicted.
    #[error("the connection table is full")]
    Full,
    /// Its owner is at its quota, and nothing in its groups can be evicted.
    #[error("the owner's share of the connection table is used up")]
    Quota,
    /// Such a packet cannot open a connection.
    #[error("the packet cannot open a connection")]
    CannotOpen,
}

/// A slot and the control word under which this thread saw or claimed it.
pub(super) type SlotRef = (u32, ControlWord);

/// Where a packet's connection is. The pipeline decides by it before it has the whole [`Conn`].
#[derive(Clone, Copy)]
pub(crate) struct ConnPlace {
    slot: u32,
    control: ControlWord,
}

impl ConnPlace {
    /// Whether it is one of the two entries of a connection to a Service.
    #[inline(always)]
    pub(crate) fn is_translated(self) -> bool {
        self.control.is_translated()
    }
}

/// Number of owners that are counted.
pub(super) const OWNERS: usize = if cfg!(all(test, feature = "loom")) { 4 } else { 1 << 16 };

/// Share that an owner always has (and at least one connection), as long as there is any room.
const SMALL_SHARE: u32 = 1024;

/// If the home group has more entries than this, new ones go to the alternate group if that has fewer. Below it entries
/// are in the group that is searched first.
const CROWDED: u32 = LANES * 3 / 4;

impl ConnTable {
    /// Creates a table of the configured size, in memory or in the configured file.
    ///
    /// # Errors
    /// An invalid setting, no memory, or a file that cannot be opened. A file that is damaged or not a table of this
    /// size and version is not an error: it is replaced, which [`ConnTable::origin`] reports.
    pub fn new(config: &Config) -> Result<Self, OpenError> {
        config.check()?;
        let groups = group_count(config.entries);
        let (storage, seed, origin) = Storage::open(groups, &config.memory)?;
        let capacity = storage.entries().len();
        let counts_itself = config.ended > 0 && storage.uses().is_none();
        let mut table = Self {
            counted: counts_itself.then(|| (0..capacity).map(|_| KernelUse::new()).collect()),
            journal: Journal::new(config.ended, capacity),
            // A table that was found may have them anywhere.
            offloaded: GroupSet::all(groups),
            storage,
            seed,
            groups,
            timeout_ticks: TimeoutTicks::new(&config.timeouts),
            counters: Counters::new(),
            origin,
            owners: (0..OWNERS).map(|_| AtomicU32::new(0)).collect(),
            total: CachePadded::new(AtomicU32::new(0)),
            fragments: Fragments::new(),
            affinities: AffinityTable::new(config.entries),
            entries: config.entries as u32,
            quota: config.quota(),
            midstream_pickup: config.midstream_pickup,
            is_published: AtomicBool::new(origin != TableOrigin::Found),
            repeats_for: config.repeats.filter(|_| config.ended == 0),
            first_event: 0,
        };
        if let Some(shared) = table.storage.shared() {
            shared.set_timeouts(table.timeout_ticks.of_kernel());
            if origin == TableOrigin::Found {
                shared.stop_repeats();
            }
            table.first_event = shared.repeats().sent();
        }
        if origin == TableOrigin::Found {
            table.recover();
            if let MidStreamPickup::AfterLoss(_) = table.midstream_pickup {
                table.midstream_pickup = MidStreamPickup::Never;
            }
        }
        Ok(table)
    }

    /// When a mid-stream packet may open a connection: as configured, or never where connections outlast the process.
    pub fn midstream_pickup(&self) -> MidStreamPickup {
        self.midstream_pickup
    }

    /// How the table was obtained.
    pub fn origin(&self) -> &TableOrigin {
        &self.origin
    }

    /// Capacity in entries; slightly more than configured.
    pub fn capacity(&self) -> usize {
        self.storage.entries().len()
    }

    /// Bytes of the table: entries, tags, links and openers.
    pub fn memory(&self) -> usize {
        let uses = self.uses().map_or(0, size_of_val);
        let storage = &self.storage;
        let beside = size_of_val(storage.links()) + size_of_val(storage.openers());
        size_of_val(storage.entries()) + size_of_val(storage.tags()) + beside + uses
    }

    /// Whether programs in the kernel read the table.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.storage.shared().is_some()
    }

    /// What was forwarded of each entry's connection, if that is counted.
    #[inline]
    pub(super) fn uses(&self) -> Option<&[KernelUse]> {
        self.storage.uses().or(self.counted.as_deref())
    }

    /// Whether packets and bytes of each connection are counted.
    #[inline]
    pub fn counts(&self) -> bool {
        self.is_shared() || self.counted.is_some()
    }

    /// The epoch that the last process published to the kernel's programs: this one's must be later.
    pub fn last_epoch(&self) -> Epoch {
        self.storage.shared().map_or(Epoch::default(), SharedMaps::epoch)
    }

    /// A snapshot of this epoch is published: from now on the kernel's programs forward no packet of a connection that
    /// was evaluated under an older one. If the table was found, only after [`ConnTable::take_over`]. Returns whether they
    /// read it.
    pub fn publish_epoch(&self, epoch: Epoch) -> bool {
        match self.storage.shared() {
            Some(shared) if self.is_taken_over() => {
                shared.set_epoch(epoch);
                true
            }
            _ => false,
        }
    }

    /// The workers have policy and ports: from now on published epochs are those of the kernel's programs, and what the last
    /// process allowed ends with the next one.
    pub fn take_over(&self) {
        self.is_published.store(true, CountOrdering::SeqCst);
    }

    pub(super) fn is_taken_over(&self) -> bool {
        self.is_published.load(CountOrdering::SeqCst)
    }

    /// Counts a packet that a worker forwards, `bytes` long from the IP header on, with these `flags` if it is a TCP segment.
    /// `path`: it has evaluated the packet under
    /// this epoch, and sends it from the first interface to the second (0: the node's stack); the kernel's programs may
    /// forward the next ones of this direction as long as that is the epoch. `knows_answers`: asked for a packet that opens a
    /// connection, which traverses the node's stack or not, whether answers go back from the second interface to the first; then the
    /// programs may forward these, too. `may_repeat`: asked after that, whether they may open the next connections that differ in the opener's
    /// port alone. If the table [counts](Self::counts) nothing, it does nothing.
    pub fn forwarded(
        &self,
        hashed: &PreparedFlow,
        bytes: u16,
        flags: TcpFlags,
        path: Option<((u32, u32), Epoch)>,
        knows_answers: impl FnOnce(bool) -> bool,
        may_repeat: impl FnOnce() -> bool,
    ) {
        let Some(uses) = self.uses() else { return };
        let Some((slot, control)) = self.lookup(hashed) else {
            return self.journal.iter().for_each(Journal::miss);
        };
        let kernel_use = &uses[slot as usize];
        kernel_use.count(hashed.orientation, bytes);
        if let Some(journal) = &self.journal {
            journal.see(slot, flags);
        }
        let Some((ends, snapshot)) = path else { return };
        let (epoch, mut are_known) = (EpochTag::of(snapshot), false);
        let knows_answers = || {
            let is_opener = hashed.orientation == control.original() && control.is_in(State::Unreplied.code());
            are_known = is_opener && knows_answers(control.is_via_host());
            are_known
        };
        let is_taken = kernel_use.take_path(hashed.orientation, ends, epoch, knows_answers, || {
            let now = self.entry(slot).control();
            now.is_same_generation(control) && now.epoch() == epoch && !now.is_revoked()
        });
        if is_taken {
            self.offloaded.insert(slot / LANES);
        }
        let is_plain = !control.is_via_host() && !control.is_translated();
        if is_taken && are_known && is_plain && self.repeats_for.is_some() && may_repeat() {
            self.leave_answer(hashed, ends, snapshot, self.entry(slot).owner());
        }
    }

    /// Number of connections; it may be off by the few that are being inserted or removed.
    pub fn len(&self) -> usize {
        self.total.load(CountOrdering::Relaxed).saturating_sub(self.credit()) as usize
    }

    /// Whether the table holds no connection.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of connections of this owner.
    pub fn len_of(&self, owner: OwnerId) -> u32 {
        self.counted(owner).saturating_sub(self.credit_of(owner))
    }

    /// The same with the connections that programs may open for it.
    pub(super) fn counted(&self, owner: OwnerId) -> u32 {
        self.owner(owner).load(CountOrdering::Relaxed)
    }

    /// Counters since the table was created.
    pub fn statistics(&self) -> ConnTableStatistics {
        self.counters.statistics()
    }

    /// Fragmented datagrams.
    pub fn fragments(&self) -> &Fragments {
        &self.fragments
    }

    /// Clients of Services with affinity that have an entry, valid or not any more, and how many can have one. Walks all
    /// entries.
    pub fn affinity_entries(&self) -> (usize, usize) {
        self.affinities().usage()
    }

    /// Clients' backends of Services with affinity.
    pub(crate) fn affinities(&self) -> &AffinityTable {
        &self.affinities
    }

    /// Prepares a flow: hashes it and prefetches the tags of its group. With a batch, prepare all packets first, then
    /// [`ConnTable::locate`] all, then [`ConnTable::find`].
    #[inline(always)]
    pub fn prepare(&self, flow: &Flow) -> PreparedFlow {
        let hashed = PreparedFlow::new(&self.seed, flow);
        prefetch(self.tags(home(hashed.hash, self.groups)));
        hashed
    }

    /// An id for the connection of a flow, the same for both directions and for the lifetime of the table, for use in
    /// logs. Consecutive connections between the same ends have the same id. Different ones collide with a probability
    /// of 2⁻⁶⁴ per pair. It is derived with a separate secret and reveals nothing about the connection's position in
    /// the table, so logs do not help to choose colliding connections.
    pub fn connection_id(&self, flow: &Flow) -> u64 {
        self.seed.name(flow)
    }

    /// Compares the tags of a prepared flow and prefetches the candidate entry. Optional: it saves [`ConnTable::find`]
    /// the memory latency if enough other work lies between the two.
    #[inline(always)]
    pub fn locate(&self, hashed: &mut PreparedFlow) {
        let group = home(hashed.hash, self.groups);
        let lanes = self.tags(group).lanes_with(hashed.tag());
        if lanes == 0 {
            prefetch(self.tags(alternate(hashed.hash, self.groups)));
        } else {
            hashed.hint = group * LANES + lanes.trailing_zeros();
            prefetch(self.entry(hashed.hint));
        }
    }

    /// The connection of this packet, in either direction. Expired ones are not found.
    #[inline(always)]
    pub fn find(&self, hashed: &PreparedFlow, now: Timestamp) -> Option<Conn<'_>> {
        self.find_place(hashed, now).map(|place| self.connection(hashed, place))
    }

    /// Where the connection of this packet is.
    #[inline(always)]
    pub(crate) fn find_place(&self, hashed: &PreparedFlow, now: Timestamp) -> Option<ConnPlace> {
        let (slot, control) = self.lookup(hashed)?;
        if self.is_expired(hashed.protocol(), (slot, control), now.tick()) {
            return None;
        }
        Some(ConnPlace { slot, control })
    }

    /// The connection that was found for this packet.
    #[inline(always)]
    pub(crate) fn connection(&self, hashed: &PreparedFlow, place: ConnPlace) -> Conn<'_> {
        Conn::new(self, hashed, place.slot, place.control)
    }

    /// The connection of the packet quoted by an ICMP error. Its state is not changed.
    pub fn related(&self, quoted: &Flow, now: Timestamp) -> Option<Conn<'_>> {
        self.find(&self.prepare(quoted), now)
    }

    /// Inserts a connection. If two workers insert the same one concurrently, from either direction, one entry remains.
    ///
    /// # Errors
    /// Why it was rejected; each reason is counted.
    pub fn insert(&self, new: &NewConnection<'_>) -> Result<Insertion<'_>, InsertError> {
        self.insert_flagged(new, false)
    }

    /// [`ConnTable::insert`], with the flag of translated connections or without.
    pub(super) fn insert_flagged(
        &self,
        new: &NewConnection<'_>,
        is_translated: bool,
    ) -> Result<Insertion<'_>, InsertError> {
        let hashed = new.hashed;
        let now = new.now.tick();
        let midstream_pickup = self.allows_pickup(new.owner, new.now);
        let opening = track::open(hashed.protocol(), hashed.orientation, new.transport, midstream_pickup, now);
        let Some((state, tracking)) = opening else {
            self.counters.count(TableEvent::RefusedCannotOpen);
            return Err(InsertError::CannotOpen);
        };
        let contents = EntryContents { owner: new.owner, tracking };
        let original = if new.is_answer { hashed.orientation.opposite() } else { hashed.orientation };
        loop {
            if let Some((slot, control)) = self.lookup(hashed) {
                if control.is_translated() && self.partner((slot, control)).is_none() {
                    self.remove_entry((slot, control), Ending::Evicted, None);
                    continue;
                }
                if !self.is_expired(hashed.protocol(), (slot, control), new.now.tick()) {
                    self.counters.count(TableEvent::Raced);
                    return Ok(Insertion::Found(Conn::new(self, hashed, slot, control)));
                }
                // Check again whether it was removed or updated, or another thread is removing it.
                self.expire(slot, control, now);
                continue;
            }
            let (slot, claimed) = self.make_room(new)?;
            let epoch = EpochTag::of(new.epoch);
            let control = ControlWord::tentative(claimed, state.code(), original, epoch, now);
            let control = control.with_via_host(new.via_host).with_translated(is_translated);
            if let Some(journal) = &self.journal {
                journal.begin(slot, new.now);
            }
            self.publish((slot, control), hashed, contents);
            match self.confirm_one(hashed, (slot, control)) {
                Some((winner, found)) if winner == slot && found.is_same_generation(control) => {
                    return Ok(Insertion::Created(Conn::new(self, hashed, slot, found)));
                }
                Some((winner, found)) => {
                    self.counters.count(TableEvent::Raced);
                    return Ok(Insertion::Found(Conn::new(self, hashed, winner, found)));
                }
                None => self.counters.count(TableEvent::Retried),
            }
        }
    }

    /// Whether a mid-stream packet may currently open a connection for this owner.
    fn allows_pickup(&self, owner: OwnerId, now: Timestamp) -> bool {
        let is_time = match self.midstream_pickup {
            MidStreamPickup::Never => false,
            MidStreamPickup::AfterLoss(end) | MidStreamPickup::Until(end) => now < end,
            MidStreamPickup::Always => true,
        };
        is_time && self.len_of(owner) < (self.limit() / 2).max(1)
    }

    /// A claimed entry for a new connection, counted for its owner.
    pub(super) fn make_room(&self, new: &NewConnection<'_>) -> Result<SlotRef, InsertError> {
        let now = new.now.tick();
        let limit = self.limit();
        if self.count(new.owner) >= limit {
            let Some((slot, claimed)) = self.evict(new.hashed, Some(new.owner), now) else {
                self.uncount(new.owner);
                self.counters.count(TableEvent::RefusedQuota);
                return Err(InsertError::Quota);
            };
            // The table has filled up since its owner got so many connections: evict one more of them.
            if self.counted(new.owner) > self.limit()
                && let Some((slot, claimed)) = self.evict(new.hashed, Some(new.owner), now)
            {
                self.entry(slot).free(claimed);
            }
            let group = slot / LANES;
            if group == home(new.hashed.hash, self.groups) || group == alternate(new.hashed.hash, self.groups) {
                return Ok((slot, claimed));
            }
            self.entry(slot).free(claimed);
        }
        let found = self.claim_free(new.hashed).or_else(|| self.evict(new.hashed, None, now));
        found.ok_or_else(|| {
            self.uncount(new.owner);
            self.counters.count(TableEvent::RefusedFull);
            InsertError::Full
        })
    }

    /// Current maximum number of connections of an owner: at most the number of free entries, so that others have room
    /// however many owners use their maximum (dynamic thresholds: Choudhury and Hahne, 1998); but always a few.
    pub(super) fn limit(&self) -> u32 {
        let free = self.entries.saturating_sub(self.total.load(CountOrdering::Relaxed));
        self.quota.min(free.max(self.entries / SMALL_SHARE).max(1))
    }

    /// Counts one more connection of `owner`; returns the previous number.
    pub(super) fn count(&self, owner: OwnerId) -> u32 {
        self.total.fetch_add(1, CountOrdering::Relaxed);
        self.owner(owner).fetch_add(1, CountOrdering::Relaxed)
    }

    fn uncount(&self, owner: OwnerId) {
        self.count_less(owner, 1);
    }

    /// Counts so many more connections of `owner`.
    pub(super) fn count_more(&self, owner: OwnerId, more: u32) {
        self.total.fetch_add(more, CountOrdering::Relaxed);
        self.owner(owner).fetch_add(more, CountOrdering::Relaxed);
    }

    /// Counts so many less.
    pub(super) fn count_less(&self, owner: OwnerId, less: u32) {
        self.owner(owner).fetch_sub(less, CountOrdering::Relaxed);
        self.total.fetch_sub(less, CountOrdering::Relaxed);
    }

    /// Claims a free entry in the home group, or in the alternate one if the home group is crowded and the other is
    /// less so.
    fn claim_free(&self, hashed: &PreparedFlow) -> Option<SlotRef> {
        let (first, second) = (home(hashed.hash, self.groups), alternate(hashed.hash, self.groups));
        let crowded = self.tags(first).occupancy();
        let groups = if crowded > CROWDED && self.tags(second).occupancy() < crowded {
            [second, first]
        } else {
            [first, second]
        };
        groups.into_iter().find_map(|group| {
            bits(self.tags(group).free_lanes()).find_map(|lane| {
                let slot = group * LANES + lane;
                Some((slot, self.entry(slot).claim()?))
            })
        })
    }

    /// Writes a connection into a claimed entry and publishes it to other inserts as tentative.
    pub(super) fn publish(&self, (slot, control): SlotRef, hashed: &PreparedFlow, contents: EntryContents) {
        // The tag first: a thread that sees the written entry and scans the tags finds it.
        self.tags(slot / LANES).set(slot % LANES, hashed.tag());
        if let Some(uses) = self.uses() {
            uses[slot as usize].reset(control.generation());
        }
        self.entry(slot).publish(control, &hashed.words, contents);
    }

    /// Confirms one tentative entry of this key as the visible connection and removes all others. Returns the confirmed
    /// entry, which another insert may have made, or `None` if `candidate` was removed without a replacement.
    ///
    /// Why two entries of a key are never live: let P confirm p and Q confirm q, where p is the lower slot. Each
    /// scanned after its candidate was published, with a sequentially consistent fence between, so one of the two scans
    /// saw the other's candidate.
    /// 1. Q saw p tentative: it gave up q for p, the lower one. Q saw p live: it gave up q.
    /// 2. P saw q tentative: it removed q, the higher one, so that Q's confirmation fails; or it could not because q
    ///    had become live, and gave up p. P saw q live: it gave up p.
    ///
    /// No thread waits: one that finds another's candidate completes that insert instead.
    pub(super) fn confirm_one(&self, hashed: &PreparedFlow, mut candidate: SlotRef) -> Option<SlotRef> {
        'candidates: loop {
            // Between the publication of the candidate (ours, or another's that we have seen) and the scan.
            fence(Ordering::SeqCst);
            let (slot, control) = candidate;
            for (other, found) in self.written(hashed) {
                if other == slot {
                    continue;
                }
                if found.is_live() {
                    return Some(self.withdraw(candidate).err().unwrap_or((other, found)));
                }
                if other < slot {
                    if let Err(confirmed) = self.withdraw(candidate) {
                        return Some(confirmed);
                    }
                    candidate = (other, found);
                    continue 'candidates;
                }
                if let Err(confirmed) = self.withdraw((other, found)) {
                    return Some(self.withdraw(candidate).err().unwrap_or(confirmed));
                }
            }
            return match self.entry(slot).exchange(control, control.confirmed()) {
                Ok(()) => {
                    // Counted here and not by the thread that made the candidate, since it may be removed before that
                    // thread continues.
                    self.counters.count(TableEvent::Created);
                    Some((slot, control.confirmed()))
                }
                Err(found) if found.is_same_generation(control) => Some((slot, found)),
                Err(_) => None,
            };
        }
    }

    /// Removes a tentative entry.
    ///
    /// # Errors
    /// The entry, if it has become live; it stays.
    fn withdraw(&self, (slot, control): SlotRef) -> Result<(), SlotRef> {
        match self.entry(slot).exchange(control, control.claimed()) {
            Ok(()) => {
                self.forget(slot);
                self.entry(slot).free(control.claimed());
                Ok(())
            }
            Err(found) if found.is_same_generation(control) => Err((slot, found)),
            Err(_) => Ok(()),
        }
    }

    /// Entries with this key, live or tentative.
    pub(super) fn written<'a>(&'a self, hashed: &'a PreparedFlow) -> impl Iterator<Item = SlotRef> + 'a {
        [home(hashed.hash, self.groups), alternate(hashed.hash, self.groups)].into_iter().flat_map(move |group| {
            bits(self.tags(group).lanes_with(hashed.tag())).filter_map(move |lane| {
                let slot = group * LANES + lane;
                Some((slot, self.entry(slot).matches(&hashed.words)?))
            })
        })
    }

    /// The live entry with this key.
    #[inline(always)]
    pub(super) fn lookup(&self, hashed: &PreparedFlow) -> Option<SlotRef> {
        if hashed.hint != NO_HINT
            && let Some(entry) = self.storage.entries().get(hashed.hint as usize)
            && let Some(control) = entry.matches(&hashed.words)
            && control.is_live()
        {
            return Some((hashed.hint, control));
        }
        self.search(hashed)
    }

    /// [`ConnTable::lookup`] without a hint, or after a wrong one.
    #[inline(never)]
    fn search(&self, hashed: &PreparedFlow) -> Option<SlotRef> {
        self.written(hashed).find(|(_, control)| control.is_live())
    }

    /// Whether a connection has expired.
    #[inline]
    pub(super) fn is_expired(&self, protocol: Protocol, (slot, control): SlotRef, now: Tick) -> bool {
        let age = control.tick().age(now);
        // No timeout is that short, and a busy connection's last packet was just now.
        if age == 0 {
            return false;
        }
        if control.is_frontend() {
            return self.partner((slot, control)).is_none();
        }
        let timeout = self.timeout_ticks.of(protocol, self.current(protocol, (slot, control)));
        age > timeout && self.kernel_age(slot, now).is_none_or(|age| age > timeout)
    }

    /// What programs have noted of a connection that is in a state in which they forward, or was when policy revoked it. What led to the
    /// state that workers have written since is not among it.
    pub(super) fn noted(&self, protocol: Protocol, (slot, control): SlotRef) -> Noted {
        const OPENED: u8 = TcpState::SynSent as u8;
        const _: () = assert!(OPENED == State::Unreplied.code());
        const ANSWERED: u8 = TcpState::SynReceived as u8;
        const ESTABLISHED: u8 = TcpState::Established as u8;
        let Some(uses) = self.uses() else { return Noted::default() };
        let noted = || uses[slot as usize].noted();
        match (protocol, control.state()) {
            (Protocol::TCP, OPENED) => {
                Some(noted()).filter(|it| it.answered && self.has_number((slot, control))).unwrap_or_default()
            }
            (Protocol::UDP, OPENED) => Some(noted()).filter(|it| it.answered).unwrap_or_default(),
            (Protocol::TCP, ANSWERED) => Some(noted())
                .filter(|it| it.confirmed)
                .map_or_else(Noted::default, |it| Noted { answered: false, ..it }),
            (Protocol::TCP, ESTABLISHED) => Noted { answered: false, ..noted() },
            _ => Noted::default(),
        }
    }

    /// Whether the number of the answer to a connection's SYN is noted. If it is not, a program that was late has noted the answer to
    /// the entry's last connection, which had the same path.
    fn has_number(&self, (slot, control): SlotRef) -> bool {
        // Also of a connection that has just ended, whose record is written.
        let found = self.entry(slot).load_claimed(control);
        found.is_some_and(|found| Window::is_answered(found.tracking[control.original().opposite() as usize]))
    }

    /// This control word with the state that the connection is in by now, after what programs have noted. Once both ends have
    /// sent a FIN, the last acknowledgement is under way. Out of line: few packets ask, and inlined it costs all of them.
    #[inline(never)]
    pub(super) fn current(&self, protocol: Protocol, place: SlotRef) -> ControlWord {
        let control = place.1;
        let state = match self.noted(protocol, place) {
            Noted { finished: [true, true], .. } => State::Tcp(TcpState::TimeWait),
            Noted { finished: [false, false], confirmed: true, .. } => State::Tcp(TcpState::Established),
            Noted { finished: [false, false], answered: true, .. } if protocol == Protocol::TCP => {
                State::Tcp(TcpState::SynReceived)
            }
            Noted { finished: [false, false], answered: true, .. } => State::Replied,
            Noted { finished: [false, false], .. } => return control,
            // Whether it was acknowledged is not noted, and the other end may send for long.
            Noted { finished: _, .. } => State::Tcp(TcpState::CloseWait),
        };
        control.with(state.code(), control.tick())
    }

    /// Ticks since the kernel last forwarded a packet of this entry by itself, if it did.
    pub(super) fn kernel_age(&self, slot: u32, now: Tick) -> Option<u32> {
        self.uses()?[slot as usize].ticks().map(|tick| tick.age(now)).min()
    }

    /// Removes the connection of `control` if it has expired. One that was updated or replaced since `control` was read
    /// stays: its control word differs.
    pub(super) fn expire(&self, slot: u32, control: ControlWord, now: Tick) -> bool {
        let entry = self.entry(slot);
        if !control.is_live() || !self.is_expired(entry.protocol(), (slot, control), now) {
            return false;
        }
        let expired = entry.exchange(control, control.claimed()).is_ok();
        if expired {
            self.release(slot, control, Ending::Expired);
            self.counters.count(TableEvent::Expired);
        }
        expired
    }

    /// Frees an entry that this thread has claimed from the connection of `control`.
    pub(super) fn release(&self, slot: u32, control: ControlWord, ending: Ending) {
        self.release_with((slot, control), ending, None);
    }

    /// [`ConnTable::release`] of a connection whose frontend flow may be known already.
    pub(super) fn release_with(&self, (slot, control): SlotRef, ending: Ending, frontend: Option<Flow>) {
        self.note_end(slot, control, ending, frontend);
        self.forget(slot);
        self.entry(slot).free(control.claimed());
    }

    /// Removes tag and owner count of an entry that this thread has claimed, before it is freed or reused: a tag
    /// cleared later could belong to the next connection.
    pub(super) fn forget(&self, slot: u32) {
        self.tags(slot / LANES).clear(slot % LANES);
        self.uncount(self.entry(slot).take_owner());
    }

    #[inline]
    pub(super) fn entry(&self, slot: u32) -> &TableEntry {
        &self.storage.entries()[slot as usize]
    }

    #[inline]
    pub(super) fn tags(&self, group: u32) -> &Tags {
        &self.storage.tags()[group as usize]
    }

    #[inline]
    pub(super) fn owner(&self, owner: OwnerId) -> &AtomicU32 {
        &self.owners[usize::from(owner.0) % OWNERS]
    }
}

/// Number of groups for this many connections: a tenth more room than needed, so that two groups suffice for each until
/// all are inserted.
pub(super) fn group_count(entries: usize) -> u32 {
    if cfg!(all(test, feature = "loom")) { 2 } else { (entries * 10).div_ceil(9 * LANES as usize).max(2) as u32 }
}

impl std::fmt::Debug for ConnTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnTable").field("capacity", &self.capacity()).field("len", &self.len()).finish()
    }
}

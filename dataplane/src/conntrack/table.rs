//! The table: its parts, lookup, and what becomes of an entry in the end.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64 as Counter, Ordering as CountOrdering};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::config::{Config, MidStreamPickup, TimeoutTicks};
use super::counters::{ConnTableStatistics, Counters, TableEvent};
use super::entry::{ControlWord, EpochTag, OwnerId, SlotRef, TableEntry};
use super::fragments::Fragments;
use super::groups::{GroupSet, group_count};
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
use super::tags::{LANES, Tags, bits};
use super::tcp::Window;
use super::time::Tick;
use crate::epoch::Epoch;
use crate::packet::{Flow, Protocol, TcpFlags};
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
    entries: u32,
    quota: u32,
    pub(super) midstream_pickup: MidStreamPickup,
    /// Slots that an earlier process had claimed when this one found the table, without tags.
    pub(super) untagged: Box<[u32]>,
    /// Whether [`ConnTable::adopt`] was called.
    is_adopted: AtomicBool,
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
    pub(super) first_event: Counter,
}

/// Number of owners that are counted.
pub(super) const OWNERS: usize = if cfg!(all(test, feature = "loom")) { 4 } else { 1 << 16 };

/// Share that an owner always has (and at least one connection), as long as there is any room.
const SMALL_SHARE: u32 = 1024;

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
            entries: config.entries as u32,
            quota: config.quota(),
            midstream_pickup: config.midstream_pickup,
            untagged: Box::default(),
            is_adopted: AtomicBool::new(false),
            is_published: AtomicBool::new(origin != TableOrigin::Found),
            repeats_for: config.repeats.filter(|_| config.ended == 0),
            first_event: Counter::new(0),
        };
        if origin == TableOrigin::Found {
            if let MidStreamPickup::AfterLoss(_) = table.midstream_pickup {
                table.midstream_pickup = MidStreamPickup::Never;
            }
            table.untagged = table.find_untagged();
            if !table.is_shared() {
                table.recover();
            }
        } else if let Some(shared) = table.storage.shared() {
            shared.set_timeouts(table.timeout_ticks.of_kernel());
        }
        Ok(table)
    }

    /// Makes what was found in BPF arrays this process' own: the kernel's programs open no connections by themselves any more, and
    /// connections are counted. Until then they go on as the last process has left them, so call it when its programs are replaced; before
    /// that no thread of this process may use the table, and no other process may. Of a table that is this process' own it changes nothing.
    pub fn adopt(&self) {
        let Some(shared) = self.storage.shared() else { return };
        if self.origin != TableOrigin::Found || self.is_adopted.swap(true, CountOrdering::SeqCst) {
            return;
        }
        shared.set_timeouts(self.timeout_ticks.of_kernel());
        shared.stop_repeats();
        self.first_event.store(shared.repeats().sent(), CountOrdering::Relaxed);
        self.recover();
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

    /// Bytes of the table: entries, tags and openers.
    pub fn memory(&self) -> usize {
        let uses = self.uses().map_or(0, size_of_val);
        let storage = &self.storage;
        size_of_val(storage.entries()) + size_of_val(storage.tags()) + size_of_val(storage.openers()) + uses
    }

    /// Whether programs in the kernel read the table.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.storage.shared().is_some()
    }

    /// Traffic of each entry's connection, if that is counted.
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

    /// Whether the kernel's programs compare with this epoch, or a later one; `None`: no epoch is theirs.
    pub fn is_published(&self, epoch: Epoch) -> Option<bool> {
        let shared = self.storage.shared().filter(|_| self.is_taken_over())?;
        Some(!shared.epoch().is_before(epoch))
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
    /// programs may forward these, too. `may_repeat`: asked after that, and for the same, whether they may open the next connections that differ
    /// in the opener's port alone. If the table [counts](Self::counts) nothing, it does nothing.
    pub fn forwarded(
        &self,
        hashed: &PreparedFlow,
        bytes: u16,
        flags: TcpFlags,
        path: Option<((u32, u32), Epoch)>,
        knows_answers: impl FnOnce(bool) -> bool,
        may_repeat: impl FnOnce(bool) -> bool,
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
        let via_host = control.is_via_host();
        if is_taken && are_known && self.repeats_for.is_some() && may_repeat(via_host) {
            self.leave_answer(hashed, (ends, via_host), snapshot, self.entry(slot).owner());
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

    pub(super) fn uncount(&self, owner: OwnerId) {
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
        self.is_idle((slot, control), self.timeout_ticks.of(protocol, self.current(protocol, (slot, control))), now)
    }

    /// Whether neither a worker nor a program has had a packet of it for more than so many ticks.
    #[inline]
    pub(super) fn is_idle(&self, (slot, control): SlotRef, timeout: u32, now: Tick) -> bool {
        control.tick().age(now) > timeout && self.kernel_age(slot, now).is_none_or(|age| age > timeout)
    }

    /// The changes that programs have recorded of a connection that is in a state in which they forward, or was when policy revoked it. What led to the
    /// state that workers have written since is not among it.
    #[inline]
    pub(super) fn noted(&self, protocol: Protocol, place: SlotRef) -> Noted {
        self.uses().map_or_else(Noted::default, |uses| self.noted_in(&uses[place.0 as usize], protocol, place))
    }

    /// [`ConnTable::noted`] where programs forward. Out of line, as few packets come here that they could have forwarded.
    #[inline(never)]
    fn noted_in(&self, kernel_use: &KernelUse, protocol: Protocol, (slot, control): SlotRef) -> Noted {
        const OPENED: u8 = TcpState::SynSent as u8;
        const _: () = assert!(OPENED == State::Unreplied.code());
        const ANSWERED: u8 = TcpState::SynReceived as u8;
        const ESTABLISHED: u8 = TcpState::Established as u8;
        let noted = || kernel_use.noted();
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
        let is_over = control.is_live() && self.is_expired(self.entry(slot).protocol(), (slot, control), now);
        is_over && self.end(slot, control)
    }

    /// Removes the connection of `control`, whose time is over, unless it has changed since.
    pub(super) fn end(&self, slot: u32, control: ControlWord) -> bool {
        let ended = self.entry(slot).exchange(control, control.claimed()).is_ok();
        if ended {
            self.release(slot, control, Ending::Expired);
            self.counters.count(TableEvent::Expired);
        }
        ended
    }

    /// Frees an entry that this thread has claimed from the connection of `control`.
    pub(super) fn release(&self, slot: u32, control: ControlWord, ending: Ending) {
        self.note_end(slot, control, ending);
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

impl std::fmt::Debug for ConnTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnTable").field("capacity", &self.capacity()).field("len", &self.len()).finish()
    }
}

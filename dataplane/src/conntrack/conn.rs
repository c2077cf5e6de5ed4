//! A handle to a connection that was found, and the updates by its packets.

use std::time::Duration;

use super::counters::TableEvent;
use super::entry::{ControlWord, EpochTag, OwnerId, SlotRef, TableEntry, Tracking};
use super::hash::PreparedFlow;
use super::journal::Ending;
use super::path::Noted;
use super::state::{EvictionClass, State, TcpState};
use super::table::ConnTable;
use super::tcp::Window;
use super::time::{TICK, Tick, Timestamp};
use super::track::{self, PacketEffect};
use crate::epoch::Epoch;
use crate::packet::{Flow, Orientation, Protocol, Transport};

/// A connection at the time it was found. Other workers may change or remove it at any time. The handle then still
/// describes the connection that was found, and its updates never reach another one.
#[derive(Clone, Copy)]
pub struct Conn<'t> {
    table: &'t ConnTable,
    entry: &'t TableEntry,
    hashed: PreparedFlow,
    slot: u32,
    control: ControlWord,
}

/// Result of applying a packet to its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Update {
    /// The packet belongs to the connection, which is now in this state.
    Accepted(State),
    /// The packet does not fit the connection: it is out of window or not allowed in this state.
    Invalid,
    /// Policy has revoked the connection, and the packet does not open a new one.
    Revoked,
    /// The packet opens a new connection in place of one that has ended or was never answered. Evaluate policy for the
    /// packet's own direction and, if allowed, [replace](Conn::replace) this one.
    Opens,
    /// A SYN from the answering side of a live connection. Evaluate policy for the packet's own direction and, if
    /// allowed, [hold it](Conn::hold_syn).
    ReverseSyn,
    /// A SYN-ACK that acknowledges a held SYN of this live connection: both ends have lost the connection and open a
    /// new one. Evaluate policy for the direction of that SYN and, if allowed, [restart](Conn::restart) this one.
    Restarts,
    /// The connection was removed meanwhile. Handle the packet as one without a connection.
    Removed,
}

/// Result of evaluating policy again for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reevaluation {
    /// Unchanged: still allowed, or still revoked. Also if another thread evaluated it under a newer epoch; that
    /// verdict stays.
    Unchanged,
    /// It was allowed and is no longer: this verdict has revoked it.
    Revoked,
    /// It was revoked and is allowed again.
    Restored,
    /// It was removed.
    Removed,
}

impl<'t> Conn<'t> {
    #[inline]
    pub(super) fn new(table: &'t ConnTable, hashed: &PreparedFlow, slot: u32, control: ControlWord) -> Self {
        Self { table, entry: table.entry(slot), hashed: *hashed, slot, control }
    }

    /// The flow of the packet that opened it.
    #[inline]
    pub fn original_flow(&self) -> Flow {
        self.hashed.key().flow(self.control.original())
    }

    /// The direction of the packet that opened it.
    #[inline]
    pub fn original(&self) -> Orientation {
        self.control.original()
    }

    /// Whether a packet in this direction is a reply to the connection's opener.
    #[inline]
    pub fn is_reply(&self, orientation: Orientation) -> bool {
        orientation != self.control.original()
    }

    /// Owner whose quota it counts against. Call it before [`Conn::update`]: if that accepts, the owner was this
    /// connection's and not that of a later one in the same entry.
    #[inline]
    pub fn owner(&self) -> OwnerId {
        self.entry.owner()
    }

    /// Whether its packets traverse the node's own stack, in both directions.
    #[inline]
    pub fn via_host(&self) -> bool {
        self.control.is_via_host()
    }

    /// Notes whether its packets traverse the node's own stack. False if it was removed.
    #[cold]
    pub fn set_via_host(&mut self, via_host: bool) -> bool {
        while self.refresh() {
            let wanted = self.control.with_via_host(via_host);
            if wanted == self.control || self.entry.exchange(self.control, wanted).is_ok() {
                self.control = wanted;
                return true;
            }
        }
        false
    }

    /// Its entry, as it was found.
    pub(super) fn place(&self) -> SlotRef {
        (self.slot, self.control)
    }

    /// Its state when it was found or last updated through this handle.
    #[inline]
    pub fn state(&self) -> State {
        let protocol = self.hashed.protocol();
        State::of(protocol, self.table.current(protocol, self.place())).unwrap_or(State::Unreplied)
    }

    /// Time since its last packet, to within a second.
    pub fn idle(&self, now: Timestamp) -> Duration {
        TICK * self.control.tick().age(now.tick())
    }

    /// Whether it was evaluated under this epoch or a newer one. Epochs are compared by their low 23 bits.
    #[inline]
    pub fn is_evaluated_under(&self, epoch: Epoch) -> bool {
        self.control.epoch().covers(EpochTag::of(epoch))
    }

    /// Whether policy has revoked it.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.control.is_revoked()
    }

    /// Records the verdict of this epoch: a connection that is no longer allowed is revoked, and a revoked one that is
    /// allowed again is restored. If several threads do so at once, exactly one gets the result `Revoked` or
    /// `Restored`. Verdict and epoch change atomically, and an older epoch never replaces a newer one.
    pub fn set_verdict(&mut self, epoch: Epoch, allowed: bool) -> Reevaluation {
        let epoch = EpochTag::of(epoch);
        loop {
            let control = self.entry.control();
            if !control.is_same_generation(self.control) {
                return Reevaluation::Removed;
            }
            self.control = control;
            if control.epoch().covers(epoch) {
                return Reevaluation::Unchanged;
            }
            let wanted = control.with_verdict(epoch, allowed);
            if self.entry.exchange(control, wanted).is_ok() {
                self.control = wanted;
                return match (control.is_revoked(), allowed) {
                    (false, false) => Reevaluation::Revoked,
                    (true, true) => Reevaluation::Restored,
                    _ => Reevaluation::Unchanged,
                };
            }
        }
    }

    /// The sequence number that the receiver of packets in this direction expects next: one past the highest that
    /// passed. `None` if unknown, or if the protocol is not TCP.
    pub fn next_sequence(&self, orientation: Orientation, now: Timestamp) -> Option<u32> {
        if self.was_forwarded_by_kernel(now.tick()) {
            return None;
        }
        let (_, tracked) = self.entry.tracking(self.control).filter(|_| self.hashed.protocol() == Protocol::TCP)?;
        Window::unpack(tracked[orientation as usize]).next()
    }

    /// Applies one of its packets.
    #[inline(always)]
    pub fn update(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> Update {
        match self.act(orientation, transport, now, false) {
            Some(update) => update,
            None => self.act_again(orientation, transport, now, false),
        }
    }

    /// [`Conn::update`] for a packet that is an allowed [`Update::ReverseSyn`]: the SYN is held until it is answered.
    pub fn hold_syn(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> Update {
        self.act_again(orientation, transport, now, true)
    }

    /// Retries [`Conn::update`] after another thread changed the entry. A round only fails because another thread's
    /// succeeded.
    #[cold]
    #[inline(never)]
    fn act_again(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp, allowed: bool) -> Update {
        loop {
            if !self.refresh() {
                return Update::Removed;
            }
            if let Some(update) = self.act(orientation, transport, now, allowed) {
                return update;
            }
        }
    }

    /// Reads the control word again; false if the connection was removed.
    fn refresh(&mut self) -> bool {
        let control = self.entry.control();
        let is_there = control.is_same_generation(self.control);
        if is_there {
            self.control = control;
        }
        is_there
    }

    /// [`Conn::update`], unless another thread changed the entry since its control word was read. `allowed`: a SYN from
    /// the answering side may pass.
    #[inline(always)]
    fn act(
        &mut self,
        orientation: Orientation,
        transport: &Transport,
        now: Timestamp,
        allowed: bool,
    ) -> Option<Update> {
        let (now, control) = (now.tick(), self.control);
        if let Transport::Udp = transport
            && self.hashed.protocol() == Protocol::UDP
            && let Some(state) = track::go_on_udp(control, orientation)
            && !(state == State::Unreplied && self.table.noted(Protocol::UDP, self.place()).answered)
        {
            return self.touch(now).then_some(Update::Accepted(state));
        }
        let tracked = self.entry.tracking_under(control)?;
        if control.is_in(TcpState::Established as u8)
            && self.hashed.protocol() == Protocol::TCP
            && let Transport::Tcp(segment) = transport
            && let Some(tracking) = track::fast_step(tracked, orientation, segment)
        {
            return self.accept(State::Tcp(TcpState::Established), tracked, tracking, now);
        }
        let Some((state, known)) = self.known(tracked, now) else { return Some(Update::Removed) };
        if control.is_revoked() {
            // Its time is then newer than the last packet that programs forwarded, so the windows say themselves that they
            // are older. If another thread was faster, it did the same.
            if self.stays_revoked_with(orientation) {
                let _ = self.exchange(tracked, known, control.with(control.state(), now));
            }
            // The other end may have opened a connection whose beginning was not seen: its packets are evaluated in their own
            // direction, as without an entry.
            let is_other_opener = self.hashed.protocol() == Protocol::TCP
                && self.is_reply(orientation)
                && Window::are_from_the_middle(known);
            return Some(if track::opens(transport) || is_other_opener { Update::Opens } else { Update::Revoked });
        }
        let held = self.entry.held_syn();
        match track::step(state, known, control.original(), orientation, transport, held, now) {
            PacketEffect::Accept(next, tracking) => self.accept(next, tracked, tracking, now),
            PacketEffect::Hold(..) if orientation != control.original() && !allowed => Some(Update::ReverseSyn),
            PacketEffect::Hold(tracking, syn) => {
                self.entry.hold_syn(control, syn);
                // It proves nothing yet, so the connection's time is not refreshed.
                self.accept(state, tracked, tracking, control.tick())
            }
            PacketEffect::Pass => Some(Update::Accepted(state)),
            PacketEffect::Invalid => Some(Update::Invalid),
            PacketEffect::Open => Some(Update::Opens),
            PacketEffect::Restart(_) => Some(Update::Restarts),
        }
    }

    /// Whether a denied packet in this direction keeps the revoked entry: any packet of the answering side, which policy might
    /// let open a connection by itself. The opener's packets keep it only if both sides had agreed to the connection. Otherwise
    /// one machine with many addresses could fill a pod's quota with revoked entries, which are never evicted.
    fn stays_revoked_with(&self, orientation: Orientation) -> bool {
        let protocol = self.hashed.protocol();
        let before = State::from_code(protocol, self.table.current(protocol, self.place()).state());
        self.is_reply(orientation) || before.is_some_and(|state| state.eviction_class() == EvictionClass::Kept)
    }

    /// Its state and windows, as far as they are known. After segments that the kernel forwarded by itself, windows begin anew; not after a
    /// SYN-ACK alone, whose number programs note.
    fn known(&self, mut tracked: Tracking, now: Tick) -> Option<(State, Tracking)> {
        let (protocol, place) = (self.hashed.protocol(), self.place());
        let Noted { answered, finished, .. } = self.table.noted(protocol, place);
        if protocol == Protocol::TCP && answered {
            let (opener, other) = (self.control.original(), self.control.original().opposite());
            tracked[opener as usize] = Window::answered_by(tracked[opener as usize], tracked[other as usize]);
        }
        if protocol == Protocol::TCP && self.was_forwarded_by_kernel(now) {
            tracked = tracked.map(Window::unsynchronised);
        }
        for (word, _) in tracked.iter_mut().zip(finished).filter(|(_, has_finished)| *has_finished) {
            *word = Window::finished(*word, finished == [true; 2]);
        }
        State::of(protocol, self.table.current(protocol, place)).map(|state| (state, tracked))
    }

    /// Whether the kernel may have forwarded packets with unknown numbers by itself since the last one that a worker did.
    fn was_forwarded_by_kernel(&self, now: Tick) -> bool {
        let noted = self.table.noted(Protocol::TCP, self.place());
        if noted.answered && !noted.confirmed {
            // The SYN-ACK alone. What came after it has met a worker, and does not end the handshake.
            return false;
        }
        // Ticks are coarse: of packets within one it is unknown which was the last. And the programs' clock
        // (CLOCK_MONOTONIC_COARSE) is behind by up to a jiffy, so that theirs may be the tick before.
        self.table.kernel_age(self.slot, now).is_some_and(|age| age <= self.control.tick().age(now) + 1)
            && !self
                .table
                .uses()
                .is_some_and(|uses| uses[self.slot as usize].is_only_handshake(self.control.original()))
    }

    /// Removes it for an allowed packet that [`Update::Opens`] a new one; insert that one then. False if such a packet
    /// no longer replaces the connection.
    pub fn replace(mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> bool {
        loop {
            if !self.refresh() {
                return true;
            }
            let seen = self.control;
            match self.act(orientation, transport, now, false) {
                Some(Update::Opens) => {}
                Some(_) => return false,
                None => continue,
            }
            // The tick may differ by now. If policy restored the connection meanwhile, or a packet changed its state,
            // the packet is applied again.
            let is_as_seen = self.refresh()
                && self.control.state() == seen.state()
                && self.control.is_revoked() == seen.is_revoked();
            if is_as_seen && self.take(self.control, Ending::Replaced) {
                self.table.counters.count(TableEvent::Reopened);
                return true;
            }
        }
    }

    /// Turns it into the connection opened by its held SYN, which this SYN-ACK acknowledges. Policy has allowed the
    /// SYN's direction under `epoch`. False if that no longer applies.
    pub fn restart(&mut self, epoch: Epoch, orientation: Orientation, transport: &Transport, now: Timestamp) -> bool {
        while self.refresh() {
            let control = self.control;
            let Some(tracked) = self.entry.tracking_under(control) else { continue };
            let Some((state, known)) = self.known(tracked, now.tick()) else { continue };
            let held = self.entry.held_syn();
            let step = track::step(state, known, control.original(), orientation, transport, held, now.tick());
            let PacketEffect::Restart(tracking) = step else { return false };
            let wanted = control
                .with(TcpState::SynReceived as u8, now.tick())
                .with_original(orientation.opposite())
                .with_verdict(EpochTag::of(epoch), true);
            if self.exchange(tracked, tracking, wanted) {
                if let Some(uses) = self.table.uses() {
                    uses[self.slot as usize].restart(control.generation());
                }
                self.table.counters.count(TableEvent::Reopened);
                return true;
            }
        }
        false
    }

    /// Replaces the tracked state by a new one; `None` if another thread was faster.
    #[inline(always)]
    fn accept(&mut self, next: State, tracked: Tracking, tracking: Tracking, now: Tick) -> Option<Update> {
        let control = self.control;
        let tick = if control.tick().age(now) == 0 { control.tick() } else { now };
        let wanted = control.with(next.code(), tick);
        self.exchange(tracked, tracking, wanted).then_some(Update::Accepted(next))
    }

    /// Notes that a packet came which changes nothing else; false if another thread was faster.
    #[inline(always)]
    fn touch(&mut self, now: Tick) -> bool {
        let control = self.control;
        if control.tick().age(now) == 0 {
            return self.entry.control() == control;
        }
        let wanted = control.with(control.state(), now);
        let done = self.entry.exchange(control, wanted).is_ok();
        if done {
            self.control = wanted;
        }
        done
    }

    /// Puts tracking words and control word in place of those that were read; false if another thread was faster.
    #[inline(always)]
    fn exchange(&mut self, tracked: Tracking, tracking: Tracking, wanted: ControlWord) -> bool {
        let (low, high) = (Orientation::LowToHigh, Orientation::HighToLow);
        // Windows first: if the process ends between the steps, they are only ahead of the state.
        let done = self.entry.exchange_tracking(low, tracked[0], tracking[0])
            && self.entry.exchange_tracking(high, tracked[1], tracking[1])
            && (wanted == self.control || self.entry.exchange(self.control, wanted).is_ok());
        if done {
            self.control = wanted;
        }
        done
    }

    /// Removes it. False if it was already removed.
    pub fn remove(self) -> bool {
        let mut control = self.control;
        while control.is_same_generation(self.control) {
            if self.take(control, Ending::Removed) {
                self.table.counters.count(TableEvent::Removed);
                return true;
            }
            control = self.entry.control();
        }
        false
    }

    /// Removes it if its control word is still this one.
    #[inline]
    fn take(&self, control: ControlWord, ending: Ending) -> bool {
        let taken = self.entry.exchange(control, control.claimed()).is_ok();
        if taken {
            self.table.release(self.slot, control, ending);
        }
        taken
    }
}

impl std::fmt::Debug for Conn<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn")
            .field("original", &self.original_flow())
            .field("state", &self.state())
            .field("owner", &self.owner())
            .finish()
    }
}

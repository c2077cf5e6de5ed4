//! A connection that was found, and what its packets do to it.

use std::time::Duration;

use super::counters::Event;
use super::entry::{Control, Entry, EpochTag, OwnerId, Tracking};
use super::hash::Hashed;
use super::state::{State, TcpState};
use super::table::ConnTable;
use super::tcp::Window;
use super::time::{TICK, Tick, Timestamp};
use super::track::{self, Step};
use crate::packet::{Flow, Orientation, Protocol, Transport};
use crate::snapshot::Epoch;

/// A connection as it was when it was found. Other workers may change or remove it at any time; what is asked of the
/// handle then answers for the connection that was found, and what is told to it never reaches another one.
#[derive(Clone, Copy)]
pub struct Conn<'t> {
    table: &'t ConnTable,
    entry: &'t Entry,
    hashed: Hashed,
    slot: u32,
    control: Control,
}

/// What became of a packet that was given to its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Update {
    /// It belongs to the connection, which is now in this state.
    Accepted(State),
    /// It does not belong into the connection as it is: out of window, or of a kind that cannot come now.
    Invalid,
    /// Policy has ended the connection, and this is no packet that opens another.
    Cut,
    /// It opens another connection where this one has ended or was never answered. Ask policy about the packet's own
    /// direction, and if it may open one, [replace](Conn::replace) this one.
    Opens,
    /// A SYN from the side that did not open this live connection. Ask policy about the packet's own direction, and if it
    /// may pass, [let it](Conn::hold_syn).
    AsksInReverse,
    /// A SYN-ACK that acknowledges a SYN which this live connection has let through: both ends have forgotten the
    /// connection and open another. Ask policy about the direction of that SYN, and if it may open one,
    /// [restart](Conn::restart) this one.
    Restarts,
    /// There is no such connection any more: it was removed meanwhile. Go on as for a packet without a connection.
    Ended,
}

/// What became of a connection about which policy was asked again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judged {
    /// It goes on as it was: allowed, or cut. Also where another thread has asked under a newer epoch: that answer stays.
    Kept,
    /// It was allowed and is not any more: this verdict has cut it.
    Cut,
    /// It was cut and is allowed again.
    Restored,
    /// It is gone.
    Gone,
}

impl<'t> Conn<'t> {
    #[inline]
    pub(super) fn new(table: &'t ConnTable, hashed: &Hashed, slot: u32, control: Control) -> Self {
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

    /// Whether a packet travelling this way answers the connection's opener.
    #[inline]
    pub fn is_reply(&self, orientation: Orientation) -> bool {
        orientation != self.control.original()
    }

    /// Whose quota it counts against. Ask before [`Conn::update`]: one that is accepted shows that the answer was this
    /// connection's, and not its successor's in the same entry.
    #[inline]
    pub fn owner(&self) -> OwnerId {
        self.entry.owner()
    }

    /// Whether its packets cross the node's own stack, in both directions.
    #[inline]
    pub fn via_host(&self) -> bool {
        self.control.is_via_host()
    }

    /// From now on its packets cross the node's own stack. False if it is gone.
    #[cold]
    pub fn set_via_host(&mut self) -> bool {
        while self.refresh() {
            let wanted = self.control.with_via_host(true);
            if wanted == self.control || self.entry.exchange(self.control, wanted).is_ok() {
                self.control = wanted;
                return true;
            }
        }
        false
    }

    /// Its state when it was found or last updated through this handle.
    #[inline]
    pub fn state(&self) -> State {
        State::of(self.hashed.protocol(), self.control).unwrap_or(State::Unreplied)
    }

    /// How long ago its last packet was, to within a second.
    pub fn idle(&self, now: Timestamp) -> Duration {
        TICK * self.control.tick().age(now.tick())
    }

    /// Whether policy was asked about it under this epoch or a newer one. Epochs are told apart by their low 23 bits.
    #[inline]
    pub fn is_of_epoch(&self, epoch: Epoch) -> bool {
        self.control.epoch().covers(EpochTag::of(epoch))
    }

    /// Whether policy has ended it.
    #[inline]
    pub fn is_cut(&self) -> bool {
        self.control.is_revoked()
    }

    /// Notes what policy said of it under this epoch: a connection that is not allowed any more is cut, and one that was
    /// cut and is allowed again is restored. Of several threads that ask at once, one learns that it did so. Verdict and
    /// epoch change in one step, and an older epoch never takes the place of a newer one.
    pub fn set_judged(&mut self, epoch: Epoch, allowed: bool) -> Judged {
        let epoch = EpochTag::of(epoch);
        loop {
            let control = self.entry.control();
            if !control.is_same_generation(self.control) {
                return Judged::Gone;
            }
            self.control = control;
            if control.epoch().covers(epoch) {
                return Judged::Kept;
            }
            let wanted = control.with_verdict(epoch, allowed);
            if self.entry.exchange(control, wanted).is_ok() {
                self.control = wanted;
                return match (control.is_revoked(), allowed) {
                    (false, false) => Judged::Cut,
                    (true, true) => Judged::Restored,
                    _ => Judged::Kept,
                };
            }
        }
    }

    /// The sequence number that whoever receives what travels this way expects next: one past the highest that was let
    /// through. `None` if that is not known, or the protocol is not TCP.
    pub fn next_sequence(&self, orientation: Orientation) -> Option<u32> {
        let (_, tracked) = self.entry.tracking(self.control).filter(|_| self.hashed.protocol() == Protocol::TCP)?;
        Window::unpack(tracked[orientation as usize]).next()
    }

    /// Lets one of its packets act on it.
    #[inline(always)]
    pub fn update(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> Update {
        match self.act(orientation, transport, now, false) {
            Some(update) => update,
            None => self.act_again(orientation, transport, now, false),
        }
    }

    /// [`Conn::update`] for a packet that [`Update::AsksInReverse`] and that policy allows: the SYN is remembered until it
    /// is answered.
    pub fn hold_syn(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> Update {
        self.act_again(orientation, transport, now, true)
    }

    /// [`Conn::update`] after another thread was faster. Each round that fails does so because another's succeeded.
    #[cold]
    #[inline(never)]
    fn act_again(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp, allowed: bool) -> Update {
        loop {
            if !self.refresh() {
                return Update::Ended;
            }
            if let Some(update) = self.act(orientation, transport, now, allowed) {
                return update;
            }
        }
    }

    /// Reads the control word again; false if the connection is gone.
    fn refresh(&mut self) -> bool {
        let control = self.entry.control();
        let is_there = control.is_same_generation(self.control);
        if is_there {
            self.control = control;
        }
        is_there
    }

    /// [`Conn::update`], unless another thread has changed the entry since its control word was read. `allowed`: a SYN from
    /// the side that did not open the connection may pass.
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
        {
            return self.touch(now).then_some(Update::Accepted(state));
        }
        let tracked = self.entry.tracking_under(control)?;
        if control.is_in(TcpState::Established as u8)
            && self.hashed.protocol() == Protocol::TCP
            && let Transport::Tcp(segment) = transport
            && let Some(tracking) = track::go_on(tracked, orientation, segment)
        {
            return self.accept(State::Tcp(TcpState::Established), tracked, tracking, now);
        }
        if control.is_revoked() {
            // Remembered for as long as its ends go on trying. If another thread was faster, it did the same.
            let _ = self.entry.exchange(control, control.with(control.state(), now));
            return Some(if track::opens(transport) { Update::Opens } else { Update::Cut });
        }
        let Some(state) = State::of(self.hashed.protocol(), control) else {
            return Some(Update::Ended);
        };
        let held = self.entry.held_syn();
        match track::step(state, tracked, control.original(), orientation, transport, held, now) {
            Step::Accept(next, tracking) => self.accept(next, tracked, tracking, now),
            Step::Hold(..) if orientation != control.original() && !allowed => Some(Update::AsksInReverse),
            Step::Hold(tracking, syn) => {
                self.entry.hold_syn(control, syn);
                // It proves nothing yet: the connection ages on.
                self.accept(state, tracked, tracking, control.tick())
            }
            Step::Pass => Some(Update::Accepted(state)),
            Step::Invalid => Some(Update::Invalid),
            Step::Open => Some(Update::Opens),
            Step::Restart(_) => Some(Update::Restarts),
        }
    }

    /// Removes it for a packet that [`Update::Opens`] another and that policy allows; enter that one then. False if the
    /// connection is not one that such a packet replaces any more.
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
            // Its time may be another now. If policy has restored it meanwhile, or a packet moved it on, the packet is
            // put to it again.
            let is_as_seen = self.refresh()
                && self.control.state() == seen.state()
                && self.control.is_revoked() == seen.is_revoked();
            if is_as_seen && self.take(self.control) {
                self.table.counters.count(Event::Reopened);
                return true;
            }
        }
    }

    /// Makes it the connection that a SYN has opened which it had let through, and which this packet, a SYN-ACK,
    /// acknowledges. Policy has allowed the SYN's direction under `epoch`. False if that is not so any more.
    pub fn restart(&mut self, epoch: Epoch, orientation: Orientation, transport: &Transport, now: Timestamp) -> bool {
        while self.refresh() {
            let control = self.control;
            let (Some(tracked), Some(state)) =
                (self.entry.tracking_under(control), State::of(self.hashed.protocol(), control))
            else {
                continue;
            };
            let held = self.entry.held_syn();
            let step = track::step(state, tracked, control.original(), orientation, transport, held, now.tick());
            let Step::Restart(tracking) = step else { return false };
            let wanted = control
                .with(TcpState::SynReceived as u8, now.tick())
                .with_original(orientation.opposite())
                .with_verdict(EpochTag::of(epoch), true);
            if self.exchange(tracked, tracking, wanted) {
                self.table.counters.count(Event::Reopened);
                return true;
            }
        }
        false
    }

    /// Goes on from what was tracked to what is now; `None` if another thread was faster.
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
    fn exchange(&mut self, tracked: Tracking, tracking: Tracking, wanted: Control) -> bool {
        let (low, high) = (Orientation::LowToHigh, Orientation::HighToLow);
        // Windows first: if the process ends between the steps, they are merely ahead of the state.
        let done = self.entry.exchange_tracking(low, tracked[0], tracking[0])
            && self.entry.exchange_tracking(high, tracked[1], tracking[1])
            && (wanted == self.control || self.entry.exchange(self.control, wanted).is_ok());
        if done {
            self.control = wanted;
        }
        done
    }

    /// Removes it. False if it was gone already.
    pub fn remove(self) -> bool {
        let mut control = self.control;
        while control.is_same_generation(self.control) {
            if self.take(control) {
                self.table.counters.count(Event::Removed);
                return true;
            }
            control = self.entry.control();
        }
        false
    }

    /// Removes it if its control word is still this one.
    #[inline]
    fn take(&self, control: Control) -> bool {
        let taken = self.entry.exchange(control, control.claimed()).is_ok();
        if taken {
            self.table.release(self.slot, control);
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

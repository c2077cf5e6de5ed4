//! A connection that was found, and what its packets do to it.

use std::time::Duration;

use super::counters::Event;
use super::entry::{Control, Entry, OwnerId, Tracking};
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
    /// There is no such connection any more: it was removed meanwhile, or it had ended and this packet opens it anew.
    /// Go on as for a packet without a connection.
    Ended,
}

/// What became of a connection that was judged again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judged {
    /// It goes on as it was: allowed, or cut.
    Kept,
    /// It was allowed and is not any more: this judgement has cut it.
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

    /// Whose quota it counts against.
    #[inline]
    pub fn owner(&self) -> OwnerId {
        self.control.owner()
    }

    /// Whether its packets cross the node's own stack, in both directions.
    #[inline]
    pub fn via_host(&self) -> bool {
        self.control.is_via_host()
    }

    /// From now on its packets cross the node's own stack. False if it is gone.
    #[cold]
    pub fn set_via_host(&mut self) -> bool {
        loop {
            let control = self.entry.control();
            if !control.is_same_stay(self.control) {
                return false;
            }
            self.control = control.with_via_host(true);
            if control == self.control || self.entry.exchange(control, self.control).is_ok() {
                return true;
            }
        }
    }

    /// Its state when it was found or last updated through this handle.
    #[inline]
    pub fn state(&self) -> State {
        State::from_code(self.hashed.protocol(), self.control.state()).unwrap_or(State::Unreplied)
    }

    /// How long ago its last packet was, to within a second.
    pub fn idle(&self, now: Timestamp) -> Duration {
        TICK * self.control.tick().age(now.tick())
    }

    /// Whether it was last judged under this epoch. Epochs are told apart by their low 24 bits.
    #[inline]
    pub fn is_of_epoch(&self, epoch: Epoch) -> bool {
        self.entry.is_of_epoch(self.control, epoch)
    }

    /// Notes that it was judged under this epoch, and is still allowed. False if it is gone.
    pub fn set_epoch(&self, epoch: Epoch) -> bool {
        self.entry.set_epoch(self.control, epoch)
    }

    /// Whether policy has ended it.
    #[inline]
    pub fn is_cut(&self) -> bool {
        self.state() == State::Cut
    }

    /// Notes how it was judged under this epoch: a connection that is not allowed any more is cut, and one that was
    /// cut and is allowed again is restored. Of several threads that judge it at once, one is told that it did so.
    pub fn set_judged(&mut self, epoch: Epoch, allowed: bool) -> Judged {
        let judged = loop {
            let control = self.entry.control();
            if !control.is_same_stay(self.control) {
                return Judged::Gone;
            }
            self.control = control;
            let (next, judged) = match (allowed, self.is_cut()) {
                (true, true) => (State::restored(self.hashed.protocol()), Judged::Restored),
                (false, false) => (State::Cut, Judged::Cut),
                _ => break Judged::Kept,
            };
            let wanted = control.with(next.code(), control.tick());
            if self.entry.exchange(control, wanted).is_ok() {
                self.control = wanted;
                break judged;
            }
        };
        if self.set_epoch(epoch) { judged } else { Judged::Gone }
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
        match self.act(orientation, transport, now) {
            Some(update) => update,
            None => {
                let update;
                (*self, update) = self.act_again(orientation, transport, now);
                update
            }
        }
    }

    /// [`Conn::update`] after another thread was faster. Each round that fails does so because another's succeeded.
    #[cold]
    #[inline(never)]
    fn act_again(mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> (Self, Update) {
        loop {
            let control = self.entry.control();
            if !control.is_same_stay(self.control) {
                return (self, Update::Ended);
            }
            self.control = control;
            if let Some(update) = self.act(orientation, transport, now) {
                return (self, update);
            }
        }
    }

    /// [`Conn::update`], unless another thread has changed the entry since its control word was read.
    #[inline(always)]
    fn act(&mut self, orientation: Orientation, transport: &Transport, now: Timestamp) -> Option<Update> {
        let (now, control) = (now.tick(), self.control);
        let tracked = self.entry.tracking_under(control)?;
        if control.state() == TcpState::Established as u8
            && self.hashed.protocol() == Protocol::TCP
            && let Transport::Tcp(segment) = transport
            && let Some(tracking) = track::go_on(tracked, orientation, segment)
        {
            return self.accept(State::Tcp(TcpState::Established), tracked, tracking, now);
        }
        let Some(state) = State::from_code(self.hashed.protocol(), control.state()) else {
            return Some(Update::Ended);
        };
        match track::step(state, tracked, control.original(), orientation, transport) {
            Step::Accept(next, tracking) => self.accept(next, tracked, tracking, now),
            Step::Pass => Some(Update::Accepted(state)),
            Step::Invalid => Some(Update::Invalid),
            Step::Cut => {
                // Remembered for as long as its ends go on trying. If another thread was faster, it did the same.
                let _ = self.entry.exchange(control, control.with(state.code(), now));
                Some(Update::Cut)
            }
            Step::Reopen => self.take(control).then(|| {
                self.table.counters.count(Event::Reopened);
                Update::Ended
            }),
        }
    }

    /// Goes on from what was tracked to what is now; `None` if another thread was faster.
    #[inline(always)]
    fn accept(&mut self, next: State, tracked: Tracking, tracking: Tracking, now: Tick) -> Option<Update> {
        let control = self.control;
        let tick = if control.tick().age(now) == 0 { control.tick() } else { now };
        let wanted = control.with(next.code(), tick);
        let (low, high) = (Orientation::LowToHigh, Orientation::HighToLow);
        // Windows first: if the process ends between the steps, they are merely ahead of the state.
        let done = self.entry.exchange_tracking(low, tracked[0], tracking[0])
            && self.entry.exchange_tracking(high, tracked[1], tracking[1])
            && (wanted == control || self.entry.exchange(control, wanted).is_ok());
        done.then(|| {
            self.control = wanted;
            Update::Accepted(next)
        })
    }

    /// Removes it. False if it was gone already.
    pub fn remove(self) -> bool {
        let mut control = self.control;
        while control.is_same_stay(self.control) {
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

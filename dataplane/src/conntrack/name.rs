//! Names of connections, for who has to ask later whether one is open.

use super::conn::Conn;
use super::hash::key_of;
use super::state::{EvictionClass, State};
use super::table::ConnTable;
use super::time::Timestamp;
use crate::packet::Flow;

/// Slot and generation of a connection's entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionName(u64);

const GENERATION_AT: u32 = 32;
const IS_NAME: u64 = 1 << 63;
/// A connection that nobody has answered, and of which nobody has sent a packet for so many ticks, does not count as open.
const UNANSWERED: u32 = 2;

impl ConnectionName {
    fn new(slot: u32, generation: u64) -> Self {
        Self(u64::from(slot) | generation << GENERATION_AT | IS_NAME)
    }

    /// As a word, which is neither 0 nor 1.
    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    /// The name that is this word.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        (word & IS_NAME != 0).then_some(Self(word))
    }
}

impl Conn<'_> {
    pub(crate) fn name(&self) -> ConnectionName {
        let (slot, control) = self.place();
        ConnectionName::new(slot, control.generation())
    }
}

impl ConnTable {
    /// Whether this connection is there, has not ended, is not revoked, and was answered or tried again within the last second.
    pub(crate) fn is_open(&self, name: ConnectionName, now: Timestamp) -> bool {
        let slot = name.0 as u32;
        let Some(entry) = self.storage.entries().get(slot as usize) else { return false };
        let control = entry.control();
        if !control.is_live() || ConnectionName::new(slot, control.generation()) != name {
            return false;
        }
        let protocol = entry.protocol();
        let current = self.current(protocol, (slot, control));
        let Some(state) = State::of(protocol, current) else { return false };
        let age = control.tick().age(now.tick());
        let age = self.kernel_age(slot, now.tick()).map_or(age, |kernel| age.min(kernel));
        let most = match state.eviction_class() {
            EvictionClass::Unanswered => UNANSWERED,
            _ => self.timeout_ticks.of(protocol, current),
        };
        age <= most && !state.has_ended() && state != State::Revoked
    }

    /// The flow of each connection that is open, in the direction in which it was opened, with its name, and whether its packets traverse the
    /// node's own stack.
    pub fn open_connections(&self, now: Timestamp) -> impl Iterator<Item = (Flow, ConnectionName, bool)> + '_ {
        (0..self.groups).flat_map(|group| self.occupied(group)).filter_map(move |slot| {
            let found = self.entry(slot).load()?;
            let name = ConnectionName::new(slot, found.control.generation());
            let flow = key_of(&found.key).flow(found.control.original());
            self.is_open(name, now).then_some((flow, name, found.control.is_via_host()))
        })
    }
}

//! Faults that a server injects into its clients' requests.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Resource;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    List,
    Watch,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Answers with this status code, and Retry-After in seconds if given. The body is plain text, as from an
    /// overloaded server.
    Code(u16, Option<u32>),
    /// Watch, or a streamed list: sends an error with this code as the first event, and ends.
    ErrorEvent(u16),
    /// Never answers.
    Silence,
    /// Answers with a body that is not JSON.
    Nonsense,
    /// Watch: closes the connection in the middle of the next event's line.
    Cut,
    /// Watch: ends immediately after it began.
    EndAtOnce,
    /// Watch: sends each event twice, and simultaneous ones in reverse order first.
    Shuffle,
    /// Watch: stays open but sends nothing more, not even bookmarks.
    Hang,
}

#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Planned>);

type Planned = VecDeque<(Verb, Resource, Fault)>;

impl Faults {
    pub(super) fn plan(&self, verb: Verb, resource: Resource, fault: Fault) {
        self.lock().push_back((verb, resource, fault));
    }

    /// Removes and returns the fault for a request, if one is pending.
    pub(super) fn take(&self, verb: Verb, resource: Resource) -> Option<Fault> {
        let mut planned = self.lock();
        let place = planned.iter().position(|(v, r, _)| (*v, *r) == (verb, resource))?;
        planned.remove(place).map(|(_, _, fault)| fault)
    }

    pub(super) fn left(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Planned> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! What a server does to its clients when it is not well.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Resource;

/// Which requests a fault is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// Lists, those that are streamed included.
    List,
    /// Watches.
    Watch,
}

/// A fault that one request meets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is answered with this status code, and told to wait so many seconds if that is given; the body is plain
    /// text, as that of an overloaded server is.
    Code(u16, Option<u32>),
    /// It is never answered.
    Silence,
    /// It is answered with something that is no JSON.
    Nonsense,
    /// A watch: its connection breaks within the line of the next event.
    Cut,
    /// A watch: it ends as soon as it has begun.
    EndAtOnce,
    /// A watch: of what comes, each event is sent twice, and those of one moment in the reverse order first.
    Shuffle,
    /// A watch: it stays open and nothing comes any more, not even bookmarks.
    Hang,
}

/// The faults that are still to happen.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Planned>);

type Planned = VecDeque<(Verb, Resource, Fault)>;

impl Faults {
    pub(super) fn plan(&self, verb: Verb, resource: Resource, fault: Fault) {
        self.lock().push_back((verb, resource, fault));
    }

    /// The fault that a request meets, if any; it has happened then.
    pub(super) fn take(&self, verb: Verb, resource: Resource) -> Option<Fault> {
        let mut planned = self.lock();
        let place = planned.iter().position(|(v, r, _)| (*v, *r) == (verb, resource))?;
        planned.remove(place).map(|(_, _, fault)| fault)
    }

    /// How many have not happened yet.
    pub(super) fn left(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Planned> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

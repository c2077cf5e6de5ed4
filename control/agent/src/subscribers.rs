//! Who follows what is published. The publisher tells subscribers of each update and does not know who they are.

use std::sync::Arc;

use penstock_dataplane::{Epoch, Snapshot};
use penstock_policy::engine::Engine;
use penstock_policy::model::ObjectChange;

/// The result of a change of the objects, or of a publication.
pub(super) struct Update<'a> {
    /// The epoch that was published last.
    pub(super) epoch: Epoch,
    /// Changes that the engine was given since the update before, in order; empty if no subscriber wants to know.
    pub(super) changes: &'a [ObjectChange],
    /// The engine, with these changes.
    pub(super) engine: &'a Engine,
    /// Reads the snapshot that was published last.
    pub(super) snapshot: &'a dyn Fn() -> Arc<Snapshot>,
}

/// How much of the next update a subscriber wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Interest {
    /// All of it.
    Changes,
    /// All but the changes, which are copied for those who want them.
    Epochs,
    /// No more updates.
    Ended,
}

/// Follows what is published.
pub(super) trait Subscriber: Send {
    /// Takes note of an update. Policy waits meanwhile, under the lock of the objects: it must not block.
    fn update(&mut self, update: &Update<'_>) -> Interest;
}

/// All subscribers, each with what it wants of the next update.
#[derive(Default)]
pub(super) struct Subscribers(Vec<(Box<dyn Subscriber>, Interest)>);

impl Subscribers {
    /// Adds one, which gets all of its first update.
    pub(super) fn add(&mut self, subscriber: impl Subscriber + 'static) {
        self.0.push((Box::new(subscriber), Interest::Changes));
    }

    /// Tells all of them, and forgets those that have ended.
    pub(super) fn tell(&mut self, update: &Update<'_>) {
        for (subscriber, interest) in &mut self.0 {
            *interest = subscriber.update(update);
        }
        self.0.retain(|(_, interest)| *interest != Interest::Ended);
    }

    /// Whether one of them wants the changes of the next update.
    pub(super) fn want_changes(&self) -> bool {
        self.0.iter().any(|(_, interest)| *interest == Interest::Changes)
    }
}

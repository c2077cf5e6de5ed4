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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use penstock_policy::engine::EngineSettings;
    use penstock_policy::model::ObjectRef;

    use super::*;

    /// Notes the epoch and the number of changes of each update, and wants what it is given in turn of the next ones.
    struct Noting(Arc<Mutex<Vec<(u32, usize)>>>, Vec<Interest>);

    impl Subscriber for Noting {
        fn update(&mut self, update: &Update<'_>) -> Interest {
            self.0.lock().unwrap().push((update.epoch.0, update.changes.len()));
            self.1.remove(0)
        }
    }

    #[test]
    fn subscribers_are_told_until_they_end_and_say_what_they_want() {
        let engine = Engine::new(EngineSettings::for_node("here"));
        let changes = [ObjectChange::Delete(ObjectRef::Namespace("shop".into()))];
        let mut subscribers = Subscribers::default();
        let tell = |subscribers: &mut Subscribers, epoch| {
            let changes = if subscribers.want_changes() { &changes[..] } else { &[] };
            let snapshot = || Arc::new(Snapshot::default());
            subscribers.tell(&Update { epoch: Epoch(epoch), changes, engine: &engine, snapshot: &snapshot });
        };
        tell(&mut subscribers, 1);
        let (first, second) = (Arc::default(), Arc::default());
        subscribers.add(Noting(Arc::clone(&first), vec![Interest::Epochs, Interest::Epochs, Interest::Epochs]));
        tell(&mut subscribers, 2);
        assert!(!subscribers.want_changes());
        tell(&mut subscribers, 3);
        subscribers.add(Noting(Arc::clone(&second), vec![Interest::Ended]));
        assert!(subscribers.want_changes());
        tell(&mut subscribers, 4);
        assert!(!subscribers.want_changes());
        assert_eq!(
            (first.lock().unwrap().as_slice(), second.lock().unwrap().as_slice()),
            (&[(2, 1), (3, 0), (4, 1)][..], &[(4, 1)][..])
        );
    }
}

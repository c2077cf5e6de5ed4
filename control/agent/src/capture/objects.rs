//! The objects of a capture: those in force when it begins, and their changes in the order of epochs.
//!
//! Objects and changes are taken under the lock under which they are published. Whoever takes the changes after it has taken a packet
//! has all that were in force for that packet.

use std::time::{SystemTime, UNIX_EPOCH};

use penstock_admin::capture::{self, CaptureMessage};
use penstock_dataplane::Epoch;
use penstock_policy::model::{Object, ObjectChange};

use crate::objects::{Follower, NodeObjects};

/// Changes that may wait for a client. Then the capture ends: without a change, packets after it cannot be judged.
const MOST_WAITING: usize = 100_000;
/// Bytes of JSON after which a message ends.
const MESSAGE: usize = 1 << 18;

/// Changes of objects for a capture, if one wants them. It is beside the objects and under their lock.
#[derive(Default)]
pub(in super::super) struct ObjectFeed(Option<KeptChanges>);

struct KeptChanges {
    /// Of the last step.
    epoch: Epoch,
    steps: Vec<ObjectStep>,
    waiting: usize,
}

/// Changes that were published together.
pub(in super::super) struct ObjectStep {
    epoch: Epoch,
    /// Nanoseconds since 1970.
    time: u64,
    changes: Vec<ObjectChange>,
}

/// Why changes of objects are not known any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct TooManyChanges;

impl ObjectFeed {
    /// Begins to keep changes, and returns the objects as they are, which are those of this epoch.
    pub(in super::super) fn begin(&mut self, objects: &mut NodeObjects, epoch: Epoch) -> CapturedObjects {
        objects.follow(Follower::Capture, true);
        self.0 = Some(KeptChanges { epoch, steps: Vec::new(), waiting: 0 });
        let engine = objects.engine();
        let mut all = engine.state().objects_without_pods();
        all.extend(engine.state().objects_of_services());
        all.extend(engine.state().pods_from(0, usize::MAX).0);
        all.extend(engine.staged().cloned());
        CapturedObjects { epoch, time: nanoseconds(SystemTime::now()), rest: all.into_iter() }
    }

    /// Keeps no more changes.
    pub(in super::super) fn end(&mut self, objects: &mut NodeObjects) {
        objects.follow(Follower::Capture, false);
        self.0 = None;
    }

    /// Call after each change of the objects and each publication, with the epoch that was published last.
    pub(in super::super) fn follow(&mut self, objects: &mut NodeObjects, epoch: Epoch) {
        let Some(kept) = &mut self.0 else { return };
        let changes = objects.take_followed(Follower::Capture);
        if changes.is_empty() && epoch == kept.epoch {
            return;
        }
        kept.epoch = epoch;
        kept.waiting += changes.len().max(1);
        match kept.waiting > MOST_WAITING {
            true => kept.steps.clear(),
            false => kept.steps.push(ObjectStep { epoch, time: nanoseconds(SystemTime::now()), changes }),
        }
    }

    /// The changes since the last call.
    pub(in super::super) fn take(&mut self) -> Result<Vec<ObjectStep>, TooManyChanges> {
        let Some(kept) = &mut self.0 else { return Ok(Vec::new()) };
        if kept.waiting > MOST_WAITING {
            return Err(TooManyChanges);
        }
        kept.waiting = 0;
        Ok(std::mem::take(&mut kept.steps))
    }
}

impl ObjectStep {
    /// Appends it to a stream of messages.
    pub(super) fn encode(&self, stream: &mut Vec<u8>) {
        let message = CaptureMessage::Changes { epoch: self.epoch.0, time: self.time };
        let mut array = vec![b'['];
        for change in &self.changes {
            if array.len() > MESSAGE {
                array.push(b']');
                capture::encode(&message, &array, stream);
                array.truncate(1);
            }
            if array.len() > 1 {
                array.push(b',');
            }
            append(change, &mut array);
        }
        array.push(b']');
        capture::encode(&message, &array, stream);
    }
}

/// The objects that are in force when a capture begins, and are not sent yet.
pub(in super::super) struct CapturedObjects {
    /// Their epoch.
    pub(in super::super) epoch: Epoch,
    /// When that was, in nanoseconds since 1970.
    pub(in super::super) time: u64,
    rest: std::vec::IntoIter<Object>,
}

impl CapturedObjects {
    /// How many are not sent yet.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next message; `None` after the last object.
    pub(super) fn next_message(&mut self) -> Option<Vec<u8>> {
        let (mut lines, mut count) = (Vec::new(), 0);
        while lines.len() < MESSAGE
            && let Some(object) = self.rest.next()
        {
            append(&object, &mut lines);
            lines.push(b'\n');
            count += 1;
        }
        let mut message = Vec::with_capacity(lines.len() + 64);
        capture::encode(&CaptureMessage::Objects { count }, &lines, &mut message);
        (count > 0).then_some(message)
    }
}

fn append(value: &impl serde::Serialize, to: &mut Vec<u8>) {
    serde_json::to_writer(to, value).expect("objects are JSON, as a test of their record shows");
}

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use penstock_policy::model::{Namespace, ObjectRef};

    use super::*;

    fn namespace(name: &str) -> ObjectChange {
        let namespace = Namespace {
            name: name.into(),
            labels: Default::default(),
            default_deny_ingress: false,
            terminating: false,
        };
        ObjectChange::Set(Object::Namespace(namespace))
    }

    /// The changes of a stream of messages, with their epochs.
    fn read(mut stream: &[u8]) -> Vec<(u32, Vec<ObjectChange>)> {
        let mut read = Vec::new();
        while let Some(decoded) = capture::decode(stream).unwrap() {
            let CaptureMessage::Changes { epoch, .. } = decoded.message else { panic!("{:?}", decoded.message) };
            read.push((epoch, serde_json::from_slice(decoded.frame).unwrap()));
            stream = &stream[decoded.length..];
        }
        read
    }

    #[test]
    fn what_a_capture_is_sent_are_the_objects_in_force_then_each_change_with_its_epoch() {
        let mut objects = NodeObjects::new("here", &[]);
        objects.apply([namespace("a"), namespace("b")], &[]);
        let mut feed = ObjectFeed::default();
        feed.follow(&mut objects, Epoch(6));
        let mut begun = feed.begin(&mut objects, Epoch(7));
        assert_eq!((begun.epoch, begun.left()), (Epoch(7), 2));
        let message = begun.next_message().unwrap();
        let decoded = capture::decode(&message).unwrap().unwrap();
        assert_eq!(decoded.message, CaptureMessage::Objects { count: 2 });
        assert_eq!(decoded.frame.iter().filter(|byte| **byte == b'\n').count(), 2);
        assert!(begun.next_message().is_none());
        objects.apply([namespace("c")], &[]);
        feed.follow(&mut objects, Epoch(8));
        feed.follow(&mut objects, Epoch(8));
        // Of ports alone.
        feed.follow(&mut objects, Epoch(9));
        let deleted = ObjectChange::Delete(ObjectRef::Namespace("a".into()));
        objects.apply([deleted.clone()], &[]);
        feed.follow(&mut objects, Epoch(10));
        let mut stream = Vec::new();
        feed.take().unwrap().iter().for_each(|step| step.encode(&mut stream));
        assert_eq!(read(&stream), [(8, vec![namespace("c")]), (9, vec![]), (10, vec![deleted])]);
        assert!(feed.take().unwrap().is_empty());
        feed.end(&mut objects);
        objects.apply([namespace("d")], &[]);
        feed.follow(&mut objects, Epoch(11));
        assert!(feed.take().unwrap().is_empty());
    }

    #[test]
    fn a_long_batch_of_changes_is_several_messages_of_one_epoch_and_too_many_are_said() {
        let mut objects = NodeObjects::new("here", &[]);
        let mut feed = ObjectFeed::default();
        feed.begin(&mut objects, Epoch(1));
        let many: Vec<ObjectChange> = (0..20_000).map(|number| namespace(&format!("namespace-{number}"))).collect();
        objects.apply(many.clone(), &[]);
        feed.follow(&mut objects, Epoch(2));
        let mut stream = Vec::new();
        feed.take().unwrap().iter().for_each(|step| step.encode(&mut stream));
        let read = read(&stream);
        assert!(read.len() > 1 && read.iter().all(|(epoch, _)| *epoch == 2), "{} messages", read.len());
        assert_eq!(read.into_iter().flat_map(|(_, changes)| changes).collect::<Vec<_>>(), many);
        for epoch in 3..=8 {
            objects.apply(many.clone(), &[]);
            feed.follow(&mut objects, Epoch(epoch));
        }
        assert_eq!(feed.take().err(), Some(TooManyChanges));
    }
}

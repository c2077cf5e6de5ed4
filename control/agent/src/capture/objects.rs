//! The objects of a capture: those in effect when it begins, and their changes in the order of epochs.
//!
//! A capture subscribes to what is published, and changes are told under the lock under which it is published. Whoever takes them under
//! that lock, after it has taken a packet, has all that were in effect for that packet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_admin::capture::{self, CaptureMessage};
use penstock_dataplane::Epoch;
use penstock_policy::model::{Object, ObjectChange};

use crate::subscribers::{Interest, Subscriber, Update};

/// Changes that may wait for a client. Then the capture ends: without a change, packets after it cannot be judged.
const MOST_WAITING: usize = 100_000;
/// Bytes of JSON after which a message ends.
const MESSAGE: usize = 1 << 18;

/// Changes of objects that the capture has not taken yet.
struct KeptChanges {
    /// Epoch of the last step.
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

/// Keeps changes for a capture, as long as that runs.
pub(in super::super) struct ObjectSubscriber(Weak<Mutex<KeptChanges>>);

impl Subscriber for ObjectSubscriber {
    fn update(&mut self, update: &Update<'_>) -> Interest {
        let Some(kept) = self.0.upgrade() else { return Interest::Ended };
        let (mut kept, changes) = (locked(&kept), update.changes);
        if changes.is_empty() && update.epoch == kept.epoch {
            return Interest::Changes;
        }
        kept.epoch = update.epoch;
        kept.waiting += changes.len().max(1);
        match kept.waiting > MOST_WAITING {
            true => kept.steps.clear(),
            false => {
                let time = nanoseconds(SystemTime::now());
                kept.steps.push(ObjectStep { epoch: update.epoch, time, changes: changes.to_vec() });
            }
        }
        Interest::Changes
    }
}

fn locked(kept: &Mutex<KeptChanges>) -> MutexGuard<'_, KeptChanges> {
    // Whoever panicked has ended the daemon.
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ObjectStep {
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

/// The objects that are in effect when a capture begins, as far as they are not sent yet, and then their changes.
pub(in super::super) struct CapturedObjects {
    pub(in super::super) epoch: Epoch,
    /// When that was, in nanoseconds since 1970.
    pub(in super::super) time: u64,
    rest: std::vec::IntoIter<Object>,
    changes: Arc<Mutex<KeptChanges>>,
}

impl CapturedObjects {
    /// The objects as they are now, and who keeps their changes from now on.
    pub(in super::super) fn begin(now: &Update<'_>) -> (ObjectSubscriber, Self) {
        let mut all = now.engine.state().objects_without_pods();
        all.extend(now.engine.state().objects_of_services());
        all.extend(now.engine.state().pods_from(0, usize::MAX).0);
        all.extend(now.engine.staged().cloned());
        let changes = Arc::new(Mutex::new(KeptChanges { epoch: now.epoch, steps: Vec::new(), waiting: 0 }));
        let time = nanoseconds(SystemTime::now());
        let subscriber = ObjectSubscriber(Arc::downgrade(&changes));
        (subscriber, Self { epoch: now.epoch, time, rest: all.into_iter(), changes })
    }

    pub(super) fn take_changes(&self) -> Result<Vec<ObjectStep>, TooManyChanges> {
        let mut kept = locked(&self.changes);
        if kept.waiting > MOST_WAITING {
            return Err(TooManyChanges);
        }
        kept.waiting = 0;
        Ok(std::mem::take(&mut kept.steps))
    }

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
    use penstock_policy::engine::{Engine, EngineSettings};
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

    struct Published {
        engine: Engine,
        subscriber: ObjectSubscriber,
    }

    impl Published {
        fn begin(objects: Vec<ObjectChange>, epoch: u32) -> (Self, CapturedObjects) {
            let mut engine = Engine::new(EngineSettings::for_node("here"));
            engine.apply(objects);
            let (subscriber, begun) = CapturedObjects::begin(&update(&engine, &[], epoch));
            (Self { engine, subscriber }, begun)
        }

        fn publish(&mut self, changes: &[ObjectChange], epoch: u32) -> Interest {
            self.engine.apply(changes.to_vec());
            self.subscriber.update(&update(&self.engine, changes, epoch))
        }
    }

    fn update<'a>(engine: &'a Engine, changes: &'a [ObjectChange], epoch: u32) -> Update<'a> {
        Update { epoch: Epoch(epoch), changes, engine, snapshot: &|| unreachable!("a capture reads no snapshot") }
    }

    #[test]
    fn a_capture_gets_the_objects_then_each_change_with_its_epoch() {
        let (mut published, mut begun) = Published::begin(vec![namespace("a"), namespace("b")], 7);
        assert_eq!((begun.epoch, begun.left()), (Epoch(7), 2));
        let message = begun.next_message().unwrap();
        let decoded = capture::decode(&message).unwrap().unwrap();
        assert_eq!(decoded.message, CaptureMessage::Objects { count: 2 });
        assert_eq!(decoded.frame.iter().filter(|byte| **byte == b'\n').count(), 2);
        assert!(begun.next_message().is_none());
        published.publish(&[namespace("c")], 8);
        published.publish(&[], 8);
        // Ports alone have changed.
        published.publish(&[], 9);
        let deleted = ObjectChange::Delete(ObjectRef::Namespace("a".into()));
        assert_eq!(published.publish(std::slice::from_ref(&deleted), 10), Interest::Changes);
        let mut stream = Vec::new();
        begun.take_changes().unwrap().iter().for_each(|step| step.encode(&mut stream));
        assert_eq!(read(&stream), [(8, vec![namespace("c")]), (9, vec![]), (10, vec![deleted])]);
        assert!(begun.take_changes().unwrap().is_empty());
        drop(begun);
        assert_eq!(published.publish(&[namespace("d")], 11), Interest::Ended);
    }

    #[test]
    fn many_changes_are_several_messages_and_too_many_are_said() {
        let (mut published, begun) = Published::begin(Vec::new(), 1);
        let many: Vec<ObjectChange> = (0..20_000).map(|number| namespace(&format!("namespace-{number}"))).collect();
        published.publish(&many, 2);
        let mut stream = Vec::new();
        begun.take_changes().unwrap().iter().for_each(|step| step.encode(&mut stream));
        let read = read(&stream);
        assert!(read.len() > 1 && read.iter().all(|(epoch, _)| *epoch == 2), "{} messages", read.len());
        assert_eq!(read.into_iter().flat_map(|(_, changes)| changes).collect::<Vec<_>>(), many);
        for epoch in 3..=8 {
            published.publish(&many, epoch);
        }
        assert_eq!(begun.take_changes().err(), Some(TooManyChanges));
    }
}

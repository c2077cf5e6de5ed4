use std::collections::BTreeMap;

use penstock_policy::model::{Namespace, Node};
use proptest::prelude::*;

use super::*;

fn namespace(name: &str, version: u64) -> ConvertedObject {
    // Its meaning changes with every third version only.
    let labels = [("third".to_owned(), (version / 3).to_string())].into();
    let object =
        Object::Namespace(Namespace { name: name.to_owned(), labels, default_deny_ingress: false, terminating: false });
    ConvertedObject {
        reference: object.reference(),
        version: Some(version),
        uid: String::new(),
        content: Interpretation::Full(object),
    }
}

/// A store of which all kinds have been listed, the namespaces of `list` among them.
fn listed(list: impl IntoIterator<Item = ConvertedObject>) -> (Store, Vec<ObjectChange>) {
    let mut store = Store::default();
    let mut list = Some(list);
    for kind in ObjectKind::ALL {
        assert_eq!(store.take(), None, "nothing is sent before all kinds are listed");
        store.begin_list(kind);
        if kind == ObjectKind::Namespace {
            list.take().into_iter().flatten().for_each(|read| store.list(kind, read));
        }
        assert!(store.end_list(kind), "the first");
    }
    let first = store.take().expect("all that there is, be it nothing");
    (store, first)
}

#[test]
fn a_version_goes_with_its_changes_or_behind_them() {
    let mut store = Store::default();
    let pods = ObjectKind::Pod as usize;
    assert_eq!(store.advance(ObjectKind::Pod, 4), 0);
    assert_eq!(store.take_versions(), None, "not all kinds are listed");
    for kind in ObjectKind::ALL {
        store.begin_list(kind);
        store.end_list(kind);
    }
    assert_eq!(store.take_versions(), None, "the first changes have not been taken");
    assert!(store.take().is_some());
    assert_eq!(store.take_versions().map(|versions| versions[pods]), Some(4));
    assert_eq!(store.take_versions(), None, "once");
    assert!(set(&mut store, "shop", 9));
    store.advance(ObjectKind::Namespace, 9);
    assert_eq!(store.take_versions(), None, "its change has not been taken");
    assert!(store.take().is_some());
    assert_eq!(store.take_versions().map(|versions| versions[ObjectKind::Namespace as usize]), Some(9));
    // Nothing of a pod's new version matters.
    assert_eq!(store.advance(ObjectKind::Pod, 11), 4);
    assert_eq!((store.take(), store.take_versions().map(|versions| versions[pods])), (None, Some(11)));
}

fn names(changes: &[ObjectChange]) -> Vec<String> {
    changes
        .iter()
        .map(|change| format!("{}{}", if matches!(change, ObjectChange::Set(_)) { "+" } else { "-" }, name_of(change)))
        .collect()
}

fn set(store: &mut Store, name: &str, version: u64) -> bool {
    store.set(ObjectKind::Namespace, namespace(name, version))
}

fn delete(store: &mut Store, name: &str, version: u64) -> bool {
    store.delete(ObjectKind::Namespace, ObjectRef::Namespace(name.to_owned()), Some(version))
}

#[test]
fn the_first_list_of_an_empty_cluster_is_reported_once() {
    let (mut store, first) = listed([]);
    assert_eq!((first, store.take()), (Vec::new(), None));
}

#[test]
fn late_and_repeated_events_are_ignored_also_for_deletions() {
    let (mut store, first) = listed([namespace("a", 9)]);
    assert_eq!(names(&first), ["+Namespace a"]);
    assert!(!set(&mut store, "a", 9) && !set(&mut store, "a", 3) && !delete(&mut store, "a", 8));
    assert_eq!(store.take(), None);
    assert!(!set(&mut store, "a", 10), "newer, but of the same meaning");
    assert!(set(&mut store, "a", 12));
    assert!(delete(&mut store, "a", 15));
    assert!(!set(&mut store, "a", 12) && !set(&mut store, "a", 15) && !delete(&mut store, "a", 15));
    assert_eq!(names(&store.take().unwrap()), ["-Namespace a"]);
    assert!(set(&mut store, "a", 18), "made again");
    assert!(!delete(&mut store, "never-seen", 20) && !set(&mut store, "never-seen", 19), "deleted before it was seen");
    assert_eq!(names(&store.take().unwrap()), ["+Namespace a"]);
    assert_eq!(store.count(ObjectKind::Namespace), (1, 0));
}

#[test]
fn a_list_replaces_all_objects_of_its_kind() {
    let (mut store, _) = listed([namespace("a", 3), namespace("b", 6), namespace("c", 9)]);
    store.begin_list(ObjectKind::Namespace);
    store.list(ObjectKind::Namespace, namespace("d", 12));
    assert_eq!(store.take(), None, "half a list is none");
    // The list broke off and begins again.
    store.begin_list(ObjectKind::Namespace);
    store.list(ObjectKind::Namespace, namespace("a", 3));
    store.list(ObjectKind::Namespace, namespace("b", 15));
    store.list(ObjectKind::Namespace, namespace("b", 13));
    assert!(!store.end_list(ObjectKind::Namespace));
    assert_eq!(names(&store.take().unwrap()), ["-Namespace c", "+Namespace b"]);
    // A list is the current state, even if the cluster was restored from a backup.
    store.begin_list(ObjectKind::Namespace);
    store.list(ObjectKind::Namespace, namespace("b", 3));
    store.end_list(ObjectKind::Namespace);
    assert_eq!(names(&store.take().unwrap()), ["-Namespace a", "+Namespace b"]);
    assert!(set(&mut store, "b", 6), "versions count from there");
}

#[test]
fn one_batch_of_changes_is_in_an_order_that_can_be_applied() {
    let (mut store, _) = listed([namespace("old", 3)]);
    let node = |name: &str| {
        let object = Object::Node(Node {
            name: name.to_owned(),
            labels: Default::default(),
            addresses: Vec::new(),
            status_addresses: Vec::new(),
        });
        ConvertedObject {
            reference: object.reference(),
            version: Some(30),
            uid: String::new(),
            content: Interpretation::Full(object),
        }
    };
    store.set(ObjectKind::Node, node("y"));
    store.set(ObjectKind::Node, node("x"));
    set(&mut store, "new", 6);
    delete(&mut store, "old", 9);
    assert_eq!(names(&store.take().unwrap()), ["-Namespace old", "+Namespace new", "+Node y", "+Node x"]);
}

#[test]
fn an_invalid_object_is_counted_and_replaces_a_valid_one() {
    let (mut store, _) = listed([namespace("a", 3)]);
    let nothing = |version| ConvertedObject {
        content: Interpretation::Unusable { problem: "why".to_owned() },
        ..namespace("a", version)
    };
    assert!(store.set(ObjectKind::Namespace, nothing(6)));
    assert_eq!(
        (names(&store.take().unwrap()), store.count(ObjectKind::Namespace)),
        (vec!["-Namespace a".to_owned()], (1, 1))
    );
    // So it is in a list, and with another version.
    store.begin_list(ObjectKind::Namespace);
    store.list(ObjectKind::Namespace, nothing(9));
    store.end_list(ObjectKind::Namespace);
    assert_eq!((store.take(), store.count(ObjectKind::Namespace)), (None, (1, 1)));
    let Interpretation::Full(object) = namespace("a", 12).content else { unreachable!("as it is built") };
    let part = ConvertedObject {
        content: Interpretation::Restricted { object, problem: "some".to_owned() },
        ..namespace("a", 12)
    };
    assert!(store.set(ObjectKind::Namespace, part));
    assert_eq!(
        (names(&store.take().unwrap()), store.count(ObjectKind::Namespace)),
        (vec!["+Namespace a".to_owned()], (1, 1))
    );
    assert!(!set(&mut store, "a", 13), "understood again, and of the same meaning");
    assert_eq!((store.take(), store.count(ObjectKind::Namespace)), (None, (1, 0)));
    delete(&mut store, "a", 15);
    assert_eq!(store.count(ObjectKind::Namespace), (0, 0));
}

/// One thing that happens to one of a few names; its version is its place in the sequence.
#[derive(Clone, Copy, Debug)]
enum Step {
    Set(u8),
    Delete(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0u8..5, any::<bool>()).prop_map(|(name, sets)| if sets { Step::Set(name) } else { Step::Delete(name) });
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// Each event comes once or several times and early or late, with lists in between. The changes sent end in the last
    /// versions.
    #[test]
    fn events_in_any_order_end_in_the_last_versions(
        steps in steps(),
        order in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..200),
    ) {
        let version = |place: usize| 3 * (place as u64 + 1);
        let name = |number: u8| format!("n{number}");
        let expected = |up_to: usize| {
            let mut expected = BTreeMap::new();
            for (place, step) in steps[..up_to].iter().enumerate() {
                match *step {
                    Step::Set(number) => drop(expected.insert(name(number), version(place))),
                    Step::Delete(number) => drop(expected.remove(&name(number))),
                }
            }
            expected
        };
        let (mut store, _) = listed([]);
        let mut received: BTreeMap<ObjectRef, Object> = BTreeMap::new();
        let mut take = |store: &mut Store| for change in store.take().unwrap_or_default() {
            match change {
                ObjectChange::Set(object) => drop(received.insert(object.reference(), object)),
                ObjectChange::Delete(reference) => drop(received.remove(&reference)),
            }
        };
        let event = |store: &mut Store, place: usize| match steps[place] {
            Step::Set(number) => set(store, &name(number), version(place)),
            Step::Delete(number) => delete(store, &name(number), version(place)),
        };
        for (index, what) in order {
            match what {
                0 => take(&mut store),
                // A list of the state after some of the steps; the later events follow again.
                1 => {
                    let up_to = index.index(steps.len() + 1);
                    store.begin_list(ObjectKind::Namespace);
                    expected(up_to).iter().for_each(|(name, &version)| store.list(ObjectKind::Namespace, namespace(name, version)));
                    store.end_list(ObjectKind::Namespace);
                    for place in up_to..steps.len() {
                        event(&mut store, place);
                    }
                }
                _ => {
                    event(&mut store, index.index(steps.len()));
                }
            }
        }
        // In the end each event has come at least once.
        for place in 0..steps.len() {
            event(&mut store, place);
        }
        take(&mut store);
        let received: BTreeMap<String, ConvertedObject> = received.into_values().map(|object| (object.reference().to_string(), object))
            .map(|(name, object)| (name, ConvertedObject { reference: object.reference(), version: None, uid: String::new(), content: Interpretation::Full(object) }))
            .collect();
        let expected: BTreeMap<String, ConvertedObject> = expected(steps.len()).into_iter()
            .map(|(name, version)| namespace(&name, version))
            .map(|read| (read.reference.to_string(), ConvertedObject { version: None, ..read }))
            .collect();
        prop_assert_eq!(received, expected);
    }
}

#[test]
fn content_that_has_no_reading_keeps_the_last_one_that_had() {
    let kept = |name: &str, version| ConvertedObject {
        content: Interpretation::Kept { problem: "what it says is not understood".to_owned() },
        ..namespace(name, version)
    };
    let (mut store, first) = listed([namespace("a", 3), kept("b", 3)]);
    assert_eq!(names(&first), ["+Namespace a"], "b had none");
    assert!(!store.set(ObjectKind::Namespace, kept("a", 6)));
    assert_eq!((store.take(), store.count(ObjectKind::Namespace)), (None, (2, 2)));
    store.begin_list(ObjectKind::Namespace);
    store.list(ObjectKind::Namespace, kept("a", 9));
    store.list(ObjectKind::Namespace, kept("b", 9));
    store.end_list(ObjectKind::Namespace);
    assert_eq!(store.take(), None, "also by a new list");
    assert!(!set(&mut store, "a", 5), "of an older version");
    assert!(set(&mut store, "a", 12));
    assert_eq!(names(&store.take().unwrap()), ["+Namespace a"]);
    assert_eq!(store.count(ObjectKind::Namespace), (2, 1));
}

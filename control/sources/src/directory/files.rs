//! The files of a directory and the objects in force. No I/O.
//!
//! Each file has its latest contents and its last valid objects. The objects in force have no conflicts: of every file the
//! latest contents if they are valid and do not conflict with other files, or else its last valid objects. A file that was written
//! in place and is now the beginning of what it was, or empty, may be what a failed write has left: it counts once it stays so.
//!
//! At a start there may be no valid objects of a file. Those of the last run stand for it then, until no file is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_policy::model::{Object, ObjectChange, ObjectRef};

use crate::manifest::{self, ManifestError, ManifestErrors, ManifestProblem, Manifests, Options, Origin};

/// A file that has lost its end must stay as it is for this long: longer than a write takes.
pub(super) const STABLE: Duration = Duration::from_secs(10);

/// The result of one or several saves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectoryChanges {
    /// Changes since the last batch: deletions first, then namespaces, nodes, pods, policies.
    pub changes: Vec<ObjectChange>,
    /// New errors. Their files keep their last valid objects.
    pub problems: Vec<ManifestError>,
    /// Files whose errors are fixed.
    pub fixed: Vec<PathBuf>,
    /// Files that count now though they have lost their end, or all they had.
    pub shortened: Vec<PathBuf>,
    /// How many files are not applied now.
    pub refused: usize,
}

impl DirectoryChanges {
    /// Whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.problems.is_empty() && self.fixed.is_empty() && self.shortened.is_empty()
    }
}

type Objects = Arc<[(Object, Origin)]>;

#[derive(Debug)]
struct File {
    /// Its latest contents.
    latest: Result<Objects, ManifestErrors>,
    /// The text of its last contents that were valid.
    text: String,
    /// Later contents that are the beginning of that text.
    cut: Option<Cut>,
    /// Its objects in force.
    last_valid: Objects,
    /// The errors reported last.
    reported: Vec<ManifestError>,
}

/// Contents without the end that they had.
#[derive(Debug)]
struct Cut {
    objects: Objects,
    text: String,
    since: Instant,
}

/// How a file got its contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Written {
    /// Into the same file: what is there may be a part.
    InPlace,
    /// As a file that took the name of another one, or is new.
    Whole,
}

/// All files of a directory.
#[derive(Debug)]
pub(super) struct Files {
    options: Options,
    files: BTreeMap<PathBuf, File>,
    /// Objects of files deleted since the last [`Files::update`].
    gone: Vec<Objects>,
    /// Objects of the last run, for files that have had no valid contents since.
    kept: Objects,
    /// Namespaces that objects use and no file defines.
    implied: Vec<Object>,
    /// Whether a file changed since the last [`Files::update`].
    is_outdated: bool,
}

impl Files {
    pub(super) fn new(options: Options) -> Self {
        Self {
            options,
            files: BTreeMap::new(),
            gone: Vec::new(),
            kept: Objects::default(),
            implied: Vec::new(),
            is_outdated: false,
        }
    }

    /// Sets a file's new contents, or the error of reading it.
    pub(super) fn set(
        &mut self,
        path: &Path,
        contents: Result<String, ManifestErrors>,
        written: Written,
        now: Instant,
    ) {
        self.is_outdated = true;
        let name: Arc<Path> = Arc::from(path);
        let parsed = contents.and_then(|text| {
            let objects = located(manifest::parse_file(&name, &text, &self.options)?);
            Ok((objects, text))
        });
        let file = self.files.entry(path.to_owned()).or_insert_with(File::new);
        match parsed {
            Ok((objects, text)) if written == Written::InPlace && file.has_lost(&objects, &text) => {
                let since = file.cut.take().filter(|cut| cut.text == text).map_or(now, |cut| cut.since);
                file.cut = Some(Cut { objects, text, since });
            }
            Ok((objects, text)) => file.take(objects, text),
            Err(errors) => (file.latest, file.cut) = (Err(errors), None),
        }
    }

    /// For a start with files that are refused: the objects of the last run stand for what these had, unless another file has
    /// them.
    pub(super) fn keep(&mut self, last: Vec<Object>) {
        let origin = Origin { file: Arc::from(Path::new("")), line: None };
        self.kept = last.into_iter().map(|object| (object, origin.clone())).collect();
        let in_force: Vec<Objects> = self.files.values().map(|file| Arc::clone(&file.last_valid)).collect();
        self.kept = self.kept_beside(&in_force);
        self.is_outdated = true;
    }

    /// How many files are not applied.
    pub(super) fn refused(&self) -> usize {
        self.files.values().filter(|file| !file.reported.is_empty()).count()
    }

    /// The known files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.keys()
    }

    /// Removes a file and its objects.
    pub(super) fn remove(&mut self, path: &Path) {
        if let Some(file) = self.files.remove(path) {
            self.is_outdated = true;
            self.gone.push(file.last_valid);
        }
    }

    /// Determines the objects in force and returns what changed.
    pub(super) fn update(&mut self, now: Instant) -> DirectoryChanges {
        let mut batch = DirectoryChanges { shortened: self.take_stable(now), ..DirectoryChanges::default() };
        if !std::mem::take(&mut self.is_outdated) {
            return DirectoryChanges { refused: self.refused(), ..batch };
        }
        let has_new_claims = self.has_new_claims();
        let (usable, mut errors) = if has_new_claims { self.usable() } else { (self.latest(), BTreeMap::new()) };
        let mut before: Vec<Objects> = std::mem::take(&mut self.gone);
        let mut after = Vec::new();
        if !self.kept.is_empty() {
            let kept = if errors.is_empty() { Objects::default() } else { self.kept_beside(&usable) };
            after.push(Arc::clone(&kept));
            before.push(std::mem::replace(&mut self.kept, kept));
        }
        for ((path, file), usable) in self.files.iter_mut().zip(usable) {
            let of_file = errors.remove(path).unwrap_or_default();
            if of_file.is_empty() && !file.reported.is_empty() {
                batch.fixed.push(path.clone());
            }
            batch.problems.extend(of_file.iter().filter(|error| !file.reported.contains(error)).cloned());
            file.reported = of_file;
            if !Arc::ptr_eq(&file.last_valid, &usable) {
                after.push(Arc::clone(&usable));
                before.push(std::mem::replace(&mut file.last_valid, usable));
            }
        }
        if !before.is_empty() || !after.is_empty() {
            let implied_before = self.implied.clone();
            if has_new_claims {
                self.implied = manifest::implied_namespaces(self.written());
            }
            batch.changes = difference(in_files(&before).chain(&implied_before), in_files(&after).chain(&self.implied));
        }
        batch.refused = self.refused();
        batch
    }

    /// Takes files as they are that have lost their end and stayed so.
    fn take_stable(&mut self, now: Instant) -> Vec<PathBuf> {
        let is_stable = |cut: &mut Cut| now.saturating_duration_since(cut.since) >= STABLE;
        let mut taken = Vec::new();
        for (path, file) in &mut self.files {
            if let Some(Cut { objects, text, .. }) = file.cut.take_if(is_stable) {
                file.take(objects, text);
                taken.push(path.clone());
                self.is_outdated = true;
            }
        }
        taken
    }

    /// What is left of the objects of the last run beside these: of one name or address is one.
    fn kept_beside(&self, usable: &[Objects]) -> Objects {
        let files = || in_files(usable);
        let names: BTreeSet<ObjectRef> = files().map(Object::reference).collect();
        let addresses: BTreeSet<&IpAddr> = files().flat_map(manifest::owned_addresses).collect();
        let is_left = |object: &Object| {
            !names.contains(&object.reference())
                && !manifest::owned_addresses(object).iter().any(|address| addresses.contains(address))
        };
        self.kept.iter().filter(|(object, _)| is_left(object)).cloned().collect()
    }

    /// Whether some file names other objects, or other addresses of pods, than it had in force, or has an error. If none does, its
    /// objects conflict with no others, and use no other namespaces: then an edit of one object costs nothing for all others.
    fn has_new_claims(&self) -> bool {
        let is_same = |file: &File| {
            if file.cut.is_some() {
                return false;
            }
            let claims_the_same = |latest: &Objects| {
                Arc::ptr_eq(latest, &file.last_valid)
                    || latest
                        .iter()
                        .map(|(object, _)| claims(object))
                        .eq(file.last_valid.iter().map(|(o, _)| claims(o)))
            };
            file.latest.as_ref().is_ok_and(claims_the_same)
        };
        !(self.gone.is_empty() && self.kept.is_empty() && self.files.values().all(is_same))
    }

    /// The latest contents of each file, in the files' order; of one with errors the last valid ones.
    fn latest(&self) -> Vec<Objects> {
        self.files.values().map(|file| Arc::clone(file.latest.as_ref().unwrap_or(&file.last_valid))).collect()
    }

    /// All objects in force, implied namespaces included.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.implied.iter().chain(self.written())
    }

    fn written(&self) -> impl Iterator<Item = &Object> {
        let kept = self.kept.iter().map(|(object, _)| object);
        self.files.values().flat_map(|file| file.last_valid.iter().map(|(object, _)| object)).chain(kept)
    }

    /// The objects of each file that can be in force, in the files' order, and the errors of files whose latest contents
    /// cannot.
    ///
    /// Starts with the latest contents of all files, so that an object can move between files and two pods can swap their
    /// addresses, in any order of saves. While two files conflict, both fall back to their last valid objects, which never
    /// conflict.
    fn usable(&self) -> (Vec<Objects>, BTreeMap<PathBuf, Vec<ManifestError>>) {
        let mut errors: BTreeMap<PathBuf, Vec<ManifestError>> = BTreeMap::new();
        let mut usable = self.latest();
        for (path, file) in &self.files {
            if let Err(ManifestErrors(of_file)) = &file.latest {
                errors.insert(path.clone(), of_file.clone());
            } else if file.cut.is_some() {
                errors.insert(path.clone(), vec![manifest::of_path(path, ManifestProblem::CutOff(STABLE.as_secs()))]);
            }
        }
        loop {
            // The file of each object in the sequence.
            let owners: Vec<usize> =
                usable.iter().enumerate().flat_map(|(i, usable)| usable.iter().map(move |_| i)).collect();
            let conflicts = manifest::conflicts(usable.iter().flat_map(|usable| usable.iter()).map(|(o, at)| (o, at)));
            let mut fell_back = false;
            for conflict in conflicts {
                for (i, (path, file)) in self.files.iter().enumerate() {
                    let error = match i {
                        _ if Arc::ptr_eq(&usable[i], &file.last_valid) => continue,
                        _ if i == owners[conflict.second] => &conflict.at_second,
                        _ if i == owners[conflict.first] => &conflict.at_first,
                        _ => continue,
                    };
                    errors.entry(path.clone()).or_default().push(error.clone());
                    fell_back = true;
                }
            }
            if !fell_back {
                return (usable, errors);
            }
            for (usable, (path, file)) in usable.iter_mut().zip(&self.files) {
                if errors.contains_key(path) {
                    *usable = Arc::clone(&file.last_valid);
                }
            }
        }
    }
}

impl File {
    /// One without contents.
    fn new() -> Self {
        let none = Objects::default();
        Self { latest: Ok(none.clone()), text: String::new(), cut: None, last_valid: none, reported: Vec::new() }
    }

    /// Takes valid contents.
    fn take(&mut self, objects: Objects, text: String) {
        (self.latest, self.text, self.cut) = (Ok(objects), text, None);
    }

    /// Whether these contents lack objects that the last valid ones had, and are the beginning of their text.
    fn has_lost(&self, objects: &Objects, text: &str) -> bool {
        let in_force = || self.last_valid.iter().map(|(object, _)| object);
        self.text.len() > text.len() && self.text.starts_with(text) && !in_force().eq(objects.iter().map(|(o, _)| o))
    }
}

/// What only one object may have: its name, and a pod's addresses.
fn claims(object: &Object) -> (ObjectRef, &[IpAddr]) {
    (object.reference(), manifest::owned_addresses(object))
}

fn located(manifests: Manifests) -> Objects {
    manifests.documents.into_iter().map(|document| (document.object, document.origin)).collect()
}

fn in_files(files: &[Objects]) -> impl Iterator<Item = &Object> {
    files.iter().flat_map(|file| file.iter().map(|(object, _)| object))
}

/// The changes from one set of objects to another.
fn difference<'a>(
    before: impl Iterator<Item = &'a Object>,
    after: impl Iterator<Item = &'a Object>,
) -> Vec<ObjectChange> {
    fn by_name<'a>(objects: impl Iterator<Item = &'a Object>) -> BTreeMap<ObjectRef, &'a Object> {
        objects.map(|object| (object.reference(), object)).collect()
    }
    let (before, after) = (by_name(before), by_name(after));
    let gone = before.keys().filter(|name| !after.contains_key(*name));
    let mut changes: Vec<ObjectChange> = gone.map(|name| ObjectChange::Delete(name.clone())).collect();
    let set = after.into_iter().filter(|(name, object)| before.get(name) != Some(object));
    changes.extend(set.map(|(_, object)| ObjectChange::Set(object.clone())));
    changes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pod(name: &str, address: &str) -> String {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, status: {{podIPs: [{{ip: {address}}}]}}}}\n---\n"
        )
    }

    fn set(files: &mut Files, path: &str, pods: &[(&str, &str)]) {
        files.set(
            Path::new(path),
            Ok(pods.iter().map(|(name, address)| pod(name, address)).collect()),
            Written::Whole,
            Instant::now(),
        );
    }

    /// `+name address` and `-name`, in order; of namespaces with their labels.
    fn reported(batch: &DirectoryChanges) -> Vec<String> {
        let describe = |change: &ObjectChange| match change {
            ObjectChange::Set(Object::Pod(pod)) => format!("+{} {}", pod.key.name, pod.addresses[0]),
            ObjectChange::Set(Object::Namespace(namespace)) => format!("+{} {:?}", namespace.name, namespace.labels),
            ObjectChange::Delete(ObjectRef::Pod(key)) => format!("-{}", key.name),
            ObjectChange::Delete(ObjectRef::Namespace(name)) => format!("-{name}"),
            other => panic!("{other:?}"),
        };
        batch.changes.iter().map(describe).collect()
    }

    /// With the namespace that the pods are in.
    fn files() -> Files {
        let mut files = Files::new(Options::default());
        let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: default}}";
        files.set(Path::new("default.yaml"), Ok(namespace.to_owned()), Written::Whole, Instant::now());
        files.update(Instant::now());
        files
    }

    #[test]
    fn an_undefined_namespace_exists_while_objects_use_it() {
        let mut files = Files::new(Options::default());
        let named = r#"+default {"kubernetes.io/metadata.name": "default"}"#;
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        assert_eq!(reported(&files.update(Instant::now())), [named, "+x 10.0.0.1"]);
        let defined = "{apiVersion: v1, kind: Namespace, metadata: {name: default, labels: {a: b}}}";
        files.set(Path::new("b.yaml"), Ok(defined.to_owned()), Written::Whole, Instant::now());
        let labelled = r#"+default {"a": "b", "kubernetes.io/metadata.name": "default"}"#;
        assert_eq!(reported(&files.update(Instant::now())), [labelled]);
        files.remove(Path::new("b.yaml"));
        assert_eq!(reported(&files.update(Instant::now())), [named], "its own labels go, the namespace stays");
        set(&mut files, "a.yaml", &[]);
        assert_eq!(reported(&files.update(Instant::now())), ["-default", "-x"]);
    }

    #[test]
    fn only_differences_are_reported() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1"), ("y", "10.0.0.2")]);
        assert_eq!(reported(&files.update(Instant::now())), ["+x 10.0.0.1", "+y 10.0.0.2"]);
        set(&mut files, "a.yaml", &[("y", "10.0.0.3"), ("z", "10.0.0.4"), ("x", "10.0.0.1")]);
        assert_eq!(reported(&files.update(Instant::now())), ["+y 10.0.0.3", "+z 10.0.0.4"]);
        set(&mut files, "a.yaml", &[("z", "10.0.0.4")]);
        assert_eq!(reported(&files.update(Instant::now())), ["-x", "-y"]);
        assert!(files.update(Instant::now()).is_empty());
        files.remove(Path::new("a.yaml"));
        assert_eq!(reported(&files.update(Instant::now())), ["-z"]);
        assert_eq!(files.objects().count(), 1);
    }

    #[test]
    fn a_broken_file_keeps_its_last_good_objects_and_is_reported_once() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
        files.update(Instant::now());
        let broken = || Ok(format!("{}{}", pod("x", "10.0.0.9"), pod("z", "10.0.0.999")));
        files.set(Path::new("a.yaml"), broken(), Written::Whole, Instant::now());
        set(&mut files, "b.yaml", &[("y", "10.0.0.3")]);
        let batch = files.update(Instant::now());
        assert_eq!(reported(&batch), ["+y 10.0.0.3"], "one file's error does not stop the other");
        assert_eq!(batch.problems.len(), 1);
        assert!(batch.problems[0].to_string().starts_with("a.yaml:3: Pod default/z: status.podIPs[0].ip: "));
        files.set(Path::new("a.yaml"), broken(), Written::Whole, Instant::now());
        assert!(files.update(Instant::now()).is_empty(), "the same error is not reported again");
        files.set(Path::new("a.yaml"), Ok("a: [".to_owned()), Written::Whole, Instant::now());
        let batch = files.update(Instant::now());
        assert!(matches!(&batch.problems[..], [error] if error.to_string().contains("YAML")), "{batch:?}");
        set(&mut files, "a.yaml", &[("x", "10.0.0.9")]);
        let batch = files.update(Instant::now());
        assert_eq!((reported(&batch), batch.fixed), (vec!["+x 10.0.0.9".to_owned()], vec![PathBuf::from("a.yaml")]));
    }

    #[test]
    fn a_file_that_was_never_valid_adds_and_removes_nothing() {
        let mut files = files();
        files.set(Path::new("a.yaml"), Ok("kind: Pod".to_owned()), Written::Whole, Instant::now());
        assert_eq!(files.update(Instant::now()).problems.len(), 1);
        files.remove(Path::new("a.yaml"));
        assert!(files.update(Instant::now()).is_empty());
    }

    #[test]
    fn an_object_moves_between_files_in_either_order_of_saves() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1"), ("y", "10.0.0.2")]);
        files.update(Instant::now());
        set(&mut files, "b.yaml", &[("x", "10.0.0.1")]);
        let batch = files.update(Instant::now());
        assert!(batch.changes.is_empty(), "{batch:?}");
        let problem = batch.problems[0].to_string();
        assert_eq!(problem, "b.yaml:1: Pod default/x: is defined twice, also at a.yaml:1: remove one, or rename it");
        set(&mut files, "a.yaml", &[("y", "10.0.0.2")]);
        let batch = files.update(Instant::now());
        assert!(batch.changes.is_empty() && batch.problems.is_empty(), "it is the same object: {batch:?}");
        assert_eq!(batch.fixed, [PathBuf::from("b.yaml")]);
        set(&mut files, "b.yaml", &[]);
        assert_eq!(reported(&files.update(Instant::now())), ["-x"]);
    }

    #[test]
    fn two_pods_exchange_their_addresses_over_two_saves() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
        files.update(Instant::now());
        set(&mut files, "a.yaml", &[("x", "10.0.0.2")]);
        let batch = files.update(Instant::now());
        assert!(batch.changes.is_empty());
        assert_eq!(
            batch.problems[0].to_string(),
            "a.yaml:1: Pod default/x: address 10.0.0.2 is also that of Pod default/y at b.yaml:1: give each pod its own"
        );
        set(&mut files, "b.yaml", &[("y", "10.0.0.1")]);
        assert_eq!(reported(&files.update(Instant::now())), ["+x 10.0.0.2", "+y 10.0.0.1"]);
    }

    #[test]
    fn a_fallback_can_force_another_file_to_fall_back() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
        files.update(Instant::now());
        // b takes the address that a leaves; but a also repeats a name within itself, so it does not leave it.
        set(&mut files, "a.yaml", &[("x", "10.0.0.3"), ("x", "10.0.0.4")]);
        set(&mut files, "b.yaml", &[("y", "10.0.0.1")]);
        let batch = files.update(Instant::now());
        assert!(batch.changes.is_empty(), "{batch:?}");
        assert_eq!(batch.problems.len(), 2);
        assert_eq!(files.objects().count(), 3);
    }

    /// The number of a name, the last part of an address, and a label's value.
    type SavedPod = (usize, u8, u8);

    /// A file's number, and the pods that a save leaves in it; `None`: the file is gone.
    fn any_save() -> impl Strategy<Value = (usize, Option<Vec<SavedPod>>)> {
        let pods = prop::collection::vec((0..3usize, 1..4u8, 0..2u8), 0..3);
        (0..3usize, prop_oneof![8 => pods.prop_map(Some), 1 => Just(None)])
    }

    proptest! {
        #[test]
        fn what_is_in_force_has_no_conflicts_and_is_what_files_say_as_soon_as_they_agree(
            saves in prop::collection::vec((any_save(), any::<bool>()), 1..30)
        ) {
            let text = |pods: &[SavedPod]| -> String {
                pods.iter().map(|(name, address, label)| {
                    format!(
                        "{{apiVersion: v1, kind: Pod, metadata: {{namespace: n{}, name: {}, labels: {{l: '{label}'}}}}, \
                         status: {{podIPs: [{{ip: 10.0.0.{address}}}]}}}}\n---\n",
                        name % 2,
                        ["x", "y", "z"][*name]
                    )
                }).collect()
            };
            let paths = ["a.yaml", "b.yaml", "c.yaml"].map(Path::new);
            let mut files = Files::new(Options::default());
            let mut followed: BTreeMap<ObjectRef, Object> = BTreeMap::new();
            let mut saved: [Vec<SavedPod>; 3] = Default::default();
            for ((file, pods), is_updated) in saves {
                match &pods {
                    Some(pods) => files.set(paths[file], Ok(text(pods)), Written::Whole, Instant::now()),
                    None => files.remove(paths[file]),
                }
                saved[file] = pods.unwrap_or_default();
                if !is_updated {
                    continue;
                }
                for change in files.update(Instant::now()).changes {
                    match change {
                        ObjectChange::Set(object) => followed.insert(object.reference(), object),
                        ObjectChange::Delete(name) => followed.remove(&name),
                    };
                }
                let in_force: BTreeMap<_, _> = files.objects().map(|object| (object.reference(), object.clone())).collect();
                prop_assert_eq!(&followed, &in_force, "what was reported is what is in force");
                let owned: Vec<IpAddr> = in_force.values().flat_map(manifest::owned_addresses).copied().collect();
                prop_assert_eq!(owned.iter().collect::<BTreeSet<_>>().len(), owned.len(), "an address has one pod: {:?}", owned);
                let all: Vec<_> = saved.iter().flatten().collect();
                let names: BTreeSet<_> = all.iter().map(|(name, ..)| name).collect();
                let addresses: BTreeSet<_> = all.iter().map(|(_, address, _)| address).collect();
                if names.len() == all.len() && addresses.len() == all.len() {
                    let labels = |object: &Object| match object {
                        Object::Pod(pod) => Some((pod.addresses[0], pod.labels["l"].clone())),
                        _ => None,
                    };
                    let found: BTreeSet<_> = in_force.values().filter_map(labels).collect();
                    let wanted = all.iter().map(|(_, address, label)| (IpAddr::from([10, 0, 0, *address]), label.to_string()));
                    prop_assert_eq!(found, wanted.collect::<BTreeSet<_>>());
                }
            }
        }
    }

    #[test]
    fn a_file_that_lost_its_end_in_place_keeps_its_objects_until_stable() {
        let both = pod("x", "10.0.0.1") + &pod("y", "10.0.0.2");
        let first = pod("x", "10.0.0.1");
        // Its text, how it was written, and what is gone at once.
        let cases: [(&str, Written, &[&str]); 6] = [
            ("", Written::InPlace, &[]),
            ("# ", Written::InPlace, &["-x", "-y"]),
            (&first, Written::InPlace, &[]),
            ("", Written::Whole, &["-x", "-y"]),
            (&first, Written::Whole, &["-y"]),
            (&both[..both.len() - 4], Written::InPlace, &[]),
        ];
        for (text, written, gone) in cases {
            let (mut files, now) = (files(), Instant::now());
            let path = Path::new("a.yaml");
            let after = |seconds| now + Duration::from_secs(seconds);
            files.set(path, Ok(both.clone()), Written::Whole, now);
            files.update(now);
            files.set(path, Ok(text.to_owned()), written, now);
            let batch = files.update(now);
            assert_eq!(reported(&batch), gone, "{text:?}");
            let is_held = gone.is_empty() && text.len() < both.len() - 4;
            assert_eq!((batch.refused, batch.problems.len()), (is_held.into(), is_held.into()), "{text:?}");
            // The same again, as its owner sees it.
            files.set(path, Ok(text.to_owned()), Written::InPlace, after(5));
            assert!(reported(&files.update(after(9))).is_empty(), "{text:?}");
            let batch = files.update(after(11));
            assert_eq!(batch.shortened.len(), usize::from(is_held), "{text:?}");
            assert_eq!((reported(&batch).is_empty(), batch.refused), (!is_held, 0), "{text:?}");
            assert!(files.update(after(30)).is_empty());
        }
    }

    #[test]
    fn objects_of_the_last_run_stand_for_refused_files_until_none_is() {
        let objects = |text: &str| {
            let read = manifest::parse_file(&Arc::from(Path::new("last")), text, &Options::default()).unwrap();
            read.documents.into_iter().map(|document| document.object).collect::<Vec<_>>()
        };
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.7")]);
        files.set(Path::new("b.yaml"), Ok("kind: Pod".to_owned()), Written::Whole, Instant::now());
        files.update(Instant::now());
        files.keep(objects(&(pod("x", "10.0.0.1") + &pod("y", "10.0.0.2") + &pod("z", "10.0.0.7"))));
        assert_eq!(files.update(Instant::now()).refused, 1);
        let pods: Vec<String> = files
            .objects()
            .filter_map(|object| match object {
                Object::Pod(pod) => Some(format!("{} {}", pod.key.name, pod.addresses[0])),
                _ => None,
            })
            .collect();
        assert_eq!(pods, ["x 10.0.0.7", "y 10.0.0.2"], "of one name or address is one");
        set(&mut files, "b.yaml", &[("w", "10.0.0.2")]);
        let batch = files.update(Instant::now());
        assert_eq!((reported(&batch), batch.refused), (vec!["-y".to_owned(), "+w 10.0.0.2".to_owned()], 0));
    }

    #[test]
    fn a_file_can_be_renamed_over_another() {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        files.update(Instant::now());
        files.remove(Path::new("a.yaml"));
        set(&mut files, "b.yaml", &[("x", "10.0.0.1")]);
        assert!(files.update(Instant::now()).is_empty(), "the object is the same");
        assert_eq!(files.objects().count(), 2);
    }
}

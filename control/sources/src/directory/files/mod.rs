//! The files of a directory and the objects in effect. No I/O.
//!
//! Each file has its latest contents and its last valid objects. The objects in effect have no conflicts: of every file the
//! latest contents if they are valid and do not conflict with other files, or else its last valid objects. A file that was written
//! in place and is now the beginning of what it was may be what a failed write has left: it counts once it stays so. One that had
//! objects and has none any more is refused: whoever means it deletes the file.
//!
//! At a start there may be no valid objects of a file. Those of the last run stand for it then, until no file is refused. If the last
//! run's are not known, a refused file has what can be read of it, and policies that close the pods that the rest may be about.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_policy::model::{
    ClusterNetworkPolicy, ClusterRule, ClusterTier, LabelOperator, NetworkPolicy, Object, ObjectChange, ObjectKey,
    ObjectRef, Peers, PolicyNotes, PolicyPorts, Requirement, Rule, RuleAction, Selector, Staging, Subject,
};

use crate::manifest::{self, ManifestError, ManifestErrors, ManifestProblem, Manifests, Options, Origin, Scope};

/// A file that has lost its end must stay as it is for this long: longer than a write takes.
pub(super) const STABLE: Duration = Duration::from_secs(10);

/// The result of one or several saves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectoryChanges {
    /// Changes since the last batch: deletions first, then namespaces, nodes, pods, policies.
    pub changes: Vec<ObjectChange>,
    /// New errors. Their files keep their last valid objects.
    pub problems: Vec<ManifestError>,
    /// Files whose errors are fixed, or that are deleted.
    pub fixed: Vec<PathBuf>,
    /// Files that count now though they have lost their end.
    pub shortened: Vec<PathBuf>,
    pub refused: usize,
    /// Why the directory can't be read, while it can't: all objects stay as they are.
    pub unreadable: Option<String>,
}

impl DirectoryChanges {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.problems.is_empty() && self.fixed.is_empty() && self.shortened.is_empty()
    }
}

/// The names of policies that close what a refused file may be about begin with this, which no object of Kubernetes may have in
/// its name. The path of the file follows.
const CLOSING: &str = "unread:";

/// The manifest that this policy stands for, if it is one that closes what a refused manifest may be about.
pub fn unread_manifest(policy: &ObjectRef) -> Option<&str> {
    match policy {
        ObjectRef::NetworkPolicy(key) => key.name.strip_prefix(CLOSING),
        ObjectRef::ClusterNetworkPolicy(name) => name.strip_prefix(CLOSING),
        _ => None,
    }
}

type Objects = Arc<[(Object, Origin)]>;

#[derive(Debug)]
struct File {
    /// Its latest contents.
    latest: Result<Objects, ManifestErrors>,
    /// The objects of its latest contents that can be read, if others can't.
    readable: Objects,
    /// The text of its last contents that were valid.
    text: String,
    /// Later contents that are the beginning of that text.
    cut: Option<Cut>,
    /// Its objects in effect.
    last_valid: Objects,
    reported: Vec<ManifestError>,
}

/// Contents without the end that they had.
#[derive(Debug)]
struct Cut {
    objects: Objects,
    text: String,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Written {
    /// Into the same file: what is there may be a part.
    InPlace,
    /// As a file that took the name of another one, or is new.
    Whole,
}

#[derive(Debug, Default)]
pub(super) struct Files {
    options: Options,
    files: BTreeMap<PathBuf, File>,
    /// Objects of files deleted since the last [`Files::update`].
    gone: Vec<Objects>,
    /// Refused files deleted since then.
    gone_refused: Vec<PathBuf>,
    /// Objects of the last run, for files that have had no valid contents since.
    kept: Objects,
    /// Namespaces that objects use and no file defines.
    implied: Vec<Object>,
    /// Whether a file changed since the last [`Files::update`].
    is_outdated: bool,
}

impl Files {
    pub(super) fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
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
        let file = self.files.entry(path.to_owned()).or_insert_with(File::new);
        let parsed = contents.and_then(|text| {
            let (manifests, mut errors) = manifest::parse_readable(&name, &text, &self.options);
            let is_empty = errors.is_empty() && manifests.documents.is_empty() && manifests.ignored.is_empty();
            if is_empty && !file.last_valid.is_empty() {
                errors.push(manifest::of_path(path, ManifestProblem::NoObject));
            }
            let objects = located(manifests);
            if errors.is_empty() {
                return Ok((objects, text));
            }
            file.readable = objects;
            Err(ManifestErrors(errors))
        });
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

    /// For a start with files that are refused, when the objects of the last run are not known: refused files get what can be read of
    /// them, and policies that close the pods that the rest may be about.
    pub(super) fn close_unread(&mut self) {
        let in_effect: Vec<Objects> = self.files.values().map(|file| Arc::clone(&file.last_valid)).collect();
        let mut names: BTreeSet<ObjectRef> = in_files(&in_effect).map(Object::reference).collect();
        let mut addresses: BTreeSet<IpAddr> =
            in_files(&in_effect).flat_map(manifest::owned_addresses).copied().collect();
        for (path, file) in self.files.iter_mut().filter(|(_, file)| !file.reported.is_empty()) {
            let readable = file.latest.as_ref().unwrap_or(&file.readable);
            let mut objects: Vec<(Object, Origin)> = Vec::new();
            for (object, origin) in readable.iter() {
                let owned = manifest::owned_addresses(object);
                if !names.contains(&object.reference()) && !owned.iter().any(|address| addresses.contains(address)) {
                    names.insert(object.reference());
                    addresses.extend(owned);
                    objects.push((object.clone(), origin.clone()));
                }
            }
            let scopes: BTreeSet<&Scope> = file.reported.iter().map(|error| &error.scope).collect();
            // The widest are last.
            let of_namespaces = scopes.iter().filter(|scope| matches!(scope, Scope::Namespace(_)));
            let wanted: Vec<&Scope> = match scopes.last() {
                Some(Scope::Namespace(_)) => of_namespaces.copied().collect(),
                Some(widest) => vec![widest],
                None => Vec::new(),
            };
            let origin = Origin { file: Arc::from(path.as_path()), line: None };
            objects.extend(wanted.into_iter().map(|scope| (closing(scope, path), origin.clone())));
            file.last_valid = objects.into();
        }
        self.implied = manifest::implied_namespaces(self.written());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    pub(super) fn has_objects(&self) -> bool {
        !self.kept.is_empty() || self.files.values().any(|file| !file.last_valid.is_empty())
    }

    /// For a start with a directory that has lost its manifests: these objects stay until it has some.
    pub(super) fn keep_all(&mut self, last: Vec<Object>) {
        self.keep(last);
        // The next file that is set decides.
        self.is_outdated = false;
    }

    pub(super) fn refused(&self) -> usize {
        self.files.values().filter(|file| !file.reported.is_empty()).count()
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.keys()
    }

    pub(super) fn remove(&mut self, path: &Path) {
        if let Some(file) = self.files.remove(path) {
            self.is_outdated = true;
            self.gone_refused.extend((!file.reported.is_empty()).then(|| path.to_owned()));
            self.gone.push(file.last_valid);
        }
    }

    /// Determines the objects in effect and returns what changed.
    pub(super) fn update(&mut self, now: Instant) -> DirectoryChanges {
        let mut batch = DirectoryChanges { shortened: self.take_stable(now), ..DirectoryChanges::default() };
        if !std::mem::take(&mut self.is_outdated) {
            return DirectoryChanges { refused: self.refused(), ..batch };
        }
        batch.fixed.append(&mut self.gone_refused);
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

    /// The objects of the last run that stay beside these: of one name or address is one.
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

    /// Whether some file names other objects, or other addresses of pods, than it had in effect, or has an error. If none does, its
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

    /// All objects in effect, implied namespaces included.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.implied.iter().chain(self.written())
    }

    fn written(&self) -> impl Iterator<Item = &Object> {
        let kept = self.kept.iter().map(|(object, _)| object);
        self.files.values().flat_map(|file| file.last_valid.iter().map(|(object, _)| object)).chain(kept)
    }

    /// The objects of each file that can be in effect, in the files' order, and the errors of files whose latest contents
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
    fn new() -> Self {
        let none = Objects::default();
        Self {
            latest: Ok(none.clone()),
            readable: none.clone(),
            text: String::new(),
            cut: None,
            last_valid: none,
            reported: Vec::new(),
        }
    }

    fn take(&mut self, objects: Objects, text: String) {
        (self.latest, self.readable, self.text, self.cut) = (Ok(objects), Objects::default(), text, None);
    }

    /// Whether these contents lack objects that the last valid ones had, and are the beginning of their text.
    fn has_lost(&self, objects: &Objects, text: &str) -> bool {
        let in_force = || self.last_valid.iter().map(|(object, _)| object);
        self.text.len() > text.len() && self.text.starts_with(text) && !in_force().eq(objects.iter().map(|(o, _)| o))
    }
}

/// A policy that closes the pods of a scope, in the place of what can't be read of a file. Without any it selects none, and tells of
/// the file.
fn closing(scope: &Scope, path: &Path) -> Object {
    let name = format!("{CLOSING}{}", path.display());
    let in_namespace = |namespace: &str, pod_selector| {
        Object::NetworkPolicy(NetworkPolicy {
            key: ObjectKey { namespace: namespace.to_owned(), name: name.clone() },
            pod_selector,
            isolates: true,
            ingress: Some(Vec::new()),
            egress: Some(Vec::new()),
            staging: Staging::InForce,
            notes: PolicyNotes::default(),
        })
    };
    match scope {
        Scope::Nothing => {
            let none = Requirement { key: "unread".to_owned(), operator: LabelOperator::In(Vec::new()) };
            in_namespace("default", Selector { requirements: vec![none] })
        }
        Scope::Namespace(namespace) => in_namespace(namespace, Selector::default()),
        Scope::Everything => {
            let deny = ClusterRule {
                name: None,
                action: RuleAction::Deny,
                matches: Rule { peers: Peers::Every, ports: PolicyPorts::Every },
                is_understood: true,
            };
            Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
                name,
                tier: ClusterTier::Admin,
                priority: 0,
                subject: Subject::default(),
                ingress: vec![deny.clone()],
                egress: vec![deny],
                staging: Staging::InForce,
                notes: PolicyNotes::default(),
            })
        }
    }
}

/// Keys that only one object may have: its name, and a pod's addresses.
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
mod tests;

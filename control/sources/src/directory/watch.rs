//! When to read a directory again: gathers file events until a save is complete.
//!
//! A save is several events, and half-written contents can be valid: a truncated file has no objects, which would drop its
//! policies. So a file being written is not read until it is closed or replaced by a rename, and events are gathered until
//! they pause. A check once a second finds what lost events, or a recreated directory without events, would hide.
//!
//! `notify-debouncer-full` (0.7) would replace only the pause, and delays each event by itself: it does not know whether a
//! file is still written, and its thread wakes four times per delay, here 400 times a second on an idle node.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, CreateKind, EventKind, ModifyKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use penstock_dataplane::without_capabilities;
use penstock_policy::model::Object;
use tokio::sync::mpsc as batches;

use super::files::{DirectoryChanges, Files, Written};
use crate::manifest::{self, Found};

/// A save is complete once its events pause this long …
const PAUSE: Duration = Duration::from_millis(5);
/// … or continue this long: a policy must not wait while other files keep changing.
const LONGEST_GATHERING: Duration = Duration::from_millis(20);
/// The same for a directory that returns: it is created first, then filled.
const PAUSE_OF_RETURN: Duration = Duration::from_millis(50);
const LONGEST_RETURN: Duration = Duration::from_millis(500);
/// A file open for writing this long is read anyway.
const LONGEST_WRITE: Duration = Duration::from_secs(10);
const CHECK: Duration = Duration::from_secs(1);

fn no_manifests() -> io::Error {
    io::Error::other(
        "has no manifest any more: restore them; to delete all objects, leave a file with a Namespace alone",
    )
}

#[derive(Debug)]
pub(super) enum Message {
    Event(notify::Result<Event>),
    Stop,
}

/// Distinguishes two states of a file.
type Stamp = (u64, u64, u64, i64, i64, i64, i64);

fn stamp(data: &Metadata) -> Stamp {
    (data.dev(), data.ino(), data.size(), data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec())
}

pub(super) struct DirectoryWatch {
    path: PathBuf,
    watcher: RecommendedWatcher,
    inbox: Receiver<Message>,
    /// Device and inode of the watched directory; `None` while it does not exist.
    watched: Option<(u64, u64)>,
    /// Whether the parent is watched for the directory's return.
    parent_watched: bool,
    /// Why the directory cannot be listed, as reported.
    missing: Option<String>,
    /// How many files were refused, and why the directory could not be listed, when a batch was sent last.
    sent: (usize, Option<String>),
    /// Files that are not read for their extension, as reported.
    others: Vec<PathBuf>,
    stamps: BTreeMap<PathBuf, Stamp>,
    /// Files with unread events.
    changed: BTreeSet<PathBuf>,
    /// Files being written, with the start time.
    writing: BTreeMap<PathBuf, Instant>,
    /// First and last event since the last read.
    events: Option<(Instant, Instant)>,
}

impl DirectoryWatch {
    pub(super) fn new(path: &Path, messages: Sender<Message>, inbox: Receiver<Message>) -> notify::Result<Self> {
        // An error means that the thread has ended.
        let send = move |event| drop(messages.send(Message::Event(event)));
        let watcher = without_capabilities(move || notify::recommended_watcher(send))?;
        let mut watch = Self {
            path: path.to_owned(),
            watcher,
            inbox,
            watched: None,
            parent_watched: false,
            missing: None,
            sent: (0, None),
            others: Vec::new(),
            stamps: BTreeMap::new(),
            changed: BTreeSet::new(),
            writing: BTreeMap::new(),
            events: None,
        };
        watch.follow_directory()?;
        Ok(watch)
    }

    pub(super) fn read_all(&mut self, files: &mut Files) -> io::Result<()> {
        fs::metadata(&self.path)?;
        self.read(files, Instant::now())
    }

    /// Why the directory can't be listed.
    pub(super) fn unreadable(&self) -> Option<String> {
        self.missing.as_ref().map(|reason| format!("{}: {reason}", self.path.display()))
    }

    pub(super) fn unread_files(&self) -> Vec<PathBuf> {
        self.others.clone()
    }

    /// For a start with a directory without manifests that had some: these objects stay.
    pub(super) fn lose(&mut self, files: &mut Files, last: Vec<Object>) {
        let error = no_manifests();
        tracing::error!("{}", super::unreadable(&self.path, &error));
        self.missing = Some(error.to_string());
        files.keep_all(last);
    }

    /// Sends a batch for each save until the receiver is gone.
    pub(super) fn run(mut self, mut files: Files, batches: &batches::Sender<DirectoryChanges>) {
        self.sent = (files.refused(), self.unreadable());
        loop {
            match self.inbox.recv_timeout(self.until_due(Instant::now())) {
                Ok(Message::Event(event)) => self.record(event),
                Err(RecvTimeoutError::Timeout) => {
                    let batch = self.refresh(&mut files);
                    super::log(&batch);
                    let state = (batch.refused, batch.unreadable.clone());
                    let is_news = !batch.is_empty() || state != self.sent;
                    self.sent = state;
                    if is_news && batches.blocking_send(batch).is_err() {
                        return;
                    }
                }
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// How long to gather events before reading the files.
    fn until_due(&self, now: Instant) -> Duration {
        let (pause, longest) = match self.missing {
            None => (PAUSE, LONGEST_GATHERING),
            Some(_) => (PAUSE_OF_RETURN, LONGEST_RETURN),
        };
        let due = self.events.map(|(first, last)| (last + pause).min(first + longest));
        due.map_or(CHECK, |due| due.saturating_duration_since(now))
    }

    fn record(&mut self, event: notify::Result<Event>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!(directory = %self.path.display(), "watching the manifests: {error}");
                Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan)
            }
        };
        if matches!(event.kind, EventKind::Access(AccessKind::Open(_) | AccessKind::Read)) {
            return;
        }
        let now = Instant::now();
        if event.need_rescan() {
            // Events were lost, among them possibly closes.
            self.writing.clear();
            self.stamps.clear();
        }
        let mut concerns_us = event.need_rescan();
        for path in event.paths {
            if path != self.path && path.starts_with(&self.path) {
                self.record_file(event.kind, &path, now);
                concerns_us = true;
            }
            // A watched parent also reports events outside the directory.
            if path == self.path {
                // It is watched at once, to get its events.
                self.follow();
                concerns_us = true;
            }
        }
        if concerns_us {
            self.events = Some((self.events.map_or(now, |(first, _)| first), now));
        }
    }

    fn record_file(&mut self, kind: EventKind, path: &Path, now: Instant) {
        let begins_write = match kind {
            EventKind::Modify(ModifyKind::Data(_)) => true,
            // A link needs no close.
            EventKind::Create(CreateKind::File) => {
                fs::symlink_metadata(path).is_ok_and(|data| data.is_file() && data.nlink() == 1)
            }
            _ => false,
        };
        let ends_write = matches!(
            kind,
            EventKind::Access(AccessKind::Close(AccessMode::Write))
                | EventKind::Modify(ModifyKind::Name(_))
                | EventKind::Remove(_)
        );
        if begins_write {
            self.writing.entry(path.to_owned()).or_insert(now);
        } else if ends_write {
            self.writing.remove(path);
        }
        self.changed.insert(path.to_owned());
    }

    /// Reads the directory and updates the objects in effect.
    fn refresh(&mut self, files: &mut Files) -> DirectoryChanges {
        let had_events = self.events.take().is_some();
        self.follow();
        let mut problems = Vec::new();
        match self.read(files, Instant::now()) {
            Ok(()) => {
                if self.missing.take().is_some() {
                    tracing::info!(directory = %self.path.display(), "manifest directory is back");
                }
            }
            Err(error) => {
                let reason = error.to_string();
                if self.missing.as_ref() != Some(&reason) {
                    problems.push(super::unreadable(&self.path, &error));
                    self.missing = Some(reason);
                }
            }
        }
        let mut batch = files.update(Instant::now());
        batch.problems.append(&mut problems);
        batch.unreadable = self.unreadable();
        tracing::trace!(had_events, changes = batch.changes.len(), "read the manifests");
        batch
    }

    /// Reads the files that changed. A directory that cannot be listed, or has no manifest any more, changes nothing: its file system
    /// may not be mounted.
    fn read(&mut self, files: &mut Files, now: Instant) -> io::Result<()> {
        let Found { manifests: present, others } = manifest::files_in(&self.path)?;
        if present.is_empty() && files.has_objects() {
            return Err(no_manifests());
        }
        for path in others.iter().filter(|path| !self.others.contains(path)) {
            tracing::warn!(file = %path.display(), "not read: manifests are *.yaml, *.yml and *.json; rename it if it is one");
        }
        self.others = others;
        let changed = std::mem::take(&mut self.changed);
        self.writing.retain(|_, since| now.duration_since(*since) < LONGEST_WRITE);
        for path in &present {
            if self.writing.contains_key(path) {
                // Its close event triggers the read.
                continue;
            }
            let current = fs::metadata(path).ok().map(|data| stamp(&data));
            if current.is_none() || self.stamps.get(path) != current.as_ref() || changed.contains(path) {
                let is_same = |(old, new): (&Stamp, &Stamp)| (old.0, old.1) == (new.0, new.1);
                let is_in_place = self.stamps.get(path).zip(current.as_ref()).is_some_and(is_same);
                let written = if is_in_place { Written::InPlace } else { Written::Whole };
                files.set(path, manifest::read_regular_file(&path.as_path().into()), written, now);
                match current {
                    Some(stamp) => self.stamps.insert(path.clone(), stamp),
                    None => self.stamps.remove(path),
                };
            }
        }
        let gone: Vec<PathBuf> = files.paths().filter(|path| present.binary_search(path).is_err()).cloned().collect();
        for path in gone {
            self.stamps.remove(&path);
            files.remove(&path);
        }
        Ok(())
    }

    fn follow(&mut self) {
        if let Err(error) = self.follow_directory() {
            tracing::debug!(directory = %self.path.display(), "cannot watch it now: {error}");
        }
    }

    /// Watches the directory at the path, or its parent while there is none.
    fn follow_directory(&mut self) -> notify::Result<()> {
        let found = fs::metadata(&self.path).ok().filter(Metadata::is_dir).map(|data| (data.dev(), data.ino()));
        if found == self.watched && (found.is_some() || self.parent_watched) {
            return Ok(());
        }
        if self.watched.take().is_some() {
            // The kernel removed the watch itself if the directory was deleted.
            let _ = self.watcher.unwatch(&self.path);
        }
        let parent = self.path.parent().filter(|parent| *parent != OsStr::new("")).unwrap_or(Path::new(".")).to_owned();
        if found.is_some() {
            self.watcher.watch(&self.path, RecursiveMode::Recursive)?;
            self.watched = found;
            if std::mem::take(&mut self.parent_watched) {
                let _ = self.watcher.unwatch(&parent);
            }
        } else if !self.parent_watched {
            self.watcher.watch(&parent, RecursiveMode::NonRecursive)?;
            self.parent_watched = true;
        }
        Ok(())
    }
}

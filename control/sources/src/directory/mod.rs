//! A directory of manifests as a source: read at start, then watched.
//!
//! `files` decides which objects are in effect, `watch` decides when to read files.

mod files;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use penstock_dataplane::drop_capabilities;
use penstock_policy::model::Object;
use tokio::sync::mpsc as batches;

pub use files::{DirectoryChanges, unread_manifest};

use super::convert::ConversionSettings;
use super::manifest::{self, ManifestError, ManifestProblem, Options};
use files::Files;
use watch::{DirectoryWatch, Message};

const WAITING_BATCHES: usize = 16;

/// A watched directory of manifests. Dropping it stops watching.
///
/// A save is applied as a whole: one [`DirectoryChanges`] holds all its changes. Errors are logged once each; their files keep their
/// last valid objects. If the directory disappears, or loses all of its manifests, all objects stay until it has some again.
#[derive(Debug)]
pub struct ManifestDirectory {
    batches: Option<batches::Receiver<DirectoryChanges>>,
    messages: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
    /// Errors of files that were refused when it was opened.
    problems: Vec<ManifestError>,
    refused: usize,
    unreadable: Option<String>,
    unread_files: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It does not exist or is not a directory.
    #[error("manifests: {path}: {reason}: set it to a readable directory", path = .path.display())]
    NotADirectory { path: PathBuf, reason: String },
    #[error("manifests: {path}: cannot be watched: {reason}", path = .path.display())]
    Watch { path: PathBuf, reason: String },
}

impl ManifestDirectory {
    /// Reads all manifests of a directory and starts to watch it.
    ///
    /// # Errors
    /// If there is no such directory, or it can't be watched.
    pub fn open(path: &Path, settings: ConversionSettings) -> Result<(Self, Vec<Object>), DirectoryError> {
        Self::open_after(path, settings, &|| None)
    }

    /// The same, with the objects that were in effect in the last run, if they are known: they stand for what refused files had. If they
    /// are not known, the pods that refused files may be about are closed.
    pub fn open_after(
        path: &Path,
        settings: ConversionSettings,
        last: &dyn Fn() -> Option<Vec<Object>>,
    ) -> Result<(Self, Vec<Object>), DirectoryError> {
        // Events name files by absolute paths.
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (messages, inbox) = mpsc::channel();
        // Watch first, then read: a save in between is seen twice, not missed.
        let mut watch = DirectoryWatch::new(path, messages.clone(), inbox)
            .map_err(|error| DirectoryError::Watch { path: path.to_owned(), reason: error.to_string() })?;
        let options = Options { settings, ..Options::default() };
        let mut files = Files::new(options);
        watch
            .read_all(&mut files)
            .map_err(|error| DirectoryError::NotADirectory { path: path.to_owned(), reason: error.to_string() })?;
        let batch = files.update(Instant::now());
        log(&batch);
        if !batch.problems.is_empty() {
            match last() {
                Some(last) => {
                    tracing::warn!(objects = last.len(), "what these files had stays as it was in the last run");
                    files.keep(last);
                    files.update(Instant::now());
                }
                None => {
                    tracing::error!(
                        "nothing is known of what these files had: the pods that it may be about are closed"
                    );
                    files.close_unread();
                }
            }
        } else if files.is_empty()
            && let Some(last) = last().filter(|last| !last.is_empty())
        {
            watch.lose(&mut files, last);
        }
        let (refused, unreadable, unread_files) = (files.refused(), watch.unreadable(), watch.unread_files());
        let objects = files.objects().cloned().collect();
        let (sender, receiver) = batches::channel(WAITING_BATCHES);
        let thread = thread::Builder::new()
            .name("manifests".to_owned())
            .spawn(move || {
                drop_capabilities();
                watch.run(files, &sender);
            })
            .map_err(|error| DirectoryError::Watch { path: path.to_owned(), reason: error.to_string() })?;
        let problems = batch.problems;
        let batches = Some(receiver);
        Ok((Self { batches, messages, thread: Some(thread), problems, refused, unreadable, unread_files }, objects))
    }

    /// How many files were refused when it was opened.
    pub fn refused(&self) -> usize {
        self.refused
    }

    /// Files that were not read for their extension when it was opened.
    pub fn unread_files(&self) -> &[PathBuf] {
        &self.unread_files
    }

    /// Why it could not be read when it was opened: the objects of the last run stand for all manifests.
    pub fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    pub fn problems(&self) -> &[ManifestError] {
        &self.problems
    }

    /// The next batch. Cancel-safe: dropping the future loses none. `None` once the source has ended.
    pub async fn next(&mut self) -> Option<DirectoryChanges> {
        self.batches.as_mut()?.recv().await
    }
}

impl Drop for ManifestDirectory {
    fn drop(&mut self) {
        // Without a receiver the thread cannot block on a full channel.
        self.batches = None;
        // An error means that the thread has ended.
        let _ = self.messages.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed on standard error by then.
            let _ = thread.join();
        }
    }
}

fn log(batch: &DirectoryChanges) {
    for error in &batch.problems {
        tracing::warn!(
            file = %error.origin.file.display(),
            line = error.origin.line,
            object = error.object,
            field = %error.field,
            "manifest not applied, its last valid objects stay: {}", error.problem
        );
    }
    for file in &batch.shortened {
        tracing::warn!(file = %file.display(), "manifest counts as it is: it stayed without the end that it had");
    }
    for file in &batch.fixed {
        tracing::info!(file = %file.display(), "manifest is good again, or deleted");
    }
}

/// The error of a directory that cannot be listed.
fn unreadable(path: &Path, error: &std::io::Error) -> manifest::ManifestError {
    manifest::of_path(path, ManifestProblem::Unreadable(format!("{error}; all objects stay as they are")))
}

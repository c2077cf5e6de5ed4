//! A directory of manifests as a source: read at the start, watched while running.
//!
//! One part knows what of the files holds, the other tells when to look at them again.

mod files;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use penstock_policy::model::Object;
use penstock_privileges as privileges;
use tokio::sync::mpsc as batches;

pub use files::Batch;

use super::convert::Settings;
use super::manifest::{self, Fault, ManifestErrors, Options};
use files::Files;
use watch::{Message, Watch};

/// How many batches may wait for a slow reader before the directory is looked at less often.
const WAITING_BATCHES: usize = 16;

/// A directory of manifests that is watched. Dropped, it stops watching.
///
/// A save is applied as a whole: one [`Batch`] holds all of its changes. Errors are logged here, once each, and
/// leave the objects of their file as they last were good. A directory that goes away leaves all objects as they
/// are until it is back.
#[derive(Debug)]
pub struct ManifestDirectory {
    batches: Option<batches::Receiver<Batch>>,
    messages: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

/// Why a directory cannot be a source.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is not there, or no directory.
    #[error("manifests: {path}: {reason}: name a directory that can be read", path = .path.display())]
    NotADirectory {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// Its manifests have errors: there is no good state to start from.
    #[error(transparent)]
    Manifests(#[from] ManifestErrors),
    /// It cannot be watched.
    #[error("manifests: {path}: cannot be watched: {reason}", path = .path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
}

impl ManifestDirectory {
    /// Reads all manifests of a directory, and watches it from then on. The objects are without conflicts.
    pub fn open(path: &Path, settings: Settings) -> Result<(Self, Vec<Object>), OpenError> {
        // Events name files by absolute paths.
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (messages, inbox) = mpsc::channel();
        // Watched first, then read: a save in between is seen twice rather than never.
        let mut watch = Watch::new(path, messages.clone(), inbox)
            .map_err(|error| OpenError::Watch { path: path.to_owned(), reason: error.to_string() })?;
        let options = Options { settings, ..Options::default() };
        let mut files = Files::new(options);
        watch
            .read_all(&mut files)
            .map_err(|error| OpenError::NotADirectory { path: path.to_owned(), reason: error.to_string() })?;
        let batch = files.settle();
        if !batch.problems.is_empty() {
            // Read at once, two objects that contradict each other are one error, told at the later of them.
            let errors = manifest::read_manifests(&[path], &options).err();
            return Err(OpenError::Manifests(errors.unwrap_or(ManifestErrors(batch.problems))));
        }
        let objects = files.objects().cloned().collect();
        let (sender, receiver) = batches::channel(WAITING_BATCHES);
        let thread = thread::Builder::new()
            .name("manifests".to_owned())
            .spawn(move || {
                privileges::drop_all();
                watch.run(files, &sender);
            })
            .map_err(|error| OpenError::Watch { path: path.to_owned(), reason: error.to_string() })?;
        Ok((Self { batches: Some(receiver), messages, thread: Some(thread) }, objects))
    }

    /// The next batch, as soon as there is one. It may be dropped while it waits without losing a batch. `None`
    /// once nothing can come any more.
    pub async fn next(&mut self) -> Option<Batch> {
        self.batches.as_mut()?.recv().await
    }
}

impl Drop for ManifestDirectory {
    fn drop(&mut self) {
        // Without a receiver the thread cannot be waiting for room among the batches.
        self.batches = None;
        // An error means that the thread has ended already.
        let _ = self.messages.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic has been told on standard error by then.
            let _ = thread.join();
        }
    }
}

/// Logs what a batch says about files.
fn log(batch: &Batch) {
    for error in &batch.problems {
        tracing::warn!(
            file = %error.origin.file.display(),
            line = error.origin.line,
            object = error.object,
            field = %error.field,
            "manifest not applied, its last good objects stay: {}", error.fault
        );
    }
    for file in &batch.mended {
        tracing::info!(file = %file.display(), "manifest is good again");
    }
}

/// The error of a directory that cannot be listed.
fn unreadable(path: &Path, error: &std::io::Error) -> manifest::ManifestError {
    manifest::of_path(path, Fault::Unreadable(format!("{error}; all objects stay as they are")))
}

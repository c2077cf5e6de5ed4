//! The thread that builds tables with many entries, so that no other change waits for them. It has no capabilities, makes no blocking
//! call, and takes no lock that the policy thread needs.

use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use penstock_policy::render::tables::{BuiltTables, TableJob};
use tokio::sync::mpsc as channel;

use crate::privileges;

/// The thread. It ends when this is dropped.
pub(super) struct TableBuilder {
    jobs: Option<mpsc::Sender<TableJob>>,
    built: channel::UnboundedReceiver<BuiltTables>,
    thread: Option<JoinHandle<()>>,
}

impl TableBuilder {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, to_build) = mpsc::channel::<TableJob>();
        let (sender, built) = channel::unbounded_channel();
        let thread = thread::Builder::new().name("tables".to_owned()).spawn(move || {
            privileges::drop_all();
            for job in to_build {
                if sender.send(job.build()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs: Some(jobs), built, thread: Some(thread) })
    }

    /// Has these tables built. There is one job at a time.
    pub(super) fn build(&self, job: TableJob) {
        // If the thread has panicked, `built` says so.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    /// Waits for the next tables; `None` if the thread has ended.
    pub(super) async fn built(&mut self) -> Option<BuiltTables> {
        self.built.recv().await
    }
}

impl Drop for TableBuilder {
    /// After the tables that it is building.
    fn drop(&mut self) {
        self.jobs = None;
        // A panic has been reported on standard error.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

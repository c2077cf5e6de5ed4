//! How those who serve the admin API and the metrics ask the daemon's loop, which alone has the state.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_dataplane::conntrack::{ConnTable, ConnectionInfo};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::types::{Dump, ExplainQuery, Explanation, Flow, Status};
use crate::service::metrics::Collected;
use crate::service::walks::Walks;

/// How long an answer may take. The loop is busy for so long only when something is wrong with it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Questions that may wait.
const WAITING: usize = 64;

/// A question to the daemon's loop, with the way back for its answer.
pub(in crate::service) enum Question {
    /// How is it?
    Status(oneshot::Sender<Status>),
    /// The connection table, and which addresses an end has.
    Connections { end: Option<String>, answer: oneshot::Sender<Result<Listing, String>> },
    /// Names and rules of connections.
    Describe { connections: Vec<ConnectionInfo>, answer: oneshot::Sender<Vec<Flow>> },
    /// Why is a flow allowed or denied?
    Explain { query: ExplainQuery, answer: oneshot::Sender<Result<Explanation, String>> },
    /// All that a support bundle holds, but the connections; and what the metrics are made of.
    Dump(oneshot::Sender<(Dump, Collected)>),
    /// What the metrics are made of.
    Metrics(oneshot::Sender<Collected>),
    /// Do the workers live? The problem, if not.
    Health(oneshot::Sender<Result<(), String>>),
    /// Are all pods' policies in force? What is awaited, if not.
    Readiness(oneshot::Sender<Result<(), String>>),
}

/// What connections are listed from.
pub(in crate::service) struct Listing {
    /// The table.
    pub(in crate::service) table: Arc<ConnTable>,
    /// The addresses to list; all where there are none.
    pub(in crate::service) addresses: Option<Vec<IpAddr>>,
}

/// Nobody answered.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(in crate::service) enum NoAnswer {
    /// The loop has not begun.
    #[error("the daemon is starting: it waits until all objects have been read; ask again later")]
    Starting,
    /// The loop does not answer in time.
    #[error("the daemon's loop does not answer: it is ending, or stuck; look at its log")]
    Silent,
}

/// The end that asks.
#[derive(Clone)]
pub(in crate::service) struct Asker {
    questions: mpsc::Sender<Question>,
    started: Arc<AtomicBool>,
    walks: Walks,
}

/// The end that answers.
pub(in crate::service) type Questions = mpsc::Receiver<Question>;

/// Both ends.
pub(in crate::service) fn channel() -> (Asker, Questions) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Asker { questions: sender, started: Arc::default(), walks: Walks::default() }, receiver)
}

impl Asker {
    /// Says that the loop answers from now on.
    pub(in crate::service) fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    /// Whether the loop is still to begin.
    pub(in crate::service) fn is_starting(&self) -> bool {
        !self.started.load(Ordering::Relaxed)
    }

    /// Where the connection table is gone through.
    pub(in crate::service) fn walks(&self) -> &Walks {
        &self.walks
    }

    /// Asks, and waits for the answer.
    pub(in crate::service) async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, NoAnswer> {
        if self.is_starting() {
            return Err(NoAnswer::Starting);
        }
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.questions.send(question(answer)).await.map_err(|_| NoAnswer::Silent)?;
            answered.await.map_err(|_| NoAnswer::Silent)
        };
        timeout(PATIENCE, asked).await.unwrap_or(Err(NoAnswer::Silent))
    }
}

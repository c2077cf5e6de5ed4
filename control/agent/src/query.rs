//! Queries of the admin API and metrics servers to the daemon's loop, which owns the state.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_admin::capture::CaptureQuery;
use penstock_admin::types::{
    ConnectionFlow, Dump, ExplainQuery, Explanation, Names, NamesQuery, Rules, Status, TrialStatus,
};
use penstock_dataplane::conntrack::{ConnTable, ConnectionInfo};
use penstock_policy::model::{Object, ObjectKey};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::capture::CaptureChunks;
use crate::metrics::Scrape;
use crate::scans::TableScans;

/// How long an answer may take. The loop is busy this long only if something is wrong with it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const CAPACITY: usize = 64;

/// A query to the daemon's loop, with the channel for its answer.
pub(crate) enum StateQuery {
    Status(oneshot::Sender<Status>),
    /// The connection table, and the addresses of `end`.
    Connections {
        end: Option<String>,
        answer: oneshot::Sender<Result<FlowScan, String>>,
    },
    Describe {
        connections: Vec<ConnectionInfo>,
        answer: oneshot::Sender<Vec<ConnectionFlow>>,
    },
    Explain {
        query: ExplainQuery,
        answer: oneshot::Sender<Result<Explanation, String>>,
    },
    Names {
        query: NamesQuery,
        answer: oneshot::Sender<Result<Names, String>>,
    },
    /// Begin a capture; the answer has its packets.
    Capture {
        query: Box<CaptureQuery>,
        answer: oneshot::Sender<Result<CaptureChunks, String>>,
    },
    Rules(oneshot::Sender<Rules>),
    /// The changes that promotion of all that is staged would make. The thread of the trial answers.
    Trial(oneshot::Sender<TrialStatus>),
    /// Judge these policies of files beside what is in effect; none: no more. The answer says why not.
    Try {
        policies: Vec<Object>,
        answer: oneshot::Sender<Result<(), NotAllowed>>,
    },
    /// A CNI plugin has given a pod these addresses. The answer says what is awaited until its policy is in effect.
    NewPod {
        pod: ObjectKey,
        addresses: Vec<IpAddr>,
        interfaces: Vec<String>,
        answer: oneshot::Sender<Result<(), String>>,
    },
    /// A support bundle without the connections, and the data for its metrics.
    Dump(oneshot::Sender<(Dump, Scrape)>),
    Metrics(oneshot::Sender<Scrape>),
    /// Whether all workers are alive; otherwise the problem.
    Health(oneshot::Sender<Result<(), String>>),
    /// Whether policy is in effect for all pods; otherwise what is awaited.
    Readiness(oneshot::Sender<Result<(), String>>),
}

pub(crate) struct FlowScan {
    pub(crate) table: Arc<ConnTable>,
    /// The addresses to list; `None` for all.
    pub(crate) addresses: Option<Vec<IpAddr>>,
}

#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "trials from files are not allowed on this node (admin.trials = false): set admin.trials = true and reload the configuration (SIGHUP), or stage the policies in the cluster by the annotation policy.penstock.dev/staged"
)]
pub(crate) struct NotAllowed;

#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(crate) enum QueryError {
    #[error("the daemon is starting: it is still reading all objects; try again later")]
    Starting,
    #[error("the daemon's loop does not answer: it is shutting down or stuck; see its log")]
    Unresponsive,
}

#[derive(Clone)]
pub(crate) struct QueryHandle {
    queries: mpsc::Sender<StateQuery>,
    started: Arc<AtomicBool>,
    scans: TableScans,
}

pub(crate) type StateQueries = mpsc::Receiver<StateQuery>;

pub(crate) fn channel() -> (QueryHandle, StateQueries) {
    let (sender, receiver) = mpsc::channel(CAPACITY);
    (QueryHandle { queries: sender, started: Arc::default(), scans: TableScans::default() }, receiver)
}

impl QueryHandle {
    pub(crate) fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_starting(&self) -> bool {
        !self.started.load(Ordering::Relaxed)
    }

    pub(crate) fn scans(&self) -> &TableScans {
        &self.scans
    }

    pub(crate) async fn query<T>(&self, query: impl FnOnce(oneshot::Sender<T>) -> StateQuery) -> Result<T, QueryError> {
        if self.is_starting() {
            return Err(QueryError::Starting);
        }
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.queries.send(query(answer)).await.map_err(|_| QueryError::Unresponsive)?;
            answered.await.map_err(|_| QueryError::Unresponsive)
        };
        timeout(ANSWER_TIMEOUT, asked).await.unwrap_or(Err(QueryError::Unresponsive))
    }
}

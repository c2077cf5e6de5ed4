//! A cluster with canned answers, for tests.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::ask::Asking;
use super::cluster::{Cluster, ClusterError, Daemon, Fleet, Missing, PodName, PodPlace, Problem, Running, Target};

#[derive(Clone, Debug)]
pub(super) enum Reply {
    /// The exit code, standard output, standard error.
    Ends(i32, Vec<u8>, String),
    /// The same once standard input has had something.
    EndsAfterInput(i32, Vec<u8>, String),
    Fails(Problem),
    /// Nothing, ever.
    Hangs,
}

impl Reply {
    pub(super) fn ok(stdout: impl Into<Vec<u8>>) -> Self {
        Self::Ends(0, stdout.into(), String::new())
    }

    pub(super) fn error(code: i32, stderr: &str) -> Self {
        Self::Ends(code, Vec::new(), stderr.to_owned())
    }
}

#[derive(Default)]
pub(super) struct FakeCluster {
    /// By node, the replies in the order of the commands; the last stays.
    replies: BTreeMap<String, Mutex<Vec<Reply>>>,
    pub(super) missing: Vec<Missing>,
    pub(super) pods: BTreeMap<String, PodPlace>,
    pub(super) versions: BTreeMap<String, u64>,
    pub(super) asked: Mutex<Vec<(String, Vec<String>)>>,
    /// Standard input of each command that had one.
    pub(super) inputs: Arc<Mutex<Vec<Vec<u8>>>>,
    running: AtomicUsize,
    pub(super) most: AtomicUsize,
}

impl FakeCluster {
    pub(super) fn new(replies: impl IntoIterator<Item = (&'static str, Vec<Reply>)>) -> Self {
        let replies = replies.into_iter().map(|(node, replies)| (node.to_owned(), Mutex::new(replies))).collect();
        Self { replies, ..Self::default() }
    }

    fn reply(&self, node: &str) -> Reply {
        let mut replies = self.replies[node].lock().unwrap();
        if replies.len() > 1 { replies.remove(0) } else { replies[0].clone() }
    }
}

/// How tests ask: a node that hangs is given up soon.
pub(super) const ASKING: Asking = Asking { timeout: Duration::from_secs(2), parallel: 3 };

impl Cluster for FakeCluster {
    async fn daemons(&self) -> Result<Fleet, ClusterError> {
        let daemons = self.replies.keys().map(|node| Daemon { node: node.clone(), pod: format!("penstock-{node}") });
        Ok(Fleet { daemons: daemons.collect(), missing: self.missing.clone(), note: None })
    }

    async fn exec(&self, daemon: &Daemon, command: Vec<String>, with_input: bool) -> Result<Running, Problem> {
        self.asked.lock().unwrap().push((daemon.node.clone(), command));
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        tokio::task::yield_now().await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        let (mut input, writer) = tokio::io::simplex(1 << 20);
        let stdin = with_input.then(|| Box::pin(writer) as _);
        let (code, printed, stderr, waits) = match self.reply(&daemon.node) {
            Reply::Fails(problem) => return Err(problem),
            Reply::Hangs => std::future::pending().await,
            Reply::Ends(code, stdout, stderr) => (code, stdout, stderr, false),
            Reply::EndsAfterInput(code, stdout, stderr) => (code, stdout, stderr, true),
        };
        let (stdout, mut output) = tokio::io::simplex(1 << 20);
        let (ended, status) = oneshot::channel();
        let inputs = Arc::clone(&self.inputs);
        tokio::spawn(async move {
            output.write_all(&printed).await.unwrap();
            if waits {
                let mut bytes = vec![0; 1 << 16];
                let count = input.read(&mut bytes).await.unwrap();
                inputs.lock().unwrap().push(bytes[..count].to_vec());
            }
            output.shutdown().await.unwrap();
            let _ = ended.send(code);
        });
        Ok(Running {
            stdin,
            stdout: Box::pin(stdout),
            stderr: Box::pin(Cursor::new(stderr.into_bytes())),
            status: Box::pin(async move { status.await.map_err(|error| Problem::Unreachable(error.to_string())) }),
        })
    }

    async fn pod(&self, pod: &PodName) -> Result<PodPlace, ClusterError> {
        let place = self.pods.get(&pod.to_string()).cloned();
        place.ok_or_else(|| ClusterError::BadInput(format!("pod {pod}: there is none")))
    }

    async fn versions(&self, _: &Target) -> Result<BTreeMap<String, u64>, ClusterError> {
        Ok(self.versions.clone())
    }
}

pub(super) fn missing(name: &str, problem: &Problem) -> Missing {
    Missing::new(name, Some("penstock-x"), problem)
}

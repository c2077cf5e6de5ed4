//! The operator's interface to a running daemon: admin API, captures, metrics, verdict log and configuration reload. The daemon's
//! loop waits here for the next event and handles it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_admin::capture::CaptureCounts;
use penstock_dataplane::worker::Dataplane;
use penstock_sources::SourceHealth;
use tokio::sync::oneshot;
use tokio::time::{Interval, MissedTickBehavior};

use super::RunError;
use super::admin::{AdminListener, AdminServer};
use super::capture::{self, RunningCapture};
use super::config::{ConfigLayers, LoadedConfig, SocketPath};
use super::exporter::MetricsListener;
use super::last_good::RejectedConfig;
use super::new_pods;
use super::query::{self, QueryHandle, StateQueries, StateQuery};
use super::rule_usage::{self, RuleUsage};
use super::samples::{self, CounterSample, CounterSamples};
use super::service_manager::ServiceManager;
use super::verdicts::VerdictWriter;

const VERDICT_LOG_INTERVAL: Duration = Duration::from_millis(100);

/// Listening sockets, opened before the daemon touches the node so that problems with them end the start early.
pub(super) struct Listeners {
    handle: QueryHandle,
    queries: StateQueries,
    served: Vec<AdminServer>,
}

impl Listeners {
    /// None yet: another daemon has them.
    pub(super) fn closed() -> Self {
        let (handle, queries) = query::channel();
        Self { handle, queries, served: Vec::new() }
    }

    /// Listens and serves from now on. Until the daemon's loop runs, clients get "starting".
    pub(super) async fn open(loaded: &LoadedConfig) -> Result<Self, RunError> {
        let mut this = Self::closed();
        this.served = serve(loaded, &this.handle).await?;
        Ok(this)
    }
}

async fn serve(loaded: &LoadedConfig, handle: &QueryHandle) -> Result<Vec<AdminServer>, RunError> {
    let listen = |socket: &SocketPath, key| socket.path().map(|path| AdminListener::listen(path, key)).transpose();
    let admin = listen(&loaded.config.admin.socket, "admin.socket")?;
    let captures = listen(&loaded.config.capture.socket, "capture.socket")?;
    let new_pods = new_pods::path(&loaded.config.admin.socket);
    let new_pods = new_pods.map(|path| AdminListener::listen(&path, "admin.socket")).transpose();
    let new_pods = new_pods?;
    if let Some(address) = loaded.config.metrics.listen.address() {
        MetricsListener::listen(address).await.map_err(RunError::bad_input)?.serve(handle.clone());
    }
    let admin = admin.map(|admin| admin.serve(handle.clone()));
    let captures = captures.map(|captures| captures.serve_captures(handle.clone()));
    let new_pods = new_pods.map(|new_pods| new_pods.serve_new_pods(handle.clone()));
    Ok(admin.into_iter().chain(captures).chain(new_pods).collect())
}

pub(super) enum OperationEvent {
    Answer(StateQuery),
    Sample,
    Write,
    Capture,
    CountUse,
}

/// State of the operator's interface, owned by the daemon's loop.
pub(super) struct Operation {
    /// Until the loop runs.
    handle: Option<QueryHandle>,
    queries: StateQueries,
    pub(super) layers: ConfigLayers,
    pub(super) loaded: LoadedConfig,
    /// If the last good configuration took the place of one that is refused.
    pub(super) rejected: Option<RejectedConfig>,
    pub(super) source: Arc<SourceHealth>,
    pub(super) samples: CounterSamples,
    pub(super) verdicts: VerdictWriter,
    pub(super) usage: RuleUsage,
    pub(super) started: Instant,
    pub(super) ready: Option<oneshot::Sender<()>>,
    pub(super) service_manager: ServiceManager,
    sampling: Interval,
    writing: Interval,
    pub(super) capture: Option<RunningCapture>,
    /// Counts of those that have ended.
    pub(super) captured: CaptureCounts,
    capturing: Interval,
    counting: Interval,
    _served: Vec<AdminServer>,
}

impl Operation {
    /// Queries are answered once [`Operation::next`] is first awaited.
    pub(super) fn start(
        listeners: Listeners,
        layers: &ConfigLayers,
        loaded: &LoadedConfig,
        rejected: Option<RejectedConfig>,
        source: Arc<SourceHealth>,
        dataplane: &Dataplane,
    ) -> Result<Self, RunError> {
        let verdicts = VerdictWriter::start(Arc::clone(dataplane.verdicts()), &loaded.config.verdict_log);
        let interval = |every| {
            let mut interval = tokio::time::interval(every);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        };
        Ok(Self {
            handle: Some(listeners.handle),
            queries: listeners.queries,
            layers: layers.clone(),
            loaded: loaded.clone(),
            rejected,
            source,
            samples: CounterSamples::new(CounterSample::first(dataplane)),
            verdicts: verdicts.map_err(RunError::bad_input)?,
            usage: RuleUsage::open(&loaded.config),
            started: Instant::now(),
            ready: None,
            service_manager: ServiceManager::of_environment(),
            sampling: interval(samples::INTERVAL),
            writing: interval(VERDICT_LOG_INTERVAL),
            capture: None,
            captured: CaptureCounts::default(),
            capturing: interval(capture::INTERVAL),
            counting: interval(rule_usage::INTERVAL),
            _served: listeners.served,
        })
    }

    /// Listens from now on: the daemon that has ended had all sockets.
    pub(super) async fn listen(&mut self) -> Result<(), RunError> {
        if let Some(handle) = &self.handle {
            self._served = serve(&self.loaded, handle).await?;
        }
        self.usage = RuleUsage::open(&self.loaded.config);
        Ok(())
    }

    /// Waits for the next event. Cancelling the wait loses nothing.
    pub(super) async fn next(&mut self) -> OperationEvent {
        if let Some(handle) = self.handle.take() {
            handle.started();
        }
        let (writes, captures) = (self.verdicts.is_on(), self.capture.is_some());
        tokio::select! {
            _ = self.sampling.tick() => OperationEvent::Sample,
            _ = self.capturing.tick(), if captures => OperationEvent::Capture,
            _ = self.writing.tick(), if writes => OperationEvent::Write,
            _ = self.counting.tick() => OperationEvent::CountUse,
            // The channel never closes: the servers hold its other end, or there are none.
            Some(query) = self.queries.recv() => OperationEvent::Answer(query),
        }
    }
}

//! What lets people and programs look into a running daemon, and change a little of it: the admin API, metrics, the
//! verdict log, and the configuration read again. The daemon's loop waits for the next thing to do here, and does it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_dataplane::worker::Dataplane;
use penstock_sources::SourceHealth;
use tokio::time::{Interval, MissedTickBehavior};

use super::RunError;
use super::admin::{Admin, Served};
use super::config::{Layers, Loaded};
use super::exporter::Metrics;
use super::query::{self, Asker, Question, Questions};
use super::samples::{self, Sample, Samples};
use super::verdicts::Verdicts;

/// How often the verdict log is written.
const WRITE: Duration = Duration::from_millis(100);

/// What is open before the daemon starts: problems with it are told before anything on the node is touched.
pub(super) struct Doors {
    asker: Asker,
    questions: Questions,
    served: Option<Served>,
}

impl Doors {
    /// Listens, and serves from now on. Until the daemon's loop runs, requests are told that it is starting.
    pub(super) async fn open(loaded: &Loaded) -> Result<Self, RunError> {
        let (asker, questions) = query::channel();
        let admin = loaded.config.admin.socket.path().map(Admin::listen).transpose().map_err(RunError::bad_input)?;
        if let Some(address) = loaded.config.metrics.listen.address() {
            Metrics::listen(address).await.map_err(RunError::bad_input)?.serve(asker.clone());
        }
        let served = admin.map(|admin| admin.serve(asker.clone()));
        Ok(Self { asker, questions, served })
    }
}

/// What is to be done next.
pub(super) enum Next {
    /// Somebody asks.
    Answer(Question),
    /// A sample of the counters is due.
    Sample,
    /// The verdict log is to be written.
    Write,
}

/// All that the daemon's loop has for its operation.
pub(super) struct Operation {
    /// Until the loop has begun.
    asker: Option<Asker>,
    questions: Questions,
    pub(super) layers: Layers,
    pub(super) loaded: Loaded,
    pub(super) source: Arc<SourceHealth>,
    pub(super) samples: Samples,
    pub(super) verdicts: Verdicts,
    pub(super) started: Instant,
    sampling: Interval,
    writing: Interval,
    _served: Option<Served>,
}

impl Operation {
    /// Questions are answered from when [`Operation::next`] is first waited for.
    pub(super) fn start(
        doors: Doors,
        layers: &Layers,
        loaded: &Loaded,
        source: Arc<SourceHealth>,
        dataplane: &Dataplane,
    ) -> Result<Self, RunError> {
        let verdicts = Verdicts::start(Arc::clone(dataplane.verdicts()), &loaded.config.verdict_log);
        let interval = |every| {
            let mut interval = tokio::time::interval(every);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        };
        Ok(Self {
            asker: Some(doors.asker),
            questions: doors.questions,
            layers: layers.clone(),
            loaded: loaded.clone(),
            source,
            samples: Samples::new(Sample::take(dataplane)),
            verdicts: verdicts.map_err(RunError::bad_input)?,
            started: Instant::now(),
            sampling: interval(samples::INTERVAL),
            writing: interval(WRITE),
            _served: doors.served,
        })
    }

    /// Waits for what is to be done next. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> Next {
        if let Some(asker) = self.asker.take() {
            asker.started();
        }
        let writes = self.verdicts.is_on();
        tokio::select! {
            _ = self.sampling.tick() => Next::Sample,
            _ = self.writing.tick(), if writes => Next::Write,
            // The channel never closes: the doors keep its other end, or nobody asks.
            Some(question) = self.questions.recv() => Next::Answer(question),
        }
    }
}

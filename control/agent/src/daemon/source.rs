//! The source of a daemon's objects: opened at a start, followed from then on.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use penstock_policy::engine::TranslatedBy;
use penstock_policy::model::{Object, ObjectChange};
use penstock_sources::Source;
use penstock_sources::api_server::{NodeWriter, PodNotEnforced, StartupTaint, pods_not_enforced};
use tokio::sync::{mpsc, oneshot};

use crate::RunError;
use crate::config::Config;
use crate::discovery::NetworkState;
use crate::learnt_names::LearntNamesFile;
use crate::objects::NodeObjects;
use crate::policy_thread::{FollowedChanges, PolicyThread};
use crate::publisher::Publisher;
use crate::recorded_objects::{ObjectFile, ObjectRecorder, RecordedLines, StaleObjects};
use crate::settings::Settings;
use crate::signals::{Signal, Signals};

/// How long a start waits for the API server before it takes the objects of the last run. Pods are closed meanwhile; a server
/// that is there lists all objects faster.
const SOURCE_PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct OpenedSource {
    pub(super) source: Source,
    pub(super) objects: Vec<Object>,
    /// Set if they are those of an earlier run.
    pub(super) stale: Option<StaleObjects>,
}

/// Makes the writer at an API server, which says that it is ready, and on which pods policy is not enforced.
pub(super) fn node_writer(config: &Config) -> (oneshot::Sender<()>, mpsc::Sender<PodNotEnforced>, NodeWriter) {
    let (ready, is_ready) = oneshot::channel();
    let key = config.source.startup_taint.as_ref().map(|key| key.as_str().to_owned());
    let startup_taint = key.map(|key| StartupTaint { key, ready: is_ready });
    let (tell, not_enforced) = pods_not_enforced();
    (ready, tell, NodeWriter { node: config.node.as_str().to_owned(), startup_taint, not_enforced })
}

/// Opens the source and reads all objects, or those of the last run if the API server does not list them soon. `None` if a
/// signal ended the wait for that.
pub(super) async fn open_source(
    config: &Config,
    writer: NodeWriter,
    record: Option<&ObjectFile>,
    signals: &mut Signals,
) -> Result<Option<OpenedSource>, RunError> {
    let location = config.source.location();
    let last = || record.and_then(ObjectFile::read).map(|(_, objects)| objects);
    let opened = Source::start(&location, Some(writer), config.conversion(), &last).await;
    let mut source =
        opened.map_err(|error| RunError::BadInput(error.to_string().lines().map(str::to_owned).collect()))?;
    let mut patience = std::pin::pin!(tokio::time::sleep(SOURCE_PATIENCE));
    let mut record = record;
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => if let Signal::Terminate(name) = signal {
                tracing::info!(signal = name, "stopped before any policy was in effect");
                return Ok(None);
            },
            objects = source.first() => return Ok(Some(OpenedSource { source, objects, stale: None })),
            () = &mut patience, if record.is_some() => {
                let Some((recorded, objects)) = record.take().and_then(ObjectFile::read) else { continue };
                tracing::warn!(
                    "the API server has not listed all objects: those of the last run, recorded at {recorded}, are in effect until it does"
                );
                let stale = Some(StaleObjects { recorded, objects: objects.len() });
                return Ok(Some(OpenedSource { source, objects, stale }));
            }
        }
    }
}

/// Publishes and records the source's changes from now on. `lines` are the objects in effect; `are_stale` if they are those of
/// an earlier run.
pub(super) fn follow(
    source: Source,
    record: Option<ObjectFile>,
    lines: RecordedLines,
    are_stale: bool,
    publisher: Arc<Publisher>,
) -> io::Result<PolicyThread> {
    let stale = are_stale.then(|| lines.references());
    let recorder = record.map(|file| ObjectRecorder::start(file, lines, are_stale)).transpose()?;
    PolicyThread::start(FollowedChanges { source, recorder, stale }, publisher)
}

/// The objects of this node to start with.
pub(super) fn first_objects(
    settings: &Settings<'_>,
    netstate: &NetworkState,
    initial: Vec<Object>,
    names: Option<&LearntNamesFile>,
) -> NodeObjects {
    let config = settings.config;
    let mut objects = NodeObjects::new(config.node.as_str(), &config.node_addresses);
    if let Some(names) = names {
        objects.learn_names(Arc::clone(names.table()));
    }
    objects.set_translated_by(TranslatedBy::Kernel);
    objects.count_use(settings.worker_cores().len());
    objects.apply(initial.into_iter().map(ObjectChange::Set), &netstate.addresses);
    objects
}

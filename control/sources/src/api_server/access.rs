//! Access to an API server: a kubeconfig or the pod's service account, read again after every failure.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Response, header::RETRY_AFTER};
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use penstock_admin::printable::with_causes;
use tower::util::MapResponseLayer;

const CONNECT: Duration = Duration::from_secs(10);

/// Where the API server's address and our credentials come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// The service account of the pod that this runs in.
    InCluster,
    Kubeconfig {
        path: PathBuf,
        /// The context in it; `None` takes its current one.
        context: Option<String>,
    },
}

/// Why the API server cannot be accessed.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Not running in a pod, or the pod has no service account.
    #[error("source.in_cluster: {0}: run in a pod with a service account, or set source.kubeconfig instead")]
    NotInCluster(String),
    /// The file is not there, or not a kubeconfig with that context.
    #[error("source.kubeconfig: {path}: {reason}: correct the file or source.context", path = .path.display())]
    Kubeconfig { path: PathBuf, reason: String },
    /// Its TLS settings or credentials are unusable.
    #[error("the API server's access data is unusable: {0}")]
    Unusable(String),
}

impl Access {
    async fn read(&self) -> Result<Config, AccessError> {
        let mut config = match self {
            Self::InCluster => Config::incluster().map_err(|error| AccessError::NotInCluster(with_causes(&error)))?,
            Self::Kubeconfig { path, context } => {
                let wrong = |error| AccessError::Kubeconfig { path: path.clone(), reason: with_causes(&error) };
                let options = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
                let file = Kubeconfig::read_from(path).map_err(wrong)?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(wrong)?
            }
        };
        config.connect_timeout = Some(CONNECT);
        // Every request has its own timeout, and failures are reported before a retry.
        config.read_timeout = None;
        config.default_retry = false;
        Ok(config)
    }
}

/// A client that is rebuilt after a failure: tokens, certificates and addresses change.
pub(super) struct RenewableClient {
    access: Access,
    current: Mutex<(u64, Client)>,
    retry_after: Arc<RetryAfter>,
}

/// The server's last Retry-After in seconds. An overloaded server sends it only as a header.
#[derive(Default)]
struct RetryAfter(AtomicU64);

#[derive(Clone)]
pub(super) struct CurrentClient {
    generation: u64,
    pub(super) client: Client,
}

impl RenewableClient {
    pub(super) async fn new(access: &Access) -> Result<Self, AccessError> {
        let retry_after = Arc::new(RetryAfter::default());
        let client = build(access, &retry_after).await?;
        Ok(Self { access: access.clone(), current: Mutex::new((0, client)), retry_after })
    }

    pub(super) fn get(&self) -> CurrentClient {
        let (generation, client) = &*self.lock();
        CurrentClient { generation: *generation, client: client.clone() }
    }

    /// Builds a new client from the current files, unless one newer than `failed` exists.
    pub(super) async fn renew(&self, failed: &CurrentClient) -> Result<(), AccessError> {
        if self.get().generation != failed.generation {
            return Ok(());
        }
        let client = build(&self.access, &self.retry_after).await?;
        let mut current = self.lock();
        if current.0 == failed.generation {
            *current = (failed.generation + 1, client);
        }
        Ok(())
    }

    /// The Retry-After of the server's last answer.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        Some(self.retry_after.0.load(Ordering::Relaxed)).filter(|&seconds| seconds > 0).map(Duration::from_secs)
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Client)> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn build(access: &Access, retry_after: &Arc<RetryAfter>) -> Result<Client, AccessError> {
    let config = access.read().await?;
    let builder = ClientBuilder::try_from(config).map_err(|error| AccessError::Unusable(with_causes(&error)))?;
    let retry_after = Arc::clone(retry_after);
    Ok(builder.with_layer(&MapResponseLayer::new(move |response| retry_after.note(response))).build())
}

impl RetryAfter {
    fn note<B>(&self, response: Response<B>) -> Response<B> {
        let text = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        // The header may hold a date instead; then the backoff decides.
        let seconds = text.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        self.0.store(seconds, Ordering::Relaxed);
        response
    }
}

//! What went wrong between us and an API server, told so that someone can mend it.

use std::time::Duration;

use kube::core::Status;

use super::access::AccessError;
use crate::Kind;

/// The role that the manifests ship.
const ROLE: &str = "ClusterRole penstock (configs/kubernetes)";

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// 401: the server does not know us.
    #[error("401 Unauthorized: {0}: renew the token or certificate; it is read again at every try")]
    Unauthorized(String),
    /// 403: it knows us, and does not let us.
    #[error(
        "403 Forbidden: {message}: the account needs the verbs get, list and watch on {resource}; bind it to {ROLE}"
    )]
    Forbidden {
        /// What we asked for.
        resource: &'static str,
        /// What the server says.
        message: String,
    },
    /// 410: what we know is too old for the server to tell what has changed since.
    #[error("410 Gone: {0}")]
    Gone(String),
    /// 4xx of another kind: it does not do what we ask.
    #[error("{code}: {message}")]
    Refused {
        /// The status code.
        code: u16,
        /// What the server says.
        message: String,
    },
    /// 429 or 5xx.
    #[error("{code}: {message}: the server is busy or not well")]
    Server {
        /// The status code.
        code: u16,
        /// What the server says.
        message: String,
        /// How long it asks us to wait.
        retry_after: Option<Duration>,
    },
    /// No connection could be made.
    #[error("no connection: {0}: is the server up, and can it be reached from this node?")]
    Unreachable(String),
    /// A connection that broke.
    #[error("no connection: {0}: is the server up, and can it be reached from this node?")]
    Connection(String),
    /// No answer for too long.
    #[error("no answer within {} s: is the server up, and can it be reached from this node?", .0.as_secs())]
    Slow(Duration),
    /// A watch ended as soon as it had begun.
    #[error(
        "a watch ended as soon as it had begun: is the server going down, or is there a proxy that does not stream?"
    )]
    Closed,
    /// An answer that is no answer.
    #[error("an answer that cannot be read: {0}: is this an API server?")]
    Malformed(String),
    /// The access data cannot be read.
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl Failure {
    /// What an error of the client means, for one kind of objects.
    pub(super) fn of(error: &kube::Error, kind: Kind) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status, kind),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) | kube::Error::LinesCodecMaxLineLengthExceeded => {
                Self::Malformed(super::chain(error))
            }
            kube::Error::Auth(error) => Self::Unauthorized(super::chain(error)),
            other if is_of_connecting(other) => Self::Unreachable(super::chain(other)),
            other => Self::Connection(super::chain(other)),
        }
    }

    /// What a status of the API means.
    pub(super) fn of_status(status: &Status, kind: Kind) -> Self {
        let message = match status.message.trim() {
            "" => status.reason.clone(),
            message => message.lines().next().unwrap_or_default().to_owned(),
        };
        match status.code {
            401 => Self::Unauthorized(message),
            403 => Self::Forbidden { resource: kind.resource(), message },
            410 => Self::Gone(message),
            code @ (408 | 429 | 500..) => {
                let seconds = status.details.as_ref().map(|details| details.retry_after_seconds);
                let retry_after = seconds.filter(|&seconds| seconds > 0).map(|s| Duration::from_secs(s.into()));
                Self::Server { code, message, retry_after }
            }
            code => Self::Refused { code, message },
        }
    }

    /// Whether there was nobody to connect to.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable(_))
    }

    /// How long the server asks us to wait.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Server { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether the place in the stream of changes from which we asked is of no use any more.
    pub(super) fn forgets_position(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Refused { .. } | Self::Malformed(_))
    }

    /// Whether it will not mend itself.
    pub(super) fn needs_someone(&self) -> bool {
        matches!(self, Self::Unauthorized(_) | Self::Forbidden { .. } | Self::Access(_))
    }

    /// Whether another client may fare better.
    pub(super) fn asks_for_new_client(&self) -> bool {
        !matches!(self, Self::Gone(_) | Self::Forbidden { .. } | Self::Refused { .. } | Self::Server { .. })
    }
}

/// Whether the connection could not be made: nothing was asked of a server then.
fn is_of_connecting(error: &kube::Error) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    causes
        .any(|cause| cause.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect()))
}

//! Failures of API server requests, with the remedy for an operator.

use std::time::Duration;

use kube::core::Status;
use penstock_admin::printable::with_causes;

use super::access::AccessError;
use crate::ObjectKind;

/// The role that the manifests ship.
pub(super) const ROLE: &str = "ClusterRole penstock (configs/kubernetes)";

#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// 401: unknown credentials.
    #[error("401 Unauthorized: {0}: renew the token or certificate; it is read again before every retry")]
    Unauthorized(String),
    /// 403: missing permissions.
    #[error(
        "403 Forbidden: {message}: the account needs the verbs get, list and watch on {resource}; bind it to {ROLE}"
    )]
    Forbidden { resource: &'static str, message: String },
    /// 410: the requested resourceVersion is too old.
    #[error("410 Gone: {0}")]
    Gone(String),
    /// Another 4xx.
    #[error("{code}: {message}")]
    Refused { code: u16, message: String },
    /// 429 or 5xx.
    #[error("{code}: {message}: the server is overloaded or failing")]
    Server { code: u16, message: String, retry_after: Option<Duration> },
    #[error("no connection: {0}: is the server up, and can it be reached from this node?")]
    Unreachable(String),
    #[error("no connection: {0}: is the server up, and can it be reached from this node?")]
    Connection(String),
    #[error("no answer within {} s: is the server up, and can it be reached from this node?", .0.as_secs())]
    Slow(Duration),
    /// A watch ended right after it started.
    #[error(
        "a watch ended right after it started: is the server shutting down, or is there a proxy that does not stream?"
    )]
    Closed,
    #[error("malformed answer: {0}: is this an API server?")]
    Malformed(String),
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl RequestError {
    /// Classifies a client error of one kind's request.
    pub(super) fn of(error: &kube::Error, kind: ObjectKind) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status, kind),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) | kube::Error::LinesCodecMaxLineLengthExceeded => {
                Self::Malformed(with_causes(error))
            }
            kube::Error::Auth(error) => Self::Unauthorized(with_causes(error)),
            other if is_of_connecting(other) => Self::Unreachable(with_causes(other)),
            other => Self::Connection(with_causes(other)),
        }
    }

    pub(super) fn of_status(status: &Status, kind: ObjectKind) -> Self {
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

    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable(_))
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Server { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether the resourceVersion we resumed from is no longer usable.
    pub(super) fn discards_version(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Refused { .. } | Self::Malformed(_))
    }

    pub(super) fn needs_operator(&self) -> bool {
        matches!(self, Self::Unauthorized(_) | Self::Forbidden { .. } | Self::Access(_))
    }

    pub(super) fn needs_new_client(&self) -> bool {
        !matches!(self, Self::Gone(_) | Self::Forbidden { .. } | Self::Refused { .. } | Self::Server { .. })
    }
}

/// Whether the error occurred while connecting, before any request.
fn is_of_connecting(error: &kube::Error) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    causes
        .any(|cause| cause.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect()))
}

//! The commands need this of a cluster: its daemons, a way to run commands beside them, and the versions of objects.
//!
//! [`Cluster`] has two implementations: the API server ([`crate::api`]), and canned answers in tests.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::pin::Pin;
use std::str::FromStr;

use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};

pub(super) trait Cluster: Send + Sync {
    /// Finds the daemons, sorted by node.
    ///
    /// # Errors
    /// The API server does not answer, refuses, or knows no pod of Penstock.
    fn daemons(&self) -> impl Future<Output = Result<Fleet, ClusterError>> + Send;

    /// Runs a command in the daemon's container, with or without standard input.
    fn exec(
        &self,
        daemon: &Daemon,
        command: Vec<String>,
        with_input: bool,
    ) -> impl Future<Output = Result<Running, Problem>> + Send;

    /// Where a pod is.
    ///
    /// # Errors
    /// The API server does not answer, refuses, or knows no such pod.
    fn pod(&self, pod: &PodName) -> impl Future<Output = Result<PodPlace, ClusterError>> + Send;

    /// The resourceVersions that a daemon must have seen to know the target as it is now, by resource.
    ///
    /// # Errors
    /// The API server does not answer, refuses, or knows no such object.
    fn versions(&self, target: &Target) -> impl Future<Output = Result<BTreeMap<String, u64>, ClusterError>> + Send;
}

/// A daemon: the pod of Penstock that answers for a node.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Daemon {
    pub(super) node: String,
    pub(super) pod: String,
}

/// The daemons of a cluster, and the nodes that have none to ask.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Fleet {
    pub(super) daemons: Vec<Daemon>,
    pub(super) missing: Vec<Missing>,
    /// Says in a line what of the cluster could not be seen.
    pub(super) note: Option<String>,
}

impl Fleet {
    /// The part of it on these nodes; a node that it does not have is missing.
    pub(super) fn only(mut self, nodes: &BTreeSet<String>) -> Self {
        self.daemons.retain(|daemon| nodes.contains(&daemon.node));
        self.missing.retain(|missing| nodes.contains(&missing.node));
        for node in nodes {
            let is_known =
                self.daemons.iter().any(|it| it.node == *node) || self.missing.iter().any(|it| it.node == *node);
            if !is_known {
                self.missing.push(Missing::new(node, None, &Problem::NoPod));
            }
        }
        self
    }
}

/// A command that runs. Dropping all of it ends the connection.
pub(super) struct Running {
    /// Standard input, if asked for. What runs may see its end only once the connection ends: version 4 of the protocol has no
    /// other way to say it.
    pub(super) stdin: Option<Writer>,
    pub(super) stdout: Reader,
    pub(super) stderr: Reader,
    /// The exit code. Both outputs must be read meanwhile.
    pub(super) status: Pin<Box<dyn Future<Output = Result<i32, Problem>> + Send>>,
}

pub(super) type Reader = Pin<Box<dyn AsyncRead + Send>>;
pub(super) type Writer = Pin<Box<dyn AsyncWrite + Send>>;

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error("no pod of Penstock is there; see what keeps the DaemonSet off this node, or leave it out with --node")]
    NoPod,
    #[error("{0}")]
    NotRunning(String),
    #[error("{0}")]
    Forbidden(String),
    #[error("{0}")]
    Unreachable(String),
    #[error("no answer within {0} s; allow more with --request-timeout")]
    TimedOut(u64),
    /// The container runs, the daemon in it does not answer.
    #[error("{0}")]
    NoDaemon(String),
    /// The daemon's version does not know the command or an option of it.
    #[error("does not know this command or option ({0}): an older version; update Penstock on this node")]
    OldVersion(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Failed(String),
    #[error("sent no valid answer ({0}); use the same version of Penstock here and there")]
    Garbage(String),
}

impl Problem {
    /// Its name in JSON.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::NoPod => "no_pod",
            Self::NotRunning(_) => "not_running",
            Self::Forbidden(_) => "forbidden",
            Self::Unreachable(_) => "unreachable",
            Self::TimedOut(_) => "timed_out",
            Self::NoDaemon(_) => "no_daemon",
            Self::OldVersion(_) => "old_version",
            Self::Refused(_) => "refused",
            Self::Failed(_) => "failed",
            Self::Garbage(_) => "invalid_answer",
        }
    }

    /// Whether the user has to ask otherwise, or be allowed to.
    pub(super) const fn is_bad_input(&self) -> bool {
        matches!(self, Self::Forbidden(_) | Self::Refused(_))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Missing {
    pub(super) node: String,
    pub(super) pod: Option<String>,
    /// One name from a closed set.
    pub(super) problem: &'static str,
    pub(super) message: String,
    #[serde(skip)]
    pub(super) is_bad_input: bool,
}

impl Missing {
    pub(super) fn new(node: &str, pod: Option<&str>, problem: &Problem) -> Self {
        Self {
            node: node.to_owned(),
            pod: pod.map(str::to_owned),
            problem: problem.name(),
            message: problem.to_string(),
            is_bad_input: problem.is_bad_input(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum ClusterError {
    /// The user must change something: a line names the thing, the value and the remedy.
    #[error("{0}")]
    BadInput(String),
    /// The API server did not do it.
    #[error("{0}")]
    Failed(String),
}

impl From<ClusterError> for super::Failure {
    fn from(error: ClusterError) -> Self {
        match error {
            ClusterError::BadInput(line) => Self::bad_input(line),
            ClusterError::Failed(line) => Self::Failed(anyhow::anyhow!(line)),
        }
    }
}

/// `namespace/name` of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PodName {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl FromStr for PodName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(format!("{text:?} is not a pod: write NAMESPACE/POD")),
        }
    }
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PodPlace {
    pub(super) node: String,
    pub(super) addresses: Vec<IpAddr>,
    /// It has the node's own addresses: no policy is about it.
    pub(super) host_network: bool,
}

/// The condition that is waited for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Target {
    AllPolicies,
    NetworkPolicy(PodName),
    ClusterNetworkPolicy(String),
    Pod(PodName),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is nothing to wait for: write networkpolicy/NAMESPACE/NAME, clusternetworkpolicy/NAME or pod/NAMESPACE/NAME"
            )
        };
        let (kind, name) = text.split_once('/').ok_or_else(wrong)?;
        let namespaced = || name.parse().map_err(|_| wrong());
        match kind.to_ascii_lowercase().as_str() {
            "networkpolicy" | "networkpolicies" | "netpol" => Ok(Self::NetworkPolicy(namespaced()?)),
            "pod" | "pods" | "po" => Ok(Self::Pod(namespaced()?)),
            "clusternetworkpolicy" | "clusternetworkpolicies" | "cnp" if !name.is_empty() && !name.contains('/') => {
                Ok(Self::ClusterNetworkPolicy(name.to_owned()))
            }
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllPolicies => f.write_str("all policies"),
            Self::NetworkPolicy(name) => write!(f, "networkpolicy/{name}"),
            Self::ClusterNetworkPolicy(name) => write!(f, "clusternetworkpolicy/{name}"),
            Self::Pod(name) => write!(f, "pod/{name}"),
        }
    }
}

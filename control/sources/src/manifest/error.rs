//! Errors of manifests, with their location.

use std::fmt::{self, Write};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use penstock_admin::printable::Escaping;
use penstock_policy::model::ObjectRef;

use super::super::convert::{FieldPath, FieldProblem};

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Origin {
    /// The file as given; `-` is standard input.
    pub file: Arc<Path>,
    /// Line, from 1; `None` where only the file is known.
    pub line: Option<u64>,
}

impl Origin {
    pub(crate) fn new(file: &Arc<Path>, line: u64) -> Self {
        Self { file: Arc::clone(file), line: Some(line).filter(|&line| line > 0) }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.file {
            file if file == Path::new("-") => f.write_str("standard input")?,
            file => file.display().fmt(f)?,
        }
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

/// Which pods an object that can't be read may be about.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Scope {
    /// It restricts nothing: a pod without its object has a closed interface.
    Nothing,
    /// A policy of this namespace.
    Namespace(String),
    #[default]
    Everything,
}

/// An error in a manifest: one line with file, line, object and field.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestError {
    pub origin: Origin,
    /// The object, as far as known: `NetworkPolicy shop/web`.
    pub object: Option<String>,
    /// The field; empty if the error is not about one field.
    pub field: FieldPath,
    pub problem: ManifestProblem,
    pub scope: Scope,
}

impl std::error::Error for ManifestError {}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Files, objects and fields are named by whoever wrote them.
        let mut f = Escaping(f);
        write!(f, "{}: ", self.origin)?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.problem)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ManifestProblem {
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// It was written in place, and has lost its end.
    #[error("is only the beginning of what it was, as after a write that failed; it counts once it stays so for {0} s")]
    CutOff(u64),
    #[error("has no manifest: name a directory with *.yaml, *.yml or *.json files")]
    NoManifests,
    /// It is not YAML.
    #[error("is not valid YAML or JSON: {0}")]
    Syntax(String),
    /// A document that is not an API object.
    #[error("is not a Kubernetes object: write a mapping with apiVersion and kind")]
    NotAnObject,
    #[error("{kind} of apiVersion {version} is not supported: use {remedy}")]
    ApiVersion { kind: String, version: String, remedy: &'static str },
    /// A policy of a kind that is not supported: what it denies would count as allowed.
    #[error(
        "{kind} of apiVersion {version} is a kind of policy that is not understood: write it as a NetworkPolicy or ClusterNetworkPolicy, or keep it out of these manifests"
    )]
    ForeignPolicy { kind: String, version: String },
    /// A kind that is close to one that is read, or an unknown one of a group that has policies.
    #[error("{kind} of apiVersion {version} is not a known kind: {remedy}, or keep it out of these manifests")]
    UnknownKind { kind: String, version: String, remedy: String },
    /// It had objects.
    #[error("has no object any more: restore its contents, or delete the file to delete its objects")]
    NoObject,
    #[error("is not a list of objects")]
    NotAList,
    #[error("{0}")]
    Type(String),
    /// A field that this version does not know, in a policy or in metadata: it could mean anything.
    #[error("is not a field that this version knows: correct its spelling, or remove it")]
    UnknownField,
    /// In a policy; elsewhere at the top, as where the `---` between two objects is missing, or in metadata.
    #[error("is there twice, and only the last one would count: remove one, or write --- between two objects")]
    Repeated,
    #[error(transparent)]
    Invalid(#[from] FieldProblem),
    #[error("is defined twice, also at {other}: remove one, or rename it")]
    Duplicate { other: Origin },
    #[error("address {address} is also that of {other} at {other_origin}: give each pod its own")]
    SharedAddress { address: IpAddr, other: ObjectRef, other_origin: Origin },
}

/// All errors in a set of manifests; at least one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestErrors(pub Vec<ManifestError>);

impl std::error::Error for ManifestErrors {}

impl fmt::Display for ManifestErrors {
    /// One line an error.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

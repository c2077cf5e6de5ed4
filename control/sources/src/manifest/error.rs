//! What is wrong with a manifest, and where.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use penstock_policy::model::ObjectRef;

use super::super::convert::{FieldPath, Problem};

/// A place in a manifest file.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Origin {
    /// The file, as it was named to us; `-` is standard input.
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

/// What is wrong with a manifest: one line that names file, line, object and field.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestError {
    /// Where.
    pub origin: Origin,
    /// The object, as far as it could be named: `NetworkPolicy shop/web`.
    pub object: Option<String>,
    /// The field in the object; empty where the error is not about one field.
    pub field: FieldPath,
    /// What is wrong.
    pub fault: Fault,
}

impl std::error::Error for ManifestError {}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        self.fault.fmt(f)
    }
}

/// What is wrong in a manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// A directory without manifests.
    #[error("holds no manifest: name a directory with *.yaml, *.yml or *.json files in it")]
    NoManifests,
    /// It is not YAML.
    #[error("is not valid YAML or JSON: {0}")]
    Syntax(String),
    /// A document that is no object of the API.
    #[error("is not a Kubernetes object: write a mapping with apiVersion and kind")]
    NotAnObject,
    /// One of our kinds in a version that is not read.
    #[error("{kind} of apiVersion {version} is not read: use {remedy}")]
    ApiVersion {
        /// The kind.
        kind: String,
        /// The version found.
        version: String,
        /// What is read.
        remedy: &'static str,
    },
    /// A list whose items are no list.
    #[error("is not a list of objects")]
    NotAList,
    /// A value of the wrong type.
    #[error("{0}")]
    Type(String),
    /// A field of a policy that this version does not know: its meaning could be any.
    #[error("is not a field that this version knows: correct its spelling, or take it out")]
    UnknownField,
    /// A field with a wrong value.
    #[error(transparent)]
    Invalid(#[from] Problem),
    /// Two objects of one kind and name.
    #[error("is there twice, also at {other}: take one out, or rename it")]
    Duplicate {
        /// The other one.
        other: Origin,
    },
    /// Two pods with one address.
    #[error("address {address} is also that of {other} at {other_origin}: give each pod its own")]
    SharedAddress {
        /// The address.
        address: IpAddr,
        /// The other pod.
        other: ObjectRef,
        /// Where that is.
        other_origin: Origin,
    },
}

/// All that is wrong with a set of manifests; at least one error.
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

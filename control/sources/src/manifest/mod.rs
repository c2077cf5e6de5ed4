//! Reads objects from manifest files: YAML and JSON, one or many documents in a file, lists of objects.
//!
//! A document becomes a tree with line numbers, then a typed API object, then a model object. An error names file, line,
//! object and field. Other kinds are skipped and listed in [`Manifests::ignored`].

mod check;
mod derive;
mod error;
mod object;
mod tree;
mod workload;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_policy::model::{EndpointSlice, Object, ObjectKey, Pod};

pub(crate) use check::{conflicts, implied_namespaces, owned_addresses};
pub use derive::derive_endpoint_slices;
pub use error::{ManifestError, ManifestErrors, ManifestProblem, Origin, Scope};

use super::convert::{ConversionSettings, FieldPath};
use object::DocumentReader;
use tree::YamlNode;

/// `include/uapi/asm-generic/fcntl.h`
const O_NONBLOCK: i32 = 0o4000;

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which objects to read beyond the stable API.
    pub settings: ConversionSettings,
    pub unknown_fields: UnknownFields,
    /// Whether files may be of a folder that a cluster is deployed from: workloads, and pods without a status, stand for their pods;
    /// what is no object is passed over.
    pub of_deployments: bool,
    /// The namespace of objects that name none; `default` if it is empty.
    pub namespace: String,
}

/// How to treat a kind of policy, and a field in a policy's spec, that this version does not know. Elsewhere an unknown field changes no meaning
/// and is only noted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UnknownFields {
    /// An error: a misspelt `from` would otherwise open a rule to everyone.
    #[default]
    Refuse,
    /// Noted in [`Document::unknown_fields`].
    Note,
}

#[derive(Debug, Default)]
pub struct Manifests {
    /// The objects, in the order of files and documents.
    pub documents: Vec<Document>,
    /// Objects of other kinds.
    pub ignored: Vec<Ignored>,
    /// Documents that are no objects, and repeated workloads, with [`Options::of_deployments`].
    pub passed_over: Vec<Origin>,
    /// Workloads, each as its pods, with their places, which are none of `documents` yet.
    workloads: Vec<(Document, usize)>,
    /// EndpointSlices that no manifest has ([`Manifests::derive_endpoint_slices`]).
    derived: Vec<EndpointSlice>,
}

impl Manifests {
    /// All objects, plus the namespaces that they use and none of them defines, with their name as the only label.
    pub fn objects(&self) -> impl Iterator<Item = Object> {
        let written = || self.documents.iter().map(|document| &document.object);
        let derived = self.derived.iter().cloned().map(Object::EndpointSlice);
        implied_namespaces(written()).into_iter().chain(written().cloned()).chain(derived)
    }

    /// The pods that workloads stand for, and those without a status: the kind of what makes them, and namespace and name.
    pub fn workloads(&self) -> Vec<(&str, &ObjectKey)> {
        let pods = self.documents.iter().filter(|document| document.stands_in).filter_map(Document::pod);
        pods.map(|pod| (pod.controller.as_ref().map_or("Pod", |it| it.kind.as_str()), &pod.key)).collect()
    }

    fn extend(&mut self, read: Self) {
        self.documents.extend(read.documents);
        self.ignored.extend(read.ignored);
        self.passed_over.extend(read.passed_over);
        self.workloads.extend(read.workloads);
    }

    /// If no manifest is an EndpointSlice: derives those of Services with a selector from their pods, as the cluster would.
    /// [`Manifests::objects`] then has them. Returns of how many Services.
    pub fn derive_endpoint_slices(&mut self) -> usize {
        let objects: Vec<_> = self.documents.iter().map(|document| (&document.object, document.is_ready())).collect();
        let (derived, services) = derive_endpoint_slices(&objects);
        self.derived = derived;
        services
    }
}

#[derive(Debug)]
pub struct Document {
    pub object: Object,
    pub origin: Origin,
    pub unknown_fields: Vec<FieldPath>,
    /// Whether it stands for the pods of a workload.
    stands_in: bool,
    tree: YamlNode,
}

impl Document {
    fn pod(&self) -> Option<&Pod> {
        match &self.object {
            Object::Pod(pod) => Some(pod),
            _ => None,
        }
    }

    /// For a pod: whether its status says that it is ready, or nothing about it.
    pub fn is_ready(&self) -> bool {
        derive::is_ready(&self.tree)
    }

    /// The location of one of the object's fields, or of its closest parent if the field is absent.
    pub fn origin_of(&self, field: &FieldPath) -> Origin {
        Origin::new(&self.origin.file, self.tree.line_of(field))
    }

    /// The value of a field as written; `None` if absent.
    pub fn value(&self, field: &FieldPath) -> Option<serde_json::Value> {
        self.tree.at(field).map(YamlNode::to_value)
    }
}

#[derive(Clone, Debug)]
pub struct Ignored {
    pub origin: Origin,
    /// Its kind and name: `Deployment shop/web`.
    pub object: String,
    /// Whether it is a policy; with [`UnknownFields::Refuse`] such an object is an error.
    pub is_policy: bool,
}

/// Reads manifests. Each path is a file, a directory (its `*.yaml`, `*.yml` and `*.json`, sorted by path, with those in its
/// subdirectories) or `-` for standard input. Collects all errors, conflicts between objects included.
pub fn read_manifests<P: AsRef<Path>>(paths: &[P], options: &Options) -> Result<Manifests, ManifestErrors> {
    let mut manifests = Manifests::default();
    let mut errors = Vec::new();
    for named in files(paths, &mut errors) {
        let file = named.path();
        match named.read().and_then(|text| parse_file(file, &text, options)) {
            Ok(read) => {
                manifests.extend(read);
            }
            Err(ManifestErrors(of_file)) => errors.extend(of_file),
        }
    }
    finish(manifests, errors)
}

/// Adds workloads, and checks for conflicts between objects.
fn finish(mut manifests: Manifests, mut errors: Vec<ManifestError>) -> Result<Manifests, ManifestErrors> {
    workload::stand_in(&mut manifests);
    let objects = manifests.documents.iter().map(|document| (&document.object, &document.origin));
    errors.extend(conflicts(objects).into_iter().map(|conflict| conflict.at_second));
    if errors.is_empty() { Ok(manifests) } else { Err(ManifestErrors(errors)) }
}

/// The texts of manifests, each with its file's name, unread. Paths are as in [`read_manifests`].
pub fn read_texts<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<(Arc<Path>, String)>, ManifestErrors> {
    let (mut texts, mut errors) = (Vec::new(), Vec::new());
    for named in files(paths, &mut errors) {
        match named.read() {
            Ok(text) => texts.push((Arc::clone(named.path()), text)),
            Err(ManifestErrors(of_file)) => errors.extend(of_file),
        }
    }
    if errors.is_empty() { Ok(texts) } else { Err(ManifestErrors(errors)) }
}

/// Reads manifests from a text, as if a file of this name had it. Collects all errors, conflicts between objects included.
pub fn read_text(name: &Path, text: &str, options: &Options) -> Result<Manifests, ManifestErrors> {
    let (manifests, errors) = parse_readable(&Arc::from(name), text, options);
    finish(manifests, errors)
}

/// Parses the text of one file; does not check for conflicts with other files.
pub(crate) fn parse_file(file: &Arc<Path>, text: &str, options: &Options) -> Result<Manifests, ManifestErrors> {
    let (manifests, errors) = parse_readable(file, text, options);
    if errors.is_empty() { Ok(manifests) } else { Err(ManifestErrors(errors)) }
}

/// Parses the text of one file as far as it can be read.
pub(crate) fn parse_readable(file: &Arc<Path>, text: &str, options: &Options) -> (Manifests, Vec<ManifestError>) {
    let mut manifests = Manifests::default();
    let mut errors = Vec::new();
    match tree::parse(text) {
        Err(tree::Malformed { line, message }) => errors.push(ManifestError {
            origin: Origin::new(file, line.unwrap_or(0)),
            object: None,
            field: FieldPath::default(),
            problem: ManifestProblem::Syntax(match text.contains("{{") {
                true => format!("{message}; render a Helm template first, with helm template"),
                false => message,
            }),
            scope: Scope::Everything,
        }),
        Ok(trees) => {
            let mut reader = DocumentReader { file, options, manifests: &mut manifests, errors: &mut errors };
            trees.into_iter().for_each(|tree| reader.document(tree));
        }
    }
    (manifests, errors)
}

enum NamedFile {
    /// Files that a user names, who may name a pipe.
    Given(Arc<Path>),
    /// Files of a directory.
    Found(Arc<Path>),
}

impl NamedFile {
    fn path(&self) -> &Arc<Path> {
        match self {
            Self::Given(path) | Self::Found(path) => path,
        }
    }

    fn read(&self) -> Result<String, ManifestErrors> {
        match self {
            Self::Given(path) => read_file(path),
            Self::Found(path) => read_regular_file(path),
        }
    }
}

fn files<P: AsRef<Path>>(paths: &[P], errors: &mut Vec<ManifestError>) -> Vec<NamedFile> {
    let mut files = Vec::new();
    for path in paths.iter().map(AsRef::as_ref) {
        if path == Path::new("-") || !path.is_dir() {
            files.push(NamedFile::Given(Arc::from(path)));
            continue;
        }
        match files_in(path) {
            Ok(Found { manifests, .. }) if manifests.is_empty() => {
                errors.push(of_path(path, ManifestProblem::NoManifests));
            }
            Ok(Found { manifests, .. }) => {
                files.extend(manifests.into_iter().map(|path| NamedFile::Found(Arc::from(path))));
            }
            Err(error) => errors.push(of_path(path, ManifestProblem::Unreadable(error.to_string()))),
        }
    }
    files
}

/// The files in a directory and its subdirectories, sorted by path.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) manifests: Vec<PathBuf>,
    /// Files whose extension is not that of a manifest.
    pub(crate) others: Vec<PathBuf>,
}

/// Lists the files in a directory. Skips hidden files and directories: editors keep drafts in them, git its data, and the
/// kubelet what the links in the volume of a ConfigMap point to.
///
/// # Errors
/// If the directory or one of its subdirectories can't be listed.
pub(crate) fn files_in(directory: &Path) -> io::Result<Found> {
    let mut found = Found::default();
    let mut directories = vec![directory.to_owned()];
    // A link may lead back to a directory above.
    let mut seen = BTreeSet::new();
    while let Some(directory) = directories.pop() {
        let data = fs::metadata(&directory)?;
        if !seen.insert((data.dev(), data.ino())) {
            continue;
        }
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b".")) {
                continue;
            }
            match path.is_dir() {
                true => directories.push(path),
                false if is_manifest(&path) => found.manifests.push(path),
                false => found.others.push(path),
            }
        }
    }
    found.manifests.sort();
    found.others.sort();
    Ok(found)
}

fn is_manifest(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension.eq_ignore_ascii_case(known)))
}

/// Reads a file of a directory. A pipe or a device there would hang its reader.
pub(crate) fn read_regular_file(file: &Arc<Path>) -> Result<String, ManifestErrors> {
    let read = || -> io::Result<String> {
        // A pipe without a writer would hang the opening already.
        let mut opened = fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(file)?;
        if !opened.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file: remove it, or give it another ending"));
        }
        let mut text = String::new();
        opened.read_to_string(&mut text).map(|_| text)
    };
    read().map_err(|error| ManifestErrors(vec![of_path(file, ManifestProblem::Unreadable(error.to_string()))]))
}

fn read_file(file: &Arc<Path>) -> Result<String, ManifestErrors> {
    let text = match &**file {
        path if path == Path::new("-") => {
            let mut text = String::new();
            io::stdin().lock().read_to_string(&mut text).map(|_| text)
        }
        path => fs::read_to_string(path),
    };
    text.map_err(|error| ManifestErrors(vec![of_path(file, ManifestProblem::Unreadable(error.to_string()))]))
}

pub(crate) fn of_path(path: &Path, problem: ManifestProblem) -> ManifestError {
    let origin = Origin { file: Arc::from(path), line: None };
    ManifestError { origin, object: None, field: FieldPath::default(), problem, scope: Scope::Everything }
}

//! Converts a document to objects.

use std::iter;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use penstock_policy::model::{Controller, Object};
use serde_json::Value;

use super::super::convert::{self, FieldError, FieldPath, PathElement};
use super::super::typed::{self, ApiType};
use super::error::{ManifestError, ManifestProblem, Origin, Scope};
use super::tree::YamlNode;
use super::workload::{pods_of, template_of};
use super::{Document, Ignored, Manifests, Options, UnknownFields};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ManifestKind {
    Namespace,
    Node,
    Pod,
    NetworkPolicy,
    NetworkPolicyV1Beta1,
    ClusterNetworkPolicy,
    Service,
    EndpointSlice,
}

impl ManifestKind {
    fn is_policy(self) -> bool {
        matches!(self, Self::NetworkPolicy | Self::NetworkPolicyV1Beta1 | Self::ClusterNetworkPolicy)
    }
}

enum Declared {
    One(ManifestKind),
    /// A list; items without a type of their own have this kind.
    List(Option<ManifestKind>),
    /// A policy of a kind that is not supported or not known, by itself or in a list; or a kind that looks like a misspelt one.
    ForeignPolicy(ManifestProblem),
    /// An object that makes pods of the template at this place.
    Workload(&'static [&'static str]),
    /// No object at all, in a folder that may have such files.
    NoObject,
    Other,
}

/// Kinds of policy in other groups whose names do not say so.
const FOREIGN_POLICIES: [(&str, &str); 1] = [("k8s.ovn.org", "EgressFirewall")];

/// Whether objects of this kind restrict packets of pods, in whatever engine. To leave one out would show as allowed what it
/// denies.
fn is_foreign_policy(version: &str, kind: &str) -> bool {
    let group = version.split_once('/').map_or("", |(group, _)| group);
    // Calico's staged policies are in effect nowhere.
    let is_named_policy = kind.ends_with("NetworkPolicy") && !kind.starts_with("Staged");
    is_named_policy || group == POLICY_GROUP || FOREIGN_POLICIES.contains(&(group, kind))
}

/// The group of AdminNetworkPolicy, BaselineAdminNetworkPolicy and ClusterNetworkPolicy.
const POLICY_GROUP: &str = "policy.networking.k8s.io";

/// Converts the documents of a file into `manifests`, and collects errors in `errors`.
pub(super) struct DocumentReader<'a> {
    pub(super) file: &'a Arc<Path>,
    pub(super) options: &'a Options,
    pub(super) manifests: &'a mut Manifests,
    pub(super) errors: &'a mut Vec<ManifestError>,
}

impl DocumentReader<'_> {
    pub(super) fn document(&mut self, tree: YamlNode) {
        match tree.into_objects() {
            Ok(objects) => self.items(objects, None),
            Err(tree) => self.items(vec![tree], None),
        }
    }

    /// Reads objects. An error in one does not hide errors in the next.
    fn items(&mut self, items: Vec<YamlNode>, in_list_of: Option<ManifestKind>) {
        for item in items {
            if let Err(error) = self.any(item, in_list_of) {
                self.errors.push(*error);
            }
        }
    }

    fn any(&mut self, tree: YamlNode, in_list_of: Option<ManifestKind>) -> Result<(), Box<ManifestError>> {
        let declared = self.declared(&tree, in_list_of)?;
        let is_policy = matches!(declared, Declared::One(kind) if kind.is_policy());
        let of_metadata = || {
            let field = tree.get("metadata")?.find_repeated(false)?;
            let metadata = PathElement::Field("metadata".to_owned());
            Some(iter::once(metadata).chain(field.elements().iter().cloned()).collect())
        };
        if !matches!(declared, Declared::NoObject)
            && let Some(field) = tree.find_repeated(is_policy).or_else(of_metadata)
        {
            return Err(self.error_at(&tree, field, ManifestProblem::Repeated));
        }
        match declared {
            Declared::One(kind) => self.object(tree, kind),
            Declared::List(kind) => {
                let items = tree.into_items_of("items");
                self.items(items.map_err(|tree| self.error(&tree, ITEMS, ManifestProblem::NotAList))?, kind);
                Ok(())
            }
            Declared::ForeignPolicy(problem) if self.options.unknown_fields == UnknownFields::Refuse => {
                Err(self.error(&tree, &[], problem))
            }
            Declared::Workload(template) => self.workload(tree, template),
            Declared::NoObject => {
                self.manifests.passed_over.push(self.origin(&tree));
                Ok(())
            }
            declared @ (Declared::Other | Declared::ForeignPolicy(_)) => {
                let is_policy = matches!(declared, Declared::ForeignPolicy(_));
                self.manifests.ignored.push(Ignored {
                    origin: self.origin(&tree),
                    object: self.describe(&tree),
                    is_policy,
                });
                Ok(())
            }
        }
    }

    fn declared(&self, tree: &YamlNode, in_list_of: Option<ManifestKind>) -> Result<Declared, Box<ManifestError>> {
        let text = |field| tree.get(field).and_then(YamlNode::as_str);
        let (version, name) = match (text("apiVersion"), text("kind"), in_list_of) {
            (Some(version), Some(name), _) => (version, name),
            // The items of a typed list may omit their type.
            (None, None, Some(kind)) if tree.get("kind").is_none() => return Ok(Declared::One(kind)),
            // Values of a chart, a patch, or a kustomization, which may leave out its type. A chart itself has a version alone.
            (version, None, _)
                if self.options.of_deployments
                    && tree.get("kind").is_none()
                    && (version.is_none() || tree.get("spec").is_none()) =>
            {
                return Ok(Declared::NoObject);
            }
            _ => return Err(self.error(tree, &[], ManifestProblem::NotAnObject)),
        };
        let (single, is_list) = name.strip_suffix("List").map_or((name, false), |single| (single, true));
        let unread = |remedy| {
            let problem = ManifestProblem::ApiVersion { kind: name.to_owned(), version: version.to_owned(), remedy };
            Err(self.error(tree, &["apiVersion"], problem))
        };
        let kind = match (single, version) {
            ("", "v1") if is_list => return Ok(Declared::List(None)),
            ("Namespace", "v1") => ManifestKind::Namespace,
            ("Node", "v1") => ManifestKind::Node,
            ("Pod", "v1") => ManifestKind::Pod,
            ("NetworkPolicy", "networking.k8s.io/v1") => ManifestKind::NetworkPolicy,
            ("NetworkPolicy", "extensions/v1beta1") if self.options.settings.v1beta1 => {
                ManifestKind::NetworkPolicyV1Beta1
            }
            ("NetworkPolicy", "extensions/v1beta1") => {
                return unread("networking.k8s.io/v1, or the v1beta1 setting with its own meaning");
            }
            // v1beta1 is announced with the same schema.
            ("ClusterNetworkPolicy", "policy.networking.k8s.io/v1alpha2" | "policy.networking.k8s.io/v1beta1") => {
                ManifestKind::ClusterNetworkPolicy
            }
            ("ClusterNetworkPolicy", version) if version.starts_with("policy.networking.k8s.io/") => {
                return unread("policy.networking.k8s.io/v1alpha2");
            }
            ("Service", "v1") => ManifestKind::Service,
            ("EndpointSlice", "discovery.k8s.io/v1") => ManifestKind::EndpointSlice,
            ("EndpointSlice", version) if version.starts_with("discovery.k8s.io/") => {
                return unread("discovery.k8s.io/v1");
            }
            // Other groups have kinds of the same names. In these groups a wrong version is an error.
            ("Namespace" | "Node" | "Pod" | "Service" | "", version) if !version.contains('/') => return unread("v1"),
            ("NetworkPolicy", version) if is_policy_group(version) => return unread("networking.k8s.io/v1"),
            (kind, version) if is_foreign_policy(version, kind) && !(is_list && tree.is_empty_list("items")) => {
                let (kind, version) = (kind.to_owned(), version.to_owned());
                return Ok(Declared::ForeignPolicy(ManifestProblem::ForeignPolicy { kind, version }));
            }
            (kind, version) => {
                let template = template_of(tree, kind, version).filter(|_| self.options.of_deployments && !is_list);
                let other = || unknown_kind(name, version).map_or(Declared::Other, Declared::ForeignPolicy);
                return Ok(template.map_or_else(other, Declared::Workload));
            }
        };
        Ok(if is_list { Declared::List(Some(kind)) } else { Declared::One(kind) })
    }

    fn object(&mut self, tree: YamlNode, kind: ManifestKind) -> Result<(), Box<ManifestError>> {
        let settings = self.options.settings;
        let (object, unknown) = match kind {
            ManifestKind::Namespace => {
                self.typed(&tree, kind, |o: &core::Namespace| convert::namespace(o, settings).map(Object::Namespace))
            }
            ManifestKind::Node => self.typed(&tree, kind, |o: &core::Node| convert::node(o).map(Object::Node)),
            ManifestKind::Pod => self.typed(&tree, kind, |o: &core::Pod| convert::pod(o).map(Object::Pod)),
            ManifestKind::NetworkPolicy => self.typed(&tree, kind, |o: &networking::NetworkPolicy| {
                convert::network_policy(o).map(Object::NetworkPolicy)
            }),
            ManifestKind::NetworkPolicyV1Beta1 => self.typed(&tree, kind, |o: &networking::NetworkPolicy| {
                convert::v1beta1_network_policy(o).map(Object::NetworkPolicy)
            }),
            ManifestKind::ClusterNetworkPolicy => self.typed(&tree, kind, |o: &convert::ClusterNetworkPolicy| {
                convert::cluster_network_policy(o, settings).map(Object::ClusterNetworkPolicy)
            }),
            ManifestKind::Service => {
                self.typed(&tree, kind, |o: &core::Service| whole(convert::service(o)).map(Object::Service))
            }
            ManifestKind::EndpointSlice => self.typed(&tree, kind, |o: &discovery::EndpointSlice| {
                whole(convert::endpoint_slice(o)).map(Object::EndpointSlice)
            }),
        }?;
        let origin = self.origin(&tree);
        // `kubectl run --dry-run=client` writes an empty one.
        let status = tree.get("status").map(YamlNode::to_value).unwrap_or_default();
        let has_status = status.as_object().is_some_and(|status| !status.is_empty());
        let stands_in = kind == ManifestKind::Pod && self.options.of_deployments && !has_status;
        self.manifests.documents.push(Document { object, origin, unknown_fields: unknown, stands_in, tree });
        Ok(())
    }

    /// A workload, as its pods.
    fn workload(&mut self, tree: YamlNode, template: &[&str]) -> Result<(), Box<ManifestError>> {
        let kind = tree.get("kind").and_then(YamlNode::as_str).unwrap_or_default();
        let pods = pods_of(&self.value(&tree), kind, template);
        let origin = self.origin(&tree);
        if pods.is_empty() {
            let object = self.describe(&tree);
            self.manifests.ignored.push(Ignored { origin: origin.clone(), object, is_policy: false });
        }
        for (place, value) in pods.into_iter().enumerate() {
            let wrong = |field: FieldPath, problem| {
                let template = template.iter().map(|name| PathElement::Field((*name).to_owned()));
                let inside: FieldPath = template.chain(field.elements().iter().cloned()).collect();
                self.error_at(&tree, if tree.at(&inside).is_some() { inside } else { field }, problem)
            };
            let (typed, _) =
                typed::read::<core::Pod>(value).map_err(|(field, error)| wrong(field, ManifestProblem::Type(error)))?;
            let converted = convert::pod(&typed);
            let mut pod =
                converted.map_err(|FieldError { field, problem }| wrong(field, ManifestProblem::Invalid(problem)))?;
            pod.controller = Some(Controller { kind: kind.to_owned(), name: pod.key.name.clone() });
            let (object, origin, tree) = (Object::Pod(pod), origin.clone(), tree.clone());
            let document = Document { object, origin, unknown_fields: Vec::new(), stands_in: true, tree };
            self.manifests.workloads.push((document, place));
        }
        Ok(())
    }

    /// The object with the namespace that it gets, and the name that it may get.
    fn value(&self, tree: &YamlNode) -> Value {
        let mut value = tree.to_value();
        if let Some(Value::Object(metadata)) = value.get_mut("metadata") {
            let is_absent = |value: Option<&Value>| value.is_none_or(|value| value.is_null() || value == "");
            if is_absent(metadata.get("namespace")) {
                metadata.insert("namespace".to_owned(), self.default_namespace().into());
            }
            if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str)
                && self.options.of_deployments
                && is_absent(metadata.get("name"))
            {
                let name = prefix.trim_end_matches('-').into();
                metadata.insert("name".to_owned(), name);
            }
        }
        value
    }

    fn default_namespace(&self) -> &str {
        if self.options.namespace.is_empty() { "default" } else { &self.options.namespace }
    }

    /// Deserializes a tree as an API type and converts it; notes the fields that the type does not know.
    fn typed<T: ApiType>(
        &self,
        tree: &YamlNode,
        kind: ManifestKind,
        convert: impl FnOnce(&T) -> Result<Object, FieldError>,
    ) -> Result<(Object, Vec<FieldPath>), Box<ManifestError>> {
        let mut value = self.value(tree);
        if let Value::Object(fields) = &mut value {
            // These are already checked, and the typed reader accepts only its own version.
            fields.remove("apiVersion");
            fields.remove("kind");
        }
        // Who wants to know of all fields also gets those that policy doesn't need.
        let noted = match self.options.unknown_fields {
            UnknownFields::Note => typed::read_whole::<T>(value.clone()).ok().map(|(_, unknown)| unknown),
            UnknownFields::Refuse => None,
        };
        let (typed, unknown) = typed::read::<T>(value)
            .map_err(|(field, wrong)| self.error_at(tree, field, ManifestProblem::Type(wrong)))?;
        let unknown = noted.unwrap_or(unknown);
        if self.options.unknown_fields == UnknownFields::Refuse
            && let Some(field) = unknown.iter().find(|field| is_misspelt(field, kind))
        {
            return Err(self.error_at(tree, field.clone(), ManifestProblem::UnknownField));
        }
        match convert(&typed) {
            Ok(object) => Ok((object, unknown)),
            Err(FieldError { field, problem }) => Err(self.error_at(tree, field, ManifestProblem::Invalid(problem))),
        }
    }

    fn origin(&self, tree: &YamlNode) -> Origin {
        Origin::new(self.file, tree.line())
    }

    fn error(&self, tree: &YamlNode, field: &[&str], problem: ManifestProblem) -> Box<ManifestError> {
        self.error_at(tree, field.iter().map(|name| PathElement::Field((*name).to_owned())).collect(), problem)
    }

    fn error_at(&self, tree: &YamlNode, field: FieldPath, problem: ManifestProblem) -> Box<ManifestError> {
        let object = tree.is_mapping().then(|| self.describe(tree));
        let origin = Origin::new(self.file, tree.line_of(&field));
        Box::new(ManifestError { origin, object, field, problem, scope: self.scope(tree) })
    }

    /// Which pods an object that can't be read may be about.
    fn scope(&self, tree: &YamlNode) -> Scope {
        let text = |field| tree.get(field).and_then(YamlNode::as_str).unwrap_or_default();
        let (version, kind) = (text("apiVersion"), text("kind"));
        let namespace = tree.get("metadata").and_then(|metadata| metadata.get("namespace"));
        match nearest(kind) {
            Some("Pod" | "Service" | "EndpointSlice") => Scope::Nothing,
            Some("NetworkPolicy") if is_policy_group(version) => match namespace {
                None => Scope::Namespace(self.default_namespace().to_owned()),
                Some(namespace) => {
                    namespace.as_str().map_or(Scope::Everything, |name| Scope::Namespace(name.to_owned()))
                }
            },
            _ => Scope::Everything,
        }
    }

    /// The name of an object, as far as known: `Pod shop/web-1`.
    fn describe(&self, tree: &YamlNode) -> String {
        let kind = tree.get("kind").and_then(YamlNode::as_str).unwrap_or("object");
        let text = |field| tree.get("metadata").and_then(|meta| meta.get(field)).and_then(YamlNode::as_str);
        let is_clustered = matches!(kind, "Namespace" | "Node" | "ClusterNetworkPolicy");
        // Whether another engine's policy without a namespace belongs to the cluster is not known here.
        let may_be_clustered = kind.ends_with("NetworkPolicy") && kind != "NetworkPolicy";
        match (text("namespace"), text("name")) {
            (Some(namespace), Some(name)) if !is_clustered => format!("{kind} {namespace}/{name}"),
            (None, Some(name)) if !is_clustered && !may_be_clustered => {
                format!("{kind} {}/{name}", self.default_namespace())
            }
            (_, Some(name)) => format!("{kind} {name}"),
            (_, None) => format!("{kind} without a name"),
        }
    }
}

/// Whether a field that the object's type doesn't have can only be a mistake: any field of a policy, and of other objects those
/// beside `spec` and `status`. These two gain fields with each version of Kubernetes; a label below `metdata` is never read.
fn is_misspelt(field: &FieldPath, kind: ManifestKind) -> bool {
    match field.elements() {
        [PathElement::Field(first), ..] if first == "status" => false,
        [PathElement::Field(first), ..] if first == "spec" => kind.is_policy(),
        [PathElement::Field(first), rest @ ..] => rest.is_empty() || first == "metadata",
        _ => false,
    }
}

/// An object without an invalid part: a file's author can correct it.
fn whole<T>(converted: Result<(T, Vec<FieldError>), FieldError>) -> Result<T, FieldError> {
    let (object, wrong) = converted?;
    wrong.into_iter().next().map_or(Ok(object), Err)
}

const ITEMS: &[&str] = &["items"];

/// Whether a version is of a group in which Kubernetes has or had NetworkPolicy.
fn is_policy_group(version: &str) -> bool {
    match version.split_once('/') {
        Some((group, _)) => matches!(group, "networking.k8s.io" | "extensions"),
        None => true,
    }
}

/// The kinds that are read, each with a version of it.
const READ_KINDS: [(&str, &str); 8] = [
    ("Namespace", "v1"),
    ("Node", "v1"),
    ("Pod", "v1"),
    ("Service", "v1"),
    ("List", "v1"),
    ("EndpointSlice", "discovery.k8s.io/v1"),
    ("NetworkPolicy", "networking.k8s.io/v1"),
    ("ClusterNetworkPolicy", "policy.networking.k8s.io/v1alpha2"),
];

/// Other kinds of networking.k8s.io and extensions.
const BESIDE_NETWORK_POLICY: [&str; 10] = [
    "Ingress",
    "IngressClass",
    "IPAddress",
    "ServiceCIDR",
    "ClusterCIDR",
    "DaemonSet",
    "Deployment",
    "ReplicaSet",
    "PodSecurityPolicy",
    "Scale",
];

/// Kinds of Kubernetes whose short names are close to one that is read.
const CLOSE_KINDS: [&str; 2] = ["Job", "Role"];

/// A kind is taken for a misspelt one up to this edit distance.
const MAX_TYPO: usize = 2;

/// The kind that is read whose name is closest to this one's, in any case, of itself or of its list.
fn nearest(kind: &str) -> Option<&'static str> {
    let written = kind.to_ascii_lowercase();
    let distance = |read: &str| {
        let read = read.to_ascii_lowercase();
        strsim::levenshtein(&written, &read).min(strsim::levenshtein(&written, &format!("{read}list")))
    };
    let near = READ_KINDS.iter().map(|(read, _)| (distance(read), *read)).filter(|(distance, _)| *distance <= MAX_TYPO);
    near.min().map(|(_, read)| read)
}

/// Why a kind that is not read can't be left out: it may be a policy, or a misspelt name of something that is read. Left out, it
/// would take an object away that is enforced.
fn unknown_kind(kind: &str, version: &str) -> Option<ManifestProblem> {
    let group = version.split_once('/').map_or("", |(group, _)| group);
    // No other groups have names without a dot, or below k8s.io.
    let is_kubernetes = !group.contains('.') || group.ends_with(".k8s.io");
    let near = nearest(kind).filter(|near| {
        let is_policy = near.ends_with("Policy") && !kind.starts_with("Staged");
        is_policy || is_kubernetes && !CLOSE_KINDS.contains(&kind)
    });
    let single = kind.strip_suffix("List").unwrap_or(kind);
    let may_be_policy = matches!(group, "networking.k8s.io" | "extensions") && !BESIDE_NETWORK_POLICY.contains(&single);
    let remedy = match near {
        Some(near) => {
            let (_, version) = READ_KINDS.iter().find(|(read, _)| *read == near)?;
            format!("write {near} of apiVersion {version} if that is meant")
        }
        None if may_be_policy => "correct its spelling".to_owned(),
        None => return None,
    };
    Some(ManifestProblem::UnknownKind { kind: kind.to_owned(), version: version.to_owned(), remedy })
}

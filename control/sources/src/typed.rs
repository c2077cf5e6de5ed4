//! Reads API types from JSON values, with the paths of errors and of unknown fields.
//!
//! [`read`] takes only the fields that policy needs ([`ApiType::FIELDS`]): a field that nobody here reads is no reason to refuse an object.

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Map, Value};

use super::convert::{ClusterNetworkPolicy, FieldPath, POLICY_ANNOTATIONS, PathElement};

/// A type of the API, of which policy needs these fields, in addition to metadata. `a.b` is field `b` of `a`, or of each item of the list `a`.
pub(super) trait ApiType: DeserializeOwned {
    const FIELDS: &'static str;
}

impl ApiType for core::Namespace {
    const FIELDS: &'static str = "";
}

impl ApiType for core::Node {
    const FIELDS: &'static str = "status.addresses";
}

impl ApiType for core::Pod {
    const FIELDS: &'static str = "spec.nodeName spec.hostNetwork \
        spec.containers.ports.name spec.containers.ports.containerPort spec.containers.ports.protocol \
        spec.initContainers.restartPolicy spec.initContainers.ports.name spec.initContainers.ports.containerPort \
        spec.initContainers.ports.protocol status.phase status.podIP status.podIPs status.startTime";
}

impl ApiType for networking::NetworkPolicy {
    const FIELDS: &'static str = "spec";
}

impl ApiType for ClusterNetworkPolicy {
    const FIELDS: &'static str = "spec";
}

impl ApiType for core::Service {
    const FIELDS: &'static str = "spec.type spec.clusterIP spec.clusterIPs spec.externalIPs spec.internalTrafficPolicy spec.selector \
        spec.ports.name spec.ports.port spec.ports.protocol spec.ports.targetPort spec.ports.nodePort \
        status.loadBalancer.ingress.ip status.loadBalancer.ingress.ipMode";
}

impl ApiType for discovery::EndpointSlice {
    const FIELDS: &'static str = "addressType endpoints.addresses endpoints.conditions endpoints.hints endpoints.nodeName \
        ports.name ports.port ports.protocol";
}

/// Fields of metadata that policy doesn't need.
const UNUSED_METADATA: &str =
    "deletionGracePeriodSeconds finalizers generateName generation managedFields resourceVersion selfLink uid";

/// Reads what policy needs of an object. Returns the fields that aren't of its type, as far as they are read; or the field with the wrong
/// type, and the reason.
pub(super) fn read<T: ApiType>(mut object: Value) -> Result<(T, Vec<FieldPath>), (FieldPath, String)> {
    let needed: Vec<&str> = T::FIELDS.split_whitespace().collect();
    if let Value::Object(fields) = &mut object {
        // A field beside these may be one of them, misspelt.
        let is_misspelt = |name: &str| !["spec", "status"].contains(&name) && fields_below(&needed, name).is_empty();
        fields.retain(|name, value| name == "metadata" || is_misspelt(name) || retain_fields(name, value, &needed));
        if let Some(Value::Object(metadata)) = fields.get_mut("metadata") {
            metadata.retain(|name, _| !UNUSED_METADATA.split(' ').any(|unused| unused == name));
            if let Some(owners) = metadata.get_mut("ownerReferences") {
                retain_fields("owner", owners, &["owner.kind", "owner.name", "owner.controller"]);
            }
            if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
                let is_ours = |name: &str| name.starts_with(POLICY_ANNOTATIONS);
                annotations.retain(|name, value| value.is_string() || is_ours(name));
            }
        }
    }
    read_whole(object)
}

/// The rest of these paths behind the field `name`; an empty one for the whole field.
fn fields_below<'a>(paths: &[&'a str], name: &str) -> Vec<&'a str> {
    let rest = paths.iter().filter_map(|path| path.strip_prefix(name));
    rest.filter_map(|rest| if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }).collect()
}

/// Removes the fields of a value that none of the paths has. Returns whether one of the paths has the value itself, which is called `name`.
fn retain_fields(name: &str, value: &mut Value, paths: &[&str]) -> bool {
    let below = fields_below(paths, name);
    let retain = |value: &mut Value| {
        if let Value::Object(fields) = value {
            fields.retain(|name, value| retain_fields(name, value, &below));
        }
    };
    match value {
        _ if below.contains(&"") => {}
        Value::Array(items) => items.iter_mut().for_each(retain),
        value => retain(value),
    }
    !below.is_empty()
}

/// A value as kubectl and the API server read it. In Go null is the zero value of its type, in lists and maps, too; and YAML 1.1 has more words
/// for booleans.
struct KubernetesValue(Value);

macro_rules! null_is {
    ($($method:ident: $zero:expr;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            Self(if self.0.is_null() { $zero } else { self.0 }).deserialize_any(visitor)
        })*
    };
}

impl<'de> IntoDeserializer<'de, Error> for KubernetesValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for KubernetesValue {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Self))),
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, value)| (name, Self(value)));
                visitor.visit_map(MapDeserializer::new(fields))
            }
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.as_str().map(str::to_ascii_lowercase).as_deref() {
            Some("y" | "yes" | "on") => visitor.visit_bool(true),
            Some("n" | "no" | "off") => visitor.visit_bool(false),
            _ => self.0.deserialize_bool(visitor),
        }
    }

    null_is! {
        deserialize_string: Value::String(String::new());
        deserialize_str: Value::String(String::new());
        deserialize_seq: Value::Array(Vec::new());
        deserialize_map: Value::Object(Map::new());
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}

/// Deserializes a value as `T`. Returns the fields that `T` does not know, or the field with the wrong type and the reason.
pub(super) fn read_whole<T: DeserializeOwned>(value: Value) -> Result<(T, Vec<FieldPath>), (FieldPath, String)> {
    let mut unknown = Vec::new();
    let mut note = |path: serde_ignored::Path<'_>| unknown.push(field_path(&path));
    let mut track = serde_path_to_error::Track::new();
    let noting = serde_ignored::Deserializer::new(KubernetesValue(value), &mut note);
    let tracking = serde_path_to_error::Deserializer::new(noting, &mut track);
    // A type of the API is compiled once for the erased reader; for these two, one in the other, it would be many times.
    match erased_serde::deserialize(&mut <dyn erased_serde::Deserializer<'_>>::erase(tracking)) {
        Ok(typed) => Ok((typed, unknown)),
        Err(error) => Err((track.path().iter().filter_map(step).collect(), error.to_string())),
    }
}

fn step(segment: &serde_path_to_error::Segment) -> Option<PathElement> {
    use serde_path_to_error::Segment;
    match segment {
        Segment::Seq { index } => Some(PathElement::Index(*index)),
        Segment::Map { key } | Segment::Enum { variant: key } => Some(PathElement::Field(key.clone())),
        Segment::Unknown => None,
    }
}

fn field_path(path: &serde_ignored::Path<'_>) -> FieldPath {
    use serde_ignored::Path;
    fn walk(path: &Path<'_>, steps: &mut Vec<PathElement>) {
        match path {
            Path::Root => {}
            Path::Seq { parent, index } => {
                walk(parent, steps);
                steps.push(PathElement::Index(*index));
            }
            Path::Map { parent, key } => {
                walk(parent, steps);
                steps.push(PathElement::Field(key.clone()));
            }
            Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
                walk(parent, steps);
            }
        }
    }
    let mut steps = Vec::new();
    walk(path, &mut steps);
    steps.into_iter().collect()
}

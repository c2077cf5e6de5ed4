//! Deserializes API types, with the paths of errors and unknown fields.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::convert::{FieldPath, PathElement};

/// Deserializes a value as `T`. Returns the fields that `T` does not know, or the field with the wrong type and the reason.
pub(super) fn read<T: DeserializeOwned>(value: Value) -> Result<(T, Vec<FieldPath>), (FieldPath, String)> {
    let mut unknown = Vec::new();
    let mut note = |path: serde_ignored::Path<'_>| unknown.push(field_path(&path));
    let noting = serde_ignored::Deserializer::new(value, &mut note);
    match serde_path_to_error::deserialize(noting) {
        Ok(typed) => Ok((typed, unknown)),
        Err(error) => Err((error.path().iter().filter_map(step).collect(), error.into_inner().to_string())),
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

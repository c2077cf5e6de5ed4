//! Deserializes API types, with the paths of errors and unknown fields.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::convert::{FieldPath, PathElement};

/// Deserializes a value as `T`. Returns the fields that `T` does not know, or the field with the wrong type and the reason.
pub(super) fn read<T: DeserializeOwned>(value: Value) -> Result<(T, Vec<FieldPath>), (FieldPath, String)> {
    let mut unknown = Vec::new();
    let mut note = |path: serde_ignored::Path<'_>| unknown.push(field_path(&path));
    let mut track = serde_path_to_error::Track::new();
    let noting = serde_ignored::Deserializer::new(value, &mut note);
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

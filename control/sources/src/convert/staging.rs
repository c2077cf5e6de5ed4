//! The annotations that stage a policy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use penstock_policy::model::Staging;

use super::{FieldError, FieldPathRef, FieldProblem, names, notes};

/// The prefix of the annotations that this version reads on policies. Under it an annotation that it does not know is an
/// error: a misspelt one would leave in effect what its author believes to be staged.
pub const POLICY_ANNOTATIONS: &str = "policy.penstock.dev/";
const STAGED: &str = "policy.penstock.dev/staged";
const STAGED_FOR: &str = "policy.penstock.dev/staged-for";
const STAGED_DELETE: &str = "policy.penstock.dev/staged-delete";

/// Reads what a policy's annotations say about its part in what is in effect.
///
/// # Errors
/// An annotation under [`POLICY_ANNOTATIONS`] is not known, has a value that it cannot have, or contradicts another.
pub(crate) fn staging(meta: &ObjectMeta) -> Result<Staging, FieldError> {
    let at = FieldPathRef::OBJECT;
    let at = at.field("metadata");
    let at = at.field("annotations");
    let (mut is_new, mut target, mut is_deleted) = (false, None, false);
    for (name, value) in meta.annotations.iter().flatten().filter(|(name, _)| name.starts_with(POLICY_ANNOTATIONS)) {
        let invalid = |problem| at.field(name).invalid(problem);
        match name.as_str() {
            STAGED => is_new = flag(value).map_err(invalid)?,
            STAGED_DELETE => is_deleted = flag(value).map_err(invalid)?,
            STAGED_FOR => {
                names::dns_subdomain(value).map_err(invalid)?;
                if meta.name.as_deref() == Some(value) {
                    return Err(invalid(FieldProblem::StagedForItself(value.clone())));
                }
                target = Some(value.clone());
            }
            notes::LOG | notes::DENY_ANSWER => {}
            _ => return Err(invalid(FieldProblem::PolicyAnnotation)),
        }
    }
    match (is_new, target, is_deleted) {
        (true, _, true) => Err(at.field(STAGED).invalid(FieldProblem::BesideStagedDelete)),
        (false, Some(_), true) => Err(at.field(STAGED_FOR).invalid(FieldProblem::BesideStagedDelete)),
        (_, Some(name), false) => Ok(Staging::Replaces(name)),
        (true, None, false) => Ok(Staging::New),
        (false, None, true) => Ok(Staging::Deleted),
        (false, None, false) => Ok(Staging::InForce),
    }
}

fn flag(value: &str) -> Result<bool, FieldProblem> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        other => Err(FieldProblem::Flag(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<Staging, String> {
        let pairs =
            annotations.iter().map(|(name, value)| (format!("{POLICY_ANNOTATIONS}{name}"), (*value).to_owned()));
        let meta = ObjectMeta {
            name: Some("web".to_owned()),
            annotations: Some(pairs.chain([("example.org/staged".to_owned(), "perhaps".to_owned())]).collect()),
            ..ObjectMeta::default()
        };
        staging(&meta).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_stage_policies_whatever_others_prefixes_say() {
        for (annotations, expected) in [
            (&[][..], Staging::InForce),
            (&[("staged", "false"), ("staged-delete", "false")], Staging::InForce),
            (&[("staged", "true")], Staging::New),
            (&[("staged-for", "db.v2")], Staging::Replaces("db.v2".to_owned())),
            (&[("staged", "true"), ("staged-for", "db")], Staging::Replaces("db".to_owned())),
            (&[("staged-delete", "true")], Staging::Deleted),
        ] {
            assert_eq!(read(annotations), Ok(expected), "{annotations:?}");
        }
    }

    #[test]
    fn an_unknown_annotation_is_an_error_with_field_and_remedy() {
        for (annotations, parts) in [
            (&[("staged", "yes")][..], ["annotations[policy.penstock.dev/staged]", "\"yes\"", "write \"true\""]),
            (&[("staged", "")], ["annotations[policy.penstock.dev/staged]", "\"\"", "write \"true\""]),
            (&[("staged-delete", "True")], ["annotations[policy.penstock.dev/staged-delete]", "\"True\"", "\"true\""]),
            (&[("staged-for", "")], ["annotations[policy.penstock.dev/staged-for]", "missing", "253"]),
            (&[("staged-for", "Web")], ["annotations[policy.penstock.dev/staged-for]", "\"Web\"", "a-z"]),
            (&[("staged-for", "web")], ["annotations[policy.penstock.dev/staged-for]", "itself", "another name"]),
            (
                &[("stagged", "true")],
                ["annotations[policy.penstock.dev/stagged]", "not an annotation", "staged-delete"],
            ),
            (&[("staged", "true"), ("staged-delete", "true")], ["/staged]", "staged-delete", "remove one"]),
            (&[("staged-for", "db"), ("staged-delete", "true")], ["/staged-for]", "staged-delete", "remove one"]),
        ] {
            let error = read(annotations).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{annotations:?}: {error}");
        }
    }
}

//! The annotations by which a policy asks for something beside its verdicts.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use penstock_policy::model::{DenyAnswer, PolicyLog, PolicyNotes};

use super::{FieldError, FieldPathRef, FieldProblem};

pub(super) const LOG: &str = "policy.penstock.dev/log";
pub(super) const DENY_ANSWER: &str = "policy.penstock.dev/deny-answer";

/// Reads what a policy's annotations ask for beside its verdicts.
///
/// # Errors
/// One has a value that it cannot have.
pub(crate) fn notes(meta: &ObjectMeta) -> Result<PolicyNotes, FieldError> {
    let at = FieldPathRef::OBJECT;
    let at = at.field("metadata");
    let at = at.field("annotations");
    let value = |name: &str| meta.annotations.as_ref()?.get(name).map(String::as_str);
    let log = value(LOG).map_or(Ok(PolicyLog::Off), log).map_err(|problem| at.field(LOG).invalid(problem))?;
    let deny_answer = value(DENY_ANSWER).map(deny_answer).transpose();
    let deny_answer = deny_answer.map_err(|problem| at.field(DENY_ANSWER).invalid(problem))?;
    Ok(PolicyNotes { log, deny_answer })
}

fn log(value: &str) -> Result<PolicyLog, FieldProblem> {
    match value {
        "denied" => Ok(PolicyLog::Denied),
        "allowed" => Ok(PolicyLog::Allowed),
        "all" => Ok(PolicyLog::All),
        other => Err(FieldProblem::PolicyLog(other.to_owned())),
    }
}

fn deny_answer(value: &str) -> Result<DenyAnswer, FieldProblem> {
    match value {
        "none" => Ok(DenyAnswer::None),
        "reject" => Ok(DenyAnswer::Reject),
        other => Err(FieldProblem::DenyAnswer(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<PolicyNotes, String> {
        let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let meta = ObjectMeta { annotations: Some(pairs.collect()), ..ObjectMeta::default() };
        super::super::staging(&meta).map_err(|error| error.to_string())?;
        notes(&meta).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_ask_for_a_log_and_an_answer() {
        for (annotations, log, deny_answer) in [
            (&[][..], PolicyLog::Off, None),
            (&[(LOG, "denied")], PolicyLog::Denied, None),
            (&[(LOG, "allowed"), (DENY_ANSWER, "none")], PolicyLog::Allowed, Some(DenyAnswer::None)),
            (&[(LOG, "all"), (DENY_ANSWER, "reject")], PolicyLog::All, Some(DenyAnswer::Reject)),
        ] {
            assert_eq!(read(annotations), Ok(PolicyNotes { log, deny_answer }), "{annotations:?}");
        }
    }

    #[test]
    fn a_wrong_value_of_an_annotation_is_an_error_with_its_remedy() {
        for (name, value, remedy) in [
            (LOG, "true", "use denied, allowed or all"),
            (LOG, "", "use denied, allowed or all"),
            (LOG, "Denied", "use denied, allowed or all"),
            (DENY_ANSWER, "drop", "use none or reject"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            let parts = [format!("annotations[{name}]"), format!("{value:?}"), remedy.to_owned()];
            assert!(parts.iter().all(|part| error.contains(part)), "{name}={value}: {error}");
        }
    }
}

//! The annotations by which a pod's connections are limited.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use penstock_policy::model::ConnectionLimits;

use super::{FieldError, FieldPathRef, FieldProblem, POLICY_ANNOTATIONS};

const EGRESS_RATE: &str = "policy.penstock.dev/egress-connections-per-second";
const INGRESS_RATE: &str = "policy.penstock.dev/ingress-connections-per-second";
const EGRESS_OPEN: &str = "policy.penstock.dev/egress-open-connections";
const INGRESS_OPEN: &str = "policy.penstock.dev/ingress-open-connections";
/// A connection takes a microsecond or more to open.
const MOST_PER_SECOND: u32 = 1_000_000;
/// Each has a place in memory.
const MOST_OPEN: u32 = 65_536;

/// Reads what a pod's annotations say of its connections.
///
/// # Errors
/// One under [`POLICY_ANNOTATIONS`] is not known, or has a value that it cannot have.
pub(crate) fn limits(meta: &ObjectMeta) -> Result<ConnectionLimits, FieldError> {
    let at = FieldPathRef::OBJECT;
    let at = at.field("metadata");
    let at = at.field("annotations");
    let mut limits = ConnectionLimits::default();
    for (name, value) in meta.annotations.iter().flatten().filter(|(name, _)| name.starts_with(POLICY_ANNOTATIONS)) {
        let (limit, most) = match name.as_str() {
            EGRESS_RATE => (&mut limits.egress.each_second, MOST_PER_SECOND),
            INGRESS_RATE => (&mut limits.ingress.each_second, MOST_PER_SECOND),
            EGRESS_OPEN => (&mut limits.egress.open, MOST_OPEN),
            INGRESS_OPEN => (&mut limits.ingress.open, MOST_OPEN),
            _ => return Err(at.field(name).invalid(FieldProblem::PodAnnotation)),
        };
        let number = value.parse().ok().filter(|number| (1..=most).contains(number));
        let wrong = || at.field(name).invalid(FieldProblem::ConnectionLimit(value.clone(), most));
        *limit = Some(number.ok_or_else(wrong)?);
    }
    Ok(limits)
}

pub(crate) fn without_limits(mut meta: ObjectMeta) -> ObjectMeta {
    meta.annotations.iter_mut().for_each(|all| all.retain(|name, _| !name.starts_with(POLICY_ANNOTATIONS)));
    meta
}

#[cfg(test)]
mod tests {
    use penstock_policy::model::ConnectionLimit;

    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<ConnectionLimits, String> {
        let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let meta = ObjectMeta { annotations: Some(pairs.collect()), ..ObjectMeta::default() };
        limits(&meta).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_limit_each_direction_by_itself() {
        assert_eq!(read(&[("example.org/limit", "x")]), Ok(ConnectionLimits::default()));
        let all = [(EGRESS_RATE, "1"), (INGRESS_RATE, "1000000"), (EGRESS_OPEN, "7"), (INGRESS_OPEN, "65536")];
        let expected = ConnectionLimits {
            egress: ConnectionLimit { each_second: Some(1), open: Some(7) },
            ingress: ConnectionLimit { each_second: Some(1_000_000), open: Some(65_536) },
        };
        assert_eq!(read(&all), Ok(expected));
    }

    #[test]
    fn a_wrong_limit_is_an_error_with_its_remedy() {
        for (name, value, remedy) in [
            (EGRESS_RATE, "many", "use 1 to 1000000"),
            (INGRESS_RATE, "0", "use 1 to 1000000"),
            (EGRESS_OPEN, "-1", "use 1 to 65536"),
            (INGRESS_OPEN, "65537", "use 1 to 65536"),
            ("policy.penstock.dev/open-connections", "5", "use egress-connections-per-second, ingress"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.contains(&format!("annotations[{name}]")) && error.contains(remedy), "{error}");
        }
    }
}

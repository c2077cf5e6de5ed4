//! Looks for what daemons' logs must not have: in ordinary churn nothing is worth a warning.

/// Parts of warnings that the soak itself causes.
const EXPECTED: [&str; 1] = [
    // Each daemon but the last one leaves its place to the next.
    "pods' interfaces stay closed",
];

/// The lines of a log that warn, or report an error, and are not expected.
pub(crate) fn unexpected(lines: &[String]) -> impl Iterator<Item = &String> {
    // The time stands before the level.
    let level =
        |line: &&String| line.split_ascii_whitespace().nth(1).is_some_and(|level| ["WARN", "ERROR"].contains(&level));
    lines.iter().filter(level).filter(|line| !EXPECTED.iter().any(|expected| line.contains(expected)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_and_an_error_count_unless_the_soak_causes_them() {
        let lines = [
            "2026-01-01T00:00:00.000000Z  INFO ready: 6 pods, a WARN in the text",
            "2026-01-01T00:00:01.000000Z  WARN pod test/passing: its interface is gone",
            "2026-01-01T00:00:02.000000Z ERROR cannot write",
            "2026-01-01T00:00:03.000000Z  WARN pods' interfaces stay closed until the next start",
            "Statistics",
            "",
        ];
        let lines = lines.map(str::to_owned);
        assert_eq!(unexpected(&lines).collect::<Vec<_>>(), [&lines[1], &lines[2]]);
    }
}

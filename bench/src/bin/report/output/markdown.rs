//! The report as Markdown.

use std::fmt::Write;

use penstock_bench::figures::table;

use super::tables::{self, ReportPart};
use crate::results::Results;

pub(crate) fn page(parts: &[ReportPart]) -> String {
    let mut text = "# Penstock: benchmark report\n".to_owned();
    for part in parts {
        // Writing to a string does not fail.
        let _ = match part {
            ReportPart::Heading(heading) => writeln!(text, "\n## {heading}"),
            ReportPart::Text(paragraph) => writeln!(text, "\n{paragraph}"),
            ReportPart::Table(rows) => write!(text, "\n{}", table(rows)),
            ReportPart::Plot(name) => writeln!(text, "\n![]({name}.svg)"),
        };
    }
    text
}

/// The summary printed at the end of a run.
pub(crate) fn summary(results: &Results) -> String {
    let overview = tables::overview(results).map(|rows| table(&rows) + "\n").unwrap_or_default();
    overview + &table(&tables::thresholds(results))
}

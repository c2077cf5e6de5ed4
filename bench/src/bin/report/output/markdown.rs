//! The report as Markdown.

use std::fmt::Write;

use super::tables::{self, ReportPart};
use crate::results::Results;

/// The whole page.
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

fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, width) in widths.iter().enumerate() {
            let cell = row.get(column).map_or("", String::as_str).replace('|', "\\|");
            // The first column is text, the others are figures.
            let _ = if column == 0 { write!(text, "| {cell:width$} ") } else { write!(text, "| {cell:>width$} ") };
        }
        text.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let end = if column == 0 { '-' } else { ':' };
                let _ = write!(text, "|{:-<1$}{end}", "", width + 1);
            }
            text.push_str("|\n");
        }
    }
    text
}

/// The summary printed at the end of a run.
pub(crate) fn summary(results: &Results) -> String {
    let overview = tables::overview(results).map(|rows| table(&rows) + "\n").unwrap_or_default();
    overview + &table(&tables::thresholds(results))
}

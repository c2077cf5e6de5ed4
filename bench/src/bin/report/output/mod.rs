//! The report: Markdown, HTML, and plots in it.

mod html;
pub(crate) mod markdown;
mod number;
pub(crate) mod overview;
mod plots;
mod tables;
mod trex;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::results::Results;

/// Writes the report into a directory; returns the files.
pub(crate) fn write(directory: &Path, results: &Results) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let mut plots = Vec::new();
    if let Some(svg) = plots::ratios(&overview::ratios(results))? {
        fs::write(directory.join(format!("{}.svg", tables::OVERVIEW)), &svg)?;
        plots.push((tables::OVERVIEW, svg));
    }
    for scenario in &results.scenarios {
        if let Some(svg) = plots::plot(scenario)? {
            fs::write(directory.join(format!("{}.svg", scenario.name)), &svg)?;
            plots.push((scenario.name, svg));
        }
    }
    let trex = fs::read_to_string(directory.join("trex.json")).ok();
    let document = tables::document(results, trex::parts(trex.as_deref()));
    let files = [
        (directory.join("report.md"), markdown::page(&document)),
        (directory.join("report.html"), html::page(&document, &plots)),
    ];
    for (path, text) in &files {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(files.into_iter().map(|(path, _)| path).collect())
}

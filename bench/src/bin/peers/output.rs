//! The report: Markdown, which is printed too, and JSON.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use penstock_bench::figures::{number, table};
use penstock_bench::machine::{BUSY, Machine};
use serde_json::json;

use crate::results::{Results, Section};

pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) server: String,
    pub(crate) rounds: u32,
    pub(crate) length: Duration,
    pub(crate) took: Duration,
    pub(crate) engines: Vec<(&'static str, String)>,
    pub(crate) results: Results,
}

/// Writes `peers.md` and `peers.json` into a folder.
pub(crate) fn write(folder: &Path, report: &Report) -> Result<[PathBuf; 2]> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let files = [folder.join("peers.md"), folder.join("peers.json")];
    let json = serde_json::to_string_pretty(&json(report))? + "\n";
    for (file, content) in files.iter().zip([markdown(report), json]) {
        fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(files)
}

/// Lines between which a page has the figures of a run.
const BORDERS: [&str; 2] = ["<!-- figures of make bench-peers -->\n", "<!-- end of the figures -->\n"];

/// Puts the figures into a page that has a place for them.
pub(crate) fn update(page: &Path, report: &Report) -> Result<()> {
    let text = fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let updated = between(&text, &body(report)).with_context(|| {
        format!("{} has no place for the figures: give it the lines {:?}", page.display(), BORDERS.map(str::trim_end))
    })?;
    fs::write(page, updated).with_context(|| format!("cannot write {}", page.display()))
}

fn between(text: &str, body: &str) -> Option<String> {
    let (before, rest) = text.split_once(BORDERS[0])?;
    let (_, after) = rest.split_once(BORDERS[1])?;
    Some([before, BORDERS[0], "\n", body, "\n", BORDERS[1], after].concat())
}

pub(crate) fn markdown(report: &Report) -> String {
    "# Penstock beside other engines\n\n".to_owned() + &body(report)
}

fn body(report: &Report) -> String {
    let Report { results, engines, .. } = report;
    let mut text = introduction(report);
    let names: Vec<&'static str> = engines.iter().map(|(name, _)| *name).collect();
    for policies in results.sizes() {
        let noun = if policies == 1 { "policy" } else { "policies" };
        // Writing to a string does not fail.
        let _ = write!(text, "\n## {} {noun}\n", number(policies as f64, 0));
        for section in Section::ALL {
            if let Some(rows) = results.table(policies, section, &names) {
                let _ = write!(text, "\n{}.\n\n{}", section.title(), table(&rows));
            }
        }
    }
    if !results.failures.is_empty() {
        text += "\n## Not measured\n\n";
        for (engine, policies, why) in &results.failures {
            let with = policies.map_or_else(String::new, |it| format!(", {} policies", number(it as f64, 0)));
            let _ = writeln!(text, "- {engine}{with}: {why}.");
        }
    }
    text += "\n## Engines and machine\n\n";
    text += &table(&facts(report));
    text
}

fn introduction(report: &Report) -> String {
    let busy = match report.machine.load {
        load if load > BUSY => {
            format!(" **The machine was busy when it began (load average {load:.1}): times and rates are unreliable.**")
        }
        _ => String::new(),
    };
    format!(
        "Two nodes in network namespaces, pods wired as Calico wires them, one API server. Each engine was seen to allow and to deny \
         first. {} in which the engines took turns, each on nodes of its own that begin anew; {:.2} s a measurement; \
         {:.0} minutes in all.{busy}\n",
        if report.rounds == 1 { "One round".to_owned() } else { format!("Medians of {} rounds", report.rounds) },
        report.length.as_secs_f64(),
        (report.took.as_secs_f64() / 60.0).max(1.0),
    )
}

fn facts(report: &Report) -> Vec<Vec<String>> {
    let fact = |name: &str, value: &str| vec![name.to_owned(), value.to_owned()];
    let mut rows = vec![fact("what", "is")];
    rows.extend(report.engines.iter().map(|(name, version)| fact(name, version)));
    rows.push(fact("API server", &report.server));
    rows.extend(report.machine.facts.iter().map(|(name, value)| fact(name, value)));
    rows
}

fn json(report: &Report) -> serde_json::Value {
    let failures = report.results.failures.iter();
    let facts = report.machine.facts.iter().map(|(name, value)| (name.clone(), json!(value)));
    json!({
        "rounds": report.rounds,
        "seconds": report.length.as_secs_f64(),
        "took_seconds": report.took.as_secs_f64(),
        "api_server": report.server,
        "machine": facts.collect::<serde_json::Map<_, _>>(),
        "load_at_the_start": report.machine.load,
        "engines": report.engines.iter().map(|(name, version)| json!({ "name": name, "version": version })).collect::<Vec<_>>(),
        "figures": report.results.json(),
        "not_measured": failures
            .map(|(engine, policies, why)| json!({ "engine": engine, "policies": policies, "why": why }))
            .collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Figure, Reading};

    #[test]
    fn a_page_names_what_was_not_measured_and_takes_new_figures() {
        let mut results = Results::default();
        let figure =
            Figure { section: Section::Rates, order: 0, name: "TCP_RR, k/s".to_owned(), digits: 1, absent: "–" };
        results.add(1000, figure, "none", 0, Reading::Number(61.5));
        results.failures.push(("kube-router", Some(1000), "it ended".to_owned()));
        let report = Report {
            machine: Machine { facts: vec![("Cores".to_owned(), "2".to_owned())], load: 3.0 },
            server: "v1.37.2".to_owned(),
            rounds: 1,
            length: Duration::from_millis(500),
            took: Duration::from_secs(90),
            engines: vec![("none", "kernel routing alone".to_owned())],
            results,
        };
        let page = markdown(&report);
        for part in [
            "## 1,000 policies",
            "| TCP_RR, k/s | 61.5 |",
            "- kube-router, 1,000 policies: it ended.",
            "busy",
            "v1.37.2",
        ] {
            assert!(page.contains(part), "{part} is not in:\n{page}");
        }
        let old = format!("before\n{}old\n{}after\n", BORDERS[0], BORDERS[1]);
        let new = between(&old, "new\n").unwrap();
        assert!(
            new.starts_with("before\n") && new.ends_with("after\n") && new.contains("new") && !new.contains("old"),
            "{new}"
        );
        assert_eq!(between(&new, "new\n").as_ref(), Some(&new));
        assert_eq!(between("no place\n", "new\n"), None);
        let json = json(&report);
        assert_eq!(json["figures"][0]["engines"]["none"][0]["value"], 61.5);
        assert_eq!(json["not_measured"][0]["why"], "it ended");
    }
}

//! Names in pages that are no links: files of the repository, and tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use penstock_dataplane::DropReason;

use crate::pages;

/// Directories whose files pages name by their path.
const SOURCES: [&str; 10] = [
    ".ci/",
    ".github/",
    "bench/",
    "configs/",
    "control/",
    "dataplane/",
    "pcap-tests/",
    "scripts/",
    "tc-filters/",
    "xdp-redirect/",
];

/// Whether a piece of code in a text is the path of a file or directory here; patterns and shortened ones are not.
fn is_path(code: &str) -> bool {
    SOURCES.iter().any(|directory| code.starts_with(directory)) && !code.contains(['*', '…', ' ', ':', '{'])
}

#[test]
fn every_file_that_a_page_names_exists() {
    let mut checked = 0;
    let mut missing = Vec::new();
    // The change log speaks of files as they were.
    for page in pages::all().into_iter().filter(|page| page.path != Path::new("CHANGELOG.md")) {
        for (line, code) in page.content().code.into_iter().filter(|(_, code)| is_path(code)) {
            checked += 1;
            if !pages::root().join(&code).exists() {
                missing.push(format!("{}:{line}: {code}", page.path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "there are no such files: {missing:#?}");
    assert!(checked > 30, "only {checked} paths found");
}

/// The targets of make that a text of code names.
fn targets(code: &str) -> impl Iterator<Item = &str> {
    let word = |text: &'_ str| {
        text.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')).unwrap_or(text.len())
    };
    code.lines()
        .filter_map(|line| line.trim_start_matches(['$', '-', ' ']).trim_start_matches("run: ").strip_prefix("make "))
        .map(move |target| &target[..word(target)])
        .filter(|target| !target.is_empty())
}

#[test]
fn every_make_target_that_a_page_or_a_workflow_names_exists() {
    let makefile = fs::read_to_string(pages::root().join("Makefile")).unwrap();
    let exists =
        |target: &str| makefile.lines().any(|line| line.strip_prefix(target).is_some_and(|rest| rest.starts_with(':')));
    let mut named = BTreeSet::new();
    for page in pages::all() {
        let content = page.content();
        let blocks = content.blocks.iter().map(|block| &page.text[block.range.clone()]);
        let texts = content.code.iter().map(|(_, code)| code.as_str()).chain(blocks);
        named.extend(texts.flat_map(targets).map(|target| (page.path.clone(), target.to_owned())));
    }
    for workflow in ["ci.yml", "release.yml"].map(|name| Path::new(".github/workflows").join(name)) {
        let text = fs::read_to_string(pages::root().join(&workflow)).unwrap();
        named.extend(targets(&text).map(|target| (workflow.clone(), target.to_owned())));
    }
    let missing: Vec<_> = named.iter().filter(|(_, target)| !exists(target)).collect();
    assert!(missing.is_empty(), "the Makefile has no such targets: {missing:?}");
    assert!(named.len() > 20, "only {named:?} found");
}

/// All Rust files of the workspace: their names, and their texts one behind the other.
fn sources() -> (Vec<PathBuf>, String) {
    let mut paths = Vec::new();
    for directory in SOURCES.iter().filter(|directory| !directory.starts_with('.')) {
        collect(&pages::root().join(directory), &mut paths);
    }
    let text = paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    (paths, text)
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The names of all functions and files of the workspace's sources.
fn functions() -> BTreeSet<String> {
    let (paths, text) = sources();
    let word = |piece: &str| piece.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let mut names: BTreeSet<String> = text.split("fn ").skip(1).map(word).collect();
    names.extend(paths.iter().filter_map(|path| path.file_stem()?.to_str()).map(str::to_owned));
    names
}

/// The name that a piece of code gives a test: its last word, behind `::`; dots stand for what is left out.
fn test_name(code: &str) -> Option<&str> {
    let name = code.rsplit([' ', ':']).next()?;
    let long = name.matches('_').count() >= 3;
    (long && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_…".contains(c))).then_some(name)
}

/// Whether `short` is `long` with pieces left out where it has dots.
fn abbreviates(short: &str, long: &str) -> bool {
    let (start, end) = (short.split('…').next().unwrap_or_default(), short.rsplit('…').next().unwrap_or_default());
    let mut rest = long;
    let in_order = short.split('…').all(|piece| {
        let found = rest.find(piece).map(|at| &rest[at + piece.len()..]);
        rest = found.unwrap_or_default();
        found.is_some()
    });
    in_order && short.contains('…') && long.starts_with(start) && long.ends_with(end)
}

#[test]
fn every_test_that_a_page_names_exists() {
    let functions = functions();
    let exists = |name: &str| functions.contains(name) || functions.iter().any(|known| abbreviates(name, known));
    let mut checked = 0;
    let mut missing = Vec::new();
    for page in pages::all() {
        let page_name = page.path.to_string_lossy();
        if page_name != "docs/promises.md" && !page_name.starts_with("docs/threat-model") {
            continue;
        }
        for (line, code) in page.content().code {
            let Some(name) = test_name(&code) else { continue };
            checked += 1;
            if !exists(name) {
                missing.push(format!("{}:{line}: {code}", page.path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "there are no such tests: {missing:#?}");
    assert!(checked > 60, "only {checked} tests found");
}

/// The metrics that a piece of code names, without labels and the suffix that the exposition format adds to counters.
fn metric(code: &str) -> Option<&str> {
    let name = code.split('{').next()?;
    name.starts_with("penstock_").then(|| name.strip_suffix("_total").unwrap_or(name))
}

#[test]
fn every_metric_that_a_page_names_exists() {
    let (_, sources) = sources();
    let mut named = BTreeSet::new();
    for page in pages::all().into_iter().filter(|page| page.path != Path::new("CHANGELOG.md")) {
        named.extend(page.content().code.iter().filter_map(|(_, code)| metric(code)).map(str::to_owned));
    }
    let missing: Vec<&String> = named.iter().filter(|name| !sources.contains(&format!("\"{name}\""))).collect();
    assert!(missing.is_empty(), "there are no such metrics: {missing:?}");
    assert!(named.len() > 10, "only {named:?} found");
}

#[test]
fn every_message_in_the_troubleshooting_table_exists() {
    let (_, sources) = sources();
    let page = pages::all().into_iter().find(|page| page.path == Path::new("docs/operate/troubleshooting.md")).unwrap();
    let rows =
        page.text.lines().skip_while(|line| !line.starts_with("| message |")).take_while(|line| !line.is_empty());
    let messages = rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next());
    // Dots stand for what the message has in its place.
    let pieces: Vec<&str> = messages.flat_map(|message| message.split('…')).map(str::trim).collect();
    let missing: Vec<_> = pieces.iter().filter(|piece| !sources.contains(**piece)).collect();
    assert!(missing.is_empty(), "there are no such messages: {missing:?}");
    assert!(pieces.len() > 4, "only {pieces:?} found");
}

#[test]
fn every_drop_reason_is_explained() {
    let page = pages::all().into_iter().find(|page| page.path == Path::new("docs/operate/troubleshooting.md")).unwrap();
    let explained: BTreeSet<String> = page.content().code.into_iter().map(|(_, code)| code).collect();
    let missing: Vec<&str> =
        DropReason::ALL.iter().map(|reason| reason.name()).filter(|name| !explained.contains(*name)).collect();
    assert!(missing.is_empty(), "docs/operate/troubleshooting.md does not explain {missing:?}");
}

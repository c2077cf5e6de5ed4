//! Links between pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::pages::{self, Page};

/// Why a link leads nowhere, if so.
fn broken(page: &Page, link: &str, anchors: &BTreeMap<PathBuf, Vec<String>>) -> Option<String> {
    if link.starts_with("https://") {
        return None;
    }
    if link.contains("://") {
        return Some("is neither relative nor https".to_owned());
    }
    let (target, anchor) = link.split_once('#').map_or((link, None), |(target, anchor)| (target, Some(anchor)));
    let path = if target.is_empty() { Some(page.path.clone()) } else { pages::resolve(&page.path, target) };
    let Some(path) = path.filter(|path| pages::root().join(path).exists()) else {
        return Some("there is no such file".to_owned());
    };
    // The book has the pages of docs/ alone: a link out of it works on the forge, and not there.
    if page.in_book() && !path.starts_with("docs") {
        return Some("leads out of docs/, and so is broken in the book: name the file instead".to_owned());
    }
    let anchor = anchor?;
    let known = anchors.get(&path).is_some_and(|anchors| anchors.iter().any(|known| known == anchor));
    (!known).then(|| format!("{} has no heading with this anchor", path.display()))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_that_exist() {
    let pages = pages::all();
    let contents: Vec<_> = pages.iter().map(Page::content).collect();
    let anchors =
        pages.iter().zip(&contents).map(|(page, content)| (page.path.clone(), content.anchors.clone())).collect();
    let mut checked = 0;
    let mut wrong = Vec::new();
    for (page, content) in pages.iter().zip(&contents) {
        for (line, link) in &content.links {
            checked += 1;
            if let Some(why) = broken(page, link, &anchors) {
                wrong.push(format!("{}:{line}: {link}: {why}", page.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 50, "only {checked} links found");
}

#[test]
fn the_summary_names_every_page_of_the_book() {
    let pages = pages::all();
    let summary = pages.iter().find(|page| page.path == Path::new("docs/SUMMARY.md")).expect("the book has one");
    let named: BTreeSet<PathBuf> =
        summary.content().links.iter().filter_map(|(_, link)| pages::resolve(&summary.path, link)).collect();
    let missing: Vec<&PathBuf> = pages
        .iter()
        .filter(|page| page.in_book() && page.path != summary.path)
        .map(|page| &page.path)
        .filter(|path| !named.contains(*path))
        .collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md, and so in no book: {missing:?}");
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let page = |path: &str| Page { path: path.into(), text: String::new() };
    let anchors = BTreeMap::from([(PathBuf::from("docs/SUMMARY.md"), vec!["summary".to_owned()])]);
    for (from, link, ok) in [
        ("README.md", "docs/SUMMARY.md", true),
        ("README.md", "docs/SUMMARY.md#summary", true),
        ("README.md", "docs/SUMMARY.md#sumary", false),
        ("README.md", "docs/nowhere.md", false),
        ("README.md", "../outside.md", false),
        ("README.md", "/README.md", false),
        ("README.md", "https://kubernetes.io/docs/", true),
        ("README.md", "http://kubernetes.io/docs/", false),
        ("docs/SUMMARY.md", "#summary", true),
        ("docs/SUMMARY.md", "../README.md", false),
    ] {
        assert_eq!(broken(&page(from), link, &anchors).is_none(), ok, "{from}: {link}");
    }
}

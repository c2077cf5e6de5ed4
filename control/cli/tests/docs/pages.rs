//! The pages: which there are, and what is in one.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// The pages beside the book, by their paths from the root.
const BESIDE: [&str; 5] = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];

/// Folders with a README that are not crates.
const FOLDERS: [&str; 4] = ["bench/src", "bench/tests", "configs", "control"];

/// The top of the repository: the directory of `book.toml`.
pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().find(|directory| directory.join("book.toml").is_file()).expect("book.toml is at the top")
}

/// One page.
pub(crate) struct Page {
    /// Its path from the root.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// A block of code.
pub(crate) struct Block {
    /// The words behind the opening fence.
    pub(crate) info: String,
    /// Where its text is in the page.
    pub(crate) range: Range<usize>,
}

/// References of a page to others, and its places that others can refer to.
#[derive(Default)]
pub(crate) struct Content {
    /// Where a link leads, with the line that it is on.
    pub(crate) links: Vec<(usize, String)>,
    /// The anchors of its headings.
    pub(crate) anchors: Vec<String>,
    /// Code within text, with the line that it is on.
    pub(crate) code: Vec<(usize, String)>,
    pub(crate) blocks: Vec<Block>,
}

/// Every page of the book, every page next to it, and the READMEs of the folders.
pub(crate) fn all() -> Vec<Page> {
    let mut paths: Vec<PathBuf> = BESIDE.iter().map(PathBuf::from).collect();
    paths.extend(folders().map(|folder| folder.join("README.md")));
    collect(Path::new("docs"), &mut paths);
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(root().join(&path)).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            Page { path, text }
        })
        .collect()
}

/// The folders that have a README: every crate, and [`FOLDERS`].
fn folders() -> impl Iterator<Item = PathBuf> {
    let entries = ["", "control"].into_iter().flat_map(|parent| fs::read_dir(root().join(parent)).unwrap());
    let crates = entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("Cargo.toml").is_file());
    let crates = crates.map(|path| path.strip_prefix(root()).unwrap().to_owned());
    crates.chain(FOLDERS.iter().map(PathBuf::from))
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = directory.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

impl Page {
    /// Whether the page is part of the book.
    pub(crate) fn in_book(&self) -> bool {
        self.path.starts_with("docs")
    }

    /// The line, counted from 1, of a place in the text.
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.text[..offset].matches('\n').count() + 1
    }

    /// Parses the page.
    pub(crate) fn content(&self) -> Content {
        let mut content = Content::default();
        let mut heading: Option<String> = None;
        let mut seen = BTreeMap::new();
        for (event, range) in Parser::new_ext(&self.text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    content.links.push((self.line(range.start), dest_url.into_string()));
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    content.anchors.push(anchor(&heading.take().expect("it has begun"), &mut seen));
                }
                Event::Text(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    content.code.push((self.line(range.start), code.into_string()));
                }
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                    content.blocks.push(Block { info: info.into_string(), range: self.inside(range) });
                }
                _ => {}
            }
        }
        content
    }

    /// The text between the fences of a block.
    fn inside(&self, fenced: Range<usize>) -> Range<usize> {
        let block = &self.text[fenced.clone()];
        let start = block.find('\n').map_or(block.len(), |end| end + 1);
        let end = block.trim_end().rfind('\n').map_or(start, |end| end + 1).max(start);
        fenced.start + start..fenced.start + end
    }
}

/// The anchor of a heading, as GitHub and mdBook both make it: letters, digits, `-` and `_` in lower case, dashes for blanks,
/// and a number behind what was there before.
fn anchor(heading: &str, seen: &mut BTreeMap<String, usize>) -> String {
    let id: String = heading
        .trim()
        .chars()
        .filter_map(|character| match character {
            '-' | '_' => Some(character),
            _ if character.is_whitespace() => Some('-'),
            _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
            _ => None,
        })
        .collect();
    let before = seen.entry(id.clone()).or_default();
    *before += 1;
    if *before == 1 { id } else { format!("{id}-{}", *before - 1) }
}

/// A path relative to a page, from the root; `None` where it leads out of the repository.
pub(crate) fn resolve(page: &Path, target: &str) -> Option<PathBuf> {
    let mut path = page.parent()?.to_owned();
    for component in Path::new(target).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                if !path.pop() {
                    return None;
                }
            }
            Component::Normal(name) => path.push(name),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

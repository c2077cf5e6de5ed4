//! No crate has more product code than ARCHITECTURE.md says, next to the list of crates: growth is a decision.
//!
//! A line counts if it has code, not only blanks and comments. Of Rust, items under `#[cfg(test)]` or `#[cfg(loom)]` and the files of
//! such modules are tests; so are the folders `tests`, `fuzz` and `examples`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

const TABLE: &str = "| crate | lines at most |\n|---|---|\n";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The rows of the table in ARCHITECTURE.md.
fn ceilings() -> BTreeMap<String, usize> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = text.split_once(TABLE).expect("ARCHITECTURE.md has the table of ceilings");
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|').map(str::trim);
        let (name, count) = (cells.next().unwrap(), cells.next().unwrap());
        (name.trim_matches('`').to_owned(), count.replace(',', "").parse().unwrap())
    })
    .collect()
}

/// The text without comments and the content of strings, line by line as before, and for each line whether it has code.
fn split(text: &str) -> (Vec<char>, Vec<bool>) {
    let source: Vec<char> = text.chars().collect();
    let (mut kept, mut code, mut at) = (Vec::new(), vec![false], 0);
    let starts = |at: usize, what: &str| what.chars().enumerate().all(|(i, c)| source.get(at + i) == Some(&c));
    while at < source.len() {
        let end = if starts(at, "//") {
            (at..source.len()).find(|&i| source[i] == '\n').unwrap_or(source.len())
        } else if starts(at, "/*") {
            let mut depth = 0;
            let ends = (at..source.len()).find(|&i| {
                depth += i32::from(starts(i, "/*")) - i32::from(i >= 1 && starts(i - 1, "*/"));
                depth == 0
            });
            ends.map_or(source.len(), |i| i + 1)
        } else {
            let literal = literal(&source, at);
            *code.last_mut().unwrap() |= literal.is_some();
            literal.map_or(at, |literal| literal.end)
        };
        if end == at {
            let character = source[at];
            kept.push(character);
            match character {
                '\n' => code.push(false),
                other => *code.last_mut().unwrap() |= !other.is_whitespace(),
            }
            at += 1;
            continue;
        }
        let is_code = !starts(at, "//") && !starts(at, "/*");
        for _ in source[at..end].iter().filter(|&&c| c == '\n') {
            kept.push('\n');
            code.push(is_code);
        }
        at = end;
    }
    (kept, code)
}

/// The string or character at this place.
fn literal(source: &[char], at: usize) -> Option<Range<usize>> {
    let is_word = |at: usize| source.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_');
    let raw = (at..at + 3).find(|&i| source.get(i) == Some(&'r')).filter(|_| at == 0 || !is_word(at - 1));
    if let Some(raw) = raw.filter(|&raw| source[at..raw].iter().all(|c| "bc".contains(*c))) {
        let hashes = source[raw + 1..].iter().take_while(|&&c| c == '#').count();
        if source.get(raw + 1 + hashes) == Some(&'"') {
            let closes = |i: usize| {
                source[i] == '"' && source[i + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
            };
            let end = (raw + 2 + hashes..source.len()).find(|&i| closes(i)).unwrap_or(source.len());
            return Some(at..(end + 1 + hashes).min(source.len()));
        }
    }
    match source[at] {
        '"' => {
            let mut is_escaped = false;
            let end = (at + 1..source.len()).find(|&i| {
                let closes = source[i] == '"' && !is_escaped;
                is_escaped = source[i] == '\\' && !is_escaped;
                closes
            });
            Some(at..end.map_or(source.len(), |end| end + 1))
        }
        '\'' if source.get(at + 1) == Some(&'\\') => {
            let end = (at + 3..source.len()).find(|&i| source[i] == '\'')?;
            Some(at..end + 1)
        }
        '\'' if source.get(at + 2) == Some(&'\'') => Some(at..at + 3),
        _ => None,
    }
}

/// The lines of product code of a file of Rust, and the modules of it that are tests.
fn of_rust(text: &str) -> (usize, Vec<String>) {
    let (kept, mut code) = split(text);
    let stripped: String = kept.iter().collect();
    let (mut modules, mut from) = (Vec::new(), 0);
    while let Some(found) = stripped[from..].find("#[cfg(") {
        let start = from + found;
        let end = start + stripped[start..].find(")]").map_or(stripped.len() - start, |at| at + 2);
        from = end;
        let condition: String = stripped[start + 6..end].split_whitespace().collect();
        let words: BTreeSet<&str> = condition.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let is_negated = condition.starts_with("not")
            || condition.contains("not(loom)")
            || condition.contains("not(test")
            || condition.contains("not(any(test")
            || condition.contains("not(all(test");
        if is_negated || !(words.contains("test") || words.contains("loom")) {
            continue;
        }
        let item = end_of_item(&stripped[end..]) + end;
        let line = |at: usize| stripped[..at].matches('\n').count();
        code[line(start)..=line(item.min(stripped.len() - 1))].fill(false);
        let declared = stripped[end..item].trim_end().rsplit_once("mod ").map(|(_, name)| name.to_owned());
        modules.extend(declared.filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_')));
    }
    (code.into_iter().filter(|&is_code| is_code).count(), modules)
}

/// Where an item or a field ends that begins here: its last character.
fn end_of_item(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ';' | ',' | '}' if depth == 0 => return at,
            '{' if depth <= 0 => {
                let mut inner = 0;
                let closes = text[at..].char_indices().find(|&(_, c)| {
                    inner += i32::from(c == '{') - i32::from(c == '}');
                    inner == 0
                });
                return at + closes.map_or(0, |(length, _)| length);
            }
            _ => {}
        }
    }
    text.len()
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() && !["target", "tests", "fuzz", "examples"].contains(&name.as_str()) {
            files_below(&path, found);
        } else if path.is_file() && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// The lines of product code below a folder.
fn product(folder: &Path) -> usize {
    let mut files = Vec::new();
    files_below(folder, &mut files);
    let (mut counts, mut tests) = (Vec::new(), BTreeSet::new());
    for file in files {
        let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if !["rs", "c", "h"].contains(&extension) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        if extension != "rs" {
            counts.push((file, split(&text).1.into_iter().filter(|&is_code| is_code).count()));
            continue;
        }
        let (count, modules) = of_rust(&text);
        let stem = file.with_extension("");
        let is_root = ["mod", "lib", "main"].iter().any(|name| stem.ends_with(name));
        let inside = if is_root { file.parent().unwrap().to_owned() } else { stem };
        tests.extend(modules.iter().map(|module| inside.join(module)));
        counts.push((file, count));
    }
    let is_test = |file: &Path| file.ancestors().any(|path| tests.contains(&path.with_extension("")));
    counts.iter().filter(|(file, _)| !is_test(file)).map(|(_, count)| count).sum()
}

#[test]
fn no_crate_outgrows_its_ceiling() {
    let ceilings = ceilings();
    let counts: BTreeMap<&str, usize> =
        ceilings.keys().map(|name| (name.as_str(), product(&root().join(name)))).collect();
    let above: Vec<String> = ceilings
        .iter()
        .filter(|(name, ceiling)| counts[name.as_str()] > **ceiling)
        .map(|(name, ceiling)| format!("{name} has {} lines, {ceiling} at most", counts[name.as_str()]))
        .collect();
    println!("{counts:#?}");
    assert!(
        above.is_empty(),
        "{above:#?}: delete, or raise the ceiling in ARCHITECTURE.md with the reason in the commit"
    );
    let named: BTreeSet<&str> = ceilings.keys().map(String::as_str).collect();
    let crates = ["admin", "agent", "cli", "cni", "kubectl", "policy", "replay", "sources", "text"];
    let crates = crates.map(|name| format!("control/{name}"));
    let others = ["dataplane", "tc-filters", "xdp-redirect"].into_iter();
    assert_eq!(named, crates.iter().map(String::as_str).chain(others).collect(), "each crate of the product has one");
}

#[test]
fn lines_of_code_are_counted_without_comments_and_tests() {
    for (text, expected) in [
        ("fn a() {} // b\n\n/* c\n */ fn d() {}\n", 2),
        ("const A: &str = \"\n// text\n\";\n/// doc\nconst B: char = '\"';\n", 4),
        ("fn a<'x>(_: &'x str) {}\nconst B: &str = r#\"// \"\n\"#;\n", 3),
        ("fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { c::<[u8; 1]>() }\n}\nfn d() {}\n", 2),
        ("#[cfg(not(test))]\nfn a() {}\n#[cfg(any(test, loom))]\nuse b::{c, d};\nfn e() {}\n", 3),
        ("struct A {\n    #[cfg(test)]\n    b: u8,\n    c: u8,\n}\n", 3),
    ] {
        assert_eq!(of_rust(text).0, expected, "{text}");
    }
    assert_eq!(of_rust("#[cfg(test)]\nmod oracle;\nmod real;\n"), (1, vec!["oracle".to_owned()]));
}

/// What a start decides is decided in one place: elsewhere nobody reads the sections that leave something open.
#[test]
fn only_settings_read_the_sections_that_leave_something_open() {
    let agent = root().join("control/agent/src");
    let mut files = Vec::new();
    files_below(&agent, &mut files);
    let reads = |file: &&PathBuf| {
        let text = fs::read_to_string(file).unwrap();
        let (product, _) = text.split_once("#[cfg(test)]\nmod tests {").unwrap_or((&text, ""));
        ["config.umem", "config.workers"].iter().any(|section| product.contains(section))
    };
    let found: Vec<_> = files.iter().filter(reads).map(|file| file.strip_prefix(&agent).unwrap()).collect();
    assert_eq!(found, [Path::new("settings.rs")], "the sections umem and workers");
}

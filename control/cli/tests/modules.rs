//! Inside each crate the modules have no circle: whoever reads one needs nothing of the modules that are built on it.
//!
//! A module counts with its folder as one, so the rule holds between modules beside each other, at each level. A file of a
//! folder may use what its parent defines, and the parent its files. What a module only passes on (`use`, with `pub` or
//! without) counts as use of the module that defines it. Modules for tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const CRATES: [&str; 14] = [
    "bench",
    "control/admin",
    "control/agent",
    "control/cli",
    "control/cni",
    "control/kubectl",
    "control/policy",
    "control/replay",
    "control/sources",
    "control/text",
    "dataplane",
    "pcap-tests",
    "tc-filters",
    "xdp-redirect",
];

/// A module's path from the root of its crate or binary.
type Name = Vec<String>;

/// One file, as far as it says which modules it needs.
#[derive(Default)]
struct Module {
    /// Paths in code and in `use`, from the module itself.
    paths: BTreeSet<Name>,
    /// Paths that `use` binds here, by name.
    imports: BTreeMap<String, Name>,
    /// Paths of `use path::*`.
    globs: Vec<Name>,
    /// Names that are defined here.
    defined: BTreeSet<String>,
    /// Modules that are there for tests alone.
    for_tests: BTreeSet<String>,
}

impl Module {
    fn read(text: &str) -> Self {
        let tokens = without_tests(&tokens(text));
        let mut module = Self { for_tests: tokens.1, ..Self::default() };
        let mut rest = tokens.0.as_slice();
        while let [token, after @ ..] = rest {
            rest = match (token.as_str(), after) {
                ("use", _) => module.read_use(&[], after),
                ("struct" | "enum" | "fn" | "trait" | "type" | "const" | "static" | "union", [name, ..]) => {
                    module.defined.insert(name.clone());
                    after
                }
                (first, [colons, ..]) if is_name(first) && colons == "::" => {
                    let (path, rest) = path(rest);
                    module.paths.insert(path);
                    rest
                }
                _ => after,
            };
        }
        module
    }

    /// Reads one tree of `use` behind this prefix, and returns the tokens that follow it.
    fn read_use<'t>(&mut self, prefix: &[String], tokens: &'t [String]) -> &'t [String] {
        let (more, mut rest) = path(tokens);
        let mut full = [prefix, &more].concat();
        match rest.first().map(String::as_str) {
            Some("{") => {
                rest = &rest[1..];
                while rest.first().is_some_and(|token| token != "}") {
                    rest = self.read_use(&full, rest);
                    rest = rest.strip_prefix(&[",".to_owned()]).unwrap_or(rest);
                }
                return &rest[1..];
            }
            Some("*") => {
                self.globs.push(full.clone());
                self.paths.insert(full);
                return &rest[1..];
            }
            _ => {}
        }
        if full.last().is_some_and(|last| last == "self") {
            full.pop();
        }
        let mut name = full.last().cloned().unwrap_or_default();
        if let [as_token, alias, after @ ..] = rest
            && as_token == "as"
        {
            (name, rest) = (alias.clone(), after);
        }
        self.imports.insert(name, full.clone());
        self.paths.insert(full);
        rest
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// The path at the beginning of these tokens, without a `::` at its end, and the tokens behind it.
fn path(tokens: &[String]) -> (Name, &[String]) {
    let (mut path, mut rest) = (Vec::new(), tokens);
    while let [name, after @ ..] = rest
        && is_name(name)
    {
        path.push(name.clone());
        match after {
            [colons, behind @ ..] if colons == "::" => rest = behind,
            _ => return (path, after),
        }
    }
    (path, rest)
}

/// Names, `::` and single characters; without comments, texts, characters and lifetimes.
fn tokens(text: &str) -> Vec<String> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let taken = match first {
            _ if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            _ if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            _ if rest.starts_with("r#\"") => rest.find("\"#").map_or(rest.len(), |at| at + 2),
            '"' => closing_quote(rest),
            '\'' => match rest[1..].chars().next() {
                Some('\\') => 2 + rest[2..].find('\'').map_or(0, |at| at + 1).max(1),
                Some(inner) if rest[1 + inner.len_utf8()..].starts_with('\'') => 2 + inner.len_utf8(),
                _ => 1,
            },
            _ if is_name(rest) => rest.find(|next: char| !next.is_alphanumeric() && next != '_').unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        let token = &rest[..taken];
        if !first.is_whitespace() && !token.starts_with(['"', '\'']) && !token.starts_with("r#\"") && first != '/' {
            tokens.push(token.to_owned());
        }
        rest = &rest[taken..];
    }
    tokens
}

/// The length of the text in quotes at the beginning.
fn closing_quote(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, character)| {
        let closes = character == '"' && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        closes
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// The tokens without items under an attribute that names `test`, and the modules among those items.
fn without_tests(tokens: &[String]) -> (Vec<String>, BTreeSet<String>) {
    let (mut kept, mut modules, mut rest) = (Vec::new(), BTreeSet::new(), tokens);
    while let [token, after @ ..] = rest {
        if token != "#" || after.first().is_none_or(|next| next != "[") {
            kept.push(token.clone());
            rest = after;
            continue;
        }
        let end = closing(after, "[", "]");
        let named = |name: &str| after[..end].iter().any(|token| token == name);
        let is_negated = after[..end].windows(3).any(|three| three == ["not", "(", "test"]);
        let is_test = named("cfg") && named("test") && !is_negated;
        rest = &after[end..];
        if is_test {
            let end = rest.iter().position(|token| token == ";" || token == "{").unwrap_or(rest.len() - 1);
            if let Some(at) = rest[..end].iter().position(|token| token == "mod") {
                modules.insert(rest[at + 1].clone());
            }
            rest = match rest[end].as_str() {
                "{" => &rest[end + closing(&rest[end..], "{", "}")..],
                _ => &rest[end + 1..],
            };
        }
    }
    (kept, modules)
}

/// How many tokens there are up to the bracket that closes the first one.
fn closing(tokens: &[String], open: &str, close: &str) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        depth += usize::from(token == open);
        depth -= usize::from(token == close);
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// The modules of a library or a binary.
struct Modules(BTreeMap<Name, Module>);

impl Modules {
    /// Those of the files below `root`, without the folders of `others`.
    fn read(root: &Path, others: &[PathBuf]) -> Self {
        let (mut found, mut folders) = (BTreeMap::new(), vec![root.to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !others.contains(&path) {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let mut name: Name = path
                        .with_extension("")
                        .strip_prefix(root)
                        .unwrap()
                        .iter()
                        .map(|part| part.to_str().unwrap().to_owned())
                        .collect();
                    if name.last().is_some_and(|last| last == "mod")
                        || ["lib", "main"].contains(&name.join("::").as_str())
                    {
                        name.pop();
                    }
                    found.insert(name, Module::read(&fs::read_to_string(&path).unwrap()));
                }
            }
        }
        let for_tests: Vec<Name> = found
            .iter()
            .flat_map(|(name, module)| {
                module.for_tests.iter().map(|test| [name.as_slice(), std::slice::from_ref(test)].concat())
            })
            .collect();
        found.retain(|name, _| !for_tests.iter().any(|test| name.starts_with(test)));
        Self(found)
    }

    /// The module that defines what a path in module `at` leads to; `None` if that is no path of this crate.
    fn find(&self, at: &Name, path: &[String], depth: usize) -> Option<Name> {
        let (mut found, mut rest) = match path.first()?.as_str() {
            "crate" => (Name::new(), &path[1..]),
            "self" => (at.clone(), &path[1..]),
            "super" => {
                let up = path.iter().take_while(|part| *part == "super").count();
                (at[..at.len().checked_sub(up)?].to_vec(), &path[up..])
            }
            first if self.0.contains_key(&[at.as_slice(), &[first.to_owned()]].concat()) => (at.clone(), path),
            _ => return None,
        };
        while let [name, after @ ..] = rest {
            let inner = [found.as_slice(), std::slice::from_ref(name)].concat();
            if !self.0.contains_key(&inner) {
                break;
            }
            (found, rest) = (inner, after);
        }
        let Some(name) = rest.first().filter(|_| depth < 10) else { return Some(found) };
        let module = self.0.get(&found)?;
        if let Some(import) = module.imports.get(name).filter(|import| found != *at || *import != path) {
            // A name of another crate that is passed on here.
            return Some(self.find(&found, &[import, &rest[1..]].concat(), depth + 1).unwrap_or(found));
        }
        let mut passed_on = module.globs.iter().filter_map(|glob| self.find(&found, glob, depth + 1));
        let defines = |from: &Name| self.0.get(from).is_some_and(|module| module.defined.contains(name));
        Some(passed_on.find(defines).unwrap_or(found))
    }

    /// For each folder, which of its modules use which others of them.
    fn uses(&self) -> BTreeMap<Name, BTreeMap<String, BTreeSet<String>>> {
        let mut uses = BTreeMap::<Name, BTreeMap<String, BTreeSet<String>>>::new();
        for (name, module) in &self.0 {
            for used in module.paths.iter().filter_map(|path| self.find(name, path, 0)) {
                let common = name.iter().zip(&used).take_while(|(one, other)| one == other).count();
                if let (Some(from), Some(to)) = (name.get(common), used.get(common)) {
                    uses.entry(name[..common].to_vec())
                        .or_default()
                        .entry(from.clone())
                        .or_default()
                        .insert(to.clone());
                }
            }
        }
        uses
    }

    /// All circles, each as the path of its folder with the modules in it.
    fn circles(&self) -> BTreeMap<String, Vec<BTreeSet<String>>> {
        let mut circles = BTreeMap::<String, Vec<BTreeSet<String>>>::new();
        for (folder, uses) in self.uses() {
            let reached = |from: &String| {
                let (mut found, mut open) = (BTreeSet::new(), vec![from]);
                while let Some(module) = open.pop() {
                    open.extend(uses.get(module).into_iter().flatten().filter(|to| found.insert((*to).clone())));
                }
                found
            };
            let reached: BTreeMap<&String, BTreeSet<String>> = uses.keys().map(|from| (from, reached(from))).collect();
            for (from, to) in &reached {
                let circle: BTreeSet<String> = to
                    .iter()
                    .filter(|other| reached.get(other).is_some_and(|back| back.contains(*from)))
                    .cloned()
                    .collect();
                let of_folder = circles.entry(folder.join("::")).or_default();
                if !circle.is_empty() && !of_folder.contains(&circle) {
                    of_folder.push(circle);
                }
            }
        }
        circles
    }
}

#[test]
fn modules_inside_each_crate_have_no_circle() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = BTreeMap::new();
    for name in CRATES {
        let source = project.join(name).join("src");
        let binaries = fs::read_dir(source.join("bin")).into_iter().flatten();
        let binaries: Vec<PathBuf> = binaries.map(|entry| entry.unwrap().path()).collect();
        for root in binaries.iter().chain([&source]) {
            let others: &[PathBuf] = if *root == source { &binaries } else { &[] };
            let name = root.strip_prefix(&project).unwrap().display();
            let circles = Modules::read(root, others).circles().into_iter().filter(|(_, circles)| !circles.is_empty());
            found.extend(circles.map(|(folder, circles)| (format!("{name} {folder}"), circles)));
        }
    }
    assert!(found.is_empty(), "circles: {found:#?}");
}

#[test]
fn a_module_with_a_folder_is_the_mod_rs_in_it() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut open: Vec<PathBuf> =
        CRATES.iter().flat_map(|name| ["src", "tests"].map(|part| project.join(name).join(part))).collect();
    let mut beside = Vec::new();
    while let Some(folder) = open.pop() {
        for path in
            fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).filter(|it| it.is_dir())
        {
            beside.extend(Some(path.with_extension("rs")).filter(|file| file.exists()));
            open.push(path);
        }
    }
    assert!(beside.is_empty(), "move into their folders, as mod.rs: {beside:?}");
}

#[test]
fn the_reader_finds_a_circle_through_what_is_passed_on() {
    let modules = |files: &[(&str, &str)]| {
        let name = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect::<Name>();
        Modules(files.iter().map(|(path, text)| (name(path), Module::read(text))).collect())
    };
    type Files = &'static [(&'static str, &'static str)];
    let cases: [(&str, Files, &[&str]); 6] = [
        ("none", &[("", "mod a; mod b;"), ("a", "use crate::b::B;"), ("b", "struct B;")], &[]),
        ("direct", &[("", ""), ("a", "use crate::b::B;"), ("b", "fn f() { super::a::f() }")], &["a", "b"]),
        (
            "by the parent",
            &[("", "pub use a::{A as Z};"), ("a", "use super::b::B;"), ("b", "use crate::Z;")],
            &["a", "b"],
        ),
        (
            "by all of it",
            &[("", "pub use a::*;"), ("a", "pub struct A; use super::b::B;"), ("b", "type T = crate::A;")],
            &["a", "b"],
        ),
        ("by a test", &[("", ""), ("a", "use crate::b::B;"), ("b", "#[cfg(test)] mod t { use crate::a::A; }")], &[]),
        (
            "in a text",
            &[("", ""), ("a", "use crate::b::B;"), ("b", "// crate::a::A\nconst T: &str = \"crate::a\";")],
            &[],
        ),
    ];
    for (case, files, expected) in cases {
        let circles: Vec<String> = modules(files).circles().into_values().flatten().flatten().collect();
        assert_eq!(circles, expected, "{case}");
    }
}

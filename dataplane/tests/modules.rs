//! The modules of this crate depend on each other without a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules of which `lib.rs` exports something.
const EXPORTED: [(&str, &str); 3] = [("DropReason", "drop_reason"), ("Epoch", "snapshot"), ("Snapshot", "snapshot")];

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Whether a file has only tests. Loom's storage stands in for the one of the table.
fn is_test(path: &Path) -> bool {
    path.components().any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "interleavings")))
        || matches!(path.file_name().and_then(|name| name.to_str()), Some("tests.rs" | "model.rs"))
}

/// Adds what the code below `path` uses of other modules, without tests and comments.
fn read(path: &Path, module: &str, graph: &mut Graph) {
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| read(&entry.unwrap().path(), module, graph));
        return;
    }
    if is_test(path) {
        return;
    }
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap();
    let code = code.split("#[cfg(all(test, not(feature = \"loom\")))]\nmod tests").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    for used in lines.split("crate::").skip(1) {
        let names: Vec<&str> = match used.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap().split(',').collect(),
            None => vec![used],
        };
        for name in names {
            let name = name.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
            let name = EXPORTED.iter().find(|(item, _)| *item == name).map_or(name, |(_, module)| module);
            if name != module && !name.is_empty() {
                graph.entry(module.to_owned()).or_default().insert(name.to_owned());
            }
        }
    }
}

/// Takes away modules that use none of those left; what stays is in a circle or uses one.
fn without_leaves(mut graph: Graph) -> Graph {
    loop {
        let before = graph.len();
        let left: BTreeSet<String> = graph.keys().cloned().collect();
        graph.retain(|_, used| used.iter().any(|module| left.contains(module)));
        if graph.len() == before {
            return graph;
        }
    }
}

#[test]
fn modules_have_no_circle() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut graph = Graph::new();
    for entry in fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if module != "lib" {
            read(&path, &module, &mut graph);
        }
    }
    // Names were found: the pipeline uses these.
    assert!(["conntrack", "forward", "snapshot"].iter().all(|used| graph["pipeline"].contains(*used)), "{graph:?}");
    let circle = without_leaves(graph);
    assert!(circle.is_empty(), "modules in a circle, or that use one: {circle:?}");
}

//! The crates depend on each other as drawn, and on no library that has no business in them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Who depends on whom among the crates of this project. Cargo itself refuses a circle.
const DRAWN: [(&str, &[&str]); 12] = [
    ("penstock-tc-filters", &[]),
    ("penstock-cni", &["penstock-admin", "penstock-tc-filters"]),
    ("penstock-xdp-redirect", &["penstock-dataplane", "penstock-tc-filters"]),
    ("penstock-dataplane", &[]),
    ("penstock-policy", &["penstock-dataplane"]),
    ("penstock-sources", &["penstock-admin", "penstock-dataplane", "penstock-policy"]),
    ("penstock-replay", &["penstock-admin", "penstock-dataplane", "penstock-policy", "penstock-sources"]),
    ("penstock-admin", &[]),
    ("penstock-text", &["penstock-admin"]),
    ("penstock-kubectl", &["penstock-admin", "penstock-replay", "penstock-sources", "penstock-text"]),
    (
        "penstock-agent",
        &["penstock-admin", "penstock-dataplane", "penstock-policy", "penstock-sources", "penstock-xdp-redirect"],
    ),
    (
        "penstock",
        &[
            "penstock-admin",
            "penstock-agent",
            "penstock-dataplane",
            "penstock-policy",
            "penstock-replay",
            "penstock-sources",
            "penstock-text",
        ],
    ),
];

/// All that policy needs of others: what compiles is a computation, without input, output, threads or clock.
const OF_POLICY: [&str; 6] = ["ipnet", "rustc-hash", "serde", "serde_json", "siphasher", "thiserror"];

/// Libraries that read command lines, draw on terminals or colour text.
const TERMINAL: [&str; 10] = [
    "anstream",
    "clap",
    "clap_complete",
    "clap_mangen",
    "console",
    "crossterm",
    "indicatif",
    "owo-colors",
    "ratatui",
    "supports-color",
];

/// Crates that compute, and commands that run anywhere: none needs a socket or a program in the kernel.
const OF_ANY_MACHINE: [&str; 6] =
    ["penstock-admin", "penstock-kubectl", "penstock-policy", "penstock-replay", "penstock-sources", "penstock-text"];

/// The C libraries of sockets and programs, and what calls them.
const OF_NODES: [&str; 3] = ["libbpf-sys", "libxdp-sys", "xsk-rs"];

/// Links of each package, by name: the dependencies of a build, not those of tests and build scripts.
struct Links(BTreeMap<String, BTreeSet<String>>);

impl Links {
    fn read() -> Self {
        // Filtered by this platform, the answer needs only what the build has fetched, and no network.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let output = Command::new(env!("CARGO"))
            .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", &platform])
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let packages = metadata["packages"].as_array().unwrap().iter();
        let names: BTreeMap<String, String> = packages.map(|it| (text(&it["id"]), text(&it["name"]))).collect();
        let mut links = BTreeMap::<String, BTreeSet<String>>::new();
        for node in metadata["resolve"]["nodes"].as_array().unwrap() {
            let linked = node["deps"].as_array().unwrap().iter().filter(|dependency| {
                dependency["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"].is_null())
            });
            let linked = linked.map(|dependency| names[&text(&dependency["pkg"])].clone());
            // Several versions of a package count as one.
            links.entry(names[&text(&node["id"])].clone()).or_default().extend(linked);
        }
        Self(links)
    }

    /// The direct dependencies of a package that are, or are not, crates of this project.
    fn of(&self, package: &str, own: bool) -> BTreeSet<&str> {
        let linked = self.0.get(package).unwrap_or_else(|| panic!("there is no package {package}"));
        linked.iter().map(String::as_str).filter(|name| name.starts_with("penstock") == own).collect()
    }

    /// All that ends in a binary with this package, itself included.
    fn closure(&self, package: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut open = vec![package.to_owned()];
        while let Some(name) = open.pop() {
            if found.insert(name.clone()) {
                open.extend(self.0[&name].iter().cloned());
            }
        }
        found
    }
}

#[test]
fn crate_dependencies_match_the_architecture() {
    let links = Links::read();
    for (package, drawn) in DRAWN {
        assert_eq!(links.of(package, true), drawn.iter().copied().collect(), "{package}");
    }
}

#[test]
fn policy_links_no_io_or_kubernetes_library() {
    assert_eq!(Links::read().of("penstock-policy", false), OF_POLICY.into());
}

#[test]
fn privileged_crates_link_no_terminal_library() {
    let links = Links::read();
    for package in ["penstock-agent", "penstock-dataplane", "penstock-xdp-redirect"] {
        let linked = links.closure(package);
        let terminal: Vec<_> = TERMINAL.into_iter().filter(|&name| linked.contains(name)).collect();
        assert!(terminal.is_empty(), "{package} links {terminal:?}");
    }
    // The names above are spelt as the packages are: the command links these.
    let command = links.closure("penstock");
    assert!(["clap", "indicatif", "owo-colors", "ratatui"].iter().all(|&name| command.contains(name)));
}

/// All that a build of this package alone links. Cargo's metadata has the features of the whole workspace instead.
fn linked_alone(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
            "--package",
        ])
        .arg(package)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

#[test]
fn only_the_daemon_links_libxdp_and_libbpf() {
    let is_linked = |package: &str| {
        let linked = linked_alone(package);
        assert!(linked.contains(package), "{linked:?}");
        OF_NODES.map(|name| linked.contains(name))
    };
    for package in OF_ANY_MACHINE.into_iter().chain(["penstock-dataplane"]) {
        assert_eq!(is_linked(package), [false; 3], "{package}: which of {OF_NODES:?} it links");
    }
    assert_eq!(is_linked("penstock-agent"), [true; 3], "which of {OF_NODES:?} the daemon links");
}

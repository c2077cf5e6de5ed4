//! Every dependency has a licence that `deny.toml` allows and comes from the registry.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;
use spdx::{Expression, ParseMode};

#[test]
fn every_dependency_has_an_allowed_licence() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let deny: toml::Table = std::fs::read_to_string(format!("{root}/deny.toml")).unwrap().parse().unwrap();
    let allowed: BTreeSet<&str> =
        deny["licenses"]["allow"].as_array().unwrap().iter().map(|licence| licence.as_str().unwrap()).collect();

    // This platform only: its dependencies are already fetched by the build, so no network is needed.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", &platform])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();

    let mut checked = 0;
    let mut refused = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        let Some(source) = package["source"].as_str() else { continue };
        assert!(source.starts_with("registry+"), "{name} comes from {source}, not from the registry");
        let licence = package["license"].as_str().unwrap_or_default();
        let holds = Expression::parse_mode(licence, ParseMode::LAX)
            .is_ok_and(|expression| expression.evaluate(|wanted| allowed.contains(wanted.to_string().as_str())));
        if !holds {
            refused.push(format!("{name}: {licence:?}"));
        }
        checked += 1;
    }
    assert!(refused.is_empty(), "not allowed by deny.toml: {refused:#?}");
    assert!(checked > 50, "only {checked} dependencies found");
}

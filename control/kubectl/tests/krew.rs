//! The krew manifest: krew's own rules for one, and the plugin's name in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn krew(arguments: &[&str]) -> Output {
    Command::new(root().join("scripts/krew")).args(arguments).output().unwrap()
}

#[test]
fn the_manifest_has_what_krew_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let machines = [("amd64", "penstock-x86_64-linux.tar.gz"), ("arm64", "penstock-aarch64-linux.tar.gz")];
    let [amd64, arm64] = machines.map(|(_, name)| {
        let archive = folder.path().join(name);
        std::fs::write(&archive, "").unwrap();
        (archive.to_str().unwrap().to_owned(), format!("https://example.org/v0/{name}"))
    });
    let output = krew(&[&amd64.0, &amd64.1, &arm64.0, &arm64.1]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains('@'), "all is filled in: {text}");
    let manifest: Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(manifest["apiVersion"], "krew.googlecontainertools.github.com/v1alpha2");
    assert_eq!((manifest["kind"].as_str(), manifest["metadata"]["name"].as_str()), (Some("Plugin"), Some("penstock")));
    let spec = &manifest["spec"];
    assert_eq!(spec["version"], format!("v{}", env!("CARGO_PKG_VERSION")));
    let short = spec["shortDescription"].as_str().unwrap();
    assert!((1..=50).contains(&short.len()) && !short.ends_with('.'), "{short}");
    assert!(spec["description"].as_str().unwrap().lines().all(|line| line.len() <= 100));
    let binary = Path::new(env!("CARGO_BIN_EXE_kubectl-penstock")).file_name().unwrap().to_str().unwrap();
    let platforms = spec["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), machines.len());
    for ((machine, name), platform) in machines.iter().zip(platforms) {
        assert_eq!(platform["selector"]["matchLabels"], serde_json::json!({"os": "linux", "arch": machine}));
        assert_eq!(platform["uri"], format!("https://example.org/v0/{name}"));
        // FIPS 180-4: SHA-256 of nothing.
        assert_eq!(platform["sha256"], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(platform["bin"], binary, "the name by which kubectl finds it");
        let files = platform["files"].as_array().unwrap();
        assert!(files.iter().any(|file| file["from"] == format!("*/{binary}")), "{files:?}");
    }
}

#[test]
fn an_archive_that_is_missing_or_no_address_is_refused() {
    for (archive, uri, part) in
        [("none.tar.gz", "https://x", "there is no such file"), ("LICENSE", "http://x", "not an https address")]
    {
        let archive = root().join(archive);
        let output = krew(&[archive.to_str().unwrap(), uri]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(part), "{output:?}");
    }
}

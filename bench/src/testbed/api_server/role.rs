//! The rights granted by the shipped manifests.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Resource;

/// A rule of a ClusterRole.
#[derive(Debug)]
pub(super) struct Rule {
    groups: Vec<String>,
    resources: Vec<String>,
    verbs: Vec<String>,
}

impl Rule {
    pub(super) fn allows(&self, verb: &str, resource: Resource) -> bool {
        let has = |list: &[String], item: &str| list.iter().any(|entry| entry == item || entry == "*");
        has(&self.groups, resource.group()) && has(&self.resources, resource.path()) && has(&self.verbs, verb)
    }
}

/// The shipped role, its account and its binding.
pub(super) fn manifests() -> Result<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/kubernetes/rbac.yaml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    text.split("\n---\n").map(|document| Ok(serde_saphyr::from_str(document)?)).collect()
}

/// The rules of the shipped ClusterRole.
pub(super) fn shipped() -> Result<Vec<Rule>> {
    let manifests = manifests()?;
    let role = manifests.iter().find(|object| object["kind"] == "ClusterRole").context("no ClusterRole is shipped")?;
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
    };
    let rules = role["rules"].as_array().context("a ClusterRole without rules")?;
    let rule = |rule: &Value| Rule {
        groups: strings(&rule["apiGroups"]),
        resources: strings(&rule["resources"]),
        verbs: strings(&rule["verbs"]),
    };
    Ok(rules.iter().map(rule).collect())
}

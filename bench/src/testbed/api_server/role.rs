//! The rights granted by the shipped manifests.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Resource;

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

/// The shipped roles, those for a startup taint included, their account and their bindings.
pub(super) fn manifests() -> Result<Vec<Value>> {
    let mut manifests = Vec::new();
    for file in ["rbac.yaml", "startup-taint/rbac.yaml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/kubernetes").join(file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for document in text.split("\n---\n") {
            manifests.push(serde_saphyr::from_str(document)?);
        }
    }
    Ok(manifests)
}

/// The rules of the shipped ClusterRoles.
pub(super) fn shipped() -> Result<Vec<Rule>> {
    let manifests = manifests()?;
    let roles: Vec<&Value> = manifests.iter().filter(|object| object["kind"] == "ClusterRole").collect();
    ensure!(roles.len() == 2, "two ClusterRoles are shipped");
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
    };
    let rules = roles.iter().flat_map(|role| role["rules"].as_array().into_iter().flatten());
    let rule = |rule: &Value| Rule {
        groups: strings(&rule["apiGroups"]),
        resources: strings(&rule["resources"]),
        verbs: strings(&rule["verbs"]),
    };
    Ok(rules.map(rule).collect())
}

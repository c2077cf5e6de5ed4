//! The policies of a trial from files.

use std::collections::BTreeMap;
use std::path::Path;

use penstock_admin::types::TrialRequest;
use penstock_policy::model::Object;
use penstock_sources::manifest::{ManifestErrors, Options, read_text};

#[derive(Debug, thiserror::Error)]
pub(super) enum TrialError {
    #[error("{0}")]
    Manifests(#[from] ManifestErrors),
    #[error("no NetworkPolicy or ClusterNetworkPolicy in {0}: name manifests with the policies to try")]
    NoPolicy(String),
    #[error("{second} and {first} both say what becomes of {target}: remove one of them")]
    Conflict { first: String, second: String, target: String },
}

/// The policies of the manifests, and the number of objects of other kinds.
pub(super) fn policies_of(request: &TrialRequest) -> Result<(Vec<Object>, usize), TrialError> {
    let (mut policies, mut left_out) = (Vec::new(), 0);
    for manifest in &request.manifests {
        let read = read_text(Path::new(&manifest.name), &manifest.text, &Options::default())?;
        left_out += read.ignored.len();
        for document in read.documents {
            if document.object.reference().is_policy() {
                policies.push((document.object, document.origin.to_string()));
            } else {
                left_out += 1;
            }
        }
    }
    let mut known = BTreeMap::new();
    for (policy, origin) in &policies {
        let target = policy.replaced().unwrap_or_else(|| policy.reference());
        if let Some(first) = known.insert(target.clone(), origin) {
            let (first, second, target) = (first.clone(), origin.clone(), target.to_string());
            return Err(TrialError::Conflict { first, second, target });
        }
    }
    if policies.is_empty() {
        let names: Vec<&str> = request.manifests.iter().map(|manifest| manifest.name.as_str()).collect();
        return Err(TrialError::NoPolicy(names.join(", ")));
    }
    Ok((policies.into_iter().map(|(policy, _)| policy).collect(), left_out))
}

#[cfg(test)]
mod tests {
    use penstock_admin::types::TrialManifest;

    use super::*;

    fn policy(name: &str, annotation: &str) -> String {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: {name}\n  namespace: shop\n  \
             annotations: {{{annotation}}}\nspec:\n  podSelector: {{}}\n"
        )
    }

    fn read(texts: &[String]) -> Result<(Vec<Object>, usize), String> {
        let manifest =
            |(number, text): (usize, &String)| TrialManifest { name: format!("{number}.yaml"), text: text.clone() };
        let request = TrialRequest { manifests: texts.iter().enumerate().map(manifest).collect() };
        policies_of(&request).map_err(|error| error.to_string())
    }

    #[test]
    fn policies_are_tried_and_objects_of_other_kinds_are_counted() {
        let namespace = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n".to_owned();
        let foreign = "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\n".to_owned();
        let (policies, left_out) = read(&[policy("db", ""), namespace, foreign, policy("web", "")]).unwrap();
        assert_eq!((policies.len(), left_out), (2, 2));
    }

    #[test]
    fn what_is_no_trial_is_refused_with_place_and_remedy() {
        for (texts, parts) in [
            (vec![], ["no NetworkPolicy", "name manifests"]),
            (vec!["kind: [".to_owned()], ["0.yaml:1", "not valid YAML"]),
            (vec![policy("db", ""), policy("db", "")], ["1.yaml", "remove one"]),
            (vec![policy("db", ""), policy("new", "policy.penstock.dev/staged-for: db")], ["shop/db", "remove one"]),
            (vec![policy("db", "policy.penstock.dev/staged: sure")], ["0.yaml", "policy.penstock.dev/staged"]),
        ] {
            let error = read(&texts).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{texts:?}: {error}");
        }
    }
}

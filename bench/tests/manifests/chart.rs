//! The Helm chart, as a real Helm renders it, against the kustomization. `make manifests-check` gets Helm and runs these tests.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::{directory, documents, objects, uninstall, with_component};

/// Runs the Helm of `PENSTOCK_HELM`, or the one in `PATH`.
fn helm(arguments: &[&str]) -> Output {
    let program = std::env::var_os("PENSTOCK_HELM").map_or_else(|| PathBuf::from("helm"), PathBuf::from);
    let output = Command::new(&program).args(arguments).output();
    output.unwrap_or_else(|error| panic!("{}: {error}; make manifests-check gets Helm", program.display()))
}

/// The output of `helm template` with these values, in the namespace of the kustomization.
fn render(values: &[&str]) -> Output {
    let chart = directory();
    let set = values.iter().flat_map(|value| ["--set", value]);
    let arguments = ["template", "penstock", chart.to_str().unwrap(), "--namespace", "kube-system"];
    helm(&arguments.into_iter().chain(set).collect::<Vec<_>>())
}

/// The objects that these values give.
fn rendered(values: &[&str]) -> Vec<Value> {
    let output = render(values);
    assert!(output.status.success(), "{values:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    documents(text.strip_prefix("---\n").unwrap())
}

/// The objects of all forms that the chart has.
pub(crate) fn every_form() -> Vec<Value> {
    let forms: [&[&str]; 6] = [
        &["kubectl.group=admins"],
        &["surge=true"],
        &["pinnedCores=3"],
        &["cni.waitSeconds=0"],
        &["startupTaint=k"],
        &["uninstall=true"],
    ];
    forms.iter().flat_map(|values| rendered(values)).collect()
}

/// An object without what a chart and a kustomization say in their own ways: where it comes from, and which configuration it has.
fn comparable(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    metadata.remove("labels");
    if !object["kind"].as_str().unwrap().starts_with("Cluster") {
        object["metadata"]["namespace"] = json!("kube-system");
    }
    if object["kind"] == "ConfigMap" {
        // kustomize appends a checksum.
        let name = object["metadata"]["name"].as_str().unwrap();
        object["metadata"]["name"] = json!(if name.contains("uninstall") { "penstock-uninstall" } else { "penstock" });
    }
    if object["kind"] == "DaemonSet" {
        let template = &mut object["spec"]["template"];
        template["metadata"].as_object_mut().unwrap().remove("annotations");
        let pod = &mut template["spec"];
        for list in ["initContainers", "containers"] {
            for container in pod[list].as_array_mut().unwrap() {
                // The policy that Kubernetes takes for an image with a tag.
                let policy = container.as_object_mut().unwrap().remove("imagePullPolicy");
                assert!(policy.is_none_or(|policy| policy == "IfNotPresent"));
                container["image"] = json!("penstock:0.1.0");
            }
        }
        for volume in pod["volumes"].as_array_mut().unwrap() {
            let Some(name) = volume.pointer_mut("/configMap/name") else { continue };
            let is_uninstall = name.as_str().unwrap().contains("uninstall");
            *name = json!(if is_uninstall { "penstock-uninstall" } else { "penstock" });
        }
    }
    object
}

/// Sorted by kind and name.
fn all_comparable(objects: Vec<Value>) -> Vec<Value> {
    let mut objects: Vec<Value> = objects.into_iter().map(comparable).collect();
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]["name"]));
    objects
}

fn daemon_set(objects: Vec<Value>) -> Value {
    comparable(objects.into_iter().find(|object| object["kind"] == "DaemonSet").unwrap())
}

/// The kustomization's objects; without kubectl to put them together, the ConfigMap as well.
fn kustomized(objects: Vec<Value>, name: &str, file: &str) -> Vec<Value> {
    let has_configuration = objects.iter().any(|object| object["kind"] == "ConfigMap");
    let data = std::fs::read_to_string(directory().join(file)).unwrap();
    let configuration = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"penstock.toml": data},
    });
    objects.into_iter().chain((!has_configuration).then_some(configuration)).collect()
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn the_chart_gives_what_the_kustomization_gives() {
    for (values, kustomized) in [
        (&[][..], kustomized(objects(), "penstock", "penstock.toml")),
        (&["uninstall=true"], kustomized(uninstall(), "penstock-uninstall", "uninstall/penstock.toml")),
    ] {
        let chart = rendered(values);
        assert_eq!(all_comparable(chart), all_comparable(kustomized), "{values:?}");
    }
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn values_that_are_components_of_the_kustomization_do_the_same() {
    for (value, component) in [
        ("surge=true", "surge"),
        ("pinnedCores=2", "pinned-cores"),
        ("startupTaint=penstock.dev/not-ready", "startup-taint"),
    ] {
        let chart = rendered(&[value]);
        assert_eq!(daemon_set(chart), with_component(component, daemon_set(objects())), "{value}");
    }
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn the_group_of_kubectl_gets_the_rights_that_are_shipped() {
    let mut chart = rendered(&["kubectl.group=admins"]);
    chart.retain(|object| object["metadata"]["name"] == "penstock-kubectl");
    let text = std::fs::read_to_string(directory().join("kubectl/rbac.yaml")).unwrap();
    let shipped = documents(&text.replace("penstock-users", "admins"));
    assert_eq!(all_comparable(chart), all_comparable(shipped));
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn a_startup_taint_comes_with_the_rights_for_it() {
    let mut chart = rendered(&["startupTaint=k"]);
    chart.retain(|object| object["metadata"]["name"] == "penstock-startup-taint");
    let shipped = documents(&std::fs::read_to_string(directory().join("startup-taint/rbac.yaml")).unwrap());
    assert_eq!(all_comparable(chart), all_comparable(shipped));
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn every_value_changes_what_it_names() {
    let pod = "/spec/template/spec";
    for (value, at, expected) in [
        ("image.repository=r/p", "/containers/0/image", json!("r/p:0.1.0")),
        ("image.tag=v9", "/initContainers/1/image", json!("penstock:v9")),
        ("image.pullPolicy=Always", "/containers/0/imagePullPolicy", json!("Always")),
        ("imagePullSecrets[0].name=r", "/imagePullSecrets", json!([{"name": "r"}])),
        ("cni.install=false", "/initContainers/2", Value::Null),
        ("cni.waitSeconds=0", "/initContainers/2/command/7", json!("0")),
        ("cni.binDir=/b", "/volumes/4/hostPath/path", json!("/b")),
        ("cni.confDir=/c", "/volumes/5/hostPath/path", json!("/c")),
        ("bpffs.mount=false", "/initContainers/0/name", json!("check")),
        ("resources.requests.cpu=2", "/containers/0/resources", json!({"requests": {"cpu": 2}})),
        ("nodeSelector.pool=a", "/nodeSelector", json!({"kubernetes.io/os": "linux", "pool": "a"})),
        ("tolerations[0].key=k", "/tolerations", json!([{"key": "k"}])),
        ("podLabels.team=net", "/../metadata/labels/team", json!("net")),
        ("podAnnotations.note=n", "/../metadata/annotations/note", json!("n")),
    ] {
        let chart = rendered(&[value]);
        let set = chart.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
        let at = format!("{pod}{at}").replace("/spec/..", "");
        assert_eq!(set.pointer(&at).cloned().unwrap_or_default(), expected, "{value}");
    }
    for (value, name) in [("config=node", "penstock"), ("uninstall=true,uninstallConfig=node", "penstock-uninstall")] {
        let chart = rendered(&[&format!("{value}=\"n\"")]);
        let map = chart.iter().find(|object| object["kind"] == "ConfigMap").unwrap();
        assert_eq!((&map["metadata"]["name"], &map["data"]["penstock.toml"]), (&json!(name), &json!("node=\"n\"\n")));
    }
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn a_changed_configuration_restarts_the_daemons() {
    let checksum = |values: &[&str]| {
        let set = rendered(values).into_iter().find(|object| object["kind"] == "DaemonSet").unwrap();
        set["spec"]["template"]["metadata"]["annotations"]["checksum/config"].as_str().unwrap().to_owned()
    };
    let shipped = checksum(&[]);
    assert_eq!(checksum(&["image.tag=v9"]), shipped);
    assert_ne!(checksum(&["config=a"]), shipped);
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn values_that_the_chart_does_not_know_are_refused() {
    for (value, named) in [
        ("imgae.tag=9", "imgae"),
        ("image.tags=9", "tags"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy"),
        ("cni.waitSeconds=101", "cni.waitSeconds"),
        ("cni.binDir=opt/cni", "cni.binDir"),
        ("pinnedCores=1", "pinnedCores"),
        ("surge=yes", "surge"),
    ] {
        let output = render(&[value]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(named), "{value}: {said}");
    }
}

#[test]
#[ignore = "needs Helm: make manifests-check"]
fn helm_lint_finds_nothing() {
    let output = helm(&["lint", "--strict", "--quiet", directory().to_str().unwrap()]);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
}

#[test]
fn the_chart_has_the_version_of_the_binaries() {
    let chart = std::fs::read_to_string(directory().join("Chart.yaml")).unwrap();
    let chart: Value = serde_saphyr::from_str(&chart).unwrap();
    let version = json!(env!("CARGO_PKG_VERSION"));
    assert_eq!((&chart["version"], &chart["appVersion"]), (&version, &version));
}

//! The shipped manifests: each field exists in its type, no right is unnecessary, and `penstock run` accepts their
//! configuration. A real API server validates them too if `KUBEBUILDER_ASSETS` names its directory. The Helm chart gives the same
//! objects.

mod chart;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use penstock_agent::config::Config;
use penstock_agent::privileges::STARTUP;
use penstock_bench::testbed::ScratchDir;
use penstock_bench::testbed::api_server::ApiServer;
use penstock_sources::Location;
use penstock_sources::api_server::Access;

use http::Method;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Container, PodSpec, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use serde::de::DeserializeOwned;
use serde_json::Value;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/kubernetes")
}

/// All objects: the output of `kubectl kustomize`, or the files themselves without it.
fn objects() -> Vec<Value> {
    objects_of(&directory(), &["rbac.yaml", "daemonset.yaml"])
}

/// The same of a directory whose files are these.
fn objects_of(directory: &Path, files: &[&str]) -> Vec<Value> {
    let rendered = Command::new("kubectl").arg("kustomize").arg(directory).output();
    let text = match rendered {
        Ok(output) => {
            assert!(output.status.success(), "kubectl kustomize: {}", String::from_utf8_lossy(&output.stderr));
            eprintln!("manifests: as kubectl kustomize makes them");
            String::from_utf8(output.stdout).unwrap()
        }
        Err(_) => {
            eprintln!("manifests: as they are in the files (kubectl is not there to put them together)");
            let read = |name: &&str| std::fs::read_to_string(directory.join(name)).unwrap();
            files.iter().map(read).collect::<Vec<_>>().join("\n---\n")
        }
    };
    documents(&text)
}

/// The objects of a file of several YAML documents.
fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}

/// The pod of the DaemonSet in these objects.
fn pod_of(objects: &[Value]) -> PodSpec {
    let set: DaemonSet = typed(objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap());
    set.spec.template.spec.unwrap()
}

/// Those of `configs/kubernetes/uninstall`.
fn uninstall() -> Vec<Value> {
    objects_of(&directory().join("uninstall"), &["daemonset.yaml"])
}

/// Deserializes an object into its type and fails on unknown fields.
fn typed<T: DeserializeOwned>(object: &Value) -> T {
    let mut unknown = Vec::new();
    let read = serde_ignored::deserialize(object.clone(), |path| unknown.push(path.to_string()));
    // The types have no fields for apiVersion and kind.
    unknown.retain(|path| !matches!(path.as_str(), "apiVersion" | "kind"));
    assert!(unknown.is_empty(), "{} has no such fields: {unknown:?}", object["kind"]);
    read.unwrap_or_else(|error| panic!("{}: {error}", object["kind"]))
}

#[test]
fn the_plugins_users_get_a_right_that_the_daemon_lacks() {
    let shipped = objects_of(&directory().join("kubectl"), &["rbac.yaml"]);
    let may_exec = |rules: &[PolicyRule]| {
        rules.iter().any(|rule| rule.resources.iter().flatten().any(|resource| resource.starts_with("pods/")))
    };
    let of_kind = |kind: &str| shipped.iter().find(|object| object["kind"] == kind).unwrap();
    let role: Role = typed(of_kind("Role"));
    let rules = role.rules.unwrap();
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0].resources.as_deref(), Some(&["pods/exec".to_owned()][..]));
    assert_eq!(rules[0].verbs, ["create", "get"]);
    let cluster_role: ClusterRole = typed(of_kind("ClusterRole"));
    for rule in cluster_role.rules.as_deref().unwrap() {
        assert!(rule.verbs.iter().all(|verb| ["get", "list"].contains(&verb.as_str())), "{rule:?}");
    }
    assert!(!may_exec(cluster_role.rules.as_deref().unwrap()), "in one namespace alone");
    for kind in ["RoleBinding", "ClusterRoleBinding"] {
        assert_eq!(of_kind(kind)["subjects"][0]["name"], "penstock-users");
    }
    drop((typed::<RoleBinding>(of_kind("RoleBinding")), typed::<ClusterRoleBinding>(of_kind("ClusterRoleBinding"))));
    let own = objects();
    let own: ClusterRole = typed(own.iter().find(|object| object["kind"] == "ClusterRole").unwrap());
    assert!(!may_exec(&own.rules.unwrap()));
}

#[test]
fn every_field_exists_in_its_type_and_no_kind_is_missing() {
    let mut kinds: Vec<String> = objects()
        .iter()
        .map(|object| {
            let kind = object["kind"].as_str().unwrap();
            match kind {
                "ServiceAccount" => drop(typed::<ServiceAccount>(object)),
                "ClusterRole" => drop(typed::<ClusterRole>(object)),
                "ClusterRoleBinding" => drop(typed::<ClusterRoleBinding>(object)),
                "ConfigMap" => drop(typed::<ConfigMap>(object)),
                "DaemonSet" => drop(typed::<DaemonSet>(object)),
                other => panic!("a {other} is not expected here"),
            }
            kind.to_owned()
        })
        .collect();
    kinds.sort();
    // kustomize generates the ConfigMap from the configuration file.
    kinds.retain(|kind| kind != "ConfigMap");
    assert_eq!(kinds, ["ClusterRole", "ClusterRoleBinding", "DaemonSet", "ServiceAccount"]);
}

#[test]
fn the_role_allows_reading_seven_kinds_and_writing_events() {
    let objects = objects();
    let role: ClusterRole = typed(objects.iter().find(|object| object["kind"] == "ClusterRole").unwrap());
    let mut rights = Vec::new();
    for rule in role.rules.unwrap() {
        assert!(rule.non_resource_urls.is_none() && rule.resource_names.is_none());
        for group in rule.api_groups.unwrap() {
            for resource in rule.resources.iter().flatten() {
                rights.extend(rule.verbs.iter().map(|verb| format!("{verb} {group}/{resource}")));
            }
        }
    }
    rights.sort();
    let resources = [
        "/namespaces",
        "/nodes",
        "/pods",
        "/services",
        "networking.k8s.io/networkpolicies",
        "policy.networking.k8s.io/clusternetworkpolicies",
    ];
    let verbs = ["get", "list", "watch"].into_iter();
    let read = verbs.flat_map(|verb| resources.map(|resource| format!("{verb} {resource}")));
    let wanted: Vec<String> = std::iter::once("create /events".to_owned()).chain(read).collect();
    assert_eq!(rights, wanted);
}

#[test]
fn the_container_lists_capabilities_and_mounts_have_volumes() {
    let objects = objects();
    let set: DaemonSet = typed(objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap());
    let spec = set.spec.template.spec.unwrap();
    assert_eq!((spec.host_network, spec.containers.len()), (Some(true), 1));
    let Container { security_context, volume_mounts, liveness_probe, readiness_probe, resources, .. } =
        &spec.containers[0];
    let security = security_context.as_ref().unwrap();
    assert_eq!(security.privileged, Some(false));
    let capabilities = security.capabilities.as_ref().unwrap();
    assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]));
    let added = capabilities.add.as_deref().unwrap();
    assert!(added.iter().all(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_') && name != "ALL"));
    let volumes: Vec<&String> = spec.volumes.iter().flatten().map(|volume| &volume.name).collect();
    for mount in volume_mounts.iter().flatten() {
        assert!(volumes.contains(&&mount.name), "no volume {}", mount.name);
    }
    assert!(liveness_probe.is_some() && readiness_probe.is_some() && resources.is_some());
}

#[test]
fn only_the_init_container_that_mounts_bpffs_is_privileged() {
    for (objects, privileged) in [(objects(), vec!["bpffs"]), (uninstall(), vec![])] {
        let spec = pod_of(&objects);
        let profile = spec.security_context.as_ref().unwrap().seccomp_profile.as_ref().unwrap();
        assert_eq!(profile.type_, "RuntimeDefault");
        let volumes: Vec<&String> = spec.volumes.iter().flatten().map(|volume| &volume.name).collect();
        let mut found = Vec::new();
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            let security = container.security_context.as_ref().unwrap();
            assert_eq!(security.read_only_root_filesystem, Some(true), "{}", container.name);
            for mount in container.volume_mounts.iter().flatten() {
                assert!(volumes.contains(&&mount.name), "{}: no volume {}", container.name, mount.name);
            }
            match security.privileged {
                Some(true) => found.push(container.name.as_str()),
                _ => {
                    let capabilities = security.capabilities.as_ref().unwrap();
                    assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]), "{}", container.name);
                    let own = start_capabilities();
                    assert!(capabilities.add.iter().flatten().all(|name| own.contains(name)), "{}", container.name);
                    assert_eq!(security.allow_privilege_escalation, Some(false), "{}", container.name);
                    let outward = container
                        .volume_mounts
                        .iter()
                        .flatten()
                        .any(|mount| mount.mount_propagation.as_deref() == Some("Bidirectional"));
                    assert!(!outward, "{}: only a privileged container may", container.name);
                }
            }
        }
        assert_eq!(found, privileged);
    }
}

#[test]
fn bpffs_is_mounted_before_the_daemon_needs_it() {
    let spec = pod_of(&objects());
    let propagation = |container: &Container| {
        let mounts = container.volume_mounts.iter().flatten();
        mounts.filter(|mount| mount.mount_path == "/sys/fs/bpf").find_map(|mount| mount.mount_propagation.clone())
    };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let seen: Vec<(&str, Option<String>)> =
        containers.map(|container| (container.name.as_str(), propagation(container))).collect();
    let (out, from_node) = (Some("Bidirectional".to_owned()), Some("HostToContainer".to_owned()));
    assert_eq!(seen, [("bpffs", out), ("check", from_node.clone()), ("install-cni", None), ("penstock", from_node)]);
    let check = spec.init_containers.unwrap()[1].args.clone().unwrap();
    assert_eq!(check[check.len() - 2..], ["--or-last-good", "--offline"], "neither keeps the daemon from starting");
}

#[test]
fn the_cni_plugin_is_removed_from_where_it_was_installed() {
    let of = |objects: &[Value], command: &str| {
        let spec = pod_of(objects);
        let container = spec
            .init_containers
            .unwrap()
            .into_iter()
            .find(|container| container.command.iter().flatten().any(|argument| argument == command));
        let (container, volumes) = (container.unwrap(), spec.volumes.unwrap());
        let arguments = container.command.unwrap().split_off(2);
        let on_node = container.volume_mounts.unwrap().into_iter().map(|mount| {
            let volume = volumes.iter().find(|volume| volume.name == mount.name).unwrap();
            (mount.mount_path, volume.host_path.as_ref().unwrap().path.clone())
        });
        (arguments, on_node.collect::<Vec<_>>())
    };
    let installed = of(&objects(), "install");
    assert_eq!(installed, of(&uninstall(), "uninstall"));
    let (arguments, mounts) = installed;
    assert!(mounts.iter().all(|(inside, _)| arguments.contains(inside)), "{arguments:?} {mounts:?}");
    let on_node: Vec<&str> = mounts.iter().map(|(_, path)| path.as_str()).collect();
    assert_eq!(on_node, ["/opt/cni/bin", "/etc/cni/net.d"], "where container runtimes look");
}

#[test]
fn uninstalling_reads_the_same_names_as_the_daemon() {
    let files = [directory().join("penstock.toml"), directory().join("uninstall/penstock.toml")];
    let [daemon, uninstall] = files.map(|file| Config::load(&file).unwrap());
    assert_eq!(&uninstall.fail.pins, &daemon.fail.pins);
    assert_eq!(uninstall.conntrack.mapping.to_string(), format!("/host{}", daemon.conntrack.mapping));
    assert_eq!(uninstall.admin.socket.to_string(), format!("/host{}", daemon.admin.socket));
    let image = |name: &str| {
        std::fs::read_to_string(directory().join(name))
            .unwrap()
            .split("images:")
            .nth(1)
            .unwrap()
            .lines()
            .filter(|line| line.contains("new"))
            .map(|line| line.trim().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(image("kustomization.yaml"), image("uninstall/kustomization.yaml"));
}

#[test]
fn the_containerfiles_context_has_what_the_build_needs() {
    let text = std::fs::read_to_string(directory().join("Containerfile")).unwrap();
    let images: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("FROM ")).collect();
    let is_complete = |image: &&str| *image == "scratch" || image.starts_with("docker.io/library/");
    assert!(!images.is_empty() && images.iter().all(is_complete), "{images:?}");
    let ignored = std::fs::read_to_string(directory().join("../../.containerignore")).unwrap();
    let ignored: Vec<&str> = ignored.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(ignored.contains(&"target") && ignored.contains(&".git"), "{ignored:?}");
    for needed in ["Cargo.toml", "Cargo.lock", "control", "dataplane", "xdp-redirect", "bench", "pcap-tests", "scripts"]
    {
        assert!(!ignored.contains(&needed), "{needed}");
    }
}

/// The capabilities that the daemon starts with, without the prefix `CAP_`.
fn start_capabilities() -> BTreeSet<String> {
    STARTUP.iter().map(|capability| capability.to_string().trim_start_matches("CAP_").to_owned()).collect()
}

/// The text of the systemd unit.
fn unit() -> String {
    std::fs::read_to_string(directory().join("../systemd/penstock.service")).unwrap()
}

#[test]
fn unit_and_daemonset_grant_exactly_the_startup_capabilities() {
    let unit = unit();
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let granted: BTreeSet<String> = line.split(' ').map(|name| name.trim_start_matches("CAP_").to_owned()).collect();
    assert_eq!(granted, start_capabilities(), "configs/systemd/penstock.service");
    let objects = objects();
    let set: DaemonSet = typed(objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap());
    let security = set.spec.template.spec.unwrap().containers[0].security_context.clone().unwrap();
    let granted: BTreeSet<String> = security.capabilities.unwrap().add.unwrap().into_iter().collect();
    assert_eq!(granted, start_capabilities(), "configs/kubernetes/daemonset.yaml");
    assert!(unit.contains("\nNoNewPrivileges=yes\n") && security.allow_privilege_escalation == Some(false));
}

#[test]
fn the_unit_lets_pods_start_once_policy_is_in_effect() {
    let unit = unit();
    let values = |key: &str| -> Vec<&str> {
        unit.lines()
            .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .flat_map(|list| list.split(' '))
            .collect()
    };
    assert_eq!(values("Type"), ["notify"]);
    let before = values("Before");
    assert!(before.contains(&"kubelet.service") && before.contains(&"containerd.service"), "{before:?}");
    assert_eq!(values("RequiredBy"), [""; 0], "a node whose API server is one of its pods starts");
    assert_eq!(values("StartLimitIntervalSec"), ["0"], "a start that fails is tried again");
    assert!(values("RestrictAddressFamilies").contains(&"AF_UNIX"), "the message is a datagram to a unix socket");
}

#[test]
#[ignore = "needs systemd-analyze: make manifests-check"]
fn systemd_accepts_the_unit_and_rates_its_sandbox_tight() {
    // systemd's most exposed own daemons are rated 9.6; a unit with only this one's capabilities 8.
    const MOST_EXPOSED: &str = "40";
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("penstock.service");
    // The binary is not installed here.
    std::fs::write(&file, unit().replace("/usr/local/bin/penstock", "/bin/true")).unwrap();
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).arg(&file).output();
    let verified = analyze(&["verify"]).expect("systemd-analyze is there");
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success() && !said.contains("penstock.service:"), "{said}");
    let rated = analyze(&["security", "--offline=yes", "--no-pager", "--threshold", MOST_EXPOSED]).unwrap();
    assert!(rated.status.success(), "{}", String::from_utf8_lossy(&rated.stdout));
}

#[test]
fn the_daemon_accepts_the_configuration_in_the_manifests() {
    let path = directory().join("penstock.toml");
    let config = Config::load(&path).unwrap();
    assert_eq!(config.source.location(), Location::ApiServer(Access::InCluster));
}

#[test]
#[ignore = "needs Helm and a real API server: make manifests-check"]
fn an_api_server_accepts_all_manifests() {
    let server = ApiServer::start(None).unwrap();
    assert!(server.is_real(), "the small server does not know these kinds; another test checks their fields");
    for object in objects().into_iter().chain(uninstall()).chain(chart::every_form()) {
        let url = match object["kind"].as_str().unwrap() {
            "ServiceAccount" => "/api/v1/namespaces/kube-system/serviceaccounts",
            "ConfigMap" => "/api/v1/namespaces/kube-system/configmaps",
            "DaemonSet" => "/apis/apps/v1/namespaces/kube-system/daemonsets",
            "Role" => "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            "RoleBinding" => "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            other => panic!("a {other} is not expected here"),
        };
        let url = format!("{url}?dryRun=All");
        match server.admin().call(Method::POST, &url, &object) {
            Ok(taken) => assert_eq!(taken["kind"], object["kind"]),
            // Some were applied when the server started.
            Err(error) => assert!(format!("{error:#}").contains("AlreadyExists"), "{}: {error:#}", object["kind"]),
        }
    }
}

/// Applies an operation of RFC 6902, as far as the components use it.
fn apply(operation: &Value, to: &mut Value) {
    let path = operation["path"].as_str().unwrap();
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = to.pointer_mut(parent).unwrap_or_else(|| panic!("{path} is not in the DaemonSet"));
    let value = operation["value"].clone();
    match (operation["op"].as_str().unwrap(), parent) {
        ("add", Value::Array(list)) if key == "-" => list.push(value),
        ("add", Value::Object(fields)) => drop(fields.insert(key.into(), value)),
        ("replace", Value::Object(fields)) => drop(fields.insert(key.into(), value).expect(path)),
        ("remove", Value::Object(fields)) => drop(fields.remove(key).expect(path)),
        (other, _) => panic!("{other} {path}"),
    }
}

/// Changes a DaemonSet as a component of the kustomization does.
fn with_component(component: &str, mut daemon_set: Value) -> Value {
    let file = directory().join(component).join("kustomization.yaml");
    let kustomization: Value = serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    for patch in kustomization["patches"].as_array().unwrap() {
        assert_eq!(
            (&patch["target"]["kind"], &patch["target"]["name"]),
            (&daemon_set["kind"], &daemon_set["metadata"]["name"])
        );
        let operations: Vec<Value> = serde_saphyr::from_str(patch["patch"].as_str().unwrap()).unwrap();
        operations.iter().for_each(|operation| apply(operation, &mut daemon_set));
    }
    daemon_set
}

#[test]
fn each_component_gives_a_valid_daemon_set() {
    for (component, at, expected) in [
        ("pinned-cores", "/spec/template/spec/containers/0/resources/limits/cpu", "\"2\""),
        ("surge", "/spec/template/spec/containers/0/readinessProbe/exec/command", "[\"penstock\",\"ready\"]"),
        ("surge", "/spec/template/spec/containers/0/args/3", "\"--take-over\""),
        ("startup-taint", "/spec/template/spec/containers/0/env/1/value", "\"penstock.dev/not-ready\""),
    ] {
        let daemon_set = std::fs::read_to_string(directory().join("daemonset.yaml")).unwrap();
        let daemon_set = with_component(component, serde_saphyr::from_str(&daemon_set).unwrap());
        assert_eq!(daemon_set.pointer(at).map(Value::to_string).as_deref(), Some(expected), "{component}");
        typed::<DaemonSet>(&daemon_set);
    }
}

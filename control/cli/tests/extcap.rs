//! `configs/wireshark/penstock-extcap` answers Wireshark's questions (extcap(4)).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Programs that stand in for `penstock` and `kubectl`, as shell scripts.
struct Programs(TempDir);

impl Programs {
    fn new(penstock: &str, kubectl: &str) -> Self {
        let directory = TempDir::new().unwrap();
        for (name, script) in [("penstock", penstock), ("kubectl", kubectl)] {
            let path = directory.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self(directory)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/wireshark/penstock-extcap");
        let mut command = Command::new("python3");
        command.arg(script).args(arguments).env_remove("PENSTOCK_NAMESPACE");
        command.env("PENSTOCK", self.path("penstock")).env("PENSTOCK_KUBECTL", self.path("kubectl"));
        command.output().expect("python3 is needed: apt-get install python3")
    }

    fn answer(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

const NODE: &str = r#"[ "$1 $2" = "status --json" ] && echo '{"node": "node-1", "pods": [{"pod": "shop/web", "port": 3}, {"pod": "shop/new", "port": null}]}'"#;
const CLUSTER: &str = r#"echo '{"items": [{"spec": {"nodeName": "node-2"}, "metadata": {"name": "penstock-x"}}, {"spec": {}, "metadata": {"name": "pending"}}]}'"#;

#[test]
fn a_node_lists_itself_and_its_pods_and_a_desk_the_nodes_of_the_cluster() {
    let interfaces = |programs: &Programs| {
        let answer = programs.answer(&["--extcap-interfaces"]);
        let (head, interfaces) = answer.split_once('\n').unwrap();
        assert!(head.starts_with("extcap {version="), "{answer}");
        interfaces.to_owned()
    };
    assert_eq!(
        interfaces(&Programs::new(NODE, "exit 1")),
        "interface {value=penstock:here}{display=Penstock: all pods of node-1}\n\
         interface {value=penstock:here:shop/web}{display=Penstock: shop/web}\n"
    );
    assert_eq!(
        interfaces(&Programs::new("exit 1", CLUSTER)),
        "interface {value=penstock:node:node-2}{display=Penstock: all pods of node-2}\n"
    );
    assert_eq!(interfaces(&Programs::new("exit 1", "exit 1")), "", "neither daemon nor cluster");
}

#[test]
fn every_interface_is_ethernet_and_has_options() {
    let programs = Programs::new("exit 1", "exit 1");
    let dlts = programs.answer(&["--extcap-interface", "penstock:here", "--extcap-dlts"]);
    assert_eq!(dlts, "dlt {number=1}{name=EN10MB}{display=Ethernet}\n");
    let options = programs.answer(&["--extcap-interface", "penstock:here", "--extcap-config"]);
    for option in ["--pod", "--verdict", "--reason", "--snaplen"] {
        assert!(options.contains(&format!("{{call={option}}}")), "{options}");
    }
}

#[test]
fn a_capture_runs_the_command_on_the_node_or_in_its_pod_and_fills_the_fifo() {
    let capture = |programs: &Programs, interface: &str, more: &[&str]| {
        let fifo = programs.path("fifo");
        let first = ["--capture", "--extcap-interface", interface, "--fifo", &fifo];
        let output = programs.run(&[&first, more].concat());
        (output.status.code(), fs::read_to_string(&fifo).unwrap_or_default())
    };
    // Stand-ins print what they are called with.
    let node = Programs::new(r#"printf '%s\n' "$*""#, "exit 1");
    let here = capture(&node, "penstock:here:shop/web", &["--extcap-capture-filter", "tcp port 80", "--verdict", ""]);
    assert_eq!(here, (Some(0), "capture -o - --pod shop/web --filter tcp port 80\n".to_owned()));
    let cluster = Programs::new("exit 1", &format!(r#"case "$3" in get) {CLUSTER};; *) printf '%s\n' "$*";; esac"#));
    let options = ["--pod", "shop/db", "--verdict", "deny", "--extcap-capture-filter", "less 0"];
    let there = capture(&cluster, "penstock:node:node-2", &options);
    let expected = "-n kube-system exec -i penstock-x -- penstock capture --end-with-input -o - --pod shop/db \
                    --verdict deny --program 4,128 0 0 0,37 0 1 0,6 0 0 0,6 0 0 262144\n";
    assert_eq!(there, (Some(0), expected.to_owned()));
    assert_eq!(capture(&cluster, "penstock:node:node-9", &[]).0, Some(1), "no such node");
    assert_eq!(capture(&cluster, "eth0", &[]).0, Some(1), "not an interface of Penstock");
}

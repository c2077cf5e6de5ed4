//! Mutation test: breaks one clause at a time in the code under test; the tests in
//! `tests/policy` must then fail.
//!
//! Run by `cargo test -p penstock-policy --test mutation -- --ignored --nocapture`; it takes some minutes, since each
//! mutant is built. It builds a copy of the policy code below the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A mutation: a line of the code and its replacement.
struct Mutation {
    breaks: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn mutation(breaks: &'static str, file: &'static str, from: &'static str, to: &'static str) -> Mutation {
    Mutation { breaks, file, from, to }
}

const POLICY: &str = "dataplane/src/policy/mod.rs";
const ROWS: &str = "dataplane/src/policy/rows.rs";
const PORTS: &str = "dataplane/src/policy/ports.rs";
const BLOCKS: &str = "dataplane/src/policy/blocks.rs";
const TABLE: &str = "dataplane/src/policy/table.rs";
const COMPILE: &str = "control/policy/src/compile/mod.rs";
const MODEL: &str = "control/policy/src/model/mod.rs";
const STATE: &str = "control/policy/src/state/mod.rs";
const PODS: &str = "control/policy/src/state/pods.rs";
const TABLES: &str = "control/policy/src/render/tables/mod.rs";
const LINKED: &str = "control/policy/src/render/tables/linked.rs";

const MUTATIONS: &[Mutation] = &[
    mutation(
        "1: ingress is evaluated by the destination's egress rules",
        POLICY,
        "self.evaluate_direction(dst, Direction::Ingress, src, flow.src, flow)",
        "self.evaluate_direction(dst, Direction::Egress, src, flow.src, flow)",
    ),
    mutation(
        "2: a policy isolates in both directions",
        COMPILE,
        "let Some(rules) = rules_of(policy, direction) else { continue };",
        "let rules = rules_of(policy, direction).unwrap_or_default();",
    ),
    mutation(
        "2: rules after the first 64 do not count",
        LINKED,
        "self.rules.iter().map(spec).collect();",
        "self.rules.iter().map(spec).enumerate().map(|(number, mut spec)| { if number >= 64 { spec.ports = penstock_dataplane::policy::PortSpec::AnyOf(Vec::new()); } spec }).collect();",
    ),
    mutation(
        "3: peers of one rule combine with ports of another",
        ROWS,
        "let common = (from(a) | from(b)) & c.bits;",
        "let common = if from(a) | from(b) != 0 { c.bits } else { 0 };",
    ),
    mutation(
        "3: a protocol without ports is looked up as TCP",
        PORTS,
        "_ => return self.any,",
        "_ => &self.tables[0],",
    ),
    mutation(
        "4: a podSelector finds pods of every namespace",
        COMPILE,
        "Peer::Pods(pods) => Some(PeerSet::InNamespace { namespace: namespace.to_owned(), pods: pods.clone(), port }),",
        "Peer::Pods(pods) => Some(PeerSet::InNamespaces { namespaces: Selector::default(), pods: pods.clone(), port }),",
    ),
    mutation(
        "4: of a peer with both selectors, only that of namespaces counts",
        COMPILE,
        "Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: pods.clone(), port })",
        "Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: Selector { requirements: pods.requirements[..0].to_vec() }, port })",
    ),
    mutation(
        "4: an except cuts out of every block of its rule",
        LINKED,
        "blocks: blocks.iter().map(block).collect() }",
        "blocks: blocks.iter().map(|one| AddressBlock { except: blocks.iter().flat_map(|other| other.except.clone()).collect(), ..block(one) }).collect() }",
    ),
    mutation("4: excepts do not count", LINKED, "except: block.except.clone() };", "except: Vec::new() };"),
    mutation(
        "4: a block does not match a pod's address",
        TABLE,
        "self.blocks.row(peer), self.ports.row(protocol, port))",
        "if identity == 0 { self.blocks.row(peer) } else { 0 }, self.ports.row(protocol, port))",
    ),
    mutation("4: ::/0 holds IPv4, too", BLOCKS, "chain([&MAPPED]).filter", "chain([]).filter"),
    mutation("4: NotIn asks for the key", MODEL, "value.is_none_or(|value|", "value.is_some_and(|value|"),
    mutation(
        "4: DoesNotExist is Exists",
        MODEL,
        "LabelOperator::DoesNotExist => value.is_none()",
        "LabelOperator::DoesNotExist => value.is_some()",
    ),
    mutation(
        "5: endPort is not included",
        COMPILE,
        "vec![range(port.protocol, *first, *last)]",
        "vec![range(port.protocol, *first, if first < last { *last - 1 } else { *last })]",
    ),
    mutation(
        "5: UDP is looked up as TCP",
        PORTS,
        "Protocol::UDP => &self.tables[1]",
        "Protocol::UDP => &self.tables[0]",
    ),
    mutation(
        "5: a name on ingress is any pod's",
        COMPILE,
        "let named = state.pod(pod).into_iter().flat_map(|pod| &pod.ports);",
        "let named = state.pods().flat_map(|(_, pod)| &pod.ports);",
    ),
    mutation(
        "5: a name on egress is any pod's",
        COMPILE,
        "pods => peer_set(namespace, pods, Some(port.clone())),",
        "pods => peer_set(namespace, pods, None),",
    ),
    mutation(
        "5: a name has no protocol",
        COMPILE,
        "own.name == *name && own.protocol == port.protocol",
        "own.name == *name",
    ),
    mutation(
        "5: beside every peer, a name is any number of anybody",
        COMPILE,
        "Peers::Every => vec![PeerSet::Port(port)],",
        "Peers::Every => return EffectiveRule { source: source.clone(), peers: EffectivePeers::Every, ports },",
    ),
    mutation("7: a host-network pod is found", STATE, "!pod.host_network && !pod.finished", "!pod.finished"),
    mutation("7: a finished pod is found", STATE, "!pod.host_network && !pod.finished", "!pod.host_network"),
    mutation(
        "7: of two pods with one address the wrong one has it",
        STATE,
        "if outranks(&next, &best) { next } else { best }",
        "if outranks(&next, &best) { best } else { next }",
    ),
    mutation("7: a namespace that is not known is found", PODS, "if namespace.labels.is_none() {", "if false {"),
    mutation("8: every node is exempt", POLICY, "(dst.is_node() && dst.node == src.node)))", "dst.is_node()))"),
    mutation("8: a pod is not exempt with itself", POLICY, "(src.endpoint == dst.endpoint || ", "(false || "),
    mutation(
        "10: only the first address of a pod counts",
        PODS,
        "if present { pod.addresses.clone() }",
        "if present { pod.addresses[..1].to_vec() }",
    ),
    mutation("11: a policy of v1beta1 isolates", COMPILE, "isolated |= policy.isolates;", "isolated = true;"),
    mutation(
        "11: the DefaultDeny annotation does not count",
        COMPILE,
        "direction == Direction::Ingress && state.is_denied_by_default(pod)",
        "false",
    ),
    mutation(
        "11: an empty list of peers is every peer",
        COMPILE,
        "if peers.is_empty() {\n        return None;",
        "if peers.is_empty() {\n        return Some(EffectivePeers::Every);",
    ),
    mutation(
        "11: cluster-wide, an allowed ingress does not overrule egress",
        POLICY,
        "(Denied, Allowed(rule)) => PolicyVerdict { egress: AllowedByPeer(rule), ingress },",
        "",
    ),
    mutation(
        "incremental: tables do not follow identities",
        TABLES,
        "in self.identities.take_changed() {",
        "in self.identities.take_changed().into_iter().take(0) {",
    ),
    mutation(
        "incremental: tables do not follow port names",
        TABLES,
        "pending.to_build.extend(self.by_name.get(name).into_iter().flatten());",
        "let _ = name;",
    ),
    mutation(
        "incremental: a pod's new labels do not count for policies that select it",
        PODS,
        "        self.reselect(number);\n",
        "        if !was || !is { self.reselect(number); }\n",
    ),
];

/// A copy of the parts under test as a workspace of its own.
struct Workspace {
    root: PathBuf,
}

/// Of the packet module, policy needs only addresses and flows, which need ICMP identifiers.
const PACKET: &str = "mod address;\nmod flow;\nmod icmp;\nmod transport;\npub use address::Address;\n\
    pub use flow::{Asker, Flow, FlowKey, Orientation, Protocol};\n";
const DATAPLANE: &str = "[package]\nname = \"penstock-dataplane\"\nversion = \"0.1.0\"\nedition.workspace = true\n\
    [dependencies]\nipnet.workspace = true\nrustc-hash.workspace = true\n\
    [dev-dependencies]\nproptest.workspace = true\n";

impl Workspace {
    fn new() -> Self {
        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutation");
        let workspace = Self { root };
        for part in
            ["dataplane/src/packet", "dataplane/src/policy", "control/policy/src", "control/policy/tests/policy"]
        {
            let _ = fs::remove_dir_all(workspace.root.join(part));
            copy(&original.join(part), &workspace.root.join(part));
        }
        let write =
            |file: &str, text: &str| fs::write(workspace.root.join(file), text).expect("below the target directory");
        let read = |file: &str| fs::read_to_string(original.join(file)).expect("a file of the project");
        write("dataplane/src/drop_reason.rs", &read("dataplane/src/drop_reason.rs"));
        write("dataplane/src/packet/mod.rs", PACKET);
        write(
            "dataplane/src/lib.rs",
            "mod drop_reason;\npub mod packet;\npub mod policy;\npub use drop_reason::DropReason;\n",
        );
        write("dataplane/Cargo.toml", DATAPLANE);
        write("control/policy/Cargo.toml", &read("control/policy/Cargo.toml"));
        write("Cargo.lock", &read("Cargo.lock"));
        let manifest = read("Cargo.toml");
        let members = manifest.lines().find(|line| line.starts_with("members")).expect("a workspace");
        write("Cargo.toml", &manifest.replace(members, "members = [\"dataplane\", \"control/policy\"]"));
        workspace
    }

    fn cargo(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO"));
        command.args(arguments).args(["--offline", "--quiet", "--package", "penstock-policy", "--test", "policy"]);
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", self.root.join("target"));
        command.output().expect("cargo runs: it runs this test")
    }

    /// Whether the suite passes. Panics if it cannot be built.
    fn passes(&self, what: &str) -> bool {
        let built = self.cargo(&["test", "--no-run"]);
        assert!(built.status.success(), "{what} does not build:\n{}", String::from_utf8_lossy(&built.stderr));
        self.cargo(&["test"]).status.success()
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("below the target directory");
    for entry in fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let path = entry.expect("a readable folder").path();
        let target = to.join(path.file_name().expect("an entry has a name"));
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).expect("below the target directory");
        }
    }
}

#[test]
fn every_mutated_line_occurs_exactly_once() {
    let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for mutation in MUTATIONS {
        let text = fs::read_to_string(original.join(mutation.file)).expect("a file of the project");
        assert_eq!(
            text.matches(mutation.from).count(),
            1,
            "{}: {} in {}",
            mutation.breaks,
            mutation.from,
            mutation.file
        );
    }
}

#[test]
#[ignore = "builds each broken version: some minutes"]
fn the_tests_fail_for_each_mutation() {
    let workspace = Workspace::new();
    assert!(workspace.passes("the unbroken code"), "the suite fails on the unbroken code");
    let mut missed = Vec::new();
    for mutation in MUTATIONS {
        let file = workspace.root.join(mutation.file);
        let text = fs::read_to_string(&file).expect("copied above");
        fs::write(&file, text.replacen(mutation.from, mutation.to, 1)).expect("below the target directory");
        let noticed = !workspace.passes(mutation.breaks);
        fs::write(&file, text).expect("below the target directory");
        println!("{} {}", if noticed { "noticed" } else { "MISSED " }, mutation.breaks);
        if !noticed {
            missed.push(mutation.breaks);
        }
    }
    println!("{} of {} noticed", MUTATIONS.len() - missed.len(), MUTATIONS.len());
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}

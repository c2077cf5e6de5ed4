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
const OWNERS: &str = "control/policy/src/state/owners.rs";
const STATE: &str = "control/policy/src/state/mod.rs";
const PODS: &str = "control/policy/src/state/pods.rs";
const TABLES: &str = "control/policy/src/render/tables/mod.rs";
const TIERS: &str = "dataplane/src/policy/tiers.rs";
const CLUSTER_POLICY: &str = "control/policy/src/model/cluster_policy.rs";
const CLUSTER_POLICIES: &str = "control/policy/src/state/cluster_policies.rs";
const OBJECTS: &str = "control/policy/src/state/objects.rs";
const ASIDE: &str = "control/policy/src/render/tables/aside.rs";
const LINKED: &str = "control/policy/src/render/tables/linked.rs";

const MUTATIONS: &[Mutation] = &[
    mutation(
        "1: ingress is evaluated by the destination's egress rules",
        POLICY,
        "self.evaluate_direction(dst, Direction::Ingress, src, flow.src, flow, NameTime::Never)",
        "self.evaluate_direction(dst, Direction::Egress, src, flow.src, flow, NameTime::Never)",
    ),
    mutation(
        "2: a policy isolates in both directions",
        COMPILE,
        "if rules_of(policy, direction).is_some() {",
        "if true {",
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
        "        (a | b) & c\n",
        "        if a | b != 0 { c } else { 0 }\n",
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
        "Some(PeerSet::InNamespace { namespace, pods: pods.clone(), port })",
        "{ drop(namespace); Some(PeerSet::InNamespaces { namespaces: Selector::default(), pods: pods.clone(), port }) }",
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
        "self.blocks.row(peer), self.ports.row(protocol, port)]",
        "if identity == 0 { self.blocks.row(peer) } else { 0 }, self.ports.row(protocol, port)]",
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
        "let own = state.pod(pod).into_iter().flat_map(|pod| &pod.ports);",
        "let own = state.pods().flat_map(|(_, pod)| &pod.ports);",
    ),
    mutation(
        "5: a name on egress is any pod's",
        COMPILE,
        "pods => peer_set(source, pods, Some(port.clone())),",
        "pods => peer_set(source, pods, None),",
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
        OWNERS,
        "if self.precedes(next, best) { next } else { best }",
        "if self.precedes(next, best) { best } else { next }",
    ),
    mutation(
        "a pod of another node has the address of one of this node",
        OWNERS,
        "(is_here, _) => is_here,",
        "(is_here, _) => !is_here,",
    ),
    mutation(
        "a Service's external address is for the Service though a pod has it",
        OWNERS,
        "service.external.iter().filter(|address| self.owner(address).is_none())",
        "service.external.iter()",
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
        "(Denied, Allowed(rule)) if self.is_of_network_policy(rule)",
        "(Denied, Allowed(rule)) if self.is_of_network_policy(rule) && self.endpoints.len() > 1_000",
    ),
    mutation(
        "tiers: the Admin tier is not first",
        TIERS,
        "first.filter(|rule| *rule < self.admin) {",
        "first.filter(|rule| *rule > self.admin) {",
    ),
    mutation(
        "tiers: Baseline rules stand before those of the Admin tier",
        COMPILE,
        "let mut all = of_cluster(&key.admin);",
        "let mut all = of_cluster(&key.baseline); all.extend(of_cluster(&key.admin));",
    ),
    mutation(
        "tiers: the Baseline tier decides for an isolated pod",
        COMPILE,
        "ClusterTier::Baseline if isolated => {}",
        "ClusterTier::Baseline if isolated && policies.is_empty() => {}",
    ),
    mutation(
        "tiers: priority does not count",
        CLUSTER_POLICY,
        "(self.tier, self.priority, self.name.as_str())",
        "(self.tier, 0, self.name.as_str())",
    ),
    mutation(
        "tiers: a higher priority number comes first",
        CLUSTER_POLICY,
        "(self.tier, self.priority, self.name.as_str())",
        "(self.tier, std::cmp::Reverse(self.priority), self.name.as_str())",
    ),
    mutation(
        "tiers: of equal priorities, the later name comes first",
        CLUSTER_POLICY,
        "(self.tier, self.priority, self.name.as_str())",
        "(self.tier, self.priority, std::cmp::Reverse(self.name.as_str()))",
    ),
    mutation(
        "tiers: a Pass of the Admin tier ends the evaluation",
        TIERS,
        "RuleAction::Pass => first = self.first_from(rows, peer, self.admin, given),",
        "RuleAction::Pass => return TierOutcome::Default,",
    ),
    mutation(
        "tiers: a Pass goes to the next rule of its own tier",
        TIERS,
        "RuleAction::Pass => first = self.first_from(rows, peer, self.admin, given),",
        "RuleAction::Pass => first = self.table.first_from(rows, rule + 1),",
    ),
    mutation(
        "tiers: a Pass is an Accept",
        TIERS,
        "RuleAction::Accept => return TierOutcome::Accepted(rule),\n                RuleAction::Deny => return TierOutcome::Denied(rule),\n                RuleAction::Pass => first = self.first_from(rows, peer, self.admin, given),",
        "RuleAction::Accept | RuleAction::Pass => return TierOutcome::Accepted(rule),\n                RuleAction::Deny => { first = None; let _ = first; return TierOutcome::Denied(rule) }",
    ),
    mutation(
        "tiers: a Pass of the Baseline tier denies",
        TIERS,
        "Some((rule, RuleAction::Deny)) => TierOutcome::Denied(rule),",
        "Some((rule, RuleAction::Deny | RuleAction::Pass)) => TierOutcome::Denied(rule),",
    ),
    mutation(
        "tiers: the rules of the tier that is passed are not masked",
        ROWS,
        "self.common_word(rows) & from(0, start)",
        "self.common_word(rows) & (from(0, start) | 1)",
    ),
    mutation(
        "tiers: a policy without rules for a direction touches it",
        COMPILE,
        "_ if cluster_rules_of(policy, direction).is_empty() => {}",
        "_ if cluster_rules_of(policy, direction).len() > 1_000 => {}",
    ),
    mutation(
        "tiers: NetworkPolicies that isolate for ingress hide the Baseline tier for egress",
        COMPILE,
        "isolated |= policy.isolates;\n            policies.push((number, revision));\n        }",
        "isolated |= policy.isolates;\n            policies.push((number, revision));\n        } else { isolated |= policy.isolates; }",
    ),
    mutation(
        "tiers: a Deny of everything denies nothing",
        COMPILE,
        "else { return Some(EffectivePeers::Every) };",
        "else { return if source.action() == crate::model::RuleAction::Deny { None } else { Some(EffectivePeers::Every) } };",
    ),
    mutation(
        "tiers: every tier spares the own node",
        POLICY,
        "if dst.is_node()\n            && let",
        "if dst.is_node() && src.is_node()\n            && let",
    ),
    mutation(
        "tiers: NetworkPolicy cuts a pod with an Admin rule off from its node",
        TIERS,
        "if self.is_isolated && own_node {",
        "if self.is_isolated && own_node && self.admin == 0 {",
    ),
    mutation(
        "tiers: the own node is spared where no NetworkPolicy isolates",
        TIERS,
        "if self.is_isolated && own_node {",
        "if own_node {",
    ),
    mutation(
        "tiers: a subject's namespaces do not count",
        CLUSTER_POLICIES,
        "namespaces.requirements.is_empty() || self",
        "namespaces.requirements.len() < 1_000 || self",
    ),
    mutation(
        "tiers: of a peer's networks only the first counts",
        COMPILE,
        "networks.iter().copied().map(block).collect()",
        "networks.iter().copied().take(1).map(block).collect()",
    ),
    mutation(
        "tiers: nodes are found by every address that is theirs",
        STATE,
        "record.status_addresses.iter().copied()",
        "record.addresses.iter().flatten().copied()",
    ),
    mutation("incremental: tables do not follow nodes", TABLES, "tables.extend(&self.by_nodes);", ""),
    mutation(
        "incremental: a pod's new labels do not count for ClusterNetworkPolicies",
        PODS,
        "        self.reselect_cluster_policies(number);\n",
        "        if !was || !is { self.reselect_cluster_policies(number); }\n",
    ),
    mutation(
        "incremental: a namespace's new labels do not count for ClusterNetworkPolicies",
        OBJECTS,
        "        self.reselect_namespace_policies(number);\n",
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
        "tables.extend(self.by_name.get(name).into_iter().flatten());",
        "let _ = name;",
    ),
    mutation(
        "aside: identities that change while another thread builds do not count",
        TABLES,
        "Stage::Building(all) => all.extend(changed),",
        "Stage::Building(_) => {}",
    ),
    mutation(
        "aside: a pod gets no newer tables after its turn",
        ASIDE,
        "        for pod in held {\n            self.assign_tables(state, pod, &mut pending);\n        }\n",
        "        drop(held);\n",
    ),
    mutation(
        "aside: a number is used again before its peer sets are released",
        TABLES,
        "        UnusedTable { number, linked: record.linked, table: record.table }",
        "        self.tables.free(number);\n        UnusedTable { number, linked: record.linked, table: record.table }",
    ),
    mutation(
        "aside: another pod of the same name keeps what the first had",
        TABLES,
        "if owner.as_ref() != Some(&self.endpoints[number].owner) {",
        "if owner.is_none() {",
    ),
    mutation(
        "aside: a new pod is open until its tables are built",
        TABLES,
        "unbuilt: EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], []))),",
        "unbuilt: EndpointPolicy::Open,",
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

impl Workspace {
    fn new() -> Self {
        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutation");
        let workspace = Self { root };
        for part in ["dataplane/src", "control/policy/src", "control/policy/tests/policy"] {
            let _ = fs::remove_dir_all(workspace.root.join(part));
            copy(&original.join(part), &workspace.root.join(part));
        }
        let write =
            |file: &str, text: &str| fs::write(workspace.root.join(file), text).expect("below the target directory");
        let read = |file: &str| fs::read_to_string(original.join(file)).expect("a file of the project");
        // Tests of the data plane itself are not built.
        let manifest = read("dataplane/Cargo.toml");
        let lines = manifest.lines().filter(|line| !line.contains("penstock-xdp-redirect"));
        write("dataplane/Cargo.toml", &lines.collect::<Vec<_>>().join("\n"));
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

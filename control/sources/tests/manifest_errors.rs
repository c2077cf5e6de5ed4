//! Every error in an object is reported with file, line, object and field.

use std::fs;
use std::path::Path;

use penstock_sources::convert::ConversionSettings;
use penstock_sources::manifest::{Options, UnknownFields, read_manifests, read_text};

/// Reads one text as a file and returns its errors without the directory's name.
fn errors(text: &str, options: &Options) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, text).unwrap();
    let prefix = format!("{}/", directory.path().display());
    match read_manifests(&[&file], options) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0.iter().map(|error| error.to_string().replace(&prefix, "")).collect(),
    }
}

/// The line of the text that is marked with `# !`.
fn marked_line(text: &str) -> usize {
    1 + text.lines().position(|line| line.ends_with("# !")).unwrap_or_else(|| panic!("no mark in {text}"))
}

/// Asserts the one error of a text: `a.yaml:MARKED LINE: object: rest`.
fn assert_error(text: &str, object: &str, rest: &str, options: &Options) {
    let found = errors(text, options);
    assert_eq!(found, [format!("a.yaml:{}: {object}{rest}", marked_line(text))], "{text}");
}

const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\n";

#[test]
fn a_policy_that_kubernetes_rejects_is_rejected_by_field() {
    for (spec, field, problem) in [
        (
            "ingress: [{from: [{ipBlock: {\n cidr: 10.0.0.0/33 # !\n}}]}]",
            "spec.ingress[0].from[0].ipBlock.cidr",
            "\"10.0.0.0/33\" is not a CIDR block: write ADDRESS/PREFIX, such as 10.0.0.0/8 or fd00::/8",
        ),
        (
            "ingress: [{from: [{ipBlock: {\n cidr: 10.0.0.1 # !\n}}]}]",
            "spec.ingress[0].from[0].ipBlock.cidr",
            "\"10.0.0.1\" is not a CIDR block: write ADDRESS/PREFIX, such as 10.0.0.0/8 or fd00::/8",
        ),
        (
            "ingress: [{from: [{ipBlock: {\n cidr: '::ffff:10.0.0.0/104' # !\n}}]}]",
            "spec.ingress[0].from[0].ipBlock.cidr",
            "\"::ffff:10.0.0.0/104\" is an IPv4-mapped IPv6 address: write it as IPv4",
        ),
        (
            "egress:\n- {}\n- to:\n  - podSelector: {}\n  - ipBlock:\n      cidr: 10.0.0.0/8\n      except:\n      - 10.1.0.0/16\n      - 11.0.0.0/16 # !\n",
            "spec.egress[1].to[1].ipBlock.except[1]",
            "11.0.0.0/16 is not strictly inside cidr 10.0.0.0/8: remove it, or name a smaller part of 10.0.0.0/8",
        ),
        (
            "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [\n 10.0.0.0/8 # !\n]}}]}]",
            "spec.ingress[0].from[0].ipBlock.except[0]",
            "10.0.0.0/8 is not strictly inside cidr 10.0.0.0/8: remove it, or name a smaller part of 10.0.0.0/8",
        ),
        (
            "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [\n 0.0.0.0/0 # !\n]}}]}]",
            "spec.ingress[0].from[0].ipBlock.except[0]",
            "0.0.0.0/0 is not strictly inside cidr 10.0.0.0/8: remove it, or name a smaller part of 10.0.0.0/8",
        ),
        (
            "ingress: [{from: [{ipBlock: {cidr: 'fd00::/8', except: [\n 10.0.0.0/8 # !\n]}}]}]",
            "spec.ingress[0].from[0].ipBlock.except[0]",
            "10.0.0.0/8 is not strictly inside cidr fd00::/8: remove it, or name a smaller part of fd00::/8",
        ),
        (
            "ingress:\n- ports:\n  - port: 443\n    endPort: 442 # !\n",
            "spec.ingress[0].ports[0].endPort",
            "442 is below port 443: use 443 to 65535",
        ),
        (
            "ingress:\n- ports:\n  - endPort: 442 # !\n",
            "spec.ingress[0].ports[0].endPort",
            "442 has no port to start from: set port to a number",
        ),
        (
            "ingress:\n- ports:\n  - port: http\n    endPort: 442 # !\n",
            "spec.ingress[0].ports[0].endPort",
            "442 is set with the named port \"http\": a range needs a number as its port",
        ),
        (
            "ingress:\n- ports:\n  - port: 443\n    endPort: 65536 # !\n",
            "spec.ingress[0].ports[0].endPort",
            "65536 is not a port number: use 1 to 65535",
        ),
        (
            "ingress:\n- ports:\n  - port: 0 # !\n",
            "spec.ingress[0].ports[0].port",
            "0 is not a port number: use 1 to 65535",
        ),
        (
            "ingress:\n- ports:\n  - port: 70000 # !\n",
            "spec.ingress[0].ports[0].port",
            "70000 is not a port number: use 1 to 65535",
        ),
        (
            "ingress:\n- ports:\n  - port: -1 # !\n",
            "spec.ingress[0].ports[0].port",
            "-1 is not a port number: use 1 to 65535",
        ),
        (
            "ingress:\n- ports:\n  - port: '80' # !\n",
            "spec.ingress[0].ports[0].port",
            "\"80\" is not a valid port name: use at most 15 of a-z, 0-9 and single '-', with at least one letter; a port's number is written without quotes",
        ),
        (
            "ingress:\n- ports:\n  - protocol: tcp # !\n",
            "spec.ingress[0].ports[0].protocol",
            "\"tcp\" is not a port protocol: use TCP, UDP or SCTP",
        ),
        (
            "ingress:\n- ports:\n  - protocol: ICMP # !\n",
            "spec.ingress[0].ports[0].protocol",
            "\"ICMP\" is not a port protocol: use TCP, UDP or SCTP",
        ),
        (
            "ingress:\n- from:\n  - {} # !\n",
            "spec.ingress[0].from[0]",
            "is an empty peer: set podSelector, namespaceSelector or ipBlock",
        ),
        (
            "egress:\n- to:\n  - podSelector: null # !\n",
            "spec.egress[0].to[0]",
            "is an empty peer: set podSelector, namespaceSelector or ipBlock",
        ),
        (
            "ingress:\n- from:\n  - ipBlock: {cidr: 10.0.0.0/8} # !\n    podSelector: {}\n",
            "spec.ingress[0].from[0]",
            "has both ipBlock and podSelector: split them into two peers",
        ),
        (
            "ingress:\n- from:\n  - ipBlock: {cidr: 10.0.0.0/8} # !\n    namespaceSelector: {}\n",
            "spec.ingress[0].from[0]",
            "has both ipBlock and namespaceSelector: split them into two peers",
        ),
        (
            "podSelector:\n  matchExpressions:\n  - key: app\n    operator: Is # !\n    values: [a]\n",
            "spec.podSelector.matchExpressions[0].operator",
            "\"Is\" is not an operator: use In, NotIn, Exists or DoesNotExist",
        ),
        (
            "podSelector:\n  matchExpressions:\n  - key: app # !\n    operator: In\n",
            "spec.podSelector.matchExpressions[0].values",
            "operator In needs at least one value",
        ),
        (
            "podSelector:\n  matchExpressions:\n  - key: app\n    operator: NotIn\n    values: [] # !\n",
            "spec.podSelector.matchExpressions[0].values",
            "operator NotIn needs at least one value",
        ),
        (
            "podSelector:\n  matchExpressions:\n  - key: app\n    operator: Exists\n    values: [a] # !\n",
            "spec.podSelector.matchExpressions[0].values",
            "operator Exists takes no values: remove them, or use In or NotIn",
        ),
        (
            "podSelector:\n  matchExpressions:\n  - key: app\n    operator: DoesNotExist\n    values: [a] # !\n",
            "spec.podSelector.matchExpressions[0].values",
            "operator DoesNotExist takes no values: remove them, or use In or NotIn",
        ),
        (
            "ingress: [{from: [{namespaceSelector: {matchLabels: {\n a/b/c: x # !\n}}}]}]",
            "spec.ingress[0].from[0].namespaceSelector.matchLabels[a/b/c]",
            "\"a/b/c\" is not a valid label key: use [DNS-PREFIX/]NAME, NAME of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
        ),
        (
            "podSelector: {matchLabels: {\n app: a b # !\n}}",
            "spec.podSelector.matchLabels.app",
            "\"a b\" is not a valid label value: use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or nothing",
        ),
        (
            "policyTypes:\n- Ingress\n- ingress # !\n",
            "spec.policyTypes[1]",
            "\"ingress\" is not a policy type: use Ingress or Egress",
        ),
        // Rules of a direction that the policy does not isolate must be valid, too.
        (
            "policyTypes: [Egress]\ningress: [{from: [\n {} # !\n]}]",
            "spec.ingress[0].from[0]",
            "is an empty peer: set podSelector, namespaceSelector or ipBlock",
        ),
        (
            "ingress:\n- from:\n  - podSelecter: {} # !\n",
            "spec.ingress[0].from[0].podSelecter",
            "is not a field that this version knows: correct its spelling, or remove it",
        ),
        (
            "ingress:\n- form: [] # !\n",
            "spec.ingress[0].form",
            "is not a field that this version knows: correct its spelling, or remove it",
        ),
        ("ingress: # !\n  from: []\n", "spec.ingress", "invalid type: map, expected a sequence"),
        (
            "ingress:\n- ports:\n  - port: 1.5 # !\n",
            "spec.ingress[0].ports[0].port",
            "invalid type: floating point `1.5`, expected IntOrString",
        ),
    ] {
        let indented: String = spec.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!("{POLICY}spec:\n{indented}");
        let found = errors(&text, &Options::default());
        let line = marked_line(&text);
        let [found] = &found[..] else { panic!("{text}: {found:?}") };
        let expected = format!("a.yaml:{line}: NetworkPolicy shop/web: {field}: ");
        let Some(found_problem) = found.strip_prefix(&expected) else {
            panic!("{text}\nexpected {expected}\nfound    {found}")
        };
        assert!(found_problem == problem, "{text}\n{found_problem}\n{problem}");
    }
}

#[test]
fn other_invalid_objects_are_rejected_with_line_and_field() {
    for (text, object, rest) in [
        (
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: Shop # !\n",
            "Namespace Shop",
            "metadata.name: \"Shop\" is not a valid name: use at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {} # !\n",
            "Namespace without a name",
            "metadata.name: is missing: use at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  namespace: a.b # !\n",
            "Pod a.b/a",
            "metadata.namespace: \"a.b\" is not a valid name: use at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  labels:\n    app: -x # !\n",
            "Pod default/a",
            "metadata.labels.app: \"-x\" is not a valid label value: use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or nothing",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nstatus:\n  podIP: 10.0.0 # !\n",
            "Pod default/a",
            "status.podIP: \"10.0.0\" is not an IP address: write it as 10.0.0.1 or fd00::1",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nstatus:\n  podIPs:\n  - ip: 10.0.0.1\n  - ip: ::ffff:10.0.0.1 # !\n",
            "Pod default/a",
            "status.podIPs[1].ip: \"::ffff:10.0.0.1\" is an IPv4-mapped IPv6 address: write it as IPv4",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nstatus:\n  podIP: 127.0.0.1 # !\n",
            "Pod default/a",
            "status.podIP: 127.0.0.1 cannot be the address of a pod or node: use a unicast address that is not loopback",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: c\n    ports:\n    - containerPort: 0 # !\n",
            "Pod default/a",
            "spec.containers[0].ports[0].containerPort: 0 is not a port number: use 1 to 65535",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: c\n    ports:\n    - containerPort: 80\n      protocol: HTTP # !\n",
            "Pod default/a",
            "spec.containers[0].ports[0].protocol: \"HTTP\" is not a port protocol: use TCP, UDP or SCTP",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  hostNetwork: perhaps # !\n",
            "Pod default/a",
            "spec.hostNetwork: invalid type: string \"perhaps\", expected a boolean",
        ),
        (
            "apiVersion: v1\nkind: Node\nmetadata: {name: n}\nstatus:\n  addresses:\n  - type: Hostname\n    address: n\n  - type: InternalIP\n    address: n # !\n",
            "Node n",
            "status.addresses[1].address: \"n\" is not an IP address: write it as 10.0.0.1 or fd00::1",
        ),
        (
            "apiVersion: v1beta3 # !\nkind: Pod\nmetadata: {name: a}\n",
            "Pod default/a",
            "apiVersion: Pod of apiVersion v1beta3 is not supported: use v1",
        ),
        (
            "apiVersion: networking.k8s.io/v1beta1 # !\nkind: NetworkPolicy\nmetadata: {name: a}\n",
            "NetworkPolicy default/a",
            "apiVersion: NetworkPolicy of apiVersion networking.k8s.io/v1beta1 is not supported: use networking.k8s.io/v1",
        ),
        (
            "apiVersion: extensions/v1beta1 # !\nkind: NetworkPolicy\nmetadata: {name: a}\n",
            "NetworkPolicy default/a",
            "apiVersion: NetworkPolicy of apiVersion extensions/v1beta1 is not supported: use networking.k8s.io/v1, or the v1beta1 setting with its own meaning",
        ),
        (
            "# text\nkind: Pod # !\nmetadata: {name: a}\n",
            "Pod default/a",
            "is not a Kubernetes object: write a mapping with apiVersion and kind",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Pod\n  metadata:\n    name: A # !\n",
            "Pod default/A",
            "metadata.name: \"A\" is not a valid name: use at most 253 of a-z, 0-9, '-' and '.', with a letter or digit at both ends of each part",
        ),
        (
            "apiVersion: v1\nkind: PodList\nitems: # !\n  a: b\n",
            "PodList without a name",
            "items: is not a list of objects",
        ),
    ] {
        assert_error(text, &format!("{object}: "), rest, &Options::default());
    }
    let found = errors("- a\n", &Options::default());
    assert_eq!(found, ["a.yaml:1: is not a Kubernetes object: write a mapping with apiVersion and kind"]);
    let found = errors("a: 1\n b: 2\n", &Options::default());
    assert!(found[0].starts_with("a.yaml:2: is not valid YAML or JSON: "), "{found:?}");
}

#[test]
fn v1beta1_rejects_fields_of_v1() {
    let options = Options {
        settings: ConversionSettings { v1beta1: true, ..ConversionSettings::default() },
        ..Options::default()
    };
    let policy = "apiVersion: extensions/v1beta1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec:\n";
    let not_in = "is not part of extensions/v1beta1: write the policy as networking.k8s.io/v1";
    for (spec, field, problem) in [
        ("  egress: [] # !\n", "spec.egress", not_in),
        ("  policyTypes: [Ingress] # !\n", "spec.policyTypes", not_in),
        ("  ingress:\n  - from:\n    - ipBlock: {cidr: 10.0.0.0/8} # !\n", "spec.ingress[0].from[0].ipBlock", not_in),
        ("  ingress:\n  - ports:\n    - port: 1\n      endPort: 2 # !\n", "spec.ingress[0].ports[0].endPort", not_in),
        ("  ingress:\n  - ports:\n    - protocol: SCTP # !\n", "spec.ingress[0].ports[0].protocol", not_in),
        (
            "  ingress:\n  - from:\n    - podSelector: {} # !\n      namespaceSelector: {}\n",
            "spec.ingress[0].from[0]",
            "has podSelector beside namespaceSelector: extensions/v1beta1 takes exactly one, networking.k8s.io/v1 both",
        ),
    ] {
        assert_error(&format!("{policy}{spec}"), "NetworkPolicy shop/web: ", &format!("{field}: {problem}"), &options);
    }
    let annotated = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n  annotations:\n    net.beta.kubernetes.io/network-policy: '{\"ingress\": {\"isolation\": \"Deny\"}}' # !\n";
    let found = errors(annotated, &options);
    let start = "a.yaml:6: Namespace shop: metadata.annotations[net.beta.kubernetes.io/network-policy]: is not the isolation that v1beta1 defines (unknown variant `Deny`";
    assert!(found.len() == 1 && found[0].starts_with(start), "{found:?}");
    assert!(errors(annotated, &Options::default()).is_empty(), "without the setting it is only an annotation");
}

#[test]
fn all_errors_of_all_objects_are_reported_together() {
    let text = format!(
        "{POLICY}spec: {{policyTypes: [x]}}\n---\na: 1\n---\napiVersion: v1\nkind: Pod\nmetadata: {{name: X}}\n"
    );
    assert_eq!(errors(&text, &Options::default()).len(), 3);
}

#[test]
fn conflicting_objects_are_reported_with_both_locations() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    write(
        "a.yaml",
        "# comment\napiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: shop}\nstatus: {podIP: 10.0.0.1}\n",
    );
    write(
        "b.json",
        r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b", "namespace": "web"}, "status": {"podIP": "10.0.0.1"}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "shop"}}
    ]}"#,
    );
    let found = read_manifests(&[directory.path()], &Options::default()).unwrap_err().to_string();
    let found = found.replace(&format!("{}/", directory.path().display()), "");
    assert_eq!(
        found.lines().collect::<Vec<_>>(),
        [
            "b.json:2: Pod web/b: address 10.0.0.1 is also that of Pod shop/a at a.yaml:2: give each pod its own",
            "b.json:3: Pod shop/a: is defined twice, also at a.yaml:2: remove one, or rename it",
        ]
    );
}

#[test]
fn addresses_may_repeat_where_policy_ignores_them() {
    let pod = |name: &str, spec: &str, phase: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\nstatus: {{podIP: 10.0.0.1, phase: {phase}}}\n"
        )
    };
    let text = pod("a", "", "Running")
        + &pod("b", "", "Succeeded")
        + &pod("c", "", "Failed")
        + &pod("d", "hostNetwork: true", "Running")
        + &pod("e", "hostNetwork: true", "Running");
    assert_eq!(errors(&text, &Options::default()), [""; 0]);
    assert_eq!(errors(&(text + &pod("f", "", "Pending")), &Options::default()).len(), 1);
}

#[test]
fn missing_paths_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let found = read_manifests(&[directory.path()], &Options::default()).unwrap_err().to_string();
    let found_problem = "has no manifest: name a directory with *.yaml, *.yml or *.json files";
    assert_eq!(found, format!("{}: {found_problem}", directory.path().display()));
    let missing = directory.path().join("missing.yaml");
    let found = read_manifests(&[&missing], &Options::default()).unwrap_err().to_string();
    assert_eq!(found, format!("{}: cannot be read: No such file or directory (os error 2)", missing.display()));
    fs::write(&missing, [0xff, 0xfe, 0x00]).unwrap();
    let found = read_manifests(&[&missing], &Options::default()).unwrap_err().to_string();
    assert!(found.contains("cannot be read") && !found.contains('\n'), "{found}");
}

#[test]
fn unknown_fields_without_effect_are_noted() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, lables: {}}\nspec:\n  containers:\n  - name: c\n    imagine: x\n";
    fs::write(&file, format!("{pod}---\n{POLICY}spec:\n  ingress:\n  - form: []\n")).unwrap();
    let options = Options { unknown_fields: UnknownFields::Note, ..Options::default() };
    let read = read_manifests(&[&file], &options).unwrap();
    let noted = read.documents.iter().flat_map(|document| {
        document.unknown_fields.iter().map(|field| (field.to_string(), document.origin_of(field).line.unwrap()))
    });
    let expected = [("metadata.lables", 3), ("spec.containers[0].imagine", 7), ("spec.ingress[0].form", 14)];
    assert_eq!(noted.collect::<Vec<_>>(), expected.map(|(field, line)| (field.to_owned(), line)));
}

/// Left out, each would take an object away that is enforced.
#[test]
fn a_misspelt_kind_or_version_is_an_error() {
    let read = |version: &str, kind: &str| {
        let text =
            format!("{{apiVersion: '{version}', kind: '{kind}', metadata: {{name: x}}, spec: {{podSelector: {{}}}}}}");
        read_text(Path::new("a.yaml"), &text, &Options::default())
    };
    let v1 = "networking.k8s.io/v1";
    for (version, kind) in [
        (v1, "NetworkPolcy"),
        (v1, "NetworkPolicies"),
        (v1, "networkpolicy"),
        (v1, "NetworkPolicy "),
        (v1, "Policy"),
        (v1, "NetworkPolicyLst"),
        ("networking.k8s.oi/v1", "NetworkPolicy"),
        ("networking.k8s.oi/v1", "NetworkPolcy"),
        ("networking/v1", "NetworkPolicy"),
        ("networking.k8s.io/v2", "NetworkPolicy"),
        ("networking.k8s.io", "NetworkPolicy"),
        ("v1", "NetworkPolicy"),
        ("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicys"),
        ("policy.networking.k8s.io/v1alpha2", "Policy"),
        ("policy.networking.k8s.io/v1alpha9", "ClusterNetworkPolicy"),
        ("v1", "pod"),
        ("v1", "Pods"),
        ("core/v1", "Pod"),
        ("apps/v1", "Pod"),
        ("v2", "Pod"),
        ("v1", "Namspace"),
        ("v1", "namespace"),
        ("v1", "Nod"),
        ("v1", "Lst"),
        ("discovery.k8s.io/v1", "EndpointSlices"),
    ] {
        let errors = read(version, kind).expect_err(kind).to_string();
        assert!(errors.starts_with("a.yaml:1: ") && !errors.contains('\n'), "{version} {kind}: {errors}");
    }
    for (version, kind) in [
        (v1, "Ingress"),
        (v1, "IngressList"),
        (v1, "IngressClass"),
        ("batch/v1", "Job"),
        ("rbac.authorization.k8s.io/v1", "Role"),
        ("v1", "Secret"),
        ("v1", "ServiceAccount"),
        ("apps/v1", "Deployment"),
        ("example.org/v1", "Pool"),
        ("serving.knative.dev/v1", "Service"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("projectcalico.org/v3", "StagedNetworkPolicy"),
    ] {
        let read = read(version, kind).unwrap_or_else(|errors| panic!("{errors}"));
        assert_eq!((read.documents.len(), read.ignored.len()), (0, 1), "{version} {kind}");
    }
}

/// A label that nobody reads is a pod that its policy does not select.
#[test]
fn a_misspelt_field_of_metadata_is_an_error() {
    for (text, field) in [
        ("{apiVersion: v1, kind: Pod, metadata: {name: x, label: {a: b}}}", "metadata.label"),
        ("{apiVersion: v1, kind: Namespace, metadata: {name: x, Labels: {a: b}}}", "metadata.Labels"),
        ("{apiVersion: v1, kind: Pod, metadata: {name: x}, metdata: {labels: {a: b}}}", "metdata"),
        ("{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: x}, sepc: {}}", "sepc"),
    ] {
        let errors = read_text(Path::new("a.yaml"), text, &Options::default()).expect_err(text).to_string();
        assert!(errors.contains(&format!(": {field}: is not a field")), "{errors}");
    }
    let newer = "{apiVersion: v1, kind: Pod, metadata: {name: x}, spec: {novel: 1}, status: {novel: 1}}";
    assert!(read_text(Path::new("a.yaml"), newer, &Options::default()).is_ok(), "of a newer API");
    let twice = "{apiVersion: v1, kind: Namespace, metadata: {name: x, name: y}}";
    assert!(read_text(Path::new("a.yaml"), twice, &Options::default()).is_err());
}

//! Every form of manifests, and the objects read from them.

use std::fs;
use std::net::IpAddr;

use penstock_policy::model::{
    IpBlock, LabelOperator, NamedPort, NetworkPolicy, Object, Peer, Peers, PolicyPort, PolicyPorts, PortMatch,
    PortProtocol, Requirement, Rule, Selector,
};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::manifest::{Manifests, Options, read_manifests, read_text};

fn read_as(name: &str, text: &str, settings: ConversionSettings) -> Manifests {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(name);
    fs::write(&file, text).unwrap();
    read_manifests(&[&file], &Options { settings, ..Options::default() }).unwrap()
}

fn objects(text: &str) -> Vec<Object> {
    objects_with(text, ConversionSettings::default())
}

fn objects_with(text: &str, settings: ConversionSettings) -> Vec<Object> {
    read_as("a.yaml", text, settings).documents.into_iter().map(|document| document.object).collect()
}

fn policy(spec: &str) -> NetworkPolicy {
    policy_of("networking.k8s.io/v1", spec)
}

fn policy_of(version: &str, spec: &str) -> NetworkPolicy {
    let text = format!("{{apiVersion: {version}, kind: NetworkPolicy, metadata: {{name: p}}, spec: {spec}}}");
    match &objects_with(&text, ConversionSettings { v1beta1: true, ..ConversionSettings::default() })[..] {
        [Object::NetworkPolicy(policy)] => policy.clone(),
        other => panic!("{other:?}"),
    }
}

fn names(manifests: &Manifests) -> Vec<String> {
    manifests.documents.iter().map(|document| document.object.reference().to_string()).collect()
}

const EVERYTHING: Rule = Rule { peers: Peers::Every, ports: PolicyPorts::Every };

#[test]
fn all_forms_of_a_file_hold_the_same_objects() {
    let pod = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}"#;
    let namespace = r#"{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}"#;
    let list = format!(r#"{{"apiVersion": "v1", "kind": "List", "items": [{pod}, {namespace}]}}"#);
    for (name, text) in [
        ("documents.yaml", format!("---\n{pod}\n---\n# nothing\n---\n{namespace}\n...\n")),
        ("block.yml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n---\nkind: Namespace\napiVersion: v1\nmetadata: {name: shop}\n".to_owned()),
        ("list.json", list.clone()),
        ("tabs.json", list.replace(' ', "\t\n")),
        ("minified.json", list.replace(' ', "")),
        ("list.yaml", format!("apiVersion: v1\nkind: List\nmetadata: {{}}\nitems:\n- {pod}\n- {namespace}\n")),
        ("one-after-the-other.json", format!("{pod}\n{namespace}")),
        ("list-of-lists.yaml", format!("{{apiVersion: v1, kind: List, items: [{list}]}}")),
        ("typed-lists.yaml", "apiVersion: v1\nkind: PodList\nitems: [{metadata: {name: a}}]\n---\napiVersion: v1\nkind: NamespaceList\nitems:\n- metadata: {name: shop}\n".to_owned()),
        ("byte-order-mark.yaml", format!("\u{feff}{list}")),
    ] {
        let read = read_as(name, &text, ConversionSettings::default());
        assert_eq!(names(&read), ["Pod default/a", "Namespace shop"], "{name}");
        assert!(read.ignored.is_empty());
    }
    assert!(objects("").is_empty());
    assert!(objects("{apiVersion: v1, kind: PodList, items: null}").is_empty());
}

#[test]
fn directories_and_files_are_read_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let pod = |name: &str| format!("{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}}}");
    for (file, name) in [("b.yaml", "b"), ("a.json", "a"), ("c.yml", "c"), ("d.txt", "d"), (".e.yaml", "e")] {
        fs::write(directory.path().join(file), pod(name)).unwrap();
    }
    let single = directory.path().join("d.txt");
    let read = read_manifests(&[single.as_path(), directory.path()], &Options::default()).unwrap();
    assert_eq!(names(&read), ["Pod default/d", "Pod default/a", "Pod default/b", "Pod default/c"]);
}

#[test]
fn other_kinds_are_skipped_and_reported() {
    let text = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: web, namespace: shop}}
- {apiVersion: projectcalico.org/v3, kind: GlobalNetworkSet, metadata: {name: other, namespace: shop}}
- {apiVersion: projectcalico.org/v3, kind: StagedNetworkPolicy, metadata: {name: later, namespace: shop}}
- {apiVersion: cilium.io/v2, kind: CiliumNetworkPolicyList, items: []}
- {apiVersion: apps/v1, kind: ReplicaSetList, items: []}
";
    let read = read_as("a.yaml", text, ConversionSettings::default());
    assert!(read.documents.is_empty());
    let ignored: Vec<_> = read.ignored.iter().map(|i| (i.origin.line.unwrap(), i.object.as_str())).collect();
    let expected = [
        (2, "Deployment shop/web"),
        (9, "ConfigMap shop/web"),
        (10, "GlobalNetworkSet shop/other"),
        (11, "StagedNetworkPolicy shop/later"),
        (12, "CiliumNetworkPolicyList without a name"),
        (13, "ReplicaSetList without a name"),
    ];
    assert_eq!(ignored, expected);
}

#[test]
fn a_namespace_has_its_name_as_a_label() {
    let [Object::Namespace(plain), Object::Namespace(own)] = &objects(
        "{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {a: b}}}\n---\n\
         {apiVersion: v1, kind: Namespace, metadata: {name: web, labels: {kubernetes.io/metadata.name: other}}}\n",
    )[..] else {
        panic!()
    };
    let labels: Vec<_> = plain.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(labels, [("a", "b"), ("kubernetes.io/metadata.name", "shop")]);
    assert_eq!(own.labels["kubernetes.io/metadata.name"], "web", "no namespace has the name of another");
}

#[test]
fn the_v1beta1_annotation_isolates_only_with_its_setting() {
    let namespace = |annotation: &str| {
        format!(
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n  annotations:\n    net.beta.kubernetes.io/network-policy: |\n      {annotation}\n"
        )
    };
    let isolates = |annotation: &str, v1beta1| match &objects_with(
        &namespace(annotation),
        ConversionSettings { v1beta1, ..ConversionSettings::default() },
    )[..]
    {
        [Object::Namespace(namespace)] => namespace.default_deny_ingress,
        other => panic!("{other:?}"),
    };
    let deny = "{\n        \"ingress\": {\n          \"isolation\": \"DefaultDeny\"\n        }\n      }";
    assert!(isolates(deny, true));
    assert!(!isolates(deny, false));
    for other in ["{}", "{\"ingress\": {}}", "{\"ingress\": null}", "{\"ingress\": {\"isolation\": null}}"] {
        assert!(!isolates(other, true), "{other}");
    }
}

#[test]
fn a_node_has_its_internal_and_external_addresses() {
    let text = "{apiVersion: v1, kind: Node, metadata: {name: n}, status: {addresses: [
        {type: Hostname, address: n}, {type: InternalIP, address: 192.0.2.1}, {type: ExternalIP, address: '2001:db8::1'},
        {type: InternalIP, address: 192.0.2.1}, {type: InternalDNS, address: n.example}]}}";
    let [Object::Node(node)] = &objects(text)[..] else { panic!() };
    assert_eq!(node.name, "n");
    assert_eq!(node.addresses, ["192.0.2.1", "2001:db8::1"].map(|a| a.parse::<IpAddr>().unwrap()));
}

#[test]
fn a_pod_keeps_only_what_policy_needs() {
    let text = "
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web}}
spec:
  nodeName: n1
  initContainers:
  - {name: once, ports: [{name: once, containerPort: 1}]}
  - {name: sidecar, restartPolicy: Always, ports: [{name: metrics, containerPort: 9090}]}
  containers:
  - name: a
    ports:
    - {name: http, containerPort: 8080}
    - {containerPort: 7}
    - {name: dns, containerPort: 53, protocol: UDP}
  - name: b
    ports: [{name: http, containerPort: 8081}, {name: dns, containerPort: 5353, protocol: TCP}]
status: {phase: Running, podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}, {ip: 'fd00::1'}]}
";
    let [Object::Pod(pod)] = &objects(text)[..] else { panic!() };
    assert_eq!(pod.key.to_string(), "shop/web-1");
    assert_eq!(pod.labels["app"], "web");
    assert_eq!(pod.node.as_deref(), Some("n1"));
    assert_eq!(pod.addresses, ["10.1.0.1", "fd00::1"].map(|a| a.parse::<IpAddr>().unwrap()));
    assert!(!pod.host_network && !pod.finished);
    let port = |name: &str, protocol, number| NamedPort { name: name.to_owned(), protocol, number };
    let expected = [
        port("http", PortProtocol::Tcp, 8080),
        port("dns", PortProtocol::Udp, 53),
        port("dns", PortProtocol::Tcp, 5353),
        port("metrics", PortProtocol::Tcp, 9090),
    ];
    assert_eq!(pod.ports, expected, "the first of a name and protocol counts; an init container that ends has none");
}

#[test]
fn host_network_and_finished_pods_are_marked() {
    for (fields, host_network, finished, addresses) in [
        ("status: {podIP: 10.0.0.1}", false, false, 1),
        ("status: {phase: Pending}", false, false, 0),
        ("spec: {hostNetwork: true}, status: {podIP: 192.0.2.1}", true, false, 1),
        ("status: {phase: Succeeded, podIP: 10.0.0.1}", false, true, 1),
        ("status: {phase: Failed}", false, true, 0),
        ("status: {phase: Unknown}", false, false, 0),
        ("spec: {nodeName: ''}", false, false, 0),
    ] {
        let text = format!("{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, {fields}}}");
        let [Object::Pod(pod)] = &objects(&text)[..] else { panic!() };
        assert_eq!(
            (pod.host_network, pod.finished, pod.addresses.len()),
            (host_network, finished, addresses),
            "{fields}"
        );
        assert_eq!(pod.node, None);
    }
}

#[test]
fn absent_policy_types_default_by_the_rules_present() {
    let isolation = |spec: &str| {
        let policy = policy(spec);
        (policy.ingress.map(|rules| rules.len()), policy.egress.map(|rules| rules.len()))
    };
    for (spec, ingress, egress) in [
        ("{podSelector: {}}", Some(0), None),
        ("{}", Some(0), None),
        ("null", Some(0), None),
        ("{ingress: [{}]}", Some(1), None),
        ("{egress: [{}]}", Some(0), Some(1)),
        ("{egress: []}", Some(0), None),
        ("{policyTypes: [], egress: [{}, {}]}", Some(0), Some(2)),
        ("{policyTypes: [Ingress], egress: [{}]}", Some(0), None),
        ("{policyTypes: [Egress]}", None, Some(0)),
        ("{policyTypes: [Egress], ingress: [{}]}", None, Some(0)),
        ("{policyTypes: [Egress, Ingress]}", Some(0), Some(0)),
    ] {
        assert_eq!(isolation(spec), (ingress, egress), "{spec}");
    }
}

#[test]
fn empty_lists_match_everything_or_nothing_in_v1beta1() {
    let nothing = || Rule { peers: Peers::AnyOf(vec![]), ports: PolicyPorts::Every };
    let no_port = || Rule { peers: Peers::Every, ports: PolicyPorts::AnyOf(vec![]) };
    for (rule, stable, v1beta1) in [
        ("{}", EVERYTHING, EVERYTHING),
        ("{from: null, ports: null}", EVERYTHING, EVERYTHING),
        ("{from: []}", EVERYTHING, nothing()),
        ("{ports: []}", EVERYTHING, no_port()),
    ] {
        let spec = format!("{{ingress: [{rule}]}}");
        let converted = policy(&spec);
        assert_eq!((converted.ingress, converted.isolates), (Some(vec![stable]), true), "{rule}");
        let converted = policy_of("extensions/v1beta1", &spec);
        assert_eq!((converted.ingress, converted.isolates), (Some(vec![v1beta1]), false), "{rule}");
    }
    let egress = policy("{egress: [{to: [], ports: []}]}").egress;
    assert_eq!(egress, Some(vec![EVERYTHING]));
}

#[test]
fn selectors_keep_their_meaning() {
    let requirement = |key: &str, test| Requirement { key: key.to_owned(), operator: test };
    let values = |values: &[&str]| values.iter().map(|value| value.to_string()).collect();
    let found = policy(
        "{podSelector: {matchLabels: {b: '2', a: ''}, matchExpressions: [
            {key: c, operator: In, values: [z, y, z]}, {key: d, operator: NotIn, values: [x]},
            {key: e, operator: Exists}, {key: f, operator: DoesNotExist, values: []}]}}",
    )
    .pod_selector;
    let expected = vec![
        requirement("a", LabelOperator::In(values(&[""]))),
        requirement("b", LabelOperator::In(values(&["2"]))),
        requirement("c", LabelOperator::In(values(&["y", "z"]))),
        requirement("d", LabelOperator::NotIn(values(&["x"]))),
        requirement("e", LabelOperator::Exists),
        requirement("f", LabelOperator::DoesNotExist),
    ];
    assert_eq!(found, Selector { requirements: expected });
}

#[test]
fn peers_and_ports_keep_their_kind() {
    let found = policy(
        "{ingress: [{from: [
            {podSelector: {}}, {namespaceSelector: {}}, {podSelector: {}, namespaceSelector: {}},
            {ipBlock: {cidr: 10.1.2.3/8, except: [10.1.2.3/16]}}, {ipBlock: {cidr: '::/0'}}],
          ports: [{}, {port: 80}, {port: 1, endPort: 65535, protocol: UDP}, {port: 5, endPort: 5}, {port: http, protocol: SCTP}]}]}",
    );
    let net = |text: &str| text.parse().unwrap();
    let peers = Peers::AnyOf(vec![
        Peer::Pods(Selector::default()),
        Peer::Namespaces(Selector::default()),
        Peer::PodsInNamespaces { namespaces: Selector::default(), pods: Selector::default() },
        Peer::IpBlock(IpBlock { cidr: net("10.0.0.0/8"), except: vec![net("10.1.0.0/16")] }),
        Peer::IpBlock(IpBlock { cidr: net("::/0"), except: vec![] }),
    ]);
    let port = |protocol, which| PolicyPort { protocol, which };
    let range = |first, last| PortMatch::Range { first, last };
    let ports = PolicyPorts::AnyOf(vec![
        port(PortProtocol::Tcp, PortMatch::Every),
        port(PortProtocol::Tcp, range(80, 80)),
        port(PortProtocol::Udp, range(1, 65535)),
        port(PortProtocol::Tcp, range(5, 5)),
        port(PortProtocol::Sctp, PortMatch::Name("http".to_owned())),
    ]);
    assert_eq!(found.ingress, Some(vec![Rule { peers, ports }]));
}

/// Each kind with a template, in a folder that a cluster is deployed from.
#[test]
fn workloads_stand_for_their_pods_and_no_object_is_passed_over() {
    let template = "{metadata: {labels: {app: NAME}}, spec: {containers: [{name: c, image: x, ports: [{name: http, containerPort: 80}]}]}}";
    let workload = |version: &str, kind: &str, name: &str, more: &str| {
        let template = template.replace("NAME", name);
        let spec = if kind == "CronJob" {
            format!("{{jobTemplate: {{spec: {{template: {template}}}}}}}")
        } else {
            format!("{{template: {template}}}")
        };
        format!(
            "---\napiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop{more}}}\nspec: {spec}\n"
        )
    };
    let owner = ", ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: api, uid: u, controller: true}]";
    let pod = "---\napiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: there-1, \
               ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: there, uid: u, controller: true}]}\n";
    let text = [
        workload("apps/v1", "Deployment", "api", ""),
        workload("apps/v1", "StatefulSet", "db", ""),
        workload("apps/v1", "DaemonSet", "agent", ""),
        workload("apps/v1", "ReplicaSet", "old", ""),
        workload("batch/v1", "Job", "once", ""),
        workload("batch/v1", "CronJob", "nightly", ""),
        // Made by the Deployment, whose pods are told already; and one whose pods are there.
        workload("apps/v1", "ReplicaSet", "api-1", owner),
        workload("apps/v1", "StatefulSet", "there", ""),
        pod.to_owned(),
        "---\nreplicaCount: 1\nimage: {tag: x}\n".to_owned(),
        "---\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [a.yaml]\n".to_owned(),
    ]
    .concat();
    let options = |of_deployments| Options { of_deployments, ..Options::default() };
    let read = read_text("a.yaml".as_ref(), &text, &options(true)).unwrap();
    let names = ["there-1", "api", "db", "agent", "old", "once", "nightly"].map(|name| format!("Pod shop/{name}"));
    assert_eq!(self::names(&read), names);
    let kinds: Vec<&str> = read.workloads().into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, ["StatefulSet", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CronJob"]);
    let mut addresses = std::collections::BTreeSet::new();
    for document in &read.documents[1..] {
        let Object::Pod(pod) = &document.object else { panic!("{:?}", document.object) };
        assert_eq!((pod.labels["app"].as_str(), pod.ports.len()), (pod.key.name.as_str(), 1));
        assert_eq!(pod.addresses.len(), 2, "one of each family");
        assert!(pod.addresses.iter().all(|address| addresses.insert(*address)), "{pod:?}");
    }
    assert_eq!(read.passed_over.len(), 1);
    let ignored: Vec<&str> = read.ignored.iter().map(|ignored| ignored.object.as_str()).collect();
    assert_eq!(ignored, ["ReplicaSet shop/api-1", "Kustomization without a name"]);
    // A daemon has pods of its own, and a file that is no object is a mistake.
    let errors = read_text("a.yaml".as_ref(), &text, &options(false)).unwrap_err();
    assert!(errors.0.iter().any(|error| error.to_string().contains("is not a Kubernetes object")), "{errors:?}");
}

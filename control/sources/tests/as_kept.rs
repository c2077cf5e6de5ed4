//! Objects as people keep them: rendered charts, folders of repositories, files that kubectl takes.

use std::path::Path;

use penstock_policy::model::{Object, Pod};
use penstock_sources::manifest::{Manifests, Options, read_text};

fn options() -> Options {
    Options { of_deployments: true, ..Options::default() }
}

fn read(text: &str) -> Manifests {
    read_text(Path::new("a.yaml"), text, &options()).unwrap_or_else(|errors| panic!("{text}\n{errors}"))
}

fn pods(manifests: &Manifests) -> Vec<&Pod> {
    let pods = manifests.documents.iter().filter_map(|document| match &document.object {
        Object::Pod(pod) => Some(pod),
        _ => None,
    });
    pods.collect()
}

/// A pod with a spec and more metadata.
fn pod(metadata: &str, spec: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: a, labels: {{app: a}}{metadata}}}\nspec: {spec}\n")
}

#[test]
fn a_field_that_policy_does_not_need_refuses_no_object() {
    let container = |fields: &str| {
        pod("", &format!("{{containers: [{{name: c, ports: [{{name: web, containerPort: 80}}], {fields}}}]}}"))
    };
    let text = [
        pod("", "{volumes: [{secret: {defaultMode: 0400}}], containers: [{ports: [{name: web, containerPort: 80}]}]}"),
        pod(
            ", resourceVersion: 12345, uid: 1e5, generation: \"2\"",
            "{containers: [{ports: [{name: web, containerPort: 0120}]}]}",
        ),
        pod(
            ", annotations: {note: , prometheus.io/port: 9102, more: {}}, managedFields: x",
            "{containers: [{ports: [{name: web, containerPort: 8e1}]}]}",
        ),
        pod(
            ", ownerReferences: [{kind: Job, name: j, uid: 5, blockOwnerDeletion: x}]",
            "{containers: [{ports: [{name: web, containerPort: 80.0}]}]}",
        ),
        container("securityContext: {runAsUser: \"1000\", privileged: \"false\"}"),
        container("resources: {limits: {cpu: 1, memory: 1.5}, requests: [none]}"),
        container("env: [null, {name: 5, value: {a: b}}], args: [null, 1, true], command: run"),
        container("livenessProbe: {httpGet: {port: [80]}}, image: null, env: [], env: []"),
        pod(
            "",
            "{restartPolicy: 5, tolerations: {}, containers: [null, {ports: [{name: web, containerPort: 80, protocol: null, hostPort: x}]}]}",
        ),
    ];
    for text in text {
        let read = read(&text);
        let [pod] = pods(&read)[..] else { panic!("{text}") };
        let ports: Vec<(&str, u16)> = pod.ports.iter().map(|port| (port.name.as_str(), port.number)).collect();
        assert_eq!((pod.labels["app"].as_str(), &ports[..]), ("a", &[("web", 80)][..]), "{text}");
    }
    for other in [
        "apiVersion: v1\nkind: Node\nmetadata: {name: n}\nspec: {podCIDR: 5}\nstatus: {capacity: [x], images: 3, addresses: [null, {type: InternalIP, address: 192.0.2.1}]}\n",
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: n, annotations: }\nspec: {finalizers: kubernetes}\nstatus: Active\n",
        "apiVersion: v1\nkind: Service\nmetadata: {name: n}\nspec: {healthCheckNodePort: x, ports: [{port: 80, appProtocol: 5}]}\n",
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: n}\naddressType: IPv4\nendpoints: [{addresses: [192.0.2.1], targetRef: x, zone: 5}]\n",
    ] {
        assert_eq!(self::read(other).documents.len(), 1, "{other}");
    }
}

/// In Go null is the zero value of its type: no label is no text, no rule is one that allows all.
#[test]
fn null_is_the_zero_value() {
    let read = read(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: a, annotations: {note: }}\n\
         spec: {podSelector: {matchLabels: {app: }}, ingress: [null, {from: null, ports: [null]}], egress: null, policyTypes: }\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: , labels: {app: }}\nspec: {hostNetwork: , containers: }\n",
    );
    let policies = read.documents.iter().filter_map(|document| match &document.object {
        Object::NetworkPolicy(policy) => Some(policy),
        _ => None,
    });
    let [policy] = policies.collect::<Vec<_>>()[..] else { panic!("one policy") };
    assert!(policy.pod_selector.matches(&pods(&read)[0].labels));
    assert_eq!(policy.ingress.as_ref().map(Vec::len), Some(2));
    assert_eq!(policy.egress, None);
}

#[test]
fn words_of_yaml_1_1_are_booleans_where_one_is_needed() {
    for (word, expected) in [("yes", true), ("On", true), ("y", true), ("no", false), ("OFF", false), ("true", true)] {
        let read = read(&pod("", &format!("{{hostNetwork: {word}}}")));
        assert_eq!(pods(&read)[0].host_network, expected, "{word}");
    }
    let refused = read_text(Path::new("a.yaml"), &pod("", "{hostNetwork: perhaps}"), &options());
    assert!(refused.unwrap_err().to_string().contains("spec.hostNetwork: invalid type"));
}

#[test]
fn each_workload_has_pods_of_its_own_name() {
    let workload = |version: &str, kind: &str, name: &str| {
        format!(
            "---\napiVersion: {version}\nkind: {kind}\nmetadata: {{{name}}}\n\
             spec: {{template: {{metadata: {{labels: {{app: {kind}}}}}, spec: {{containers: [{{name: c}}]}}}}}}\n"
        )
    };
    let text = [
        workload("apps/v1", "Deployment", "name: web"),
        workload("apps/v1", "StatefulSet", "name: web"),
        // A patch of the first.
        workload("apps/v1", "Deployment", "name: web"),
        workload("extensions/v1beta1", "Deployment", "name: old"),
        workload("apps/v1beta2", "DaemonSet", "name: older"),
        workload("batch/v1", "Job", "generateName: migrate-"),
        workload("argoproj.io/v1alpha1", "Rollout", "name: canary"),
        workload("apps.openshift.io/v1", "DeploymentConfig", "name: config"),
        workload("serving.knative.dev/v1", "Service", "name: function"),
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: canary}\n".to_owned(),
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: waits}\nstatus: {phase: Pending}\n".to_owned(),
    ];
    let read = read(&text.concat());
    let found: Vec<(&str, Option<&str>)> = pods(&read)
        .into_iter()
        .map(|pod| (pod.key.name.as_str(), pod.addresses.first().and(pod.labels.get("app")).map(String::as_str)))
        .collect();
    let expected = [
        ("canary", None),
        ("waits", None),
        ("web-deployment", Some("Deployment")),
        ("web-statefulset", Some("StatefulSet")),
        ("old", Some("Deployment")),
        ("older", Some("DaemonSet")),
        ("migrate", Some("Job")),
        ("canary-rollout", Some("Rollout")),
        ("config", Some("DeploymentConfig")),
        ("function", Some("Service")),
    ];
    assert_eq!(found, expected);
    let canary = pods(&read).into_iter().find(|pod| pod.key.name == "canary").unwrap();
    assert_eq!(canary.addresses.len(), 2, "a pod without a status has addresses, too");
    assert_eq!(read.passed_over.iter().map(|origin| origin.line).collect::<Vec<_>>(), [Some(12)]);
}

#[test]
fn controllers_labels_are_there_and_tell_pods_apart_where_selected() {
    let workload = |kind: &str, version: &str, name: &str, spec: &str| {
        format!(
            "---\napiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}}}\n\
             spec: {{{spec}, template: {{metadata: {{labels: {{app: x}}}}, spec: {{hostNetwork: true}}}}}}\n"
        )
    };
    let text = [
        workload("StatefulSet", "apps/v1", "db", "replicas: 3, ordinals: {start: 5}"),
        workload("Job", "batch/v1", "part", "completionMode: Indexed, completions: 2"),
        workload("Job", "batch/v1", "once", "completions: 2"),
        workload("CronJob", "batch/v1", "nightly", "schedule: x"),
    ]
    .concat();
    let found = |text: &str| {
        let read = read(text);
        let labels = |pod: &&Pod| {
            let own = pod.labels.iter().filter(|(key, _)| *key != "app");
            let own: Vec<String> =
                own.map(|(key, value)| format!("{}={value}", key.rsplit('/').next().unwrap())).collect();
            format!("{} {}", pod.key.name, own.join(","))
        };
        pods(&read).iter().map(labels).collect::<Vec<_>>()
    };
    let db = |name: &str, number| format!("{name} pod-index={number},pod-name=db-{number}");
    let part = |name: &str, number| format!("{name} job-completion-index={number},job-name=part,job-name=part");
    let (once, nightly) = ("once job-name=once,job-name=once".to_owned(), "nightly ".to_owned());
    assert_eq!(found(&text), [db("db", 5), part("part", 0), once.clone(), nightly.clone()]);
    let policy = "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\n\
                  spec: {podSelector: {matchExpressions: [{key: apps.kubernetes.io/pod-index, operator: Exists}]}}\n";
    let all = [db("db", 5), db("db-1", 6), db("db-2", 7), part("part", 0), part("part-1", 1), once, nightly];
    assert_eq!(found(&(text + policy)), all);
}

#[test]
fn what_is_no_object_is_passed_over() {
    for text in [
        "- {op: replace, path: /spec/replicas, value: 3}\n",
        "apiVersion: v2\nname: chart\nversion: 1.0.0\ndependencies: []\n",
        "spec: {replicas: 3}\n",
        "a sentence\n",
        "5\n",
        "{apiVersion: v1, kind: List, items: [null]}",
    ] {
        let read = read(text);
        assert_eq!((read.documents.len(), read.passed_over.len()), (0, 1), "{text}");
        let strict = read_text(Path::new("a.yaml"), text, &Options::default());
        assert!(strict.is_err(), "{text}");
    }
    let list = "- {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- {apiVersion: v1, kind: Namespace, metadata: {name: b}}\n";
    assert_eq!(read(list).documents.len(), 2);
}

#[test]
fn objects_without_a_namespace_are_in_the_one_that_is_named() {
    let text = "{apiVersion: v1, kind: Pod, metadata: {name: a}}\n---\n{apiVersion: v1, kind: Pod, metadata: {name: b, namespace: \"\"}}\n\
                ---\n{apiVersion: v1, kind: Pod, metadata: {name: c, namespace: own}}\n---\n{apiVersion: v1, kind: Namespace, metadata: {name: d}}\n\
                ---\n{apiVersion: apps/v1, kind: Deployment, metadata: {name: e}}\n";
    for (given, namespace) in [("monitoring", "monitoring"), ("", "default")] {
        let options = Options { namespace: given.to_owned(), ..options() };
        let read = read_text(Path::new("a.yaml"), text, &options).unwrap();
        let names: Vec<String> =
            read.documents.iter().map(|document| document.object.reference().to_string()).collect();
        let of = |name: &str| format!("Pod {namespace}/{name}");
        assert_eq!(names, [of("a"), of("b"), "Pod own/c".to_owned(), "Namespace d".to_owned(), of("e")]);
    }
}

#[test]
fn a_repeated_field_is_an_error_where_it_may_hide_an_object_or_a_rule() {
    let policy = |spec: &str| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: a}}\nspec: {{podSelector: {{}}, {spec}}}\n"
        )
    };
    for (text, field) in [
        (policy("ingress: [], ingress: [{}]"), "spec.ingress"),
        (policy("ingress: [{from: [], from: []}]"), "spec.ingress[0].from"),
        (pod("", "{}") + &pod("", "{}"), "apiVersion"),
        ("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, kind: Secret}".to_owned(), "kind"),
        (pod(", name: b", "{}"), "metadata.name"),
    ] {
        let errors = read_text(Path::new("a.yaml"), &text, &options()).unwrap_err().to_string();
        assert!(errors.contains(&format!(": {field}: is there twice")), "{text}\n{errors}");
    }
    read("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: x, a: y}\n");
    let pods_label = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n\
                      spec: {template: {metadata: {labels: {app: x, app: y}}, spec: {containers: []}}}\n";
    assert_eq!(pods(&read(pods_label))[0].labels["app"], "y");
}

#[test]
fn a_template_is_to_be_rendered_first() {
    for text in [
        "{{- if .Values.enabled }}\nkind: Pod\n{{- end }}\n",
        "metadata:\n  name: {{ include \"x\" . }}\n",
        "{{/* a comment */}}\nkind: [\n",
    ] {
        let error = read_text(Path::new("a.yaml"), text, &options()).unwrap_err().to_string();
        assert!(error.contains("render a Helm template first, with helm template"), "{text}: {error}");
    }
    let error = read_text(Path::new("a.yaml"), "a: [\nb: x\n", &options()).unwrap_err().to_string();
    assert!(!error.contains("helm"), "{error}");
}

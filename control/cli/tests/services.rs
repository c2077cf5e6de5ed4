//! Questions about Services: what policy means for whoever answers.

use serde_json::Value;

use crate::commands::penstock_with;

/// A Service with two backends, of which an egress policy of the client allows one.
const WITH_SERVICE: &str = "
{apiVersion: v1, kind: Service, metadata: {name: api, namespace: shop}, spec: {clusterIP: 10.96.0.1, selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}, {name: none, port: 81, targetPort: absent}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: client, namespace: shop, labels: {app: client}}, status: {podIPs: [{ip: 10.0.0.1}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: api-0, namespace: shop, labels: {app: api, good: 'yes'}}, status: {podIPs: [{ip: 10.0.0.2}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: api-1, namespace: shop, labels: {app: api}}, status: {podIPs: [{ip: 10.0.0.3}]}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: out, namespace: shop}, spec: {podSelector: {matchLabels: {app: client}}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {good: 'yes'}}}], ports: [{port: 8080}]}]}}
";

#[test]
fn questions_about_a_service_are_answered_for_each_backend() {
    let queries = tempfile::NamedTempFile::new().unwrap();
    let lines = [
        r#"{"from":"shop/client","to":"svc/shop/api","port":80}"#,
        r#"{"from":"shop/api-0","to":"svc/shop/api","port":"http"}"#,
        r#"{"from":"shop/client","to":"svc/shop/api","port":81}"#,
    ];
    std::fs::write(queries.path(), lines.join("\n")).unwrap();
    let path = queries.path().to_str().unwrap();
    let found = penstock_with(&["evaluate", "--manifests", "-", "--queries", path], WITH_SERVICE, &[]);
    assert_eq!(found.error, "penstock: no EndpointSlices: derived those of 1 Service from selectors and ready pods\n");
    let answers: Vec<serde_json::Value> = found.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&answers[0]["verdict"], &answers[0]["frontend"]), (&"partial".into(), &"10.96.0.1:80".into()));
    let backends: Vec<_> = answers[0]["backends"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| ["name", "address", "verdict"].map(|field| it[field].as_str().unwrap()))
        .collect();
    assert_eq!(backends, [["shop/api-0", "10.0.0.2:8080", "allow"], ["shop/api-1", "10.0.0.3:8080", "deny"]]);
    assert_eq!(answers[0]["backends"][0]["egress"]["rule"].as_str().unwrap(), "shop-egress-out-0-podSelector-0-0");
    assert_eq!(answers[1]["verdict"], "allow", "no policy isolates it, and it is one of its own backends");
    assert_eq!(answers[2]["verdict"], "deny");
    assert_eq!(answers[2]["reason"], "no backend anywhere: refused");
    let matrix = penstock_with(&["matrix", "--services", "--manifests", "-"], WITH_SERVICE, &[]).out;
    for line in [
        "  1 shop/api:http  80/TCP at 10.96.0.1",
        "  2 shop/api:none  81/TCP at 10.96.0.1",
        "          1  2",
        "  api-0   +  0",
        "  client  ~  0",
        "+ every backend allowed  ~ some  0 no backend",
    ] {
        assert!(matrix.lines().any(|found| found == line), "{line}\n{matrix}");
    }
    let one = penstock_with(&["matrix", "--services", "--port", "none/TCP", "--manifests", "-"], WITH_SERVICE, &[]).out;
    assert!(one.contains("  1 shop/api:none  ") && !one.contains("shop/api:http"), "{one}");
    let explain = |to: &str, port: &str| {
        let arguments = ["explain", "--manifests", "-", "--from", "shop/client", "--to", to, "--port", port];
        penstock_with(&arguments, WITH_SERVICE, &[])
    };
    let text = explain("svc/shop/api", "http/TCP").out;
    assert!(
        text.starts_with("partial: Service shop/api:http at 10.96.0.1:80/TCP, 2 backends, 1 of them allowed\n"),
        "{text}"
    );
    for line in [
        "allowed: shop/client (10.0.0.1) -> shop/api-0 (10.0.0.2), 8080/TCP",
        "denied: shop/client (10.0.0.1) -> shop/api-1 (10.0.0.3), 8080/TCP",
    ] {
        assert!(text.lines().any(|found| found == line), "{text}");
    }
    for (to, port, error) in [
        ("svc/shop/web", "80", "Service shop/web is unknown"),
        ("svc/shop/api", "8080", "Service shop/api has no port 8080/TCP"),
    ] {
        let found = explain(to, port);
        assert_eq!(found.code, 2);
        assert!(found.error.contains(error), "{}", found.error);
    }
}

fn explained(from: &str, to: &str, port: &str, manifests: &str) -> String {
    let arguments = ["explain", "--manifests", "-", "--from", from, "--to", to, "--port", port];
    penstock_with(&arguments, manifests, &[]).out
}

fn evaluated(from: &str, to: &str, port: u16, manifests: &str) -> Value {
    let queries = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(queries.path(), format!(r#"{{"from":"{from}","to":"{to}","port":{port}}}"#)).unwrap();
    let arguments = ["evaluate", "--manifests", "-", "--queries", queries.path().to_str().unwrap()];
    let found = penstock_with(&arguments, manifests, &[]);
    serde_json::from_str(&found.out).unwrap_or_else(|_| panic!("{}", found.error))
}

/// The Service above with an external address, a load balancer's and a node port, on two nodes.
fn at_all_addresses() -> String {
    let nodes = [("here", "192.0.2.1"), ("there", "192.0.2.2")].map(|(name, address)| {
        format!(
            "---\n{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}, \
             status: {{addresses: [{{type: InternalIP, address: {address}}}]}}}}\n"
        )
    });
    let service = WITH_SERVICE
        .replace(
            "spec: {clusterIP: 10.96.0.1,",
            "spec: {type: LoadBalancer, externalIPs: [203.0.113.7], clusterIP: 10.96.0.1,",
        )
        .replace("port: 80, targetPort: 8080}", "port: 80, targetPort: 8080, nodePort: 30080}")
        .replace("status: {podIPs: [{ip: 10.0.0.1}]}", "spec: {nodeName: here}, status: {podIPs: [{ip: 10.0.0.1}]}");
    service + &nodes.concat()
}

#[test]
fn an_address_of_a_service_is_asked_about_as_the_service() {
    let manifests = at_all_addresses();
    for (to, port) in [("10.96.0.1", 80), ("203.0.113.7", 80), ("192.0.2.1", 30_080)] {
        let answer = evaluated("shop/client", to, port, &manifests);
        assert_eq!((&answer["verdict"], &answer["frontend"]), (&"partial".into(), &format!("{to}:{port}").into()));
        let verdicts: Vec<&str> =
            answer["backends"].as_array().unwrap().iter().map(|it| it["verdict"].as_str().unwrap()).collect();
        assert_eq!(verdicts, ["allow", "deny"], "{to}");
        let text = explained("shop/client", to, &port.to_string(), &manifests);
        let head = format!("partial: Service shop/api:http at {to}:{port}/TCP, 2 backends, 1 of them allowed\n");
        assert!(text.starts_with(&head), "{text}");
    }
    // Another port of an address, and the node port of another node, which translates it itself.
    let text = explained("shop/client", "10.96.0.1", "8080", &manifests);
    assert!(text.starts_with("denied: ") && text.ends_with("of Service shop/api, which has no such port\n"), "{text}");
    let text = explained("shop/client", "192.0.2.2", "30080", &manifests);
    assert!(text.starts_with("denied: shop/client (10.0.0.1) -> node there (192.0.2.2), 30080/TCP\n"), "{text}");
}

#[test]
fn a_pod_that_is_its_own_backend_obeys_cluster_policies_alone() {
    let isolated = "---\n{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: none, namespace: shop}, \
                    spec: {podSelector: {matchLabels: {app: api}}, policyTypes: [Egress, Ingress]}}\n";
    let locked = "---\n{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: lock}, \
                  spec: {tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}}\n\
                  ---\n{apiVersion: v1, kind: Namespace, metadata: {name: shop}}\n";
    // By itself; by an isolating policy, which no pod is subject to with itself; by one of the cluster.
    for (more, verdicts, head) in [
        ("", ["allow", "allow"], "allowed"),
        (isolated, ["allow", "deny"], "partial"),
        (locked, ["deny", "deny"], "denied"),
        (&[isolated, locked].concat(), ["deny", "deny"], "denied"),
    ] {
        let manifests = WITH_SERVICE.to_owned() + more;
        let answer = evaluated("shop/api-0", "svc/shop/api", 80, &manifests);
        let found: Vec<&str> =
            answer["backends"].as_array().unwrap().iter().map(|it| it["verdict"].as_str().unwrap()).collect();
        assert_eq!(found, verdicts, "{more}");
        let text = explained("shop/api-0", "svc/shop/api", "80", &manifests);
        assert!(text.starts_with(&format!("{head}: Service shop/api:http ")), "{more}: {text}");
        let matrix = penstock_with(&["matrix", "--services", "--port", "80", "--manifests", "-"], &manifests, &[]).out;
        let symbol = match head {
            "allowed" => "+",
            "partial" => "~",
            _ => ".",
        };
        assert!(matrix.lines().any(|line| line == format!("  api-0   {symbol}")), "{matrix}");
    }
    // Directly, no policy keeps it from itself.
    let answer = evaluated("shop/api-0", "shop/api-0", 8080, &(WITH_SERVICE.to_owned() + locked));
    assert_eq!(answer["verdict"], "allow");
}

/// Two backends of one Service, a client, and the cluster's DNS.
const LINTED: &str = "
{apiVersion: v1, kind: Service, metadata: {name: api, namespace: shop}, spec: {clusterIP: 10.96.0.1, selector: {app: api}, ports: [{port: 80, targetPort: 8080}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: dns, namespace: infra, labels: {k8s-app: kube-dns}}, spec: {clusterIP: 10.96.0.10, selector: {app: dns}, ports: [{port: 53, protocol: UDP}]}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: infra}}
---
{apiVersion: v1, kind: Pod, metadata: {name: api-0, namespace: shop, labels: {app: api}}, spec: {containers: [{name: a, ports: [{name: http, containerPort: 8080}]}]}, status: {podIPs: [{ip: 10.1.0.2}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: api-1, namespace: shop, labels: {app: api}}, spec: {containers: [{name: a, ports: [{name: http, containerPort: 8080}]}]}, status: {podIPs: [{ip: 10.1.0.3}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: client, namespace: shop, labels: {app: client}}, status: {podIPs: [{ip: 10.1.0.4}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: dns-0, namespace: infra, labels: {app: dns}}, status: {podIPs: [{ip: 10.1.0.53}]}}
";

/// The kinds of findings about a policy of these rules for the client's egress, or the backends' ingress.
fn lint_kinds(direction: &str, rules: &str, others: &str) -> Vec<String> {
    let (app, policy_type) = if direction == "egress" { ("client", "Egress") } else { ("api", "Ingress") };
    let policy = format!(
        "---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: p, namespace: shop}}, spec: \
         {{podSelector: {{matchLabels: {{app: {app}}}}}, policyTypes: [{policy_type}], {direction}: {rules}}}}}\n"
    );
    let found = penstock_with(&["lint", "--manifests", "-"], &(LINTED.to_owned() + &policy + others), &[]);
    assert_eq!(found.code, 0, "{rules}: {}", found.error);
    let kinds = found.out.lines().filter_map(|line| line.strip_suffix(']')?.rsplit_once('['));
    kinds.map(|(_, kind)| kind.to_owned()).collect()
}

#[test]
fn lint_finds_what_policies_get_wrong_about_services() {
    const DNS: &str = "{ports: [{port: 53, protocol: UDP}]}";
    let block = |block: &str| format!("[{{to: [{{ipBlock: {block}}}], ports: [{{port: 53, protocol: UDP}}]}}]");
    let to_api =
        |port: &str| format!("[{{to: [{{podSelector: {{matchLabels: {{app: api}}}}}}], ports: [{port}]}}, {DNS}]");
    let accept = "---\n{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: c}, spec: \
                  {tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Accept, from: [{namespaces: {}}]}]}}\n";
    let networks = "---\n{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: c}, spec: \
                    {tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{networks: [10.96.0.0/12]}]}]}}\n";
    for (direction, rules, others, expected) in [
        ("egress", block("{cidr: 10.96.0.1/32}"), "", &["service-address"][..]),
        ("egress", block("{cidr: 10.96.0.0/12}"), "", &["service-address"]),
        ("egress", block("{cidr: 10.96.0.0/12, except: [10.96.0.0/24]}"), "", &[]),
        ("egress", block("{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}"), "", &[]),
        ("egress", block("{cidr: 10.1.0.0/24}"), "", &[]),
        ("egress", block("{cidr: 203.0.113.0/24}"), networks, &["service-address"]),
        ("egress", "[{to: [{podSelector: {matchLabels: {app: api}}}]}]".to_owned(), "", &["no-dns"]),
        ("egress", "[{to: [{namespaceSelector: {}}]}]".to_owned(), "", &[]),
        ("egress", "[{to: [{namespaceSelector: {}}], ports: [{port: 8080}]}]".to_owned(), "", &["no-dns"]),
        ("egress", "[]".to_owned(), "", &[]),
        ("egress", to_api("{port: 8080}"), "", &[]),
        ("egress", to_api("{port: 80}"), "", &["service-port"]),
        ("egress", to_api("{port: 80, endPort: 8080}"), "", &[]),
        ("egress", to_api("{port: 80, protocol: UDP}"), "", &[]),
        ("egress", format!("[{{to: [{{podSelector: {{}}}}], ports: [{{port: 80}}]}}, {DNS}]"), "", &[]),
        ("ingress", "[{ports: [{port: 80}]}]".to_owned(), "", &["closed-port", "service-port"]),
        ("ingress", "[{ports: [{port: 8080}]}]".to_owned(), "", &[]),
        ("ingress", "[{ports: [{port: http}]}]".to_owned(), "", &[]),
        ("ingress", "[{ports: [{port: 8080, protocol: UDP}]}]".to_owned(), "", &["closed-port"]),
        ("ingress", "[]".to_owned(), "", &["closed-port"]),
        ("ingress", "[]".to_owned(), accept, &[]),
    ] {
        assert_eq!(lint_kinds(direction, &rules, others), expected, "{direction}: {rules} {others}");
    }
}

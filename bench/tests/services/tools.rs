//! The tools say of a flow to a Service what its packets find, for each kind of Service's address.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Output, Stdio};

use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{
    KubeProxy, Outside, PacketCapture, ProxiedPort, ProxiedService, ProxyMode, RouteVia, ServiceProtocol,
    penstock_binary,
};

use crate::fixture::{Fixture, SERVICES, pods, policy};
use crate::services::service::{address, run};

/// Identity of the servers that are not on this node.
const ELSEWHERE: u32 = 77;
/// A pod of another node, and that node; the machine outside has both.
const FAR: &str = "198.51.100.2";
const OTHER_NODE: &str = "203.0.113.50";
const NODE: &str = "172.18.0.2";
/// Cluster addresses; two with external ones, as of a load balancer.
const NEAR: [&str; 2] = ["10.96.0.10", "203.0.113.7"];
const BEYOND: [&str; 2] = ["10.96.0.11", "203.0.113.8"];
const EMPTY: &str = "10.96.0.12";
const SHUT: &str = "10.96.0.13";
/// Two under egress policy, one without, and the backend here.
const CLIENTS: [&str; 4] = ["test/pod-0", "test/pod-2", "test/pod-3", "test/pod-1"];

/// An address and a port to which clients send, and who answers.
struct Way {
    what: &'static str,
    to: &'static str,
    port: u16,
    /// The Service by its name, where it is a cluster address.
    service: Option<&'static str>,
    is_near: bool,
}

const WAYS: [Way; 10] = [
    Way { what: "a cluster address, backend here", to: NEAR[0], port: 80, service: Some("near"), is_near: true },
    Way { what: "an external address, backend here", to: NEAR[1], port: 80, service: None, is_near: true },
    Way { what: "a node port, backend here", to: NODE, port: 30_080, service: None, is_near: true },
    Way { what: "a cluster address, backend elsewhere", to: BEYOND[0], port: 80, service: Some("far"), is_near: false },
    Way { what: "a load balancer's, backend elsewhere", to: BEYOND[1], port: 80, service: None, is_near: false },
    Way { what: "a node port, backend elsewhere", to: NODE, port: 30_081, service: None, is_near: false },
    Way { what: "another node's node port", to: OTHER_NODE, port: 30_080, service: None, is_near: false },
    Way { what: "a headless Service's pod", to: "10.244.1.11", port: 8080, service: None, is_near: true },
    Way { what: "no backend", to: EMPTY, port: 80, service: Some("empty"), is_near: true },
    Way { what: "a port that policy opens to nobody", to: SHUT, port: 81, service: Some("shut"), is_near: true },
];

fn service(name: &str, spec: &str, backend: Option<(&str, u16)>) -> String {
    let slice = backend.map_or_else(String::new, |(address, port)| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: test, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}\n\
             addressType: IPv4\nendpoints: [{{addresses: ['{address}']}}]\nports: [{{name: web, port: {port}}}]\n"
        )
    });
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: test, name: {name}}}\nspec: {{{spec}}}\n{slice}"
    )
}

/// The Services, a pod and a node elsewhere, and policies: `pod-0` may reach only what is here, `pod-2` only what is elsewhere, and
/// the backend here admits both and nobody else.
fn objects() -> String {
    let own = "10.244.1.11";
    let services = [
        service(
            "near",
            &format!(
                "type: NodePort, clusterIP: {}, externalIPs: [{}], ports: [{{name: web, port: 80, targetPort: 8080, nodePort: 30080}}]",
                NEAR[0], NEAR[1]
            ),
            Some((own, 8080)),
        ),
        service(
            "far",
            &format!(
                "type: LoadBalancer, clusterIP: {}, ports: [{{name: web, port: 80, targetPort: 8080, nodePort: 30081}}]}}\n\
                 status: {{loadBalancer: {{ingress: [{{ip: {}}}]}}",
                BEYOND[0], BEYOND[1]
            ),
            Some((FAR, 8080)),
        ),
        service("headless", "clusterIP: None, ports: [{name: web, port: 8080}]", Some((own, 8080))),
        service("empty", &format!("clusterIP: {EMPTY}, ports: [{{name: web, port: 80}}]"), None),
        service("shut", &format!("clusterIP: {SHUT}, ports: [{{name: web, port: 81}}]"), Some((own, 9090))),
    ];
    let elsewhere = format!(
        "---\napiVersion: v1\nkind: Node\nmetadata: {{name: other}}\n\
         status: {{addresses: [{{type: InternalIP, address: {OTHER_NODE}}}]}}\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {{namespace: test, name: far, labels: {{app: far}}}}\n\
         spec: {{nodeName: other, containers: [{{name: main, image: example.invalid/test}}]}}\n\
         status: {{phase: Running, podIPs: [{{ip: {FAR}}}]}}\n"
    );
    let egress = |to: &str| {
        format!(
            "  policyTypes: [Egress]\n  egress: [{{to: [{{podSelector: {{matchLabels: {{app: {to}}}}}}}], ports: [{{port: 8080}}]}}]\n"
        )
    };
    let clients = "{matchExpressions: [{key: app, operator: In, values: [pod-0, pod-2]}]}";
    let ingress = format!("  ingress: [{{from: [{{podSelector: {clients}}}], ports: [{{port: 8080}}]}}]\n");
    services.concat()
        + &elsewhere
        + &policy("client-0", "pod-0", &egress("pod-1"))
        + &policy("client-2", "pod-2", &egress("far"))
        + &policy("server", "pod-1", &ingress)
}

/// kube-proxy's rules for them; one for an external address is as that for a cluster address.
fn proxied() -> Vec<ProxiedService> {
    let of = |name: &str, at: &str, number, node_port, backend: Option<SocketAddr>| ProxiedService {
        name: format!("test/{name}"),
        addresses: vec![address(at)],
        ports: vec![ProxiedPort {
            protocol: ServiceProtocol::Tcp,
            number,
            node_port,
            backends: backend.into_iter().collect(),
        }],
    };
    let (near, far) = (SocketAddr::new(address("10.244.1.11"), 8080), SocketAddr::new(address(FAR), 8080));
    let shut = SocketAddr::new(near.ip(), 9090);
    vec![
        of("near", NEAR[0], 80, Some(30_080), Some(near)),
        of("near-external", NEAR[1], 80, None, Some(near)),
        of("far", BEYOND[0], 80, Some(30_081), Some(far)),
        of("far-external", BEYOND[1], 80, None, Some(far)),
        of("empty", EMPTY, 80, None, None),
        of("shut", SHUT, 81, None, Some(shut)),
    ]
}

struct Asked {
    fixture: Fixture,
    _servers: [EchoServers; 2],
    _outside: Outside,
}

impl Asked {
    fn new() -> Self {
        let mut outside = None;
        let fixture = Fixture::of(&pods(4), |cluster, config| {
            let socket = config.manifests.with_file_name("capture.sock");
            config.sections += &format!("[capture]\nsocket = \"{}\"\n", socket.display());
            let node = cluster.node.addresses().to_vec();
            let machine = cluster.node.add_outside("outside").unwrap();
            KubeProxy { mode: ProxyMode::Nftables, node, services: proxied() }
                .install(cluster.node.namespace())
                .unwrap();
            let netlink = cluster.node.netlink();
            let index = netlink.index(machine.interface()).unwrap();
            // The node translates before it routes; the rest is refused on the way there, or answered.
            for network in ["10.96.0.0/16", "203.0.113.0/24"] {
                netlink.add_route(network.parse().unwrap(), index, RouteVia::Gateway(address(FAR))).unwrap();
            }
            run(machine.namespace(), "ip", &["address", "add", &format!("{OTHER_NODE}/32"), "dev", "lo"], "");
            outside = Some(machine);
        });
        let outside = outside.unwrap();
        let site = |address: &str| Site { addresses: vec![self::address(address)], ..Site::from(&outside) };
        let servers = [
            EchoServers::start(&site(FAR), ELSEWHERE, &SERVICES).unwrap(),
            EchoServers::start(&site(OTHER_NODE), ELSEWHERE, &[EchoService::Tcp(30_080)]).unwrap(),
        ];
        fixture.enforce(&(pods(4) + &objects()));
        Self { fixture, _servers: servers, _outside: outside }
    }

    /// Sends packets. Whether they are answered.
    fn probe(&self, client: &str, way: &Way) -> bool {
        let identity = if way.is_near { self.fixture.target("test/pod-1", false).0 } else { ELSEWHERE };
        let patience = RetryPolicy { attempts: 3, ..RetryPolicy::default() };
        let to: (u32, IpAddr) = (identity, address(way.to));
        let outcome = probe::run_one(self.fixture.site(client), to, Protocol::Tcp(way.port), patience).unwrap();
        assert_ne!(outcome, ProbeOutcome::Wrong, "{client} to {}", way.what);
        outcome == ProbeOutcome::Reached
    }

    fn command(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = Command::new(penstock_binary().unwrap());
        command
            .args(arguments)
            .env("NO_COLOR", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn print(&self, arguments: &[&str], input: &str) -> String {
        let output = self.command(arguments, input);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn manifests(&self) -> &str {
        self.fixture.manifests.to_str().unwrap()
    }

    fn socket(&self) -> &str {
        self.fixture.admin().to_str().unwrap()
    }

    /// Asks `evaluate` about all flows.
    fn evaluated(&self, manifests: &str) -> BTreeMap<(String, String), bool> {
        let flows = CLIENTS.iter().flat_map(|client| WAYS.iter().map(move |way| (*client, way)));
        let query = |(client, way): (&str, &Way)| {
            format!("{{\"from\":\"{client}\",\"to\":\"{}\",\"port\":{}}}\n", way.to, way.port)
        };
        let queries: String = flows.clone().map(query).collect();
        let answers = self.print(&["evaluate", "--manifests", manifests, "--queries", "-"], &queries);
        let verdicts = answers.lines().map(|line| {
            let answer: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_ne!(answer["verdict"], "partial", "{answer}");
            answer["verdict"] == "allow"
        });
        flows.map(|(client, way)| (client.to_owned(), way.what.to_owned())).zip(verdicts).collect()
    }

    /// Asks `explain`, with the manifests or of the running daemon.
    fn explained(&self, source: &[&str], client: &str, to: &str, port: u16) -> bool {
        let port = format!("{port}/TCP");
        let arguments = [&["explain"], source, &["--from", client, "--to", to, "--port", &port]].concat();
        let text = self.print(&arguments, "");
        assert!(text.starts_with("allowed: ") || text.starts_with("denied: "), "{arguments:?}: {text}");
        text.starts_with("allowed: ")
    }

    /// Asks `matrix --services` about a pod and a Service.
    fn in_matrix(&self, client: &str, service: &str) -> bool {
        let pod = ["matrix", "--services", "--manifests", self.manifests(), "--pod", client];
        let text = self.print(&pod, "");
        let column = text.lines().position(|line| line.contains(&format!(" test/{service}:web ")));
        let name = client.strip_prefix("test/").unwrap();
        let row = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        // The columns' list begins at the third line.
        row.split_whitespace().nth(1 + column.unwrap() - 2) == Some("+")
    }
}

impl Asked {
    /// `learn`, from the daemon's connections, in place of the policies.
    fn assert_learnt_policies_allow_what_packets_found(&self, flows: &str, found: &BTreeMap<(String, String), bool>) {
        let scratch = self.fixture.scratch.path();
        let (bare, file) = (scratch.join("bare"), scratch.join("flows.json"));
        std::fs::create_dir(&bare).unwrap();
        let documents = (pods(4) + &objects()).split("---\n").map(str::to_owned).collect::<Vec<_>>();
        let others = documents.into_iter().filter(|document| !document.contains("kind: NetworkPolicy"));
        std::fs::write(bare.join("all.yaml"), others.collect::<Vec<_>>().join("---\n")).unwrap();
        std::fs::write(&file, flows).unwrap();
        let (bare_at, file) = (bare.to_str().unwrap(), file.to_str().unwrap());
        let learnt = self.print(&["learn", "--from", file, "--manifests", bare_at], "");
        std::fs::write(bare.join("learnt.yaml"), &learnt).unwrap();
        let by_learnt = self.evaluated(bare_at);
        // A pod and itself need no rule.
        let differ: Vec<_> = found.iter().filter(|(way, reached)| by_learnt[*way] != **reached).collect();
        assert!(differ.is_empty(), "what packets found is not what learnt policies allow: {differ:#?}\n{learnt}");
    }

    /// `rules`: each of the three has decided.
    fn assert_rules_that_decided_have_hits(&self) {
        let rules: serde_json::Value =
            serde_json::from_str(&self.print(&["rules", "--json", "--socket", self.socket()], "")).unwrap();
        let unused: Vec<_> = rules["rules"].as_array().unwrap().iter().filter(|rule| rule["hits"] == 0).collect();
        assert!(unused.is_empty(), "{unused:#?}");
    }

    /// `trial`, of an edit that allows nothing. Where the node translates to another one, a worker hears of the first packet to an address
    /// and port alone.
    fn assert_a_trial_names_what_an_edit_cuts(&self) {
        let edit = |of: &str| {
            policy(&format!("edit-{of}"), &format!("pod-{of}"), "  policyTypes: [Egress]\n").replace(
                &format!("name: edit-{of}"),
                &format!("name: edit-{of}, annotations: {{policy.penstock.dev/staged-for: client-{of}}}"),
            )
        };
        self.fixture.save("all.yaml", &(pods(4) + &objects() + &edit("0") + &edit("2")));
        let cut = [("test/pod-0", "test/pod-1")];
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            let ways = WAYS.iter().filter(|way| way.service.is_some() && way.port == 80 && way.to != EMPTY);
            for (way, client) in ways.zip(["test/pod-0", "test/pod-2"]) {
                assert!(self.probe(client, way), "{client}: a staged edit cuts nothing");
            }
            let status = self.command(&["trial", "status", "--json", "--socket", self.socket()], "").stdout;
            let status: serde_json::Value = serde_json::from_slice(&status).unwrap();
            let names = |(from, to): &(&str, &str)| {
                let changes = status["changes"].as_array().unwrap();
                changes.iter().any(|change| {
                    change["from"] == **from && change["to"] == **to && change["promoted"]["allowed"] == false
                })
            };
            if cut.iter().all(names) {
                break;
            }
            assert!(std::time::Instant::now() < until, "{status:#}");
        }
    }

    /// A ClusterNetworkPolicy is for a pod that reaches itself by its Service; every tool says so.
    fn assert_tiers_keep_a_pod_from_itself(&self) {
        let lock = "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: lock}\n\
                    spec: {tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}\n";
        self.fixture.enforce(&(pods(4) + &objects() + lock));
        let (client, way) = ("test/pod-1", &WAYS[0]);
        assert!(!self.probe(client, way), "{}", self.fixture.statistics().join("\n"));
        let live = ["--live", "--socket", self.socket()];
        let says = [
            ("evaluate", self.evaluated(self.manifests())[&(client.to_owned(), way.what.to_owned())]),
            ("explain", self.explained(&["--manifests", self.manifests()], client, way.to, way.port)),
            ("explain --live", self.explained(&live, client, way.to, way.port)),
            ("matrix", self.in_matrix(client, way.service.unwrap())),
        ];
        assert_eq!(says.map(|(tool, says)| (tool, says)), says.map(|(tool, _)| (tool, false)));
    }
}

#[test]
fn tools_agree_with_packets_where_the_node_translates() {
    let asked = Asked::new();
    let (socket, bundle) =
        (asked.fixture.manifests.with_file_name("capture.sock"), asked.fixture.scratch.path().join("bundle"));
    let capture = PacketCapture::start_bundle(&socket, &bundle, &[]).unwrap();
    let (mut found, mut flows) = (BTreeMap::new(), String::new());
    for client in CLIENTS {
        found.extend(WAYS.iter().map(|way| ((client.to_owned(), way.what.to_owned()), asked.probe(client, way))));
        // Before those that were refused expire.
        flows += &asked.print(&["flows", "--json", "--limit", "100000", "--socket", asked.socket()], "");
    }
    capture.end().unwrap();
    let log = || asked.fixture.statistics().join("\n");
    let expected = |client: &str, way: &Way| match client {
        "test/pod-0" => way.is_near && way.port != 81 && way.to != EMPTY,
        "test/pod-2" => !way.is_near && way.to != OTHER_NODE,
        // It always reaches itself, by its Service, too.
        "test/pod-1" => way.to != EMPTY,
        _ => !way.is_near,
    };
    for (client, way) in CLIENTS.iter().flat_map(|client| WAYS.iter().map(move |way| (*client, way))) {
        let reached = found[&(client.to_owned(), way.what.to_owned())];
        assert_eq!(reached, expected(client, way), "packets of {client} to {}\n{}", way.what, log());
    }
    let mut wrong = Vec::new();
    let evaluated = asked.evaluated(asked.manifests());
    let live = ["--live", "--socket", asked.socket()];
    for (client, way) in CLIENTS.iter().flat_map(|client| WAYS.iter().map(move |way| (*client, way))) {
        let key = (client.to_owned(), way.what.to_owned());
        let mut says = vec![
            ("evaluate", evaluated[&key]),
            ("explain", asked.explained(&["--manifests", asked.manifests()], client, way.to, way.port)),
            ("explain --live", asked.explained(&live, client, way.to, way.port)),
        ];
        if let Some(service) = way.service {
            let name = format!("svc/test/{service}");
            says.push(("explain svc/", asked.explained(&live, client, &name, way.port)));
            says.push(("matrix", asked.in_matrix(client, service)));
        }
        wrong.extend(
            says.into_iter().filter(|(_, says)| *says != found[&key]).map(|(tool, says)| (tool, says, key.clone())),
        );
    }
    assert!(wrong.is_empty(), "these tools say otherwise than packets find: {wrong:#?}");
    let lint = asked.command(&["lint", "--manifests", asked.manifests()], "");
    let lint = String::from_utf8(lint.stdout).unwrap();
    let closed: Vec<&str> = lint.lines().filter(|line| line.ends_with("[closed-port]")).collect();
    assert!(closed.len() == 1 && closed[0].contains(" Service test/shut: "), "{lint}");
    let replayed = asked.command(&["replay", bundle.to_str().unwrap(), "--summary", "json"], "");
    let summary: serde_json::Value =
        serde_json::from_slice(&replayed.stdout).unwrap_or_else(|_| panic!("{replayed:?}"));
    assert_eq!(summary["recorded"]["different"], 0, "{summary:#}");
    assert!(summary["recorded"]["same"].as_u64().unwrap() > 50, "{summary:#}");
    asked.assert_learnt_policies_allow_what_packets_found(&flows, &found);
    asked.assert_rules_that_decided_have_hits();
    asked.assert_a_trial_names_what_an_edit_cuts();
    asked.assert_tiers_keep_a_pod_from_itself();
}

#[test]
fn a_daemon_without_endpoint_slices_goes_by_selectors() {
    let manifests = |spec: &str| {
        let spec = format!("clusterIP: {}, {spec} ports: [{{name: web, port: 80, targetPort: 8080}}]", NEAR[0]);
        pods(3)
            + &service("near", &spec, None)
            + &policy("server", "pod-1", "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n")
    };
    for (selector, expected) in [("selector: {app: pod-1},", ["allowed", "denied"]), ("", ["unknown", "unknown"])] {
        let fixture = Fixture::of(&manifests(selector), |_, _| {});
        let found = ["test/pod-0", "test/pod-2"].map(|client| {
            let mut command = Command::new(penstock_binary().unwrap());
            command.args(["explain", "--live", "--from", client, "--to", NEAR[0], "--port", "80"]);
            let output = command.env("NO_COLOR", "1").arg("--socket").arg(fixture.admin()).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.split(':').next().unwrap_or_default().to_owned()
        });
        assert_eq!(found, expected, "{selector}");
    }
}

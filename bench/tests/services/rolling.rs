//! A rolling update behind a Service, with policies that deny by default, while a client talks to it all the time.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use penstock_bench::probe::Site;
use penstock_bench::testbed::{KubeProxy, Namespace, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{WEB, service};

/// For an answer.
const LIMIT: Duration = Duration::from_secs(20);
/// Connections that are kept at the same time.
const OPEN: usize = 24;

/// A moment of the update: the pods that there are, and those among them that the Service has.
type Moment = (&'static [u8], &'static [u8]);

/// Pods 1 and 2 are replaced by 3 and 4. A pod is there before it serves, and ends after it has served.
const UPDATE: [Moment; 8] = [
    (&[1, 2], &[1, 2]),
    (&[1, 2, 3], &[1, 2]),
    (&[1, 2, 3], &[1, 2, 3]),
    (&[1, 2, 3], &[2, 3]),
    (&[2, 3], &[2, 3]),
    (&[2, 3, 4], &[2, 3, 4]),
    (&[2, 3, 4], &[3, 4]),
    (&[3, 4], &[3, 4]),
];

fn address(pod: u8, v6: bool) -> String {
    if v6 { format!("fd00:10:244:1::{}", 10 + pod) } else { format!("10.244.1.{}", 10 + pod) }
}

/// The objects of a moment: the client may send to the servers and to nobody else, and they take in nothing else.
fn manifests((present, serving): Moment) -> String {
    let all = pods(5);
    let documents: Vec<&str> = all.split("---\n").collect();
    let is_there = |document: &&str| {
        let number = (1..5).find(|number| document.contains(&format!("name: pod-{number},")));
        number.is_none_or(|number| present.contains(&number))
    };
    let mut yaml = documents.into_iter().filter(is_there).collect::<Vec<_>>().join("---\n");
    yaml += "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: test, name: deny}\n\
             spec: {podSelector: {}, policyTypes: [Ingress, Egress]}\n";
    let servers = "{podSelector: {matchExpressions: [{key: app, operator: In, values: [pod-1, pod-2, pod-3, pod-4]}]}}";
    yaml += &policy(
        "client",
        "pod-0",
        &format!("  egress: [{{to: [{servers}], ports: [{{port: 8080}}]}}]\n  policyTypes: [Egress]\n"),
    );
    for number in 1..5 {
        let from = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], ports: [{port: 8080}]}]\n";
        yaml += &policy(&format!("server-{number}"), &format!("pod-{number}"), from);
    }
    let [v4, v6] = [false, true].map(service);
    yaml += &format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: test, name: api}}\n\
         spec: {{clusterIPs: [{v4}, \"{v6}\"], ports: [{{name: web, port: {WEB}, targetPort: 8080}}]}}\n"
    );
    for v6 in [false, true] {
        let family = if v6 { "IPv6" } else { "IPv4" };
        let endpoints: Vec<String> =
            serving.iter().map(|pod| format!("{{addresses: [\"{}\"]}}", address(*pod, v6))).collect();
        yaml += &format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: test, name: api-{}, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: {family}\nendpoints: [{}]\nports: [{{name: web, port: 8080}}]\n",
            family.to_lowercase(),
            endpoints.join(", ")
        );
    }
    yaml
}

/// kube-proxy's rules of a moment.
fn install(node: &Namespace, mode: ProxyMode, (_, serving): Moment) {
    let backend = |(pod, v6): (u8, bool)| SocketAddr::new(address(pod, v6).parse().unwrap(), 8080);
    let backends = serving.iter().flat_map(|pod| [(*pod, false), (*pod, true)]).map(backend).collect();
    let ports = vec![ProxiedPort { protocol: ServiceProtocol::Tcp, number: WEB, node_port: None, backends }];
    let api = ProxiedService { name: "test/api".to_owned(), addresses: [false, true].map(service).into(), ports };
    KubeProxy { mode, node: Vec::new(), services: vec![api] }.install(node).unwrap();
}

/// A connection to the server that the Service has chosen.
struct Connection {
    stream: TcpStream,
    server: u32,
}

impl Connection {
    fn open(client: &Site, v6: bool) -> io::Result<Self> {
        let mut stream =
            client.namespace.run(|| TcpStream::connect_timeout(&SocketAddr::new(service(v6), WEB), LIMIT))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_nodelay(true)?;
        let mut greeting = [0; 4];
        stream.read_exact(&mut greeting)?;
        Ok(Self { stream, server: u32::from_be_bytes(greeting) })
    }

    fn is_answered(&mut self) -> io::Result<()> {
        let (request, mut reply) = ([0x5a; 8], [0; 8]);
        self.stream.write_all(&request)?;
        self.stream.read_exact(&mut reply)?;
        if reply == request.map(|byte| !byte) { Ok(()) } else { Err(io::Error::other("another answer")) }
    }
}

/// The client, on a thread of its own.
#[derive(Default)]
struct Load {
    is_over: AtomicBool,
    /// Exchanges in rounds over all connections.
    rounds: AtomicUsize,
    /// Servers of pods that have ended, and those that any connection had.
    ended: Mutex<BTreeSet<u32>>,
    reached: Mutex<BTreeSet<u32>>,
    lost: Mutex<Vec<String>>,
}

impl Load {
    fn run(&self, client: &Site) {
        let mut connections: Vec<Connection> = Vec::new();
        let mut count = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            match Connection::open(client, count % 2 == 1) {
                Ok(connection) => {
                    self.reached.lock().unwrap().insert(connection.server);
                    connections.push(connection);
                }
                Err(error) => self.lost.lock().unwrap().push(format!("connection {count} does not open: {error}")),
            }
            count += 1;
            connections.retain_mut(|connection| {
                let has_ended = || self.ended.lock().unwrap().contains(&connection.server);
                if has_ended() {
                    return false;
                }
                let Err(error) = connection.is_answered() else { return true };
                let has_ended = self.ended.lock().unwrap().contains(&connection.server);
                if !has_ended {
                    self.lost.lock().unwrap().push(format!("connection to server {}: {error}", connection.server));
                }
                false
            });
            if connections.len() > OPEN {
                // Old ones stay: they are those that an update could cut.
                connections.remove(OPEN / 2);
            }
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wait_for_rounds(&self, count: usize) {
        let (until, deadline) = (self.rounds.load(Ordering::Relaxed) + count, Instant::now() + 3 * LIMIT);
        while self.rounds.load(Ordering::Relaxed) < until && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(self.rounds.load(Ordering::Relaxed) >= until, "the client is stuck: {:?}", self.lost.lock().unwrap());
    }
}

fn update(mode: ProxyMode) {
    let fixture = Fixture::of(&manifests((&[1, 2, 3, 4], &[1, 2])), |cluster, _| {
        install(cluster.node.namespace(), mode, UPDATE[0]);
    });
    let load = Load::default();
    let identity = |pod: u8| fixture.target(&format!("test/pod-{pod}"), false).0;
    fixture.enforce(&manifests(UPDATE[0]));
    std::thread::scope(|scope| {
        scope.spawn(|| load.run(fixture.site("test/pod-0")));
        for moments in UPDATE.windows(2) {
            load.wait_for_rounds(12);
            let [before, now] = [moments[0], moments[1]];
            let gone = before.0.iter().filter(|pod| !now.0.contains(pod));
            load.ended.lock().unwrap().extend(gone.map(|pod| identity(*pod)));
            // A pod that begins to serve is ready: its policy is in effect before rules lead to it.
            if before.0 != now.0 {
                fixture.enforce(&manifests(now));
            } else {
                fixture.save("all.yaml", &manifests(now));
            }
            install(fixture.cluster.node.namespace(), mode, now);
        }
        load.wait_for_rounds(12);
        load.is_over.store(true, Ordering::Relaxed);
    });
    let lost = load.lost.lock().unwrap();
    let log = || [fixture.daemon.log().lines(), fixture.statistics()].concat().join("\n");
    assert!(lost.is_empty(), "{mode:?}\n{}\n{}", lost.join("\n"), log());
    let all: BTreeSet<u32> = (1..5).map(identity).collect();
    assert_eq!(*load.reached.lock().unwrap(), all, "every pod has served");
}

#[test]
fn an_update_under_default_deny_cuts_only_what_ends() {
    [ProxyMode::Iptables, ProxyMode::Nftables].into_iter().for_each(update);
}

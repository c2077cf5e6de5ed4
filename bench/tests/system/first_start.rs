//! The first start on a node that is in use: connections of all kinds that are older than the daemon notice nothing, neither without a
//! policy nor when policies come that allow them.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use penstock_admin::client::Client;
use penstock_admin::types::Status;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::testbed::{Daemon, DaemonConfig, Namespace, Outside, ScratchDir};

use crate::fixture::{pods, policy};

/// For an answer, also where a segment has to be sent again.
const LIMIT: Duration = Duration::from_secs(30);
/// The first of the servers' ports, which policies allow later.
const PORT: u16 = 7000;
/// One that they do not allow.
const OTHER: u16 = 7010;
const OUTSIDE: [&str; 2] = ["198.51.100.2", "fd00:51:100::2"];
/// Both pods are isolated in both directions, and what is open is allowed.
const EGRESS: &str = "  policyTypes: [Ingress, Egress]\n  egress: [{ports: [{port: 7000, endPort: 7002}, {port: 7000, endPort: 7002, protocol: UDP}]}]\n";
const INGRESS: &str = "  policyTypes: [Ingress, Egress]\n  ingress: [{ports: [{port: 7000, endPort: 7002}, {port: 7000, endPort: 7002, protocol: UDP}]}]\n";

/// The behaviour of a connection from its beginning on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Nothing, until policies are in effect.
    IdleUntilPolicies,
    /// Nothing, until the daemon runs.
    IdleUntilStart,
    /// Data to and fro, all the time.
    Busy,
    /// Its client has ended its side: data comes from the server alone. Policies that do not let the server open a connection cut it, since
    /// nothing shows who opened it.
    ClosedByClient,
    /// The other way round.
    ClosedByServer,
    Datagrams,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::IdleUntilPolicies,
        Self::IdleUntilStart,
        Self::Busy,
        Self::ClosedByClient,
        Self::ClosedByServer,
        Self::Datagrams,
    ];
}

enum Ends {
    Tcp(TcpStream, TcpStream),
    /// The client, and the server that all clients of an address have.
    Udp(UdpSocket, UdpSocket),
}

struct Connection {
    kind: Kind,
    name: String,
    ends: Ends,
    sent: u64,
}

impl Connection {
    /// Data in each direction that is open.
    fn exchange(&mut self) -> io::Result<()> {
        self.sent += 1;
        let number = self.sent;
        match &mut self.ends {
            Ends::Tcp(client, server) => {
                if self.kind != Kind::ClosedByClient {
                    pass(client, server, number)?;
                }
                if self.kind != Kind::ClosedByServer {
                    pass(server, client, number)?;
                }
                Ok(())
            }
            Ends::Udp(client, server) => ask(client, server, number),
        }
    }
}

fn pass(from: &mut TcpStream, to: &mut TcpStream, number: u64) -> io::Result<()> {
    from.write_all(&number.to_be_bytes())?;
    let mut bytes = [0; 8];
    to.read_exact(&mut bytes)?;
    assert_eq!(u64::from_be_bytes(bytes), number);
    Ok(())
}

/// Datagrams may be lost while programs are attached.
fn ask(client: &UdpSocket, server: &UdpSocket, number: u64) -> io::Result<()> {
    let (mut bytes, deadline) = ([0; 8], Instant::now() + LIMIT);
    while Instant::now() < deadline {
        client.send(&number.to_be_bytes())?;
        let Ok((_, from)) = server.recv_from(&mut bytes) else { continue };
        server.send_to(&bytes, from)?;
        if client.recv(&mut bytes).is_ok() && u64::from_be_bytes(bytes) == number {
            return Ok(());
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// A node with two pods and a machine behind it, and no daemon.
struct Node {
    cluster: Cluster,
    outside: Outside,
    config: DaemonConfig,
    scratch: ScratchDir,
}

impl Node {
    fn new() -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::write(manifests.join("all.yaml"), pods(2)).unwrap();
        let mut cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
        let outside = cluster.node.add_outside("outside").unwrap();
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.admin = Some(scratch.path().join("admin.sock"));
        Self { cluster, outside, config, scratch }
    }

    /// A pod, or the machine outside: its namespace and its address.
    fn end(&self, name: &str, v6: bool) -> (&Namespace, IpAddr) {
        match name {
            "outside" => (self.outside.namespace(), OUTSIDE[usize::from(v6)].parse().unwrap()),
            pod => {
                let pod = self.cluster.node.pod(pod).unwrap();
                (pod.namespace(), pod.address(v6).unwrap())
            }
        }
    }

    /// So many connections of all kinds between all ends.
    fn open(&self, count: usize) -> Vec<Connection> {
        const WAYS: usize = 3;
        let ways: [_; WAYS] = [("test/pod-0", "test/pod-1"), ("test/pod-0", "outside"), ("outside", "test/pod-1")];
        let mut all = Vec::with_capacity(count);
        let ways = (0..).zip(ways).flat_map(|(number, way)| [(number, way, false), (number, way, true)]);
        for (way, (from, to), v6) in ways {
            let here = all.len();
            let ((client, _), (server, address)) = (self.end(from, v6), self.end(to, v6));
            let at = SocketAddr::new(address, PORT + way);
            let listener = server.listen(at).unwrap();
            let datagrams = server.udp(at).unwrap();
            datagrams.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let of_way = (count - here).min(count.div_ceil(2 * WAYS));
            for number in 0..of_way {
                let kind = Kind::ALL[number % Kind::ALL.len()];
                let ends = match kind {
                    Kind::Datagrams => Ends::Udp(connected_socket(client, at), datagrams.try_clone().unwrap()),
                    _ => tcp(client, &listener, at),
                };
                let name = format!("{kind:?} from {from} to {at}, number {number}");
                let mut connection = Connection { kind: Kind::Busy, name, ends, sent: 0 };
                connection.exchange().unwrap_or_else(|error| panic!("{}, before a daemon: {error}", connection.name));
                connection.kind = kind;
                close_half(&connection);
                all.push(connection);
            }
        }
        all
    }

    fn add_policies(&self, daemon: &Daemon) {
        let yaml = policy("client", "pod-0", EGRESS) + &policy("server", "pod-1", INGRESS);
        let seen = daemon.log().len();
        let file = self.config.manifests.join("policies.yaml");
        self.scratch.save(&file, yaml.trim_start_matches("---\n")).unwrap();
        daemon.log().wait_for_after(seen, "published", LIMIT).unwrap();
        let client = Client::new(self.config.admin.as_deref().unwrap()).unwrap();
        let deadline = Instant::now() + LIMIT;
        while !client.get::<Status>("/v1/status", &()).unwrap().in_force {
            assert!(Instant::now() < deadline, "the policies are not in effect");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether a pod can open a connection to a port of the other one.
    fn opens(&self, port: u16) -> bool {
        let ((client, _), (server, address)) = (self.end("test/pod-0", false), self.end("test/pod-1", false));
        let at = SocketAddr::new(address, port);
        let _listener = server.listen(at).unwrap();
        client.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(2))).is_ok()
    }
}

fn connected_socket(client: &Namespace, at: SocketAddr) -> UdpSocket {
    let any = if at.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = client
        .run(|| {
            let socket = UdpSocket::bind(any)?;
            socket.connect(at).map(|()| socket)
        })
        .unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

fn tcp(client: &Namespace, listener: &TcpListener, at: SocketAddr) -> Ends {
    let client = client.run(|| TcpStream::connect_timeout(&at, LIMIT)).unwrap();
    let (server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(LIMIT)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    Ends::Tcp(client, server)
}

fn close_half(connection: &Connection) {
    let Ends::Tcp(client, server) = &connection.ends else { return };
    let (closing, mut other) = match connection.kind {
        Kind::ClosedByClient => (client, server),
        Kind::ClosedByServer => (server, client),
        _ => return,
    };
    closing.shutdown(Shutdown::Write).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "{}: the end has arrived", connection.name);
}

/// The first of these connections that breaks.
fn broken(connections: &mut [Connection], when: &str) -> Option<String> {
    connections.iter_mut().find_map(|connection| {
        let error = connection.exchange().err()?;
        Some(format!("{}, {when}: {error}", connection.name))
    })
}

/// Data on all of these until the end; how often they had any, or the first that broke.
fn keep_busy(mut connections: Vec<Connection>, is_over: &AtomicBool) -> Result<usize, String> {
    let mut rounds = 0;
    while !is_over.load(Ordering::Relaxed) {
        if let Some(found) = broken(&mut connections, "all the time") {
            return Err(found);
        }
        rounds += 1;
    }
    Ok(rounds)
}

fn none_breaks(count: usize) {
    let node = Node::new();
    let (busy, mut others): (Vec<_>, Vec<_>) =
        node.open(count).into_iter().partition(|connection| connection.kind == Kind::Busy);
    assert!(node.opens(OTHER), "nothing is denied");
    others.sort_by_key(|connection| connection.kind != Kind::IdleUntilPolicies);
    let idle = others.iter().filter(|connection| connection.kind == Kind::IdleUntilPolicies).count();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let busy = scope.spawn(|| keep_busy(busy, &is_over));
        let daemon = Daemon::start(node.cluster.node.namespace(), &node.config).unwrap();
        let log = || daemon.log().lines().join("\n");
        let mut found = broken(&mut others[idle..], "after the first start");
        if found.is_none() {
            node.add_policies(&daemon);
            others.retain(|connection| connection.kind != Kind::ClosedByClient);
            found = broken(&mut others, "under policies");
        }
        let (is_allowed, is_denied) = (node.opens(PORT), !node.opens(OTHER));
        is_over.store(true, Ordering::Relaxed);
        let rounds = busy.join().unwrap();
        assert!(found.is_none() && rounds.is_ok(), "{found:?} {rounds:?}\n{}", log());
        assert!(is_allowed && is_denied, "what policies allow, and what not: {is_allowed} {is_denied}");
        println!("{count} connections, {rounds:?} rounds of the busy ones");
    });
}

#[test]
fn no_connection_breaks_on_the_day_of_installation() {
    none_breaks(200);
}

#[test]
#[ignore = "takes a minute: make test-long"]
fn none_of_a_thousand_breaks_on_the_day_of_installation() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    none_breaks(1000);
}

//! Pods whose annotations limit their connections.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use penstock_admin::types::ConnectionLimitStatus;
use penstock_bench::probe::Site;

use crate::fixture::{Fixture, pods};

const PORT: u16 = 7000;
/// Until retransmissions have come on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);
/// How long a connection is tried that a limit refuses, which is silent.
const REFUSED: Duration = Duration::from_millis(600);

/// Pods, of which these have these annotations.
fn limited(count: u8, limits: &[(&str, &str)]) -> String {
    limits.iter().fold(pods(count), |yaml, (pod, annotations)| {
        let annotated = format!("name: {pod}, annotations: {{{annotations}}}, labels");
        yaml.replace(&format!("name: {pod}, labels"), &annotated)
    })
}

fn address(site: &Site, v6: bool) -> SocketAddr {
    SocketAddr::new(site.address(v6).unwrap(), PORT)
}

fn connect(from: &Site, to: SocketAddr, limit: Duration) -> Option<TcpStream> {
    from.namespace.run(|| TcpStream::connect_timeout(&to, limit)).ok()
}

fn limits_of(fixture: &Fixture, pod: &str) -> Vec<ConnectionLimitStatus> {
    fixture.status().pods.into_iter().find(|found| found.pod == pod).unwrap().limits
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Also where programs would open what repeats.
#[test]
fn a_pod_opens_only_so_many_connections_a_second() {
    const MOST: u64 = 5;
    const TRIES: u64 = 300;
    let rates = |most: u64| {
        let egress = format!("policy.penstock.dev/egress-connections-per-second: \"{most}\"");
        let ingress = format!("policy.penstock.dev/ingress-connections-per-second: \"{most}\"");
        limited(4, &[("pod-0", &egress), ("pod-3", &ingress)])
    };
    let fixture = Fixture::of(&rates(MOST), |_, _| {});
    let drops = |pod: &str| fixture.port(pod).drops.get("connection_rate").copied().unwrap_or(0);
    // A socket each, so that each datagram is of another connection.
    let send = |from: &str, to: &str| {
        let (client, there, start) = (fixture.site(from), address(fixture.site(to), false), Instant::now());
        for _ in 0..TRIES {
            client.namespace.udp(("0.0.0.0", 0)).unwrap().send_to(b"opens", there).unwrap();
        }
        start.elapsed().as_secs()
    };
    for (from, to, limited, direction) in
        [("test/pod-0", "test/pod-1", "test/pod-0", "egress"), ("test/pod-1", "test/pod-3", "test/pod-3", "ingress")]
    {
        let before = drops(from);
        let opens = MOST * (send(from, to) + 2);
        let refused = || drops(from) - before;
        wait_until("what is too much is dropped", || refused() + opens >= TRIES);
        assert!(refused() <= TRIES - MOST, "{direction}: {} of {TRIES}", refused());
        let limits = limits_of(&fixture, limited);
        let [limit] = &limits[..] else { panic!("one direction is limited: {limits:?}") };
        assert_eq!((limit.direction.as_str(), limit.each_second), (direction, Some(MOST as u32)));
        assert_eq!(limit.refused_each_second, refused());
    }
    send("test/pod-2", "test/pod-1");
    assert_eq!(drops("test/pod-2"), 0, "no other pod has less");
    // Without the annotations they open what they like.
    fixture.enforce(&pods(4));
    let before = [drops("test/pod-0"), drops("test/pod-1")];
    send("test/pod-0", "test/pod-1");
    send("test/pod-1", "test/pod-3");
    assert_eq!([drops("test/pod-0"), drops("test/pod-1")], before);
    assert!(limits_of(&fixture, "test/pod-0").is_empty());
}

/// Connections of both ends of the same node count at the pod that opens, and at the one that they are opened to.
#[test]
fn so_many_connections_of_a_pod_are_open_and_no_more() {
    let egress = ("pod-0", "policy.penstock.dev/egress-open-connections: \"3\"");
    let ingress = ("pod-1", "policy.penstock.dev/ingress-open-connections: \"3\"");
    for (limit, direction) in [(egress, "egress"), (ingress, "ingress")] {
        let mut fixture = Fixture::of(&pods(3), |_, config| {
            let directory = config.manifests.parent().unwrap().display();
            config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\n");
        });
        let [from, other, to] = ["test/pod-0", "test/pod-2", "test/pod-1"].map(|name| fixture.site(name).clone());
        let there = address(&to, direction == "ingress");
        let _server: TcpListener = to.namespace.listen(there).unwrap();
        let open = |from: &Site| connect(from, there, PATIENCE).expect("as many may be open");
        // One that is older than the annotation counts.
        let mut streams = vec![open(&from)];
        fixture.enforce(&limited(3, &[limit]));
        let limited = format!("test/{}", limit.0);
        wait_until("what is open counts", || limits_of(&fixture, &limited)[0].open == Some(1));
        streams.extend([open(&from), open(&from)]);
        assert_eq!(limits_of(&fixture, &limited)[0].open, Some(3));
        assert!(connect(&from, there, REFUSED).is_none(), "{direction}: a fourth");
        let status = limits_of(&fixture, &limited).remove(0);
        assert!(status.direction == direction && status.refused_open > 0, "{status:?}");
        assert_eq!(connect(&other, there, REFUSED).is_some(), direction == "egress", "another pod opens one");
        // After a restart what is open still counts, and what was closed makes room.
        fixture.kill();
        fixture.restart();
        wait_until("what is open counts", || {
            limits_of(&fixture, &limited).first().is_some_and(|it| it.open >= Some(3))
        });
        assert!(connect(&from, there, REFUSED).is_none(), "{direction}: a fourth after a restart");
        streams.pop();
        drop(_server);
        let _server = to.namespace.listen(there);
        wait_until("an end makes room", || connect(&from, there, REFUSED).is_some());
    }
}

/// Nobody has to wait until the kernel's probes, or what nobody answers, go.
#[test]
fn the_nodes_own_connections_are_under_no_pods_limit() {
    let ingress = "policy.penstock.dev/ingress-open-connections: \"1\", \
                   policy.penstock.dev/ingress-connections-per-second: \"1\"";
    let fixture = Fixture::of(&limited(2, &[("pod-1", ingress)]), |_, _| {});
    let (node, to) = (fixture.cluster.node.namespace(), fixture.site("test/pod-1"));
    let there = address(to, false);
    let _server = to.namespace.listen(there).unwrap();
    let open = || node.run(|| TcpStream::connect_timeout(&there, PATIENCE)).expect("a probe");
    let _probes = [open(), open(), open()];
    let _first = connect(fixture.site("test/pod-0"), there, PATIENCE).expect("one may be open");
    assert!(connect(fixture.site("test/pod-0"), there, REFUSED).is_none());
    open();
}

//! Domain names in egress rules, with a resolver that runs outside.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use penstock_bench::probe::Site;
use penstock_bench::testbed::{Attach, Outside, ServiceProcess};

use crate::fixture::{Fixture, pods};

/// Until a retransmission has come on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How long a connection is tried that is denied. A denial is silent.
const DENIED: Duration = Duration::from_millis(400);
const PORT: u16 = 7000;
/// TTL of the IPv4 address's name, in seconds. That of the IPv6 address is long.
const SHORT: u64 = 2;

/// `pod-0` may ask the resolver, and connect to what it says of names below `example.org`.
fn policy(resolver: IpAddr) -> String {
    format!(
        "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: names}}\n\
         spec:\n  tier: Admin\n  priority: 1\n\
         \x20 subject: {{pods: {{podSelector: {{matchLabels: {{app: pod-0}}}}}}}}\n  egress:\n\
         \x20 - {{action: Accept, to: [{{networks: [{resolver}/32]}}], protocols: [{{udp: {{destinationPort: {{number: 53}}}}}}]}}\n\
         \x20 - {{action: Accept, to: [{{domainNames: ['*.Example.org.']}}], protocols: [{{tcp: {{destinationPort: {{number: {PORT}}}}}}}]}}\n\
         \x20 - {{action: Deny, to: [{{networks: [0.0.0.0/0, '::/0']}}]}}\n"
    )
}

/// A machine outside with a resolver, and a server that sends back what it gets.
struct World {
    outside: Outside,
    addresses: [IpAddr; 2],
    _resolver: ServiceProcess,
}

impl World {
    fn start(outside: Outside) -> Self {
        let address = |v6| outside.addresses().iter().copied().find(|address| address.is_ipv6() == v6).unwrap();
        let addresses = [address(false), address(true)];
        let mut command = outside.namespace().command("dnsmasq");
        command.args(["--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces"]);
        command.args(["--user=root", "--pid-file", "--port=53"]);
        command.arg(format!("--listen-address={}", addresses[0]));
        command.arg(format!("--host-record=www.example.org,{},{SHORT}", addresses[0]));
        command.arg(format!("--host-record=six.example.org,{},600", addresses[1]));
        command.arg(format!("--host-record=www.example.com,{},600", addresses[0]));
        command.arg("--cname=alias.example.org,six.example.org,600");
        let resolver = ServiceProcess::start(command).expect("dnsmasq is installed: `make setup` does that");
        for address in addresses {
            let listener = outside.namespace().listen((address, PORT)).unwrap();
            thread::spawn(move || {
                for mut stream in listener.incoming().flatten() {
                    thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut stream));
                }
            });
        }
        Self { outside, addresses, _resolver: resolver }
    }
}

/// The answer's bytes for a name and a type of record. Each time from the same port: from the second answer on, packets of an
/// established connection bring it.
fn resolve(socket: &UdpSocket, resolver: IpAddr, name: &str, rtype: u8) -> Vec<u8> {
    let mut question = vec![0, rtype, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(label.len() as u8);
        question.extend(label.as_bytes());
    }
    question.extend([0, 0, rtype, 0, 1]);
    let deadline = Instant::now() + TIMEOUT;
    let mut answer = [0; 512];
    loop {
        assert!(Instant::now() < deadline, "no answer for {name}");
        socket.send_to(&question, (resolver, 53)).unwrap();
        if let Ok((length, _)) = socket.recv_from(&mut answer)
            && answer[..2] == question[..2]
        {
            return answer[..length].to_vec();
        }
    }
}

fn connect(from: &Site, to: IpAddr, limit: Duration) -> Option<TcpStream> {
    from.namespace.run(|| TcpStream::connect_timeout(&SocketAddr::new(to, PORT), limit)).ok()
}

fn is_denied(from: &Site, to: IpAddr) -> bool {
    connect(from, to, DENIED).is_none()
}

fn exchange(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(b"there").unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"there");
}

const A: u8 = 1;
const AAAA: u8 = 28;

fn pods_reach_what_their_resolver_says(attach: Attach) {
    let mut world = None;
    let mut fixture = Fixture::of(&pods(1), |cluster, config| {
        world = Some(World::start(cluster.node.add_outside("outside").unwrap()));
        let directory = config.manifests.parent().unwrap().display();
        config.attach = attach;
        config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\n");
        config.sections += "[domain_names]\nenabled = true\n";
    });
    let World { outside, addresses: [v4, v6], .. } = world.as_ref().unwrap();
    let pod = fixture.site("test/pod-0").clone();
    let socket = pod.namespace.udp((pod.address(false).unwrap(), 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    // Established before the pod has a rule with names.
    assert!(resolve(&socket, *v4, "www.example.org", A).ends_with(&octets(*v4)), "{:?}", outside.addresses());
    resolve(&socket, *v4, "www.example.org", A);
    fixture.enforce(&(pods(1) + &policy(*v4)));
    assert!(is_denied(&pod, *v4) && is_denied(&pod, *v6), "nothing is learnt");
    resolve(&socket, *v4, "www.example.com", A);
    assert!(is_denied(&pod, *v4), "no rule has this name");
    resolve(&socket, *v4, "www.example.org", A);
    let heard = Instant::now();
    let mut stream = connect(&pod, *v4, TIMEOUT).expect("allowed after the answer");
    exchange(&mut stream);
    assert!(is_denied(&pod, *v6), "not for this address");
    assert!(resolve(&socket, *v4, "alias.example.org", AAAA).ends_with(&octets(*v6)));
    exchange(&mut connect(&pod, *v6, TIMEOUT).expect("allowed after the answer"));
    let left = (heard + Duration::from_millis(1000 * SHORT + 100)).saturating_duration_since(Instant::now());
    thread::sleep(left);
    assert!(is_denied(&pod, *v4), "expired");
    exchange(&mut stream);
    resolve(&socket, *v4, "www.example.org", A);
    exchange(&mut connect(&pod, *v4, TIMEOUT).expect("allowed after another answer"));
    let names = fixture.status().domain_names.expect("it is on");
    assert!(names.kept >= 4 && names.learnt >= 5 && names.not_understood == 0, "{names:?}");
    // A second after a change the file is written. The next daemon knows the name that lasts, and no expired one.
    thread::sleep(Duration::from_millis(1000 * SHORT + 500));
    fixture.kill();
    fixture.restart();
    exchange(&mut connect(&pod, *v6, TIMEOUT).expect("learnt before the restart"));
    assert!(is_denied(&pod, *v4), "expired before the restart");
    exchange(&mut stream);
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

#[test]
fn pods_reach_what_their_resolver_says_with_xdp() {
    pods_reach_what_their_resolver_says(Attach::Xdp);
}

#[test]
fn pods_reach_what_their_resolver_says_with_tcx() {
    pods_reach_what_their_resolver_says(Attach::Tcx);
}

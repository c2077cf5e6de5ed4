//! Domain names in egress rules, with a resolver that runs outside.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use penstock_bench::probe::Site;
use penstock_bench::testbed::{Outside, ServiceProcess};

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
         \x20 - {{action: Accept, to: [{{networks: [{resolver}/32]}}], protocols: [{{udp: {{destinationPort: {{number: 53}}}}}}, {{tcp: {{destinationPort: {{number: 53}}}}}}]}}\n\
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

/// A question for a name's records of a type, with this number.
fn question(name: &str, rtype: u8, number: u16) -> Vec<u8> {
    let [high, low] = number.to_be_bytes();
    let mut question = vec![high, low, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(label.len() as u8);
        question.extend(label.as_bytes());
    }
    question.extend([0, 0, rtype, 0, 1]);
    question
}

/// The same by TCP, in two segments.
fn resolve_by_tcp(from: &Site, resolver: IpAddr, name: &str, rtype: u8) -> Vec<u8> {
    let there = SocketAddr::new(resolver, 53);
    let mut stream = from.namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT)).expect("a resolver");
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_nodelay(true).unwrap();
    let question = question(name, rtype, 77);
    stream.write_all(&(question.len() as u16).to_be_bytes()).unwrap();
    stream.write_all(&question).unwrap();
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut answer).unwrap();
    answer
}

/// The answer's bytes for a name and a type of record. Each time from the same port: from the second answer on, packets of an
/// established connection bring it.
fn resolve(socket: &UdpSocket, resolver: IpAddr, name: &str, rtype: u8) -> Vec<u8> {
    let question = question(name, rtype, rtype.into());
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

#[test]
fn pods_reach_what_their_resolver_says() {
    let (mut world, mut state) = (None, PathBuf::new());
    let mut fixture = Fixture::of(&pods(1), |cluster, config| {
        world = Some(World::start(cluster.node.add_outside("outside").unwrap()));
        state = config.manifests.parent().unwrap().join("run");
        config.conntrack = format!("mapping = \"{}/conntrack\"\nentries = 4096\n", state.display());
        let resolver = world.as_ref().unwrap().addresses[0];
        config.sections += &format!("[domain_names]\nresolvers = [\"{resolver}\"]\n");
        config.environment.push(("MIN_TTL".into(), "1000".into()));
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
    let asked = SystemTime::now();
    resolve(&socket, *v4, "www.example.org", A);
    let expires = Instant::now() + Duration::from_millis(1000 * SHORT + 500);
    exchange(&mut connect(&pod, *v4, TIMEOUT).expect("allowed after another answer"));
    let names = fixture.status().domain_names.expect("it is on");
    assert!(names.kept >= 4 && names.learnt >= 5 && names.not_understood == 0, "{names:?}");
    // A second after a change the file is written, later on a busy machine. The next daemon knows the name that lasts, and no expired one.
    wait_until_written(&state, asked);
    thread::sleep(expires.saturating_duration_since(Instant::now()));
    fixture.kill();
    fixture.restart();
    exchange(&mut connect(&pod, *v6, TIMEOUT).expect("learnt before the restart"));
    assert!(is_denied(&pod, *v4), "expired before the restart");
    exchange(&mut stream);
}

/// Waits until the daemon has written the names that pods have learnt since then.
fn wait_until_written(folder: &Path, since: SystemTime) {
    let deadline = Instant::now() + TIMEOUT;
    let is_written = || {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut names = files.filter(|path| path.extension().is_some_and(|extension| extension == "names"));
        names.any(|path| path.metadata().is_ok_and(|file| file.modified().unwrap() > since))
    };
    while !is_written() {
        assert!(Instant::now() < deadline, "nothing is written to {}", folder.display());
        thread::sleep(Duration::from_millis(50));
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// A resolver in a namespace, with these arguments.
fn dnsmasq(mut command: std::process::Command, port: u16, arguments: &[String]) -> ServiceProcess {
    command.args(["--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces"]);
    command.args(["--user=root", "--pid-file", &format!("--port={port}")]).args(arguments);
    ServiceProcess::start(command).expect("dnsmasq is installed: `make setup` does that")
}

fn ip(mut command: std::process::Command, arguments: &str) {
    let status = command.args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}: {status}");
}

/// As many names as pass in some seconds, or as `ANSWERED_NAMES` says: each is another address, which the pod connects to at once.
#[test]
fn no_first_packet_after_an_answer_is_denied() {
    /// Most that a pod keeps.
    const KEPT: u16 = 8192;
    let names: u16 = std::env::var("ANSWERED_NAMES").map_or(2000, |names| names.parse().expect("a number"));
    let address_of = |number: u16| format!("198-18-{}-{}", number / 250, 1 + number % 250);
    let mut world = None;
    let fixture = Fixture::of(&pods(1), |cluster, config| {
        let outside = cluster.node.add_outside("outside").unwrap();
        let v4 = *outside.addresses().iter().find(|address| address.is_ipv4()).unwrap();
        ip(outside.namespace().command("ip"), "route add local 198.18.0.0/16 dev lo");
        ip(cluster.node.namespace().command("ip"), &format!("route add 198.18.0.0/16 via {v4}"));
        let arguments = [format!("--listen-address={v4}"), "--synth-domain=names.example.org,198.18.0.0/16".to_owned()];
        let resolver = dnsmasq(outside.namespace().command("dnsmasq"), 53, &arguments);
        let listener = outside.namespace().listen(("0.0.0.0".parse::<IpAddr>().unwrap(), PORT)).unwrap();
        thread::spawn(move || listener.incoming().for_each(drop));
        config.sections += &format!("[domain_names]\nresolvers = [\"{v4}\"]\n");
        world = Some((outside, v4, resolver));
    });
    let v4 = world.as_ref().unwrap().1;
    let pod = fixture.site("test/pod-0").clone();
    fixture.enforce(&(pods(1) + &policy(v4)));
    let socket = pod.namespace.udp((pod.address(false).unwrap(), 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let denied = || fixture.port("test/pod-0").drops.get("egress_denied").copied().unwrap_or(0);
    for number in 0..names {
        let address = address_of(number);
        let site: IpAddr = address.replace('-', ".").parse().unwrap();
        assert!(resolve(&socket, v4, &format!("{address}.names.example.org"), A).ends_with(&octets(site)));
        assert!(connect(&pod, site, TIMEOUT).is_some(), "{site}");
    }
    assert_eq!(denied(), 0, "of {names} first packets");
    assert!(is_denied(&pod, "198.18.99.99".parse().unwrap()) && denied() > 0, "what no answer gave");
    // The commands tell what was learnt.
    let penstock = |arguments: &[&str]| {
        let mut command = std::process::Command::new(penstock_bench::testbed::penstock_binary().unwrap());
        let output = command.args(arguments).arg("--socket").arg(fixture.admin()).output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    let (address, name) = (address_of(names - 1), format!("{}.names.example.org", address_of(names - 1)));
    let listed = penstock(&["names", "--pod", "test/pod-0", "--name", &name]);
    assert!(listed.contains(&format!("test/pod-0  {name}  {}  ", address.replace('-', "."))), "{listed}");
    assert!(penstock(&["names", "--limit", "10"]).contains(&format!("10 of {} names", names.min(KEPT))));
    let explained =
        penstock(&["explain", "--live", "--from", "test/pod-0", "--to", &name, "--port", &format!("{PORT}/TCP")]);
    assert!(explained.starts_with(&format!("allowed: test/pod-0 -> {name}")), "{explained}");
    let explained =
        penstock(&["explain", "--live", "--from", "test/pod-0", "--to", "x.example.org", "--port", "22/TCP"]);
    assert!(explained.starts_with("denied: ") && explained.contains("no rule accepts this name"), "{explained}");
}

/// NodeLocal DNSCache listens at an address of the node's link, which is one of the resolvers by default.
#[test]
fn answers_by_tcp_and_of_a_cache_on_the_node_count() {
    const CACHE: &str = "169.254.20.10";
    let mut world = None;
    let fixture = Fixture::of(&pods(1), |cluster, _| {
        let outside = cluster.node.add_outside("outside").unwrap();
        let v4 = *outside.addresses().iter().find(|address| address.is_ipv4()).unwrap();
        let listener = outside.namespace().listen((v4, PORT)).unwrap();
        thread::spawn(move || listener.incoming().for_each(drop));
        let node = cluster.node.namespace();
        ip(node.command("ip"), &format!("address add {CACHE}/32 dev lo"));
        let names = ["www.example.org", "tcp.example.org"].map(|name| format!("--host-record={name},{v4},600"));
        let arguments = [&names[..], &[format!("--listen-address={CACHE}")]].concat();
        world = Some((outside, v4, dnsmasq(node.command("dnsmasq"), 53, &arguments)));
    });
    let (cache, v4) = (CACHE.parse().unwrap(), world.as_ref().unwrap().1);
    let pod = fixture.site("test/pod-0").clone();
    for (name, is_tcp) in [("tcp.example.org", true), ("www.example.org", false)] {
        fixture.enforce(&(pods(1) + &policy(cache).replace("*.Example.org.", name)));
        assert!(is_denied(&pod, v4), "nothing is learnt of {name}");
        let answer = if is_tcp {
            resolve_by_tcp(&pod, cache, name, A)
        } else {
            let socket = pod.namespace.udp((pod.address(false).unwrap(), 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            resolve(&socket, cache, name, A)
        };
        assert!(answer.ends_with(&octets(v4)));
        assert!(connect(&pod, v4, TIMEOUT).is_some(), "allowed after the answer for {name}");
    }
    let names = fixture.status().domain_names.expect("it is on by default");
    assert!(names.has_resolver && names.unasked == 0 && names.not_understood == 0, "{names:?}");
}

/// Where the node doesn't have the cache's address, a machine may have it that the node's routes lead to.
#[test]
fn answers_from_the_caches_address_count_only_on_a_node_that_has_it() {
    const CACHE: &str = "169.254.20.10";
    let mut world = None;
    let fixture = Fixture::of(&pods(1), |cluster, _| {
        let outside = cluster.node.add_outside("outside").unwrap();
        let v4 = *outside.addresses().iter().find(|address| address.is_ipv4()).unwrap();
        let listener = outside.namespace().listen((v4, PORT)).unwrap();
        thread::spawn(move || listener.incoming().for_each(drop));
        ip(outside.namespace().command("ip"), &format!("address add {CACHE}/32 dev eth0"));
        ip(cluster.node.namespace().command("ip"), &format!("route add {CACHE}/32 via {v4}"));
        let arguments = [format!("--host-record=www.example.org,{v4},600"), format!("--listen-address={CACHE}")];
        world = Some((v4, dnsmasq(outside.namespace().command("dnsmasq"), 53, &arguments), outside));
    });
    let (cache, v4) = (CACHE.parse().unwrap(), world.as_ref().unwrap().0);
    let pod = fixture.site("test/pod-0").clone();
    fixture.enforce(&(pods(1) + &policy(cache).replace("*.Example.org.", "www.example.org")));
    let answer = resolve_by_tcp(&pod, cache, "www.example.org", A);
    assert!(answer.ends_with(&octets(v4)), "the machine answers");
    assert!(is_denied(&pod, v4), "what a machine says with the cache's address is learnt");
    assert!(!fixture.status().domain_names.expect("it is on by default").has_resolver);
    // From the moment on at which the node has the address, its answers count.
    let node = fixture.cluster.node.namespace();
    ip(node.command("ip"), &format!("route del {CACHE}/32"));
    let seen = fixture.daemon.log().len();
    ip(node.command("ip"), &format!("address add {CACHE}/32 dev lo"));
    fixture.daemon.log().wait_for_after(seen, "published", Duration::from_secs(30)).unwrap();
    assert!(fixture.status().domain_names.expect("it is on by default").has_resolver);
}

/// Beside kube-proxy. Another server's answers teach nothing.
#[test]
fn the_clusters_dns_is_known_by_its_service() {
    const CLUSTER_DNS: &str = "10.96.0.10";
    let service = format!(
        "---\n{{apiVersion: v1, kind: Namespace, metadata: {{name: kube-system}}}}\n---\n\
         apiVersion: v1\nkind: Service\nmetadata: {{namespace: kube-system, name: kube-dns}}\n\
         spec:\n  clusterIP: {CLUSTER_DNS}\n  clusterIPs: [{CLUSTER_DNS}]\n\
         \x20 ports: [{{name: dns, port: 53, protocol: UDP, targetPort: 5353}}, {{name: dns-tcp, port: 53, protocol: TCP, targetPort: 5353}}]\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{namespace: kube-system, name: kube-dns-1, labels: {{kubernetes.io/service-name: kube-dns}}}}\n\
         addressType: IPv4\nports: [{{name: dns, port: 5353, protocol: UDP}}, {{name: dns-tcp, port: 5353, protocol: TCP}}]\n\
         endpoints: [{{addresses: [10.244.1.11], conditions: {{ready: true}}, nodeName: node}}]\n"
    );
    let mut world = None;
    let rules = policy(CLUSTER_DNS.parse().unwrap())
        .replace(&format!("[{CLUSTER_DNS}/32]"), &format!("[{CLUSTER_DNS}/32, 10.244.1.11/32, 0.0.0.0/0]"));
    let udp = |port| format!("{{udp: {{destinationPort: {{number: {port}}}}}}}");
    let rules = rules.replace(&udp(53), &format!("{}, {}", udp(53), udp(5353)));
    let fixture = Fixture::of(&(pods(2) + &service), |cluster, config| {
        let outside = cluster.node.add_outside("outside").unwrap();
        let v4 = *outside.addresses().iter().find(|address| address.is_ipv4()).unwrap();
        let listener = outside.namespace().listen((v4, PORT)).unwrap();
        thread::spawn(move || listener.incoming().for_each(drop));
        cluster.proxy_services(&config.manifests, penstock_bench::testbed::ProxyMode::Iptables).unwrap();
        let record = format!("--host-record=www.example.org,{v4},600");
        let stranger =
            dnsmasq(outside.namespace().command("dnsmasq"), 53, &[record.clone(), format!("--listen-address={v4}")]);
        world = Some((outside, v4, stranger, record));
    });
    fixture.enforce(&(pods(2) + &service + &rules));
    let (_, v4, _, record) = world.as_ref().unwrap();
    let (pod, dns) = (fixture.site("test/pod-0").clone(), fixture.site("test/pod-1").clone());
    let _resolver =
        dnsmasq(dns.namespace.command("dnsmasq"), 5353, &[record.clone(), "--listen-address=10.244.1.11".to_owned()]);
    let socket = pod.namespace.udp((pod.address(false).unwrap(), 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(resolve(&socket, *v4, "www.example.org", A).ends_with(&octets(*v4)));
    assert!(is_denied(&pod, *v4), "by a stranger's answer");
    assert!(resolve(&socket, CLUSTER_DNS.parse().unwrap(), "www.example.org", A).ends_with(&octets(*v4)));
    assert!(connect(&pod, *v4, TIMEOUT).is_some(), "by the cluster's");
}

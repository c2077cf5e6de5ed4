//! A node and its pods in their own network namespaces, as the `ptp` CNI plugin sets them up. All is deleted when the
//! test ends, also when it fails.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns, unshare};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Runs `test` on a thread in a fresh network namespace, which ends with the thread. Needs root.
pub(crate) fn on_a_node<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root: they make network namespaces");
            ip("link set lo up");
            without_duplicate_detection();
            test()
        };
        scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Like [`on_a_node`], with a tokio runtime on that thread.
#[allow(dead_code, reason = "not every test binary has asynchronous tests")]
pub(crate) fn on_a_node_async<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send) {
    on_a_node(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
}

/// Runs a command in the node's namespace and returns its output; panics if it fails.
pub(crate) fn run(command: &str) -> String {
    let (ok, output) = attempt(command);
    assert!(ok, "{command}: {output}");
    output
}

/// Runs `ip` with these arguments. `-n NAMESPACE` must come first; the namespace is entered by its file only, since `ip
/// -n` also remounts /sys, which fails if the root is no mount point (in a chroot).
pub(crate) fn ip(arguments: &str) -> String {
    match arguments.strip_prefix("-n ").and_then(|rest| rest.split_once(' ')) {
        Some((namespace, rest)) => run(&format!("nsenter --net=/run/netns/{namespace} ip {rest}")),
        None => run(&format!("ip {arguments}")),
    }
}

/// Runs a command that may fail.
pub(crate) fn attempt(command: &str) -> (bool, String) {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    let success = output.status.success();
    // A command that succeeds may still warn, for example about another test's namespace that is being deleted.
    let text = if success { output.stdout } else { [output.stdout, output.stderr].concat() };
    (success, String::from_utf8_lossy(&text).into_owned())
}

/// Has interfaces that are made from now on in this thread's namespace take IPv6 addresses without duplicate address detection, which takes
/// seconds (RFC 4862 section 5.4).
fn without_duplicate_detection() {
    for interfaces in ["all", "default"] {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{interfaces}/accept_dad"), "0").unwrap();
    }
}

/// Waits until an interface has a link-local address, without which the kernel solicits no neighbor, and each IPv6 address of the namespace
/// its local route, without which nobody reaches it: the kernel adds both some time later (`addrconf_dad_work` in net/ipv6/addrconf.c).
fn wait_for_addresses(namespace: &str, interface: &str) {
    let lines = |command: &str| ip(&format!("{namespace}-6 {command}"));
    let is_done = || {
        let routes = lines("route show table local");
        !lines(&format!("-o addr show dev {interface} scope link")).is_empty()
            && routes.lines().filter(|line| line.starts_with("local")).count() >= lines("-o addr").lines().count()
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_done() {
        assert!(Instant::now() < deadline, "{}", lines("addr"));
        thread::sleep(Duration::from_millis(5));
    }
}

/// A pod: a named namespace with `eth0`, whose other end is `veth` on the node.
pub(crate) struct Pod {
    /// Name of its namespace.
    pub(crate) namespace: String,
    /// Its interface on the node.
    pub(crate) veth: String,
    /// Its IPv4 address.
    pub(crate) v4: String,
    /// Its IPv6 address.
    pub(crate) v6: String,
}

/// The gateways that all pods have, on their veths' host sides.
pub(crate) const GATEWAYS: [&str; 2] = ["10.1.1.1", "fd00:1::1"];

/// The addresses of the bridge that [`Pod::on_bridge`] makes.
pub(crate) const BRIDGE_GATEWAYS: [&str; 2] = ["10.2.2.1", "fd00:2::1"];

impl Pod {
    /// Pod number `number` (2 to 250), from within [`on_a_node`].
    pub(crate) fn new(number: u8) -> Self {
        let pod = Self::unwired(number, "10.1.1", "fd00:1");
        let [gateway4, gateway6] = GATEWAYS;
        pod.wire([32, 128], |Self { namespace, veth, v4, v6 }| {
            ip(&format!("addr add {gateway4}/32 dev {veth}"));
            ip(&format!("addr add {gateway6}/128 dev {veth} nodad"));
            ip(&format!("link set {veth} up"));
            for (family, gateway) in [("-4", gateway4), ("-6", gateway6)] {
                ip(&format!("-n {namespace} {family} route add {gateway} dev eth0"));
                ip(&format!("-n {namespace} {family} route add default via {gateway} dev eth0"));
            }
            ip(&format!("route add {v4}/32 dev {veth} scope link"));
            ip(&format!("-6 route add {v6}/128 dev {veth}"));
        })
    }

    /// Pod number `number` on the bridge `cni0`, as the `bridge` CNI plugin sets it up; the first one makes the bridge.
    #[allow(dead_code, reason = "not every test binary has pods on a bridge")]
    pub(crate) fn on_bridge(number: u8) -> Self {
        let [gateway4, gateway6] = BRIDGE_GATEWAYS;
        if !attempt("ip link show cni0").0 {
            ip("link add cni0 type bridge");
            ip(&format!("addr add {gateway4}/24 dev cni0"));
            ip(&format!("addr add {gateway6}/64 dev cni0 nodad"));
            ip("link set cni0 up");
        }
        Self::unwired(number, "10.2.2", "fd00:2").wire([24, 64], |Self { namespace, veth, .. }| {
            ip(&format!("link set {veth} master cni0 up"));
            for (family, gateway) in [("-4", gateway4), ("-6", gateway6)] {
                ip(&format!("-n {namespace} {family} route add default via {gateway} dev eth0"));
            }
        })
    }

    fn unwired(number: u8, network4: &str, network6: &str) -> Self {
        Self {
            namespace: format!("pst-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)),
            veth: format!("veth{number}"),
            v4: format!("{network4}.{number}"),
            v6: format!("{network6}::{number:x}"),
        }
    }

    /// Makes the namespace, the veth and the addresses with these prefix lengths, then runs `rest`.
    fn wire(self, [length4, length6]: [u8; 2], rest: impl FnOnce(&Self)) -> Self {
        let Self { namespace, veth, v4, v6 } = &self;
        ip(&format!("netns add {namespace}"));
        self.inside(without_duplicate_detection);
        ip(&format!("link add {veth} type veth peer name eth0 netns {namespace}"));
        ip(&format!("-n {namespace} addr add {v4}/{length4} dev eth0"));
        ip(&format!("-n {namespace} addr add {v6}/{length6} dev eth0 nodad"));
        ip(&format!("-n {namespace} link set eth0 up"));
        ip(&format!("-n {namespace} link set lo up"));
        rest(&self);
        wait_for_addresses(&format!("-n {namespace} "), "eth0");
        wait_for_addresses("", veth);
        self
    }

    /// Its addresses.
    #[allow(dead_code, reason = "not every test binary writes manifests")]
    pub(crate) fn addresses(&self) -> (&str, &str) {
        (&self.v4, &self.v6)
    }

    /// Runs `inside` on a thread in the pod's namespace.
    pub(crate) fn inside<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let run = || {
                let namespace = std::fs::File::open(format!("/run/netns/{}", self.namespace)).unwrap();
                setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
                inside()
            };
            scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        attempt(&format!("ip netns del {}", self.namespace));
    }
}

/// Links, addresses, rules and routes of the node, as text to compare.
pub(crate) fn node_state() -> String {
    let mut state = String::new();
    for what in ["-o link", "-o addr", "rule", "-6 rule", "-4 route show table all", "-6 route show table all"] {
        let mut text = ip(what);
        // The carrier state changes by itself, a little after its cause.
        for carrier in ["NO-CARRIER,", ",LOWER_UP", " state UP", " state DOWN", " state LOWERLAYERDOWN"] {
            text = text.replace(carrier, "");
        }
        let mut lines: Vec<&str> = text.lines().filter(|line| !line.contains("fe80:")).collect();
        lines.sort_unstable();
        state.extend(lines.iter().flat_map(|line| [line.trim_end(), "\n"]));
    }
    for interface in ip("-o link").lines().filter_map(|line| line.split([' ', '@', ':']).nth(2)) {
        for setting in ["rp_filter", "arp_filter"] {
            let path = format!("/proc/sys/net/ipv4/conf/{interface}/{setting}");
            state += &format!("{path} = {}", std::fs::read_to_string(&path).unwrap());
        }
    }
    state
}

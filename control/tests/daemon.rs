//! `penstock run` on a real node in network namespaces, through the binary.

mod netns;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use netns::{BRIDGE_GATEWAYS, GATEWAYS, Pod, ip, node_state, on_a_node};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A directory with a config file and manifests.
struct Files(TempDir);

impl Files {
    fn new(keys: &str, manifests: &[(&str, String)]) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        fs::create_dir(files.path("manifests")).unwrap();
        for (name, text) in manifests {
            files.save(name, text);
        }
        let fixed = "umem.memory = \"32MiB\"\nconntrack.entries = 4096\nconntrack.mapping = \"off\"\nworkers.cores = [0]\n\
                     admin.socket = \"off\"\nmetrics.listen = \"off\"\n";
        let fixed: String = fixed
            .lines()
            .filter(|line| !keys.contains(line.split(' ').next().unwrap()))
            .flat_map(|line| [line, "\n"])
            .collect();
        let text = format!("node = \"here\"\nsource.manifests = \"manifests\"\n{fixed}{keys}\n");
        fs::write(files.path("penstock.toml"), text).unwrap();
        files
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// As an editor saves: a new file takes the old one's place.
    fn save(&self, name: &str, text: &str) {
        fs::write(self.path("new"), text).unwrap();
        fs::rename(self.path("new"), self.path("manifests").join(name)).unwrap();
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
        command.args([subcommand, "--config"]).arg(self.path("penstock.toml")).env("NO_COLOR", "1");
        let follow = || nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from);
        // SAFETY: between fork and exec the closure makes one system call; it neither allocates nor takes a lock.
        // It ends the process with the thread that started it, so that none outlives a test that fails.
        unsafe { command.pre_exec(follow) };
        command
    }
}

/// A running daemon, ended with the test.
struct Daemon {
    child: Child,
    lines: Receiver<String>,
}

impl Daemon {
    /// Starts it and waits until it is ready.
    fn start(files: &Files) -> Self {
        let mut command = files.command("run");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let streams: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for stream in streams {
            let sender = sender.clone();
            thread::spawn(move || {
                BufReader::new(stream).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
        }
        let daemon = Self { child, lines };
        daemon.wait_for("ready: ");
        daemon
    }

    /// The next line with this text in it.
    fn wait_for(&self, text: &str) -> String {
        let mut seen = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no line with {text:?}; there were:\n{}", seen.join("\n")),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Ends it and tells how it ended, after how long, and what it still said.
    fn end(mut self, signal: Signal) -> (ExitStatus, Duration, String) {
        let asked = Instant::now();
        self.signal(signal);
        let status = self.child.wait().unwrap();
        let took = asked.elapsed();
        (status, took, self.lines.iter().collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pod_manifest(name: &str, (v4, v6): (&str, &str)) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: {name}}}}}\n\
         spec: {{nodeName: here, containers: [{{name: c, image: i}}]}}\n\
         status: {{phase: Running, podIP: {v4}, podIPs: [{{ip: {v4}}}, {{ip: '{v6}'}}]}}\n---\n"
    )
}

/// Only `from` may reach `to`.
fn policy(to: &str, from: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {to}, namespace: shop}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {to}}}}}, \
         ingress: [{{from: [{{podSelector: {{matchLabels: {{app: {from}}}}}}}]}}]}}\n---\n"
    )
}

const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n";

/// Whether a datagram that `send` sends to `address` gets to this pod.
fn arrives(pod: &Pod, address: &str, send: impl Fn(SocketAddr)) -> bool {
    let any = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let receiver = pod.inside(|| UdpSocket::bind(any).unwrap());
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let to = SocketAddr::new(address.parse().unwrap(), receiver.local_addr().unwrap().port());
    // The first one may be lost to address resolution.
    (0..4).any(|_| {
        send(to);
        receiver.recv(&mut [0; 16]).is_ok()
    })
}

fn send(to: SocketAddr) {
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    // A route may be missing: then nothing arrives, which is what is asked.
    let _ = UdpSocket::bind(any).unwrap().send_to(b"hello", to);
}

/// Whether `from` reaches `to`, over IPv4 and over IPv6.
fn reaches(from: &Pod, to: &Pod) -> [bool; 2] {
    [&to.v4, &to.v6].map(|address| arrives(to, address, |to| from.inside(|| send(to))))
}

/// Whether the node reaches `to` and `to` the node, over IPv4 and over IPv6.
fn reaches_node(pod: &Pod) -> [bool; 4] {
    reaches_node_at(pod, GATEWAYS)
}

/// The same, by other addresses of the node.
fn reaches_node_at(pod: &Pod, gateways: [&str; 2]) -> [bool; 4] {
    let [v4, v6] = [&pod.v4, &pod.v6].map(|address| arrives(pod, address, send));
    let to_node = |gateway: &str| {
        let receiver = UdpSocket::bind(SocketAddr::new(gateway.parse().unwrap(), 0)).unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let to = receiver.local_addr().unwrap();
        (0..4).any(|_| {
            pod.inside(|| send(to));
            receiver.recv(&mut [0; 16]).is_ok()
        })
    };
    [v4, v6, to_node(gateways[0]), to_node(gateways[1])]
}

#[test]
fn policy_is_enforced_on_real_packets_and_follows_manifests_and_interfaces() {
    on_a_node(|| {
        // As a node is set, with reverse path filtering at its strictest.
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter"] {
            fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
        }
        let [web, db, job] = [5, 6, 7].map(Pod::new);
        let before = node_state();
        let objects = [
            NAMESPACE.to_owned(),
            pod_manifest("web", web.addresses()),
            pod_manifest("db", db.addresses()),
            pod_manifest("job", job.addresses()),
        ];
        let files = Files::new("", &[("pods.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&web, &db), [true; 2]);
        assert_eq!(reaches(&job, &db), [false; 2]);
        assert_eq!(reaches(&db, &job), [true; 2]);
        assert_eq!(reaches_node(&db), [true; 4], "a pod and its node always reach each other");

        // Another policy in its place.
        files.save("policies.yaml", &policy("db", "job"));
        let told = daemon.wait_for("published: NetworkPolicy shop/db");
        assert!(told.contains("epoch=2"), "{told}");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches(&job, &db), [true; 2]);

        // A manifest that is broken changes nothing.
        files.save("policies.yaml", "kind: NetworkPolicy\nspec: {podSelector: 3}\n");
        daemon.wait_for("policies.yaml");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches(&job, &db), [true; 2]);

        // Nor does one that claims another pod's address.
        files.save("clash.yaml", &pod_manifest("thief", web.addresses()));
        let told = daemon.wait_for("clash.yaml");
        assert!(told.contains("10.1.1.5"), "{told}");
        assert_eq!(reaches(&db, &web), [true; 2]);
        fs::remove_file(files.path("manifests/clash.yaml")).unwrap();

        // A pod that comes while running, its object before its interface.
        files.save("late.yaml", &pod_manifest("late", ("10.1.1.8", "fd00:1::8")));
        daemon.wait_for("no host route to 10.1.1.8");
        let late = Pod::new(8);
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);
        assert_eq!(reaches(&late, &db), [false; 2]);

        // Statistics, while it runs.
        daemon.signal(Signal::SIGUSR1);
        daemon.wait_for("PORT  INTERFACE");
        let line = daemon.wait_for("shop/web");
        assert!(line.contains("ingress_denied"), "{line}");
        assert!(line.contains("redirected"), "{line}");

        // It is made anew: another interface, with the same name and addresses.
        drop(late);
        daemon.wait_for("closed");
        let late = Pod::new(8);
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);

        // And it goes, its interface first.
        drop(late);
        daemon.wait_for("closed");
        fs::remove_file(files.path("manifests/late.yaml")).unwrap();
        daemon.wait_for("Pod shop/late deleted");

        let (status, took, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert!(said.contains("PORT  INTERFACE"), "statistics at the end: {said}");
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
    });
}

#[test]
fn pods_on_a_bridge_are_found_by_their_neighbour_entries_and_policy_holds_between_them() {
    on_a_node(|| {
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter"] {
            fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
        }
        let [web, db] = [5, 6].map(Pod::on_bridge);
        let routed = Pod::new(7);
        let before = node_state();
        let objects = [
            NAMESPACE.to_owned(),
            pod_manifest("web", web.addresses()),
            pod_manifest("db", db.addresses()),
            pod_manifest("routed", routed.addresses()),
        ];
        let files = Files::new("", &[("pods.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
        let daemon = Daemon::start(&files);
        // Nobody may have sent yet: the daemon has the kernel ask.
        while daemon.wait_for("published").contains("pods=1") {}
        assert_eq!(reaches(&web, &db), [true; 2]);
        assert_eq!(reaches(&routed, &db), [false; 2]);
        assert_eq!(reaches(&db, &routed), [true; 2]);
        assert_eq!(reaches_node_at(&db, BRIDGE_GATEWAYS), [true; 4], "a pod and its node always reach each other");
        files.save("policies.yaml", &policy("db", "routed"));
        daemon.wait_for("published: NetworkPolicy shop/db");
        assert_eq!(reaches(&web, &db), [false; 2], "though they are on one network");
        assert_eq!(reaches(&routed, &db), [true; 2]);

        // One that comes while running is closed at first.
        let late = Pod::on_bridge(8);
        daemon.wait_for("closed until its pod is known");
        files.save("late.yaml", &pod_manifest("late", late.addresses()));
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);
        assert_eq!(reaches(&late, &db), [false; 2]);
        drop(late);
        daemon.wait_for("closed");
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
    });
}

#[test]
fn a_pod_whose_object_is_gone_stays_closed_while_its_interface_lives() {
    on_a_node(|| {
        let [web, db] = [5, 6].map(Pod::new);
        let before = node_state();
        let files = Files::new(
            "",
            &[
                ("web.yaml", NAMESPACE.to_owned() + &pod_manifest("web", web.addresses())),
                ("db.yaml", pod_manifest("db", db.addresses())),
            ],
        );
        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&db, &web), [true; 2]);
        fs::remove_file(files.path("manifests/db.yaml")).unwrap();
        daemon.wait_for("Pod shop/db deleted");
        assert_eq!(reaches(&db, &web), [false; 2]);
        assert_eq!(reaches(&web, &db), [false; 2]);
        files.save("db.yaml", &pod_manifest("db", db.addresses()));
        daemon.wait_for("published: Pod shop/db");
        assert_eq!(reaches(&db, &web), [true; 2]);
        let (status, _, said) = daemon.end(Signal::SIGINT);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
    });
}

/// The node is as it was: at once, or when the kernel has done what it does on its own a little later.
fn assert_restored(before: &str) {
    let deadline = Instant::now() + Duration::from_secs(3);
    while node_state() != before && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    let (now, had) = (node_state(), before);
    let more: Vec<_> = now.lines().filter(|line| !had.contains(line)).collect();
    let less: Vec<_> = had.lines().filter(|line| !now.contains(line)).collect();
    assert!(more.is_empty() && less.is_empty(), "left behind: {more:#?}\ngone: {less:#?}");
}

/// The kernel carries packets between two pods again. It may first have to find the pods' link addresses anew.
fn assert_forwarded_by_kernel(from: &Pod, to: &Pod) {
    let reached = (0..5).any(|_| reaches(from, to) == [true; 2]);
    assert!(reached, "{:?}", reaches(from, to));
}

/// The interfaces that have an XDP program.
fn xdp_programs() -> Vec<String> {
    let links = ip("-o link");
    let with = links.lines().filter(|line| line.contains(" xdp"));
    with.filter_map(|line| Some(line.split(": ").nth(1)?.to_owned())).collect()
}

/// Two pods that may reach each other, and the files of their node's daemon.
fn two_pods(keys: &str) -> ([Pod; 2], Files) {
    // As a node is set, with reverse path filtering at its strictest.
    for setting in
        ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter", "ipv4/conf/default/rp_filter"]
    {
        fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
    }
    let [web, db] = [5, 6].map(Pod::new);
    let objects = [NAMESPACE.to_owned(), pod_manifest("web", web.addresses()), pod_manifest("db", db.addresses())];
    let files = Files::new(keys, &[("all.yaml", objects.concat())]);
    ([web, db], files)
}

#[test]
fn after_a_kill_all_is_closed_until_the_next_daemon_takes_over_and_puts_all_back() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("");
        let before = node_state();
        let daemon = Daemon::start(&files);
        let second = output(files.command("run"));
        assert_eq!(second.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&second.stderr).contains("another penstock runs in this network namespace"));
        assert_eq!(reaches(&web, &db), [true; 2], "the first one goes on");
        let attached = xdp_programs();
        daemon.end(Signal::SIGKILL);
        assert_eq!(xdp_programs(), attached, "the programs stay");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches_node(&web), [false; 4]);

        // One that cannot start opens nothing either.
        let manifests = fs::read_to_string(files.path("manifests/all.yaml")).unwrap();
        files.save("all.yaml", "kind: Pod\nspec: 3\n");
        assert_eq!(output(files.command("run")).status.code(), Some(2));
        assert_eq!(reaches(&web, &db), [false; 2]);
        files.save("all.yaml", &manifests);

        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&web, &db), [true; 2]);
        assert_eq!(reaches_node(&web), [true; 4]);
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
    });
}

#[test]
fn what_a_kill_left_is_taken_away_by_cleanup() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("");
        let before = node_state();
        let daemon = Daemon::start(&files);
        let refusal = output(files.command("cleanup"));
        assert_eq!(refusal.status.code(), Some(2), "not under a running daemon");
        daemon.end(Signal::SIGKILL);
        assert_eq!(reaches(&web, &db), [false; 2]);
        let said = output(files.command("cleanup"));
        assert_eq!(said.status.code(), Some(0));
        assert_eq!(String::from_utf8_lossy(&said.stdout), "taken away: 2 XDP programs, the host port\n");
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
        let again = output(files.command("cleanup"));
        assert_eq!(String::from_utf8_lossy(&again.stdout), "taken away: 0 XDP programs, no host port\n");
    });
}

#[test]
fn a_daemon_that_is_told_to_keep_the_node_closed_does_so_until_the_next_one() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("fail.on_exit = \"keep\"");
        let before = node_state();
        for _ in 0..2 {
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [true; 2]);
            let (status, _, said) = daemon.end(Signal::SIGTERM);
            assert_eq!(status.code(), Some(0), "{said}");
            assert!(said.contains("stay closed until the next start"), "{said}");
            assert_eq!(reaches(&web, &db), [false; 2]);
        }
        assert_eq!(output(files.command("cleanup")).status.code(), Some(0));
        assert_restored(&before);
    });
}

#[test]
fn where_the_setting_says_open_the_kernel_has_the_pods_a_tenth_of_a_second_after_the_daemon_died() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("fail.mode = \"open\"");
        files.save("policies.yaml", &policy("db", "nobody"));
        let before = node_state();
        for _ in 0..2 {
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2], "judged");
            assert_eq!(reaches_node(&web), [true; 4]);
            daemon.end(Signal::SIGKILL);
            // The process is gone. (While it goes, the kernel closes its sockets one by one.)
            let gone = Instant::now();
            let took = first_datagram(&web, &db) - gone;
            assert!(took < Duration::from_millis(100), "{took:?}");
            assert_forwarded_by_kernel(&web, &db);
        }
        let daemon = Daemon::start(&files);
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
    });
}

/// When the first of many datagrams arrives, sent one a millisecond for at most five seconds.
fn first_datagram(from: &Pod, to: &Pod) -> Instant {
    let receiver = to.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    receiver.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let address = SocketAddr::new(to.v4.parse().unwrap(), receiver.local_addr().unwrap().port());
    let sender = from.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        // Refused while the route that led into the pair is going.
        let _ = sender.send_to(b"?", address);
        if receiver.recv(&mut [0; 16]).is_ok() {
            return Instant::now();
        }
    }
    panic!("nothing arrives");
}

#[test]
fn a_new_pod_is_closed_until_its_object_is_known() {
    on_a_node(|| {
        let ([web, _db], files) = two_pods("");
        let daemon = Daemon::start(&files);
        let late = Pod::new(8);
        daemon.wait_for("closed until its pod is known");
        assert_eq!(reaches_node(&late)[2..], [false; 2], "nothing of it reaches the node");
        daemon.signal(Signal::SIGUSR1);
        let line = daemon.wait_for("(not known yet)");
        assert!(line.contains("veth8") && line.contains("no_socket"), "{line}");
        files.save("late.yaml", &pod_manifest("late", late.addresses()));
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);
        assert_eq!(reaches_node(&late), [true; 4]);
    });
    on_a_node(|| {
        let (_pods, files) = two_pods("startup = \"open\"");
        let _daemon = Daemon::start(&files);
        let late = Pod::new(8);
        assert_eq!(reaches_node(&late)[2..], [true; 2], "open, as the setting says");
    });
}

#[test]
fn policy_holds_for_the_world_with_and_without_an_uplink() {
    for keys in ["", "uplinks = [\"veth9\"]"] {
        on_a_node(|| {
            for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
            }
            let [web, db, world] = [5, 6, 9].map(Pod::new);
            let before = node_state();
            let objects =
                [NAMESPACE.to_owned(), pod_manifest("web", web.addresses()), pod_manifest("db", db.addresses())];
            let files = Files::new(keys, &[("all.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&world, &web), [true; 2], "{keys}");
            assert_eq!(reaches(&web, &world), [true; 2], "{keys}");
            assert_eq!(reaches(&db, &world), [true; 2], "{keys}");
            assert_eq!(reaches(&world, &db), [false; 2], "{keys}");
            assert!(reaches_node(&world).iter().all(|&reached| reached), "what is for the node passes");
            let (status, _, said) = daemon.end(Signal::SIGTERM);
            assert_eq!(status.code(), Some(0), "{said}");
            // Which way what was denied had come: by the uplink, or by the kernel and the host port.
            let denied = said.lines().find(|line| line.contains("ingress_denied")).unwrap();
            assert!(denied.contains(if keys.is_empty() { "(node)" } else { "(uplink)" }), "{said}");
            assert_restored(&before);
        });
    }
}

#[test]
fn when_the_pair_is_taken_away_the_daemon_ends_loudly_and_pods_stay_closed() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("log = { level = \"error\", format = \"json\" }");
        let before = node_state();
        let mut daemon = Daemon::start(&files);
        ip("link del penstock-host");
        assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
        daemon.wait_for("penstock: host_port: interface penstock-host is gone; restart penstock");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(output(files.command("cleanup")).status.code(), Some(0));
        assert_restored(&before);
    });
}

#[test]
fn a_reader_of_the_log_that_goes_away_is_no_reason_to_leave_anything_behind() {
    on_a_node(|| {
        let web = Pod::new(5);
        let before = node_state();
        let files = Files::new("", &[("all.yaml", NAMESPACE.to_owned() + &pod_manifest("web", web.addresses()))]);
        let mut child = files.command("run").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("ready: ")));
        drop((lines, child.stdout.take()));
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert_restored(&before);
    });
}

/// Takes these capabilities (numbers of linux/capability.h) from what the command starts.
fn without(command: &mut Command, capabilities: &'static [libc::c_ulong]) {
    let drop = move || {
        for &capability in capabilities {
            // SAFETY: prctl takes no pointer here; it changes this process alone, which is about to be replaced.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(drop) };
}

/// What a command that is to end by itself says. It gets 20 seconds.
fn output(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn refused(command: Command, line: &str) {
    let output = output(command);
    let told = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{line}: {told}");
    assert!(told.lines().any(|told| told.contains(line)), "not said: {line}\n{told}");
}

#[test]
fn bad_input_is_one_line_exit_code_2_and_nothing_left() {
    on_a_node(|| {
        let pod = Pod::new(5);
        ip("link add down0 type veth peer name down1");
        ip("link add long0 type veth peer name long1");
        ip("link set long0 mtu 9000 up");
        let before = node_state();
        let good = || NAMESPACE.to_owned() + &pod_manifest("web", pod.addresses());
        let twice = good() + &pod_manifest("other", pod.addresses());
        let bad =
            "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop}\nstatus: {podIPs: [{ip: 10.1.1.300}]}\n";
        let cases = [
            ("on_mis = \"drop\"", good(), "penstock.toml:9: on_mis: unknown key; take it out, or use one of: node,"),
            ("workers.cores = [999]", good(), "workers.cores: core 999 does not exist or is not open to this process;"),
            ("umem.memory = \"900GiB\"", good(), "MiB available; lower umem.memory or conntrack.entries"),
            (
                "uplinks = [\"nowhere0\"]",
                good(),
                "uplinks: interface nowhere0 does not exist; create it, or take it out",
            ),
            ("uplinks = [\"down0\"]", good(), "uplinks: interface down0 is down; set it up (ip link set down0 up)"),
            (
                "uplinks = [\"long0\"]",
                good(),
                "uplinks: MTU 9000 of interface long0 is more than the 1778 that a frame",
            ),
            ("uplinks = [\"veth5\"]", good(), "uplinks: interface veth5 is pod shop/web's; take it out of the list"),
            ("host_port.workers = \"down0\"", good(), "interface down0 exists and is not penstock's; delete it, or"),
            ("", twice, "10.1.1.5"),
            ("", bad.to_owned(), "10.1.1.300"),
        ];
        for (keys, manifests, line) in cases {
            let files = Files::new(keys, &[("all.yaml", manifests)]);
            refused(files.command("run"), line);
            assert_eq!(node_state(), before, "{line}");
        }
        let files = Files::new("", &[("all.yaml", good())]);
        fs::remove_dir_all(files.path("manifests")).unwrap();
        refused(files.command("run"), "is not a directory; create it, or correct the path");

        let files = Files::new("", &[("all.yaml", good())]);
        for subcommand in ["run", "check"] {
            let mut command = files.command(subcommand);
            without(&mut command, &[12, 13, 21, 39]);
            refused(command, "capabilities: CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF missing");
        }
        ip("link set veth5 mtu 9000");
        refused(
            files.command("run"),
            "pod shop/web: MTU 9000 of veth5 is more than the 1778 that a frame holds; lower it",
        );
        ip("link set veth5 mtu 1500");
        assert_restored(&before);
    });
}

#[test]
fn check_tells_each_thing_and_changes_nothing() {
    on_a_node(|| {
        let pod = Pod::new(5);
        let before = node_state();
        let files = Files::new("", &[("all.yaml", NAMESPACE.to_owned() + &pod_manifest("web", pod.addresses()))]);
        let output = output(files.command("check"));
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{told}");
        for line in [
            "ok       capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF",
            "ok       AF_XDP: the kernel has it",
            "ok       workers.cores: 0",
            "ok       source: 2 objects",
            "ok       pod shop/web: veth5, MTU 1500; tso on, gso on, gro ",
            "ok       kernel ",
            "ok       RLIMIT_MEMLOCK: ",
            "warning  net/ipv4/ip_forward = 0: pods reach neither Services nor other nodes; set it to 1",
        ] {
            assert!(told.lines().any(|told| told.starts_with(line)), "not told: {line}\n{told}");
        }
        assert_restored(&before);

        refused(
            Files::new("uplinks = [\"nowhere0\"]", &[]).command("check"),
            "uplinks: interface nowhere0 does not exist",
        );
    });
}

//! The daemon dies, ends, and follows another: what is open and what is closed meanwhile.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{
    Daemon, Files, NAMESPACE, assert_forwarded_by_kernel, assert_restored, output, pod_manifest, policy, reaches,
    reaches_node,
};
use crate::netns::{Pod, ip, node_state, on_a_node};

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
fn after_a_kill_pods_are_closed_until_the_next_daemon() {
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
fn cleanup_removes_what_a_killed_daemon_left() {
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
        assert_eq!(
            String::from_utf8_lossy(&said.stdout),
            "removed: 4 programs on interfaces, the host veth, 0 files\n"
        );
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
        let again = output(files.command("cleanup"));
        assert_eq!(
            String::from_utf8_lossy(&again.stdout),
            "removed: 0 programs on interfaces, no host veth, 0 files\n"
        );
    });
}

#[test]
fn cleanup_leaves_nothing_of_the_state_directory() {
    on_a_node(|| {
        let top = tempfile::tempdir().unwrap();
        let state = top.path().join("run/penstock");
        let [table, socket] = ["conntrack", "admin.sock"].map(|name| state.join(name).display().to_string());
        let (_pods, files) = two_pods(&format!("conntrack.mapping = \"{table}\"\nadmin.socket = \"{socket}\""));
        let before = node_state();
        let daemon = Daemon::start(&files);
        let refusal = output(files.command("cleanup"));
        assert_eq!(refusal.status.code(), Some(2), "not under a running daemon");
        // The configuration is kept once the daemon is ready.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !["conntrack.config", "conntrack"].iter().all(|file| state.join(file).exists()) {
            assert!(Instant::now() < deadline, "{:?}", fs::read_dir(&state).map(Vec::from_iter));
            std::thread::sleep(Duration::from_millis(1));
        }
        daemon.end(Signal::SIGKILL);
        let said = output(files.command("cleanup"));
        assert_eq!(said.status.code(), Some(0), "{said:?}");
        assert!(!state.exists(), "{:?}", fs::read_dir(&state).map(Vec::from_iter));
        assert_restored(&before);
    });
}

/// A page of the daemon's HTTP server, with its status line.
fn page(address: &str, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_bad_configuration_leaves_the_last_good_one_and_says_so() {
    const METRICS: &str = "127.0.0.1:19469";
    on_a_node(|| {
        ip("link set lo up");
        let state = tempfile::tempdir().unwrap();
        let path = |name: &str| state.path().join(name).display().to_string();
        let keys = format!(
            "conntrack.mapping = \"{}\"\nadmin.socket = \"{}\"\nmetrics.listen = \"{METRICS}\"\nfail.on_exit = \"keep\"",
            path("conntrack"),
            path("admin.sock")
        );
        let ([web, db], files) = two_pods(&keys);
        let good = fs::read_to_string(files.path("penstock.toml")).unwrap();
        let status = || {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_penstock"));
            command.args(["status", "--socket", &path("admin.sock")]).env("NO_COLOR", "1");
            String::from_utf8(output(command).stdout).unwrap()
        };
        let bad = [
            (good.replace("[0]", "[\"0\"]"), "workers.cores"),
            (good.replace("[0]", "[999]"), "core 999 does not exist"),
            (format!("{good}uplinks = [\"nowhere0\"]\n"), "interface nowhere0 does not exist"),
        ];
        // Nothing is known as good yet.
        fs::write(files.path("penstock.toml"), &bad[0].0).unwrap();
        assert_eq!(output(files.command("run")).status.code(), Some(2));
        let mut check = files.command("check");
        check.arg("--or-last-good");
        assert_eq!(output(check).status.code(), Some(2));

        fs::write(files.path("penstock.toml"), &good).unwrap();
        let daemon = Daemon::start(&files);
        assert!(page(METRICS, "/metrics").contains("\npenstock_config_rejected 0"));
        assert!(page(METRICS, "/readyz").starts_with("HTTP/1.0 200"));
        daemon.end(Signal::SIGTERM);
        for (text, reason) in bad {
            fs::write(files.path("penstock.toml"), text).unwrap();
            assert_eq!(output(files.command("check")).status.code(), Some(2), "{reason}");
            let mut check = files.command("check");
            check.arg("--or-last-good");
            let check = output(check);
            let said = String::from_utf8(check.stdout).unwrap();
            assert_eq!(check.status.code(), Some(0), "{said}");
            assert!(said.contains(reason) && said.contains("the last good configuration, in effect at "), "{said}");
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [true; 2], "{reason}");
            assert!(page(METRICS, "/metrics").contains("\npenstock_config_rejected 1"), "{reason}");
            let ready = page(METRICS, "/readyz");
            assert!(ready.starts_with("HTTP/1.0 503") && ready.contains(reason), "{ready}");
            assert!(page(METRICS, "/healthz").starts_with("HTTP/1.0 200"));
            let status = status();
            assert!(
                status.contains("configuration refused, the last good one is in effect: ") && status.contains(reason),
                "{status}"
            );
            let (.., said) = daemon.end(Signal::SIGTERM);
            assert!(said.contains("ended"), "{said}");
        }
        fs::write(files.path("penstock.toml"), &good).unwrap();
        let daemon = Daemon::start(&files);
        assert!(page(METRICS, "/readyz").starts_with("HTTP/1.0 200"), "good again");
        daemon.end(Signal::SIGTERM);
        assert_eq!(output(files.command("cleanup")).status.code(), Some(0));
    });
}

#[test]
fn check_refuses_what_a_start_refuses_and_nothing_else() {
    on_a_node(|| {
        let state = tempfile::tempdir().unwrap();
        let ([web, db], files) = two_pods(&format!("conntrack.mapping = \"{}/conntrack\"", state.path().display()));
        let (good, pipe) = (policy("db", "nobody"), files.path("manifests/pipe.yaml"));
        let breaks: [(&str, &dyn Fn()); 2] = [
            ("policies.yaml", &|| files.save("policies.yaml", "kind: Pod\nspec: 3\n")),
            ("pipe.yaml", &|| nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap()),
        ];
        let checked = |subcommand| {
            let output = output(files.command(subcommand));
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        for (broken, break_it) in breaks {
            files.save("policies.yaml", &good);
            let recorded = state.path().join("conntrack.objects");
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2]);
            daemon.end(Signal::SIGTERM);
            assert!(recorded.exists(), "what is in effect is kept for the next start");
            break_it();
            let (code, said) = checked("check");
            let warning = |line: &str| line.starts_with("warning  source: ") && line.contains(broken);
            assert!(code == Some(0) && said.lines().any(warning), "{broken}: {said}");
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2], "{broken}: the policy stays");
            daemon.end(Signal::SIGTERM);
            fs::remove_file(&recorded).unwrap();
            for subcommand in ["check", "run"] {
                assert_eq!(checked(subcommand).0, Some(2), "{broken}: nothing stands for it in {subcommand}");
            }
            let _ = fs::remove_file(&pipe);
        }
    });
}

#[test]
fn keep_closed_on_exit_closes_pods_until_the_next_daemon() {
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
fn with_fail_mode_open_the_kernel_forwards_after_a_kill() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("fail.mode = \"open\"");
        files.save("policies.yaml", &policy("db", "nobody"));
        let before = node_state();
        for _ in 0..2 {
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2], "evaluated");
            assert_eq!(reaches_node(&web), [true; 4]);
            daemon.end(Signal::SIGKILL);
            // The process is gone. (While it goes, the kernel closes its sockets one by one.)
            let gone = Instant::now();
            println!("passes {:?} after the process was gone", first_datagram(&web, &db) - gone);
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
fn without_the_veth_pair_the_daemon_fails_and_pods_stay_closed() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("log = { level = \"error\", format = \"json\" }");
        let before = node_state();
        let mut daemon = Daemon::start(&files);
        ip("link del penstock-host");
        assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
        daemon.wait_for("penstock: host_veth: interface penstock-host is gone; restart penstock");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(output(files.command("cleanup")).status.code(), Some(0));
        assert_restored(&before);
    });
}

#[test]
fn a_closed_log_pipe_does_not_prevent_cleanup() {
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

#[test]
fn a_service_manager_hears_that_policy_is_in_effect() {
    on_a_node(|| {
        let [web, db, job] = [5, 6, 7].map(Pod::new);
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        let pods = [("web", &web), ("db", &db), ("job", &job)].map(|(name, pod)| pod_manifest(name, pod.addresses()));
        let files = Files::new("", &[("all.yaml", NAMESPACE.to_owned() + &pods.concat() + &policy("db", "job"))]);
        let socket = files.path("service-manager");
        let service_manager = UnixDatagram::bind(&socket).unwrap();
        service_manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut command = files.command("run");
        command.env("NOTIFY_SOCKET", &socket);
        let daemon = Daemon::spawn(command);
        let mut message = [0; 64];
        let length = service_manager.recv(&mut message).expect("the daemon says something");
        assert_eq!(&message[..length], b"READY=1");
        assert_eq!([reaches(&web, &db), reaches(&job, &db)], [[false; 2], [true; 2]]);
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(said.contains("ready: "), "{said}");
        service_manager.set_nonblocking(true).unwrap();
        assert!(service_manager.recv(&mut message).is_err(), "it is said once");
    });
}

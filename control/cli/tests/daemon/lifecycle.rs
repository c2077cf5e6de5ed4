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
        daemon.end(Signal::SIGKILL);
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches_node(&web), [false; 4]);

        // One that cannot start opens nothing either.
        let manifests = fs::read_to_string(files.path("manifests/all.yaml")).unwrap();
        fs::rename(files.path("manifests"), files.path("away")).unwrap();
        assert_eq!(output(files.command("run")).status.code(), Some(2));
        fs::rename(files.path("away"), files.path("manifests")).unwrap();
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
            "removed: 4 programs on interfaces, the workers' veth pairs, 0 files\n"
        );
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
        let again = output(files.command("cleanup"));
        assert_eq!(
            String::from_utf8_lossy(&again.stdout),
            "removed: 0 programs on interfaces, no veth pair, 0 files\n"
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
        while !state.join("conntrack.config").exists() {
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

/// Waits until its policy is in effect, some milliseconds after it logs that it is ready.
fn wait_until_ready(metrics: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !page(metrics, "/readyz").starts_with("HTTP/1.0 200") {
        assert!(Instant::now() < deadline, "{}", page(metrics, "/readyz"));
        std::thread::sleep(Duration::from_millis(20));
    }
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
        wait_until_ready(METRICS);
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
        wait_until_ready(METRICS);
        daemon.end(Signal::SIGTERM);
        assert_eq!(output(files.command("cleanup")).status.code(), Some(0));
    });
}

#[test]
fn a_start_with_a_manifest_that_cannot_be_read_closes_its_pods() {
    on_a_node(|| {
        let state = tempfile::tempdir().unwrap();
        let path = |name: &str| state.path().join(name).display().to_string();
        let ([web, db], files) = two_pods(&format!(
            "conntrack.mapping = \"{}\"\nadmin.socket = \"{}\"",
            path("conntrack"),
            path("admin.sock")
        ));
        let (good, pipe) = (policy("db", "nobody"), files.path("manifests/pipe.yaml"));
        let (bad_policy, bad_kind) =
            (policy("db", "web").replace("podSelector: {m", "podSelektor: {m"), good.replace("Policy", "Polcy"));
        // Which way between the pods stays open if nothing is known of what the file had.
        let breaks: [(&str, &dyn Fn()); 4] = [
            ("policies.yaml", &|| files.save("policies.yaml", &bad_policy)),
            ("policies.yaml", &|| files.save("policies.yaml", &bad_kind)),
            ("policies.yaml", &|| files.save("policies.yaml", "a: [")),
            ("pipe.yaml", &|| nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap()),
        ];
        let checked = |options: &[&str]| {
            let mut command = files.command("check");
            command.args(options);
            let output = output(command);
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        let ready = || {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_penstock"));
            command.args(["ready", "--socket", &path("admin.sock")]);
            output(command).status.success()
        };
        let line =
            |said: &str, start: &str, end: &str| said.lines().any(|line| line.starts_with(start) && line.contains(end));
        for (broken, break_it) in breaks {
            files.save("policies.yaml", &good);
            let recorded = state.path().join("conntrack.objects");
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2]);
            daemon.end(Signal::SIGTERM);
            assert!(recorded.exists(), "what is in effect is kept for the next start");
            break_it();
            let (code, said) = checked(&[]);
            assert!(code == Some(0) && line(&said, "warning  source: ", broken), "{broken}: {said}");
            let daemon = Daemon::start(&files);
            assert_eq!(reaches(&web, &db), [false; 2], "{broken}: the policy stays");
            daemon.end(Signal::SIGTERM);

            fs::remove_file(&recorded).unwrap();
            let (code, said) = checked(&[]);
            assert!(code == Some(2) && line(&said, "error    source: ", broken), "{broken}: {said}");
            assert_eq!(checked(&["--or-last-good"]).0, Some(0), "{broken}: it starts all the same");
            let daemon = Daemon::spawn(files.command("run"));
            assert!(daemon.wait_for("ready: ").contains("NOT ready: "), "{broken}");
            assert_eq!([reaches(&web, &db), reaches(&db, &web)], [[false; 2]; 2], "{broken}: closed");
            assert!(!ready(), "{broken}");
            let _ = fs::remove_file(&pipe);
            files.save("policies.yaml", &good);
            daemon.wait_for("manifest is good again");
            let deadline = Instant::now() + Duration::from_secs(20);
            while !ready() {
                assert!(Instant::now() < deadline, "{broken}: it does not get ready");
                std::thread::sleep(Duration::from_millis(50));
            }
            assert_eq!([reaches(&web, &db), reaches(&db, &web)], [[false; 2], [true; 2]], "{broken}: corrected");
            daemon.end(Signal::SIGTERM);
        }
    });
}

#[test]
fn a_pod_whose_manifest_cannot_be_read_is_closed() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("");
        files.save("all.yaml", &(NAMESPACE.to_owned() + &pod_manifest("web", web.addresses())));
        files.save("db.yaml", &pod_manifest("db", (db.v4.as_str(), "fd00::zz")));
        let daemon = Daemon::spawn(files.command("run"));
        daemon.wait_for("ready: ");
        assert_eq!([reaches(&web, &db), reaches(&db, &web)], [[false; 2]; 2]);
        files.save("db.yaml", &pod_manifest("db", db.addresses()));
        daemon.wait_for("manifest is good again");
        let deadline = Instant::now() + Duration::from_secs(20);
        while [reaches(&web, &db), reaches(&db, &web)] != [[true; 2]; 2] {
            assert!(Instant::now() < deadline, "its manifest is good again");
        }
    });
}

#[test]
fn a_wrong_node_name_is_an_error_of_check_and_run() {
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: here}\n---\n";
    for (objects, reason) in [("", "no pod is on this node, but there are pods on here"), (node, "no such Node")] {
        on_a_node(|| {
            let state = tempfile::tempdir().unwrap();
            let socket = state.path().join("admin.sock").display().to_string();
            let (_pods, files) = two_pods(&format!("admin.socket = \"{socket}\""));
            files.save("node.yaml", objects);
            let command = |subcommand: &str| {
                let mut command = files.command(subcommand);
                command.args(["--set", "node=typo"]);
                command
            };
            let check = output(command("check"));
            let said = String::from_utf8(check.stdout).unwrap();
            assert!(check.status.code() == Some(2) && said.contains(reason), "{said}");
            let daemon = Daemon::spawn(command("run"));
            let said = daemon.wait_for("ready: ");
            assert!(said.contains("NOT ready: ") && said.contains(reason), "{said}");
            let status = |subcommand: &str| {
                let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_penstock"));
                command.args([subcommand, "--socket", &socket]).env("NO_COLOR", "1");
                let output = output(command);
                String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
            };
            let deadline = Instant::now() + Duration::from_secs(20);
            while !status("ready").contains(reason) {
                assert!(Instant::now() < deadline, "{}", status("ready"));
                std::thread::sleep(Duration::from_millis(50));
            }
            assert!(status("status").contains(reason), "{}", status("status"));
            // Its name is that of a Node that comes later.
            files.save("node.yaml", &node.replace("here", "typo"));
            let deadline = Instant::now() + Duration::from_secs(20);
            while !status("ready").is_empty() {
                assert!(Instant::now() < deadline, "{}", status("ready"));
                std::thread::sleep(Duration::from_millis(50));
            }
            daemon.end(Signal::SIGTERM);
        });
    }
}

#[test]
fn a_manifest_directory_that_is_gone_makes_the_node_unready() {
    const METRICS: &str = "127.0.0.1:19469";
    on_a_node(|| {
        ip("link set lo up");
        let ([web, db], files) = two_pods(&format!("metrics.listen = \"{METRICS}\""));
        files.save("policies.yaml", &policy("db", "nobody"));
        let daemon = Daemon::start(&files);
        let is_ready_soon = |ready: bool| {
            let deadline = Instant::now() + Duration::from_secs(20);
            while page(METRICS, "/readyz").starts_with("HTTP/1.0 200") != ready {
                assert!(Instant::now() < deadline, "{}", page(METRICS, "/readyz"));
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        is_ready_soon(true);
        let (manifests, away) = (files.path("manifests"), files.path("away"));
        fs::rename(&manifests, &away).unwrap();
        is_ready_soon(false);
        let text = page(METRICS, "/readyz");
        assert!(text.contains("manifests: ") && text.contains("No such file"), "{text}");
        let connected = "penstock_source_connected{resource=\"networkpolicies\"}";
        assert!(page(METRICS, "/metrics").contains(&format!("\n{connected} 0")));
        assert_eq!(reaches(&web, &db), [false; 2], "the last good objects stay");
        fs::create_dir(&manifests).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(reaches(&web, &db), [false; 2], "another one without manifests changes nothing");
        assert!(page(METRICS, "/readyz").contains("has no manifest any more"), "{}", page(METRICS, "/readyz"));
        fs::remove_dir(&manifests).unwrap();
        fs::rename(&away, &manifests).unwrap();
        is_ready_soon(true);
        assert!(page(METRICS, "/metrics").contains(&format!("\n{connected} 1")));
        daemon.end(Signal::SIGTERM);
    });
}

#[test]
fn a_second_daemon_and_a_mistake_in_the_command_start_nothing() {
    const METRICS: &str = "127.0.0.1:19469";
    on_a_node(|| {
        ip("link set lo up");
        let state = tempfile::tempdir().unwrap();
        let path = |name: &str| state.path().join(name).display().to_string();
        let (_pods, files) = two_pods(&format!(
            "conntrack.mapping = \"{}\"\nadmin.socket = \"{}\"\nmetrics.listen = \"{METRICS}\"",
            path("conntrack"),
            path("admin.sock")
        ));
        let with = |subcommand: &str, settings: &[&str]| {
            let mut command = files.command(subcommand);
            settings.iter().for_each(|setting| _ = command.args(["--set", setting]));
            let output = output(command);
            (
                output.status.code(),
                String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
            )
        };
        let mut command = files.command("run");
        command.args(["--set", "log.level=debug"]);
        let daemon = Daemon::spawn(command);
        daemon.wait_for("ready: ");
        page(METRICS, "/readyz");
        // A daemon runs: nothing in a file has to be corrected.
        for settings in [&[][..], &["log.level=warn"], &["umem.memory=48MiB"]] {
            let (code, said) = with("run", settings);
            assert!(code == Some(2) && said.contains("another daemon"), "{settings:?}: {said}");
            assert!(!said.contains("correct ") && !said.contains("last good"), "{settings:?}: {said}");
        }
        let (_, said) = with("check", &[]);
        assert!(said.contains("metrics.listen: 127.0.0.1:19469, in use while a daemon runs here"), "{said}");
        daemon.end(Signal::SIGTERM);
        // A mistake in the command: the previous run's settings do not take the place of it.
        let (code, said) = with("run", &["log.levl=debug"]);
        assert!(code == Some(2) && said.contains("--set log.levl"), "{said}");
        assert!(!said.contains("starting with"), "{said}");
        // One in the file: settings of the command are those given now.
        let good = fs::read_to_string(files.path("penstock.toml")).unwrap();
        fs::write(files.path("penstock.toml"), format!("{good}nonsense = 1\n")).unwrap();
        let daemon = Daemon::start(&files);
        let (.., said) = daemon.end(Signal::SIGTERM);
        assert!(!said.contains("DEBUG"), "{said}");
        fs::write(files.path("penstock.toml"), good).unwrap();
        // Another program has the port.
        let _held = std::net::TcpListener::bind(METRICS).unwrap();
        let (code, said) = with("check", &[]);
        assert!(code == Some(2) && said.contains("error    metrics.listen = 127.0.0.1:19469: cannot listen"), "{said}");
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
            assert!(said.contains("stay closed to new connections until the next start"), "{said}");
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
        assert!(line.contains("veth8") && line.contains("not_ready"), "{line}");
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
fn without_a_workers_veth_pair_the_daemon_fails_and_pods_stay_closed() {
    on_a_node(|| {
        let ([web, db], files) = two_pods("log = { level = \"error\", format = \"json\" }");
        let before = node_state();
        let mut daemon = Daemon::start(&files);
        ip("link del penstock-w0");
        assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
        daemon.wait_for("penstock: worker pairs: interface penstock-w0 is gone; restart penstock");
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

//! The plugin as a container runtime calls it, on a real veth. These tests need root; each has namespaces of its own.

use std::fs::{self, File};
use std::io::Write;
use std::net::UdpSocket;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns, unshare};
use serde_json::{Value, json};

/// Directory of pins of one test.
struct Pins(PathBuf);

impl Pins {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(format!("/sys/fs/bpf/penstock-cni-test-{}-{number}", std::process::id()).into())
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a test as the node, in a network namespace of its own; the pod's is the argument, joined by a veth `host0`.
fn on_node(test: impl FnOnce(&File) + Send) {
    let run = || {
        let namespace = || File::open("/proc/thread-self/ns/net").unwrap();
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        let pod = namespace();
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let node = namespace();
        ip("link add host0 type veth peer name eth0");
        ip("addr add 192.0.2.1/24 dev host0");
        ip("link set host0 up");
        // `ip` moves an interface to the namespace of a process, which this thread is for a moment.
        setns(&pod, CloneFlags::CLONE_NEWNET).unwrap();
        let thread = nix::unistd::gettid();
        thread::scope(|scope| {
            scope.spawn(|| {
                setns(&node, CloneFlags::CLONE_NEWNET).unwrap();
                ip(&format!("link set eth0 netns {thread}"));
            });
        });
        ip("addr add 192.0.2.2/24 dev eth0");
        ip("link set eth0 up");
        setns(&node, CloneFlags::CLONE_NEWNET).unwrap();
        test(&pod);
    };
    if let Err(panic) = thread::scope(|scope| scope.spawn(run).join()) {
        std::panic::resume_unwind(panic);
    }
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Calls the plugin; returns its exit code and its answer.
fn call(command: &str, config: &Value) -> (i32, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_penstock-cni"))
        .env("CNI_COMMAND", command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let answer = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
    (output.status.code().unwrap(), answer)
}

fn config(pins: &Pins, interfaces: Value) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "pods", "type": "penstock-cni", "pins": pins.0,
        "prevResult": { "cniVersion": "1.0.0", "interfaces": interfaces, "ips": [{ "address": "192.0.2.2/24" }] },
    })
}

/// The result of ptp and bridge: the node's interfaces, and the pod's.
fn of_veth() -> Value {
    json!([{ "name": "lo" }, { "name": "host0", "mac": "02:00:00:00:00:01" }, { "name": "eth0", "sandbox": "/run/netns/x" }])
}

/// Whether a datagram arrives, from the pod to the node and the other way.
fn passes(pod: &File) -> [bool; 2] {
    let bind = |address: &str| {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(250))).unwrap();
        socket
    };
    let node = bind("192.0.2.1:0");
    let of_pod = thread::scope(|scope| {
        let in_pod = || {
            setns(pod, CloneFlags::CLONE_NEWNET).unwrap();
            bind("192.0.2.2:0")
        };
        scope.spawn(in_pod).join().unwrap()
    });
    // An interface that has just been set up drops what comes first.
    let arrives = |from: &UdpSocket, to: &UdpSocket| {
        (0..6).any(|_| {
            from.send_to(b"x", to.local_addr().unwrap()).unwrap();
            to.recv(&mut [0; 8]).is_ok()
        })
    };
    [arrives(&of_pod, &node), arrives(&node, &of_pod)]
}

#[test]
fn a_new_pod_is_closed_before_its_containers_start() {
    let pins = Pins::new();
    on_node(|pod| {
        assert_eq!(passes(pod), [true, true], "without the plugin");
        let config = config(&pins, of_veth());
        assert_eq!(call("CHECK", &config).0, 1, "it is open");
        let (code, answer) = call("ADD", &config);
        assert_eq!((code, &answer), (0, &config["prevResult"]), "the result of the plugins before it");
        assert_eq!(passes(pod), [false, false]);
        assert_eq!(call("CHECK", &config), (0, Value::Null));
        // Runtimes may repeat both.
        for command in ["ADD", "DEL", "DEL"] {
            assert_eq!(call(command, &config).0, 0, "{command}");
        }
        assert_eq!(passes(pod), [false, false]);
    });
}

#[test]
fn pins_of_an_interface_that_is_gone_are_replaced() {
    let pins = Pins::new();
    on_node(|_| {
        let config = config(&pins, of_veth());
        let index = nix::net::if_::if_nametoindex("host0").unwrap();
        assert_eq!(call("ADD", &config).0, 0);
        // Its links are those of an interface that is gone once it is: the same index, again.
        ip("link del host0");
        ip(&format!("link add host0 index {index} type veth peer name eth0"));
        ip("link set host0 up");
        assert_eq!(call("CHECK", &config).0, 1);
        assert_eq!(call("ADD", &config).0, 0);
        assert_eq!(call("CHECK", &config).0, 0);
    });
}

#[test]
fn what_it_cannot_close_is_an_error_that_names_the_remedy() {
    let pins = Pins::new();
    on_node(|_| {
        let mut wrong_version = config(&pins, of_veth());
        wrong_version["cniVersion"] = json!("0.2.0");
        let mut first = config(&pins, of_veth());
        first.as_object_mut().unwrap().remove("prevResult");
        let mut no_bpffs = config(&pins, of_veth());
        no_bpffs["pins"] = json!(std::env::temp_dir().join("penstock-cni"));
        let folder = tempfile::tempdir().unwrap();
        no_bpffs["socket"] = json!(folder.path().join("none"));
        let mut beside_a_daemon = no_bpffs.clone();
        let socket = folder.path().join("daemon");
        let _daemon = UnixListener::bind(&socket).unwrap();
        beside_a_daemon["socket"] = json!(socket);
        for (command, config, code, said) in [
            ("ADD", &wrong_version, 1, "is no supported version"),
            ("ADD", &first, 7, "list penstock-cni behind the plugin"),
            ("CHECK", &first, 7, "list penstock-cni behind the plugin"),
            ("ADD", &config(&pins, json!([])), 7, "no interface"),
            ("ADD", &config(&pins, json!([{ "name": "lo" }])), 7, "with veths"),
            ("ADD", &config(&pins, json!([{ "name": "gone" }])), 7, "with veths"),
            ("ADD", &no_bpffs, 100, "mount -t bpf bpf /sys/fs/bpf"),
            ("STATUS", &no_bpffs, 51, "no daemon serves those that there are: "),
            ("STATUS", &beside_a_daemon, 50, "mount -t bpf bpf /sys/fs/bpf"),
            ("TURN", &config(&pins, of_veth()), 4, "use ADD, DEL, CHECK"),
        ] {
            let (exit, answer) = call(command, config);
            assert_eq!(exit, 1, "{command}: {answer}");
            assert_eq!(answer["code"], code, "{answer}");
            assert!(answer["msg"].as_str().unwrap().contains(said), "{answer}");
        }
    });
}

#[test]
fn it_says_which_versions_it_knows() {
    let (code, answer) = call("VERSION", &json!({ "cniVersion": "1.0.0" }));
    assert_eq!(code, 0);
    assert!(answer["supportedVersions"].as_array().unwrap().contains(&json!("1.0.0")), "{answer}");
    assert_eq!(call("STATUS", &config(&Pins::new(), of_veth())), (0, Value::Null));
}

#[test]
fn what_is_left_of_interfaces_that_are_gone_is_collected() {
    let pins = Pins::new();
    on_node(|_| {
        let config = config(&pins, of_veth());
        let count = || {
            fs::read_dir(&pins.0).unwrap().flatten().map(|of| fs::read_dir(of.path()).unwrap().count()).sum::<usize>()
        };
        assert_eq!(call("ADD", &config).0, 0);
        assert_eq!(call("GC", &config), (0, Value::Null));
        assert_eq!(count(), 2, "those of an interface that is there stay");
        ip("link del host0");
        assert_eq!(call("GC", &config), (0, Value::Null));
        assert_eq!(count(), 0);
    });
}

/// A runtime gives up a pod, or collects what is left of others, whatever there still is of them.
#[test]
fn what_is_gone_is_no_error_for_the_end_of_a_pod() {
    let pins = Pins::new();
    let of = |more: Value| {
        let mut config = json!({ "cniVersion": "1.1.0", "name": "pods", "type": "penstock-cni", "pins": pins.0 });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let gone = of(json!({ "prevResult": { "interfaces": [{ "name": "gone0" }] } }));
    let others = of(json!({ "cni.dev/valid-attachments": [{ "containerID": "a", "ifname": "eth0" }] }));
    for (command, config) in [("DEL", &gone), ("DEL", &of(json!({}))), ("GC", &others), ("GC", &of(json!({})))] {
        assert_eq!(call(command, config), (0, Value::Null), "{command} {config}");
    }
    assert!(!pins.0.exists(), "nothing is made");
}

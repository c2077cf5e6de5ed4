//! A daemon with its files, and what its pods reach.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::netns::{GATEWAYS, Pod, node_state};

/// A directory with a config file and manifests.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new(keys: &str, manifests: &[(&str, String)]) -> Self {
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

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// As an editor saves: a new file takes the old one's place.
    pub(crate) fn save(&self, name: &str, text: &str) {
        fs::write(self.path("new"), text).unwrap();
        fs::rename(self.path("new"), self.path("manifests").join(name)).unwrap();
    }

    pub(crate) fn command(&self, subcommand: &str) -> Command {
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
pub(crate) struct Daemon {
    pub(crate) child: Child,
    lines: Receiver<String>,
}

impl Daemon {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(files: &Files) -> Self {
        let daemon = Self::spawn(files.command("run"));
        daemon.wait_for("ready: ");
        daemon
    }

    /// Starts it.
    pub(crate) fn spawn(mut command: Command) -> Self {
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
        Self { child, lines }
    }

    /// The next line with this text in it.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        let mut seen = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(90);
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no line with {text:?}; there were:\n{}", seen.join("\n")),
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Ends it and tells how it ended, after how long, and what it still said.
    pub(crate) fn end(mut self, signal: Signal) -> (ExitStatus, Duration, String) {
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

pub(crate) fn pod_manifest(name: &str, (v4, v6): (&str, &str)) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: {name}}}}}\n\
         spec: {{nodeName: here, containers: [{{name: c, image: i}}]}}\n\
         status: {{phase: Running, podIP: {v4}, podIPs: [{{ip: {v4}}}, {{ip: '{v6}'}}]}}\n---\n"
    )
}

/// Only `from` may reach `to`.
pub(crate) fn policy(to: &str, from: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {to}, namespace: shop}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {to}}}}}, \
         ingress: [{{from: [{{podSelector: {{matchLabels: {{app: {from}}}}}}}]}}]}}\n---\n"
    )
}

pub(crate) const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n";

/// Whether a datagram that `send` sends to `address` gets to this pod.
pub(crate) fn arrives(pod: &Pod, address: &str, send: impl Fn(SocketAddr)) -> bool {
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

pub(crate) fn send(to: SocketAddr) {
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    // A route may be missing: then nothing arrives, which is what is asked.
    let _ = UdpSocket::bind(any).unwrap().send_to(b"hello", to);
}

/// Whether `from` reaches `to`, over IPv4 and over IPv6.
pub(crate) fn reaches(from: &Pod, to: &Pod) -> [bool; 2] {
    [&to.v4, &to.v6].map(|address| arrives(to, address, |to| from.inside(|| send(to))))
}

/// Whether the node reaches `to` and `to` the node, over IPv4 and over IPv6.
pub(crate) fn reaches_node(pod: &Pod) -> [bool; 4] {
    reaches_node_at(pod, GATEWAYS)
}

/// The same, by other addresses of the node.
pub(crate) fn reaches_node_at(pod: &Pod, gateways: [&str; 2]) -> [bool; 4] {
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

/// The node is as it was: at once, or when the kernel has done what it does on its own a little later.
pub(crate) fn assert_restored(before: &str) {
    let deadline = Instant::now() + Duration::from_secs(3);
    while node_state() != before && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    let (now, had) = (node_state(), before);
    let more: Vec<_> = now.lines().filter(|line| !had.contains(line)).collect();
    let less: Vec<_> = had.lines().filter(|line| !now.contains(line)).collect();
    assert!(more.is_empty() && less.is_empty(), "left behind: {more:#?}\ngone: {less:#?}");
}

/// The output of a command that is to end by itself. It gets 90 seconds.
pub(crate) fn output(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(90);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// The kernel carries packets between two pods again. It may first have to find the pods' link addresses anew.
pub(crate) fn assert_forwarded_by_kernel(from: &Pod, to: &Pod) {
    let reached = (0..5).any(|_| reaches(from, to) == [true; 2]);
    assert!(reached, "{:?}", reaches(from, to));
}

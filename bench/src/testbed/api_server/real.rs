//! A real API server: `etcd` and `kube-apiserver` from a directory, as separate processes.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use crate::testbed::{CleanupGuard, Namespace, ScratchDir};

const START: Duration = Duration::from_secs(90);

/// The two processes. Dropping it ends them.
pub(super) struct RealServer {
    assets: PathBuf,
    directory: PathBuf,
    namespace: Option<Namespace>,
    ports: Ports,
    etcd: ServerProcess,
    server: Mutex<Option<ServerProcess>>,
    _scratch: ScratchDir,
}

#[derive(Clone, Copy)]
struct Ports {
    etcd: u16,
    peer: u16,
    server: u16,
}

struct ServerProcess {
    _guard: CleanupGuard,
}

impl RealServer {
    /// Starts both, in a network namespace if one is given. `tokens` is the content of a static token file.
    pub(super) fn start(assets: &Path, tokens: &str, namespace: Option<&Namespace>) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let directory = scratch.path().to_owned();
        let ports = inside(namespace, || -> Result<Ports> {
            // Allocated together, so that the ports differ.
            let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
            let [etcd, peer, server] = listeners.map(|listener| listener.and_then(|l| l.local_addr()));
            Ok(Ports { etcd: etcd?.port(), peer: peer?.port(), server: server?.port() })
        })?;
        fs::write(directory.join("tokens.csv"), tokens)?;
        let key = directory.join("accounts.key");
        let made =
            Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048").stderr(Stdio::null()).status();
        ensure!(made.context("openssl is needed for the server's key")?.success(), "openssl made no key");
        let etcd = Self::spawn_etcd(assets, &directory, namespace, ports)?;
        let (assets, namespace) = (assets.to_owned(), namespace.cloned());
        let real = Self { assets, directory, namespace, ports, etcd, server: Mutex::default(), _scratch: scratch };
        real.resume()?;
        Ok(real)
    }

    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.ports.server)
    }

    /// Kills the API server; etcd stays.
    pub(super) fn stop(&self) {
        self.server.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }

    /// Restarts the API server and waits until it is ready.
    pub(super) fn resume(&self) -> Result<()> {
        let Ports { etcd, server, .. } = self.ports;
        let file = |name: &str| self.directory.join(name).display().to_string();
        let arguments = [
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            // No Service leads to it: a server that other machines do not reach has no endpoint.
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--secure-port={server}"),
            format!("--cert-dir={}", file("certificates")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-signing-key-file={}", file("accounts.key")),
            format!("--service-account-key-file={}", file("accounts.key")),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            // No controller runs that would create service accounts for pods.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            // Init containers of Penstock's pods are.
            "--allow-privileged=true".to_owned(),
        ];
        let mut command = self.command("kube-apiserver");
        command.args(arguments);
        let process = ServerProcess::spawn(command, &self.directory.join("kube-apiserver.log"))?;
        *self.server.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(process);
        Ok(())
    }

    pub(super) fn wait(&self, mut is_ready: impl FnMut() -> Result<()>) -> Result<()> {
        let deadline = Instant::now() + START;
        while let Err(error) = is_ready() {
            if Instant::now() > deadline {
                let log = fs::read_to_string(self.directory.join("kube-apiserver.log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(20).collect();
                bail!("kube-apiserver is not ready: {error:#}; the end of its log, backwards:\n{}", tail.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Compacts etcd's history up to now, through its JSON gateway.
    pub(super) fn compact(&self) -> Result<()> {
        let url = |path: &str| format!("http://127.0.0.1:{}/v3/kv/{path}", self.ports.etcd);
        let post = |path: &str, body: String| -> Result<String> {
            let answer = inside(self.namespace.as_ref(), || http_post(&url(path), &body))?;
            Ok(answer)
        };
        let range = post("range", r#"{"key":"AA==","limit":"1"}"#.to_owned())?;
        let revision = range.split("\"revision\":\"").nth(1).and_then(|rest| rest.split('"').next());
        let revision = revision.with_context(|| format!("etcd reports no revision: {range}"))?;
        post("compaction", format!(r#"{{"revision":"{revision}","physical":true}}"#)).map(drop)
    }

    fn spawn_etcd(
        assets: &Path,
        directory: &Path,
        namespace: Option<&Namespace>,
        ports: Ports,
    ) -> Result<ServerProcess> {
        let (client, peer) = (format!("http://127.0.0.1:{}", ports.etcd), format!("http://127.0.0.1:{}", ports.peer));
        let mut command = command(assets, "etcd", namespace);
        command.arg("--data-dir").arg(directory.join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        // It reads settings from its environment.
        command.env_clear();
        ServerProcess::spawn(command, &directory.join("etcd.log"))
    }

    fn command(&self, program: &str) -> Command {
        command(&self.assets, program, self.namespace.as_ref())
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        self.stop();
        let _ = &self.etcd;
    }
}

fn command(assets: &Path, program: &str, namespace: Option<&Namespace>) -> Command {
    let path = assets.join(program);
    namespace.map_or_else(|| Command::new(&path), |namespace| namespace.command(&path))
}

fn inside<T: Send>(namespace: Option<&Namespace>, work: impl FnOnce() -> T + Send) -> T {
    match namespace {
        Some(namespace) => namespace.run(work),
        None => work(),
    }
}

impl ServerProcess {
    fn spawn(mut command: Command, log: &Path) -> Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let follow = || nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from);
        // SAFETY: between fork and exec the closure makes one system call; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(follow) };
        command.process_group(0);
        let mut child: Child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let end = move || {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        };
        Ok(Self { _guard: CleanupGuard::new(end) })
    }
}

/// A POST over plain HTTP/1.0; returns the answer's body.
fn http_post(url: &str, body: &str) -> Result<String> {
    use std::io::{Read, Write};
    let (host, path) = url.trim_start_matches("http://").split_once('/').context("no path")?;
    let mut stream = std::net::TcpStream::connect(host)?;
    write!(stream, "POST /{path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    ensure!(head.contains(" 200 "), "{url}: {}", head.lines().next().unwrap_or_default());
    Ok(body.to_owned())
}

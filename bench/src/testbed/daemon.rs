//! The real daemon in a node's namespace.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cleanup::CleanupGuard;
use super::namespace::Namespace;
use super::process::{END, Process};
use super::scratch::ScratchDir;

/// Log line of a daemon that is ready.
const READY: &str = "ready: ";
const START: Duration = Duration::from_secs(60);
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    pub node: String,
    pub manifests: PathBuf,
    /// Whether programs forward packets of established connections; not if `PENSTOCK_TEST_OFFLOAD` is `false`.
    pub offload: bool,
    /// Further top-level keys, in TOML.
    pub keys: String,
    /// Keys of the section `[conntrack]`, in TOML.
    pub conntrack: String,
    /// Further sections, in TOML.
    pub sections: String,
    /// Socket of the admin API, if enabled.
    pub admin: Option<PathBuf>,
    /// Address of the metrics endpoint, if enabled.
    pub metrics: Option<SocketAddr>,
    pub environment: Vec<(String, String)>,
}

impl DaemonConfig {
    /// Defaults, with the memory that a few pods need, and without a connection table file, admin API
    /// and metrics.
    pub fn new(node: &str, manifests: &Path) -> Self {
        Self {
            node: node.into(),
            manifests: manifests.into(),
            offload: std::env::var("PENSTOCK_TEST_OFFLOAD").as_deref() != Ok("false"),
            keys: String::new(),
            conntrack: "mapping = \"off\"\n".into(),
            sections: "[umem]\nmemory = \"64MiB\"\n".into(),
            admin: None,
            metrics: None,
            environment: Vec::new(),
        }
    }

    pub fn to_toml(&self) -> String {
        let Self { node, manifests, offload, keys, conntrack, sections, admin, metrics, environment: _ } = self;
        let manifests = manifests.display();
        // Daemons of several nodes share a machine, so each has its own file or none.
        let admin = admin.as_ref().map_or_else(|| "off".into(), |path| path.display().to_string());
        let metrics = metrics.map_or_else(|| "off".into(), |address| address.to_string());
        format!(
            "node = \"{node}\"\n{keys}\noffload = {offload}\n[source]\nmanifests = \"{manifests}\"\n\n[conntrack]\n{conntrack}\n\
             [admin]\nsocket = \"{admin}\"\n\n[metrics]\nlisten = \"{metrics}\"\n\n{sections}"
        )
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Privileges {
    /// Those of this process.
    All,
    /// No capability, although its user is the same.
    None,
    /// At most these capabilities (a bit mask), as granted by a service manager or a container runtime.
    Bounded(u64),
}

/// Drops every other capability from the bounding set, so that the next executed program has at most these.
fn drop_capabilities_but(kept: u64) {
    for capability in (0..=63).filter(|capability| kept >> capability & 1 == 0) {
        // SAFETY: no memory is passed. The kernel rejects numbers that it does not know.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
}

/// The `penstock` binary: `PENSTOCK_BIN`, otherwise the one built beside this program.
pub fn penstock_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PENSTOCK_BIN") {
        return Ok(path.into());
    }
    let program = std::env::current_exe()?;
    // Test programs are one directory deeper, in `deps`.
    let found = program.ancestors().skip(1).take(2).map(|directory| directory.join("penstock"));
    found.into_iter().find(|path| path.is_file()).with_context(|| {
        format!(
            "no penstock binary beside {}; build it (cargo build -p penstock) or name it in PENSTOCK_BIN",
            program.display()
        )
    })
}

/// A running `penstock run`. Dropping it sends SIGTERM and waits.
pub struct Daemon {
    process: Arc<Process>,
    log: Arc<Log>,
    config: PathBuf,
    _guard: CleanupGuard,
    _scratch: ScratchDir,
}

impl Daemon {
    /// Starts it inside `namespace` and waits until it logs that it is ready.
    ///
    /// It is killed when the calling *thread* ends, so that it cannot outlive a test that was killed.
    pub fn start(namespace: &Namespace, config: &DaemonConfig) -> Result<Self> {
        Self::start_with(namespace, config, Privileges::All)
    }

    /// Like [`Daemon::start`], with these privileges.
    pub fn start_with(namespace: &Namespace, config: &DaemonConfig, privileges: Privileges) -> Result<Self> {
        let daemon = Self::launch_with(namespace, &config.to_toml(), privileges, &config.environment, &[])?;
        daemon.wait_until_ready()
    }

    fn wait_until_ready(self) -> Result<Self> {
        self.log.wait_for(READY, START, || self.process.has_ended()).with_context(|| {
            format!("the daemon did not get ready; its output was:\n{}", self.log.lines().join("\n"))
        })?;
        Ok(self)
    }

    /// Starts one that takes over from the one that runs, and waits until it is ready.
    pub fn take_over(namespace: &Namespace, config: &DaemonConfig) -> Result<Self> {
        let arguments = ["--take-over"];
        let daemon = Self::launch_with(namespace, &config.to_toml(), Privileges::All, &config.environment, &arguments)?;
        daemon.wait_until_ready()
    }

    /// Starts one that is to take over, with this configuration, and does not wait.
    pub fn launch_to_take_over(namespace: &Namespace, toml: &str) -> Result<Self> {
        Self::launch_with(namespace, toml, Privileges::All, &[], &["--take-over"])
    }

    /// Starts it with this configuration and does not wait.
    pub fn launch(namespace: &Namespace, toml: &str, privileges: Privileges) -> Result<Self> {
        Self::launch_with(namespace, toml, privileges, &[], &[])
    }

    fn launch_with(
        namespace: &Namespace,
        toml: &str,
        privileges: Privileges,
        environment: &[(String, String)],
        arguments: &[&str],
    ) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let config = scratch.path().join("penstock.toml");
        std::fs::write(&config, toml)?;
        let binary = penstock_binary()?;
        let mut command = namespace.command(&binary);
        command
            .arg("run")
            .arg("--config")
            .arg(&config)
            .args(arguments)
            .env("NO_COLOR", "1")
            .envs(environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let prepare = move || {
            match privileges {
                Privileges::All => {}
                Privileges::None => drop_capabilities_but(0),
                Privileges::Bounded(kept) => drop_capabilities_but(kept),
            }
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM).map_err(std::io::Error::from)
        };
        // SAFETY: between fork and exec the closure only makes system calls; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(prepare) };
        // Ctrl-C reaches a terminal's whole process group. The daemon must be ended by its guard instead.
        command.process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", binary.display()))?;
        let log = Arc::new(Log::default());
        log.collect(child.stdout.take());
        log.collect(child.stderr.take());
        let process = Arc::new(Process::new(child));
        let guard = CleanupGuard::new({
            let process = process.clone();
            move || process.end()
        });
        Ok(Self { process, log, config, _guard: guard, _scratch: scratch })
    }

    pub fn config(&self) -> &Path {
        &self.config
    }

    pub fn id(&self) -> Pid {
        self.process.id
    }

    /// Its output, standard output and standard error together.
    pub fn log(&self) -> &Log {
        &self.log
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.id(), signal).with_context(|| format!("cannot send {signal} to the daemon"))
    }

    /// Ends it with SIGTERM; returns its exit status and all of its output.
    pub fn stop(self) -> Result<(ExitStatus, Vec<String>)> {
        // It may have ended by itself; its exit status then says how.
        let _ = self.signal(Signal::SIGTERM);
        self.wait(END)
    }

    /// Waits until it has ended, however it ends.
    pub fn wait_until_ended(&self, limit: Duration) -> Result<ExitStatus> {
        self.process.wait(limit)
    }

    /// Waits until it ends by itself.
    pub fn wait(self, limit: Duration) -> Result<(ExitStatus, Vec<String>)> {
        let status = self
            .process
            .wait(limit)
            .with_context(|| format!("the daemon does not end; its output was:\n{}", self.log.lines().join("\n")))?;
        self.log.wait_until_closed(Duration::from_secs(2));
        Ok((status, self.log.lines()))
    }

    /// CPU time used, user and kernel.
    pub fn processor_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id()))?;
        // utime and stime are the 14th and 15th field; the name, the 2nd, may hold spaces (proc_pid_stat(5)).
        let fields = stat.rsplit_once(')').context("no name in /proc/PID/stat")?.1.split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap_or(0)).sum();
        // The kernel reports this time in units of USER_HZ, which is 100 wherever Linux runs on x86 and Arm.
        Ok(Duration::from_millis(ticks * 10))
    }
}

/// Output of a process, line by line.
#[derive(Default)]
pub struct Log {
    state: Mutex<LogState>,
    changed: Condvar,
}

#[derive(Default)]
struct LogState {
    lines: Vec<String>,
    open: usize,
}

impl Log {
    fn collect(self: &Arc<Self>, stream: Option<impl Read + Send + 'static>) {
        let Some(stream) = stream else { return };
        self.state().open += 1;
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(std::io::Result::ok) {
                log.state().lines.push(line);
                log.changed.notify_all();
            }
            log.state().open -= 1;
            log.changed.notify_all();
        });
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lines(&self) -> Vec<String> {
        self.state().lines.clone()
    }

    /// Number of lines: a position from which to wait.
    pub fn len(&self) -> usize {
        self.state().lines.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits for a line that contains `text`, starting at line `start`.
    pub fn wait_for_after(&self, start: usize, text: &str, limit: Duration) -> Result<String> {
        self.wait(start, text, limit, || false)
    }

    fn wait_for(&self, text: &str, limit: Duration, ended: impl Fn() -> bool) -> Result<String> {
        self.wait(0, text, limit, ended)
    }

    fn wait(&self, start: usize, text: &str, limit: Duration, ended: impl Fn() -> bool) -> Result<String> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if let Some(line) = state.lines.iter().skip(start).find(|line| line.contains(text)) {
                return Ok(line.clone());
            }
            if state.open == 0 && ended() {
                bail!("it ended without a line that has \"{text}\" in it");
            }
            if Instant::now() > deadline {
                bail!("no line that has \"{text}\" in it came within {limit:?}:\n{}", state.lines.join("\n"));
            }
            let waited = self.changed.wait_timeout(state, Duration::from_millis(20));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn wait_until_closed(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while state.open > 0 && Instant::now() < deadline {
            let waited = self.changed.wait_timeout(state, Duration::from_millis(20));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

//! Child processes that are ended by a guard.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cleanup::CleanupGuard;

pub(super) const END: Duration = Duration::from_secs(10);

/// A child process, shared with the guard that ends it.
pub(super) struct Process {
    pub(super) id: Pid,
    child: Mutex<Child>,
}

impl Process {
    pub(super) fn new(child: Child) -> Self {
        Self { id: Pid::from_raw(child.id().cast_signed()), child: Mutex::new(child) }
    }

    fn status(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // A child that cannot be waited for counts as ended.
        child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    pub(super) fn has_ended(&self) -> bool {
        self.status().is_some()
    }

    pub(super) fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.status() {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("process {} is still there after {limit:?}", self.id);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(super) fn end(&self) {
        for (signal, limit) in [(Signal::SIGTERM, END), (Signal::SIGKILL, END)] {
            if self.has_ended() {
                return;
            }
            // It may end by itself meanwhile, or be stopped; waiting shows which.
            let _ = kill(self.id, signal);
            let _ = kill(self.id, Signal::SIGCONT);
            let _ = self.wait(limit);
        }
    }
}

/// A program that runs beside a test or a benchmark. Dropping it sends SIGTERM and waits.
pub struct ServiceProcess {
    process: Arc<Process>,
    _guard: CleanupGuard,
}

impl ServiceProcess {
    /// Starts it. It is killed when the calling thread ends.
    pub fn start(mut command: Command) -> Result<Self> {
        let prepare = || nix::sys::prctl::set_pdeathsig(Signal::SIGTERM).map_err(std::io::Error::from);
        // SAFETY: between fork and exec the closure makes one system call; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(prepare) };
        // Ctrl-C reaches a terminal's whole process group. These programs must be ended by their guards instead.
        command.process_group(0);
        let name = command.get_program().to_owned();
        let child = command.spawn().with_context(|| format!("cannot start {}", name.display()))?;
        let process = Arc::new(Process::new(child));
        let guard = CleanupGuard::new({
            let process = process.clone();
            move || process.end()
        });
        Ok(Self { process, _guard: guard })
    }

    pub fn id(&self) -> Pid {
        self.process.id
    }

    /// Whether it ended by itself.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }
}

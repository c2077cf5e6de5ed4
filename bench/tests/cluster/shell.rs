//! Programs that run to their end, and those that go on.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use penstock_bench::testbed::{Namespace, ServiceProcess};

/// Runs a program and returns what it wrote on standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    if !done.status.success() {
        bail!("{command:?} ended with {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs `ip` with each line of `script` in a network namespace.
pub(crate) fn ip(namespace: &Namespace, script: &str) -> Result<()> {
    script.lines().map(str::trim).filter(|line| !line.is_empty()).try_for_each(|line| {
        let mut command = namespace.command("ip");
        output(command.args(line.split_whitespace())).map(drop)
    })
}

/// Starts a program that goes on, with its output in a file.
pub(crate) fn start(mut command: Command, log: &Path) -> Result<ServiceProcess> {
    let log = File::options().create(true).append(true).open(log).context("cannot open a log")?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    ServiceProcess::start(command)
}

/// Repeats `attempt` until it succeeds; fails with its last error once `limit` has passed.
pub(crate) fn eventually<T>(limit: Duration, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(200)),
            Err(error) => return Err(error.context(format!("not within {limit:?}"))),
            done => return done,
        }
    }
}

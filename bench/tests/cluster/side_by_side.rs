//! Both clusters at once, each with its tests in a process of its own: for half of the time a test waits for a kubelet.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::machine::Machine;
use crate::node::Cni;

/// Runs all tests, and then looks whether they have left the machine as it was.
pub(crate) fn run() -> ExitCode {
    let began = Instant::now();
    let all = || -> Result<bool> {
        let before = Machine::now()?;
        let passed = thread::scope(|scope| {
            let runs = Cni::ALL.map(|cni| scope.spawn(move || run_tests_of(cni)));
            runs.map(|run| run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let passed = passed.into_iter().collect::<Result<Vec<_>>>()?;
        before.expect_unchanged().context("nothing_is_left_on_the_machine")?;
        println!("test nothing_is_left_on_the_machine ... ok");
        Ok(passed.into_iter().all(|passed| passed))
    };
    let result = all();
    println!("all clusters: {:.0?}", began.elapsed());
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all tests in the cluster with this plugin have passed. They end with this thread.
fn run_tests_of(cni: Cni) -> Result<bool> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    command.arg(format!("{}::", cni.name())).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    // By lines: a test's result is on the line that its start began.
    for line in BufReader::new(child.stdout.take().context("its output is a pipe")?).lines() {
        println!("{}", line?);
    }
    Ok(child.wait()?.success())
}

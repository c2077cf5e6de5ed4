//! The peers' programs and the packages that contain them.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::testbed::Namespace;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingTool {
    program: &'static str,
    package: &'static str,
}

impl fmt::Display for MissingTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not installed; install it with: apt-get install {}", self.program, self.package)
    }
}

impl std::error::Error for MissingTool {}

/// Finds a program in `PATH`, or in the directories that only root has in its `PATH`.
///
/// # Errors
/// If no such directory holds it.
pub fn find(program: &'static str, package: &'static str) -> Result<PathBuf, MissingTool> {
    find_in(&search_path(), program, package)
}

/// `PATH`, followed by the directories that only root has in it.
pub fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Finds a program in the directories of `path`, separated as in `PATH`.
///
/// # Errors
/// If none of them holds it.
pub fn find_in(path: &OsStr, program: &'static str, package: &'static str) -> Result<PathBuf, MissingTool> {
    let mut places = std::env::split_paths(path).map(|directory| directory.join(program));
    places.find(|file| file.is_file()).ok_or(MissingTool { program, package })
}

/// Runs a program to completion inside a namespace, with `input` on its standard input.
pub(super) fn run(namespace: &Namespace, program: &Path, arguments: &[&str], input: &str) -> Result<String> {
    let mut command = namespace.command(program);
    command.args(arguments);
    finish(command, input).with_context(|| format!("{} {} failed", program.display(), arguments.join(" ")))
}

/// Runs a command to completion and returns its output.
pub(super) fn finish(mut command: Command, input: &str) -> Result<String> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that stops reading early explains why in its output.
        let _ = std::io::Write::write_all(&mut stdin, input.as_bytes());
    }
    let output = child.wait_with_output()?;
    let complaint = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    ensure!(output.status.success(), "it ended with {}: {:.400}", output.status, complaint);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The first line of a program's version output.
pub(super) fn version(program: &'static str, argument: &str) -> Result<String> {
    let mut command = Command::new(find(program, program)?);
    command.arg(argument);
    Ok(finish(command, "")?.lines().next().unwrap_or_default().to_owned())
}

pub(super) fn kernel() -> Result<String> {
    let name = nix::sys::utsname::uname()?;
    Ok(format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy()))
}

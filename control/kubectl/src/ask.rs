//! Asks all daemons the same, a bounded number at a time, and sorts answers from problems.

use std::io::{self, Write};
use std::time::Duration;

use futures_util::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::Failure;
use super::cluster::{Cluster, Daemon, Fleet, Missing, Problem, Running};

/// Most bytes of an answer: connections and bundles of a large node are some 10 MB.
const MAX_ANSWER: u64 = 256 << 20;
pub(super) const MAX_ERRORS: u64 = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Asking {
    /// How long a node may take for its whole answer.
    pub(super) timeout: Duration,
    pub(super) parallel: usize,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Output {
    pub(super) code: i32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
}

/// Answers by node, and the nodes without one; both sorted by node.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answers<T> {
    pub(super) answers: Vec<(Daemon, T)>,
    pub(super) missing: Vec<Missing>,
}

#[derive(Serialize)]
struct WithMissing<'a, T> {
    #[serde(flatten)]
    answer: &'a T,
    missing: &'a [Missing],
}

impl<T> Answers<T> {
    /// Which nodes have not answered, as the command's result: the answers of the others are printed by then.
    pub(super) fn completeness(&self) -> Result<(), Failure> {
        if self.missing.is_empty() {
            return Ok(());
        }
        let lines = lines(&self.missing);
        if !self.answers.is_empty() {
            return Err(Failure::Partial(lines));
        }
        Err(match self.missing.iter().all(|missing| missing.is_bad_input) {
            true => Failure::BadInput(lines),
            false => Failure::Failed(anyhow::anyhow!("{}", lines.join("\n"))),
        })
    }

    pub(super) fn all(&self) -> usize {
        self.answers.len() + self.missing.len()
    }

    /// Fails if no node has answered: there is nothing to print.
    pub(super) fn some(self) -> Result<Self, Failure> {
        match self.answers.is_empty() {
            true => Err(self.completeness().err().unwrap_or_else(|| Failure::bad_input("there is no node to ask"))),
            false => Ok(self),
        }
    }
}

/// A line for each problem, with the nodes that have it.
pub(super) fn lines(missing: &[Missing]) -> Vec<String> {
    let mut grouped: Vec<(&str, Vec<&str>)> = Vec::new();
    for Missing { node, message, .. } in missing {
        match grouped.iter_mut().find(|(known, _)| known == message) {
            Some((_, nodes)) => nodes.push(node),
            None => grouped.push((message, vec![node])),
        }
    }
    let line = |(message, nodes): (&str, Vec<&str>)| {
        let noun = if nodes.len() == 1 { "node" } else { "nodes" };
        format!("{noun} {}: {message}", nodes.join(", "))
    };
    grouped.into_iter().map(line).collect()
}

/// Prints the answer, then tells which nodes are missing from it.
pub(super) fn print<T>(text: &str, answers: &Answers<T>) -> Result<(), Failure> {
    Failure::print(text)?;
    answers.completeness()
}

/// A merged answer with the nodes that it does not cover, as `--json` prints it.
pub(super) fn whole<'a, T: Serialize>(answer: &'a T, missing: &'a [Missing]) -> impl Serialize + 'a {
    WithMissing { answer, missing }
}

/// Prints a listing once more and waits: JSON as a further line, text for people in the place of the one before, with the nodes that
/// are missing from it.
pub(super) async fn print_again(text: &str, missing: &[Missing], is_json: bool, seconds: u64) -> io::Result<()> {
    let missing = if is_json { Vec::new() } else { lines(missing) };
    let screen = missing.iter().fold(text.to_owned(), |screen, line| screen + line + "\n");
    let mut output = io::stdout();
    output.write_all(screen.as_bytes()).and_then(|()| output.flush())?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    Ok(())
}

/// Asks each daemon of the fleet, and reads its answer.
pub(super) async fn ask_all<C: Cluster, T>(
    cluster: &C,
    asking: Asking,
    fleet: Fleet,
    command: impl Fn(&Daemon) -> Vec<String>,
    input: Option<&[u8]>,
    read: impl Fn(&Output) -> Result<T, Problem>,
) -> Answers<T> {
    let asked = futures_util::stream::iter(fleet.daemons).map(|daemon| {
        let command = command(&daemon);
        async move {
            let output = ask(cluster, asking, &daemon, command, input).await;
            (daemon, output)
        }
    });
    let mut asked = asked.buffer_unordered(asking.parallel.max(1));
    let (mut answers, mut missing) = (Vec::new(), fleet.missing);
    while let Some((daemon, output)) = asked.next().await {
        match output.and_then(|output| read(&output)) {
            Ok(answer) => answers.push((daemon, answer)),
            Err(problem) => missing.push(Missing::new(&daemon.node, Some(&daemon.pod), &problem)),
        }
    }
    answers.sort_by(|(one, _), (other, _)| one.cmp(other));
    missing.sort_by(|one, other| one.node.cmp(&other.node));
    Answers { answers, missing }
}

/// Runs a command beside a daemon until it ends.
async fn ask<C: Cluster>(
    cluster: &C,
    asking: Asking,
    daemon: &Daemon,
    command: Vec<String>,
    input: Option<&[u8]>,
) -> Result<Output, Problem> {
    let whole = async {
        let Running { mut stdin, stdout, stderr, status } = cluster.exec(daemon, command, input.is_some()).await?;
        let write = async {
            if let (Some(stdin), Some(input)) = (&mut stdin, input) {
                // A command that does not read says why by its exit code.
                let _ = stdin.write_all(input).await;
                let _ = stdin.flush().await;
            }
        };
        let broken = |error: io::Error| Problem::Unreachable(format!("the answer broke off: {error}"));
        // The status fails when the connection does; the outputs have no end then.
        let ((), stdout, stderr, code) = tokio::try_join!(
            async {
                write.await;
                Ok(())
            },
            async { read_all(stdout, MAX_ANSWER).await.map_err(broken) },
            async { read_all(stderr, MAX_ERRORS).await.map_err(broken) },
            status,
        )?;
        // Only now: its end may be that of the connection.
        drop(stdin);
        Ok(Output { code, stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() })
    };
    let timeout = tokio::time::timeout(asking.timeout, whole);
    timeout.await.unwrap_or(Err(Problem::TimedOut(asking.timeout.as_secs())))
}

/// All that is read, at most so much; the rest is read and forgotten, so that the command can end.
pub(super) async fn read_all(reader: impl AsyncRead, most: u64) -> io::Result<Vec<u8>> {
    let mut reader = std::pin::pin!(reader);
    let mut bytes = Vec::new();
    (&mut reader).take(most).read_to_end(&mut bytes).await?;
    tokio::io::copy(&mut reader, &mut tokio::io::sink()).await?;
    Ok(bytes)
}

/// The standard output of a command that succeeded, with one of these exit codes.
pub(super) fn succeeded<'a>(output: &'a Output, codes: &[i32]) -> Result<&'a [u8], Problem> {
    if codes.contains(&output.code) {
        return Ok(&output.stdout);
    }
    Err(problem(output.code, &output.stderr))
}

/// Why a command of `penstock` failed, from its exit code and what it said.
pub(super) fn problem(code: i32, stderr: &str) -> Problem {
    let lines: Vec<&str> = stderr.lines().map(|line| line.trim_start_matches("penstock: ").trim()).collect();
    let said: Vec<&str> = lines.into_iter().filter(|line| !line.is_empty()).collect();
    let first = said.first().copied().unwrap_or_default().trim_start_matches("error: ");
    let unknown = ["unexpected argument", "unrecognized subcommand", "invalid value"];
    if code == 2 && stderr.contains("For more information") && unknown.iter().any(|start| first.starts_with(start)) {
        return match first.starts_with("invalid value") {
            true => Problem::Refused(first.to_owned()),
            false => Problem::OldVersion(first.to_owned()),
        };
    }
    let said = match said.is_empty() {
        true => format!("penstock ended with exit code {code} and said nothing; see the log of its pod"),
        false => said.join("; "),
    };
    match code {
        2 if said.contains("no daemon listens") => {
            // The remedy that it names is for who is on the node.
            let what = said.split("; ").next().unwrap_or_default();
            Problem::NoDaemon(format!("{what}; see the log of its pod"))
        }
        2 => Problem::Refused(said),
        _ => Problem::Failed(said),
    }
}

/// Parses a command's JSON.
pub(super) fn parsed<T: DeserializeOwned>(output: &Output) -> Result<T, Problem> {
    from_json(succeeded(output, &[0])?)
}

pub(super) fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|error| Problem::Garbage(error.to_string()))
}

pub(super) fn words(command: &[&str]) -> Vec<String> {
    command.iter().map(|&word| word.to_owned()).collect()
}

//! `penstock trial`: what staged policies would change, on a running daemon.

use std::fmt::Write as _;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_admin::types::{TrialManifest, TrialPolicies, TrialRequest, TrialStatus};
use penstock_sources::manifest::read_texts;
use penstock_text::number::json;
use penstock_text::trial::text;

use super::Failure;
use super::daemon::{DaemonArgs, failure};

/// Try policies on live traffic: what would change, without changing it
///
/// A policy with the annotation policy.penstock.dev/staged: "true" is not in effect. The daemon judges every connection that is
/// open, opened or denied by what is in effect and by what would be if everything that is staged were promoted, and sums up
/// where the two differ. `start` does the same with policies of files, on this node alone and without touching the cluster:
/// each counts as if it were applied. No connection is treated otherwise meanwhile.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Annotations of NetworkPolicy and ClusterNetworkPolicy, in the cluster or in files:
  policy.penstock.dev/staged: \"true\"         a new policy
  policy.penstock.dev/staged-for: NAME        in place of that policy, in the same namespace
  policy.penstock.dev/staged-delete: \"true\"  stays in effect, and is judged as if it were gone

Columns of status:
  LIVE     connections that are open, or revoked and would be allowed again
  OPENED   connections that were opened, or denied, since these policies are judged
  PACKETS  packets that opened them, or were denied; other packets are not counted one by one
  NOW      the verdict in effect
  STAGED   the verdict after promotion, with what decides it

Exit codes:
  0  done; status: nothing would change
  1  the daemon sent no valid answer
  2  bad input: manifests, no daemon listens at the socket, or admin.trials does not allow a start
  3  status: something would change

Examples:
  penstock trial status
  penstock trial start --manifests new-policies/
  penstock trial status --json | jq '.changes[] | select(.present.allowed)'
  penstock trial stop")]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand, Debug)]
enum Action {
    /// Judge the policies of files, instead of those of an earlier start; needs admin.trials = true
    Start {
        #[command(flatten)]
        daemon: DaemonArgs,
        /// Manifests, YAML or JSON: files, directories (*.yaml, *.yml, *.json in them), or - for standard input
        #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
        manifests: Vec<PathBuf>,
        /// Read so many bytes of standard input, for a connection that cannot say where it ends
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=MAX_INPUT))]
        input_bytes: Option<u64>,
    },
    /// Print what promotion of everything that is staged would change
    Status {
        #[command(flatten)]
        daemon: DaemonArgs,
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Judge the policies of files no more
    Stop {
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    match args.action {
        Action::Start { daemon, manifests, input_bytes } => start(&daemon, &manifests, input_bytes),
        Action::Status { daemon, json } => status(&daemon, json),
        Action::Stop { daemon } => {
            let TrialPolicies { .. } = daemon.client()?.delete("/v1/trial").map_err(failure)?;
            Failure::print("stopped: no policies of files are judged\n")
        }
    }
}

const MAX_INPUT: u64 = 8 << 20;

fn start(daemon: &DaemonArgs, manifests: &[PathBuf], input_bytes: Option<u64>) -> Result<(), Failure> {
    let manifests = match input_bytes {
        Some(count) if manifests == [PathBuf::from("-")] => vec![read_input(count)?],
        Some(_) => return Err(Failure::bad_input("--input-bytes is of standard input: give --manifests - with it")),
        None => read(manifests)?,
    };
    let request = TrialRequest { manifests };
    let TrialPolicies { policies, left_out } = daemon.client()?.post("/v1/trial", &request).map_err(failure)?;
    let mut text = format!("judged beside what is in effect: {}\n", policies.join(", "));
    if left_out > 0 {
        let _ = writeln!(text, "not used, of other kinds: {left_out}; pods and namespaces are those of the cluster");
    }
    Failure::print(&text)
}

fn read(manifests: &[PathBuf]) -> Result<Vec<TrialManifest>, Failure> {
    let texts = read_texts(manifests)
        .map_err(|errors| Failure::BadInput(errors.0.iter().map(ToString::to_string).collect()))?;
    let manifest = |(path, text): (Arc<Path>, String)| TrialManifest { name: path.display().to_string(), text };
    Ok(texts.into_iter().map(manifest).collect())
}

fn read_input(count: u64) -> Result<TrialManifest, Failure> {
    let mut text = String::new();
    match io::stdin().lock().take(count).read_to_string(&mut text) {
        Ok(read) if read as u64 == count => Ok(TrialManifest { name: "standard input".to_owned(), text }),
        Ok(read) => Err(Failure::bad_input(format!(
            "standard input: ends after {read} bytes, and --input-bytes says {count}; give its length"
        ))),
        Err(error) => Err(Failure::bad_input(format!("standard input: {error}; give manifests in UTF-8"))),
    }
}

fn status(daemon: &DaemonArgs, as_json: bool) -> Result<(), Failure> {
    let status: TrialStatus = daemon.get("/v1/trial", &())?;
    Failure::print(&if as_json { json(&status) } else { text(&status) })?;
    if status.has_changes() { Err(Failure::Differs) } else { Ok(()) }
}

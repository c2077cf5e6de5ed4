//! `penstock trial`: what staged policies would change, on a running daemon.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;

use penstock_admin::table::align_columns;
use penstock_admin::types::{StagedChange, StagedVerdict, TrialManifest, TrialPolicies, TrialRequest, TrialStatus};
use penstock_sources::manifest::read_texts;

use super::Failure;
use super::daemon::{DaemonArgs, failure, json};
use super::flows::amount;

/// Try policies on live traffic: what would change, without changing it
///
/// A policy with the annotation policy.penstock.dev/staged: "true" is not in force. The daemon judges every connection that is
/// open, opened or denied by what is in force and by what would be if everything that is staged were promoted, and sums up
/// where the two differ. `start` does the same with policies of files, on this node alone and without touching the cluster:
/// each counts as if it were applied. No connection is treated otherwise meanwhile.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Annotations of NetworkPolicy and ClusterNetworkPolicy, in the cluster or in files:
  policy.penstock.dev/staged: \"true\"         a new policy
  policy.penstock.dev/staged-for: NAME        in place of that policy, in the same namespace
  policy.penstock.dev/staged-delete: \"true\"  stays in force, and is judged as if it were gone

Columns of status:
  LIVE     connections that are open, or revoked and would be allowed again
  OPENED   connections that were opened, or denied, since these policies are judged
  PACKETS  packets that opened them, or were denied; other packets are not counted one by one
  NOW      the verdict in force
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
        Action::Start { daemon, manifests } => start(&daemon, &manifests),
        Action::Status { daemon, json } => status(&daemon, json),
        Action::Stop { daemon } => {
            let TrialPolicies { .. } = daemon.client()?.delete("/v1/trial").map_err(failure)?;
            print("stopped: no policies of files are judged\n")
        }
    }
}

fn start(daemon: &DaemonArgs, manifests: &[PathBuf]) -> Result<(), Failure> {
    let texts = read_texts(manifests)
        .map_err(|errors| Failure::BadInput(errors.0.iter().map(ToString::to_string).collect()))?;
    let manifest = |(path, text): (std::sync::Arc<std::path::Path>, String)| TrialManifest {
        name: path.display().to_string(),
        text,
    };
    let request = TrialRequest { manifests: texts.into_iter().map(manifest).collect() };
    let TrialPolicies { policies, left_out } = daemon.client()?.post("/v1/trial", &request).map_err(failure)?;
    let mut text = format!("judged beside what is in force: {}\n", policies.join(", "));
    if left_out > 0 {
        let _ = writeln!(text, "not used, of other kinds: {left_out}; pods and namespaces are those of the cluster");
    }
    print(&text)
}

fn status(daemon: &DaemonArgs, as_json: bool) -> Result<(), Failure> {
    let status: TrialStatus = daemon.get("/v1/trial", &())?;
    print(&if as_json { json(&status) } else { text(&status) })?;
    if status.has_changes() { Err(Failure::Differs) } else { Ok(()) }
}

fn print(text: &str) -> Result<(), Failure> {
    io::stdout().write_all(text.as_bytes()).or_else(Failure::from_output)
}

fn text(status: &TrialStatus) -> String {
    let TrialStatus { staged, since, problems, live_judged, opening_judged, unrecorded, ungrouped, changes, .. } =
        status;
    let Some(since) = since else { return "nothing is staged\n".to_owned() };
    let mut text = format!("staged since {since}: {}\n", staged.join(", "));
    for problem in problems {
        let _ = writeln!(text, "note: {problem}");
    }
    let _ = writeln!(text, "judged: {live_judged} open connections, {opening_judged} packets that open one");
    if !changes.is_empty() {
        let heading = ["FROM", "TO", "PORT", "LIVE", "OPENED", "PACKETS", "BYTES", "LAST SEEN", "NOW", "STAGED"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(changes.iter().map(row));
        let _ = write!(text, "\n{}", align_columns(&rows));
    }
    for (count, what) in [(unrecorded, "packets that came too fast"), (ungrouped, "connections beyond 1000 groups")] {
        if *count > 0 {
            let _ = writeln!(text, "not listed: {count} {what}, whose verdict would change");
        }
    }
    if !status.has_changes() {
        text.push_str("nothing would change\n");
    }
    text
}

fn row(change: &StagedChange) -> Vec<String> {
    let port = match change.port {
        0 => change.protocol.clone(),
        port => format!("{port}/{}", change.protocol),
    };
    vec![
        change.from.clone(),
        change.to.clone(),
        port,
        live(change),
        change.opened.to_string(),
        change.packets.to_string(),
        change.bytes.to_string(),
        change.last_seen.clone(),
        verdict(&change.present),
        promoted(change),
    ]
}

/// `2`, or with what they sent `2 (9 packets, 600 B)`.
fn live(change: &StagedChange) -> String {
    match &change.live_traffic {
        Some(traffic) => format!("{} ({})", change.live, amount(traffic)),
        None => change.live.to_string(),
    }
}

fn promoted(change: &StagedChange) -> String {
    match &change.isolating[..] {
        [] => verdict(&change.promoted),
        policies => format!("denied ({}, isolated by {})", change.promoted.reason, policies.join(", ")),
    }
}

fn verdict(StagedVerdict { allowed, reason }: &StagedVerdict) -> String {
    format!("{} ({reason})", if *allowed { "allowed" } else { "denied" })
}

#[cfg(test)]
mod tests {
    use penstock_admin::types::Traffic;

    use super::*;

    #[test]
    fn a_status_lists_the_groups_and_what_is_in_none() {
        assert_eq!(text(&TrialStatus::default()), "nothing is staged\n");
        let since = Some("2026-11-22T10:00:00Z".to_owned());
        let staged = vec!["NetworkPolicy shop/db".to_owned()];
        let mut status = TrialStatus { since, staged, live_judged: 3, ..TrialStatus::default() };
        assert!(text(&status).ends_with("judged: 3 open connections, 0 packets that open one\nnothing would change\n"));
        let verdict = |allowed, reason: &str| StagedVerdict { allowed, reason: reason.to_owned() };
        status.changes.push(StagedChange {
            from: "shop/web".to_owned(),
            to: "shop/db".to_owned(),
            protocol: "TCP".to_owned(),
            port: 5432,
            present: verdict(true, "no policy applies"),
            promoted: verdict(false, "ingress: no rule allows it"),
            isolating: vec!["shop/guard".to_owned()],
            live: 2,
            live_traffic: Some(Traffic { packets: 1200, bytes: 90_000 }),
            opened: 7,
            packets: 9,
            bytes: 600,
            first_seen: "2026-11-22T10:00:00Z".to_owned(),
            last_seen: "2026-11-22T10:00:05Z".to_owned(),
            example: "10.0.0.1:4000 to 10.0.0.2:5432".to_owned(),
        });
        status.ungrouped = 4;
        let listed = text(&status);
        let line = listed.lines().find(|line| line.starts_with("shop/web")).unwrap();
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let expected = [
            "shop/web",
            "shop/db",
            "5432/TCP",
            "2 (1200 packets, 87.89 KiB)",
            "7",
            "9",
            "600",
            "2026-11-22T10:00:05Z",
            "allowed (no policy applies)",
            "denied (ingress: no rule allows it, isolated by shop/guard)",
        ];
        assert_eq!(cells, expected);
        assert!(
            listed.ends_with("not listed: 4 connections beyond 1000 groups, whose verdict would change\n"),
            "{listed}"
        );
    }
}

//! `kubectl penstock trial`: what staged policies would change, on all nodes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use penstock_admin::types::{StagedChange, StagedVerdict, TrialStatus};
use penstock_sources::manifest::read_texts;
use penstock_text::number::json;
use penstock_text::trial::text;
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, Output, ask_all, from_json, print, succeeded, whole, words};
use super::cluster::{Cluster, Daemon, Problem};

const MAX_INPUT: usize = 8 << 20;

/// Try policies on the live traffic of all nodes: what would change, without changing it
///
/// `start` gives the policies of files to every daemon, without touching the cluster: each counts as if it were applied. `status`
/// sums up what of all nodes would change, and `stop` ends it everywhere. Of a connection between two nodes each judges its own
/// side; where both would change, it counts on both. See `penstock trial --help` for the annotations and the columns.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  done on all nodes; status: nothing would change
  1  no node has answered, or the API server is away
  2  bad input: manifests, the kubeconfig, rights that the user lacks, or admin.trials does not allow a start
  3  status: all nodes have answered, and something would change
  4  some nodes have not answered; they are named

Examples:
  kubectl penstock trial start --manifests new-policies/
  kubectl penstock trial status
  kubectl penstock trial status --json | jq '.changes[] | select(.present.allowed)'
  kubectl penstock trial stop")]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand, Debug)]
enum Action {
    /// Judge the policies of files on all nodes; needs admin.trials = true there
    Start {
        /// Manifests, YAML or JSON: files, directories (*.yaml, *.yml, *.json in them), or - for standard input
        #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
        manifests: Vec<PathBuf>,
    },
    /// Print what promotion of everything that is staged would change, summed over all nodes
    Status {
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Judge the policies of files no more, on no node
    Stop,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Merged {
    /// Nodes that judge staged policies.
    nodes: usize,
    #[serde(flatten)]
    status: TrialStatus,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    match args.action {
        Action::Start { manifests } => start(cluster, asking, &manifests).await,
        Action::Status { json } => status(cluster, asking, json).await,
        Action::Stop => {
            let answers = everywhere(cluster, asking, words(&["penstock", "trial", "stop"]), None).await?;
            print(&said(&answers), &answers)
        }
    }
}

async fn start<C: Cluster>(cluster: &C, asking: Asking, manifests: &[PathBuf]) -> Result<(), Failure> {
    let texts = read_texts(manifests)
        .map_err(|errors| Failure::BadInput(errors.0.iter().map(ToString::to_string).collect()))?;
    // JSON is YAML, too.
    let whole = texts.iter().map(|(_, text)| format!("---\n{}\n", text.trim_end())).collect::<String>();
    if whole.len() > MAX_INPUT {
        return Err(Failure::bad_input(format!(
            "--manifests: {} bytes, and a daemon reads at most {MAX_INPUT}; try fewer policies at a time",
            whole.len()
        )));
    }
    let count = whole.len().to_string();
    let command = words(&["penstock", "trial", "start", "--manifests", "-", "--input-bytes", &count]);
    let answers = everywhere(cluster, asking, command, Some(whole.as_bytes())).await?;
    print(&said(&answers), &answers)
}

/// Runs a command on all nodes that prints a line.
async fn everywhere<C: Cluster>(
    cluster: &C,
    asking: Asking,
    command: Vec<String>,
    input: Option<&[u8]>,
) -> Result<Answers<String>, Failure> {
    let fleet = cluster.daemons().await?;
    super::tell(fleet.note.as_deref());
    let read = |output: &Output| Ok(String::from_utf8_lossy(succeeded(output, &[0])?).into_owned());
    ask_all(cluster, asking, fleet, |_| command.clone(), input, read).await.some()
}

/// The output of the nodes, once where it is the same.
fn said(answers: &Answers<String>) -> String {
    let mut said = BTreeMap::<&str, Vec<&str>>::new();
    for (daemon, text) in &answers.answers {
        said.entry(text).or_default().push(&daemon.node);
    }
    said.into_iter().map(|(text, nodes)| format!("{}: {text}", nodes.join(", "))).collect()
}

async fn status<C: Cluster>(cluster: &C, asking: Asking, as_json: bool) -> Result<(), Failure> {
    let fleet = cluster.daemons().await?;
    super::tell(fleet.note.as_deref());
    let command = |_: &Daemon| words(&["penstock", "trial", "status", "--json"]);
    // 3: something would change.
    let read = |output: &Output| -> Result<TrialStatus, Problem> { from_json(succeeded(output, &[0, 3])?) };
    let answers = ask_all(cluster, asking, fleet, command, None, read).await.some()?;
    let merged = merge(&answers.answers);
    let text = match as_json {
        true => json(&whole(&merged, &answers.missing)),
        false => format!("{}judged on {} of {} nodes\n", text(&merged.status), merged.nodes, answers.all()),
    };
    print(&text, &answers)?;
    if merged.status.has_changes() { Err(Failure::Differs) } else { Ok(()) }
}

/// The key by which changes are alike on two nodes.
type Group = (bool, String, String, String, u16, String, bool, String, Vec<String>);

fn group(change: &StagedChange) -> Group {
    let StagedChange { from, to, protocol, port, present, promoted, isolating, .. } = change.clone();
    let (StagedVerdict { allowed: was, reason: why }, StagedVerdict { allowed: is, reason }) = (present, promoted);
    // Those that would be denied first, as on one node.
    (is, from, to, protocol, port, why, was, reason, isolating)
}

fn merge(answers: &[(Daemon, TrialStatus)]) -> Merged {
    let judging: Vec<&TrialStatus> = answers.iter().map(|(_, it)| it).filter(|it| it.since.is_some()).collect();
    let mut status = TrialStatus::default();
    let mut groups = BTreeMap::<Group, StagedChange>::new();
    for one in &judging {
        status.from_files |= one.from_files;
        status.since = earlier(status.since.take(), one.since.clone());
        status.staged.extend(one.staged.iter().cloned());
        status.problems.extend(one.problems.iter().cloned());
        status.live_judged += one.live_judged;
        status.opening_judged += one.opening_judged;
        status.unrecorded += one.unrecorded;
        status.ungrouped += one.ungrouped;
        for change in &one.changes {
            match groups.entry(group(change)) {
                std::collections::btree_map::Entry::Vacant(place) => _ = place.insert(change.clone()),
                std::collections::btree_map::Entry::Occupied(mut place) => add(place.get_mut(), change),
            }
        }
    }
    for list in [&mut status.staged, &mut status.problems] {
        list.sort();
        list.dedup();
    }
    status.changes = groups.into_values().collect();
    Merged { nodes: judging.len(), status }
}

/// Adds what another node has of the same group.
fn add(sum: &mut StagedChange, other: &StagedChange) {
    sum.live += other.live;
    sum.opened += other.opened;
    sum.packets += other.packets;
    sum.bytes += other.bytes;
    sum.live_traffic = match (sum.live_traffic, other.live_traffic) {
        (Some(mut traffic), Some(more)) => {
            traffic += more;
            Some(traffic)
        }
        (one, another) => one.or(another),
    };
    sum.first_seen =
        earlier(Some(std::mem::take(&mut sum.first_seen)), Some(other.first_seen.clone())).unwrap_or_default();
    if order(&sum.last_seen) < order(&other.last_seen) {
        sum.last_seen.clone_from(&other.last_seen);
    }
    if other.example < sum.example {
        sum.example.clone_from(&other.example);
    }
}

/// The order of times as in RFC 3339, whose text has another where fractions of seconds are of different lengths.
fn order(time: &str) -> (Option<Timestamp>, &str) {
    (time.parse().ok(), time)
}

fn earlier(one: Option<String>, other: Option<String>) -> Option<String> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if order(&other) < order(&one) { other } else { one }),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use penstock_admin::types::Traffic;
    use proptest::prelude::*;

    use super::*;
    use crate::fake::{ASKING, FakeCluster, Reply};

    fn change(to: &str, live: u64, seen: &str) -> StagedChange {
        let verdict = |allowed| StagedVerdict { allowed, reason: "rule".to_owned() };
        StagedChange {
            from: "shop/web".to_owned(),
            to: to.to_owned(),
            protocol: "TCP".to_owned(),
            port: 5432,
            present: verdict(true),
            promoted: verdict(false),
            isolating: Vec::new(),
            live,
            live_traffic: (live > 0).then_some(Traffic { packets: live, bytes: 100 * live }),
            opened: 2 * live,
            packets: 3,
            bytes: 60,
            first_seen: seen.to_owned(),
            last_seen: seen.to_owned(),
            example: format!("example {live}"),
        }
    }

    fn judging(changes: Vec<StagedChange>) -> TrialStatus {
        let since = Some("2026-11-22T10:00:00Z".to_owned());
        TrialStatus {
            since,
            staged: vec!["NetworkPolicy shop/db".to_owned()],
            live_judged: 7,
            changes,
            ..TrialStatus::default()
        }
    }

    fn answer(node: &str, status: TrialStatus) -> (Daemon, TrialStatus) {
        (Daemon { node: node.to_owned(), pod: String::new() }, status)
    }

    #[test]
    fn changes_are_summed_and_times_compared_as_times() {
        let merged = merge(&[
            answer("a", judging(vec![change("shop/db", 2, "2026-11-22T10:00:05Z")])),
            answer(
                "b",
                judging(vec![
                    change("shop/db", 3, "2026-11-22T10:00:05.5Z"),
                    change("shop/api", 0, "2026-11-22T10:00:00Z"),
                ]),
            ),
            answer("c", TrialStatus::default()),
        ]);
        assert_eq!((merged.nodes, merged.status.live_judged, merged.status.staged.len()), (2, 14, 1));
        let db = merged.status.changes.iter().find(|change| change.to == "shop/db").unwrap();
        assert_eq!(
            (db.live, db.opened, db.packets, db.live_traffic),
            (5, 10, 6, Some(Traffic { packets: 5, bytes: 500 }))
        );
        assert_eq!((db.first_seen.as_str(), db.last_seen.as_str()), ("2026-11-22T10:00:05Z", "2026-11-22T10:00:05.5Z"));
        assert_eq!(merge(&[answer("c", TrialStatus::default())]).status, TrialStatus::default(), "nothing is staged");
    }

    #[tokio::test]
    async fn manifests_reach_every_node_whole_and_a_refusal_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), "kind: A\n").unwrap();
        std::fs::write(folder.path().join("b.json"), r#"{"kind": "B"}"#).unwrap();
        let judged = Reply::EndsAfterInput(0, b"judged beside what is in effect: shop/db\n".to_vec(), String::new());
        let refused = Reply::EndsAfterInput(2, Vec::new(), "penstock: admin.trials is false; set it\n".to_owned());
        let cluster = FakeCluster::new([("a", vec![judged.clone()]), ("b", vec![refused]), ("c", vec![judged])]);
        let ended = start(&cluster, ASKING, &[folder.path().to_owned()]).await;
        let Err(Failure::Partial(lines)) = ended else { panic!("{ended:?}") };
        assert_eq!(lines, ["node b: admin.trials is false; set it"]);
        let expected = b"---\nkind: A\n---\n{\"kind\": \"B\"}\n";
        let inputs = cluster.inputs.lock().unwrap();
        assert!(inputs.len() == 3 && inputs.iter().all(|input| input == expected), "{inputs:?}");
        let asked = cluster.asked.lock().unwrap();
        assert_eq!(asked[0].1[5..], ["--input-bytes", &expected.len().to_string()]);
    }

    #[tokio::test]
    async fn a_status_with_changes_on_one_node_has_its_own_exit_code() {
        let nothing = || vec![Reply::ok(json(&TrialStatus::default()))];
        let differs = Reply::Ends(3, json(&judging(vec![change("shop/db", 2, "x")])).into_bytes(), String::new());
        let cluster = FakeCluster::new([("a", nothing()), ("b", vec![differs.clone()])]);
        assert!(matches!(status(&cluster, ASKING, false).await, Err(Failure::Differs)));
        let cluster = FakeCluster::new([("a", nothing()), ("b", nothing())]);
        status(&cluster, ASKING, false).await.unwrap();
        let cluster = FakeCluster::new([("a", vec![Reply::error(1, "")]), ("b", vec![differs])]);
        assert!(matches!(status(&cluster, ASKING, false).await, Err(Failure::Partial(_))), "the sum is not whole");
    }

    proptest! {
        #[test]
        fn sums_equal_their_parts_in_any_order(
            parts in prop::collection::vec(prop::collection::vec((0usize..3, 0u64..9, 0u8..60), 0..5), 1..5), turn in 0usize..5,
        ) {
            let names = ["shop/a", "shop/b", "shop/c"];
            let changes = |part: &Vec<(usize, u64, u8)>| part.iter().map(|&(to, live, second)| {
                change(names[to], live, &format!("2026-11-22T10:00:{second:02}Z"))
            }).collect::<Vec<_>>();
            let mut answers: Vec<_> = parts.iter().map(|part| answer("n", judging(changes(part)))).collect();
            let merged = merge(&answers);
            let count = answers.len();
            answers.rotate_left(turn % count);
            answers.iter_mut().for_each(|(_, status)| status.changes.reverse());
            prop_assert_eq!(&merge(&answers), &merged);
            let all: Vec<StagedChange> = parts.iter().flat_map(changes).collect();
            for name in names {
                let of = |changes: &[StagedChange]| {
                    let of: Vec<StagedChange> = changes.iter().filter(|change| change.to == name).cloned().collect();
                    let traffic: u64 = of.iter().filter_map(|change| change.live_traffic).map(|traffic| traffic.bytes).sum();
                    (of.iter().map(|it| it.live).sum::<u64>(), of.iter().map(|it| it.packets).sum::<u64>(), traffic,
                        of.iter().map(|it| it.last_seen.clone()).max())
                };
                prop_assert_eq!(of(&merged.status.changes), of(&all));
            }
        }
    }
}

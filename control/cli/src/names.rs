//! `penstock names`: the domain names that pods of a running daemon have learnt.

use penstock_admin::table::align_columns;
use penstock_admin::types::{LearntName, Names, NamesQuery};
use penstock_text::number::json;

use super::Failure;
use super::daemon::DaemonArgs;

/// List the domain names that pods have learnt from DNS answers
///
/// For pods with `domainNames` in the egress rules of a ClusterNetworkPolicy: which addresses the answers gave them, and for how long
/// they may still open connections there by that name. An expired name counts for connections that are open.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the daemon sent no valid answer
  2  bad input: a filter, domain names are not followed, or no daemon listens at the socket

Examples:
  penstock names
  penstock names --pod shop/web-1 --name '*.example.org'
  penstock names --json | jq '.names[] | select(.seconds == 0)'")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Only what this pod has learnt (NAMESPACE/POD)
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Only this name; `*.NAME`: those below it
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// List at most this many
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    limit: usize,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let query = NamesQuery { pod: args.pod, name: args.name, limit: Some(args.limit) };
    let names: Names = args.daemon.get("/v1/names", &query)?;
    let text = if args.json { json(&names) } else { text(&names) };
    Failure::print(text)
}

fn text(names: &Names) -> String {
    let heading = ["POD", "NAME", "ADDRESS", "HOLDS"].map(str::to_owned).to_vec();
    let row = |LearntName { pod, name, address, seconds }: &LearntName| {
        let holds = if *seconds == 0 { "expired".to_owned() } else { format!("{seconds} s") };
        vec![pod.clone(), name.clone(), address.to_string(), holds]
    };
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(names.names.iter().map(row)).collect();
    let mut text = align_columns(&rows);
    if names.matching > names.names.len() {
        text += &format!("{} of {} names\n", names.names.len(), names.matching);
    }
    text += &format!("answers count of {}", names.resolvers.join(", "));
    if !names.has_resolver {
        text += ", none of which is known: set domain_names.resolvers";
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_with_how_long_they_hold() {
        let name = |name: &str, seconds| LearntName {
            pod: "shop/web".to_owned(),
            name: name.to_owned(),
            address: [203, 0, 113, 7].into(),
            seconds,
        };
        let mut names = Names {
            matching: 3,
            names: vec![name("a.example.org", 42), name("b.example.org", 0)],
            resolvers: vec!["kube-system/kube-dns".to_owned(), "169.254.20.10".to_owned()],
            has_resolver: true,
        };
        let expected = "POD       NAME           ADDRESS      HOLDS\n\
                        shop/web  a.example.org  203.0.113.7  42 s\n\
                        shop/web  b.example.org  203.0.113.7  expired\n\
                        2 of 3 names\n\
                        answers count of kube-system/kube-dns, 169.254.20.10\n";
        assert_eq!(text(&names), expected);
        names.has_resolver = false;
        assert!(text(&names).ends_with("none of which is known: set domain_names.resolvers\n"));
    }
}

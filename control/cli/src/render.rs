//! `penstock render`: the policy of manifests in the forms that enforce it.

use std::fmt::Write as _;

use clap::ValueEnum;
use penstock_policy::describe;
use penstock_policy::engine::Engine;
use penstock_policy::listing;
use penstock_policy::render::tables::PodScope;
use penstock_policy::render::{acl, nft};

use super::Failure;
use super::cluster::ManifestArgs;

/// Print the policy of manifests in the forms that enforce it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the output cannot be written
  2  bad input: manifests, an unknown node, or a form that cannot express the options

Examples:
  penstock render --manifests policies/ --node node-a --format table
  penstock render --manifests policies/ --format nft | nft --check --file -")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// Only the pods of this node; default: all pods
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The form
    #[arg(long, value_enum)]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Format {
    /// The workers' rule tables, for a person
    Table,
    /// Six-tuples for a device that applies the first match, with excepts subtracted
    Acl,
    /// A ruleset for nftables
    Nft,
    /// The workers' rule tables, for a program
    Json,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if args.format == Format::Nft && args.manifests.is_cluster_wide() {
        return Err(Failure::bad_input(
            "--cluster-wide has no rendering for nftables: use --format acl, table or json",
        ));
    }
    let scope = args.node.clone().map_or(PodScope::AllPods, PodScope::Node);
    let engine = args.manifests.engine(scope)?;
    if let Some(node) = &args.node
        && engine.state().find_node(node).is_none()
    {
        return Err(Failure::bad_input(format_args!(
            "--node {node}: no manifest has this node, or a pod on it: correct its name"
        )));
    }
    let text = match args.format {
        Format::Table => listing::text(&engine),
        Format::Json => listing::json(&engine),
        Format::Acl => access_lists(&engine),
        Format::Nft => nft::render(engine.state(), engine.tables()),
    };
    Failure::print(text)
}

fn access_lists(engine: &Engine) -> String {
    let mut lists = acl::render(engine.state(), engine.tables());
    lists.sort_by_key(|list| (engine.state().pod(list.pod).map(|pod| pod.key.clone()), list.direction));
    let mut text = "# source, source port, destination, destination port, protocol, action\n".to_owned();
    for list in lists {
        let Some(pod) = engine.state().pod(list.pod) else { continue };
        let addresses = pod.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "\n# {} of {} ({addresses})", describe::direction(list.direction), pod.key);
        for entry in &list.entries {
            let _ = writeln!(text, "{entry}");
        }
    }
    text
}

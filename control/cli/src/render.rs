//! `penstock render`: the rule tables of manifests.

use clap::ValueEnum;
use penstock_policy::listing;
use penstock_policy::render::tables::PodScope;

use super::Failure;
use super::cluster::ManifestArgs;

/// Print the rule tables that the workers would read
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the output cannot be written
  2  bad input: manifests, or an unknown node

Examples:
  penstock render --manifests policies/ --node node-a --format table
  penstock render --manifests policies/ --format json")]
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
    /// For a person
    Table,
    /// For a program
    Json,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
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
    };
    Failure::print(text)
}

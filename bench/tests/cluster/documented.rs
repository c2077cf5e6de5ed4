//! The commands of the pages for a cluster, run as they are printed there.

use anyhow::{Context, Result};

use crate::real_cluster::RealCluster;
use crate::shell::output;

const README: &str = include_str!("../../../README.md");
const PAGE: &str = include_str!("../../../docs/install/cluster.md");

/// The block of shell commands that follows a heading.
fn block(text: &'static str, heading: &str) -> Result<&'static str> {
    let section = text.split_once(&format!("\n## {heading}\n")).map(|(_, section)| section);
    let section = section.and_then(|section| section.split("\n## ").next());
    let block = section.and_then(|section| section.split_once("```sh\n")?.1.split_once("```"));
    block.map(|(block, _)| block).with_context(|| format!("no commands under {heading:?}"))
}

/// Runs a script in a copy of the repository's `configs`, with `kubectl` for this cluster; returns what it has printed.
fn run(cluster: &RealCluster, script: &str) -> Result<String> {
    cluster.manifests("documented/configs/kubernetes", "")?;
    let mut shell = cluster.plane.shell();
    output(shell.args(["-c", script]).current_dir(cluster.manifests("documented", "")?))
}

/// README's quick start, from the image in the nodes' registry on. Its last command prints the status of a node.
pub(crate) fn install(cluster: &RealCluster) -> Result<String> {
    let commands = block(README, "Quick start on a cluster")?;
    let (_, commands) = commands.split_once("kustomization.yaml\n").context("README says where to name the image")?;
    run(cluster, commands)
}

/// What takes Penstock away for good.
pub(crate) fn remove(cluster: &RealCluster) -> Result<()> {
    run(cluster, block(PAGE, "Remove")?).map(drop)
}

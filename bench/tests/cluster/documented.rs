//! The commands of the pages for a cluster, run as they are printed there, with an image that the nodes pull from a registry.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use penstock_bench::testbed::ServiceProcess;

use crate::node::REGISTRY;
use crate::real_cluster::RealCluster;
use crate::shell::{eventually, output, start};

const README: &str = include_str!("../../../README.md");
const PAGE: &str = include_str!("../../../docs/install/cluster.md");
/// The image that README builds, without its registry. `make image` builds the same, under this name.
const IMAGE: &str = concat!("penstock:", env!("CARGO_PKG_VERSION"));

const MANIFESTS: &str = "documented/configs/kubernetes";

/// The block of shell commands that follows a heading.
fn block(text: &'static str, heading: &str) -> Result<&'static str> {
    let section = text.split_once(&format!("\n## {heading}\n")).map(|(_, section)| section);
    let section = section.and_then(|section| section.split("\n## ").next());
    let block = section.and_then(|section| section.split_once("```sh\n")?.1.split_once("```"));
    block.map(|(block, _)| block).with_context(|| format!("no commands under {heading:?}"))
}

/// Runs a script beside the manifests, with `kubectl` for this cluster; returns what it has printed.
fn run(cluster: &RealCluster, script: &str) -> Result<String> {
    cluster.manifests(MANIFESTS, "")?;
    let mut shell = cluster.plane.shell();
    output(shell.args(["-c", script]).current_dir(cluster.manifests("documented", "")?))
}

/// Names the image in both kustomizations, as README and the page say.
fn name_image(cluster: &RealCluster) -> Result<()> {
    for file in ["kustomization.yaml", "uninstall/kustomization.yaml"] {
        let file = cluster.manifests(MANIFESTS, file)?;
        let named = format!("newName: {REGISTRY}/penstock\n");
        let text = fs::read_to_string(&file)?.replace("newName: penstock\n", &named);
        ensure!(text.contains(&named), "{file} does not name the image as these tests know it");
        fs::write(&file, text)?;
    }
    Ok(())
}

/// Serves a registry in front of the nodes, with the image in it as README's first command leaves it there.
fn serve_registry(cluster: &RealCluster) -> Result<ServiceProcess> {
    ensure!(README.contains(&format!("-t REGISTRY/{IMAGE} ")), "README builds another image than {IMAGE}");
    let folder = cluster.folder("registry")?;
    let config = folder.join("config.yml");
    let storage = folder.display();
    let text = format!(
        "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {storage}}}}}\nhttp: {{addr: \"{REGISTRY}\"}}\n"
    );
    fs::write(&config, text)?;
    let mut serve = cluster.plane.world.command("docker-registry");
    serve.arg("serve").arg(&config);
    let service = start(serve, &folder.join("log"))?;
    let to = format!("docker://{REGISTRY}/{IMAGE}");
    eventually(Duration::from_secs(30), || {
        let mut push = cluster.plane.world.command("buildah");
        output(push.args(["push", "--quiet", "--tls-verify=false", IMAGE, &to])).map(drop)
    })?;
    Ok(service)
}

/// README's quick start, from the image in the registry on. Its last command prints the status of a node.
pub(crate) fn install(cluster: &RealCluster) -> Result<String> {
    let _registry = serve_registry(cluster)?;
    name_image(cluster)?;
    let commands = block(README, "Quick start on a cluster")?;
    let (_, commands) = commands.split_once("kustomization.yaml\n").context("README says where to name the image")?;
    let printed = run(cluster, commands)?;
    cluster.note_installed();
    Ok(printed)
}

/// The commands that take Penstock away for good.
pub(crate) fn remove(cluster: &RealCluster) -> Result<()> {
    run(cluster, block(PAGE, "Remove")?)?;
    cluster.note_removed();
    Ok(())
}

//! Penstock is taken away from the cluster, and comes back: by kubectl and by Helm.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::documented;
use crate::real_cluster::RealCluster;
use crate::whole::expect_reached;

pub(crate) fn the_documented_commands_remove_and_install(cluster: &mut RealCluster) -> Result<()> {
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)?;
    documented::remove(cluster)?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, true)?;
    let status = documented::install(cluster)?;
    ensure!(status.contains("is in effect on every worker"), "README's last command printed:\n{status}");
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)
}

pub(crate) fn nothing_is_left_on_a_node(cluster: &mut RealCluster) -> Result<()> {
    if cluster.is_installed() {
        documented::remove(cluster)?;
    }
    for node in &cluster.nodes {
        for path in ["/run/penstock", "/sys/fs/bpf/penstock"] {
            ensure!(!node.path(path).exists(), "{path} is left on {}", node.number.name());
        }
        for folder in ["/opt/cni/bin", "/etc/cni/net.d"] {
            for file in std::fs::read_dir(node.path(folder))?.flatten() {
                let text = std::fs::read(file.path())?;
                let is_configuration = folder.starts_with("/etc");
                let names_it = file.file_name().to_string_lossy().contains("penstock")
                    || is_configuration && String::from_utf8_lossy(&text).contains("penstock");
                ensure!(!names_it, "{} on {}", file.path().display(), node.number.name());
            }
        }
        let links = crate::shell::output(node.namespace.command("ip").args(["-o", "link"]))?;
        ensure!(!links.contains("penstock") && !links.contains("xdp"), "{links}");
    }
    Ok(())
}

/// The chart in place of the kustomization, as docs/install/cluster.md says it.
pub(crate) fn helm_installs_changes_and_removes(cluster: &mut RealCluster) -> Result<()> {
    documented::remove(cluster)?;
    let program =
        std::env::var_os("PENSTOCK_HELM").context("PENSTOCK_HELM is not set: run it by `make test-cluster`")?;
    let chart = cluster.manifests("install", "")?;
    let helm = |arguments: &[&str]| {
        let mut command = cluster.plane.kubectl_plugin(Path::new(&program));
        crate::shell::output(command.args(arguments).args(["--namespace", "kube-system", "--timeout", "180s"]))
    };
    let rolled_out = |name: &str| {
        cluster.kubectl(&["-n", "kube-system", "rollout", "status", &format!("daemonset/{name}"), "--timeout=120s"])
    };
    helm(&["install", "penstock", &chart, "--wait"])?;
    cluster.wait_for_penstock()?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)?;

    let configuration = std::fs::read_to_string(Path::new(&chart).join("penstock.toml"))?;
    let changed = Path::new(&chart).join("changed.toml");
    std::fs::write(&changed, format!("{configuration}\n[admin]\ntrials = true\n"))?;
    let file = format!("config={}", changed.display());
    helm(&["upgrade", "penstock", &chart, "--set-file", &file, "--wait"])?;
    rolled_out("penstock")?;
    cluster.wait_for_penstock()?;
    cluster.penstock(0, &["trial", "status"]).context("the changed configuration is not in effect")?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)?;

    helm(&["upgrade", "penstock", &chart, "--reuse-values", "--set", "uninstall=true"])?;
    rolled_out("penstock-uninstall")?;
    helm(&["uninstall", "penstock", "--wait"])?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, true)
}

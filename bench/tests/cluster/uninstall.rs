//! Penstock is taken away from the cluster.

use anyhow::{Result, ensure};

use crate::real_cluster::RealCluster;
use crate::whole::expect_reached;

/// As README and the kustomization in `uninstall` say it.
pub(crate) fn remove(cluster: &RealCluster) -> Result<()> {
    cluster.kubectl(&["delete", "-k", &cluster.manifests("install", "")?, "--wait=true"])?;
    let uninstall = cluster.manifests("install", "uninstall")?;
    cluster.kubectl(&["apply", "-k", &uninstall])?;
    cluster.kubectl(&["-n", "kube-system", "rollout", "status", "daemonset/penstock-uninstall", "--timeout=120s"])?;
    cluster.kubectl(&["delete", "-k", &uninstall, "--wait=true"]).map(drop)
}

pub(crate) fn removed_and_installed_again(cluster: &mut RealCluster) -> Result<()> {
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)?;
    remove(cluster)?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, true)?;
    cluster.install()?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)
}

pub(crate) fn nothing_is_left_on_a_node(cluster: &mut RealCluster) -> Result<()> {
    remove(cluster)?;
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
    cluster.install()
}

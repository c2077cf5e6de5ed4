//! The Kubernetes that runs: its programs, their version, and what versions differ in.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::shell::output;

/// Programs of one version, in one directory with etcd.
#[derive(Clone)]
pub(crate) struct Kubernetes {
    directory: PathBuf,
    /// Of version 1.
    minor: u32,
    pub(crate) proxy_mode: ProxyMode,
}

/// How kube-proxy translates (`--proxy-mode`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProxyMode {
    Iptables,
    Nftables,
}

impl ProxyMode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

impl Kubernetes {
    /// The programs of this directory; kube-proxy in iptables mode unless `proxy_mode` names another one.
    pub(crate) fn find(directory: &Path, proxy_mode: Option<&str>) -> Result<Self> {
        let printed = output(Command::new(directory.join("kube-apiserver")).arg("--version"))?;
        // Such as `Kubernetes v1.20.2`.
        let minor = printed.trim().strip_prefix("Kubernetes v1.").and_then(|rest| rest.split('.').next()?.parse().ok());
        let minor = minor.with_context(|| format!("kube-apiserver --version prints {printed:?}"))?;
        let proxy_mode = match proxy_mode.unwrap_or("iptables") {
            "iptables" => ProxyMode::Iptables,
            "nftables" => ProxyMode::Nftables,
            other => bail!("kube-proxy's mode {other:?}: iptables or nftables"),
        };
        ensure!(
            proxy_mode == ProxyMode::Iptables || minor >= 31,
            "kube-proxy 1.{minor} has no nftables mode: take 1.31 or newer, or leave PENSTOCK_KUBE_PROXY_MODE unset"
        );
        Ok(Self { directory: directory.into(), minor, proxy_mode })
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// What switches on both address families. Since 1.23 that is no choice, and later the flag is refused.
    pub(crate) fn dual_stack(&self) -> Option<&'static str> {
        (self.minor < 23).then_some("--feature-gates=IPv6DualStack=true")
    }

    /// What makes the kubelet use a socket's runtime. Since 1.27 it knows no other way.
    pub(crate) fn remote_runtime(&self) -> Option<&'static str> {
        (self.minor < 27).then_some("--container-runtime=remote")
    }

    /// Whether a DaemonSet may have two pods on a node during an update.
    pub(crate) fn has_max_surge(&self) -> bool {
        self.minor >= 22
    }

    /// Whether its kubelets leave the objects of ended pods in place for up to a minute (kubernetes/kubernetes#97288).
    pub(crate) fn keeps_ended_pods(&self) -> bool {
        self.minor == 20
    }
}

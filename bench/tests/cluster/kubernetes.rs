//! The programs that run: Kubernetes, etcd, containerd and the CNI plugins, in one folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail, ensure};

use crate::shell::output;

/// Programs that `scripts/kubernetes` has built.
#[derive(Clone)]
pub(crate) struct Kubernetes {
    directory: PathBuf,
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
    /// The programs of this directory; kube-proxy in nftables mode unless `proxy_mode` names another one.
    pub(crate) fn find(directory: &Path, proxy_mode: Option<&str>) -> Result<Self> {
        for program in ["etcd", "kube-apiserver", "kubelet", "containerd", "ptp"] {
            ensure!(directory.join(program).is_file(), "{} has no {program}", directory.display());
        }
        let proxy_mode = match proxy_mode.unwrap_or("nftables") {
            "iptables" => ProxyMode::Iptables,
            "nftables" => ProxyMode::Nftables,
            other => bail!("kube-proxy's mode {other:?}: iptables or nftables"),
        };
        Ok(Self { directory: directory.into(), proxy_mode })
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A search path with these programs before all others: containerd looks for its shim there.
    pub(crate) fn path(&self) -> String {
        format!("{}:{}", self.directory.display(), std::env::var("PATH").unwrap_or_default())
    }

    /// Versions as the programs tell them, for the results of suites.
    pub(crate) fn versions(&self) -> Result<String> {
        let kubernetes = output(Command::new(self.program("kube-apiserver")).arg("--version"))?;
        let mode = self.proxy_mode.name();
        Ok(format!("{}, kube-proxy in {mode} mode", kubernetes.trim()))
    }
}

//! An API server for tests: a real one if `KUBEBUILDER_ASSETS` names a directory with `etcd` and `kube-apiserver` (the
//! convention of envtest), otherwise a small one inside this process. Both have the same interface.

mod admin;
mod faults;
mod in_process;
mod object_store;
mod real;
mod role;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub use admin::Admin;
pub use faults::{Fault, Verb};
pub use in_process::FakeServer;

use super::{Namespace, ScratchDir};
use real::RealServer;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Resource {
    Namespaces,
    Nodes,
    Pods,
    NetworkPolicies,
    /// ClusterNetworkPolicies, which a server serves only once they are defined.
    ClusterNetworkPolicies,
    Services,
    /// Events, which Penstock writes and does not read.
    Events,
}

impl Resource {
    pub const ALL: [Self; 7] = [
        Self::Namespaces,
        Self::Nodes,
        Self::Pods,
        Self::NetworkPolicies,
        Self::ClusterNetworkPolicies,
        Self::Services,
        Self::Events,
    ];

    /// Its API group; empty for the core group.
    pub fn group(self) -> &'static str {
        self.api_version().split_once('/').map_or("", |(group, _)| group)
    }

    pub fn kind(self) -> &'static str {
        match self {
            Self::Namespaces => "Namespace",
            Self::Nodes => "Node",
            Self::Pods => "Pod",
            Self::Services => "Service",
            Self::Events => "Event",
            Self::NetworkPolicies => "NetworkPolicy",
            Self::ClusterNetworkPolicies => "ClusterNetworkPolicy",
        }
    }

    pub fn path(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Nodes => "nodes",
            Self::Pods => "pods",
            Self::Services => "services",
            Self::Events => "events",
            Self::NetworkPolicies => "networkpolicies",
            Self::ClusterNetworkPolicies => "clusternetworkpolicies",
        }
    }

    pub fn of(object: &Value) -> Result<Self> {
        let kind = object["kind"].as_str().unwrap_or_default();
        let found = Self::ALL.into_iter().find(|resource| resource.kind() == kind);
        found.with_context(|| format!("{kind:?} is none of the kinds that are served"))
    }

    pub fn api_version(self) -> &'static str {
        match self {
            Self::Namespaces | Self::Nodes | Self::Pods | Self::Services | Self::Events => "v1",
            Self::NetworkPolicies => "networking.k8s.io/v1",
            Self::ClusterNetworkPolicies => "policy.networking.k8s.io/v1alpha2",
        }
    }

    /// The path of an object or of its list, under an `apiVersion`.
    pub fn url(self, api_version: &str, namespace: Option<&str>, name: Option<&str>) -> String {
        let root = if api_version.contains('/') { format!("/apis/{api_version}") } else { "/api/v1".to_owned() };
        let namespace = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
        let name = name.map(|name| format!("/{name}")).unwrap_or_default();
        format!("{root}{namespace}/{}{name}", self.path())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Account {
    Admin,
    /// Penstock's service account, with only the rights of the shipped ClusterRole.
    Penstock,
    Nobody,
}

const TOKENS: [(Account, &str, &str); 3] = [
    (Account::Admin, "token-of-admin", "admin,admin,system:masters"),
    (
        Account::Penstock,
        "token-of-penstock",
        "system:serviceaccount:kube-system:penstock,penstock,system:serviceaccounts",
    ),
    (Account::Nobody, "token-of-nobody", "nobody,nobody,"),
];

/// An API server. Dropping it stops it.
pub struct ApiServer {
    server: ServerKind,
    admin: Admin,
    namespace: Option<Namespace>,
    scratch: ScratchDir,
}

enum ServerKind {
    FakeServer(FakeServer),
    RealServer(RealServer),
}

impl ApiServer {
    /// Starts the server that `KUBEBUILDER_ASSETS` selects and prints which; in a network namespace if one is given.
    pub fn start(namespace: Option<&Namespace>) -> Result<Self> {
        match std::env::var_os("KUBEBUILDER_ASSETS").filter(|assets| !assets.is_empty()) {
            None => Self::in_process(false, namespace),
            Some(assets) => {
                let assets = PathBuf::from(assets);
                eprintln!("API server: the real one, {}", assets.join("kube-apiserver").display());
                let tokens = TOKENS.map(|(_, token, user)| format!("{token},{user}\n")).concat();
                Self::finish(ServerKind::RealServer(RealServer::start(&assets, &tokens, namespace)?), namespace)
            }
        }
    }

    /// Starts the one in this process; `streams` says whether it supports streaming lists.
    pub fn in_process(streams: bool, namespace: Option<&Namespace>) -> Result<Self> {
        eprintln!("API server: the small one in this process (KUBEBUILDER_ASSETS is not set)");
        let server = match namespace {
            Some(namespace) => namespace.run(|| FakeServer::start(streams))?,
            None => FakeServer::start(streams)?,
        };
        TOKENS.iter().for_each(|(account, token, _)| server.set_token(*account, token));
        Self::finish(ServerKind::FakeServer(server), namespace)
    }

    fn finish(server: ServerKind, namespace: Option<&Namespace>) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let url = match &server {
            ServerKind::FakeServer(server) => server.url(),
            ServerKind::RealServer(server) => server.url(),
        };
        for (account, token, _) in TOKENS {
            let token_file = token_file(scratch.path(), account);
            std::fs::write(&token_file, token)?;
            std::fs::write(kubeconfig(scratch.path(), account), kubeconfig_text(&url, &token_file))?;
        }
        let admin = Admin::new(&kubeconfig(scratch.path(), Account::Admin), namespace)?;
        let server = Self { server, admin, namespace: namespace.cloned(), scratch };
        server.wait_until_ready()?;
        if let ServerKind::RealServer(_) = server.server {
            server.grant()?;
        }
        Ok(server)
    }

    /// Applies the shipped role and waits until it is in effect.
    fn grant(&self) -> Result<()> {
        for object in role::manifests()? {
            let path = match object["kind"].as_str() {
                Some("ServiceAccount") => "/api/v1/namespaces/kube-system/serviceaccounts",
                Some("ClusterRole") => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
                Some("ClusterRoleBinding") => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
                other => bail!("the shipped rights hold a {other:?}"),
            };
            let ready = || self.admin.call(http::Method::POST, path, &object).map(drop);
            match &self.server {
                // The namespace kube-system appears a moment after the server.
                ServerKind::RealServer(real) => real.wait(ready)?,
                ServerKind::FakeServer(_) => ready()?,
            }
        }
        Ok(())
    }

    fn wait_until_ready(&self) -> Result<()> {
        match &self.server {
            ServerKind::FakeServer(_) => Ok(()),
            ServerKind::RealServer(real) => real.wait(|| self.admin.list(Resource::NetworkPolicies).map(drop)),
        }
    }

    pub fn is_real(&self) -> bool {
        matches!(self.server, ServerKind::RealServer(_))
    }

    /// The server in this process, for fault injection; `None` if the server is real.
    pub fn fake(&self) -> Option<&FakeServer> {
        match &self.server {
            ServerKind::FakeServer(server) => Some(server),
            ServerKind::RealServer(_) => None,
        }
    }

    /// The port of the loopback at which it serves.
    pub fn port(&self) -> Result<u16> {
        let url = match &self.server {
            ServerKind::FakeServer(server) => server.url(),
            ServerKind::RealServer(server) => server.url(),
        };
        let port = url.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        port.with_context(|| format!("no port in {url}"))
    }

    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    pub fn kubeconfig(&self, account: Account) -> PathBuf {
        kubeconfig(self.scratch.path(), account)
    }

    /// The token file that an account's kubeconfig refers to.
    pub fn token_file(&self, account: Account) -> PathBuf {
        token_file(self.scratch.path(), account)
    }

    /// Kills the server; its objects stay.
    pub fn stop(&self) {
        match &self.server {
            ServerKind::FakeServer(server) => server.stop(),
            ServerKind::RealServer(real) => real.stop(),
        }
    }

    /// Starts it again on the same address and waits until it is ready.
    pub fn resume(&self) -> Result<()> {
        match (&self.server, &self.namespace) {
            (ServerKind::FakeServer(server), Some(namespace)) => namespace.run(|| server.resume())?,
            (ServerKind::FakeServer(server), None) => server.resume()?,
            (ServerKind::RealServer(real), _) => real.resume()?,
        }
        self.wait_until_ready()
    }

    /// Discards its history, as etcd's compaction does.
    pub fn compact(&self) -> Result<()> {
        match &self.server {
            ServerKind::FakeServer(server) => {
                server.compact();
                Ok(())
            }
            ServerKind::RealServer(real) => real.compact(),
        }
    }
}

fn kubeconfig(directory: &Path, account: Account) -> PathBuf {
    directory.join(format!("{account:?}.kubeconfig"))
}

fn token_file(directory: &Path, account: Account) -> PathBuf {
    directory.join(format!("{account:?}.token"))
}

fn kubeconfig_text(url: &str, token_file: &Path) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
         clusters: [{{name: test, cluster: {{server: '{url}', insecure-skip-tls-verify: true}}}}]\n\
         users: [{{name: test, user: {{tokenFile: '{}'}}}}]\n\
         contexts: [{{name: test, context: {{cluster: test, user: test}}}}]\n",
        token_file.display()
    )
}

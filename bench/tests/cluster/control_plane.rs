//! etcd, API server, controller manager and scheduler, in a network namespace with a bridge to the nodes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use penstock_bench::testbed::{Namespace, ServiceProcess};

use crate::kubernetes::Kubernetes;
use crate::shell::{eventually, ip, output, start};

/// Address of the API server, and of the bridge that joins the nodes.
pub(crate) const API: &str = "10.99.0.1";
/// Addresses of Services and of pods, IPv4 and IPv6.
pub(crate) const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";
pub(crate) const PODS: &str = "10.244.0.0/16,fd00:10:244::/48";
/// Address of the Service that resolves names, where there is one.
pub(crate) const CLUSTER_DNS: &str = "10.96.0.10";

/// Users, each with a token of its own name, and their groups.
const USERS: [(&str, &str); 6] = [
    ("admin", "system:masters"),
    ("system:kube-controller-manager", ""),
    ("system:kube-scheduler", ""),
    ("system:kube-proxy", ""),
    ("system:node:n1", "system:nodes"),
    ("system:node:n2", "system:nodes"),
];

pub(crate) struct ControlPlane {
    /// The API server, while it runs.
    api_server: Option<ServiceProcess>,
    _others: Vec<ServiceProcess>,
    /// The machine outside of the nodes: clients there are no pods.
    pub(crate) world: Namespace,
    kubernetes: Kubernetes,
    directory: PathBuf,
}

impl ControlPlane {
    /// Starts it; `directory` is an empty one for its state.
    pub(crate) fn start(kubernetes: &Kubernetes, directory: &Path) -> Result<Self> {
        let world = Namespace::new("world")?;
        ip(
            &world,
            &format!(
                "link add br0 type bridge
                addr add {API}/24 dev br0
                addr add fd99::1/64 dev br0 nodad
                link set br0 up"
            ),
        )?;
        world.set_sysctl("net/ipv4/ip_forward", "1")?;
        world.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
        let tokens: String =
            USERS.iter().map(|(user, groups)| format!("{user},{user},{user},\"{groups}\"\n")).collect();
        fs::write(directory.join("tokens.csv"), tokens)?;
        let key = directory.join("accounts.key");
        output(Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048"))?;
        for (user, _) in USERS {
            fs::write(kubeconfig(directory, user), kubeconfig_of(user, directory))?;
        }
        let mut plane = Self {
            api_server: None,
            _others: Vec::new(),
            world,
            kubernetes: kubernetes.clone(),
            directory: directory.into(),
        };
        plane._others.push(plane.spawn_etcd()?);
        plane.start_api_server()?;
        plane._others.push(plane.spawn_controllers()?);
        plane._others.push(plane.spawn(
            "kube-scheduler",
            [kubeconfig_flag(directory, "system:kube-scheduler"), "--leader-elect=false".into()].as_slice(),
        )?);
        Ok(plane)
    }

    /// A `kubectl` with full rights.
    pub(crate) fn kubectl(&self) -> Command {
        self.kubectl_plugin(&self.kubernetes.program("kubectl"))
    }

    /// The file with which one has full rights.
    pub(crate) fn admin_kubeconfig(&self) -> PathBuf {
        kubeconfig(&self.directory, "admin")
    }

    /// The programs that run.
    pub(crate) fn kubernetes(&self) -> &Kubernetes {
        &self.kubernetes
    }

    /// A program that reads its kubeconfig as `kubectl` does, with full rights.
    pub(crate) fn kubectl_plugin(&self, program: &Path) -> Command {
        let mut command = self.world.command(program);
        command.env("KUBECONFIG", kubeconfig(&self.directory, "admin")).env("HOME", &self.directory);
        command
    }

    /// A shell whose `kubectl` has full rights.
    pub(crate) fn shell(&self) -> Command {
        let mut command = self.kubectl_plugin(Path::new("bash"));
        command.env("PATH", self.kubernetes.path()).args(["-e", "-u", "-o", "pipefail"]);
        command
    }

    /// Ends the API server. The cluster's objects stay in etcd.
    pub(crate) fn stop_api_server(&mut self) {
        self.api_server = None;
    }

    /// Starts the API server and waits until it is ready.
    pub(crate) fn start_api_server(&mut self) -> Result<()> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        self.api_server = Some(self.spawn(
            "kube-apiserver",
            &[
                "--etcd-servers=http://127.0.0.1:2379".to_owned(),
                format!("--bind-address={API}"),
                format!("--advertise-address={API}"),
                // It makes its own certificate there, for these addresses and the Service's.
                format!("--cert-dir={}", file("certificates")),
                format!("--token-auth-file={}", file("tokens.csv")),
                "--authorization-mode=Node,RBAC".to_owned(),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                format!("--service-account-key-file={}", file("accounts.key")),
                format!("--service-account-signing-key-file={}", file("accounts.key")),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                format!("--service-cluster-ip-range={SERVICES}"),
                "--allow-privileged=true".to_owned(),
            ],
        )?);
        eventually(Duration::from_secs(90), || output(self.kubectl().args(["get", "--raw", "/readyz"])).map(drop))
    }

    fn spawn_etcd(&self) -> Result<ServiceProcess> {
        let mut command = self.world.command(self.kubernetes.program("etcd"));
        // It reads settings from its environment. Nothing here outlasts a crash of the machine.
        command.env_clear().arg("--unsafe-no-fsync").arg("--data-dir").arg(self.directory.join("etcd"));
        start(command, &self.log("etcd"))
    }

    fn spawn_controllers(&self) -> Result<ServiceProcess> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let user = "system:kube-controller-manager";
        let config = kubeconfig(&self.directory, user).display().to_string();
        self.spawn(
            "kube-controller-manager",
            &[
                kubeconfig_flag(&self.directory, user),
                format!("--authentication-kubeconfig={config}"),
                format!("--authorization-kubeconfig={config}"),
                "--use-service-account-credentials=true".to_owned(),
                format!("--service-account-private-key-file={}", file("accounts.key")),
                format!("--root-ca-file={}", file("certificates/apiserver.crt")),
                "--allocate-node-cidrs=false".to_owned(),
                format!("--cluster-cidr={PODS}"),
                format!("--service-cluster-ip-range={SERVICES}"),
                "--bind-address=127.0.0.1".to_owned(),
                "--leader-elect=false".to_owned(),
            ],
        )
    }

    fn spawn(&self, program: &str, arguments: &[String]) -> Result<ServiceProcess> {
        let mut command = self.world.command(self.kubernetes.program(program));
        command.args(arguments).current_dir(&self.directory);
        start(command, &self.log(program))
    }

    fn log(&self, program: &str) -> PathBuf {
        self.directory.join(format!("{program}.log"))
    }
}

/// The file with which this user reaches the API server.
pub(crate) fn kubeconfig(directory: &Path, user: &str) -> PathBuf {
    directory.join(format!("{}.kubeconfig", user.replace(':', "-")))
}

fn kubeconfig_flag(directory: &Path, user: &str) -> String {
    format!("--kubeconfig={}", kubeconfig(directory, user).display())
}

fn kubeconfig_of(user: &str, directory: &Path) -> String {
    let authority = directory.join("certificates/apiserver.crt").display().to_string();
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
         clusters: [{{name: it, cluster: {{server: \"https://{API}:6443\", certificate-authority: {authority}}}}}]\n\
         users: [{{name: it, user: {{token: \"{user}\"}}}}]\n\
         contexts: [{{name: it, context: {{cluster: it, user: it}}}}]\n"
    )
}

//! A Kubernetes cluster of two nodes: real parts in namespaces of this machine.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use penstock_bench::cluster::read_objects;
use penstock_bench::probe::{EchoServers, EchoService, Site};
use penstock_bench::testbed::{CleanupGuard, Namespace, ScratchDir};
use penstock_policy::model::Object;
use serde_json::Value;

use crate::control_plane::ControlPlane;
use crate::kubernetes::Kubernetes;
use crate::node::{Cni, NodeNumber, RealNode};
use crate::shell::{eventually, output};

/// The ports that every pod of the workload serves.
const SERVED: [EchoService; 3] = [EchoService::Tcp(8080), EchoService::Tcp(9090), EchoService::Udp(5353)];
/// For pods to start, once their images are there.
const START: Duration = Duration::from_secs(180);

/// The programs that are built once.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) kubernetes: Kubernetes,
    /// `PENSTOCK_IMAGES`: archives of images.
    pub(crate) images: PathBuf,
}

pub(crate) struct RealCluster {
    pub(crate) plane: ControlPlane,
    pub(crate) nodes: Vec<RealNode>,
    /// The workload's pods. Their servers' identities are their indices.
    pub(crate) sites: Vec<Site>,
    servers: Vec<EchoServers>,
    pub(crate) cni: Cni,
    scratch: ScratchDir,
    configuration: Mutex<Configuration>,
    _settings: CleanupGuard,
}

/// The settings of Penstock's daemons.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Configuration {
    /// There are none.
    None,
    Shipped,
    AllOn,
}

/// The taint that daemons remove once they are ready, if that is on.
pub(crate) const STARTUP_TAINT: &str = "penstock.dev/not-ready";
/// Where daemons write flow records, if that is on, and the address of a collector in front of the nodes.
pub(crate) const RECORDS: &str = "/tmp/flows.jsonl";
pub(crate) const COLLECTOR: &str = "10.99.0.1:4318";

impl RealCluster {
    /// Starts the cluster and the workload, without Penstock.
    pub(crate) fn start(parts: &Parts, cni: Cni) -> Result<Self> {
        let began = Instant::now();
        let settings = keep_settings();
        let scratch = ScratchDir::new()?;
        let plane = ControlPlane::start(&parts.kubernetes, scratch.path())?;
        let mut images = archives(&parts.images)?;
        // Suites that others wrote run with one CNI plugin.
        if cni == Cni::Ptp {
            images.extend(archives(&parts.images.join("suites"))?);
        }
        let start = |number| RealNode::start(&plane, number, cni, (&parts.kubernetes, &images, scratch.path()));
        let nodes = NodeNumber::ALL.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        let mut cluster = Self {
            plane,
            nodes,
            sites: Vec::new(),
            servers: Vec::new(),
            cni,
            scratch,
            configuration: Mutex::new(Configuration::None),
            _settings: settings,
        };
        cluster.wait_for_nodes()?;
        // A new namespace has no service account at once, without which no pod is admitted.
        eventually(Duration::from_secs(30), || cluster.apply(include_str!("workload.yaml")))?;
        cluster.kubectl(&["wait", "--for=condition=Ready", "pods", "--all", "--all-namespaces", "--timeout=180s"])?;
        cluster.enter_pods()?;
        eprintln!("cluster with {}: started in {:.0?}", cni.name(), began.elapsed());
        Ok(cluster)
    }

    /// Runs `kubectl` with full rights.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.plane.kubectl().args(arguments))
    }

    /// An object, as the API server has it.
    pub(crate) fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[&["get", "-o", "json"], arguments].concat())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Creates or changes objects.
    pub(crate) fn apply(&self, yaml: &str) -> Result<()> {
        let file = self.scratch.path().join("applied.yaml");
        fs::write(&file, yaml)?;
        self.kubectl(&["apply", "-f", &file.display().to_string()]).map(drop)
    }

    /// The objects that policy depends on, read back as `penstock evaluate` reads them.
    pub(crate) fn objects(&self) -> Result<Vec<Object>> {
        let directory = self.scratch.path().join("objects");
        fs::create_dir_all(&directory)?;
        let kinds = "namespaces,pods,nodes,networkpolicies";
        fs::write(directory.join("cluster.yaml"), self.kubectl(&["get", kinds, "-A", "-o", "yaml"])?)?;
        read_objects(&directory)
    }

    /// The pod `NAMESPACE/NAME` of the workload.
    pub(crate) fn site(&self, name: &str) -> &Site {
        &self.sites[self.index(name)]
    }

    /// Identity and address of a pod of the workload.
    pub(crate) fn target(&self, name: &str, v6: bool) -> (u32, IpAddr) {
        let index = self.index(name);
        (index as u32, self.sites[index].address(v6).expect("every pod has both families"))
    }

    fn index(&self, name: &str) -> usize {
        self.sites.iter().position(|site| site.name == name).unwrap_or_else(|| panic!("no pod {name}"))
    }

    /// The clusterIP of a Service.
    pub(crate) fn cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        let service = self.get(&["service", "-n", namespace, name])?;
        Ok(service["spec"]["clusterIP"].as_str().context("no clusterIP")?.parse()?)
    }

    /// The machine outside of the nodes.
    pub(crate) fn outside(&self) -> Site {
        Site { name: "outside".into(), namespace: self.plane.world.clone(), addresses: Vec::new() }
    }

    /// A node, as the origin of probes.
    pub(crate) fn node(&self, number: usize) -> Site {
        let node = &self.nodes[number];
        let address = node.number.address().parse().expect("an address");
        Site { name: node.number.name(), namespace: node.namespace.clone(), addresses: vec![address] }
    }

    /// Installs Penstock with the kustomization of this repository and waits until it is ready on every node.
    pub(crate) fn install(&self) -> Result<()> {
        self.kubectl(&["apply", "-k", &self.manifests("install", "")?])?;
        self.wait_for_penstock()?;
        self.set_configuration(Configuration::Shipped);
        Ok(())
    }

    /// Has the cluster's names resolved, as most clusters have it.
    pub(crate) fn start_dns(&self) -> Result<()> {
        self.apply(include_str!("dns.yaml"))?;
        self.kubectl(&["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=180s"]).map(drop)
    }

    /// Waits until the newest daemons are ready.
    pub(crate) fn wait_for_penstock(&self) -> Result<()> {
        let status = self.kubectl(&["-n", "kube-system", "rollout", "status", "daemonset/penstock", "--timeout=180s"]);
        status.map(drop).map_err(|error| {
            let pods =
                self.kubectl(&["-n", "kube-system", "describe", "pods", "-l", "app.kubernetes.io/name=penstock"]);
            let logs =
                self.kubectl(&["-n", "kube-system", "logs", "--tail=20", "-l", "app.kubernetes.io/name=penstock"]);
            let kubelets: Vec<String> = self.nodes.iter().map(RealNode::sandbox_log).collect();
            let parts = [pods.unwrap_or_default(), logs.unwrap_or_default(), kubelets.join("\n")];
            error.context(parts.join("\n"))
        })
    }

    /// Has Penstock run with all that is off by default: one update for all tests that need some of it.
    pub(crate) fn switch_all_on(&self) -> Result<()> {
        if self.configuration() == Configuration::AllOn {
            return Ok(());
        }
        // The daemons remove the taint with these.
        self.kubectl(&["apply", "-f", &self.manifests("install", "startup-taint/rbac.yaml")?])?;
        let shipped = fs::read_to_string(self.manifests("install", "penstock.toml")?)?;
        let in_cluster = "in_cluster = true\n";
        let (before, after) = shipped.split_once(in_cluster).context("it follows the cluster's own API server")?;
        let text = format!(
            "{before}{in_cluster}startup_taint = \"{STARTUP_TAINT}\"\n{after}\n\
             [capture]\nsocket = \"/run/penstock/capture.sock\"\n[admin]\ntrials = true\n\
             [flow_records]\nfile = {RECORDS:?}\ninterval = \"1s\"\notlp = \"http://{COLLECTOR}\"\n"
        );
        self.update_at_once("all-on", &text)?;
        self.set_configuration(Configuration::AllOn);
        Ok(())
    }

    /// Has Penstock run as it is shipped.
    pub(crate) fn switch_to_defaults(&self) -> Result<()> {
        match self.configuration() {
            Configuration::Shipped => return Ok(()),
            Configuration::None => {}
            Configuration::AllOn => {
                let shipped = fs::read_to_string(self.manifests("install", "penstock.toml")?)?;
                self.update_at_once("shipped", &shipped)?;
            }
        }
        // Restarts nothing after an update of all nodes: how the next one goes is all that differs.
        self.install()
    }

    /// Changes the configuration, on all nodes at once: an update node by node has tests of its own.
    fn update_at_once(&self, name: &str, text: &str) -> Result<()> {
        let folder = self.manifests(name, "")?;
        fs::write(format!("{folder}/penstock.toml"), text)?;
        let daemonset = format!("{folder}/daemonset.yaml");
        let at_once = fs::read_to_string(&daemonset)?.replace("maxUnavailable: 1\n", "maxUnavailable: 100%\n");
        fs::write(&daemonset, at_once)?;
        self.kubectl(&["apply", "-k", &folder])?;
        self.wait_for_penstock()
    }

    fn configuration(&self) -> Configuration {
        *self.configuration.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_configuration(&self, configuration: Configuration) {
        *self.configuration.lock().unwrap_or_else(PoisonError::into_inner) = configuration;
    }

    /// Whether Penstock is installed, by the kustomization.
    pub(crate) fn is_installed(&self) -> bool {
        self.configuration() != Configuration::None
    }

    /// It has been installed as it is shipped.
    pub(crate) fn note_installed(&self) {
        self.set_configuration(Configuration::Shipped);
    }

    /// It has been removed.
    pub(crate) fn note_removed(&self) {
        self.set_configuration(Configuration::None);
    }

    /// A folder of this cluster for what a test writes.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.scratch.path().join(name);
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Copies `configs/kubernetes` for a test that may change it; returns the path of its folder `below`.
    pub(crate) fn manifests(&self, name: &str, below: &str) -> Result<String> {
        let target = self.scratch.path().join(name);
        if !target.exists() {
            copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/kubernetes"), &target)?;
        }
        Ok(target.join(below).display().to_string())
    }

    /// Name of the Penstock pod of a node.
    pub(crate) fn penstock_on(&self, node: usize) -> Result<String> {
        let name = self.nodes[node].number.name();
        let selected = ["-n", "kube-system", "-l", "app.kubernetes.io/name=penstock"];
        let field = format!("--field-selector=spec.nodeName={name},status.phase=Running");
        let pods = self.get(&[&["pods", &field], selected.as_slice()].concat())?;
        Ok(pods["items"][0]["metadata"]["name"].as_str().with_context(|| format!("no Penstock on {name}"))?.to_owned())
    }

    /// Runs the binary in the Penstock pod of a node.
    pub(crate) fn penstock(&self, node: usize, arguments: &[&str]) -> Result<String> {
        let pod = self.penstock_on(node)?;
        self.kubectl(&[&["-n", "kube-system", "exec", &pod, "-c", "penstock", "--", "penstock"], arguments].concat())
    }

    /// The log of a node's daemon; `since`: such as `60s`.
    pub(crate) fn log_of_penstock(&self, node: usize, since: &str) -> Result<String> {
        let pod = self.penstock_on(node)?;
        self.kubectl(&["-n", "kube-system", "logs", &pod, "-c", "penstock", &format!("--since={since}")])
    }

    /// Leaves the cluster up until SIGINT, and says how to look into it.
    pub(crate) fn keep(&self, why: &str) {
        eprintln!("\n{why}\n\nThe cluster stays until Ctrl-C.\n  {:?}", self.plane.kubectl());
        eprintln!("  ip netns exec {} bash", self.plane.world.name());
        for node in &self.nodes {
            eprintln!("  {:?}", node.command("bash"));
        }
        loop {
            std::thread::park();
        }
    }

    fn wait_for_nodes(&self) -> Result<()> {
        eventually(START, || {
            let nodes = self.get(&["nodes"])?;
            let ready = nodes["items"].as_array().into_iter().flatten().filter(|node| is_ready(node)).count();
            match ready == self.nodes.len() {
                true => Ok(()),
                false => bail!(
                    "{ready} of {} nodes are ready; see the logs in {}",
                    self.nodes.len(),
                    self.scratch.path().display()
                ),
            }
        })
    }

    /// Starts servers in the network namespaces of the workload's pods.
    fn enter_pods(&mut self) -> Result<()> {
        let pods = self.get(&["pods", "-A", "-l", "part-of=workload"])?;
        for pod in pods["items"].as_array().into_iter().flatten() {
            let site = self.enter(pod)?;
            self.servers.push(EchoServers::start(&site, self.sites.len() as u32, &SERVED)?);
            self.sites.push(site);
        }
        Ok(())
    }

    /// A pod's object, once its containers run.
    pub(crate) fn running(&self, namespace: &str, name: &str) -> Result<Value> {
        let pod = self.get(&["pod", "-n", namespace, name])?;
        match pod["status"]["phase"] == "Running" {
            true => Ok(pod),
            false => bail!("{namespace}/{name} does not run: {}", pod["status"]),
        }
    }

    /// The network namespace and the addresses of a pod that runs.
    pub(crate) fn enter(&self, pod: &Value) -> Result<Site> {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let name = format!("{}/{}", text("/metadata/namespace"), text("/metadata/name"));
        let on = text("/spec/nodeName");
        let node = self.nodes.iter().find(|node| node.number.name() == on);
        let node = node.with_context(|| format!("{name} is on {on:?}"))?;
        let processes = node.processes_of(text("/metadata/uid"));
        let process = processes.first().with_context(|| format!("{name} has no process"))?;
        let namespace = Namespace::of_process(*process, &name)?;
        let addresses = pod["status"]["podIPs"].as_array().into_iter().flatten();
        Ok(Site { name, namespace, addresses: addresses.filter_map(|ip| ip["ip"].as_str()?.parse().ok()).collect() })
    }
}

/// Archives of images in a folder.
fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let files = entries.flatten().map(|entry| entry.path());
    Ok(files.filter(|file| file.extension().is_some_and(|extension| extension == "tar")).collect())
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Settings that a kubelet changes for the whole machine.
pub(crate) fn kept_settings() -> Vec<(PathBuf, String)> {
    let names = [
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    ];
    let files = names.map(|name| Path::new("/proc/sys").join(name));
    files.into_iter().filter_map(|file| Some((file.clone(), fs::read_to_string(file).ok()?))).collect()
}

/// Puts it back at the end.
fn keep_settings() -> CleanupGuard {
    let before = kept_settings();
    CleanupGuard::new(move || before.iter().for_each(|(file, value)| drop(fs::write(file, value.trim()))))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)?.flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target)?,
            false => drop(fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}

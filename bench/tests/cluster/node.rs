//! A node: namespaces with containerd, kubelet and kube-proxy in them.
//!
//! It has a network, a mount and a process namespace. Killing the first process of the last ends all that runs there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use penstock_bench::testbed::{CleanupGuard, Namespace, ServiceProcess};

use crate::control_plane::{API, CLUSTER_DNS, ControlPlane, PODS, kubeconfig};
use crate::kubernetes::Kubernetes;
use crate::shell::{eventually, ip, output, start};

/// The CNI plugin that wires pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cni {
    /// A route to each pod's veth.
    Ptp,
    /// All pods on a Linux bridge, as flannel sets it up.
    Bridge,
}

impl Cni {
    pub(crate) const ALL: [Self; 2] = [Self::Ptp, Self::Bridge];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ptp => "ptp",
            Self::Bridge => "bridge",
        }
    }
}

/// Names and addresses of a node of this number.
#[derive(Clone, Copy)]
pub(crate) struct NodeNumber(pub(crate) u8);

impl NodeNumber {
    pub(crate) const ALL: [Self; 2] = [Self(1), Self(2)];

    pub(crate) fn name(self) -> String {
        format!("n{}", self.0)
    }

    pub(crate) fn address(self) -> String {
        format!("10.99.0.{}", 10 + self.0)
    }

    fn address6(self) -> String {
        format!("fd99::{}", 10 + self.0)
    }

    fn pods(self) -> String {
        format!("10.244.{}.0/24", self.0)
    }

    fn pods6(self) -> String {
        format!("fd00:10:244:{}::/64", self.0)
    }
}

pub(crate) struct RealNode {
    pub(crate) number: NodeNumber,
    pub(crate) namespace: Namespace,
    /// First process of the node's process namespace, as seen from outside.
    init: Pid,
    /// Ended first: with it everything on the node.
    _holder: ServiceProcess,
    _others: Vec<ServiceProcess>,
    _control_groups: CleanupGuard,
    state: PathBuf,
}

impl RealNode {
    /// Starts it, with these image archives in its containerd.
    pub(crate) fn start(
        plane: &ControlPlane,
        number: NodeNumber,
        cni: Cni,
        (kubernetes, images, directory): (&Kubernetes, &[PathBuf], &Path),
    ) -> Result<Self> {
        let name = number.name();
        let state = directory.join(&name);
        fs::create_dir_all(state.join("cgroup"))?;
        let namespace = join(&plane.world, number)?;
        let groups = control_groups(&name)?;
        let mut holder = namespace.command("unshare");
        holder.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL"]);
        // A shell, since it reaps what is left to it.
        holder.args(["bash", "-c", "sleep infinity & while :; do wait; done"]);
        let holder = start(holder, &state.join("init.log"))?;
        let init = eventually(Duration::from_secs(5), || child_of(holder.id()))?;
        let mut node =
            Self { number, namespace, init, _holder: holder, _others: Vec::new(), _control_groups: groups, state };
        let mut mounts = node.command("bash");
        mounts.args(["-c", include_str!("node-mounts.sh")]).env("STATE", &node.state);
        // One node has no BPF file system, as one without systemd.
        mounts.env("PLUGINS", kubernetes.program(""));
        output(mounts.env("BPFFS", if number.0 == 1 { "yes" } else { "no" }))?;
        node.start_containerd(kubernetes, images, cni)?;
        node.start_kubelet(kubernetes, directory)?;
        node.start_kube_proxy(kubernetes, cni, directory)?;
        Ok(node)
    }

    /// A program on the node.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--net", "--pid", "--target", &self.init.to_string(), "--"]).arg(program);
        command
    }

    /// A path of the node as it is seen from outside.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Processes of the pod with this UID.
    pub(crate) fn processes_of(&self, uid: &str) -> Vec<Pid> {
        let node = format!("/{}/", control_group(&self.number.name()));
        let is_of_pod = |process: &Pid| {
            let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
            groups.contains(&node) && groups.contains(uid)
        };
        processes().into_iter().filter(is_of_pod).collect()
    }

    /// Lines of the kubelet's log about sandboxes, the newest last.
    pub(crate) fn sandbox_log(&self) -> String {
        let log = fs::read_to_string(self.state.join("kubelet.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("andbox")).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    fn start_containerd(&mut self, kubernetes: &Kubernetes, images: &[PathBuf], cni: Cni) -> Result<()> {
        fs::write(self.state.join("etc/cni/net.d/10-pods.conflist"), conflist(cni, self.number))?;
        let registries = self.state.join("registries");
        fs::create_dir_all(registries.join(REGISTRY))?;
        fs::write(registries.join(REGISTRY).join("hosts.toml"), format!("server = \"http://{REGISTRY}\"\n"))?;
        let config = self.state.join("containerd.toml");
        fs::write(&config, containerd_config(&self.runtime()?, &registries))?;
        let mut containerd = self.command(kubernetes.program("containerd"));
        containerd.arg("--config").arg(&config).env("PATH", kubernetes.path());
        self._others.push(start(containerd, &self.state.join("containerd.log"))?);
        let images_command = |arguments: &[&str]| {
            let mut ctr = self.command(kubernetes.program("ctr"));
            ctr.args(["-n", "k8s.io", "images"]).args(arguments);
            ctr
        };
        eventually(Duration::from_secs(60), || output(&mut images_command(&["list", "-q"])))?;
        for image in images {
            output(images_command(&["import"]).arg(image))?;
        }
        let names = output(&mut images_command(&["list", "-q"]))?;
        for (name, other) in ALIASES.iter().filter(|(name, _)| names.lines().any(|line| line == *name)) {
            output(&mut images_command(&["tag", "--force", name, other]))?;
        }
        Ok(())
    }

    /// runc, or a script before it where root lacks CAP_SYS_RESOURCE: the kernel refuses it a lower oom_score_adj and higher
    /// limits then, and runc fails.
    fn runtime(&self) -> Result<PathBuf> {
        let runc = PathBuf::from("/usr/sbin/runc");
        if caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_RESOURCE)? {
            return Ok(runc);
        }
        let wrapper = self.state.join("runc");
        fs::write(&wrapper, include_str!("runc-without-sys-resource.py"))?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
        Ok(wrapper)
    }

    fn start_kubelet(&mut self, kubernetes: &Kubernetes, directory: &Path) -> Result<()> {
        let (name, config) = (self.number.name(), self.state.join("kubelet.yaml"));
        fs::write(self.state.join("resolv.conf"), format!("nameserver {API}\n"))?;
        fs::write(&config, kubelet_config(self.number, &self.state))?;
        let mut kubelet = self.command(kubernetes.program("kubelet"));
        kubelet.arg("--config").arg(&config);
        kubelet.arg("--kubeconfig").arg(kubeconfig(directory, &format!("system:node:{name}")));
        let addresses = format!("{},{}", self.number.address(), self.number.address6());
        kubelet.args(["--hostname-override", &name, "--node-ip", &addresses]);
        self._others.push(start(kubelet, &self.state.join("kubelet.log"))?);
        Ok(())
    }

    fn start_kube_proxy(&mut self, kubernetes: &Kubernetes, cni: Cni, directory: &Path) -> Result<()> {
        let (name, address) = (self.number.name(), self.number.address());
        let mut proxy = self.command(kubernetes.program("kube-proxy"));
        proxy.arg("--kubeconfig").arg(kubeconfig(directory, "system:kube-proxy"));
        proxy.args(["--hostname-override", &name, "--bind-address", &address, "--cluster-cidr", PODS]);
        // One of the two clusters masquerades what comes from pods, too.
        proxy.arg(format!("--masquerade-all={}", cni == Cni::Bridge));
        // The machine's own limit of connections stays as it is.
        proxy.args(["--proxy-mode", kubernetes.proxy_mode.name(), "--conntrack-max-per-core=0"]);
        self._others.push(start(proxy, &self.state.join("kube-proxy.log"))?);
        Ok(())
    }
}

/// Makes the node's network namespace and joins it to the bridge of `world`.
fn join(world: &Namespace, number: NodeNumber) -> Result<Namespace> {
    let namespace = Namespace::new(&number.name())?;
    let (address, address6) = (number.address(), number.address6());
    ip(
        world,
        &format!(
            "link add node{0} type veth peer name eth0 netns {1}\nlink set node{0} master br0 up",
            number.0,
            namespace.name()
        ),
    )?;
    ip(
        &namespace,
        &format!(
            "link set eth0 up
            addr add {address}/24 dev eth0
            addr add {address6}/64 dev eth0 nodad
            route add default via {API}
            route add default via fd99::1"
        ),
    )?;
    namespace.set_sysctl("net/ipv4/ip_forward", "1")?;
    namespace.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    ip(world, &format!("route add {} via {address}\nroute add {} via {address6}", number.pods(), number.pods6()))?;
    for other in NodeNumber::ALL.into_iter().filter(|other| other.0 != number.0) {
        ip(
            &namespace,
            &format!(
                "route add {} via {}\nroute add {} via {}",
                other.pods(),
                other.address(),
                other.pods6(),
                other.address6()
            ),
        )?;
    }
    Ok(namespace)
}

/// A registry in front of the nodes, without TLS.
pub(crate) const REGISTRY: &str = "10.99.0.1:5000";

/// Images of the suites under which other names they run, too: what the tests ask for, and agnhost's earlier versions.
const ALIASES: [(&str, &str); 8] = [
    (AGNHOST, "registry.k8s.io/e2e-test-images/agnhost:2.45"),
    (AGNHOST, "registry.k8s.io/e2e-test-images/agnhost:2.55"),
    (AGNHOST, "registry.k8s.io/e2e-test-images/busybox:1.37.0-2"),
    (AGNHOST, "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.1.1"),
    (PAUSE, "registry.k8s.io/pause:3.10.2"),
    (PAUSE, "registry.k8s.io/pause:3.10.1"),
    (PAUSE, "registry.k8s.io/pause:3.10"),
    (PAUSE, "registry.k8s.io/pause:3.9"),
];
const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.66.1";
const PAUSE: &str = "docker.io/library/penstock-test-pause:1";

/// Name of the node's control group in each hierarchy.
fn control_group(node: &str) -> String {
    format!("{CONTROL_GROUPS}{}-{node}", std::process::id())
}

/// The beginning of the names of all control groups of these tests.
pub(crate) const CONTROL_GROUPS: &str = "penstock-test-";

/// Makes the node's control groups, which the guard removes with all below them.
fn control_groups(node: &str) -> Result<CleanupGuard> {
    let root = Path::new("/sys/fs/cgroup");
    ensure!(
        root.join("cpuset/cpuset.cpus").exists(),
        "{} has no hierarchies of version 1, in which these tests place kubelets: boot with systemd.unified_cgroup_hierarchy=0",
        root.display()
    );
    let hierarchies: Vec<PathBuf> =
        fs::read_dir(root)?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    let groups: Vec<PathBuf> = hierarchies.iter().map(|path| path.join(control_group(node))).collect();
    let guard = CleanupGuard::new({
        let groups = groups.clone();
        move || groups.iter().for_each(|group| remove_control_group(group))
    });
    for (hierarchy, group) in hierarchies.iter().zip(&groups) {
        fs::create_dir_all(group).with_context(|| format!("cannot make {}", group.display()))?;
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|file| hierarchy.join(file).exists()) {
            fs::copy(hierarchy.join(file), group.join(file)).with_context(|| format!("cannot set {file}"))?;
        }
    }
    Ok(guard)
}

/// Removes a control group. Its processes have been killed and may not be gone yet.
fn remove_control_group(group: &Path) {
    for below in fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        remove_control_group(&below.path());
    }
    // The last test says what is left.
    let _ = eventually(Duration::from_secs(5), || Ok(fs::remove_dir(group)?));
}

fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))).collect()
}

fn child_of(parent: Pid) -> Result<Pid> {
    let is_child = |process: &&Pid| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["PPid:", &parent.to_string()]))
    };
    processes().iter().find(is_child).copied().with_context(|| format!("process {parent} has no child"))
}

fn conflist(cni: Cni, number: NodeNumber) -> String {
    let ranges = format!(r#"[[{{"subnet":"{}"}}],[{{"subnet":"{}"}}]]"#, number.pods(), number.pods6());
    let plugin = match cni {
        Cni::Ptp => format!(
            r#"{{"type":"ptp","ipMasq":false,"mtu":1500,"ipam":{{"type":"host-local","ranges":{ranges},"routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0"}}]}}}}"#
        ),
        Cni::Bridge => format!(
            r#"{{"type":"bridge","bridge":"cni0","isGateway":true,"isDefaultGateway":true,"hairpinMode":true,"ipMasq":false,"mtu":1450,"ipam":{{"type":"host-local","ranges":{ranges}}}}}"#
        ),
    };
    format!(
        r#"{{"cniVersion":"0.4.0","name":"pods","plugins":[{plugin},{{"type":"portmap","capabilities":{{"portMappings":true}}}}]}}"#
    )
}

fn containerd_config(runtime: &Path, registries: &Path) -> String {
    format!(
        r#"version = 3
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{}"
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/opt/cni/bin"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{}"
"#,
        registries.display(),
        runtime.display()
    )
}

/// On control groups of version 1, which a kubelet refuses by default. It may look at a pod that has ended only after a minute, unless it
/// is told to look more often. Images are imported, and have names that nobody pulled them by.
fn kubelet_config(number: NodeNumber, state: &Path) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {}
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
cgroupDriver: cgroupfs
cgroupRoot: /{}
failCgroupV1: false
failSwapOn: false
syncFrequency: 2s
resolvConf: {}/resolv.conf
clusterDNS: [{CLUSTER_DNS}]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
imagePullCredentialsVerificationPolicy: NeverVerify
evictionHard: {{memory.available: 100Mi}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
",
        number.address(),
        control_group(&number.name()),
        state.display()
    )
}

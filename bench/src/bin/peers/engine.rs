//! The engines: how each is started on a node, as its project installs it, and what it needs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use penstock_bench::peers::{find, find_in, search_path};
use penstock_bench::testbed::{Namespace, penstock_binary};

/// An engine that enforces policy on the nodes of a cell.
pub(crate) struct Engine {
    /// Name on the command line and in tables.
    pub(crate) name: &'static str,
    /// How it enforces, for the list.
    pub(crate) about: &'static str,
    /// How the interfaces of its pods begin: it finds them by their names.
    pub(crate) prefix: &'static str,
    program: Program,
    needs: &'static [Need],
    /// Folder of CustomResourceDefinitions, in the peers' folder.
    definitions: Option<&'static str>,
    /// An object that its project's set-up creates: where, and what.
    pub(crate) object: Option<(&'static str, &'static str)>,
    /// Folder of its files, in `lib` of the peers' folder, which it finds in `/usr/lib`.
    library: Option<&'static str>,
    arguments: fn(&Place<'_>) -> Vec<String>,
    environment: fn(&Place<'_>) -> Vec<(&'static str, String)>,
    /// Content of [`Place::configuration`].
    pub(crate) configuration: fn(&Place<'_>) -> String,
}

pub(crate) struct Place<'a> {
    pub(crate) node: &'a str,
    /// Leads to the API server, with all rights.
    pub(crate) kubeconfig: &'a Path,
    pub(crate) state: &'a Path,
    /// Where its BPF file system has the node's part.
    pub(crate) pins: &'a Path,
}

impl Place<'_> {
    pub(crate) fn configuration(&self) -> PathBuf {
        self.state.join("configuration")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    None,
    Penstock,
    /// In the peers' folder.
    Peer(&'static str),
}

enum Need {
    /// A program, and its Debian package.
    Tool(&'static str, &'static str),
    /// The kernel's `queue` statement of nftables (`CONFIG_NFT_QUEUE`).
    NftablesQueue,
    /// No testbed here has it.
    Elsewhere(&'static str),
}

impl Need {
    /// Why it isn't met, if its programs are those in `path`.
    fn missing(&self, path: &OsStr) -> Option<String> {
        match self {
            Self::Elsewhere(why) => Some((*why).to_owned()),
            Self::Tool(program, package) => find_in(path, program, package).err().map(|missing| missing.to_string()),
            Self::NftablesQueue => match has_nftables_queue() {
                Ok(true) => None,
                Ok(false) => Some("the kernel has no queue statement of nftables (CONFIG_NFT_QUEUE)".to_owned()),
                Err(error) => Some(format!("{error:#}")),
            },
        }
    }
}

fn has_nftables_queue() -> Result<bool> {
    let namespace = Namespace::new("nft-queue")?;
    let nft = find("nft", "nftables")?;
    let rules = "add table inet t; add chain inet t c; add rule inet t c queue num 1";
    let output = namespace.command(nft).arg(rules).output().context("cannot run nft")?;
    Ok(output.status.success())
}

/// The folder with the peers' programs, which `PENSTOCK_PEERS` names.
pub(crate) struct PeersFolder(pub(crate) Option<PathBuf>);

impl PeersFolder {
    pub(crate) fn of_environment() -> Self {
        Self(std::env::var_os("PENSTOCK_PEERS").filter(|path| !path.is_empty()).map(PathBuf::from))
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        let folder = self.0.as_ref().with_context(|| {
            format!("PENSTOCK_PEERS is not set; set it to a folder with bin/{name}, which its project builds")
        })?;
        let path = folder.join("bin").join(name);
        ensure!(
            path.is_file(),
            "bin/{name} is not in the folder that PENSTOCK_PEERS names; build it as its project says, and put it there"
        );
        Ok(path)
    }

    /// A folder in it with what belongs there.
    fn folder(&self, name: &str, content: &str) -> Result<PathBuf> {
        let path = self.0.as_ref().context("PENSTOCK_PEERS is not set")?.join(name);
        ensure!(
            path.is_dir(),
            "{name} is not in the folder that PENSTOCK_PEERS names; put {content} there that its project installs"
        );
        Ok(path)
    }

    /// The libraries that engines find in `/usr/lib`, if there are any.
    pub(crate) fn libraries(&self) -> Option<PathBuf> {
        self.0.as_ref().map(|folder| folder.join("lib")).filter(|path| path.is_dir())
    }

    /// A program's version, from its line in the folder's file `VERSIONS`.
    fn version(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.as_ref()?.join("VERSIONS")).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(|version| version.trim().to_owned()))
    }
}

impl Engine {
    pub(crate) fn enforces(&self) -> bool {
        self.program != Program::None
    }

    /// Whether it is a program of another project, which gets file systems of its own.
    pub(crate) fn is_peer(&self) -> bool {
        matches!(self.program, Program::Peer(_))
    }

    pub(crate) fn missing(&self, peers: &PeersFolder) -> Option<String> {
        self.missing_in(&search_path(), peers)
    }

    fn missing_in(&self, path: &OsStr, peers: &PeersFolder) -> Option<String> {
        let program = self.program(peers).err().map(|error| format!("{error:#}"));
        let definitions = self.definitions(peers).err().map(|error| format!("{error:#}"));
        let library = self.library.and_then(|name| peers.folder(name, "the BPF programs").err());
        let library = library.map(|error| format!("{error:#}"));
        // First what no program would change.
        self.needs.iter().find_map(|need| need.missing(path)).or(program).or(definitions).or(library)
    }

    /// Its program; `None` where nothing enforces.
    pub(crate) fn program(&self, peers: &PeersFolder) -> Result<Option<PathBuf>> {
        match self.program {
            Program::None => Ok(None),
            Program::Penstock => penstock_binary().map(Some),
            Program::Peer(name) => peers.program(name).map(Some),
        }
    }

    /// The folder of its CustomResourceDefinitions.
    pub(crate) fn definitions(&self, peers: &PeersFolder) -> Result<Option<PathBuf>> {
        self.definitions.map(|name| peers.folder(name, "the CustomResourceDefinitions")).transpose()
    }

    /// Its version, as far as it is known.
    pub(crate) fn version(&self, peers: &PeersFolder) -> String {
        match self.program {
            Program::None => "kernel routing alone".to_owned(),
            Program::Penstock => env!("CARGO_PKG_VERSION").to_owned(),
            Program::Peer(name) => peers.version(name).unwrap_or_else(|| "not named in VERSIONS".to_owned()),
        }
    }

    pub(crate) fn arguments(&self, place: &Place<'_>) -> Vec<String> {
        (self.arguments)(place)
    }

    pub(crate) fn environment(&self, place: &Place<'_>) -> Vec<(&'static str, String)> {
        (self.environment)(place)
    }
}

/// An engine without anything of its own.
const PLAIN: Engine = Engine {
    name: "",
    about: "",
    prefix: "cali",
    program: Program::None,
    needs: &[],
    definitions: None,
    object: None,
    library: None,
    arguments: |_| Vec::new(),
    environment: |_| Vec::new(),
    configuration: |_| String::new(),
};

const IPTABLES: Need = Need::Tool("iptables", "iptables");
const IPSET: Need = Need::Tool("ipset", "ipset");
const NFT: Need = Need::Tool("nft", "nftables");

/// Felix waits until this says that the cluster's objects are there.
const CALICO_IS_READY: (&str, &str) = (
    "/apis/crd.projectcalico.org/v1/clusterinformations",
    r#"{"apiVersion":"crd.projectcalico.org/v1","kind":"ClusterInformation","metadata":{"name":"default"},"spec":{"datastoreReady":true}}"#,
);

/// All engines; the first is what the others are compared with.
pub(crate) static ENGINES: [Engine; 7] = [
    Engine { name: "none", about: "no enforcement: the kernel's routing, the zero line", ..PLAIN },
    Engine {
        name: "penstock",
        about: "this checkout's daemon with the settings of its manifests",
        program: Program::Penstock,
        arguments: |place| vec!["run".into(), "--config".into(), place.configuration().display().to_string()],
        configuration: penstock,
        ..PLAIN
    },
    Engine {
        name: "calico-nft",
        about: "Calico's Felix in nftables mode",
        program: Program::Peer("calico-felix"),
        needs: &[NFT, IPTABLES, IPSET],
        definitions: Some("crds/calico"),
        object: Some(CALICO_IS_READY),
        arguments: |_| felix_arguments(),
        environment: |place| felix(place, &[("FELIX_NFTABLESMODE", "Enabled"), ("FELIX_BPFENABLED", "false")]),
        ..PLAIN
    },
    Engine {
        name: "calico-bpf",
        about: "Calico's Felix in eBPF mode",
        program: Program::Peer("calico-felix"),
        needs: &[NFT, IPTABLES, IPSET],
        definitions: Some("crds/calico"),
        object: Some(CALICO_IS_READY),
        library: Some("lib/calico/bpf"),
        arguments: |_| felix_arguments(),
        environment: |place| {
            let of_mode = [
                ("FELIX_BPFENABLED", "true"),
                ("FELIX_NFTABLESMODE", "Auto"),
                // kube-proxy's part is nobody's here.
                ("FELIX_BPFCONNECTTIMELOADBALANCING", "Disabled"),
                ("FELIX_BPFHOSTNETWORKEDNATWITHOUTCTLB", "Enabled"),
                ("FELIX_BPFKUBEPROXYIPTABLESCLEANUPENABLED", "false"),
                ("FELIX_BPFLOGLEVEL", "Off"),
            ];
            felix(place, &of_mode)
        },
        ..PLAIN
    },
    Engine {
        name: "kube-router",
        about: "kube-router's firewall alone: iptables and ipset",
        program: Program::Peer("kube-router"),
        needs: &[IPTABLES, IPSET],
        arguments: |place| {
            let mut arguments = vec![
                format!("--kubeconfig={}", place.kubeconfig.display()),
                format!("--hostname-override={}", place.node),
            ];
            let fixed = [
                "--run-firewall=true",
                "--run-router=false",
                "--run-service-proxy=false",
                "--run-loadbalancer=false",
                "--enable-ipv6=false",
                "--health-port=0",
                "--metrics-port=0",
                "--service-cluster-ip-range=10.96.0.0/16",
            ];
            arguments.extend(fixed.map(str::to_owned));
            arguments
        },
        ..PLAIN
    },
    Engine {
        name: "kube-network-policies",
        about: "the SIG's reference: first packets go to a process by nftables' queue",
        program: Program::Peer("kube-network-policies"),
        needs: &[NFT, Need::NftablesQueue],
        arguments: |place| {
            vec![
                format!("--kubeconfig={}", place.kubeconfig.display()),
                format!("--hostname-override={}", place.node),
                "--metrics-bind-address=127.0.0.1:0".to_owned(),
                "--v=2".to_owned(),
            ]
        },
        ..PLAIN
    },
    Engine {
        name: "aws",
        about: "the network policy agent of AWS",
        prefix: "eni",
        program: Program::Peer("aws-network-policy-agent"),
        needs: &[Need::Elsewhere(
            "it asks the address manager of AWS's CNI plugin for pods, and the instance's metadata service for the node, which this testbed has not",
        )],
        ..PLAIN
    },
];

/// As `configs/kubernetes/penstock.toml` has it; but two daemons share a machine, so each has files of its own.
fn penstock(place: &Place<'_>) -> String {
    let (state, pins) = (place.state.display(), place.pins.display());
    format!(
        "node = \"{}\"\npod_interfaces = [\"cali*\"]\n[source]\nkubeconfig = \"{}\"\n[conntrack]\nmapping = \"{state}/conntrack\"\n\
         [fail]\non_exit = \"keep\"\npins = \"{pins}\"\n[admin]\nsocket = \"{state}/admin.sock\"\n\
         [metrics]\nlisten = \"127.0.0.1:9469\"\n",
        place.node,
        place.kubeconfig.display(),
    )
}

/// Without a configuration file: the environment has all of it.
fn felix_arguments() -> Vec<String> {
    vec!["--config-file=/nonexistent".to_owned()]
}

/// Felix's settings for a cluster whose policies are Kubernetes' objects, and for these of a mode.
fn felix(place: &Place<'_>, of_mode: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let fixed = [
        ("DATASTORE_TYPE", "kubernetes"),
        ("FELIX_DATASTORETYPE", "kubernetes"),
        ("FELIX_IPV6SUPPORT", "false"),
        ("FELIX_DEFAULTENDPOINTTOHOSTACTION", "ACCEPT"),
        ("FELIX_ROUTESOURCE", "WorkloadIPs"),
        ("FELIX_IPINIPENABLED", "false"),
        ("FELIX_VXLANENABLED", "false"),
        ("FELIX_LOGSEVERITYSCREEN", "Info"),
        ("FELIX_LOGSEVERITYFILE", "none"),
        ("FELIX_LOGSEVERITYSYS", "none"),
        ("FELIX_LOGFILEPATH", "none"),
        ("FELIX_USAGEREPORTINGENABLED", "false"),
        ("FELIX_HEALTHENABLED", "false"),
        ("FELIX_PROMETHEUSMETRICSENABLED", "false"),
    ];
    let mut all: Vec<(&'static str, String)> = vec![
        ("KUBECONFIG", place.kubeconfig.display().to_string()),
        ("FELIX_FELIXHOSTNAME", place.node.to_owned()),
        ("NODENAME", place.node.to_owned()),
    ];
    all.extend(fixed.iter().chain(of_mode).map(|&(name, value)| (name, value.to_owned())));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_engine_is_the_zero_line_and_names_differ() {
        let names: std::collections::BTreeSet<_> = ENGINES.iter().map(|engine| engine.name).collect();
        assert_eq!(names.len(), ENGINES.len());
        assert!(!ENGINES[0].enforces() && ENGINES[1..].iter().all(Engine::enforces));
    }

    #[test]
    fn a_program_that_is_not_there_is_named_with_its_place() {
        let tools = tempfile::tempdir().unwrap();
        let missing = |folder: Option<&str>| {
            let peers = PeersFolder(folder.map(PathBuf::from));
            ENGINES[4].missing_in(tools.path().as_os_str(), &peers).unwrap()
        };
        let cases = [
            ("", None, "apt-get install iptables"),
            ("iptables", None, "apt-get install ipset"),
            ("ipset", None, "PENSTOCK_PEERS is not set"),
            ("", Some("/nowhere"), "bin/kube-router is not in the folder"),
        ];
        for (installed, folder, expected) in cases {
            if !installed.is_empty() {
                std::fs::write(tools.path().join(installed), "").unwrap();
            }
            let reason = missing(folder);
            assert!(reason.contains(expected), "{reason}");
        }
    }
}

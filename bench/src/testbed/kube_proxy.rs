//! The rules of a cluster's node for Services, in the forms that kube-proxy writes, and for traffic that leaves the cluster.
//!
//! kube-proxy's own rules, for ports without session affinity and with `externalTrafficPolicy: Cluster`: in iptables mode as
//! iptables-nft translates them (`pkg/proxy/iptables/proxier.go`), in nftables mode as of Kubernetes 1.33
//! (`pkg/proxy/nftables/proxier.go`). Names of chains have the Service where kube-proxy has a hash.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::Value;

use super::namespace::Namespace;

/// The networks of all pods, by family: kube-proxy's `--cluster-cidr`.
pub const POD_NETWORKS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
/// The networks of Services' cluster addresses, by family.
pub const SERVICE_NETWORKS: [&str; 2] = ["10.96.0.0/16", "fd00:10:96::/112"];
/// The mark of packets to masquerade: bit 14, kube-proxy's `--iptables-masquerade-bit`.
const MASQUERADE: &str = "0x4000";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProxyMode {
    /// Chains that are gone through rule by rule.
    Iptables,
    /// A table of its own with verdict maps.
    Nftables,
}

/// A protocol of a Service's port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceProtocol {
    Tcp,
    Udp,
    Sctp,
}

impl ServiceProtocol {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

#[derive(Clone, Debug)]
pub struct ProxiedPort {
    pub protocol: ServiceProtocol,
    pub number: u16,
    /// Its number at each of the node's addresses.
    pub node_port: Option<u16>,
    /// Where connections go, of both families; each with equal probability. Without one they are refused.
    pub backends: Vec<SocketAddr>,
}

/// A Service as kube-proxy knows it.
#[derive(Clone, Debug)]
pub struct ProxiedService {
    pub name: String,
    /// Its cluster addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<ProxiedPort>,
}

/// The rules for Services on one node.
#[derive(Clone, Debug)]
pub struct KubeProxy {
    pub mode: ProxyMode,
    /// The node's addresses, at which node ports are open.
    pub node: Vec<IpAddr>,
    pub services: Vec<ProxiedService>,
}

impl KubeProxy {
    /// Replaces the node's rules for Services by these.
    pub fn install(&self, node: &Namespace) -> Result<()> {
        let rules = [false, true].map(|v6| Rules::of(self, v6).text()).concat();
        install(node, &rules).context("cannot install rules for Services")
    }
}

/// Makes a node give its own address to what pods send out of the cluster, as CNI plugins do (`ipMasq`).
pub fn masquerade_outside(node: &Namespace) -> Result<()> {
    let mut rules = String::new();
    for (ip, pods, multicast) in [("ip", POD_NETWORKS[0], "224.0.0.0/4"), ("ip6", POD_NETWORKS[1], "ff00::/8")] {
        let _ = write!(
            rules,
            "table {ip} masquerade-outside {{\n\
             chain postrouting {{ type nat hook postrouting priority 100\n\
             {ip} saddr {pods} {ip} daddr {pods} return\n\
             {ip} saddr {pods} {ip} daddr != {multicast} masquerade fully-random\n}}\n}}\n"
        );
    }
    install(node, &rules).context("cannot install rules for traffic out of the cluster")
}

fn install(node: &Namespace, rules: &str) -> Result<()> {
    let mut nft =
        node.command("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().context("nft: install nftables")?;
    nft.stdin.take().context("nft has an input")?.write_all(rules.as_bytes())?;
    let status = nft.wait()?;
    ensure!(status.success(), "nft: {status}:\n{rules}");
    Ok(())
}

/// One port of a Service in one family.
struct Entry<'a> {
    /// Part of the names of its chains.
    id: String,
    address: IpAddr,
    port: &'a ProxiedPort,
    backends: Vec<SocketAddr>,
}

struct Rules<'a> {
    mode: ProxyMode,
    ip: &'static str,
    address_type: &'static str,
    pods: &'static str,
    services: &'static str,
    node: Vec<String>,
    entries: Vec<Entry<'a>>,
}

impl<'a> Rules<'a> {
    fn of(proxy: &'a KubeProxy, v6: bool) -> Self {
        let of_family = |address: &&IpAddr| address.is_ipv6() == v6;
        let mut entries = Vec::new();
        for service in &proxy.services {
            let Some(&address) = service.addresses.iter().find(of_family) else { continue };
            entries.extend(service.ports.iter().map(|port| Entry {
                id: format!("{}/{}/{}", service.name, port.protocol.name(), port.number),
                address,
                port,
                backends: port.backends.iter().copied().filter(|backend| backend.is_ipv6() == v6).collect(),
            }));
        }
        let index = usize::from(v6);
        Self {
            mode: proxy.mode,
            ip: ["ip", "ip6"][index],
            address_type: ["ipv4_addr", "ipv6_addr"][index],
            pods: POD_NETWORKS[index],
            services: SERVICE_NETWORKS[index],
            node: proxy.node.iter().filter(of_family).map(IpAddr::to_string).collect(),
            entries,
        }
    }

    fn text(&self) -> String {
        match self.mode {
            ProxyMode::Iptables => self.iptables(),
            ProxyMode::Nftables => self.nftables(),
        }
    }

    /// The chains of one port's backends.
    fn backend_chains(&self, entry: &Entry<'_>, name: &dyn Fn(usize) -> String, mark: &str) -> String {
        let Self { ip, .. } = self;
        let mut chains = String::new();
        for (number, backend) in entry.backends.iter().enumerate() {
            let (chain, own, protocol) = (name(number), backend.ip(), entry.port.protocol.name());
            // A pod that is its own backend must not see its own address.
            let _ = writeln!(
                chains,
                "chain {chain} {{\n{ip} saddr {own} jump {mark}\nmeta l4proto {protocol} dnat to {backend}\n}}"
            );
        }
        chains
    }

    fn iptables(&self) -> String {
        let of = IptablesEntries::of(self);
        let chain = |name: &str, rules: &str| format!("chain {name} {{\n{rules}\n}}\n");
        let base = |name: &str, kind: &str, priority: i32, rule: &str| {
            let hook = name.to_lowercase();
            format!("chain {name} {{ type {kind} hook {hook} priority {priority}\n{rule}\n}}\n")
        };
        let nat = [
            base("PREROUTING", "nat", -100, "jump KUBE-SERVICES"),
            base("OUTPUT", "nat", -100, "jump KUBE-SERVICES"),
            base("POSTROUTING", "nat", 100, "jump KUBE-POSTROUTING"),
            chain("KUBE-SERVICES", &format!("{}fib daddr type local jump KUBE-NODEPORTS", of.services)),
            chain("KUBE-NODEPORTS", &of.node_ports),
            chain("KUBE-MARK-MASQ", &format!("meta mark set meta mark or {MASQUERADE}")),
            chain("KUBE-POSTROUTING", &masquerading()),
            of.chains,
        ];
        let forward = format!(
            "ct state invalid drop\nmeta mark and {MASQUERADE} == {MASQUERADE} accept\nct state related,established accept"
        );
        let filter = [
            base("FORWARD", "filter", 0, "jump KUBE-FORWARD\nct state new jump KUBE-SERVICES"),
            base("OUTPUT", "filter", 0, "ct state new jump KUBE-SERVICES"),
            chain("KUBE-FORWARD", &forward),
            chain("KUBE-SERVICES", &of.refused),
        ];
        self.table("nat", &nat.concat()) + &self.table("filter", &filter.concat())
    }

    fn nftables(&self) -> String {
        let Self { ip, address_type, services, .. } = self;
        let of = NftablesEntries::of(self);
        let mut addresses: Vec<String> = self.entries.iter().map(|entry| entry.address.to_string()).collect();
        addresses.dedup();
        let destination = format!("{address_type} . inet_proto . inet_service : verdict");
        let node_port = "inet_proto . inet_service : verdict";
        let body = [
            elements("set cluster-ips", address_type, &addresses),
            elements("set nodeport-ips", address_type, &self.node),
            elements("map firewall-ips", &destination, &[]),
            elements("map no-endpoint-services", &destination, &of.refused),
            elements("map no-endpoint-nodeports", node_port, &[]),
            elements("map service-ips", &destination, &of.services),
            elements("map service-nodeports", node_port, &of.node_ports),
            of.chains,
            nftables_chains(ip, services),
        ];
        self.table("kube-proxy", &body.concat())
    }

    /// A table in place of the one of this name.
    fn table(&self, name: &str, body: &str) -> String {
        let Self { ip, .. } = self;
        format!("table {ip} {name}\ndelete table {ip} {name}\ntable {ip} {name} {{\n{body}}}\n")
    }
}

/// The part of each port in iptables mode: rules and chains, as text.
#[derive(Default)]
struct IptablesEntries {
    services: String,
    node_ports: String,
    refused: String,
    chains: String,
}

impl IptablesEntries {
    fn of(rules: &Rules<'_>) -> Self {
        let mut all = Self::default();
        rules.entries.iter().for_each(|entry| all.add(rules, entry));
        all
    }

    fn add(&mut self, rules: &Rules<'_>, entry: &Entry<'_>) {
        let (ip, id, protocol) = (rules.ip, &entry.id, entry.port.protocol.name());
        let sent = format!("{ip} daddr {} {protocol} dport {}", entry.address, entry.port.number);
        if entry.backends.is_empty() {
            self.refused += &format!("{sent} reject\n");
            return;
        }
        self.services += &format!("{sent} jump KUBE-SVC-{id}\n");
        let backend = |number: usize| format!("KUBE-SEP-{id}/{number}");
        self.chains += &format!("chain KUBE-SVC-{id} {{\n{ip} saddr != {} {sent} jump KUBE-MARK-MASQ\n", rules.pods);
        for number in 0..entry.backends.len() {
            let left = entry.backends.len() - number;
            let chance = if left > 1 { format!("numgen random mod {left} 0 ") } else { String::new() };
            self.chains += &format!("{chance}jump {}\n", backend(number));
        }
        self.chains += "}\n";
        self.chains += &rules.backend_chains(entry, &backend, "KUBE-MARK-MASQ");
        if let Some(node_port) = entry.port.node_port {
            self.node_ports += &format!("{protocol} dport {node_port} jump KUBE-EXT-{id}\n");
            self.chains += &format!("chain KUBE-EXT-{id} {{\njump KUBE-MARK-MASQ\njump KUBE-SVC-{id}\n}}\n");
        }
    }
}

/// The part of each port in nftables mode: elements of its maps, and chains as text.
#[derive(Default)]
struct NftablesEntries {
    services: Vec<String>,
    node_ports: Vec<String>,
    refused: Vec<String>,
    chains: String,
}

impl NftablesEntries {
    fn of(rules: &Rules<'_>) -> Self {
        let mut all = Self::default();
        rules.entries.iter().for_each(|entry| all.add(rules, entry));
        all
    }

    fn add(&mut self, rules: &Rules<'_>, entry: &Entry<'_>) {
        let (ip, id, protocol) = (rules.ip, &entry.id, entry.port.protocol.name());
        let sent = format!("{} . {protocol} . {}", entry.address, entry.port.number);
        if entry.backends.is_empty() {
            self.refused.push(format!("{sent} : goto reject-chain"));
            return;
        }
        self.services.push(format!("{sent} : goto service-{id}"));
        let backend = |number: usize| format!("endpoint-{id}__{number}");
        let choices: Vec<String> =
            (0..entry.backends.len()).map(|number| format!("{number} : goto {}", backend(number))).collect();
        self.chains += &format!(
            "chain service-{id} {{\n{ip} daddr {} {ip} saddr != {} jump mark-for-masquerade\n\
             numgen random mod {} vmap {{ {} }}\n}}\n",
            entry.address,
            rules.pods,
            choices.len(),
            choices.join(", ")
        );
        self.chains += &rules.backend_chains(entry, &backend, "mark-for-masquerade");
        if let Some(node_port) = entry.port.node_port {
            self.node_ports.push(format!("{protocol} . {node_port} : goto external-{id}"));
            self.chains += &format!("chain external-{id} {{\njump mark-for-masquerade\ngoto service-{id}\n}}\n");
        }
    }
}

fn masquerading() -> String {
    format!("meta mark and {MASQUERADE} == 0 return\nmeta mark set meta mark xor {MASQUERADE}\nmasquerade fully-random")
}

/// A set or map; nft accepts no empty list of elements.
fn elements(what: &str, kind: &str, elements: &[String]) -> String {
    let list = if elements.is_empty() { String::new() } else { format!("elements = {{ {} }}\n", elements.join(", ")) };
    format!("{what} {{\ntype {kind}\n{list}}}\n")
}

/// The chains of nftables mode that are the same for all Services.
fn nftables_chains(ip: &str, services: &str) -> String {
    let masquerading = masquerading();
    format!(
        "chain filter-prerouting-pre-dnat {{ type filter hook prerouting priority -110\nct state new jump firewall-check\n}}\n\
         chain filter-output-pre-dnat {{ type filter hook output priority -110\nct state new jump firewall-check\n}}\n\
         chain filter-forward {{ type filter hook forward priority 0\n\
         ct state new jump service-endpoints-check\nct state new jump cluster-ips-check\n}}\n\
         chain filter-input {{ type filter hook input priority 0\n\
         ct state new jump nodeport-endpoints-check\nct state new jump service-endpoints-check\n}}\n\
         chain filter-output {{ type filter hook output priority 0\n\
         ct state new jump service-endpoints-check\nct state new jump cluster-ips-check\n}}\n\
         chain nat-prerouting {{ type nat hook prerouting priority -100\njump services\n}}\n\
         chain nat-output {{ type nat hook output priority -100\njump services\n}}\n\
         chain nat-postrouting {{ type nat hook postrouting priority 100\njump masquerading\n}}\n\
         chain services {{\n{ip} daddr . meta l4proto . th dport vmap @service-ips\n\
         {ip} daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports\n}}\n\
         chain cluster-ips-check {{\n{ip} daddr @cluster-ips reject\n{ip} daddr {services} drop\n}}\n\
         chain service-endpoints-check {{\n{ip} daddr . meta l4proto . th dport vmap @no-endpoint-services\n}}\n\
         chain nodeport-endpoints-check {{\n\
         {ip} daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports\n}}\n\
         chain firewall-check {{\n{ip} daddr . meta l4proto . th dport vmap @firewall-ips\n}}\n\
         chain reject-chain {{\nreject\n}}\n\
         chain mark-for-masquerade {{\nmeta mark set meta mark or {MASQUERADE}\n}}\n\
         chain masquerading {{\n{masquerading}\n}}\n"
    )
}

/// The Services of a directory of manifests, with the backends that EndpointSlices name.
pub fn read_services(manifests: &Path) -> Result<Vec<ProxiedService>> {
    let documents = read_documents(manifests)?;
    let of_kind = |kind: &'static str| documents.iter().filter(move |document| document["kind"] == kind);
    let slices: Vec<EndpointSlice> = of_kind("EndpointSlice")
        .map(|document| Ok(serde_json::from_value(document.clone())?))
        .collect::<Result<_>>()?;
    let mut services = Vec::new();
    for document in of_kind("Service") {
        services.push(proxied(&serde_json::from_value(document.clone())?, &slices)?);
    }
    Ok(services)
}

fn read_documents(manifests: &Path) -> Result<Vec<Value>> {
    let mut documents = Vec::new();
    let entries = fs::read_dir(manifests).with_context(|| format!("cannot read {}", manifests.display()))?;
    let mut files: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        for document in text.split("---\n").filter(|document| !document.trim().is_empty()) {
            documents.push(serde_saphyr::from_str(document).with_context(|| file.display().to_string())?);
        }
    }
    Ok(documents)
}

fn proxied(service: &Service, slices: &[EndpointSlice]) -> Result<ProxiedService> {
    let metadata = &service.metadata;
    let name = metadata.name.as_deref().context("a Service without a name")?;
    let spec = service.spec.as_ref().with_context(|| format!("Service {name} has no spec"))?;
    let is_its = |slice: &&EndpointSlice| {
        let of = slice.metadata.labels.as_ref().and_then(|labels| labels.get("kubernetes.io/service-name"));
        slice.metadata.namespace == metadata.namespace && of.is_some_and(|of| of == name)
    };
    let mut ports = Vec::new();
    for port in spec.ports.iter().flatten() {
        let mut backends = Vec::new();
        for slice in slices.iter().filter(is_its) {
            let at = slice.ports.iter().flatten().find(|at| at.name == port.name).and_then(|at| at.port);
            let Some(at) = at else { continue };
            for address in slice.endpoints.iter().flatten().flat_map(|endpoint| &endpoint.addresses) {
                backends.push(SocketAddr::new(address.parse()?, at.try_into()?));
            }
        }
        let protocol = match port.protocol.as_deref() {
            None | Some("TCP") => ServiceProtocol::Tcp,
            Some("UDP") => ServiceProtocol::Udp,
            Some("SCTP") => ServiceProtocol::Sctp,
            Some(other) => anyhow::bail!("Service {name}: {other} is no protocol of a Service"),
        };
        let node_port = port.node_port.map(u16::try_from).transpose()?;
        ports.push(ProxiedPort { protocol, number: port.port.try_into()?, node_port, backends });
    }
    let addresses =
        spec.cluster_ips.iter().flatten().map(|address| Ok(address.parse()?)).collect::<Result<Vec<IpAddr>>>()?;
    let namespace = metadata.namespace.as_deref().unwrap_or("default");
    Ok(ProxiedService { name: format!("{namespace}/{name}"), addresses, ports })
}

/// [`SERVICE_NETWORKS`], parsed.
pub(super) fn service_networks() -> Result<[IpNet; 2]> {
    Ok([SERVICE_NETWORKS[0].parse()?, SERVICE_NETWORKS[1].parse()?])
}

//! The kernel's own filters: nftables with sets, nftables with linear rules, and iptables with ipset.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use penstock_dataplane::policy::{Direction, PortProtocol, PortRange};
use penstock_policy::engine::Engine;

use super::policy;
use super::tools::{find, run, version};
use crate::load::ALL_PORTS;
use crate::rulesets::acl::{AccessList, Action, SixTuple};
use crate::rulesets::{acl, nft};
use crate::testbed::Namespace;

/// Loads the nftables ruleset with sets.
pub(super) fn nftables(node: &Namespace, engine: &Engine, scratch: &Path) -> Result<String> {
    load(node, &nft::render(engine.state(), engine.tables()), scratch)
}

/// Translates the first Service as kube-proxy's nftables mode does: a map of cluster addresses, a chain of each Service that
/// chooses a backend, and one of each backend (pkg/proxy/nftables of Kubernetes).
pub(super) fn service(node: &Namespace, scratch: &Path) -> Result<()> {
    let (address, backend) = (policy::cluster_address(0), policy::pod_address(1));
    let mut ports = String::new();
    for port in ALL_PORTS {
        for protocol in ["tcp", "udp"] {
            // Writing to a string does not fail.
            let _ = write!(ports, "{address} . {protocol} . {port} : goto service, ");
        }
    }
    let ruleset = format!(
        "table ip services\ndelete table ip services\ntable ip services {{\n\
         \tmap addresses {{ type ipv4_addr . inet_proto . inet_service : verdict; elements = {{ {ports} }} }}\n\
         \tchain endpoint {{ meta l4proto {{ tcp, udp }} dnat to {backend}; }}\n\
         \tchain service {{ numgen random mod 1 vmap {{ 0 : goto endpoint }}; }}\n\
         \tchain prerouting {{\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\
         \t\tip daddr . meta l4proto . th dport vmap @addresses\n\t}}\n}}\n"
    );
    load(node, &ruleset, scratch).map(drop)
}

fn load(node: &Namespace, ruleset: &str, scratch: &Path) -> Result<String> {
    let nft = find("nft", "nftables")?;
    let file = scratch.join("ruleset.nft");
    std::fs::write(&file, ruleset)?;
    run(node, &nft, &["-f", &file.display().to_string()], "")?;
    version("nft", "--version")
}

/// Loads the access lists, one rule per entry. Entries that match the measured packets come last.
pub(super) fn linear(node: &Namespace, engine: &Engine, scratch: &Path) -> Result<String> {
    let (mut chains, mut jumps) = (String::new(), String::new());
    for (number, (address, list)) in lists(engine).into_iter().enumerate() {
        // Writing to a string does not fail.
        let _ = writeln!(chains, "\tchain list_{number} {{");
        let is_measured = |entry: &&SixTuple| entry.src.or(entry.dst).is_some_and(|net| is_pod(net.addr()));
        let (last, first): (Vec<_>, Vec<_>) = permits(&list).partition(is_measured);
        for entry in first.into_iter().chain(last) {
            let peer = match (entry.src, entry.dst) {
                (Some(net), _) => format!("ip saddr {net} "),
                (None, Some(net)) => format!("ip daddr {net} "),
                (None, None) => String::new(),
            };
            let ports = entry.ports.map_or_else(String::new, |ports| nft_ports(&ports));
            let _ = writeln!(chains, "\t\t{peer}{ports}return");
        }
        chains.push_str("\t\tdrop\n\t}\n");
        let end = if list.direction == Direction::Egress { "saddr" } else { "daddr" };
        let _ = writeln!(jumps, "\t\tip {end} {address} jump list_{number}");
    }
    let ruleset = format!(
        "table inet penstock\ndelete table inet penstock\ntable inet penstock {{\n{chains}\tchain forward {{\n\
         \t\ttype filter hook forward priority filter; policy accept;\n{jumps}\t}}\n}}\n"
    );
    load(node, &ruleset, scratch)
}

/// The IPv4 access lists with the address of their pod.
pub(super) fn lists(engine: &Engine) -> Vec<(IpAddr, AccessList)> {
    let address = |list: &AccessList| engine.state().pod(list.pod)?.addresses.iter().copied().find(IpAddr::is_ipv4);
    let lists = acl::render(engine.state(), engine.tables()).into_iter();
    lists.filter_map(|list| Some((address(&list)?, list))).collect()
}

pub(super) fn permits(list: &AccessList) -> impl Iterator<Item = &SixTuple> {
    list.entries.iter().filter(|entry| entry.action == Action::Permit)
}

fn is_pod(address: IpAddr) -> bool {
    (0..256).any(|number| IpAddr::V4(policy::pod_address(number)) == address)
}

pub(super) fn protocol(of: PortProtocol) -> &'static str {
    match of {
        PortProtocol::Tcp => "tcp",
        PortProtocol::Udp => "udp",
        PortProtocol::Sctp => "sctp",
    }
}

fn nft_ports(ports: &PortRange) -> String {
    format!("{} dport {}-{} ", protocol(ports.protocol), ports.first, ports.last)
}

/// A chain for each direction of a pod, with a rule for each set of ports and the peers in an ipset.
pub(super) fn iptables(node: &Namespace, engine: &Engine) -> Result<String> {
    let ipset = find("ipset", "ipset")?;
    let restore = find("iptables-restore", "iptables")?;
    let (sets, rules) = iptables_rules(engine);
    run(node, &ipset, &["restore"], &sets)?;
    run(node, &restore, &[], &rules)?;
    Ok(format!("{}, {}", version("iptables", "--version")?, version("ipset", "version")?))
}

fn iptables_rules(engine: &Engine) -> (String, String) {
    let (mut sets, mut chains, mut rules) = (String::new(), String::new(), String::new());
    rules.push_str("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n");
    for (number, (address, list)) in lists(engine).into_iter().enumerate() {
        let (own, peer) = if list.direction == Direction::Egress { ("-s", "dst") } else { ("-d", "src") };
        let _ = writeln!(chains, ":SIDE-{number} - [0:0]");
        let _ = writeln!(rules, "-A FORWARD {own} {address} -j SIDE-{number}");
        let mut by_ports: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for entry in permits(&list) {
            let ports = entry.ports.map_or_else(String::new, |ports| {
                format!(" -p {} --dport {}:{}", protocol(ports.protocol), ports.first, ports.last)
            });
            let net = entry.src.or(entry.dst);
            // ipset accepts no prefix of length 0; two halves are equivalent.
            let nets = net.map_or_else(|| vec!["0.0.0.0/1".into(), "128.0.0.0/1".into()], |net| vec![net.to_string()]);
            by_ports.entry(ports).or_default().extend(nets);
        }
        for (index, (ports, nets)) in by_ports.into_iter().enumerate() {
            let set = format!("s{number}-{index}");
            let _ = writeln!(sets, "create {set} hash:net maxelem 131072");
            for net in nets.iter().filter(|net| !net.contains("::")) {
                let _ = writeln!(sets, "add -exist {set} {net}");
            }
            let _ = writeln!(rules, "-A SIDE-{number}{ports} -m set --match-set {set} {peer} -j RETURN");
        }
        let _ = writeln!(rules, "-A SIDE-{number} -j DROP");
    }
    let rules = format!("*filter\n:FORWARD ACCEPT [0:0]\n{chains}{rules}COMMIT\n");
    (sets, rules)
}

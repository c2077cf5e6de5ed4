//! A cell: two nodes and their pods, wired as Calico wires them, with what an engine finds on a node.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use anyhow::{Context, Result};
use ipnet::Ipv4Net;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use penstock_bench::probe::{EchoServers, EchoService, Probe, Protocol, RetryPolicy, Site, run};
use penstock_bench::testbed::{CleanupGuard, Namespace, Relay, RouteVia, ScratchDir};

use crate::cluster::{CLIENT, CLOSED, NODES, OPEN, PODS, REMOTE, SERVER, STRANGER};

/// The gateway of all pods: the node answers for it by proxy ARP.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const MTU: u32 = 1500;

/// Fields are dropped in this order: what runs on the nodes goes before them.
pub(crate) struct Cell {
    _servers: Vec<EchoServers>,
    _relays: Vec<Relay>,
    /// By the index of their pod.
    pub(crate) sites: Vec<Site>,
    pub(crate) nodes: Vec<CellNode>,
    _state: ScratchDir,
}

pub(crate) struct CellNode {
    pub(crate) namespace: Namespace,
    pub(crate) state: PathBuf,
    /// BPF file system of its own, in that folder.
    _bpf: CleanupGuard,
}

impl Cell {
    /// Wires one whose pods' interfaces begin with `prefix`; its nodes reach the API server at this port of their loopback.
    pub(crate) fn new(prefix: &str, api_port: u16) -> Result<Self> {
        let state = ScratchDir::new()?;
        let mut nodes = Vec::new();
        for plan in &NODES[..2] {
            let folder = state.path().join(plan.name);
            for name in ["run", "lib", "log", "bpf"] {
                std::fs::create_dir_all(folder.join(name))?;
            }
            let namespace = Namespace::new(plan.name)?;
            namespace.set_sysctl("net/ipv4/ip_forward", "1")?;
            nodes.push(CellNode { namespace, _bpf: mount_bpf(folder.join("bpf"))?, state: folder });
        }
        join(&nodes)?;
        let sites = (0..PODS.len()).map(|pod| add_pod(&nodes, pod, prefix)).collect::<Result<Vec<_>>>()?;
        let services =
            [EchoService::Tcp(OPEN), EchoService::Udp(OPEN), EchoService::Tcp(CLOSED), EchoService::Udp(CLOSED)];
        let servers = EchoServers::start_all(&sites, &services)?;
        let relays = nodes.iter().map(|node| Relay::start(&node.namespace, api_port)).collect::<Result<Vec<_>>>()?;
        Ok(Self { _servers: servers, _relays: relays, sites, nodes, _state: state })
    }

    /// Where probes contradict the policies: between pods of a node and of two, by TCP and UDP, at either end.
    pub(crate) fn differences(&self) -> Result<Vec<String>> {
        let mut probes = Vec::new();
        for &(from, to, port, _) in &CHECKS {
            for protocol in [Protocol::Tcp(port), Protocol::Udp(port)] {
                probes.push(Probe { from, to, source: None, destination: PODS[to].address.into(), protocol });
            }
        }
        let patience = RetryPolicy { timeout: std::time::Duration::from_millis(250), attempts: 1 };
        let outcomes = run(&self.sites, &probes, patience)?;
        let expected = CHECKS.iter().flat_map(|&(.., allowed)| [allowed, allowed]);
        let differs = probes.iter().zip(outcomes).zip(expected);
        Ok(differs
            .filter(|((_, outcome), allowed)| outcome.arrived() != *allowed)
            .map(|((probe, outcome), allowed)| {
                let [from, to] = [probe.from, probe.to].map(|pod| PODS[pod].name);
                let should = if allowed { "should pass" } else { "should not pass" };
                format!("{from} to {to}, {}, {should}: {outcome}", probe.protocol)
            })
            .collect())
    }
}

/// From, to, port, and whether it is allowed.
const CHECKS: [(usize, usize, u16, bool); 7] = [
    (CLIENT, SERVER, OPEN, true),
    (CLIENT, SERVER, CLOSED, false),
    (CLIENT, REMOTE, OPEN, true),
    (CLIENT, REMOTE, CLOSED, false),
    // Denied by the ingress of the other end alone.
    (STRANGER, SERVER, OPEN, false),
    (STRANGER, REMOTE, OPEN, false),
    // Denied by the egress of the own end alone.
    (CLIENT, STRANGER, OPEN, false),
];

/// An instance of its own, which outlasts a daemon that is killed, as a node's does.
fn mount_bpf(place: PathBuf) -> Result<CleanupGuard> {
    mount(Some("bpf"), &place, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount a BPF file system at {}", place.display()))?;
    Ok(CleanupGuard::new(move || {
        // A mount that stays goes with the machine's other mounts.
        let _ = umount2(&place, MntFlags::MNT_DETACH);
    }))
}

fn host(address: Ipv4Addr) -> ipnet::IpNet {
    Ipv4Net::from(address).into()
}

/// The nodes reach each other, and each other's pods, by `eth0`.
fn join(nodes: &[CellNode]) -> Result<()> {
    let [first, second] = nodes else { anyhow::bail!("a cell has two nodes") };
    let mtu = MTU;
    first.namespace.netlink()?.add_veth("eth0", "eth0", &second.namespace, mtu)?;
    for (own, other) in [(0, 1), (1, 0)] {
        let netlink = nodes[own].namespace.netlink()?;
        let index = netlink.index("eth0")?;
        netlink.set_up(index)?;
        netlink.add_address(index, Ipv4Net::new(NODES[own].address, 24)?.into())?;
        let via = RouteVia::Gateway(IpAddr::from(NODES[other].address));
        for destination in [NODES[other].pods, "0.0.0.0/0"] {
            netlink.add_route(destination.parse()?, index, via)?;
        }
    }
    Ok(())
}

fn add_pod(nodes: &[CellNode], pod: usize, prefix: &str) -> Result<Site> {
    let plan = &PODS[pod];
    let (node, namespace) = (&nodes[plan.node].namespace, Namespace::new(plan.name)?);
    let interface = format!("{prefix}{}", plan.digest);
    let netlink = node.netlink()?;
    let index = netlink.add_veth(&interface, "eth0", &namespace, MTU)?;
    node.set_sysctl(&format!("net/ipv4/conf/{interface}/proxy_arp"), "1")?;
    node.set_sysctl(&format!("net/ipv4/neigh/{interface}/proxy_delay"), "0")?;
    netlink.add_route(host(plan.address), index, RouteVia::Link)?;
    let inside = namespace.netlink()?;
    let eth0 = inside.index("eth0")?;
    inside.set_up(eth0)?;
    inside.add_address(eth0, host(plan.address))?;
    inside.add_route(host(GATEWAY), eth0, RouteVia::Link)?;
    inside.add_route("0.0.0.0/0".parse()?, eth0, RouteVia::Gateway(GATEWAY.into()))?;
    Ok(Site { name: plan.name.to_owned(), namespace, addresses: vec![plan.address.into()] })
}

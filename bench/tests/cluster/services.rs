//! Services, with kube-proxy on the nodes.

use std::net::IpAddr;

use anyhow::{Result, bail};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::real_cluster::RealCluster;

/// A probe of `from` to `address`, behind which the pod `to` answers.
fn expect(cluster: &RealCluster, rows: &[(&Site, &str, IpAddr, Protocol, bool)]) -> Result<()> {
    let mut wrong = Vec::new();
    for &(from, to, address, protocol, reached) in rows {
        let target = (cluster.target(to, false).0, address);
        let outcome = probe::run_one(from, target, protocol, RetryPolicy::expecting(reached))?;
        if (outcome == ProbeOutcome::Reached) != reached {
            let expected = if reached { "reached" } else { "denied" };
            wrong.push(format!("{} to {to} by {address}, {protocol}: {outcome}, expected: {expected}", from.name));
        }
    }
    if !wrong.is_empty() {
        bail!("{} of {}:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
    }
    Ok(())
}

pub(crate) fn a_cluster_ip_reaches_its_pod(cluster: &mut RealCluster) -> Result<()> {
    let (near, far) = (cluster.cluster_ip("ops", "near")?, cluster.cluster_ip("ops", "far")?);
    let web = cluster.cluster_ip("shop", "web")?;
    let (tcp, dns) = (Protocol::Tcp(80), Protocol::Udp(53));
    let mut rows = Vec::new();
    // The egress policy of lab/builder names the pods of ops: it is evaluated behind kube-proxy's translation.
    for from in ["shop/web", "lab/guest", "lab/builder"] {
        let from = cluster.site(from);
        for (to, address) in [("ops/monitor", near), ("ops/dash", far)] {
            rows.extend([(from, to, address, tcp, true), (from, to, address, dns, true)]);
        }
    }
    rows.push((cluster.site("lab/builder"), "shop/web", web, tcp, false));
    expect(cluster, &rows)
}

pub(crate) fn a_pod_reaches_itself_through_its_service(cluster: &mut RealCluster) -> Result<()> {
    let web = cluster.cluster_ip("shop", "web")?;
    expect(cluster, &[(cluster.site("shop/web"), "shop/web", web, Protocol::Tcp(80), true)])
}

pub(crate) fn the_node_reaches_services(cluster: &mut RealCluster) -> Result<()> {
    let near = cluster.cluster_ip("ops", "near")?;
    let (first, second) = (cluster.node(0), cluster.node(1));
    let rows = [&first, &second]
        .map(|node| [Protocol::Tcp(80), Protocol::Udp(53)].map(|protocol| (node, "ops/monitor", near, protocol, true)));
    expect(cluster, rows.as_flattened())
}

/// kube-proxy masquerades what comes by a node port, so that the pod sees the node. Policy is for who sent it.
pub(crate) fn policy_holds_for_clients_of_a_node_port(cluster: &mut RealCluster) -> Result<()> {
    let outside = cluster.outside();
    let (guest, monitor) = (cluster.site("lab/guest"), cluster.site("ops/monitor"));
    let nodes: Vec<IpAddr> =
        cluster.nodes.iter().map(|node| node.number.address().parse()).collect::<Result<_, _>>()?;
    let mut rows = Vec::new();
    // From outside by the other node, its masquerade makes the client that node, which is no node of the pod.
    for &node in &nodes {
        rows.push((&outside, "shop/web", node, Protocol::Tcp(30080), true));
        rows.push((guest, "shop/web", node, Protocol::Tcp(30080), true));
        rows.push((&outside, "shop/api", node, Protocol::Tcp(30082), false));
        rows.push((guest, "shop/api", node, Protocol::Tcp(30082), false));
        rows.push((monitor, "shop/api", node, Protocol::Tcp(30082), false));
    }
    // Whom policy names reaches it by its own node: a pod, and the machine outside, which an ipBlock names.
    let (web, dash) = (cluster.site("shop/web"), cluster.site("ops/dash"));
    rows.push((web, "shop/api", nodes[0], Protocol::Tcp(30082), true));
    rows.push((&outside, "shop/db", nodes[1], Protocol::Tcp(30090), true));
    rows.push((dash, "shop/db", nodes[1], Protocol::Tcp(30090), false));
    // A packet that the other node masquerades comes from that node.
    rows.push((&outside, "shop/db", nodes[0], Protocol::Tcp(30090), false));
    // With externalTrafficPolicy: Local nothing is masqueraded, and only the pod's node answers.
    rows.push((&outside, "shop/db", nodes[1], Protocol::Tcp(30091), true));
    rows.push((&outside, "shop/db", nodes[0], Protocol::Tcp(30091), false));
    rows.push((dash, "shop/db", nodes[1], Protocol::Tcp(30091), false));
    expect(cluster, &rows)
}

/// A port of the node that the CNI plugin `portmap` sends on to a pod.
pub(crate) fn policy_holds_for_clients_of_a_host_port(cluster: &mut RealCluster) -> Result<()> {
    let node: IpAddr = cluster.nodes[0].number.address().parse()?;
    let (outside, second) = (cluster.outside(), cluster.node(1));
    let mut rows = Vec::new();
    for from in [&outside, &second, cluster.site("lab/guest")] {
        rows.push((from, "shop/web", node, Protocol::Tcp(8088), true));
        rows.push((from, "shop/api", node, Protocol::Tcp(8089), false));
    }
    expect(cluster, &rows)
}

/// A pod always reaches its own node. Where that leads to a pod of the other node, egress policy is for that pod.
pub(crate) fn egress_policy_holds_for_node_ports_of_the_own_node(cluster: &mut RealCluster) -> Result<()> {
    let node: IpAddr = cluster.nodes[0].number.address().parse()?;
    let mut rows = Vec::new();
    for (from, is_isolated) in [("lab/builder", true), ("ops/monitor", false)] {
        let from = cluster.site(from);
        rows.push((from, "ops/dash", node, Protocol::Tcp(30084), true));
        rows.push((from, "ops/dash", node, Protocol::Udp(30085), true));
        rows.push((from, "lab/guest", node, Protocol::Tcp(30086), !is_isolated));
        rows.push((from, "lab/guest", node, Protocol::Udp(30087), !is_isolated));
    }
    expect(cluster, &rows)
}

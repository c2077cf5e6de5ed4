//! Pod churn during a measurement, and how long a policy change takes meanwhile.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::policy::NODE;
use super::{ManifestReloader, PeerTestbed, v4};
use crate::testbed::{Namespace, Netlink, RouteVia};

/// Pods that are removed together. A node that removes one interface at a time is limited to some forty a second: each
/// removal waits for an RCU grace period under the RTNL lock.
const GROUP: u32 = 10;
/// Number of groups of churned pods that exist at a time.
const ALIVE: usize = 2;
/// Port that is opened and closed in turn; no other policy allows it.
const PORT: u16 = 9200;
/// Timeout of a change.
const LIMIT: Duration = Duration::from_secs(10);
/// Interval between packets: the resolution of the measured time.
const INTERVAL: Duration = Duration::from_micros(200);
/// How long nothing may arrive before the port counts as closed.
const SILENCE: Duration = Duration::from_millis(20);

/// Creates and removes this many pods a second until `ends` is set; returns how many were created.
///
/// Each is a veth whose other end is in a shared namespace, a route and a manifest: the daemon's cost of a pod, not the
/// machine's cost of running one.
pub fn churn(testbed: &PodChurn, a_second: f64, ends: &AtomicBool) -> Result<u32> {
    let (node, others) = (testbed.node.netlink()?, Namespace::new("churn")?);
    let inside = others.netlink()?;
    let mut alive: VecDeque<(u32, Vec<String>)> = VecDeque::new();
    let (start, mut made) = (Instant::now(), 0_u32);
    while !ends.load(Ordering::Relaxed) {
        if start.elapsed().as_secs_f64() * a_second < f64::from(made) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        if made.is_multiple_of(GROUP) {
            // Group 0 is the default group.
            alive.push_back((1 + made / GROUP, Vec::new()));
        }
        if let Some((group, files)) = alive.back_mut() {
            files.push(come(testbed, &node, (&others, &inside), (made, *group))?);
        }
        made += 1;
        if alive.len() > ALIVE {
            go(testbed, &node, alive.pop_front())?;
        }
    }
    alive.into_iter().try_for_each(|group| go(testbed, &node, Some(group)))?;
    Ok(made)
}

/// What [`churn`] needs of a testbed.
pub struct PodChurn {
    node: Namespace,
    reload: ManifestReloader,
}

impl PodChurn {
    /// From this testbed.
    pub fn new(testbed: &PeerTestbed) -> Self {
        Self { node: testbed.node().namespace().clone(), reload: testbed.reload() }
    }
}

fn come(
    testbed: &PodChurn,
    node: &Netlink,
    (others, inside): (&Namespace, &Netlink),
    (number, group): (u32, u32),
) -> Result<String> {
    let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 244, 2, 0).to_bits() + number % 1000);
    let peer = format!("peer{number}");
    let index = node.add_veth(&format!("churn{number}"), &peer, others, 1500)?;
    node.set_group(index, group)?;
    inside.set_up(inside.index(&peer)?)?;
    node.add_route(IpAddr::from(address).into(), index, RouteVia::Link)?;
    let file = format!("churn-{number}.yaml");
    testbed.reload.save_as(
        &file,
        &format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{ namespace: bench, name: churn-{number}, labels: {{ role: churn }} }}\n\
             spec: {{ nodeName: {NODE}, containers: [{{ name: main, image: example.invalid/main }}] }}\n\
             status: {{ phase: Running, podIPs: [{{ ip: {address} }}] }}\n"
        ),
    )?;
    Ok(file)
}

fn go(testbed: &PodChurn, node: &Netlink, group: Option<(u32, Vec<String>)>) -> Result<()> {
    let Some((group, files)) = group else { return Ok(()) };
    files.iter().try_for_each(|file| testbed.reload.remove(file))?;
    node.remove_group(group)
}

/// Opens and closes a port of the second pod by policy, `changes` times. Returns the time from each save to the first
/// packet that arrives.
pub fn times_until_in_force(testbed: &PeerTestbed, changes: usize) -> Result<Vec<Duration>> {
    let (from, to, reload) = (testbed.pod(0)?, testbed.pod(1)?, testbed.reload());
    let there = SocketAddr::new(v4(to)?, PORT);
    let receiver = to.namespace().run(|| UdpSocket::bind(there).context("cannot bind"))?;
    let here = SocketAddr::new(v4(from)?, 0);
    let sender = from.namespace().run(|| UdpSocket::bind(here).context("cannot bind"))?;
    let arrives = |wait: Duration| -> Result<bool> {
        receiver.set_read_timeout(Some(wait))?;
        Ok(receiver.recv(&mut [0; 64]).is_ok())
    };
    let mut times = Vec::with_capacity(changes);
    for _ in 0..changes {
        let saved = Instant::now();
        reload.save_as("toggle.yaml", &toggle(PORT))?;
        loop {
            sender.send_to(b"open?", there)?;
            if arrives(INTERVAL)? {
                break;
            }
            ensure!(saved.elapsed() < LIMIT, "the policy is not in force after {LIMIT:?}");
        }
        times.push(saved.elapsed());
        let closed = Instant::now();
        reload.save_as("toggle.yaml", &toggle(PORT + 1))?;
        let mut quiet = Instant::now();
        while quiet.elapsed() < SILENCE {
            sender.send_to(b"closed?", there)?;
            if arrives(INTERVAL)? {
                quiet = Instant::now();
            }
            ensure!(closed.elapsed() < LIMIT, "the port is still open after {LIMIT:?}");
        }
    }
    reload.remove("toggle.yaml")?;
    Ok(times)
}

/// A policy for all pods: it also restricts the sender's egress.
fn toggle(port: u16) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{ namespace: bench, name: toggle }}\n\
         spec:\n  podSelector: {{}}\n  policyTypes: [Ingress, Egress]\n  \
         ingress: [{{ ports: [{{ port: {port}, protocol: UDP }}] }}]\n  \
         egress: [{{ ports: [{{ port: {port}, protocol: UDP }}] }}]\n"
    )
}

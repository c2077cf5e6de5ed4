//! Pod churn during a measurement, and how long a policy change takes meanwhile.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

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
const LIMIT: Duration = Duration::from_secs(10);
/// Interval between packets: the resolution of the measured time.
const INTERVAL: Duration = Duration::from_micros(200);
/// How long a port stays open before it is closed: its connection gets established, and programs forward its packets.
const ESTABLISHED: Duration = Duration::from_millis(4);
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

/// The parts of a testbed that [`churn`] needs.
pub struct PodChurn {
    node: Namespace,
    reload: ManifestReloader,
}

impl PodChurn {
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

/// Times from saving a change until it showed on packets.
#[derive(Clone, Debug, Default)]
pub struct ChangeTimes {
    /// Until the first packet that the policy allows arrived.
    pub opened: Vec<Duration>,
    /// Until the last packet arrived of a connection that the policy does not allow any more.
    pub closed: Vec<Duration>,
}

/// Opens and closes a port of the second pod by policy, `changes` times.
pub fn times_until_in_force(testbed: &PeerTestbed, changes: usize) -> Result<ChangeTimes> {
    let reload = testbed.reload();
    let mut connection = PacedConnection::new(testbed)?;
    let mut times = ChangeTimes::default();
    for _ in 0..changes {
        let saved = Instant::now();
        reload.save_as("toggle.yaml", &toggle(PORT))?;
        let first = loop {
            if let Some(arrived) = connection.send_one()? {
                break arrived;
            }
            ensure!(saved.elapsed() < LIMIT, "the policy is not in effect after {LIMIT:?}");
        };
        times.opened.push(first - saved);
        let mut last = first;
        while first.elapsed() < ESTABLISHED {
            last = connection.send_one()?.unwrap_or(last);
        }
        let saved = Instant::now();
        reload.save_as("toggle.yaml", &toggle(PORT + 1))?;
        while last.elapsed() < SILENCE {
            last = connection.send_one()?.unwrap_or(last);
            ensure!(saved.elapsed() < LIMIT, "the port is still open after {LIMIT:?}");
        }
        times.closed.push(last.saturating_duration_since(saved));
    }
    reload.remove("toggle.yaml")?;
    Ok(times)
}

/// A UDP connection from the first pod to the second on which a packet is sent each [`INTERVAL`].
struct PacedConnection {
    sender: UdpSocket,
    receiver: UdpSocket,
    next: Instant,
}

impl PacedConnection {
    fn new(testbed: &PeerTestbed) -> Result<Self> {
        let (from, to) = (testbed.pod(0)?, testbed.pod(1)?);
        let (here, there) = (SocketAddr::new(v4(from)?, 0), SocketAddr::new(v4(to)?, PORT));
        let bound = |address: SocketAddr| UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"));
        let (sender, receiver) = (from.namespace().run(|| bound(here))?, to.namespace().run(|| bound(there))?);
        sender.connect(there)?;
        receiver.set_nonblocking(true)?;
        Ok(Self { sender, receiver, next: Instant::now() })
    }

    /// Sends a packet and waits until the next one is due. Returns when the last packet arrived meanwhile, if one did.
    ///
    /// A socket's own timeout is rounded up to the kernel's ticks, which are as long as what is measured.
    fn send_one(&mut self) -> Result<Option<Instant>> {
        // Refused: an ICMP error for an earlier packet. A packet that is not sent does not arrive.
        let _ = self.sender.send(b"packet");
        // After a delay the packets that were missed are not made up for.
        self.next = Instant::now().max(self.next + INTERVAL);
        let mut arrived = None;
        loop {
            let left = self.next.saturating_duration_since(Instant::now());
            let mut waiting = [PollFd::new(self.receiver.as_fd(), PollFlags::POLLIN)];
            ppoll(&mut waiting, Some(TimeSpec::from_duration(left)), None)?;
            while self.receiver.recv(&mut [0; 64]).is_ok() {
                arrived = Some(Instant::now());
            }
            if left.is_zero() {
                return Ok(arrived);
            }
        }
    }
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

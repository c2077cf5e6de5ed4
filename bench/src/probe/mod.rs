//! Real traffic between sites, with its result.
//!
//! A probe is one exchange: a request with a random payload and a reply that proves which server answered and that the
//! request arrived unchanged. No reply within the retry policy counts as denied.

mod attempt;
mod echo_connection;
mod sctp;
mod series;
mod server;

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::testbed::{Namespace, Node, Outside, Pod};
use attempt::Attempt;
pub use attempt::time_until_reached;
pub use echo_connection::EchoConnection;
pub use series::{OLDEST, Series, SeriesPoint};
pub use server::{EchoServers, EchoService};

/// The reply of the server with this identity to a request.
fn reply_to(identity: u32, request: &[u8]) -> Vec<u8> {
    let mut reply = identity.to_be_bytes().to_vec();
    reply.extend(request.iter().map(|byte| !byte));
    reply
}

/// An end of a probe: a namespace with its addresses.
#[derive(Clone)]
pub struct Site {
    pub name: String,
    pub namespace: Namespace,
    pub addresses: Vec<IpAddr>,
}

impl Site {
    pub fn address(&self, v6: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv6() == v6)
    }
}

impl From<&Pod> for Site {
    fn from(pod: &Pod) -> Self {
        Self { name: pod.name().into(), namespace: pod.namespace().clone(), addresses: pod.addresses().to_vec() }
    }
}

impl From<&Node> for Site {
    fn from(node: &Node) -> Self {
        Self { name: "node".into(), namespace: node.namespace().clone(), addresses: node.addresses().to_vec() }
    }
}

impl From<&Outside> for Site {
    fn from(outside: &Outside) -> Self {
        let addresses = outside.addresses().to_vec();
        Self { name: "outside".into(), namespace: outside.namespace().clone(), addresses }
    }
}

/// An address of a Service or of a node that leads to another site's server.
#[derive(Clone, Debug)]
pub struct Frontend {
    pub name: String,
    /// Its addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// Index of the site that answers.
    pub to: usize,
    /// The protocol and port that is sent to, and the one at which it arrives at the site.
    pub ports: Vec<(Protocol, Protocol)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Protocol {
    /// Connects to this port, exchanges some bytes and closes.
    Tcp(u16),
    /// Sends a datagram to this port and expects a reply.
    Udp(u16),
    /// Asks for an association with this port and expects the answer to its first packet.
    Sctp(u16),
    /// Sends an echo request of the address's family.
    Icmp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(port) => write!(f, "TCP {port}"),
            Self::Udp(port) => write!(f, "UDP {port}"),
            Self::Sctp(port) => write!(f, "SCTP {port}"),
            Self::Icmp => f.write_str("ICMP"),
        }
    }
}

/// One exchange from one site to an address of another; sites are indices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Probe {
    /// Index of the client site.
    pub from: usize,
    /// Index of the server site.
    pub to: usize,
    /// Source address; `None` for the one that the client's kernel chooses.
    pub source: Option<IpAddr>,
    pub destination: IpAddr,
    pub protocol: Protocol,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProbeOutcome {
    /// The right server replied with the right payload.
    Reached,
    /// The destination's kernel rejected the packet: it arrived, but nothing listens there.
    Refused,
    Silent,
    /// A reply with the wrong identity or payload.
    Wrong,
    /// The local kernel failed with this errno, for example without a route.
    Failed(i32),
}

impl ProbeOutcome {
    /// Whether the packet arrived at its destination.
    pub fn arrived(self) -> bool {
        matches!(self, Self::Reached | Self::Refused)
    }
}

impl fmt::Display for ProbeOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached => f.write_str("reached"),
            Self::Refused => f.write_str("refused by the destination's kernel"),
            Self::Silent => f.write_str("no answer"),
            Self::Wrong => f.write_str("a wrong answer"),
            Self::Failed(errno) => write!(f, "failed: {}", std::io::Error::from_raw_os_error(*errno)),
        }
    }
}

/// How long to wait for a reply, and how often to try again.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    pub timeout: Duration,
    /// Number of attempts while nothing comes back.
    pub attempts: u32,
}

impl RetryPolicy {
    /// For a probe that is expected to reach its destination, or not: one that must be reached may take long on a busy machine.
    pub fn expecting(reached: bool) -> Self {
        match reached {
            true => Self { timeout: Duration::from_secs(1), attempts: 5 },
            false => Self::default(),
        }
    }
}

impl Default for RetryPolicy {
    /// Three attempts of 300 ms: a busy machine may delay one packet, but hardly three.
    fn default() -> Self {
        Self { timeout: Duration::from_millis(300), attempts: 3 }
    }
}

/// Every pair of different sites, over every family that both have and these protocols.
pub fn all_pairs(sites: &[Site], protocols: &[Protocol]) -> Vec<Probe> {
    let mut probes = Vec::new();
    for from in 0..sites.len() {
        for (to, site) in sites.iter().enumerate().filter(|&(to, _)| to != from) {
            let common = site.addresses.iter().filter(|address| sites[from].address(address.is_ipv6()).is_some());
            for &destination in common {
                probes.extend(protocols.iter().map(|&protocol| Probe {
                    from,
                    to,
                    source: None,
                    destination,
                    protocol,
                }));
            }
        }
    }
    probes
}

/// Every site to these frontends, over every family that both have; those to the frontend of this index in the list.
pub fn to_frontends(sites: &[Site], frontends: &[Frontend]) -> Vec<(usize, Probe)> {
    let mut probes = Vec::new();
    for (index, frontend) in frontends.iter().enumerate() {
        for (from, site) in sites.iter().enumerate() {
            let common = frontend.addresses.iter().filter(|address| site.address(address.is_ipv6()).is_some());
            for &destination in common {
                let probe = |protocol| Probe { from, to: frontend.to, source: None, destination, protocol };
                probes.extend(frontend.ports.iter().map(|&(sent, _)| (index, probe(sent))));
            }
        }
    }
    probes
}

/// Sends all probes at once and waits for all; results are in the order of the probes.
///
/// The sites need running [`EchoServers`] whose identity is the site's index.
pub fn run(sites: &[Site], probes: &[Probe], patience: RetryPolicy) -> Result<Vec<ProbeOutcome>> {
    let mut outcomes = vec![ProbeOutcome::Silent; probes.len()];
    std::thread::scope(|scope| {
        let sources: Vec<_> = (0..sites.len())
            .map(|from| {
                let mine: Vec<_> = probes.iter().enumerate().filter(|(_, probe)| probe.from == from).collect();
                let namespace = &sites[from].namespace;
                scope.spawn(move || {
                    let probes = mine.iter().map(|(_, probe)| **probe).collect::<Vec<_>>();
                    let results = namespace.run(|| run_here(&probes, patience))?;
                    Ok(mine.iter().map(|(index, _)| *index).zip(results).collect::<Vec<_>>())
                })
            })
            .collect();
        for source in sources {
            let results: Result<_> = source.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            for (index, outcome) in results? {
                outcomes[index] = outcome;
            }
        }
        Ok(outcomes)
    })
}

pub fn run_one(from: &Site, to: (u32, IpAddr), protocol: Protocol, patience: RetryPolicy) -> Result<ProbeOutcome> {
    let probe = Probe { from: 0, to: to.0 as usize, source: None, destination: to.1, protocol };
    let outcomes = from.namespace.run(|| run_here(&[probe], patience))?;
    outcomes.first().copied().context("one probe has one outcome")
}

fn run_here(probes: &[Probe], patience: RetryPolicy) -> Result<Vec<ProbeOutcome>> {
    let mut outcomes = vec![ProbeOutcome::Silent; probes.len()];
    let mut open: Vec<usize> = (0..probes.len()).collect();
    for _ in 0..patience.attempts {
        let start = Instant::now();
        let mut attempts =
            open.iter().map(|&index| Attempt::start(&probes[index])).collect::<std::io::Result<Vec<_>>>()?;
        attempt::drive(&mut attempts, start + patience.timeout)?;
        for (&index, attempt) in open.iter().zip(&attempts) {
            outcomes[index] = attempt.outcome().unwrap_or(ProbeOutcome::Silent);
        }
        open.retain(|&index| outcomes[index] == ProbeOutcome::Silent);
        if open.is_empty() {
            break;
        }
    }
    Ok(outcomes)
}

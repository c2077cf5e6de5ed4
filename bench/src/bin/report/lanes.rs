//! The testbeds of a run: each is built once, when a scenario first needs it.

use std::collections::BTreeMap;

use anyhow::Result;
use penstock_bench::peers::{Cores, Lane, Missing, Peer, Size};

/// Specification of a testbed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Spec {
    pub(crate) peer: Peer,
    pub(crate) size: Size,
    pub(crate) mtu: u32,
}

/// Default number of policies.
pub(crate) const POLICIES: usize = 100;
/// Default MTU of pods.
pub(crate) const MTU: u32 = 1500;

impl Spec {
    /// Two pods and a hundred policies.
    pub(crate) fn of(peer: Peer) -> Self {
        Self { peer, size: Size { pods: 2, policies: POLICIES }, mtu: MTU }
    }

    pub(crate) fn policies(self, policies: usize) -> Self {
        Self { size: Size { policies, ..self.size }, ..self }
    }

    pub(crate) fn pods(self, pods: usize) -> Self {
        Self { size: Size { pods, ..self.size }, ..self }
    }

    pub(crate) fn mtu(self, mtu: u32) -> Self {
        Self { mtu, ..self }
    }

    /// The peer's name in reports.
    pub(crate) fn peer_name(&self) -> &'static str {
        match &self.peer {
            Peer::Penstock { enforces: true, .. } => "Penstock",
            Peer::Penstock { enforces: false, .. } => "Penstock, raw forward",
            Peer::Kernel => "kernel routing",
            Peer::Nftables => "nftables, sets + conntrack",
            Peer::Linear => "nftables, linear rules",
            Peer::Iptables => "iptables + ipset",
            Peer::Nfqueue => "NFQUEUE",
            Peer::OpenVSwitch => "Open vSwitch, userspace",
            Peer::Testpmd => "DPDK testpmd",
        }
    }
}

/// The testbeds that were built, and why others could not be.
pub(crate) struct Lanes {
    cores: Cores,
    built: BTreeMap<Spec, Result<Lane, String>>,
    /// By peer.
    pub(crate) descriptions: BTreeMap<String, String>,
}

impl Lanes {
    pub(crate) fn new(cores: Cores) -> Self {
        Self { cores, built: BTreeMap::new(), descriptions: BTreeMap::new() }
    }

    /// The testbed, or one line that explains why there is none.
    pub(crate) fn get(&mut self, spec: &Spec) -> Result<&mut Lane, String> {
        let number = self.built.len();
        let (cores, descriptions) = (self.cores, &mut self.descriptions);
        let lane = self.built.entry(spec.clone()).or_insert_with(|| {
            let built = Lane::build(&format!("lane{number}"), spec.peer.clone(), spec.size, spec.mtu, cores);
            let lane = built.map_err(|error| match error.downcast_ref::<Missing>() {
                Some(missing) => missing.to_string(),
                None => format!("{error:#}").replace('\n', "; "),
            });
            let description = lane.as_ref().map_or_else(Clone::clone, |lane| lane.description().to_owned());
            descriptions.entry(spec.peer_name().to_owned()).or_insert(description);
            lane
        });
        lane.as_mut().map_err(|reason| reason.clone())
    }
}

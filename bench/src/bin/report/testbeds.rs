//! The testbeds of a run: each is built once, when a scenario first needs it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use penstock_bench::peers::{ClusterSize, Cores, MissingTool, Peer, PeerTestbed};

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct TestbedSpec {
    pub(crate) peer: Peer,
    pub(crate) size: ClusterSize,
    pub(crate) mtu: u32,
}

pub(crate) const POLICIES: usize = 100;
pub(crate) const MTU: u32 = 1500;

/// Room for connections in a table that is filled.
pub(crate) const FULL_TABLE: usize = 1 << 20;
/// Connections that are open in it.
const OPEN: u32 = FULL_TABLE as u32 / 100 * 92;
/// Pods whose connections fill it: none may have more than there are free entries.
const FULL_TABLE_PODS: usize = 26;

impl TestbedSpec {
    /// A peer that keeps a table of connections, which is full.
    pub(crate) fn with_full_table(peer: Peer) -> Self {
        Self::of(peer).pods(FULL_TABLE_PODS).open(OPEN)
    }

    /// Two pods and a hundred policies.
    pub(crate) fn of(peer: Peer) -> Self {
        Self {
            peer,
            size: ClusterSize {
                pods: 2,
                policies: POLICIES,
                services: 0,
                to_service: false,
                other_node: false,
                open: 0,
            },
            mtu: MTU,
        }
    }

    pub(crate) fn policies(self, policies: usize) -> Self {
        Self { size: ClusterSize { policies, ..self.size }, ..self }
    }

    pub(crate) fn pods(self, pods: usize) -> Self {
        Self { size: ClusterSize { pods, ..self.size }, ..self }
    }

    pub(crate) fn services(self, services: usize, to_service: bool) -> Self {
        Self { size: ClusterSize { services, to_service, ..self.size }, ..self }
    }

    pub(crate) fn other_node(self) -> Self {
        Self { size: ClusterSize { other_node: true, ..self.size }, ..self }
    }

    /// With this many connections open all the time.
    fn open(self, open: u32) -> Self {
        Self { size: ClusterSize { open, ..self.size }, ..self }
    }

    pub(crate) fn mtu(self, mtu: u32) -> Self {
        Self { mtu, ..self }
    }

    pub(crate) fn peer_name(&self) -> &'static str {
        match &self.peer {
            peer if *peer == Peer::penstock_by_tcx(true) => "Penstock, tcx",
            peer if *peer == Peer::penstock_by_tcx(false) => "Penstock, tcx, all by workers",
            peer if *peer == Peer::penstock_by_tcx_with_one_worker() => "Penstock, tcx, one worker",
            peer if *peer == Peer::penstock_by_tcx_without_repeats() => "Penstock, tcx, by workers",
            peer if *peer == Peer::penstock_by_tcx_with_one_worker_without_repeats() => "Penstock, tcx, by one worker",
            peer if *peer == Peer::penstock_as_shipped() => "Penstock, tcx, as shipped",
            peer if *peer == Peer::penstock_by_tcx_with_table(FULL_TABLE) => "Penstock, tcx, full table",
            Peer::Nftables if self.size.open > 0 => "nftables, sets + conntrack, full table",
            peer if *peer == Peer::forward_by_tcx() => "Penstock, tcx, raw forward by workers",
            Peer::Penstock { enforces: true, .. } => "Penstock",
            Peer::Penstock { enforces: false, .. } => "Penstock, raw forward",
            Peer::Kernel => "kernel routing",
            Peer::Nftables => "nftables, sets + conntrack",
            Peer::Linear => "nftables, linear rules",
            Peer::Iptables => "iptables + ipset",
            Peer::Nfqueue => "NFQUEUE",
            Peer::OpenVSwitch => "Open vSwitch, userspace",
            Peer::Testpmd => "DPDK testpmd",
            Peer::Redirect => "tcx, redirect alone",
        }
    }
}

/// The testbeds that were built, and why others could not be.
pub(crate) struct PeerTestbeds {
    cores: Cores,
    built: BTreeMap<TestbedSpec, Result<PeerTestbed, String>>,
    pub(crate) descriptions: BTreeMap<String, String>,
    pub(crate) building: Duration,
}

impl PeerTestbeds {
    pub(crate) fn new(cores: Cores) -> Self {
        Self { cores, built: BTreeMap::new(), descriptions: BTreeMap::new(), building: Duration::ZERO }
    }

    /// The testbed, or one line that explains why there is none.
    pub(crate) fn get(&mut self, spec: &TestbedSpec) -> Result<&mut PeerTestbed, String> {
        let (number, began) = (self.built.len(), Instant::now());
        let (cores, descriptions) = (self.cores, &mut self.descriptions);
        let testbed = self.built.entry(spec.clone()).or_insert_with(|| {
            let built = PeerTestbed::build(&format!("peer{number}"), spec.peer.clone(), spec.size, spec.mtu, cores);
            let testbed = built.map_err(|error| match error.downcast_ref::<MissingTool>() {
                Some(missing) => missing.to_string(),
                None => format!("{error:#}").replace('\n', "; "),
            });
            let description = testbed.as_ref().map_or_else(Clone::clone, |testbed| testbed.description().to_owned());
            descriptions.entry(spec.peer_name().to_owned()).or_insert(description);
            testbed
        });
        self.building += began.elapsed();
        testbed.as_mut().map_err(|reason| reason.clone())
    }
}

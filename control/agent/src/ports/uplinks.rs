//! Interfaces to other machines. What a pod sends to its own node passes without policy, and what it sends to a Service is not judged by the
//! Service's address; where the node sends it on, egress policy is evaluated for the machine that gets it. Tunnel packets of other nodes' pods
//! are not unwrapped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;
use penstock_dataplane::Snapshot;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::Protocol;
use penstock_dataplane::pipeline::may_leave;
use penstock_xdp_redirect::{
    AttachError, AttachedUplink, Destination, KeptBy, NO_UPLINK_NUMBER, RemoteNetwork, TcxMapError, TcxPrograms,
    UplinkNumber,
};

use super::{OpenPorts, interface};
use crate::discovery::{Link, NetworkState};
use crate::node_context::RefusedTunnels;

/// The attached uplinks.
#[derive(Default)]
pub(super) struct Uplinks {
    attached: BTreeMap<u32, AttachedUplink>,
    /// Interfaces that could not be attached, with what is said of them.
    failed: BTreeMap<u32, String>,
    /// Tunnel packets that the programs refuse.
    tunnels: Arc<RefusedTunnels>,
}

impl OpenPorts {
    /// Attaches to the node's interfaces to other machines.
    pub(crate) fn follow_uplinks(&mut self, netstate: &NetworkState) {
        let pairs = self.pairs.iter().flat_map(|pair| [pair.far.interface().index, pair.near.interface().index]);
        let pods = self.pods.values().flat_map(|pod| [pod.last.link, pod.last.enters_by]);
        let known: BTreeSet<u32> = pairs.chain(pods).collect();
        let is_uplink = |link: &&Link| {
            let is_own = known.contains(&link.index) || link.is_penstocks();
            link.up && link.name != "lo" && !is_own && !self.closed_interfaces.has(link.index)
        };
        self.uplinks.follow_links(&self.programs, netstate.links.values().filter(is_uplink));
        self.uplinks.follow_longest(netstate.longest.unwrap_or(u32::MAX));
    }

    /// Has the programs refuse these tunnel packets.
    pub(crate) fn refuse_tunnels(&mut self, wanted: &Arc<RefusedTunnels>) {
        const THING: &str = "tunnel packets";
        if self.uplinks.tunnels == *wanted {
            return;
        }
        match self.uplinks.refuse_tunnels(&self.programs, wanted) {
            Ok(()) => drop(self.untold.remove(THING)),
            // The next call tries again.
            Err(error) => {
                let reason = format!("{error}; tunnel packets of other nodes' pods may be unwrapped here");
                self.untold.insert(THING.to_owned(), reason);
            }
        }
    }

    /// Renews the destinations on other machines that pods may send to by this snapshot, for the time without a daemon.
    pub(crate) fn renew_allowed_to_leave(&self, snapshot: &Snapshot) {
        let is_allowed = |to: &Destination| {
            may_leave(snapshot, PortId(to.port), to.address.into(), Protocol(to.protocol), to.to_port)
        };
        if let Err(error) = self.programs.renew_allowed_to_leave(snapshot.epoch.0, is_allowed) {
            tracing::warn!("{error}; pods may not reach Services on other nodes until the next daemon starts");
        }
    }

    /// Whether programs see all that leaves the node: otherwise egress policy must not be left to them.
    pub(crate) fn watches_uplinks(&self) -> bool {
        self.uplinks.failed.is_empty()
    }
}

impl Uplinks {
    pub(super) fn has(&self, interface: u32) -> bool {
        self.attached.contains_key(&interface)
    }

    pub(super) fn attached_mut(&mut self) -> impl Iterator<Item = &mut AttachedUplink> {
        self.attached.values_mut()
    }

    /// Leaves the programs attached for the next daemon.
    pub(super) fn keep(self) {
        self.attached.into_values().for_each(AttachedUplink::keep);
    }

    fn follow_links<'a>(&mut self, tcx: &TcxPrograms, links: impl Iterator<Item = &'a Link>) {
        let wanted: BTreeMap<u32, &Link> = links.map(|link| (link.index, link)).collect();
        self.attached.retain(|index, _| wanted.contains_key(index));
        self.failed.retain(|index, _| wanted.contains_key(index));
        for (&index, &link) in &wanted {
            if self.attached.contains_key(&index) {
                continue;
            }
            match self.attach(tcx, link) {
                Ok(uplink) => {
                    self.failed.remove(&index);
                    if uplink.number() == NO_UPLINK_NUMBER {
                        tracing::error!(
                            interface = link.name,
                            "more interfaces to other machines than workers know: closed to what pods send to their node and it sends on there; remove some"
                        );
                    }
                    self.attached.insert(index, uplink);
                }
                // It is gone again.
                Err(AttachError::NoInterface { .. }) => {}
                Err(error) => {
                    let problem = format!(
                        "uplink {}: cannot attach it ({error}): egress policy is not enforced on what pods send to their node and it sends on there; trying again",
                        link.name
                    );
                    self.failed.insert(index, problem);
                }
            }
        }
    }

    /// `longest`: the longest packet that all routes take.
    fn follow_longest(&mut self, longest: u32) {
        for uplink in self.attached.values_mut() {
            if let Err(error) = uplink.set_longest(longest) {
                tracing::error!(%error, "packets may pass the node's stack by that are too long for its routes");
            }
        }
    }

    /// Why packets that come in by each of them go by the node's stack.
    pub(super) fn kept_by(&self, tcx: &TcxPrograms) -> Vec<(&str, [Option<KeptBy>; 2])> {
        let of = |uplink: &AttachedUplink, v6| {
            if !uplink.has_way() {
                return Some(KeptBy::Header);
            }
            tcx.kept_by(uplink.interface().index, v6).unwrap_or(Some(KeptBy::Other))
        };
        let uplinks = self.attached.values();
        uplinks.map(|uplink| (uplink.interface().name.as_str(), [false, true].map(|v6| of(uplink, v6)))).collect()
    }

    fn refuse_tunnels(&mut self, tcx: &TcxPrograms, wanted: &Arc<RefusedTunnels>) -> Result<(), TcxMapError> {
        let before = &self.tunnels;
        let network = |network: &IpNet| RemoteNetwork { address: network.addr(), length: network.prefix_len() };
        for (at, &of_pods) in wanted.networks.iter().filter(|&(at, is)| before.networks.get(at) != Some(is)) {
            tcx.set_remote_network(network(at), Some(of_pods))?;
        }
        for at in before.networks.keys().filter(|at| !wanted.networks.contains_key(at)) {
            tcx.set_remote_network(network(at), None)?;
        }
        wanted.ports.difference(&before.ports).try_for_each(|&port| tcx.set_tunnel_port(port, true))?;
        before.ports.difference(&wanted.ports).try_for_each(|&port| tcx.set_tunnel_port(port, false))?;
        self.tunnels = Arc::clone(wanted);
        Ok(())
    }

    fn attach(&self, tcx: &TcxPrograms, link: &Link) -> Result<AttachedUplink, AttachError> {
        let used: BTreeSet<UplinkNumber> = self.attached.values().map(AttachedUplink::number).collect();
        let number = (0..NO_UPLINK_NUMBER).find(|number| !used.contains(number)).unwrap_or(NO_UPLINK_NUMBER);
        tcx.attach_uplink(&interface(link), number, link.mac != Default::default())
    }

    /// Names what is not enforced at the node's interfaces to other machines.
    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.failed.values()
    }
}

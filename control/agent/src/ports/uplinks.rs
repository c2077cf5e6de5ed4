//! Interfaces to other machines. What a pod sends to its own node passes without policy; where the node sends that on, egress
//! policy is evaluated for the machine that gets it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_xdp_redirect::{AttachError, AttachedUplink, NO_UPLINK_NUMBER, TcxPrograms, UplinkNumber};

use super::{OpenPorts, Programs, interface};
use crate::discovery::{Link, NetworkState};

/// The attached uplinks, and what the programs know beside.
#[derive(Default)]
pub(super) struct Uplinks {
    attached: BTreeMap<u32, AttachedUplink>,
    /// Interfaces that could not be attached, with what is said of them.
    failed: BTreeMap<u32, String>,
    /// Addresses that could not be told, with what is said of them.
    untold: BTreeMap<IpAddr, String>,
    /// The node's own addresses in the programs.
    addresses: BTreeSet<IpAddr>,
}

impl OpenPorts {
    /// Attaches to the node's interfaces to other machines, and tells the programs its own addresses. With tcx only: by XDP the
    /// programs do not see what leaves by other interfaces.
    pub(crate) fn follow_uplinks(&mut self, netstate: &NetworkState) {
        let Programs::Tcx { tcx, .. } = &self.programs else { return };
        let own = self.permanent.iter().map(|open| open.programs.interface().index);
        let pairs = self.pairs.iter().flat_map(|pair| [pair.far.interface().index, pair.near.interface().index]);
        let pods = self.pods.values().flat_map(|pod| [pod.last.link, pod.last.enters_by]);
        let known: BTreeSet<u32> = own.chain(pairs).chain(pods).collect();
        let is_uplink = |link: &&Link| {
            link.up && link.name != "lo" && !known.contains(&link.index) && !self.closed_interfaces.has(link.index)
        };
        self.uplinks.follow_links(tcx, netstate.links.values().filter(is_uplink));
        self.uplinks.follow_addresses(tcx, netstate.addresses.iter().copied().collect());
    }
}

impl Uplinks {
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

    fn attach(&self, tcx: &TcxPrograms, link: &Link) -> Result<AttachedUplink, AttachError> {
        let used: BTreeSet<UplinkNumber> = self.attached.values().map(AttachedUplink::number).collect();
        let number = (0..NO_UPLINK_NUMBER).find(|number| !used.contains(number)).unwrap_or(NO_UPLINK_NUMBER);
        tcx.attach_uplink(&interface(link), number, link.mac != Default::default())
    }

    fn follow_addresses(&mut self, tcx: &TcxPrograms, wanted: BTreeSet<IpAddr>) {
        self.untold.clear();
        for address in wanted.symmetric_difference(&self.addresses).copied().collect::<Vec<_>>() {
            match tcx.set_node_address(address, wanted.contains(&address)) {
                Ok(()) if wanted.contains(&address) => drop(self.addresses.insert(address)),
                Ok(()) => drop(self.addresses.remove(&address)),
                // Told again by the next call.
                Err(error) => {
                    let problem = format!(
                        "{address}: {error}; egress policy is not enforced on what pods send to this address of the node and it sends on"
                    );
                    self.untold.insert(address, problem);
                }
            }
        }
    }

    /// What is not enforced at the node's interfaces to other machines.
    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.failed.values().chain(self.untold.values())
    }
}

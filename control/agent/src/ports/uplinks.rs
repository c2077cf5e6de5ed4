//! Interfaces to other machines. What a pod sends to its own node passes without policy, and what it sends to a Service is not judged by the
//! Service's address; where the node sends it on, egress policy is evaluated for the machine that gets it.

use std::collections::{BTreeMap, BTreeSet};

use penstock_xdp_redirect::{AttachError, AttachedUplink, TcxPrograms, UplinkNumber};

use super::{OpenPorts, Programs, interface};
use crate::discovery::{Link, NetworkState};

/// The attached uplinks.
#[derive(Default)]
pub(super) struct Uplinks {
    attached: BTreeMap<u32, AttachedUplink>,
    /// Interfaces that could not be attached, which was logged.
    failed: BTreeSet<u32>,
}

impl OpenPorts {
    /// Attaches to the node's interfaces to other machines. With tcx only: by XDP the programs do not see what leaves by other
    /// interfaces.
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
    }

    /// Whether programs see all that leaves the node: otherwise egress policy must not be left to them.
    pub(crate) fn watches_uplinks(&self) -> bool {
        !self.programs.are_xdp() && self.uplinks.failed.is_empty()
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
        self.failed.retain(|index| wanted.contains_key(index));
        for (&index, &link) in &wanted {
            if self.attached.contains_key(&index) {
                continue;
            }
            match self.attach(tcx, link) {
                Ok(uplink) => {
                    self.failed.remove(&index);
                    self.attached.insert(index, uplink);
                }
                // It is gone again.
                Err(Some(AttachError::NoInterface { .. })) => {}
                Err(error) if self.failed.insert(index) => {
                    let reason = error.map_or_else(|| "too many interfaces".to_owned(), |error| error.to_string());
                    tracing::error!(
                        interface = link.name,
                        reason,
                        "cannot attach the uplink: EGRESS POLICY IS NOT ENFORCED on what pods send to their node and it sends on there; trying again"
                    );
                }
                Err(_) => {}
            }
        }
    }

    /// Fails with `None` if all numbers are in use.
    fn attach(&self, tcx: &TcxPrograms, link: &Link) -> Result<AttachedUplink, Option<AttachError>> {
        let used: BTreeSet<UplinkNumber> = self.attached.values().map(AttachedUplink::number).collect();
        let number = (0..=UplinkNumber::MAX).find(|number| !used.contains(number)).ok_or(None)?;
        tcx.attach_uplink(&interface(link), number, link.mac != Default::default()).map_err(Some)
    }
}

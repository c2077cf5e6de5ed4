//! Which addresses are local pods', for the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_xdp_redirect::Entrances;

use super::OpenPorts;
use crate::discovery::PodPort;

impl OpenPorts {
    /// Tells the programs which addresses are local pods', and the interfaces by which their packets come in; no packet may have an
    /// address of `unserved`. Call it before a snapshot with them is published, and [`OpenPorts::retract`] after it, so that nobody else
    /// can use a pod's address in between.
    pub(crate) fn announce(&mut self, unserved: &BTreeSet<IpAddr>) {
        let mut wanted: BTreeMap<IpAddr, Option<Entrances>> = unserved.iter().map(|&address| (address, None)).collect();
        // The addresses of a gone pod stay while its interface exists, unless another pod has them.
        for served in [false, true] {
            for attachment in self.pods.values().filter(|attachment| attachment.served == served) {
                let PodPort { link, enters_by, .. } = attachment.last;
                let by = Some(Entrances { veth: link, stack: enters_by });
                wanted.extend(attachment.last.addresses.iter().map(|&address| (address, by)));
            }
        }
        let mut untold = BTreeSet::new();
        for (&address, by) in wanted.iter().filter(|&(address, by)| self.announced.get(address) != Some(by)) {
            match self.programs.set_pod_address(address, *by) {
                Ok(()) => drop(self.untold.remove(&address.to_string())),
                Err(error) => {
                    // Told again by the next call.
                    untold.insert(address);
                    let reason = format!(
                        "{address}: {error}; packets from outside do not reach it, and may use it as their source"
                    );
                    self.untold.insert(address.to_string(), reason);
                }
            }
        }
        for &address in self.announced.keys().filter(|&address| !wanted.contains_key(address)) {
            self.retracted.insert(address);
            self.untold.remove(&address.to_string());
        }
        self.retracted.retain(|address| !wanted.contains_key(address));
        self.announced = wanted;
        self.announced.retain(|address, _| !untold.contains(address));
    }

    /// Withdraws addresses that are no local pod's any more.
    pub(crate) fn retract(&mut self) {
        for address in std::mem::take(&mut self.retracted) {
            if let Err(error) = self.programs.remove_pod_address(address) {
                tracing::error!(%error, "cannot withdraw a pod's address: packets for it still go to the workers");
            }
        }
    }
}

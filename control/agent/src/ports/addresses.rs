//! Which addresses are local pods', for the XDP programs and for the node's routes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_xdp_redirect::Entrances;

use super::open::mtu;
use super::{ETHERNET_HEADER, OpenPorts};
use crate::discovery::{PodPort, PodRoute};

/// A local pod's address as the programs know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Announced {
    /// The longest frame for it, with its Ethernet header; 0 if its pod is not served.
    longest: u16,
    /// The interfaces by which its packets come in.
    by: Option<Entrances>,
}

impl OpenPorts {
    /// Tells the programs which addresses are local pods', and the longest packet that uplinks may hand over for each:
    /// zero for pods that are not served. Call it before a snapshot with them is published, and [`OpenPorts::retract`]
    /// after it, so that nobody else can use a pod's address in between.
    pub(crate) fn announce(&mut self, unserved: &BTreeSet<IpAddr>) {
        let of = |route: PodRoute| Announced {
            longest: self.longest.min(mtu(route.mtu.saturating_add(ETHERNET_HEADER))),
            by: Some(Entrances { veth: route.link, stack: route.enters_by }),
        };
        let mut wanted: BTreeMap<IpAddr, Announced> =
            unserved.iter().map(|&address| (address, Announced::default())).collect();
        wanted.extend(self.pod_routes().into_iter().map(|(address, route)| (address, of(route))));
        let mut untold = BTreeSet::new();
        for (&address, announced) in
            wanted.iter().filter(|&(address, announced)| self.announced.get(address) != Some(announced))
        {
            match self.programs.announce(address, announced.longest, announced.by) {
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
            if let Err(error) = self.programs.retract(address) {
                tracing::error!(%error, "cannot withdraw a pod's address: packets for it still go to the workers");
            }
        }
    }

    /// The node's routes to the pods' addresses, through the workers.
    ///
    /// The addresses of a gone pod stay while its interface exists, unless another pod has them.
    pub(crate) fn pod_routes(&self) -> BTreeMap<IpAddr, PodRoute> {
        let mut routes = BTreeMap::new();
        for served in [false, true] {
            for attachment in self.pods.values().filter(|attachment| attachment.served == served) {
                let PodPort { link, mtu, enters_by, .. } = attachment.last;
                let route = PodRoute { link, mtu, enters_by };
                routes.extend(attachment.last.addresses.iter().map(|&address| (address, route)));
            }
        }
        routes
    }
}

//! Which addresses are local pods', for the XDP programs and for the node's routes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::open::mtu;
use super::{ETHERNET_HEADER, OpenPorts};
use crate::discovery::PodRoute;

impl OpenPorts {
    /// Tells the programs which addresses are local pods', and the longest packet that uplinks may hand over for each:
    /// zero for pods that are not served. Call it before a snapshot with them is published, and [`OpenPorts::retract`]
    /// after it, so that nobody else can use a pod's address in between.
    pub(crate) fn announce(&mut self, unserved: &BTreeSet<IpAddr>) {
        let longest = |route: PodRoute| self.longest.min(mtu(route.mtu.saturating_add(ETHERNET_HEADER)));
        let mut wanted: BTreeMap<IpAddr, u16> = unserved.iter().map(|&address| (address, 0)).collect();
        wanted.extend(self.pod_routes().into_iter().map(|(address, route)| (address, longest(route))));
        let local = self.redirect.local_pods();
        for (&address, &longest) in
            wanted.iter().filter(|&(address, longest)| self.announced.get(address) != Some(longest))
        {
            if let Err(error) = local.insert(address, longest) {
                tracing::error!(%error, "cannot announce a pod's address: packets from outside do not reach it, and may use it as their source");
            }
        }
        for &address in self.announced.keys().filter(|&address| !wanted.contains_key(address)) {
            self.retracted.insert(address);
        }
        self.retracted.retain(|address| !wanted.contains_key(address));
        self.announced = wanted;
    }

    /// Withdraws addresses that are no local pod's any more.
    pub(crate) fn retract(&mut self) {
        for address in std::mem::take(&mut self.retracted) {
            if let Err(error) = self.redirect.local_pods().remove(address) {
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
                let route = PodRoute { link: attachment.last.link, mtu: attachment.last.mtu };
                routes.extend(attachment.last.addresses.iter().map(|&address| (address, route)));
            }
        }
        routes
    }
}

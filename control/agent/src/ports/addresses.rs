//! Which addresses are local pods': as the programs know it, and as the node's routes are to have it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::open::mtu;
use super::{ETHERNET_HEADER, Ports};
use crate::discovery::PodRoute;

impl Ports {
    /// Tells the programs which addresses are local pods', and how long packets for them may be that uplinks hand over: none
    /// for those that are not served. To be called before a snapshot with them is published, and [`Ports::retract`] after it,
    /// so that at no time somebody else passes for a pod.
    pub(crate) fn announce(&mut self, unserved: &BTreeSet<IpAddr>) {
        let longest = |route: PodRoute| self.longest.min(mtu(route.mtu.saturating_add(ETHERNET_HEADER)));
        let mut wanted: BTreeMap<IpAddr, u16> = unserved.iter().map(|&address| (address, 0)).collect();
        wanted.extend(self.pod_routes().into_iter().map(|(address, route)| (address, longest(route))));
        let local = self.redirect.local_pods();
        for (&address, &longest) in
            wanted.iter().filter(|&(address, longest)| self.announced.get(address) != Some(longest))
        {
            if let Err(error) = local.insert(address, longest) {
                tracing::error!(%error, "packets from outside do not reach the pod, and may come in its name");
            }
        }
        for &address in self.announced.keys().filter(|&address| !wanted.contains_key(address)) {
            self.retracted.insert(address);
        }
        self.retracted.retain(|address| !wanted.contains_key(address));
        self.announced = wanted;
    }

    /// Has the programs forget the addresses that are no local pod's any more.
    pub(crate) fn retract(&mut self) {
        for address in std::mem::take(&mut self.retracted) {
            if let Err(error) = self.redirect.local_pods().remove(address) {
                tracing::error!(%error, "packets from outside are still taken");
            }
        }
    }

    /// How the node is to reach each pod's addresses: by the workers.
    ///
    /// The addresses of a pod that is gone stay, while its interface does, unless another pod has them.
    pub(crate) fn pod_routes(&self) -> BTreeMap<IpAddr, PodRoute> {
        let mut routes = BTreeMap::new();
        for served in [false, true] {
            for side in self.pods.values().filter(|side| side.served == served) {
                let route = PodRoute { link: side.last.link, mtu: side.last.mtu };
                routes.extend(side.last.addresses.iter().map(|&address| (address, route)));
            }
        }
        routes
    }
}

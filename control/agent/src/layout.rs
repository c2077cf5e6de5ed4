//! The open ports as a snapshot needs them: a value of its own, so that publishing does not wait for who opens them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::forward::{Forwarding, Port, PortId};
use penstock_dataplane::packet::Address;
use penstock_policy::model::ObjectKey;

use super::connections::Tenants;
use super::surroundings::Surroundings;

/// All open ports of one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Layout {
    pub(super) ports: Vec<OpenPort>,
}

/// An open port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OpenPort {
    pub(super) id: PortId,
    pub(super) interface: String,
    pub(super) port: Port,
    /// The pod behind it, if one is served.
    pub(super) pod: Option<Served>,
}

/// The pod behind a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Served {
    pub(super) key: ObjectKey,
    /// Index of its interface, which a pod that is made again has anew.
    pub(super) link: u32,
    pub(super) addresses: BTreeSet<IpAddr>,
}

impl Layout {
    /// Who has each address by the ports: the pod and its interface.
    pub(super) fn tenants(&self) -> Tenants {
        let served = self.ports.iter().filter_map(|port| port.pod.as_ref());
        served.flat_map(|pod| pod.addresses.iter().map(|&at| (at, (pod.key.clone(), pod.link)))).collect()
    }

    /// How many pods are served.
    pub(super) fn pods(&self) -> usize {
        self.ports.iter().filter(|port| port.pod.is_some()).count()
    }

    /// The pods that have all of their addresses, each with its port.
    pub(super) fn served<'a>(
        &'a self,
        admitted: &'a Tenants,
    ) -> impl Iterator<Item = (&'a ObjectKey, PortId, &'a BTreeSet<IpAddr>)> {
        let served = self.ports.iter().filter_map(|port| Some((port.id, port.pod.as_ref()?)));
        let whole = |pod: &Served| pod.addresses.iter().all(|at| pod.is(admitted.get(at)));
        served.filter(move |(_, pod)| whole(pod)).map(|(id, pod)| (&pod.key, id, &pod.addresses))
    }

    /// The forwarding table. A pod has those of its addresses that are admitted. One that waits for all that it is to have
    /// has no port meanwhile, so that its packets are dropped as of a pod that is not ready.
    pub(super) fn forwarding(
        &self,
        around: &Surroundings,
        services: &[IpNet],
        wanted: &Tenants,
        admitted: &Tenants,
    ) -> Forwarding {
        let mut forwarding = around.forwarding().with_services(services);
        for open in &self.ports {
            let mut port = open.port.clone();
            if let Some(pod) = &open.pod {
                let of = |tenants: &Tenants| -> Vec<Address> {
                    let own = pod.addresses.iter().filter(|at| pod.is(tenants.get(at)));
                    own.map(|&at| at.into()).collect()
                };
                port.addresses = of(admitted);
                if port.addresses.is_empty() && !of(wanted).is_empty() {
                    continue;
                }
            }
            if let Err(error) = forwarding.insert(open.id, port) {
                tracing::error!(interface = open.interface, %error, "port left out");
            }
        }
        forwarding
    }
}

impl Served {
    fn is(&self, tenant: Option<&(ObjectKey, u32)>) -> bool {
        tenant.is_some_and(|(key, link)| (key, *link) == (&self.key, self.link))
    }
}

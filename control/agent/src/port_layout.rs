//! The open ports as a snapshot needs them: a copy, so that publishing does not wait for the thread that opens ports.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::forward::{Forwarding, Port, PortId};
use penstock_dataplane::packet::Address;
use penstock_policy::model::ObjectKey;

use super::connections::AddressOwners;
use super::node_context::NodeContext;

/// All open ports at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct PortLayout {
    pub(super) ports: Vec<LayoutPort>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LayoutPort {
    pub(super) id: PortId,
    pub(super) interface: String,
    pub(super) port: Port,
    /// The pod behind it, if one is served.
    pub(super) pod: Option<ServedPod>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ServedPod {
    pub(super) key: ObjectKey,
    /// Index of its interface; a recreated pod has a new one.
    pub(super) link: u32,
    pub(super) addresses: BTreeSet<IpAddr>,
}

impl PortLayout {
    /// The owner of each address according to the ports: the pod and its interface.
    pub(super) fn owners(&self) -> AddressOwners {
        let served = self.ports.iter().filter_map(|port| port.pod.as_ref());
        served.flat_map(|pod| pod.addresses.iter().map(|&at| (at, (pod.key.clone(), pod.link)))).collect()
    }

    pub(super) fn pods(&self) -> usize {
        self.ports.iter().filter(|port| port.pod.is_some()).count()
    }

    /// The pods whose addresses are all admitted, each with its port.
    pub(super) fn served<'a>(
        &'a self,
        admitted: &'a AddressOwners,
    ) -> impl Iterator<Item = (&'a ObjectKey, PortId, &'a BTreeSet<IpAddr>)> {
        let served = self.ports.iter().filter_map(|port| Some((port.id, port.pod.as_ref()?)));
        let is_admitted = |pod: &ServedPod| pod.addresses.iter().all(|at| pod.is(admitted.get(at)));
        served.filter(move |(_, pod)| is_admitted(pod)).map(|(id, pod)| (&pod.key, id, &pod.addresses))
    }

    /// The forwarding table. A pod gets those of its addresses that are admitted. A pod that waits for all of its
    /// addresses has no port meanwhile: its packets are dropped as `not_ready`.
    pub(super) fn forwarding(
        &self,
        node_context: &NodeContext,
        services: &[IpNet],
        wanted: &AddressOwners,
        admitted: &AddressOwners,
    ) -> Forwarding {
        let mut forwarding = node_context.forwarding().with_services(services);
        for open in &self.ports {
            let mut port = open.port.clone();
            if let Some(pod) = &open.pod {
                let of = |owners: &AddressOwners| -> Vec<Address> {
                    let own = pod.addresses.iter().filter(|at| pod.is(owners.get(at)));
                    own.map(|&at| at.into()).collect()
                };
                port.addresses = of(admitted);
                if port.addresses.is_empty() && !of(wanted).is_empty() {
                    continue;
                }
            }
            if let Err(error) = forwarding.insert(open.id, port) {
                tracing::error!(interface = open.interface, %error, "cannot add the port to the forwarding table");
            }
        }
        forwarding
    }
}

impl ServedPod {
    fn is(&self, owner: Option<&(ObjectKey, u32)>) -> bool {
        owner.is_some_and(|(key, link)| (key, *link) == (&self.key, self.link))
    }
}

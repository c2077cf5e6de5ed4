//! Read access to the ports, for snapshots, answers, metrics and statistics.

use std::net::IpAddr;

use penstock_dataplane::forward::{Port, PortId};
use penstock_policy::model::ObjectKey;
use penstock_xdp_redirect::ProgramOutcomeCounts;

use super::OpenPorts;
use super::open::PodAttachment;
use crate::discovery::PodPort;
use crate::port_layout::{LayoutPort, PortLayout, ServedPod};

/// The role of a port, for those who look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortRole {
    Pod,
    Host,
    /// The packets of many ports, between programs and a worker.
    Pair,
}

impl PortRole {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Host => "host",
            Self::Pair => "pair",
        }
    }
}

/// A port with the counters of its programs.
pub(crate) struct PortOutcomes {
    pub(crate) id: PortId,
    pub(crate) role: PortRole,
    /// How its programs are attached.
    pub(crate) program: &'static str,
    pub(crate) pod: Option<ObjectKey>,
    /// `None` if the kernel does not give them.
    pub(crate) outcomes: Option<ProgramOutcomeCounts>,
}

impl OpenPorts {
    /// The ports as a snapshot needs them.
    pub(crate) fn layout(&self) -> PortLayout {
        let placed = |id, interface: &str, port: &Port, pod| LayoutPort {
            id,
            interface: interface.to_owned(),
            port: port.clone(),
            pod,
        };
        let served = |attachment: &PodAttachment| {
            let PodPort { pod, link, addresses, .. } = &attachment.last;
            attachment.served.then(|| ServedPod { key: pod.clone(), link: *link, addresses: addresses.clone() })
        };
        let node = self.node.iter().map(|node| placed(node.id, &node.interface, &node.port, None));
        let pods = self.pods.values().map(|attachment| {
            placed(attachment.id, &attachment.veth.interface().name, &attachment.port, served(attachment))
        });
        PortLayout { ports: node.chain(pods).collect() }
    }

    /// The port of this pod, and its interface.
    pub(crate) fn port_of(&self, pod: &ObjectKey) -> Option<(PortId, &str)> {
        let attachment = self.pods.values().find(|attachment| attachment.served && attachment.last.pod == *pod)?;
        Some((attachment.id, &attachment.last.name))
    }

    /// Which of a pod's packets others have filters for, and what becomes of these.
    pub(crate) fn filters_of(&self, pod: &ObjectKey) -> Option<String> {
        let attachment = self.pods.values().find(|attachment| attachment.served && attachment.last.pod == *pod)?;
        let which = attachment.last.shaping.directions()?;
        Some(format!("{which}; its packets take the way by these"))
    }

    /// The pod behind a port, if it is served.
    pub(crate) fn pod_of(&self, port: PortId) -> Option<&ObjectKey> {
        self.pods
            .values()
            .find(|attachment| attachment.served && attachment.id == port)
            .map(|attachment| &attachment.last.pod)
    }

    /// The pod with this address, if it is served.
    pub(crate) fn pod_with(&self, address: IpAddr) -> Option<&ObjectKey> {
        let mut served = self.pods.values().filter(|attachment| attachment.served);
        served.find(|attachment| attachment.last.addresses.contains(&address)).map(|attachment| &attachment.last.pod)
    }

    /// Names what is behind a port: a pod's `namespace/name`, or `node`. `None` if it is not served.
    pub(crate) fn name_of(&self, port: PortId) -> Option<String> {
        let pods = self.pods.values().filter(|attachment| attachment.served);
        pods.map(|attachment| (attachment.id, attachment.last.pod.to_string()))
            .chain(self.node.iter().map(|node| (node.id, "node".to_owned())))
            .find_map(|(id, name)| (id == port).then_some(name))
    }

    /// Interfaces that are closed because their pod is not known, with their counters.
    pub(crate) fn closed_interfaces(&self) -> Vec<(String, ProgramOutcomeCounts)> {
        self.closed_interfaces.counters()
    }

    /// How many pods are served.
    pub(crate) fn pods(&self) -> usize {
        self.pods.values().filter(|attachment| attachment.served).count()
    }

    /// Every port with its counters.
    pub(crate) fn outcomes(&self) -> Vec<PortOutcomes> {
        let tc = if self.programs.filter_watch().is_some() { "clsact" } else { "tcx" };
        let pods = self.pods.values().map(|attachment| PortOutcomes {
            id: attachment.id,
            role: PortRole::Pod,
            program: tc,
            pod: attachment.served.then(|| attachment.last.pod.clone()),
            outcomes: attachment.veth.outcomes().ok(),
        });
        let own = self.node.iter().map(|node| (node.id, PortRole::Host, tc));
        let own = own.chain(self.pairs.iter().map(|pair| (pair.id, PortRole::Pair, "xdp")));
        let without_counters =
            |(id, role, program)| PortOutcomes { id, role, program, pod: None, outcomes: Some(Default::default()) };
        own.map(without_counters).chain(pods).collect()
    }
}

//! Read access to the ports, for snapshots, answers, metrics and statistics.

use std::net::IpAddr;

use penstock_dataplane::forward::{PortId, PortKind};
use penstock_policy::model::ObjectKey;
use penstock_xdp_redirect::ProgramOutcomeCounts;

use super::OpenPorts;
use super::open::{AttachedPort, PodAttachment};
use super::programs::AttachMode;
use crate::discovery::PodPort;
use crate::port_layout::{LayoutPort, PortLayout, ServedPod};

/// The role of a port, for those who look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortRole {
    Pod,
    Host,
    Uplink,
    /// The packets of many ports, between programs and a worker.
    Pair,
}

impl PortRole {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Host => "host",
            Self::Uplink => "uplink",
            Self::Pair => "pair",
        }
    }
}

impl From<PortKind> for PortRole {
    fn from(kind: PortKind) -> Self {
        match kind {
            PortKind::Pod => Self::Pod,
            PortKind::Host => Self::Host,
            PortKind::Uplink => Self::Uplink,
        }
    }
}

/// A port with the counters of its program.
pub(crate) struct PortXdpCounters {
    pub(crate) id: PortId,
    pub(crate) role: PortRole,
    pub(crate) pod: Option<ObjectKey>,
    pub(crate) mode: AttachMode,
    pub(crate) outcomes: Option<ProgramOutcomeCounts>,
}

impl OpenPorts {
    /// The ports as a snapshot needs them.
    pub(crate) fn layout(&self) -> PortLayout {
        let placed = |open: &AttachedPort, pod: Option<ServedPod>| LayoutPort {
            id: open.id,
            interface: open.programs.interface().name.clone(),
            port: open.port.clone(),
            pod,
        };
        let served = |attachment: &PodAttachment| {
            let PodPort { pod, link, addresses, .. } = &attachment.last;
            attachment.served.then(|| ServedPod { key: pod.clone(), link: *link, addresses: addresses.clone() })
        };
        let permanent = self.permanent.iter().map(|open| placed(open, None));
        PortLayout {
            ports: permanent
                .chain(self.pods.values().map(|attachment| placed(&attachment.open, served(attachment))))
                .collect(),
        }
    }

    /// The port of this pod, and its interface.
    pub(crate) fn port_of(&self, pod: &ObjectKey) -> Option<(PortId, &str)> {
        let attachment = self.pods.values().find(|attachment| attachment.served && attachment.last.pod == *pod)?;
        Some((attachment.open.id, &attachment.last.name))
    }

    /// Which of a pod's packets others have filters for, and what becomes of these.
    pub(crate) fn filters_of(&self, pod: &ObjectKey) -> Option<String> {
        let attachment = self.pods.values().find(|attachment| attachment.served && attachment.last.pod == *pod)?;
        let found = attachment.last.shaping;
        let which = found.directions()?;
        let held = attachment.open.programs.filters_that_hold(found);
        Some(match held.directions() {
            None => format!("{which}; its packets pass beside these"),
            Some(_) if held == found => format!("{which}; its packets take the way by these"),
            Some(held) => format!("{which}; only {held} takes the way by these"),
        })
    }

    /// The pod behind a port, if it is served.
    pub(crate) fn pod_of(&self, port: PortId) -> Option<&ObjectKey> {
        self.pods
            .values()
            .find(|attachment| attachment.served && attachment.open.id == port)
            .map(|attachment| &attachment.last.pod)
    }

    /// The pod with this address, if it is served.
    pub(crate) fn pod_with(&self, address: IpAddr) -> Option<&ObjectKey> {
        let mut served = self.pods.values().filter(|attachment| attachment.served);
        served.find(|attachment| attachment.last.addresses.contains(&address)).map(|attachment| &attachment.last.pod)
    }

    /// Names what is behind a port: a pod's `namespace/name`, `node`, or an interface. `None` if it is not served.
    pub(crate) fn name_of(&self, port: PortId) -> Option<String> {
        let interface = |open: &AttachedPort| match open.port.kind {
            PortKind::Host => "node".to_owned(),
            PortKind::Pod | PortKind::Uplink => open.programs.interface().name.clone(),
        };
        let pods = self.pods.values().filter(|attachment| attachment.served);
        pods.map(|attachment| (attachment.open.id, attachment.last.pod.to_string()))
            .chain(self.permanent.iter().map(|open| (open.id, interface(open))))
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
    pub(crate) fn xdp_counters(&self) -> Vec<PortXdpCounters> {
        let pod_of = |attachment: &PodAttachment| attachment.served.then(|| attachment.last.pod.clone());
        let pods = self.pods.values().map(|attachment| (&attachment.open, pod_of(attachment)));
        let all = self.permanent.iter().map(|open| (open, None)).chain(pods);
        let counters = |(open, pod): (&AttachedPort, Option<ObjectKey>)| PortXdpCounters {
            id: open.id,
            role: open.port.kind.into(),
            pod,
            mode: open.programs.mode(),
            outcomes: open.programs.outcomes(),
        };
        let pairs = self.pairs.iter().map(|pair| PortXdpCounters {
            id: pair.id,
            role: PortRole::Pair,
            pod: None,
            mode: AttachMode::Xdp(pair.far.mode().clone()),
            outcomes: pair.far.outcomes().ok(),
        });
        all.map(counters).chain(pairs).collect()
    }
}

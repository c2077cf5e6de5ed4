//! The ports as others read them: snapshots, answers, metrics and statistics.

use penstock_dataplane::forward::{PortId, PortKind};
use penstock_policy::model::ObjectKey;
use penstock_xdp_redirect::{XdpMode, XdpOutcomeCounts};

use super::Ports;
use super::open::{Open, PodSide};
use crate::discovery::PodPort;
use crate::layout::{Layout, OpenPort, Served};

/// A port's name and counters for the statistics.
pub(crate) struct Counted {
    pub(crate) id: PortId,
    pub(crate) kind: PortKind,
    pub(crate) pod: Option<ObjectKey>,
    pub(crate) mode: XdpMode,
    pub(crate) outcomes: Option<XdpOutcomeCounts>,
}

impl Ports {
    /// What a snapshot needs to know of the ports that are open.
    pub(crate) fn layout(&self) -> Layout {
        let placed = |open: &Open, pod: Option<Served>| OpenPort {
            id: open.id,
            interface: open.attached.interface().name.clone(),
            port: open.port.clone(),
            pod,
        };
        let served = |side: &PodSide| {
            let PodPort { pod, link, addresses, .. } = &side.last;
            side.served.then(|| Served { key: pod.clone(), link: *link, addresses: addresses.clone() })
        };
        let fixed = self.fixed.iter().map(|open| placed(open, None));
        Layout { ports: fixed.chain(self.pods.values().map(|side| placed(&side.open, served(side)))).collect() }
    }

    /// The port of this pod, and its interface.
    pub(crate) fn port_of(&self, pod: &ObjectKey) -> Option<(PortId, &str)> {
        let side = self.pods.values().find(|side| side.served && side.last.pod == *pod)?;
        Some((side.open.id, &side.last.name))
    }

    /// The pod behind a port, if it is served.
    pub(crate) fn pod_of(&self, port: PortId) -> Option<&ObjectKey> {
        self.pods.values().find(|side| side.served && side.open.id == port).map(|side| &side.last.pod)
    }

    /// Interfaces that are closed because their pod is not known, with what came from them.
    pub(crate) fn waiting(&self) -> Vec<(String, XdpOutcomeCounts)> {
        self.waiting.counted()
    }

    /// How many pods are served.
    pub(crate) fn pods(&self) -> usize {
        self.pods.values().filter(|side| side.served).count()
    }

    /// Every port's name and the program's counters.
    pub(crate) fn counted(&self) -> Vec<Counted> {
        let pod_of = |side: &PodSide| side.served.then(|| side.last.pod.clone());
        let pods = self.pods.values().map(|side| (&side.open, pod_of(side)));
        let all = self.fixed.iter().map(|open| (open, None)).chain(pods);
        let counted = |(open, pod): (&Open, Option<ObjectKey>)| Counted {
            id: open.id,
            kind: open.port.kind,
            pod,
            mode: open.attached.mode().clone(),
            outcomes: open.attached.outcomes().ok(),
        };
        all.map(counted).collect()
    }
}

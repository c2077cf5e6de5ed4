//! Turns a pod's interface into a port: its programs lead to the workers' pairs.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, PortPath, PortRequest};
use penstock_xdp_redirect::{
    AttachError, Bridge, Filtered, Interface, PodVeth, ServedPort, SocketRedirect, TrafficCount, WorkerPair,
};

use super::OpenPorts;
use super::closed_interfaces::interface;
use crate::discovery::{Link, NetworkState, PodPort, WorkerVeth};

/// Why an interface could not be made a port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenPortError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Attach(#[from] AttachError),
}

/// The node's stack as a port.
pub(super) struct NodePort {
    pub(super) id: PortId,
    /// The node's end of the first pair.
    pub(super) interface: String,
    pub(super) port: Port,
}

/// A worker's pair as a port: the XDP program with the worker's socket at the far end, a tc program at the near one. Dropping it detaches
/// both.
pub(super) struct OpenPair {
    pub(super) id: PortId,
    pub(super) far: SocketRedirect,
    pub(super) near: WorkerPair,
}

/// A pod's interface. Once attached it stays so while it exists: after its pod is gone, its packets are dropped instead
/// of left to the kernel.
pub(super) struct PodAttachment {
    pub(super) id: PortId,
    /// Dropping it detaches the programs; [`OpenPorts`] closes the port.
    pub(super) veth: PodVeth,
    pub(super) port: Port,
    bridge: Option<Bridge>,
    /// The pod's port as last known; the pod may be gone.
    pub(super) last: PodPort,
    pub(super) served: bool,
}

/// Threads that attach to pods' interfaces at a time. The kernel waits for a grace period up to four times for each interface: for maps one
/// period serves all who wait (`maybe_wait_bpf_programs` in kernel/bpf/syscall.c), for programs one thread waits at a time ([`Haste`](crate::haste::Haste)).
const ATTACHING: usize = 16;

impl OpenPorts {
    /// Attaches to new interfaces, many at once, and closes them: those of a whole node come at a start. What fails is tried again when its
    /// port is opened.
    pub(super) fn attach_ahead(&mut self, netstate: &NetworkState, wanted: &BTreeMap<u32, PodPort>) {
        let is_new = |index: &&u32| {
            let is_attached = self.pods.contains_key(*index) || self.closed_interfaces.has(**index);
            !is_attached && !self.is_left_to_other(**index)
        };
        let links = wanted.keys().filter(is_new).filter_map(|index| netstate.links.get(index));
        let new: Vec<Interface> = links.map(interface).collect();
        if new.len() < 2 {
            return;
        }
        let programs = &self.programs;
        let attach = |part: &[Interface]| -> Vec<PodVeth> {
            part.iter().filter_map(|interface| programs.attach_pod(interface).ok()).collect()
        };
        let attached: Vec<PodVeth> = thread::scope(|scope| {
            let parts = new.chunks(new.len().div_ceil(ATTACHING));
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || attach(part))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
        });
        attached.into_iter().for_each(|veth| self.closed_interfaces.put(veth));
    }

    /// A port whose packets the programs send to the workers' pairs once the pod is served.
    pub(super) fn open_pod(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        bridge: Option<Bridge>,
        port: PodPort,
    ) -> Result<PodAttachment, OpenPortError> {
        let veth = match self.closed_interfaces.take(link.index) {
            Some(closed) => closed,
            None => self.programs.attach_pod(&interface(link))?,
        };
        let request = PortRequest::new(link.name.as_str(), PortPath::Pod);
        let id = match dataplane.open_port(&request) {
            Ok(id) => id,
            Err(error) => {
                // A closed interface stays closed.
                if self.closed_interfaces.closes() {
                    self.closed_interfaces.put(veth);
                }
                return Err(error.into());
            }
        };
        let mut attachment =
            PodAttachment { id, veth, port: forwarding_port(&port, id), bridge, last: port, served: true };
        attachment.update_programs();
        tracing::info!(pod = %attachment.last.pod, interface = attachment.last.name, port = %id, "attached");
        Ok(attachment)
    }

    /// Opens a worker's pair: the socket, the XDP program at its end, and the tc program at the node's.
    pub(super) fn open_pair(
        &mut self,
        dataplane: &Dataplane,
        worker: usize,
        pair: &WorkerVeth,
    ) -> Result<OpenPair, OpenPortError> {
        let request = PortRequest::new(pair.worker.name.as_str(), PortPath::PairOf(worker));
        let id = dataplane.open_port(&request)?;
        let far = dataplane.with_socket(id, |socket| SocketRedirect::attach(&interface(&pair.worker), socket))??;
        Ok(OpenPair { id, far, near: self.programs.attach_worker(&interface(&pair.node))? })
    }

    /// The node's stack as a port, through the workers' pairs.
    pub(super) fn open_node(&self, dataplane: &Dataplane, near: &Link) -> Result<NodePort, OpenPortError> {
        let request = PortRequest::new(near.name.as_str(), PortPath::Node);
        let id = dataplane.open_port(&request)?;
        let (own_mac, peer_mac) = PortRequest::macs(None);
        let port = Port::new(PortKind::Host, own_mac, peer_mac, mtu(near.mtu), Vec::new());
        Ok(NodePort { id, interface: near.name.clone(), port })
    }
}

impl PodAttachment {
    /// Traffic of the pod without a worker, sent and received.
    pub(super) fn offloaded(&self) -> [TrafficCount; 2] {
        // It fails only if the kernel has no memory for the answer.
        self.veth.offloaded().unwrap_or_default()
    }

    /// The pod is gone or no longer known to be behind the interface: everything that it sends is dropped.
    pub(super) fn release_pod(&mut self) {
        tracing::info!(pod = %self.last.pod, interface = self.last.name, "pod gone; its interface stays closed");
        self.served = false;
        self.port.addresses.clear();
        self.update_programs();
    }

    /// Tells the programs where the pod is, and limits it to its own addresses in ARP and neighbour discovery.
    fn update_programs(&mut self) {
        let PodPort { own_mac, peer_mac, name, shaping, .. } = &self.last;
        let (node_mac, bridge) = self.bridge.map_or((own_mac.0, 0), |bridge| (bridge.mac, bridge.index));
        let filtered = Filtered { to_pod: shaping.to_pod, from_pod: shaping.from_pod };
        let (port, pod_mac, mtu) = (self.id.0, peer_mac.0, self.port.mtu.into());
        if let Err(error) = self.veth.serve(&ServedPort { port, node_mac, pod_mac, bridge, mtu, filtered }) {
            tracing::error!(interface = name, %error, "the pod has no network");
        }
        let none = BTreeSet::new();
        let addresses = if self.served { &self.last.addresses } else { &none };
        if let Err(error) = self.veth.set_own_addresses(peer_mac.0, addresses) {
            tracing::error!(%error, "cannot set the pod's own addresses: it may claim others in ARP and neighbour discovery");
        }
    }

    pub(super) fn take(&mut self, port: PodPort) {
        self.port = forwarding_port(&port, self.id);
        self.last = port;
        self.served = true;
        self.update_programs();
    }
}

/// A pod's port as workers know it. The MAC addresses say which port a frame on a pair is for.
fn forwarding_port(port: &PodPort, id: PortId) -> Port {
    let (own_mac, peer_mac) = PortRequest::macs(Some(id));
    Port {
        kind: PortKind::Pod,
        own_mac,
        peer_mac,
        mtu: mtu(port.mtu),
        interface: port.link,
        by_stack: port.shaping.from_pod,
        bridge: if port.bridge.is_some() { port.enters_by } else { 0 },
        addresses: port.addresses.iter().copied().map(Address::from).collect(),
    }
}

/// An IP packet has at most 65535 bytes, whatever the interface's MTU is.
pub(super) fn mtu(mtu: u32) -> u16 {
    mtu.try_into().unwrap_or(u16::MAX)
}

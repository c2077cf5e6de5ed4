//! Turns an interface into a port: with XDP by sockets in the workers and a program on the interface, with tcx by programs
//! on the interface that lead to the workers' pairs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::thread;

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, PortPath, PortRequest};
use penstock_xdp_redirect::{
    AttachError, AttachOptions, Interface, ModeChoice, OnMiss, Role, SocketError, TcxMapError, XdpMode,
};

use super::OpenPorts;
use super::closed_interfaces::interface;
use super::programs::{InterfacePrograms, OpenPair, Programs};
use crate::discovery::{Link, NetworkState, PodPort, Shaping, WorkerVeth, keep_answering_arp};

/// Why an interface could not be made a port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenPortError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Map(#[from] TcxMapError),
}

/// An attached interface. Dropping it detaches the programs; [`OpenPorts`] closes the port.
pub(super) struct AttachedPort {
    pub(super) id: PortId,
    pub(super) programs: InterfacePrograms,
    pub(super) port: Port,
}

/// A pod's interface. Once attached it stays so while it exists: after its pod is gone, its packets are dropped instead
/// of left to the kernel.
pub(super) struct PodAttachment {
    pub(super) open: AttachedPort,
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
        let new: Vec<(Interface, AttachOptions)> = links
            .map(|link| (interface(link), AttachOptions { bridge: netstate.bridge(link), ..self.options(Role::Pod) }))
            .filter(|(_, options)| !self.programs.are_xdp() || self.stays_closed(options))
            .collect();
        if new.len() < 2 {
            return;
        }
        let programs = &self.programs;
        let attach = |part: &[(Interface, AttachOptions)]| -> Vec<InterfacePrograms> {
            part.iter().filter_map(|(interface, options)| programs.attach(interface, *options).ok()).collect()
        };
        let attached: Vec<InterfacePrograms> = thread::scope(|scope| {
            let parts = new.chunks(new.len().div_ceil(ATTACHING));
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || attach(part))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
        });
        for programs in attached {
            log_mode(&programs);
            self.closed_interfaces.put(programs);
        }
    }

    /// Whether a pod's interface with these programs is closed while it has no socket, and stays so if it gets none.
    fn stays_closed(&self, options: &AttachOptions) -> bool {
        options.role == Role::Pod && self.closed_interfaces.closes() && options.on_miss == OnMiss::Drop
    }

    pub(super) fn open_pod(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: PodPort,
    ) -> Result<PodAttachment, OpenPortError> {
        let open = match self.programs {
            Programs::Xdp { .. } => {
                let open = self.open(dataplane, link, options, |id, programs| forwarding_port(&port, id, programs))?;
                for name in std::iter::once(&port.name).chain(&port.bridge) {
                    // An interface that is gone already needs no setting.
                    if let Err(error) = keep_answering_arp(&mut self.settings, name, self.found_leftovers)
                        && error.kind() != io::ErrorKind::NotFound
                    {
                        tracing::warn!(interface = name, %error, "cannot loosen rp_filter: the pod's ARP may go unanswered");
                    }
                }
                open
            }
            Programs::Tcx { .. } => self.open_by_tcx(dataplane, link, options, &port)?,
        };
        let mut attachment = PodAttachment { open, last: port, served: true };
        attachment.update_programs();
        tracing::info!(pod = %attachment.last.pod, interface = attachment.last.name, port = %attachment.open.id, "attached");
        Ok(attachment)
    }

    /// A port whose packets the tcx programs take to the workers' pairs. They do so once the pod is served.
    fn open_by_tcx(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: &PodPort,
    ) -> Result<AttachedPort, OpenPortError> {
        let programs = self.attach(link, options)?;
        let request = PortRequest { path: PortPath::Pairs, ..PortRequest::new(link.name.as_str()) };
        match dataplane.open_port(&request) {
            Ok(id) => Ok(AttachedPort { id, port: forwarding_port(port, id, &programs), programs }),
            Err(error) => {
                // A closed interface stays closed.
                if self.closed_interfaces.closes() {
                    self.closed_interfaces.put(programs);
                }
                Err(error.into())
            }
        }
    }

    /// Opens a worker's pair: the socket, the XDP program at its end, and the tcx program at the node's.
    pub(super) fn open_pair(
        &mut self,
        dataplane: &Dataplane,
        worker: usize,
        pair: &WorkerVeth,
    ) -> Result<OpenPair, OpenPortError> {
        let Programs::Tcx { tcx, xdp } = &self.programs else { unreachable!("only tcx has pairs") };
        let request = PortRequest { path: PortPath::PairOf(worker), ..PortRequest::new(pair.worker.name.as_str()) };
        let id = dataplane.open_port(&request)?;
        let attached = xdp.attach(&interface(&pair.worker), AttachOptions::new(Role::Host))?;
        let given = dataplane.with_sockets(id, |sockets| {
            sockets.iter().try_for_each(|(queue, socket)| attached.set_socket(*queue, *socket))
        });
        given??;
        Ok(OpenPair { id, far: attached, near: tcx.attach_worker(&interface(&pair.node))? })
    }

    /// The node's stack as a port, through the workers' pairs.
    pub(super) fn open_node_by_pairs(&self, dataplane: &Dataplane, near: &Link) -> Result<AttachedPort, OpenPortError> {
        let request = PortRequest { path: PortPath::NodeByPairs, ..PortRequest::new(near.name.as_str()) };
        let id = dataplane.open_port(&request)?;
        let (own_mac, peer_mac) = PortRequest::macs(None);
        let port = Port::new(PortKind::Host, own_mac, peer_mac, mtu(near.mtu), Vec::new());
        Ok(AttachedPort { id, programs: InterfacePrograms::Pairs(interface(near)), port })
    }

    /// First the sockets, then the program, then the sockets into its map: until the last step packets are dropped.
    pub(super) fn open(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: impl FnOnce(PortId, &InterfacePrograms) -> Port,
    ) -> Result<AttachedPort, OpenPortError> {
        let request = PortRequest { patience: self.busy_limit, ..PortRequest::new(link.name.as_str()) };
        let id = dataplane.open_port(&request)?;
        if let Some(error) = dataplane.gso_refused(id) {
            tracing::warn!(
                interface = link.name,
                error,
                "TCP segments are sent one by one, which makes bulk TCP slower: allow packet sockets (AF_PACKET), or set workers.gso = false"
            );
        }
        let attached = self.attach(link, options).map_err(OpenPortError::from).and_then(|attached| {
            let given = match &attached {
                InterfacePrograms::Xdp { attached, .. } => dataplane.with_sockets(id, |sockets| {
                    sockets.iter().try_for_each(|(queue, socket)| attached.set_socket(*queue, *socket))
                }),
                InterfacePrograms::Tcx { .. } | InterfacePrograms::Pairs(_) => Ok(Ok(())),
            };
            match given.map_err(OpenPortError::from).and_then(|given| Ok(given?)) {
                Ok(()) => Ok(attached),
                Err(error) => {
                    // A closed interface stays closed.
                    if self.stays_closed(&options) {
                        self.closed_interfaces.put(attached);
                    }
                    Err(error)
                }
            }
        });
        match attached {
            Ok(programs) => Ok(AttachedPort { id, port: port(id, &programs), programs }),
            Err(error) => {
                if let Err(error) = dataplane.close_port(id) {
                    tracing::error!(interface = link.name, %error, "cannot close the port");
                }
                Err(error)
            }
        }
    }

    /// How to attach a port of this role. The host veth always prefers native mode: then the kernel segments what the
    /// other end sends.
    pub(super) fn options(&self, role: Role) -> AttachOptions {
        let mode = match role {
            Role::Pod | Role::Uplink => self.mode,
            Role::Host => ModeChoice::NativeElseGeneric,
        };
        AttachOptions { on_miss: self.on_miss, mode, ..AttachOptions::new(role) }
    }

    fn attach(&mut self, link: &Link, options: AttachOptions) -> Result<InterfacePrograms, AttachError> {
        // Reuses the programs that closed the interface if their options match; otherwise new ones replace them.
        match self.closed_interfaces.take(link.index) {
            Some(closed) if closed.options() == Some(options) => return Ok(closed),
            Some(closed) => closed.keep(),
            None => {}
        }
        let attached = self.programs.attach(&interface(link), options)?;
        log_mode(&attached);
        Ok(attached)
    }
}

impl PodAttachment {
    /// The pod is gone or no longer known to be behind the interface: everything that it sends is dropped.
    pub(super) fn release_pod(&mut self) {
        tracing::info!(pod = %self.last.pod, interface = self.last.name, "pod gone; its interface stays closed");
        self.served = false;
        self.open.port.addresses.clear();
        self.update_programs();
    }

    /// Tells the programs where the pod is, and limits it to its own addresses in ARP and neighbour discovery.
    fn update_programs(&mut self) {
        let PodPort { peer_mac, name, .. } = &self.last;
        if let Err(error) = self.open.programs.serve(self.open.id, self.open.port.mtu, &self.last) {
            tracing::error!(interface = name, %error, "the pod has no network");
        }
        let none = BTreeSet::new();
        let addresses = if self.served { &self.last.addresses } else { &none };
        if let Err(error) = self.open.programs.set_own_addresses(peer_mac.0, addresses) {
            tracing::error!(%error, "cannot set the pod's own addresses: it may claim others in ARP and neighbour discovery");
        }
    }

    pub(super) fn take(&mut self, port: PodPort) {
        self.open.port = forwarding_port(&port, self.open.id, &self.open.programs);
        self.last = port;
        self.served = true;
        self.update_programs();
    }
}

/// Logs the consequences of generic mode, or of a mode other than configured.
fn log_mode(programs: &InterfacePrograms) {
    let InterfacePrograms::Xdp { attached, .. } = programs else { return };
    let (interface, wanted) = (attached.interface(), attached.options());
    match attached.mode() {
        XdpMode::Generic { because } => {
            let reason = because.as_deref().unwrap_or("xdp.mode, now or when its link was pinned");
            let longer = match wanted.role {
                Role::Uplink => "take the kernel's path",
                Role::Pod | Role::Host => {
                    "are lost; switch segmentation offloads off on the other end (ethtool -K <interface> tso off gso off)"
                }
            };
            tracing::warn!(
                %interface,
                reason,
                "attached in generic mode: slower, and packets longer than a frame {longer}"
            );
        }
        XdpMode::Native if wanted.mode == ModeChoice::Generic => tracing::warn!(
            %interface,
            "stays in native mode, in which its link was pinned; run penstock cleanup before the next start for xdp.mode to count"
        ),
        XdpMode::Native => {}
    }
}

/// A pod's port as workers know it. Through the workers' pairs MAC addresses say which port a frame is for.
fn forwarding_port(port: &PodPort, id: PortId, programs: &InterfacePrograms) -> Port {
    let by_pairs = matches!(programs, InterfacePrograms::Tcx { .. });
    let (own_mac, peer_mac) = if by_pairs { PortRequest::macs(Some(id)) } else { (port.own_mac, port.peer_mac) };
    let filters = programs.filters_that_hold(port.shaping);
    Port {
        kind: PortKind::Pod,
        own_mac,
        peer_mac,
        mtu: mtu(port.mtu),
        interface: port.link,
        by_stack: filters.from_pod,
        by_host: (filters != Shaping::default() && !by_pairs).then_some(id),
        bridge: if port.bridge.is_some() { port.enters_by } else { 0 },
        addresses: port.addresses.iter().copied().map(Address::from).collect(),
    }
}

/// An IP packet has at most 65535 bytes, whatever the interface's MTU is.
pub(super) fn mtu(mtu: u32) -> u16 {
    mtu.try_into().unwrap_or(u16::MAX)
}

//! Turns an interface into a port: sockets in the workers, a program on the interface.

use std::collections::BTreeSet;

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, PortRequest};
use penstock_xdp_redirect::{AttachError, AttachOptions, Attached, ModeChoice, OnMiss, Role, SocketError, XdpMode};

use super::OpenPorts;
use crate::closed_interfaces::interface;
use crate::discovery::{Link, PodPort, keep_answering_arp};

/// Why an interface could not be made a port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenPortError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// An attached interface. Dropping it detaches the program; [`OpenPorts`] closes the port.
pub(super) struct AttachedPort {
    pub(super) id: PortId,
    pub(super) attached: Attached,
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

impl OpenPorts {
    pub(super) fn open_pod(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: PodPort,
    ) -> Result<PodAttachment, OpenPortError> {
        let open = self.open(dataplane, link, options, forwarding_port(&port))?;
        for name in std::iter::once(&port.name).chain(&port.bridge) {
            if let Err(error) = keep_answering_arp(&mut self.settings, name, self.found_leftovers) {
                tracing::warn!(interface = name, %error, "cannot loosen rp_filter: the pod's ARP may go unanswered");
            }
        }
        let attachment = PodAttachment { open, last: port, served: true };
        attachment.sync_own_addresses();
        tracing::info!(pod = %attachment.last.pod, interface = attachment.last.name, port = %attachment.open.id, "attached");
        Ok(attachment)
    }

    /// First the sockets, then the program, then the sockets into its map: until the last step packets are dropped.
    pub(super) fn open(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: Port,
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
            let given = dataplane.with_sockets(id, |sockets| {
                sockets.iter().try_for_each(|(queue, socket)| attached.set_socket(*queue, *socket))
            });
            match given.map_err(OpenPortError::from).and_then(|given| Ok(given?)) {
                Ok(()) => Ok(attached),
                Err(error) => {
                    // A closed interface stays closed.
                    if options.role == Role::Pod && self.closed_interfaces.closes() && options.on_miss == OnMiss::Drop {
                        self.closed_interfaces.put(attached);
                    }
                    Err(error)
                }
            }
        });
        match attached {
            Ok(attached) => Ok(AttachedPort { id, attached, port }),
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

    fn attach(&mut self, link: &Link, options: AttachOptions) -> Result<Attached, AttachError> {
        // Reuses the program that closed the interface if its options match; otherwise the new program replaces it.
        match self.closed_interfaces.take(link.index) {
            Some(closed) if closed.options() == options => return Ok(closed),
            Some(closed) => closed.keep(),
            None => {}
        }
        let attached = self.redirect.attach(&interface(link), options)?;
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
        self.sync_own_addresses();
    }

    /// Limits the pod to its own addresses in ARP and neighbour discovery.
    fn sync_own_addresses(&self) {
        let none = BTreeSet::new();
        let addresses = if self.served { &self.last.addresses } else { &none };
        if let Err(error) = self.open.attached.set_own_addresses(self.last.peer_mac.0, addresses) {
            tracing::error!(%error, "cannot set the pod's own addresses: it may claim others in ARP and neighbour discovery");
        }
    }

    pub(super) fn take(&mut self, port: PodPort) {
        self.open.port = forwarding_port(&port);
        self.last = port;
        self.served = true;
        self.sync_own_addresses();
    }
}

/// Logs the consequences of generic mode, or of a mode other than configured.
fn log_mode(attached: &Attached) {
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

fn forwarding_port(port: &PodPort) -> Port {
    Port {
        kind: PortKind::Pod,
        own_mac: port.own_mac,
        peer_mac: port.peer_mac,
        mtu: mtu(port.mtu),
        addresses: port.addresses.iter().copied().map(Address::from).collect(),
    }
}

/// An IP packet has at most 65535 bytes, whatever the interface's MTU is.
pub(super) fn mtu(mtu: u32) -> u16 {
    mtu.try_into().unwrap_or(u16::MAX)
}

//! How an interface is made a port: sockets in the workers, a program on the interface.

use std::collections::BTreeSet;

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, PortRequest};
use penstock_xdp_redirect::{AttachError, AttachOptions, Attached, ModeChoice, OnMiss, Role, SocketError, XdpMode};

use super::Ports;
use crate::discovery::{Link, PodPort, keep_answering_arp};
use crate::waiting::interface;

/// Why an interface could not be made a port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// An interface whose packets the workers get. Dropping it detaches the program; the port is closed by [`Ports`].
pub(super) struct Open {
    pub(super) id: PortId,
    pub(super) attached: Attached,
    pub(super) port: Port,
}

/// A pod's interface. Once attached it stays so while it exists: if its pod goes first, its packets are dropped, not
/// left to the kernel.
pub(super) struct PodSide {
    pub(super) open: Open,
    /// What was last known of it; its pod may be gone.
    pub(super) last: PodPort,
    pub(super) served: bool,
}

impl Ports {
    pub(super) fn open_pod(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: PodPort,
    ) -> Result<PodSide, OpenError> {
        let open = self.open(dataplane, link, options, forwarding_port(&port))?;
        for name in std::iter::once(&port.name).chain(&port.bridge) {
            if let Err(error) = keep_answering_arp(&mut self.settings, name, self.follows) {
                tracing::warn!(interface = name, %error, "rp_filter could not be loosened: the pod's ARP may go unanswered");
            }
        }
        let side = PodSide { open, last: port, served: true };
        side.tell_own();
        tracing::info!(pod = %side.last.pod, interface = side.last.name, port = %side.open.id, "attached");
        Ok(side)
    }

    /// Sockets first, then the program, then the sockets into its map: until the last step packets are dropped.
    pub(super) fn open(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: Port,
    ) -> Result<Open, OpenError> {
        let request = PortRequest { patience: self.patience, ..PortRequest::new(link.name.as_str()) };
        let id = dataplane.open_port(&request)?;
        if let Some(error) = dataplane.gso_refused(id) {
            tracing::warn!(
                interface = link.name,
                error,
                "TCP segments leave one by one, which makes bulk TCP slower: allow packet sockets (AF_PACKET), or set workers.gso = false"
            );
        }
        let attached = self.attach(link, options).map_err(OpenError::from).and_then(|attached| {
            let given = dataplane.with_sockets(id, |sockets| {
                sockets.iter().try_for_each(|(queue, socket)| attached.set_socket(*queue, *socket))
            });
            match given.map_err(OpenError::from).and_then(|given| Ok(given?)) {
                Ok(()) => Ok(attached),
                Err(error) => {
                    // What was closed stays closed.
                    if options.role == Role::Pod && self.waiting.closes() && options.on_miss == OnMiss::Drop {
                        self.waiting.put(attached);
                    }
                    Err(error)
                }
            }
        });
        match attached {
            Ok(attached) => Ok(Open { id, attached, port }),
            Err(error) => {
                if let Err(error) = dataplane.close_port(id) {
                    tracing::error!(interface = link.name, %error, "port could not be closed");
                }
                Err(error)
            }
        }
    }

    /// How a port of this role is attached. The host port's pair is a veth of our own, whose other end has what it sends cut
    /// into segments as long as the program is native.
    pub(super) fn options(&self, role: Role) -> AttachOptions {
        let mode = match role {
            Role::Pod | Role::Uplink => self.mode,
            Role::Host => ModeChoice::NativeElseGeneric,
        };
        AttachOptions { on_miss: self.on_miss, mode, ..AttachOptions::new(role) }
    }

    fn attach(&mut self, link: &Link, options: AttachOptions) -> Result<Attached, AttachError> {
        // The program that closes it is the one that serves it, if it would be the same; else it gives its place.
        match self.waiting.take(link.index) {
            Some(closed) if closed.options() == options => return Ok(closed),
            Some(closed) => closed.keep(),
            None => {}
        }
        let attached = self.redirect.attach(&interface(link), options)?;
        tell_mode(&attached);
        Ok(attached)
    }
}

impl PodSide {
    /// Its pod is gone, or is not known to be behind it any more: whatever it sends is dropped.
    pub(super) fn give_up(&mut self) {
        tracing::info!(pod = %self.last.pod, interface = self.last.name, "pod gone; its interface stays closed");
        self.served = false;
        self.open.port.addresses.clear();
        self.tell_own();
    }

    /// Has the program hold the pod to its own addresses in ARP and neighbour discovery.
    fn tell_own(&self) {
        let none = BTreeSet::new();
        let addresses = if self.served { &self.last.addresses } else { &none };
        if let Err(error) = self.open.attached.set_own_addresses(self.last.peer_mac.0, addresses) {
            tracing::error!(%error, "the pod may speak for others in ARP and neighbour discovery");
        }
    }

    pub(super) fn take(&mut self, port: PodPort) {
        self.open.port = forwarding_port(&port);
        self.last = port;
        self.served = true;
        self.tell_own();
    }
}

/// Says what follows from where a program runs, unless that is the driver, as it should be.
fn tell_mode(attached: &Attached) {
    let (interface, wanted) = (attached.interface(), attached.options());
    match attached.mode() {
        XdpMode::Generic { because } => {
            let reason = because.as_deref().unwrap_or("xdp.mode, now or when its link was pinned");
            let longer = match wanted.role {
                Role::Uplink => "go by the kernel",
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

/// No IP packet is longer than 65535 octets, whatever an interface says.
pub(super) fn mtu(mtu: u32) -> u16 {
    mtu.try_into().unwrap_or(u16::MAX)
}

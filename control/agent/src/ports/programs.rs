//! The programs on interfaces, by `attach`: XDP on what pods send, with tcx beside it where the kernel has that, or tcx on all with XDP on the
//! far ends of the workers' pairs.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use penstock_dataplane::forward::PortId;
use penstock_xdp_redirect::{
    AttachError, AttachOptions, Attached, AttachedUplink, Entrances, FilterWatch, Filtered, Interface,
    OwnAddressesError, Pinned, PinnedProgram, Pins, PodVeth, ProgramOutcomeCounts, Redirect, Role, ServedPort,
    TcxMapError, TcxPrograms, TrafficCount, WorkerPair, XdpMode,
};

use crate::discovery::{PodPort, Shaping};

/// The loaded programs.
pub(crate) enum Programs {
    /// `attach = "xdp"`.
    Xdp {
        /// On what pods send.
        redirect: Redirect,
        /// Where the kernel has tcx.
        beside: Option<ProgramsBesideXdp>,
    },
    /// `attach = "tcx"`.
    Tcx {
        /// At pods' veths and the near ends of the pairs.
        tcx: TcxPrograms,
        /// At the far ends of the pairs.
        xdp: Redirect,
    },
}

/// The tcx programs beside XDP: on what pods get past the node's routes, on uplinks, and at the node's end of the host veth.
pub(crate) struct ProgramsBesideXdp {
    pub(crate) tcx: TcxPrograms,
    pub(crate) host_veth: WorkerPair,
}

impl Programs {
    /// The filters, where the kernel has no tcx.
    pub(super) fn filter_watch(&self) -> Option<&FilterWatch> {
        self.tcx()?.filter_watch().map(|watch| &**watch)
    }

    /// The tcx programs.
    pub(super) fn tcx(&self) -> Option<&TcxPrograms> {
        match self {
            Self::Xdp { beside, .. } => beside.as_ref().map(|beside| &beside.tcx),
            Self::Tcx { tcx, .. } => Some(tcx),
        }
    }

    /// With XDP: index of the node's end of the host veth, if it has tcx programs.
    pub(super) fn host_veth(&self) -> Option<u32> {
        match self {
            Self::Xdp { beside, .. } => beside.as_ref().map(|beside| beside.host_veth.interface().index),
            Self::Tcx { .. } => None,
        }
    }

    /// Whether programs on what pods send are XDP.
    pub(super) fn are_xdp(&self) -> bool {
        matches!(self, Self::Xdp { .. })
    }

    /// Whether these programs have such pins. A daemon with the other `attach` may have left others.
    pub(super) fn include(&self, pinned: PinnedProgram) -> bool {
        match (self, pinned) {
            (Self::Xdp { .. }, PinnedProgram::Xdp(_)) => true,
            (Self::Xdp { beside, .. }, PinnedProgram::ToPod) => beside.is_some(),
            (Self::Xdp { .. }, _) => false,
            (Self::Tcx { .. }, pinned) => !matches!(pinned, PinnedProgram::Xdp(_)),
        }
    }

    /// The pins of the programs at pods' veths, if links are pinned.
    pub(crate) fn pins(&self) -> Option<&Pins> {
        match self {
            Self::Xdp { redirect, .. } => redirect.pins(),
            Self::Tcx { tcx, .. } => tcx.pins(),
        }
    }

    /// The sockets whose closing tells programs that the process is gone.
    pub(super) fn alive(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let by_xdp = match self {
            Self::Xdp { redirect, .. } => Some(redirect.alive()),
            Self::Tcx { .. } => None,
        };
        by_xdp.into_iter().chain(self.tcx().map(TcxPrograms::alive))
    }

    /// Attaches to a pod's veth, or with XDP to another interface. Until it is served everything is dropped.
    pub(super) fn attach(
        &self,
        interface: &Interface,
        options: AttachOptions,
    ) -> Result<InterfacePrograms, AttachError> {
        Ok(match self {
            Self::Xdp { redirect, beside } => {
                let attached = redirect.attach(interface, options)?;
                let beside = beside.as_ref().filter(|_| options.role == Role::Pod);
                let veth = beside.map(|beside| beside.tcx.attach_pod(interface)).transpose()?;
                // penstock-cni closes new interfaces by tcx.
                let left = [PinnedProgram::FromPod, PinnedProgram::ToPod].into_iter();
                for program in left.filter(|program| !self.include(*program)) {
                    redirect
                        .pins()
                        .into_iter()
                        .for_each(|pins| pins.remove(Pinned { program, interface: interface.index }));
                }
                InterfacePrograms::Xdp { attached: Box::new(attached), veth, options }
            }
            Self::Tcx { tcx, .. } => InterfacePrograms::Tcx { veth: tcx.attach_pod(interface)?, options },
        })
    }

    /// From now on these programs run where an earlier daemon left its own.
    pub(super) fn take_over<'a>(
        &self,
        uplinks: impl IntoIterator<Item = &'a mut AttachedUplink>,
        interfaces: impl IntoIterator<Item = &'a mut InterfacePrograms>,
    ) -> Result<(), AttachError> {
        let Self::Tcx { tcx, .. } = self else { return Ok(()) };
        let veths = interfaces.into_iter().filter_map(|programs| match programs {
            InterfacePrograms::Tcx { veth, .. } => Some(veth),
            InterfacePrograms::Xdp { .. } | InterfacePrograms::Pairs(_) => None,
        });
        tcx.take_over(uplinks, veths)
    }

    /// Packets that the programs forwarded without a worker ([`TcxPrograms::offloaded`]).
    pub(crate) fn offloaded(&self) -> Option<[TrafficCount; 5]> {
        match self {
            Self::Xdp { .. } => None,
            Self::Tcx { tcx, .. } => tcx.offloaded().ok(),
        }
    }

    /// Marks an address as a local pod's. The longest frame for it matters to uplinks, and is 0 for a pod without a port.
    /// `by`: the interfaces by which the pod's packets come in.
    pub(super) fn announce(
        &self,
        address: IpAddr,
        longest: u16,
        by: Option<Entrances>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        if let Self::Xdp { redirect, .. } = self {
            redirect.local_pods().insert(address, longest)?;
        }
        Ok(self.tcx().map_or(Ok(()), |tcx| tcx.set_pod_address(address, by))?)
    }

    /// Withdraws an address that is no local pod's any more.
    pub(super) fn retract(&self, address: IpAddr) -> Result<(), Box<dyn std::error::Error>> {
        if let Self::Xdp { redirect, .. } = self {
            redirect.local_pods().remove(address)?;
        }
        Ok(self.tcx().map_or(Ok(()), |tcx| tcx.remove_pod_address(address))?)
    }
}

/// How an interface is attached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum AttachMode {
    Xdp(XdpMode),
    Tcx,
}

impl fmt::Display for AttachMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xdp(mode) => mode.fmt(f),
            Self::Tcx => f.pad("tcx"),
        }
    }
}

/// The programs on one interface. Dropping it detaches them.
pub(crate) enum InterfacePrograms {
    Xdp {
        attached: Box<Attached>,
        /// On what a pod gets, where the kernel has tcx.
        veth: Option<PodVeth>,
        options: AttachOptions,
    },
    Tcx {
        veth: PodVeth,
        options: AttachOptions,
    },
    /// The node's stack through the workers' pairs, which have the programs.
    Pairs(Interface),
}

impl InterfacePrograms {
    pub(crate) fn interface(&self) -> &Interface {
        match self {
            Self::Xdp { attached, .. } => attached.interface(),
            Self::Tcx { veth, .. } => veth.interface(),
            Self::Pairs(interface) => interface,
        }
    }

    /// The options that it was attached with, where they matter.
    pub(super) fn options(&self) -> Option<AttachOptions> {
        match self {
            Self::Xdp { options, .. } | Self::Tcx { options, .. } => Some(*options),
            Self::Pairs(_) => None,
        }
    }

    pub(crate) fn mode(&self) -> AttachMode {
        match self {
            Self::Xdp { attached, .. } => AttachMode::Xdp(attached.mode().clone()),
            Self::Tcx { .. } | Self::Pairs(_) => AttachMode::Tcx,
        }
    }

    pub(crate) fn outcomes(&self) -> Option<ProgramOutcomeCounts> {
        match self {
            Self::Xdp { attached, veth, .. } => {
                let received = veth.as_ref().and_then(|veth| veth.outcomes().ok()).unwrap_or_default();
                attached.outcomes().ok().map(|sent| sent.and(received))
            }
            Self::Tcx { veth, .. } => veth.outcomes().ok(),
            Self::Pairs(_) => Some(ProgramOutcomeCounts::default()),
        }
    }

    /// Traffic of the pod without a worker, sent and received.
    pub(super) fn offloaded(&self) -> [TrafficCount; 2] {
        match self {
            // Only if the kernel has no memory for the answer.
            Self::Tcx { veth, .. } => veth.offloaded().unwrap_or_default(),
            Self::Xdp { .. } | Self::Pairs(_) => Default::default(),
        }
    }

    /// Limits the pod behind it to its own addresses in ARP and neighbour discovery.
    pub(super) fn set_own_addresses(
        &self,
        mac: [u8; 6],
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<(), OwnAddressesError> {
        match self {
            Self::Xdp { attached, .. } => attached.set_own_addresses(mac, addresses),
            Self::Tcx { veth, .. } => veth.set_own_addresses(mac, addresses),
            Self::Pairs(_) => Ok(()),
        }
    }

    /// The tcx programs of a pod's interface, with the options that it was attached with.
    fn veth_mut(&mut self) -> Option<(&mut PodVeth, AttachOptions)> {
        match self {
            Self::Xdp { veth: Some(veth), options, .. } | Self::Tcx { veth, options } => Some((veth, *options)),
            Self::Xdp { veth: None, .. } | Self::Pairs(_) => None,
        }
    }

    /// To tcx programs its packets are those of this port from now on.
    pub(super) fn serve(&mut self, port: PortId, mtu: u16, pod: &PodPort) -> Result<(), TcxMapError> {
        let Shaping { to_pod, from_pod } = self.filters_that_hold(pod.shaping);
        let Some((veth, options)) = self.veth_mut() else { return Ok(()) };
        let (node_mac, bridge) = options.bridge.map_or((pod.own_mac.0, 0), |bridge| (bridge.mac, bridge.index));
        let filtered = Filtered { to_pod, from_pod };
        let (port, pod_mac) = (port.0, pod.peer_mac.0);
        veth.serve(&ServedPort { port, node_mac, pod_mac, bridge, mtu: mtu.into(), filtered })
    }

    /// Those of others' queueing disciplines and filters on a pod's interface by which its packets can go. What a pod has sent would meet a generic
    /// XDP program again on that way.
    pub(super) fn filters_that_hold(&self, found: Shaping) -> Shaping {
        match self {
            Self::Xdp { veth: None, .. } | Self::Pairs(_) => Shaping::default(),
            Self::Xdp { attached, .. } if *attached.mode() != XdpMode::Native => Shaping { from_pod: false, ..found },
            Self::Xdp { .. } | Self::Tcx { .. } => found,
        }
    }

    /// With tcx: whether programs leave all packets of the pod to the workers.
    pub(super) fn set_captured(&mut self, is_captured: bool) -> Result<(), TcxMapError> {
        match self {
            Self::Tcx { veth, .. } => veth.set_captured(is_captured),
            Self::Xdp { .. } | Self::Pairs(_) => Ok(()),
        }
    }

    /// Leaves pinned programs attached.
    pub(super) fn keep(self) {
        match self {
            Self::Xdp { attached, veth, .. } => {
                attached.keep();
                veth.into_iter().for_each(PodVeth::keep);
            }
            Self::Tcx { veth, .. } => veth.keep(),
            Self::Pairs(_) => {}
        }
    }
}

/// A worker's pair as a port: the XDP program with the worker's socket at the far end, tcx at the near one.
pub(super) struct OpenPair {
    pub(super) id: PortId,
    pub(super) far: Attached,
    pub(super) near: WorkerPair,
}

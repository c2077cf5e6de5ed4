//! The programs at a pod's veth.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::{Maps, TcxLink, TcxMapError, TcxPrograms, TrafficCount, new_outcomes, new_own_addresses, sums};
use crate::{AttachError, Interface, LoadError, OwnAddressesError, ProgramOutcomeCounts, own_addresses};

/// A pod as the programs must know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServedPort {
    /// The number that workers know it by; below [`MAX_TCX_PORTS`](super::MAX_TCX_PORTS).
    pub port: u16,
    /// MAC of the node towards the pod: that of the veth's end, or of the bridge that it is a port of.
    pub node_mac: [u8; 6],
    /// MAC of the pod's end.
    pub pod_mac: [u8; 6],
    /// Index of the bridge that the interface belongs to, or 0.
    pub bridge: u32,
    /// Longest IP packet to the pod, in bytes.
    pub mtu: u32,
    /// Others' queueing disciplines and filters on the veth, which its packets must meet.
    pub filtered: Filtered,
}

/// Where others have queueing disciplines or filters on a pod's interface: limits of bandwidth, for example.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Filtered {
    /// On what the node sends to the pod.
    pub to_pod: bool,
    /// On what the pod sends.
    pub from_pod: bool,
}

impl Filtered {
    /// `FILTERS_…` in `src/bpf/tcx_maps.h`.
    fn flags(self) -> u8 {
        u8::from(self.to_pod) | u8::from(self.from_pod) << 1
    }
}

/// Size of `struct interface` and of `struct target` in `src/bpf/tcx_maps.h`.
const INTERFACE: usize = 24;
pub(super) const TARGET: usize = 20;

impl ServedPort {
    fn interface(&self, is_captured: bool) -> [u8; INTERFACE] {
        let mut bytes = [0; INTERFACE];
        bytes[..2].copy_from_slice(&self.port.to_ne_bytes());
        bytes[2] = self.filtered.flags();
        bytes[3] = is_captured.into();
        bytes[4..10].copy_from_slice(&self.node_mac);
        bytes[10..16].copy_from_slice(&self.pod_mac);
        bytes[16..20].copy_from_slice(&self.mtu.to_ne_bytes());
        bytes[20..].copy_from_slice(&self.bridge.to_ne_bytes());
        bytes
    }

    fn target(&self, interface: u32) -> [u8; TARGET] {
        let mut bytes = [0; TARGET];
        bytes[..4].copy_from_slice(&interface.to_ne_bytes());
        bytes[4..10].copy_from_slice(&self.node_mac);
        bytes[10..16].copy_from_slice(&self.pod_mac);
        bytes[16..].copy_from_slice(&u32::from(self.filtered.flags()).to_ne_bytes());
        bytes
    }
}

/// The node's end of a pod's veth with its programs attached. Dropping it detaches them.
#[derive(Debug)]
pub struct PodVeth {
    interface: Interface,
    maps: Arc<Maps>,
    own: MapHandle,
    outcomes: MapHandle,
    served: Option<ServedPort>,
    /// Whether workers must see all of its packets.
    is_captured: bool,
    /// That of what the pod sends, and that of what the node's stack sends to it.
    links: Vec<TcxLink>,
    is_kept: bool,
}

impl TcxPrograms {
    /// Attaches to the node's end of a pod's veth, in the calling thread's network namespace. Everything except address
    /// resolution is dropped until [`PodVeth::serve`]. Pinned links of this interface are taken over: no packet passes
    /// meanwhile that the old programs would have dropped. They run until [`TcxPrograms::take_over`].
    pub fn attach_pod(&self, interface: &Interface) -> Result<PodVeth, AttachError> {
        let kernel = |source: libbpf_rs::Error| AttachError::Load {
            interface: interface.name.clone(),
            source: LoadError::new("the maps of an interface", source),
        };
        let (own, outcomes) = (new_own_addresses().map_err(kernel)?, new_outcomes().map_err(kernel)?);
        let index = interface.index.to_ne_bytes();
        self.maps.interfaces_remove(interface.index);
        for (map, inner) in [(&self.maps.own_addresses, &own), (&self.maps.outcomes, &outcomes)] {
            map.update(&index, &inner.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY).map_err(kernel)?;
        }
        // That for packets of the pod first: until both are attached, nothing that it sends passes.
        let attached =
            self.at_pods.iter().map(|(pinned, program, hook)| self.attach(interface, *pinned, program, *hook));
        let links = attached.collect::<Result<_, _>>()?;
        let mut veth = PodVeth {
            interface: interface.clone(),
            maps: Arc::clone(&self.maps),
            own,
            outcomes,
            served: None,
            is_captured: false,
            links,
            is_kept: false,
        };
        if self.is_live.load(Ordering::Relaxed) {
            self.take_over_veth(&mut veth)?;
        }
        Ok(veth)
    }

    pub(super) fn take_over_veth(&self, veth: &mut PodVeth) -> Result<(), AttachError> {
        for (link, (_, program, hook)) in veth.links.iter_mut().zip(&self.at_pods) {
            self.take_over_link(link, &veth.interface, program, *hook)?;
        }
        Ok(())
    }
}

impl PodVeth {
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// From now on packets go to the workers as those of this port, and the workers' packets for this port to the pod.
    pub fn serve(&mut self, served: &ServedPort) -> Result<(), TcxMapError> {
        if self.served.is_some_and(|before| before.port != served.port) {
            self.stop_serving();
        }
        let forget = if self.served.is_none() { self.maps.clear_offloaded(served.port) } else { Ok(()) };
        // First the way to the pod: an answer may come at once.
        let target = served.target(self.interface.index);
        let set = forget.and_then(|()| self.maps.set_target(served.port, &target)).and_then(|()| {
            self.served = Some(*served);
            self.set_interface(served)
        });
        set.map_err(|source| self.failed(source))
    }

    /// From now on programs leave all packets of the pod to the workers, also those of established connections, or do so no
    /// longer. It ends with the process ([`TcxPrograms::alive`]).
    pub fn set_captured(&mut self, is_captured: bool) -> Result<(), TcxMapError> {
        if self.is_captured == is_captured {
            return Ok(());
        }
        self.is_captured = is_captured;
        let set = self.served.map_or(Ok(()), |served| self.set_interface(&served));
        set.map_err(|source| {
            self.is_captured = !is_captured;
            self.failed(source)
        })
    }

    fn set_interface(&self, served: &ServedPort) -> Result<(), libbpf_rs::Error> {
        let index = self.interface.index.to_ne_bytes();
        self.maps.interfaces.update(&index, &served.interface(self.is_captured), MapFlags::ANY)
    }

    fn failed(&self, source: libbpf_rs::Error) -> TcxMapError {
        TcxMapError { thing: format!("interface {}", self.interface), source }
    }

    /// From now on every packet is dropped, except address resolution.
    pub fn stop_serving(&mut self) {
        self.maps.interfaces_remove(self.interface.index);
        if let Some(served) = self.served.take()
            && let Err(error) = self.maps.set_target(served.port, &[0; TARGET])
        {
            tracing::error!(interface = %self.interface, %error, "cannot take the port from the tcx programs");
        }
    }

    /// Sets MAC and addresses of the pod: ARP and neighbour discovery that claim others are dropped. Before the first call
    /// the programs cannot verify them.
    pub fn set_own_addresses(&self, mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Result<(), OwnAddressesError> {
        own_addresses::set(&self.own, mac, addresses)
            .map_err(|source| OwnAddressesError { interface: self.interface.name.clone(), source })
    }

    /// Packets that the pod sent and received without a worker, since it is served.
    pub fn offloaded(&self) -> Result<[TrafficCount; 2], libbpf_rs::Error> {
        match self.served {
            Some(served) => sums(&self.maps.offloaded_ports, served.port.into()),
            None => Ok(Default::default()),
        }
    }

    /// Counters of its programs, by outcome.
    pub fn outcomes(&self) -> Result<ProgramOutcomeCounts, libbpf_rs::Error> {
        ProgramOutcomeCounts::read(&self.outcomes)
    }

    /// Leaves the programs attached if they are pinned, with what they know of the interface; otherwise detaches them.
    pub fn keep(mut self) {
        self.links.iter_mut().for_each(|link| link.link.keep());
        self.is_kept = self.links.iter().all(|link| link.link.pin.is_some());
    }
}

impl Drop for PodVeth {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        self.stop_serving();
        for map in [&self.maps.own_addresses, &self.maps.outcomes] {
            // It may be gone already.
            let _ = map.delete(&self.interface.index.to_ne_bytes());
        }
    }
}

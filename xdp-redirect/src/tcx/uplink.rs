//! Interfaces to other machines: what a pod sent to its node or to a Service, and the node's stack sends on, goes to a worker first. What comes in
//! there is dropped if it is a tunnel packet of another node's pod.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::libbpf_sys::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use libbpf_rs::{MapCore, MapFlags};

use super::{Maps, TcxLink, TcxMapError, TcxPrograms};
use crate::pins::PinnedProgram;
use crate::{AttachError, Interface, LoadError};

const ETHERNET_HEADER: u32 = 14;

/// The number by which workers know an uplink: as many as `MAX_UPLINKS` in `src/bpf/tcx_maps.h`.
pub type UplinkNumber = u8;
/// The number of all uplinks for which there is no other: what workers let pass there is dropped.
pub const NO_UPLINK_NUMBER: UplinkNumber = UplinkNumber::MAX;

/// A destination of a pod on another machine, as the node sends it on: `struct destination` in `src/bpf/tcx_maps.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    pub address: IpAddr,
    pub to_port: u16,
    /// The pod's, by its number.
    pub port: u16,
    pub protocol: u8,
}

impl Destination {
    fn of_key(key: &[u8]) -> Option<Self> {
        let (address, rest) = key.split_first_chunk()?;
        let &[high, low, port_0, port_1, p0, p1, p2, p3] = rest else { return None };
        Some(Self {
            address: Ipv6Addr::from(*address).to_canonical(),
            to_port: u16::from_be_bytes([high, low]),
            port: u16::from_ne_bytes([port_0, port_1]),
            protocol: u32::from_ne_bytes([p0, p1, p2, p3]).try_into().ok()?,
        })
    }
}

impl TcxPrograms {
    /// Gives an epoch to the destinations that workers have allowed under older ones, where policy still allows them: until the next daemon
    /// starts, no worker renews them. The rest stay closed.
    ///
    /// # Errors
    /// The kernel doesn't write the map.
    pub fn renew_allowed_to_leave(
        &self,
        epoch: u32,
        is_allowed: impl Fn(&Destination) -> bool,
    ) -> Result<(), TcxMapError> {
        let map = &self.maps.allowed_to_leave;
        let failed = |source| TcxMapError { thing: "destinations that pods may send to".to_owned(), source };
        // The programs of uplinks go on to write: then the kernel may begin again with its first key.
        for key in map.keys().take(map.max_entries() as usize) {
            let is_kept = Destination::of_key(&key).is_some_and(|destination| is_allowed(&destination));
            let value = if is_kept { map.lookup(&key, MapFlags::ANY).map_err(failed)? } else { None };
            // `struct allowed`; the tick says nothing without a daemon.
            if let Some(mut value) = value {
                value[..4].copy_from_slice(&epoch.to_ne_bytes());
                map.update(&key, &value, MapFlags::ANY).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// An interface to other machines with its programs. Dropping it detaches them.
#[derive(Debug)]
pub struct AttachedUplink {
    interface: Interface,
    number: UplinkNumber,
    header: u32,
    /// The longest packet that may pass the node's stack by.
    longest: u32,
    maps: Arc<Maps>,
    /// That on what leaves, and that on what comes in.
    links: Vec<TcxLink>,
    is_kept: bool,
}

impl AttachedUplink {
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    pub fn number(&self) -> UplinkNumber {
        self.number
    }

    /// From now on packets of pods of at most this length, in bytes, may leave and enter there past the node's stack
    /// ([`super::TcxOptions::host_routing`]); 0, as after it is attached: none. An interface without an Ethernet header has none.
    pub fn set_longest(&mut self, longest: u32) -> Result<(), TcxMapError> {
        let longest = if self.header == 0 { 0 } else { longest };
        if self.longest == longest {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.longest, longest);
        self.set_entry().map_err(|source| {
            self.longest = before;
            TcxMapError { thing: format!("uplink {}", self.interface), source }
        })
    }

    /// Whether packets may pass the node's stack by there.
    pub fn has_way(&self) -> bool {
        self.header != 0
    }

    fn set_entry(&self) -> Result<(), libbpf_rs::Error> {
        let words = [self.number.into(), self.header, self.longest];
        let value: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        self.maps.uplinks.update(&self.interface.index.to_ne_bytes(), &value, MapFlags::ANY)
    }

    /// Leaves the programs attached if they are pinned, with what they know of the interface; otherwise detaches them.
    pub fn keep(mut self) {
        self.links.iter_mut().for_each(|link| link.link.keep());
        self.is_kept = !self.links.is_empty() && self.links.iter().all(|link| link.link.pin.is_some());
    }
}

impl Drop for AttachedUplink {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // The programs first: without the entries one drops everything.
        self.links.clear();
        let _ = self.maps.uplinks.delete(&self.interface.index.to_ne_bytes());
        let _ = self.maps.set_uplink_interface(self.number, 0);
    }
}

impl TcxPrograms {
    /// Attaches to an interface to other machines, in the calling thread's network namespace: packets of local pods that the node has
    /// translated, or has not although they are to a Service, go to the workers, and tunnel packets of other nodes' pods that would end at the
    /// node are dropped. No other attached uplink has this number, unless it is [`NO_UPLINK_NUMBER`].
    /// `has_ethernet`: whether frames there have an Ethernet header. Pinned links of this interface are taken over, and run the
    /// earlier programs until [`TcxPrograms::take_over`].
    pub fn attach_uplink(
        &self,
        interface: &Interface,
        number: UplinkNumber,
        has_ethernet: bool,
    ) -> Result<AttachedUplink, AttachError> {
        let (interface, maps) = (interface.clone(), Arc::clone(&self.maps));
        let header = if has_ethernet { ETHERNET_HEADER } else { 0 };
        let mut uplink =
            AttachedUplink { interface, number, header, longest: 0, maps, links: Vec::new(), is_kept: false };
        let set = self.maps.set_uplink_interface(number, uplink.interface.index);
        let set = set.and_then(|()| uplink.set_entry());
        set.map_err(|source| AttachError::Load {
            interface: uplink.interface.name.clone(),
            source: LoadError::new("the maps of an uplink", source),
        })?;
        for (pinned, program, hook) in [
            (PinnedProgram::ToUplink, &self.to_uplink, BPF_TCX_EGRESS),
            (PinnedProgram::FromUplink, &self.from_uplink, BPF_TCX_INGRESS),
        ] {
            let link = self.attach(&uplink.interface, pinned, program, hook)?;
            uplink.links.push(link);
        }
        if self.is_live.load(Ordering::Relaxed) {
            self.take_over_uplink(&mut uplink)?;
        }
        Ok(uplink)
    }

    pub(super) fn take_over_uplink(&self, uplink: &mut AttachedUplink) -> Result<(), AttachError> {
        let programs = [(&self.to_uplink, BPF_TCX_EGRESS), (&self.from_uplink, BPF_TCX_INGRESS)];
        for (link, (program, hook)) in uplink.links.iter_mut().zip(programs) {
            self.take_over_link(link, &uplink.interface, program, hook)?;
        }
        Ok(())
    }
}

impl Maps {
    fn set_uplink_interface(&self, number: UplinkNumber, interface: u32) -> Result<(), libbpf_rs::Error> {
        if number == NO_UPLINK_NUMBER {
            return Ok(());
        }
        self.uplink_interfaces.update(&u32::from(number).to_ne_bytes(), &interface.to_ne_bytes(), MapFlags::ANY)
    }
}

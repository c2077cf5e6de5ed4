//! Interfaces to other machines: what a pod sent to its node or to a Service, and the node's stack sends on, goes to a worker first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::libbpf_sys::BPF_TCX_EGRESS;
use libbpf_rs::{MapCore, MapFlags};

use super::{Filtered, Maps, ServedPort, TcxLink, TcxMapError, TcxPrograms};
use crate::pins::PinnedProgram;
use crate::{AttachError, Interface, LoadError};

/// Bytes of an Ethernet header.
const ETHERNET_HEADER: u32 = 14;

/// The number by which workers know an uplink: as many as `MAX_UPLINKS` in `src/bpf/tcx.bpf.c`.
pub type UplinkNumber = u8;
/// That of all uplinks for which there is no other: what workers let pass there is dropped.
pub const NO_UPLINK_NUMBER: UplinkNumber = UplinkNumber::MAX;

/// An interface to other machines with its program. Dropping it detaches the program.
#[derive(Debug)]
pub struct AttachedUplink {
    interface: Interface,
    number: UplinkNumber,
    maps: Arc<Maps>,
    link: Option<TcxLink>,
    is_kept: bool,
}

impl AttachedUplink {
    /// The interface.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// The number that it was attached with.
    pub fn number(&self) -> UplinkNumber {
        self.number
    }

    /// Leaves the program attached if it is pinned, with what it knows of the interface; otherwise detaches it.
    pub fn keep(mut self) {
        self.link.iter_mut().for_each(|link| link.link.keep());
        self.is_kept = self.link.as_ref().is_some_and(|link| link.link.pin.is_some());
    }
}

impl Drop for AttachedUplink {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // The program first: without the entries it drops everything.
        self.link = None;
        let _ = self.maps.uplinks.delete(&self.interface.index.to_ne_bytes());
        let _ = self.maps.set_uplink_interface(self.number, 0);
    }
}

impl TcxPrograms {
    /// Attaches to an interface to other machines, in the calling thread's network namespace: packets of local pods that the node has
    /// translated, or has not although they are to a Service, go to the workers. No other attached uplink has this number, unless it
    /// is [`NO_UPLINK_NUMBER`].
    /// `has_ethernet`: whether frames there have an Ethernet header. A pinned link of this interface is taken over, and runs the
    /// earlier program until [`TcxPrograms::take_over`].
    pub fn attach_uplink(
        &self,
        interface: &Interface,
        number: UplinkNumber,
        has_ethernet: bool,
    ) -> Result<AttachedUplink, AttachError> {
        let (interface, maps) = (interface.clone(), Arc::clone(&self.maps));
        let mut uplink = AttachedUplink { interface, number, maps, link: None, is_kept: false };
        let index = uplink.interface.index;
        let mut value = [0; 8];
        value[..4].copy_from_slice(&u32::from(number).to_ne_bytes());
        value[4..].copy_from_slice(&(if has_ethernet { ETHERNET_HEADER } else { 0 }).to_ne_bytes());
        let set = self.maps.set_uplink_interface(number, index);
        let set = set.and_then(|()| self.maps.uplinks.update(&index.to_ne_bytes(), &value, MapFlags::ANY));
        set.map_err(|source| AttachError::Load {
            interface: uplink.interface.name.clone(),
            source: LoadError::new("the maps of an uplink", source),
        })?;
        let link = self.attach(&uplink.interface, PinnedProgram::ToUplink, &self.to_uplink, BPF_TCX_EGRESS)?;
        uplink.link = Some(link);
        if self.is_live.load(Ordering::Relaxed) {
            self.take_over_uplink(&mut uplink)?;
        }
        Ok(uplink)
    }

    /// Names the port of the pod behind an interface that XDP programs serve, for what it sends by uplinks; `None`: it has none any more, and
    /// what the node has translated of it is dropped there.
    pub fn set_sender(&self, interface: u32, port: Option<u16>) -> Result<(), TcxMapError> {
        let Some(port) = port else {
            self.maps.interfaces_remove(interface);
            return Ok(());
        };
        let sender =
            ServedPort { port, node_mac: [0; 6], pod_mac: [0; 6], bridge: 0, mtu: 0, filtered: Filtered::default() };
        let set = self.maps.interfaces.update(&interface.to_ne_bytes(), &sender.interface(false), MapFlags::ANY);
        set.map_err(|source| TcxMapError { thing: format!("interface {interface}"), source })
    }

    pub(super) fn take_over_uplink(&self, uplink: &mut AttachedUplink) -> Result<(), AttachError> {
        let Some(link) = &mut uplink.link else { return Ok(()) };
        self.take_over_link(link, &uplink.interface, &self.to_uplink, BPF_TCX_EGRESS)
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

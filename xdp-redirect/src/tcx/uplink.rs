//! Interfaces to other machines: what the node's stack sends there although a pod sent it to the node goes to a worker first.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use libbpf_rs::libbpf_sys::BPF_TCX_EGRESS;
use libbpf_rs::{MapCore, MapFlags};

use super::{Maps, TcxMapError, TcxPrograms, create_link};
use crate::local_pods::key;
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
    link: Option<OwnedFd>,
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
}

impl Drop for AttachedUplink {
    fn drop(&mut self) {
        // The program first: without the entries it drops everything.
        self.link = None;
        let _ = self.maps.uplinks.delete(&self.interface.index.to_ne_bytes());
        let _ = self.maps.set_uplink_interface(self.number, 0);
    }
}

impl TcxPrograms {
    /// Attaches to an interface to other machines, in the calling thread's network namespace: packets that local pods sent to an
    /// address of the node, and which the node sends on, go to the workers. No other attached uplink has this number, unless it is
    /// [`NO_UPLINK_NUMBER`].
    /// `has_ethernet`: whether frames there have an Ethernet header.
    ///
    /// The link is not pinned: new connections to the node need a worker first.
    pub fn attach_uplink(
        &self,
        interface: &Interface,
        number: UplinkNumber,
        has_ethernet: bool,
    ) -> Result<AttachedUplink, AttachError> {
        let mut uplink =
            AttachedUplink { interface: interface.clone(), number, maps: Arc::clone(&self.maps), link: None };
        let mut value = [0; 8];
        value[..4].copy_from_slice(&u32::from(number).to_ne_bytes());
        value[4..].copy_from_slice(&(if has_ethernet { ETHERNET_HEADER } else { 0 }).to_ne_bytes());
        let set = self.maps.set_uplink_interface(number, interface.index);
        let set = set.and_then(|()| self.maps.uplinks.update(&interface.index.to_ne_bytes(), &value, MapFlags::ANY));
        set.map_err(|source| AttachError::Load {
            interface: interface.name.clone(),
            source: LoadError::new("the maps of an uplink", source),
        })?;
        uplink.link = Some(create_link(self.to_uplink.as_fd(), interface, BPF_TCX_EGRESS)?);
        Ok(uplink)
    }

    /// Marks an address as one of the node's own, to which a pod's packets pass without policy, or as none of them any more.
    /// Removing a missing address is not an error.
    pub fn set_node_address(&self, address: IpAddr, is_own: bool) -> Result<(), TcxMapError> {
        let set = if is_own {
            self.maps.node_addresses.update(&key(address), &1u32.to_ne_bytes(), MapFlags::ANY)
        } else {
            match self.maps.node_addresses.delete(&key(address)) {
                Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        };
        set.map_err(|source| TcxMapError { thing: format!("address {address}"), source })
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

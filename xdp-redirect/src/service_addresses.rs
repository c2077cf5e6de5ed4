//! The map of the addresses at which pods may send to Services: egress policy is asked once the node has translated the packet.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, libbpf_sys};

use crate::LoadError;
use crate::address_key;

/// Capacity of the map, as `service_addresses` in `src/bpf/tcx_maps.h`.
pub const MAX_SERVICE_ADDRESSES: u32 = 65_536;

/// Addresses of Services, for the program on what leaves the node: a packet of a pod to one of them that leaves as it is must meet a
/// worker. What the node has translated does in any case.
#[derive(Clone)]
pub struct ServiceAddresses {
    map: Arc<MapHandle>,
}

impl fmt::Debug for ServiceAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceAddresses").finish_non_exhaustive()
    }
}

/// The kernel did not change the map of Services' addresses.
#[derive(Debug, thiserror::Error)]
#[error(
    "address {address} of a Service: the kernel does not enter it ({source}); egress policy is asked for the address itself: is \
     memory short, or are there more than {MAX_SERVICE_ADDRESSES}?"
)]
pub struct ServiceAddressError {
    address: IpAddr,
    source: libbpf_rs::Error,
}

impl ServiceAddresses {
    /// A new map, with the name of the programs' as far as the kernel keeps it. Needs CAP_BPF (or root).
    pub fn create() -> Result<Self, LoadError> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_NO_PREALLOC,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::Hash, Some("service_address"), 16, 4, MAX_SERVICE_ADDRESSES, &options);
        let map = map.map_err(|source| LoadError::new("the map of Services' addresses", source))?;
        Ok(Self { map: Arc::new(map) })
    }

    pub(crate) fn map(&self) -> &MapHandle {
        &self.map
    }

    pub fn insert(&self, address: IpAddr) -> Result<(), ServiceAddressError> {
        let entered = self.map.update(&address_key(address), &1_u32.to_ne_bytes(), MapFlags::ANY);
        entered.map_err(|source| ServiceAddressError { address, source })
    }

    /// Removes an address. One that is missing is no error.
    pub fn remove(&self, address: IpAddr) -> Result<(), ServiceAddressError> {
        match self.map.delete(&address_key(address)) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(ServiceAddressError { address, source }),
            _ => Ok(()),
        }
    }
}

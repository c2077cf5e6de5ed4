//! Addresses of this node's pods.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};

use crate::LoadError;

/// Capacity of the map, as `local_pods` in `src/bpf/redirect.bpf.c`.
pub const MAX_LOCAL_ADDRESSES: u32 = 131_072;

/// The map of local pods' addresses, shared by all instances of the program. An uplink redirects packets to them. On
/// the node's end of the host port, packets with these sources only pass if they came from the workers.
#[derive(Debug)]
pub struct LocalPods {
    map: MapHandle,
}

/// The map of local pods could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum LocalPodsError {
    #[error("address {address} does not fit: a node has room for {MAX_LOCAL_ADDRESSES} addresses of local pods")]
    Full { address: IpAddr },
    #[error("address {address}: the kernel does not change the map of local pods ({source})")]
    Kernel { address: IpAddr, source: libbpf_rs::Error },
}

impl LocalPods {
    pub(crate) fn create() -> Result<Self, LoadError> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_NO_PREALLOC,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::Hash, Some("local_pods"), 16, 2, MAX_LOCAL_ADDRESSES, &options)
            .map_err(|source| LoadError::new("the map of local pods", source))?;
        Ok(Self { map })
    }

    pub(crate) fn map(&self) -> &MapHandle {
        &self.map
    }

    /// Redirects packets to this address from now on if their frames have at most `longest` bytes, Ethernet header
    /// included: the limit of the workers and of the pod's link. Longer ones pass to the kernel, unless their source is
    /// an address of this node or of its pods. An existing entry gets the new length.
    pub fn insert(&self, address: IpAddr, longest: u16) -> Result<(), LocalPodsError> {
        let (key, value) = (key(address), longest.to_ne_bytes());
        // libbpf-rs hides the kernel's error number.
        // SAFETY: the map is open, and key and value live across the call and have its sizes.
        let result = unsafe {
            libbpf_sys::bpf_map_update_elem(
                self.map.as_fd().as_raw_fd(),
                key.as_ptr().cast(),
                value.as_ptr().cast(),
                libbpf_sys::BPF_ANY.into(),
            )
        };
        match result {
            0 => Ok(()),
            // Error of a hash map that has `max_entries` elements (`alloc_htab_elem` in kernel/bpf/hashtab.c).
            error if -error == libc::E2BIG => Err(LocalPodsError::Full { address }),
            error => Err(LocalPodsError::Kernel { address, source: io::Error::from_raw_os_error(-error).into() }),
        }
    }

    /// Marks this address as that of a local pod without workers: packets to it pass to the kernel, and none from
    /// elsewhere may have it as source.
    pub fn insert_unserved(&self, address: IpAddr) -> Result<(), LocalPodsError> {
        self.insert(address, 0)
    }

    /// Packets to this address pass to the kernel from now on. Removing a missing address is not an error.
    pub fn remove(&self, address: IpAddr) -> Result<(), LocalPodsError> {
        match self.map.delete(&key(address)) {
            Err(source) if source.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(LocalPodsError::Kernel { address, source })
            }
            _ => Ok(()),
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        matches!(self.map.lookup(&key(address), MapFlags::ANY), Ok(Some(_)))
    }
}

/// Sixteen bytes in network order, IPv4 as `::ffff:a.b.c.d`.
pub(crate) fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn address(number: u32) -> IpAddr {
        Ipv6Addr::from_bits(u128::from(number)).into()
    }

    #[test]
    fn a_full_address_map_is_reported_by_the_kernels_error_number() {
        let local = LocalPods::create().unwrap();
        for number in 0..MAX_LOCAL_ADDRESSES {
            local.insert(address(number), 1514).unwrap();
        }
        let one_more = address(MAX_LOCAL_ADDRESSES);
        assert!(matches!(local.insert(one_more, 1514), Err(LocalPodsError::Full { address }) if address == one_more));
        local.insert(address(7), 9014).unwrap();
        local.remove(address(7)).unwrap();
        local.insert(one_more, 1514).unwrap();
        assert!(local.contains(one_more) && !local.contains(address(7)));
    }
}

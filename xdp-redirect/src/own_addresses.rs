//! A pod's own addresses for checks of ARP and neighbour discovery.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle};

use crate::address_key;

/// The addresses of a port's pod could not be set.
#[derive(Debug, thiserror::Error)]
#[error("interface {interface}: the kernel does not change the map of its pod's own addresses ({source})")]
pub struct OwnAddressesError {
    pub(crate) interface: String,
    pub(crate) source: libbpf_rs::Error,
}

/// Updates the map `own_addresses` of `src/bpf/tcx_maps.h`. Link-local addresses that the pod has chosen stay in it.
pub(crate) fn set(map: &MapHandle, mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Result<(), libbpf_rs::Error> {
    /// Marks the pod as known: while present, the program checks the other entries.
    const KNOWN: [u8; 16] = Ipv6Addr::UNSPECIFIED.octets();
    let wanted: BTreeSet<[u8; 16]> = addresses.iter().map(|&address| address_key(address)).chain([KNOWN]).collect();
    let known: Vec<Vec<u8>> = map.keys().collect();
    let chosen = |key: &[u8]| key.starts_with(&[0xfe]) && key.get(1).is_some_and(|byte| byte & 0xc0 == 0x80);
    for other in known.iter().filter(|key| !chosen(key) && !wanted.contains(key.as_slice())) {
        match map.delete(other) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // In descending order, so that KNOWN is inserted after all others.
    wanted.iter().rev().try_for_each(|address| map.update(address, &mac, MapFlags::ANY))
}

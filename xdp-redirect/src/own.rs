//! What a pod may say of itself in ARP and neighbour discovery.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle};

use crate::local_pods::key;

/// A port's program could not be told whose port it is.
#[derive(Debug, thiserror::Error)]
#[error("interface {interface}: the kernel does not change the map of its pod's own addresses ({source})")]
pub struct OwnError {
    pub(crate) interface: String,
    pub(crate) source: libbpf_rs::Error,
}

/// Brings `own` of `src/bpf/redirect.bpf.c` in step. Link-local addresses in it that the pod has chosen stay.
pub(crate) fn set(map: &MapHandle, mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Result<(), libbpf_rs::Error> {
    /// Stands for the pod itself: while it is there, the program goes by the others.
    const KNOWN: [u8; 16] = Ipv6Addr::UNSPECIFIED.octets();
    let wanted: BTreeSet<[u8; 16]> = addresses.iter().map(|&address| key(address)).chain([KNOWN]).collect();
    let known: Vec<Vec<u8>> = map.keys().collect();
    let chosen = |key: &[u8]| key.starts_with(&[0xfe]) && key.get(1).is_some_and(|octet| octet & 0xc0 == 0x80);
    for other in known.iter().filter(|key| !chosen(key) && !wanted.contains(key.as_slice())) {
        match map.delete(other) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // The greatest first, so that KNOWN comes when the others are whole.
    wanted.iter().rev().try_for_each(|address| map.update(address, &mac, MapFlags::ANY))
}

//! Tunnel packets from other nodes' pods, which this node must not unwrap.

use std::net::IpAddr;

use libbpf_rs::{ErrorKind, MapCore, MapFlags};

use super::{TcxMapError, TcxPrograms};
use crate::address_key;

/// A network of other nodes, in which senders of tunnel packets may be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RemoteNetwork {
    pub address: IpAddr,
    pub length: u8,
}

impl RemoteNetwork {
    /// `struct network` in `src/bpf/tunnel.h`.
    fn key(self) -> [u8; 20] {
        let length = u32::from(self.length) + if self.address.is_ipv4() { 96 } else { 0 };
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[4..].copy_from_slice(&address_key(self.address));
        bytes
    }

    fn failed(self, source: libbpf_rs::Error) -> TcxMapError {
        TcxMapError { thing: format!("network {}/{}", self.address, self.length), source }
    }
}

impl TcxPrograms {
    /// Nodes unwrap what comes to this UDP port, or do not. Removing a missing port is not an error.
    pub fn set_tunnel_port(&self, port: u16, is_one: bool) -> Result<(), TcxMapError> {
        let (map, bytes) = (&self.maps.tunnel_ports, u32::from(port).to_ne_bytes());
        let set =
            if is_one { map.update(&bytes, &1_u32.to_ne_bytes(), MapFlags::ANY) } else { gone(map.delete(&bytes)) };
        set.map_err(|source| TcxMapError { thing: format!("tunnel port {port}"), source })
    }

    /// Whether pods of other nodes are in this network; `None`: it is no network of theirs. The longest one with an address counts.
    /// Removing a missing one is not an error.
    pub fn set_remote_network(&self, network: RemoteNetwork, of_pods: Option<bool>) -> Result<(), TcxMapError> {
        let (map, key) = (&self.maps.remote_networks, network.key());
        let set = match of_pods {
            // `POD_NETWORK` in `src/bpf/tunnel.h`.
            Some(of_pods) => map.update(&key, &u32::from(of_pods).to_ne_bytes(), MapFlags::ANY),
            None => gone(map.delete(&key)),
        };
        set.map_err(|source| network.failed(source))
    }

    /// Tunnel packets of other nodes' pods that the node did not unwrap.
    pub fn refused_tunnels(&self) -> Result<u64, libbpf_rs::Error> {
        let counts = self.maps.refused_tunnels.lookup_percpu(&0_u32.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default();
        let count = |bytes: &Vec<u8>| bytes.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        Ok(counts.iter().map(count).sum())
    }
}

fn gone(deleted: Result<(), libbpf_rs::Error>) -> Result<(), libbpf_rs::Error> {
    match deleted {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

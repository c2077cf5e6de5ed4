//! The map in which the programs note whose packets the node's stack forwards under an address of its own.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};

use crate::LoadError;
use crate::address_key;
use crate::pins::Pins;

/// Capacity of the map, as `sources` in `src/bpf/origin.h`. The connection whose entry was used least recently makes
/// room.
const MAX_SOURCES: u32 = 16_384;
/// Bytes of `struct sent_flow`: two addresses, two ports in network order, the protocol in 32 bits.
const KEY: usize = 40;
/// Name of the pin, with the version of its contents.
const NAME: &str = "translated_sources_1";

/// Sources of connections before the node's stack translated them, by the flow as it leaves the stack. Programs see to it
/// for each packet to a worker. Pinned, it outlasts the process.
#[derive(Clone)]
pub struct TranslatedSources {
    map: Arc<MapHandle>,
}

impl fmt::Debug for TranslatedSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TranslatedSources").finish_non_exhaustive()
    }
}

impl TranslatedSources {
    /// Opens the map that an earlier process has pinned, or makes a new one. Needs CAP_BPF (or root).
    pub fn open(pins: Option<&Pins>) -> Result<Self, LoadError> {
        if let Some(found) = pins.and_then(Self::find) {
            return Ok(found);
        }
        let failed = |source| LoadError::new("the map of translated sources", source);
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let mut map = MapHandle::create(MapType::LruHash, Some("sources"), KEY as u32, 16, MAX_SOURCES, &options)
            .map_err(failed)?;
        if let Some(pins) = pins {
            pins.remove_translated_sources();
            map.pin(pins.map_path(NAME)).map_err(failed)?;
        }
        Ok(Self { map: Arc::new(map) })
    }

    pub fn find(pins: &Pins) -> Option<Self> {
        Some(Self { map: Arc::new(MapHandle::from_pinned_path(pins.map_path(NAME)).ok()?) })
    }

    /// Whether the calling thread may look sources up. One without CAP_BPF may from Linux 5.19 on, and before where
    /// kernel.unprivileged_bpf_disabled is 0 (`__sys_bpf` in kernel/bpf/syscall.c).
    pub fn is_readable(&self) -> bool {
        self.map.lookup(&[0; KEY], MapFlags::ANY).is_ok()
    }

    pub(crate) fn map(&self) -> &MapHandle {
        &self.map
    }

    /// Source of the connection that is now one between these ends, in the direction in which it was opened. `protocol`: IP
    /// protocol number. A system call: some 300 ns.
    pub fn source_of(&self, protocol: u8, from: SocketAddr, to: SocketAddr) -> Option<IpAddr> {
        let found = self.map.lookup(&flow_key(protocol, from, to), MapFlags::ANY).ok()??;
        let bytes: [u8; 16] = found.try_into().ok()?;
        Some(std::net::Ipv6Addr::from(bytes).to_canonical())
    }

    #[cfg(test)]
    fn note(&self, protocol: u8, from: SocketAddr, to: SocketAddr, source: IpAddr) {
        self.map.update(&flow_key(protocol, from, to), &address_key(source), MapFlags::ANY).unwrap();
    }
}

fn flow_key(protocol: u8, from: SocketAddr, to: SocketAddr) -> [u8; KEY] {
    let mut bytes = [0; KEY];
    bytes[..16].copy_from_slice(&address_key(from.ip()));
    bytes[16..32].copy_from_slice(&address_key(to.ip()));
    bytes[32..34].copy_from_slice(&from.port().to_be_bytes());
    bytes[34..36].copy_from_slice(&to.port().to_be_bytes());
    bytes[36..].copy_from_slice(&u32::from(protocol).to_ne_bytes());
    bytes
}

impl Pins {
    pub fn remove_translated_sources(&self) {
        self.remove_maps("translated_sources_");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_found_by_all_of_its_flow() {
        let sources = TranslatedSources::open(None).unwrap();
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (from, to, source) in
            [("10.0.0.1:40000", "10.1.1.5:80", "192.0.2.7"), ("[fd00::1]:40000", "[fd00:1::5]:80", "2001:db8::7")]
        {
            let (from, to, source): (_, _, IpAddr) = (address(from), address(to), source.parse().unwrap());
            sources.note(6, from, to, source);
            assert_eq!(sources.source_of(6, from, to), Some(source));
            assert_eq!(sources.source_of(17, from, to), None);
            assert_eq!(sources.source_of(6, to, from), None);
            let mut other = from;
            other.set_port(40001);
            assert_eq!(sources.source_of(6, other, to), None);
        }
    }
}

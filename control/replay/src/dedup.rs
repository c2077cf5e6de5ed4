//! Distinguishes a packet captured at two interfaces from a packet sent twice.

use std::hash::{Hash, Hasher};

use penstock_dataplane::packet::{Protocol, parse};
use rustc_hash::{FxHashMap, FxHasher};

use super::capture::{InterfaceId, Time};

/// Time window in which the same packet at another interface counts as a duplicate.
const WINDOW: u64 = 50_000_000;
/// Packets remembered; with more in one window, the oldest are forgotten.
const REMEMBERED: usize = 1 << 16;

/// Where a packet was captured: the interface, and the fields that a router changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SeenPacket {
    interface: InterfaceId,
    macs: [u8; 12],
    ttl: u8,
}

#[derive(Debug, Default)]
pub(super) struct Deduplicator {
    recent: FxHashMap<u64, (Time, SeenPacket)>,
}

impl Deduplicator {
    /// Whether this packet was captured before at another place: the same IP packet, except for fields that a router
    /// changes and checksums left to offload, on another interface or with other MACs or TTL. The same packet at the same
    /// place was sent twice.
    pub(super) fn is_duplicate(&mut self, time: Time, interface: InterfaceId, frame: &[u8]) -> bool {
        let Some((fingerprint, ttl)) = fingerprint(frame) else { return false };
        let mut macs = [0; 12];
        macs.copy_from_slice(&frame[..12]);
        let here = SeenPacket { interface, macs, ttl };
        if self.recent.len() >= REMEMBERED {
            self.recent.retain(|_, (seen, _)| time.0.saturating_sub(seen.0) <= WINDOW);
            if self.recent.len() >= REMEMBERED {
                self.recent.clear();
            }
        }
        match self.recent.get(&fingerprint) {
            Some((seen, first)) if time.0.saturating_sub(seen.0) <= WINDOW && *first != here => true,
            _ => {
                self.recent.insert(fingerprint, (time, here));
                false
            }
        }
    }
}

/// A hash of the IP packet without TTL and checksums, and the TTL; `None` if the packet cannot be parsed.
fn fingerprint(frame: &[u8]) -> Option<(u64, u8)> {
    let packet = parse(frame).ok()?;
    let (network, transport) = (usize::from(packet.layout.network), usize::from(packet.layout.transport));
    let end = usize::from(packet.layout.end);
    let checksum = match packet.flow.protocol {
        Protocol::TCP => Some(transport + 16),
        Protocol::UDP => Some(transport + 6),
        Protocol::SCTP => Some(transport + 8),
        _ => None,
    };
    let checksum = checksum.filter(|_| packet.fragment.is_none_or(|fragment| fragment.is_first()));
    let mut hasher = FxHasher::default();
    if packet.flow.src.is_v4() {
        frame[network..network + 8].hash(&mut hasher);
        frame[network + 9..network + 10].hash(&mut hasher);
        frame[network + 12..transport].hash(&mut hasher);
    } else {
        frame[network..network + 7].hash(&mut hasher);
        frame[network + 8..transport].hash(&mut hasher);
    }
    match checksum {
        Some(at) if at + 4 <= end => {
            frame[transport..at].hash(&mut hasher);
            let width = if packet.flow.protocol == Protocol::SCTP { 4 } else { 2 };
            frame[at + width..end].hash(&mut hasher);
        }
        _ => frame[transport..end].hash(&mut hasher),
    }
    Some((hasher.finish(), packet.ttl))
}

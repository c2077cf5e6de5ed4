//! Outcomes of packets in the XDP and tcx programs, and their counters.

use std::fmt;

use libbpf_rs::{MapCore, MapFlags};

/// The fate of a packet in the program, and why. Numbered as `enum outcome` in `src/bpf/outcome.h`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum XdpOutcome {
    /// Redirected to the AF_XDP socket of its queue.
    Redirected,
    /// Its queue has no socket: dropped or passed, according to [`crate::OnMiss`].
    NoSocket,
    /// ARP: passed to the kernel.
    Arp,
    /// IPv6 neighbour discovery (RFC 4861): passed to the kernel.
    NeighbourDiscovery,
    /// Not IP: passed to the kernel.
    NotIp,
    /// On an uplink, not to a local pod: passed to the kernel.
    NotLocal,
    /// On a pod or host port, VLAN-tagged: dropped, since the kernel would treat VLAN 0 as untagged.
    VlanTag,
    /// On a pod's port, ARP or neighbour discovery in which the pod claims another's address or acts as a router:
    /// dropped.
    ForgedNeighbour,
    /// On an uplink, longer than a socket or the pod's link accepts: passed to the kernel, which segments it on the way
    /// to the host port.
    TooLong,
    /// On the node's end of the host port, with the source of a local pod, but not received from the workers: dropped.
    SpoofedSource,
    /// On an uplink, on a connection that the kernel translates: passed to it.
    Translated,
    /// On an uplink, unknown whether the kernel translates its connection (a fragment, or neither TCP nor UDP): passed
    /// to it.
    Undecided,
    /// At a pod's veth, by tcx: no worker serves the pod yet, or any more. Dropped.
    NotReady,
    /// At a pod's veth, by tcx: sent to the pod by the node's stack, and redirected to a worker.
    FromStack,
    /// At a pod's veth, by tcx: the pod's share of the workers' queues is used up. Dropped.
    ShareUsed,
    /// At a pod's veth, by tcx: the kernel had no memory for the headers that a program was to write. Dropped.
    NoMemory,
}

impl XdpOutcome {
    /// All outcomes, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::Redirected,
        Self::NoSocket,
        Self::Arp,
        Self::NeighbourDiscovery,
        Self::NotIp,
        Self::NotLocal,
        Self::VlanTag,
        Self::ForgedNeighbour,
        Self::TooLong,
        Self::SpoofedSource,
        Self::Translated,
        Self::Undecided,
        Self::NotReady,
        Self::FromStack,
        Self::ShareUsed,
        Self::NoMemory,
    ];

    /// Its name in counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redirected => "redirected",
            Self::NoSocket => "no_socket",
            Self::Arp => "arp",
            Self::NeighbourDiscovery => "neighbour_discovery",
            Self::NotIp => "not_ip",
            Self::NotLocal => "not_local",
            Self::VlanTag => "vlan_tag",
            Self::ForgedNeighbour => "forged_neighbour",
            Self::TooLong => "too_long",
            Self::SpoofedSource => "spoofed_source",
            Self::Translated => "translated",
            Self::Undecided => "undecided",
            Self::NotReady => "not_ready",
            Self::FromStack => "from_stack",
            Self::ShareUsed => "share_used",
            Self::NoMemory => "no_memory",
        }
    }
}

impl fmt::Display for XdpOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Packets by outcome since the program was attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XdpOutcomeCounts([u64; XdpOutcome::ALL.len()]);

impl XdpOutcomeCounts {
    /// Reads and sums the per-CPU counters.
    pub(crate) fn read(map: &impl MapCore) -> Result<Self, libbpf_rs::Error> {
        let mut total = Self::default();
        for outcome in XdpOutcome::ALL {
            let key = u32::from(outcome as u8).to_ne_bytes();
            let per_cpu = map.lookup_percpu(&key, MapFlags::ANY)?.unwrap_or_default();
            total.0[outcome as usize] =
                per_cpu.iter().filter_map(|value| Some(u64::from_ne_bytes(value.get(..8)?.try_into().ok()?))).sum();
        }
        Ok(total)
    }

    /// Packets with this outcome.
    pub fn get(&self, outcome: XdpOutcome) -> u64 {
        self.0[outcome as usize]
    }

    /// Each outcome with its packets.
    pub fn iter(&self) -> impl Iterator<Item = (XdpOutcome, u64)> + '_ {
        XdpOutcome::ALL.into_iter().map(|outcome| (outcome, self.get(outcome)))
    }

    /// All packets that the program saw.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::XdpOutcome;

    #[test]
    fn numbers_match_the_list_and_names_are_distinct() {
        for (index, outcome) in XdpOutcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index);
            assert!(XdpOutcome::ALL.iter().all(|other| *other == outcome || other.name() != outcome.name()));
        }
    }
}

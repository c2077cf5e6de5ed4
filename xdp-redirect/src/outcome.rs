//! Outcomes of packets in the XDP and tcx programs, and their counters.

use std::fmt;

use libbpf_rs::{MapCore, MapFlags};

macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// The fate of a packet in the program, and why. Numbered as `enum outcome` in `src/bpf/outcome.h`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum ProgramOutcome { $($(#[doc = $doc])+ $variant,)+ }

        impl ProgramOutcome {
            /// All outcomes, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];
            /// Number of outcomes.
            pub const COUNT: usize = Self::ALL.len();

            /// Its name in counters and logs.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

outcomes! {
    /// Redirected to the AF_XDP socket of its queue.
    Redirected = "redirected",
    /// Its queue has no socket: dropped or passed, according to [`crate::OnMiss`].
    NoSocket = "no_socket",
    /// ARP: passed to the kernel.
    Arp = "arp",
    /// IPv6 neighbour discovery (RFC 4861): passed to the kernel.
    NeighbourDiscovery = "neighbour_discovery",
    /// Not IP: passed to the kernel.
    NotIp = "not_ip",
    /// On an uplink, not to a local pod: passed to the kernel. At a pod's veth, by tcx: for another port of its bridge, and dropped.
    NotLocal = "not_local",
    /// On a pod or host port, VLAN-tagged: dropped, since the kernel would treat VLAN 0 as untagged.
    VlanTag = "vlan_tag",
    /// On a pod's port, ARP or neighbour discovery in which the pod claims another's address or acts as a router:
    /// dropped.
    ForgedNeighbour = "forged_neighbour",
    /// On an uplink, longer than a socket or the pod's link accepts: passed to the kernel, which segments it on the way
    /// to the host port.
    TooLong = "too_long",
    /// On the node's end of the host port, with the source of a local pod, but not received from the workers: dropped.
    SpoofedSource = "spoofed_source",
    /// On an uplink, on a connection that the kernel translates: passed to it.
    Translated = "translated",
    /// On an uplink, unknown whether the kernel translates its connection (a fragment, or neither TCP nor UDP): passed
    /// to it.
    Undecided = "undecided",
    /// At a pod's veth, by tcx: no worker serves the pod yet, or any more. Dropped.
    NotReady = "not_ready",
    /// At a pod's veth, by tcx: sent to the pod by the node's stack, and redirected to a worker.
    FromStack = "from_stack",
    /// At a pod's veth, by tcx: the pod's share of the workers' queues is used up. Dropped.
    ShareUsed = "share_used",
    /// At a pod's veth, by tcx: the kernel had no memory for the headers that a program was to write. Dropped.
    NoMemory = "no_memory",
}

impl fmt::Display for ProgramOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Packets by outcome since the program was attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProgramOutcomeCounts([u64; ProgramOutcome::COUNT]);

impl ProgramOutcomeCounts {
    /// Reads and sums the per-CPU counters.
    pub(crate) fn read(map: &impl MapCore) -> Result<Self, libbpf_rs::Error> {
        let mut total = Self::default();
        for &outcome in ProgramOutcome::ALL {
            let key = u32::from(outcome as u8).to_ne_bytes();
            let per_cpu = map.lookup_percpu(&key, MapFlags::ANY)?.unwrap_or_default();
            total.0[outcome as usize] =
                per_cpu.iter().filter_map(|value| Some(u64::from_ne_bytes(value.get(..8)?.try_into().ok()?))).sum();
        }
        Ok(total)
    }

    /// Packets with this outcome.
    pub fn get(&self, outcome: ProgramOutcome) -> u64 {
        self.0[outcome as usize]
    }

    /// Each outcome with its packets.
    pub fn iter(&self) -> impl Iterator<Item = (ProgramOutcome, u64)> + '_ {
        ProgramOutcome::ALL.iter().map(|outcome| (*outcome, self.get(*outcome)))
    }

    /// All packets that the program saw.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

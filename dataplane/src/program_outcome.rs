//! Outcomes of packets in the programs at the ports, as they count them.

use crate::DropReason;

macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:expr, $drop_reason:expr;)+) => {
        /// The fate of a packet in an XDP or tcx program, and why. Numbered as `enum outcome` in
        /// `xdp-redirect/src/bpf/outcome.h`. A program that drops a packet has a [`DropReason`]; its outcome has the same name.
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

            /// Why the packet is dropped; `None`: a worker gets it, or the kernel.
            pub const fn drop_reason(self) -> Option<DropReason> {
                match self { $(Self::$variant => $drop_reason,)+ }
            }
        }
    };
}

outcomes! {
    /// Redirected to the AF_XDP socket of its queue.
    Redirected = "redirected", None;
    /// Its queue has no socket: dropped, or passed, as `fail.mode` says.
    NoSocket = DropReason::NoSocket.name(), Some(DropReason::NoSocket);
    /// ARP: passed to the kernel.
    Arp = "arp", None;
    /// IPv6 neighbour discovery (RFC 4861): passed to the kernel.
    NeighbourDiscovery = "neighbour_discovery", None;
    /// Not IP: passed to the kernel.
    NotIp = "not_ip", None;
    /// On an uplink, not to a local pod: passed to the kernel. At a pod's veth, by tcx: for another port of its bridge, which has a copy; not
    /// sent to this pod.
    NotLocal = "not_local", None;
    /// On a pod or host port, VLAN-tagged. Dropped, since the kernel would treat VLAN 0 as untagged.
    VlanTag = DropReason::VlanTag.name(), Some(DropReason::VlanTag);
    /// On a pod's port, ARP or neighbour discovery in which the pod claims another's address or acts as a router.
    ForgedNeighbour = DropReason::ForgedNeighbour.name(), Some(DropReason::ForgedNeighbour);
    /// On an uplink, longer than a socket or the pod's link accepts: passed to the kernel, which segments it on the way
    /// to the host port.
    TooLong = "too_long", None;
    /// On the node's end of the host port, with the source of a local pod, but not received from the workers.
    SpoofedSource = DropReason::SpoofedSource.name(), Some(DropReason::SpoofedSource);
    /// On an uplink, on a connection that the kernel translates: passed to it.
    Translated = "translated", None;
    /// On an uplink, unknown whether the kernel translates its connection (a fragment, or neither TCP nor UDP): passed
    /// to it.
    Undecided = "undecided", None;
    /// At a pod's veth, by tcx: no worker serves the pod yet, or any more.
    NotReady = DropReason::NotReady.name(), Some(DropReason::NotReady);
    /// At a pod's veth, by tcx: sent to the pod by the node's stack, and redirected to a worker.
    FromStack = "from_stack", None;
    /// At a pod's veth, by tcx: the pod's share of the workers' queues is used up.
    ShareUsed = DropReason::ShareUsed.name(), Some(DropReason::ShareUsed);
    /// At a pod's veth, by tcx: the kernel had no memory for the headers that a program was to write.
    NoMemory = DropReason::NoMemory.name(), Some(DropReason::NoMemory);
}

impl std::fmt::Display for ProgramOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_that_drops_has_the_name_of_its_drop_reason() {
        for (index, outcome) in ProgramOutcome::ALL.iter().enumerate() {
            assert_eq!(*outcome as usize, index);
            assert!(ProgramOutcome::ALL.iter().all(|other| other == outcome || other.name() != outcome.name()));
            assert!(outcome.drop_reason().is_none_or(|reason| reason.name() == outcome.name()), "{outcome}");
        }
    }

    #[test]
    fn a_drop_reason_is_of_workers_or_of_programs() {
        let of_workers: Vec<DropReason> = DropReason::of_workers().collect();
        for reason in DropReason::ALL {
            let is_of_programs = ProgramOutcome::ALL.iter().any(|outcome| outcome.drop_reason() == Some(*reason));
            assert!(is_of_programs || of_workers.contains(reason), "{reason}");
        }
    }
}

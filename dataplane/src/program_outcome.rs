//! Outcomes of packets in the tc programs, as they count them.

use crate::DropReason;

macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:expr, $drop_reason:expr;)+) => {
        /// The fate of a packet in a tc program, and why. Numbered as `enum outcome` in
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
    /// A packet of the pod, redirected to a worker.
    Redirected = "redirected", None;
    /// No process serves the sockets: dropped, or passed, as `fail.mode` says.
    NoSocket = DropReason::NoSocket.name(), Some(DropReason::NoSocket);
    /// ARP: passed to the kernel.
    Arp = "arp", None;
    /// IPv6 neighbour discovery (RFC 4861): passed to the kernel.
    NeighbourDiscovery = "neighbour_discovery", None;
    /// Not IP: passed to the kernel.
    NotIp = "not_ip", None;
    /// For another port of the pod's bridge, which has a copy; not sent to this pod.
    NotLocal = "not_local", None;
    /// VLAN-tagged: dropped, since the kernel would treat VLAN 0 as untagged.
    VlanTag = DropReason::VlanTag.name(), Some(DropReason::VlanTag);
    /// ARP or neighbour discovery in which the pod claims another's address or acts as a router.
    ForgedNeighbour = DropReason::ForgedNeighbour.name(), Some(DropReason::ForgedNeighbour);
    /// Sent by the node's stack with the source of a local pod, but not received from that pod.
    SpoofedSource = DropReason::SpoofedSource.name(), Some(DropReason::SpoofedSource);
    /// No worker serves the pod yet, or any more.
    NotReady = DropReason::NotReady.name(), Some(DropReason::NotReady);
    /// Sent to the pod by the node's stack, and redirected to a worker.
    FromStack = "from_stack", None;
    /// The pod's share of the workers' queues is used up.
    ShareUsed = DropReason::ShareUsed.name(), Some(DropReason::ShareUsed);
    /// The kernel had no memory for the headers that a program was to write.
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

//! Drop reasons: a closed set, shared by the programs at the ports, workers, counters, logs and replay.

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped. The set is closed and its names are part of the interface: the
        /// daemon's counters, its logs and the replay's `reason` use the same ones.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum DropReason { $($(#[doc = $doc])+ $variant,)+ }

        impl DropReason {
            /// All reasons, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];
            /// Number of reasons.
            pub const COUNT: usize = Self::ALL.len();

            /// Its name in counters, logs and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

drop_reasons! {
    /// Shorter than its headers indicate.
    Truncated = "truncated",
    /// Invalid header field: version, header length, total length or source address.
    Malformed = "malformed",
    /// Neither IPv4 nor IPv6; the programs pass these to the kernel, so a worker should not receive them.
    NotIp = "not_ip",
    /// VLAN-tagged; the programs drop these on pods' ports, so a worker should not receive them. The kernel would
    /// treat VLAN 0 as untagged.
    VlanTag = "vlan_tag",
    /// Too many IPv6 extension headers, or an unknown one.
    ExtensionHeaders = "extension_headers",
    /// Source-routed (IPv4 source route option, or IPv6 routing header with segments left).
    SourceRoute = "source_route",
    /// An ICMP redirect, which would change routes independently of policy.
    Redirect = "redirect",
    /// Neighbour discovery that is none by RFC 4861: behind extension headers, or not from the link (hop limit below 255).
    /// A program passes the other to the kernel.
    InvalidDiscovery = "invalid_discovery",
    /// The IPv4 header checksum is wrong.
    HeaderChecksum = "header_checksum",
    /// The source address is not the pod's own.
    SpoofedSource = "spoofed_source",
    /// A tunnel packet from a pod to a node's address: the node would decapsulate and route content that policy has not
    /// seen.
    Encapsulation = "encapsulation",
    /// The destination is multicast or broadcast, which is not routed between pods.
    Multicast = "multicast",
    /// Source or destination is link-local or loopback, which is never routed.
    NotRoutable = "not_routable",
    /// TTL or hop limit would reach zero.
    TtlExpired = "ttl_expired",
    /// Longer than the MTU of its egress port.
    TooBig = "too_big",
    /// Denied by the egress policy of the source.
    EgressDenied = "egress_denied",
    /// The same, and the destination is a Service's address. Rules that select pods do not match it, since it stands
    /// for several pods and the backend is not chosen yet; an ipBlock rule may match.
    ServiceDenied = "service_denied",
    /// Denied by the ingress policy of the destination.
    IngressDenied = "ingress_denied",
    /// Its connection was revoked by policy.
    ConnectionRevoked = "connection_revoked",
    /// It belongs to no connection and cannot open one (a TCP segment, an echo reply, an ICMP error).
    NoConnection = "no_connection",
    /// Invalid in the state of its connection (TCP flags that no stack sends, another tag of SCTP).
    InvalidState = "invalid_state",
    /// The connection table is full.
    TableFull = "table_full",
    /// The pod has used up its share of the connection table.
    QuotaExceeded = "quota_exceeded",
    /// The pod has opened, or others have opened to it, as many connections in a second as its annotation lets them.
    ConnectionRate = "connection_rate",
    /// As many connections of the pod are open, or of others to it, as its annotation lets them.
    TooManyConnections = "too_many_connections",
    /// A later fragment whose first fragment is unknown.
    Fragment = "fragment",
    /// No port leads to the destination.
    NoPort = "no_port",
    /// The TX ring of the worker's pair is full.
    TxRingFull = "tx_ring_full",
    /// Its port was closed while it was in transit.
    PortGone = "port_gone",
    /// The port is known, but its pod or policies are not yet. At a pod's veth, by a program: no worker serves the pod yet, or any more.
    NotReady = "not_ready",
    /// By a program: no process serves the workers' sockets. The program drops the packet, or passes it, as `fail.mode` says.
    NoSocket = "no_socket",
    /// By a program: ARP or neighbour discovery in which the pod claims another's address or acts as a router.
    ForgedNeighbour = "forged_neighbour",
    /// By a program: the pod's share of the workers' queues is used up.
    ShareUsed = "share_used",
    /// By a program: the kernel had no memory for the headers that the program was to write.
    NoMemory = "no_memory",
}

impl DropReason {
    /// Those for which workers drop packets. The others are of the programs at the ports alone, which count them
    /// ([`ProgramOutcome`](crate::ProgramOutcome)).
    pub fn of_workers() -> impl Iterator<Item = Self> {
        let of_programs = [Self::NoSocket, Self::ForgedNeighbour, Self::ShareUsed, Self::NoMemory];
        Self::ALL.iter().copied().filter(move |reason| !of_programs.contains(reason))
    }

    /// Whether a packet that is dropped for it may have been the first of a connection, which is denied by that. Others
    /// belong to a connection, or to none.
    pub const fn denies_connection(self) -> bool {
        matches!(
            self,
            Self::EgressDenied
                | Self::ServiceDenied
                | Self::IngressDenied
                | Self::TableFull
                | Self::QuotaExceeded
                | Self::ConnectionRate
                | Self::TooManyConnections
                | Self::NotReady
        )
    }
}

impl std::fmt::Display for DropReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DropReason;

    #[test]
    fn numbers_match_the_list_and_names_are_distinct() {
        for (index, reason) in DropReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
            assert!(DropReason::ALL.iter().all(|other| other == reason || other.name() != reason.name()));
        }
    }
}

//! Why a packet was dropped: a closed set, the same for counters, logs and replay.

macro_rules! causes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped. The set is closed and its names are part of the interface: the
        /// daemon's counters, its logs and the replay's `reason` use the same ones.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Cause { $($(#[doc = $doc])+ $variant,)+ }

        impl Cause {
            /// Every cause, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];
            /// How many causes there are.
            pub const COUNT: usize = Self::ALL.len();

            /// Its name in counters, logs and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

causes! {
    /// Shorter than its own headers say.
    Truncated = "truncated",
    /// A header field that cannot be: version, header length, total length, source address.
    Malformed = "malformed",
    /// Neither IPv4 nor IPv6: the XDP program leaves these to the kernel, so a worker should see none.
    NotIp = "not_ip",
    /// Has a VLAN tag: the XDP program drops these on pods' ports, so a worker should see none. The kernel would take a
    /// tag of VLAN 0 for none.
    VlanTag = "vlan_tag",
    /// More IPv6 extension headers than are followed, or one that is not known.
    ExtensionHeaders = "extension_headers",
    /// Asks for a route of its sender's choosing (IPv4 source route, IPv6 routing header with segments left).
    SourceRoute = "source_route",
    /// An ICMP redirect: would change routes behind the policy's back.
    Redirect = "redirect",
    /// Neighbour discovery that the XDP program did not take for such: behind extension headers, or not from
    /// the link (hop limit below 255).
    NeighbourDiscovery = "neighbour_discovery",
    /// The IPv4 header checksum is wrong.
    HeaderChecksum = "header_checksum",
    /// The source address is not the pod's own.
    SpoofedSource = "spoofed_source",
    /// A pod's, and a node would unwrap it and route what is inside, which nobody has judged: a tunnel's packet to a node's
    /// address.
    Encapsulation = "encapsulation",
    /// The destination is multicast or broadcast: neither is routed between pods.
    Multicast = "multicast",
    /// Source or destination is link-local or loopback: never routed.
    NotRoutable = "not_routable",
    /// TTL or hop limit would reach zero.
    TtlExpired = "ttl_expired",
    /// Longer than the MTU of the port that it must leave by.
    TooBig = "too_big",
    /// The egress policy of the source does not allow it.
    EgressDenied = "egress_denied",
    /// The same, and the destination is a Service's address. Rules for pods do not mean it, since it stands for several
    /// pods and which one is not decided yet; an ipBlock rule may.
    ServiceDenied = "service_denied",
    /// The ingress policy of the destination does not allow it.
    IngressDenied = "ingress_denied",
    /// Its connection was allowed once and is not any more.
    ConnectionCut = "connection_cut",
    /// Belongs to no connection and cannot open one (a TCP segment, an echo reply, an ICMP error).
    NoConnection = "no_connection",
    /// Not valid in the state of its connection (sequence out of window, unexpected flags).
    InvalidState = "invalid_state",
    /// The connection table has no room for another connection.
    TableFull = "table_full",
    /// The pod has used up its share of the connection table.
    QuotaExceeded = "quota_exceeded",
    /// A later fragment whose first fragment is not known.
    Fragment = "fragment",
    /// No port leads to the destination.
    NoPort = "no_port",
    /// The TX ring of the port that it must leave by is full.
    TxRingFull = "tx_ring_full",
    /// The queue to the worker that owns the port is full.
    HandOffFull = "hand_off_full",
    /// Its port went away while it was under way.
    PortGone = "port_gone",
    /// The port is known but its pod or policies are not yet.
    NotReady = "not_ready",
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Cause;

    #[test]
    fn numbers_index_the_list_and_names_are_distinct() {
        for (index, cause) in Cause::ALL.iter().enumerate() {
            assert_eq!(*cause as usize, index);
            assert!(Cause::ALL.iter().all(|other| other == cause || other.name() != cause.name()));
        }
    }
}

//! Problems of local pods' interfaces.

use std::net::IpAddr;

use penstock_policy::model::ObjectKey;

/// Why a local pod has no port, or what somebody claims of a pod's port.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, thiserror::Error)]
pub enum PodProblem {
    /// No route leads to any of its addresses, and no neighbour on a bridge has one.
    #[error(
        "pod {pod}: no host route to {addresses}; waiting for the CNI plugin to set one, for its result, or for a neighbour on a bridge to answer; a pod without a veth on the node (macvlan, SR-IOV) cannot be served: keep policies off it"
    )]
    NoRoute { pod: ObjectKey, addresses: String },
    /// The route leads to something other than a veth.
    #[error("pod {pod}: the route to {address} leads to {link}, which is not a veth; only veth pairs are supported")]
    NotVeth { pod: ObjectKey, address: IpAddr, link: String },
    #[error(
        "pod {pod}: its addresses are behind {first} and {second}; a pod has one interface: correct its podIPs or the routes"
    )]
    TwoLinks { pod: ObjectKey, first: String, second: String },
    #[error(
        "pods {first} and {second}: both are behind {link}; an interface has one pod: correct their podIPs or the routes"
    )]
    TwoPods { first: ObjectKey, second: ObjectKey, link: String },
    #[error(
        "pods {first} and {second}: both have {address}; {first} gets it, because it is not terminating or started later: delete {second}, or correct its podIPs"
    )]
    AddressTaken {
        first: ObjectKey,
        /// The other, which does not get it.
        second: ObjectKey,
        address: IpAddr,
    },
    /// Neighbours say that its address is behind an interface that is not its own.
    #[error(
        "pod {pod}: neighbours say that {address} is behind {link}, which is another pod's or not the first that they named; the binding stays as it is: somebody claims the pod's address, look at what runs behind {link}"
    )]
    Claimed { pod: ObjectKey, address: IpAddr, link: String },
    /// It has given its interface the MAC address of another pod on the bridge.
    #[error(
        "pod {pod}: behind {link} is the MAC address {mac} of another pod on the same bridge; the other pod keeps it: give the interface another address, and look at what runs in the pod"
    )]
    MacTaken { pod: ObjectKey, link: String, mac: String },
    /// It has interfaces beside the one with its addresses.
    #[error(
        "pod {pod}: policy is not enforced on its other interfaces ({interfaces}); leave them out, or keep policies off the pod"
    )]
    OtherInterfaces { pod: ObjectKey, interfaces: String },
    /// A veth of the node that nobody has named leads to it, too.
    #[error(
        "pod {pod}: policy is not enforced on {link}, which leads to it beside its interface; take it away, or keep policies off the pod"
    )]
    AnotherVeth { pod: ObjectKey, index: u32, link: String },
    #[error("pod {pod}: {link} is down; set it up (ip link set {link} up)")]
    Down { pod: ObjectKey, link: String },
    #[error(
        "pod {pod}: the Ethernet address behind {link} is not known yet; waiting for the veth's other end or a neighbour entry"
    )]
    NoMac { pod: ObjectKey, link: String },
    /// Its interface's MTU is larger than a frame. It is served all the same.
    #[error(
        "pod {pod}: MTU {mtu} of {link} is more than the {largest} that a frame holds: of longer packets only those of established connections pass; TCP is told to send shorter ones; lower the MTU to {largest}, or raise umem.frame_size"
    )]
    TooLong { pod: ObjectKey, link: String, mtu: u32, largest: u32 },
}

impl PodProblem {
    /// Whether it passes by itself when it is one of a pod that has just come or is about to go.
    pub fn can_pass(&self) -> bool {
        match self {
            Self::NoRoute { .. }
            | Self::TwoLinks { .. }
            | Self::TwoPods { .. }
            | Self::AddressTaken { .. }
            | Self::Down { .. }
            | Self::NoMac { .. } => true,
            Self::NotVeth { .. }
            | Self::TooLong { .. }
            | Self::Claimed { .. }
            | Self::MacTaken { .. }
            | Self::OtherInterfaces { .. }
            | Self::AnotherVeth { .. } => false,
        }
    }

    /// Whether the pod cannot be served as it is wired.
    pub fn keeps_from_service(&self) -> bool {
        matches!(self, Self::NotVeth { .. } | Self::TooLong { .. })
    }

    pub fn pods(&self) -> impl Iterator<Item = &ObjectKey> {
        let (one, other) = match self {
            Self::TwoPods { first, second, .. } | Self::AddressTaken { first, second, .. } => (first, Some(second)),
            Self::NoRoute { pod, .. }
            | Self::NotVeth { pod, .. }
            | Self::TwoLinks { pod, .. }
            | Self::Down { pod, .. }
            | Self::NoMac { pod, .. }
            | Self::Claimed { pod, .. }
            | Self::MacTaken { pod, .. }
            | Self::OtherInterfaces { pod, .. }
            | Self::AnotherVeth { pod, .. }
            | Self::TooLong { pod, .. } => (pod, None),
        };
        std::iter::once(one).chain(other)
    }
}

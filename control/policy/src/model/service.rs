//! Services and EndpointSlices, reduced to what decides where a packet to a cluster address goes.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{ObjectKey, PortProtocol, Selector};

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Service {
    pub key: ObjectKey,
    /// Its cluster addresses, of each family at most one. Empty if it is headless, of type ExternalName, or left to
    /// another proxy.
    pub addresses: Vec<IpAddr>,
    /// Its other addresses: external ones, and those of its load balancer.
    #[serde(default)]
    pub external: Vec<IpAddr>,
    /// Its ports; a name occurs once, and a number once for each protocol.
    pub ports: Vec<ServicePort>,
    /// `internalTrafficPolicy: Local`: only backends of the client's node serve.
    pub local_only: bool,
    /// The pods behind it, where EndpointSlices do not say; `None` without a selector.
    pub selector: Option<Selector>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ServicePort {
    /// Its name, by which EndpointSlices refer to it; empty if it is the only one.
    pub name: String,
    pub protocol: PortProtocol,
    /// Its number at the cluster address.
    pub number: u16,
    /// Its number at the pods that the selector names.
    pub target: TargetPort,
    /// Its number at the addresses of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_port: Option<u16>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum TargetPort {
    Number(u16),
    Name(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum AddressFamily {
    V4,
    V6,
}

impl AddressFamily {
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The `addressType` in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// An EndpointSlice: some of the backends of a Service, of one family.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct EndpointSlice {
    pub key: ObjectKey,
    /// The Service in its namespace whose backends it lists: label `kubernetes.io/service-name`.
    pub service: Option<String>,
    /// Its ports; each is one at all endpoints.
    pub ports: Vec<EndpointPort>,
    /// Its endpoints, all of one family.
    pub endpoints: Vec<ServiceEndpoint>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct EndpointPort {
    pub name: String,
    pub protocol: PortProtocol,
    pub number: u16,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ServiceEndpoint {
    /// Its address: the first one of a list whose entries are the same endpoint.
    pub address: IpAddr,
    /// Takes new connections.
    pub ready: bool,
    /// Answers, whether terminating or not.
    pub serving: bool,
    pub terminating: bool,
    /// The node on which it runs, if it says so.
    pub node: Option<String>,
    /// The nodes that should prefer it (`hints.forNodes`).
    pub node_hints: Vec<String>,
    /// The zones that should prefer it (`hints.forZones`).
    pub zone_hints: Vec<String>,
}

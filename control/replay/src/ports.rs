//! Which port the interfaces of a capture are.

use std::str::FromStr;

use penstock_dataplane::forward::PortId;
use penstock_policy::model::ObjectKey;
use rustc_hash::FxHashMap;

use super::capture::Interface;
use super::cluster::{Cluster, HOST, UPLINK};

/// An interface of the capture and the port that it is: `veth1=shop/web`, `eth0=uplink`, `cni0=host`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The interface's name in a pcapng capture.
    pub interface: String,
    /// The port.
    pub port: PortName,
}

/// A port by its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortName {
    /// A local pod's.
    Pod(ObjectKey),
    /// Into the node's own stack.
    Host,
    /// To everywhere else.
    Uplink,
}

/// A mapping that cannot be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PortError {
    /// It is not written as a mapping.
    #[error("--ports {0}: write INTERFACE=PORT, where PORT is NAMESPACE/POD, host or uplink")]
    Form(String),
    /// The pod is none here.
    #[error("--ports {interface}={pod}: no pod of this name is on the node; see its manifests, or --node")]
    UnknownPod {
        /// The interface.
        interface: String,
        /// The pod.
        pod: ObjectKey,
    },
}

impl FromStr for Mapping {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let malformed = || PortError::Form(text.to_owned());
        let (interface, port) = text.split_once('=').ok_or_else(malformed)?;
        let port = match port {
            "host" => PortName::Host,
            "uplink" => PortName::Uplink,
            pod => match pod.split_once('/') {
                Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
                    PortName::Pod(ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() })
                }
                _ => return Err(malformed()),
            },
        };
        if interface.is_empty() { Err(malformed()) } else { Ok(Self { interface: interface.to_owned(), port }) }
    }
}

/// From the interfaces of captures to ports, in one cluster.
#[derive(Debug, Default)]
pub struct PortMap {
    by_name: FxHashMap<String, PortId>,
    by_interface: Vec<Option<PortId>>,
}

impl PortMap {
    /// With these mappings, as the cluster has its ports now.
    ///
    /// # Errors
    /// A pod is not there.
    pub fn new(mappings: &[Mapping], cluster: &Cluster) -> Result<Self, PortError> {
        let mut by_name = FxHashMap::default();
        for Mapping { interface, port } in mappings {
            let port = match port {
                PortName::Host => HOST,
                PortName::Uplink => UPLINK,
                PortName::Pod(pod) => cluster
                    .pod_port(pod)
                    .ok_or_else(|| PortError::UnknownPod { interface: interface.clone(), pod: pod.clone() })?,
            };
            by_name.insert(interface.clone(), port);
        }
        Ok(Self { by_name, by_interface: Vec::new() })
    }

    /// The port that an interface is known to be. `interfaces` are those that the captures told of so far.
    #[inline]
    pub fn port(&mut self, interface: usize, interfaces: &[Interface]) -> Option<PortId> {
        if self.by_name.is_empty() {
            return None;
        }
        while self.by_interface.len() < interfaces.len() {
            let name = interfaces[self.by_interface.len()].name.as_ref();
            self.by_interface.push(name.and_then(|name| self.by_name.get(name)).copied());
        }
        self.by_interface[interface]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_port_mappings_parse_and_others_are_rejected() {
        let pod = ObjectKey { namespace: "shop".to_owned(), name: "web".to_owned() };
        for (text, port) in [
            ("veth1=shop/web", Some(PortName::Pod(pod))),
            ("eth0=uplink", Some(PortName::Uplink)),
            ("cni0=host", Some(PortName::Host)),
            ("eth0", None),
            ("=host", None),
            ("eth0=", None),
            ("eth0=web", None),
            ("eth0=/web", None),
        ] {
            let mapping = text.parse::<Mapping>().ok();
            assert_eq!(mapping.map(|mapping| mapping.port), port, "{text}");
        }
    }
}

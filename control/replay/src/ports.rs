//! Maps the interfaces of a capture to ports.

use std::str::FromStr;

use penstock_dataplane::forward::PortId;
use penstock_policy::model::ObjectKey;
use rustc_hash::FxHashMap;

use super::capture::CaptureInterface;
use super::cluster::{HOST, ReplayCluster, UPLINK};

/// An interface of the capture and its port: `veth1=shop/web`, `eth0=uplink`, `cni0=host`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    pub interface: String,
    pub port: PortName,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortName {
    Pod(ObjectKey),
    Host,
    Uplink,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PortMappingError {
    #[error("--ports {0}: write INTERFACE=PORT, where PORT is NAMESPACE/POD, host or uplink")]
    Form(String),
    #[error("--ports {interface}={pod}: the node has no pod of this name; check its manifests, or --node")]
    UnknownPod { interface: String, pod: ObjectKey },
}

impl FromStr for Mapping {
    type Err = PortMappingError;

    fn from_str(text: &str) -> Result<Self, PortMappingError> {
        let malformed = || PortMappingError::Form(text.to_owned());
        let (interface, port) = text.split_once('=').ok_or_else(malformed)?;
        let port = match port {
            "host" => PortName::Host,
            "uplink" => PortName::Uplink,
            pod => PortName::Pod(ObjectKey::parse(pod).ok_or_else(malformed)?),
        };
        if interface.is_empty() { Err(malformed()) } else { Ok(Self { interface: interface.to_owned(), port }) }
    }
}

/// The ports of a capture's interfaces, in one cluster.
#[derive(Debug, Default)]
pub struct PortMap {
    by_name: FxHashMap<String, PortId>,
    by_interface: Vec<Option<PortId>>,
    /// The kind of an interface that has none of the names.
    other: Option<PortId>,
}

impl PortMap {
    /// Resolves these mappings in the current cluster.
    pub fn new(mappings: &[Mapping], cluster: &ReplayCluster) -> Result<Self, PortMappingError> {
        let mut by_name = FxHashMap::default();
        for Mapping { interface, port } in mappings {
            let port = match port {
                PortName::Host => HOST,
                PortName::Uplink => UPLINK,
                PortName::Pod(pod) => cluster
                    .pod_port(pod)
                    .ok_or_else(|| PortMappingError::UnknownPod { interface: interface.clone(), pod: pod.clone() })?,
            };
            by_name.insert(interface.clone(), port);
        }
        Ok(Self { by_name, by_interface: Vec::new(), other: None })
    }

    /// The ports of interfaces that are named as a daemon's capture names them.
    pub(super) fn of_daemon(cluster: &ReplayCluster) -> Self {
        let pods = cluster.pod_ports().map(|(pod, port)| (pod.to_string(), port));
        let by_name = pods.chain([("node".to_owned(), HOST)]).collect();
        Self { by_name, by_interface: Vec::new(), other: Some(UPLINK) }
    }

    /// The port mapped to an interface. `interfaces` are those of the captures so far.
    #[inline]
    pub fn port(&mut self, interface: usize, interfaces: &[CaptureInterface]) -> Option<PortId> {
        if self.by_name.is_empty() {
            return None;
        }
        while self.by_interface.len() < interfaces.len() {
            let name = interfaces[self.by_interface.len()].name.as_ref();
            self.by_interface.push(name.and_then(|name| self.by_name.get(name)).copied().or(self.other));
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

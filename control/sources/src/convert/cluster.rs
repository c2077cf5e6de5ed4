//! Namespace, Node and Pod.

use std::collections::HashSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Namespace, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use penstock_policy::model::{self, NamedPort, PodLifetime};
use serde::Deserialize;

use super::distinct::Distinct;
use super::{ConversionSettings, FieldError, FieldPathRef, FieldProblem, names, port};

/// The label with a namespace's name, which the API server sets.
pub(crate) const NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// The annotation that isolated a namespace in v1beta1.
pub const ISOLATION_ANNOTATION: &str = "net.beta.kubernetes.io/network-policy";

/// Converts a Namespace. Its name label is its name whatever is written, as the API server has it (`SetDefaults_Namespace` in
/// pkg/apis/core/v1/defaults.go): otherwise a manifest could claim the peers of another namespace.
pub fn namespace(namespace: &Namespace, settings: ConversionSettings) -> Result<model::Namespace, FieldError> {
    let name = super::name(&namespace.metadata, names::dns_label)?;
    let mut labels = super::labels(&namespace.metadata)?;
    labels.insert(NAME_LABEL.to_owned(), name.clone());
    let annotations = namespace.metadata.annotations.as_ref();
    let default_deny_ingress = match annotations.and_then(|annotations| annotations.get(ISOLATION_ANNOTATION)) {
        Some(text) if settings.v1beta1 => isolates_ingress(text)?,
        _ => false,
    };
    let terminating = namespace.metadata.deletion_timestamp.is_some();
    Ok(model::Namespace { name, labels, default_deny_ingress, terminating })
}

/// Reads the value of the isolation annotation.
fn isolates_ingress(text: &str) -> Result<bool, FieldError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Isolation {
        ingress: Option<Ingress>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Ingress {
        isolation: Option<IsolationMode>,
    }
    #[derive(Deserialize)]
    enum IsolationMode {
        DefaultDeny,
    }
    match serde_json::from_str::<Isolation>(text) {
        Ok(Isolation { ingress }) => {
            Ok(matches!(ingress, Some(Ingress { isolation: Some(IsolationMode::DefaultDeny) })))
        }
        Err(error) => {
            let at = FieldPathRef::OBJECT;
            let (metadata, problem) = (at.field("metadata"), FieldProblem::Annotation(error.to_string()));
            Err(metadata.field("annotations").field(ISOLATION_ANNOTATION).invalid(problem))
        }
    }
}

pub fn node(node: &Node) -> Result<model::Node, FieldError> {
    let name = super::name(&node.metadata, names::dns_subdomain)?;
    let at = FieldPathRef::OBJECT;
    let status_at = at.field("status");
    let addresses_at = status_at.field("addresses");
    let (mut addresses, mut status_addresses) = (Distinct::default(), Distinct::default());
    for (i, entry) in node.status.iter().flat_map(|status| &status.addresses).flatten().enumerate() {
        if matches!(entry.type_.as_str(), "InternalIP" | "ExternalIP") {
            let entry_at = addresses_at.index(i);
            addresses.push(unicast(&entry.address, &entry_at.field("address"))?);
        }
        // Most other kinds are names.
        if let Ok(address) = unicast(&entry.address, &addresses_at) {
            status_addresses.push(address);
        }
    }
    let labels = super::labels(&node.metadata)?;
    let (addresses, status_addresses) = (addresses.into_vec(), status_addresses.into_vec());
    Ok(model::Node { name, labels, addresses, status_addresses })
}

pub fn pod(pod: &Pod) -> Result<model::Pod, FieldError> {
    let key = super::key(&pod.metadata)?;
    let labels = super::labels(&pod.metadata)?;
    let spec = pod.spec.as_ref();
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let addresses = addresses(pod)?;
    Ok(model::Pod {
        key,
        labels,
        node: spec.and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty()),
        other_interfaces: other_interfaces(pod, &addresses),
        addresses,
        host_network: spec.and_then(|spec| spec.host_network).unwrap_or(false),
        finished: matches!(phase, Some("Succeeded" | "Failed")),
        ports: named_ports(pod)?,
        lifetime: lifetime(pod),
        controller: controller(pod),
        limits: super::limits(&pod.metadata)?,
    })
}

/// The owner that controls the pod, by what stays of its name: a Deployment's ReplicaSet ends with the hash of the template,
/// which the pod has as a label, and a CronJob's Job with its time in minutes.
fn controller(pod: &Pod) -> Option<model::Controller> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    let is_hash = |last: &str| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get("pod-template-hash")).is_some_and(|hash| hash == last)
    };
    let is_time = |last: &str| last.len() >= 8 && last.bytes().all(|digit| digit.is_ascii_digit());
    let (kind, name) = match (owner.kind.as_str(), owner.name.rsplit_once('-')) {
        ("ReplicaSet", Some((name, last))) if is_hash(last) => ("Deployment", name),
        ("Job", Some((name, last))) if is_time(last) => ("CronJob", name),
        (kind, _) => (kind, owner.name.as_str()),
    };
    Some(model::Controller { kind: kind.to_owned(), name: name.to_owned() })
}

const MOST_INTERFACES: usize = 16;

/// An entry of the annotation in which Multus and others note a pod's networks
/// (<https://github.com/k8snetworkplumbingwg/multi-net-spec>).
#[derive(Deserialize)]
struct NetworkStatus {
    #[serde(default)]
    name: String,
    #[serde(default)]
    interface: String,
    #[serde(default)]
    ips: Vec<String>,
    #[serde(default)]
    default: bool,
}

/// The interfaces beside that of the pod's addresses. What is not understood tells of none: whoever wrote it may not mean policy.
fn other_interfaces(pod: &Pod, addresses: &[IpAddr]) -> Vec<String> {
    let annotations = pod.metadata.annotations.as_ref();
    let noted = annotations.and_then(|all| all.get("k8s.v1.cni.cncf.io/network-status"));
    let networks: Vec<NetworkStatus> = noted.and_then(|noted| serde_json::from_str(noted).ok()).unwrap_or_default();
    let is_main = |network: &NetworkStatus| {
        network.default || network.ips.iter().any(|ip| ip.parse().is_ok_and(|ip| addresses.contains(&ip)))
    };
    let others = networks.into_iter().filter(|network| !is_main(network));
    let named = others.map(|network| if network.interface.is_empty() { network.name } else { network.interface });
    named.take(MOST_INTERFACES).collect()
}

fn lifetime(pod: &Pod) -> PodLifetime {
    let seconds = |time: &Time| time.0.as_second();
    PodLifetime {
        leaving: pod.metadata.deletion_timestamp.is_some(),
        started: pod.status.as_ref().and_then(|status| status.start_time.as_ref()).map(seconds),
        created: pod.metadata.creation_timestamp.as_ref().map(seconds),
    }
}

/// `status.podIPs`, or else `status.podIP`.
fn addresses(pod: &Pod) -> Result<Vec<IpAddr>, FieldError> {
    let Some(status) = &pod.status else { return Ok(Vec::new()) };
    let at = FieldPathRef::OBJECT;
    let status_at = at.field("status");
    let mut addresses = Distinct::default();
    let list_at = status_at.field("podIPs");
    for (i, entry) in status.pod_ips.iter().flatten().enumerate() {
        let entry_at = list_at.index(i);
        addresses.push(unicast(&entry.ip, &entry_at.field("ip"))?);
    }
    if let Some(text) = status.pod_ip.as_deref().filter(|text| !text.is_empty()) {
        addresses.push(unicast(text, &status_at.field("podIP"))?);
    }
    Ok(addresses.into_vec())
}

/// The named ports of a pod's containers and sidecars (init containers that keep running). The first of a name and
/// protocol counts, as for a Service.
fn named_ports(pod: &Pod) -> Result<Vec<NamedPort>, FieldError> {
    let Some(spec) = &pod.spec else { return Ok(Vec::new()) };
    let at = FieldPathRef::OBJECT;
    let spec_at = at.field("spec");
    let (mut found, mut names) = (Vec::new(), HashSet::new());
    let mut collect = |list: &'static str, i: usize, container: &Container| {
        let list_at = spec_at.field(list);
        let container_at = list_at.index(i);
        let ports_at = container_at.field("ports");
        for (i, port) in container.ports.iter().flatten().enumerate() {
            match port::container_port(port, &ports_at.index(i))? {
                Some(port) if names.insert((port.name.clone(), port.protocol)) => found.push(port),
                _ => {}
            }
        }
        Ok(())
    };
    for (i, container) in spec.containers.iter().enumerate() {
        collect("containers", i, container)?;
    }
    for (i, container) in spec.init_containers.iter().flatten().enumerate() {
        if container.restart_policy.as_deref() == Some("Always") {
            collect("initContainers", i, container)?;
        }
    }
    Ok(found)
}

pub(super) fn unicast(text: &str, at: &FieldPathRef<'_>) -> Result<IpAddr, FieldError> {
    let address: IpAddr = text.parse().map_err(|_| at.invalid(FieldProblem::Address(text.to_owned())))?;
    if let IpAddr::V6(v6) = address
        && v6.to_ipv4_mapped().is_some()
    {
        return Err(at.invalid(FieldProblem::Mapped(text.to_owned())));
    }
    let broadcast = address == IpAddr::from([255; 4]);
    match address.is_unspecified() || address.is_loopback() || address.is_multicast() || broadcast {
        true => Err(at.invalid(FieldProblem::NotUnicast(address))),
        false => Ok(address),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    #[test]
    fn a_pods_other_interfaces_are_those_without_its_addresses() {
        for (noted, expected) in [
            (
                r#"[{"name":"cbr0","ips":["10.1.1.5"]},{"name":"shop/x","interface":"net1","ips":["10.9.9.9"]}]"#,
                &["net1"][..],
            ),
            (r#"[{"name":"cbr0","interface":"eth0","default":true},{"name":"shop/x"}]"#, &["shop/x"]),
            (r#"[{"name":"cbr0","default":true}]"#, &[]),
            ("[]", &[]),
            ("no list", &[]),
            (r#"{"name":"x"}"#, &[]),
        ] {
            let annotations = [("k8s.v1.cni.cncf.io/network-status".to_owned(), noted.to_owned())].into();
            let metadata = ObjectMeta { annotations: Some(annotations), ..ObjectMeta::default() };
            let pod = Pod { metadata, ..Pod::default() };
            assert_eq!(other_interfaces(&pod, &["10.1.1.5".parse().unwrap()]), expected, "{noted}");
        }
    }
}

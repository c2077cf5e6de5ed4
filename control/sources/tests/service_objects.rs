//! Services and EndpointSlices in manifests: what they mean, each of their faults with its field, and what stands for
//! EndpointSlices where there are none.

use std::fs;
use std::net::IpAddr;

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use penstock_policy::model::{EndpointSlice, Object, PortProtocol, Service, TargetPort};
use penstock_sources::convert;
use penstock_sources::manifest::{Manifests, Options, read_manifests};
use serde_json::{Value, json};

fn read(text: &str) -> Result<Manifests, Vec<String>> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, text).unwrap();
    let prefix = format!("{}/", directory.path().display());
    read_manifests(&[&file], &Options::default())
        .map_err(|errors| errors.0.iter().map(|error| error.to_string().replace(&prefix, "")).collect())
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn service(spec: Value) -> (Service, Vec<String>) {
    let object: core::Service =
        serde_json::from_value(json!({"metadata": {"namespace": "shop", "name": "api"}, "spec": spec})).unwrap();
    let (service, wrong) = convert::service(&object).unwrap();
    (service, wrong.iter().map(ToString::to_string).collect())
}

fn slice(rest: Value) -> (EndpointSlice, Vec<String>) {
    let mut object = json!({
        "metadata": {"namespace": "shop", "name": "api-1", "labels": {"kubernetes.io/service-name": "api"}},
        "addressType": "IPv4", "endpoints": [],
    });
    object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    let object: discovery::EndpointSlice = serde_json::from_value(object).unwrap();
    let (slice, wrong) = convert::endpoint_slice(&object).unwrap();
    (slice, wrong.iter().map(ToString::to_string).collect())
}

#[test]
fn a_service_has_its_cluster_addresses_ports_and_settings() {
    let (found, wrong) = service(json!({
        "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00:96::10"],
        "ports": [
            {"name": "http", "port": 80, "targetPort": "web"},
            {"name": "dns", "protocol": "UDP", "port": 53},
        ],
        "selector": {"app": "api"}, "internalTrafficPolicy": "Local",
    }));
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!(found.addresses, ["10.96.0.10", "fd00:96::10"].map(address));
    assert!(found.local_only);
    let ports: Vec<_> = found.ports.iter().map(|port| (port.name.as_str(), port.protocol, port.number)).collect();
    assert_eq!(ports, [("http", PortProtocol::Tcp, 80), ("dns", PortProtocol::Udp, 53)]);
    assert_eq!(found.ports[0].target, TargetPort::Name("web".to_owned()));
    assert_eq!(found.ports[1].target, TargetPort::Number(53));
    let plain = service(json!({"clusterIP": "10.96.0.1"})).0;
    assert_eq!((plain.addresses, plain.local_only), (vec![address("10.96.0.1")], false));
}

/// S1.
#[test]
fn headless_external_and_other_proxies_services_have_no_address() {
    for spec in [
        json!({"clusterIP": "None"}),
        json!({"clusterIPs": ["None"], "clusterIP": "None"}),
        json!({"type": "ExternalName", "externalName": "example.org"}),
        json!({}),
    ] {
        assert_eq!(service(spec.clone()), (Service { addresses: Vec::new(), ..service(spec).0 }, Vec::new()));
    }
    let text = "{apiVersion: v1, kind: Service, metadata: {name: a, labels: {service.kubernetes.io/service-proxy-name: x}}, \
                spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}";
    let read = read(text).unwrap();
    let Object::Service(found) = &read.documents[0].object else { panic!() };
    assert!(found.addresses.is_empty());
}

/// Egress policy is postponed at these: only at what a node translates.
#[test]
fn external_addresses_are_those_that_a_node_translates() {
    let of = |status: Value| {
        let object: core::Service = serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": "api"},
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.10", "externalIPs": ["203.0.113.5"],
                "loadBalancerSourceRanges": ["198.51.100.0/24"], "trafficDistribution": "PreferSameNode",
            },
            "status": {"loadBalancer": {"ingress": [status]}},
        }))
        .unwrap();
        let (service, wrong) = convert::service(&object).unwrap();
        assert!(wrong.is_empty(), "{wrong:?}");
        service.external
    };
    for (ingress, more) in [
        (json!({"ip": "203.0.113.7"}), Some("203.0.113.7")),
        (json!({"ip": "203.0.113.7", "ipMode": "VIP"}), Some("203.0.113.7")),
        // The load balancer keeps the address for itself.
        (json!({"ip": "203.0.113.7", "ipMode": "Proxy"}), None),
        (json!({"hostname": "api.example.org"}), None),
        (json!({"ip": "203.0.113.5"}), None),
    ] {
        let expected: Vec<IpAddr> = ["203.0.113.5"].into_iter().chain(more).map(address).collect();
        assert_eq!(of(ingress.clone()), expected, "{ingress}");
    }
}

#[test]
fn what_is_wrong_in_a_service_is_named_and_the_rest_counts() {
    let ok = json!({"name": "ok", "port": 1});
    for (spec, addresses, ports, expected) in [
        (json!({"clusterIPs": ["10.96.0.300"]}), 0, 0, "spec.clusterIPs[0]: \"10.96.0.300\" is not an IP address"),
        (
            json!({"clusterIPs": ["10.96.0.1", "10.96.0.2"]}),
            1,
            0,
            "spec.clusterIPs[1]: 10.96.0.2 is of the same family as 10.96.0.1",
        ),
        (json!({"clusterIP": "127.0.0.1"}), 0, 0, "spec.clusterIP: 127.0.0.1 cannot be the address"),
        (json!({"ports": [ok, {"name": "x", "port": 0}]}), 0, 1, "spec.ports[1].port: 0 is not a port number"),
        (json!({"ports": [{"port": 1}, {"port": 2}]}), 0, 1, "spec.ports[1].name: \"\" is in the list already"),
        (json!({"ports": [ok, {"name": "b", "port": 1}]}), 0, 1, "spec.ports[1].port: \"1\" is in the list already"),
        (
            json!({"ports": [ok, {"name": "b", "port": 2, "protocol": "ICMP"}]}),
            0,
            1,
            "spec.ports[1].protocol: \"ICMP\"",
        ),
        (json!({"ports": [ok, {"name": "b", "port": 2, "targetPort": "A"}]}), 0, 1, "spec.ports[1].targetPort: \"A\""),
    ] {
        let (found, wrong) = service(spec.clone());
        assert_eq!((found.addresses.len(), found.ports.len(), wrong.len()), (addresses, ports, 1), "{spec} {wrong:?}");
        assert!(wrong[0].starts_with(expected), "{}", wrong[0]);
    }
}

/// S2: conditions that are not given.
#[test]
fn an_endpoint_without_conditions_is_ready_and_serves() {
    let (found, wrong) = slice(json!({
        "ports": [{"name": "http", "port": 8080}, {"name": "any"}],
        "endpoints": [
            {"addresses": ["10.0.0.1"]},
            {"addresses": ["10.0.0.2", "10.0.0.3"], "conditions": {"ready": false, "terminating": true}, "nodeName": "n1",
             "hints": {"forZones": [{"name": "east"}], "forNodes": [{"name": "n1"}]}},
            {"addresses": []},
        ],
    }));
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!((found.service.as_deref(), found.ports.len()), (Some("api"), 1), "a port without a number is none");
    let flags: Vec<_> = found.endpoints.iter().map(|it| (it.address, it.ready, it.serving, it.terminating)).collect();
    assert_eq!(flags, [(address("10.0.0.1"), true, true, false), (address("10.0.0.2"), false, true, true)]);
    let second = &found.endpoints[1];
    assert_eq!(
        (second.node.as_deref(), &second.node_hints, &second.zone_hints),
        (Some("n1"), &vec!["n1".to_owned()], &vec!["east".to_owned()])
    );
}

#[test]
fn an_endpoint_slices_errors_are_named_and_the_rest_counts() {
    let good = json!({"addresses": ["10.0.0.1"]});
    for (rest, endpoints, expected) in [
        (json!({"endpoints": [good, {"addresses": ["nowhere"]}]}), 1, "endpoints[1].addresses[0]: \"nowhere\" is not"),
        (json!({"endpoints": [good, {"addresses": ["fd00::1"]}]}), 1, "endpoints[1].addresses[0]: fd00::1 is not IPv4"),
        (json!({"endpoints": [good, {"addresses": ["127.0.0.1"]}]}), 1, "endpoints[1].addresses[0]: 127.0.0.1 cannot"),
        (
            json!({"endpoints": [good, {"addresses": ["169.254.0.1"]}]}),
            1,
            "endpoints[1].addresses[0]: 169.254.0.1 cannot",
        ),
        (json!({"addressType": "IPX", "endpoints": [good]}), 0, "addressType: \"IPX\" is not an address type"),
        (json!({"ports": [{"port": 1}, {"port": 2}], "endpoints": [good]}), 1, "ports[1].name: \"\" is in the list"),
        (json!({"ports": [{"port": 70000}], "endpoints": [good]}), 1, "ports[0].port: 70000 is not a port number"),
    ] {
        let (found, wrong) = slice(rest.clone());
        assert_eq!((found.endpoints.len(), wrong.len()), (endpoints, 1), "{rest} {wrong:?}");
        assert!(wrong[0].starts_with(expected), "{}", wrong[0]);
    }
    let (names, wrong) = slice(json!({"addressType": "FQDN", "endpoints": [{"addresses": ["example.org"]}]}));
    assert!(names.endpoints.is_empty() && wrong.is_empty());
}

#[test]
fn a_manifest_with_a_fault_is_refused_with_file_line_and_field() {
    let found = read("apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  ports:\n  - port: 0\n").unwrap_err();
    assert_eq!(found, ["a.yaml:6: Service default/a: spec.ports[0].port: 0 is not a port number: use 1 to 65535"]);
    for (version, expected) in [
        (
            "v1beta1",
            "a.yaml:1: EndpointSlice default/a: apiVersion: EndpointSlice of apiVersion discovery.k8s.io/v1beta1 is not",
        ),
        ("v1", "a.yaml:4: EndpointSlice default/a: addressType: \"IP\" is not an address type"),
    ] {
        let text = format!(
            "apiVersion: discovery.k8s.io/{version}\nkind: EndpointSlice\nmetadata: {{name: a}}\naddressType: IP\n"
        );
        let found = read(&text).unwrap_err();
        assert!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");
    }
}

const PODS: &str = "
apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop}
spec:
  clusterIPs: [10.96.0.1, 'fd00:96::1']
  selector: {app: api}
  ports: [{name: http, port: 80, targetPort: web}, {name: dns, port: 53, protocol: UDP, targetPort: 5353}]
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Pod
  metadata: {name: one, namespace: shop, labels: {app: api}}
  spec: {nodeName: n1, containers: [{name: main, ports: [{name: web, containerPort: 8080}]}]}
  status: {podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}]}
- apiVersion: v1
  kind: Pod
  metadata: {name: not-ready, namespace: shop, labels: {app: api}}
  spec: {containers: [{name: main, ports: [{name: web, containerPort: 8080}]}]}
  status: {podIPs: [{ip: 10.0.0.2}], conditions: [{type: Ready, status: 'False'}]}
- apiVersion: v1
  kind: Pod
  metadata: {name: other-number, namespace: shop, labels: {app: api}}
  spec: {containers: [{name: main, ports: [{name: web, containerPort: 8081}]}]}
  status: {podIPs: [{ip: 10.0.0.3}], conditions: [{type: Ready, status: 'True'}]}
- {apiVersion: v1, kind: Pod, metadata: {name: elsewhere, labels: {app: api}}, status: {podIPs: [{ip: 10.0.0.4}]}}
";

#[test]
fn missing_endpoint_slices_are_derived_from_ready_pods() {
    let mut manifests = read(PODS).unwrap();
    assert_eq!(manifests.derive_endpoint_slices(), 1);
    let mut backends: Vec<String> = manifests
        .objects()
        .filter_map(|object| match object {
            Object::EndpointSlice(slice) => Some(slice),
            _ => None,
        })
        .flat_map(|slice| {
            assert_eq!(slice.service.as_deref(), Some("api"));
            let ports = slice.ports.clone();
            slice.endpoints.into_iter().flat_map(move |endpoint| {
                ports
                    .clone()
                    .into_iter()
                    .map(move |port| format!("{} {} {} {}", port.name, endpoint.address, port.number, endpoint.ready))
            })
        })
        .collect();
    backends.sort();
    assert_eq!(
        backends,
        [
            "dns 10.0.0.1 5353 true",
            "dns 10.0.0.2 5353 false",
            "dns 10.0.0.3 5353 true",
            "dns fd00::1 5353 true",
            "http 10.0.0.1 8080 true",
            "http 10.0.0.2 8080 false",
            "http 10.0.0.3 8081 true",
            "http fd00::1 8080 true",
        ]
    );
    let with_slice = format!(
        "{PODS}---\n{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {{name: x}}, addressType: IPv4}}\n"
    );
    assert_eq!(read(&with_slice).unwrap().derive_endpoint_slices(), 0, "where there are some, they count alone");
}

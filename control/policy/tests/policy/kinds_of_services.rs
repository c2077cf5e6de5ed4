//! Each difference between Services, and between their endpoints, that the API has, as kube-proxy of 1.37 treats it for the clients of one
//! node (`CategorizeEndpoints` in its pkg/proxy/topology.go).

use penstock_policy::model::{Object, Service, ServiceEndpoint};
use penstock_policy::render::services::WithoutBackend;

use super::build::selector;
use super::services::{backends, endpoint, engine, frontend, node, service, set, slice};

const OWN: &str = "10.0.0.1:8080";
const OTHER: &str = "10.0.0.2:8080";
const REFUSED: Result<&[&str], WithoutBackend> = Err(WithoutBackend::Refused);
const DROPPED: Result<&[&str], WithoutBackend> = Err(WithoutBackend::Dropped);

/// A name, the Service, its endpoints, and the backends that a new connection may get.
type Row = (&'static str, Service, Vec<ServiceEndpoint>, Result<&'static [&'static str], WithoutBackend>);

fn check(rows: Vec<Row>) {
    for (what, of, endpoints, expected) in rows {
        let mut engine = engine();
        engine.apply([
            set(node("n0", Some("east"))),
            set(Object::Service(of)),
            set(Object::EndpointSlice(slice("api-1", "api", endpoints))),
        ]);
        let found = frontend(&engine, "10.96.0.1").unwrap();
        let chosen = backends(&found);
        let chosen: Vec<&str> = chosen.iter().map(String::as_str).collect();
        let shown = if chosen.is_empty() { Err(found.without) } else { Ok(&chosen[..]) };
        assert_eq!(shown, expected, "{what}");
    }
}

fn on(text: &str, node: &str) -> ServiceEndpoint {
    ServiceEndpoint { node: Some(node.to_owned()), ..endpoint(text) }
}

/// An endpoint of the clients' node, and one of another.
fn two() -> [ServiceEndpoint; 2] {
    [on("10.0.0.1", "n0"), on("10.0.0.2", "n1")]
}

fn leaving(of: &ServiceEndpoint) -> ServiceEndpoint {
    ServiceEndpoint { ready: false, terminating: true, ..of.clone() }
}

fn unready(of: &ServiceEndpoint) -> ServiceEndpoint {
    ServiceEndpoint { ready: false, serving: false, ..of.clone() }
}

fn selected() -> Service {
    Service { selector: Some(selector("app=api")), ..service("api", 1, false) }
}

fn plain() -> Service {
    service("api", 1, false)
}

fn local() -> Service {
    service("api", 1, true)
}

#[test]
fn kinds_of_services_have_the_backends_of_kube_proxy() {
    let [own, other] = two();
    let both = || vec![own.clone(), other.clone()];
    // The endpoints' controller says ready of a pod that is not.
    let published = ServiceEndpoint { ready: true, ..unready(&other) };
    check(vec![
        ("by a selector", selected(), both(), Ok(&[OWN, OTHER])),
        ("without a selector", plain(), vec![other.clone()], Ok(&[OTHER])),
        ("endpoints of nobody", plain(), vec![endpoint("198.51.100.9")], Ok(&["198.51.100.9:8080"])),
        ("publishNotReadyAddresses", selected(), vec![published], Ok(&[OTHER])),
        ("an endpoint twice", selected(), vec![own.clone(), own.clone()], Ok(&[OWN])),
        ("a new pod with the address of one that ends", selected(), vec![own.clone(), leaving(&own)], Ok(&[OWN])),
        ("not ready", selected(), vec![own.clone(), unready(&other)], Ok(&[OWN])),
        ("one that ends beside a ready one", selected(), vec![own.clone(), leaving(&other)], Ok(&[OWN])),
        ("all end, and serve", selected(), vec![leaving(&other)], Ok(&[OTHER])),
        ("all end, and none serves", selected(), vec![unready(&leaving(&other))], REFUSED),
        ("the last endpoint has gone", selected(), vec![], REFUSED),
        ("internalTrafficPolicy: Local", local(), both(), Ok(&[OWN])),
        ("Local, none here", local(), vec![other.clone()], DROPPED),
        ("Local, one here that ends", local(), vec![leaving(&own), other.clone()], Ok(&[OWN])),
        ("Local, none anywhere", local(), vec![unready(&other)], REFUSED),
    ]);
}

/// `trafficDistribution` is for the endpoints' controller, which writes hints.
#[test]
fn hints_of_each_traffic_distribution_are_kube_proxys() {
    let [own, other] = two();
    let hinted = |of: &ServiceEndpoint, nodes: &[&str], zones: &[&str]| ServiceEndpoint {
        node_hints: nodes.iter().map(|&hint| hint.to_owned()).collect(),
        zone_hints: zones.iter().map(|&hint| hint.to_owned()).collect(),
        ..of.clone()
    };
    let of = |own_hints: (&[&str], &[&str]), other_hints: (&[&str], &[&str])| {
        vec![hinted(&own, own_hints.0, own_hints.1), hinted(&other, other_hints.0, other_hints.1)]
    };
    let mut gone = of((&["n0"], &["east"]), (&["n1"], &["west"]));
    gone[0] = unready(&gone[0]);
    check(vec![
        ("PreferSameNode", selected(), of((&["n0"], &["east"]), (&["n1"], &["east"])), Ok(&[OWN])),
        ("PreferSameNode, none here", selected(), of((&["n1"], &["west"]), (&["n1"], &["east"])), Ok(&[OTHER])),
        ("PreferSameZone, PreferClose", selected(), of((&[], &["west"]), (&[], &["east"])), Ok(&[OTHER])),
        ("two zones for one endpoint", selected(), of((&[], &["west", "east"]), (&[], &["west"])), Ok(&[OWN])),
        ("a zone without an endpoint", selected(), of((&[], &["west"]), (&[], &["west"])), Ok(&[OWN, OTHER])),
        ("an endpoint without hints", selected(), of((&["n0"], &["east"]), (&[], &[])), Ok(&[OWN, OTHER])),
        ("the close one is not ready", selected(), gone, Ok(&[OTHER])),
        ("internalTrafficPolicy: Local", local(), of((&["n1"], &["west"]), (&["n1"], &["west"])), Ok(&[OWN])),
    ]);
}

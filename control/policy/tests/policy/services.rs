//! Services: which backends a node's clients may get, against a plain list of kube-proxy's decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_policy::engine::{Engine, EngineSettings, TranslatedBy};
use penstock_policy::flow::FlowEndpoint;
use penstock_policy::model::*;
use penstock_policy::render::services::{Backend, ClientPlace, Selection, WithoutBackend, select};
use penstock_policy::service_flows::{Without, service_flows};
use proptest::prelude::*;

const NODES: [&str; 3] = ["n0", "n1", "n2"];
const ZONES: [&str; 2] = ["east", "west"];

fn key(name: &str) -> ObjectKey {
    ObjectKey { namespace: "shop".to_owned(), name: name.to_owned() }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn node(name: &str, zone: Option<&str>) -> Object {
    let labels = zone.map(|zone| ("topology.kubernetes.io/zone".to_owned(), zone.to_owned())).into_iter().collect();
    Object::Node(Node { name: name.to_owned(), labels, addresses: Vec::new(), status_addresses: Vec::new() })
}

fn port(name: &str, protocol: PortProtocol, number: u16) -> ServicePort {
    ServicePort { name: name.to_owned(), protocol, number, target: TargetPort::Number(number), node_port: None }
}

/// A Service on 10.96.0.`number` and fd00:96::`number`, with port 80/TCP `http` and 53/UDP `dns`.
pub(crate) fn service(name: &str, number: u8, local_only: bool) -> Service {
    Service {
        key: key(name),
        addresses: vec![address(&format!("10.96.0.{number}")), address(&format!("fd00:96::{number:x}"))],
        ports: vec![port("http", PortProtocol::Tcp, 80), port("dns", PortProtocol::Udp, 53)],
        external: Vec::new(),
        local_only,
        selector: None,
    }
}

pub(crate) fn endpoint(text: &str) -> ServiceEndpoint {
    ServiceEndpoint {
        address: address(text),
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        node_hints: Vec::new(),
        zone_hints: Vec::new(),
    }
}

pub(crate) fn slice(name: &str, service: &str, endpoints: Vec<ServiceEndpoint>) -> EndpointSlice {
    let port = |name: &str, protocol, number| EndpointPort { name: name.to_owned(), protocol, number };
    EndpointSlice {
        key: key(name),
        service: Some(service.to_owned()),
        ports: vec![port("http", PortProtocol::Tcp, 8080), port("dns", PortProtocol::Udp, 5353)],
        endpoints,
    }
}

pub(crate) fn set(object: Object) -> ObjectChange {
    ObjectChange::Set(object)
}

pub(crate) fn engine() -> Engine {
    Engine::new(EngineSettings::for_node("n0"))
}

/// The backends of a Service's port at one of its addresses, for clients on `n0`.
fn selected(engine: &Engine, service: &Service, port: &ServicePort, at: IpAddr) -> Selection {
    let slices = engine.state().endpoint_slices(&service.key).map(|slice| &**slice);
    select(service, port, AddressFamily::of(at), slices, &ClientPlace::on("n0", engine.state()))
}

/// The same of the first port of the Service that has this address.
pub(crate) fn frontend(engine: &Engine, text: &str) -> Option<Selection> {
    let service = engine.state().services().find(|service| service.addresses.contains(&address(text)))?;
    Some(selected(engine, service, &service.ports[0], address(text)))
}

pub(crate) fn backends(selection: &Selection) -> Vec<String> {
    let text = |backend: &Backend| format!("{}:{}", IpAddr::from(backend.address), backend.port);
    selection.backends.iter().map(text).collect()
}

/// kube-proxy's decision, written as its list of cases (`CategorizeEndpoints`): the backends, and whether a packet is
/// dropped where there are none.
fn oracle(
    slices: &[&EndpointSlice],
    port_name: &str,
    protocol: PortProtocol,
    v4: bool,
    local_only: bool,
    zone: Option<&str>,
) -> (BTreeSet<(IpAddr, u16)>, bool) {
    let mut all: BTreeMap<(IpAddr, u16), &ServiceEndpoint> = BTreeMap::new();
    for slice in slices {
        for port in &slice.ports {
            if port.name != port_name || port.protocol != protocol {
                continue;
            }
            for endpoint in &slice.endpoints {
                if endpoint.address.is_ipv4() != v4 {
                    continue;
                }
                let key = (endpoint.address, port.number);
                if !all.contains_key(&key) || !endpoint.terminating {
                    all.insert(key, endpoint);
                }
            }
        }
    }
    let pick = |wanted: &dyn Fn(&ServiceEndpoint) -> bool| -> BTreeSet<(IpAddr, u16)> {
        all.iter().filter(|(_, endpoint)| wanted(endpoint)).map(|(key, _)| *key).collect()
    };
    let is_local = |endpoint: &ServiceEndpoint| endpoint.node.as_deref() == Some("n0");
    if local_only {
        let any = !pick(&|it| it.ready || it.serving && it.terminating).is_empty();
        let local_ready = pick(&|it| it.ready && is_local(it));
        let local_leaving = pick(&|it| it.serving && it.terminating && is_local(it));
        let chosen = if local_ready.is_empty() { local_leaving } else { local_ready };
        return (chosen, any);
    }
    let ready: Vec<&&ServiceEndpoint> = all.values().filter(|it| it.ready).collect();
    if ready.is_empty() {
        return (pick(&|it| it.serving && it.terminating), false);
    }
    if ready.iter().all(|it| !it.node_hints.is_empty())
        && ready.iter().any(|it| it.node_hints.contains(&"n0".to_owned()))
    {
        return (pick(&|it| it.ready && it.node_hints.contains(&"n0".to_owned())), false);
    }
    if let Some(zone) = zone.map(str::to_owned)
        && ready.iter().all(|it| !it.zone_hints.is_empty())
        && ready.iter().any(|it| it.zone_hints.contains(&zone))
    {
        return (pick(&|it| it.ready && it.zone_hints.contains(&zone)), false);
    }
    (pick(&|it| it.ready), false)
}

prop_compose! {
    fn any_endpoint(always_hinted: bool)(
        number in 1u8..7, v6 in prop::bool::weighted(0.3), ready in prop::bool::weighted(0.6),
        serving in prop::bool::weighted(0.7), terminating in prop::bool::weighted(0.3), node in prop::option::of(0usize..3),
        nodes in prop::collection::vec(0usize..3, 0..3), zones in prop::collection::vec(0usize..2, 0..3),
    ) -> ServiceEndpoint {
        let hints = |numbers: Vec<usize>, names: &[&str]| -> Vec<String> {
            let numbers = if numbers.is_empty() && always_hinted { vec![1] } else { numbers };
            numbers.into_iter().map(|number| names[number].to_owned()).collect()
        };
        let text = if v6 { format!("fd00::{number}") } else { format!("10.0.0.{number}") };
        ServiceEndpoint {
            ready, serving, terminating,
            node: node.map(|node| NODES[node].to_owned()),
            node_hints: hints(nodes, &NODES),
            zone_hints: hints(zones, &ZONES),
            ..endpoint(&text)
        }
    }
}

fn any_endpoints() -> impl Strategy<Value = Vec<ServiceEndpoint>> {
    any::<bool>().prop_flat_map(|hinted| prop::collection::vec(any_endpoint(hinted), 0..6))
}

/// A step of a history: of Services `a` and `b`, their slices, and the own node's zone.
#[derive(Clone, Debug)]
enum Step {
    Service(usize, bool),
    NoService(usize),
    Slice(usize, usize, Vec<ServiceEndpoint>),
    NoSlice(usize),
    Zone(Option<usize>),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0usize..2, any::<bool>()).prop_map(|(of, local)| Step::Service(of, local)),
        1 => (0usize..2).prop_map(Step::NoService),
        6 => (0usize..4, 0usize..2, any_endpoints()).prop_map(|(slice, of, endpoints)| Step::Slice(slice, of, endpoints)),
        1 => (0usize..4).prop_map(Step::NoSlice),
        1 => prop::option::of(0usize..2).prop_map(Step::Zone),
    ]
}

const SERVICES: [&str; 2] = ["a", "b"];

#[derive(Default)]
struct Plain {
    services: BTreeMap<usize, bool>,
    slices: BTreeMap<usize, EndpointSlice>,
    zone: Option<&'static str>,
}

impl Plain {
    fn take(&mut self, step: &Step) -> ObjectChange {
        match step {
            Step::Service(of, local) => {
                self.services.insert(*of, *local);
                set(Object::Service(service(SERVICES[*of], *of as u8 + 1, *local)))
            }
            Step::NoService(of) => {
                self.services.remove(of);
                ObjectChange::Delete(ObjectRef::Service(key(SERVICES[*of])))
            }
            Step::Slice(number, of, endpoints) => {
                let it = slice(&format!("slice-{number}"), SERVICES[*of], endpoints.clone());
                self.slices.insert(*number, it.clone());
                set(Object::EndpointSlice(it))
            }
            Step::NoSlice(number) => {
                self.slices.remove(number);
                ObjectChange::Delete(ObjectRef::EndpointSlice(key(&format!("slice-{number}"))))
            }
            Step::Zone(zone) => {
                self.zone = zone.map(|zone| ZONES[zone]);
                set(node("n0", self.zone))
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_history_gives_the_backends_that_kube_proxy_would_use(steps in prop::collection::vec(any_step(), 1..25)) {
        let (mut engine, mut plain) = (engine(), Plain::default());
        for step in &steps {
            engine.apply([plain.take(step)]);
        }
        for (of, local_only) in &plain.services {
            let slices: Vec<&EndpointSlice> =
                plain.slices.values().filter(|it| it.service.as_deref() == Some(SERVICES[*of])).collect();
            let object = service(SERVICES[*of], *of as u8 + 1, *local_only);
            for cluster in &object.addresses {
                for port in &object.ports {
                    let found = selected(&engine, &object, port, *cluster);
                    let (expected, dropped) =
                        oracle(&slices, &port.name, port.protocol, cluster.is_ipv4(), *local_only, plain.zone);
                    let chosen: BTreeSet<(IpAddr, u16)> =
                        found.backends.iter().map(|it| (it.address.into(), it.port)).collect();
                    prop_assert_eq!(&chosen, &expected);
                    prop_assert_eq!(chosen.len(), found.backends.len(), "each once");
                    if expected.is_empty() {
                        prop_assert_eq!(found.without == WithoutBackend::Dropped, dropped);
                    }
                }
            }
        }
    }
}

#[test]
fn terminating_backends_serve_only_where_none_is_ready() {
    let mut engine = engine();
    let leaving = ServiceEndpoint { ready: false, terminating: true, ..endpoint("10.0.0.2") };
    let silent = ServiceEndpoint { ready: false, serving: false, terminating: true, ..endpoint("10.0.0.3") };
    let of = |endpoints| set(Object::EndpointSlice(slice("one", "api", endpoints)));
    engine.apply([
        set(Object::Service(service("api", 1, false))),
        of(vec![endpoint("10.0.0.1"), leaving.clone(), silent.clone()]),
    ]);
    let found = frontend(&engine, "10.96.0.1").unwrap();
    assert_eq!(backends(&found), ["10.0.0.1:8080"]);
    engine.apply([of(vec![leaving, silent])]);
    assert_eq!(backends(&frontend(&engine, "10.96.0.1").unwrap()), ["10.0.0.2:8080"]);
    engine.apply([of(vec![])]);
    let found = frontend(&engine, "10.96.0.1").unwrap();
    assert_eq!((backends(&found).len(), found.without), (0, WithoutBackend::Refused));
}

/// internalTrafficPolicy Local.
#[test]
fn a_local_service_uses_only_backends_of_the_node() {
    let mut engine = engine();
    let on = |text: &str, node: &str| ServiceEndpoint { node: Some(node.to_owned()), ..endpoint(text) };
    let of = |endpoints| set(Object::EndpointSlice(slice("one", "api", endpoints)));
    engine.apply([set(Object::Service(service("api", 1, true))), of(vec![on("10.0.0.1", "n0"), on("10.0.0.2", "n1")])]);
    assert_eq!(backends(&frontend(&engine, "10.96.0.1").unwrap()), ["10.0.0.1:8080"]);
    for (endpoints, without) in
        [(vec![on("10.0.0.2", "n1")], WithoutBackend::Dropped), (vec![], WithoutBackend::Refused)]
    {
        engine.apply([of(endpoints)]);
        let found = frontend(&engine, "10.96.0.1").unwrap();
        assert_eq!((backends(&found).len(), found.without), (0, without));
    }
}

/// Hints for the node, then for its zone; only if every ready endpoint has some.
#[test]
fn hints_choose_close_backends_where_all_have_them() {
    let mut engine = engine();
    let hinted = |text: &str, node: &str, zone: &str| ServiceEndpoint {
        node_hints: vec![node.to_owned()],
        zone_hints: vec![zone.to_owned()],
        ..endpoint(text)
    };
    let own = hinted("10.0.0.1", "n0", "east");
    let near = hinted("10.0.0.2", "n1", "east");
    let far = hinted("10.0.0.3", "n2", "west");
    let of = |endpoints: &[&ServiceEndpoint]| {
        set(Object::EndpointSlice(slice("one", "api", endpoints.iter().map(|it| (*it).clone()).collect())))
    };
    engine.apply([set(Object::Service(service("api", 1, false))), set(node("n0", Some("east")))]);
    let plain = endpoint("10.0.0.4");
    let only_zone = ServiceEndpoint { node_hints: Vec::new(), ..near.clone() };
    for (endpoints, expected) in [
        (&[&own, &near, &far][..], &["10.0.0.1:8080"][..]),
        (&[&near, &far], &["10.0.0.2:8080"]),
        (&[&own, &only_zone, &far], &["10.0.0.1:8080", "10.0.0.2:8080"]),
        (&[&own, &near, &far, &plain], &["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080", "10.0.0.4:8080"]),
        (&[&far], &["10.0.0.3:8080"]),
    ] {
        engine.apply([of(endpoints)]);
        assert_eq!(backends(&frontend(&engine, "10.96.0.1").unwrap()), expected);
    }
    engine.apply([of(&[&near, &far])]);
    engine.apply([set(node("n0", Some("west")))]);
    assert_eq!(backends(&frontend(&engine, "10.96.0.1").unwrap()), ["10.0.0.3:8080"]);
}

#[test]
fn without_endpoint_slices_questions_go_by_selectors() {
    let asked = |selector: Option<&str>, other: Option<EndpointSlice>, by_kernel: bool| {
        let mut engine = engine();
        if by_kernel {
            engine.set_translated_by(TranslatedBy::Kernel);
        }
        let service = Service { selector: selector.map(super::build::selector), ..service("api", 1, false) };
        let pods = [("shop/web", "app=web", "10.0.0.1"), ("shop/api", "app=api", "10.0.0.2")];
        let pods = pods.map(|(name, labels, address)| Object::Pod(super::build::pod(name, labels, &[address], &[])));
        let objects = pods.into_iter().chain([Object::Service(service)]).chain(other.map(Object::EndpointSlice));
        engine.apply(objects.map(set));
        let found =
            service_flows(&engine, &FlowEndpoint::Pod(key("web")), &key("api"), &"80".parse().unwrap()).unwrap();
        (found.flows.len(), found.without == Without::Knowledge)
    };
    assert_eq!(asked(Some("app=api"), None, true), (1, false));
    assert_eq!(asked(Some("app=api"), None, false), (0, false), "they are followed, and there are none");
    assert_eq!(asked(None, None, true), (0, true), "it may have some that nobody here knows");
    assert_eq!(asked(Some("app=api"), Some(slice("other-1", "other", Vec::new())), true), (0, false), "there are some");
}

#[test]
fn unpostponed_egress_policy_is_for_the_services_address() {
    use penstock_policy::explain::{self, PlainText};
    let to_api = super::build::rule(&["pods app=api"], &[]);
    let explained = |client: &str, who: TranslatedBy, postponed: &[&str]| {
        let mut engine = engine();
        engine.set_translated_by(who);
        let pods =
            [("shop/web", "app=web", "10.0.0.1"), ("shop/api", "app=api", "10.0.0.2"), ("shop/any", "", "10.0.0.3")];
        let pods = pods.map(|(name, labels, address)| {
            let pod = super::build::pod(name, labels, &[address], &[]);
            Object::Pod(Pod { node: Some("n0".to_owned()), ..pod })
        });
        let service = Service { external: vec![address("203.0.113.7")], ..service("api", 1, false) };
        let others = [
            Object::Service(service),
            Object::EndpointSlice(slice("api-1", "api", vec![endpoint("10.0.0.2")])),
            super::build::policy("shop/out", "app=web", None, Some(vec![to_api.clone()])),
            super::build::namespace("shop", ""),
        ];
        engine.apply(pods.into_iter().chain(others).map(set));
        engine.set_services(&std::sync::Arc::new(postponed.iter().map(|text| address(text).into()).collect()));
        let from = FlowEndpoint::Pod(key(client));
        ["10.96.0.1", "203.0.113.7"].map(|to| {
            let to = FlowEndpoint::Address(address(to));
            let (is_allowed, text) = explain::text(&engine, &PlainText, &from, &to, &"80".parse().unwrap()).unwrap();
            (is_allowed, text.contains("egress policy is for its address"))
        })
    };
    let (behind, denied, open) = ((true, false), (false, true), (true, false));
    for (client, who, postponed, expected) in [
        ("web", TranslatedBy::Anyone, &[][..], [behind, behind]),
        ("web", TranslatedBy::Kernel, &["10.96.0.1", "203.0.113.7"], [behind, behind]),
        ("web", TranslatedBy::Kernel, &[], [denied, denied]),
        ("any", TranslatedBy::Kernel, &[], [open, open]),
    ] {
        assert_eq!(explained(client, who, postponed), expected, "{client}, {who:?}, {postponed:?}");
    }
}

//! Who has an address that objects of several writers name.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::packet::{Address, Flow, Protocol};
use penstock_dataplane::policy::AddressSet;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::state::{MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE, MAX_SERVICE_ADDRESSES, PodOrNode};
use proptest::prelude::*;
use proptest::sample::select;

use super::build::{ips, key, namespace, node, pod, policy, rule};

fn service(name: &str, cluster: &[&str], external: &[&str]) -> Object {
    Object::Service(Service {
        key: key(name),
        addresses: ips(cluster),
        external: ips(external),
        ports: Vec::new(),
        local_only: false,
        selector: None,
    })
}

fn engine_here(objects: impl IntoIterator<Item = Object>) -> Engine {
    let mut engine = Engine::new(EngineSettings::for_node("here"));
    apply(&mut engine, objects.into_iter().map(ObjectChange::Set));
    engine
}

/// Applies changes as the daemon does: the addresses of Services follow if the engine says that they may have changed.
fn apply(engine: &mut Engine, changes: impl IntoIterator<Item = ObjectChange>) {
    engine.apply(changes);
    if let Some(found) = engine.take_service_addresses() {
        let postponed: AddressSet = found.addresses.into_iter().map(Address::from).collect();
        engine.set_services(&Arc::new(postponed));
    }
}

fn owner(engine: &Engine, address: IpAddr) -> Option<String> {
    Some(match engine.state().owner(&address)? {
        PodOrNode::Pod(pod) => engine.state().pod(pod)?.key.to_string(),
        PodOrNode::Node(node) => engine.state().node_name(node)?.to_owned(),
    })
}

#[test]
fn the_better_known_claim_has_the_address() {
    const AT: &str = "10.9.9.9";
    let on = |node: &str, pod: Pod| Object::Pod(Pod { node: Some(node.to_owned()), ..pod });
    let lifetime = PodLifetime { leaving: false, started: Some(9), created: Some(9) };
    // In the order of ranks: what claims the address, who has it by that, and whether it is a Service's if nobody comes before.
    let claims = [
        ("here", Some(node("here", &[AT])), false),
        ("bank/local", Some(on("here", pod("bank/local", "", &[AT], &[]))), false),
        ("front/far", Some(on("there", Pod { lifetime, ..pod("front/far", "", &[AT], &[]) })), false),
        ("there", Some(node("there", &[AT])), false),
        ("", Some(service("shop/api", &[AT], &[])), true),
        ("", Some(service("evil/mine", &[], &[AT])), true),
    ];
    for chosen in 1_usize..1 << claims.len() {
        for is_reversed in [false, true] {
            let mut objects: Vec<Object> =
                (0..claims.len()).filter(|at| chosen >> at & 1 == 1).filter_map(|at| claims[at].1.clone()).collect();
            if is_reversed {
                objects.reverse();
            }
            let engine = engine_here(objects);
            let first = claims[chosen.trailing_zeros() as usize].0;
            let case = format!("{chosen:b}, reversed {is_reversed}");
            assert_eq!(owner(&engine, ips(&[AT])[0]).unwrap_or_default(), first, "{case}");
            let [has_here, has_far, has_cluster] = [0b11, 0b1100, 0b1_0000].map(|some| chosen & some != 0);
            let is_services = !has_here && (has_cluster || !has_far);
            assert_eq!(engine.state().service_addresses().addresses.len(), usize::from(is_services), "{case}");
            let named = engine.state().address_conflicts(9).len();
            let is_pods = chosen & 0b11 == 0b10;
            let others = usize::from(chosen & 0b100 != 0) + usize::from(chosen & 0b1000 != 0);
            assert_eq!(named, if is_pods { others } else { 0 }, "{case}");
        }
    }
}

#[test]
fn a_conflict_ends_with_the_claim() {
    let mut engine =
        engine_here([Object::Pod(Pod { node: Some("here".to_owned()), ..pod("bank/local", "", &["10.9.9.9"], &[]) })]);
    assert_eq!(engine.state().address_conflicts(9).len(), 0);
    engine.apply([ObjectChange::Set(node("there", &["10.9.9.9"]))]);
    let named: Vec<String> = engine.state().address_conflicts(9).iter().map(ToString::to_string).collect();
    assert!(named.len() == 1 && named[0].contains("bank/local") && named[0].contains("node there"), "{named:?}");
    engine.apply([ObjectChange::Delete(ObjectRef::Node("there".to_owned()))]);
    assert_eq!(engine.state().address_conflicts(9).len(), 0);
}

fn numbered(first: u32, count: usize) -> Vec<IpAddr> {
    (first..).take(count).map(|number| IpAddr::from(number.to_be_bytes())).collect()
}

fn many(name: &str, cluster: Vec<IpAddr>, external: Vec<IpAddr>) -> Object {
    let Object::Service(service) = service(name, &[], &[]) else { unreachable!("it is a Service") };
    Object::Service(Service { addresses: cluster, external, ..service })
}

#[test]
fn no_namespace_takes_the_room_of_anothers_services() {
    // A Service that a tenant has written, and one Service with too many cluster IPs for many of one.
    for (cluster, external) in [(0, 100_000), (100_000, 0), (60_000, 60_000)] {
        for order in [false, true] {
            let mut objects = vec![
                many("evil/flood", numbered(1 << 24, cluster), numbered(2 << 24, external)),
                service("bank/api", &["10.96.0.10"], &["203.0.113.7"]),
                many("shop/lots", numbered(3 << 24, 1000), numbered(4 << 24, 1000)),
            ];
            if order {
                objects.reverse();
            }
            let engine = engine_here(objects);
            let found = engine.state().service_addresses();
            assert!(found.addresses.len() <= MAX_SERVICE_ADDRESSES);
            assert!(ips(&["10.96.0.10", "203.0.113.7"]).iter().all(|address| found.addresses.contains(address)));
            assert_eq!(found.left_out.keys().collect::<Vec<_>>(), ["evil"]);
            let of_evil = found.addresses.len() - 2002;
            assert!(found.left_out["evil"] > 0);
            assert!(of_evil <= cluster + MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE);
        }
    }
}

const PODS: [(&str, &str, &str); 4] = [
    ("bank/b", "here", "10.244.1.10"),
    ("bank/d", "here", "10.244.1.11"),
    ("front/ingress", "there", "10.244.2.7"),
    ("front/six", "there", "fd00:10:244:2::7"),
];
const NODES: [(&str, &str); 2] = [("here", "172.18.0.2"), ("there", "172.18.0.3")];
const OTHER_SERVICES: [&str; 2] = ["10.96.0.10", "203.0.113.7"];
const MACHINES: [&str; 2] = ["198.51.100.2", "192.0.2.9"];

/// What other namespaces have.
fn others() -> Vec<Object> {
    let to_front = rule(&["namespaces kubernetes.io/metadata.name=front", "198.51.100.0/24"], &[]);
    let of_pods =
        PODS.map(|(name, node, at)| Object::Pod(Pod { node: Some(node.to_owned()), ..pod(name, "", &[at], &[]) }));
    let of_nodes = NODES.map(|(name, at)| node(name, &[at]));
    let rest = [
        namespace("bank", ""),
        namespace("front", ""),
        namespace("evil", ""),
        policy("bank/b", "", Some(vec![to_front.clone()]), Some(vec![to_front])),
        service("bank/api", &OTHER_SERVICES[..1], &OTHER_SERVICES[1..]),
    ];
    of_pods.into_iter().chain(of_nodes).chain(rest).collect()
}

/// An object that a tenant or another node's kubelet may write, with addresses that others have: a tenant's Service any of them; a Pod
/// or Node of another node this node's, its pods' and cluster IPs.
fn adversarial() -> impl Strategy<Value = Object> {
    let here = vec!["10.244.1.10", "10.244.1.11", "172.18.0.2", OTHER_SERVICES[0]];
    let known = PODS.iter().map(|pod| pod.2).chain(NODES.iter().map(|node| node.1));
    let known: Vec<&str> = known.chain(OTHER_SERVICES).chain(MACHINES).collect();
    let some = |of: Vec<&'static str>| prop::collection::vec(select(of), 0..5);
    (some(known), some(here), 0..4_u8, 0..3_u8).prop_map(|(known, here, kind, number)| match kind {
        0 => {
            let lifetime = PodLifetime { leaving: false, started: Some(i64::MAX), created: Some(i64::MAX) };
            let claimed = pod(&format!("evil/p{number}"), "", &here, &[]);
            Object::Pod(Pod { node: Some("evil-node".to_owned()), lifetime, ..claimed })
        }
        1 => node(&format!("evil-{number}"), &here),
        _ => service(&format!("evil/s{number}"), &[], &known),
    })
}

/// The verdicts between addresses that other namespaces have, and which of these are a Service's.
fn known_of_others(engine: &Engine) -> (Vec<bool>, BTreeSet<IpAddr>) {
    let pods = PODS.iter().map(|pod| pod.2).chain(NODES.iter().map(|node| node.1));
    let known = ips(&pods.chain(OTHER_SERVICES).collect::<Vec<_>>());
    let pairs = known.iter().flat_map(|src| known.iter().map(move |dst| (*src, *dst)));
    let pairs = pairs.filter(|(src, dst)| src.is_ipv4() == dst.is_ipv4());
    let verdicts = pairs.map(|(src, dst)| {
        let flow = Flow { src: src.into(), dst: dst.into(), protocol: Protocol::TCP, src_port: 9, dst_port: 80 };
        engine.evaluate(&flow).is_allowed()
    });
    let services = engine.policy_set().services();
    let of_services = known.iter().copied().filter(|address| services.contains(&Address::from(*address))).collect();
    (verdicts.collect(), of_services)
}

proptest! {
    #[test]
    fn objects_of_tenants_and_other_nodes_change_nothing_for_others(
        objects in prop::collection::vec(adversarial(), 1..6),
        mixed in Just(others()).prop_shuffle(),
        position in any::<prop::sample::Index>(),
        is_each_alone in any::<bool>(),
    ) {
        let before = known_of_others(&engine_here(others()));
        prop_assert_eq!(before.1.len(), OTHER_SERVICES.len());
        let (first, last) = mixed.split_at(position.index(mixed.len() + 1));
        let changes = [first, &objects, last].concat().into_iter().map(ObjectChange::Set);
        let mut engine = engine_here([]);
        if is_each_alone {
            changes.for_each(|change| apply(&mut engine, [change]));
        } else {
            apply(&mut engine, changes);
        }
        prop_assert_eq!(&known_of_others(&engine), &before);
        apply(&mut engine, objects.iter().map(|object| ObjectChange::Delete(object.reference())));
        prop_assert_eq!(&known_of_others(&engine), &before);
        let services = engine.policy_set().services();
        prop_assert!(ips(&MACHINES).into_iter().all(|address| !services.contains(&address.into())), "as before");
    }
}

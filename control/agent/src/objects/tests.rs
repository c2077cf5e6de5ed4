use penstock_dataplane::packet::{Flow, Protocol};

use super::*;
use penstock_policy::model::{Namespace, NetworkPolicy, PodLifetime, Selector, Staging};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn pod(name: &str, node: &str) -> ObjectChange {
    let key = ObjectKey { namespace: "shop".into(), name: name.into() };
    let addresses = vec![address("10.1.1.5")];
    ObjectChange::Set(Object::Pod(Pod { key, node: Some(node.into()), addresses, ..Pod::default() }))
}

/// A policy that denies all ingress to the namespace's pods.
fn closed() -> ObjectChange {
    ObjectChange::Set(Object::NetworkPolicy(NetworkPolicy {
        key: ObjectKey { namespace: "shop".into(), name: "closed".into() },
        pod_selector: Selector::default(),
        isolates: true,
        ingress: Some(Vec::new()),
        egress: None,
        staging: Staging::InForce,
        notes: Default::default(),
    }))
}

fn reaches_pod(objects: &NodeObjects, from: &str) -> bool {
    let flow = Flow {
        src: address(from).into(),
        dst: address("10.1.1.5").into(),
        protocol: Protocol::UDP,
        src_port: 9,
        dst_port: 53,
    };
    objects.engine().evaluate(&flow).is_allowed()
}

#[test]
fn a_policy_deleted_just_before_its_namespace_ends_stays() {
    let namespace = |terminating| {
        let (name, labels) = ("shop".to_owned(), Default::default());
        let namespace = Namespace { name, labels, default_deny_ingress: false, terminating };
        ObjectChange::Set(Object::Namespace(namespace))
    };
    let name = ObjectKey { namespace: "shop".into(), name: "closed".into() };
    let gone = || ObjectChange::Delete(ObjectRef::NetworkPolicy(name.clone()));
    let pod_gone = || {
        let name = ObjectKey { namespace: "shop".into(), name: "web".into() };
        ObjectChange::Delete(ObjectRef::Pod(name))
    };
    for (what, batches, is_closed) in [
        ("the namespace first", vec![vec![namespace(true)], vec![gone()]], true),
        ("the policy first", vec![vec![gone()], vec![namespace(true)]], true),
        ("both at once", vec![vec![gone(), namespace(true)]], true),
        ("made anew meanwhile", vec![vec![gone()], vec![closed()], vec![namespace(true)]], true),
        ("another namespace of its name", vec![vec![gone()], vec![namespace(true)], vec![namespace(false)]], false),
        ("the policy alone", vec![vec![gone()], vec![namespace(false)]], false),
    ] {
        let mut objects = NodeObjects::new("here", &[]);
        objects.apply([namespace(false), pod("web", "here"), closed()], &[]);
        for changes in batches {
            let changes = objects.complete(changes);
            objects.apply(changes, &[]);
        }
        assert_eq!(!reaches_pod(&objects, "10.1.1.9"), is_closed, "{what}");
        objects.apply([pod_gone()], &[]);
        assert_eq!(objects.engine().state().statistics().policies, usize::from(what == "made anew meanwhile"));
    }
    // A daemon that starts meanwhile: what is there when it reads all is in effect, and stays.
    let mut objects = NodeObjects::new("here", &[]);
    objects.apply([namespace(true), pod("web", "here"), closed()], &[]);
    let changes = objects.complete(vec![gone()]);
    objects.apply(changes, &[]);
    assert!(!reaches_pod(&objects, "10.1.1.9"), "a daemon that starts meanwhile");
}

#[test]
fn changes_that_are_kept_make_another_engine_equal() {
    let mut objects = NodeObjects::new("here", &[address("192.0.2.1")]);
    objects.apply([pod("web", "here")], &[]);
    assert!(objects.take_changes().is_empty());
    objects.keep_changes(true);
    let mut other = Engine::new(EngineSettings::for_node("here"));
    let engine = objects.engine();
    let (pods, rest) = engine.state().pods_from(0, 10);
    let known = engine.state().objects_without_pods().into_iter().chain(pods);
    other.apply(known.map(ObjectChange::Set));
    objects.apply([closed()], &[address("10.1.1.1")]);
    objects.apply_addresses(&[address("10.1.1.2")]);
    other.apply(objects.take_changes());
    assert!(rest.is_none() && objects.take_changes().is_empty());
    let reached = ["192.0.2.1", "10.1.1.1", "10.1.1.2", "198.51.100.1"].map(|from| {
        let flow = Flow {
            src: address(from).into(),
            dst: address("10.1.1.5").into(),
            protocol: Protocol::UDP,
            src_port: 9,
            dst_port: 53,
        };
        assert_eq!(other.evaluate(&flow).is_allowed(), reaches_pod(&objects, from), "{from}");
        other.evaluate(&flow).is_allowed()
    });
    assert_eq!(reached, [true, false, true, false]);
    objects.keep_changes(false);
    objects.apply([pod("web", "here")], &[]);
    assert!(objects.take_changes().is_empty());
}

#[test]
fn staged_policies_do_not_count_as_policies() {
    let mut objects = NodeObjects::new("here", &[]);
    let ObjectChange::Set(Object::NetworkPolicy(policy)) = closed() else { unreachable!("it is a policy") };
    for (staging, count) in
        [(Staging::InForce, 1), (Staging::New, 0), (Staging::Deleted, 1), (Staging::Replaces("q".into()), 0)]
    {
        objects.apply([ObjectChange::Set(Object::NetworkPolicy(NetworkPolicy { staging, ..policy.clone() }))], &[]);
        assert_eq!((objects.policies(), objects.engine().statistics().0.policies), (count, count));
    }
}

#[test]
fn every_known_address_of_the_node_reaches_its_pods() {
    let mut objects = NodeObjects::new("here", &[address("192.0.2.1")]);
    let interfaces = [address("10.1.1.1")];
    assert!(objects.apply([pod("web", "here"), closed()], &interfaces).policy);
    let reached = |objects: &NodeObjects| ["192.0.2.1", "10.1.1.1", "192.0.2.9"].map(|from| reaches_pod(objects, from));
    assert_eq!(reached(&objects), [true, true, false]);
    let node = |name: &str| {
        let addresses = vec![address("192.0.2.9")];
        let status_addresses = addresses.clone();
        Object::Node(Node { name: name.into(), labels: Default::default(), addresses, status_addresses })
    };
    objects.apply([ObjectChange::Set(node("elsewhere"))], &interfaces);
    assert_eq!(reached(&objects), [true, true, false]);
    objects.apply(
        [ObjectChange::Delete(ObjectRef::Node("elsewhere".into())), ObjectChange::Set(node("here"))],
        &interfaces,
    );
    assert_eq!(reached(&objects), [true, true, true]);
    objects.apply([ObjectChange::Delete(ObjectRef::Node("here".into()))], &interfaces);
    assert_eq!(reached(&objects), [true, true, false]);
    assert!(objects.apply_addresses(&[address("192.0.2.9")]));
    assert!(!objects.apply_addresses(&[address("192.0.2.9")]), "nothing new");
    assert_eq!(reached(&objects), [true, false, true]);
    assert_eq!(objects.node_addresses(), ["192.0.2.1", "192.0.2.9"].map(address));
}

#[test]
fn the_running_one_of_two_pods_owns_their_address() {
    let lifetime = |leaving, started, created| PodLifetime { leaving, started, created };
    let plain = lifetime(false, Some(10), Some(10));
    let finished = |pod: &mut Pod| pod.finished = true;
    let nothing = |_: &mut Pod| {};
    type Edit = fn(&mut Pod);
    // The difference between `old` and `new`, which of them owns the address, and whether the other is reported.
    let cases: [(&str, PodLifetime, PodLifetime, Edit, &str, bool); 8] = [
        ("old finished", plain, plain, finished, "new", false),
        ("old finished, though it started later", lifetime(false, Some(20), None), plain, finished, "new", false),
        ("old is being deleted", lifetime(true, Some(10), Some(10)), plain, nothing, "new", true),
        ("old is being deleted and started later", lifetime(true, Some(20), Some(20)), plain, nothing, "new", true),
        ("new started later", plain, lifetime(false, Some(11), Some(1)), nothing, "new", true),
        ("old is known to have started, new is not", plain, lifetime(false, None, Some(99)), nothing, "old", true),
        ("new was created later", plain, lifetime(false, Some(10), Some(11)), nothing, "new", true),
        ("no difference: by name", plain, plain, nothing, "new", true),
    ];
    for (what, of_old, of_new, more, holder, reported) in cases {
        for in_order in [true, false] {
            for far in [None, Some("old"), Some("new")] {
                let mut objects = NodeObjects::new("here", &[]);
                let made = |name: &str, lifetime, more: Edit| {
                    let node = if far == Some(name) { "elsewhere" } else { "here" };
                    let ObjectChange::Set(Object::Pod(mut made)) = pod(name, node) else { unreachable!() };
                    made.lifetime = lifetime;
                    more(&mut made);
                    ObjectChange::Set(Object::Pod(made))
                };
                let (old, new) = (made("old", of_old, more), made("new", of_new, nothing));
                let (first, second) = if in_order { (old, new) } else { (new, old) };
                objects.apply([first], &[]);
                objects.apply([second], &[]);
                let case = format!("{what}, in order {in_order}, elsewhere {far:?}");
                let (pods, problems) = objects.resolved_pods();
                let live = |pod: &&Pod| !pod.finished && !pod.addresses.is_empty();
                // A pod of this node keeps its address whatever another node's object says.
                let holder = match far {
                    Some("new") if !what.starts_with("old finished") => "old",
                    Some("old") => "new",
                    _ => holder,
                };
                let served: Vec<&str> = pods.iter().filter(live).map(|pod| pod.key.name.as_str()).collect();
                let expected = if far == Some(holder) { vec![] } else { vec![holder] };
                assert_eq!(served, expected, "forwarding: {case}");
                for name in ["old", "new"] {
                    let key = ObjectKey { namespace: "shop".into(), name: name.into() };
                    assert_eq!(objects.has(&key, address("10.1.1.5")), name == holder, "policy: {case}");
                }
                let other = if holder == "new" { "old" } else { "new" };
                let is_here = far != Some(other);
                assert_eq!(problems.len(), usize::from(reported && is_here), "{case}: {problems:?}");
                for problem in problems {
                    let text = problem.to_string();
                    assert!(text.starts_with(&format!("pods shop/{holder} and shop/{other}: both have")), "{text}");
                }
            }
        }
    }
}

#[test]
fn an_address_moves_to_the_other_pod_when_its_owner_terminates() {
    let mut objects = NodeObjects::new("here", &[]);
    let made = |name: &str, started, leaving| {
        let ObjectChange::Set(Object::Pod(mut made)) = pod(name, "here") else { unreachable!() };
        made.lifetime = PodLifetime { leaving, started: Some(started), created: None };
        ObjectChange::Set(Object::Pod(made))
    };
    let key = |name: &str| ObjectKey { namespace: "shop".into(), name: name.into() };
    let gone = ObjectChange::Delete(ObjectRef::Pod(key("b")));
    for (change, holder) in
        [(made("b", 2, false), "b"), (made("a", 1, false), "b"), (made("b", 2, true), "a"), (gone, "a")]
    {
        objects.apply([change], &[]);
        assert!(objects.has(&key(holder), address("10.1.1.5")), "{holder}");
    }
}

#[test]
fn only_this_nodes_pods_are_kept() {
    let mut objects = NodeObjects::new("here", &[]);
    for (change, touched, kept) in [
        (pod("web", "elsewhere"), false, 0),
        (pod("web", "here"), true, 1),
        (closed(), false, 1),
        (pod("web", "elsewhere"), true, 0),
        (pod("web", "here"), true, 1),
        (ObjectChange::Delete(ObjectRef::Pod(ObjectKey { namespace: "shop".into(), name: "web".into() })), true, 0),
    ] {
        assert_eq!(objects.apply([change], &[]).pods, touched);
        assert_eq!(objects.pods().count(), kept);
    }
    assert_eq!(objects.policies(), 1);
    objects.apply(
        [ObjectChange::Delete(ObjectRef::NetworkPolicy(ObjectKey { namespace: "shop".into(), name: "closed".into() }))],
        &[],
    );
    assert_eq!(objects.policies(), 0);
}

//! API server faults and recovery of the client. Only the server in this process can inject them.

use std::time::Duration;

use penstock_bench::testbed::api_server::{Account, ApiServer, FakeServer, Fault, Resource, Verb};
use penstock_sources::ObjectKind;

use crate::api_server::follower::Follower;
use crate::api_server::objects::{cluster_policy, namespace, numbered_pod, pod, shop};

fn server(streams: bool) -> ApiServer {
    ApiServer::in_process(streams, None).unwrap()
}

fn fake(server: &ApiServer) -> &FakeServer {
    server.fake().expect("it is the small one")
}

#[test]
fn after_any_watch_fault_the_same_objects_are_known() {
    let cases = [
        (Verb::Watch, Fault::Code(429, Some(1)), 1),
        (Verb::Watch, Fault::Code(500, None), 3),
        (Verb::Watch, Fault::Code(503, None), 2),
        (Verb::Watch, Fault::ErrorEvent(500), 2),
        (Verb::Watch, Fault::Code(410, None), 1),
        (Verb::List, Fault::Code(410, None), 1),
        (Verb::Watch, Fault::Silence, 1),
        (Verb::Watch, Fault::Nonsense, 1),
        (Verb::Watch, Fault::Cut, 1),
        (Verb::Watch, Fault::EndAtOnce, 3),
        (Verb::Watch, Fault::Shuffle, 1),
        (Verb::Watch, Fault::Hang, 1),
    ];
    std::thread::scope(|scope| {
        for (verb, fault, times) in cases {
            scope.spawn(move || {
                let server = server(false);
                shop(&server);
                let mut follower = Follower::start(&server);
                follower.catch_up(&server);
                (0..times).for_each(|_| fake(&server).plan(verb, Resource::Pods, fault.clone()));
                // The fault applies to the next watch, or to the list before it.
                if verb == Verb::List {
                    fake(&server).plan(Verb::Watch, Resource::Pods, Fault::Code(410, None));
                }
                server.stop();
                server.resume().unwrap();
                for round in 0..4 {
                    let address = format!("10.1.0.{}", 20 + round);
                    server.admin().create(&pod("shop", "moves", &address)).unwrap();
                    server.admin().delete(&pod("shop", "web", "10.1.0.1")).unwrap();
                    follower.listen(Duration::from_millis(30));
                    server.admin().delete(&pod("shop", "moves", &address)).unwrap();
                    server.admin().create(&pod("shop", "web", "10.1.0.1")).unwrap();
                }
                while fake(&server).faults_left() > 0 {
                    follower.listen(Duration::from_millis(20));
                }
                server.admin().create(&pod("shop", "last", "10.1.0.77")).unwrap();
                follower.catch_up(&server);
                follower.until(&format!("{fault:?} over"), |health| health.connected);
                assert!(follower.objects().len() == 7, "{fault:?}: {:?}", follower.objects().keys());
            });
        }
    });
}

#[test]
fn nothing_is_reported_until_all_kinds_are_listed() {
    for fault in [Fault::Code(503, None), Fault::Code(429, Some(1)), Fault::Nonsense, Fault::Silence] {
        let server = server(false);
        shop(&server);
        fake(&server).plan(Verb::List, Resource::NetworkPolicies, fault.clone());
        // The follower asserts that all kinds are listed when the first objects are reported.
        let mut follower = Follower::start(&server);
        assert_eq!(fake(&server).faults_left(), 0);
        assert_eq!((follower.objects().len(), follower.reaches("10.1.0.3", "10.1.0.2")), (6, false), "{fault:?}");
        follower.catch_up(&server);
    }
}

#[test]
fn long_lists_are_paged_and_read_whole_if_a_page_expires() {
    let server = server(false);
    server.admin().create(&namespace("many")).unwrap();
    let pods: Vec<_> = (0..1_200).map(|number| numbered_pod("many", number)).collect();
    server.admin().create_all(&pods).unwrap();
    let before = fake(&server).requests(Verb::List, Resource::Pods);
    let mut follower = Follower::start(&server);
    // One attempt at a streaming list, then three pages.
    assert_eq!(fake(&server).requests(Verb::List, Resource::Pods) - before, 4);
    follower.catch_up(&server);
    drop(follower);
    // The first page, then an expired page.
    for fault in [Fault::Shuffle, Fault::Shuffle, Fault::Code(410, None)] {
        fake(&server).plan(Verb::List, Resource::Pods, fault);
    }
    let before = fake(&server).requests(Verb::List, Resource::Pods);
    let mut follower = Follower::start(&server);
    assert_eq!(fake(&server).requests(Verb::List, Resource::Pods) - before, 4, "the last one is the whole list");
    follower.catch_up(&server);
}

#[test]
fn no_pages_are_requested_from_a_server_with_streaming_lists() {
    let server = server(true);
    shop(&server);
    let mut follower = Follower::start(&server);
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.until("four pods", |health| health.objects == 4);
    let requests = |verb| fake(&server).requests(verb, Resource::Pods);
    assert_eq!((requests(Verb::List), requests(Verb::Watch)), (1, 0), "one stream for all");
    assert_eq!(follower.health(ObjectKind::Pod).lists, 1);
    // Cut within the list, it is listed again.
    fake(&server).plan(Verb::Watch, Resource::Pods, Fault::Code(410, None));
    server.stop();
    server.resume().unwrap();
    server.admin().delete(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.until("listed again", |health| health.lists == 2);
    follower.catch_up(&server);
}

#[test]
fn a_server_that_cannot_stream_its_lists_is_asked_for_pages() {
    // Kubernetes 1.34 sends an event with code 500 if its etcd is too old.
    let faults = [Fault::Code(400, None), Fault::Code(422, None), Fault::Code(500, None), Fault::ErrorEvent(500)];
    for fault in faults {
        let server = server(true);
        shop(&server);
        fake(&server).plan(Verb::List, Resource::Pods, fault.clone());
        let mut follower = Follower::start(&server);
        assert_eq!(fake(&server).requests(Verb::List, Resource::Pods), 2, "{fault:?}: the stream, then a page");
        follower.catch_up(&server);
    }
}

#[test]
fn an_expired_token_is_reloaded() {
    let server = server(false);
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    // As the kubelet does it: the file is replaced, and the old token becomes invalid.
    std::fs::write(server.token_file(Account::Penstock), "another-token").unwrap();
    fake(&server).set_token(Account::Penstock, "another-token");
    server.stop();
    server.resume().unwrap();
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.catch_up(&server);
    follower.until("followed again", |health| health.connected);
}

#[test]
fn cluster_policies_are_followed_while_they_are_defined() {
    let server = server(true);
    shop(&server);
    let mut follower = Follower::start(&server);
    let kind = ObjectKind::ClusterNetworkPolicy;
    assert!(follower.health(kind).synced, "a cluster without the definition is complete");
    assert_eq!(fake(&server).requests(Verb::List, Resource::ClusterNetworkPolicies), 0, "and nothing is asked");
    follower.catch_up(&server);
    let reaches = |follower: &Follower| follower.reaches("10.1.0.1", "10.1.0.2");
    assert!(reaches(&follower));
    fake(&server).define_cluster_policies(true);
    server.admin().create(&cluster_policy("guard", "Deny")).unwrap();
    follower.catch_up(&server);
    assert!(!reaches(&follower) && follower.health(kind).objects == 1);
    // An object that cannot be read leaves the last version in effect, and is counted.
    server.admin().replace(&cluster_policy("guard", "Log")).unwrap();
    for _ in 0..100 {
        if follower.health(kind).invalid == 0 {
            follower.listen(Duration::from_millis(50));
        }
    }
    assert!(follower.health(kind).invalid == 1 && !reaches(&follower));
    server.admin().replace(&cluster_policy("guard", "Accept")).unwrap();
    follower.catch_up(&server);
    assert!(reaches(&follower) && follower.health(kind).invalid == 0);
    server.admin().replace(&cluster_policy("guard", "Deny")).unwrap();
    follower.catch_up(&server);
    assert!(!reaches(&follower));
    // The server forgets the definition, and says so more than once.
    fake(&server).define_cluster_policies(false);
    server.stop();
    server.resume().unwrap();
    follower.catch_up(&server);
    assert!(reaches(&follower) && follower.health(kind).objects == 0);
}

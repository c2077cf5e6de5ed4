//! Services and EndpointSlices: followed only when they are needed, and then never silently without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer, FakeServer, Resource, Verb};
use penstock_sources::api_server::{Access, ApiServer as Source};
use penstock_sources::{FollowedKinds, ObjectKind, SourceHealth};

use crate::follower::{Follower, TIMEOUTS};
use crate::objects::{endpoint_slice, pod, service, shop};

const RESOURCES: [Resource; 2] = [Resource::Services, Resource::EndpointSlices];

fn server() -> ApiServer {
    ApiServer::in_process(true, None).unwrap()
}

fn fake(server: &ApiServer) -> &FakeServer {
    server.fake().expect("it is the small one")
}

/// A shop with a Service `db` of one backend.
fn shop_with_service(server: &ApiServer, api_version: &str) {
    shop(server);
    server.admin().create(&service("shop", "db", "10.96.0.7")).unwrap();
    server.admin().create(&endpoint_slice(api_version, "shop", "db", "10.1.0.2")).unwrap();
}

/// Follows a server until a kind that is not listed has a reason with this text; returns the awaited kinds.
fn awaited_for(server: &ApiServer, text: &str) -> Vec<ObjectKind> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let health = Arc::new(SourceHealth::new(FollowedKinds::All));
    let access = Access::Kubeconfig { path: server.kubeconfig(Account::Penstock), context: None };
    let mut source = runtime.block_on(Source::start(&access, TIMEOUTS, Arc::clone(&health))).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let first = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(50), source.first()).await });
        assert!(first.is_err(), "objects without Services are reported as all objects");
        let awaited = health.awaited();
        let has_reason = |reason: &Option<String>| reason.as_ref().is_some_and(|reason| reason.contains(text));
        if awaited.iter().all(|(_, reason)| has_reason(reason)) {
            assert!(!health.is_synced());
            return awaited.into_iter().map(|(kind, _)| kind).collect();
        }
        assert!(Instant::now() < deadline, "nobody says {text:?}: {awaited:?}");
    }
}

#[test]
fn without_services_the_server_is_not_asked_for_them_and_no_right_is_needed() {
    let server = server();
    shop_with_service(&server, "discovery.k8s.io/v1");
    RESOURCES.into_iter().for_each(|resource| fake(&server).set_readable(resource, false));
    let mut follower = Follower::of_kinds(&server, FollowedKinds::WithoutServices);
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.catch_up(&server);
    assert_eq!(follower.objects().len(), 7);
    for resource in RESOURCES {
        let asked = [Verb::List, Verb::Watch].map(|verb| fake(&server).requests(verb, resource));
        assert_eq!(asked, [0, 0], "{resource:?}");
    }
    assert!(!follower.health(ObjectKind::Service).synced && !follower.health(ObjectKind::EndpointSlice).synced);
    // As after a restart with services.enabled, and the role applied.
    drop(follower);
    RESOURCES.into_iter().for_each(|resource| fake(&server).set_readable(resource, true));
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    assert_eq!(follower.objects().len(), 9);
}

#[test]
fn a_missing_right_to_read_services_is_an_error_with_its_remedy() {
    for (resource, kind) in RESOURCES.into_iter().zip([ObjectKind::Service, ObjectKind::EndpointSlice]) {
        let server = server();
        shop_with_service(&server, "discovery.k8s.io/v1");
        fake(&server).set_readable(resource, false);
        let remedy = format!("on {}; bind it to ClusterRole penstock", resource.path());
        assert_eq!(awaited_for(&server, &remedy), [kind]);
        assert_eq!(awaited_for(&server, "or set services.enabled = false"), [kind]);
    }
}

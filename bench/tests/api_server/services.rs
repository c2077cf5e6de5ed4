//! Services are followed, and never silently left out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer, FakeServer, Resource, Verb};
use penstock_sources::api_server::{Access, ApiServer as Source};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::{FollowedKinds, ObjectKind, SourceHealth};

use crate::api_server::follower::{Follower, TIMEOUTS};
use crate::api_server::objects::{pod, service, shop};

const RESOURCES: [Resource; 2] = [Resource::Services, Resource::EndpointSlices];

fn server() -> ApiServer {
    ApiServer::in_process(true, None).unwrap()
}

fn fake(server: &ApiServer) -> &FakeServer {
    server.fake().expect("it is the small one")
}

/// A shop with a Service `db`.
fn shop_with_service(server: &ApiServer) {
    shop(server);
    server.admin().create(&service("shop", "db", "10.96.0.7")).unwrap();
}

/// Follows a server until a kind that is not listed has a reason with this text; returns the awaited kinds.
fn awaited_for(server: &ApiServer, text: &str) -> Vec<ObjectKind> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let health = Arc::new(SourceHealth::new(FollowedKinds::WithoutEndpointSlices));
    let access = Access::Kubeconfig { path: server.kubeconfig(Account::Penstock), context: None };
    let opened = Source::start(&access, TIMEOUTS, Arc::clone(&health), None, ConversionSettings::default());
    let mut source = runtime.block_on(opened).unwrap();
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
fn objects_wait_for_the_right_to_read_services_and_endpoint_slices_need_none() {
    let server = server();
    shop_with_service(&server);
    RESOURCES.into_iter().for_each(|resource| fake(&server).set_readable(resource, false));
    let mut follower = Follower::of_kinds(&server, FollowedKinds::WithoutEndpointSlices);
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.listen(TIMEOUTS.look_again * 10);
    assert_eq!(follower.objects().len(), 7, "all but the Service");
    // The role has been applied.
    fake(&server).set_readable(Resource::Services, true);
    follower.catch_up(&server);
    assert_eq!(follower.objects().len(), 8);
    let asked = [Verb::List, Verb::Watch].map(|verb| fake(&server).requests(verb, Resource::EndpointSlices));
    assert_eq!(asked, [0, 0]);
    assert!(!follower.health(ObjectKind::EndpointSlice).synced);
}

#[test]
fn a_missing_right_to_read_services_is_an_error_with_its_remedy() {
    let server = server();
    shop_with_service(&server);
    fake(&server).set_readable(Resource::Services, false);
    assert_eq!(awaited_for(&server, "on services; bind it to ClusterRole penstock"), [ObjectKind::Service]);
}

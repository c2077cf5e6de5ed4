//! Services and EndpointSlices: followed only when they are needed, and then never silently without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer, FakeServer, Resource, Verb};
use penstock_policy::model::Object;
use penstock_sources::api_server::{Access, ApiServer as Source};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::{FollowedKinds, ObjectKind, SourceHealth};

use crate::api_server::follower::{Follower, TIMEOUTS};
use crate::api_server::objects::{endpoint_slice, pod, service, shop};

const STABLE: &str = "discovery.k8s.io/v1";
const OLD: &str = "discovery.k8s.io/v1beta1";

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

/// The list of EndpointSlices under a version.
fn slices_path(api_version: &str) -> String {
    format!("/apis/{api_version}/endpointslices")
}

/// The nodes of the backends that a follower knows.
fn backend_nodes(follower: &Follower) -> Vec<Option<String>> {
    let slices = follower.objects().values().filter_map(|object| match object {
        Object::EndpointSlice(slice) => Some(slice),
        _ => None,
    });
    slices.flat_map(|slice| slice.endpoints.iter().map(|endpoint| endpoint.node.clone())).collect()
}

#[test]
fn endpoint_slices_are_followed_as_v1_or_else_v1beta1() {
    for (served, followed) in
        [(&[STABLE][..], STABLE), (&[OLD], OLD), (&[STABLE, OLD], STABLE), (&[OLD, STABLE], STABLE)]
    {
        let server = server();
        fake(&server).serve_slices_as(served);
        shop_with_service(&server, followed);
        let mut follower = Follower::start(&server);
        follower.catch_up(&server);
        let asked: Vec<&str> =
            [STABLE, OLD].into_iter().filter(|version| fake(&server).was_asked_for(&slices_path(version))).collect();
        // The test's own client asks for the stable version first, and is not counted where that is not served.
        assert_eq!(asked, [followed], "{served:?}");
        assert_eq!(backend_nodes(&follower), [Some("here".to_owned())], "{served:?}");
        server.admin().create(&endpoint_slice(followed, "shop", "web", "10.1.0.1")).unwrap();
        follower.catch_up(&server);
        server.admin().delete(&endpoint_slice(followed, "shop", "db", "10.1.0.2")).unwrap();
        follower.catch_up(&server);
        assert_eq!(follower.health(ObjectKind::EndpointSlice).objects, 1, "{served:?}");
    }
}

#[test]
fn a_servers_new_version_of_endpoint_slices_is_followed() {
    let server = server();
    fake(&server).serve_slices_as(&[OLD]);
    shop_with_service(&server, OLD);
    let mut follower = Follower::start(&server);
    fake(&server).serve_slices_as(&[STABLE]);
    server.stop();
    server.resume().unwrap();
    server.admin().create(&endpoint_slice(STABLE, "shop", "web", "10.1.0.1")).unwrap();
    follower.catch_up(&server);
    assert!(fake(&server).was_asked_for(&slices_path(STABLE)));
    assert_eq!(backend_nodes(&follower).len(), 2);
}

#[test]
fn a_server_without_endpoint_slices_is_an_error() {
    let server = server();
    shop_with_service(&server, STABLE);
    fake(&server).serve_slices_as(&[]);
    let text = "serves endpointslices neither as discovery.k8s.io/v1 nor discovery.k8s.io/v1beta1";
    assert_eq!(awaited_for(&server, text), [ObjectKind::EndpointSlice]);
    // Known ones stay while a server that starts does not serve them yet.
    fake(&server).serve_slices_as(&[STABLE]);
    let mut follower = Follower::start(&server);
    fake(&server).serve_slices_as(&[]);
    server.stop();
    server.resume().unwrap();
    follower.listen(TIMEOUTS.look_again * 20);
    assert_eq!(backend_nodes(&follower).len(), 1);
    fake(&server).serve_slices_as(&[STABLE]);
    server.admin().create(&endpoint_slice(STABLE, "shop", "web", "10.1.0.1")).unwrap();
    follower.catch_up(&server);
}

#[test]
fn without_the_setting_endpoints_need_no_right() {
    let server = server();
    shop_with_service(&server, STABLE);
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
    // As after a restart with services.enabled.
    drop(follower);
    fake(&server).set_readable(Resource::EndpointSlices, true);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    assert_eq!(follower.objects().len(), 9);
}

#[test]
fn a_missing_right_to_read_services_is_an_error_with_its_remedy() {
    for (resource, kind) in RESOURCES.into_iter().zip([ObjectKind::Service, ObjectKind::EndpointSlice]) {
        let server = server();
        shop_with_service(&server, STABLE);
        fake(&server).set_readable(resource, false);
        let remedy = format!("on {}; bind it to ClusterRole penstock", resource.path());
        assert_eq!(awaited_for(&server, &remedy), [kind]);
        assert_eq!(awaited_for(&server, "or set services.enabled = false"), [kind]);
    }
}

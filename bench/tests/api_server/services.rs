//! Services are followed, and never silently left out.

use penstock_bench::testbed::api_server::{ApiServer, FakeServer, Resource};

use crate::api_server::follower::{Follower, TIMEOUTS};
use crate::api_server::objects::{pod, service, shop};

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

#[test]
fn without_the_right_to_read_services_all_else_is_followed() {
    let server = server();
    shop_with_service(&server);
    fake(&server).set_readable(Resource::Services, false);
    let mut follower = Follower::start(&server);
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    follower.listen(TIMEOUTS.look_again * 10);
    assert_eq!(follower.objects().len(), 7, "all but the Service");
    // The role has been applied.
    fake(&server).set_readable(Resource::Services, true);
    follower.catch_up(&server);
    assert_eq!(follower.objects().len(), 8);
}

//! Policies learnt from flows to Services, which policy judges for what answers.

use penstock_policy::learn::{LearnSettings, NotLearnt, ObservedFlow, Outcome};
use penstock_policy::model::{Object, PortProtocol};

use super::learn::{flow, learn, seen, service, shop};

const WEB: &str = "10.0.0.4";
const EXTERNAL: &str = "203.0.113.7";

/// The shop, with a Service that has an external address and a node port, and backends of which none is on the client's node.
fn objects() -> Vec<Object> {
    let mut objects = shop();
    objects.extend(service(&["10.0.1.2", "203.0.113.9"]));
    for object in &mut objects {
        if let Object::Service(service) = object {
            service.external = vec![EXTERNAL.parse().unwrap()];
            service.local_only = true;
            service.ports[0].node_port = Some(30_080);
        }
    }
    objects
}

/// A datagram that nobody has answered.
fn silent(to: &str, port: &str) -> ObservedFlow {
    ObservedFlow { outcome: Outcome::Silent, ..seen(flow(WEB, to, port)) }
}

#[test]
fn a_flow_to_any_address_of_a_service_allows_its_backends() {
    for (to, port) in [(EXTERNAL, "tcp/80"), ("192.168.0.1", "tcp/30080")] {
        let learnt = learn(&objects(), &[seen(flow(WEB, to, port))], &LearnSettings::default());
        assert_eq!(learnt.reasons(), [], "{to}");
        for (end, at, is_allowed) in [
            ("10.0.1.2", "tcp/81", true),
            ("203.0.113.9", "tcp/81", true),
            ("10.0.0.2", "tcp/81", false),
            ("10.0.1.2", "tcp/80", false),
            // The address itself, where a node cannot judge what answers.
            (EXTERNAL, "tcp/80", to == EXTERNAL),
        ] {
            assert_eq!(learnt.allows(WEB, end, at), is_allowed, "by {to}: {end} {at}");
        }
    }
    // Another node translates its own, and here policy is for that node.
    let learnt = learn(&objects(), &[seen(flow(WEB, "192.168.0.2", "tcp/30080"))], &LearnSettings::default());
    assert!(learnt.allows(WEB, "192.168.0.2", "tcp/30080") && !learnt.allows(WEB, "10.0.1.2", "tcp/81"));
    // The node's own port, of no Service.
    let learnt = learn(&objects(), &[seen(flow(WEB, "192.168.0.1", "tcp/30081"))], &LearnSettings::default());
    assert_eq!(learnt.reasons(), [(NotLearnt::Exempt, 1)]);
}

/// Where the node translates, policy may have denied it behind that.
#[test]
fn a_datagram_to_a_service_without_an_answer_is_not_learnt() {
    let mut objects = objects();
    for object in &mut objects {
        match object {
            Object::Service(service) => service.ports[0].protocol = PortProtocol::Udp,
            Object::EndpointSlice(slice) => slice.ports[0].protocol = PortProtocol::Udp,
            _ => {}
        }
    }
    for (to, port) in [("10.96.0.1", "udp/80"), (EXTERNAL, "udp/80"), ("192.168.0.1", "udp/30080")] {
        let learnt = learn(&objects, &[silent(to, port)], &LearnSettings::default());
        assert_eq!(learnt.reasons(), [(NotLearnt::Unanswered, 1)], "{to}");
        let settings = LearnSettings { unanswered: true, ..LearnSettings::default() };
        assert!(learn(&objects, &[silent(to, port)], &settings).allows(WEB, "10.0.1.2", "udp/81"), "{to}");
    }
    let learnt = learn(&objects, &[silent("10.0.1.2", "udp/81")], &LearnSettings::default());
    assert!(learnt.allows(WEB, "10.0.1.2", "udp/81"), "what a pod itself has got");
}

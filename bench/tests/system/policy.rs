//! Policies are enforced on packets, and a change is in effect immediately.

use std::time::{Duration, Instant};

use penstock_bench::expectation::Expectation;
use penstock_bench::matrix::{self, Legend};
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy, time_until_reached};
use penstock_bench::testbed::RouteVia;

use crate::fixture::{Fixture, PROTOCOLS, pods, policy};

/// Timeout of a change on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(1);

/// Allows TCP to one port of `test/pod-1`, from everyone.
fn only_port(port: u16) -> String {
    policy("only", "pod-1", &format!("  ingress: [{{ports: [{{port: {port}}}]}}]\n"))
}

#[test]
fn the_demos_packets_match_its_policies_over_both_families() {
    let fixture = Fixture::demo();
    let matrix = fixture.matrix();
    let by_frontend = 8 * 2 * 3 * 2;
    assert_eq!(
        matrix.entries().len(),
        8 * 7 * 2 * 4 + by_frontend,
        "8 sites, 2 families, 4 protocols; 2 frontends, 3 ports"
    );
    for v6 in [false, true] {
        for expected in [true, false] {
            let count = matrix.entries().iter().filter(|entry| {
                entry.probe.destination.is_ipv6() == v6 && (entry.expected == Expectation::Allowed) == expected
            });
            assert!(count.count() > 50, "the demo has many cells that are allowed and many that are denied");
        }
    }
    fixture.assert_as_expected(&matrix);
    // The README shows the demo's grid.
    owo_colors::set_override(false);
    let grid =
        matrix.grid(false, &mut Legend::default()).into_iter().chain([String::new()]).chain(matrix::key(&PROTOCOLS));
    let excerpt = format!("Reachability over IPv4\n{}\n```", grid.collect::<Vec<_>>().join("\n"));
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
    assert!(readme.contains(&excerpt), "README.md shows another grid than this:\n{excerpt}");
}

#[test]
fn an_edit_revokes_an_open_connection_and_allows_the_new_port() {
    let fixture = Fixture::of(&(pods(2) + &only_port(8080)), |_, _| {});
    let client = fixture.site("test/pod-0");
    for v6 in [false, true] {
        let target = fixture.target("test/pod-1", v6);
        let flow = EchoConnection::open(&client.namespace, target, 8080, SILENCE).unwrap();
        flow.wait_for(100, LIMIT).unwrap();
        let saved = Instant::now();
        fixture.save("all.yaml", &(pods(2) + &only_port(9090)));
        let cut = flow.wait_until_blocked(LIMIT).expect("the connection is revoked");
        println!("revoked {:?} after the save", cut.saturating_duration_since(saved));
        fixture.assert_as_expected(&fixture.matrix());

        let saved = Instant::now();
        fixture.save("all.yaml", &(pods(2) + &only_port(8080)));
        let interval = Duration::from_millis(2);
        let reached = time_until_reached(&client.namespace, target, Protocol::Tcp(8080), interval, LIMIT).unwrap();
        let opened = reached.expect("the port opens");
        println!("opened {:?} after the save", opened.saturating_duration_since(saved));
        fixture.assert_as_expected(&fixture.matrix());
    }
}

#[test]
fn a_change_that_still_allows_a_connection_does_not_disturb_it() {
    let fixture = Fixture::of(&(pods(2) + &only_port(8080)), |_, _| {});
    let client = fixture.site("test/pod-0");
    let flow = EchoConnection::open(&client.namespace, fixture.target("test/pod-1", false), 8080, SILENCE).unwrap();
    flow.wait_for(100, LIMIT).unwrap();
    let other = policy("other", "pod-1", "  ingress: [{ports: [{port: 9090}]}]\n");
    let seen = fixture.daemon.log().len();
    fixture.save("all.yaml", &(pods(2) + &only_port(8080) + &other));
    fixture.daemon.log().wait_for_after(seen, "published", LIMIT).unwrap();
    flow.wait_for(500, LIMIT).unwrap();
    assert_eq!(flow.wait_until_blocked(Duration::from_millis(1)), None);
    fixture.assert_as_expected(&fixture.matrix());
}

#[test]
fn a_manifest_that_does_not_parse_keeps_the_last_good_state() {
    let good = pods(2) + &only_port(8080);
    let fixture = Fixture::of(&good, |_, _| {});
    let client = fixture.site("test/pod-0");
    let target = fixture.target("test/pod-1", false);
    let flow = EchoConnection::open(&client.namespace, target, 8080, SILENCE).unwrap();
    for (bad, logged) in [
        (good.clone() + "---\napiVersion: v1\nkind: [Pod\n", "line="),
        (good.replace("port: 8080", "port: 70000"), "port"),
        (good.replace("ingress:", "ingres:"), "ingres"),
    ] {
        let seen = fixture.daemon.log().len();
        fixture.save("all.yaml", &bad);
        let line = fixture.daemon.log().wait_for_after(seen, "all.yaml", LIMIT).unwrap();
        assert!(line.contains(logged), "{line}");
        flow.wait_for(100, LIMIT).unwrap();
        let denied = probe::run_one(client, target, Protocol::Tcp(9090), RetryPolicy::default()).unwrap();
        assert_eq!(denied, ProbeOutcome::Silent);
    }
    fixture.save("all.yaml", &(pods(2) + &only_port(9090)));
    assert!(flow.wait_until_blocked(LIMIT).is_some(), "the next good save is taken");
}

#[test]
fn to_egress_policy_a_service_address_is_no_pods() {
    let [service, other] = ["10.96.0.10", "10.97.0.10"].map(|text| text.parse::<std::net::IpAddr>().unwrap());
    let egress =
        |to: &str| policy("egress", "pod-0", &format!("  policyTypes: [Egress]\n  egress: [{{to: [{to}]}}]\n"));
    let to_pods = egress("{podSelector: {}}");
    let to_block = egress("{podSelector: {}}, {ipBlock: {cidr: 10.96.0.0/16}}");
    let mut outside = None;
    let fixture = Fixture::of(&(pods(2) + &to_pods), |cluster, config| {
        config.keys += "service_cidrs = [\"10.96.0.0/16\"]\n";
        // The Service's backend is behind the node: a reply proves that the packet was let out.
        let machine = cluster.node.add_outside("services").unwrap();
        let (node, inside) = (cluster.node.netlink(), machine.namespace().netlink().unwrap());
        for address in [service, other] {
            inside.add_address(inside.index("lo").unwrap(), address.into()).unwrap();
            let link = node.index(machine.interface()).unwrap();
            node.add_route(address.into(), link, RouteVia::Gateway(machine.addresses()[0])).unwrap();
        }
        outside = Some(machine);
    });
    let from = fixture.site("test/pod-0");
    let ask = |address| probe::run_one(from, (0, address), Protocol::Icmp, RetryPolicy::default()).unwrap();
    assert_eq!((ask(service), ask(other)), (ProbeOutcome::Silent, ProbeOutcome::Silent));
    let logged = fixture.statistics().join("\n");
    assert!(logged.contains("service_denied") && logged.contains("egress_denied"), "{logged}");
    let seen = fixture.daemon.log().len();
    fixture.save("all.yaml", &(pods(2) + &to_block));
    fixture.daemon.log().wait_for_after(seen, "published", LIMIT).unwrap();
    assert_eq!((ask(service), ask(other)), (ProbeOutcome::Reached, ProbeOutcome::Silent));
}

/// Both change at once, so the order in which they take effect says which waited.
#[test]
fn a_pod_with_few_rules_does_not_wait_for_one_with_many() {
    let small = |port: u16| policy("small", "pod-0", &format!("  ingress: [{{ports: [{{port: {port}}}]}}]\n"));
    let big = |rules: u32| {
        let rule = |n: u32| {
            let [_, _, a, b] = n.to_be_bytes();
            format!("  - {{from: [{{ipBlock: {{cidr: 11.0.{a}.{b}/32}}}}], ports: [{{port: {}}}]}}\n", 1 + n)
        };
        let own = "  - {from: [{ipBlock: {cidr: 10.244.1.10/32}}], ports: [{port: 9090}]}\n";
        policy("big", "pod-1", &format!("  ingress:\n{own}{}", (0..rules).map(rule).collect::<String>()))
    };
    let fixture = Fixture::of(&(pods(2) + &small(8080) + &big(1)), |_, _| {});
    let pod = |name: &str| {
        let pods = fixture.status().pods;
        pods.into_iter().find(|pod| pod.pod == name).expect("a pod of this name")
    };
    let names = ["test/pod-0", "test/pod-1"];
    let before = names.map(|name| pod(name).changed);
    fixture.save("all.yaml", &(pods(2) + &small(9090) + &big(4_000)));
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let now = names.map(pod);
        let is_changed = |place: usize| now[place].changed > before[place];
        if is_changed(0) && !is_changed(1) {
            assert!(
                now[1].building && !now[1].enforced,
                "what was in effect for it stays, and the status says so: {now:?}"
            );
        }
        if is_changed(0) && is_changed(1) && now.iter().all(|pod| pod.enforced) {
            assert!(now[0].changed < now[1].changed, "{now:?}");
            break;
        }
        assert!(Instant::now() < deadline, "{now:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    fixture.assert_as_expected(&fixture.matrix());
}

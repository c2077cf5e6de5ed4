//! The API server is unreachable while pods come, go and change: the last known state is enforced, and changes are in
//! force soon after the server is back.

use std::time::{Duration, Instant};

use penstock_bench::testbed::Namespace;
use penstock_bench::testbed::api_server::FakeServer;
use serde_json::Value;

use crate::on_cluster::fixture::{Fixture, pod, policy};
use crate::on_cluster::stream::Stream;

/// Time limit for all changes to be in effect after the server is back.
const SOON: Duration = Duration::from_secs(2);

#[test]
fn changes_during_an_outage_count_soon_after_it() {
    away_for(Duration::from_secs(8));
}

#[test]
#[ignore = "takes a minute and more; make test-long runs it"]
fn changes_during_a_minute_of_outage_count_soon_after_it() {
    away_for(Duration::from_secs(60));
}

fn away_for(length: Duration) {
    let mut fixture = Fixture::with_three_pods();
    if fixture.server.fake().is_none() {
        eprintln!("SKIPPED: nobody can change the objects of a real API server while it is away");
        return;
    }
    let db = namespace_of(&fixture, "db");
    let from = |fixture: &Fixture, name: &str| Stream::start(&namespace_of(fixture, name), &db, "10.244.1.11");
    let (web, lab) = (from(&fixture, "web"), from(&fixture, "lab"));
    let deadline = Instant::now() + Duration::from_secs(30);
    while !web.passes() || lab.passes() {
        assert!(Instant::now() < deadline, "the policy is in effect");
    }
    let began = Instant::now();
    fixture.server.stop();
    fixture.daemon.log().wait_for_after(0, "stay in effect", Duration::from_secs(10)).unwrap();

    // A pod goes, another one gets its address, a third one is created, and a policy changes.
    drop(lab);
    fixture.node.remove_pod("test/lab").unwrap();
    for (name, address) in [("heir", "10.244.1.12"), ("late", "10.244.1.13")] {
        let closed = fixture.daemon.log().len();
        fixture.wire_pod(name, address);
        fixture.daemon.log().wait_for_after(closed, "closed until its pod is known", Duration::from_secs(10)).unwrap();
    }
    let server = fixture.server.fake().expect("it is the small one");
    change(
        server,
        &[pod("lab", "10.244.1.12"), policy("db", "web")],
        &[pod("heir", "10.244.1.12"), pod("late", "10.244.1.13"), policy("db", "late")],
    );
    let (heir, late) = (from(&fixture, "heir"), from(&fixture, "late"));
    while began.elapsed() < length {
        assert!(web.passes(), "what was allowed goes on after {:?}", began.elapsed());
        assert!(!heir.passes() && !late.passes(), "who is not known sends nowhere after {:?}", began.elapsed());
    }

    let returns = Instant::now();
    let took = late.time_until_passing(|| fixture.server.resume().unwrap());
    while web.passes() {
        assert!(returns.elapsed() < Duration::from_secs(60), "the old policy stays in effect");
    }
    let last_of_web = web.last_arrival().saturating_duration_since(returns);
    println!(
        "away for {length:?}: in effect {took:.2?} after its return; what is denied since ended {last_of_web:.2?} after it"
    );
    assert!(took < SOON && last_of_web < SOON, "{took:?} and {last_of_web:?}");
    assert!(!heir.passes(), "the address is another pod's now");
    let to_heir = Stream::start(&namespace_of(&fixture, "late"), &namespace_of(&fixture, "heir"), "10.244.1.12");
    assert!(to_heir.passes(), "which is served");
}

fn namespace_of(fixture: &Fixture, name: &str) -> Namespace {
    fixture.node.pod(&format!("test/{name}")).unwrap().namespace().clone()
}

fn change(server: &FakeServer, gone: &[Value], new: &[Value]) {
    gone.iter().for_each(|object| server.delete_elsewhere(object).unwrap());
    new.iter().for_each(|object| server.create_elsewhere(object).unwrap());
}

//! A rollout under traffic of pairs that open a connection now and then.

use std::time::{Duration, Instant};

use penstock_bench::probe::{EchoServers, EchoService, Protocol, Series, Site};

use crate::on_cluster::fixture::{Fixture, policy};

/// Between the end of one daemon and the start of the next.
const OUTAGE: Duration = Duration::from_secs(6);
/// Between two connections of a pair.
const INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(2700)];
const PAIRS: [(&str, &str); 3] = [("web", "db"), ("db", "lab"), ("lab", "web")];
const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp(8080), Protocol::Udp(53)];
const LIMIT: Duration = Duration::from_secs(20);

type Change = fn(&Fixture);

#[test]
fn a_rollout_loses_no_connection_of_slow_pairs() {
    let mut fixture = Fixture::start("[fail]\non_exit = \"keep\"\n");
    let addresses = ["10.244.1.10", "10.244.1.11", "10.244.1.12"];
    for (name, address) in ["web", "db", "lab"].into_iter().zip(addresses) {
        fixture.add_pod(name, address);
    }
    fixture.server.admin().create(&policy("db", "web")).unwrap();
    let names = ["web", "db", "lab"];
    let sites = names.map(|name| Site::from(fixture.node.pod(&format!("test/{name}")).unwrap()));
    let site = |name: &str| names.iter().position(|known| *known == name).unwrap();
    let services = [EchoService::Tcp(8080), EchoService::Udp(53)];
    let _servers = EchoServers::start_all(&sites, &services).unwrap();
    let cases: [(&str, Change); 2] = [
        ("the daemon's own pod is deleted", |_| ()),
        ("another pod's policy changes just before", |fixture| {
            fixture.server.admin().create(&policy("lab", "db")).unwrap();
        }),
    ];
    for (what, change) in cases {
        let series: Vec<_> = PAIRS
            .into_iter()
            .flat_map(|pair| PROTOCOLS.map(|protocol| (pair, protocol)))
            .flat_map(|(pair, protocol)| INTERVALS.map(|interval| (pair, protocol, interval)))
            .map(|(pair, protocol, interval)| {
                // Not all at once: whenever the daemon ends, most have opened none just before.
                std::thread::sleep(Duration::from_millis(170));
                let (from, to) = (site(pair.0), site(pair.1));
                let series = Series::start(&sites[from], &sites[to], to, protocol, interval).unwrap();
                ((pair, protocol, interval), series)
            })
            .collect();
        let started = Instant::now();
        for (name, series) in &series {
            let reached = series.wait_for(started, true, LIMIT).unwrap();
            assert!(reached.is_some(), "{what}: {name:?} before:\n{}", fixture.daemon.log().lines().join("\n"));
        }
        change(&fixture);
        let began = Instant::now();
        fixture.delete_daemon();
        let log = fixture.daemon.log().lines().join("\n");
        std::thread::sleep(OUTAGE);
        let ended = Instant::now();
        fixture.create_daemon();
        for (name, series) in series {
            let points = series.end().unwrap();
            let during: Vec<_> = points.iter().filter(|point| point.at > began && point.at < ended).collect();
            let lost = during.iter().filter(|point| !point.reached);
            let lost: Vec<_> = lost.map(|point| point.at - began).collect();
            assert!(
                lost.is_empty() && during.len() > 1,
                "{what}: {name:?} of {} lost those {lost:?} after its deletion:\n{log}",
                during.len()
            );
        }
    }
}

//! Services: ten thousand of them, each with ten backends, compiled, changed one by one, and looked up.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use penstock_dataplane::packet::{Address, Protocol};
use penstock_dataplane::services::ServiceSet;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{
    EndpointPort, EndpointSlice, Object, ObjectChange, PortProtocol, Service, ServiceEndpoint, ServicePort, TargetPort,
};

use super::cluster::key;
use super::row;

const BACKENDS: u32 = 10;
/// Lookups in a round.
const LOOKUPS: usize = 100_000;
const PORT: u16 = 80;

fn cluster_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 0, 0).to_bits() + number as u32)
}

fn service(number: usize) -> ObjectChange {
    let port = ServicePort {
        name: String::new(),
        protocol: PortProtocol::Tcp,
        number: PORT,
        target: TargetPort::Number(8080),
        node_port: None,
    };
    ObjectChange::Set(Object::Service(Service {
        key: key(0, format!("service-{number}")),
        created: None,
        addresses: vec![cluster_address(number).into()],
        ports: vec![port],
        external: Vec::new(),
        local_only: false,
        affinity_seconds: None,
        selector: None,
    }))
}

/// The backends of a Service; each `turn` has others.
fn slice(number: usize, turn: u32) -> ObjectChange {
    let endpoint = |backend: u32| ServiceEndpoint {
        address: IpAddr::from(Ipv4Addr::from_bits((10 << 24 | 128 << 16) + 64 * number as u32 + backend + turn % 50)),
        ready: true,
        serving: true,
        terminating: false,
        node: Some(format!("node-{}", backend % 3)),
        node_hints: Vec::new(),
        zone_hints: Vec::new(),
    };
    ObjectChange::Set(Object::EndpointSlice(EndpointSlice {
        key: key(0, format!("service-{number}")),
        service: Some(format!("service-{number}")),
        ports: vec![EndpointPort { name: String::new(), protocol: PortProtocol::Tcp, number: 8080 }],
        endpoints: (0..BACKENDS).map(endpoint).collect(),
    }))
}

fn objects(services: usize) -> impl Iterator<Item = ObjectChange> {
    (0..services).flat_map(|number| [service(number), slice(number, 0)])
}

pub(crate) fn run(services: usize, changes: usize, rounds: usize) -> Vec<bool> {
    let before = allocated_mebibytes();
    let mut engine = Engine::new(EngineSettings::for_node("node-0"));
    let start = Instant::now();
    engine.apply(objects(services));
    let mut published = engine.service_set().clone();
    let fresh = start.elapsed();
    assert_eq!(published.len(), services);
    let memory = allocated_mebibytes().saturating_sub(before);
    let mut times: Vec<Duration> = (0..changes)
        .map(|turn| {
            let change = slice(turn.wrapping_mul(7919) % services, turn as u32 + 1);
            let start = Instant::now();
            engine.apply([change]);
            published = engine.service_set().clone();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    let p99 = times[changes * 99 / 100];
    let mut one = Engine::new(EngineSettings::for_node("node-0"));
    one.apply(objects(1));
    let (many_took, one_took) = lookups(&published, one.service_set(), services, rounds);
    let ratio = many_took / one_took;
    vec![
        row(
            &format!("{services} Services of {BACKENDS} backends: fresh compile and publish"),
            format!("{:.2} s", fresh.as_secs_f64()),
            "<= 1 s",
            fresh <= Duration::from_secs(1),
        ),
        row(
            &format!("one EndpointSlice changed, event to published, p99 (median {:.0?})", times[changes / 2]),
            format!("{:.3} ms", p99.as_secs_f64() * 1e3),
            "<= 5 ms",
            p99 <= Duration::from_millis(5),
        ),
        row(
            "memory that they take",
            format!("{memory} MiB"),
            "<= 100 MB",
            (1..=95).contains(&memory) || services < 1_000,
        ),
        row(
            &format!("lookup of one address again and again, {services} Services against 1 ({one_took:.1} ns)"),
            format!("{ratio:.2}"),
            "<= 1.1",
            ratio <= 1.1,
        ),
    ]
}

/// Nanoseconds of a lookup in each set, the best of all rounds.
fn lookups(many: &ServiceSet, one: &ServiceSet, services: usize, rounds: usize) -> (f64, f64) {
    let time = |set: &ServiceSet, number: usize| {
        let address = Address::from(IpAddr::from(cluster_address(number)));
        let start = Instant::now();
        for _ in 0..LOOKUPS {
            black_box(set.find(black_box(address), Protocol::TCP, PORT));
        }
        start.elapsed().as_nanos() as f64 / LOOKUPS as f64
    };
    (0..rounds).fold((f64::MAX, f64::MAX), |(best, best_of_one), round| {
        let number = round.wrapping_mul(7919) % services;
        (best.min(time(many, number)), best_of_one.min(time(one, 0)))
    })
}

/// MiB that the main thread has allocated: of memory that the process has freed before, resident memory would not tell.
fn allocated_mebibytes() -> usize {
    // SAFETY: no memory is passed.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) >> 20
}

//! Nanoseconds a packet of the whole pipeline and of its parts, in memory: no socket, no system call.
//!
//! `cargo bench -p penstock-bench --bench pipeline`. Packets of 64 octets in full batches: a time is that of a batch of
//! 64 (of one packet for `parse` and `judge`), as the thread had the core, so that others' load tells little.

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use etherparse::PacketBuilder;
use nix::time::{ClockId, clock_gettime};
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Address, parse};
use penstock_dataplane::pipeline::{BATCH, Cause, Frames, Mode, Pipeline, Verdict};
use penstock_dataplane::policy::{
    Endpoint, EndpointId, Identity, Isolation, NodeId, Owner, PeerSpec, PolicySet, PortProtocol, PortRange, PortSpec,
    RuleName, RuleSpec, RuleTable,
};
use penstock_dataplane::{Epoch, Snapshot};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Frames that are put back as they were after each batch, so that a TTL never runs out.
struct Batch {
    frames: Vec<[u8; 64]>,
    header: [u8; 4],
    first: usize,
}

impl Frames for Batch {
    fn len(&self) -> usize {
        BATCH
    }

    fn bytes(&mut self, index: usize) -> &mut [u8] {
        let frame = &mut self.frames[self.first + index];
        // TTL, protocol and header checksum, which are the same in all of them.
        frame[22..26].copy_from_slice(&self.header);
        frame
    }
}

fn frame(number: usize) -> [u8; 64] {
    let (from, to) = (1024 + (number & 0x7fff) as u16, 1 + (number >> 15) as u16);
    let mut bytes = Vec::new();
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(CLIENT.octets(), SERVER.octets(), 64)
        .udp(from, to)
        .write(&mut bytes, &[0; 22])
        .unwrap();
    bytes.try_into().unwrap()
}

fn snapshot() -> Snapshot {
    let mut forwarding = Forwarding::default();
    let mut update = PolicySet::default().update();
    let rule = RuleSpec {
        name: RuleName("all UDP".into()),
        peers: PeerSpec::Every,
        ports: PortSpec::AnyOf(vec![PortRange { protocol: PortProtocol::Udp, first: 1, last: 65535 }]),
    };
    let table = Arc::new(RuleTable::new(&[rule], []));
    for (number, address) in [(0, CLIENT), (1, SERVER)] {
        let address = Address::from_v4_octets(address.octets());
        let port = Port {
            kind: PortKind::Pod,
            own_mac: Mac([2, 0, 0, 0, 0, number]),
            peer_mac: Mac([4, 0, 0, 0, 0, number]),
            mtu: 1500,
            addresses: vec![address],
        };
        forwarding.insert(PortId(number.into()), port).unwrap();
        let endpoint = EndpointId(number.into());
        let isolation = || Isolation::Isolated(Arc::clone(&table));
        update.set_endpoint(endpoint, Some(Endpoint { egress: isolation(), ingress: isolation() }));
        let identity = Identity(NonZeroU32::MIN);
        update.set_address(address, Some(Owner::Pod { identity, endpoint: Some(endpoint), node: Some(NodeId(0)) }));
    }
    Snapshot { epoch: Epoch(1), policy: update.finish(), forwarding }
}

/// How long this thread had a core for so many rounds of work.
fn on_core<T>(times: u64, mut work: impl FnMut() -> T) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every Linux kernel has the clock");
        Duration::new(time.tv_sec() as u64, time.tv_nsec() as u32)
    };
    let started = now();
    for _ in 0..times {
        black_box(work());
    }
    now() - started
}

fn pipeline(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pipeline");
    group.throughput(Throughput::Elements(BATCH as u64));
    for (mode, flows) in [(Mode::ForwardOnly, 1), (Mode::Full, 1), (Mode::Full, 64 << 10), (Mode::Full, 512 << 10)] {
        let config = Config { entries: 1 << 20, quota: Some(1 << 20), ..Config::default() };
        let connections = Arc::new(ConnTable::new(&config).unwrap());
        let mut pipeline = Pipeline::new(connections, mode);
        let snapshot = snapshot();
        let count = flows.max(BATCH);
        let mut batch = Batch {
            frames: (0..count).map(|number| frame(number % flows)).collect(),
            header: *frame(0)[22..].first_chunk().unwrap(),
            first: 0,
        };
        let mut verdicts = [Verdict::Drop(Cause::NotReady); BATCH];
        let mut run = || {
            pipeline.process_batch(
                &snapshot,
                Timestamp::from_millis(5_000_000),
                PortId(0),
                &mut batch,
                &mut verdicts,
                &mut (),
            );
            batch.first = (batch.first + BATCH) % count;
            verdicts[BATCH - 1]
        };
        for _ in 0..count / BATCH {
            assert_eq!(run(), Verdict::Forward(PortId(1)));
        }
        group.bench_function(BenchmarkId::new(format!("{mode:?}"), format!("{flows} flows")), |bencher| {
            bencher.iter_custom(|times| on_core(times, &mut run));
        });
    }
    group.finish();
}

fn stages(criterion: &mut Criterion) {
    let bytes = frame(0);
    criterion.bench_function("parse", |bencher| {
        bencher.iter_custom(|times| on_core(times, || parse(black_box(&bytes))));
    });
    let set = snapshot().policy;
    let flow = parse(&bytes).unwrap().flow;
    criterion.bench_function("judge", |bencher| {
        bencher.iter_custom(|times| on_core(times, || set.judge(black_box(&flow))));
    });
}

criterion_group!(benches, pipeline, stages);
criterion_main!(benches);

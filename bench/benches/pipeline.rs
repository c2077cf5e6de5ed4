//! Nanoseconds a packet of the whole pipeline and of its parts, in memory: no socket, no system call.
//!
//! `cargo bench -p penstock-bench --bench pipeline`. Packets of 64 bytes in full batches: a time is that of a batch of
//! 64 (of one packet for `parse` and `judge`), in thread CPU time, so that other load has little effect.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use nix::time::{ClockId, clock_gettime};
use penstock_bench::in_memory::{Batch, frame, snapshot};
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::parse;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};

/// CPU time of this thread for so many repetitions of `work`.
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
    for (mode, flows) in [
        (PipelineMode::ForwardOnly, 1),
        (PipelineMode::Full, 1),
        (PipelineMode::Full, 64 << 10),
        (PipelineMode::Full, 512 << 10),
    ] {
        let config = Config { entries: 1 << 20, quota: Some(1 << 20), ..Config::default() };
        let connections = Arc::new(ConnTable::new(&config).unwrap());
        let mut pipeline = Pipeline::new(connections, mode);
        let snapshot = snapshot();
        let mut batch = Batch::of(flows);
        let rounds = batch.count() / BATCH;
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let mut run = || {
            pipeline.process_batch(
                &snapshot,
                Timestamp::from_millis(5_000_000),
                PortId(0),
                &mut batch,
                &mut verdicts,
                &mut (),
            );
            batch.turn();
            verdicts[BATCH - 1]
        };
        for _ in 0..rounds {
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
        bencher.iter_custom(|times| on_core(times, || set.evaluate(black_box(&flow))));
    });
}

criterion_group!(benches, pipeline, stages);
criterion_main!(benches);

//! The epoch reported as in effect is the one under which packets are evaluated.

use std::sync::atomic::{AtomicBool, AtomicU32};

use super::lifecycle::start;
use super::net::in_namespace;
use super::*;
use crate::Epoch;

fn snapshot(epoch: u32) -> Snapshot {
    Snapshot { epoch: Epoch(epoch), ..Snapshot::default() }
}

#[test]
fn a_snapshot_is_in_effect_on_sleeping_workers_at_once() {
    in_namespace(|| {
        let dataplane = start(config(&[0, 1]));
        wait_until("both sleep", || dataplane.statistics().workers.iter().all(|worker| worker.sleeps > 0));
        for epoch in 1..100 {
            dataplane.publish(snapshot(epoch));
            // One that was just waking up may finish its poll iteration.
            wait_until("in effect", || dataplane.in_force() == [Epoch(epoch); 2]);
        }
    });
}

#[test]
fn a_worker_that_never_sleeps_reports_its_epoch_every_iteration() {
    in_namespace(|| {
        let dataplane = start(Config { spin: NEVER_SLEEPS, ..config(&[0]) });
        for epoch in 1..50 {
            dataplane.publish(snapshot(epoch));
            wait_until("in effect", || dataplane.in_force() == [Epoch(epoch)]);
        }
    });
}

/// Holds the worker in the middle of a batch, and reports its snapshot's epoch.
#[derive(Clone, Default)]
struct Held {
    holds: Arc<AtomicBool>,
    inside: Arc<AtomicBool>,
    evaluated_under: Arc<AtomicU32>,
}

impl Processor for Held {
    fn process(
        &mut self,
        snapshot: &Snapshot,
        _: Instant,
        _: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    ) {
        self.inside.store(true, Ordering::SeqCst);
        while self.holds.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        verdicts[..frames.len()].fill(Verdict::Drop(DropReason::NoPort));
        self.evaluated_under.store(snapshot.epoch.0, Ordering::SeqCst);
        self.inside.store(false, Ordering::SeqCst);
    }

    fn housekeeping(&mut self, _: &Snapshot, _: Instant, _: bool) {}
}

#[test]
fn a_snapshot_is_in_effect_once_no_batch_uses_the_last_one() {
    in_namespace(|| {
        let held = Held::default();
        let dataplane = Dataplane::start_with(config(&[0]), |_, _| held.clone()).unwrap();
        let pair = Pair::of(dataplane, Wires::new());
        let (dataplane, sender) = (&pair.dataplane, &pair.near);
        dataplane.publish(snapshot(1));
        held.holds.store(true, Ordering::SeqCst);
        sender.send_all(&pair.frames(0, 1));
        wait_until("it is evaluating", || held.inside.load(Ordering::SeqCst));
        dataplane.publish(snapshot(2));
        for _ in 0..100 {
            assert_eq!(dataplane.in_force(), [Epoch(1)]);
            thread::sleep(Duration::from_micros(100));
        }
        held.holds.store(false, Ordering::SeqCst);
        wait_until("in effect", || dataplane.in_force() == [Epoch(2)]);
        assert_eq!(held.evaluated_under.load(Ordering::SeqCst), 1, "the current batch keeps its snapshot");
        sender.send_all(&pair.frames(0, 1));
        wait_until("the next one under the new snapshot", || held.evaluated_under.load(Ordering::SeqCst) == 2);
        let worker = &dataplane.statistics().workers[0];
        assert_eq!(worker.batch_sizes[0], worker.batches, "each batch had one packet");
        assert!(worker.busy_iterations.sum() >= Duration::from_millis(10), "{:?}", worker.busy_iterations.sum());
    });
}

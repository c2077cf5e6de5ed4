//! A program and a worker in one entry at the same time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::*;

/// Runs `program` while `worker` writes again and again, until so many runs have had a worker beside them; on a machine where both
/// hardly ever run at the same time, for ten times as many.
fn beside(worker: impl Fn() + Sync, runs: u32, program: impl FnMut()) {
    // An entry's generation, of which there are 1024, must not come back while a program runs.
    beside_turns(200, worker, runs, program);
}

/// The same with at most so many turns of the worker in a run.
fn beside_turns(most_turns: u32, worker: impl Fn() + Sync, runs: u32, mut program: impl FnMut()) {
    const MOST: u32 = 10;
    let (is_over, begun, turns) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut run, mut in_run) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                let now = begun.load(Ordering::SeqCst);
                if now != run {
                    (run, in_run) = (now, 0);
                }
                if in_run < most_turns {
                    worker();
                    in_run += 1;
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut all = || {
            // Before, the entry is as the connection was opened, and its packets pass.
            while turns.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            let mut accompanied = 0;
            for _ in 0..MOST * runs {
                let before = turns.load(Ordering::Relaxed);
                begun.fetch_add(1, Ordering::SeqCst);
                program();
                accompanied += u32::from(turns.load(Ordering::Relaxed) != before);
                if accompanied == runs {
                    break;
                }
            }
        };
        // Also if an assertion fails, the worker ends.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut all));
        is_over.store(true, Ordering::Relaxed);
        done.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

const RUNS: u32 = 4_000;

/// The control word once the entry has been claimed again.
fn of_next_generation(control: u64, claims: &AtomicU64) -> u64 {
    let generation = claims.fetch_add(1, Ordering::Relaxed) & GENERATIONS;
    control & !(GENERATIONS << GENERATION_AT) | generation << GENERATION_AT
}

/// An entry has in turn an allowed connection of another flow, and the packet's flow, which is revoked.
#[test]
fn a_packet_never_passes_by_the_entrys_last_verdict() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        for (v4, tcp) in [(true, true), (false, false)] {
            forget(&node);
            let there = Sent { v4, ..sent(End::A, End::B, tcp, ACK) };
            open(&mut node, there, now);
            let slot = words.slots()[0];
            let (allowed, entry) = (words.read(slot).entry, words.entry(slot));
            let claims = AtomicU64::new(0);
            let worker = || {
                for (port, verdict) in [(allowed[5] ^ 1, 0), (allowed[5], REVOKED)] {
                    let control = of_next_generation(allowed[0], &claims);
                    entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                    entry[5].store(port, Ordering::SeqCst);
                    entry[0].store(control | verdict, Ordering::SeqCst);
                }
            };
            let (frame, at) = (there.frame(), node.interface(End::A));
            let before = node.programs.offloaded().unwrap();
            beside(worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
            assert_eq!(node.programs.offloaded().unwrap(), before, "{there:?}");
        }
    });
}

/// A worker changes the path while a program forwards a FIN, and notes it there.
#[test]
fn a_fin_never_brings_back_a_path_that_a_worker_changed() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        let there = sent(End::A, End::B, true, FIN | ACK);
        open(&mut node, there, now);
        let slot = words.slots()[0];
        let taken = words.read(slot).path & !FINISHED;
        let none = taken & !(0b11 << TAKEN_AT);
        let path = &words.usage(slot)[0];
        let (brought_back, turns) = (AtomicBool::new(false), AtomicU32::new(0));
        path.store(none, Ordering::SeqCst);
        let worker = || {
            brought_back.fetch_or(path.swap(taken, Ordering::SeqCst) != none, Ordering::SeqCst);
            // It changes the path at another moment of the program's each time, and sometimes long after, so that some pass.
            let spins = (1u32 << (turns.fetch_add(1, Ordering::Relaxed) % 9)) - 1;
            (0..spins).for_each(|_| std::hint::spin_loop());
            path.store(none, Ordering::SeqCst);
            (0..4).for_each(|_| std::hint::spin_loop());
        };
        let (frame, at) = (there.frame(), node.interface(End::A));
        let before = node.programs.offloaded().unwrap();
        beside_turns(u32::MAX, worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
        assert_ne!(node.programs.offloaded().unwrap(), before, "some pass");
        assert!(!brought_back.into_inner());
    });
}

/// While a program notes the number of a SYN-ACK, the next SYN that was sent between the same ends gets the entry.
#[test]
fn a_late_answer_leaves_the_entrys_next_window() {
    in_namespace(|| {
        let mut node = Node::new();
        let (words, now) = (Words::of(&node), Timestamp::now());
        let there = sent(End::A, End::B, true, SYN);
        node.handshake(there, SYN, true, now);
        let (slot, back) = (words.slots()[0], Sent { flags: SYN | ACK, payload: 0, ..there.back() });
        let other = 6 + usize::from(back.ends().0.0 > back.ends().1.0);
        let (fields, entry, path) = (words.read(slot).entry, words.entry(slot), &words.usage(slot)[0]);
        let (taken, claims, wrong) = (path.load(Ordering::SeqCst), AtomicU64::new(0), AtomicBool::new(false));
        // A worker writes other protocols' words, and those of a connection that it has answered itself.
        let worker = || {
            for window in [0, 77, 1 << 61 | 5000] {
                let control = of_next_generation(fields[0], &claims);
                entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                path.store(control >> GENERATION_AT & GENERATIONS, Ordering::SeqCst);
                entry[other].store(window, Ordering::SeqCst);
                entry[0].store(control, Ordering::SeqCst);
                (0..50).for_each(|_| std::hint::spin_loop());
                wrong.fetch_or(entry[other].load(Ordering::SeqCst) != window, Ordering::SeqCst);
                entry[0].store(control & !STATES | CLAIMED, Ordering::SeqCst);
                entry[other].store(fields[other], Ordering::SeqCst);
                path.store(taken, Ordering::SeqCst);
                entry[0].store(of_next_generation(fields[0], &claims), Ordering::SeqCst);
                (0..200).for_each(|_| std::hint::spin_loop());
            }
        };
        let (frame, at) = (in_step(back.frame(), true, SYN | ACK, false), node.interface(End::B));
        let before = node.programs.offloaded().unwrap();
        beside(worker, RUNS, || _ = node.programs.try_frame(TriedSender::Pod, at, &frame, 0).unwrap());
        assert_ne!(node.programs.offloaded().unwrap(), before, "some pass");
        assert!(!wrong.into_inner());
    });
}

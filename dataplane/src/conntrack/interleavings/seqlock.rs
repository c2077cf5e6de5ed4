//! The sequence lock alone: two words, written by one or two threads and read by another.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::explore;
use crate::conntrack::seqlock::{Control, SeqLock};

/// The lowest bit says that a thread writes, the others count writes.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Count(u64);

impl Control for Count {
    fn from_word(word: u64) -> Self {
        Self(word)
    }

    fn word(self) -> u64 {
        self.0
    }

    fn is_same_write(self, other: Self) -> bool {
        self.0 & 1 == 0 && self == other
    }
}

type Pair = SeqLock<Count, [AtomicU64; 2]>;

/// Writes the number of the write into both words, unless another thread is writing.
fn write(pair: &Pair) {
    let before = pair.control();
    if before.0 & 1 == 1 || pair.exchange(before, Count(before.0 + 1)).is_err() {
        return;
    }
    let number = before.0 / 2 + 1;
    pair.publish(Count(2 * number), |words| words.iter().for_each(|word| word.store(number, Ordering::Relaxed)));
}

fn read(pair: &Pair) -> Option<u64> {
    let before = pair.control();
    let words = pair.read(before, |words| [0, 1].map(|at: usize| words[at].load(Ordering::Relaxed)))?;
    assert_eq!(words, [before.0 / 2; 2], "both of one write");
    Some(words[0])
}

/// A read during two writes finds nothing of them, the first, the second, or that the words change.
fn read_during_two_writes(other_writer: bool) {
    explore(4, move || {
        let pair = Arc::new(Pair::new([AtomicU64::new(0), AtomicU64::new(0)]));
        let run = |work: fn(&Pair) -> Option<u64>| {
            let pair = pair.clone();
            thread::spawn(move || work(&pair))
        };
        let reader = run(read);
        let writer = other_writer.then(|| run(|pair| (write(pair), None).1));
        (0..if other_writer { 1 } else { 2 }).for_each(|_| write(&pair));
        writer.into_iter().for_each(|writer| _ = writer.join().unwrap());
        let found = reader.join().unwrap();
        assert!((1..=2).contains(&read(&pair).unwrap()), "the last write is whole");
        found.map_or(3, |number| number as usize)
    });
}

#[test]
fn a_read_never_mixes_two_writes_of_one_thread() {
    read_during_two_writes(false);
}

#[test]
fn a_read_never_mixes_the_writes_of_two_threads() {
    read_during_two_writes(true);
}

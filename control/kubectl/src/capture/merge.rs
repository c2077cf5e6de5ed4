//! Packets of several nodes in the order of their times.
//!
//! A node's packets come in the order of its clock. A packet is written once every other node has a later one, or has ended, or
//! after it has waited for them for some time: a node without packets sends nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Items of several nodes that wait for older ones.
#[derive(Debug)]
pub(super) struct Merger<T> {
    heap: BinaryHeap<Reverse<Held<T>>>,
    /// By node: how many of its items wait, and whether more may come.
    nodes: Vec<(usize, bool)>,
    hold: Duration,
    sequence: u64,
    /// The time of the last item that was given out.
    last: u64,
    late: u64,
}

#[derive(Debug)]
struct Held<T> {
    /// Its time, its node, and its number among all.
    key: (u64, usize, u64),
    arrived: Duration,
    item: T,
}

impl<T> PartialEq for Held<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<T> Eq for Held<T> {}

impl<T> PartialOrd for Held<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Held<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl<T> Merger<T> {
    /// Merges the items of so many nodes; an item waits at most for `hold`.
    pub(super) fn new(nodes: usize, hold: Duration) -> Self {
        Self { heap: BinaryHeap::new(), nodes: vec![(0, true); nodes], hold, sequence: 0, last: 0, late: 0 }
    }

    /// Takes an item of a node that has arrived `now`.
    pub(super) fn push(&mut self, node: usize, time: u64, item: T, now: Duration) {
        self.sequence += 1;
        self.nodes[node].0 += 1;
        self.heap.push(Reverse(Held { key: (time, node, self.sequence), arrived: now, item }));
    }

    /// Nothing more comes of a node.
    pub(super) fn end(&mut self, node: usize) {
        self.nodes[node].1 = false;
    }

    /// The next item whose turn it is `now`, with its node.
    pub(super) fn pop(&mut self, now: Duration) -> Option<(usize, T)> {
        let Reverse(first) = self.heap.peek()?;
        let is_known = self.nodes.iter().all(|&(waiting, may_come)| waiting > 0 || !may_come);
        if !is_known && now.saturating_sub(first.arrived) < self.hold {
            return None;
        }
        let Reverse(Held { key: (time, node, _), item, .. }) = self.heap.pop()?;
        self.nodes[node].0 -= 1;
        self.late += u64::from(time < self.last);
        self.last = self.last.max(time);
        Some((node, item))
    }

    /// Items that came too late for their place.
    pub(super) fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOLD: Duration = Duration::from_millis(100);

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn an_item_waits_a_while_for_nodes_that_may_have_older_ones() {
        let mut merger = Merger::new(2, HOLD);
        merger.push(0, 20, "a20", at(0));
        assert_eq!(merger.pop(at(99)), None, "the other node may have an older one");
        merger.push(1, 10, "b10", at(99));
        assert_eq!(merger.pop(at(99)), Some((1, "b10")));
        assert_eq!(merger.pop(at(99)), None);
        assert_eq!(merger.pop(at(100)), Some((0, "a20")), "it has waited");
        merger.push(1, 15, "b15", at(300));
        merger.end(0);
        assert_eq!(merger.pop(at(300)), Some((1, "b15")), "nothing more can come of the first");
        assert_eq!((merger.late(), merger.pop(at(1000))), (1, None));
    }

    proptest! {
        /// Whatever the nodes' packets are, and however much less than the hold they are on their way.
        #[test]
        fn items_that_arrive_in_time_come_out_sorted_and_whole(
            streams in prop::collection::vec(prop::collection::vec((0u64..40, 0u64..90), 0..20), 1..4),
        ) {
            // Each node's items by time, in milliseconds; each arrives after its delay, in the node's order.
            let mut arrivals = Vec::new();
            for (node, stream) in streams.iter().enumerate() {
                let (mut time, mut arrived) = (0, 0);
                for (number, (step, delay)) in stream.iter().enumerate() {
                    time += step;
                    arrived = (time + delay).max(arrived);
                    arrivals.push((arrived, node, number, time));
                }
            }
            arrivals.sort_unstable();
            let (mut merger, mut out) = (Merger::new(streams.len(), HOLD), Vec::new());
            for &(arrived, node, number, time) in &arrivals {
                while let Some((node, item)) = merger.pop(at(arrived)) {
                    out.push((node, item));
                }
                merger.push(node, time, (time, number), at(arrived));
            }
            (0..streams.len()).for_each(|node| merger.end(node));
            while let Some((node, item)) = merger.pop(Duration::MAX) {
                out.push((node, item));
            }
            prop_assert_eq!(merger.late(), 0);
            prop_assert!(out.is_sorted_by_key(|(_, (time, _))| *time));
            let mut expected: Vec<_> = arrivals.iter().map(|&(_, node, number, time)| (node, (time, number))).collect();
            let mut found = out.clone();
            expected.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
            // Items of one node keep their order.
            for node in 0..streams.len() {
                prop_assert!(out.iter().filter(|(of, _)| *of == node).is_sorted_by_key(|(_, (_, number))| *number));
            }
        }
    }
}

//! Packets of several nodes in the order of their times.
//!
//! A node's packets come in the order of its clock. A packet is written once every other node has a later one, or has ended, or
//! after it has waited for them for some time: a node without packets sends nothing.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{self, Write};
use std::time::Duration;

use penstock_replay::capture::{CaptureInterface, CaptureWriter, InterfaceId, LinkType, Record, Time};

use super::node::{Counts, Packet};

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
    /// Of so many nodes; an item waits at most for `hold`.
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

/// The file.
pub(super) struct PacketFile<W: Write> {
    writer: CaptureWriter<W>,
    nodes: Vec<String>,
    /// By node and the interface's number there.
    numbers: HashMap<(usize, u32), usize>,
    interfaces: Vec<(usize, CaptureInterface, u64)>,
    packets: u64,
    last: Time,
}

impl<W: Write> PacketFile<W> {
    /// Starts a file with packets of these nodes.
    pub(super) fn new(output: W, nodes: Vec<String>) -> io::Result<Self> {
        let mut writer = CaptureWriter::new(output)?;
        writer.flush()?;
        let (numbers, interfaces) = Default::default();
        Ok(Self { writer, nodes, numbers, interfaces, packets: 0, last: Time::default() })
    }

    /// Packets in the file.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    /// Writes the packets whose turn it is, at most up to so many in all, and passes them on.
    pub(super) fn drain(&mut self, from: &mut Merger<Packet>, now: Duration, most: Option<u64>) -> io::Result<()> {
        let before = self.packets;
        while let Some((node, packet)) = from.pop(now) {
            if most.is_none_or(|most| self.packets < most) {
                self.packet(node, &packet)?;
            }
        }
        if self.packets > before { self.writer.flush() } else { Ok(()) }
    }

    fn packet(&mut self, node: usize, packet: &Packet) -> io::Result<()> {
        let (number, name) = &packet.interface;
        let next = self.interfaces.len();
        let number = *self.numbers.entry((node, *number)).or_insert(next);
        if number == next {
            let name = Some(format!("{name} on {}", self.nodes[node]));
            self.interfaces.push((node, CaptureInterface { file: 0, name, link: LinkType::Ethernet }, 0));
        }
        let (_, interface, count) = &mut self.interfaces[number];
        *count += 1;
        self.packets += 1;
        self.last = Time(packet.time);
        let record = Record {
            time: self.last,
            interface: InterfaceId(number as u32),
            captured: packet.frame.len() as u32,
            original: packet.original,
        };
        let comment = format!("{} node={}", packet.comment, self.nodes[node]);
        self.writer.write(&record, interface, &packet.frame, comment.trim_start())
    }

    /// Ends the file with each interface's packets. What a node lost stands with its first interface.
    pub(super) fn end(&mut self, counts: &[Counts]) -> io::Result<()> {
        let mut said = vec![false; self.nodes.len()];
        for (number, (node, interface, packets)) in self.interfaces.iter().enumerate() {
            let (lost, comment) = match std::mem::replace(&mut said[*node], true) {
                false => (
                    counts[*node].lost,
                    format!("{} packets of node {} lost to the capture", counts[*node].lost, self.nodes[*node]),
                ),
                true => (0, String::new()),
            };
            let id = InterfaceId(number as u32);
            self.writer.statistics((self.last, id), interface, (packets + lost, lost), &comment)?;
        }
        self.writer.flush()
    }

    /// What is in the file, and what is not, in a line.
    pub(super) fn summary(&self, counts: &[Counts], late: u64) -> String {
        let nodes = self.nodes.iter().enumerate().map(|(node, name)| {
            let packets: u64 = self.interfaces.iter().filter(|(of, ..)| *of == node).map(|(.., packets)| packets).sum();
            format!("{name} {packets} (and {} lost to the capture)", counts[node].lost)
        });
        let late =
            if late > 0 { format!("; {late} came too late for their place in the order") } else { String::new() };
        format!("{} packets: {}{late}", self.packets, nodes.collect::<Vec<_>>().join(", "))
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
    fn an_item_waits_for_nodes_that_may_have_older_ones_and_not_forever() {
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
            // Of one node, in its own order.
            for node in 0..streams.len() {
                prop_assert!(out.iter().filter(|(of, _)| *of == node).is_sorted_by_key(|(_, (_, number))| *number));
            }
        }
    }
}

//! Results in the order of the capture: those behind a packet that is not decided yet wait for it.

use std::collections::VecDeque;

use super::capture::Record;
use super::player::Decision;

#[derive(Debug)]
pub(super) struct PacketResult {
    pub(super) number: u64,
    pub(super) record: Record,
    pub(super) decision: Decision,
    /// For a capture, if it is written.
    pub(super) frame: Vec<u8>,
    pub(super) comment: Vec<u8>,
    /// The line of JSON, if it is written.
    pub(super) line: Vec<u8>,
}

impl PacketResult {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.frame.len() + self.comment.len() + self.line.len()
    }
}

#[derive(Debug, Default)]
pub(super) struct InOrder {
    /// By number, beginning with a packet that is not decided.
    waiting: VecDeque<(u64, Option<PacketResult>)>,
    bytes: usize,
}

impl InOrder {
    /// Bytes of results that may wait.
    const MOST: usize = 64 << 20;

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether the first packet must be decided now.
    pub(super) fn is_full(&self) -> bool {
        self.bytes > Self::MOST
    }

    /// The next packet is not decided yet.
    pub(super) fn wait_for(&mut self, number: u64) {
        self.waiting.push_back((number, None));
    }

    /// Adds the result of the next packet, or of one that was waited for.
    pub(super) fn add(&mut self, result: PacketResult) {
        self.bytes += result.bytes();
        let at = self.waiting.partition_point(|(number, _)| *number < result.number);
        match self.waiting.get_mut(at) {
            Some((_, waited_for)) => *waited_for = Some(result),
            None => self.waiting.push_back((result.number, Some(result))),
        }
    }

    /// Takes the first result, if it waits for none before it.
    pub(super) fn take(&mut self) -> Option<PacketResult> {
        let (_, Some(_)) = self.waiting.front()? else { return None };
        let result = self.waiting.pop_front()?.1?;
        self.bytes -= result.bytes();
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::capture::{InterfaceId, Time};
    use super::*;

    fn result(number: u64) -> PacketResult {
        let record = Record { time: Time(number), interface: InterfaceId(0), captured: 1, original: 1 };
        PacketResult { number, record, decision: Decision::Allow, frame: vec![], comment: vec![], line: vec![] }
    }

    #[test]
    fn results_leave_in_order_behind_what_is_undecided() {
        let mut order = InOrder::default();
        let taken = |order: &mut InOrder| -> Vec<u64> {
            std::iter::from_fn(|| order.take()).map(|result| result.number).collect()
        };
        order.wait_for(3);
        order.add(result(4));
        order.wait_for(7);
        order.add(result(9));
        assert_eq!(taken(&mut order), [0; 0]);
        order.add(result(7));
        assert_eq!(taken(&mut order), [0; 0]);
        order.add(result(3));
        assert_eq!(taken(&mut order), [3, 4, 7, 9]);
        assert!(order.is_empty() && !order.is_full() && order.bytes == 0);
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut order = InOrder::default();
        order.wait_for(1);
        order.add(PacketResult { line: vec![0; InOrder::MOST], ..result(2) });
        assert!(order.is_full());
        order.add(result(1));
        while order.take().is_some() {}
        assert!(!order.is_full());
    }
}

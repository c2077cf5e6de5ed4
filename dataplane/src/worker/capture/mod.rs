//! Captures: copies of packets with their verdicts, for a reader that looks in.
//!
//! While no capture runs, a batch costs one check. A capture comes to each worker as a command between two poll iterations,
//! with all memory that the worker needs for it. Copies go into a bounded queue of buffers that were made before; a packet
//! for which no buffer is free is counted as lost. So a slow reader loses packets of the capture, and never delays a worker.

mod filter;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crossbeam::queue::ArrayQueue;

pub use filter::{CaptureFilter, CapturedPod};

use super::verdicts::{LoggedEvaluation, Recorder};
use crate::conntrack::{ConnTable, Timestamp};
use crate::forward::PortId;
use crate::packet::{Flow, parse};
use crate::pipeline::{BATCH, Frames, Verdict};
use crate::tag;
use crate::{Epoch, Snapshot};
use filter::SeenPacket;

/// Bytes of both Ethernet addresses.
const MACS: usize = 12;

/// A capture: which packets, and where their copies go.
#[derive(Clone, Debug)]
pub struct Capture {
    pub filter: Arc<CaptureFilter>,
    /// Where their copies go.
    pub queue: Arc<CaptureQueue>,
}

#[derive(Clone, Debug)]
pub struct CapturedPacket {
    /// When its batch was received.
    pub at: Instant,
    pub worker: usize,
    pub ingress: PortId,
    pub verdict: Verdict,
    pub epoch: Epoch,
    /// Bytes of the frame, Ethernet header included.
    pub length: usize,
    /// The first of them, at most as many as the capture keeps.
    pub bytes: Vec<u8>,
    /// The flow of the packet's connection, in the direction in which it was opened. `None` if the table has none for the
    /// packet's own flow, as for an ICMP error.
    pub original: Option<Flow>,
    /// Connection id, as in the verdict log ([`ConnTable::connection_id`]): of a dropped packet, that which its connection
    /// would have.
    pub connection: Option<u64>,
    /// The policy verdict, if policy was evaluated for this packet.
    pub evaluation: Option<LoggedEvaluation>,
    /// How policy would be evaluated if everything that is staged were promoted, if something is and the packet opens a
    /// connection or tries to.
    pub staged: Option<LoggedEvaluation>,
}

/// The queue of copies from all workers to one reader.
#[derive(Debug)]
pub struct CaptureQueue {
    /// Bytes that are kept of each packet.
    snap_length: usize,
    filled: ArrayQueue<CapturedPacket>,
    free: ArrayQueue<Vec<u8>>,
    lost: AtomicU64,
}

impl CaptureQueue {
    /// A queue of so many packets, at least one, of which `snap_length` bytes each are kept. All memory is allocated here.
    pub fn new(packets: usize, snap_length: usize) -> Self {
        let packets = packets.max(1);
        let free = ArrayQueue::new(packets);
        for _ in 0..packets {
            // It has room for all of them.
            let _ = free.push(Vec::with_capacity(snap_length));
        }
        Self { snap_length, filled: ArrayQueue::new(packets), free, lost: AtomicU64::new(0) }
    }

    /// Takes the oldest packet. Give its buffer back with [`CaptureQueue::give_back`].
    pub fn take(&self) -> Option<CapturedPacket> {
        self.filled.pop()
    }

    /// Returns the buffer of a packet that was read.
    pub fn give_back(&self, mut bytes: Vec<u8>) {
        bytes.clear();
        if bytes.capacity() >= self.snap_length {
            // Only if it is none of this queue's.
            let _ = self.free.push(bytes);
        }
    }

    /// Packets that fit the filter and found no free buffer.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn buffer(&self) -> Option<Vec<u8>> {
        let buffer = self.free.pop();
        if buffer.is_none() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        buffer
    }
}

/// A packet of the current batch as it came.
#[derive(Clone, Copy, Default)]
struct Received {
    flow: Option<Flow>,
    length: usize,
    fits_program: bool,
}

pub(crate) struct CaptureTap {
    capture: Capture,
    worker: usize,
    received: [Received; BATCH],
    /// The first bytes of each frame as it came, one after the other.
    bytes: Box<[u8]>,
}

/// The same for all packets of a batch.
pub(super) struct CapturedBatch<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) connections: &'a ConnTable,
    pub(super) at: Instant,
    pub(super) now: Timestamp,
    pub(super) ingress: PortId,
}

impl CaptureTap {
    pub(super) fn new(capture: Capture, worker: usize) -> Self {
        let bytes = vec![0; BATCH * capture.queue.snap_length].into();
        Self { capture, worker, received: [Received::default(); BATCH], bytes }
    }

    /// Keeps the frames of a batch as they came. Call it before they are rewritten.
    pub(super) fn keep(&mut self, frames: &mut impl Frames) {
        let snap_length = self.capture.queue.snap_length;
        for (index, received) in self.received.iter_mut().enumerate().take(frames.len()) {
            let frame = frames.bytes(index);
            let kept = frame.len().min(snap_length);
            self.bytes[index * snap_length..][..kept].copy_from_slice(&frame[..kept]);
            *received = Received {
                flow: parse(frame).ok().map(|packet| packet.flow),
                length: frame.len(),
                fits_program: self.capture.filter.fits_program(frame),
            };
        }
    }

    /// Copies the packets that fit, which were processed with `recorder` as their observer.
    pub(super) fn record(
        &mut self,
        batch: &CapturedBatch<'_>,
        frames: &mut impl Frames,
        verdicts: &[Verdict; BATCH],
        recorder: &Recorder,
    ) {
        // On a pair the addresses are tags for workers and programs.
        let port = batch.snapshot.forwarding.port(batch.ingress);
        let has_macs = port.is_some_and(|port| port.own_mac != tag::FROM);
        let staged = recorder.staged();
        for (index, &verdict) in verdicts.iter().enumerate().take(frames.len()) {
            // It is captured once it is decided.
            if verdict == Verdict::Early {
                continue;
            }
            let received = self.received[index];
            let evaluated = recorder.evaluated(index);
            let original = batch.connection_of(received.flow);
            let refused = received.flow.filter(|_| matches!(verdict, Verdict::Drop(_)));
            let of_connection = original.or(evaluated.map(|it| it.flow)).or(refused);
            let connection = of_connection.map(|flow| batch.connections.connection_id(&flow));
            let seen = SeenPacket {
                ingress: batch.ingress,
                verdict,
                flows: [received.flow, of_connection],
                connection,
                fits_program: received.fits_program,
            };
            if !self.capture.filter.fits(&seen) {
                continue;
            }
            let packet = CapturedPacket {
                at: batch.at,
                worker: self.worker,
                ingress: batch.ingress,
                verdict,
                epoch: batch.snapshot.epoch,
                length: received.length,
                bytes: Vec::new(),
                original,
                connection,
                evaluation: evaluated.map(|it| it.name(&batch.snapshot.policy)),
                staged: evaluated.zip(staged.as_ref()).and_then(|(it, staged)| it.promoted(staged, batch.now)),
            };
            let snap_length = self.capture.queue.snap_length;
            let kept = &self.bytes[index * snap_length..][..received.length.min(snap_length)];
            self.push(packet, kept, has_macs);
        }
    }

    fn push(&self, packet: CapturedPacket, frame: &[u8], has_macs: bool) {
        let queue = &self.capture.queue;
        let Some(mut bytes) = queue.buffer() else { return };
        bytes.extend_from_slice(&frame[..frame.len().min(queue.snap_length)]);
        if !has_macs {
            let macs = bytes.len().min(MACS);
            bytes[..macs].fill(0);
        }
        // There are as many places as buffers.
        let _ = queue.filled.push(CapturedPacket { bytes, ..packet });
    }
}

impl CapturedBatch<'_> {
    /// The flow in which the packet's connection was opened.
    fn connection_of(&self, flow: Option<Flow>) -> Option<Flow> {
        self.connections.find(&self.connections.prepare(&flow?), self.now).map(|found| found.original_flow())
    }
}

#[cfg(test)]
mod tests;

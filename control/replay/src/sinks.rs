//! Per-packet outputs of a replay.

use std::path::PathBuf;

use penstock_dataplane::packet::parse;

use super::batch::{BatchedPacket, PacketBatch};
use super::capture::{CaptureInterface, CaptureWriter, Record};
use super::in_order::{InOrder, PacketResult};
use super::line::{EvaluatedPacket, VerdictLineWriter};
use super::output::{Output, OutputError};
use super::player::{Decision, EntryPoint, Player};

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OutputPaths {
    /// Verdicts: one line of JSON per packet.
    pub verdicts: Option<PathBuf>,
    pub allowed: Option<PathBuf>,
    pub denied: Option<PathBuf>,
}

#[derive(Default)]
pub(super) struct Sinks {
    verdicts: Option<Output>,
    allowed: Option<CaptureSink>,
    denied: Option<CaptureSink>,
    lines: VerdictLineWriter,
    /// The comment of the packet that is written now.
    comment: Vec<u8>,
    line: Vec<u8>,
    order: InOrder,
}

struct CaptureSink {
    output: Output,
    writer: CaptureWriter<Vec<u8>>,
}

const WRITE_SIZE: usize = 1 << 16;

impl Sinks {
    pub(super) fn create(paths: &OutputPaths) -> Result<Self, OutputError> {
        let capture = |path: &PathBuf| -> Result<CaptureSink, OutputError> {
            let output = Output::create(path)?;
            let writer = CaptureWriter::new(Vec::with_capacity(2 * WRITE_SIZE)).map_err(|cause| output.error(cause))?;
            Ok(CaptureSink { output, writer })
        };
        Ok(Self {
            verdicts: paths.verdicts.as_deref().map(Output::create).transpose()?,
            allowed: paths.allowed.as_ref().map(capture).transpose()?,
            denied: paths.denied.as_ref().map(capture).transpose()?,
            ..Self::default()
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.verdicts.is_none() && !self.writes_captures()
    }

    pub(super) fn writes_captures(&self) -> bool {
        self.allowed.is_some() || self.denied.is_some()
    }

    pub(super) fn forget_names(&mut self) {
        self.lines.forget_names();
    }

    /// Writes the last batch. `originals` holds its frames before processing, if captures are written.
    pub(super) fn write_verdict(
        &mut self,
        entry: EntryPoint,
        batch: &PacketBatch,
        originals: &PacketBatch,
        player: &mut Player,
        interfaces: &[CaptureInterface],
    ) -> Result<(), OutputError> {
        for (index, member) in batch.packets().iter().enumerate() {
            if player.is_early(index) {
                self.order.wait_for(member.number);
                continue;
            }
            let original = originals.packets().get(index).map_or(&[][..], |original| originals.frame(original));
            let original = &original[..original.len().min(member.record.captured as usize)];
            self.write_packet((entry, index), member, (batch.frame(member), original), player, interfaces)?;
        }
        Ok(())
    }

    /// Writes a packet of the last batch, or lets its result wait for one before it.
    #[inline]
    fn write_packet(
        &mut self,
        (entry, index): (EntryPoint, usize),
        member: &BatchedPacket,
        (frame, original): (&[u8], &[u8]),
        player: &mut Player,
        interfaces: &[CaptureInterface],
    ) -> Result<(), OutputError> {
        let packet = parse(frame).ok();
        let (connection_state, rules) = match &packet {
            Some(packet) => player.connection_state(entry, index, packet, frame),
            None => Default::default(),
        };
        let decision = player.decision(entry, index);
        let (number, record) = (member.number, member.record);
        let (mut comment, mut line) = (std::mem::take(&mut self.comment), std::mem::take(&mut self.line));
        comment.clear();
        line.clear();
        if self.capture_of(decision).is_some() {
            match decision {
                Decision::Deny(reason) => comment.extend_from_slice(reason.name().as_bytes()),
                _ => player.cluster().rules().write_names(rules, &mut comment),
            }
        }
        if self.verdicts.is_some() {
            let (time, packet) = (record.time, packet.as_ref());
            let evaluated = EvaluatedPacket { number, time, frame, packet, decision, connection_state, rules };
            self.lines.write(&evaluated, player.cluster(), &mut line);
        }
        if self.order.is_empty() {
            self.write_result(decision, &record, (original, &comment), &line, interfaces)?;
            (self.comment, self.line) = (comment, line);
            return Ok(());
        }
        let frame = if self.capture_of(decision).is_some() { original.to_vec() } else { Vec::new() };
        self.order.add(PacketResult { number, record, decision, frame, comment, line });
        while let Some(PacketResult { record, decision, frame, comment, line, .. }) = self.order.take() {
            self.write_result(decision, &record, (&frame, &comment), &line, interfaces)?;
        }
        Ok(())
    }

    #[inline]
    fn write_result(
        &mut self,
        decision: Decision,
        record: &Record,
        (frame, comment): (&[u8], &[u8]),
        line: &[u8],
        interfaces: &[CaptureInterface],
    ) -> Result<(), OutputError> {
        if let Some(capture) = self.capture_of(decision) {
            let comment = std::str::from_utf8(comment).unwrap_or_default();
            let written = capture.writer.write(record, &interfaces[record.interface.index()], frame, comment);
            written.map_err(|cause| capture.output.error(cause))?;
            capture.write_batch(WRITE_SIZE)?;
        }
        self.verdicts.as_mut().map_or(Ok(()), |output| output.write(line))
    }

    #[inline]
    fn capture_of(&mut self, decision: Decision) -> Option<&mut CaptureSink> {
        match decision {
            Decision::Allow => self.allowed.as_mut(),
            Decision::Deny(_) => self.denied.as_mut(),
            Decision::Kernel(_) => None,
        }
    }

    /// Whether the first packet that is waited for must be decided now.
    pub(super) fn is_full(&self) -> bool {
        self.order.is_full()
    }

    /// Completes all files, which gives them their names.
    pub(super) fn complete(self) -> Result<(), OutputError> {
        let captures = [self.allowed, self.denied].into_iter().flatten().map(CaptureSink::complete);
        let captures = captures.collect::<Result<Vec<_>, _>>()?;
        self.verdicts.into_iter().chain(captures).try_for_each(Output::complete)
    }
}

impl CaptureSink {
    fn write_batch(&mut self, at_least: usize) -> Result<(), OutputError> {
        let bytes = self.writer.output_mut();
        if bytes.len() >= at_least {
            self.output.write(bytes)?;
            bytes.clear();
        }
        Ok(())
    }

    fn complete(mut self) -> Result<Output, OutputError> {
        self.write_batch(0)?;
        Ok(self.output)
    }
}

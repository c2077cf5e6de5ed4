//! Per-packet outputs of a replay.

use std::path::PathBuf;

use penstock_dataplane::packet::parse;

use super::batch::PacketBatch;
use super::capture::{CaptureInterface, CaptureWriter};
use super::line::{EvaluatedPacket, VerdictLineWriter};
use super::output::{Output, OutputError};
use super::player::{Decision, EntryPoint, Player};

/// The files to write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OutputPaths {
    /// Verdicts: one line of JSON per packet.
    pub verdicts: Option<PathBuf>,
    /// A capture of the packets that passed.
    pub allowed: Option<PathBuf>,
    /// A capture of the packets that were dropped.
    pub denied: Option<PathBuf>,
}

/// The files being written.
#[derive(Default)]
pub(super) struct Sinks {
    verdicts: Option<Output>,
    allowed: Option<CaptureSink>,
    denied: Option<CaptureSink>,
    lines: VerdictLineWriter,
    text: Vec<u8>,
}

struct CaptureSink {
    output: Output,
    writer: CaptureWriter<Vec<u8>>,
}

/// Bytes of text buffered before a write.
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
            lines: VerdictLineWriter::default(),
            text: Vec::with_capacity(2 * WRITE_SIZE),
        })
    }

    /// Whether no file is written.
    pub(super) fn is_empty(&self) -> bool {
        self.verdicts.is_none() && !self.writes_captures()
    }

    /// Whether it needs the frames as captured.
    pub(super) fn writes_captures(&self) -> bool {
        self.allowed.is_some() || self.denied.is_some()
    }

    pub(super) fn forget_names(&mut self) {
        self.lines.forget_names();
    }

    /// Writes the last batch. `originals` holds its frames before processing, if captures are written or Services
    /// translated.
    pub(super) fn write_verdict(
        &mut self,
        entry: EntryPoint,
        batch: &PacketBatch,
        originals: &PacketBatch,
        player: &mut Player,
        interfaces: &[CaptureInterface],
    ) -> Result<(), OutputError> {
        let captured = if player.cluster().translates() { originals } else { batch };
        for (index, member) in captured.packets().iter().enumerate() {
            let frame = captured.frame(member);
            let packet = parse(frame).ok();
            let (connection_state, rules) = match &packet {
                Some(packet) => player.connection_state(entry, index, packet, frame),
                None => Default::default(),
            };
            let service = packet.as_ref().and_then(|packet| player.service(index, packet, frame));
            let decision = player.decision(entry, index);
            let capture = match decision {
                Decision::Allow => &mut self.allowed,
                Decision::Deny(_) => &mut self.denied,
                Decision::Kernel(_) => &mut None,
            };
            if let Some(capture) = capture {
                self.text.clear();
                match decision {
                    Decision::Deny(reason) => self.text.extend_from_slice(reason.name().as_bytes()),
                    _ => player.cluster().rules().write_names(rules, &mut self.text),
                }
                let comment = std::str::from_utf8(&self.text).unwrap_or_default();
                let original = originals.frame(&originals.packets()[index]);
                let captured = &original[..original.len().min(member.record.captured as usize)];
                let interface = &interfaces[member.record.interface.index()];
                let written = capture.writer.write(&member.record, interface, captured, comment);
                written.map_err(|cause| capture.output.error(cause))?;
                capture.write_batch(WRITE_SIZE)?;
            }
            if let Some(output) = &mut self.verdicts {
                let (number, time) = (member.number, member.record.time);
                let packet = packet.as_ref();
                let evaluated =
                    EvaluatedPacket { number, time, frame, packet, decision, connection_state, rules, service };
                self.text.clear();
                self.lines.write(&evaluated, player.cluster(), &mut self.text);
                output.write(&self.text)?;
            }
        }
        Ok(())
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

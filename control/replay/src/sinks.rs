//! Where a replay's packets are told of, one by one.

use std::path::PathBuf;

use penstock_dataplane::packet::parse;

use super::batch::Batch;
use super::capture::{CaptureWriter, Interface};
use super::line::{LineWriter, Verdict};
use super::output::{Output, OutputError};
use super::player::{Decision, Place, Player};

/// Which files are asked for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Paths {
    /// A line of JSON a packet.
    pub verdicts: Option<PathBuf>,
    /// A capture of what passed.
    pub allowed: Option<PathBuf>,
    /// A capture of what was dropped.
    pub denied: Option<PathBuf>,
}

/// The files being written.
#[derive(Default)]
pub(super) struct Sinks {
    verdicts: Option<Output>,
    allowed: Option<CaptureSink>,
    denied: Option<CaptureSink>,
    lines: LineWriter,
    text: Vec<u8>,
}

struct CaptureSink {
    output: Output,
    writer: CaptureWriter<Vec<u8>>,
}

/// Text gathered before it is handed on.
const GATHERED: usize = 1 << 16;

impl Sinks {
    pub(super) fn create(paths: &Paths) -> Result<Self, OutputError> {
        let capture = |path: &PathBuf| -> Result<CaptureSink, OutputError> {
            let output = Output::create(path)?;
            let writer = CaptureWriter::new(Vec::with_capacity(2 * GATHERED)).map_err(|cause| output.error(cause))?;
            Ok(CaptureSink { output, writer })
        };
        Ok(Self {
            verdicts: paths.verdicts.as_deref().map(Output::create).transpose()?,
            allowed: paths.allowed.as_ref().map(capture).transpose()?,
            denied: paths.denied.as_ref().map(capture).transpose()?,
            lines: LineWriter::default(),
            text: Vec::with_capacity(2 * GATHERED),
        })
    }

    /// Whether there are any.
    pub(super) fn is_empty(&self) -> bool {
        self.verdicts.is_none() && !self.writes_captures()
    }

    /// Whether frames are asked for as they were captured.
    pub(super) fn writes_captures(&self) -> bool {
        self.allowed.is_some() || self.denied.is_some()
    }

    pub(super) fn forget_names(&mut self) {
        self.lines.forget_names();
    }

    /// Tells of the batch that was played last. `originals` are its frames before they were judged, where captures are
    /// written.
    pub(super) fn tell(
        &mut self,
        place: Place,
        batch: &Batch,
        originals: &Batch,
        player: &mut Player,
        interfaces: &[Interface],
    ) -> Result<(), OutputError> {
        for (index, member) in batch.members().iter().enumerate() {
            let frame = batch.frame(member);
            let packet = parse(frame).ok();
            let (standing, rules) = match &packet {
                Some(packet) => player.standing(place, index, packet, frame),
                None => Default::default(),
            };
            let decision = player.decision(place, index);
            let capture = match decision {
                Decision::Allow => &mut self.allowed,
                Decision::Deny(_) => &mut self.denied,
                Decision::Kernel(_) => &mut None,
            };
            if let Some(capture) = capture {
                self.text.clear();
                match decision {
                    Decision::Deny(cause) => self.text.extend_from_slice(cause.name().as_bytes()),
                    _ => player.cluster().rules().write_names(rules, &mut self.text),
                }
                let comment = std::str::from_utf8(&self.text).unwrap_or_default();
                let original = originals.frame(&originals.members()[index]);
                let captured = &original[..original.len().min(member.record.captured as usize)];
                let interface = &interfaces[member.record.interface.index()];
                let written = capture.writer.write(&member.record, interface, captured, comment);
                written.map_err(|cause| capture.output.error(cause))?;
                capture.hand_on(GATHERED)?;
            }
            if let Some(output) = &mut self.verdicts {
                let (number, time) = (member.number, member.record.time);
                let packet = packet.as_ref();
                let verdict = Verdict { number, time, frame, packet, decision, standing, rules };
                self.text.clear();
                self.lines.write(&verdict, player.cluster(), &mut self.text);
                output.write(&self.text)?;
            }
        }
        Ok(())
    }

    /// Gives all files their names.
    pub(super) fn complete(self) -> Result<(), OutputError> {
        let captures = [self.allowed, self.denied].into_iter().flatten().map(CaptureSink::complete);
        let captures = captures.collect::<Result<Vec<_>, _>>()?;
        self.verdicts.into_iter().chain(captures).try_for_each(Output::complete)
    }
}

impl CaptureSink {
    fn hand_on(&mut self, at_least: usize) -> Result<(), OutputError> {
        let octets = self.writer.gathered();
        if octets.len() >= at_least {
            self.output.write(octets)?;
            octets.clear();
        }
        Ok(())
    }

    fn complete(mut self) -> Result<Output, OutputError> {
        self.hand_on(0)?;
        Ok(self.output)
    }
}

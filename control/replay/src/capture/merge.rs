//! Several captures merged by time.

use std::path::Path;

use super::{CaptureError, CaptureFile, CaptureInterface, Record, Time};

/// The packets of several files, merged by time. Packets of one file keep their order even if its clock stepped back; of
/// packets with equal times, the file listed first comes first.
pub struct Captures {
    files: Vec<CaptureFile>,
    /// With several files, the next packet of each.
    next_packets: Vec<Option<PendingRecord>>,
    interfaces: Vec<CaptureInterface>,
}

struct PendingRecord {
    record: Record,
    frame: Vec<u8>,
}

impl Captures {
    /// Opens all files.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self, CaptureError> {
        let mut interfaces = Vec::new();
        let mut files = Vec::new();
        for (number, path) in paths.iter().enumerate() {
            files.push(CaptureFile::open(path.as_ref(), number, &mut interfaces)?);
        }
        let mut captures = Self { files, next_packets: Vec::new(), interfaces };
        if captures.files.len() > 1 {
            for number in 0..captures.files.len() {
                let next = captures.read(number, Vec::new())?;
                captures.next_packets.push(next);
            }
        }
        Ok(captures)
    }

    /// Appends the next packet's frame to `frames` and returns its record; `None` at the end of all files.
    #[inline]
    pub fn next(&mut self, frames: &mut Vec<u8>) -> Result<Option<Record>, CaptureError> {
        match self.files.as_mut_slice() {
            [file] => file.next(frames, &mut self.interfaces),
            _ => self.next_of_many(frames),
        }
    }

    fn next_of_many(&mut self, frames: &mut Vec<u8>) -> Result<Option<Record>, CaptureError> {
        let time = |next: &Option<PendingRecord>| next.as_ref().map(|next| next.record.time);
        let earliest =
            self.next_packets.iter().enumerate().filter_map(|(number, next)| Some((time(next)?, number))).min();
        let Some((_, number)): Option<(Time, usize)> = earliest else { return Ok(None) };
        let Some(PendingRecord { record, mut frame }) = self.next_packets[number].take() else { return Ok(None) };
        frames.extend_from_slice(&frame);
        frame.clear();
        self.next_packets[number] = self.read(number, frame)?;
        Ok(Some(record))
    }

    fn read(&mut self, number: usize, mut frame: Vec<u8>) -> Result<Option<PendingRecord>, CaptureError> {
        let record = self.files[number].next(&mut frame, &mut self.interfaces)?;
        Ok(record.map(|record| PendingRecord { record, frame }))
    }

    /// Keeps the comments of a single file's packets from now on.
    #[must_use]
    pub(crate) fn with_comments(mut self) -> Self {
        self.files = self.files.into_iter().map(CaptureFile::with_comments).collect();
        self
    }

    /// The comment of the last packet, of a single file whose comments are kept.
    pub(crate) fn comment(&self) -> &str {
        self.files.first().map(CaptureFile::comment).unwrap_or_default()
    }

    /// Every interface seen so far, indexed by [`Record::interface`].
    pub fn interfaces(&self) -> &[CaptureInterface] {
        &self.interfaces
    }

    pub fn files(&self) -> &[CaptureFile] {
        &self.files
    }

    /// Bytes read from all files on disk so far.
    pub fn bytes_read(&self) -> u64 {
        self.files.iter().map(CaptureFile::bytes_read).sum()
    }
}

//! Several captures as one, in the order of time.

use std::path::Path;

use super::{CaptureError, CaptureFile, Interface, Record, Time};

/// The packets of several files, merged by time. Packets of one file keep their order, also where its clock stepped
/// back; of packets of one time the file named first comes first.
pub struct Captures {
    files: Vec<CaptureFile>,
    /// Of each file, where there are several, the packet that comes next.
    heads: Vec<Option<Head>>,
    interfaces: Vec<Interface>,
}

struct Head {
    record: Record,
    frame: Vec<u8>,
}

impl Captures {
    /// Opens all files.
    ///
    /// # Errors
    /// One of them cannot be read or is no capture.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self, CaptureError> {
        let mut interfaces = Vec::new();
        let mut files = Vec::new();
        for (number, path) in paths.iter().enumerate() {
            files.push(CaptureFile::open(path.as_ref(), number, &mut interfaces)?);
        }
        let mut captures = Self { files, heads: Vec::new(), interfaces };
        if captures.files.len() > 1 {
            for number in 0..captures.files.len() {
                let head = captures.read(number, Vec::new())?;
                captures.heads.push(head);
            }
        }
        Ok(captures)
    }

    /// Appends the next packet's frame to `frames`, and tells of it; `None` at the end of all.
    ///
    /// # Errors
    /// A file cannot be read or is damaged.
    #[inline]
    pub fn next(&mut self, frames: &mut Vec<u8>) -> Result<Option<Record>, CaptureError> {
        match self.files.as_mut_slice() {
            [file] => file.next(frames, &mut self.interfaces),
            _ => self.next_of_many(frames),
        }
    }

    fn next_of_many(&mut self, frames: &mut Vec<u8>) -> Result<Option<Record>, CaptureError> {
        let time = |head: &Option<Head>| head.as_ref().map(|head| head.record.time);
        let earliest = self.heads.iter().enumerate().filter_map(|(number, head)| Some((time(head)?, number))).min();
        let Some((_, number)): Option<(Time, usize)> = earliest else { return Ok(None) };
        let Some(Head { record, mut frame }) = self.heads[number].take() else { return Ok(None) };
        frames.extend_from_slice(&frame);
        frame.clear();
        self.heads[number] = self.read(number, frame)?;
        Ok(Some(record))
    }

    fn read(&mut self, number: usize, mut frame: Vec<u8>) -> Result<Option<Head>, CaptureError> {
        let record = self.files[number].next(&mut frame, &mut self.interfaces)?;
        Ok(record.map(|record| Head { record, frame }))
    }

    /// Every interface met so far; [`Record::interface`] indexes it.
    pub fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    /// The files.
    pub fn files(&self) -> &[CaptureFile] {
        &self.files
    }

    /// Octets read of all files so far, as they lie on disk.
    pub fn octets_read(&self) -> u64 {
        self.files.iter().map(CaptureFile::octets_read).sum()
    }
}

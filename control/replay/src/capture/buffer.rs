//! A buffered window on a stream.

use std::io::{self, Read};

const CHUNK: usize = 1 << 20;

/// The longest record or block that is read whole. A packet has at most 256 KiB (libpcap's MAXIMUM_SNAPLEN); blocks with
/// secrets or journals can be longer.
pub(super) const LONGEST: usize = 64 << 20;

/// Buffered input that grows to the size a parser asks for.
pub(super) struct Buffer {
    input: Box<dyn Read>,
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Stream offset of `start`.
    passed: u64,
    ended: bool,
    /// Whether it ended inside a gzip stream.
    is_cut: bool,
}

impl Buffer {
    pub(super) fn new(input: Box<dyn Read>) -> Self {
        Self { input, bytes: vec![0; CHUNK], start: 0, end: 0, passed: 0, ended: false, is_cut: false }
    }

    #[inline]
    pub(super) fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    pub(super) fn position(&self) -> u64 {
        self.passed
    }

    /// Buffers at least `count` bytes if the stream has them. Returns whether it has.
    #[inline]
    pub(super) fn want(&mut self, count: usize) -> io::Result<bool> {
        if self.end - self.start >= count { Ok(true) } else { self.read_until(count) }
    }

    #[cold]
    fn read_until(&mut self, count: usize) -> io::Result<bool> {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        while self.end < count && !self.ended {
            // Grows with the data read, not with a length that a damaged file claims.
            if self.end == self.bytes.len() {
                self.bytes.resize((2 * self.end).min(count.next_multiple_of(CHUNK)), 0);
            }
            match self.input.read(&mut self.bytes[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A truncated gzip stream ends there, like a truncated plain file.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => (self.ended, self.is_cut) = (true, true),
                Err(error) => return Err(error),
            }
        }
        Ok(self.end >= count)
    }

    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start, "consumes more than is buffered");
        self.start += count;
        self.passed += count as u64;
    }
}

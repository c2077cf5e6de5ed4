//! A window on a stream: what was read of it and not yet used.

use std::io::{self, Read};

/// Octets read at a time.
const CHUNK: usize = 1 << 20;

/// The longest record or block that is read whole. A packet has at most 256 KiB (libpcap's MAXIMUM_SNAPLEN); blocks
/// with secrets or journals may be longer.
pub(super) const LONGEST: usize = 64 << 20;

/// Buffered input of which a parser sees as much as it asks for.
pub(super) struct Buffer {
    input: Box<dyn Read>,
    octets: Vec<u8>,
    start: usize,
    end: usize,
    /// Octets of the stream before `start`.
    passed: u64,
    ended: bool,
}

impl Buffer {
    pub(super) fn new(input: Box<dyn Read>) -> Self {
        Self { input, octets: vec![0; CHUNK], start: 0, end: 0, passed: 0, ended: false }
    }

    /// What is there.
    #[inline]
    pub(super) fn available(&self) -> &[u8] {
        &self.octets[self.start..self.end]
    }

    /// Where in the stream [`Buffer::available`] begins.
    pub(super) fn position(&self) -> u64 {
        self.passed
    }

    /// Has at least `count` octets there, if the stream has them. Says whether it has.
    #[inline]
    pub(super) fn want(&mut self, count: usize) -> io::Result<bool> {
        if self.end - self.start >= count { Ok(true) } else { self.read_until(count) }
    }

    #[cold]
    fn read_until(&mut self, count: usize) -> io::Result<bool> {
        self.octets.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        while self.end < count && !self.ended {
            // It grows with what is there, not with what a damaged file says that there will be.
            if self.end == self.octets.len() {
                self.octets.resize((2 * self.end).min(count.next_multiple_of(CHUNK)), 0);
            }
            match self.input.read(&mut self.octets[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A compressed file that was cut ends there, like one that was not compressed.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.ended = true,
                Err(error) => return Err(error),
            }
        }
        Ok(self.end >= count)
    }

    /// Lets go of the first `count` octets, which are there.
    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start, "more consumed than there is");
        self.start += count;
        self.passed += count as u64;
    }
}

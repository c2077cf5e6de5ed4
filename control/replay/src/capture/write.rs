//! Writes pcapng: little-endian, Ethernet, nanoseconds, one comment per packet, and how many packets an interface lost.

use std::io::{self, Write};

use super::{CaptureInterface, InterfaceId, Record, Time};

/// Writes packets into one section. Describes an interface before its first packet.
pub struct CaptureWriter<W> {
    output: W,
    /// The interface's number in this file, indexed by [`super::InterfaceId`].
    numbers: Vec<Option<u32>>,
    described: u32,
}

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const COMMENT: u16 = 1;
const SHB_USER_APPLICATION: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;
const PADDING: [u8; 3] = [0; 3];

impl<W: Write> CaptureWriter<W> {
    pub fn new(mut output: W) -> io::Result<Self> {
        const APPLICATION: &str = concat!("penstock ", env!("CARGO_PKG_VERSION"));
        let length = 28 + option_len(APPLICATION.len()) + 4;
        words(&mut output, &[SECTION_HEADER, length as u32, 0x1a2b_3c4d])?;
        output.write_all(&[1, 0, 0, 0])?;
        // Section length: unspecified.
        output.write_all(&[0xff; 8])?;
        option(&mut output, SHB_USER_APPLICATION, APPLICATION.as_bytes())?;
        words(&mut output, &[0, length as u32])?;
        Ok(Self { output, numbers: Vec::new(), described: 0 })
    }

    /// Writes a packet as captured, with its Ethernet header. Omits an empty comment.
    pub fn write(
        &mut self,
        record: &Record,
        interface: &CaptureInterface,
        frame: &[u8],
        comment: &str,
    ) -> io::Result<()> {
        let number = self.number(record.interface, interface)?;
        let comment = shortened(comment);
        let options = if comment.is_empty() { 0 } else { option_len(comment.len()) + 4 };
        let length = (32 + padded(frame.len()) + options) as u32;
        let stamp = record.time.0;
        words(
            &mut self.output,
            &[ENHANCED_PACKET, length, number, (stamp >> 32) as u32, stamp as u32, frame.len() as u32, record.original],
        )?;
        self.output.write_all(frame)?;
        self.output.write_all(&PADDING[..padded(frame.len()) - frame.len()])?;
        if !comment.is_empty() {
            option(&mut self.output, COMMENT, comment)?;
            words(&mut self.output, &[0])?;
        }
        words(&mut self.output, &[length])
    }

    /// Writes how many packets were received at an interface until `time`, and how many of them are not in the capture.
    pub fn statistics(
        &mut self,
        (time, id): (Time, InterfaceId),
        interface: &CaptureInterface,
        (received, lost): (u64, u64),
        comment: &str,
    ) -> io::Result<()> {
        let number = self.number(id, interface)?;
        let comment = shortened(comment);
        let comment_len = if comment.is_empty() { 0 } else { option_len(comment.len()) };
        let length = (24 + comment_len + 2 * option_len(8) + 4) as u32;
        let stamp = time.0;
        words(&mut self.output, &[INTERFACE_STATISTICS, length, number, (stamp >> 32) as u32, stamp as u32])?;
        if !comment.is_empty() {
            option(&mut self.output, COMMENT, comment)?;
        }
        option(&mut self.output, ISB_IFRECV, &received.to_le_bytes())?;
        option(&mut self.output, ISB_IFDROP, &lost.to_le_bytes())?;
        words(&mut self.output, &[0, length])
    }

    /// Passes on what the output has buffered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }

    /// Returns the output, with all packets written to it.
    pub fn into_inner(self) -> W {
        self.output
    }

    pub(crate) fn output_mut(&mut self) -> &mut W {
        &mut self.output
    }

    fn number(&mut self, id: InterfaceId, interface: &CaptureInterface) -> io::Result<u32> {
        let index = id.index();
        if let Some(Some(number)) = self.numbers.get(index) {
            return Ok(*number);
        }
        let name = interface.name.as_deref().unwrap_or_default();
        let name_len = if name.is_empty() { 0 } else { option_len(name.len()) };
        let length = (16 + name_len + option_len(1) + 4 + 4) as u32;
        // Link type Ethernet; no limit to a packet's length.
        words(&mut self.output, &[INTERFACE_DESCRIPTION, length, 1, 0])?;
        if !name.is_empty() {
            option(&mut self.output, IF_NAME, name.as_bytes())?;
        }
        option(&mut self.output, IF_TSRESOL, &[9])?;
        words(&mut self.output, &[0, length])?;
        let number = self.described;
        self.described += 1;
        if self.numbers.len() <= index {
            self.numbers.resize(index + 1, None);
        }
        self.numbers[index] = Some(number);
        Ok(number)
    }
}

/// A comment that an option has room for.
fn shortened(comment: &str) -> &[u8] {
    &comment.as_bytes()[..comment.len().min(usize::from(u16::MAX) - 3)]
}

const fn padded(length: usize) -> usize {
    length.next_multiple_of(4)
}

const fn option_len(value: usize) -> usize {
    4 + padded(value)
}

fn words(output: &mut impl Write, words: &[u32]) -> io::Result<()> {
    words.iter().try_for_each(|word| output.write_all(&word.to_le_bytes()))
}

fn option(output: &mut impl Write, code: u16, value: &[u8]) -> io::Result<()> {
    output.write_all(&code.to_le_bytes())?;
    output.write_all(&(value.len() as u16).to_le_bytes())?;
    output.write_all(value)?;
    output.write_all(&PADDING[..padded(value.len()) - value.len()])
}

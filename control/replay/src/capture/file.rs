//! One capture file, read packet by packet.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;
use pcap_parser::pcapng::{Block, parse_block_be, parse_block_le};
use pcap_parser::{OptionCode, PcapNGOption, SectionHeaderBlock, parse_pcap_header};

use super::buffer::{Buffer, LONGEST};
use super::error::{CaptureError, Damage};
use super::interface_description::{self, InterfaceDescription, TimestampResolution};
use super::{CaptureInterface, InterfaceId, LinkType, Record, Time};

/// The type of the obsolete Packet Block (draft-ietf-opsawg-pcapng, appendix A).
const PACKET_BLOCK: u32 = 2;

/// A capture file, open for reading from its first packet to its last.
pub struct CaptureFile {
    path: PathBuf,
    number: usize,
    buffer: Buffer,
    format: Format,
    truncated_at: Option<u64>,
    unread_packets: u64,
    read: Arc<AtomicU64>,
    /// The last packet's comment, if comments are wanted.
    comment: Option<String>,
}

enum Format {
    Pcap(Pcap),
    PcapNg(PcapNg),
}

/// The header of a pcap file, which applies to all its packets.
struct Pcap {
    big_endian: bool,
    /// Nanoseconds in a unit of a record's fraction.
    unit: u64,
    /// Bytes of a record's header: 24 in Kuznetzov's modified format, which appends an interface.
    header: usize,
    link: LinkType,
    interface: InterfaceId,
}

#[derive(Default)]
struct PcapNg {
    big_endian: bool,
    interfaces: Vec<InterfaceDescription>,
}

enum ReadStep {
    Packet(Record),
    /// A packet in an obsolete form.
    UnreadPacket,
    /// Something else, skipped.
    Other,
    End,
}

/// Counts the bytes read from the file on disk, compressed or not.
struct CountingReader<R> {
    input: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl CaptureFile {
    /// Opens file `number` of a replay. Appends the interfaces that it describes to `interfaces`.
    ///
    /// # Errors
    /// The file cannot be read, is not a capture, or has an unsupported link type.
    pub fn open(path: &Path, number: usize, interfaces: &mut Vec<CaptureInterface>) -> Result<Self, CaptureError> {
        let file = File::open(path).map_err(|error| CaptureError::new(path, error.into()))?;
        Self::read(path, file, number, interfaces)
    }

    /// Reads a capture from any reader; errors name it `path`.
    pub fn read(
        path: &Path,
        input: impl Read + 'static,
        number: usize,
        interfaces: &mut Vec<CaptureInterface>,
    ) -> Result<Self, CaptureError> {
        let read = Arc::new(AtomicU64::new(0));
        let error = |damage| CaptureError::new(path, damage);
        let input = uncompressed(CountingReader { input, read: Arc::clone(&read) });
        let mut buffer = Buffer::new(input.map_err(|unreadable| error(unreadable.into()))?);
        let format = format(&mut buffer, number, interfaces).map_err(error)?;
        Ok(Self {
            path: path.to_owned(),
            number,
            buffer,
            format,
            truncated_at: None,
            unread_packets: 0,
            read,
            comment: None,
        })
    }

    /// Keeps the comments of packets from now on.
    #[must_use]
    pub fn with_comments(self) -> Self {
        Self { comment: Some(String::new()), ..self }
    }

    /// The comment of the last packet; empty if it has none, or if comments are not kept.
    pub fn comment(&self) -> &str {
        self.comment.as_deref().unwrap_or_default()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Packets so far in blocks that are not read: the Packet Block, which the Enhanced Packet Block has replaced.
    pub fn unread_packets(&self) -> u64 {
        self.unread_packets
    }

    /// The offset in the uncompressed capture at which the file ends inside a packet or a gzip stream; known once the end is reached.
    pub fn truncated_at(&self) -> Option<u64> {
        self.truncated_at
    }

    /// Bytes read from the file on disk so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Appends the next packet's frame to `frames` and returns its record; `None` at the end. A frame always has an
    /// Ethernet header; it is synthesized if the capture has none.
    ///
    /// # Errors
    /// The file cannot be read or is damaged. A file truncated inside a packet is not an error.
    #[inline]
    pub fn next(
        &mut self,
        frames: &mut Vec<u8>,
        interfaces: &mut Vec<CaptureInterface>,
    ) -> Result<Option<Record>, CaptureError> {
        loop {
            let step = match &mut self.format {
                Format::Pcap(pcap) => pcap.step(&mut self.buffer, frames),
                Format::PcapNg(section) => {
                    section.step((&mut self.buffer, self.comment.as_mut()), frames, self.number, interfaces)
                }
            };
            match step {
                Ok(ReadStep::Packet(record)) => return Ok(Some(record)),
                Ok(ReadStep::UnreadPacket) => self.unread_packets += 1,
                Ok(ReadStep::Other) => {}
                Ok(ReadStep::End) => {
                    let is_cut = self.buffer.is_cut() || !self.buffer.available().is_empty();
                    self.truncated_at = is_cut.then(|| self.buffer.position());
                    return Ok(None);
                }
                Err(damage) => return Err(CaptureError::new(&self.path, damage)),
            }
        }
    }
}

fn uncompressed(mut file: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut magic = [0; 2];
    let mut filled = 0;
    while filled < magic.len() {
        match file.read(&mut magic[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let whole = io::Cursor::new(magic).take(filled as u64).chain(file);
    Ok(if magic == [0x1f, 0x8b] {
        Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(1 << 16, whole)))
    } else {
        Box::new(whole)
    })
}

/// Detects the format by its first bytes; reads the header of pcap.
fn format(buffer: &mut Buffer, file: usize, interfaces: &mut Vec<CaptureInterface>) -> Result<Format, Damage> {
    const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
    if buffer.want(4)? && buffer.available()[..4] == SECTION_HEADER {
        return Ok(Format::PcapNg(PcapNg::default()));
    }
    if !buffer.want(24)? {
        return Err(Damage::NotACapture);
    }
    let (_, header) = parse_pcap_header(buffer.available()).map_err(|_| Damage::NotACapture)?;
    if header.version_major != 2 {
        return Err(Damage::NotACapture);
    }
    let link = LinkType::from_number(header.network.0 as u32)?;
    let pcap = Pcap {
        big_endian: header.is_bigendian(),
        unit: if header.is_nanosecond_precision() { 1 } else { 1000 },
        header: if header.is_modified_format() { 24 } else { 16 },
        link,
        interface: add(interfaces, CaptureInterface { file, name: None, link }),
    };
    buffer.consume(24);
    Ok(Format::Pcap(pcap))
}

fn add(interfaces: &mut Vec<CaptureInterface>, interface: CaptureInterface) -> InterfaceId {
    interfaces.push(interface);
    InterfaceId(interfaces.len() as u32 - 1)
}

impl Pcap {
    #[inline]
    fn step(&mut self, buffer: &mut Buffer, frames: &mut Vec<u8>) -> Result<ReadStep, Damage> {
        if !buffer.want(self.header)? {
            return Ok(ReadStep::End);
        }
        let [seconds, fraction, captured, original] = self.fields(buffer.available());
        if captured as usize > LONGEST {
            return Err(Damage::TooLong { at: buffer.position(), length: captured.into() });
        }
        let whole = self.header + captured as usize;
        if !buffer.want(whole)? {
            return Ok(ReadStep::End);
        }
        let before = frames.len();
        self.link.append_ethernet(&buffer.available()[self.header..whole], frames);
        buffer.consume(whole);
        // A fraction beyond a second is added unchanged.
        let time = Time(u64::from(seconds) * super::SECOND + u64::from(fraction) * self.unit);
        let captured = (frames.len() - before) as u32;
        let original = self.link.ethernet_len(original).max(captured);
        Ok(ReadStep::Packet(Record { time, interface: self.interface, captured, original }))
    }

    /// The four words of a record's header: seconds, fraction, captured and original length.
    #[inline]
    fn fields(&self, header: &[u8]) -> [u32; 4] {
        std::array::from_fn(|word| {
            let bytes = [header[word * 4], header[word * 4 + 1], header[word * 4 + 2], header[word * 4 + 3]];
            if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
        })
    }
}

impl PcapNg {
    #[inline]
    fn step(
        &mut self,
        (buffer, comment): (&mut Buffer, Option<&mut String>),
        frames: &mut Vec<u8>,
        file: usize,
        interfaces: &mut Vec<CaptureInterface>,
    ) -> Result<ReadStep, Damage> {
        let Some(length) = self.block_length(buffer)? else { return Ok(ReadStep::End) };
        if !buffer.want(length)? {
            return Ok(ReadStep::End);
        }
        let at = buffer.position();
        let bytes = &buffer.available()[..length];
        let parse = if self.big_endian { parse_block_be } else { parse_block_le };
        let (_, block) = parse(bytes).map_err(|_| Damage::Malformed(at))?;
        let step = match block {
            Block::EnhancedPacket(packet) => {
                let stamp = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
                let interface = self.interface(packet.if_id, at)?;
                let bytes = packet.data.get(..packet.caplen as usize).ok_or(Damage::Malformed(at))?;
                if let Some(kept) = comment {
                    keep_comment(&packet.options, kept);
                }
                ReadStep::Packet(interface.record(bytes, stamp, packet.origlen, frames))
            }
            Block::SimplePacket(packet) => {
                let interface = self.interface(0, at)?;
                let captured = match interface.snap_length {
                    0 => packet.origlen,
                    snap_length => packet.origlen.min(snap_length),
                };
                let bytes = packet.data.get(..captured as usize).ok_or(Damage::Malformed(at))?;
                // A simple packet block has no time: it gets the epoch of the capture's clock.
                ReadStep::Packet(interface.record(bytes, 0, packet.origlen, frames))
            }
            Block::SectionHeader(section) => {
                *self = Self::begin(&section);
                ReadStep::Other
            }
            Block::InterfaceDescription(block) => {
                let link = LinkType::from_number(block.linktype.0 as u32)?;
                let clock = TimestampResolution::of(&block, self.big_endian, self.interfaces.len())?;
                let id = add(interfaces, CaptureInterface { file, name: interface_description::name(&block), link });
                self.interfaces.push(InterfaceDescription { id, link, snap_length: block.snaplen, clock });
                ReadStep::Other
            }
            Block::Unknown(block) if block.block_type == PACKET_BLOCK => ReadStep::UnreadPacket,
            _ => ReadStep::Other,
        };
        buffer.consume(length);
        Ok(step)
    }

    /// The length of the next block, `None` at the end of the file. A section header block defines the byte order.
    #[inline]
    fn block_length(&mut self, buffer: &mut Buffer) -> Result<Option<usize>, Damage> {
        if !buffer.want(12)? {
            return Ok(None);
        }
        let head = buffer.available();
        let word = |at: usize| [head[at], head[at + 1], head[at + 2], head[at + 3]];
        let big_endian = match (word(0), word(8)) {
            ([0x0a, 0x0d, 0x0d, 0x0a], [0x1a, 0x2b, 0x3c, 0x4d]) => true,
            ([0x0a, 0x0d, 0x0d, 0x0a], [0x4d, 0x3c, 0x2b, 0x1a]) => false,
            ([0x0a, 0x0d, 0x0d, 0x0a], _) => return Err(Damage::Malformed(buffer.position())),
            _ => self.big_endian,
        };
        let length = if big_endian { u32::from_be_bytes(word(4)) } else { u32::from_le_bytes(word(4)) } as usize;
        match length {
            12..=LONGEST if length.is_multiple_of(4) => Ok(Some(length)),
            12.. if length > LONGEST => Err(Damage::TooLong { at: buffer.position(), length: length as u64 }),
            _ => Err(Damage::Malformed(buffer.position())),
        }
    }

    /// Starts a section: its own byte order, no interfaces yet.
    fn begin(section: &SectionHeaderBlock<'_>) -> Self {
        Self { big_endian: section.big_endian(), interfaces: Vec::new() }
    }

    #[inline]
    fn interface(&self, interface: u32, at: u64) -> Result<InterfaceDescription, Damage> {
        self.interfaces.get(interface as usize).copied().ok_or(Damage::Interface { at, interface })
    }
}

/// Keeps the first comment among these options.
fn keep_comment(options: &[PcapNGOption<'_>], kept: &mut String) {
    kept.clear();
    let comment = options.iter().find(|option| option.code == OptionCode::Comment);
    if let Some(Ok(bytes)) = comment.map(PcapNGOption::as_bytes) {
        kept.push_str(&String::from_utf8_lossy(bytes));
    }
}

impl InterfaceDescription {
    #[inline]
    fn record(self, packet: &[u8], stamp: u64, original: u32, frames: &mut Vec<u8>) -> Record {
        let before = frames.len();
        self.link.append_ethernet(packet, frames);
        let captured = (frames.len() - before) as u32;
        Record {
            time: self.clock.time(stamp),
            interface: self.id,
            captured,
            original: self.link.ethernet_len(original).max(captured),
        }
    }
}

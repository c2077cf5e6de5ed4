//! Captures of every supported kind, built byte by byte here, and the output of the writer.

use std::io::Write;
use std::path::{Path, PathBuf};

use penstock_replay::capture::{CaptureInterface, CaptureWriter, Captures, LinkType, Record, Time};

/// A number in the byte order of the file under test.
#[derive(Clone, Copy)]
struct Order {
    big: bool,
}

impl Order {
    fn u16(self, value: u16) -> [u8; 2] {
        if self.big { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn u32(self, value: u32) -> [u8; 4] {
        if self.big { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn pcap(self, nanoseconds: bool, link: u32) -> Vec<u8> {
        let magic = self.u32(if nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 });
        [&magic[..], &self.u16(2), &self.u16(4), &[0; 8], &self.u32(65535), &self.u32(link)].concat()
    }

    fn record(self, seconds: u32, fraction: u32, packet: &[u8], original: u32) -> Vec<u8> {
        let head = [seconds, fraction, packet.len() as u32, original].map(|word| self.u32(word)).concat();
        [&head, packet].concat()
    }

    fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let mut body = body.to_vec();
        body.resize(body.len().next_multiple_of(4), 0);
        let length = self.u32(body.len() as u32 + 12);
        [&self.u32(kind)[..], &length, &body, &length].concat()
    }

    fn section(self) -> Vec<u8> {
        self.block(0x0a0d_0d0a, &[&self.u32(0x1a2b_3c4d)[..], &self.u16(1), &self.u16(0), &[0xff; 8]].concat())
    }

    fn option(self, code: u16, value: &[u8]) -> Vec<u8> {
        let mut value_padded = value.to_vec();
        value_padded.resize(value.len().next_multiple_of(4), 0);
        [&self.u16(code)[..], &self.u16(value.len() as u16), &value_padded].concat()
    }

    fn interface(self, link: u16, options: &[Vec<u8>]) -> Vec<u8> {
        let body = [&self.u16(link)[..], &[0; 2], &self.u32(0), &options.concat(), &[0; 4]].concat();
        self.block(1, &body)
    }

    fn packet(self, interface: u32, stamp: u64, packet: &[u8], options: &[u8]) -> Vec<u8> {
        let length = packet.len() as u32;
        let head = [interface, (stamp >> 32) as u32, stamp as u32, length, length].map(|word| self.u32(word)).concat();
        let mut packet = packet.to_vec();
        packet.resize(packet.len().next_multiple_of(4), 0);
        self.block(6, &[&head, &packet[..], options].concat())
    }
}

const LITTLE: Order = Order { big: false };
const BIG: Order = Order { big: true };

fn frame(mark: u8) -> Vec<u8> {
    [&[1; 6][..], &[2; 6], &[0x08, 0x00], &[mark; 31]].concat()
}

fn file(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

struct Read {
    packets: Vec<(u64, u32, Vec<u8>)>,
    originals: Vec<u32>,
    names: Vec<Option<String>>,
    cut: Vec<bool>,
}

fn read(paths: &[PathBuf]) -> Result<Read, String> {
    let mut captures = Captures::open(paths).map_err(|error| error.to_string())?;
    let (mut packets, mut originals, mut frames) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let before = frames.len();
        let Some(record) = captures.next(&mut frames).map_err(|error| error.to_string())? else { break };
        assert_eq!(frames.len() - before, record.captured as usize);
        packets.push((record.time.0, record.interface.0, frames[before..].to_vec()));
        originals.push(record.original);
    }
    Ok(Read {
        packets,
        originals,
        names: captures.interfaces().iter().map(|interface| interface.name.clone()).collect(),
        cut: captures.files().iter().map(|file| file.truncated_at().is_some()).collect(),
    })
}

#[test]
fn pcap_is_read_in_any_byte_order_resolution_compression() {
    let directory = tempfile::tempdir().unwrap();
    for order in [LITTLE, BIG] {
        for (nanoseconds, unit) in [(false, 1000), (true, 1)] {
            for compressed in [false, true] {
                let mut bytes = order.pcap(nanoseconds, 1);
                bytes.extend(order.record(1_700_000_000, 5, &frame(1), 45));
                bytes.extend(order.record(1_700_000_001, 999, &frame(2), 1500));
                if compressed {
                    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                    encoder.write_all(&bytes).unwrap();
                    bytes = encoder.finish().unwrap();
                }
                let read = read(&[file(directory.path(), "a.pcap", &bytes)]).unwrap();
                let time = |seconds: u64, fraction: u64| seconds * 1_000_000_000 + fraction * unit;
                assert_eq!(
                    read.packets,
                    [(time(1_700_000_000, 5), 0, frame(1)), (time(1_700_000_001, 999), 0, frame(2))]
                );
                assert_eq!((read.originals, read.cut), (vec![45, 1500], vec![false]));
            }
        }
    }
}

#[test]
fn pcapng_is_read_over_sections_interfaces_and_resolutions() {
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = LITTLE.section();
    bytes.extend(LITTLE.interface(1, &[LITTLE.option(2, b"veth-web"), LITTLE.option(9, &[9])]));
    bytes.extend(LITTLE.interface(101, &[LITTLE.option(9, &[0x8a])]));
    bytes.extend(LITTLE.packet(0, 77, &frame(1), &[]));
    bytes.extend(LITTLE.packet(1, 1536, &[0x45; 21], &[&LITTLE.option(1, b"a comment")[..], &[0; 4]].concat()));
    bytes.extend(LITTLE.block(5, &[0; 12]));
    bytes.extend(LITTLE.block(0xbad, &[1, 2, 3, 4]));
    bytes.extend(BIG.section());
    bytes.extend(BIG.interface(1, &[BIG.option(14, &2i64.to_be_bytes())]));
    bytes.extend(BIG.packet(0, 3_000_001, &frame(3), &[]));
    bytes.extend(BIG.block(3, &[&BIG.u32(45)[..], &frame(4)].concat()));
    let read = read(&[file(directory.path(), "a.pcapng", &bytes)]).unwrap();
    let raw = [&[0; 12][..], &[0x08, 0x00], &[0x45; 21]].concat();
    assert_eq!(
        read.packets,
        [(77, 0, frame(1)), (1_500_000_000, 1, raw), (5_000_001_000, 2, frame(3)), (2_000_000_000, 2, frame(4))]
    );
    assert_eq!(read.names, [Some("veth-web".to_owned()), None, None]);
}

#[test]
fn files_are_merged_by_time_and_keep_their_own_order() {
    let directory = tempfile::tempdir().unwrap();
    let pcap = |records: &[(u32, u8)]| {
        let records = records.iter().map(|(seconds, mark)| LITTLE.record(*seconds, 0, &frame(*mark), 45));
        records.fold(LITTLE.pcap(false, 1), |bytes, record| [bytes, record].concat())
    };
    let files = [
        file(directory.path(), "a.pcap", &pcap(&[(1, 1), (4, 2), (3, 3), (9, 4)])),
        file(directory.path(), "b.pcap", &pcap(&[(1, 11), (3, 12), (5, 13)])),
        file(directory.path(), "c.pcap", &pcap(&[])),
    ];
    let order: Vec<u8> = read(&files).unwrap().packets.iter().map(|(_, _, frame)| frame[20]).collect();
    assert_eq!(order, [1, 11, 12, 2, 3, 13, 4]);
}

#[test]
fn a_truncated_capture_is_read_up_to_the_last_complete_packet() {
    let directory = tempfile::tempdir().unwrap();
    let pcap = [LITTLE.pcap(false, 1), LITTLE.record(1, 0, &frame(1), 45), LITTLE.record(2, 0, &frame(2), 45)].concat();
    let ng = [
        LITTLE.section(),
        LITTLE.interface(1, &[]),
        LITTLE.packet(0, 1, &frame(1), &[]),
        LITTLE.packet(0, 2, &frame(2), &[]),
    ]
    .concat();
    for (name, bytes, first, second) in [("pcap", &pcap, 24, 24 + 61), ("pcapng", &ng, 28 + 24, 28 + 24 + 80)] {
        for end in first..bytes.len() {
            let read = read(&[file(directory.path(), name, &bytes[..end])]).unwrap();
            assert_eq!(read.packets.len(), usize::from(end >= second), "{name} cut at {end}");
            assert_eq!(read.cut, [end != first && end != second], "{name} cut at {end}");
        }
    }
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    encoder.write_all(&pcap).unwrap();
    let compressed = encoder.finish().unwrap();
    let read = read(&[file(directory.path(), "cut.gz", &compressed[..compressed.len() - 30])]).unwrap();
    assert_eq!((read.packets.len(), read.cut), (1, vec![true]));
}

#[test]
fn a_file_that_is_not_a_capture_is_a_one_line_error() {
    let directory = tempfile::tempdir().unwrap();
    let ng = |blocks: &[Vec<u8>]| [LITTLE.section(), blocks.concat()].concat();
    for (name, bytes, says) in [
        ("empty", Vec::new(), "is not a capture"),
        ("text", b"this is a text that goes on for a while".to_vec(), "is not a capture"),
        ("bluetooth.pcap", LITTLE.pcap(false, 187), "link type 187"),
        ("bluetooth.pcapng", ng(&[LITTLE.interface(187, &[])]), "link type 187"),
        ("no-interface", ng(&[LITTLE.packet(0, 1, &frame(1), &[])]), "refers to interface 0"),
        ("resolution", ng(&[LITTLE.interface(1, &[LITTLE.option(9, &[20])])]), "time resolution 0x14"),
        ("long.pcap", [LITTLE.pcap(false, 1), LITTLE.record(1, 0, &[], 0)].concat(), ""),
        ("garbage.pcapng", ng(&[vec![0xab; 64]]), "byte 28"),
    ] {
        let mut bytes = bytes;
        if name == "long.pcap" {
            bytes[24 + 8..24 + 12].fill(0xff);
        }
        let says = if name == "long.pcap" { "byte 24 claims 4294967295 bytes" } else { says };
        let message = read(&[file(directory.path(), name, &bytes)]).err().unwrap_or_else(|| panic!("{name} was read"));
        assert!(message.contains(says) && message.contains(name) && !message.contains('\n'), "{name}: {message}");
    }
    let message = read(&[directory.path().join("absent")]).err().unwrap();
    assert!(message.contains("absent: cannot be read"), "{message}");
}

#[test]
fn a_written_capture_reads_back_with_times_names_and_lengths() {
    let directory = tempfile::tempdir().unwrap();
    let interfaces = [
        CaptureInterface { file: 0, name: None, link: LinkType::Ethernet },
        CaptureInterface { file: 0, name: Some("eth0".to_owned()), link: LinkType::LinuxCooked },
    ];
    let mut writer = CaptureWriter::new(Vec::new()).unwrap();
    let record = |time, interface, original| Record {
        time: Time(time),
        interface: penstock_replay::capture::InterfaceId(interface),
        captured: 45,
        original,
    };
    let packets = [
        (record(1_700_000_000_123_456_789, 1, 45), frame(1), "shop-ingress-web-0"),
        (record(1_700_000_000_123_456_790, 0, 1500), frame(2), ""),
        (record(1_700_000_001_000_000_000, 1, 45), frame(3), "x"),
    ];
    for (record, frame, comment) in &packets {
        writer.write(record, &interfaces[record.interface.index()], frame, comment).unwrap();
    }
    let bytes = writer.into_inner();
    assert!(bytes.windows(18).any(|window| window == b"shop-ingress-web-0"));
    let read = read(&[file(directory.path(), "out.pcapng", &bytes)]).unwrap();
    assert_eq!(
        read.packets,
        [
            (1_700_000_000_123_456_789, 0, frame(1)),
            (1_700_000_000_123_456_790, 1, frame(2)),
            (1_700_000_001_000_000_000, 0, frame(3)),
        ]
    );
    assert_eq!(read.originals, [45, 1500, 45]);
    assert_eq!(read.names, [Some("eth0".to_owned()), None]);
}

//! Builds a frame from a line of a case.

use std::net::IpAddr;

use crate::frame::{ChecksumSpec, IpSpec, crc32c, sum, write_checksum};
use crate::script::PacketLine;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuiltPacket {
    /// The frame, from its Ethernet header on.
    pub frame: Vec<u8>,
    /// Its length on the wire: longer than the frame if the capture's snap length truncated it.
    pub original: usize,
    pub interface: Option<String>,
}

/// Builds the frame of a line. `before` are the frames of earlier lines, which ICMP errors may quote.
///
/// Kinds and their words:
/// - `tcp`: `S`, `A`, `F`, `R`, `P`, `U` (flags), `seq=`, `ack=`, `win=`, `scale=` (window scale), `len=` (payload)
/// - `udp`: `len=`, `udplen=` (the length field)
/// - `sctp`: the chunk (`init`, `init-ack`, `cookie-echo`, `cookie-ack`, `data`, `shutdown`, `shutdown-ack`,
///   `shutdown-complete`, `abort`), `tag=`, `itag=` (of INIT and its answer)
/// - `ping`, `pong`: `id=`, `len=`; `timestamp`, `timestamp-reply` (of ICMP alone): `id=`
/// - `unreachable`, `expired`, `toobig`, `redirect`: `quote=` (the number of a packet before, from 1), `keep=` (bytes
///   of it)
/// - `arp`, `solicit`, `advertise`, `ethertype=`: no IP, or neighbour discovery
/// - `proto=` (another protocol): `len=`
///
/// With an IP header: `ttl=`, `id=`, `frag=OFFSET` (with `more`), `option=lsrr|rr|nop|bad`,
/// `ext=hop,routing,segments,dest,dest64,ah,unknown…`, `behind=` (the same, behind the fragment header), `iplen=`, `version=`, `ihl=`, `ipsum=bad`, `sum=bad|partial|zero`.
///
/// All kinds: `vlan=`, `if=` (interface), `cut=` (bytes that were sent), `snap=` (bytes that were captured), `pad=`,
/// `mac=` (which pair of MACs).
///
/// # Panics
/// If the line is invalid.
pub fn build(line: &PacketLine, before: &[BuiltPacket]) -> BuiltPacket {
    let (ethertype, packet) = match line.kind.as_str() {
        "arp" => ([0x08, 0x06], arp(line)),
        kind if kind.starts_with("ethertype=") => {
            let number = u16::from_str_radix(kind.trim_start_matches("ethertype=0x"), 16);
            let number = number.unwrap_or_else(|_| panic!("{}: {kind} is no EtherType", line.place));
            (number.to_be_bytes(), vec![0; 46])
        }
        _ => ip(line, before),
    };
    let pair: u8 = line.number("mac").unwrap_or(0);
    let mut frame = vec![2, 0, 0, 0, pair, 2, 2, 0, 0, 0, pair, 1];
    if let Some(tag) = line.number::<u16>("vlan") {
        frame.extend([0x81, 0x00]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend(ethertype);
    frame.extend(packet);
    frame.resize(frame.len() + line.number("pad").unwrap_or(0), 0xaa);
    if let Some(cut) = line.number("cut") {
        frame.truncate(cut);
    }
    let original = frame.len();
    if let Some(snap) = line.number("snap") {
        frame.truncate(snap);
    }
    BuiltPacket { frame, original, interface: line.word("if").map(str::to_owned) }
}

fn ip(line: &PacketLine, before: &[BuiltPacket]) -> ([u8; 2], Vec<u8>) {
    let is_v6 = line.src.address.is_ipv6();
    let icmp = if is_v6 { 58 } else { 1 };
    let protocol = match line.kind.as_str() {
        "tcp" => 6,
        "udp" => 17,
        "sctp" => 132,
        "ping" | "pong" | "timestamp" | "timestamp-reply" | "unreachable" | "expired" | "toobig" | "redirect" => icmp,
        "solicit" | "advertise" => 58,
        kind => match kind.strip_prefix("proto=").and_then(|number| number.parse().ok()) {
            Some(number) => number,
            None => panic!("{}: {kind} is no kind of packet", line.place),
        },
    };
    let mut ip = IpSpec::new(line.src.address, line.dst.address, protocol);
    ip.ttl = line.number("ttl").unwrap_or(if matches!(line.kind.as_str(), "solicit" | "advertise") { 255 } else { 64 });
    let has_identifier = matches!(line.kind.as_str(), "ping" | "pong" | "timestamp" | "timestamp-reply");
    ip.id = if has_identifier { 0 } else { line.number("id").unwrap_or(0) };
    ip.id = line.number("ipid").unwrap_or(ip.id);
    ip.fragment = line.number("frag").map(|offset: u16| (offset, line.word("more").is_some()));
    ip.length = line.number("iplen");
    ip.version = line.number("version");
    ip.header_words = line.number("ihl");
    ip.checksum = if line.word("ipsum") == Some("bad") { ChecksumSpec::Bad } else { ChecksumSpec::Right };
    ip.options = option(line);
    ip.extensions = extensions(line, "ext");
    ip.behind = extensions(line, "behind");
    let payload = if ip.fragment.is_some_and(|(offset, _)| offset > 0) {
        vec![b'f'; line.number("len").unwrap_or(16)]
    } else {
        transport(line, &ip, before)
    };
    ip.packet(&payload)
}

fn transport(line: &PacketLine, ip: &IpSpec, before: &[BuiltPacket]) -> Vec<u8> {
    let checksum = match line.word("sum") {
        None => ChecksumSpec::Right,
        Some("bad") => ChecksumSpec::Bad,
        Some("partial") => ChecksumSpec::Partial,
        Some("zero") => ChecksumSpec::Zero,
        Some(other) => panic!("{}: sum={other} is no kind of checksum", line.place),
    };
    let data = vec![b'd'; line.number("len").unwrap_or(0)];
    match line.kind.as_str() {
        "tcp" => tcp(line, ip, &data, checksum),
        "udp" => {
            let length = line.number("udplen").unwrap_or(8 + data.len() as u16);
            let mut bytes = ports(line);
            bytes.extend(length.to_be_bytes());
            bytes.extend([0, 0]);
            bytes.extend(data);
            write_checksum(ip, &mut bytes, 6, checksum);
            bytes
        }
        "sctp" => sctp(line),
        "ping" => echo(line, ip, if line.src.address.is_ipv6() { 128 } else { 8 }, &data, checksum),
        "pong" => echo(line, ip, if line.src.address.is_ipv6() { 129 } else { 0 }, &data, checksum),
        "timestamp" => echo(line, ip, 13, &[0; 12], checksum),
        "timestamp-reply" => echo(line, ip, 14, &[0; 12], checksum),
        "solicit" | "advertise" => {
            let kind = if line.kind == "solicit" { 135 } else { 136 };
            let target = match line.dst.address {
                IpAddr::V6(target) => target.octets(),
                IpAddr::V4(_) => panic!("{}: neighbour discovery is of IPv6", line.place),
            };
            let mut bytes = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target].concat();
            write_checksum(ip, &mut bytes, 2, checksum);
            bytes
        }
        "unreachable" | "expired" | "toobig" | "redirect" => error(line, ip, before),
        _ => vec![b'd'; line.number("len").unwrap_or(20)],
    }
}

fn ports(line: &PacketLine) -> Vec<u8> {
    [line.src.port.to_be_bytes(), line.dst.port.to_be_bytes()].concat()
}

fn tcp(line: &PacketLine, ip: &IpSpec, data: &[u8], checksum: ChecksumSpec) -> Vec<u8> {
    let bits = [("F", 1), ("S", 2), ("R", 4), ("P", 8), ("A", 16), ("U", 32)];
    let flags = bits.iter().filter(|(flag, _)| line.word(flag).is_some()).fold(0u8, |flags, (_, bit)| flags | bit);
    let options = match line.number::<u8>("scale") {
        Some(shift) => vec![1, 3, 3, shift],
        None => Vec::new(),
    };
    let mut bytes = ports(line);
    bytes.extend(line.number::<u32>("seq").unwrap_or(0).to_be_bytes());
    bytes.extend(line.number::<u32>("ack").unwrap_or(0).to_be_bytes());
    let words = line.number("offset").unwrap_or(5 + options.len() as u8 / 4);
    bytes.extend([words << 4, flags]);
    bytes.extend(line.number::<u16>("win").unwrap_or(8192).to_be_bytes());
    bytes.extend([0, 0, 0, 0]);
    bytes.extend(options);
    bytes.extend(data);
    write_checksum(ip, &mut bytes, 16, checksum);
    bytes
}

fn sctp(line: &PacketLine) -> Vec<u8> {
    let chunks = [
        ("data", 0),
        ("init", 1),
        ("init-ack", 2),
        ("abort", 6),
        ("shutdown", 7),
        ("shutdown-ack", 8),
        ("cookie-echo", 10),
        ("cookie-ack", 11),
        ("shutdown-complete", 14),
    ];
    let chunk = chunks.iter().find(|(name, _)| line.word(name).is_some());
    let (_, number) = chunk.unwrap_or_else(|| panic!("{}: names no SCTP chunk", line.place));
    let body = match number {
        // Initiate tag, window, streams out and in, first sequence number.
        1 | 2 => {
            [&line.number::<u32>("itag").unwrap_or(1).to_be_bytes()[..], &[0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]].concat()
        }
        0 => [&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0][..], b"data"].concat(),
        7 => vec![0, 0, 0, 1],
        10 => b"cookie12".to_vec(),
        _ => Vec::new(),
    };
    let mut bytes = ports(line);
    bytes.extend(line.number::<u32>("tag").unwrap_or(0).to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend([*number, 0]);
    bytes.extend((4 + body.len() as u16).to_be_bytes());
    bytes.extend(body);
    let checksum = crc32c(&bytes).to_le_bytes();
    bytes[8..12].copy_from_slice(&checksum);
    bytes
}

fn echo(line: &PacketLine, ip: &IpSpec, kind: u8, data: &[u8], checksum: ChecksumSpec) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(line.number::<u16>("id").unwrap_or(1).to_be_bytes());
    bytes.extend(line.number::<u16>("n").unwrap_or(1).to_be_bytes());
    bytes.extend(data);
    write_icmp_checksum(ip, &mut bytes, checksum);
    bytes
}

/// ICMP checksums; unlike ICMP, ICMPv6 includes the pseudo-header.
fn write_icmp_checksum(ip: &IpSpec, bytes: &mut [u8], checksum: ChecksumSpec) {
    if ip.src.is_ipv6() {
        write_checksum(ip, bytes, 2, checksum);
    } else {
        bytes[2..4].fill(0);
        let right = !sum(bytes, 0) as u16;
        let value = if checksum == ChecksumSpec::Bad { right ^ 0x5555 } else { right };
        bytes[2..4].copy_from_slice(&value.to_be_bytes());
    }
}

fn error(line: &PacketLine, ip: &IpSpec, before: &[BuiltPacket]) -> Vec<u8> {
    let quote: usize = line.number("quote").unwrap_or_else(|| panic!("{}: quotes no packet", line.place));
    let quoted = &before[quote - 1].frame[14..];
    let keep = line.number("keep").unwrap_or(quoted.len());
    let head: [u8; 8] = match (line.kind.as_str(), ip.src.is_ipv6()) {
        ("unreachable", false) => [3, 3, 0, 0, 0, 0, 0, 0],
        ("unreachable", true) => [1, 4, 0, 0, 0, 0, 0, 0],
        ("expired", false) => [11, 0, 0, 0, 0, 0, 0, 0],
        ("expired", true) => [3, 0, 0, 0, 0, 0, 0, 0],
        ("toobig", false) => [3, 4, 0, 0, 0, 0, 0x05, 0x14],
        ("toobig", true) => [2, 0, 0, 0, 0, 0, 0x05, 0x14],
        ("redirect", false) => [5, 1, 0, 0, 10, 0, 0, 9],
        _ => [137, 0, 0, 0, 0, 0, 0, 0],
    };
    let mut bytes = [&head[..], &quoted[..keep.min(quoted.len())]].concat();
    write_icmp_checksum(ip, &mut bytes, ChecksumSpec::Right);
    bytes
}

fn arp(line: &PacketLine) -> Vec<u8> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (line.src.address, line.dst.address) else {
        panic!("{}: ARP is of IPv4", line.place)
    };
    [&[0, 1, 0x08, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1][..], &src.octets(), &[0; 6], &dst.octets()].concat()
}

fn option(line: &PacketLine) -> Vec<u8> {
    match line.word("option") {
        None => Vec::new(),
        Some("nop") => vec![1, 1, 1, 0],
        Some("rr") => vec![7, 7, 4, 0, 0, 0, 0, 0],
        Some("lsrr") => vec![131, 7, 4, 192, 0, 2, 1, 0],
        Some("ssrr") => vec![137, 7, 4, 192, 0, 2, 1, 0],
        Some("bad") => vec![7, 40, 4, 0],
        Some(other) => panic!("{}: option={other} is not known", line.place),
    }
}

fn extensions(line: &PacketLine, word: &str) -> Vec<(u8, Vec<u8>)> {
    let Some(list) = line.word(word) else { return Vec::new() };
    let padded = [0, 1, 4, 0, 0, 0, 0].to_vec();
    list.split(',')
        .map(|name| match name {
            "hop" => (0, padded.clone()),
            "dest" => (60, padded.clone()),
            // One option of padding, to 64 bytes.
            "dest64" => (60, [&[7, 1, 60][..], &[0; 60]].concat()),
            // Type 0, no segments left; and one left.
            "routing" => (43, vec![0, 0, 0, 0, 0, 0, 0]),
            "segments" => (43, [&[2, 0, 1, 0, 0, 0, 0][..], &[0xfd; 16]].concat()),
            "ah" => (51, [&[4, 0, 0][..], &[0; 8], &[7; 12]].concat()),
            "unknown" => (253, padded.clone()),
            other => panic!("{}: {word}={other} is not known", line.place),
        })
        .collect()
}

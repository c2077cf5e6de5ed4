//! The bytes of a case's capture: little-endian pcapng, written here independently of the writer under test.

use crate::packet::BuiltPacket;
use crate::script::LinkLayer;

/// 2026-01-01T00:00:00Z in seconds since 1970.
pub const EPOCH: u64 = 1_767_225_600;

/// A pcapng file of these packets, each with nanoseconds since [`EPOCH`].
pub fn pcapng(link: LinkLayer, packets: &[(u64, BuiltPacket)]) -> Vec<u8> {
    let mut file = block(0x0a0d_0d0a, &[&0x1a2b_3c4du32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat());
    let mut interfaces: Vec<Option<&str>> = Vec::new();
    for (_, packet) in packets {
        let name = packet.interface.as_deref();
        if !interfaces.contains(&name) {
            interfaces.push(name);
            file.extend(interface(link, name));
        }
    }
    for (time, packet) in packets {
        let number = interfaces.iter().position(|name| *name == packet.interface.as_deref()).unwrap_or(0);
        let bytes = of_link(link, &packet.frame);
        let grown = bytes.len() as i64 - packet.frame.len() as i64;
        let time = EPOCH * 1_000_000_000 + time;
        let original = (packet.original as i64 + grown).max(0) as u32;
        let words = [number as u32, (time >> 32) as u32, time as u32, bytes.len() as u32, original];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.extend(block(6, &[&head, &padded(&bytes)[..]].concat()));
    }
    file
}

fn interface(link: LinkLayer, name: Option<&str>) -> Vec<u8> {
    let number: u16 = match link {
        LinkLayer::Ethernet => 1,
        LinkLayer::Cooked => 113,
        LinkLayer::Cooked2 => 276,
        LinkLayer::Raw => 101,
    };
    let mut body = [&number.to_le_bytes()[..], &[0; 6]].concat();
    if let Some(name) = name {
        body.extend(option(2, name.as_bytes()));
    }
    body.extend(option(9, &[9]));
    body.extend([0; 4]);
    block(1, &body)
}

/// The frame with the capture's link-layer header.
fn of_link(link: LinkLayer, frame: &[u8]) -> Vec<u8> {
    match link {
        LinkLayer::Ethernet => frame.to_vec(),
        LinkLayer::Raw => frame[14..].to_vec(),
        // Sent to us, Ethernet, six address bytes.
        LinkLayer::Cooked => [&[0, 0, 0, 1, 0, 6][..], &frame[6..12], &[0, 0], &frame[12..]].concat(),
        LinkLayer::Cooked2 => {
            let head = [&frame[12..14], &[0, 0, 0, 0, 0, 2, 0, 1, 0, 6][..], &frame[6..12], &[0, 0]].concat();
            [&head, &frame[14..]].concat()
        }
    }
}

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32 + 12).to_le_bytes();
    [&kind.to_le_bytes()[..], &length, body, &length].concat()
}

fn option(code: u16, value: &[u8]) -> Vec<u8> {
    [&code.to_le_bytes()[..], &(value.len() as u16).to_le_bytes(), &padded(value)].concat()
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

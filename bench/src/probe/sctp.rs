//! The first two packets of an SCTP association (RFC 9260), over raw sockets: many kernels have no SCTP of their own. One
//! that has it may answer with an ABORT as well; that is not read.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use socket2::{Domain, Socket, Type};

use super::reply_to;

/// IP protocol number.
const NUMBER: i32 = 132;
/// Bytes of the common header (section 3.1).
const COMMON_HEADER: usize = 12;
/// Bytes of an INIT or INIT ACK chunk without parameters (sections 3.3.2 and 3.3.3).
const INIT_CHUNK: usize = 20;
/// Bytes of a parameter before its value (section 3.2.1).
const PARAMETER_HEADER: usize = 4;
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
/// The parameter that each INIT ACK has (section 3.3.3.1).
const STATE_COOKIE: u16 = 7;
/// A receive window and numbers of streams as endpoints offer them.
const WINDOW: u32 = 65_536;
const STREAMS: u16 = 10;

/// A raw socket. On IPv4 it receives packets with their IP header.
pub(super) fn socket(v6: bool) -> std::io::Result<Socket> {
    let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
    let socket = Socket::new(domain, Type::RAW, Some(NUMBER.into()))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A client's request for an association, and what its answer must contain.
#[derive(Clone, Copy)]
pub(super) struct Request {
    port: u16,
    server_port: u16,
    tag: u32,
}

impl Request {
    /// From a random port with a random tag.
    pub(super) fn new(server_port: u16) -> Self {
        Self { port: rand::random_range(32_768..=60_999), server_port, tag: rand::random_range(1..=u32::MAX) }
    }

    /// The packet with the INIT chunk.
    pub(super) fn packet(&self) -> Vec<u8> {
        packet((self.port, self.server_port), 0, INIT, self.tag, &[])
    }

    /// The state cookie of the answer by the server with this identity.
    pub(super) fn expected(&self, identity: u32) -> Vec<u8> {
        reply_to(identity, &self.tag.to_be_bytes())
    }

    /// The state cookie of what a socket has received, if that answers this request.
    pub(super) fn cookie<'a>(&self, received: &'a [u8], v6: bool) -> Option<&'a [u8]> {
        let chunk = Chunk::read(received, v6, INIT_ACK)?;
        let answers = chunk.ports == (self.server_port, self.port) && chunk.verification_tag == self.tag;
        let (header, cookie) = chunk.parameters.split_at_checked(PARAMETER_HEADER)?;
        (answers && header.starts_with(&STATE_COOKIE.to_be_bytes())).then_some(cookie)
    }
}

/// A server of one port at one address: answers each INIT chunk with an INIT ACK that has its identity.
pub(super) struct Server {
    /// A raw socket, which receives and sends as one for datagrams does.
    pub(super) socket: UdpSocket,
    port: u16,
}

impl Server {
    pub(super) fn bind(address: IpAddr, port: u16) -> std::io::Result<Self> {
        let socket = socket(address.is_ipv6())?;
        socket.bind(&SocketAddr::new(address, 0).into())?;
        Ok(Self { socket: socket.into(), port })
    }

    pub(super) fn answer(&self, identity: u32) {
        let mut buffer = [0; 4096];
        while let Ok((length, from)) = self.socket.recv_from(&mut buffer) {
            let Some(init) = Chunk::read(&buffer[..length], from.is_ipv6(), INIT) else { continue };
            let (client, server) = init.ports;
            if server == self.port {
                let cookie = reply_to(identity, &init.initiate_tag.to_be_bytes());
                let answer = packet((server, client), init.initiate_tag, INIT_ACK, rand::random(), &cookie);
                // A reply that cannot be sent is a reply that does not arrive; the probe detects it.
                let _ = self.socket.send_to(&answer, from);
            }
        }
    }
}

/// A packet with one INIT or INIT ACK chunk, and this state cookie unless it is empty.
fn packet(ports: (u16, u16), verification_tag: u32, kind: u8, initiate_tag: u32, cookie: &[u8]) -> Vec<u8> {
    let length_of = |bytes: usize| u16::try_from(bytes).expect("a cookie has a few bytes").to_be_bytes();
    let parameter = if cookie.is_empty() { 0 } else { PARAMETER_HEADER + cookie.len() };
    let mut packet = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    packet.extend(verification_tag.to_be_bytes());
    packet.extend([0; 4]);
    packet.extend([kind, 0]);
    packet.extend(length_of(INIT_CHUNK + parameter));
    packet.extend([initiate_tag.to_be_bytes(), WINDOW.to_be_bytes()].concat());
    packet.extend([STREAMS.to_be_bytes(), STREAMS.to_be_bytes()].concat());
    // The initial TSN may be anything.
    packet.extend(initiate_tag.to_be_bytes());
    if parameter > 0 {
        packet.extend([STATE_COOKIE.to_be_bytes(), length_of(parameter)].concat());
        packet.extend(cookie);
    }
    let checksum = crc32c::crc32c(&packet).to_le_bytes();
    packet[8..COMMON_HEADER].copy_from_slice(&checksum);
    packet
}

/// The first chunk of a received packet, an INIT or INIT ACK.
struct Chunk<'a> {
    ports: (u16, u16),
    verification_tag: u32,
    initiate_tag: u32,
    parameters: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Reads what a raw socket has received; `None` unless it is a valid packet whose first chunk is of this kind.
    fn read(received: &'a [u8], v6: bool, kind: u8) -> Option<Self> {
        let ip_header = if v6 { 0 } else { usize::from(received.first()? & 0xf) * 4 };
        let packet = received.get(ip_header..)?;
        let long = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        let short = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
        let mut unsigned = packet.to_vec();
        unsigned.get_mut(8..COMMON_HEADER)?.fill(0);
        let is_valid = packet.get(8..COMMON_HEADER)? == crc32c::crc32c(&unsigned).to_le_bytes();
        let is_of_kind = packet.get(COMMON_HEADER) == Some(&kind);
        let length = usize::from(short(COMMON_HEADER + 2)?);
        let parameters = packet.get(COMMON_HEADER + INIT_CHUNK..COMMON_HEADER + length)?;
        (is_valid && is_of_kind).then_some(Self {
            ports: (short(0)?, short(2)?),
            verification_tag: long(4)?,
            initiate_tag: long(COMMON_HEADER + 4)?,
            parameters,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_intact_answer_to_the_request_is_read() {
        let request = Request::new(34_345);
        let cookie = request.expected(7);
        let answer = |ports, tag| packet(ports, tag, INIT_ACK, 99, &cookie);
        let there_and_back = (request.server_port, request.port);
        let right = answer(there_and_back, request.tag);
        assert_eq!(request.cookie(&right, true), Some(&cookie[..]));
        // With an IPv4 header of 24 bytes before it.
        let with_header = [&[0x46; 24], &right[..]].concat();
        assert_eq!(request.cookie(&with_header, false), Some(&cookie[..]));
        assert_ne!(request.expected(8), cookie, "another server's answer differs");

        let wrong = [
            ("another tag", answer(there_and_back, request.tag ^ 1)),
            ("another server's port", answer((request.server_port ^ 1, request.port), request.tag)),
            ("another client's port", answer((request.server_port, request.port ^ 1), request.tag)),
            ("no cookie", packet(there_and_back, request.tag, INIT_ACK, 99, &[])),
            ("the request", request.packet()),
        ];
        for (why, bytes) in wrong {
            assert_eq!(request.cookie(&bytes, true), None, "{why}");
        }
        for at in 0..right.len() {
            let mut damaged = right.clone();
            damaged[at] ^= 1;
            assert_eq!(request.cookie(&damaged, true), None, "byte {at} is damaged");
            assert_eq!(request.cookie(&right[..at], true), None, "cut to {at} bytes");
        }
    }

    #[test]
    fn a_request_is_a_valid_init_chunk() {
        let request = Request::new(80);
        let bytes = request.packet();
        assert_eq!(bytes.len(), COMMON_HEADER + INIT_CHUNK);
        let chunk = Chunk::read(&bytes, true, INIT).expect("a valid packet");
        assert_eq!((chunk.ports, chunk.verification_tag), ((request.port, 80), 0));
        assert_eq!(chunk.initiate_tag, request.tag);
        assert!(chunk.parameters.is_empty());
    }
}

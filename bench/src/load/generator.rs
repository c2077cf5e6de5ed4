//! Sends frames of one UDP flow as fast as one core can, bypassing the queueing discipline; and a packet socket for
//! single frames.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::testbed::Namespace;

const BATCH: usize = 128;

/// Bytes of the Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

/// Addresses of a UDP flow over IPv4 and the MAC addresses of its first hop.
#[derive(Clone, Copy, Debug)]
pub struct UdpFlow {
    /// MAC of the interface that sends.
    pub source_mac: [u8; 6],
    pub gateway_mac: [u8; 6],
    pub source: SocketAddr,
    pub destination: SocketAddr,
}

impl UdpFlow {
    /// A frame of this flow. `length` counts bytes from the Ethernet header to the end of the payload, without the
    /// frame check sequence.
    pub fn frame(&self, length: usize) -> Result<Vec<u8>> {
        let (IpAddr::V4(source), IpAddr::V4(destination)) = (self.source.ip(), self.destination.ip()) else {
            bail!("frames are generated for IPv4 alone, not for {} to {}", self.source, self.destination);
        };
        let Some(payload) = length.checked_sub(HEADERS) else {
            bail!("a frame of {length} bytes has no room for its headers, which are {HEADERS}");
        };
        let builder = etherparse::PacketBuilder::ethernet2(self.source_mac, self.gateway_mac)
            .ipv4(source.octets(), destination.octets(), 64)
            .udp(self.source.port(), self.destination.port());
        let mut frame = Vec::with_capacity(length);
        builder.write(&mut frame, &vec![0x5a; payload])?;
        Ok(frame)
    }
}

pub struct Generator {
    socket: Socket,
}

impl Generator {
    /// Opens one on an interface of the calling thread's namespace.
    pub fn open(interface: &str) -> Result<Self> {
        // With protocol 0 it receives nothing (packet(7)).
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
        socket.bind(&link_address(interface)?).with_context(|| format!("cannot bind to {interface}"))?;
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
        set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, 8 << 20)?;
        Ok(Self { socket })
    }

    /// Sends `frame` repeatedly for this long; returns how many times the kernel accepted it.
    pub fn run_for(&self, frame: &[u8], length: Duration) -> Result<u64> {
        let deadline = Instant::now() + length;
        self.run(frame, |_| Instant::now() < deadline)
    }

    /// Sends `frame` this many times, with a pause after each batch.
    pub fn send(&self, frame: &[u8], count: u64, pause: Duration) -> Result<u64> {
        self.run(frame, |sent| {
            if sent > 0 && !pause.is_zero() {
                std::thread::sleep(pause);
            }
            sent < count
        })
    }

    /// Sends each of these frames once; returns how many the kernel accepted. A frame rejected because the interface is
    /// overloaded is not sent again.
    pub fn send_frames<F: AsRef<[u8]>>(&self, frames: &[F]) -> Result<usize> {
        // SAFETY: all fields of the C structs are integers and pointers, for which zero is a value.
        let (mut parts, mut headers): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { std::mem::zeroed() };
        let mut taken = 0;
        for frames in frames.chunks(BATCH) {
            for (index, frame) in frames.iter().enumerate() {
                let frame = frame.as_ref();
                parts[index] = libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
                headers[index].msg_hdr.msg_iov = &raw mut parts[index];
                headers[index].msg_hdr.msg_iovlen = 1;
            }
            let mut next = 0;
            while next < frames.len() {
                let left = &mut headers[next..frames.len()];
                // SAFETY: headers, parts and frames outlive the call, which only reads the frames.
                let result = unsafe {
                    libc::sendmmsg(self.socket.as_raw_fd(), left.as_mut_ptr(), left.len() as libc::c_uint, 0)
                };
                match usize::try_from(result) {
                    Ok(count) => {
                        taken += count;
                        // The call stopped early: the next frame was rejected.
                        next += count + 1;
                    }
                    Err(_) => {
                        is_overload(io::Error::last_os_error())?;
                        next += 1;
                    }
                }
            }
        }
        Ok(taken)
    }

    fn run(&self, frame: &[u8], more: impl Fn(u64) -> bool) -> Result<u64> {
        let mut part = libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
        // SAFETY: all fields of the C struct are integers and pointers, for which zero is a value.
        let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
        header.msg_hdr.msg_iov = &raw mut part;
        header.msg_hdr.msg_iovlen = 1;
        let mut headers = [header; BATCH];
        let mut sent = 0;
        while more(sent) {
            // SAFETY: the headers and the one buffer that all of them name outlive the call, which only reads
            // the buffer.
            let result =
                unsafe { libc::sendmmsg(self.socket.as_raw_fd(), headers.as_mut_ptr(), BATCH as libc::c_uint, 0) };
            match u64::try_from(result) {
                Ok(count) => sent += count,
                Err(_) => is_overload(io::Error::last_os_error())?,
            }
        }
        Ok(sent)
    }
}

/// Accepts the errors of an overloaded interface (frame dropped, queue full) and returns all others.
fn is_overload(error: io::Error) -> Result<()> {
    match error.raw_os_error() {
        Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR) => Ok(()),
        _ => Err(error).context("cannot send frames"),
    }
}

fn set_option(socket: &Socket, level: i32, option: i32, value: i32) -> Result<()> {
    let size = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the option's value is an int, and lives through the call.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
    if result != 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("cannot set socket option {option}"));
    }
    Ok(())
}

fn link_address(interface: &str) -> Result<SockAddr> {
    let index = if_nametoindex(interface).with_context(|| format!("no interface {interface}"))?;
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: a sockaddr_ll fits into the storage, is plain old data, and its fields are all set here or zero.
    let address: &mut libc::sockaddr_ll = unsafe { storage.view_as() };
    address.sll_family = libc::AF_PACKET as libc::sa_family_t;
    address.sll_ifindex = index.cast_signed();
    // SAFETY: the storage holds an initialised address of this length.
    Ok(unsafe { SockAddr::new(storage, size_of::<libc::sockaddr_ll>() as libc::socklen_t) })
}

/// A packet socket that sends single raw frames on an interface and captures all frames received there.
pub struct PacketSocket {
    socket: Socket,
}

impl PacketSocket {
    /// Opens one on `eth0` of a namespace.
    pub fn open(namespace: &Namespace) -> Result<Self> {
        // The protocol number is in network byte order (packet(7)).
        let every = i32::from((libc::ETH_P_ALL as u16).to_be());
        let open = || {
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(every)))?;
            socket.bind(&link_address("eth0")?)?;
            set_option(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
            set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20)?;
            anyhow::Ok(Self { socket })
        };
        namespace.run(open).context("cannot open a packet socket")
    }

    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.socket.send(frame).map(drop)
    }

    /// Frames received since the last call, without waiting. Frames sent by this host are left out.
    pub fn waiting(&self) -> Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        // Longer than any packet of a link with jumbo frames.
        let mut buffer = [MaybeUninit::<u8>::uninit(); 16 << 10];
        loop {
            match self.socket.recv_with_flags(&mut buffer, libc::MSG_DONTWAIT) {
                // SAFETY: the kernel has written these bytes.
                Ok(length) => frames.push(buffer[..length].iter().map(|byte| unsafe { byte.assume_init() }).collect()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(frames),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Frames received since the last call and within the next `time`. Frames sent by this host are left out.
    pub fn received(&self, time: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + time;
        let mut frames = Vec::new();
        // Longer than any packet of a link with jumbo frames.
        let mut buffer = vec![0; 16 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match (&self.socket).read(&mut buffer) {
                Ok(length) => frames.push(buffer[..length].to_vec()),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(frames);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

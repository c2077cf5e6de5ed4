//! Bulk TCP transfers whose content is compared byte by byte.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use crate::testbed::Namespace;

const CHUNK: usize = 64 << 10;
/// A transfer without progress for this long has failed.
const STALL: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, Debug)]
pub struct TransferReport {
    /// Bytes received, all identical to what was sent.
    pub bytes: u64,
    /// From the start of sending until the last byte arrived.
    pub time: Duration,
    /// Segments sent by the sender's kernel, retransmissions included (`tcpi_segs_out`).
    pub segments: u64,
    /// Segments retransmitted (`tcpi_total_retrans`).
    pub retransmitted: u64,
}

impl TransferReport {
    pub fn gigabits_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.time.as_secs_f64() / 1e9
    }

    /// Share of the segments that were retransmitted, from 0 to 1.
    pub fn retransmitted_share(&self) -> f64 {
        self.retransmitted as f64 / (self.segments.max(1)) as f64
    }
}

/// Sends this many pseudo-random bytes over one connection and compares every byte on arrival.
pub fn transfer(from: &Namespace, to: &Namespace, address: IpAddr, bytes: u64) -> Result<TransferReport> {
    run(from, to, address, |sent, _| sent < bytes)
}

pub fn transfer_for(from: &Namespace, to: &Namespace, address: IpAddr, length: Duration) -> Result<TransferReport> {
    run(from, to, address, |_, time| time < length)
}

fn run(
    from: &Namespace,
    to: &Namespace,
    address: IpAddr,
    more: impl Fn(u64, Duration) -> bool + Send,
) -> Result<TransferReport> {
    let listener = to.run(|| TcpListener::bind(SocketAddr::new(address, PORT)))?;
    let seed = rand::random();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || receive(&listener, seed));
        let sent = from.run(|| send(SocketAddr::new(address, PORT), seed, more));
        let received = receiver.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (bytes, start, segments, retransmitted) = sent?;
        let (arrived, end) = received?;
        if arrived != bytes {
            bail!("{bytes} bytes were sent and {arrived} arrived");
        }
        Ok(TransferReport { bytes, time: end.saturating_duration_since(start), segments, retransmitted })
    })
}

/// Port of bulk transfers; the one that iperf3 uses.
const PORT: u16 = 5201;

fn send(address: SocketAddr, seed: u64, more: impl Fn(u64, Duration) -> bool) -> Result<(u64, Instant, u64, u64)> {
    let mut stream = TcpStream::connect_timeout(&address, STALL).with_context(|| format!("cannot reach {address}"))?;
    stream.set_write_timeout(Some(STALL))?;
    let mut random = SmallRng::seed_from_u64(seed);
    let mut chunk = vec![0; CHUNK];
    let mut sent = 0;
    let start = Instant::now();
    while more(sent, start.elapsed()) {
        random.fill_bytes(&mut chunk);
        stream.write_all(&chunk).with_context(|| format!("stalled after {sent} bytes"))?;
        sent += CHUNK as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    stream.set_read_timeout(Some(STALL))?;
    // The receiver closes once it has read everything. The counters are complete only then.
    let _ = stream.read(&mut [0; 1]).context("the receiver does not close")?;
    let (segments, retransmitted) = segments(&stream)?;
    Ok((sent, start, segments, retransmitted))
}

fn receive(listener: &TcpListener, seed: u64) -> Result<(u64, Instant)> {
    let mut stream = accept(listener)?;
    stream.set_read_timeout(Some(STALL))?;
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut chunk, mut expected) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut arrived = 0;
    loop {
        let length = fill(&mut stream, &mut chunk).with_context(|| format!("stalled after {arrived} bytes"))?;
        if length == 0 {
            return Ok((arrived, Instant::now()));
        }
        random.fill_bytes(&mut expected);
        if chunk[..length] != expected[..length] {
            let at = (0..length).find(|&at| chunk[at] != expected[at]).unwrap_or(length);
            bail!("byte {} differs from what was sent", arrived + at as u64);
        }
        arrived += length as u64;
    }
}

fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + STALL;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error).context("nobody connected"),
        }
    }
}

/// Reads until the buffer is full or the stream ends.
fn fill(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match stream.read(&mut buffer[length..])? {
            0 => break,
            read => length += read,
        }
    }
    Ok(length)
}

/// `tcpi_segs_out` and `tcpi_total_retrans` of a connection (tcp(7)).
pub fn segments(stream: &TcpStream) -> Result<(u64, u64)> {
    // SAFETY: all fields of the C struct are integers, for which zero is a value.
    let mut info: TcpInfo = unsafe { std::mem::zeroed() };
    let mut length = size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the struct's size.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut length)
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error()).context("no TCP_INFO");
    }
    Ok((info.segs_out.into(), info.total_retrans.into()))
}

/// The start of the kernel's `struct tcp_info` (include/uapi/linux/tcp.h), up to the last field read here.
#[repr(C)]
struct TcpInfo {
    bytes: [u8; 8],
    words: [u32; 23],
    total_retrans: u32,
    rates_and_bytes: [u64; 4],
    segs_out: u32,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    #[test]
    fn tcp_info_matches_the_kernel_layout() {
        assert_eq!(offset_of!(super::TcpInfo, total_retrans), offset_of!(libc::tcp_info, tcpi_total_retrans));
        assert_eq!(offset_of!(super::TcpInfo, segs_out), 136);
    }
}

//! One non-blocking attempt of one probe, so that a thread drives many.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Socket, Type};

use super::reply_to;
use super::{Probe, ProbeOutcome, Protocol, sctp};
use crate::testbed::Namespace;

/// Bytes of a request's random payload.
const PAYLOAD: usize = 16;
/// Bytes of an ICMP echo message before its payload (RFC 792, RFC 4443 section 4.1).
const ECHO_HEADER: usize = 8;
const ECHO_REQUEST_V4: u8 = 8;
const ECHO_REPLY_V4: u8 = 0;
const ECHO_REQUEST_V6: u8 = 128;
const ECHO_REPLY_V6: u8 = 129;

pub(super) struct Attempt {
    socket: Socket,
    started: Instant,
    state: AttemptState,
    v6: bool,
    framing: Framing,
    request: Vec<u8>,
    expected: Vec<u8>,
    received: Vec<u8>,
}

/// How a socket's reads frame the answer.
#[derive(Clone, Copy)]
enum Framing {
    None,
    Echo,
    Sctp(sctp::Request),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AttemptState {
    Connecting,
    Awaiting,
    Done(ProbeOutcome),
}

impl Attempt {
    /// Opens a socket in the calling thread's namespace and sends the first packet.
    pub(super) fn start(probe: &Probe) -> io::Result<Self> {
        let payload: [u8; PAYLOAD] = rand::random();
        let v6 = probe.destination.is_ipv6();
        let (port, framing) = match probe.protocol {
            Protocol::Tcp(port) | Protocol::Udp(port) => (port, Framing::None),
            // A raw socket has no port.
            Protocol::Sctp(port) => (0, Framing::Sctp(sctp::Request::new(port))),
            Protocol::Icmp => (0, Framing::Echo),
        };
        let identity = probe.to as u32;
        let (request, expected) = match &framing {
            Framing::None => (payload.to_vec(), reply_to(identity, &payload)),
            Framing::Echo => (echo_request(v6, &payload), payload.to_vec()),
            Framing::Sctp(request) => (request.packet(), request.expected(identity)),
        };
        let socket = open(probe.protocol, v6)?;
        if let Some(source) = probe.source {
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        let address = SocketAddr::new(probe.destination, port);
        let connected = socket.connect(&address.into());
        let mut attempt = Self {
            socket,
            started: Instant::now(),
            state: AttemptState::Connecting,
            v6,
            framing,
            request,
            expected,
            received: Vec::new(),
        };
        match connected {
            Ok(()) => attempt.send(),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => attempt.fail(&error),
        }
        Ok(attempt)
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn outcome(&self) -> Option<ProbeOutcome> {
        match self.state {
            AttemptState::Done(outcome) => Some(outcome),
            AttemptState::Connecting | AttemptState::Awaiting => None,
        }
    }

    fn waits_for(&self) -> Option<PollFlags> {
        match self.state {
            AttemptState::Connecting => Some(PollFlags::POLLOUT),
            AttemptState::Awaiting => Some(PollFlags::POLLIN),
            AttemptState::Done(_) => None,
        }
    }

    fn advance(&mut self) {
        match self.state {
            AttemptState::Connecting => match self.socket.take_error() {
                Ok(None) => self.send(),
                Ok(Some(error)) | Err(error) => self.fail(&error),
            },
            AttemptState::Awaiting => self.receive(),
            AttemptState::Done(_) => {}
        }
    }

    fn send(&mut self) {
        match (&self.socket).write(&self.request) {
            Ok(length) if length == self.request.len() => self.state = AttemptState::Awaiting,
            Ok(_) => self.state = AttemptState::Done(ProbeOutcome::Wrong),
            Err(error) => self.fail(&error),
        }
    }

    fn receive(&mut self) {
        let mut buffer = [0; 512];
        match (&self.socket).read(&mut buffer) {
            Ok(0) => self.state = AttemptState::Done(ProbeOutcome::Wrong),
            Ok(length) => {
                self.received.extend_from_slice(self.payload_of(&buffer[..length]));
                if self.received == self.expected {
                    self.state = AttemptState::Done(ProbeOutcome::Reached);
                } else if !self.expected.starts_with(&self.received) {
                    self.state = AttemptState::Done(ProbeOutcome::Wrong);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => self.fail(&error),
        }
    }

    /// The part of a read that answers the request. A datagram of an ICMP socket starts at the ICMP header.
    fn payload_of<'a>(&self, datagram: &'a [u8]) -> &'a [u8] {
        match (&self.framing, datagram.first()) {
            (Framing::None, _) => datagram,
            (Framing::Echo, Some(&(ECHO_REPLY_V4 | ECHO_REPLY_V6))) => datagram.get(ECHO_HEADER..).unwrap_or_default(),
            (Framing::Echo, _) => &[],
            (Framing::Sctp(request), _) => request.cookie(datagram, self.v6).unwrap_or_default(),
        }
    }

    fn fail(&mut self, error: &io::Error) {
        self.state = AttemptState::Done(match error.raw_os_error() {
            // The latter two: without the protocol (an ICMP error on IPv4, another on IPv6).
            Some(libc::ECONNREFUSED | libc::ENOPROTOOPT | libc::EPROTO) => ProbeOutcome::Refused,
            Some(errno) => ProbeOutcome::Failed(errno),
            None => ProbeOutcome::Wrong,
        });
    }
}

/// A non-blocking socket of a protocol.
fn open(protocol: Protocol, v6: bool) -> io::Result<Socket> {
    let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
    let echo = if v6 { socket2::Protocol::ICMPV6 } else { socket2::Protocol::ICMPV4 };
    let socket = match protocol {
        Protocol::Tcp(_) => Socket::new(domain, Type::STREAM, None)?,
        Protocol::Udp(_) => Socket::new(domain, Type::DGRAM, None)?,
        Protocol::Icmp => Socket::new(domain, Type::DGRAM, Some(echo))?,
        Protocol::Sctp(_) => return sctp::socket(v6),
    };
    socket.set_nonblocking(true)?;
    if let Protocol::Tcp(_) = protocol {
        // Closing with a reset avoids thousands of sockets in TIME_WAIT.
        socket.set_linger(Some(Duration::ZERO))?;
    }
    Ok(socket)
}

fn echo_request(v6: bool, payload: &[u8]) -> Vec<u8> {
    // The kernel fills in identifier and checksum; the sequence number may be anything.
    let mut message = vec![0; ECHO_HEADER];
    message[0] = if v6 { ECHO_REQUEST_V6 } else { ECHO_REQUEST_V4 };
    message[7] = 1;
    message.extend_from_slice(payload);
    message
}

/// Drives all attempts until each has a result or the deadline has passed.
pub(super) fn drive(attempts: &mut [Attempt], deadline: Instant) -> Result<()> {
    while wait(attempts, deadline)? {}
    Ok(())
}

/// Polls until an attempt can advance and advances it; false if none is pending or the deadline has passed.
fn wait(attempts: &mut [Attempt], deadline: Instant) -> Result<bool> {
    let waiting: Vec<(usize, PollFlags)> =
        attempts.iter().enumerate().filter_map(|(index, attempt)| Some((index, attempt.waits_for()?))).collect();
    let left = deadline.saturating_duration_since(Instant::now());
    if waiting.is_empty() || left.is_zero() {
        return Ok(false);
    }
    let mut polled: Vec<PollFd> =
        waiting.iter().map(|&(index, flags)| PollFd::new(attempts[index].socket.as_fd(), flags)).collect();
    // Rounded up to whole milliseconds, so that the last one is not busy-waited.
    let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    match poll(&mut polled, timeout) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready: Vec<usize> = waiting
        .iter()
        .zip(&polled)
        .filter(|(_, polled)| polled.any().unwrap_or(true))
        .map(|(&(index, _), _)| index)
        .collect();
    for index in ready {
        attempts[index].advance();
    }
    Ok(true)
}

/// Repeats a probe, with a new attempt every `interval`, until one is answered. Returns when that attempt had started,
/// or `None` once `limit` has passed.
pub fn time_until_reached(
    namespace: &Namespace,
    (identity, destination): (u32, IpAddr),
    protocol: Protocol,
    interval: Duration,
    limit: Duration,
) -> Result<Option<Instant>> {
    /// Older attempts have failed: their first packet was dropped.
    const OLDEST: Duration = Duration::from_millis(200);
    let probe = Probe { from: 0, to: identity as usize, source: None, destination, protocol };
    namespace.run(|| {
        let deadline = Instant::now() + limit;
        let mut attempts: Vec<Attempt> = Vec::new();
        while Instant::now() < deadline {
            attempts.retain(|attempt| attempt.started.elapsed() < OLDEST);
            attempts.push(Attempt::start(&probe)?);
            drive(&mut attempts, Instant::now() + interval)?;
            let reached = attempts.iter().find(|attempt| attempt.outcome() == Some(ProbeOutcome::Reached));
            if let Some(attempt) = reached {
                return Ok(Some(attempt.started));
            }
        }
        Ok(None)
    })
}

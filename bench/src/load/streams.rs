//! Between two pods: bulk TCP streams, datagrams, and connections that are opened and closed.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Socket, Type};

use super::pin;
use super::sink::UdpSink;
use crate::testbed::Namespace;

const CHUNK: usize = 128 << 10;
const OPEN: Duration = Duration::from_secs(3);
const CLIENTS: usize = 2;
/// Server ports; several, so that no client runs out of source ports.
const SERVERS: u16 = 16;

/// Total throughput of this many streams to an address in gigabits a second, counted at the receiver after a fifth of
/// `length`. It listens on that port of all its addresses. An error if a stream breaks before the end.
pub fn streams_for(
    from: &Namespace,
    to: &Namespace,
    address: SocketAddr,
    streams: usize,
    length: Duration,
) -> Result<f64> {
    let own = on_any(address);
    let listener = to.run(|| TcpListener::bind(own)).with_context(|| format!("cannot listen on {own}"))?;
    let (ends, arrived, broken) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let rate = std::thread::scope(|scope| {
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for _ in 0..streams {
            let sender = from.run(|| TcpStream::connect_timeout(&address, OPEN));
            let sender = sender.with_context(|| format!("cannot connect to {address}"))?;
            let (receiver, _) = listener.accept()?;
            for stream in [&sender, &receiver] {
                stream.set_read_timeout(Some(Duration::from_millis(100)))?;
                stream.set_write_timeout(Some(Duration::from_millis(100)))?;
            }
            senders.push(sender);
            receivers.push(receiver);
        }
        for receiver in receivers {
            scope.spawn(|| read_until(receiver, &ends, &arrived));
        }
        for sender in senders {
            scope.spawn(|| write_until(sender, &ends, &broken));
        }
        std::thread::sleep(length / 5);
        let (start, before) = (Instant::now(), arrived.load(Ordering::Relaxed));
        std::thread::sleep(length);
        let (time, after) = (start.elapsed(), arrived.load(Ordering::Relaxed));
        ends.store(true, Ordering::Relaxed);
        anyhow::Ok((after - before) as f64 * 8.0 / time.as_secs_f64() / 1e9)
    })?;
    let broken = broken.into_inner();
    ensure!(broken == 0, "{broken} of {streams} streams broke");
    Ok(rate)
}

fn write_until(mut stream: TcpStream, ends: &AtomicBool, broken: &AtomicU64) {
    let chunk = vec![0x5a; CHUNK];
    // Retry after a timeout until the end.
    while !ends.load(Ordering::Relaxed) {
        // Receivers end no earlier: one that is gone before has broken, too.
        if !goes_on(stream.write(&chunk)) && !ends.load(Ordering::Relaxed) {
            broken.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
}

fn read_until(mut stream: TcpStream, ends: &AtomicBool, arrived: &AtomicU64) {
    let mut chunk = vec![0; CHUNK];
    while !ends.load(Ordering::Relaxed) {
        let result = stream.read(&mut chunk);
        if let Ok(length) = result {
            arrived.fetch_add(length as u64, Ordering::Relaxed);
        }
        if matches!(result, Ok(0)) || !goes_on(result) {
            return;
        }
    }
}

fn goes_on(result: std::io::Result<usize>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted),
    }
}

/// Datagrams a second, with this many bytes of payload, that one socket sends to an address and that arrive there, counted after a fifth
/// of `length`. `core`: the sender's.
pub fn datagrams_for(
    from: &Namespace,
    to: &Namespace,
    address: SocketAddr,
    (bytes, core): (usize, usize),
    length: Duration,
) -> Result<f64> {
    let sink = UdpSink::open(to, on_any(address))?;
    let sender = from.run(|| UdpSocket::bind(on_any(SocketAddr::new(address.ip(), 0))))?;
    sender.connect(address).with_context(|| format!("cannot send to {address}"))?;
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(core)?;
            let payload = vec![0x5a; bytes];
            while !ends.load(Ordering::Relaxed) {
                // A refused packet does not arrive, and so is not counted.
                let _ = sender.send(&payload);
            }
            anyhow::Ok(())
        });
        let counted = || -> Result<f64> {
            std::thread::sleep(length / 5);
            let (start, before) = (Instant::now(), sink.arrived()?);
            std::thread::sleep(length);
            let (time, after) = (start.elapsed(), sink.arrived()?);
            Ok((after - before) as f64 / time.as_secs_f64())
        };
        let rate = counted();
        ends.store(true, Ordering::Relaxed);
        rate
    })
}

/// Connections to an address opened and closed per second, counted after a fifth of `length`. The second figure is the
/// number of failed attempts.
pub fn connections_for(
    from: &Namespace,
    to: &Namespace,
    address: IpAddr,
    first_port: u16,
    length: Duration,
) -> Result<(f64, u64)> {
    let addresses: Vec<SocketAddr> = (0..SERVERS).map(|server| SocketAddr::new(address, first_port + server)).collect();
    let listening = || addresses.iter().map(|address| listen(&on_any(*address))).collect::<Result<Vec<_>>>();
    let listeners = to.run(listening).context("cannot listen")?;
    let (ends, opened, failed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let server = scope.spawn(|| accept_until(&listeners, &ends));
        for client in 0..CLIENTS {
            let addresses = &addresses;
            let (ends, opened, failed) = (&ends, &opened, &failed);
            scope.spawn(move || from.run(|| open_until(addresses, client, ends, opened, failed)));
        }
        std::thread::sleep(length / 5);
        let (start, before) = (Instant::now(), opened.load(Ordering::Relaxed));
        std::thread::sleep(length);
        let (time, after) = (start.elapsed(), opened.load(Ordering::Relaxed));
        ends.store(true, Ordering::Relaxed);
        server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(((after - before) as f64 / time.as_secs_f64(), failed.load(Ordering::Relaxed)))
    })
}

const PACED: u32 = 16;
/// Shorter than the one second after which TCP retransmits a SYN.
const AT_ONCE: Duration = Duration::from_millis(950);

/// Opens this many connections a second to an address and gives up those that need a second SYN. Returns how many were
/// tried and how many opened.
pub fn connections_at(
    from: &Namespace,
    to: &Namespace,
    address: SocketAddr,
    rate: f64,
    length: Duration,
) -> Result<(u64, u64)> {
    let listeners = [to.run(|| listen(&address)).context("cannot listen")?];
    let (ends, tried, opened) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let tries = &|client: u32| {
        let (start, mut turn) = (Instant::now(), 0);
        while start.elapsed() < length {
            turn += 1;
            tried.fetch_add(1, Ordering::Relaxed);
            let is_open = TcpStream::connect_timeout(&address, AT_ONCE).is_ok();
            opened.fetch_add(u64::from(is_open), Ordering::Relaxed);
            let next = f64::from(turn * PACED + client) / rate;
            std::thread::sleep(Duration::from_secs_f64(next).saturating_sub(start.elapsed()));
        }
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| accept_until(&listeners, &ends));
        let clients: Vec<_> = (0..PACED).map(|client| scope.spawn(move || from.run(|| tries(client)))).collect();
        clients.into_iter().for_each(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ends.store(true, Ordering::Relaxed);
        server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok((tried.into_inner(), opened.into_inner()))
}

/// Accept backlog for all pending connections. A SYN that finds the backlog full is retransmitted a second later, which
/// would dominate the measurement.
const WAITING: i32 = 65_535;

/// The port of an address, on all addresses of its family: clients may use a Service's.
pub(super) fn on_any(address: SocketAddr) -> SocketAddr {
    let any = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(any, address.port())
}

fn listen(address: &SocketAddr) -> Result<TcpListener> {
    // `somaxconn` of this network namespace caps the backlog.
    std::fs::write("/proc/sys/net/core/somaxconn", WAITING.to_string())?;
    let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&(*address).into())?;
    socket.listen(WAITING)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn open_until(addresses: &[SocketAddr], client: usize, ends: &AtomicBool, opened: &AtomicU64, failed: &AtomicU64) {
    let mut turn = client;
    while !ends.load(Ordering::Relaxed) {
        turn += 1;
        match TcpStream::connect_timeout(&addresses[turn % addresses.len()], OPEN) {
            Ok(_) => opened.fetch_add(1, Ordering::Relaxed),
            Err(_) => failed.fetch_add(1, Ordering::Relaxed),
        };
    }
}

/// Accepts and closes at once.
fn accept_until(listeners: &[TcpListener], ends: &AtomicBool) -> Result<()> {
    let mut waiting: Vec<PollFd<'_>> =
        listeners.iter().map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)).collect();
    while !ends.load(Ordering::Relaxed) {
        poll(&mut waiting, PollTimeout::from(20_u16))?;
        for listener in listeners {
            while listener.accept().is_ok() {}
        }
    }
    Ok(())
}

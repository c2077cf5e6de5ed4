//! Questions and answers of one byte between two pods, as netperf's TCP_RR and TCP_CRR: in a connection that stays, or each
//! in one of its own; and as those of DNS, each datagram from a port of its own.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::pin;
use super::ports::SERVERS;
use super::streams::on_any;
use crate::testbed::Namespace;

/// Timeout of a connection's single steps.
const LIMIT: Duration = Duration::from_secs(3);

/// Who asks, who answers, and on which cores.
#[derive(Clone, Copy)]
pub struct TransactionEnds<'a> {
    pub from: &'a Namespace,
    pub to: &'a Namespace,
    /// Where the clients ask; the first of 16 ports.
    pub address: SocketAddr,
    /// The clients' core; `None`: wherever the scheduler puts them.
    pub client_core: Option<usize>,
    pub server_core: Option<usize>,
}

/// Round trips in connections that stay, this many at once, after a fifth of `length`. In nanoseconds. `pause`: after each.
pub fn round_trips(
    ends: &TransactionEnds<'_>,
    connections: usize,
    pause: Duration,
    length: Duration,
) -> Result<Histogram<u64>> {
    let listener = listen(ends, 0)?;
    let stops = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for _ in 0..connections {
            let client = connect(ends, 0)?;
            poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::from(3_000_u16))?;
            let (server, _) = listener.accept().context("the connection did not arrive")?;
            server.set_nonblocking(false)?;
            set_limits(&server)?;
            scope.spawn(|| ends.server_core.map_or(Ok(()), pin).map(|()| answer(server)));
            clients.push(client);
        }
        let asking: Vec<ScopedJoinHandle<'_, Result<Histogram<u64>>>> =
            clients.into_iter().map(|client| scope.spawn(|| ask_until(client, ends, pause, &stops))).collect();
        std::thread::sleep(length + length / 5);
        stops.store(true, Ordering::Relaxed);
        let mut all = Histogram::new(3)?;
        for client in asking {
            all.add(client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)?;
        }
        ensure!(!all.is_empty(), "no question was answered");
        Ok(all)
    })
}

/// Transactions a second that open a connection, ask, get the answer and close it, from this many clients at once, counted
/// after a fifth of `length`.
pub fn connected_transactions(ends: &TransactionEnds<'_>, clients: usize, length: Duration) -> Result<f64> {
    let listeners = (0..SERVERS).map(|port| listen(ends, port)).collect::<Result<Vec<_>>>()?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        listeners.iter().for_each(|listener| serve_until(scope, listener, ends, &is_over));
        let done = transactions_a_second(ends, clients, length, transact_until);
        // Not before: a client waits for its last answer.
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

/// The same of datagrams: each question has a socket of its own, and so a port of its own.
pub fn datagram_transactions(ends: &TransactionEnds<'_>, clients: usize, length: Duration) -> Result<f64> {
    let bind = |port| {
        let own = SocketAddr::new(ends.address.ip(), ends.address.port() + port);
        // Where the machine has several addresses, an answer is to come from the one that was asked; a Service's is no machine's.
        let bound = ends.to.run(|| UdpSocket::bind(own).or_else(|_| UdpSocket::bind(on_any(own))));
        bound.with_context(|| format!("cannot bind {own}"))
    };
    let servers = (0..SERVERS).map(bind).collect::<Result<Vec<_>>>()?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for server in &servers {
            scope.spawn(|| answer_datagrams_until(server, ends, &is_over));
        }
        let done = transactions_a_second(ends, clients, length, ask_by_datagrams_until);
        is_over.store(true, Ordering::Relaxed);
        done.and_then(|done| (done > 0.0).then_some(done).context("no question was answered"))
    })
}

/// The times from SYN to SYN-ACK, in nanoseconds: that many connections a second, one after the other, each from a port of its own.
/// A SYN that comes again after a loss counts with its wait.
pub fn handshakes(ends: &TransactionEnds<'_>, a_second: f64, length: Duration) -> Result<Histogram<u64>> {
    let listeners = (0..SERVERS).map(|port| listen(ends, port)).collect::<Result<Vec<_>>>()?;
    let asking = || -> Result<Histogram<u64>> {
        ends.client_core.map_or(Ok(()), pin)?;
        let (mut times, begin) = (Histogram::new(3)?, Instant::now());
        for number in 0..(a_second * length.as_secs_f64()) as u32 {
            let due = begin + Duration::from_secs_f64(f64::from(number) / a_second);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let port = number as u16 % SERVERS;
            let address = SocketAddr::new(ends.address.ip(), ends.address.port() + port);
            let start = Instant::now();
            let client = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
            times.record(start.elapsed().as_nanos() as u64)?;
            // The handshake ends in the kernel: nobody is woken to accept.
            drop((client, listeners[usize::from(port)].accept()));
            ensure!(begin.elapsed() < length + 10 * LIMIT, "after {:?} {number} connections are open", begin.elapsed());
        }
        Ok(times)
    };
    std::thread::scope(|scope| scope.spawn(|| ends.from.run(asking)).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The client with this number returns how many transactions it has done; the first word says when it stops, and the second when they count.
type Client = fn(&TransactionEnds<'_>, u16, &AtomicBool, &AtomicBool) -> Result<u64>;

fn transactions_a_second(ends: &TransactionEnds<'_>, clients: usize, length: Duration, client: Client) -> Result<f64> {
    let (stops, counts) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (stops, counts) = (&stops, &counts);
        let asking: Vec<ScopedJoinHandle<'_, Result<u64>>> = (0..clients)
            .map(|number| scope.spawn(move || ends.from.run(|| client(ends, number as u16, stops, counts))))
            .collect();
        std::thread::sleep(length / 5);
        counts.store(true, Ordering::Relaxed);
        let start = Instant::now();
        std::thread::sleep(length);
        stops.store(true, Ordering::Relaxed);
        let took = start.elapsed();
        let done: Result<Vec<u64>> = asking
            .into_iter()
            .map(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        Ok(done?.iter().sum::<u64>() as f64 / took.as_secs_f64())
    })
}

fn listen(ends: &TransactionEnds<'_>, port: u16) -> Result<TcpListener> {
    let own = on_any(SocketAddr::new(ends.address.ip(), ends.address.port() + port));
    let listener = ends.to.run(|| TcpListener::bind(own)).with_context(|| format!("cannot listen on {own}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn connect(ends: &TransactionEnds<'_>, port: u16) -> Result<TcpStream> {
    let address = SocketAddr::new(ends.address.ip(), ends.address.port() + port);
    let client = ends.from.run(|| TcpStream::connect_timeout(&address, LIMIT));
    let client = client.with_context(|| format!("cannot connect to {address}"))?;
    set_limits(&client)?;
    Ok(client)
}

fn set_limits(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))
}

fn ask(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

fn ask_until(
    mut client: TcpStream,
    ends: &TransactionEnds<'_>,
    pause: Duration,
    stops: &AtomicBool,
) -> Result<Histogram<u64>> {
    ends.client_core.map_or(Ok(()), pin)?;
    let (mut times, begin) = (Histogram::new(3)?, Instant::now());
    while !stops.load(Ordering::Relaxed) {
        let start = Instant::now();
        ask(&mut client)?;
        times.record(start.elapsed().as_nanos() as u64)?;
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    ensure!(begin.elapsed() < 10 * LIMIT, "the measurement took {:?}", begin.elapsed());
    Ok(times)
}

fn answer(mut server: TcpStream) {
    while server.read_exact(&mut [0]).is_ok() && server.write_all(b"!").is_ok() {}
}

fn serve_until<'scope>(
    scope: &'scope Scope<'scope, '_>,
    listener: &'scope TcpListener,
    ends: &'scope TransactionEnds<'_>,
    is_over: &'scope AtomicBool,
) {
    scope.spawn(move || {
        ends.server_core.map_or(Ok(()), pin)?;
        let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        while !is_over.load(Ordering::Relaxed) {
            poll(&mut waiting, PollTimeout::from(20_u16))?;
            if let Ok((mut server, _)) = listener.accept() {
                // A client that has given up is counted by its own end.
                let _ = server
                    .set_nonblocking(false)
                    .and_then(|()| set_limits(&server))
                    .and_then(|()| server.read_exact(&mut [0]))
                    .and_then(|()| server.write_all(b"!"));
            }
        }
        Ok::<(), anyhow::Error>(())
    });
}

fn transact_until(ends: &TransactionEnds<'_>, number: u16, stops: &AtomicBool, counts: &AtomicBool) -> Result<u64> {
    ends.client_core.map_or(Ok(()), pin)?;
    let (mut port, mut done) = (number, 0);
    while !stops.load(Ordering::Relaxed) {
        port += 1;
        let address = SocketAddr::new(ends.address.ip(), ends.address.port() + port % SERVERS);
        let mut client = TcpStream::connect_timeout(&address, LIMIT)?;
        set_limits(&client)?;
        ask(&mut client)?;
        done += u64::from(counts.load(Ordering::Relaxed));
        if port > 60_000 {
            port = number;
        }
    }
    Ok(done)
}

fn answer_datagrams_until(server: &UdpSocket, ends: &TransactionEnds<'_>, is_over: &AtomicBool) -> Result<()> {
    ends.server_core.map_or(Ok(()), pin)?;
    server.set_read_timeout(Some(Duration::from_millis(20)))?;
    while !is_over.load(Ordering::Relaxed) {
        if let Ok((_, client)) = server.recv_from(&mut [0]) {
            // One that is lost is counted by nobody.
            let _ = server.send_to(b"!", client);
        }
    }
    Ok(())
}

fn ask_by_datagrams_until(
    ends: &TransactionEnds<'_>,
    number: u16,
    stops: &AtomicBool,
    counts: &AtomicBool,
) -> Result<u64> {
    ends.client_core.map_or(Ok(()), pin)?;
    let (mut port, mut done) = (number, 0);
    while !stops.load(Ordering::Relaxed) {
        port = port.wrapping_add(1);
        let client = UdpSocket::bind(on_any(SocketAddr::new(ends.address.ip(), 0)))?;
        client.connect(SocketAddr::new(ends.address.ip(), ends.address.port() + port % SERVERS))?;
        client.set_read_timeout(Some(LIMIT))?;
        client.send(b"?")?;
        // As a resolver does: what gets no answer is asked again.
        let is_answered = client.recv(&mut [0]).is_ok();
        done += u64::from(is_answered && counts.load(Ordering::Relaxed));
    }
    Ok(done)
}

//! A connection that stays open and reports when it is blocked.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::reply_to;
use crate::load::segments;
use crate::testbed::Namespace;

/// Interval between exchanges: the resolution with which an interruption is measured.
const INTERVAL: Duration = Duration::from_micros(200);

/// A TCP connection that exchanges eight bytes with an echo server several thousand times a second.
pub struct EchoConnection {
    stream: TcpStream,
    exchanges: Arc<AtomicU64>,
    /// Duration of the slowest exchange in nanoseconds.
    slowest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    blocked: Receiver<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl EchoConnection {
    /// Connects from `namespace` to the server with this identity and starts the exchanges. Without a reply for
    /// `silence` the connection counts as blocked.
    pub fn open(
        namespace: &Namespace,
        (identity, address): (u32, IpAddr),
        port: u16,
        silence: Duration,
    ) -> Result<Self> {
        let address = SocketAddr::new(address, port);
        let stream = namespace
            .run(|| connect(identity, address, silence))
            .with_context(|| format!("cannot open a connection to {address}"))?;
        let own = stream.try_clone()?;
        let exchanges = Arc::new(AtomicU64::new(0));
        let slowest = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, blocked) = sync_channel(1);
        let thread = {
            let (exchanges, slowest, stop) = (exchanges.clone(), slowest.clone(), stop.clone());
            std::thread::spawn(move || {
                if let Some(at) = exchange(stream, &exchanges, &slowest, &stop) {
                    // The receiver may be gone by now.
                    let _ = sender.send(at);
                }
            })
        };
        Ok(Self { stream: own, exchanges, slowest, stop, blocked, thread: Some(thread) })
    }

    pub fn exchanges(&self) -> u64 {
        self.exchanges.load(Ordering::Relaxed)
    }

    /// Segments that its end has sent again so far (`tcpi_total_retrans`).
    pub fn retransmitted(&self) -> Result<u64> {
        Ok(segments(&self.stream)?.1)
    }

    /// Duration of the slowest exchange since the last call.
    pub fn take_slowest(&self) -> Duration {
        Duration::from_nanos(self.slowest.swap(0, Ordering::Relaxed))
    }

    /// Waits for `more` further exchanges; fails once `limit` has passed.
    pub fn wait_for(&self, more: u64, limit: Duration) -> Result<()> {
        let goal = self.exchanges() + more;
        let deadline = Instant::now() + limit;
        while self.exchanges() < goal {
            if Instant::now() > deadline {
                bail!("the connection does not flow: {} exchanges of {goal} within {limit:?}", self.exchanges());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits at most `limit` until the connection is blocked. Returns when the first unanswered byte was sent.
    pub fn wait_until_blocked(&self, limit: Duration) -> Option<Instant> {
        self.blocked.recv_timeout(limit).ok()
    }
}

impl Drop for EchoConnection {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn connect(identity: u32, address: SocketAddr, silence: Duration) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    let mut greeting = [0; 4];
    stream.read_exact(&mut greeting)?;
    if greeting.as_slice() != reply_to(identity, &[]) {
        bail!("server {} answered instead of {identity}", u32::from_be_bytes(greeting));
    }
    Ok(stream)
}

/// Exchanges until `stop` is set. Returns when the first unanswered bytes were sent.
fn exchange(mut stream: TcpStream, exchanges: &AtomicU64, slowest: &AtomicU64, stop: &AtomicBool) -> Option<Instant> {
    while !stop.load(Ordering::Relaxed) {
        let request = exchanges.load(Ordering::Relaxed).to_be_bytes();
        let sent = Instant::now();
        let mut reply = [0; 8];
        if stream.write_all(&request).and_then(|()| stream.read_exact(&mut reply)).is_err() {
            return Some(sent);
        }
        if reply != request.map(|byte| !byte) {
            return Some(sent);
        }
        exchanges.fetch_add(1, Ordering::Relaxed);
        slowest.fetch_max(sent.elapsed().as_nanos() as u64, Ordering::Relaxed);
        std::thread::sleep(INTERVAL);
    }
    None
}

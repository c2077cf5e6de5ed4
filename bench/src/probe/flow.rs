//! A connection that stays open and tells when it stops flowing.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::server::reply_to;
use crate::testbed::Namespace;

/// Between two exchanges: the precision with which a cut is seen.
const INTERVAL: Duration = Duration::from_micros(200);

/// A TCP connection that exchanges eight octets several thousand times a second with an echo server.
pub struct Flow {
    exchanges: Arc<AtomicU64>,
    /// Nanoseconds that the slowest exchange took.
    slowest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    blocked: Receiver<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl Flow {
    /// Connects from `namespace` to the server of this identity and starts exchanging. Without an answer for
    /// `silence`, it counts as blocked.
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
        Ok(Self { exchanges, slowest, stop, blocked, thread: Some(thread) })
    }

    /// How many exchanges were completed so far.
    pub fn exchanges(&self) -> u64 {
        self.exchanges.load(Ordering::Relaxed)
    }

    /// How long the slowest exchange took since this was asked last: a gap in the connection.
    pub fn take_slowest(&self) -> Duration {
        Duration::from_nanos(self.slowest.swap(0, Ordering::Relaxed))
    }

    /// Waits until `more` further exchanges are completed, or fails once `limit` has passed.
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

    /// Waits until it is blocked, at most for `limit`; returns when the first octet that was not answered had
    /// been sent.
    pub fn wait_until_blocked(&self, limit: Duration) -> Option<Instant> {
        self.blocked.recv_timeout(limit).ok()
    }
}

impl Drop for Flow {
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

/// Exchanges until told to stop; returns when the octets were sent that were not answered.
fn exchange(mut stream: TcpStream, exchanges: &AtomicU64, slowest: &AtomicU64, stop: &AtomicBool) -> Option<Instant> {
    while !stop.load(Ordering::Relaxed) {
        let request = exchanges.load(Ordering::Relaxed).to_be_bytes();
        let sent = Instant::now();
        let mut reply = [0; 8];
        if stream.write_all(&request).and_then(|()| stream.read_exact(&mut reply)).is_err() {
            return Some(sent);
        }
        if reply != request.map(|octet| !octet) {
            return Some(sent);
        }
        exchanges.fetch_add(1, Ordering::Relaxed);
        slowest.fetch_max(sent.elapsed().as_nanos() as u64, Ordering::Relaxed);
        std::thread::sleep(INTERVAL);
    }
    None
}

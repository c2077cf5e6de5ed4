//! Continuous traffic: numbered datagrams, connections, and datagrams that policy denies.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use hdrhistogram::Histogram;
use nix::sys::socket::{setsockopt, sockopt};
use penstock_bench::probe::{EchoConnection, Site};

use crate::fixture::{ALLOWED, DENIED, Fixture};

const PACE: Duration = Duration::from_millis(1);
/// A connection that was silent for this long is broken: longer than any restart takes.
const SILENCE: Duration = Duration::from_secs(30);
/// How long packets may be in flight at the end.
const LAST: Duration = Duration::from_millis(500);

/// Numbered datagrams from one site to another.
struct Stream {
    name: String,
    sender: JoinHandle<Vec<u32>>,
    receiver: JoinHandle<Vec<u64>>,
}

pub(crate) struct Streams {
    streams: Vec<Stream>,
    denied: (JoinHandle<Vec<u32>>, JoinHandle<Vec<u64>>),
    flows: Vec<EchoConnection>,
    latencies: Arc<Mutex<Histogram<u64>>>,
    received: Arc<AtomicU64>,
    ends: [Arc<AtomicBool>; 2],
}

pub(crate) struct StreamResult {
    pub(crate) name: String,
    pub(crate) sent: u64,
    pub(crate) twice: u64,
    /// When each lost datagram was sent, since the start of the run.
    pub(crate) lost: Vec<Duration>,
}

pub(crate) struct TrafficResult {
    pub(crate) streams: Vec<StreamResult>,
    pub(crate) denied_sent: u64,
    pub(crate) denied_arrived: u64,
    pub(crate) flows_broken: usize,
    pub(crate) exchanges: u64,
}

pub(crate) fn start(fixture: &Fixture) -> Result<Streams> {
    let histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(|error| anyhow!("{error:?}"))?;
    let latencies = Arc::new(Mutex::new(histogram));
    let received = Arc::new(AtomicU64::new(0));
    let ends = [Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false))];
    let mut streams = Vec::new();
    for (from, to, v6) in [
        ("test/pod-0", "test/pod-1", false),
        ("test/pod-2", "test/pod-3", true),
        ("node", "test/pod-4", false),
        ("test/pod-5", "node", true),
    ] {
        let address = fixture.address(to, v6, ALLOWED)?;
        let receiver = receive(fixture, to, address, &ends[1], Some((latencies.clone(), received.clone())))?;
        let sender = send(fixture.site(from)?, address, fixture.epoch, &ends[0])?;
        streams.push(Stream { name: format!("{from} to {to}"), sender, receiver });
    }
    let address = fixture.address("test/pod-1", false, DENIED)?;
    let arrived = receive(fixture, "test/pod-1", address, &ends[1], None)?;
    let denied = (send(fixture.site("test/pod-2")?, address, fixture.epoch, &ends[0])?, arrived);
    let mut flows = Vec::new();
    for (from, to, v6) in [("test/pod-0", "test/pod-1", true), ("test/pod-3", "node", false)] {
        let target = fixture.address(to, v6, 0)?.ip();
        let identity = fixture.cluster.site(to)? as u32;
        flows.push(EchoConnection::open(&fixture.site(from)?.namespace, (identity, target), 8080, SILENCE)?);
    }
    Ok(Streams { streams, denied, flows, latencies, received, ends })
}

/// Sends until `ends` is set; returns when each datagram was sent, in milliseconds since `epoch`.
fn send(from: &Site, to: SocketAddr, epoch: Instant, ends: &Arc<AtomicBool>) -> Result<JoinHandle<Vec<u32>>> {
    let local = SocketAddr::new(from.address(to.is_ipv6()).ok_or_else(|| anyhow!("no address"))?, 0);
    let socket = from.namespace.run(|| UdpSocket::bind(local))?;
    let ends = ends.clone();
    Ok(std::thread::spawn(move || {
        let mut times = Vec::new();
        while !ends.load(Ordering::Relaxed) {
            let now = epoch.elapsed();
            let datagram = [(times.len() as u64).to_be_bytes(), (now.as_nanos() as u64).to_be_bytes()].concat();
            // An ICMP error for an earlier datagram is reported here; go on.
            if socket.send_to(&datagram, to).is_ok() {
                times.push(now.as_millis() as u32);
            }
            std::thread::sleep(PACE);
        }
        times
    }))
}

type Measure = (Arc<Mutex<Histogram<u64>>>, Arc<AtomicU64>);

/// Receives until `ends` is set; returns the numbers that arrived.
fn receive(
    fixture: &Fixture,
    at: &str,
    address: SocketAddr,
    ends: &Arc<AtomicBool>,
    measure: Option<Measure>,
) -> Result<JoinHandle<Vec<u64>>> {
    let socket = fixture.site(at)?.namespace.run(|| UdpSocket::bind(address))?;
    setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20))?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    let (ends, epoch) = (ends.clone(), fixture.epoch);
    Ok(std::thread::spawn(move || {
        let (mut numbers, mut datagram) = (Vec::new(), [0; 16]);
        while !ends.load(Ordering::Relaxed) {
            let Ok((16, _)) = socket.recv_from(&mut datagram) else { continue };
            let (number, sent) = datagram.split_at(8);
            let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap_or_default());
            numbers.push(word(number));
            if let Some((latencies, received)) = &measure {
                let took = (epoch.elapsed().as_nanos() as u64).saturating_sub(word(sent));
                latencies.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(took);
                received.fetch_add(1, Ordering::Relaxed);
            }
        }
        numbers
    }))
}

impl Streams {
    /// Median and 99th percentile in milliseconds since the last call; `None` if nothing arrived.
    pub(crate) fn take_latency(&self) -> Option<(f64, f64)> {
        let mut latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        let at = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e6;
        let taken = (!latencies.is_empty()).then(|| (at(0.5), at(0.99)));
        latencies.reset();
        taken
    }

    pub(crate) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(self) -> Result<TrafficResult> {
        let flows_broken = self.flows.iter().filter(|flow| flow.wait_for(10, SILENCE).is_err()).count();
        let exchanges = self.flows.iter().map(EchoConnection::exchanges).sum();
        drop(self.flows);
        self.ends[0].store(true, Ordering::Relaxed);
        std::thread::sleep(LAST);
        self.ends[1].store(true, Ordering::Relaxed);
        let mut streams = Vec::new();
        for Stream { name, sender, receiver } in self.streams {
            streams.push(stream_result(name, &joined(sender)?, &joined(receiver)?));
        }
        let (denied_sent, denied_arrived) = (joined(self.denied.0)?.len() as u64, joined(self.denied.1)?.len() as u64);
        Ok(TrafficResult { streams, denied_sent, denied_arrived, flows_broken, exchanges })
    }
}

fn joined<T>(thread: JoinHandle<T>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread of the traffic panicked"))
}

fn stream_result(name: String, sent: &[u32], arrived: &[u64]) -> StreamResult {
    let mut seen = vec![false; sent.len()];
    let mut twice = 0;
    for &number in arrived {
        if let Some(seen) = seen.get_mut(number as usize) {
            twice += u64::from(std::mem::replace(seen, true));
        }
    }
    let lost = sent.iter().zip(&seen).filter(|(_, seen)| !**seen);
    let lost = lost.map(|(&sent, _)| Duration::from_millis(sent.into())).collect();
    StreamResult { name, sent: sent.len() as u64, twice, lost }
}

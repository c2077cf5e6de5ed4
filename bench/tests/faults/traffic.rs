//! Numbered datagrams and a receiver that records them by sender.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use penstock_bench::probe::Site;

/// Source ports of datagrams that policy allows, that it denies, and that come from the node.
pub(crate) const ALLOWED: u16 = 40_001;
pub(crate) const DENIED: u16 = 40_002;
pub(crate) const NODE: u16 = 40_003;

/// Numbered datagrams from one site to another, one per millisecond, each with its time of sending.
pub(crate) struct Stream {
    ends: Arc<AtomicBool>,
    sender: JoinHandle<u64>,
}

impl Stream {
    /// The source port identifies the stream.
    pub(crate) fn start(from: &Site, port: u16, to: SocketAddr, epoch: Instant) -> Self {
        let local = SocketAddr::new(from.address(to.is_ipv6()).unwrap(), port);
        let socket = from.namespace.udp(local).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let sender = std::thread::spawn(move || {
            let mut count = 0u64;
            while !ended.load(Ordering::Relaxed) {
                let now = epoch.elapsed().as_nanos() as u64;
                let datagram = [count.to_be_bytes(), now.to_be_bytes()].concat();
                // An ICMP error for an earlier datagram is reported here; go on.
                count += u64::from(socket.send_to(&datagram, to).is_ok());
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        });
        Self { ends, sender }
    }

    /// Stops; returns how many were sent.
    pub(crate) fn stop(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.sender.join().unwrap()
    }
}

/// Receives all streams on one socket: numbers and times of sending, by source port.
pub(crate) struct Sniffer {
    ends: Arc<AtomicBool>,
    receiver: JoinHandle<BTreeMap<u16, Vec<(u64, Duration)>>>,
}

impl Sniffer {
    pub(crate) fn start(at: &Site, address: SocketAddr) -> Self {
        let socket = at.namespace.udp(address).unwrap();
        // A large buffer for a delayed burst.
        setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let receiver = std::thread::spawn(move || {
            let mut arrived = BTreeMap::<u16, Vec<_>>::new();
            let mut datagram = [0; 16];
            while !ended.load(Ordering::Relaxed) {
                let Ok((16, from)) = socket.recv_from(&mut datagram) else { continue };
                let number = u64::from_be_bytes(datagram[..8].try_into().unwrap());
                let sent = Duration::from_nanos(u64::from_be_bytes(datagram[8..].try_into().unwrap()));
                arrived.entry(from.port()).or_default().push((number, sent));
            }
            arrived
        });
        Self { ends, receiver }
    }

    pub(crate) fn stop(self) -> BTreeMap<u16, Vec<(u64, Duration)>> {
        // The last datagrams are still in flight.
        std::thread::sleep(Duration::from_millis(200));
        self.ends.store(true, Ordering::Relaxed);
        self.receiver.join().unwrap()
    }
}

//! A steady stream of datagrams from one pod to another, to measure when it starts and stops passing.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_bench::testbed::Namespace;

/// Interval between packets.
const PERIOD: Duration = Duration::from_micros(250);
/// A stream without arrivals for this long is denied.
const GAP: Duration = Duration::from_millis(200);

/// The stream. Dropping it stops it.
pub(crate) struct Stream {
    arrivals: Arc<Mutex<Vec<Instant>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    pub(crate) fn start(from: &Namespace, to: &Namespace, address: &str) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let (arrivals, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let receiver = to.udp("0.0.0.0:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let to_port = SocketAddr::new(address, receiver.local_addr().unwrap().port());
        let sender = from.udp("0.0.0.0:0").unwrap();
        let receive = {
            let (arrivals, ends) = (Arc::clone(&arrivals), Arc::clone(&ends));
            move || {
                while !ends.load(Ordering::Relaxed) {
                    if receiver.recv(&mut [0; 64]).is_ok() {
                        arrivals.lock().unwrap().push(Instant::now());
                    }
                }
            }
        };
        let send = {
            let ends = Arc::clone(&ends);
            move || {
                while !ends.load(Ordering::Relaxed) {
                    // An ICMP error is reported here; only arrivals count.
                    let _ = sender.send_to(b"may I?", to_port);
                    std::thread::sleep(PERIOD);
                }
            }
        };
        let threads = vec![std::thread::spawn(receive), std::thread::spawn(send)];
        Self { arrivals, ends, threads }
    }

    /// Whether packets currently arrive.
    pub(crate) fn passes(&self) -> bool {
        let before = self.count();
        std::thread::sleep(GAP);
        self.count() > before
    }

    /// Time of the last arrival.
    pub(crate) fn last_arrival(&self) -> Instant {
        *self.arrivals.lock().unwrap().last().expect("some arrived")
    }

    /// Number of packets received so far.
    pub(crate) fn count(&self) -> usize {
        self.arrivals.lock().unwrap().len()
    }

    /// Runs `act` on a denied stream; returns how long after its start the first packet arrived.
    pub(crate) fn time_until_passing(&self, act: impl FnOnce()) -> Duration {
        // A new interface is closed shortly after it comes up.
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.passes() {
            assert!(Instant::now() < deadline, "it is denied before");
        }
        let (before, begin) = (self.count(), Instant::now());
        act();
        while self.count() == before {
            assert!(begin.elapsed() < Duration::from_secs(10), "nothing arrives after 10 s");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.arrivals.lock().unwrap()[before].duration_since(begin)
    }

    /// Runs `act` on a passing stream; returns how long after its start the last packet arrived.
    pub(crate) fn time_until_denied(&self, act: impl FnOnce()) -> Duration {
        assert!(self.passes(), "it is allowed before");
        let begin = Instant::now();
        act();
        while self.passes() {
            assert!(begin.elapsed() < Duration::from_secs(10), "packets still arrive after 10 s");
        }
        self.last_arrival().saturating_duration_since(begin)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic has already printed its message.
            let _ = thread.join();
        }
    }
}

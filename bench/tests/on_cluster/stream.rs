//! A steady stream of datagrams from one pod to another: each packet is a question whether it may pass.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_bench::testbed::Namespace;

/// From one packet to the next.
const PERIOD: Duration = Duration::from_micros(250);
/// A stream in which nothing has come for this long is denied.
const GAP: Duration = Duration::from_millis(200);

/// The stream. Dropped, it ends.
pub(crate) struct Stream {
    arrivals: Arc<Mutex<Vec<Instant>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    pub(crate) fn start(from: &Namespace, to: &Namespace, address: &str) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let (arrivals, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let receiver = to.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        receiver.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let to_port = SocketAddr::new(address, receiver.local_addr().unwrap().port());
        let sender = from.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
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
                    // A refusal is an answer too; what counts is what arrives.
                    let _ = sender.send_to(b"may I?", to_port);
                    std::thread::sleep(PERIOD);
                }
            }
        };
        let threads = vec![std::thread::spawn(receive), std::thread::spawn(send)];
        Self { arrivals, ends, threads }
    }

    /// Whether packets arrive at present.
    pub(crate) fn passes(&self) -> bool {
        let before = self.count();
        std::thread::sleep(GAP);
        self.count() > before
    }

    /// When the last packet arrived.
    pub(crate) fn last_arrival(&self) -> Instant {
        *self.arrivals.lock().unwrap().last().expect("some arrived")
    }

    /// How many packets arrived so far.
    pub(crate) fn count(&self) -> usize {
        self.arrivals.lock().unwrap().len()
    }

    /// Does `act`, and tells how long after its beginning the first packet arrived that had not come before.
    pub(crate) fn time_until_passing(&self, act: impl FnOnce()) -> Duration {
        // An interface that is new is closed within a moment of its coming up.
        let deadline = Instant::now() + Duration::from_secs(5);
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

    /// Does `act`, and tells how long after its beginning the last packet arrived.
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
            // A panic has been told by then.
            let _ = thread.join();
        }
    }
}

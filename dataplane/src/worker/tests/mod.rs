//! Workers on real veth pairs. These tests need root; each has its own network namespace.

mod epochs;
mod forwarding;
mod joined;
mod lifecycle;
mod net;
mod pairs;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use penstock_xdp_redirect::{Interface, SocketRedirect};

use super::processor::Processor;
use super::*;
use crate::forward::{Forwarding, Port, PortId, PortKind};
use crate::io::{FrameAccount, RxBatch};
use crate::pipeline::{BATCH, DropReason, Frames, Verdict};
use crate::tag::CHECKSUM_OPEN;
use crate::{Epoch, Snapshot};

/// Forwards all packets of a port to the port it is wired to, and marks their first byte.
#[derive(Clone)]
struct Wires(Arc<[AtomicU16]>);

const NOWHERE: u16 = u16::MAX;

impl Wires {
    fn new() -> Self {
        Self((0..128).map(|_| AtomicU16::new(NOWHERE)).collect())
    }

    fn connect(&self, from: PortId, to: PortId) {
        self.0[from.index()].store(to.0, Ordering::Relaxed);
    }

    fn cut(&self, from: PortId) {
        self.0[from.index()].store(NOWHERE, Ordering::Relaxed);
    }
}

impl Processor for Wires {
    fn process(
        &mut self,
        _: &Snapshot,
        _: Instant,
        ingress: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    ) {
        let to = self.0[ingress.index()].load(Ordering::Relaxed);
        for (index, verdict) in verdicts.iter_mut().enumerate().take(frames.len()) {
            assert_ne!(frames.bytes(index)[0], 0xde, "a deadly packet");
            frames.bytes(index)[0] = 0x42;
            *verdict = if to == NOWHERE { Verdict::Drop(DropReason::NoPort) } else { Verdict::Forward(PortId(to)) };
        }
    }

    fn housekeeping(&mut self, _: &Snapshot, _: Instant, _: bool) {}
}

/// Polls a condition, with a timeout for a busy machine.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_micros(100));
    }
}

/// A spin time that no test outlasts.
const NEVER_SLEEPS: Duration = Duration::from_secs(3600);

/// A small dataplane with one worker per given core.
fn config(cores: &[usize]) -> Config {
    Config {
        // Enough that every queue can fill its ring.
        frames: 1 << 16,
        ring_size: 512,
        connections: crate::conntrack::Config { entries: 1024, ..Default::default() },
        cores: cores.iter().map(|&core| CoreId(core)).collect(),
        ..Config::default()
    }
}

/// A worker's pair `x` and `xp`, ports of the interfaces `a` and `b` on it, and the node's stack.
struct Pair {
    dataplane: Dataplane,
    wires: Wires,
    /// The node's end of the pair, in place of the tc programs.
    near: net::Raw,
    pair: PortId,
    ports: [PortId; 2],
    node: PortId,
    attached: SocketRedirect,
}

/// Opens the pair of worker 0 on `x`.
fn open_pair(dataplane: &Dataplane) -> (PortId, SocketRedirect) {
    let request = PortRequest::new("x", PortPath::PairOf(0));
    let pair = dataplane.open_port(&request).unwrap();
    let attach = |socket: BorrowedFd<'_>| SocketRedirect::attach(&Interface::by_name("x").unwrap(), socket);
    (pair, dataplane.with_socket(pair, attach).unwrap().unwrap())
}

impl Pair {
    fn new() -> Self {
        Self::with(config(&[0]))
    }

    fn with(config: Config) -> Self {
        let wires = Wires::new();
        let dataplane = Dataplane::start_with(config, |_, _| wires.clone()).unwrap();
        Self::of(dataplane, wires)
    }

    fn of(dataplane: Dataplane, wires: Wires) -> Self {
        ["x", "a", "b"].into_iter().for_each(net::veth);
        let open = |interface: &str, path| dataplane.open_port(&PortRequest::new(interface, path)).unwrap();
        let (pair, attached) = open_pair(&dataplane);
        let ports = ["a", "b"].map(|interface| open(interface, PortPath::Pod));
        let node = open("xp", PortPath::Node);
        let mut forwarding = Forwarding::new([]);
        let (own_mac, peer_mac) = PortRequest::macs(None);
        let host = Port::new(PortKind::Host, own_mac, peer_mac, 1500, Vec::new());
        forwarding.insert(node, host).unwrap();
        // Workers take nothing before.
        dataplane.publish(Snapshot { forwarding, epoch: Epoch(1), ..Snapshot::default() });
        let near = net::Raw::open("xp");
        Self { dataplane, wires, near, pair, ports, node, attached }
    }

    /// The same with the ports wired to each other.
    fn wired(config: Config) -> Self {
        let it = Self::with(config);
        let [a, b] = it.ports;
        it.wires.connect(a, b);
        it.wires.connect(b, a);
        it
    }

    /// A frame as a program tags it, with this number in it.
    fn frame(&self, port: usize, flags: u8, number: u8) -> Vec<u8> {
        let mut frame = self.tag(port, flags, vec![0; 59]);
        frame.push(number);
        frame
    }

    /// Makes a frame one of this port.
    fn tag(&self, port: usize, flags: u8, mut frame: Vec<u8>) -> Vec<u8> {
        let interface = Interface::by_name(["a", "b"][port]).unwrap().index.to_be_bytes();
        let [p, q] = self.ports[port].0.to_be_bytes();
        frame[..8].copy_from_slice(&[2, 0xfa, CHECKSUM_OPEN | flags, 0, p, q, 2, 0xfa]);
        frame[8..12].copy_from_slice(&interface);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame
    }

    fn frames(&self, port: usize, count: u8) -> Vec<Vec<u8>> {
        (0..count).map(|number| self.frame(port, 0, number)).collect()
    }

    fn traffic(&self, port: PortId) -> Traffic {
        self.dataplane.statistics().port(port).unwrap().traffic
    }

    /// Waits until the pair has received so many packets.
    fn wait_for(&self, packets: u64) {
        wait_until("all are received", || self.traffic(self.pair).rx_packets >= packets);
        assert_eq!(self.traffic(self.pair).rx_packets, packets);
    }

    /// Sends frames in portions that the rings can hold, each after the previous one was received.
    fn feed(&self, frames: &[Vec<u8>]) {
        for portion in frames.chunks(100) {
            let wanted = self.traffic(self.pair).rx_packets + portion.len() as u64;
            self.near.send_all(portion);
            self.wait_for(wanted);
        }
    }

    /// The frames that come out of the pair: so many.
    fn received(&self, count: usize) -> Vec<Vec<u8>> {
        let next = || self.near.receive(Duration::from_secs(10)).expect("a frame comes out");
        std::iter::repeat_with(next).filter(|frame| frame[0] == 0x42).take(count).collect()
    }

    /// The account at rest: balanced, and equal by rings and by frame owners.
    fn account(&self) -> FrameAccount {
        let account = self.dataplane.frames().unwrap();
        assert!(account.is_balanced(), "{account:?}");
        assert_eq!(account, self.dataplane.census(), "rings and holders agree");
        account
    }
}

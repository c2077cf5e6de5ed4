//! Workers on real veth pairs. These tests need root; each has its own network namespace.

mod epochs;
mod forwarding;
mod joined;
mod lifecycle;
mod net;
mod pairs;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use penstock_xdp_redirect::{AttachOptions, Attached, Interface, Redirect, Role};

use super::processor::Processor;
use super::*;
use crate::forward::PortId;
use crate::io::{FrameAccount, RxBatch};
use crate::pipeline::{BATCH, DropReason, Frames, Verdict};
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

struct Bench {
    dataplane: Dataplane,
    redirect: Redirect,
    wires: Wires,
}

impl Bench {
    fn start(config: Config) -> Self {
        let wires = Wires::new();
        let dataplane = Dataplane::start_with(config, |_, _| wires.clone()).unwrap();
        // Workers take nothing before.
        dataplane.publish(Snapshot { epoch: crate::Epoch(1), ..Snapshot::default() });
        Self { dataplane, redirect: Redirect::new().unwrap(), wires }
    }

    /// Opens a port on an interface and redirects its packets to it.
    fn open(&self, interface: &str) -> (PortId, Attached) {
        let port = self.dataplane.open_port(&PortRequest::new(interface)).unwrap();
        let interface = Interface::by_name(interface).unwrap();
        let attached = self.redirect.attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        let set = self.dataplane.with_sockets(port, |sockets| {
            sockets.iter().try_for_each(|&(queue, socket)| attached.set_socket(queue, socket))
        });
        set.unwrap().unwrap();
        (port, attached)
    }

    /// Sends frames into a port in portions that its rings can hold, each after the previous one was received.
    fn feed(&self, port: PortId, sender: &net::Raw, frames: &[Vec<u8>]) {
        let received = || self.dataplane.statistics().port(port).unwrap().traffic.rx_packets;
        let mut wanted = received();
        for portion in frames.chunks(100) {
            sender.send_all(portion);
            wanted += portion.len() as u64;
            let deadline = Instant::now() + Duration::from_secs(10);
            while received() < wanted {
                assert!(Instant::now() < deadline, "{} of {wanted} packets were received", received());
                thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// The account at rest: balanced, and equal by rings and by frame owners.
    fn account(&self) -> FrameAccount {
        let account = self.dataplane.frames().unwrap();
        assert!(account.is_balanced(), "{account:?}");
        assert_eq!(account, self.dataplane.census(), "rings and holders agree");
        account
    }
}

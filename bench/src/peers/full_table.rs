//! A connection table that is nearly full before anything is measured.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{KEPT, Peer, PeerTestbed, v4};
use crate::load::{Generator, PORTS, Traffic, Trial, UdpFlow, UdpFrames, pin};

/// Connections of the first pod, which are measured. They come first: later its share of the table would be too small.
const MEASURED: u32 = 100_000;
/// Packets a second of each pod that opens others.
const RATE: f64 = 200e3;
const BURST: u32 = 64;
/// How often all connections are opened that are not there yet.
const PASSES: usize = 4;
/// Share of the connections that must be there in the end.
const ENOUGH: f64 = 0.98;

/// Opens this many UDP connections, of the first pod and of all others that send, by one packet each.
pub(super) fn fill(testbed: &mut PeerTestbed, connections: u32) -> Result<()> {
    keep(testbed)?;
    let measured = Traffic { connections: MEASURED.min(connections), ..Traffic::SMALLEST };
    testbed.run(&Trial::paced(measured, 1000.0, Duration::from_millis(20)))?;
    let others: Vec<usize> = (2..testbed.size().pods).step_by(2).collect();
    ensure!(!others.is_empty(), "no pod but the first sends, so nobody opens connections");
    let each = (connections - measured.connections) / others.len() as u32;
    let enough = f64::from(connections) * ENOUGH;
    let mut open = 0;
    for _ in 0..PASSES {
        for &pod in &others {
            open_connections(testbed, pod, 0..each)?;
        }
        open = testbed.open_connections()?;
        if open as f64 >= enough {
            return Ok(());
        }
    }
    bail!("of {connections} connections {open} are open after {PASSES} attempts")
}

/// Makes the kernel keep what nobody answers; Penstock has it in its configuration.
fn keep(testbed: &PeerTestbed) -> Result<()> {
    if matches!(testbed.peer(), Peer::Penstock { .. }) {
        return Ok(());
    }
    let set = || -> Result<()> {
        for name in ["nf_conntrack_udp_timeout", "nf_conntrack_udp_timeout_stream"] {
            let path = format!("/proc/sys/net/netfilter/{name}");
            std::fs::write(&path, KEPT.to_string()).with_context(|| format!("cannot set {path}"))?;
        }
        Ok(())
    };
    testbed.node().namespace().run(set)
}

/// Sends a packet of each of these connections from a pod to the second one.
fn open_connections(testbed: &PeerTestbed, pod: usize, connections: Range<u32>) -> Result<()> {
    let (from, to) = (testbed.pod(pod)?, testbed.pod(1)?);
    let hop = UdpFlow {
        source_mac: from.namespace().netlink()?.mac("eth0")?,
        gateway_mac: testbed.node().netlink().mac(from.interface())?,
        source: SocketAddr::new(v4(from)?, 0),
        destination: SocketAddr::new(v4(to)?, PORTS.start),
    };
    let generator = from.namespace().run(|| Generator::open("eth0"))?;
    let mut frames = UdpFrames::new(&hop)?;
    let core = testbed.cores.generator;
    let send = || -> Result<()> {
        pin(core)?;
        let start = Instant::now();
        for first in connections.clone().step_by(BURST as usize) {
            let due = Duration::from_secs_f64(f64::from(first - connections.start) / RATE);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            generator.send_frames(frames.of(first..connections.end.min(first + BURST)))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| scope.spawn(send).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

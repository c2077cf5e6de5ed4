//! Rates between two pods, and what a transaction costs the processor: both ends, the kernel's work in them, and the engine.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use nix::time::{ClockId, clock_gettime};
use penstock_bench::load::{TransactionEnds, connected_transactions, datagrams_for, round_trips, streams_for};
use penstock_bench::peers::Cores;

use crate::cell::Cell;
use crate::cluster::{CLIENT, LOAD, PODS, REMOTE, SERVER};
use crate::running::Running;

const DATAGRAM: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    Stream,
    RoundTrips,
    Connections(usize),
    Datagrams,
}

/// A kind of traffic, as tables name it.
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) rate: &'static str,
    pub(crate) cost: &'static str,
    load: Load,
}

/// The measurements, with netperf's names.
pub(crate) const TESTS: [Test; 5] = [
    Test { name: "TCP_STREAM", rate: "Gb/s", cost: "ms/Gb", load: Load::Stream },
    Test { name: "TCP_RR", rate: "k/s", cost: "µs", load: Load::RoundTrips },
    Test { name: "TCP_CRR", rate: "k/s", cost: "µs", load: Load::Connections(1) },
    Test { name: "TCP_CRR, 32 at once", rate: "k/s", cost: "µs", load: Load::Connections(32) },
    Test { name: "UDP_STREAM, 64 bytes", rate: "k/s", cost: "µs", load: Load::Datagrams },
];

pub(crate) const PLACES: [(&str, usize); 2] = [("same node", SERVER), ("other node", REMOTE)];

/// A rate, and processor time for each unit of it, in the units that the test names.
pub(crate) struct Measured {
    pub(crate) rate: f64,
    /// None where nothing arrived.
    pub(crate) cost: Option<f64>,
}

/// Measures one kind to one pod. Both ends of one connection share the first core; many are where the scheduler puts them.
pub(crate) fn measure(
    test: &Test,
    cell: &Cell,
    to: usize,
    running: &Running<'_>,
    length: Duration,
) -> Result<Measured> {
    let (from, into) = (&cell.sites[CLIENT].namespace, &cell.sites[to].namespace);
    let address = SocketAddr::new(PODS[to].address.into(), LOAD);
    let first = Cores::first_two()?.generator;
    let one = TransactionEnds { from, to: into, address, client_core: Some(first), server_core: Some(first) };
    let many = TransactionEnds { client_core: None, server_core: None, ..one };
    // Where both pods are on the first node, the second engine has nothing to do with it.
    let nodes = 1 + PODS[to].node;
    let (own, engines) = (own_time()?, running.processor_time(nodes)?);
    let rate = match test.load {
        Load::Stream => streams_for(from, into, address, 1, length)?,
        Load::RoundTrips => 1e6 / round_trips(&one, 1, Duration::ZERO, length)?.mean(),
        Load::Connections(1) => connected_transactions(&one, 1, length)? / 1e3,
        Load::Connections(clients) => connected_transactions(&many, clients, length)? / 1e3,
        Load::Datagrams => datagrams_for(from, into, address, (DATAGRAM, first), length)? / 1e3,
    };
    // The whole of it, its first fifth included, which the rate leaves out. Thousands a second and microseconds, or gigabits and
    // milliseconds.
    let used = own_time()?.saturating_sub(own) + running.processor_time(nodes)?.saturating_sub(engines);
    let done = rate * 1e3 * (length + length / 5).as_secs_f64();
    Ok(Measured { rate, cost: (done > 0.0).then(|| used.as_secs_f64() * 1e6 / done) })
}

/// Processor time of this process, whose threads are both ends.
fn own_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

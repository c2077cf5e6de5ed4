//! A pod that sends what no honest stack would, and what the daemon counted of it.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_admin::types::PortStatus;
use penstock_bench::load::Wire;
use penstock_bench::testbed::Outside;

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};

use crate::fixture::World;

/// The MAC that every frame must have which is meant for all on a link.
pub(crate) const BROADCAST: [u8; 6] = [0xff; 6];

/// A pod's interface, past its own stack.
pub(crate) struct Forger {
    wire: Wire,
    pub(crate) mac: [u8; 6],
    pub(crate) gateway: [u8; 6],
    pub(crate) sent: u64,
}

impl Forger {
    pub(crate) fn of(world: &World, pod: &str) -> Self {
        let namespace = &world.site(pod).namespace;
        let host_side = world.cluster.node.pod(pod).unwrap().interface();
        Self {
            wire: Wire::open(namespace).unwrap(),
            mac: namespace.netlink().unwrap().mac("eth0").unwrap(),
            gateway: world.cluster.node.netlink().mac(host_side).unwrap(),
            sent: 0,
        }
    }

    /// A machine's interface outside, past its own stack.
    pub(crate) fn outside(world: &World, outside: &Outside) -> Self {
        Self {
            wire: Wire::open(outside.namespace()).unwrap(),
            mac: outside.namespace().netlink().unwrap().mac("eth0").unwrap(),
            gateway: world.cluster.node.netlink().mac(outside.interface()).unwrap(),
            sent: 0,
        }
    }

    /// The Ethernet and IP header of a packet to the gateway.
    pub(crate) fn ip(&self, from: IpAddr, to: IpAddr) -> PacketBuilderStep<IpHeaders> {
        let ethernet = PacketBuilder::ethernet2(self.mac, self.gateway);
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
            (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
            _ => panic!("{from} and {to} are of two families"),
        }
    }

    pub(crate) fn udp(&self, from: (IpAddr, u16), to: (IpAddr, u16), payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        self.ip(from.0, to.0).udp(from.1, to.1).write(&mut frame, payload).unwrap();
        frame
    }

    /// A segment; `flags` sets them, and the numbers.
    pub(crate) fn tcp(&self, from: (IpAddr, u16), to: (IpAddr, u16), flags: impl FnOnce(&mut TcpHeader)) -> Vec<u8> {
        let mut header = TcpHeader::new(from.1, to.1, 1_000, 65_000);
        flags(&mut header);
        let mut frame = Vec::new();
        self.ip(from.0, to.0).tcp_header(header).write(&mut frame, b"").unwrap();
        frame
    }

    /// Sends a frame; it is in the worker's or the kernel's hands when this returns, or dropped.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN));
        while let Err(error) = self.wire.send(frame) {
            assert!(refused(&error), "{error}");
            std::thread::yield_now();
        }
        self.sent += 1;
    }
}

/// How often the daemon names `cause` in the line of a port or pod, by its statistics of now.
pub(crate) fn count(world: &World, pod: &str, cause: &str) -> u64 {
    let statistics = world.statistics();
    let line = statistics.iter().find(|line| line.contains(pod)).unwrap_or_else(|| panic!("{statistics:#?}"));
    let mut words = line.split([' ', ',']).skip_while(|word| *word != cause).skip(1);
    words.next().map_or(0, |count| count.parse().unwrap())
}

/// The same, once it is so much, or has not become so in time.
pub(crate) fn count_to(world: &World, pod: &str, cause: &str, expected: u64) -> u64 {
    sum_to(world, pod, &[cause], expected)
}

/// The same of several causes together.
pub(crate) fn sum_to(world: &World, pod: &str, causes: &[&str], expected: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let counted = causes.iter().map(|cause| count(world, pod, cause)).sum();
        if counted >= expected || Instant::now() > deadline {
            return counted;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Packets that the kernel lost at a port's socket: `rx_dropped` counts those for which the fill ring was empty too.
pub(crate) fn kernel_lost(port: &PortStatus) -> u64 {
    ["rx_dropped", "rx_ring_full"].iter().filter_map(|cause| port.kernel_drops.get(*cause)).sum()
}

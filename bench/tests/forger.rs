//! Sends packets that a regular stack would not send, and reads the daemon's drop counters.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use penstock_admin::types::PortStatus;
use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::Outside;

use crate::fixture::Fixture;

/// The broadcast MAC address.
pub(crate) const BROADCAST: [u8; 6] = [0xff; 6];

/// A raw socket on a pod's interface.
pub(crate) struct Forger {
    wire: PacketSocket,
    pub(crate) mac: [u8; 6],
    pub(crate) gateway: [u8; 6],
    pub(crate) sent: u64,
}

impl Forger {
    pub(crate) fn of(fixture: &Fixture, pod: &str) -> Self {
        let namespace = &fixture.site(pod).namespace;
        let host_side = fixture.cluster.node.pod(pod).unwrap().interface();
        Self {
            wire: PacketSocket::open(namespace).unwrap(),
            mac: namespace.netlink().unwrap().mac("eth0").unwrap(),
            gateway: fixture.cluster.node.netlink().mac(host_side).unwrap(),
            sent: 0,
        }
    }

    /// A raw socket on an outside machine's interface.
    pub(crate) fn outside(fixture: &Fixture, outside: &Outside) -> Self {
        Self {
            wire: PacketSocket::open(outside.namespace()).unwrap(),
            mac: outside.namespace().netlink().unwrap().mac("eth0").unwrap(),
            gateway: fixture.cluster.node.netlink().mac(outside.interface()).unwrap(),
            sent: 0,
        }
    }

    /// Ethernet and IP header of a packet to the gateway.
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

    /// A TCP segment; `flags` sets flags and numbers.
    pub(crate) fn tcp(&self, from: (IpAddr, u16), to: (IpAddr, u16), flags: impl FnOnce(&mut TcpHeader)) -> Vec<u8> {
        let mut header = TcpHeader::new(from.1, to.1, 1_000, 65_000);
        flags(&mut header);
        let mut frame = Vec::new();
        self.ip(from.0, to.0).tcp_header(header).write(&mut frame, b"").unwrap();
        frame
    }

    /// Sends a frame. When this returns, the worker or the kernel has it, or it was dropped.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN));
        while let Err(error) = self.wire.send(frame) {
            assert!(refused(&error), "{error}");
            std::thread::yield_now();
        }
        self.sent += 1;
    }
}

/// The daemon's current count of a drop reason on a port or pod.
pub(crate) fn count(fixture: &Fixture, pod: &str, cause: &str) -> u64 {
    let statistics = fixture.statistics();
    let line = statistics.iter().find(|line| line.contains(pod)).unwrap_or_else(|| panic!("{statistics:#?}"));
    let mut words = line.split([' ', ',']).skip_while(|word| *word != cause).skip(1);
    words.next().map_or(0, |count| count.parse().unwrap())
}

/// The same, after waiting until it reaches `expected` or a timeout passes.
pub(crate) fn count_to(fixture: &Fixture, pod: &str, cause: &str, expected: u64) -> u64 {
    sum_to(fixture, pod, &[cause], expected)
}

/// The sum of several reasons.
pub(crate) fn sum_to(fixture: &Fixture, pod: &str, causes: &[&str], expected: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let counted = causes.iter().map(|cause| count(fixture, pod, cause)).sum();
        if counted >= expected || Instant::now() > deadline {
            return counted;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Packets that the kernel dropped at a port's socket.
pub(crate) fn kernel_lost(port: &PortStatus) -> u64 {
    ["rx_dropped", "rx_ring_full", "fill_ring_empty"].iter().filter_map(|cause| port.kernel_drops.get(*cause)).sum()
}

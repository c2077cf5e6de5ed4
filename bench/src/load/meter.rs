//! Counts datagrams exactly, and drops them right where they are counted.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;

use anyhow::{Context, Result};

use super::sink::udp_v4;
use crate::testbed::Namespace;

/// Sockets on a range of ports, with a filter that takes nothing: the kernel checks what arrives at them, counts it and
/// drops it, so that nothing waits uncounted in a buffer.
///
/// Nothing else may receive UDP over IPv4 in its namespace without being counted too.
pub struct Meter {
    namespace: Namespace,
    first: u16,
    sockets: Vec<UdpSocket>,
}

/// What a meter has counted so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// Datagrams with a right checksum.
    pub arrived: u64,
    /// Datagrams with a wrong one.
    pub corrupted: u64,
}

impl Meter {
    /// Opens one inside `namespace`.
    pub fn open(namespace: &Namespace, address: IpAddr, ports: Range<u16>) -> Result<Self> {
        let open = || ports.clone().map(|port| bind(SocketAddr::new(address, port))).collect::<Result<Vec<_>>>();
        let sockets = namespace.run(open)?;
        Ok(Self { namespace: namespace.clone(), first: ports.start, sockets })
    }

    /// Sends an answer from one of its ports; what cannot be sent is lost, as it could be on its way.
    pub fn answer(&self, port: u16, to: SocketAddr) {
        if let Some(socket) = port.checked_sub(self.first).and_then(|place| self.sockets.get(usize::from(place))) {
            let _ = socket.send_to(b"answer", to);
        }
    }

    /// What was counted so far.
    pub fn count(&self) -> Result<Count> {
        let read = || std::fs::read_to_string("/proc/thread-self/net/snmp");
        let text = self.namespace.run(read)?;
        // What the filter refuses, and what finds a buffer full, is an error of its own; so is a wrong checksum.
        let [read, errors, corrupted] = ["InDatagrams", "InErrors", "InCsumErrors"].map(|name| udp_v4(&text, name));
        let corrupted = corrupted?;
        Ok(Count { arrived: read? + errors?.saturating_sub(corrupted), corrupted })
    }
}

fn bind(address: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    let nothing = socket2::SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0);
    socket2::SockRef::from(&socket).attach_filter(&[nothing]).context("cannot attach a socket filter")?;
    Ok(socket)
}

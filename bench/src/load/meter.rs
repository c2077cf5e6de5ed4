//! Counts received UDP datagrams exactly and drops them in the kernel.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;

use anyhow::{Context, Result};

use super::sink::udp_v4;
use crate::testbed::Namespace;

/// UDP sockets on a range of ports with a filter that accepts nothing: the kernel verifies, counts and drops each
/// datagram, so that none waits uncounted in a buffer.
///
/// It reads the namespace's counters, so other UDP over IPv4 received there is counted too.
pub struct UdpMeter {
    namespace: Namespace,
    first: u16,
    sockets: Vec<UdpSocket>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DatagramCounts {
    pub arrived: u64,
    pub corrupted: u64,
}

impl UdpMeter {
    pub fn open(namespace: &Namespace, address: IpAddr, ports: Range<u16>) -> Result<Self> {
        let open = || ports.clone().map(|port| bind(SocketAddr::new(address, port))).collect::<Result<Vec<_>>>();
        let sockets = namespace.run(open)?;
        Ok(Self { namespace: namespace.clone(), first: ports.start, sockets })
    }

    /// Sends a reply from one of the ports. A reply that cannot be sent counts as lost.
    pub fn answer(&self, port: u16, to: SocketAddr) {
        if let Some(socket) = port.checked_sub(self.first).and_then(|place| self.sockets.get(usize::from(place))) {
            let _ = socket.send_to(b"answer", to);
        }
    }

    pub fn count(&self) -> Result<DatagramCounts> {
        let read = || std::fs::read_to_string("/proc/thread-self/net/snmp");
        let text = self.namespace.run(read)?;
        // Datagrams that the filter rejects or that find a full buffer are counted as InErrors, and so are wrong
        // checksums.
        let [read, errors, corrupted] = ["InDatagrams", "InErrors", "InCsumErrors"].map(|name| udp_v4(&text, name));
        let corrupted = corrupted?;
        Ok(DatagramCounts { arrived: read? + errors?.saturating_sub(corrupted), corrupted })
    }
}

fn bind(address: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    let nothing = socket2::SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0);
    socket2::SockRef::from(&socket).attach_filter(&[nothing]).context("cannot attach a socket filter")?;
    Ok(socket)
}

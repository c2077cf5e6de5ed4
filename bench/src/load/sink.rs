//! Counts the datagrams that reach a UDP socket, whether or not they are read.

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::testbed::Namespace;

/// A bound UDP socket. Counts come from the namespace's counters, so it works without reading the socket.
///
/// Nothing else in the namespace may receive UDP at the same time.
pub struct UdpSink {
    namespace: Namespace,
    socket: UdpSocket,
}

impl UdpSink {
    pub fn open(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        let socket = namespace
            .run(|| {
                let socket = UdpSocket::bind(address)?;
                // A small buffer: the rest is dropped where it is counted.
                socket2::SockRef::from(&socket).set_recv_buffer_size(16 << 10)?;
                std::io::Result::Ok(socket)
            })
            .with_context(|| format!("cannot bind {address}"))?;
        Ok(Self { namespace: namespace.clone(), socket })
    }

    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Reads all queued datagrams; waits at most `wait` for the first. Returns sender and content of each.
    pub fn drain(&self, wait: Duration) -> Result<Vec<(SocketAddr, Vec<u8>)>> {
        let mut buffer = [0; 2048];
        let mut datagrams = Vec::new();
        self.socket.set_read_timeout(Some(wait))?;
        while let Ok((length, from)) = self.socket.recv_from(&mut buffer) {
            datagrams.push((from, buffer[..length].to_vec()));
            self.socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        }
        Ok(datagrams)
    }

    /// Datagrams with a valid checksum that reached a socket of this namespace so far: read, or dropped for a full
    /// buffer. (Datagrams still in the buffer are in neither counter.)
    pub fn arrived(&self) -> Result<u64> {
        self.namespace.run(|| {
            let v4 = fs::read_to_string("/proc/thread-self/net/snmp")?;
            let v6 = fs::read_to_string("/proc/thread-self/net/snmp6")?;
            Ok(udp_v4(&v4, "InDatagrams")?
                + udp_v4(&v4, "RcvbufErrors")?
                + udp_v6(&v6, "Udp6InDatagrams")?
                + udp_v6(&v6, "Udp6RcvbufErrors")?)
        })
    }

    /// Datagrams dropped for a wrong checksum so far.
    pub fn wrong_checksums(&self) -> Result<u64> {
        self.namespace.run(|| udp_v4(&fs::read_to_string("/proc/thread-self/net/snmp")?, "InCsumErrors"))
    }
}

/// A counter of `/proc/net/snmp`: a line of names, then a line of values, both prefixed `Udp:`.
pub(super) fn udp_v4(text: &str, name: &str) -> Result<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with("Udp: ")).map(str::split_whitespace);
    let (names, values) = lines.next().zip(lines.next()).context("no UDP counters in /proc/net/snmp")?;
    let value = names.zip(values).find(|(other, _)| *other == name).map(|(_, value)| value);
    value.with_context(|| format!("no UDP counter {name} in /proc/net/snmp"))?.parse().context("a counter is a number")
}

/// A counter of `/proc/net/snmp6`: one name and value per line.
fn udp_v6(text: &str, name: &str) -> Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.with_context(|| format!("no counter {name} in /proc/net/snmp6"))
}

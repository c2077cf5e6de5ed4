//! The connections: each with a question and an answer of one byte, opened and closed by one thread.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result};
use penstock_bench::load::{PORTS, pin};
use penstock_bench::peers::PeerTestbed;
use penstock_bench::testbed::Namespace;

/// Several, so that the client does not run out of ports.
const SERVERS: u16 = 8;

pub(crate) struct Connections<'a> {
    from: &'a Namespace,
    servers: Vec<(SocketAddr, TcpListener)>,
    core: usize,
}

impl<'a> Connections<'a> {
    /// From the first pod to the second, both on this core.
    pub(crate) fn between(testbed: &'a PeerTestbed, core: usize) -> Result<Self> {
        let (from, to, address) = testbed.ends()?;
        let listen = |port| {
            let address = SocketAddr::new(address, PORTS.start + 10 + port);
            anyhow::Ok((address, to.listen(address).with_context(|| format!("cannot listen on {address}"))?))
        };
        Ok(Self { from, servers: (0..SERVERS).map(listen).collect::<Result<_>>()?, core })
    }

    /// Opens so many, one after the other; returns the nanoseconds of one.
    pub(crate) fn open(&self, number: u32) -> Result<f64> {
        let work = || -> Result<f64> {
            pin(self.core)?;
            let start = Instant::now();
            for (_, (address, listener)) in (0..number).zip(self.servers.iter().cycle()) {
                let mut client = TcpStream::connect(address)?;
                let (mut server, _) = listener.accept()?;
                client.write_all(b"?")?;
                server.read_exact(&mut [0])?;
                server.write_all(b"!")?;
                client.read_exact(&mut [0])?;
            }
            Ok(start.elapsed().as_nanos() as f64 / f64::from(number))
        };
        self.from.run(work)
    }
}

//! Single raw frames: sends what a pod's stack would not send and sees everything that its interface receives.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use super::generator::{link_address, set_option};
use crate::testbed::Namespace;

/// A packet socket that sends single raw frames on an interface and captures all frames received there.
pub struct Wire {
    socket: Socket,
}

impl Wire {
    /// Opens one on `eth0` of a namespace.
    pub fn open(namespace: &Namespace) -> Result<Self> {
        // The protocol number is in network byte order (packet(7)).
        let every = i32::from((libc::ETH_P_ALL as u16).to_be());
        let open = || {
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(every)))?;
            socket.bind(&link_address("eth0")?)?;
            set_option(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
            set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20)?;
            anyhow::Ok(Self { socket })
        };
        namespace.run(open).context("cannot open a packet socket")
    }

    /// Sends one frame.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.socket.send(frame).map(drop)
    }

    /// Frames received since the last call and within the next `time`. Frames sent by this host are left out.
    pub fn received(&self, time: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + time;
        let mut frames = Vec::new();
        let mut buffer = vec![0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match (&self.socket).read(&mut buffer) {
                Ok(length) => frames.push(buffer[..length].to_vec()),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(frames);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

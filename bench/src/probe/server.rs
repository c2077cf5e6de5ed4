//! Echo servers that identify themselves: the server side of probes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Site, reply_to, sctp};

/// A service on each of a site's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EchoService {
    /// Echoes a stream: first the server's identity, then the received bytes inverted.
    Tcp(u16),
    /// Echoes datagrams: the server's identity and the request, inverted.
    Udp(u16),
    /// Answers the first packet of each association with the server's identity and the packet's tag, inverted.
    Sctp(u16),
}

/// The running servers of one site; they stop when this is dropped.
pub struct EchoServers {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl EchoServers {
    /// Starts the servers; they listen when this returns. `identity` is part of each reply.
    pub fn start(site: &Site, identity: u32, services: &[EchoService]) -> Result<Self> {
        let sockets = site.namespace.run(|| Sockets::bind(site, identity, services))?;
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let stopped = stop.clone();
        let thread = site.namespace.spawn("servers", move || sockets.serve(&stopped))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Starts servers on every site, each with its index as identity.
    pub fn start_all(sites: &[Site], services: &[EchoService]) -> Result<Vec<Self>> {
        (0u32..).zip(sites).map(|(identity, site)| Self::start(site, identity, services)).collect()
    }
}

impl Drop for EchoServers {
    fn drop(&mut self) {
        // An eventfd that was written once cannot be full, and a panicked thread has already printed its message.
        let _ = self.stop.write(1);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Sockets {
    identity: u32,
    listeners: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    associations: Vec<sctp::Server>,
    streams: Vec<TcpStream>,
}

impl Sockets {
    fn bind(site: &Site, identity: u32, services: &[EchoService]) -> Result<Self> {
        let mut sockets = Self {
            identity,
            listeners: Vec::new(),
            datagrams: Vec::new(),
            associations: Vec::new(),
            streams: Vec::new(),
        };
        for &address in &site.addresses {
            for service in services {
                sockets
                    .open(service, address)
                    .with_context(|| format!("{} cannot serve {service:?} on {address}", site.name))?;
            }
        }
        Ok(sockets)
    }

    fn open(&mut self, service: &EchoService, address: std::net::IpAddr) -> io::Result<()> {
        match *service {
            EchoService::Tcp(port) => {
                let listener = TcpListener::bind(SocketAddr::new(address, port))?;
                listener.set_nonblocking(true)?;
                self.listeners.push(listener);
            }
            EchoService::Udp(port) => {
                let socket = UdpSocket::bind(SocketAddr::new(address, port))?;
                socket.set_nonblocking(true)?;
                self.datagrams.push(socket);
            }
            EchoService::Sctp(port) => self.associations.push(sctp::Server::bind(address, port)?),
        }
        Ok(())
    }

    fn serve(mut self, stop: &EventFd) {
        loop {
            let ready = match self.wait(stop) {
                Ok(ready) => ready,
                Err(nix::Error::EINTR) => continue,
                Err(error) => panic!("cannot poll the servers' sockets: {error}"),
            };
            let (stopped, ready) = ready.split_first().expect("the stop event is polled first");
            if *stopped {
                return;
            }
            let (listeners, rest) = ready.split_at(self.listeners.len());
            let (datagrams, rest) = rest.split_at(self.datagrams.len());
            let (associations, streams) = rest.split_at(self.associations.len());
            let mut streams = streams.iter();
            let identity = self.identity;
            self.streams.retain_mut(|stream| !streams.next().is_some_and(|ready| *ready) || echo(stream));
            for (socket, _) in self.datagrams.iter().zip(datagrams).filter(|(_, ready)| **ready) {
                answer(socket, identity);
            }
            for (server, _) in self.associations.iter().zip(associations).filter(|(_, ready)| **ready) {
                server.answer(identity);
            }
            for (listener, _) in self.listeners.iter().zip(listeners).filter(|(_, ready)| **ready) {
                self.streams.extend(accept(listener, identity));
            }
        }
    }

    fn wait(&self, stop: &EventFd) -> nix::Result<Vec<bool>> {
        let mut polled: Vec<PollFd> = std::iter::once(stop.as_fd())
            .chain(self.listeners.iter().map(AsFd::as_fd))
            .chain(self.datagrams.iter().map(AsFd::as_fd))
            .chain(self.associations.iter().map(|server| server.socket.as_fd()))
            .chain(self.streams.iter().map(AsFd::as_fd))
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
        poll(&mut polled, PollTimeout::NONE)?;
        Ok(polled.iter().map(|fd| fd.any().unwrap_or(true)).collect())
    }
}

/// Echoes what a stream received; false once the stream is to be closed.
fn echo(stream: &mut TcpStream) -> bool {
    let mut buffer = [0; 4096];
    match stream.read(&mut buffer) {
        Ok(0) => false,
        Ok(length) => {
            buffer[..length].iter_mut().for_each(|byte| *byte = !*byte);
            stream.write_all(&buffer[..length]).is_ok()
        }
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

/// Answers what has come, but no server, itself included: two would answer each other for ever.
fn answer(socket: &UdpSocket, identity: u32) {
    let own = socket.local_addr().map(|address| address.port());
    let mut buffer = [0; 4096];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        if own.as_ref().is_ok_and(|own| *own != from.port()) {
            // A reply that cannot be sent is a reply that does not arrive; the probe detects it.
            let _ = socket.send_to(&reply_to(identity, &buffer[..length]), from);
        }
    }
}

fn accept(listener: &TcpListener, identity: u32) -> Option<TcpStream> {
    let (mut stream, _) = listener.accept().ok()?;
    stream.set_nonblocking(true).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.write_all(&reply_to(identity, &[])).ok()?;
    Some(stream)
}

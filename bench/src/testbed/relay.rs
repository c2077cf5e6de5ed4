//! A port of one network namespace's loopback that leads to the same port of this process's.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::namespace::Namespace;

/// Nodes reach an API server by it, whatever an engine does to what they send and receive. It ends when it is dropped.
pub struct Relay {
    stop: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    pub fn start(namespace: &Namespace, port: u16) -> Result<Self> {
        let listener = namespace.listen(("127.0.0.1", port)).with_context(|| format!("cannot listen on {port}"))?;
        listener.set_nonblocking(true)?;
        let (stop, open) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::default()));
        let (stopped, into) = (Arc::clone(&stop), Arc::clone(&open));
        let serve = move || serve_until(&stopped, &listener, port, &into);
        let thread = std::thread::Builder::new().name("relay".to_owned()).spawn(serve)?;
        Ok(Self { stop, open, thread: Some(thread) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
        for stream in self.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn serve_until(stop: &AtomicBool, listener: &TcpListener, port: u16, open: &Mutex<Vec<TcpStream>>) {
    let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    while !stop.load(Ordering::Relaxed) {
        // Interrupted or not: the listener says whether somebody is there.
        let _ = poll(&mut waiting, PollTimeout::from(100_u16));
        while let Ok((client, _)) = listener.accept() {
            // A server that is not there ends the client's connection, as it would its own.
            let _ = join(client, port, open);
        }
    }
}

fn join(client: TcpStream, port: u16, open: &Mutex<Vec<TcpStream>>) -> io::Result<()> {
    client.set_nonblocking(false)?;
    let server = TcpStream::connect(("127.0.0.1", port))?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        open.lock().unwrap_or_else(PoisonError::into_inner).push(stream.try_clone()?);
    }
    let (from_client, to_server) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || copy(from_client, to_server));
    std::thread::spawn(move || copy(server, client));
    Ok(())
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

//! The metrics port's connections: a bounded number, each for a bounded time. Every user of the node can connect, and what is held
//! open there must not take the descriptors that a new pod's programs need, nor keep the kubelet's probes away: connections of this
//! machine's root have places of their own.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};

use super::socket_owner::SocketOwners;

/// Most connections at a time of root, and of all others. One more ends the oldest of the same kind.
const MOST: usize = 64;
/// How long a connection lasts, whatever it does: a scrape of a large table takes a second.
const LIFETIME: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct BoundedListener {
    listener: TcpListener,
    lifetime: Duration,
    is_root: Box<dyn Fn(&TcpStream) -> bool + Send>,
    /// The open connections of root, and of all others, oldest first.
    open: [VecDeque<Weak<Ended>>; 2],
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        let owners = SocketOwners::open();
        let is_root = Box::new(move |client: &TcpStream| owners.client_of(client) == Some(0));
        Self { listener, lifetime: LIFETIME, is_root, open: Default::default() }
    }

    fn bounded(&mut self, stream: TcpStream) -> BoundedStream {
        let open = &mut self.open[usize::from(!(self.is_root)(&stream))];
        open.retain(|connection| connection.strong_count() > 0);
        if open.len() >= MOST
            && let Some(oldest) = open.pop_front().and_then(|oldest| oldest.upgrade())
        {
            oldest.end();
        }
        let ended = Arc::new(Ended::default());
        open.push_back(Arc::downgrade(&ended));
        BoundedStream { stream, ended, lifetime: Box::pin(sleep(self.lifetime)) }
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, from)) => return (self.bounded(stream), from),
                // The client is gone already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                // No descriptor is free.
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Whether a connection has had to make room for another.
#[derive(Default)]
struct Ended {
    is_over: AtomicBool,
    task: AtomicWaker,
}

impl Ended {
    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.task.wake();
    }
}

/// A connection that fails once its time is over.
pub(super) struct BoundedStream {
    stream: TcpStream,
    ended: Arc<Ended>,
    lifetime: Pin<Box<Sleep>>,
}

impl BoundedStream {
    fn check(&mut self, task: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        self.ended.task.register(task.waker());
        let is_over = self.ended.is_over.load(Ordering::Acquire);
        match is_over || self.lifetime.as_mut().poll(task).is_ready() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for BoundedStream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(task)?.poll_read(task, to)
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(task)?.poll_write(task, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(task)?.poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(task)
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn idle_connections_keep_no_client_away_and_are_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "ok" }));
        tokio::spawn(async move { axum::serve(BoundedListener::new(listener), router).await });
        let mut idle = Vec::new();
        for _ in 0..2 * MOST {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nX: y").await.unwrap();
            idle.push(client);
        }
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("ok"), "{answer}");
        // The first ones have ended.
        for client in &mut idle[..MOST] {
            let read = tokio::time::timeout(Duration::from_secs(30), client.read(&mut [0; 999])).await;
            assert!(matches!(read, Ok(Ok(_) | Err(_))), "it is still open");
        }
    }

    #[tokio::test]
    async fn connections_of_others_never_end_those_of_root() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let roots = TcpStream::connect(address).await.unwrap();
        let port = roots.local_addr().unwrap().port();
        let is_root = Box::new(move |client: &TcpStream| client.peer_addr().is_ok_and(|from| from.port() == port));
        let mut bounded = BoundedListener { is_root, ..BoundedListener::new(listener) };
        let (probe, _) = bounded.accept().await;
        let (mut clients, mut others) = (Vec::new(), Vec::new());
        for _ in 0..2 * MOST {
            clients.push(TcpStream::connect(address).await.unwrap());
            others.push(bounded.accept().await.0);
        }
        let is_over = |stream: &BoundedStream| stream.ended.is_over.load(Ordering::Acquire);
        assert!(!is_over(&probe));
        let ended: Vec<bool> = others.iter().map(is_over).collect();
        assert_eq!(ended, [[true; MOST], [false; MOST]].concat());
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut bounded = BoundedListener { lifetime: Duration::from_millis(1), ..BoundedListener::new(listener) };
        let (mut stream, _) = bounded.accept().await;
        let error = stream.read(&mut [0; 9]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

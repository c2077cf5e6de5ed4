//! The metrics port's connections: a bounded number, each for a bounded time. Every user of the node can connect, and what is held
//! open there must not take the descriptors that a new pod's programs need.

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

/// Most connections at a time. One more ends the oldest: so whoever only holds connections open keeps no probe away.
const MOST: usize = 64;
/// How long a connection lasts, whatever it does: a scrape of a large table takes a second.
const LIFETIME: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct BoundedListener {
    listener: TcpListener,
    lifetime: Duration,
    /// The open connections, oldest first.
    open: VecDeque<Weak<Ended>>,
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, lifetime: LIFETIME, open: VecDeque::new() }
    }

    fn bounded(&mut self, stream: TcpStream) -> BoundedStream {
        self.open.retain(|connection| connection.strong_count() > 0);
        if self.open.len() >= MOST
            && let Some(oldest) = self.open.pop_front().and_then(|oldest| oldest.upgrade())
        {
            oldest.end();
        }
        let ended = Arc::new(Ended::default());
        self.open.push_back(Arc::downgrade(&ended));
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
                // No descriptor is free, or the client is gone.
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
    async fn a_connection_ends_with_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut bounded = BoundedListener { lifetime: Duration::from_millis(1), ..BoundedListener::new(listener) };
        let (mut stream, _) = bounded.accept().await;
        let error = stream.read(&mut [0; 9]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

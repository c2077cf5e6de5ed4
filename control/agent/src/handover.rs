//! A new daemon takes over from the one that runs (`penstock run --take-over`).
//!
//! For a moment two daemons are in one network namespace. The new one reads all objects and loads its programs, and only then asks the
//! old one, by a unix socket beside the admin socket. The old one stops as a daemon does whose place another will take: its programs stay, with the
//! connection table in the kernel. It answers when its ports and listeners are free, and the new one opens them. Meanwhile
//! the programs forward packets of established connections (`attach = "tcx"`), and new connections wait.
//!
//! The old process stays, without workers, until a signal ends it: whoever supervises it would start it again. It fails if
//! the daemon that took over is gone, so that it is started again.

use std::io::{self, Write};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::RunError;
use super::config::SocketPath;
use super::signals::{Signal, Signals};
use super::unix_socket::{AdminSocketError, SocketFile, listen};

const REQUEST: &[u8] = b"take over\n";
const RELEASED: &[u8] = b"released\n";
/// How long a client of the socket may take for its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(1);
/// How long the old daemon may take to stop.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);
/// How often the old process looks for the daemon that took over, and how often that may be missing in a row.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const MISSED_LOOKS: u32 = 10;

/// The socket's path; `None` without an admin socket.
pub(super) fn path(admin: &SocketPath) -> Option<PathBuf> {
    admin.path().map(|admin| admin.with_extension("handover"))
}

/// Where a daemon is asked to hand over.
pub(super) struct HandoverListener {
    requests: mpsc::Receiver<UnixStream>,
    _file: Option<SocketFile>,
}

impl HandoverListener {
    /// Listens from now on, on the current runtime.
    pub(super) fn listen(admin: &SocketPath) -> Result<Self, AdminSocketError> {
        let (send, requests) = mpsc::channel(1);
        let Some(path) = path(admin) else { return Ok(Self { requests, _file: None }) };
        let (listener, file) = listen(&path, "admin.socket")?;
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut request = [0; REQUEST.len()];
                let read = timeout(REQUEST_LIMIT, client.read_exact(&mut request)).await;
                // Who only looks whether somebody listens says nothing.
                if matches!(read, Ok(Ok(_))) && request == REQUEST && send.send(client).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { requests, _file: Some(file) })
    }

    /// Waits until a new daemon asks. Cancelling the wait loses nothing.
    pub(super) async fn asked(&mut self) -> Result<Handover, RunError> {
        match self.requests.recv().await {
            Some(client) => Ok(Handover(client.into_std().map_err(RunError::failed)?)),
            // Without a socket nobody asks.
            None => std::future::pending().await,
        }
    }
}

/// A new daemon that waits for the ports of this one.
pub(super) struct Handover(net::UnixStream);

impl Handover {
    /// Tells the new daemon that the ports are free, then waits for a signal.
    ///
    /// # Errors
    /// If the new daemon is gone.
    pub(super) fn finish(mut self, admin: &SocketPath) -> Result<(), RunError> {
        // If it is gone, the look for it will say so.
        let _ = self.0.set_nonblocking(false).and_then(|()| self.0.write_all(RELEASED));
        drop(self.0);
        tracing::info!("handed over to another daemon; this process has no workers any more, and waits for its end");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(RunError::failed)?.block_on(wait_for_end(path(admin).as_deref()))
    }
}

async fn wait_for_end(path: Option<&Path>) -> Result<(), RunError> {
    let mut signals = Signals::listen().context("cannot listen to signals")?;
    let mut missed = 0;
    while missed < MISSED_LOOKS {
        tokio::select! {
            signal = signals.next() => if let Signal::Terminate(_) = signal {
                return Ok(());
            },
            () = sleep(LOOK_INTERVAL) => {
                let is_there = path.is_some_and(|path| net::UnixStream::connect(path).is_ok());
                missed = if is_there { 0 } else { missed + 1 };
            }
        }
    }
    Err(RunError::Failed(anyhow!("the daemon that took over is gone; start penstock again")))
}

/// The daemon that runs already.
pub(super) struct Predecessor(PathBuf);

impl Predecessor {
    /// Looks for it.
    pub(super) fn find(admin: &SocketPath) -> Option<Self> {
        let path = path(admin)?;
        let running = net::UnixStream::connect(&path).ok()?;
        let process = getsockopt(&running, sockopt::PeerCredentials).map_or(0, |peer| peer.pid());
        // 0: in another container.
        tracing::info!(process, "another daemon runs here; this one takes over once it has read all objects");
        Some(Self(path))
    }

    /// Asks it to stop its workers, and waits until it has.
    pub(super) async fn hand_over(self) -> Result<(), RunError> {
        let stopped = timeout(RELEASE_LIMIT, async {
            // A daemon that ends meanwhile by itself answers nothing.
            while !self.ask().await? {
                sleep(Duration::from_millis(50)).await;
            }
            Ok::<(), io::Error>(())
        });
        let limit = RELEASE_LIMIT.as_secs();
        match stopped.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(RunError::Failed(anyhow!(
                "{}: cannot ask the daemon that runs to hand over ({error}); stop it",
                self.0.display()
            ))),
            Err(_) => Err(RunError::Failed(anyhow!(
                "{}: the daemon that runs has not handed over within {limit} s; stop it",
                self.0.display()
            ))),
        }
    }

    /// Asks it once. Returns whether it has released everything, or is gone.
    async fn ask(&self) -> io::Result<bool> {
        let mut running = match UnixStream::connect(&self.0).await {
            Ok(running) => running,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        let mut answer = Vec::new();
        let asked = running.write_all(REQUEST).await;
        Ok(asked.is_ok() && running.read_to_end(&mut answer).await.is_ok() && answer == RELEASED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admin_in(directory: &tempfile::TempDir) -> SocketPath {
        directory.path().join("admin.sock").display().to_string().try_into().unwrap()
    }

    #[tokio::test]
    async fn a_daemon_hands_over_when_asked_not_when_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let admin = admin_in(&directory);
        assert!(Predecessor::find(&admin).is_none());
        let mut listener = HandoverListener::listen(&admin).unwrap();
        let predecessor = Predecessor::find(&admin).expect("one listens");
        assert!(timeout(Duration::from_millis(100), listener.asked()).await.is_err(), "it was only looked for");
        let asks = tokio::spawn(predecessor.hand_over());
        let Handover(mut client) = listener.asked().await.unwrap();
        assert!(!asks.is_finished(), "not before the other has stopped");
        client.set_nonblocking(false).unwrap();
        client.write_all(RELEASED).unwrap();
        drop((client, listener));
        asks.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_daemon_that_ends_instead_of_handing_over_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let admin = admin_in(&directory);
        let mut listener = HandoverListener::listen(&admin).unwrap();
        let asks = tokio::spawn(Predecessor::find(&admin).unwrap().hand_over());
        drop((listener.asked().await.unwrap(), listener));
        asks.await.unwrap().unwrap();
    }
}

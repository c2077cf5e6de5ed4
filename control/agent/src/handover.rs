//! A new daemon takes over from the one that runs (`penstock run --take-over`).
//!
//! For a moment two daemons are in one network namespace. The new one reads all objects, loads its programs, opens all ports and compiles
//! all policy (with tcx links and `offload`). Then it puts its programs in the place of the old one's, so that packets for workers wait in its own
//! rings, and asks the old one, by a unix socket beside the admin socket. That one ends its workers and answers: from now on the connection table
//! is the new one's, which publishes, and decides what waits. The old one then stops as a daemon does whose place another has taken,
//! and answers once more when its listeners and files are free. Without programs that forward by themselves nothing can be prepared beside a daemon: then
//! the new one asks first, and new connections wait until it is ready.
//!
//! The old process stays, without workers, until a signal ends it: whoever supervises it would start it again. It fails if
//! the daemon that took over is gone, so that it is started again.

use std::io::{self, Write};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

use super::RunError;
use super::config::SocketPath;
use super::signals::{Signal, Signals};
use super::unix_socket::{AdminSocketError, SocketFile, listen};

const REQUEST: &[u8] = b"take over\n";
const STOPPED: &[u8] = b"stopped\n";
/// All that the next daemon needs is free.
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
    /// Tells the new daemon that the connection table is its own.
    pub(super) fn tell_stopped(&mut self) {
        // If it is gone, the look for it will say so.
        let _ = self.0.set_nonblocking(false).and_then(|()| self.0.write_all(STOPPED));
    }

    /// Tells the new daemon that everything is free, then waits for a signal.
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

/// Whether a daemon serves at the sockets beside this one.
pub(super) fn is_daemon_running(admin: &SocketPath) -> bool {
    path(admin).is_some_and(|path| net::UnixStream::connect(path).is_ok())
}

pub(super) struct Predecessor(PathBuf);

impl Predecessor {
    pub(super) fn find(admin: &SocketPath) -> Option<Self> {
        let path = path(admin)?;
        let running = net::UnixStream::connect(&path).ok()?;
        let process = getsockopt(&running, sockopt::PeerCredentials).map_or(0, |peer| peer.pid());
        // 0: in another container.
        tracing::info!(process, "another daemon runs here; this one takes over once it has read all objects");
        Some(Self(path))
    }

    /// Asks it to stop its workers, and waits until they have ended.
    pub(super) async fn stop_workers(self) -> Result<StoppedPredecessor, RunError> {
        let limit = timeout(RELEASE_LIMIT, async {
            // A daemon that ends meanwhile by itself answers nothing.
            loop {
                if let Some(running) = self.ask().await? {
                    return Ok(running);
                }
                sleep(Duration::from_millis(50)).await;
            }
        });
        let answer = self.in_time(limit.await)?;
        Ok(StoppedPredecessor { predecessor: self, answer })
    }

    fn in_time<T>(&self, result: Result<io::Result<T>, Elapsed>) -> Result<T, RunError> {
        let (path, limit) = (self.0.display(), RELEASE_LIMIT.as_secs());
        match result {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(RunError::Failed(anyhow!(
                "{path}: cannot ask the daemon that runs to hand over ({error}); stop it"
            ))),
            Err(_) => Err(RunError::Failed(anyhow!(
                "{path}: the daemon that runs has not handed over within {limit} s; stop it"
            ))),
        }
    }

    /// Asks it once. `None`: it has not answered.
    async fn ask(&self) -> io::Result<Option<Answer>> {
        let mut running = match UnixStream::connect(&self.0).await {
            Ok(running) => BufReader::new(running),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(Some(Answer::Released));
            }
            Err(error) => return Err(error),
        };
        let asked = running.get_mut().write_all(REQUEST).await;
        let mut answer = Vec::new();
        Ok(match asked.is_ok() && running.read_until(b'\n', &mut answer).await.is_ok() {
            true if answer == STOPPED => Some(Answer::Stopped(running)),
            // As earlier versions do.
            true if answer == RELEASED => Some(Answer::Released),
            _ => None,
        })
    }
}

/// The answer of a daemon that was asked to hand over.
enum Answer {
    Stopped(BufReader<UnixStream>),
    /// Or it is gone.
    Released,
}

/// The daemon that ran, whose workers have ended.
pub(super) struct StoppedPredecessor {
    predecessor: Predecessor,
    answer: Answer,
}

impl StoppedPredecessor {
    /// Waits until its listeners and files are free.
    pub(super) async fn released(self) -> Result<(), RunError> {
        let Self { predecessor, answer } = self;
        let Answer::Stopped(mut running) = answer else { return Ok(()) };
        let limit = timeout(RELEASE_LIMIT, async {
            let mut answer = Vec::new();
            // One that ends instead has released everything, too.
            running.read_until(b'\n', &mut answer).await.map(drop)
        });
        predecessor.in_time(limit.await)
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
        let asks = tokio::spawn(predecessor.stop_workers());
        let mut handover = listener.asked().await.unwrap();
        assert!(!asks.is_finished(), "not before the other has stopped");
        handover.tell_stopped();
        let stopped = asks.await.unwrap().unwrap();
        let waits = tokio::spawn(stopped.released());
        sleep(Duration::from_millis(20)).await;
        assert!(!waits.is_finished(), "not before the other has released everything");
        handover.0.write_all(RELEASED).unwrap();
        waits.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_daemon_that_ends_instead_of_handing_over_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let admin = admin_in(&directory);
        let mut listener = HandoverListener::listen(&admin).unwrap();
        let asks = tokio::spawn(Predecessor::find(&admin).unwrap().stop_workers());
        drop((listener.asked().await.unwrap(), listener));
        asks.await.unwrap().unwrap().released().await.unwrap();
    }

    #[tokio::test]
    async fn a_daemon_of_an_earlier_version_releases_all_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let admin = admin_in(&directory);
        let mut listener = HandoverListener::listen(&admin).unwrap();
        let asks = tokio::spawn(Predecessor::find(&admin).unwrap().stop_workers());
        let Handover(mut client) = listener.asked().await.unwrap();
        client.set_nonblocking(false).unwrap();
        client.write_all(RELEASED).unwrap();
        asks.await.unwrap().unwrap().released().await.unwrap();
    }
}

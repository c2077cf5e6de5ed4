//! The signals that the daemon handles.

use std::io;

use tokio::signal::unix::{self, SignalKind, signal};

pub(super) enum Signal {
    /// End; with the signal's name.
    Terminate(&'static str),
    Statistics,
    Reload,
}

/// SIGINT, SIGTERM, SIGUSR1 and SIGHUP, from [`Signals::listen`] on.
pub(super) struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
    user1: unix::Signal,
    hangup: unix::Signal,
}

impl Signals {
    pub(super) fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            user1: signal(SignalKind::user_defined1())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    pub(super) async fn next(&mut self) -> Signal {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Signal::Terminate("SIGTERM"),
            _ = self.interrupt.recv() => Signal::Terminate("SIGINT"),
            _ = self.user1.recv() => Signal::Statistics,
            _ = self.hangup.recv() => Signal::Reload,
        }
    }
}
